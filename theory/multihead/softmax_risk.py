r"""The exact population risk of multi-head softmax attention, at any number of heads, dimension and context.

The predictor (3.2) sees the tokens through their scores :math:`z_\ell = x_\ell^\top x_q/r`, r = \|x_q\| ~ χ_d. With
the f's of `attention_moments` and κ = (d-1)/d + σ²,

.. math:: \mathcal L(\omega,\mu) = 1 + \sigma^2 - 2\sum_h\mu_h c(\omega_h) + \sum_{hk}\mu_h\mu_k K(\omega_h,\omega_k),
          \quad c(\omega) = \tfrac1d E[r f_1(\omega r)], \quad
          K(\omega,\omega') = E\big[\tfrac1d f_2(\omega r,\omega' r) + \kappa f_3(\omega r,\omega' r)\big].

Beyond the paper, which approximates this loss by (4.1). Risks are against the noisy label, as in (2.5); the tokens are
isotropic.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import gammainccinv, gammaincinv

from theory.multihead.attention_moments import single_slope_moments, slope_pair_moments
from theory.multihead.gauss_rules import discretised_gauss_rule
from theory.problems import MAX_SCALE, RegressionTask, as_integer
from theory.results import Certified, DomainError, FloatArray, IntArray, PrecisionError

# Lengths of the query beyond which less than this probability lies.
_LENGTH_TAIL = 1e-18
# Nodes in the length of the query: while |omega| stays below the limit this many hold 1e-12 (checked by doubling); and
# at any omega, in high dimension, where the length hardly varies, a constant and a multiple of 1/dim.
_LENGTH_NODES = (
    (0.06, 9),
    (0.15, 12),
    (0.3, 16),
    (0.5, 21),
    (0.75, 27),
    (1.0, 31),
    (1.5, 38),
    (2.0, 44),
    (np.inf, 52),
)
_NARROW_NODES = (9.0, 200.0)
# Points of the fine rule that they are made from.
_LENGTH_POINTS = 500
# Every node contributes its moments to this accuracy of the whole, with steps from these multiples of the finest.
_NODE_ACCURACY = 1e-14
_TIERS = (1.0, 0.8, 0.6, 0.4)
# Derivatives converge later, so their light nodes are coarsened by less.
_DERIVATIVE_LIGHTNESS = 0.6
# The tolerance compares with a grid coarser by this factor, whose error is far larger than the reported value's.
_COARSE = 0.85
# Rounding of the moments, relative to the sum of absolute terms of the risk.
_ROUNDING = 1e-13
# Below this ratio to the largest, eigenvalues of the quadratic form are lost in the error of its entries.
_SINGULAR = 1e-11


@dataclass(frozen=True, slots=True)
class RiskCoefficients:
    r"""The risk as a quadratic in μ: :math:`\sigma^2 + 1 - 2c^\top\mu + \mu^\top K\mu`.

    omega: shape (h,); linear: c, shape (h,); quadratic: K, shape (h, h); then their derivatives, where asked for:
    linear_1, linear_2: c', c'' per head; diagonal_1, diagonal_2: total derivatives of K(ω, ω) per head; row_1, row_2:
    ∂K(ω_h, ω_k)/∂ω_h and its second, with h ≠ k, zero on the diagonal; mixed: ∂²K/∂ω_h∂ω_k, zero on the diagonal.
    """

    omega: FloatArray
    linear: FloatArray
    quadratic: FloatArray
    linear_1: FloatArray
    linear_2: FloatArray
    diagonal_1: FloatArray
    diagonal_2: FloatArray
    row_1: FloatArray
    row_2: FloatArray
    mixed: FloatArray


@dataclass(frozen=True, slots=True)
class RiskDerivatives:
    """Value, gradient, shape (2h,), and Hessian, shape (2h, 2h), of the risk in (omega, mu) stacked."""

    value: float
    gradient: FloatArray
    hessian: FloatArray


def query_length_rule(dim: int, largest_omega: float, fineness: float = 1.0) -> tuple[FloatArray, FloatArray]:
    r"""Nodes r and weights, shape (n,) each, of a mean over the length of a standard normal query, r ~ χ_d.

    The Gauss rule of that density in r, not in r²/2: the softmax bends at r ~ 1/ω, where Laguerre nodes are sparse.
    dim: d >= 1; largest_omega: of the heads' \|ω\|. Source: beyond the paper.
    """
    count = float(next(n for limit, n in _LENGTH_NODES if largest_omega <= limit))
    count = min(count * (1 + 0.15 / dim), _NARROW_NODES[0] + _NARROW_NODES[1] / dim)
    return _length_rule(dim, int(np.ceil(count * fineness)))


@functools.lru_cache(maxsize=64)
def _length_rule(dim: int, count: int) -> tuple[FloatArray, FloatArray]:
    low = np.sqrt(2 * gammaincinv(dim / 2, _LENGTH_TAIL))
    high = np.sqrt(2 * gammainccinv(dim / 2, _LENGTH_TAIL))
    x, weight = np.polynomial.legendre.leggauss(_LENGTH_POINTS)
    r = low + (high - low) * (1 + x) / 2
    log_density = (dim - 1) * np.log(r) - r * r / 2
    return discretised_gauss_rule(r, weight * np.exp(log_density - log_density.max()), count)


def softmax_risk(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> Certified:
    r"""Exact population risk :math:`\mathcal L(\omega, \mu)` of one model, with the tolerance that it was computed to.

    omega, mu: one number per head, shape (h,), any h >= 1. The tolerance is the distance to a coarser grid plus
    rounding, which grows with \|μ\|² where heads cancel. Exact limits: 1 + σ² + \|Σμ\|²(1+σ²)/L as ω → 0.
    Any heads with \|ω\| up to 3 are in range, for dim up to 1000 and context up to 10^5: 1e-10 or better, relative.
    Source: beyond the paper; multihead (2.5) with (3.2). Raises DomainError where the covariance is not
    the identity or shapes differ, PrecisionError where \|ω\| \|x_q\| leaves the range of the quadrature.
    """
    w, m = _heads(omega, mu)
    if w.ndim != 1:
        raise DomainError(f"omega must hold one number per head, got shape {w.shape}; see softmax_risks for grids")
    value, fine = _risk(task, w[np.newaxis], m[np.newaxis], 1.0)
    coarse, _ = _risk(task, w[np.newaxis], m[np.newaxis], _COARSE)
    return Certified(value[0], abs(value[0] - coarse[0]) + _ROUNDING * fine[0])


def softmax_risks(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> FloatArray:
    r"""Exact risks over grids: omega and mu broadcast to shape (..., h); returns shape (...).

    Each distinct pair of ω's is integrated once, however many models share it. Error 1e-11 of
    :math:`\sum_{hk}|\mu_hK_{hk}\mu_k|`. Source: as `softmax_risk`.
    """
    w, m = np.broadcast_arrays(*_heads(omega, mu))
    shape, heads = w.shape[:-1], w.shape[-1]
    return _risk(task, w.reshape(-1, heads), m.reshape(-1, heads), 1.0)[0].reshape(shape)


def _heads(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    w, m = np.asarray(omega, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    if w.ndim == 0 or m.ndim == 0 or w.shape[-1] != m.shape[-1] or w.shape[-1] == 0:
        raise DomainError(f"omega and mu must hold one number per head each, got shapes {w.shape} and {m.shape}")
    for name, values in (("omega", w), ("mu", m)):
        if not np.isfinite(values).all():
            raise DomainError(f"{name} must be finite, got {float(values[~np.isfinite(values)][0])!r}")
        if np.abs(values).max(initial=0) > MAX_SCALE:
            largest = float(values.flat[np.abs(values).argmax()])
            raise DomainError(f"{name} must lie in [-{MAX_SCALE:g}, {MAX_SCALE:g}], got {largest!r}")
    return w, m


def _check_isotropic(task: RegressionTask) -> None:
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for the exact softmax risk, got a matrix")


def _risk(task: RegressionTask, omega: FloatArray, mu: FloatArray, fineness: float) -> tuple[FloatArray, FloatArray]:
    """Risks of models omega, mu, shape (n, h) each, and the sums of the absolute terms that make them up."""
    _check_isotropic(task)
    n, heads = omega.shape
    r, weight = query_length_rule(task.dim, float(np.abs(omega).max()), fineness)
    kernel, linear = _single_kernel(task, np.abs(omega), r, weight, 0, fineness)
    total = 1 + task.noise - 2 * np.sum(mu * np.sign(omega) * linear[0], axis=1) + np.sum(mu**2 * kernel[0], axis=1)
    size = 1 + task.noise + np.sum(mu**2 * kernel[0], axis=1)
    first, second = np.triu_indices(heads, 1)
    if first.size:
        pairs = _distinct_pairs(omega[:, first], omega[:, second])
        values = _pair_kernel(task, pairs[0], pairs[1], r, weight, 0, fineness)[0][pairs[2]].reshape(n, -1)
        terms = 2 * mu[:, first] * mu[:, second] * values
        total, size = total + terms.sum(axis=1), size + np.abs(terms).sum(axis=1)
    return total, size


def _distinct_pairs(left: FloatArray, right: FloatArray) -> tuple[FloatArray, FloatArray, npt.NDArray[np.intp]]:
    """Distinct unordered pairs up to a common sign, under which K is invariant, and where each pair is found."""
    a, b = left.ravel(), right.ravel()
    swap = np.abs(a) > np.abs(b)
    small, large = np.where(swap, b, a), np.where(swap, a, b)
    flip = np.where(large < 0, -1.0, 1.0)
    canonical, inverse = np.unique(np.stack([small * flip, large * flip], axis=1), axis=0, return_inverse=True)
    return canonical[:, 0], canonical[:, 1], np.asarray(inverse).ravel()


def _single_kernel(
    task: RegressionTask, omega: FloatArray, r: FloatArray, weight: FloatArray, order: int, fineness: float
) -> tuple[list[FloatArray], list[FloatArray]]:
    """K(ω, ω) and c(ω) with their derivatives in ω, for an array of ω's."""
    distinct, inverse = np.unique(omega, return_inverse=True)
    inverse = np.asarray(inverse).reshape(omega.shape)
    a = np.multiply.outer(distinct, r)
    f2, f3 = np.empty((2, order + 1, *a.shape))
    for nodes, relative in _tiers(weight, order):
        part = single_slope_moments(a[:, nodes].ravel(), task.context, order, relative * fineness)
        f2[:, :, nodes], f3[:, :, nodes] = part.reshape(2, order + 1, distinct.size, nodes.size)
    d = task.dim
    kernel = [((f2[n] / d + _kappa(task) * f3[n]) * r**n) @ weight for n in range(order + 1)]
    f1 = [a * (1 - f3[0])]
    if order > 0:
        f1.append(1 - f3[0] - a * f3[1])
    if order > 1:
        f1.append(-2 * f3[1] - a * f3[2])
    linear = [(f * r ** (n + 1)) @ weight / d for n, f in enumerate(f1)]
    return [k[inverse] for k in kernel], [c[inverse] for c in linear]


