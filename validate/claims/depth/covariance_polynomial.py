"""Claims depth:19 to depth:30: linear attention as an ordered matrix polynomial, and its population risk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from sim.streams import stream
from theory.depth import covariance_polynomial as theory
from theory.depth import repeated_update
from theory.problems import ArraySpectrum, PowerLawSpectrum
from validate.claims.exact import ExactArray, as_float, identity, mismatches, rational
from validate.claims.ledger import Evidence, Ledger, Method, statistical

LEDGER = Ledger()
# Layers, dimensions, hidden widths and tokens over which exact identities are tried.
SHAPES = tuple(itertools.product((1, 2, 3, 5), (1, 2, 3), (3, 4), (1, 4)))
# A relative error of products of a few small matrices in float64.
MATRIX_TOLERANCE = 1e-11
FALSE_ALARM = 1e-6
_DOMAIN = "depth 1-5, dim 1-3, width 3-4, 1-4 tokens, random rational matrices"


@dataclass(frozen=True)
class _Model:
    """Exact random weights and one context; letters as in depth (19)-(21)."""

    L: int
    P: int
    N: int
    U: ExactArray
    q: ExactArray
    beta: ExactArray
    W_x: ExactArray
    W_y: ExactArray
    W_v: ExactArray
    W_o: ExactArray
    W_q: list[ExactArray]
    W_k: list[ExactArray]

    @property
    def S(self) -> ExactArray:  # noqa: N802
        return self.U @ self.U.T / self.P

    @property
    def B(self) -> list[ExactArray]:  # noqa: N802
        return [self.W_x.T @ k.T @ q @ self.W_x / self.N for k, q in zip(self.W_k, self.W_q, strict=True)]

    def moments(self) -> list[ExactArray]:
        """m_r = W_o W_v^r W_y, r = 1..L."""
        states = list(itertools.accumulate([self.W_y, *([self.W_v] * self.L)], lambda state, W: W @ state))
        return [self.W_o @ state for state in states[1:]]


def _models(name: str) -> Iterator[_Model]:
    for index, (L, d, N, P) in enumerate(SHAPES):
        rng = stream(19, name, index)
        yield _Model(
            L,
            P,
            N,
            *(rational(rng, d, P), rational(rng, d), rational(rng, d)),
            *(rational(rng, N, d), rational(rng, N), rational(rng, N, N), rational(rng, N)),
            [rational(rng, N, N) for _ in range(L)],
            [rational(rng, N, N) for _ in range(L)],
        )


def _token_level(model: _Model) -> tuple[list[ExactArray], list[ExactArray]]:
    """Label states of context and test token from the model's definition: (8), (11), mask (75), one token at a time."""
    tokens = [*model.U.T, model.q]
    states = [[model.W_y * (model.beta @ x) for x in model.U.T] + [model.W_y * 0]]
    for W_q, W_k in zip(model.W_q, model.W_k, strict=True):
        old, new = states[-1], []
        for i, receiver in enumerate(tokens):
            sign = 1 if i == model.P else -1
            update = model.W_y * 0
            for j in range(model.P):
                score = (W_q @ model.W_x @ receiver) @ (W_k @ model.W_x @ tokens[j]) / (model.P * model.N)
                update = update + sign * score * (model.W_v @ old[j])
            new.append(old[i] + update / model.L)
        states.append(new)
    return [np.array(layer[:-1]).T for layer in states], [layer[-1] for layer in states]


def _exact(figure: float, what: str) -> Evidence:
    return Evidence(Method.EXACT, figure, 0.0, f"entries that differ in {what}", _DOMAIN)


@LEDGER.claim("depth:19", "labels and empirical covariance", r"y=U^\top\beta,\quad S=\tfrac1P UU^\top")
def empirical_covariance() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for model in _models("depth:19"):
        outer = sum((np.outer(x, x) for x in model.U.T), np.outer(model.q, model.q) * 0) / model.P
        wrong += mismatches(model.S, outer)
        wrong += mismatches(model.U.T @ model.beta, [sum(model.beta * x) for x in model.U.T])
        ours, exact = theory.empirical_covariance(as_float(model.U)), as_float(outer)
        error = max(error, float(np.abs(ours - exact).max() / np.abs(exact).max()))
    yield _exact(wrong, "y and S against sums over tokens")
    yield Evidence(Method.NUMERIC, error, MATRIX_TOLERANCE, "relative error of empirical_covariance", _DOMAIN)


