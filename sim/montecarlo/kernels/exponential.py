"""Exponentials and softmax of many numbers side by side, in vector instructions."""

from __future__ import annotations

import math
from typing import Any

from numba import njit

LOG2_E = 1.4426950408889634
# ln 2 as a sum: the first part has so few digits that its product with a small integer is exact.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
# Adding 1.5 * 2^52 rounds to an integer and leaves that integer in the lowest bits.
ROUNDER = 6755399441055744.0
# Below exp(-708) = 3e-308 powers become subnormal, and slow.
LEAST_EXPONENT = -708.0


@njit(nogil=True)
def exponentiate(values: Any, power: Any, power_bits: Any) -> None:
    """Exponential of ``values`` x (n,) in [-inf, 0] in place, to 4e-16 relative; 3e-308 = exp(-708) for x below -708.

    x = k ln 2 + r with an integer k and |r| <= ln(2)/2, so that exp(x) = 2^k exp(r): Taylor's polynomial of degree 13
    leaves less than 1e-17. power (n,) and power_bits, its bits as int64: working space, in which 2^k is put together.
    The libraries' exp cannot be called on several numbers at once. Source: definition of exp.
    """
    for i in range(values.size):
        x = max(values[i], LEAST_EXPONENT)
        power[i] = x * LOG2_E + ROUNDER
        k = power[i] - ROUNDER
        r = (x - k * LN2_HIGH) - k * LN2_LOW
        series = 1 / 6227020800.0
        series = series * r + 1 / 479001600.0
        series = series * r + 1 / 39916800.0
        series = series * r + 1 / 3628800.0
        series = series * r + 1 / 362880.0
        series = series * r + 1 / 40320.0
        series = series * r + 1 / 5040.0
        series = series * r + 1 / 720.0
        series = series * r + 1 / 120.0
        series = series * r + 1 / 24.0
        series = series * r + 1 / 6.0
        series = series * r + 0.5
        series = series * r + 1.0
        values[i] = series * r + 1.0
    for i in range(values.size):
        power_bits[i] = (power_bits[i] + 1023) << 52  # the exponent field of 2^k
    for i in range(values.size):
        values[i] *= power[i]


@njit(nogil=True)
def exponentiate_columns(scores: Any, total: Any, largest: Any, power: Any, power_bits: Any) -> None:
    """exp(s_in - max_i s_in) in the place of ``scores`` s (m, n), and the sum of each column into ``total`` (n,).

    A softmax over i before it is divided by its sum. largest, power, power_bits (n,): working space, the last two as
    in `exponentiate`. Source: multihead (3.2), depth (59).
    """
    rows, columns = scores.shape
    largest[:] = -math.inf
    for i in range(rows):
        for n in range(columns):
            largest[n] = max(largest[n], scores[i, n])
    total[:] = 0.0
    for i in range(rows):
        row = scores[i]
        for n in range(columns):
            row[n] -= largest[n]
        exponentiate(row, power, power_bits)
        for n in range(columns):
            total[n] += row[n]