def _pair_kernel(
    task: RegressionTask,
    left: FloatArray,
    right: FloatArray,
    r: FloatArray,
    weight: FloatArray,
    order: int,
    fineness: float,
) -> list[FloatArray]:
    """K(ω, ω') and its partial derivatives, in the order of `slope_pair_moments`, shape (n,) each."""
    a, b = np.multiply.outer(left, r), np.multiply.outer(right, r)
    size = (1, 3, 6)[order]
    f2, f3 = np.empty((2, size, *a.shape))
    for nodes, relative in _tiers(weight, order):
        part = slope_pair_moments(a[:, nodes].ravel(), b[:, nodes].ravel(), task.context, order, relative * fineness)
        f2[:, :, nodes], f3[:, :, nodes] = part.reshape(2, size, left.size, nodes.size)
    powers = (0, 1, 1, 2, 2, 2)[:size]
    return [((x / task.dim + _kappa(task) * y) * r**n) @ weight for n, x, y in zip(powers, f2, f3, strict=True)]


def _tiers(weight: FloatArray, order: int) -> Iterator[tuple[IntArray, float]]:
    """Nodes by weight, with the fineness each needs: half the steps square the error, so light nodes need less."""
    lightness = np.log10(np.maximum(weight, 1e-300)) / np.log10(_NODE_ACCURACY)
    relative = np.clip(1 - (_DERIVATIVE_LIGHTNESS if order else 1.0) * lightness, _TIERS[-1], 1)
    tier = np.searchsorted(-np.array(_TIERS), -relative, side="right") - 1
    for number in np.unique(tier):
        yield np.flatnonzero(tier == number), _TIERS[number]