@LEDGER.claim(
    "depth:20",
    "effective query-key matrix",
    r"B_\ell=\tfrac1N W_x^\top (W_k^\ell)^\top W_q^\ell W_x,\quad"
    r"\tfrac{(W_q^\ell W_x x_i)^\top(W_k^\ell W_x x_j)}{NP}=\tfrac{x_j^\top B_\ell x_i}{P}",
    reading="the transposes are lost in the extracted text; this is the only placement that fits the dimensions",
)
def effective_query_key() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for model in _models("depth:20"):
        for W_q, W_k, B in zip(model.W_q, model.W_k, model.B, strict=True):
            scores = (W_q @ model.W_x @ model.q) @ (W_k @ model.W_x @ model.U) / (model.N * model.P)
            wrong += mismatches(scores, model.U.T @ B @ model.q / model.P)
            ours = theory.effective_query_key(as_float(model.W_x), as_float(W_k), as_float(W_q))
            error = max(error, float(np.abs(ours - as_float(B)).max() / np.abs(as_float(B)).max()))
    yield _exact(wrong, "attention scores against x_j^T B x_i / P")
    yield Evidence(Method.NUMERIC, error, MATRIX_TOLERANCE, "relative error of effective_query_key", _DOMAIN)


@LEDGER.claim(
    "depth:21",
    "label states under the linear-attention mask",
    r"Z_\ell=Z_{\ell-1}-\tfrac1{LP}W_vZ_{\ell-1}U^\top B_\ell U,\quad "
    r"h_\ell=h_{\ell-1}+\tfrac1{LP}W_vZ_{\ell-1}U^\top B_\ell q",
)
def label_states() -> Iterator[Evidence]:
    wrong = 0.0
    for model in _models("depth:21"):
        context, test = _token_level(model)
        Z, h = np.outer(model.W_y, model.beta @ model.U), model.W_y * 0
        for layer, B in enumerate(model.B, 1):
            Z, h = (
                Z - model.W_v @ Z @ model.U.T @ B @ model.U / (model.L * model.P),
                h + model.W_v @ Z @ model.U.T @ B @ model.q / (model.L * model.P),
            )
            wrong += mismatches(Z, context[layer]) + mismatches(h, test[layer])
    yield _exact(wrong, "the recursion against token-by-token attention with mask (75)")


@LEDGER.claim(
    "depth:22",
    "label states as linear maps of the inputs",
    r"Z_\ell=F_\ell U,\quad F_\ell=F_{\ell-1}-\tfrac1L W_vF_{\ell-1}SB_\ell,\quad "
    r"h_\ell-h_{\ell-1}=(F_{\ell-1}-F_\ell)q",
)
def label_maps() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for model in _models("depth:22"):
        context, test = _token_level(model)
        F = np.outer(model.W_y, model.beta)
        query_keys = [as_float(B) for B in model.B]
        ours = theory.label_states(as_float(model.S), query_keys, as_float(model.W_v), as_float(F))
        for layer, B in enumerate(model.B, 1):
            previous, F = F, F - model.W_v @ F @ model.S @ B / model.L
            wrong += mismatches(F @ model.U, context[layer])
            wrong += mismatches(test[layer] - test[layer - 1], (previous - F) @ model.q)
            error = max(error, float(np.abs(ours[layer] - as_float(F)).max() / np.abs(as_float(F)).max()))
    yield _exact(wrong, "F U and (F_{l-1} - F_l) q against token-by-token attention")
    yield Evidence(Method.NUMERIC, error, MATRIX_TOLERANCE, "relative error of label_states", _DOMAIN)


