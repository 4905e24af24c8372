"""Claims multihead:4.9 to multihead:4.13 and Theorem 4.2 (i), (ii): the learned predictor as debiased descent."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import sympy

from sim.streams import stream
from theory.multihead import approximate_loss as approximate
from theory.multihead import gradient_descent as descent
from theory.multihead import solution_manifold as manifold
from theory.problems import RegressionTask
from theory.results import FloatArray
from validate.claims.exact import mismatches, rational
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical
from validate.claims.multihead.setup import (
    APPROXIMATELY,
    FALSE_ALARM,
    PAPER,
    REGIME_TEXT,
    REGIMES,
    TWO_HEADS,
    best_heads,
    sample,
    worst_score,
    z_score,
)

LEDGER = Ledger()
# Contexts on which predictors are compared.
_SAMPLED = (PAPER, RegressionTask(1, 10, 1.0), RegressionTask(40, 20, 0.5), RegressionTask(30, 60, 0.0))
_SAMPLED_TEXT = "(5,40,0.1) (1,10,1) (40,20,0.5) (30,60,0)"


@LEDGER.claim(
    "multihead:4.9",
    "every model on the manifold is one two-head model",
    r"\hat y_q=\mu_\gamma\Big(\sum_\ell\frac{y_\ell e^{\gamma x_\ell^\top x_q}}{\sum_\ell e^{\gamma x_\ell^\top x_q}}"
    r"-\sum_\ell\frac{y_\ell e^{-\gamma x_\ell^\top x_q}}{\sum_\ell e^{-\gamma x_\ell^\top x_q}}\Big)",
)
def two_head_form() -> Iterator[Evidence]:
    worst = 0.0
    splits = (([1.0], [1.0], 0), ([0.3, 0.7], [1.0], 1), ([0.2, 0.5, 0.3], [0.9, 0.1], 2))
    for index, task in enumerate(_SAMPLED):
        X, y, query, _ = sample(task, 50, stream(49, "multihead:4.9", index))
        for gamma, split in itertools.product((0.01, 0.3), splits):
            omega, mu = manifold.manifold_point(task, gamma, *split)
            weight = float(manifold.effective_mu(task, gamma))
            kernel = np.exp(gamma * np.einsum("nld,nd->nl", X, query))
            up, down = ((y * k).sum(axis=1) / k.sum(axis=1) for k in (kernel, 1 / kernel))
            gap = np.abs(descent.softmax_prediction(X, y, query, omega, mu) - weight * (up - down))
            worst = max(worst, float(gap.max()) / weight)
    yield Evidence(
        Method.SWEEP, worst, 1e-12, "difference over mu_gamma", f"2-7 heads, gamma 0.01, 0.3; {_SAMPLED_TEXT}"
    )


def _relative_distance(task: RegressionTask, index: int, gamma: float, mu: float, step: float) -> float:
    """Root mean square of two heads minus debiased descent, over that of descent; 1,000 fixed contexts."""
    X, y, query, _ = sample(task, 1000, stream(41, "multihead:4.10", index))
    heads = descent.two_head_prediction(X, y, query, gamma, mu)
    plain = descent.debiased_prediction(X, y, query, step)
    return float(np.sqrt(np.mean((heads - plain) ** 2) / np.mean(plain**2)))


@LEDGER.claim(
    "multihead:4.10",
    "two heads approximate debiased gradient descent",
    r"\hat y_q\approx\frac{2\mu_\gamma\gamma}L\sum_\ell y_\ell\bar x_\ell^\top x_q\approx\frac1{1+(1+\sigma^2)d/L}\cdot\frac1L\sum_\ell y_\ell\bar x_\ell^\top x_q",
    reading="for small gamma: within 10 % at gamma = 0.1/sqrt(d), and with an error that vanishes as gamma^2",
)
def two_heads_as_descent() -> Iterator[Evidence]:
    for index, task in enumerate(_SAMPLED):
        gamma = 0.1 / np.sqrt(task.dim)
        errors = []
        for scale in (gamma, gamma / 10):
            mu = float(manifold.effective_mu(task, scale))
            errors.append(
                [
                    _relative_distance(task, index, scale, mu, step)
                    for step in (2 * mu * scale, descent.debiased_step(task))
                ]
            )
        domain = f"({task.dim},{task.context},{task.noise:g}), gamma 0.1/sqrt(d)"
        yield Evidence(
            Method.NUMERIC, max(errors[0]), APPROXIMATELY, "relative root mean square error of either form", domain
        )
        yield Evidence(
            Method.NUMERIC, errors[1][0] / errors[0][0], 0.0105, "the first at a tenth of gamma over it", domain
        )
    w, m = TWO_HEADS
    step = 2 * w * m
    yield Evidence(
        Method.NUMERIC,
        step / descent.debiased_step(PAPER) - 1,
        APPROXIMATELY,
        "2 mu gamma of the trained heads over eta*, minus one",
        "(5,40,0.1)",
    )


@LEDGER.claim(
    "multihead:4.11a",
    "debiased descent is a gradient step on the debiased loss",
    r"\text{one step from zero on }(2L)^{-1}\sum_\ell(\beta^\top\bar x_\ell-y_\ell)^2,\quad\bar x_\ell=x_\ell-L^{-1}\sum_\ell x_\ell",
)
def debiased_gradient() -> Iterator[Evidence]:
    wrong = 0.0
    for index, (d, L) in enumerate(((1, 2), (3, 5), (4, 2))):
        rng = stream(41, "multihead:4.11a", index)
        X, y, query = rational(rng, L, d), rational(rng, L), rational(rng, d)
        centred = X - sum(X) / L
        # The loss is quadratic in beta: its gradient at zero by exact central differences.
        gradient = []
        for i in range(d):
            losses = [sum((sign * centred[:, i] - y) ** 2) / (2 * L) for sign in (1, -1)]
            gradient.append((losses[0] - losses[1]) / 2)
        wrong += mismatches(-sum(g * x for g, x in zip(gradient, query, strict=True)), sum(y * (centred @ query)) / L)
    yield Evidence(Method.EXACT, wrong, 0.0, "predictions that differ", "(d,L) in (1,2) (3,5) (4,2)")


@LEDGER.claim(
    "multihead:4.11",
    "the debiased descent predictor",
    r"\hat y_q^{gd}(\eta)=\frac\eta L\sum_\ell y_\ell\bar x_\ell^\top x_q",
)
def debiased_predictor() -> Iterator[Evidence]:
    worst, scores = 0.0, []
    for index, task in enumerate(_SAMPLED):
        X, y, query, label = sample(task, 2000, stream(41, "multihead:4.11", index))
        centred = X - X.mean(axis=1, keepdims=True)
        plain = 0.7 * np.mean(y * np.einsum("nld,nd->nl", centred, query), axis=1)
        guess = descent.debiased_prediction(X, y, query, 0.7)
        worst = max(worst, float(np.abs(plain - guess).max()))
        scores.append(z_score((label - guess) ** 2, float(descent.debiased_step_risk(task, 0.7))))
    yield Evidence(Method.NUMERIC, worst, 1e-12, "difference of debiased_prediction", _SAMPLED_TEXT)
    yield statistical(worst_score(scores), FALSE_ALARM / 4, "sampled risk against debiased_step_risk", _SAMPLED_TEXT)


def _mean_term(task: RegressionTask) -> float:
    r"""E(ȳ x̄·x_q)² = (d+2)/L² + σ²d/L²: what debiasing removes, for step one."""
    return (task.dim + 2 + task.noise * task.dim) / task.context**2


@LEDGER.claim(
    "multihead:4.12a",
    "in low dimension debiased and vanilla descent coincide",
    r"L\to\infty,\ d/L\to0:\quad\bar x_\ell\approx x_\ell,\quad2\mu_\gamma\gamma\approx1",
)
def debiased_is_vanilla() -> Iterator[Evidence]:
    scores = []
    for index, task in enumerate((RegressionTask(2, 5, 0.5), RegressionTask(10, 20, 0.0))):
        X, y, query, _ = sample(task, 40_000, stream(41, "multihead:4.12a", index))
        gap = descent.vanilla_prediction(X, y, query) - descent.debiased_prediction(X, y, query)
        scores.append(z_score(gap**2, _mean_term(task)))
    yield statistical(
        worst_score(scores),
        FALSE_ALARM / 2,
        "mean square of vanilla minus debiased against (d+2+noise d)/L^2",
        "(2,5,0.5) (10,20,0)",
    )
    for d in (1, 10, 1000):
        task = RegressionTask(d, 1000 * d, 0.1)
        yield Evidence(
            Method.NUMERIC,
            np.sqrt(_mean_term(task)),
            0.002,
            "root mean square of their difference",
            f"({d},{1000 * d},0.1)",
        )
        step = 2e-6 * float(manifold.effective_mu(task, 1e-6))
        yield Evidence(Method.NUMERIC, step - 1, 0.002, "2 mu_gamma gamma - 1", f"({d},{1000 * d},0.1), gamma 1e-6")


@LEDGER.claim(
    "multihead:4.12",
    "the single-head predictor",
    r"\hat y_q=\mu\langle y,smax(\omega Xx_q)\rangle=\mu\sum_\ell\frac{y_\ell e^{\omega x_\ell^\top x_q}}{\sum_\ell e^{\omega x_\ell^\top x_q}}",
)
def single_head() -> Iterator[Evidence]:
    worst = 0.0
    for index, task in enumerate(_SAMPLED):
        X, y, query, _ = sample(task, 50, stream(41, "multihead:4.12", index))
        for omega, mu in ((0.3, 1.0), (-0.1, 2.0)):
            kernel = np.exp(omega * np.einsum("nld,nd->nl", X, query))
            plain = mu * (y * kernel).sum(axis=1) / kernel.sum(axis=1)
            worst = max(worst, float(np.abs(plain - descent.single_head_prediction(X, y, query, omega, mu)).max()))
    yield Evidence(Method.NUMERIC, worst, 1e-12, "difference of single_head_prediction", _SAMPLED_TEXT)


@LEDGER.claim(
    "multihead:4.13a",
    "single-head minimiser of the approximate loss",
    r"\omega^*=1/\sqrt d,\quad\mu^*=\sqrt d\,(1+e(1+\sigma^2)dL^{-1})^{-1}",
)
def single_head_minimiser() -> Iterator[Evidence]:
    d, c, w, m = sympy.symbols("d c omega mu", positive=True)
    loss = -2 * m * w + m**2 * (w**2 + c * sympy.exp(d * w**2))
    point = {w: 1 / sympy.sqrt(d), m: sympy.sqrt(d) / (1 + sympy.E * c * d)}
    wrong = sum(float(sympy.simplify(sympy.diff(loss, v).subs(point)) != 0) for v in (w, m))
    yield Evidence(Method.SYMBOLIC, wrong, 0.0, "partial derivatives that do not vanish", "all d, L, noise")
    excess = 0.0
    for task in REGIMES:
        omega, mu = approximate.single_head_optimum(task)
        best = float(approximate.approximate_loss(task, [omega], [mu]))
        grid = np.linspace(0.01, 4, 400) / np.sqrt(task.dim)
        for scale in (0.5, 0.9, 1.0, 1.1, 2.0):
            weight = scale * grid / (grid**2 + approximate.noise_level(task) * np.exp(task.dim * grid**2))
            excess = max(
                excess,
                best - float(approximate.approximate_loss(task, grid[:, np.newaxis], weight[:, np.newaxis]).min()),
            )
    yield Evidence(
        Method.SWEEP, max(excess, 0.0), 1e-12, "loss at the minimiser above the least on a grid", REGIME_TEXT
    )


@LEDGER.claim(
    "multihead:4.13b",
    "bandwidth of the single head on the sphere",
    r"\text{Nadaraya-Watson with a Gaussian RBF kernel on }\mathbb S^{d-1},\ \text{bandwidth }d^{1/4}\text{ at }\omega^*",
    reading="kernel exp(-|x - x'|^2/(2 h^2)); then h = omega^(-1/2)",
)
def bandwidth() -> Iterator[Evidence]:
    worst = 0.0
    for index, d in enumerate((2, 16, 81)):
        X, y, query, _ = sample(RegressionTask(d, 30, 0.1), 20, stream(41, "multihead:4.13b", index))
        X, query = X / np.linalg.norm(X, axis=2, keepdims=True), query / np.linalg.norm(query, axis=1, keepdims=True)
        kernel = np.exp(-np.sum((X - query[:, np.newaxis]) ** 2, axis=2) / (2 * np.sqrt(d)))
        watson = (y * kernel).sum(axis=1) / kernel.sum(axis=1)
        worst = max(worst, float(np.abs(watson - descent.single_head_prediction(X, y, query, d**-0.5, 1.0)).max()))
    yield Evidence(Method.NUMERIC, worst, 1e-12, "difference of the head and the regressor", "d 2, 16, 81")


@LEDGER.claim(
    "multihead:3.2a",
    "the role of omega as an inverse bandwidth",
    r"1/\omega^{(h)}\text{ plays the role of bandwidth}",
    reading="of a Gaussian kernel, as after (4.12); checked by the kernel on the sphere",
)
def inverse_bandwidth() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC,
        _kernel_gap(lambda omega: 1 / omega),
        1e-12,
        "difference of normalised kernels",
        "omega 0.1, 0.5, 3",
    )


@LEDGER.correction(
    "multihead:3.2a",
    Relation.MISPRINT,
    r"1/\sqrt{\omega^{(h)}}\text{ plays the role of bandwidth}",
    "the statement after (4.12), d^(1/4) at omega = 1/sqrt(d), is the right one",
)
def root_bandwidth() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC,
        _kernel_gap(lambda omega: omega**-0.5),
        1e-12,
        "difference of normalised kernels",
        "omega 0.1, 0.5, 3",
    )


def _kernel_gap(bandwidth_of: object) -> float:
    worst = 0.0
    for index, omega in enumerate((0.1, 0.5, 3.0)):
        rng = stream(32, "multihead:3.2a", index)
        X, query = rng.standard_normal((20, 6)), rng.standard_normal(6)
        X, query = X / np.linalg.norm(X, axis=1, keepdims=True), query / np.linalg.norm(query)
        width = bandwidth_of(omega)  # type: ignore[operator]
        head, gauss = np.exp(omega * X @ query), np.exp(-np.sum((X - query) ** 2, axis=1) / (2 * width**2))
        worst = max(worst, float(np.abs(head / head.sum() - gauss / gauss.sum()).max()))
    return worst


@LEDGER.claim(
    "multihead:4.13",
    "the larger parameter space contains the manifold",
    r"\bar{\mathcal S}=\{(\omega,\mu):\forall\gamma>0,\ \omega^{(h)}=\gamma\,sign(\omega^{(h)})\ \forall h,\ \min\{|\mathcal H_+|,|\mathcal H_-|\}>1\}\supseteq\mathcal S^*",
    reading="'for all gamma' is read as 'for some gamma'",
)
def larger_space() -> Iterator[Evidence]:
    outside = 0.0
    for positive, negative in _SPLITS:
        omega, _ = manifold.manifold_point(PAPER, 0.1, positive, negative)
        outside += float(min((omega > 0).sum(), (omega < 0).sum()) <= 1)
    yield Evidence(
        Method.EXACT, outside, 0.0, "splits of the manifold that the print excludes", "1 to 3 heads of either sign"
    )


_SPLITS = (([1.0], [1.0]), ([0.5, 0.5], [1.0]), ([0.5, 0.5], [0.5, 0.5]), ([0.2, 0.5, 0.3], [0.9, 0.1]))


@LEDGER.correction(
    "multihead:4.13",
    Relation.MISPRINT,
    r"\bar{\mathcal S}=\{(\omega,\mu):\exists\gamma>0,\ \omega^{(h)}=\gamma\,sign(\omega^{(h)})\ \forall h,\ \min\{|\mathcal H_+|,|\mathcal H_-|\}\ge1\}",
    "as printed no two-head model belongs to it, the paper's main case",
)
def larger_space_mended() -> Iterator[Evidence]:
    wrong = 0.0
    for positive, negative in _SPLITS:
        omega, mu = manifold.manifold_point(PAPER, 0.1, positive, negative, 1)
        wrong += float(not manifold.in_larger_space(omega, mu)) + float(manifold.in_larger_space(np.abs(omega), mu))
    yield Evidence(
        Method.EXACT,
        wrong,
        0.0,
        "splits outside, or one-signed heads inside",
        "1 to 3 heads of either sign and a dummy",
    )


def _deviations(task: RegressionTask, index: int, gamma: float, count: int) -> FloatArray:
    X, y, query, _ = sample(task, count, stream(42, "multihead:thm-4.2-i", index))
    heads = descent.softmax_prediction(X, y, query, (gamma, gamma, -gamma), (0.4 / gamma, 0.1 / gamma, -0.5 / gamma))
    return np.abs(heads - descent.debiased_prediction(X, y, query, 1.0))


@LEDGER.claim(
    "multihead:thm-4.2-i",
    "Theorem 4.2 (i), approximation",
    r"L\gtrsim\log(1/\delta),\ \gamma\lesssim(\sqrt d\log(L/\delta))^{-1},\ \check\mu=\eta/(2\gamma)\Rightarrow "
    r"P\big(|\hat y_q(\theta)-\hat y_q^{gd}(\eta)|\le\tilde O(\sqrt{1+\sigma^2}\,\gamma d)\big)\ge1-\delta",
    reading="with constants one and no logarithm, at delta = 0.01 and eta = 1; then the limit gamma -> 0",
)
def theorem_approximation() -> Iterator[Evidence]:
    count, delta, scores = 4000, 0.01, []
    for index, task in enumerate(
        (PAPER, RegressionTask(1, 10, 1.0), RegressionTask(40, 20, 0.5), RegressionTask(10, 200, 0.0))
    ):
        largest = 1 / (np.sqrt(task.dim) * np.log(task.context / delta))
        for gamma in (largest, largest / 10):
            misses = int((_deviations(task, index, gamma, count) > np.sqrt(1 + task.noise) * gamma * task.dim).sum())
            # One-sided: misses below the binomial mean count as none.
            scores.append(max(0.0, (misses - delta * count) / np.sqrt(delta * (1 - delta) * count)))
    domain = "(5,40,0.1) (1,10,1) (40,20,0.5) (10,200,0); gamma at its largest and a tenth; 4,000 contexts each"
    yield statistical(max(scores), FALSE_ALARM / 8, "the number of larger deviations against delta", domain)
    limit = max(float(_deviations(task, 9, 1e-5, 200).max()) for task in (PAPER, RegressionTask(40, 20, 0.5)))
    yield Evidence(
        Method.NUMERIC, limit, 1e-6, "largest deviation at gamma 1e-5", "(5,40,0.1) (40,20,0.5), 200 contexts"
    )


@LEDGER.claim(
    "multihead:thm-4.2-ii",
    "Theorem 4.2 (ii), optimality",
    r"\min_{\bar{\mathcal S}}\tilde{\mathcal L}\text{ is attained in }\mathcal S^*,\text{ by }\gamma\to0^+;\text{ the optimal model coincides with }"
    r"\hat y_q^{gd}(\eta^*),\ \eta^*=(1+(1+\sigma^2)d/L)^{-1}",
    reading="'attained' as: some point of the manifold has the least loss",
)
def theorem_optimality() -> Iterator[Evidence]:
    for task in REGIMES:
        infimum = 1 + task.noise - 1 / (1 + approximate.noise_level(task) * task.dim)
        gammas = np.sqrt(np.geomspace(1e-3, 3, 40) / task.dim)
        excess = float((manifold.manifold_loss(task, gammas) - infimum).min())
        yield Evidence(
            Method.NUMERIC,
            excess,
            0.0,
            "least excess over the infimum of a point with gamma > 0",
            f"({task.dim},{task.context},{task.noise:g}), d gamma^2 0.001-3",
        )


@LEDGER.correction(
    "multihead:thm-4.2-ii",
    Relation.OVERCLAIM,
    r"\inf_{\bar{\mathcal S}}\tilde{\mathcal L}=1+\sigma^2-\eta^*\text{ is approached as }\gamma\to0^+\text{, where }2\gamma\mu_\gamma\to\eta^*\text{, and not attained;}"
    r"\text{ the minimum of the loss }\mathcal L\text{ itself is attained, at a finite }\gamma",
    "at (5,40,0.1) the minimum of (2.5) is at gamma = 0.0712; descent with eta* is beaten by 3.3e-5 in risk, always "
    "though by little: see beyond:finite-gamma",
)
def theorem_optimality_as_limit() -> Iterator[Evidence]:
    worst, step, gain, above = 0.0, 0.0, 0.0, 0.0
    for index, task in enumerate(REGIMES):
        infimum = 1 + task.noise - descent.debiased_step(task)
        gamma = 1e-4 / np.sqrt(task.dim)
        worst = max(worst, abs(float(manifold.manifold_loss(task, gamma)) - infimum))
        step = max(step, abs(2 * gamma * float(manifold.effective_mu(task, gamma)) - descent.debiased_step(task)))
        for number in range(300):
            rng = stream(42, "multihead:thm-4.2-ii", 1000 * index + number)
            scale = np.sqrt(rng.uniform(1e-3, 3) / task.dim)
            omega = scale * np.array([1, 1, -1, -1, 0.0])
            loss = float(approximate.approximate_loss(task, omega, rng.uniform(-2, 2, 5) / scale))
            above = max(above, infimum - loss)
    for task in (PAPER, RegressionTask(2, 100, 0.0), RegressionTask(30, 20, 0.5)):
        best = best_heads(task, 2)
        gain = max(gain, best.risk.value - float(descent.debiased_step_risk(task, descent.debiased_step(task))))
        gain = max(gain, -float(best.curvatures[0]))
    yield Evidence(Method.SWEEP, worst, 1e-10, "loss at d gamma^2 = 1e-8 minus 1 + noise - eta*", REGIME_TEXT)
    yield Evidence(Method.SWEEP, step, 1e-10, "2 gamma mu_gamma minus eta*", REGIME_TEXT)
    yield Evidence(
        Method.SWEEP,
        max(above, 0.0),
        0.0,
        "depth of random models of the larger space below the infimum",
        f"300 models each; {REGIME_TEXT}",
    )
    yield Evidence(
        Method.SWEEP,
        max(gain, 0.0),
        0.0,
        "exact risk of the best finite gamma above that of eta*",
        "(5,40,0.1) (2,100,0) (30,20,0.5)",
    )


@LEDGER.claim(
    "multihead:thm-4.2-ii-increasing",
    "the loss on the manifold rises with gamma",
    r"\tilde{\mathcal L}(\theta_\gamma)\text{ is monotonically increasing in }\gamma",
)
def rising_loss() -> Iterator[Evidence]:
    yield Evidence(
        Method.SWEEP,
        max(0.0, -_least_slope()),
        0.0,
        "largest fall between neighbours",
        f"d gamma^2 1e-4 to 30; {REGIME_TEXT}",
    )
    x, X = sympy.symbols("x X", positive=True)
    # sinh(x)/x has positive Taylor coefficients only, and the loss is an increasing function of it.
    series = sympy.series(sympy.sinh(x) / x, x, 0, 14).removeO()
    negative = float(sum(bool(series.coeff(x, k) < 0) for k in range(14)))
    rising = sympy.simplify(sympy.diff(X * x / (1 + X * x), x) - X / (1 + X * x) ** 2)
    yield Evidence(
        Method.SYMBOLIC,
        negative + float(rising != 0),
        0.0,
        "negative coefficients of sinh(x)/x, through x^13",
        "all d, L, noise",
    )


@functools.cache
def _least_slope() -> float:
    least = np.inf
    for task in REGIMES:
        gammas = np.sqrt(np.geomspace(1e-4, 30, 300) / task.dim)
        losses = manifold.manifold_loss(task, gammas)
        # Near the ends of its range the loss is flat to rounding.
        kept = np.diff(losses)[np.diff(losses) != 0]
        least = min(least, float(kept.min()))
    return least


@LEDGER.claim(
    "multihead:thm-4.2-ii-decreasing",
    "the same loss, as the text on the late dynamics has it",
    r"\tilde{\mathcal L}(\theta_\gamma)\text{ is a monotonically decreasing function of }\gamma",
)
def falling_loss() -> Iterator[Evidence]:
    yield Evidence(
        Method.SWEEP,
        max(0.0, _least_slope()),
        0.0,
        "least rise between neighbours",
        f"d gamma^2 1e-4 to 30; {REGIME_TEXT}",
    )


@LEDGER.correction(
    "multihead:thm-4.2-ii-decreasing",
    Relation.MISPRINT,
    r"\tilde{\mathcal L}(\theta_\gamma)\text{ is a monotonically increasing function of }\gamma",
    "two paragraphs earlier it is right; gamma decreases along training because the loss increases with it",
)
def falling_loss_mended() -> Iterator[Evidence]:
    yield from rising_loss()
