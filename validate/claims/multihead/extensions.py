"""Claims multihead:5.1 to multihead:5.6, Table 1 and the introduction's contributions (e) and (f)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mpmath
import numpy as np
import sympy
from scipy.special import softmax

from sim.streams import stream
from theory.multihead import activations, multitask
from theory.multihead import gradient_descent as descent
from theory.multihead import softmax_risk as exact
from theory.problems import MultiTaskRegression, RegressionTask
from theory.results import FloatArray
from validate.claims.exact import mismatches, rational
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical
from validate.claims.multihead.setup import (
    APPROXIMATELY,
    FALSE_ALARM,
    PAPER,
    REGIME_TEXT,
    REGIMES,
    best_heads,
    sample,
    worst_score,
    z_score,
)

LEDGER = Ledger()
# Table 1: activation, C, |omega|, |mu|, eta_eff.
TABLE_1 = (
    ("exp", 1.0, 0.1267, 3.5006, 0.8871),
    ("1+tanh", 1.0, 0.1504, 3.3362, 1.0035),
    ("1+Cx", 0.5, 0.3677, 2.3963, 0.8810),
    ("1+Cx", 0.8, 0.2411, 2.2819, 0.8802),
    ("1+Cx", 1.0, 0.1979, 2.2221, 0.8794),
    ("(1+Cx)^2", 0.5, 0.2882, 1.7561, 1.0122),
    ("(1+Cx)^2", 0.8, 0.1810, 1.7487, 1.0128),
    ("(1+Cx)^2", 1.0, 0.1452, 1.7448, 1.0132),
)
_SMALL = (PAPER, RegressionTask(1, 10, 1.0), RegressionTask(40, 20, 0.5))


def kac_murdock_szego(d: int, rho: float) -> FloatArray:
    """Covariance rho^|i-j|."""
    return np.asarray(rho ** np.abs(np.subtract.outer(np.arange(d), np.arange(d))), dtype=np.float64)


def anisotropic(d: int, L: int, noise: float, rho: float = 0.5) -> RegressionTask:
    return RegressionTask(d, L, noise, tuple(map(tuple, kac_murdock_szego(d, rho).tolist())))


# The paper's setting of section 5.3, and harder ones.
ANISOTROPIC = (
    anisotropic(5, 40, 0.1),
    anisotropic(5, 400, 0.0),
    anisotropic(20, 10, 0.1),
    anisotropic(5, 10, 0.5, 0.9),
)
_ANISOTROPIC = "(d,L,noise,rho) (5,40,0.1,0.5) (5,400,0,0.5) (20,10,0.1,0.5) (5,10,0.5,0.9)"


@LEDGER.claim(
    "multihead:5.1",
    "linear attention implements vanilla gradient descent with one head",
    r"LinTF_\theta(Z)=Z+\frac1L\sum_hO^{(h)}V^{(h)}Z\cdot Z^\top K^{(h)\top}Q^{(h)}Z",
)
def linear_attention() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for index, (d, L) in enumerate(((1, 3), (3, 5), (5, 2))):
        rng = stream(51, "multihead:5.1", index)
        X, y, query = rational(rng, L, d), rational(rng, L), rational(rng, d)
        zero = rational(rng, 1)[0] * 0
        Z = np.hstack([np.vstack([X.T, y]), np.append(query, zero)[:, np.newaxis]])
        OV, KQ = np.full((d + 1, d + 1), zero), np.full((d + 1, d + 1), zero)
        OV[d, d] = zero + 1
        KQ[np.arange(d), np.arange(d)] = zero + 1
        update = OV @ Z @ Z.T @ KQ @ Z / L
        wrong += mismatches(update[d, L], sum(y * (X @ query)) / L)
        ours = descent.linear_transformer(*(m.astype(np.float64) for m in (Z, OV[np.newaxis], KQ[np.newaxis])))
        plain = Z.astype(np.float64) + update.astype(np.float64) * L / (L + 1)
        error = max(error, float(np.abs(ours - plain).max() / np.abs(plain).max()))
    yield Evidence(
        Method.EXACT, wrong, 0.0, "read-outs that differ from vanilla descent", "(d,L) in (1,3) (3,5) (5,2)"
    )
    yield Evidence(
        Method.NUMERIC, error, 1e-12, "relative error of linear_transformer, which divides by L + 1 columns", "same"
    )


def _pair_limit(columns: bool) -> float:
    """Relative distance of 2H softmax heads at γ = 1e-5 from (5.2), normalised by L as printed or by the columns."""
    worst = 0.0
    for index, (d, L, heads) in enumerate(((1, 4, 1), (3, 12, 2), (5, 40, 3))):
        rng = stream(52, "multihead:5.2", index)
        Z = rng.standard_normal((d + 1, L + 1))
        OV, KQ = rng.standard_normal((2, heads, d + 1, d + 1))
        pair = descent.paired_softmax_transformer(Z, OV, KQ, 1e-5)
        n = L + 1 if columns else L
        mean = Z.sum(axis=1, keepdims=True) / n
        printed = Z + np.sum(OV @ Z @ Z.T @ KQ @ Z, axis=0) / n - np.sum(OV @ mean @ mean.T @ KQ @ Z, axis=0)
        if columns:
            worst = max(worst, float(np.abs(descent.centred_linear_transformer(Z, OV, KQ) - printed).max()))
        worst = max(worst, float(np.abs(pair - printed).max() / np.abs(printed - Z).max()))
    return worst


@LEDGER.claim(
    "multihead:5.2a",
    "2H softmax heads that imitate H linear heads",
    r"TF_\theta(Z)=Z+\sum_h\sum_{j\in\{0,1\}}\frac{(-1)^j}{2\gamma}O^{(h)}V^{(h)}Z\cdot smax((-1)^j\gamma Z^\top K^{(h)\top}Q^{(h)}Z)",
)
def paired_heads() -> Iterator[Evidence]:
    worst = 0.0
    for index, (d, L, heads) in enumerate(((1, 4, 1), (5, 40, 3))):
        rng = stream(52, "multihead:5.2a", index)
        Z = rng.standard_normal((d + 1, L + 1))
        OV, KQ = rng.standard_normal((2, heads, d + 1, d + 1))
        plain = Z.copy()
        for value, key_query in zip(OV, KQ, strict=True):
            for sign in (1, -1):
                plain = plain + sign / 0.2 * value @ Z @ softmax(sign * 0.1 * Z.T @ key_query @ Z, axis=0)
        worst = max(worst, float(np.abs(plain - descent.paired_softmax_transformer(Z, OV, KQ, 0.1)).max()))
    yield Evidence(
        Method.NUMERIC, worst, 1e-11, "error of paired_softmax_transformer", "gamma 0.1; (d,L,H) (1,4,1) (5,40,3)"
    )


@LEDGER.claim(
    "multihead:5.2",
    "softmax heads in the limit of small gamma",
    r"TF_\theta(Z)\approx LinTF_\theta(Z)-\sum_hO^{(h)}V^{(h)}\bar Z\bar Z^\top K^{(h)\top}Q^{(h)}Z,\quad\bar Z=L^{-1}Z1_L",
    reading="1_L summing all L + 1 columns that softmax sees; the approximation as a limit",
)
def small_gamma_transformer() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC,
        _pair_limit(columns=False),
        1e-3,
        "relative distance at gamma 1e-5",
        "(d,L,H) (1,4,1) (3,12,2) (5,40,3)",
    )


@LEDGER.correction(
    "multihead:5.2",
    Relation.MISPRINT,
    r"\text{with }\tfrac1{L+1}\text{ for }\tfrac1L\text{ in (5.1) and }\bar Z=(L+1)^{-1}Z1_{L+1}",
    "unmasked softmax runs over the L + 1 columns of the embedding; a factor 1 + 1/L of the update, 2.5 % at L = 40",
)
def small_gamma_transformer_mended() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC,
        _pair_limit(columns=True),
        1e-6,
        "relative distance at gamma 1e-5",
        "(d,L,H) (1,4,1) (3,12,2) (5,40,3)",
    )


def _turning_length(task: RegressionTask) -> float:
    """Test length of least risk of linear attention with its best step: the vertex of the parabola."""
    lengths = np.arange(1, 3 * (task.context + task.dim))
    return float(lengths[np.argmin(descent.linear_length_risk(task, descent.vanilla_step(task), lengths))])


@LEDGER.claim(
    "multihead:5.3-length",
    "linear attention does not generalise in length",
    r"\text{its error starts to increase for }L'>L",
    reading="the least error within 10 % of the training length, at the best step",
)
def linear_length() -> Iterator[Evidence]:
    for task in (PAPER, RegressionTask(2, 400, 0.0), RegressionTask(40, 20, 0.5)):
        yield Evidence(
            Method.NUMERIC,
            _turning_length(task) / task.context - 1,
            APPROXIMATELY,
            "length of least error over the training length, minus one",
            f"({task.dim},{task.context},{task.noise:g})",
        )


@LEDGER.correction(
    "multihead:5.3-length",
    Relation.CONDITIONS,
    r"\text{its error is least at }L'=L+\tfrac12(d+1+d\sigma^2)\text{: near }L\text{ if }d(1+\sigma^2)\ll2L;\text{ it then grows as }L'^2",
    "43 at the paper's setting; at d = 2L, noise 1/2 it still falls to 2.5 L",
)
def linear_length_turns() -> Iterator[Evidence]:
    d, L, s, T = sympy.symbols("d L s T", positive=True)
    eta = L / (L + d + 1 + d * s) * T / L
    risk = -2 * eta + eta**2 * (1 + (d + 1 + d * s) / T)
    turn = sympy.solve(sympy.diff(risk, T), T)
    gap = sympy.simplify(turn[0] - L - (d + 1 + d * s) / 2)
    yield Evidence(
        Method.SYMBOLIC, float(gap != 0 or len(turn) != 1), 0.0, "turning lengths that differ", "all d, L, noise"
    )
    worst = max(abs(_turning_length(task) - task.context - (task.dim * (1 + task.noise) + 1) / 2) for task in REGIMES)
    yield Evidence(Method.SWEEP, worst, 0.5001, "distance of the best integer length", REGIME_TEXT)
    scores = []
    for index, (task, test) in enumerate(((PAPER, 80), (RegressionTask(40, 20, 0.5), 30))):
        step = descent.vanilla_step(task)
        longer = RegressionTask(task.dim, test, task.noise)
        X, y, query, label = sample(longer, 20_000, stream(53, "multihead:5.3-length", index))
        guess = descent.vanilla_prediction(X, y, query, step * test / task.context)
        scores.append(z_score((label - guess) ** 2, float(descent.linear_length_risk(task, step, test))))
    yield statistical(
        worst_score(scores),
        FALSE_ALARM / 2,
        "sampled risk against linear_length_risk",
        "(5,40,0.1) at 80, (40,20,0.5) at 30",
    )


@LEDGER.claim(
    "multihead:contribution-e",
    "softmax attention outperforms linear attention in linear ICL tasks",
    r"\mathcal E(\text{softmax})\le\mathcal E(\text{linear})",
    reading="two softmax heads against one linear head, both at their exact optimum, at the training length and at twice it",
)
def softmax_outperforms() -> Iterator[Evidence]:
    for task in (PAPER, RegressionTask(2, 100, 0.0), RegressionTask(30, 20, 0.5)):
        linear = float(descent.vanilla_step_risk(task, descent.vanilla_step(task)))
        gap = best_heads(task, 2).risk.value - linear
        yield Evidence(
            Method.NUMERIC,
            max(gap, 0.0),
            0.0,
            "excess of softmax over linear at the training length",
            f"({task.dim},{task.context},{task.noise:g})",
        )


@LEDGER.correction(
    "multihead:contribution-e",
    Relation.OVERCLAIM,
    r"\text{at the training length the linear head is better: vanilla }1+\sigma^2-\frac L{L+d+1+d\sigma^2}<1+\sigma^2-\frac{L-1}{L+d+d\sigma^2}\text{ debiased;}"
    r"\text{ softmax wins at lengths beyond its turning point}",
    "the token mean that softmax subtracts is zero in the population: debiasing only loses a sample (0.2398 against "
    "0.2428 at (5,40,0.1))",
)
def softmax_outperforms_when_longer() -> Iterator[Evidence]:
    d, L, s = sympy.symbols("d L s", positive=True)
    gap = sympy.simplify(
        L / (L + d + 1 + d * s)
        - (L - 1) / (L + d + d * s)
        - (d + d * s + 1) / ((L + d + 1 + d * s) * (L + d + d * s))
    )
    yield Evidence(
        Method.SYMBOLIC,
        float(gap != 0),
        0.0,
        "gap of the two optimal risks minus a positive fraction",
        "all d, L, noise",
    )
    loss = 0.0
    for task in (PAPER, RegressionTask(2, 100, 0.0), RegressionTask(30, 20, 0.5)):
        best, test = best_heads(task, 2), 3 * (task.context + task.dim)
        longer = RegressionTask(task.dim, test, task.noise)
        soft = exact.softmax_risk(longer, best.omega, best.mu).value
        loss = max(loss, soft / float(descent.linear_length_risk(task, descent.vanilla_step(task), test)))
    yield Evidence(
        Method.SWEEP,
        loss,
        0.999,
        "largest ratio of softmax to linear risk at 3 (L + d) tokens",
        "(5,40,0.1) (2,100,0) (30,20,0.5)",
    )


@LEDGER.claim(
    "multihead:5.3a",
    "first-order coefficients of the activations",
    r"f(x)\approx1+C_fx:\quad f_1=1+Cx,\ f_2=(1+Cx)^2,\ f_3=1+\tanh x:\ C_{f_1}=C,\ C_{f_2}=2C,\ C_{f_3}=1",
)
def coefficients() -> Iterator[Evidence]:
    x, C = sympy.symbols("x C", positive=True)
    wrong = 0.0
    for f, slope in (
        (1 + C * x, C),
        ((1 + C * x) ** 2, 2 * C),
        (1 + sympy.tanh(x), sympy.Integer(1)),
        (sympy.exp(x), sympy.Integer(1)),
    ):
        wrong += float(sympy.simplify(sympy.diff(f, x).subs(x, 0) - slope) != 0) + float(f.subs(x, 0) != 1)
    for name, scale, *_ in TABLE_1:
        act = activations.activation(name, scale)
        step = 1e-6
        slope = float((act.function(np.array(step)) - act.function(np.array(-step))) / (2 * step))
        wrong += float(abs(slope - act.slope) > 1e-8)
    yield Evidence(Method.SYMBOLIC, wrong, 0.0, "coefficients that differ", "all C > 0; Activation.slope of Table 1")


@LEDGER.claim(
    "multihead:5.3b",
    "heads with a normalised activation as debiased descent",
    r"\hat y_q=|\mu|\Big(\sum_\ell\frac{y_\ell f(|\omega|x_\ell^\top x_q)}{\sum_\ell f(|\omega|x_\ell^\top x_q)}-\sum_\ell\frac{y_\ell f(-|\omega|x_\ell^\top x_q)}"
    r"{\sum_\ell f(-|\omega|x_\ell^\top x_q)}\Big)\approx\frac{\eta_{eff}}L\sum_\ell y_\ell\bar x_\ell^\top x_q,\quad\eta_{eff}=2C_f|\omega||\mu|",
    reading="as omega -> 0 on given contexts: relative error below 1 % at C_f omega = 0.01/sqrt(d)",
)
def activation_as_descent() -> Iterator[Evidence]:
    worst = 0.0
    for index, task in enumerate(_SMALL):
        X, y, query, _ = sample(task, 500, stream(53, "multihead:5.3b", index))
        scores = np.einsum("nld,nd->nl", X, query)
        plain = descent.debiased_prediction(X, y, query, 1.0)
        for name, scale in (("exp", 1.0), ("1+tanh", 1.0), ("1+Cx", 0.5), ("(1+Cx)^2", 0.8)):
            act = activations.activation(name, scale)
            omega = 0.01 / np.sqrt(task.dim) / act.slope
            up, down = act.function(omega * scores), act.function(-omega * scores)
            heads = ((y * up).sum(axis=1) / up.sum(axis=1) - (y * down).sum(axis=1) / down.sum(axis=1)) / (
                2 * act.slope * omega
            )
            worst = max(worst, float(np.sqrt(np.mean((heads - plain) ** 2) / np.mean(plain**2))))
    yield Evidence(
        Method.SWEEP,
        worst,
        0.01,
        "relative root mean square error",
        "exp, 1+tanh, 1+0.5x, (1+0.8x)^2; (5,40,0.1) (1,10,1) (40,20,0.5)",
    )


def _profile(act: activations.Activation, gamma: float) -> float:
    return activations.activation_risk(PAPER, act, gamma, activations.best_mu(PAPER, act, gamma)).value


@LEDGER.claim(
    "multihead:table-1",
    "Table 1, learned parameters of two heads with other activations",
    r"|\omega^{(1)}|,\ |\mu^{(1)}|,\ \eta_{eff}=2C_f|\omega^{(1)}||\mu^{(1)}|\text{ of exp, }1+\tanh,\ 1+Cx,\ (1+Cx)^2",
    measurement=True,
    reading="the printed product within the rounding of its factors; each row with f >= 0 near a minimum of the exact risk",
)
def table_1() -> Iterator[Evidence]:
    excess = 0.0
    for name, scale, omega, mu, eta in TABLE_1:
        slope = activations.activation(name, scale).slope
        rounding = 2 * slope * 5e-5 * (omega + mu) + 5e-5
        excess = max(excess, abs(2 * slope * omega * mu - eta) / rounding)
    yield Evidence(
        Method.EXACT, excess, 1.0, "distance of eta_eff from its product over their rounding", "all 8 columns"
    )
    floor = {"exp": best_heads(PAPER, 2).risk.value, "1+tanh": 0.2393832168611458, "(1+Cx)^2": 0.2383410792409213}
    for (name, scale, omega, mu, _), least in ((row, floor[row[0]]) for row in TABLE_1 if row[0] in floor):
        risk = activations.activation_risk(PAPER, activations.activation(name, scale), omega, mu).value
        yield Evidence(
            Method.NUMERIC,
            risk / least - 1,
            1e-3,
            "exact risk of the printed values over the least for two heads, minus one",
            f"{name}, C = {scale:g}",
        )
    # That these two are minima: the profile rises on both sides of the stated scale.
    for act, gamma, least in (
        (activations.shifted_tanh(), 0.14340, 0.2393832168611458),
        (activations.square(0.5), 0.28435, 0.2383410792409213),
    ):
        sides = min(_profile(act, gamma * 0.9), _profile(act, gamma * 1.1))
        yield Evidence(
            Method.NUMERIC, least / sides, 1.0, "least risk over those at 0.9 and 1.1 of its scale", act.name
        )
        yield Evidence(
            Method.NUMERIC, _profile(act, gamma) - least, 1e-9, "risk at the stated scale minus the least", act.name
        )


@LEDGER.claim(
    "multihead:table-1-eta",
    "all activations learn the same debiased descent",
    r"\eta_{eff}\text{ are all close to one: all models effectively learn }\hat y_q^{gd}(\eta^*),\ \eta^*=(1+(1+\sigma^2)d/L)^{-1}",
    measurement=True,
    reading="within 10 % of eta* = 0.8791 at (5,40,0.1)",
)
def same_step() -> Iterator[Evidence]:
    step = descent.debiased_step(PAPER)
    for name, scale, _, _, eta in TABLE_1:
        yield Evidence(
            Method.EXACT,
            eta / step - 1,
            APPROXIMATELY,
            "printed eta_eff over eta*, minus one",
            f"{name}, C = {scale:g}",
        )


@LEDGER.correction(
    "multihead:table-1-eta",
    Relation.OVERCLAIM,
    r"\text{true of exp and }1+Cx;\ 1+\tanh\text{ and }(1+Cx)^2\text{ have }\eta_{eff}\text{ 14-15 \% above }\eta^*\text{, lower risk than any debiased descent}"
    r"\text{ (0.2394, 0.2384 against 0.2429) and a finite best }\omega",
    "they gain from the second order of f: f_2 > 3 f_3 in normalised coefficients",
)
def two_kinds_of_activation() -> Iterator[Evidence]:
    step = descent.debiased_step(PAPER)
    limit = float(descent.debiased_step_risk(PAPER, step))
    for name, scale, omega, mu, eta in TABLE_1:
        act = activations.activation(name, scale)
        if act.name == "exp" or name == "1+Cx":
            yield Evidence(Method.EXACT, eta / step - 1, 0.01, "printed eta_eff over eta*, minus one", act.name)
        else:
            yield Evidence(
                Method.EXACT, eta / step - 1.147, 0.008, "printed eta_eff over eta*, minus 1.147", act.name
            )
            gain = 1 - activations.activation_risk(PAPER, act, omega, mu).value / limit
            yield Evidence(
                Method.NUMERIC, 0.01 / gain, 1.0, "1 % over its gain on the best debiased descent", act.name
            )
            yield Evidence(
                Method.EXACT,
                float(activations.regime(act) is not activations.Regime.FINITE),
                0.0,
                "not in the regime of a finite best scale",
                act.name,
            )


@LEDGER.claim(
    "multihead:5.3c",
    "Theorem 4.2 for normalised activations in general",
    r"f(x)\approx1+C_fx\Rightarrow\text{the limiting model learns the same debiased GD predictor, }\gamma\to0",
    reading="'any' activation with this first order; by the exact population risk",
)
def any_activation() -> Iterator[Evidence]:
    for act in (activations.exponential(), activations.shifted_tanh(), activations.square(1.0)):
        for task in (PAPER, RegressionTask(30, 20, 0.5)):
            slope = activations.small_gamma_coefficient(task, act)
            yield Evidence(
                Method.NUMERIC,
                max(0.0, -slope),
                0.0,
                "fall of the risk with gamma^2 at zero",
                f"{act.name}, ({task.dim},{task.context},{task.noise:g})",
            )


@LEDGER.correction(
    "multihead:5.3c",
    Relation.OVERCLAIM,
    r"\gamma\to0\text{ is best only if }(L+1)f_2<3(L-1)f_3;\text{ else a finite }\gamma\text{ beats debiased descent; where }f\text{ changes sign, as }1+Cx,"
    r"\text{ the population risk is infinite at every }\gamma\ne0",
    "normalised to f = 1 + x + f_2 x^2 + f_3 x^3; the second and third order decide, not the first",
)
def second_order_decides() -> Iterator[Evidence]:
    for name, scale in (("exp", 1.0), ("1+tanh", 1.0), ("(1+Cx)^2", 1.0)):
        act = activations.activation(name, scale)
        for task in (PAPER, RegressionTask(10, 12, 0.5)):
            base = float(descent.debiased_step_risk(task, descent.debiased_step(task)))
            # Small enough that the order gamma^4 is a small part, large enough that the quadrature resolves the gain.
            gamma = 0.01 / act.slope
            value = activations.activation_risk(task, act, gamma, activations.best_mu(task, act, gamma)).value
            slope = (value - base) / (act.slope * gamma) ** 2
            ratio = slope / activations.small_gamma_coefficient(task, act)
            yield Evidence(
                Method.NUMERIC,
                ratio - 1,
                0.05,
                "fall of the exact risk over gamma^2 against small_gamma_coefficient, minus one",
                f"{act.name}, ({task.dim},{task.context},{task.noise:g})",
            )

    # 1 + Cx: the reciprocal square of a normaliser with a positive density at zero has no mean. Given x_q the normaliser
    # over L is 1 + s z with a normal z: cut at |1 + s z| > cut, the mean grows as 1 / cut.
    def cut_mean(s: float, cut: float) -> mpmath.mpf:
        def integrand(u: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf((u - 1) / s) / s / u**2

        return mpmath.quad(integrand, [-8 * s, -1, -0.1, -10 * cut, -cut]) + mpmath.quad(
            integrand, [cut, 10 * cut, 0.1, 1, 2, 1 + 8 * s]
        )

    for s in (0.5, 0.9):
        growth = float(cut_mean(s, 1e-6) / cut_mean(s, 1e-5))
        yield Evidence(
            Method.HIGH_PRECISION,
            growth / 10 - 1,
            0.01,
            "growth of the cut mean over that of 1/cut, minus one",
            f"1+x, normaliser 1 + {s:g} z",
        )


@LEDGER.claim(
    "multihead:5.3",
    "circuits learned on anisotropic tokens",
    r"K^{(h)\top}Q^{(h)}=\begin{bmatrix}(-1)^{h+1}\gamma\Omega&*\\0_d^\top&*\end{bmatrix},\quad O^{(h)}V^{(h)}=\begin{bmatrix}*&*\\0_d^\top&(-1)^{h+1}\mu_\gamma\end{bmatrix}",
    reading="as circuits with which the layer (2.2) gives (5.4)",
)
def anisotropic_circuits() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC,
        _circuit_error("multihead:5.3"),
        1e-11,
        "layer (2.2) against softmax_prediction with a matrix",
        _ANISOTROPIC,
    )


def _circuit_error(name: str) -> float:
    worst = 0.0
    for index, task in enumerate(ANISOTROPIC):
        rng = stream(53, name, index)
        X, y, query, _ = (part[0] for part in sample(task, 1, rng))
        d = task.dim
        root = rng.standard_normal((d, d)) / d
        omega = root @ root.T + np.eye(d)
        gamma, mu = 0.05, 4.0
        Z = np.vstack([X.T, y])
        total = 0.0
        for sign in (1, -1):
            KQ, OV = rng.standard_normal((2, d + 1, d + 1))
            KQ[:d, :d], KQ[d, :d] = sign * gamma * omega, 0
            OV[d, :d], OV[d, d] = 0, sign * mu
            total += float((OV @ Z @ softmax(Z.T @ KQ @ np.append(query, 0)))[d])
        kernel = np.exp(gamma * X @ omega @ query)
        printed = mu * float(y @ kernel / kernel.sum() - y @ (1 / kernel) / (1 / kernel).sum())
        ours = float(descent.two_head_prediction(X, y, query, gamma, mu, omega))
        worst = max(worst, abs(total - printed), abs(ours - printed))
    return worst


@LEDGER.claim(
    "multihead:5.4",
    "a sum of two kernel regressors on anisotropic tokens",
    r"\hat y_q=\mu_\gamma\Big(\sum_\ell\frac{y_\ell e^{\gamma x_\ell^\top\Omega x_q}}{\sum_\ell e^{\gamma x_\ell^\top\Omega x_q}}-\sum_\ell\frac{y_\ell e^{-\gamma x_\ell^\top\Omega x_q}}{\sum_\ell e^{-\gamma x_\ell^\top\Omega x_q}}\Big)",
)
def anisotropic_kernels() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC, _circuit_error("multihead:5.4"), 1e-11, "two_head_prediction against the print", _ANISOTROPIC
    )


@LEDGER.claim(
    "multihead:5.5a",
    "the kernel of the two regressors",
    r"F(x,x';\gamma,\Omega)=\tfrac1\gamma\exp(-\gamma x^\top\Omega x')",
    reading="of the negative head at gamma, of the positive one at -gamma; the prefactor cancels",
)
def kernel_function() -> Iterator[Evidence]:
    worst = 0.0
    for index, d in enumerate((2, 6)):
        rng = stream(55, "multihead:5.5a", index)
        X, query = rng.standard_normal((9, d)), rng.standard_normal(d)
        for gamma in (0.3, -0.3):
            kernel = np.exp(-gamma * X @ query) / gamma
            worst = max(worst, float(np.abs(kernel / kernel.sum() - softmax(-gamma * X @ query)).max()))
    yield Evidence(
        Method.NUMERIC, worst, 1e-14, "normalised kernel against the head's weights", "gamma +-0.3, d 2, 6"
    )


@LEDGER.claim(
    "multihead:5.5",
    "small-gamma limit on anisotropic tokens",
    r"\hat y_q\approx\frac{2\gamma\mu_\gamma}L\sum_\ell y_\ell\bar x_\ell^\top\Omega x_q",
    reading="with an error that vanishes as gamma^2; within 10 % at gamma |Omega|^(1/2) = 0.05",
)
def anisotropic_limit() -> Iterator[Evidence]:
    for index, task in enumerate(ANISOTROPIC):
        omega = np.linalg.inv(descent.paper_covariance(task))
        X, y, query, _ = sample(task, 1000, stream(55, "multihead:5.5", index))
        plain = descent.debiased_prediction(X, y, query, 1.0, omega)
        errors = []
        for gamma in (0.05 / np.sqrt(task.dim), 0.005 / np.sqrt(task.dim)):
            heads = descent.two_head_prediction(X, y, query, gamma, 1 / (2 * gamma), omega)
            errors.append(float(np.sqrt(np.mean((heads - plain) ** 2) / np.mean(plain**2))))
        domain = f"d = {task.dim}, L = {task.context}"
        yield Evidence(Method.NUMERIC, errors[0], APPROXIMATELY, "relative root mean square error", domain)
        yield Evidence(Method.NUMERIC, errors[1] / errors[0], 0.011, "the same at a tenth of gamma over it", domain)


@LEDGER.claim(
    "multihead:5.6a",
    "the effective learning rate is that of the isotropic case",
    r"\eta=2\gamma\mu_\gamma\ (\to\eta^*),\text{ with }\Omega\approx\tilde\Sigma^{-1}\text{ of (5.6)}",
    reading="the model (5.5) with both has a risk within 1 % of the best of its kind",
)
def anisotropic_step() -> Iterator[Evidence]:
    for task in ANISOTROPIC:
        gap = _shrunk_risk(task, descent.debiased_step(RegressionTask(task.dim, task.context, task.noise)))
        yield Evidence(
            Method.NUMERIC,
            gap,
            0.01,
            "relative excess of the risk",
            f"d = {task.dim}, L = {task.context}, noise {task.noise:g}",
        )


def _shrunk_risk(task: RegressionTask, step: float) -> float:
    """Risk of debiased descent with step times the inverse of (5.6), over the least, minus one."""
    best = descent.debiased_risk(task, descent.debiased_preconditioner(task))
    return descent.debiased_risk(task, step * np.linalg.inv(descent.paper_covariance(task))) / best - 1


@LEDGER.correction(
    "multihead:5.6a",
    Relation.OVERCLAIM,
    r"\text{with }\Omega=\tilde\Sigma^{-1}\text{ the best rate is }2\gamma\mu\approx1:\ \tilde\Sigma\text{ already holds the factor }1+(1+\sigma^2)d/L",
    "eta* and the second term of (5.6) are the same shrinkage; both together cost 7 % in risk at the paper's setting, 23 % at "
    "d = 20, L = 10. For tokens of unit covariance the print's own (5.6) equals 1/eta* + 1/L",
)
def anisotropic_step_mended() -> Iterator[Evidence]:
    worst, distance, unit = 0.0, 0.0, 0.0
    for task in ANISOTROPIC:
        G = np.linalg.inv(descent.paper_covariance(task))
        # The risk is quadratic in the step: its minimiser from three values.
        low, middle, high = (descent.debiased_risk(task, step * G) for step in (0.5, 1.0, 1.5))
        vertex = 1 - 0.25 * (high - low) / (high - 2 * middle + low)
        distance, worst = max(distance, abs(vertex - 1)), max(worst, _shrunk_risk(task, 1.0))
        isotropic = RegressionTask(task.dim, task.context, task.noise)
        unit = max(
            unit,
            float(
                np.abs(
                    descent.paper_covariance(isotropic)
                    - np.eye(task.dim) * (1 / descent.debiased_step(isotropic) + 1 / task.context)
                ).max()
            ),
        )
    yield Evidence(Method.SWEEP, distance, 0.09, "distance of the best rate from one", _ANISOTROPIC)
    yield Evidence(Method.SWEEP, worst, 0.006, "relative excess of the risk at rate one", _ANISOTROPIC)
    yield Evidence(Method.SWEEP, unit, 1e-12, "(5.6) at unit covariance minus 1/eta* + 1/L", "same d, L, noise")


def _curvature_excess(task: RegressionTask, matrix: FloatArray, index: int, *, vanilla: bool) -> float:
    """Largest gain over G = matrix by 200 random small changes of G."""
    risk = descent.vanilla_risk if vanilla else descent.debiased_risk
    rng, base = (
        stream(56, "multihead:5.6", index),
        (descent.vanilla_risk if vanilla else descent.debiased_risk)(task, matrix),
    )
    return max(base - risk(task, matrix + 1e-3 * rng.standard_normal(matrix.shape)) for _ in range(200))


@LEDGER.claim(
    "multihead:5.6",
    "the optimal pre-conditioning matrix",
    r"\hat y_q^{vgd}=\frac1L\sum_\ell y_\ell x_\ell^\top\tilde\Sigma^{-1}x_q,\quad\tilde\Sigma=\Big(1+\frac1L\Big)\Sigma+\frac{tr(\Sigma)+d\sigma^2}LI_d",
    reading="optimal among all matrices for the vanilla estimator, which is the one printed (section E.4, cited, does not exist)",
)
def optimal_preconditioner() -> Iterator[Evidence]:
    gap, gain, scores = 0.0, 0.0, []
    for index, task in enumerate(ANISOTROPIC):
        G = np.asarray(np.linalg.inv(descent.paper_covariance(task)), dtype=np.float64)
        gap = max(gap, float(np.abs(G - descent.vanilla_preconditioner(task)).max()))
        gain = max(gain, _curvature_excess(task, G, index, vanilla=True))
        X, y, query, label = sample(task, 10_000, stream(56, "multihead:5.6 sampled", index))
        scores.append(
            z_score((label - descent.vanilla_prediction(X, y, query, 1.0, G)) ** 2, descent.vanilla_risk(task, G))
        )
    yield Evidence(Method.SWEEP, gap, 1e-12, "inverse of the print minus vanilla_preconditioner", _ANISOTROPIC)
    yield Evidence(
        Method.SWEEP, max(gain, 0.0), 0.0, "gain of vanilla descent by 200 random changes of the matrix", _ANISOTROPIC
    )
    yield statistical(worst_score(scores), FALSE_ALARM / 4, "sampled risk against vanilla_risk", _ANISOTROPIC)


@LEDGER.claim(
    "multihead:conj-5.3",
    "the learned pattern is the optimal pre-conditioner",
    r"\Omega\approx\tilde\Sigma^{-1},\text{ since two-head softmax is near linear attention and }\tilde\Sigma\text{ is optimal over all pre-conditioning matrices}",
    reading="that the inverse of (5.6) is optimal for the debiased estimator (5.5), which the heads emulate, to 1e-6 in risk",
)
def conjecture() -> Iterator[Evidence]:
    for task in ANISOTROPIC:
        gap = _shrunk_risk(task, 1.0)
        yield Evidence(
            Method.NUMERIC,
            gap,
            1e-6,
            "relative excess of the risk of debiased descent",
            f"d = {task.dim}, L = {task.context}, noise {task.noise:g}",
        )


@LEDGER.correction(
    "multihead:conj-5.3",
    Relation.MISPRINT,
    r"\text{for (5.5): }\Omega\propto\Big(\Sigma+\frac{tr(\Sigma)+d\sigma^2}LI_d\Big)^{-1}",
    "the factor 1 + 1/L belongs to the vanilla estimator only; (5.6) costs 0.2 % in risk at the paper's setting, 0.5 % at d = 5, L = 10, noise 1/2",
)
def conjecture_mended() -> Iterator[Evidence]:
    gap, gain, scores = 0.0, 0.0, []
    for index, task in enumerate(ANISOTROPIC):
        S, d, L = task.covariance_matrix(), task.dim, task.context
        G = np.linalg.inv(S + (np.trace(S) + d * task.noise) / L * np.eye(d))
        gap = max(gap, float(np.abs(G - descent.debiased_preconditioner(task)).max()))
        gain = max(gain, _curvature_excess(task, G, index, vanilla=False))
        X, y, query, label = sample(task, 10_000, stream(56, "multihead:conj-5.3", index))
        scores.append(
            z_score((label - descent.debiased_prediction(X, y, query, 1.0, G)) ** 2, descent.debiased_risk(task, G))
        )
    yield Evidence(Method.SWEEP, gap, 1e-12, "its difference from debiased_preconditioner", _ANISOTROPIC)
    yield Evidence(
        Method.SWEEP,
        max(gain, 0.0),
        0.0,
        "gain of debiased descent by 200 random changes of the matrix",
        _ANISOTROPIC,
    )
    yield statistical(worst_score(scores), FALSE_ALARM / 4, "sampled risk against debiased_risk", _ANISOTROPIC)


@LEDGER.claim(
    "multihead:fig-12",
    "band structure of the pre-conditioners",
    r"\Sigma_{ij}=\rho^{|i-j|}:\ \Sigma^{-1}\text{ is tridiagonal; }\tilde\Sigma^{-1}\text{ has small entries at }(i,i\pm2)",
)
def bands() -> Iterator[Evidence]:
    task = ANISOTROPIC[0]
    inverse, tilde = np.linalg.inv(task.covariance_matrix()), np.linalg.inv(descent.paper_covariance(task))
    outside = float(np.abs(np.triu(inverse, 2)).max())
    second, first = np.abs(np.diagonal(tilde, 2)), np.abs(np.diagonal(tilde, 1))
    yield Evidence(
        Method.NUMERIC, outside, 1e-14, "largest entry of the inverse covariance outside the band", "d = 5, rho = 0.5"
    )
    yield Evidence(
        Method.NUMERIC,
        1e-3 / second.min(),
        1.0,
        "0.001 over the least second off-diagonal of the other",
        "d = 5, L = 40, noise 0.1",
    )
    yield Evidence(
        Method.NUMERIC, second.max() / first.min(), 0.25, "largest second over least first off-diagonal", "same"
    )


@LEDGER.claim(
    "multihead:5.6-long",
    "long contexts",
    r"L\to\infty:\quad\tilde\Sigma\to\Sigma,\quad\hat y_q=L^{-1}\sum_\ell y_\ell x_\ell^\top\Sigma^{-1}x_q",
    reading="as a limit: both the matrix and the risk, at fixed d",
)
def long_contexts() -> Iterator[Evidence]:
    for d, rho in ((5, 0.5), (20, 0.9)):
        task = anisotropic(d, 10**6, 0.1, rho)
        S = task.covariance_matrix()
        gap = float(np.linalg.norm(descent.paper_covariance(task) - S, 2))
        yield Evidence(
            Method.NUMERIC, gap, 1e-4, "norm of the difference of the matrices", f"d = {d}, rho = {rho:g}, L = 10^6"
        )
        risk = descent.debiased_risk(task, np.linalg.inv(S)) - descent.debiased_risk(
            task, descent.debiased_preconditioner(task)
        )
        yield Evidence(
            Method.NUMERIC, risk, 1e-4, "excess risk of the inverse covariance", f"d = {d}, rho = {rho:g}, L = 10^6"
        )


MULTITASK = MultiTaskRegression(6, 40, 0.1, ((1, 2, 3, 4), (3, 4, 5, 6)))


@LEDGER.claim(
    "multihead:def-5.1",
    "multi-task linear model",
    r"y_n=\beta_{\mathcal S_n}^\top x_{\mathcal S_n}+\epsilon_n,\quad\epsilon_n\sim N(0,\sigma^2),\ n\in[N]",
    reading="checked by the label moments that it implies: E y_n y_m = |S_n and S_m|/d + noise delta",
)
def multitask_labels() -> Iterator[Evidence]:
    scores = []
    for index, task in enumerate((MULTITASK, MultiTaskRegression(3, 1, 1.0, ((1,), (2, 3), (1, 3))))):
        mask = multitask.signal_mask(task)
        rng = stream(57, "multihead:def-5.1", index)
        x, beta = rng.standard_normal((2, 100_000, task.dim))
        y = (x * beta / np.sqrt(task.dim)) @ mask.T + np.sqrt(task.noise) * rng.standard_normal((100_000, len(mask)))
        sets = [set(s) for s in task.signal_sets]
        for n, m in itertools.combinations_with_replacement(range(len(sets)), 2):
            scores.append(z_score(y[:, n] * y[:, m], len(sets[n] & sets[m]) / task.dim + task.noise * (n == m)))
    yield statistical(
        worst_score(scores), FALSE_ALARM / 9, "label moments", "the paper's two tasks; three tasks in dim 3"
    )


@LEDGER.claim(
    "multihead:def-5.2",
    "embedding of a multi-task context",
    r"Z_{ebd}\in\mathbb R^{(d+1)\times(L+N)}\text{ as in (2.1)}",
)
def multitask_embedding() -> Iterator[Evidence]:
    d, L, N = MULTITASK.dim, MULTITASK.context, len(MULTITASK.signal_sets)
    gap = abs((d + N) - (d + 1)) + abs((L + 1) - (L + N))
    yield Evidence(
        Method.EXACT,
        float(gap),
        0.0,
        "rows and columns of tokens and labels minus those printed",
        "d = 6, L = 40, N = 2",
    )


@LEDGER.correction(
    "multihead:def-5.2",
    Relation.MISPRINT,
    r"Z_{ebd}\in\mathbb R^{(d+N)\times(L+1)}",
    "a column holds one covariate of d entries and one response of N",
)
def multitask_embedding_mended() -> Iterator[Evidence]:
    rng = stream(57, "multihead:def-5.2")
    X, Y, query = rng.standard_normal((40, 6)), rng.standard_normal((40, 2)), rng.standard_normal(6)
    Z = np.hstack([np.vstack([X.T, Y.T]), np.append(query, [0, 0])[:, np.newaxis]])
    omega, mu = rng.standard_normal((3, 6)), rng.standard_normal((3, 2))
    plain = sum(
        np.outer(m, [1.0]) * (Z[6:, :40] @ softmax(X @ (w * query)))[:, np.newaxis]
        for w, m in zip(omega, mu, strict=True)
    )
    gap = np.abs(np.ravel(plain) - multitask.multitask_prediction(X, Y, query, omega, mu)).max()
    yield Evidence(
        Method.EXACT,
        float(abs(Z.shape[0] - 8) + abs(Z.shape[1] - 41)),
        0.0,
        "shape minus (d+N, L+1)",
        "d = 6, L = 40, N = 2",
    )
    yield Evidence(
        Method.NUMERIC, float(gap), 1e-12, "heads on this embedding against multitask_prediction", "3 heads"
    )


def _distinct_rule(tasks: int) -> FloatArray:
    """The descent rule of tasks on disjoint pairs of coordinates, of full rank."""
    sets = tuple((2 * n + 1, 2 * n + 2) for n in range(tasks))
    return multitask.descent_rule(MultiTaskRegression(2 * tasks, 40, 0.1, sets))


@LEDGER.claim(
    "multihead:contribution-f",
    "when heads superpose tasks",
    r"H<N<2H\text{: superposition, where individual heads encode multiple tasks simultaneously}",
    reading="N tasks whose descent rules are linearly independent are solved, each by its rule, by H heads that share tasks",
)
def superposition() -> Iterator[Evidence]:
    short = max(multitask.heads_needed(_distinct_rule(N)) - H for H, N in ((2, 3), (3, 4), (3, 5)))
    yield Evidence(
        Method.EXACT, float(short), 0.0, "heads needed minus heads there are", "(H,N) in (2,3) (3,4) (3,5)"
    )


@LEDGER.correction(
    "multihead:contribution-f",
    Relation.MISPRINT,
    r"N<H<2N",
    "heads and tasks are exchanged: N independent rules need N + 1 heads, because each row of mu sums to zero, and 2N heads need "
    "not share; the paper's own example is H = 3, N = 2",
)
def superposition_mended() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for N in (2, 3, 4):
        rule = _distinct_rule(N)
        for H in range(N + 1, 2 * N + 2):
            pattern = multitask.descent_pattern(rule, H, 1e-3)
            wrong += float(multitask.superposition_forced(rule, H) != (H < 2 * N)) + float(
                pattern.superposed != (H < 2 * N)
            )
            sums, done = multitask.implemented_rule(pattern.omega, pattern.mu)
            error = max(error, float(np.abs(sums).max()) * 1e-3, float(np.abs(done - rule).max()))
        # Zero-sum rows of mu: mu^T omega has rank at most H - 1.
        rng = stream(57, "multihead:contribution-f", N)
        mu = rng.standard_normal((N, N))
        rank = np.linalg.matrix_rank((mu - mu.mean(axis=0)).T @ rng.standard_normal((N, 2 * N)))
        wrong += float(rank >= N)
    yield Evidence(Method.EXACT, wrong, 0.0, "patterns on the wrong side", "N 2-4, H from N+1 to 2N+1")
    yield Evidence(Method.NUMERIC, error, 1e-12, "error of the rules that descent_pattern implements", "same")