@LEDGER.claim("depth:23", "the output telescopes", r"\hat y_L=W_o\sum_\ell(F_{\ell-1}-F_\ell)q=W_o(F_0-F_L)q")
def telescoped_output() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for model in _models("depth:23"):
        _, test = _token_level(model)
        states = [np.outer(model.W_y, model.beta)]
        for B in model.B:
            states.append(states[-1] - model.W_v @ states[-1] @ model.S @ B / model.L)
        output = model.W_o @ test[-1]
        wrong += mismatches(output, model.W_o @ (states[0] - states[-1]) @ model.q)
        ours = theory.readout_prediction([as_float(F) for F in states], as_float(model.W_o), as_float(model.q))
        scale = np.abs(as_float(model.W_o)) @ np.abs(as_float(states[0] - states[-1])) @ np.abs(as_float(model.q))
        error = max(error, float(abs(ours - float(output)) / scale))
    yield _exact(wrong, "W_o h_L against W_o (F_0 - F_L) q")
    yield Evidence(Method.NUMERIC, error, MATRIX_TOLERANCE, "relative error of readout_prediction", _DOMAIN)


@LEDGER.claim(
    "depth:24a",
    "the first two label maps",
    r"F_2=W_y\beta^\top-\tfrac1L W_vW_y\beta^\top(SB_1+SB_2)+\tfrac1{L^2}W_v^2W_y\beta^\top SB_1SB_2",
)
def first_two_layers() -> Iterator[Evidence]:
    wrong = 0.0
    for model in _models("depth:24a"):
        if model.L < 2:
            continue
        F_0, (SB_1, SB_2) = np.outer(model.W_y, model.beta), [model.S @ B for B in model.B[:2]]
        F_1 = F_0 - model.W_v @ F_0 @ SB_1 / model.L
        F_2 = F_1 - model.W_v @ F_1 @ SB_2 / model.L
        printed = F_0 - model.W_v @ F_0 @ (SB_1 + SB_2) / model.L
        printed = printed + model.W_v @ model.W_v @ F_0 @ SB_1 @ SB_2 / model.L**2
        wrong += mismatches(F_2, printed)
    yield _exact(wrong, "F_2")


def _printed_polynomial(model: _Model) -> ExactArray:
    """Depth (24) as printed: a sum over all increasing sequences of layers."""
    SB = [model.S @ B for B in model.B]
    total = model.S * 0
    for r, m_r in enumerate(model.moments(), 1):
        for chosen in itertools.combinations(range(model.L), r):
            product = identity(len(model.S))
            for layer in chosen:
                product = product @ SB[layer]
            total = total + (-1) ** (r - 1) * m_r / model.L**r * product
    return total


@LEDGER.claim(
    "depth:24",
    "linear attention is an ordered matrix polynomial",
    r"P_L(S)=\sum_{r=1}^{L}\frac{(-1)^{r-1}m_r}{L^r}\sum_{1\le\ell_1<\cdots<\ell_r\le L}SB_{\ell_1}\cdots SB_{\ell_r},"
    r"\quad m_r=W_oW_v^rW_y",
)
def ordered_polynomial() -> Iterator[Evidence]:
    wrong, error = 0.0, 0.0
    for model in _models("depth:24"):
        _, test = _token_level(model)
        printed = _printed_polynomial(model)
        wrong += mismatches(model.W_o @ test[-1], model.beta @ printed @ model.q)
        moments = np.array([float(m) for m in model.moments()])
        ours = theory.ordered_polynomial(as_float(model.S), [as_float(B) for B in model.B], moments)
        error = max(error, float(np.abs(ours - as_float(printed)).max() / np.abs(as_float(printed)).max()))
    yield _exact(wrong, "the trained architecture's output against beta^T P_L(S) q")
    yield Evidence(Method.NUMERIC, error, 1e-8, "relative error of ordered_polynomial (terms of both signs)", _DOMAIN)


