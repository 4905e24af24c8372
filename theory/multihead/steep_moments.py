r"""Means over softmax weights of steep slopes, where the softmax is nearly a maximum.

The scores are anchored at the largest one, M. Given M the other n = L - 1 tokens are independent normals below it,
:math:`z = M + \zeta`, and with :math:`S_a = \sum e^{a\zeta}` over them :math:`D_a = e^{aM}(1 + S_a)`. So

.. math:: f_3 = E\frac{1+S_{a+b}}{(1+S_a)(1+S_b)} = E_M\iint e^{-t-s}\Big[ts\,\psi^n
          + n\,E[w_aw_be^{-w_a-w_b}]\,\psi^{n-1}\Big]\frac{dt}t\frac{ds}s,
          \quad w_a = te^{a\zeta},\ w_b = se^{b\zeta},\ \psi = Ee^{-w_a-w_b},

and f_2 follows from :math:`p\cdot z = M + p\cdot\zeta`. However steep the slopes, all integrands are smooth: in M, in
log t, and in the logarithm of the distance -ζ, which is resolved from 1/a upwards. The steeper slope is a > 0. Where
it acts, -ζ is of order 1/a; means in which only b occurs are taken by a rule of their own. Derivatives in a and b
are exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from theory.multihead.gauss_rules import discretised_gauss_rule
from theory.multihead.moment_jets import (
    log_power,
    pair_jet,
    pair_power,
    pair_product,
    single_jet,
    single_power,
    single_product,
    weight_kernel,
)
from theory.results import FloatArray

# Tails are cut where they hold less than this of the total, in units of log; DECADES is where exp(-e^x) is that small.
_CUT = 36.0
_DECADES = float(np.log(_CUT))
# Steps of the trapezoid rules: in log t, and in log of the distance; and the nodes in M, at context 1 and per log L.
# Halving the steps and doubling the nodes changes nothing beyond 1e-12.
_LOG_STEP = 0.24
_DISTANCE_STEP = 0.24
_LARGEST_NODES = 28.0
_LARGEST_NODES_PER_LOG = 1.4
# Distances grow geometrically up to this one, then linearly, because the normal density is no wider.
_LINEAR_DISTANCE = 1.6
# log s of a slope of the other sign: growth of its step per unit away from zero, and the largest step in units of the
# slope over the deviation of the smallest score, about 1/sqrt(1 + log L).
_GROWTH = 0.25
_SPREAD = 0.7
# Columns of the grid in log t whose integrand never exceeds this fraction of the largest are left out.
_NEGLIGIBLE = 1e-17


@dataclass(frozen=True, slots=True)
class _Slope:
    """One slope with its grid in u = log t: w, exp(-w), 1 - exp(-w) at distances, one row per u.

    density: of the distance given M times its weight, shape (M, y); zeta: minus the distance, shape (y,).
    """

    slope: float
    u: FloatArray
    du: FloatArray
    zeta: FloatArray
    density: FloatArray
    w: FloatArray
    kernel: FloatArray
    miss: FloatArray

    def mean(self, k: int, i: int, _: int = 0) -> FloatArray:
        """E[ζ^k w^i exp(-w)] given M, shape (M, u)."""
        return np.asarray((self.density * self.zeta**k) @ (self.w**i * self.kernel).T)

    @property
    def missing(self) -> FloatArray:
        """1 - ψ, shape (M, u)."""
        return np.asarray(self.density @ self.miss.T)

    @property
    def measure(self) -> FloatArray:
        """Weights of the mean over exponential t, as an integral in u."""
        return np.asarray(self.du * np.exp(-np.exp(self.u)))


@functools.lru_cache(maxsize=64)
def largest_score_rule(context: int, count: int) -> tuple[FloatArray, FloatArray]:
    r"""Gauss rule for the largest of L normal scores, density :math:`L\varphi(M)\Phi(M)^{L-1}`; shape (n,) each.

    Source: Lanczos on a fine trapezoid rule.
    """
    z = np.linspace(-9, 11, 600)
    log_density = -z * z / 2 + (context - 1) * log_ndtr(z)
    return discretised_gauss_rule(z, np.exp(log_density - log_density.max()), count)


def steep_single_moments(a: float, context: int, order: int, fineness: float) -> FloatArray:
    """f_2(a, a) and f_3(a, a) with total derivatives in a up to ``order``, shape (2, order + 1), for a > 0, L >= 2.

    Source: beyond the paper; the double integral of the module with 1/(1+S)² = ∫ t exp(-t(1+S)) dt.
    """
    n = context - 1
    M, mass = _largest(context, fineness)
    head = _steeper(a, M, context, fineness)
    phi = single_jet(head.mean, 0, 0, order) if order else [np.empty(0)]
    log_phi = log_power(head.missing)
    lower, upper, full = (single_power(log_phi, phi, m) for m in (n - 2, n - 1, n))
    square = np.exp(2 * head.u)
    first, cubic = single_jet(head.mean, 1, 1, order), single_jet(head.mean, 2, 2, order)
    own = single_product(single_jet(head.mean, 0, 2, order), upper)
    f3 = [square * x + n * y for x, y in zip(full, own, strict=True)]
    both = single_product(single_product(first, first), lower)
    f2 = [n * x + n * (n - 1) * y for x, y in zip(single_product(cubic, upper), both, strict=True)]
    pull = [M[:, np.newaxis] * n * x for x in single_product(first, upper)]
    out = np.array([[mass @ (value @ head.measure) for value in f] for f in (f2, f3, pull)])
    out[0] += 2 * out[2]
    out[0, 0] += mass @ M**2
    return out[:2]


def steep_pair_moments(a: float, b: float, context: int, order: int, fineness: float) -> FloatArray:
    """f_2(a, b) and f_3(a, b) with partial derivatives, shape (2, m), for a >= abs(b), a > 0, L >= 2.

    m is 1, 3 or 6 for order 0, 1 or 2: f; f_a, f_b; f_aa, f_ab, f_bb. Source: beyond the paper; the double integral
    of the module.
    """
    n = context - 1
    M, mass = _largest(context, fineness)
    left, right = _steeper(a, M, context, fineness), _gentler(b, a, M, context, fineness)
    w, kernel, _ = weight_kernel(right.u[:, np.newaxis] + b * left.zeta)
    rows, columns = [left.kernel], [kernel]
    shape = (M.size, left.u.size, right.u.size)
    cache: dict[tuple[int, int, int], FloatArray] = {}

    def product(values: FloatArray, k: int, j: int) -> FloatArray:
        """E[ζ^k values w_b^j exp(-w_b)], for values that vanish far below M; shape (M, u, v)."""
        while len(columns) <= j:
            columns.append(columns[-1] * w)
        weighted = (left.density * left.zeta**k)[:, np.newaxis, :] * values
        return (weighted.reshape(-1, left.zeta.size) @ columns[j].T).reshape(shape)

    def mean(k: int, i: int, j: int) -> FloatArray:
        while len(rows) <= i:
            rows.append(rows[-1] * left.w)
        if (k, i, j) not in cache:
            # exp(-w_a) does not vanish far below M, 1 - exp(-w_a) does.
            far = 0.0 if i else right.mean(k, j)[:, np.newaxis, :]
            cache[k, i, j] = far + product(rows[i] if i else -left.miss, k, j)
        return cache[k, i, j]

    # 1 - ψ = E(1-A) + E(1-B) - E(1-A)(1-B), sums of small positive numbers, so that ψ^n keeps its digits.
    missing = left.missing[:, :, np.newaxis] + right.missing[:, np.newaxis, :]
    overlap = (left.density[:, np.newaxis, :] * left.miss).reshape(-1, left.zeta.size) @ (1 - kernel).T
    log_phi = log_power(missing - overlap.reshape(shape))
    phi = [np.empty(0)]
    if order:
        phi = [np.exp(log_phi), *pair_jet(mean, 0, 0, 0, order)[1:]]
    lower, upper, full = (pair_power(log_phi, phi, m) for m in (n - 2, n - 1, n))
    ts = np.multiply.outer(np.exp(left.u), np.exp(right.u))
    f3 = [ts * x + n * y for x, y in zip(full, pair_product(pair_jet(mean, 0, 1, 1, order), upper), strict=True)]
    both = pair_product(pair_product(pair_jet(mean, 1, 1, 0, order), pair_jet(mean, 1, 0, 1, order)), lower)
    square = pair_product(pair_jet(mean, 2, 1, 1, order), upper)
    f2 = [n * x + n * (n - 1) * y for x, y in zip(square, both, strict=True)]
    out = np.array([[mass @ ((value @ right.measure) @ left.measure) for value in f] for f in (f2, f3)])
    pull_a, pull_b = (_pull(head, M, mass, n, order) for head in (left, right))
    out[0, 0] += mass @ M**2
    for pull, places in ((pull_a, (0, 1, 3)), (pull_b, (0, 2, 5))):
        for value, place in zip(pull, places, strict=False):
            out[0, place] += value
    return out


def _pull(head: _Slope, M: FloatArray, mass: FloatArray, n: int, order: int) -> list[float]:
    """E[M p·ζ] with its derivatives in the slope."""
    phi = single_jet(head.mean, 0, 0, order) if order else [np.empty(0)]
    upper = single_power(log_power(head.missing), phi, n - 1)
    jet = single_product(single_jet(head.mean, 1, 1, order), upper)
    return [float((mass * M) @ (n * value @ head.measure)) for value in jet]


def _largest(context: int, fineness: float) -> tuple[FloatArray, FloatArray]:
    count = (_LARGEST_NODES + _LARGEST_NODES_PER_LOG * np.log(context)) * fineness
    return largest_score_rule(context, int(np.ceil(count)))


def _steeper(a: float, M: FloatArray, context: int, fineness: float) -> _Slope:
    reach = min(float(M.max()) + 8.3, (_CUT + np.log(context)) / a)
    y, dy = _distance_grid(a, _LINEAR_DISTANCE, reach, _DISTANCE_STEP / fineness)
    return _same_sign(a, y, dy, M, context, fineness)


def _gentler(b: float, a: float, M: FloatArray, context: int, fineness: float) -> _Slope:
    """The rule for means of the slope b alone, and its grid in log s."""
    reach, step = float(M.max()) + 8.3, _DISTANCE_STEP / fineness
    if b >= 0:
        reach = min(reach, (_CUT + np.log(context)) / max(b, 1e-3))
        y, dy = _distance_grid(max(b, 1.0), _LINEAR_DISTANCE, reach, step)
        return _same_sign(b, y, dy, M, context, fineness)
    # exp(-s exp(|b|y)) falls within a distance 1/|b|, at any distance.
    y, dy = _distance_grid(max(a, 1.0), min(_LINEAR_DISTANCE, -1 / b), reach, step)
    u, du = _opposite_log_grid(-b, reach, context, _LOG_STEP / fineness)
    return _slope(b, u, du, y, _density(M, y, dy), context)


def _same_sign(a: float, y: FloatArray, dy: FloatArray, M: FloatArray, context: int, fineness: float) -> _Slope:
    density = _density(M, y, dy)
    # S is a sum of numbers below one: beyond 3 E S + 36 its probability is below e^-36, by Chernoff's bound.
    expected = (context - 1) * float((density @ np.exp(-a * y)).max())
    u, du = _log_grid(np.log1p(min(context - 1, 3 * expected + _CUT)), _LOG_STEP / fineness)
    return _slope(a, u, du, y, density, context)


def _slope(a: float, u: FloatArray, du: FloatArray, y: FloatArray, density: FloatArray, context: int) -> _Slope:
    """Assemble a slope, without the columns of its grid that cannot matter."""
    n = context - 1
    w, kernel, miss = weight_kernel(u[:, np.newaxis] - a * y)
    t = np.exp(u)
    others = log_power(density @ miss.T)
    size = (t + n * (density @ (w * kernel).T)) * np.exp(max(n - 2, 0) * others - t)
    size = (size * du).max(axis=0)
    keep = size > _NEGLIGIBLE * size.max()
    return _Slope(a, u[keep], du[keep], -y, density, w[keep], kernel[keep], miss[keep])


def _density(M: FloatArray, y: FloatArray, dy: FloatArray) -> FloatArray:
    """Density of the distance of another token from the largest one, times the weights of the grid, shape (M, y)."""
    z = M[:, np.newaxis] - y
    return np.asarray(np.exp(-z * z / 2 - log_ndtr(M)[:, np.newaxis]) / np.sqrt(2 * np.pi) * dy)


def _points(low: float, high: float, step: float) -> tuple[FloatArray, float]:
    count = max(2, int(np.ceil((high - low) / step)))
    step = (high - low) / count
    return np.asarray(low + step * np.arange(count + 1), dtype=np.float64), step


def _distance_grid(slope: float, linear: float, reach: float, step: float) -> tuple[FloatArray, FloatArray]:
    """Distances from 0 to ``reach``, resolved from 1/slope on: geometric up to ``linear``, then linear."""
    shift = np.log(slope * linear)
    x, h = _points(-shift - _DECADES, reach / linear, step)
    stretch = np.exp(-x - shift)
    g = x - stretch
    small = np.exp(-np.abs(g))
    y = linear * (np.maximum(g, 0) + np.log1p(small))
    return y, h * (1 + stretch) * linear * np.where(g > 0, 1, small) / (1 + small)


def _log_grid(span: float, step: float) -> tuple[FloatArray, FloatArray]:
    """U = log t and weights for means of exp(-t(1 + S)) with log(1 + S) up to ``span``; double exponential ends."""
    x, h = _points(-span - _DECADES, _DECADES, step)
    stretch = np.exp(-x - span)
    return x - stretch, h * (1 + stretch)


def _opposite_log_grid(slope: float, reach: float, context: int, step: float) -> tuple[FloatArray, FloatArray]:
    """The same for S = Σ exp(slope y): unit steps near zero, growing to a fraction of the slope, where y is smooth."""
    largest = slope * _SPREAD / np.sqrt(1 + np.log(context))
    depth = slope * reach + np.log(context)

    def position(x: FloatArray) -> FloatArray:
        return np.asarray(x - largest / _GROWTH * np.logaddexp(0, -_GROWTH * x - np.log(largest)))

    trial = -np.arange(0.0, depth + 1, 0.25)
    span = float(-trial[min(int(np.searchsorted(-position(trial), depth)), trial.size - 1)])
    # To the left of that all tokens are far below 1/s, and the integrand falls as exp(u).
    x, h = _points(-span - max(float(np.log(_CUT / (1 + largest))), 0.5), _DECADES + 0.7, step)
    stretch = np.exp(-x - span)
    inner = x - stretch
    slope_factor = 1 + largest / (1 + largest * np.exp(np.clip(_GROWTH * inner, -700, 700)))
    return position(inner), h * (1 + stretch) * slope_factor
