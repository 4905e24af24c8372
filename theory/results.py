"""Errors and result types shared by theory, simulation and comparison.

Every number that is not exact carries its error: `Estimate` for what was sampled, `Certified` for what an
iteration or a quadrature returned. Errors are sentences that name the argument, its value and the allowed range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class AttnlawsError(Exception):
    """Any failure that attnlaws itself reports; its text is one sentence for the user."""


class DomainError(AttnlawsError, ValueError):
    """An argument lies outside the range where the quantity is defined."""


class PrecisionError(AttnlawsError, ArithmeticError):
    """A computation could not reach the precision that it guarantees."""


class MissingDependencyError(AttnlawsError, ImportError):
    """An optional package is needed for the call; the text names the extra to install."""


class Status(Enum):
    """How a computation ended; each member is a sentence that says what to do."""

    DONE = "The requested error was reached."
    SAMPLE_LIMIT = "The sample limit was reached before the requested error: raise the limit or accept the interval."

    @property
    def reached(self) -> bool:
        """Whether the request was met."""
        return self is Status.DONE


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval ``[low, high]`` that covers the true value with probability ``level``."""

    low: float
    high: float
    level: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, float]:
        """Plain numbers, for JSON."""
        return {"low": self.low, "high": self.high, "level": self.level}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A sampled number with its standard error.

    value, stderr: estimate and standard error, both finite, in the units of the quantity.
    samples: number of independent draws (contexts); chunks: number of independent groups of draws from which the
    standard error was computed, at least 2, so that intervals use Student's t with ``chunks - 1`` degrees.
    seed: the seed that reproduces the value bit for bit. status: whether the requested error was reached.
    """

    value: float
    stderr: float
    samples: int
    chunks: int
    seed: int
    status: Status = Status.DONE

    def __post_init__(self) -> None:
        # NumPy scalars, which JSON does not know, become plain numbers.
        object.__setattr__(self, "value", float(self.value))
        object.__setattr__(self, "stderr", float(self.stderr))
        for name in ("samples", "chunks", "seed"):
            number = getattr(self, name)
            if number % 1 != 0:
                raise DomainError(f"{name} must be an integer, got {number!r}")
            object.__setattr__(self, name, int(number))
        if not (math.isfinite(self.value) and math.isfinite(self.stderr) and self.stderr >= 0):
            raise PrecisionError(
                f"an estimate needs a finite value and a finite stderr >= 0, got {self.value!r} and {self.stderr!r}"
            )
        if self.chunks < 2 or self.samples < self.chunks:
            raise DomainError(
                f"an estimate needs chunks >= 2 and samples >= chunks, got {self.chunks} and {self.samples}"
            )

    def interval(self, level: float = 0.95) -> Interval:
        """Student interval over the independent chunks, two-sided, covering with probability ``level``."""
        if not 0 < level < 1:
            raise DomainError(f"level must lie strictly between 0 and 1, got {level!r}")
        from scipy.special import stdtrit

        half_width = float(-stdtrit(self.chunks - 1, (1 - level) / 2)) * self.stderr
        return Interval(self.value - half_width, self.value + half_width, level)

    def z_score(self, reference: float, reference_stderr: float = 0.0) -> float:
        """Distance from ``reference`` in units of the combined standard error (infinite where both are zero).

        Raises DomainError where ``reference`` is not finite or ``reference_stderr`` not finite and >= 0.
        """
        if not (math.isfinite(reference) and math.isfinite(reference_stderr) and reference_stderr >= 0):
            raise DomainError(
                "z_score needs a finite reference and a finite reference_stderr >= 0, "
                f"got {reference!r} and {reference_stderr!r}"
            )
        scale = math.hypot(self.stderr, reference_stderr)
        difference = self.value - reference
        if scale == 0:
            return 0.0 if difference == 0 else math.copysign(math.inf, difference)
        return difference / scale

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "value": self.value,
            "stderr": self.stderr,
            "interval": self.interval().to_json(),
            "samples": self.samples,
            "chunks": self.chunks,
            "seed": self.seed,
            "status": self.status.value,
        }


@dataclass(frozen=True, slots=True)
class Certified:
    """A deterministic number with an absolute ``tolerance`` that its computation guarantees."""

    value: float
    tolerance: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))
        object.__setattr__(self, "tolerance", float(self.tolerance))
        if not (math.isfinite(self.value) and math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise PrecisionError(
                f"a certified number needs a finite value and tolerance, got {self.value!r} and {self.tolerance!r}"
            )

    def interval(self) -> Interval:
        """The range that holds the exact value."""
        return Interval(self.value - self.tolerance, self.value + self.tolerance, 1.0)

    def to_json(self) -> dict[str, float]:
        """Plain numbers, for JSON."""
        return {"value": self.value, "tolerance": self.tolerance}