@LEDGER.claim(
    "depth:25", "prediction and target of the easy task", r"\hat y_L=\beta^\top P_L(S)q,\quad y^*=\beta^\top q"
)
def prediction_and_target() -> Iterator[Evidence]:
    wrong = 0.0
    for model in _models("depth:25"):
        _, test = _token_level(model)
        error = model.W_o @ test[-1] - model.beta @ model.q
        D = identity(len(model.S)) - _printed_polynomial(model)
        wrong += mismatches(error, -(model.beta @ D @ model.q))
    yield _exact(wrong, "prediction minus target against -beta^T (I - P_L(S)) q")


@LEDGER.claim(
    "depth:26",
    "risk averaged over the teacher",
    r"\mathcal R_L=E_{U,q,O}[q^\top D_L(S)^\top\Omega D_L(S)q],\quad D_L=I_d-P_L(S)",
)
def risk_over_teacher() -> Iterator[Evidence]:
    for index, (d, b) in enumerate(((2, 0.0), (6, 1.0), (20, 2.0))):
        rng = stream(26, "depth:26", index)
        D, q = np.eye(d) - rng.standard_normal((d, d)) / d, rng.standard_normal(d)
        O = np.linalg.qr(rng.standard_normal((d, d)))[0]  # noqa: E741
        omega = np.arange(1, d + 1.0) ** -b
        beta = (O * np.sqrt(omega)) @ rng.standard_normal((d, 200_000))
        errors = (beta.T @ D @ q) ** 2
        exact = theory.query_risk(np.eye(d) - D, (O * omega) @ O.T, q)
        z = (errors.mean() - exact) / (errors.std(ddof=1) / np.sqrt(errors.size))
        yield statistical(z, FALSE_ALARM, "the sampled teacher average", f"dim {d}, b = {b:g}, 200,000 teachers")


@LEDGER.claim(
    "depth:27",
    "repeated updates: one scalar per layer and an aligned value map",
    r"B_\ell=\kappa I_d,\quad W_vW_y=vW_y\quad\Rightarrow\quad m_r=W_oW_v^rW_y=v^r\,W_oW_y",
)
def aligned_value_map() -> Iterator[Evidence]:
    wrong = 0.0
    for model in _models("depth:27"):
        v, direction = model.q[0], model.W_y
        # A value map with W_v W_y = v W_y that is not a multiple of the identity.
        projector = np.outer(direction, direction) / (direction @ direction)
        W_v = v * projector + (identity(model.N) - projector) @ model.W_v @ (identity(model.N) - projector)
        state, power = direction, 1
        for _ in range(model.L):
            state, power = W_v @ state, power * v
            wrong += mismatches(model.W_o @ state, power * (model.W_o @ direction))
    yield _exact(wrong, "W_o W_v^r W_y against v^r W_o W_y")


@LEDGER.claim(
    "depth:28",
    "repeated updates give a scalar polynomial",
    r"B_\ell=\kappa I,\ W_vW_y=vW_y\Rightarrow P_L(S)=\sum_r a_rS^r,\quad a_r=(-1)^{r-1}\tbinom Lr(\kappa/L)^rm_r",
)
def repeated_polynomial() -> Iterator[Evidence]:
    wrong, binomial_error = 0.0, 0.0
    for model in _models("depth:28"):
        kappa, v = model.q[0], model.beta[0]
        eigen = _Model(
            model.L, model.P, model.N, model.U, model.q, model.beta, model.W_x, model.W_y,
            v * identity(model.N), model.W_o, model.W_q, model.W_k,
        )  # fmt: skip
        power, printed, total = identity(len(model.S)), model.S * 0, model.S * 0
        SB = kappa * model.S
        symmetric = [identity(len(model.S))] + [model.S * 0] * model.L
        for layer in range(1, model.L + 1):
            for r in range(layer, 0, -1):
                symmetric[r] = symmetric[r] + symmetric[r - 1] @ SB
        for r, m_r in enumerate(eigen.moments(), 1):
            power = power @ model.S
            count = math.comb(model.L, r)
            printed = printed + (-1) ** (r - 1) * count * (kappa / model.L) ** r * m_r * power
            total = total + (-1) ** (r - 1) * m_r / model.L**r * symmetric[r]
        wrong += mismatches(printed, total)
        ours = repeated_update.predictor_coefficients(model.L, 0.5)
        signs = [(-1) ** (r - 1) * math.comb(model.L, r) * (0.5 / model.L) ** r for r in range(1, model.L + 1)]
        binomial_error = max(binomial_error, float(np.abs(ours / signs - 1).max()))
    yield _exact(wrong, "the polynomial with B = kappa I against its binomial form")
    yield Evidence(Method.NUMERIC, binomial_error, 1e-13, "relative error of predictor_coefficients", "depth 1-5")


