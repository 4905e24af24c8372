r"""Means over softmax weights of normal scores, to 12 digits: what the exact risk of multi-head attention is made of.

With z one standard normal score per token, :math:`D(a) = \sum_\ell e^{az_\ell}` and :math:`p(a) = e^{az}/D(a)`,

.. math:: f_1(a) = E\sum_\ell p_\ell(a)z_\ell, \qquad f_2(a,b) = E[(p(a)\cdot z)(p(b)\cdot z)], \qquad
          f_3(a,b) = E[p(a)\cdot p(b)].

:math:`1/(D_aD_b) = \iint e^{-tD_a-sD_b}\,dt\,ds` turns these means over L tokens into integrals of (L-1)-th powers of
means over one token; on a grid the exponential factorises, so that those are matrix products. Trapezoid rules
converge geometrically in all three variables. Where both slopes are equal one integral over t is enough.
Derivatives in a and b are exact, by differentiation under the integral.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from theory.results import FloatArray, IntArray, PrecisionError

# Tails are cut where they hold less than this of the total.
_TAIL = 1e-17
# Steps of the trapezoid rules at which halving changes nothing beyond 1e-12: in log t, smaller where both slopes have
# one sign and the gentler exceeds the given limit, because then the integrand bends within a unit of log t along the
# diagonal; in z, where exp(-t exp(az)) is analytic within pi/(2a) of the real axis.
_LOG_STEP = 0.2
_STEEP = ((3.0, 0.07), (1.5, 0.1))
_SCORE_STEP = 0.6
_SCORE_STEP_TIMES_SLOPE = 0.26
# exp(-exp(6.7)) is zero in float64; larger exponents would only overflow.
_DEAD_EXPONENT = 6.7
# A probability that rounds to one is known to this accuracy only; its logarithm must stay finite.
_ROUNDING = 1e-16
# Elements of the largest array of one batch; the largest ratio of slopes in a batch, all of which share the score
# grid of the steepest; slopes below this one are all alike.
_BATCH_ELEMENTS = 1_000_000
_BATCH_RATIO = 1.4
_GENTLE = 0.4
# Largest slopes: scores need 70 a nodes; where the integrand bends log t needs 100 a, which soon is too many.
MAX_SLOPE = 130.0
MAX_BENT_SLOPE = 30.0
# Steps in log t grow with the slope beyond this one: the integrand is then as smooth as the normal density of the
# score -u/a at which exp(-t exp(az)) switches.
_SMOOTH_SLOPE = 5.0
# With fewer tokens opposite heads can switch at one score too, which bends the integrand.
_FEW_TOKENS = 24

# A sum of moments: the coefficient of E[z^k w_a^i w_b^j exp(-w_a-w_b)] under the key (k, i, j).
_Terms = dict[tuple[int, int, int], float]


def single_slope_moments(slope: FloatArray, context: int, order: int = 0, fineness: float = 1.0) -> FloatArray:
    r"""f_2(a, a) and f_3(a, a) with total derivatives in a up to ``order``, shape (2, order + 1, n).

    .. math:: f_3 = L\int_0^\infty t\,E[w^2e^{-tw}]\,\varphi(t)^{L-1}dt, \qquad w = e^{az}, \quad \varphi(t) = Ee^{-tw}

    slope: a, shape (n,); context: L >= 1; order: 0 to 2; fineness: divides all steps. Relative error 1e-12.
    Source: beyond the paper. Raises PrecisionError where \|a\| > 130.
    """
    a = np.abs(slope)
    if context == 1:
        return _one_token(a.size, order + 1)
    _check_slope(a)
    out = np.empty((2, order + 1, a.size))
    for batch in _batches(a, context, fineness, axes=1):
        out[:, :, batch] = _single_batch(a[batch], context, order, fineness)
    out[:, 1::2] *= np.sign(slope)  # even in a, so odd derivatives are odd
    return out


def slope_pair_moments(
    left: FloatArray, right: FloatArray, context: int, order: int = 0, fineness: float = 1.0
) -> FloatArray:
    r"""f_2(a, b) and f_3(a, b) with partial derivatives, shape (2, m, n).

    m is 1, 3 or 6 for order 0, 1 or 2: f; f_a, f_b; f_aa, f_ab, f_bb. left, right: a and b, shape (n,); context:
    L >= 1; fineness: divides all steps. Error below 1e-12 of 1 + \|f\|.
    Source: beyond the paper. Raises PrecisionError where a slope exceeds 130 in magnitude, or two
    slopes both exceed 30 and are of one sign, or of any sign with fewer than 24 tokens.
    """
    size = (1, 3, 6)[order]
    if context == 1:
        return _one_token(left.size, size)
    larger = np.maximum(np.abs(left), np.abs(right))
    smaller = np.minimum(np.abs(left), np.abs(right))
    _check_slope(larger)
    out = np.empty((2, size, left.size))
    same_sign = left * right > 0
    steps = np.select([same_sign & (smaller > limit) for limit, _ in _STEEP], [step for _, step in _STEEP], _LOG_STEP)
    bends = (same_sign & (smaller > _STEEP[-1][0])) | (~same_sign & (context < _FEW_TOKENS))
    _check_bend(smaller[bends])
    for step, bent in sorted(set(zip(steps.tolist(), bends.tolist(), strict=True))):
        members = np.flatnonzero((steps == step) & (bends == bent))
        for batch in _batches(larger[members], context, fineness * _LOG_STEP / step, axes=2):
            chosen = members[batch]
            out[:, :, chosen] = _pair_batch(
                left[chosen], right[chosen], context, order, step if bent else None, fineness
            )
    return out


def _one_token(count: int, size: int) -> FloatArray:
    """With one token p = 1, so that f_2 = E z² = 1 and f_3 = 1 whatever the slopes."""
    out = np.zeros((2, size, count))
    out[:, 0] = 1
    return out


def _check_bend(bend: FloatArray) -> None:
    if bend.max(initial=0) > MAX_BENT_SLOPE:
        raise PrecisionError(
            "two different omegas of one sign (or of any sign, below 24 tokens) times the length of the query must not "
            f"both exceed {MAX_BENT_SLOPE:g} in the quadrature of softmax weights, got {float(bend.max()):g}"
        )


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
        points = _log_grid(steepest, context, _smooth_step(steepest) / fineness)[0].size
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


def _smooth_step(slope: FloatArray) -> float:
    """Step in log t where the integrand does not bend."""
    return _LOG_STEP * max(1.0, float(slope.min()) / _SMOOTH_SLOPE)


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
    rest = (_TAIL ** (1 / L) - ndtr(-y)) / ndtr(y)
    high = np.min(np.multiply.outer(a, y[rest > 0]) + np.log(-np.log(rest[rest > 0])), axis=-1)
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


def _weights(log_t: FloatArray, slope: FloatArray, z: FloatArray) -> FloatArray:
    """Products t w = exp(u + az), shape (n, m, z); capped where exp(-t w) is zero anyhow."""
    exponent = log_t[:, :, np.newaxis] + slope[:, np.newaxis, np.newaxis] * z
    return np.asarray(np.exp(np.minimum(exponent, _DEAD_EXPONENT)))


def _log_power(complement: FloatArray) -> FloatArray:
    """The logarithm of φ from 1 - φ."""
    return np.asarray(np.log1p(-np.minimum(complement, 1 - _ROUNDING)))


def _single_batch(a: FloatArray, L: int, order: int, fineness: float) -> FloatArray:
    z, weight = _score_grid(float(a.max()), L, fineness)
    u, du = _log_grid(a, L, _smooth_step(a) / fineness)
    w = _weights(u, a, z)
    kernel = np.exp(-w) * weight
    powers = [kernel]

    def mean(k: int, i: int) -> FloatArray:
        while len(powers) <= i:
            powers.append(powers[-1] * w)
        return np.asarray(powers[i] @ z**k)

    def derivatives(k: int, i: int) -> list[FloatArray]:
        terms: _Terms = {(k, i, 0): 1.0}
        values = []
        for _ in range(order + 1):
            values.append(np.asarray(sum(c * mean(*key[:2]) for key, c in terms.items())))
            terms = _slope_derivative(terms, 1)
        return values

    log_phi = _log_power(-np.expm1(-w) @ weight)
    phi = derivatives(0, 0)
    lower, upper = (_single_power(log_phi, phi, n) for n in (L - 2, L - 1))
    own, square, first = derivatives(0, 2), derivatives(2, 2), derivatives(1, 1)
    f3 = _leibniz(own, upper)
    both = _leibniz(_leibniz(first, first), lower)
    f2 = [x + (L - 1) * y for x, y in zip(_leibniz(square, upper), both, strict=True)]
    return L * np.array([[np.sum(value * du, axis=1) for value in f] for f in (f2, f3)])


def _single_power(log_phi: FloatArray, phi: list[FloatArray], n: int) -> list[FloatArray]:
    """φ^n with its derivatives."""
    value = np.exp(n * log_phi)
    ratios = [derivative * np.exp(-log_phi) for derivative in phi[1:]]
    out = [value]
    if len(ratios) > 0:
        out.append(value * n * ratios[0])
    if len(ratios) > 1:
        out.append(value * n * (ratios[1] + (n - 1) * ratios[0] ** 2))
    return out


def _leibniz(x: list[FloatArray], y: list[FloatArray]) -> list[FloatArray]:
    """Derivatives of a product, up to the second."""
    out = [x[0] * y[0]]
    if len(x) > 1:
        out.append(x[1] * y[0] + x[0] * y[1])
    if len(x) > 2:
        out.append(x[2] * y[0] + 2 * x[1] * y[1] + x[0] * y[2])
    return out


def _slope_derivative(terms: _Terms, side: int) -> _Terms:
    r"""Derivative in a (side 1) or b (side 2): :math:`\partial_a w^ie^{-w} = z(iw^i - w^{i+1})e^{-w}`."""
    out: _Terms = {}
    for (k, i, j), c in terms.items():
        power = (i, j)[side - 1]
        raised = (k + 1, i + 1, j) if side == 1 else (k + 1, i, j + 1)
        out[raised] = out.get(raised, 0.0) - c
        if power:
            out[k + 1, i, j] = out.get((k + 1, i, j), 0.0) + c * power
    return out


def _pair_batch(a: FloatArray, b: FloatArray, L: int, order: int, step: float | None, fineness: float) -> FloatArray:
    """Moments of one batch; step: in log t where the integrand bends, else ``None``."""
    z, weight = _score_grid(float(max(np.abs(a).max(), np.abs(b).max())), L, fineness)
    u, du = _log_grid(np.abs(a), L, (step or _smooth_step(np.abs(a))) / fineness)
    v, dv = _log_grid(np.abs(b), L, (step or _smooth_step(np.abs(b))) / fineness)
    w_a = _weights(u, a, z)
    kernel_a, miss_a = np.exp(-w_a), -np.expm1(-w_a)
    if np.array_equal(a, -b):  # mirror images in z
        w_b, kernel_b, miss_b = w_a[:, :, ::-1], kernel_a[:, :, ::-1], miss_a[:, :, ::-1]
    else:
        w_b = _weights(v, b, z)
        kernel_b, miss_b = np.exp(-w_b), -np.expm1(-w_b)
    left, right = [kernel_a * weight], [kernel_b]
    cache: dict[tuple[int, int, int], FloatArray] = {}

    def mean(k: int, i: int, j: int) -> FloatArray:
        """E[z^k w_a^i w_b^j exp(-w_a-w_b)] on the (u, v) grid, by one matrix product."""
        while len(left) <= i:
            left.append(left[-1] * w_a)
        while len(right) <= j:
            right.append(right[-1] * w_b)
        if (k, i, j) not in cache:
            cache[k, i, j] = (left[i] * z**k if k else left[i]) @ right[j].swapaxes(1, 2)
        return cache[k, i, j]

    def jet(k: int, i: int, j: int) -> list[FloatArray]:
        start: _Terms = {(k, i, j): 1.0}
        a_, b_ = _slope_derivative(start, 1), _slope_derivative(start, 2)
        second = (_slope_derivative(a_, 1), _slope_derivative(a_, 2), _slope_derivative(b_, 2))
        every = (start, a_, b_, *second)[: (1, 3, 6)[order]]
        return [np.asarray(sum(c * mean(*key) for key, c in terms.items())) for terms in every]

    # 1 - φ = E(1-A) + E(1-B) - E(1-A)(1-B), sums of small positive numbers, so that φ^L keeps its digits.
    complement = (miss_a @ weight)[:, :, np.newaxis] + (miss_b @ weight)[:, np.newaxis, :]
    complement = complement - (miss_a * weight) @ miss_b.swapaxes(1, 2)
    log_phi = _log_power(complement)
    phi = jet(0, 0, 0) if order else [np.exp(log_phi)]
    lower, upper = (_pair_power(log_phi, phi, n) for n in (L - 2, L - 1))
    f3 = _jet_product(jet(0, 1, 1), upper)
    both = _jet_product(_jet_product(jet(1, 1, 0), jet(1, 0, 1)), lower)
    f2 = [x + (L - 1) * y for x, y in zip(_jet_product(jet(2, 1, 1), upper), both, strict=True)]
    return L * np.array([[_double_integral(value, du, dv) for value in f] for f in (f2, f3)])


def _double_integral(value: FloatArray, du: FloatArray, dv: FloatArray) -> FloatArray:
    return np.asarray(np.sum((value @ dv[:, :, np.newaxis])[:, :, 0] * du, axis=1))


def _pair_power(log_phi: FloatArray, phi: list[FloatArray], n: int) -> list[FloatArray]:
    """φ^n with its partial derivatives."""
    value = np.exp(n * log_phi)
    if len(phi) == 1:
        return [value]
    inverse = np.exp(-log_phi)
    r_a, r_b = phi[1] * inverse, phi[2] * inverse
    out = [value, n * value * r_a, n * value * r_b]
    if len(phi) > 3:
        for second, product in zip(phi[3:], (r_a * r_a, r_a * r_b, r_b * r_b), strict=True):
            out.append(n * value * (second * inverse + (n - 1) * product))
    return out


def _jet_product(x: list[FloatArray], y: list[FloatArray]) -> list[FloatArray]:
    """Partial derivatives of a product: value; a, b; aa, ab, bb."""
    out = [x[0] * y[0]]
    if len(x) > 1:
        out += [x[1] * y[0] + x[0] * y[1], x[2] * y[0] + x[0] * y[2]]
    if len(x) > 3:
        out.append(x[3] * y[0] + 2 * x[1] * y[1] + x[0] * y[3])
        out.append(x[4] * y[0] + x[1] * y[2] + x[2] * y[1] + x[0] * y[4])
        out.append(x[5] * y[0] + 2 * x[2] * y[2] + x[0] * y[5])
    return out
