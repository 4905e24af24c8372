r"""The floor that linear attention cannot pass on the difficult task, depth (41)-(53).

A covariance polynomial p(Σ)q predicts the mean t of the selected tokens; its risk is
:math:`T - 2 a^\top h + a^\top G a`, and the floor is the minimum over coefficients. Here the polynomials are taken in
the orthonormal basis of G, so that G = I and the floors of all degrees come from one vector h. Isotropic inputs need
no sampling at all; other spectra take their moments from `sim`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betainccinv, betaincinv, binom, gamma, log_ndtr, ndtri_exp

from theory.depth.free_polynomial import bidiagonalise
from theory.depth.spectral_measure import DIRECT_MODES, SpectralMeasure, node_positions, spectral_measure
from theory.problems import Spectrum, TopKTask, as_integer, as_real
from theory.results import Certified, DomainError, FloatArray, PrecisionError
from theory.special import chi_mean, log_cosine_constant, mean_over_order_statistic, normal_top_mean

MAX_BASIS_DEGREE = 64
# Relative rounding error of the few operations that follow the quadratures.
_ROUNDING = 4e-14
# Trapezoid rule for averages over queries: first step in log t, halvings, agreement of two sums (the error of the
# finer one is about the square of it), decades (in e) to which the integrand must fall, and nodes held at a time.
_FIRST_RATIO_STEP = 0.5
_MAX_RATIO_HALVINGS = 8
_RATIO_AGREEMENT = 1e-9
_RATIO_DECADES = 45.0
_RATIO_BLOCK = 512


@dataclass(frozen=True, slots=True)
class IsotropicFloor:
    r"""Moments and floor of the difficult task with isotropic inputs.

    target_power: T = E[t^T Ω t]; alignment: E[t·q] for unit-variance inputs; floor: T - h²/G, the same for every
    degree. Each with its guaranteed absolute tolerance.
    """

    target_power: Certified
    alignment: Certified
    floor: Certified


def isotropic_floor(task: TopKTask) -> IsotropicFloor:
    r"""Exact floor for isotropic inputs, any teacher spectrum, dim, context and top_k.

    .. math:: T_1 = \frac dk + \frac{k-1}{k}\,\bar\chi^2\, E[m^2], \quad h_1 = \bar\chi^2\, E[m], \quad
              R_{irr} = \lambda\,\frac{\operatorname{tr}\Omega}{d}\Big(T_1 - \frac{h_1^2}{d}\Big)

    with :math:`\bar\chi = E|x|` and m the mean cosine beyond the (k+1)-th largest one: lengths and directions of
    isotropic tokens are independent, and given that order statistic the k selected cosines are independent draws
    from the tail. Relative tolerance about 1e-12. Source: depth (49)-(53) in closed form (beyond the paper).
    Raises DomainError where the inputs are not isotropic.
    """
    spectrum = task.spectrum
    if not spectrum.isotropic_input:
        raise DomainError(f"spectrum must have equal eigenvalues for the exact floor, got {spectrum.to_json()}")
    d, k = _dim(spectrum), task.top_k
    scale = _label_variance(spectrum) / d
    first, second = _selected_cosine_moments(d, task.context, k)
    length = chi_mean(d) ** 2
    power = d / k + (k - 1) / k * length * second.value
    alignment = length * first.value
    power_error = length * second.tolerance + _ROUNDING * power
    alignment_error = length * first.tolerance + _ROUNDING * alignment
    floor_error = power_error + 2 * alignment * alignment_error / d
    return IsotropicFloor(
        target_power=Certified(scale * power, scale * power_error),
        alignment=Certified(alignment, alignment_error),
        floor=Certified(scale * (power - alignment**2 / d), scale * floor_error),
    )


def _dim(spectrum: Spectrum) -> int:
    if spectrum.dim is None:
        raise DomainError("spectrum.dim must be finite for the difficult task, got None")
    return spectrum.dim


def _label_variance(spectrum: Spectrum) -> float:
    """Total label variance of isotropic inputs, at any dimension."""
    return float(spectral_measure(spectrum, 0).weights.sum())


def _selected_cosine_moments(dim: int, context: int, top_k: int) -> tuple[Certified, Certified]:
    """Mean of a selected cosine and mean product of two different selected cosines."""
    if top_k == context:
        return Certified(0.0, 0.0), Certified(0.0, 0.0)
    if dim == 1:
        return _sign_moments(context, top_k)

    def tail_mean(log_v: FloatArray) -> FloatArray:
        return tail_cosine(log_v, dim)

    first = mean_over_order_statistic(tail_mean, context, top_k + 1)
    second = mean_over_order_statistic(lambda log_v: tail_mean(log_v) ** 2, context, top_k + 1)
    return first, second


def tail_cosine(log_tail: npt.ArrayLike, dim: int) -> FloatArray:
    r"""Mean cosine of a uniform direction, given that it lies in the upper tail of probability v.

    .. math:: m = \frac{c_d\,(1-\tau^2)^{(d-1)/2}}{(d-1)\,v}, \qquad P(C > \tau) = v

    log_tail: log v <= 0, shape (...); dim: d >= 2. The quantile is taken from whichever of τ² and 1-τ² is small.
    Source: beyond the paper; the exact counterpart of the normal tail in depth (45).
    """
    log_v = np.asarray(log_tail, dtype=np.float64)
    half = (as_integer("dim", dim, 2) - 1) / 2
    v = np.exp(log_v)
    doubled = 2 * np.minimum(v, -np.expm1(log_v))
    square, rest = betainccinv(0.5, half, doubled), betaincinv(half, 0.5, doubled)
    log_rest = np.where(
        rest < 0.5, np.log(np.maximum(rest, np.finfo(float).tiny)), np.log1p(-np.minimum(square, 0.9))
    )
    return np.asarray(np.exp(log_cosine_constant(dim) + half * log_rest - log_v) / (2 * half))


def _sign_moments(context: int, top_k: int) -> tuple[Certified, Certified]:
    """The same for dim 1, where cosines are fair signs: sums over the binomial number of positive ones."""
    if context > 1000:
        raise DomainError(f"context must be at most 1000 at dim 1, got {context}")
    positive = np.arange(context + 1)
    weight = binom(context, positive) * 0.5**context
    total = 2 * np.minimum(positive, top_k) - top_k
    first = float(weight @ total) / top_k
    second = float(weight @ (total**2 - top_k)) / (top_k * (top_k - 1)) if top_k > 1 else 0.0
    return Certified(first, 1e-12), Certified(second, 1e-12)


def predictor_basis(spectrum: Spectrum, degree: int) -> FloatArray:
    r"""Orthonormal covariance polynomials without constant term, at every mode: ψ_j(λ_k), shape (rank, dim).

    .. math:: \sum_k \omega_k\lambda_k\,\psi_i(\lambda_k)\psi_j(\lambda_k) = \delta_{ij}, \qquad
              \psi_j(\lambda) = \lambda\,\varphi_j(\lambda), \quad j = 1..\text{rank}

    degree: R in 1..64; the rank is min(R, number of distinct eigenvalues with label variance). The Gram matrix (50)
    of monomials has condition numbers beyond 1e16 from degree 8; in this basis it is the identity.
    Source: depth (47), (50) orthogonalised.
    """
    steps = as_integer("degree", degree, 1, MAX_BASIS_DEGREE)
    measure = spectral_measure(spectrum, steps)
    if not measure.exact:
        raise DomainError("dim must be at most 4096 for the basis of the loss floor")
    # Label variances times (λ/λ_1)²: a common factor changes no direction, and the full square could overflow.
    weights = measure.weights / measure.weights.max() * measure.nodes**2
    tilted = SpectralMeasure(measure.largest, measure.nodes, weights, exact=True)
    vectors = bidiagonalise(tilted, steps - 1).right
    values = vectors / np.sqrt(measure.weights)
    return np.asarray(values[:, node_positions(measure, spectrum.input_variances())])


def gram_matrix(spectrum: Spectrum, degree: int) -> FloatArray:
    r"""Gram matrix of the monomials, :math:`G_{rs} = \operatorname{tr}(\Omega\Sigma^{r+s+1})`.

    Shape (degree, degree). For reference: never invert it, see `predictor_basis`. Source: depth (50).
    """
    powers = np.arange(1, as_integer("degree", degree, 1, MAX_BASIS_DEGREE) + 1)
    exponent = np.add.outer(powers, powers) + 1
    eigenvalues, teacher = spectrum.input_variances(), spectrum.teacher_variances()
    return np.asarray(np.sum(teacher * eigenvalues ** exponent[..., None], axis=-1))


def floors_by_degree(target_power: float, cross_moments: npt.ArrayLike) -> FloatArray:
    r"""Floors :math:`T - \sum_{j\le r} h_j^2` of degrees r = 1..R in the orthonormal basis, shape (R,).

    target_power: T; cross_moments: h_j = E[(ψ_j(Σ)q)^T Ω t], shape (R,). Never increasing in the degree.
    Source: depth (51), (53) with G = I.
    """
    h = np.asarray(cross_moments, dtype=np.float64)
    return np.asarray(target_power - np.cumsum(h**2))


def score_variance(spectrum: Spectrum, query: npt.ArrayLike) -> FloatArray:
    r"""Variance :math:`V(q) = q^\top\Sigma q` of the scores :math:`q^\top x_i` at a fixed query, shape (...).

    query: coordinates in the eigenbasis, shape (..., dim). Source: depth, display before (44).
    """
    q = np.asarray(query, dtype=np.float64)
    return np.asarray(q**2 @ spectrum.input_variances())


def conditional_token(spectrum: Spectrum, query: npt.ArrayLike, score: npt.ArrayLike) -> FloatArray:
    r"""Mean token :math:`E[x_i | s_i, q] = \frac{\Sigma q}{V(q)} s_i` of a given score, shape (..., dim).

    query: in the eigenbasis, shape (..., dim); score: s_i, shape (...). Source: depth (44).
    """
    ratio = np.asarray(score, dtype=np.float64) / score_variance(spectrum, query)
    return np.asarray(spectrum.input_variances() * np.asarray(query) * ratio[..., np.newaxis])


def score_variance_moments(spectrum: Spectrum) -> tuple[float, float]:
    r"""Mean :math:`\operatorname{tr}\Sigma^2` and variance :math:`2\operatorname{tr}\Sigma^4` of V(q).

    Source: depth, display after (45).
    """
    squares = spectrum.input_variances() ** 2
    return float(squares.sum()), float(2 * (squares**2).sum())


def score_variation(spectrum: Spectrum) -> float:
    r"""Squared relative variation :math:`2\operatorname{tr}\Sigma^4/(\operatorname{tr}\Sigma^2)^2` of V(q).

    It is 2/d for isotropic inputs, 0.3 at a = 0.5 (d = 128) and near 2 on steep spectra. The predictable component is
    proportional to Σq where it is small. Source: depth, condition before (46).
    """
    mean, variance = score_variance_moments(spectrum)
    return variance / mean**2


def mean_target(task: TopKTask, query: npt.ArrayLike) -> FloatArray:
    r"""Mean :math:`\bar t(q) = \gamma_{P,k}\,\Sigma q/\sqrt{q^\top\Sigma q}` of the target, shape (..., dim).

    Exact for tokens ranked by inner product, the paper's approximation for cosines. query: in the eigenbasis, shape
    (..., dim). Source: depth (45).
    """
    gamma = normal_top_mean(task.context, task.top_k).value
    return conditional_token(task.spectrum, query, gamma * np.sqrt(score_variance(task.spectrum, query)))


def predictable_slope(task: TopKTask) -> float:
    r"""Slope :math:`c = \gamma_{P,k}/\sqrt{\operatorname{tr}\Sigma^2}` of the predictable component c Σ q.

    Source: depth (46) and the display before it.
    """
    mean, _ = score_variance_moments(task.spectrum)
    return normal_top_mean(task.context, task.top_k).value / float(np.sqrt(mean))


def predictor_features(spectrum: Spectrum, query: npt.ArrayLike, degree: int) -> FloatArray:
    r"""Features :math:`\Phi_L(q) = [\Sigma q, \dots, \Sigma^L q]`, shape (..., dim, degree).

    query: in the eigenbasis, shape (..., dim). Source: depth (47).
    """
    powers = np.arange(1, as_integer("degree", degree, 1, MAX_BASIS_DEGREE) + 1)
    q = np.asarray(query, dtype=np.float64)
    return np.asarray(q[..., np.newaxis] * spectrum.input_variances()[:, np.newaxis] ** powers)


def coefficient_risk(
    target_power: float, cross_moments: npt.ArrayLike, gram: npt.ArrayLike, coefficients: npt.ArrayLike
) -> float:
    r"""Risk :math:`T - 2 a^\top h + a^\top G a` of given coefficients.

    target_power: T; cross_moments: h, shape (L,); gram: G, shape (L, L); coefficients: a, shape (L,).
    Source: depth (48).
    """
    h, G, a = (np.asarray(value, dtype=np.float64) for value in (cross_moments, gram, coefficients))
    return float(target_power - 2 * a @ h + a @ G @ a)


def normal_top_square(samples: int, top: int) -> Certified:
    r"""Mean square :math:`E\bar z^2` of the mean of the ``top`` largest of ``samples`` standard normals.

    .. math:: E\bar z^2 = E_z\Big[\frac{1 + z\,m(z)}{k} + \frac{k-1}{k}m(z)^2\Big], \qquad m = \frac{\varphi}{1-\Phi}

    averaged over the (k+1)-th largest value z, beyond which the k largest are independent. 1/P where all are taken.
    Source: second moment to depth (45) (beyond the paper). Raises DomainError where top > samples.
    """
    n = as_integer("samples", samples, 1)
    k = as_integer("top", top, 1, n)
    if k == n:
        return Certified(1 / n, 0.0)

    def square(log_v: FloatArray) -> FloatArray:
        z = -np.asarray(ndtri_exp(log_v))
        tail = np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_ndtr(-z))
        return np.asarray((1 + z * tail + (k - 1) * tail**2) / k)

    return mean_over_order_statistic(square, n, k + 1)


def query_ratio_means(spectrum: Spectrum, power: float) -> FloatArray:
    r"""Means :math:`E[q_k^2/V(q)^p]` over queries, mode by mode, shape (dim,), relative error 1e-11.

    .. math:: E\frac{q_k^2}{V^p} = \frac{\lambda_k}{\Gamma(p)}\int_0^\infty \frac{t^{p-1}}{1+2t\lambda_k^2}
              \prod_j\frac{1}{\sqrt{1+2t\lambda_j^2}}\,dt

    spectrum: at most 4096 modes; power: p in [0.25, 1]. In log t the integrand falls exponentially on both sides,
    where the trapezoid rule converges geometrically; the step is halved until two sums agree.
    Source: average of depth (45) over queries without replacing V(q) by its mean (beyond the paper). Raises
    DomainError outside these ranges, PrecisionError where the sums do not settle.
    """
    p = as_real("power", power, 0.25, 1)
    if spectrum.dim is None or spectrum.dim > DIRECT_MODES:
        raise DomainError(f"dim must be at most {DIRECT_MODES} for averages over queries, got {spectrum.dim}")
    eigenvalues = spectrum.input_variances() / spectrum.input_variances().max()
    squares = 2 * eigenvalues**2
    step, previous = _FIRST_RATIO_STEP, np.full(spectrum.dim, np.inf)
    for _ in range(_MAX_RATIO_HALVINGS):
        value = _ratio_sum(squares, p, step)
        if (np.abs(value - previous) <= _RATIO_AGREEMENT * value).all():
            # V is of degree 2 in the eigenvalues, q_k^2 of degree 1.
            return np.asarray(eigenvalues * value * float(spectrum.input_variances().max()) ** (1 - 2 * p))
        previous, step = value, step / 2
    raise PrecisionError(f"averages over queries did not settle to {_RATIO_AGREEMENT:g} at power {p:g}")


def _ratio_sum(squares: FloatArray, p: float, step: float) -> FloatArray:
    """Trapezoid sum of the integral in `query_ratio_means` without the factor λ_k, for squares 2 λ_j²."""
    low = -np.log(squares.sum()) - _RATIO_DECADES / p
    high = -np.log(squares.min()) + _RATIO_DECADES / (len(squares) / 2 + 1 - p)
    total = np.zeros_like(squares)
    for block in np.array_split(np.arange(low, high, step), max(1, int((high - low) / step) // _RATIO_BLOCK)):
        scaled = np.exp(block)[:, np.newaxis] * squares
        weight = np.exp(p * block - 0.5 * np.log1p(scaled).sum(axis=1))
        total += weight @ (1 / (1 + scaled))
    return np.asarray(total * step / gamma(p))


@dataclass(frozen=True, eq=False, slots=True)
class InnerProductFloor:
    r"""Moments and floors of the difficult task with tokens ranked by inner product instead of cosine.

    target_power: T; cross_moments: h_j in the orthonormal basis, shape (rank,); by_degree: floors of degree 1..rank;
    irreducible: :math:`E\|t - \bar t(q)\|_\Omega^2`, the floor of arbitrary functions of Σ and q.
    """

    target_power: float
    cross_moments: FloatArray
    by_degree: FloatArray
    irreducible: float


def inner_product_floor(task: TopKTask, degree: int) -> InnerProductFloor:
    r"""The floor where tokens are ranked by inner product, without sampling.

    .. math:: T = \frac{\operatorname{tr}\Omega\Sigma}{k}
              + \Big(E\bar z^2 - \frac1k\Big)\sum_k\omega_k\lambda_k^2 E\frac{q_k^2}{V}, \qquad
              h_j = \gamma_{P,k}\sum_k\omega_k\lambda_k\psi_j(\lambda_k) E\frac{q_k^2}{\sqrt V}

    Given q, tokens are :math:`\Sigma q\, s_i/V` plus a part independent of the score, so that everything but the
    average over q is Gaussian conditioning. degree: R in 1..64, cut at the number of distinct eigenvalues. Cosines
    favour no long tokens: for isotropic inputs this floor is 7 % above `isotropic_floor` at (128, 1024, 2).
    Relative error 1e-10. Source: depth (44), (45), (49)-(53), ranked by inner product (beyond the paper).
    """
    spectrum, k = task.spectrum, task.top_k
    basis = predictor_basis(spectrum, degree)
    eigenvalues, teacher = spectrum.input_variances(), spectrum.teacher_variances()
    slope, square = normal_top_mean(task.context, k).value, normal_top_square(task.context, k).value
    direction_power = float(teacher * eigenvalues**2 @ query_ratio_means(spectrum, 1.0))
    power = float(spectrum.label_variances().sum()) / k + (square - 1 / k) * direction_power
    cross = slope * (basis * (teacher * eigenvalues) @ query_ratio_means(spectrum, 0.5))
    return InnerProductFloor(power, cross, floors_by_degree(power, cross), power - slope**2 * direction_power)


@dataclass(frozen=True, slots=True)
class IsotropicEmpiricalFloor:
    r"""Degree-one floor in the empirical covariance S, isotropic inputs.

    alignment: :math:`E[t\cdot Sq]` and feature_power: :math:`E|Sq|^2`, both for unit-variance inputs; floor: least
    risk of :math:`a\,\beta^\top Sq`, in units of the label variance.
    """

    alignment: Certified
    feature_power: float
    floor: Certified


def isotropic_empirical_floor(task: TopKTask) -> IsotropicEmpiricalFloor:
    r"""Exact degree-one floor at finite context, where the model reads S, which holds the selected tokens.

    .. math:: E[t\cdot Sq] = \frac{\bar\chi^2}{P}\,E_\tau\Big[m\big(d\tau^2 + (P-k-1)\,d\,b_2 + (k-1)\,d\,m_2
              + d + 1\big)\Big], \qquad E|Sq|^2 = d\Big(1 + \frac{d+1}P\Big)

    with τ the (k+1)-th largest cosine, m and m_2 the first two moments of the cosine beyond it, b_2 the second moment
    below it; integration by parts gives :math:`d\,m_2 = 1 + (d-1)m\tau` and
    :math:`d\,b_2 = 1 - \frac{v}{1-v}(d-1)m\tau`. task: isotropic, dim >= 2. The floor differs from
    `isotropic_floor` by O(1/P): it is below where the selected tokens show in S (1.7 % at dim 128, context 1024, top
    2), and slightly above at larger context, where only the noise of S is left.
    Source: beyond the paper; compare depth (42), which takes S = Σ.
    Raises DomainError where the inputs are not isotropic or dim is 1.
    """
    population = isotropic_floor(task)
    d, k, P = as_integer("dim", _dim(task.spectrum), 2), task.top_k, task.context
    feature_power = d * (1 + (d + 1) / P)
    if k == P:
        return IsotropicEmpiricalFloor(Certified(0.0, 0.0), feature_power, population.floor)

    def integrand(log_v: FloatArray) -> FloatArray:
        mean, edge = tail_cosine(log_v, d), cosine_quantile(log_v, d)
        product = (d - 1) * mean * edge
        odds = np.exp(log_v) / -np.expm1(log_v)
        others = (P - k - 1) * (1 - odds * product) + (k - 1) * (1 + product)
        return np.asarray(mean * (d * edge**2 + others + d + 1))

    moment = mean_over_order_statistic(integrand, P, k + 1)
    scale = chi_mean(d) ** 2 / P
    alignment, error = scale * moment.value, scale * (moment.tolerance + _ROUNDING * moment.value)
    label_scale = _label_variance(task.spectrum) / d
    floor = population.target_power.value - label_scale * alignment**2 / feature_power
    tolerance = population.target_power.tolerance + 2 * label_scale * alignment * error / feature_power
    return IsotropicEmpiricalFloor(
        Certified(alignment, error), feature_power, Certified(floor, tolerance + _ROUNDING * floor)
    )


def cosine_quantile(log_tail: npt.ArrayLike, dim: int) -> FloatArray:
    r"""The cosine τ that a uniform direction exceeds with probability v, shape of log_tail = log v <= 0.

    dim: d >= 2. Source: beyond the paper; inverse of `theory.special.cosine_upper_tail`.
    """
    log_v = np.asarray(log_tail, dtype=np.float64)
    half = (as_integer("dim", dim, 2) - 1) / 2
    doubled = 2 * np.minimum(np.exp(log_v), -np.expm1(log_v))
    size = np.sqrt(betainccinv(0.5, half, doubled))
    return np.asarray(np.where(log_v < -np.log(2), size, -size))