@LEDGER.claim(
    "depth:29",
    "population risk of a covariance polynomial",
    r"\mathcal R_L^{pop}=E_O\operatorname{tr}[D_L(\Sigma)^\top\Omega D_L(\Sigma)\Sigma]"
    r"=\sum_k\lambda_k\omega_k[1-p_L(\lambda_k)]^2",
)
def population_risk() -> Iterator[Evidence]:
    error = 0.0
    for index, (a, b, d, L) in enumerate(itertools.product((0.0, 0.5, 2.0), (0.0, 1.0), (1, 3, 12), (1, 4, 9))):
        rng = stream(29, "depth:29", index)
        spectrum = PowerLawSpectrum(a, b, d)
        O = np.linalg.qr(rng.standard_normal((d, d)))[0]  # noqa: E741
        sigma = (O * spectrum.input_variances()) @ O.T
        omega = (O * spectrum.teacher_variances()) @ O.T
        coefficients = rng.standard_normal(L)
        polynomial = sum(
            (c * np.linalg.matrix_power(sigma, r) for r, c in enumerate(coefficients, 1)), np.zeros((d, d))
        )
        trace = theory.population_risk(polynomial, omega, sigma)
        modes = theory.residual_risk(spectrum, partial(theory.polynomial_residual, coefficients), L)
        error = max(error, abs(trace / modes - 1))
    yield Evidence(
        Method.SWEEP, error, 1e-11, "relative difference of trace and mode sum",
        "a in 0, 0.5, 2; b in 0, 1; dim 1-12; depth 1-9; random rotations and coefficients",
    )  # fmt: skip


@LEDGER.claim(
    "depth:30",
    "risk as a constrained polynomial approximation",
    r"\deg r_L\le L,\quad r_L(0)=1,\quad \mathcal R_L^{pop}=\sum_{k=1}^d\lambda_k\omega_kr_L(\lambda_k)^2",
)
def constrained_residual() -> Iterator[Evidence]:
    import sympy

    x = sympy.Symbol("x")
    worst_degree, wrong_origin, error = 0, 0, 0.0
    for index, L in enumerate((1, 2, 5, 8)):
        rng = stream(30, "depth:30", index)
        coefficients = [sympy.Rational(int(n), 7) for n in rng.integers(-20, 20, L)]
        residual = sympy.Poly(1 - sum(c * x**r for r, c in enumerate(coefficients, 1)), x)
        worst_degree = max(worst_degree, int(residual.degree()) - L)
        wrong_origin += int(residual.eval(0) != 1)
        values = np.array([0.3, 1.0, 2.0])
        ours = theory.polynomial_residual([float(c) for c in coefficients], values)
        exact = np.array([float(residual.eval(sympy.nsimplify(value))) for value in values])
        error = max(error, float(np.abs(ours / exact - 1).max()))
    spectrum = ArraySpectrum((2.0, 1.0, 0.5), (1.0, 3.0, 0.0))
    by_hand = 2.0 * (1 - 2.0 * 0.4) ** 2 + 3.0 * (1 - 0.4) ** 2
    risk = theory.residual_risk(spectrum, lambda value: 1 - 0.4 * value, 1)
    yield Evidence(
        Method.SYMBOLIC,
        float(max(worst_degree, 0) + wrong_origin),
        0.0,
        "violations of deg r <= L, r(0) = 1",
        "depth 1-8",
    )
    yield Evidence(Method.NUMERIC, error, 1e-12, "relative error of polynomial_residual", "depth 1-8")
    yield Evidence(Method.NUMERIC, risk / by_hand - 1, 1e-14, "mode sum against three terms by hand", "three modes")