def _kappa(task: RegressionTask) -> float:
    return (task.dim - 1) / task.dim + task.noise


def risk_coefficients(
    task: RegressionTask, omega: npt.ArrayLike, order: int = 0, fineness: float = 1.0
) -> RiskCoefficients:
    r"""Coefficients c and K of the heads ``omega``, shape (h,), with derivatives in ω up to ``order`` (0, 1 or 2).

    Derivatives beyond ``order`` are zero arrays. fineness: divides the steps of all quadratures, to check them.
    Source: beyond the paper. Raises DomainError where the covariance is not the identity.
    """
    w, _ = _heads(omega, omega)
    _check_isotropic(task)
    heads = w.size
    r, weight = query_length_rule(task.dim, float(np.abs(w).max()), fineness)
    kernel, linear = _single_kernel(task, w, r, weight, order, fineness)
    kernel += [np.zeros(heads)] * (2 - order)
    linear += [np.zeros(heads)] * (2 - order)
    first, second = np.triu_indices(heads, 1)
    pair = _pair_kernel(task, w[first], w[second], r, weight, order, fineness)
    pair += [np.zeros(first.size)] * (6 - len(pair))
    quadratic, row_1, row_2, mixed = (np.zeros((heads, heads)) for _ in range(4))
    for matrix, upper, lower in ((quadratic, 0, 0), (row_1, 1, 2), (row_2, 3, 5), (mixed, 4, 4)):
        matrix[first, second], matrix[second, first] = pair[upper], pair[lower]
    np.fill_diagonal(quadratic, kernel[0])
    return RiskCoefficients(w, linear[0], quadratic, linear[1], linear[2], kernel[1], kernel[2], row_1, row_2, mixed)


