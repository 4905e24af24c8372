"""Claims multihead:4.5a to multihead:4.8: the Taylor form of the approximate loss and the solution manifold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mpmath
import numpy as np
import sympy

from sim.streams import stream
from theory.multihead import approximate_loss as approximate
from theory.multihead import solution_manifold as manifold
from theory.problems import RegressionTask
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method, Relation
from validate.claims.multihead.setup import REGIME_TEXT, REGIMES

LEDGER = Ledger()
GAMMAS = (1e-3, 0.05, 0.3, 0.8)


def _matched(name: str) -> Iterator[tuple[RegressionTask, FloatArray, FloatArray]]:
    """Random sign-matched heads, 2 to 6 of them, in every regime, with d ω² up to 2."""
    for index, (task, heads) in enumerate(itertools.product(REGIMES, (2, 3, 6))):
        rng = stream(4, name, index)
        omega = rng.uniform(-1, 1, heads) * np.sqrt(2 / task.dim)
        yield task, omega, np.sign(omega) * rng.uniform(0.1, 3, heads)


@LEDGER.claim(
    "multihead:4.5a",
    "Taylor form of the approximate loss",
    r"\tilde{\mathcal L}=\sigma^2+(1-\langle\mu,\omega\rangle)^2+\frac{1+\sigma^2}L\langle\mu,1_H\rangle^2"
    r"+\frac{1+\sigma^2}L\sum_{k\ge1}\frac{d^k}{k!}\langle\mu,\omega^{\odot k}\rangle^2",
)
def taylor_form() -> Iterator[Evidence]:
    w1, w2, m1, m2, d = sympy.symbols("w1 w2 m1 m2 d")
    # Coefficient by coefficient in d: both sides are series in d.
    wrong = 0
    kernel = m1**2 * sympy.exp(d * w1**2) + 2 * m1 * m2 * sympy.exp(d * w1 * w2) + m2**2 * sympy.exp(d * w2**2)
    for k in range(7):
        coefficient = sympy.diff(kernel, d, k).subs(d, 0) / sympy.factorial(k)
        printed = (m1 * w1**k + m2 * w2**k) ** 2 / sympy.factorial(k)
        wrong += int(sympy.expand(coefficient - printed) != 0)
    p, s = sympy.symbols("p s")
    wrong += int(sympy.expand(1 + s - 2 * p + p**2 - (s + (1 - p) ** 2)) != 0)
    yield Evidence(Method.SYMBOLIC, float(wrong), 0.0, "coefficients of d^k that differ", "two heads, k 0-6")
    worst = 0.0
    for task, omega, mu in _matched("multihead:4.5a"):
        exact = float(approximate.approximate_loss(task, omega, mu))
        worst = max(worst, abs(float(approximate.taylor_loss(task, omega, mu, 60)) / exact - 1))
    yield Evidence(Method.SWEEP, worst, 1e-13, "relative error of 60 terms", f"2-6 heads; {REGIME_TEXT}")


def _sides(task: RegressionTask, omega: FloatArray, mu: FloatArray, *, printed: bool) -> tuple[float, float]:
    """Both sides of (4.5): 60 terms on the left; on the right with |ω|, or to k = 9 as printed (all are positive)."""
    left, right, norm = 0.0, 0.0, float(np.abs(mu).sum())
    factor = 1.0
    for k in range(1, 61):
        factor *= task.dim / k
        left += factor * float(mu @ omega**k) ** 2
        if k % 2 and not (printed and k > 9):
            inner = float(np.abs(mu) @ np.abs(omega) ** (k if printed else 1))
            right += factor * norm**2 * (inner / norm) ** (2 * k)
    return left, right


@LEDGER.claim(
    "multihead:4.5",
    "lower bound on the high-order terms",
    r"\sum_{k\ge1}\frac{d^k}{k!}\langle\mu,\omega^{\odot k}\rangle^2\ge\sum_{k\text{ odd}}\frac{d^k}{k!}\|\mu\|_1^{2(1-k)}"
    r"\langle|\mu|,|\omega|^{\odot k}\rangle^{2k},\quad\text{with equality at }|\omega^{(h)}|=\gamma,\ \langle\mu,1\rangle=0",
)
def odd_terms_bound() -> Iterator[Evidence]:
    gap, broken = 0.0, 0.0
    for index, task in enumerate(REGIMES):
        for x in (0.1, 1.0):
            gamma = np.sqrt(x / task.dim)
            left, right = _sides(task, gamma * np.array([1.0, -1, -1]), np.array([2.0, -1.5, -0.5]), printed=True)
            gap = max(gap, abs(right / left - 1))
        # |ω| above one: its powers exceed it.
        rng = stream(45, "multihead:4.5", index)
        omega = rng.uniform(1.1, 1.3, 3) * np.array([1, -1, 1])
        left, right = _sides(RegressionTask(1, 10, 0.0), omega, omega, printed=True)
        broken = max(broken, right / left)
    yield Evidence(Method.SWEEP, broken, 1.0, "right over left side", "three heads, |omega| 1.1-1.3, d = 1")
    yield Evidence(
        Method.SWEEP, gap, 1e-12, "relative gap on homogeneous zero-sum heads", "d gamma^2 0.1, 1; all regimes"
    )


@LEDGER.correction(
    "multihead:4.5",
    Relation.MISPRINT,
    r"\ldots\ge\sum_{k\text{ odd}}\frac{d^k}{k!}\|\mu\|_1^{2(1-k)}\langle|\mu|,|\omega|\rangle^{2k}=\|\mu\|_1^2\sinh\big(d\langle|\mu|,|\omega|\rangle^2/\|\mu\|_1^2\big)",
    "with the power k on omega the two sides do not scale alike",
)
def odd_terms_bound_mended() -> Iterator[Evidence]:
    excess, gap, error = 0.0, 0.0, 0.0
    for task, omega, mu in _matched("multihead:4.5"):
        left, right = _sides(task, omega, mu, printed=False)
        excess = max(excess, right / left - 1)
        ours = manifold.odd_terms_bound(task, omega, mu)
        error = max(error, abs(ours[0] / left - 1), abs(ours[1] / right - 1))
        gamma = float(np.abs(omega).max())
        left, right = _sides(task, gamma * np.array([1.0, -1, -1]), np.array([2.0, -1.5, -0.5]), printed=False)
        gap = max(gap, abs(right / left - 1))
    domain = f"sign-matched, 2-6 heads; {REGIME_TEXT}"
    yield Evidence(Method.SWEEP, max(excess, 0.0), 1e-13, "relative excess of the right side", domain)
    yield Evidence(Method.SWEEP, gap, 1e-12, "relative gap on homogeneous zero-sum heads", domain)
    yield Evidence(Method.SWEEP, error, 1e-12, "relative error of odd_terms_bound", domain)


@LEDGER.claim(
    "multihead:4.6a",
    "power-mean inequality for the odd terms",
    r"\langle|\mu|,|\omega|^{\odot k}\rangle^k=\Big(\sum_h|\mu^{(h)}||\omega^{(h)}|\Big)^k\le\|\mu\|_1^{k-1}\langle|\mu|,|\omega|^{\odot k}\rangle",
)
def power_mean() -> Iterator[Evidence]:
    gap = 0.0
    for _, omega, mu in _matched("multihead:4.6a"):
        m, w = np.abs(mu), np.abs(omega)
        gap = max(gap, abs(float(m @ w**3) ** 3 / float(m @ w) ** 3 - 1))
    yield Evidence(Method.SWEEP, gap, 1e-12, "relative gap of the first equality at k = 3", "2-6 random heads")


@LEDGER.correction(
    "multihead:4.6a",
    Relation.MISPRINT,
    r"\langle|\mu|,|\omega|\rangle^k=\Big(\sum_h|\mu^{(h)}||\omega^{(h)}|\Big)^k\le\|\mu\|_1^{k-1}\langle|\mu|,|\omega|^{\odot k}\rangle",
    "the first member has a power too many, as in (4.5)",
)
def power_mean_mended() -> Iterator[Evidence]:
    excess = 0.0
    for _, omega, mu in _matched("multihead:4.6a"):
        m, w = np.abs(mu), np.abs(omega)
        for k in (1, 2, 3, 5, 9, 21):
            excess = max(excess, float(m @ w) ** k / (m.sum() ** (k - 1) * float(m @ w**k)) - 1)
    yield Evidence(
        Method.SWEEP, max(excess, 0.0), 1e-12, "relative excess of the left side", "2-6 random heads, k 1-21"
    )


def _manifold_points() -> Iterator[tuple[RegressionTask, float, FloatArray, FloatArray]]:
    for task, gamma in itertools.product(REGIMES, GAMMAS):
        if task.dim * gamma**2 < 30:
            for positive, negative, dummies in (
                ([1.0], [1.0], 0),
                ([0.3, 0.7], [1.0], 1),
                ([0.2, 0.5, 0.3], [0.9, 0.1], 2),
            ):
                yield task, gamma, *manifold.manifold_point(task, gamma, positive, negative, dummies)


_POINTS = f"2 to 7 heads with dummies, gamma 0.001-0.8; {REGIME_TEXT}"


@LEDGER.claim(
    "multihead:4.6b",
    "moments of heads on the manifold",
    r"\langle\mu,|\omega|^{\odot k}\rangle=\begin{cases}0&k\text{ even}\\\gamma^k\|\mu\|_1&k\text{ odd}\end{cases}",
)
def manifold_moments() -> Iterator[Evidence]:
    yield Evidence(Method.SWEEP, _moment_gap(absolute=True), 1e-12, "relative error, k 1 to 6", _POINTS)


@LEDGER.correction(
    "multihead:4.6b",
    Relation.MISPRINT,
    r"\langle\mu,\omega^{\odot k}\rangle=\begin{cases}0&k\text{ even}\\\gamma^k\|\mu\|_1&k\text{ odd}\end{cases}",
    "with the absolute value all moments are zero, because mu sums to zero",
)
def manifold_moments_mended() -> Iterator[Evidence]:
    yield Evidence(Method.SWEEP, _moment_gap(absolute=False), 1e-12, "relative error, k 1 to 6", _POINTS)


def _moment_gap(*, absolute: bool) -> float:
    worst = 0.0
    for _, gamma, omega, mu in _manifold_points():
        base, norm = np.abs(omega) if absolute else omega, float(np.abs(mu).sum())
        for k in range(1, 7):
            worst = max(worst, abs(float(mu @ base**k) / (gamma**k * norm) - k % 2))
    return worst


@LEDGER.claim(
    "multihead:4.6c",
    "the approximate loss on the manifold",
    r"\tilde{\mathcal L}=\sigma^2+(1-\gamma\|\mu\|_1)^2+(1+\sigma^2)L^{-1}\sinh(d\gamma^2)\|\mu\|_1",
)
def loss_on_manifold() -> Iterator[Evidence]:
    yield Evidence(Method.SWEEP, _norm_loss_gap(1), 1e-12, "relative error against (4.1)", _POINTS)


@LEDGER.correction(
    "multihead:4.6c",
    Relation.MISPRINT,
    r"\tilde{\mathcal L}=\sigma^2+(1-\gamma\|\mu\|_1)^2+(1+\sigma^2)L^{-1}\sinh(d\gamma^2)\|\mu\|_1^2",
    "the square is missing in print; (4.6) is derived with it",
)
def loss_on_manifold_mended() -> Iterator[Evidence]:
    yield Evidence(Method.SWEEP, _norm_loss_gap(2), 1e-12, "relative error against (4.1)", _POINTS)
    worst = 0.0
    for task, gamma, omega, mu in _manifold_points():
        norm = float(np.abs(mu).sum())
        loss = float(approximate.approximate_loss(task, omega, mu))
        worst = max(worst, abs(float(manifold.norm_loss(task, gamma, norm)) / loss - 1))
        worst = max(worst, abs(float(manifold.manifold_loss(task, gamma)) / loss - 1))
    yield Evidence(Method.SWEEP, worst, 1e-9, "relative error of norm_loss and manifold_loss", _POINTS)


def _norm_loss_gap(power: int) -> float:
    """Relative distance of the print, with ‖μ‖ to this power, from (4.1), at norms off the optimum too (high precision)."""
    worst = 0.0
    with mpmath.workdps(30):
        for task, gamma, omega, mu in _manifold_points():
            for scale in (0.5, 1.0, 2.0):
                w, m = [mpmath.mpf(float(x)) for x in omega], [mpmath.mpf(float(x)) * scale for x in mu]
                c, norm = (1 + mpmath.mpf(task.noise)) / task.context, mpmath.fsum(abs(x) for x in m)
                p = mpmath.fsum(a * b for a, b in zip(w, m, strict=True))
                form = mpmath.fsum(
                    a * b * mpmath.exp(task.dim * u * v)
                    for (a, u), (b, v) in itertools.product(zip(m, w, strict=True), repeat=2)
                )
                loss = task.noise + (1 - p) ** 2 + c * form
                printed = (
                    task.noise
                    + (1 - gamma * norm) ** 2
                    + c * mpmath.sinh(task.dim * mpmath.mpf(gamma) ** 2) * norm**power
                )
                worst = max(worst, abs(float(printed / loss - 1)))
    return worst


@LEDGER.claim(
    "multihead:4.6",
    "best norm of mu at a given gamma",
    r"\|\mu\|_1=\big(\gamma^2+(1+\sigma^2)L^{-1}\sinh(d\gamma^2)\big)^{-1}\gamma:=2\mu_\gamma",
)
def best_norm() -> Iterator[Evidence]:
    g, n, c, d, s = sympy.symbols("gamma n c d s", positive=True)
    loss = s + (1 - g * n) ** 2 + c * sympy.sinh(d * g**2) * n**2
    best = sympy.solve(sympy.diff(loss, n), n)[0]
    wrong = float(sympy.simplify(best - g / (g**2 + c * sympy.sinh(d * g**2))) != 0)
    yield Evidence(Method.SYMBOLIC, wrong, 0.0, "minimisers that differ", "all gamma, d, L, noise")
    worst = 0.0
    for task, gamma in itertools.product(REGIMES, GAMMAS):
        if task.dim * gamma**2 < 30:
            mu = approximate.best_approximate_mu(task, [gamma, -gamma])
            target = float(manifold.effective_mu(task, gamma))
            worst = max(worst, abs(mu[0] / target - 1), abs(mu[1] / target + 1))
    yield Evidence(
        Method.SWEEP,
        worst,
        1e-9,
        "free minimiser in both mu against (mu_gamma, -mu_gamma)",
        f"gamma 0.001-0.8; {REGIME_TEXT}",
    )


@LEDGER.claim(
    "multihead:4.7",
    "the solution manifold",
    r"\mathcal S_\gamma=\Big\{(\omega,\mu)\subseteq\mathbb R^H:\omega^{(h)}=\gamma\,sign(\mu^{(h)}),"
    r"\ \sum_{\mathcal H_+}\mu^{(h)}=-\sum_{\mathcal H_-}\mu^{(h)}=\mu_\gamma\Big\}",
)
def solution_manifold() -> Iterator[Evidence]:
    yield from _manifold_evidence()
    extra = max(omega.size + mu.size - omega.size for _, _, omega, mu in _manifold_points())
    yield Evidence(Method.EXACT, float(extra), 0.0, "numbers in (omega, mu) minus H", "2 to 7 heads")


@LEDGER.correction(
    "multihead:4.7",
    Relation.MISPRINT,
    r"\mathcal S_\gamma=\{(\omega,\mu)\in\mathbb R^{2H}:\ldots\}",
    "a pair of vectors of H numbers each; as everywhere else in the paper",
)
def solution_manifold_mended() -> Iterator[Evidence]:
    yield from _manifold_evidence()


def _manifold_evidence() -> Iterator[Evidence]:
    spread, slope, distance = 0.0, 0.0, 0.0
    for task, gamma, omega, mu in _manifold_points():
        two = manifold.manifold_point(task, gamma, [1.0], [1.0])
        loss, reference = (float(approximate.approximate_loss(task, *point)) for point in ((omega, mu), two))
        spread = max(spread, abs(loss / reference - 1))
        _, by_mu = approximate.approximate_gradient(task, omega, mu)
        scale = 1 + float(np.abs(mu).max()) * approximate.noise_level(task)
        slope = max(slope, float(np.abs(by_mu[omega != 0]).max()) / scale)
        distance = max(distance, manifold.membership(task, omega, mu, gamma).distance / (1 + float(np.abs(mu).max())))
    yield Evidence(Method.SWEEP, spread, 1e-8, "spread of the loss over splits and dummies", _POINTS)
    yield Evidence(Method.SWEEP, slope, 1e-9, "gradient in mu of heads that are not dummies", _POINTS)
    yield Evidence(Method.SWEEP, distance, 1e-9, "distance by membership", _POINTS)


@LEDGER.claim(
    "multihead:4.8",
    "the weight at small gamma",
    r"\mu_\gamma\asymp1/\big(2\gamma(1+(1+\sigma^2)d/L)\big)",
    reading="as gamma -> 0, where the ratio tends to one",
)
def weight_at_small_gamma() -> Iterator[Evidence]:
    worst, rate = 0.0, 0.0
    for task in REGIMES:
        X = approximate.noise_level(task) * task.dim
        for x in (1e-6, 1e-4, 1e-2):
            gamma = np.sqrt(x / task.dim)
            ratio = float(manifold.effective_mu(task, gamma) / manifold.small_gamma_mu(task, gamma))
            worst = max(worst, abs(ratio - 1))
            rate = max(rate, abs((1 - ratio) / (X / (1 + X) * x**2 / 6) - 1) if x > 1e-3 else 0.0)
    yield Evidence(Method.SWEEP, worst, 2e-5, "ratio minus one", f"d gamma^2 up to 0.01; {REGIME_TEXT}")
    yield Evidence(
        Method.SWEEP,
        rate,
        1e-3,
        "its order, X (d gamma^2)^2 / (6(1+X)), minus one",
        f"d gamma^2 = 0.01; {REGIME_TEXT}",
    )
