r"""The free reference: the best polynomial of given degree, depth (35)-(40), for continuous and for real spectra.

A residual r of degree L with r(0) = 1 has least risk :math:`1/\sum_{n\le L}\varphi_n(0)^2`, where the
:math:`\varphi_n` are orthonormal for the spectral measure. On a continuous power-law spectrum they are Jacobi
polynomials and everything is in closed form; on a finite or discrete spectrum they come from Golub-Kahan
bidiagonalisation of :math:`\Lambda^{1/2}` started from :math:`\sqrt{\lambda\omega}`, or at great depth from quotients
and differences. In both all quantities are products of positive numbers, so that risks far below rounding error keep
all their digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.linalg import svdvals
from scipy.special import betaln, binom, eval_jacobi, gamma, psi

from theory.depth.quotient_difference import quotients_and_differences
from theory.depth.spectral_measure import DIRECT_MODES, MAX_DEGREE, SpectralMeasure, node_positions, spectral_measure
from theory.problems import PowerLawSpectrum, Spectrum, as_depths, as_integer, as_real
from theory.results import DomainError, FloatArray, PrecisionError
from theory.special import gamma_ratio

# Beyond these arguments Gamma functions leave float64 and logarithms are used, at some loss of digits (1e-12).
_MAX_PLAIN_ZETA = 40.0
_MAX_PLAIN_LOG = 600.0
# Gram-Schmidt is repeated until a pass keeps most of the vector, which then is orthogonal to rounding; two passes do
# it almost always (Giraud, Langou, Rozloznik 2005).
_KEPT_SHARE = 0.7
_MAX_ORTHOGONALISATIONS = 5
# From this degree on, coefficients without their vectors are found faster by quotients and differences.
_VECTORS_BELOW = 256


def inverse_binomial(depth: npt.ArrayLike, zeta: float) -> FloatArray:
    r"""The Beta function :math:`B(\zeta, L+1) = \Gamma(\zeta)\Gamma(L+1)/\Gamma(L+1+\zeta)`.

    depth: L >= 0, shape (...); zeta > 0. 14 digits for zeta <= 40, else 12; underflows to 0 below 1e-308.
    Source: depth (39), the endpoint values of Jacobi polynomials.
    """
    depths = as_depths(depth)
    zeta = as_real("zeta", zeta, 0, 1e6, open_low=True)
    if zeta <= _MAX_PLAIN_ZETA and zeta * np.log(depths.max(initial=1) + zeta + 1) < _MAX_PLAIN_LOG:
        return np.asarray(gamma(zeta) / gamma_ratio(depths + 1, zeta))
    return np.asarray(np.exp(betaln(zeta, depths + 1)))


def continuum_amplitude(spectrum: PowerLawSpectrum) -> float:
    r"""Prefactor :math:`c_\lambda c_\omega/a` of risks on a continuous spectrum, in units where λ_1 = 1.

    Source: depth (31), with :math:`c_\lambda^{1-\zeta}\lambda_1^\zeta = c_\lambda`. Raises DomainError for zeta <= 0.
    """
    _ = spectrum.zeta
    return spectrum.input_scale * spectrum.teacher_scale / spectrum.input_exponent


def continuum_risk(spectrum: PowerLawSpectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""Lowest risk of a degree-``depth`` covariance polynomial on a continuous power-law spectrum.

    .. math:: R(L) = \frac{c_\lambda c_\omega}{a}\, \zeta \left[\frac{\Gamma(\zeta)\,\Gamma(L+1)}{\Gamma(L+1+\zeta)}
              \right]^2

    depth: number of layers L >= 0, shape (...). Returns the mean squared error, shape (...), not divided
    by the label variance. Valid for zeta > 0 (a > 0, a + b > 1); decays as L^(-2 zeta). A finite or discrete spectrum
    decays faster: see `finite_risk`. Source: depth (36)-(39), summed exactly; the paper gives the leading order only.
    Raises DomainError where zeta <= 0.
    """
    zeta = spectrum.zeta
    return np.asarray(continuum_amplitude(spectrum) * zeta * inverse_binomial(depth, zeta) ** 2)


