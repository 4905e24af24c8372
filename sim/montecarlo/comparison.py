"""Several quantities measured on the same contexts, so that their differences have small errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sim.montecarlo.stopping import Progress, draw_until, mean_over_chunks
from sim.streams import MAX_SEED
from theory.problems import MAX_SIZE, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, Status

# The error is looked at first after this many chunks: its own error is 13 % then, which keeps optional stopping from
# shortening the intervals.
FIRST_LOOK = 32


@dataclass(frozen=True, slots=True, eq=False)
class CommonSample:
    """Means over chunks of equal size of K quantities measured on common random numbers.

    names: of the quantities; chunk_means: shape (m, K), m >= 2, with independent rows; samples: contexts in all
    chunks; seed: of their stream; status: whether the requested errors were reached.
    Source: Monte Carlo averages; no equation.
    """

    names: tuple[str, ...]
    chunk_means: FloatArray
    samples: int
    seed: int
    status: Status = Status.DONE

    def estimate(self, name: str) -> Estimate:
        """The quantity ``name``. Raises DomainError where there is none of this name."""
        return self._estimate(self._column(name))

    def difference(self, name: str, other: str) -> Estimate:
        """``name`` minus ``other`` with the error of the difference, which common contexts make small."""
        return self._estimate(self._column(name) - self._column(other))

    def estimates(self) -> dict[str, Estimate]:
        """All quantities by name."""
        return {name: self.estimate(name) for name in self.names}

    def _column(self, name: str) -> FloatArray:
        if name not in self.names:
            raise DomainError(f"name must be one of {', '.join(self.names)}, got {name!r}")
        column: FloatArray = self.chunk_means[:, self.names.index(name)]
        return column

    def _estimate(self, means: FloatArray) -> Estimate:
        value, stderr = mean_over_chunks(means)
        return Estimate(value, stderr, self.samples, len(means), self.seed, self.status)


def draw_common_sample(
    draw: Callable[[np.random.Generator], FloatArray],
    names: tuple[str, ...],
    *,
    stream_name: str,
    chunk_contexts: int,
    relative_error: float,
    culprit: str,
    judged: tuple[str, ...] | None = None,
    seed: int,
    max_contexts: int,
    workers: int | None,
    progress: Progress | None,
) -> CommonSample:
    """Draw chunks of ``chunk_contexts`` contexts until every judged quantity has its relative error.

    draw: generator -> means of the K quantities over one chunk, shape (K,); judged: the quantities, >= 0, whose
    standard error over the value is compared with relative_error in (0, 1], by default all; culprit: the argument
    to blame where a mean is not finite; max_contexts: limit on the contexts drawn, at least 32 chunks; where it stops
    the run, the status says so. The same seed gives the same bits for any number of workers.
    Raises DomainError for arguments outside these ranges and for means that are not finite.
    Source: Monte Carlo averages; no equation.
    """
    seed = as_integer("seed", seed, 0, MAX_SEED)
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    max_contexts = as_integer("max_contexts", max_contexts, FIRST_LOOK * chunk_contexts, MAX_SIZE)
    columns = [names.index(name) for name in (names if judged is None else judged)]

    def error_ratio(rows: list[FloatArray]) -> float:
        means = np.array(rows)
        if not np.isfinite(means).all():
            raise DomainError(f"{culprit} must keep the risk finite in float64, got values that make it overflow")
        pairs = [mean_over_chunks(means[:, column]) for column in columns]
        return max(_relative_error(*pair) for pair in pairs) / relative_error

    rows = draw_until(
        draw,
        error_ratio,
        seed=seed,
        name=stream_name,
        max_chunks=min(max_contexts // chunk_contexts, 2**32),
        workers=workers,
        progress=progress,
        first_look=FIRST_LOOK,
    )
    status = Status.DONE if error_ratio(rows) <= 1 else Status.SAMPLE_LIMIT
    return CommonSample(names, np.array(rows), len(rows) * chunk_contexts, seed, status)


def _relative_error(value: float, stderr: float) -> float:
    """0 where the value is exactly 0 without error; infinite where noise has pushed it to zero or below."""
    if stderr == 0:
        return 0.0
    return stderr / value if value > 0 else math.inf
