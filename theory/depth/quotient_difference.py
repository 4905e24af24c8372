r"""Recurrence coefficients of a discrete measure on positive nodes, without a subtraction that cancels.

A measure on (0, ∞) has a Jacobi matrix J = LU with unit lower bidiagonal L of subdiagonal e_k > 0 and upper bidiagonal
U of diagonal q_k > 0: the quotients and differences. Adding a mass at the origin and moving the origin down change
them by sums, products and quotients of positive numbers. So nodes are added in descending order, each at the origin,
which then moves down to the next: O(n m) operations for n nodes and m coefficients, where orthogonalising vectors
takes O(n m²). Compare Laurie 1999 (partial fractions to qd) and Fernando and Parlett 1994.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from theory.results import FloatArray

# Each node costs a rounding in every coefficient. Long doubles, where they are longer than doubles (x86, most Linux),
# keep all 15 digits at any size; elsewhere 10 digits are left at 20,000 nodes.
_REAL = np.longdouble
_TINY = np.finfo(_REAL).tiny


def quotients_and_differences(nodes: FloatArray, weights: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    r"""Coefficients :math:`q_k, e_k` of the measure :math:`\sum_i w_i\delta_{x_i}`, k = 1..count.

    .. math:: \alpha_k = q_k + e_{k-1}, \qquad \beta_k = q_k e_k, \qquad
              x\,\pi_k = \pi_{k+1} + \alpha_{k+1}\pi_k + \beta_k\pi_{k-1}

    nodes: x > 0, descending, distinct, shape (n,); weights: w > 0, shape (n,); count: at most n - 1. Returns both
    square roots, :math:`\sqrt{q_k}` and :math:`\sqrt{e_k}`, shape (count,): the entries of the bidiagonal matrix of
    Golub and Kahan. Relative error about 1e-14, see `_REAL`.

    A mass w at the origin leaves x times the measure, whose matrix is UL, as it is, and divides the mean of the rest
    by 1 + w/m:

    .. math:: \tilde q_1 = \frac{m\,q_1}{m+w}, \quad \delta_1 = \frac{w\,q_1}{m+w}, \quad \tilde e_k = e_k + \delta_k,
              \quad \tilde q_{k+1} = \frac{q_{k+1} e_k}{\tilde e_k}, \quad
              \delta_{k+1} = \frac{q_{k+1}\delta_k}{\tilde e_k}

    Moving the origin down by σ adds it to J:

    .. math:: s_1 = \sigma, \quad q_k = \tilde q_k + s_k, \quad e_k = \frac{\tilde e_k\tilde q_k}{q_k}, \quad
              s_{k+1} = \sigma + \frac{\tilde e_k s_k}{q_k}

    Source: computes the recurrence behind depth (36), (37); beyond the paper.
    """
    x, w = nodes.astype(_REAL), weights.astype(_REAL)
    total, size = len(x), count + 1
    shifts = np.append(x[:-1] - x[1:], x[-1])
    masses = np.cumsum(w)
    kept, moved = np.append(_REAL(0), masses[:-1]) / masses, w / masses
    q, e = np.zeros(size, _REAL), np.zeros(size, _REAL)
    # Node i reaches coefficient k at time i + k, after node i - 1 and before node i + 1: all that meet at one time are
    # updated at once. What node i carries from k to k + 1 is held at place k + 1.
    keep, move, shift = (np.zeros(size + 1, _REAL) for _ in range(3))
    backwards = shifts[::-1].copy()
    for time in range(total + size - 1):
        first, last = max(0, time - total + 1), min(size, time // 2 + 1)
        if first == 0:
            keep[0], move[0], shift[0] = kept[time], moved[time], shifts[time]
        here, following = slice(first, last), slice(first + 1, last + 1)
        own = backwards[total - 1 - time + first : total - 1 - time + last]
        q[here], e[here], *carried = _pass(q[here], e[here], keep[here], move[here], shift[here], own)
        keep[following], move[following], shift[following] = carried
    return np.sqrt(q[:count]).astype(np.float64), np.sqrt(e[:count]).astype(np.float64)


def _pass(q: Any, e: Any, keep: Any, move: Any, shift: Any, own: Any) -> tuple[npt.NDArray[Any], ...]:
    """One coefficient of several nodes: new q and e, and what they carry on (shares kept and moved, shift)."""
    before, delta = q * keep, q * move
    grown = e + delta
    after = before + shift
    slope = grown / after
    # A difference of zero ends the chain, and nothing is carried beyond.
    divisor = np.maximum(grown, _TINY)
    return after, slope * before, e / divisor, delta / divisor, own + slope * shift
