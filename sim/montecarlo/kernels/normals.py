"""Standard normals in float32 for training, many lanes at a time.

Each lane is a xoshiro128++ generator (Blackman, Vigna 2021) and turns two of its numbers into two normals by Box and
Muller's rule. Nothing branches, so that the loops over lanes vectorise; logarithm, sine and cosine are Taylor series on
the short ranges where few terms hold float32, and no sum is reordered: the bits are those of any machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

_ONE, _TWO, _HALF = np.float32(1), np.float32(2), np.float32(0.5)
_ROOT_TWO, _LOG_TWO = np.float32(math.sqrt(2)), np.float32(math.log(2))
_UNIT = np.float32(2.0**-32)
_HALF_UNIT = np.float32(2.0**-33)
# Quarter turns from signed 32-bit integers: angles in [-pi/4, pi/4).
_EIGHTH_TURN = np.float32(math.pi / 4 * 2.0**-31)
_LOG_3, _LOG_5, _LOG_7, _LOG_9 = (np.float32(1 / n) for n in (3, 5, 7, 9))
_COS_4, _COS_6, _COS_8 = (np.float32(1 / math.factorial(n)) for n in (4, 6, 8))
_SIN_3, _SIN_5, _SIN_7, _SIN_9 = (np.float32(1 / math.factorial(n)) for n in (3, 5, 7, 9))


@njit(nogil=True)
def next_bits(state: Any, bits: Any) -> None:
    """The next number of each lane into ``bits`` (lanes,) uint32; state (4, lanes) uint32 moves on."""
    for lane in range(bits.size):
        a, b, c, d = state[0, lane], state[1, lane], state[2, lane], state[3, lane]
        total = np.uint32(a + d)
        bits[lane] = np.uint32(np.uint32((total << 7) | (total >> 25)) + a)
        shifted = np.uint32(b << 9)
        c ^= a
        d ^= b
        b ^= c
        a ^= d
        c ^= shifted
        state[0, lane], state[1, lane], state[2, lane] = a, b, c
        state[3, lane] = np.uint32((d << 11) | (d >> 21))


@njit(nogil=True, error_model="numpy")
def radii(bits: Any, mantissa: Any, mantissa_bits: Any, radius: Any) -> None:
    """sqrt(-2 ln u) of u = (k + 1/2) 2^-32 for numbers k in ``bits``, into ``radius`` (lanes,).

    mantissa: scratch of the same shape, and mantissa_bits its int32 view. With u = 2^e m and s = (m - 1)/(m + 1),
    ln m = 2 (s + s^3/3 + ...) and |s| < 0.172.
    """
    for lane in range(bits.size):
        mantissa[lane] = np.float32(bits[lane]) * _UNIT + _HALF_UNIT
    for lane in range(bits.size):
        radius[lane] = np.float32((mantissa_bits[lane] >> 23) - 127)
        mantissa_bits[lane] = (mantissa_bits[lane] & 0x7FFFFF) | 0x3F800000
    for lane in range(bits.size):
        m, e = mantissa[lane], radius[lane]
        large = m > _ROOT_TWO
        m = m * _HALF if large else m
        e = e + _ONE if large else e
        s = (m - _ONE) / (m + _ONE)
        q = s * s
        log = _TWO * s * (_ONE + q * (_LOG_3 + q * (_LOG_5 + q * (_LOG_7 + q * _LOG_9))))
        square = -_TWO * (e * _LOG_TWO + log)
        radius[lane] = np.float32(math.sqrt(max(square, np.float32(0))))


@njit(nogil=True)
def split_by_angle(bits: Any, radius: Any, first: Any, second: Any) -> None:
    """Radius times cosine and sine of a uniform angle, into ``first`` and ``second`` (lanes,).

    The two low bits of a number choose the quarter, the others the angle in it.
    """
    for lane in range(bits.size):
        x = np.float32(np.int32(bits[lane])) * _EIGHTH_TURN
        q = x * x
        cos = _ONE - q * (_HALF - q * (_COS_4 - q * (_COS_6 - q * _COS_8)))
        sin = x * (_ONE - q * (_SIN_3 - q * (_SIN_5 - q * (_SIN_7 - q * _SIN_9))))
        turned, opposite = (bits[lane] & 1) != 0, (bits[lane] & 2) != 0
        r = -radius[lane] if opposite else radius[lane]
        first[lane] = r * (-sin if turned else cos)
        second[lane] = r * (cos if turned else sin)


@njit(nogil=True)
def fill_normals(state: Any, out: Any) -> None:
    """Fill ``out`` (n,) float32 with independent standard normals; state (4, lanes) uint32, not all zero in a lane."""
    lanes = state.shape[1]
    bits = np.empty(lanes, np.uint32)
    mantissa, radius = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    mantissa_bits = mantissa.view(np.int32)
    pair = np.empty(2 * lanes, np.float32)
    for start in range(0, out.size, 2 * lanes):
        next_bits(state, bits)
        radii(bits, mantissa, mantissa_bits, radius)
        next_bits(state, bits)
        if start + 2 * lanes <= out.size:
            block = out[start : start + 2 * lanes]
            split_by_angle(bits, radius, block[:lanes], block[lanes:])
        else:
            split_by_angle(bits, radius, pair[:lanes], pair[lanes:])
            for i in range(start, out.size):
                out[i] = pair[i - start]
