"""Exact rational matrices for checking polynomial identities.

A polynomial identity that holds at random integer points in exact arithmetic is true except with a probability below
degree / range (Schwartz-Zippel); with entries from 2,001 integers and several draws that is far below 1e-12.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from theory.results import FloatArray

ExactArray = npt.NDArray[Any]
_RANGE = 1000


def rational(rng: np.random.Generator, *shape: int) -> ExactArray:
    """A matrix of random fractions n/m, |n| <= 1000, m in 1..7, shape ``shape``."""
    numerators = rng.integers(-_RANGE, _RANGE + 1, size=shape)
    denominators = rng.integers(1, 8, size=shape)
    flat = [Fraction(int(n), int(m)) for n, m in zip(numerators.flat, denominators.flat, strict=True)]
    return np.array(flat, dtype=object).reshape(shape)


def identity(size: int) -> ExactArray:
    """The exact identity matrix."""
    return np.array([[Fraction(int(i == j)) for j in range(size)] for i in range(size)], dtype=object)


def mismatches(left: Any, right: Any) -> float:
    """Number of entries in which two exact arrays differ (0 for an identity that holds)."""
    return float(np.count_nonzero(np.asarray(left, dtype=object) != np.asarray(right, dtype=object)))


def as_float(matrix: ExactArray) -> FloatArray:
    """The nearest float64 matrix."""
    return matrix.astype(np.float64)
