r"""Normalised activations other than the exponential: weights :math:`f(\nu_i)/\sum_jf(\nu_j)` of two opposite heads.

With f(x) = f(0)(1 + C x + ...) and γ rescaled by C, every f is 1 + x + f₂x² + f₃x³ + ...; the heads are (γ, -γ) and
(μ, -μ), the effective step is η = 2Cγμ, and γ → 0 is debiased gradient descent. Whether a finite γ does better is
decided by f₂ and f₃. Risks are against the noisy label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy.optimize import minimize_scalar

from theory.multihead.gradient_descent import debiased_step, debiased_step_risk
from theory.multihead.softmax_risk import query_length_rule
from theory.problems import RegressionTask, as_real
from theory.results import Certified, DomainError, FloatArray

# As in attention_moments: tails, and steps in log t and in z; the latter is finer, since exp(-t(1 + tanh az)) is
# bounded within pi/(4a) of the real axis only.
_TAIL = 1e-17
_LOG_STEP = 0.2
_SCORE_STEP = 0.5
_SCORE_STEP_TIMES_SLOPE = 0.14
_DEAD_EXPONENT = 6.7
_ROUNDING = 1e-16
_COARSE = 0.75
# Search range of C γ, and half-width, relative, of the window in which the minimum is refined.
_SEARCH = (0.02, 1.5)
_WINDOW = 0.15
_WINDOW_NODES = 11
# Normalised coefficients that agree to this are on the boundary.
_EQUAL = 1e-12


class Regime(Enum):
    """Which scale γ is best for two heads; each member is a sentence."""

    FINITE = "A finite scale is best, and beats debiased gradient descent."
    VANISHING = "The scale tends to zero, where the heads are debiased gradient descent."
    BORDERLINE = "To leading order in the context length the scale does not matter."


@dataclass(frozen=True, slots=True)
class Activation:
    """A normalised activation.

    name: as printed in Table 1; function: f, vectorised; slope: C = f'(0)/f(0); second, third: f₂ and f₃, Taylor
    coefficients of f(x/C)/f(0); nonnegative: whether f >= 0, without which the normaliser can vanish.
    """

    name: str
    function: Callable[[FloatArray], FloatArray]
    slope: float
    second: float
    third: float
    nonnegative: bool


@dataclass(frozen=True, slots=True)
class ActivationOptimum:
    """Best two opposite heads: gamma, mu, exact risk, effective step 2Cγμ, and gain over debiased descent.

    gamma is ``None`` (and mu) where the optimum is the limit γ → 0.
    """

    gamma: float | None
    mu: float | None
    risk: Certified
    step: float
    gain: float


def exponential() -> Activation:
    """Softmax itself, f = exp: f₂ = 1/2, f₃ = 1/6. Source: multihead section 5.2."""
    return Activation("exp", np.exp, 1.0, 1 / 2, 1 / 6, True)


def shifted_tanh() -> Activation:
    """Shifted tangent, 1 + tanh x: f₂ = 0, f₃ = -1/3. Source: multihead section 5.2."""
    return Activation("1+tanh", _one_plus_tanh, 1.0, 0.0, -1 / 3, True)


def _one_plus_tanh(x: FloatArray) -> FloatArray:
    """2/(1 + e^{-2x}), which keeps its digits where 1 + tanh x is small."""
    from scipy.special import expit

    return np.asarray(2 * expit(2 * x))


def linear(scale: float = 1.0) -> Activation:
    """Linear activation 1 + Cx: f₂ = f₃ = 0. It takes both signs. scale: C > 0. Source: multihead section 5.2."""
    C = as_real("scale", scale, 0, 1e3, open_low=True)
    return Activation(f"1+{C:g}x", lambda x: np.asarray(1 + C * x), C, 0.0, 0.0, False)


def square(scale: float = 1.0) -> Activation:
    """Squared activation (1 + Cx)²: slope 2C, f₂ = 1/4, f₃ = 0. scale: C > 0. Source: multihead section 5.2."""
    C = as_real("scale", scale, 0, 1e3, open_low=True)
    return Activation(f"(1+{C:g}x)^2", lambda x: np.asarray((1 + C * x) ** 2), 2 * C, 1 / 4, 0.0, True)


def activation(name: str, scale: float = 1.0) -> Activation:
    """The activation called exp, 1+tanh, 1+Cx or (1+Cx)^2, with C = scale where it has one.

    Source: multihead Table 1. Raises DomainError for other names, and for a scale outside (0, 1000], used or not.
    """
    C = as_real("scale", scale, 0, 1e3, open_low=True)
    makers: dict[str, Callable[[], Activation]] = {
        "exp": exponential,
        "1+tanh": shifted_tanh,
        "1+Cx": lambda: linear(C),
        "(1+Cx)^2": lambda: square(C),
    }
    if name not in makers:
        raise DomainError(f"activation must be one of {', '.join(makers)}, got {name!r}")
    return makers[name]()


def effective_step(act: Activation, gamma: float, mu: float) -> float:
    r"""Effective learning rate :math:`\eta_{\mathrm{eff}} = 2C_f|\gamma||\mu|`. Source: multihead Table 1."""
    return 2 * act.slope * abs(gamma) * abs(mu)


def activation_risk(task: RegressionTask, act: Activation, gamma: float, mu: float) -> Certified:
    r"""Exact population risk of two opposite heads with a normalised activation f >= 0.

    Quadrature as in `attention_moments`, with f(az) for exp(az). Source: beyond the paper; predictor of
    multihead section 5.2. Raises DomainError where f changes sign: then the normaliser has a density at zero and the
    risk is infinite at every γ ≠ 0, however rarely a batch shows it. For f with a zero, the context must be above 4.
    """
    linear_term, quadratic = _two_head_terms(task, act, gamma, 1.0)
    coarse = _two_head_terms(task, act, gamma, _COARSE)
    base = 1 + task.noise
    value = base - 2 * mu * linear_term + mu**2 * quadratic
    other = base - 2 * mu * coarse[0] + mu**2 * coarse[1]
    size = base + mu**2 * (1 + task.noise) / task.context
    return Certified(value, abs(value - other) + 1e-13 * size)


def best_mu(task: RegressionTask, act: Activation, gamma: float) -> float:
    """The μ with the least exact risk at given γ. Source: beyond the paper. Errors as `activation_risk`."""
    linear_term, quadratic = _two_head_terms(task, act, gamma, 1.0)
    return linear_term / quadratic


def _two_head_terms(task: RegressionTask, act: Activation, gamma: float, fineness: float) -> tuple[float, float]:
    """Coefficients of -2μ and μ² in the risk: 2c(γ) and 2(K(γ,γ) - K(γ,-γ))."""
    scale = as_real("gamma", gamma, 0, 10 / act.slope, open_low=True)
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for the activation risk, got a matrix")
    if not act.nonnegative:
        raise DomainError(
            f"activation must be >= 0 for a finite population risk, got {act.name}, whose normaliser vanishes with "
            "positive density"
        )
    if task.context < 5:
        raise DomainError(f"context must be at least 5 for the activation risk, got {task.context}")
    r, weight = query_length_rule(task.dim, 2 * scale * act.slope, fineness)  # tanh bends twice as fast as exp
    moments = np.array([_opposite_moments(act, scale * length, task.context, fineness) for length in r])
    own, opposite, first = moments[:, 0], moments[:, 1], moments[:, 2]
    kappa = (task.dim - 1) / task.dim + task.noise
    difference = (own[:, 0] - opposite[:, 0]) / task.dim + kappa * (own[:, 1] - opposite[:, 1])
    return float(2 * (first[:, 0] * r) @ weight / task.dim), float(2 * difference @ weight)


def _opposite_moments(act: Activation, slope: float, L: int, fineness: float) -> FloatArray:
    """Rows (f2, f3) at (a, a), (f2, f3) at (a, -a), and (f1, 0), for weights f(az)/Σ f(az)."""
    z, weight = _score_grid(act, slope, L, fineness)
    f = act.function(slope * z)
    mean = float(f @ weight)
    u, du = _log_grid(f, weight, mean, L, fineness)
    with np.errstate(divide="ignore"):
        w = np.exp(np.minimum(u[:, np.newaxis] + np.log(f), _DEAD_EXPONENT))
    kernel, miss = np.exp(-w), -np.expm1(-w)
    own = np.log1p(-np.minimum(miss @ weight, 1 - _ROUNDING))
    upper, lower = np.exp((L - 1) * own), np.exp((L - 2) * own)
    wk = w * kernel
    first = L * (wk @ (weight * z) * upper) @ du
    f3 = L * ((w * wk) @ weight * upper) @ du
    f2 = L * ((w * wk) @ (weight * z * z) * upper + (L - 1) * (wk @ (weight * z)) ** 2 * lower) @ du
    mirror, mirror_miss, mirror_wk = kernel[:, ::-1], miss[:, ::-1], wk[:, ::-1]
    complement = (miss @ weight)[:, np.newaxis] + mirror_miss @ weight - (miss * weight) @ mirror_miss.T
    both = np.log1p(-np.minimum(complement, 1 - _ROUNDING))
    upper, lower = np.exp((L - 1) * both), np.exp((L - 2) * both)
    A = (wk * (weight * z)) @ mirror.T
    cross3 = L * du @ ((wk * weight) @ mirror_wk.T * upper) @ du
    # With u and v exchanged and z reflected, the second factor E[z w_b ...] is minus the transpose of the first.
    cross2 = L * du @ ((wk * (weight * z * z)) @ mirror_wk.T * upper - (L - 1) * A * A.T * lower) @ du
    return np.array([[f2, f3], [cross2, cross3], [first, 0.0]])


def _score_grid(act: Activation, slope: float, L: int, fineness: float) -> tuple[FloatArray, FloatArray]:
    reach = float(np.sqrt(-2 * np.log(_TAIL) + 4 * np.log(L)))
    step = min(_SCORE_STEP, _SCORE_STEP_TIMES_SLOPE / (slope * act.slope)) / fineness
    count = int(np.ceil(reach / step))
    z = np.asarray(step * np.arange(-count, count + 1), dtype=np.float64)
    return z, np.asarray(step * np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


def _log_grid(
    f: FloatArray, weight: FloatArray, mean: float, L: int, fineness: float
) -> tuple[FloatArray, FloatArray]:
    """Nodes u = log t and weights of ∫ du: as `attention_moments`, with the right end found by trial."""
    centre = -np.log(L * mean)
    trial = centre + 0.5 * np.arange(160)
    with np.errstate(divide="ignore"):
        exponent = np.minimum(trial[:, np.newaxis] + np.log(f), _DEAD_EXPONENT)
    log_phi = np.log(np.maximum(np.exp(-np.exp(exponent)) @ weight, _ROUNDING))
    high = trial[min(int(np.argmax(L * log_phi < np.log(_TAIL))) or trial.size - 1, trial.size - 1)]
    decades = np.log(-np.log(_TAIL))
    shift = max(0.0, float(np.log(f.max() / (L * mean))))
    left, right = -(shift + decades), high - centre
    count = int(np.ceil((right - left) / _LOG_STEP * fineness))
    step = (right - left) / count
    x = left + step * np.arange(count + 1)
    stretch = np.exp(-x - shift)
    return centre + x - stretch, step * (1 + stretch)


def small_gamma_coefficient(task: RegressionTask, act: Activation) -> float:
    r"""Coefficient of (Cγ)² in the exact risk of two opposite heads with the best μ, around debiased descent.

    .. math:: -\frac{4(L-1)(d+2)\big[(L+1)f_2-3(L-1)f_3\big]}{L(L+d+d\sigma^2)^2}

    For exp it is :math:`-4(L-1)(d+2)/(L(L+d+d\sigma^2)^2) < 0`; for 1 + Cx it is exactly 0. A formal series where f
    changes sign. Source: beyond the paper for exp; any f by the moments of z̄, mean z², ... up to z⁴.
    """
    d, L = task.dim, task.context
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for the small-gamma coefficient, got a matrix")
    bracket = (L + 1) * act.second - 3 * (L - 1) * act.third
    return -4 * (L - 1) * (d + 2) * bracket / (L * (L + d + d * task.noise) ** 2)


def regime(act: Activation) -> Regime:
    """Which side of f₂ = 3f₃ the activation lies on, which decides at large context; exp and 1 + Cx lie on the line.

    At finite context the line is (L+1)f₂ = 3(L-1)f₃, so that exp has a finite best scale; see
    `small_gamma_coefficient`. Source: beyond the paper.
    """
    difference = act.second - 3 * act.third
    if abs(difference) <= _EQUAL:
        return Regime.BORDERLINE
    return Regime.FINITE if difference > 0 else Regime.VANISHING


def asymptotic_gain(task: RegressionTask) -> float:
    r"""Gain of the best finite scale over debiased descent at large context, :math:`2(d+2)/L^2`, where f₂ > 3f₃.

    Source: beyond the paper.
    """
    return 2 * (task.dim + 2) / task.context**2


def best_two_heads(task: RegressionTask, act: Activation) -> ActivationOptimum:
    """Best γ and μ of two opposite heads for the exact risk; Table 1 without training.

    The risk with the best μ is minimised over C γ in [0.02, 1.5], and the minimum refined as the root of the derivative
    of a polynomial through it, good to 1e-6 in γ. Where f changes sign the risk is infinite at every γ > 0 and only
    the limit is returned. Source: beyond the paper; multihead Table 1.
    """
    step = debiased_step(task)
    limit = float(debiased_step_risk(task, step))
    if not act.nonnegative or small_gamma_coefficient(task, act) >= 0:
        return ActivationOptimum(None, None, Certified(limit, 4e-16 * limit), step, 0.0)

    def profile(log_scale: float) -> float:
        linear_term, quadratic = _two_head_terms(task, act, float(np.exp(log_scale)) / act.slope, 1.0)
        return 1 + task.noise - linear_term**2 / quadratic

    low, high = np.log(_SEARCH)
    coarse = minimize_scalar(profile, bounds=(low, high), method="bounded", options={"xatol": 1e-3}).x
    nodes = coarse + _WINDOW * np.polynomial.chebyshev.chebpts1(_WINDOW_NODES)
    fit = np.polynomial.Chebyshev.fit(nodes, [profile(node) for node in nodes], _WINDOW_NODES - 1)
    roots = fit.deriv().roots()
    real = roots[np.abs(roots.imag) < 1e-9].real
    gamma = float(np.exp(real[np.argmin(np.abs(real - coarse))])) / act.slope
    mu = best_mu(task, act, gamma)
    risk = activation_risk(task, act, gamma, mu)
    return ActivationOptimum(gamma, mu, risk, effective_step(act, gamma, mu), limit - risk.value)