def risk_derivatives(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> RiskDerivatives:
    r"""Exact risk with its gradient and Hessian in (ω, μ), stacked in this order, for one model of h heads.

    omega, mu: shape (h,). Source: beyond the paper. Errors as in `softmax_risk`.
    """
    w, m = _heads(omega, mu)
    return assemble_derivatives(task, risk_coefficients(task, w, 2), m)


def assemble_derivatives(task: RegressionTask, coefficients: RiskCoefficients, mu: FloatArray) -> RiskDerivatives:
    r"""Risk, gradient and Hessian at ``mu`` from coefficients with derivatives of order 2.

    mu: shape (h,). Source: derivatives of the quadratic form in `RiskCoefficients`.
    """
    q, m, h = coefficients, mu, mu.size
    value = 1 + task.noise - 2 * q.linear @ m + m @ q.quadratic @ m
    slope = q.row_1 @ m
    by_omega = -2 * m * q.linear_1 + m**2 * q.diagonal_1 + 2 * m * slope
    by_mu = -2 * q.linear + 2 * q.quadratic @ m
    hessian = np.zeros((2 * h, 2 * h))
    curvature = -2 * m * q.linear_2 + m**2 * q.diagonal_2 + 2 * m * (q.row_2 @ m)
    hessian[:h, :h] = 2 * np.outer(m, m) * q.mixed + np.diag(curvature)
    cross = 2 * m[:, np.newaxis] * q.row_1 + np.diag(-2 * q.linear_1 + 2 * m * q.diagonal_1 + 2 * slope)
    hessian[:h, h:], hessian[h:, :h] = cross, cross.T
    hessian[h:, h:] = 2 * q.quadratic
    return RiskDerivatives(float(value), np.concatenate([by_omega, by_mu]), hessian)


def optimal_mu(task: RegressionTask, omega: npt.ArrayLike) -> tuple[FloatArray, Certified]:
    r"""The μ with the least exact risk at given ω, :math:`\mu = K^{-1}c`, and that risk, :math:`1+\sigma^2-c^\top\mu`.

    omega: shape (h,). Heads of equal ω share their weight equally. Source: beyond the paper; compare
    (4.6). Raises PrecisionError where distinct ω's are so close that K is singular to its own error: see
    `merged_risk` for the limit.
    """
    w, _ = _heads(omega, omega)
    if w.ndim != 1:
        raise DomainError(f"omega must hold one number per head, got shape {w.shape}")
    distinct, inverse, counts = np.unique(w, return_inverse=True, return_counts=True)
    coefficients = risk_coefficients(task, distinct)
    mu = _solve_mu(coefficients.quadratic, coefficients.linear)
    spread = (mu / counts)[np.asarray(inverse).ravel()]
    return spread, softmax_risk(task, w, spread)


def _solve_mu(quadratic: FloatArray, linear: FloatArray) -> FloatArray:
    scale = np.sqrt(np.diag(quadratic))
    values = np.linalg.eigvalsh(quadratic / np.outer(scale, scale))
    if values[0] <= _SINGULAR * values[-1]:
        raise PrecisionError(
            "the heads' omegas are too close for their weights to be told apart: "
            f"the quadratic form has a condition number of {values[-1] / max(values[0], 1e-300):.1e}"
        )
    return np.asarray(np.linalg.solve(quadratic, linear))


def small_gamma_risk(task: RegressionTask, gamma: npt.ArrayLike) -> FloatArray:
    r"""Exact risk of heads ±γ with the best ±μ, to order γ², shape of γ.

    .. math:: 1+\sigma^2-\frac{L-1}{L}\eta^* - \frac{4(L-1)(d+2)}{L(L+d(1+\sigma^2))^2}\gamma^2 + O(\gamma^4),
              \quad \eta^* = \frac{L}{L+d(1+\sigma^2)}

    The coefficient is negative: a finite γ beats debiased gradient descent at every d and L > 1.
    Source: beyond the paper.
    """
    _check_isotropic(task)
    d, L, noise = task.dim, task.context, task.noise
    g = np.asarray(gamma, dtype=np.float64)
    total = L + d * (1 + noise)
    return np.asarray(1 + noise - (L - 1) / total - 4 * (L - 1) * (d + 2) / (L * total**2) * g * g)


@dataclass(frozen=True, slots=True)
class MergedModel:
    r"""A limit of softmax heads in which a pair merges, :math:`\mu\,p(\omega_0) + \nu\,p'(\omega_0)`, with plain heads.

    omega: plain heads then ω₀, shape (k + 1,); mu: their weights; slope_weight: ν, the limit of (μ_1 - μ_2)s/2 for
    heads ω₀ ± s/2; risk: exact, with the best weights.
    """

    omega: FloatArray
    mu: FloatArray
    slope_weight: float
    risk: float


def merged_risk(task: RegressionTask, plain: npt.ArrayLike, merged: float, fineness: float = 1.0) -> MergedModel:
    r"""Least exact risk of plain heads with one pair merged at ω₀, in the limit where its μ's tend to ±∞.

    plain: ω of the plain heads, shape (k,), k >= 0; merged: ω₀. At ω₀ = 0 the pair is debiased gradient descent.
    Exact: the merged pair's moments are the derivatives of K and c. fineness: as in `risk_coefficients`; the solution
    for the weights magnifies quadrature errors, from 1e-12 at 1 to 1e-9 at 0.8. Source: beyond the paper. Raises
    DomainError for a fineness below 0.8, where the risk would be wrong in digits that matter.
    """
    _check_isotropic(task)
    if not fineness >= _SEARCH_FINENESS:
        raise DomainError(f"fineness must be at least {_SEARCH_FINENESS} for a merged pair, got {fineness!r}")
    w = np.append(np.asarray(plain, dtype=np.float64), merged)
    k = w.size - 1
    r, weight = query_length_rule(task.dim, float(np.abs(w).max()), fineness)
    own, linear_plain = _single_kernel(task, w, r, weight, 0, fineness)
    _, linear_merged = _single_kernel(task, w[k:], r, weight, 1, fineness)
    pair = _pair_kernel(task, w[k:], w[k:], r, weight, 2, fineness)
    K = np.zeros((k + 2, k + 2))
    first, second = np.triu_indices(k, 1)
    if first.size:
        K[first, second] = _pair_kernel(task, w[first], w[second], r, weight, 0, fineness)[0]
    if k:
        mixed = _pair_kernel(task, w[:k], np.full(k, merged), r, weight, 1, fineness)
        K[:k, k], K[:k, k + 1] = mixed[0], mixed[2]
    K[k, k + 1] = pair[1][0]
    K = K + K.T
    np.fill_diagonal(K, [*own[0], pair[4][0]])
    c = np.array([*linear_plain[0], linear_merged[1][0]])
    weights = _solve_mu(K, c)
    return MergedModel(w, weights[:-1], float(weights[-1]), float(1 + task.noise - c @ weights))


@dataclass(frozen=True, slots=True)
class SoftmaxOptimum:
    r"""The best heads found, with a certificate of stationarity.

    attained: whether the infimum is a finite model (one or two heads) or a limit in which a pair merges (mostly, for
    three or four). omega, mu: of the model, shape (h,); of a limit, plain heads then ω₀, and ``slope_weight`` as in
    `MergedModel`, else 0. risk: exact. gradient_norm: of the risk profiled over μ, in the free ω's. curvatures: the
    eigenvalues of its Hessian, positive at a strict minimum. separation: for a limit, the second difference of the risk
    in the pair's distance, positive where merging is best; else 0. scanned: how many sets of heads the scan compared;
    ends: the risk that each start of the local search led to, infinite where it did not settle.

    Certified: the risk, that it is stationary, and that its Hessian is positive. Not certified: that no lower minimum
    lies between the points of the scan or beyond its range.
    """

    attained: bool
    omega: FloatArray
    mu: FloatArray
    slope_weight: float
    risk: Certified
    gradient_norm: float
    curvatures: FloatArray
    separation: float
    scanned: int = 0
    ends: tuple[float, ...] = ()


# The scan takes heads from these multiples of 1/sqrt(d) and their negatives; as far as steep heads were ever best.
_SCAN = (0.0, 0.15, 0.3, 0.5, 0.8, 1.2, 1.8, 2.6, 3.6, 4.8)
# Its moments need not be finer than this with one or two heads, whose weights are not differences of large numbers; its
# mean over the length of the query is as fine as for the following omega, though some heads are steeper.
_SCAN_FINENESS = 0.65
_SCAN_LENGTHS = 1.0
# Distinct starts for 1 to 4 heads: the best of the scan, apart from those next to a better one. For four heads each
# costs minutes unless its mirror image equals it.
_STARTS = (2, 2, 2, 1)
# While searching grids are coarser by this factor, at which limits are known to 1e-9; the end is polished on the full
# grid.
_SEARCH_FINENESS = 0.8
_NEWTON_STEPS = 40
# Newton stops at this relative step, which it still takes; its next one would be lost in the error of the moments.
_STATIONARY = 1e-6
# Differences for limits, in multiples of 1/sqrt(d): their error is the square.
_DIFFERENCE = 5e-3
_SEPARATION = 0.1


def optimum(task: RegressionTask, heads: int) -> SoftmaxOptimum:
    r"""The heads with the least exact risk, for 1 to 4 heads, by a deterministic global search.

    Every set of heads with ω's on a grid of 19 points, \|ω\| up to 4.8/sqrt(d), is compared with its best μ; from the
    best sets that are not neighbours (one set, for four heads) Newton's method goes to a minimum. One head has a
    single minimum. Two are opposite, at a finite γ. With three or four the infimum is mostly not attained: a pair
    merges at ω₀, with μ → ±∞, and the others are steep and light; with four, ω₀ = 0 and the steep pair is opposite,
    so that this is debiased gradient descent with a correction. So three and four heads are polished as such limits,
    in all plain ω's and ω₀, and from there as separate heads where pulling the pair apart helps (small contexts).
    `SoftmaxOptimum` says what is certified. Source: beyond the paper. Raises DomainError for other head counts and
    for context 1 (where all heads are alike), PrecisionError where no start settles or γ is lost in rounding
    (context of 10^5).
    """
    count = as_integer("heads", heads, 1, 4)
    if task.context < 2:
        raise DomainError("context must be at least 2 for an optimum over omega, got 1")
    starts, scanned = _scan(task, count)
    polish = _separate_optimum if count <= 2 else _merged_optimum
    found: list[SoftmaxOptimum] = []
    ends, failure = [], None
    for start in starts:
        try:
            found.append(polish(task, start))
            ends.append(found[-1].risk.value)
        except PrecisionError as error:
            failure = error
            ends.append(float("inf"))
    if not found:
        raise PrecisionError(f"the optimum of {count} heads did not settle from {len(starts)} starts: {failure}")
    return replace(min(found, key=lambda end: end.risk.value), scanned=scanned, ends=tuple(ends))


def _scan(task: RegressionTask, count: int) -> tuple[list[FloatArray], int]:
    """The best sets of heads on the grid that are not neighbours, ascending in ω each, and how many were compared."""
    _check_isotropic(task)
    half = np.array(_SCAN) / np.sqrt(task.dim)
    grid = np.concatenate([-half[:0:-1], half])
    fineness = _SCAN_FINENESS if count <= 2 else _SEARCH_FINENESS
    r, weight = query_length_rule(task.dim, min(float(half[-1]), _SCAN_LENGTHS), fineness)
    own, linear = _single_kernel(task, np.abs(grid), r, weight, 0, fineness)
    K, c = np.diag(own[0]), np.sign(grid) * linear[0]
    if count > 1:
        first, second = np.triu_indices(grid.size, 1)
        left, right, place = _distinct_pairs(grid[first], grid[second])
        K[first, second] = _pair_kernel(task, left, right, r, weight, 0, fineness)[0][place]
        K[second, first] = K[first, second]
    sets = np.array(list(itertools.combinations(range(grid.size), count)))
    linear_part = c[sets][:, :, np.newaxis]
    gain = np.sum(
        linear_part * np.linalg.solve(K[sets[:, :, np.newaxis], sets[:, np.newaxis, :]], linear_part), (1, 2)
    )
    starts: list[IntArray] = []
    for index in np.argsort(-gain, kind="stable"):
        chosen = sets[index]
        mirror = grid.size - 1 - chosen[::-1]
        if all(np.abs(other - old).max() > 1 for old in starts for other in (chosen, mirror)):
            starts.append(chosen)
        if len(starts) == _STARTS[count - 1]:
            break
    return [grid[chosen] for chosen in starts], len(sets)


def _eigenvalues(hessian: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.eigvalsh(hessian), dtype=np.float64)


def _profiled(task: RegressionTask, omega: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Gradient and Hessian in ω of the risk with the best μ, and that μ."""
    h = omega.size
    coefficients = risk_coefficients(task, omega, 2)
    mu = _solve_mu(coefficients.quadratic, coefficients.linear)
    full = assemble_derivatives(task, coefficients, mu)
    cross = full.hessian[:h, h:]
    reduced = full.hessian[:h, :h] - cross @ np.linalg.solve(full.hessian[h:, h:], cross.T)
    return full.gradient[:h], (reduced + reduced.T) / 2, mu


def _merged_optimum(task: RegressionTask, start: FloatArray) -> SoftmaxOptimum:
    """From separate heads: merge the closest two, and go to a minimum over the plain heads and ω₀ by differences."""
    unit = 1 / np.sqrt(task.dim)
    ordered = np.sort(start)
    nearest = int(np.argmin(np.diff(ordered)))
    free = np.append(np.delete(ordered, [nearest, nearest + 1]), ordered[nearest : nearest + 2].mean())

    def risk(x: FloatArray, fineness: float) -> float:
        return merged_risk(task, x[:-1], float(x[-1]), fineness).risk

    fine, rough = functools.partial(risk, fineness=1.0), functools.partial(risk, fineness=_SEARCH_FINENESS)
    every = np.eye(free.size)
    # A start that its mirror image equals leads to an end that does, so that one number is free.
    mirrored = free.size == 3 and np.allclose(ordered, -ordered[::-1], atol=1e-12)
    free = _limit_minimum(rough, fine, free, np.array([[-1.0, 1.0, 0.0]]) if mirrored else every, unit)
    hessian = _differences(rough, free, _DIFFERENCE * unit)[1]
    if mirrored and not (_eigenvalues(hessian) > 0).all():
        free = _limit_minimum(rough, fine, free + 0.01 * unit, every, unit)
        hessian = _differences(rough, free, _DIFFERENCE * unit)[1]
    gradient = _slopes(fine, free, _DIFFERENCE * unit)
    plain, merged = free[:-1], float(free[-1])
    best = merged_risk(task, plain, merged)
    coarse = merged_risk(task, plain, merged, _COARSE)
    half = _SEPARATION * unit / 2
    apart = optimal_mu(task, np.append(plain, [merged - half, merged + half]))[1].value
    if apart < best.risk:
        return _separate_optimum(task, np.append(plain, [merged - half, merged + half]))
    if np.abs(np.diff(np.sort(free))).min() < 2 * half:
        raise PrecisionError(f"more than two of {start.size} heads merge, at omega {free}")
    return SoftmaxOptimum(
        False,
        best.omega,
        best.mu,
        best.slope_weight,
        Certified(best.risk, abs(best.risk - coarse.risk) + _ROUNDING),
        float(np.linalg.norm(gradient)),
        _eigenvalues(hessian),
        float((apart - best.risk) / half**2),
    )


def _limit_minimum(
    rough: Callable[[FloatArray], float],
    fine: Callable[[FloatArray], float],
    free: FloatArray,
    directions: FloatArray,
    unit: float,
) -> FloatArray:
    """Newton's method on differences along ``directions``, rows: on the rough risk, then with its Hessian on the fine.

    free, unit: starting point and 1/sqrt(d). Raises PrecisionError where it does not settle.
    """
    hessian = np.eye(len(directions))
    for function, tolerance in ((rough, 1e-4), (fine, 1e-5)):
        for _ in range(_NEWTON_STEPS):
            base = free

            def along(y: FloatArray, function: Callable[..., float] = function, base: FloatArray = base) -> float:
                return function(base + y @ directions)

            origin, width = np.zeros(len(directions)), _DIFFERENCE * unit
            if function is rough:
                gradient, hessian = _differences(along, origin, width)
            else:
                gradient = _slopes(along, origin, width)
            values, vectors = np.linalg.eigh(hessian)
            step = -vectors @ ((vectors.T @ gradient) / np.abs(values))
            step *= min(1.0, 0.5 * unit / max(float(np.linalg.norm(step)), 1e-300))
            free = free + step @ directions
            if np.linalg.norm(step) <= tolerance * unit:
                break
        else:
            raise PrecisionError(f"the optimum of {free.size + 1} heads did not settle, got omega {free}")
    return free


def _separate_optimum(task: RegressionTask, omega: FloatArray) -> SoftmaxOptimum:
    """Newton's method on the risk profiled over μ, in all ω's, from a start where no pair wants to merge."""
    unit = 1 / np.sqrt(task.dim)
    for _ in range(_NEWTON_STEPS):
        gradient, hessian, _ = _profiled(task, omega)
        values, vectors = np.linalg.eigh(hessian)
        # Downhill along every eigenvector, also where the profile bends down, and never far.
        step = -vectors @ ((vectors.T @ gradient) / np.abs(values))
        longest = 0.3 * unit if omega.size != 2 else 0.3 * min(unit, float(np.ptp(omega)))
        step *= min(1.0, longest / max(float(np.linalg.norm(step)), 1e-300))
        omega = omega + step
        if np.linalg.norm(step) <= _STATIONARY * min(unit, float(np.abs(omega).max())):
            break
    else:
        raise PrecisionError(f"the optimum of {omega.size} separate heads did not settle, got omega {omega}")
    gradient, hessian, mu = _profiled(task, omega)
    if omega[0] < 0:  # the sign of all heads together is free
        omega, mu, gradient = -omega, -mu, -gradient
    norm = float(np.linalg.norm(gradient))
    return SoftmaxOptimum(True, omega, mu, 0.0, softmax_risk(task, omega, mu), norm, _eigenvalues(hessian), 0.0)


def _slopes(function: Callable[[FloatArray], float], x: FloatArray, step: float) -> FloatArray:
    """Gradient by central differences."""
    return np.array([(function(x + e) - function(x - e)) / (2 * step) for e in step * np.eye(x.size)])


def _differences(
    function: Callable[[FloatArray], float], x: FloatArray, step: float
) -> tuple[FloatArray, FloatArray]:
    """Gradient and Hessian by central differences."""
    n = x.size
    unit = step * np.eye(n)
    centre = function(x)
    plus, minus = (np.array([function(x + sign * e) for e in unit]) for sign in (1, -1))
    gradient = (plus - minus) / (2 * step)
    hessian = np.diag((plus + minus - 2 * centre) / step**2)
    for i in range(n):
        for j in range(i):
            corner = function(x + unit[i] + unit[j]) - function(x + unit[i] - unit[j])
            corner = corner - function(x - unit[i] + unit[j]) + function(x - unit[i] - unit[j])
            hessian[i, j] = hessian[j, i] = corner / (4 * step**2)
    return gradient, hessian
