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

from collections.abc import Callable, Iterator

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from theory.results import FloatArray, PrecisionError

# Tails are cut where they hold less than this of the total.
_TAIL = 1e-17
# Steps of the trapezoid rules at which halving changes nothing beyond 1e-13: in log t; in log t where both slopes
# have one sign and are steep, so that the integrand bends within a unit of log t along the diagonal; in z, where
# exp(-t exp(az)) is analytic within pi/(2a) of the real axis.
_LOG_STEP = 0.2
_LOG_STEP_STEEP = 0.1
_STEEP = 1.5
_SCORE_STEP = 0.6
_SCORE_STEP_TIMES_SLOPE = 0.26
# exp(-exp(6.7)) is zero in float64; larger exponents would only overflow.
_DEAD_EXPONENT = 6.7
# Elements of the largest array of one batch.
_BATCH = 1_500_000
# Beyond this slope product grids are too large; see `sharp_moments`.
MAX_PRODUCT_SLOPE = 6.0
MAX_SLOPE = 200.0
# Largest relative size of a slope within a batch, all of which share the grid of the steepest.
_BATCH_RATIO = 1.4

Terms = dict[tuple[int, int, int], float]


def slope_moment_single(slope: FloatArray, context: int, order: int, fineness: float = 1.0) -> FloatArray:
    r"""f_2(a, a) and f_3(a, a) with their total derivatives in a, shape (2, order + 1, n).

    .. math:: f_3 = L\int t\,E[w^2e^{-tw}]\,\varphi(t)^{L-1}dt, \qquad w = e^{az}, \quad \varphi(t) = Ee^{-tw}

    slope: a, shape (n,), |a| <= 200; context: L >= 1; order: 0 to 2; fineness: divides all steps.
    Source: beyond the paper, FINDINGS D.
    """
    a, L = np.abs(slope), context
    signs = np.sign(slope) + (slope == 0)
    if L == 1:
        return _one_token(len(a), (order + 1))
    out = np.empty((2, order + 1, len(a)))
    for batch in _batches(a, lambda m, n: n * len(_scores(m, L, fineness)[0])):
        out[:, :, batch] = _single_batch(a[batch], L, order, fineness)
    out[:, 1::2] *= signs  # f(a, a) is even in a, so odd derivatives change sign
    return out


def slope_moment_pair(
    left: FloatArray, right: FloatArray, context: int, order: int, fineness: float = 1.0
) -> FloatArray:
    r"""f_2(a, b) and f_3(a, b) with derivatives, shape (2, m, n), m = 1, 3 or 6: f; f_a, f_b; f_aa, f_ab, f_bb.

    left, right: a and b, shape (n,), at most 200 in magnitude; context: L >= 1; order: 0 to 2; fineness: divides all
    steps. Source: beyond the paper, FINDINGS D.
    """
    L, size = context, (1, 3, 6)[order]
    if L == 1:
        return _one_token(len(left), size)
    out = np.empty((2, size, len(left)))
    steepest = np.maximum(np.abs(left), np.abs(right))
    steep = (left * right > 0) & (np.minimum(np.abs(left), np.abs(right)) > _STEEP)
    for step, members in ((_LOG_STEP, np.flatnonzero(~steep)), (_LOG_STEP_STEEP, np.flatnonzero(steep))):
        cost = lambda m, n, step=step: n * n  # noqa: E731
        for batch in _batches(steepest[members], cost):
            chosen = members[batch]
            out[:, :, chosen] = _pair_batch(left[chosen], right[chosen], L, order, step / fineness, fineness)
    return out


def _one_token(count: int, size: int) -> FloatArray:
    """With one token p = 1: f_2 = E z² = 1 and f_3 = 1 whatever the slopes."""
    out = np.zeros((2, size, count))
    out[:, 0] = 1
    return out


def _batches(slope: FloatArray, cost: Callable[[float, int], int]) -> Iterator[slice | FloatArray]:
    raise NotImplementedError
