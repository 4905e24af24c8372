"""Loss floor of linear attention on the difficult task at finite context, by Monte Carlo.

The model reads the empirical covariance S of the context, which holds the selected tokens themselves, so polynomials
in S may pass the floor (53) of polynomials in Sigma. Their vectors S^r q are taken in a basis that a pilot run makes
nearly orthonormal (Arnoldi, because S is not symmetric in the metric of Omega); the floor is the least sampled loss
over coefficients, whose bias of order degree / contexts the jackknife over chunks removes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sim.montecarlo.floor_moments import check_task
from sim.montecarlo.kernels.empirical_floor import draw_context, empirical_floor_chunk
from sim.montecarlo.stopping import (
    DEFAULT_MAX_CONTEXTS,
    FIRST_LOOK,
    Progress,
    chunk_size,
    draw_until,
    mean_over_chunks,
)
from sim.streams import MAX_SEED, stream
from theory.problems import MAX_SIZE, TopKTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, Status

MAX_DEGREE = 32
# The pilot keeps this many contexts at most, and this many numbers (128 MB).
PILOT_CONTEXTS = 32
PILOT_NUMBERS = 2**24
# A new Krylov vector shorter than this share of its image is rounding: the degrees of freedom are exhausted.
RANK_TOLERANCE = 1e-9
# What the kernel returns for one chunk: T, h (R,) and G (R, R).
EmpiricalChunk = tuple[float, FloatArray, FloatArray]


@dataclass(frozen=True, slots=True, eq=False)
class EmpiricalMoments:
    """Means of each of m chunks of equal size, in units of the label variance.

    target_power (m,): T; cross_moments (m, R): h; gram (m, R, R): G, in the basis of ``recurrence`` (R, R), see
    `kernels.empirical_floor.krylov_vectors`. Source: depth (49) with S in the place of Sigma.
    """

    contexts_per_chunk: int
    recurrence: FloatArray
    target_power: FloatArray
    cross_moments: FloatArray
    gram: FloatArray


@dataclass(frozen=True, slots=True)
class EmpiricalFloorEstimate:
    """Floors of the best polynomial of degree 1..R in S, in units of the label variance.

    by_degree: with jackknife errors; target_power: T, the floor of degree 0; pilot_contexts: contexts that chose the
    basis, on top of the ``samples`` of each estimate. Source: depth (51) with S in the place of Sigma.
    """

    by_degree: tuple[Estimate, ...]
    target_power: Estimate
    pilot_contexts: int

    @property
    def floor(self) -> Estimate:
        """The floor of the highest degree."""
        return self.by_degree[-1]

    @property
    def status(self) -> Status:
        """`Status.DONE` where the floors of all degrees have reached the requested error."""
        return self.target_power.status


def pilot_recurrence(task: TopKTask, degree: int, seed: int) -> tuple[FloatArray, int]:
    """Recurrence (R, R) of polynomials in S that are orthonormal on a few sampled contexts, and their number.

    degree: R, at most 32. The basis decides about rounding only, never about the floor. S differs from context to
    context, so that a degree beyond dim still makes a difference. Source: Arnoldi process for depth (47), (49) with
    S. Raises DomainError for a degree that the pilot's contexts do not resolve.
    """
    check_task(task)
    variances, teacher = task.spectrum.input_variances(), task.spectrum.teacher_variances()
    dim, context = variances.size, task.context
    degree = as_integer("degree", degree, 1, MAX_DEGREE)
    count = max(2, min(PILOT_CONTEXTS, PILOT_NUMBERS // (dim * context)))
    rng = stream(seed, f"empirical floor pilot {task.canonical()}")
    tokens, vector = np.empty((count, context, dim)), np.empty((count, dim))
    work = np.empty(1), np.empty(1, np.int64), np.empty((1, dim)), np.empty(dim)
    for index in range(count):
        draw_context(rng, np.sqrt(variances), vector[index], tokens[index], *work)
    recurrence, basis = np.zeros((degree, degree)), np.zeros((degree, count, dim))
    for j in range(degree):
        image = np.einsum("npk,np->nk", tokens, np.einsum("npk,nk->np", tokens, vector)) / context
        start = _length(image, teacher)
        for _ in range(2):  # twice is enough
            for i in range(j):
                overlap = float(np.einsum("nk,k,nk->", basis[i], teacher, image)) / count
                recurrence[j, i] += overlap
                image = image - overlap * basis[i]
        length = _length(image, teacher)
        if not length > RANK_TOLERANCE * start:
            raise DomainError(f"degree must be at most {j}, which the contexts of the pilot resolve, got {degree}")
        recurrence[j, j] = 1 / length
        basis[j] = vector = image / length
    return recurrence, count


def _length(vectors: FloatArray, teacher: FloatArray) -> float:
    """Root mean square length of ``vectors`` (n, dim) in the metric of Omega."""
    return float(np.sqrt(np.mean(vectors**2 @ teacher)))


def empirical_moments(
    task: TopKTask,
    degree: int,
    *,
    seed: int,
    chunks: int,
    workers: int | None = None,
    progress: Progress | None = None,
) -> EmpiricalMoments:
    """Moments T, h, G of ``chunks`` >= 2 chunks of contexts. Source: depth (49) with S in the place of Sigma."""
    seed = as_integer("seed", seed, 0, MAX_SEED)
    recurrence, _ = pilot_recurrence(task, degree, seed)
    results = draw_until(
        _chunks(task, recurrence), lambda _: math.inf, seed=seed, name=_stream_name(task),
        max_chunks=as_integer("chunks", chunks, 2, 2**32), workers=workers, progress=progress,
    )  # fmt: skip
    return _stack(results, recurrence, _size(task))


def least_losses(power: FloatArray, cross: FloatArray, gram: FloatArray) -> FloatArray:
    r"""Least losses :math:`T - h_r^\top G_r^{-1} h_r` of degree r = 1..R, shape (..., R).

    power: T, shape (...); cross: h, shape (..., R); gram: G, shape (..., R, R), positive definite. One Cholesky
    factor serves all degrees. Source: depth (51).
    """
    factor = np.linalg.cholesky(gram)
    whitened = np.linalg.solve(factor, cross[..., np.newaxis])[..., 0]
    losses: FloatArray = power[..., np.newaxis] - np.cumsum(whitened**2, axis=-1)
    return losses


def jackknife_floors(moments: EmpiricalMoments) -> tuple[FloatArray, FloatArray]:
    """Floors of degree 1..R and standard errors, both (R,): delete-one-chunk jackknife, bias removed.

    Source: depth (51) at sampled T, h and G.
    """
    T, h, G = moments.target_power, moments.cross_moments, moments.gram
    chunks = T.size
    whole = least_losses(T.mean(axis=0), h.mean(axis=0), G.mean(axis=0))
    left_out = least_losses(*((value.sum(axis=0) - value) / (chunks - 1) for value in (T, h, G)))
    mean = left_out.mean(axis=0)
    spread = np.sqrt((chunks - 1) / chunks * np.sum((left_out - mean) ** 2, axis=0))
    return chunks * whole - (chunks - 1) * mean, spread


def empirical_floor(
    task: TopKTask,
    degree: int,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> EmpiricalFloorEstimate:
    """Loss floor of the difficult task for polynomials of degree 1..R in the empirical covariance S.

    degree: R, at most 32. relative_error in (0, 1]: requested standard error of the floor of every degree, relative
    to the floor. max_contexts: limit on the contexts drawn, at least 16 chunks.
    The same seed gives the same bits for any number of workers. Source: depth (51) with S (beyond the paper).
    Raises DomainError for arguments outside these ranges.
    """
    seed = as_integer("seed", seed, 0, MAX_SEED)
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    recurrence, pilot = pilot_recurrence(task, degree, seed)
    size = _size(task)
    max_contexts = as_integer("max_contexts", max_contexts, FIRST_LOOK * size, MAX_SIZE)

    def relative_errors(results: list[EmpiricalChunk]) -> FloatArray:
        values, errors = jackknife_floors(_stack(results, recurrence, size))
        return np.where(values > 0, errors / np.where(values > 0, values, 1.0), np.inf)

    results = draw_until(
        _chunks(task, recurrence), lambda drawn: float(relative_errors(drawn).max()) / relative_error, seed=seed,
        name=_stream_name(task), max_chunks=min(max_contexts // size, 2**32), workers=workers, progress=progress,
    )  # fmt: skip
    moments = _stack(results, recurrence, size)
    reached = relative_errors(results) <= relative_error
    status = Status.DONE if reached.all() else Status.SAMPLE_LIMIT
    chunks = len(results)

    def estimate(value: float, error: float, status: Status) -> Estimate:
        return Estimate(value, error, chunks * size, chunks, seed, status)

    floors = tuple(
        estimate(float(v), float(e), Status.DONE if r else Status.SAMPLE_LIMIT)
        for v, e, r in zip(*jackknife_floors(moments), reached, strict=True)
    )
    return EmpiricalFloorEstimate(floors, estimate(*mean_over_chunks(moments.target_power), status), pilot)


def _size(task: TopKTask) -> int:
    return chunk_size(task.spectrum.input_variances().size * task.context)


def _stream_name(task: TopKTask) -> str:
    """Tasks get independent streams."""
    return f"empirical floor {task.canonical()}"


def _chunks(task: TopKTask, recurrence: FloatArray) -> Callable[[np.random.Generator], EmpiricalChunk]:
    """The kernel with everything but the generator filled in."""
    sqrt_input, teacher = np.sqrt(task.spectrum.input_variances()), task.spectrum.teacher_variances()
    size = _size(task)

    def draw(rng: np.random.Generator) -> EmpiricalChunk:
        chunk: EmpiricalChunk = empirical_floor_chunk(
            rng, size, sqrt_input, teacher, task.context, task.top_k, recurrence
        )
        return chunk

    return draw


def _stack(results: list[EmpiricalChunk], recurrence: FloatArray, size: int) -> EmpiricalMoments:
    power, cross, gram = (np.array(column) for column in zip(*results, strict=True))
    return EmpiricalMoments(size, recurrence, power, cross, gram)
