"""When to stop drawing: chunks of fixed size, few looks at the error, results in order.

Every Monte Carlo wrapper cuts its work into chunks that depend on the problem alone, and stops by rules that depend
on results in order alone, so that the bits never depend on time, threads or workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar, cast

import numpy as np

from sim.streams import map_chunks
from theory.results import FloatArray

Progress = Callable[[float], None]
_Result = TypeVar("_Result")

# A chunk holds about this many normals (0.2 s on one core) ...
NORMALS_PER_CHUNK = 2**25
# ... but its contexts stay between these: enough for nearly normal means, few enough for many chunks.
CONTEXTS_PER_CHUNK = (16, 256)
# The error is looked at first after this many chunks, and then each time their number has grown by half: few looks
# at many chunks keep optional stopping from shortening the intervals.
FIRST_LOOK = 16
DEFAULT_MAX_CONTEXTS = 10**6


def chunk_size(normals_per_context: int) -> int:
    """Contexts in a chunk: fixed by the problem alone, so that the bits never depend on time or workers."""
    fewest, most = CONTEXTS_PER_CHUNK
    return max(fewest, min(most, NORMALS_PER_CHUNK // normals_per_context))


def draw_until(
    draw: Callable[[np.random.Generator], _Result],
    error_ratio: Callable[[list[_Result]], float],
    *,
    seed: int,
    name: str,
    max_chunks: int,
    workers: int | None,
    progress: Progress | None,
    first_look: int = FIRST_LOOK,
) -> list[_Result]:
    """Draw chunks until ``error_ratio`` of all so far is at most 1, or ``max_chunks`` are drawn.

    error_ratio: standard error reached over the one requested. It is looked at after ``first_look`` chunks and then
    each time their number has grown by half: only results in order decide, so the workers do not matter. progress is
    called with the fraction done, which never falls. A run stops more easily where its error comes out too small, so
    that its 95 % intervals cover 93.9 % at worst with a first look at 16 chunks and 94.5 % with one at 32 (measured
    on normal chunk means, whatever the requested error).
    """
    results: list[_Result] = []
    look, expected, fraction = first_look, max_chunks, 0.0
    # Closing cancels the chunks that are queued but not needed.
    with closing(cast("Generator[_Result]", map_chunks(draw, seed, name, range(max_chunks), workers))) as chunks:
        for result in chunks:
            results.append(result)
            drawn = len(results)
            if drawn == look:
                ratio = error_ratio(results)
                if ratio <= 1:
                    break
                look += look // 2
                # Errors fall with the square root of the samples, and no run stops between looks.
                expected = max_chunks if ratio * ratio * drawn >= max_chunks else math.ceil(ratio * ratio * drawn)
            fraction = max(fraction, drawn / max(expected, drawn + 1))
            if progress is not None:
                progress(fraction)
    if progress is not None:
        progress(1.0)
    return results


def mean_over_chunks(means: FloatArray) -> tuple[float, float]:
    """Mean and standard error of ``means`` (m,), the means of m >= 2 independent chunks of equal size."""
    chunks = means.size
    mean = float(means.mean())
    # hypot neither overflows nor underflows where squares of a scaled problem would.
    return mean, math.hypot(*(means - mean)) / math.sqrt(chunks * (chunks - 1))
