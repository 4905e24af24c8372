r"""Means over softmax weights of normal scores, to 11 digits: what the exact risk of multi-head attention is made of.

With z one standard normal score per token, :math:`D(a) = \sum_\ell e^{az_\ell}` and :math:`p(a) = e^{az}/D(a)`,

.. math:: f_1(a) = E\sum_\ell p_\ell(a)z_\ell, \qquad f_2(a,b) = E[(p(a)\cdot z)(p(b)\cdot z)], \qquad
          f_3(a,b) = E[p(a)\cdot p(b)].

:math:`1/(D_aD_b) = \iint e^{-tD_a-sD_b}\,dt\,ds` turns these means over L tokens into integrals of (L-1)-th powers of
means over one token; on a grid the exponential factorises, so that those are matrix products. Trapezoid rules
converge geometrically in all three variables. Where both slopes are equal one integral over t is enough.
Derivatives in a and b are exact, by differentiation under the integral. Steep slopes, for which that integrand bends,
are left to `steep_moments`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

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
from theory.multihead.steep_moments import steep_pair_moments, steep_single_moments
from theory.results import FloatArray, IntArray, PrecisionError

# Tails are cut where they hold less than this of the total.
_TAIL = 1e-15
# Steps of the trapezoid rules at which halving changes nothing beyond 1e-12: in log t, for slopes up to a limit; in z,
# where exp(-t exp(az)) is analytic within pi/(2a) of the real axis.
_LOG_STEPS = ((1.0, 0.28), (2.5, 0.24), (np.inf, 0.2))
_SCORE_STEP = 0.7
_SCORE_STEP_TIMES_SLOPE = 0.3
# Steps in log t grow with the slope beyond this one: the integrand is then as smooth as the normal density of the
# score -u/a at which exp(-t exp(az)) switches.
_SMOOTH_SLOPE = 5.0
# Steeper slopes are anchored at the largest score: one slope above the first limit; two of one sign where both exceed
# the second or one the third; opposite ones above the fourth, or the fifth where, with few tokens, both can switch at
# one score.
_STEEP_SINGLE = 6.0
_STEEP_BOTH = 1.3
_STEEP_SAME = 4.0
_STEEP_OPPOSITE = 24.0
_STEEP_FEW = 3.0
_FEW_TOKENS = 24
# Elements of the largest array of one batch; the largest ratio of slopes in a batch, all of which share the score
# grid of the steepest; slopes below this one are all alike.
_BATCH_ELEMENTS = 1_000_000
_BATCH_RATIO = 1.4
_GENTLE = 0.4
# Largest slopes: beyond, the distance of opposite heads needs more nodes than memory holds in a batch.
MAX_SLOPE = 130.0


def single_slope_moments(slope: FloatArray, context: int, order: int = 0, fineness: float = 1.0) -> FloatArray:
    r"""f_2(a, a) and f_3(a, a) with total derivatives in a up to ``order``, shape (2, order + 1, n).

    .. math:: f_3 = L\int_0^\infty t\,E[w^2e^{-tw}]\,\varphi(t)^{L-1}dt, \qquad w = e^{az}, \quad \varphi(t) = Ee^{-tw}

    slope: a, shape (n,); context: L >= 1; order: 0 to 2; fineness: divides all steps. Relative error 1e-11,
    of second derivatives 1e-8.
    Source: beyond the paper. Raises PrecisionError where \|a\| > 130.
    """
    a = np.abs(slope)
    if context == 1:
        return _one_token(a.size, order + 1)
    _check_slope(a)
    out = np.empty((2, order + 1, a.size))
    steep = a > _STEEP_SINGLE
    for n in np.flatnonzero(steep):
        out[:, :, n] = steep_single_moments(float(a[n]), context, order, fineness)
    gentle = np.flatnonzero(~steep)
    for part in _batches(a[gentle], context, fineness, axes=1):
        batch = gentle[part]
        out[:, :, batch] = _single_batch(a[batch], context, order, fineness)
    out[:, 1::2] *= np.sign(slope)  # even in a, so odd derivatives are odd
    return out


def slope_pair_moments(
    left: FloatArray, right: FloatArray, context: int, order: int = 0, fineness: float = 1.0
) -> FloatArray:
    r"""f_2(a, b) and f_3(a, b) with partial derivatives, shape (2, m, n).

    m is 1, 3 or 6 for order 0, 1 or 2: f; f_a, f_b; f_aa, f_ab, f_bb. left, right: a and b, shape (n,); context:
    L >= 1; fineness: divides all steps. Error below 1e-11 of 1 + \|f\|.
    Source: beyond the paper. Raises PrecisionError where a slope exceeds 130 in magnitude.
    """
    size = (1, 3, 6)[order]
    if context == 1:
        return _one_token(left.size, size)
    larger = np.maximum(np.abs(left), np.abs(right))
    smaller = np.minimum(np.abs(left), np.abs(right))
    _check_slope(larger)
    out = np.empty((2, size, left.size))
    steep_same = (smaller > _STEEP_BOTH) | (larger > _STEEP_SAME)
    steep_opposite = larger > (_STEEP_FEW if context < _FEW_TOKENS else _STEEP_OPPOSITE)
    steep = np.where(left * right > 0, steep_same, steep_opposite)
    for n in np.flatnonzero(steep):
        out[:, :, n] = _steep_pair(float(left[n]), float(right[n]), context, order, fineness)
    gentle = np.flatnonzero(~steep)
    for part in _batches(larger[gentle], context, fineness, axes=2):
        batch = gentle[part]
        out[:, :, batch] = _pair_batch(left[batch], right[batch], context, order, fineness)
    return out


def _steep_pair(a: float, b: float, context: int, order: int, fineness: float) -> FloatArray:
    """The steep pair with its steeper slope first and positive; both signs may change, and the slopes change places."""
    swap = abs(b) > abs(a)
    if swap:
        a, b = b, a
    sign = -1.0 if a < 0 else 1.0
    out = steep_pair_moments(sign * a, sign * b, context, order, fineness)
    out[:, 1:3] *= sign
    if swap and order:
        out = out[:, [0, 2, 1, 5, 4, 3][: out.shape[1]]]
    return out


def _one_token(count: int, size: int) -> FloatArray:
    """With one token p = 1, so that f_2 = E z² = 1 and f_3 = 1 whatever the slopes."""
    out = np.zeros((2, size, count))
    out[:, 0] = 1
    return out


def _check_slope(slope: FloatArray) -> None:
    if slope.max(initial=0) > MAX_SLOPE:
        raise PrecisionError(
            f"omega times the length of the query must stay below {MAX_SLOPE:g} for the quadrature of softmax weights, "
            f"got {float(slope.max()):g}; reduce omega or dim"
        )


def _batches(slope: FloatArray, context: int, fineness: float, axes: int) -> Iterator[IntArray]:
    """Groups of indices with similar slopes, each small enough for the memory of one batch."""
    order = np.argsort(slope, kind="stable")
    start = 0
    while start < order.size:
        smallest = max(float(slope[order[start]]), _GENTLE)
        stop = int(np.searchsorted(slope[order], smallest * _BATCH_RATIO, side="right"))
        steepest = np.array([smallest * _BATCH_RATIO])
        points = _log_grid(steepest, context, _log_step(steepest, fineness))[0].size
        if axes == 1:
            points *= _score_grid(float(steepest[0]), context, fineness)[0].size
        else:
            points *= points
        stop = min(stop, start + max(1, _BATCH_ELEMENTS // points))
        yield order[start:stop]
        start = stop


def _score_grid(slope: float, context: int, fineness: float) -> tuple[FloatArray, FloatArray]:
    """Nodes z and weights of a mean over a standard normal score, shape (m,) each.

    Where the weights exp(az) tilt the normal the range shifts by the slopes, up to where L² tokens would not reach.
    """
    reach = min(8.6 + 2 * slope, float(np.sqrt(-2 * np.log(_TAIL) + 4 * np.log(context))))
    step = min(_SCORE_STEP, _SCORE_STEP_TIMES_SLOPE / max(slope, 1e-300)) / fineness
    count = int(np.ceil(reach / step))
    z = np.asarray(step * np.arange(-count, count + 1), dtype=np.float64)
    return z, np.asarray(step * np.exp(-z * z / 2) / np.sqrt(2 * np.pi))


def _log_step(slope: FloatArray, fineness: float) -> float:
    """Step in log t of a batch."""
    step = next(step for limit, step in _LOG_STEPS if slope.max() <= limit)
    return step * max(1.0, float(slope.min()) / _SMOOTH_SLOPE) / fineness


def _log_grid(slope: FloatArray, context: int, step: float) -> tuple[FloatArray, FloatArray]:
    r"""Nodes u = log t and weights for ∫ du, shape (n, m) each, for the slopes a >= 0, shape (n,).

    The integrand falls as e^u to the left of u ~ -log D, and double exponentially to the right; u = c + x - e^{-x-s}
    makes the left end double exponential too. c is minus the free energy of a random energy model, log D of most
    contexts; to its left, down to c - s, contexts with an outstanding token still count.
    """
    a, L = slope, context
    freezing = np.sqrt(2 * np.log(L))
    centre = -np.where(a < freezing, np.log(L) + a * a / 2, a * freezing)
    # Right end: φ^L < tail. For any y, φ(u) < P(z < -y) + P(z > -y) exp(-e^{u - ay}).
    y = np.linspace(-8, 8, 65)
    # Written with the complements, which keep their digits where the L-th root of the tail is one to rounding.
    missing = -np.expm1(np.log(_TAIL) / L) / ndtr(y)
    y, missing = y[missing < 1], missing[missing < 1]
    high = np.min(np.multiply.outer(a, y) + np.log(-np.log1p(-missing)), axis=-1)
    # Left end: L (1 - φ) < tail. For any y, 1 - φ(u) < P(z > y) + e^u E[e^{az}; z < y].
    top = -ndtri(_TAIL / L)
    low = np.log(_TAIL / L) - a * a / 2 - log_ndtr(top - a)
    decades = np.log(-np.log(_TAIL))
    shift = np.maximum(centre - low + np.log(_TAIL) - decades, 0)
    left, right = -(shift + decades), high - centre
    count = int(np.ceil(float(np.max(right - left)) / step))
    widths = ((right - left) / count)[:, np.newaxis]
    x = left[:, np.newaxis] + widths * np.arange(count + 1)
    stretch = np.exp(-x - shift[:, np.newaxis])
    return centre[:, np.newaxis] + x - stretch, widths * (1 + stretch)


def _single_batch(a: FloatArray, L: int, order: int, fineness: float) -> FloatArray:
    z, weight = _score_grid(float(a.max()), L, fineness)
    u, du = _log_grid(a, L, _log_step(a, fineness))
    w, kernel, miss = weight_kernel(u[:, :, np.newaxis] + a[:, np.newaxis, np.newaxis] * z)
    powers = [kernel * weight]

    def mean(k: int, i: int, _: int) -> FloatArray:
        while len(powers) <= i:
            powers.append(powers[-1] * w)
        return np.asarray(powers[i] @ z**k)

    log_phi = log_power(miss @ weight)
    phi = single_jet(mean, 0, 0, order) if order else [np.empty(0)]
    lower, upper = (single_power(log_phi, phi, n) for n in (L - 2, L - 1))
    first = single_jet(mean, 1, 1, order)
    f3 = single_product(single_jet(mean, 0, 2, order), upper)
    both = single_product(single_product(first, first), lower)
    square = single_product(single_jet(mean, 2, 2, order), upper)
    f2 = [x + (L - 1) * y for x, y in zip(square, both, strict=True)]
    return L * np.array([[np.sum(value * du, axis=1) for value in f] for f in (f2, f3)])


def _pair_batch(a: FloatArray, b: FloatArray, L: int, order: int, fineness: float) -> FloatArray:
    z, weight = _score_grid(float(max(np.abs(a).max(), np.abs(b).max())), L, fineness)
    u, du = _log_grid(np.abs(a), L, _log_step(np.abs(a), fineness))
    w_a, kernel_a, miss_a = weight_kernel(u[:, :, np.newaxis] + a[:, np.newaxis, np.newaxis] * z)
    mirrored = np.array_equal(a, -b)
    if mirrored:
        v, dv = u, du
        w_b, kernel_b, miss_b = w_a[:, :, ::-1], kernel_a[:, :, ::-1], miss_a[:, :, ::-1]
    else:
        v, dv = _log_grid(np.abs(b), L, _log_step(np.abs(b), fineness))
        w_b, kernel_b, miss_b = weight_kernel(v[:, :, np.newaxis] + b[:, np.newaxis, np.newaxis] * z)
    left, right = [kernel_a * weight], [kernel_b]
    cache: dict[tuple[int, int, int], FloatArray] = {}

    def mean(k: int, i: int, j: int) -> FloatArray:
        """E[z^k w_a^i w_b^j exp(-w_a-w_b)] on the (u, v) grid, by one matrix product."""
        if mirrored and j > i:  # z -> -z exchanges the heads
            return np.asarray((-1) ** k * mean(k, j, i).swapaxes(1, 2))
        while len(left) <= i:
            left.append(left[-1] * w_a)
        while len(right) <= j:
            right.append(right[-1] * w_b)
        if (k, i, j) not in cache:
            cache[k, i, j] = (left[i] * z**k if k else left[i]) @ right[j].swapaxes(1, 2)
        return cache[k, i, j]

    # 1 - φ = E(1-A) + E(1-B) - E(1-A)(1-B), sums of small positive numbers, so that φ^L keeps its digits.
    complement = (miss_a @ weight)[:, :, np.newaxis] + (miss_b @ weight)[:, np.newaxis, :]
    log_phi = log_power(complement - (miss_a * weight) @ miss_b.swapaxes(1, 2))
    phi = pair_jet(mean, 0, 0, 0, order) if order else [np.empty(0)]
    lower, upper = (pair_power(log_phi, phi, n) for n in (L - 2, L - 1))
    f3 = pair_product(pair_jet(mean, 0, 1, 1, order), upper)
    both = pair_product(pair_product(pair_jet(mean, 1, 1, 0, order), pair_jet(mean, 1, 0, 1, order)), lower)
    square = pair_product(pair_jet(mean, 2, 1, 1, order), upper)
    f2 = [x + (L - 1) * y for x, y in zip(square, both, strict=True)]
    return L * np.array([[_double_integral(value, du, dv) for value in f] for f in (f2, f3)])


def _double_integral(value: FloatArray, du: FloatArray, dv: FloatArray) -> FloatArray:
    return np.asarray(np.sum((value @ dv[:, :, np.newaxis])[:, :, 0] * du, axis=1))
