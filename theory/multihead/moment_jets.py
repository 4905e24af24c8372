r"""Derivatives of means over exp(-t D) in the slopes: bookkeeping shared by the quadratures of softmax weights.

A jet is a list of arrays: the value, then its derivatives. Single jets are total derivatives in one slope; pair jets
hold f; f_a, f_b; f_aa, f_ab, f_bb. With :math:`w_a = te^{a\zeta}` and :math:`w_b = se^{b\zeta}` every derivative of a
mean :math:`E[\zeta^kw_a^iw_b^je^{-w_a-w_b}]` is a sum of such means.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from theory.results import FloatArray

# A probability that rounds to one is known to this accuracy only; its logarithm must stay finite.
_ROUNDING = 1e-16
# exp(-exp(6.7)) is zero in float64; larger exponents would only overflow.
_DEAD_EXPONENT = 6.7
# A sum of means: the coefficient of the mean (k, i, j) under that key.
Terms = dict[tuple[int, int, int], float]
Mean = Callable[[int, int, int], FloatArray]


def weight_kernel(exponent: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """W = exp(exponent), capped where exp(-w) is zero anyhow, exp(-w), and 1 - exp(-w) to full relative accuracy.

    Source: the kernel of 1/(1+S) = ∫ exp(-t(1+S)) dt behind multihead (3.2); beyond the paper.
    """
    w = np.exp(np.minimum(exponent, _DEAD_EXPONENT))
    return w, np.exp(-w), -np.expm1(-w)


def log_power(complement: FloatArray) -> FloatArray:
    """The logarithm of φ from 1 - φ. Source: numerical; no equation."""
    return np.asarray(np.log1p(-np.minimum(complement, 1 - _ROUNDING)))


def slope_derivative(terms: Terms, side: int) -> Terms:
    r"""Derivative in a (side 1) or b (side 2): :math:`\partial_a w^ie^{-w} = \zeta(iw^i - w^{i+1})e^{-w}`.

    Source: chain rule with w = exp(aζ + const).
    """
    out: Terms = {}
    for (k, i, j), c in terms.items():
        power = (i, j)[side - 1]
        raised = (k + 1, i + 1, j) if side == 1 else (k + 1, i, j + 1)
        out[raised] = out.get(raised, 0.0) - c
        if power:
            out[k + 1, i, j] = out.get((k + 1, i, j), 0.0) + c * power
    return out


def single_jet(mean: Mean, k: int, i: int, order: int) -> list[FloatArray]:
    """E[ζ^k w^i exp(-w)] and its derivatives in a up to ``order``.

    Source: `slope_derivative`, repeated.
    """
    terms: Terms = {(k, i, 0): 1.0}
    values = []
    for _ in range(order + 1):
        values.append(_sum(mean, terms))
        terms = slope_derivative(terms, 1)
    return values


def pair_jet(mean: Mean, k: int, i: int, j: int, order: int) -> list[FloatArray]:
    """E[ζ^k w_a^i w_b^j exp(-w_a-w_b)] and its partial derivatives up to ``order``.

    Source: `slope_derivative`, repeated.
    """
    start: Terms = {(k, i, j): 1.0}
    values = [_sum(mean, start)]
    if order:
        a_, b_ = slope_derivative(start, 1), slope_derivative(start, 2)
        second = (slope_derivative(a_, 1), slope_derivative(a_, 2), slope_derivative(b_, 2))
        values += [_sum(mean, terms) for terms in (a_, b_, *second)[: (0, 2, 5)[order]]]
    return values


def _sum(mean: Mean, terms: Terms) -> FloatArray:
    items = list(terms.items())
    if len(items) == 1 and items[0][1] == 1:
        return mean(*items[0][0])
    return np.asarray(sum(c * mean(*key) for key, c in items))


def single_power(log_phi: FloatArray, phi: list[FloatArray], n: int) -> list[FloatArray]:
    """φ^n with its derivatives. Source: chain rule."""
    value = np.exp(n * log_phi)
    ratios = [derivative * np.exp(-log_phi) for derivative in phi[1:]]
    out = [value]
    if len(ratios) > 0:
        out.append(value * n * ratios[0])
    if len(ratios) > 1:
        out.append(value * n * (ratios[1] + (n - 1) * ratios[0] ** 2))
    return out


def pair_power(log_phi: FloatArray, phi: list[FloatArray], n: int) -> list[FloatArray]:
    """φ^n with its partial derivatives. Source: chain rule."""
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


def single_product(x: list[FloatArray], y: list[FloatArray]) -> list[FloatArray]:
    """Derivatives of a product in one slope. Source: product rule."""
    out = [x[0] * y[0]]
    if len(x) > 1:
        out.append(x[1] * y[0] + x[0] * y[1])
    if len(x) > 2:
        out.append(x[2] * y[0] + 2 * x[1] * y[1] + x[0] * y[2])
    return out


def pair_product(x: list[FloatArray], y: list[FloatArray]) -> list[FloatArray]:
    """Partial derivatives of a product. Source: product rule."""
    out = [x[0] * y[0]]
    if len(x) > 1:
        out += [x[1] * y[0] + x[0] * y[1], x[2] * y[0] + x[0] * y[2]]
    if len(x) > 3:
        out.append(x[3] * y[0] + 2 * x[1] * y[1] + x[0] * y[3])
        out.append(x[4] * y[0] + x[1] * y[2] + x[2] * y[1] + x[0] * y[4])
        out.append(x[5] * y[0] + 2 * x[2] * y[2] + x[0] * y[5])
    return out