def continuum_local_exponent(spectrum: PowerLawSpectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""Local decay exponent :math:`-d\log R/d\log L = 2L\,[\psi(L+1+\zeta) - \psi(L+1)]` of `continuum_risk`.

    depth: L >= 0, shape (...). Rises to 2 zeta. Source: derivative of the exact form of depth (39).
    """
    depths, zeta = as_depths(depth), spectrum.zeta
    return np.asarray(2 * depths * (psi(depths + 1 + zeta) - psi(depths + 1)))


def christoffel_sum(zeta: float, depth: npt.ArrayLike, largest: float = 1.0) -> FloatArray:
    r"""Sum of squared endpoint values of the orthonormal Jacobi polynomials, in closed form.

    .. math:: \sum_{n=0}^{L} \varphi_n(0)^2 = \frac{\lambda_1^{-\zeta}}{\zeta}
              \left[\frac{\Gamma(L+1+\zeta)}{\Gamma(\zeta)\,L!}\right]^2

    zeta > 0; depth: L >= 0, shape (...); largest: λ_1. Source: depth (39), which prints the leading order; the sum
    telescopes. Raises PrecisionError where the sum overflows.
    """
    reciprocal = inverse_binomial(depth, zeta)
    if (reciprocal**2 == 0).any():
        raise PrecisionError("the Christoffel sum exceeds 1e308 here: use continuum_risk, its reciprocal")
    return np.asarray(largest**-zeta / (zeta * reciprocal**2))


def jacobi_basis(degree: int, zeta: float, eigenvalue: npt.ArrayLike, largest: float = 1.0) -> FloatArray:
    r"""Orthonormal polynomial of the weight :math:`\lambda^{\zeta-1}` on [0, λ_1].

    .. math:: \varphi_n(\lambda) = \sqrt{\frac{2n+\zeta}{\lambda_1^\zeta}}\; P_n^{(\zeta-1,0)}(1 - 2\lambda/\lambda_1)

    degree: n >= 0, kept an integer (float degrees lose the recurrence); eigenvalue: λ, shape (...).
    Source: depth (38).
    """
    n = as_integer("degree", degree, 0, 10**6)
    zeta = as_real("zeta", zeta, 0, 1e6, open_low=True)
    x = 1 - 2 * np.asarray(eigenvalue, dtype=np.float64) / largest
    return np.asarray(np.sqrt((2 * n + zeta) / largest**zeta) * eval_jacobi(n, zeta - 1, 0.0, x))


def continuum_residual(zeta: float, depth: int, eigenvalue: npt.ArrayLike, largest: float = 1.0) -> FloatArray:
    r"""Optimal residual polynomial on a continuous spectrum.

    .. math:: r_L(\lambda) = \frac{P_L^{(\zeta,0)}(1 - 2\lambda/\lambda_1)}{\binom{L+\zeta}{L}}
              = {}_2F_1(-L, L+\zeta+1; \zeta+1; \lambda/\lambda_1)

    zeta > 0; depth: L >= 0; eigenvalue: λ in [0, λ_1], shape (...). One at λ = 0.
    Source: depth (37), (38) summed by Christoffel-Darboux (beyond the paper).
    """
    n = as_integer("depth", depth, 0, 10**6)
    zeta = as_real("zeta", zeta, 0, 1e6, open_low=True)
    x = 1 - 2 * np.asarray(eigenvalue, dtype=np.float64) / largest
    if not (np.abs(x) <= 1).all():
        raise DomainError(f"eigenvalue must lie in [0, {largest:g}]")
    return np.asarray(eval_jacobi(n, zeta, 0.0, x) / binom(n + zeta, n))


def discrete_exponent(spectrum: PowerLawSpectrum) -> float:
    r"""Decay exponent :math:`(2+a)\zeta` of the free risk on the discrete spectrum of infinitely many modes.

    Roots of the residual remove the leading eigenvalues one by one, so a discrete spectrum is learned faster than
    the continuum's 2 zeta. Source: beyond the paper; compare depth (40).
    """
    return (2 + spectrum.input_exponent) * spectrum.zeta


@dataclass(frozen=True, eq=False, slots=True)
class Bidiagonal:
    r"""Golub-Kahan coefficients of a spectral measure: :math:`\Lambda^{1/2} V = U B` with B upper bidiagonal.

    total: label variance; diagonal ρ_1..ρ_m and superdiagonal σ_1..σ_m of B, positive, for λ_1 = 1, shape (m,);
    right: the vectors V, rows, shape (m + 1, n), or (0, n) where they were not asked for; largest: λ_1; complete:
    whether a degree was asked for that reaches the number of nodes, so that it has no risk.
    """

    total: float
    diagonal: FloatArray
    superdiagonal: FloatArray
    right: FloatArray
    largest: float
    complete: bool

    @property
    def steps(self) -> int:
        """Number of steps m taken."""
        return len(self.diagonal)


def bidiagonalise(measure: SpectralMeasure, steps: int) -> Bidiagonal:
    r"""Golub-Kahan bidiagonalisation of :math:`\Lambda^{1/2}` from :math:`\sqrt{\lambda\omega}`, reorthogonalised.

    measure: n nodes; steps: m, cut at n - 1, where the Krylov space is exhausted. Cost O(n m²). The vectors U carry
    the orthogonal polynomials of the measure, V those of λ times the measure, shifted.
    Source: computes the recurrence behind depth (36), (37) for any spectrum; Golub and Kahan 1965.
    """
    count = len(measure.nodes)
    taken = min(steps, count - 1)
    root = np.sqrt(measure.nodes)
    left, right = np.zeros((taken, count)), np.zeros((taken + 1, count))
    diagonal, superdiagonal = np.zeros(taken), np.zeros(taken)
    start = np.sqrt(measure.weights / measure.weights.max())
    right[0] = start / np.linalg.norm(start)
    for i in range(taken):
        left[i], diagonal[i] = _next_direction(root * right[i], left[:i])
        right[i + 1], superdiagonal[i] = _next_direction(root * left[i], right[: i + 1])
    complete = measure.exact and taken == count - 1 and steps > taken
    return Bidiagonal(float(measure.weights.sum()), diagonal, superdiagonal, right, measure.largest, complete)


def bidiagonal_coefficients(measure: SpectralMeasure, steps: int) -> Bidiagonal:
    """`bidiagonalise` without the vectors where that is faster: at great depth in O(n m).

    Source: as `bidiagonalise`.
    """
    if steps < _VECTORS_BELOW:
        return bidiagonalise(measure, steps)
    descending, group = np.unique(-measure.nodes, return_inverse=True)
    taken = min(steps, len(descending) - 1)
    weights = np.bincount(group.ravel(), measure.weights).astype(np.float64)
    diagonal, superdiagonal = quotients_and_differences(-descending, weights, taken)
    complete = measure.exact and taken == len(descending) - 1 and steps > taken
    no_vectors = np.zeros((0, len(descending)))
    return Bidiagonal(float(weights.sum()), diagonal, superdiagonal, no_vectors, measure.largest, complete)


def _next_direction(vector: FloatArray, basis: FloatArray) -> tuple[FloatArray, float]:
    norm = float(np.linalg.norm(vector))
    for _ in range(_MAX_ORTHOGONALISATIONS):
        before = norm
        vector = vector - basis.T @ (basis @ vector)
        norm = float(np.linalg.norm(vector))
        if norm > _KEPT_SHARE * before:
            return vector / norm, norm
    raise PrecisionError(
        "two eigenvalues differ by less than rounding can resolve: merge them, adding their teacher variances"
    )


def _endpoint_squares(bidiagonal: Bidiagonal) -> FloatArray:
    """Squares of φ_n(0) times the total label variance, n = 0..m: products of ratios (ρ_i/σ_i)², all positive."""
    with np.errstate(over="ignore"):  # an overflow means a risk below 1e-308, returned as zero
        return np.concatenate([[1.0], np.cumprod((bidiagonal.diagonal / bidiagonal.superdiagonal) ** 2)])


def finite_risk(spectrum: Spectrum, depth: npt.ArrayLike, *, leading_modes: int = 1024) -> FloatArray:
    r"""Lowest risk of a degree-``depth`` covariance polynomial on the given spectrum, discrete modes included.

    .. math:: R(L) = \min_{\deg r\le L,\; r(0)=1} \sum_k \lambda_k\omega_k\, r(\lambda_k)^2
              = \Big[\sum_{n=0}^{L}\varphi_n(0)^2\Big]^{-1}

    spectrum: arrays, a power law of any dim up to 10^18, or infinitely many modes (dim None); cost does not grow
    with dim. depth: L from 0 to 4096, shape (...). Returns mean squared errors of shape (...), not divided by
    the label variance, with relative error about 1e-14 also where they are far below rounding; never increasing in
    depth, and zero from depth = number of distinct eigenvalues. leading_modes: see `spectral_measure`.
    Source: depth (30), (35)-(37) for the sum itself instead of its continuum limit.
    """
    depths = as_depths(depth)
    deepest = as_integer("depth", float(depths.max(initial=0)), 0, MAX_DEGREE)
    risks = _risks_to_depth(spectrum, deepest, leading_modes)
    return np.asarray(risks[np.minimum(depths.astype(np.int64), len(risks) - 1)])


@lru_cache(maxsize=64)
def _risks_to_depth(spectrum: Spectrum, deepest: int, leading_modes: int) -> FloatArray:
    """Free risks at depths 0..deepest (shorter where the risk has reached zero), read-only."""
    bidiagonal = bidiagonal_coefficients(spectral_measure(spectrum, deepest, leading_modes=leading_modes), deepest)
    risks = bidiagonal.total / np.cumsum(_endpoint_squares(bidiagonal))
    if bidiagonal.complete:
        risks = np.append(risks, 0.0)
    risks.flags.writeable = False
    return np.asarray(risks)


def residual_roots(spectrum: Spectrum, depth: int) -> FloatArray:
    r"""Roots of the optimal residual, ascending, shape (depth,): Gauss nodes of the measure λ·λω.

    They are squared singular values of the bidiagonal matrix: real, simple and inside (0, λ_1). At depth = number of
    distinct eigenvalues they are the eigenvalues. depth: L >= 1, at most the number of distinct eigenvalues.
    Source: roots of depth (37) (beyond the paper). Raises DomainError for a larger depth.
    """
    steps = as_integer("depth", depth, 1, MAX_DEGREE)
    measure = spectral_measure(spectrum, steps)
    if measure.exact and steps >= len(measure.nodes):
        if steps > len(measure.nodes):
            raise DomainError(
                f"depth must be at most the number of distinct eigenvalues ({len(measure.nodes)}), got {steps}"
            )
        return np.asarray(measure.largest * measure.nodes[::-1])
    bidiagonal = bidiagonal_coefficients(measure, steps)
    matrix = np.zeros((steps, steps + 1))
    index = np.arange(steps)
    matrix[index, index], matrix[index, index + 1] = bidiagonal.diagonal, bidiagonal.superdiagonal
    return np.asarray(bidiagonal.largest * np.sort(svdvals(matrix)) ** 2)


def layer_steps(spectrum: Spectrum, depth: int) -> FloatArray:
    r"""Layer scalars that attain the free optimum: step of layer ℓ is 1/root_ℓ, shape (depth,), descending.

    With B_ℓ = κ_ℓ I and κ_ℓ v / L = 1/root_ℓ the linear-attention model has residual Π(1 - λ/root_ℓ), so the free
    reference is reachable by the architecture. Once leading modes are removed (roots on top of eigenvalues), the
    product amplifies the rounding of each step: at dim 300, a = b = 1 float64 steps stop helping near depth 14.
    Source: beyond the paper; compare depth (27), (33).
    """
    return 1 / residual_roots(spectrum, depth)


def product_residual(steps: npt.ArrayLike, eigenvalue: npt.ArrayLike) -> FloatArray:
    r"""Residual :math:`r(\lambda) = \prod_\ell (1 - s_\ell\lambda)` of layer steps s, at eigenvalues of any shape.

    Multiplied in logarithms, so that factors of very different size neither overflow nor underflow on the way.
    Source: depth (24) with B_ℓ = κ_ℓ I, m_r = v^r and s_ℓ = κ_ℓ v/L.
    """
    s = np.asarray(steps, dtype=np.float64)
    factors = 1 - np.multiply.outer(np.asarray(eigenvalue, dtype=np.float64), s)
    with np.errstate(divide="ignore"):
        size = np.exp(np.log(np.abs(factors)).sum(axis=-1))
    return np.asarray(size * np.where((factors < 0).sum(axis=-1) % 2, -1.0, 1.0))


def mode_residuals(spectrum: Spectrum, depth: int) -> FloatArray:
    r"""Optimal residual at every mode of a finite spectrum.

    .. math:: r_L(\lambda_k) = \sum_n\varphi_n(0)\,\varphi_n(\lambda_k) \Big/ \sum_n\varphi_n(0)^2

    spectrum: at most 4096 modes, all with label variance > 0; depth: L >= 0. Returns shape (dim,), in the order of
    the spectrum; the error of :math:`\sqrt{\lambda_k\omega_k}\,r_L(\lambda_k)` is about 1e-15 of the root of the
    risk.
    Summed in the orthonormal basis: the product over roots cannot represent modes that are already removed.
    Source: depth (37). Raises DomainError for larger spectra or modes without label variance.
    """
    steps = as_integer("depth", depth, 0, MAX_DEGREE)
    if spectrum.dim is None or spectrum.dim > DIRECT_MODES:
        raise DomainError(f"dim must be at most {DIRECT_MODES} to list every mode, got {spectrum.dim}")
    if not (spectrum.label_variances() > 0).all():
        raise DomainError("every mode must have label variance > 0 for its residual to be determined")
    measure = spectral_measure(spectrum, steps)
    bidiagonal = bidiagonalise(measure, steps)
    if bidiagonal.complete:
        return np.zeros(spectrum.dim)
    endpoint = np.sqrt(_endpoint_squares(bidiagonal)) * (-1.0) ** np.arange(bidiagonal.steps + 1)
    residual = endpoint @ bidiagonal.right / (endpoint @ endpoint)
    residual *= np.sqrt(measure.weights.sum() / measure.weights)
    return np.asarray(residual[node_positions(measure, spectrum.input_variances())])


def polynomial_coefficients(spectrum: Spectrum, depth: int) -> FloatArray:
    r"""Coefficients a_1..a_L of the best predictor :math:`p_L(\lambda) = \sum_{r=1}^L a_r\lambda^r`, shape (depth,).

    .. math:: a_r = (-1)^{r-1} e_r(1/\text{root}_1, \dots, 1/\text{root}_L)

    Elementary symmetric functions of positive numbers add without cancellation. Coefficients grow fast: evaluate
    with `mode_residuals` instead. Source: depth (35). Raises PrecisionError where they overflow.
    """
    symmetric = np.zeros(as_integer("depth", depth, 1, MAX_DEGREE) + 1)
    symmetric[0] = 1
    with np.errstate(over="ignore"):  # refused below
        for step in layer_steps(spectrum, depth):
            symmetric[1:] += step * symmetric[:-1]
    if not np.isfinite(symmetric).all():
        raise PrecisionError(f"the coefficients at depth {depth} exceed 1e308: use layer_steps instead")
    return np.asarray(symmetric[1:] * (-1.0) ** np.arange(depth))


def local_exponents(depth: npt.ArrayLike, risk: npt.ArrayLike) -> FloatArray:
    r"""Exponents between neighbouring depths, :math:`-\log(R_{i+1}/R_i)/\log(L_{i+1}/L_i)`, shape (n - 1,).

    depth: increasing, > 0, shape (n,); risk: > 0, shape (n,). Source: local slope of the laws in depth (40).
    Raises DomainError where a depth or a risk is not positive, or depths do not increase.
    """
    depths, risks = as_depths(depth), np.asarray(risk, dtype=np.float64)
    if depths.ndim != 1 or depths.shape != risks.shape or (depths <= 0).any() or (np.diff(depths) <= 0).any():
        raise DomainError("local exponents need increasing depths > 0 and one risk per depth")
    if not (risks > 0).all():
        raise DomainError("local exponents need risks > 0: leave out depths where the risk has reached zero")
    return np.asarray(-np.diff(np.log(risks)) / np.diff(np.log(depths)))
