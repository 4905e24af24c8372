"""Loss floor of linear attention on the difficult task, by Monte Carlo over whole contexts.

In a basis psi_1..psi_R that is orthonormal for the Gram matrix of depth (49), the best predictor of degree r has the
coefficients h_1..h_r. The plug-in estimate ``T - |h|^2`` of the floor (51), (54) is the small difference of two large
averages; on steep spectra its variance is tens of times that of the residual at fixed coefficients. So a pilot run
estimates h, the main run averages the residual y_r at the pilot's coefficients, and the exact identity
``min = E y_r - |E g_r|^2``, with g_r minus half the gradient, removes what the pilot missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from sim.montecarlo.kernels.floor import floor_chunk
from sim.montecarlo.stopping import (
    DEFAULT_MAX_CONTEXTS,
    FIRST_LOOK,
    Progress,
    chunk_size,
    draw_until,
    mean_over_chunks,
)
from sim.streams import MAX_SEED
from theory.problems import MAX_SIZE, TopKTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, Status

# What the kernel returns for one chunk: T, c (R,), y (R,) and g (R, R).
FloorChunk = tuple[float, FloatArray, FloatArray, FloatArray]

# Contexts larger than this many normals (0.1 s on one core) are refused: a floor would take hours.
MAX_CONTEXT_WORK = 2 * 10**7
PILOT_CHUNKS = 8
GRAM_TOLERANCE = 1e-8
# All modes but the largest must hold this share of the largest input variance, or float64 cannot rank the cosines.
MIN_REST_OF_SPECTRUM = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class FloorMoments:
    """Means of each of m chunks of equal size, in units of the label variance; see `floor_chunk`.

    target_power (m,): T; cross_moments (m, R): h; residuals (m, R): loss of the given coefficients of degree
    1..R; gradients (m, R, R): minus half its gradient. Source: depth (48), (49).
    """

    contexts_per_chunk: int
    target_power: FloatArray
    cross_moments: FloatArray
    residuals: FloatArray
    gradients: FloatArray

    def floors(self) -> tuple[FloatArray, FloatArray]:
        """Floor of each degree and its standard error, both (R,); see `minimal_risks`."""
        return minimal_risks(self.residuals, self.gradients)


@dataclass(frozen=True, slots=True)
class FloorEstimate:
    """Loss floors of the difficult task, in units of the label variance.

    by_degree: floor of the best polynomial of degree 1..R; target_power: T, the floor of degree 0; cross_moments:
    h_1..h_R, the coefficients of the best polynomial in the orthonormal basis; pilot_contexts: contexts drawn by the
    pilot, on top of the ``samples`` of each estimate. The status of `by_degree` is that of each floor; the other
    estimates carry the status of the run. Source: depth (49), (51), (53).
    """

    by_degree: tuple[Estimate, ...]
    target_power: Estimate
    cross_moments: tuple[Estimate, ...]
    pilot_contexts: int

    @property
    def floor(self) -> Estimate:
        """The floor of the highest degree."""
        return self.by_degree[-1]

    @property
    def status(self) -> Status:
        """`Status.DONE` where the floors of all degrees have reached the requested error."""
        return self.target_power.status


def minimal_risks(residuals: FloatArray, gradients: FloatArray) -> tuple[FloatArray, FloatArray]:
    r"""Floor of each degree and its standard error, both (R,), from residuals (m, R) and gradients (m, R, R).

    .. math:: \hat R_r = \frac1m \sum_c y_{cr} - \frac1{m(m-1)} \sum_{c \ne c'} g_{cr} \cdot g_{c'r}

    The second term estimates ``|E g_r|^2`` without bias, from pairs of distinct chunks. By that much the minimum lies
    below the residual of the given coefficients, because the Gram matrix of the basis is the identity. The standard
    error is the delete-one jackknife of the whole statistic over the m >= 3 chunks. Source: depth (48), (51).
    """
    chunks = residuals.shape[0]
    squares = (gradients**2).sum(axis=2)
    total_residual, total_gradient, total_square = residuals.sum(axis=0), gradients.sum(axis=0), squares.sum(axis=0)
    value = _minimal_risk(total_residual, total_gradient, total_square, chunks)
    without_one = _minimal_risk(
        total_residual - residuals, total_gradient - gradients, total_square - squares, chunks - 1
    )
    deviations = without_one - without_one.mean(axis=0)
    spread = np.array([math.hypot(*column) for column in deviations.T])
    return value, spread * math.sqrt((chunks - 1) / chunks)


def _minimal_risk(residual: FloatArray, gradient: FloatArray, square: FloatArray, chunks: int) -> FloatArray:
    """The statistic of `minimal_risks` from the sums over ``chunks`` chunks of y, g and ``|g|^2``."""
    pairs = (gradient**2).sum(axis=-1) - square
    value: FloatArray = residual / chunks - pairs / (chunks * (chunks - 1))
    return value


def floor_moments(
    task: TopKTask,
    basis: FloatArray,
    coefficients: FloatArray,
    *,
    seed: int,
    chunks: int,
    name: str = "floor moments",
    workers: int | None = None,
    progress: Progress | None = None,
) -> FloorMoments:
    """Moments of ``chunks`` >= 2 chunks of contexts at fixed coefficients of the polynomials.

    basis (R, dim): psi_j(lambda_k), orthonormal in the sense sum_k omega_k lambda_k psi_i psi_j = delta_ij;
    coefficients (R, R), lower triangular: row r-1 belongs to degree r. name: of the random stream, which differs
    from task to task. Source: depth (48), (49). Raises DomainError for arguments outside these ranges.
    """
    draw = _floor_chunks(task, basis, coefficients)
    chunks = as_integer("chunks", chunks, 2, 2**32)
    results = draw_until(
        draw, lambda _: math.inf, seed=seed, name=_stream_name(name, task), max_chunks=chunks, workers=workers,
        progress=progress,
    )  # fmt: skip
    return _stack(results, chunk_size(_normals(task)))


def residual_floor(
    task: TopKTask,
    basis: FloatArray,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> FloorEstimate:
    """Loss floor of the difficult task for covariance polynomials of degree 1..R, with honest errors.

    basis (R, dim): psi_j(lambda_k), j = 1..R, of degree j and zero at 0, orthonormal in the sense
    sum_k omega_k lambda_k psi_i psi_j = delta_ij. relative_error in (0, 1]: requested standard error of the floor of
    every degree, relative to the floor. max_contexts: limit on the contexts drawn, pilot included, at least 24
    chunks; where it stops the run, the status says so. The same seed gives the same bits for any number of workers,
    and other tasks get independent bits. The floor assumes that the empirical covariance S is Sigma: it is not a
    bound at finite context. Source: depth (51), (53), (54). Raises DomainError for arguments outside these ranges.
    """
    check_task(task)
    return estimate_floor(
        lambda coefficients: _floor_chunks(task, basis, coefficients),
        basis=checked_basis(task, basis),
        size=chunk_size(_normals(task)),
        name=lambda part: _stream_name(f"floor {part}", task),
        relative_error=relative_error,
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )


def estimate_floor(
    sampler: Callable[[FloatArray], Callable[[np.random.Generator], FloorChunk]],
    *,
    basis: FloatArray,
    size: int,
    name: Callable[[str], str],
    relative_error: float,
    seed: int,
    max_contexts: int,
    workers: int | None,
    progress: Progress | None,
    tolerance: Callable[[FloatArray], FloorChunk] | None = None,
) -> FloorEstimate:
    """A pilot run at zero coefficients, then a main run at the coefficients that it found.

    sampler: draws a chunk of ``size`` contexts at given coefficients (R, R); name: of the streams "pilot" and "main";
    max_contexts: limit on all contexts drawn; tolerance: at given coefficients, the error of the means of a chunk that
    sampling does not show; it is added to the standard errors. Source: depth (51), (53). Raises DomainError for a
    relative_error, seed or max_contexts out of range.
    """
    seed = as_integer("seed", seed, 0, MAX_SEED)
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    fewest = (PILOT_CHUNKS + FIRST_LOOK) * size
    max_contexts = as_integer("max_contexts", max_contexts, fewest, MAX_SIZE)
    degrees = basis.shape[0]
    pilot = draw_until(
        sampler(np.zeros((degrees, degrees))), lambda _: math.inf, seed=seed, name=name("pilot"),
        max_chunks=PILOT_CHUNKS, workers=workers, progress=None,
    )  # fmt: skip
    # The basis is orthonormal, so a lower degree keeps the first coefficients of a higher one.
    coefficients = np.tril(np.tile(_stack(pilot, size).cross_moments.mean(axis=0), (degrees, 1)))
    none = 0.0, np.zeros(degrees), np.zeros(degrees), np.zeros((degrees, degrees))
    added = none if tolerance is None else tolerance(coefficients)

    def error_ratio(results: list[FloorChunk]) -> float:
        values, errors = _stack(results, size).floors()
        return max(_relative_errors(values, errors + added[2])) / relative_error

    results = draw_until(
        sampler(coefficients),
        error_ratio,
        seed=seed,
        name=name("main"),
        max_chunks=min(max_contexts // size - PILOT_CHUNKS, 2**32),
        workers=workers,
        progress=progress,
    )
    return _floor_estimate(_stack(results, size), coefficients[-1], added, relative_error, seed)


def _floor_estimate(
    moments: FloorMoments, coefficients: FloatArray, added: FloorChunk, relative_error: float, seed: int
) -> FloorEstimate:
    """The estimates of a main run at pilot ``coefficients`` (R,) of the highest degree; ``added`` widens the errors."""
    chunks, size = moments.target_power.size, moments.contexts_per_chunk
    values, errors = moments.floors()
    errors = errors + added[2]
    reached = [error <= relative_error for error in _relative_errors(values, errors)]
    status = _status(all(reached))
    # E g_Rj = h_j - a_Rj varies less than c_j, because the predictor has been subtracted.
    cross = [mean_over_chunks(coefficients[j] + moments.gradients[:, -1, j]) for j in range(coefficients.size)]
    power, power_error = mean_over_chunks(moments.target_power)

    def estimate(value: float, stderr: float, status: Status) -> Estimate:
        return Estimate(float(value), float(stderr), chunks * size, chunks, seed, status)

    return FloorEstimate(
        by_degree=tuple(estimate(v, e, _status(r)) for v, e, r in zip(values, errors, reached, strict=True)),
        target_power=estimate(power, power_error + added[0], status),
        cross_moments=tuple(
            estimate(value, stderr + extra, status) for (value, stderr), extra in zip(cross, added[1], strict=True)
        ),
        pilot_contexts=PILOT_CHUNKS * size,
    )


def _status(reached: bool) -> Status:
    return Status.DONE if reached else Status.SAMPLE_LIMIT


def _relative_errors(values: FloatArray, errors: FloatArray) -> list[float]:
    """Standard errors relative to the values; infinite where noise has pushed an estimate to zero or below."""
    return [float(e / v) if v > 0 else math.inf for v, e in zip(values, errors, strict=True)]


def _stack(results: list[FloorChunk], size: int) -> FloorMoments:
    power, cross, residuals, gradients = (np.array(column) for column in zip(*results, strict=True))
    return FloorMoments(size, power, cross, residuals, gradients)


def _stream_name(name: str, task: TopKTask) -> str:
    """Tasks get independent streams, so that the rows of a table of floors are independent at one seed."""
    return f"{name} {task.canonical()}"


def _normals(task: TopKTask) -> int:
    """Normals in the tokens of one context."""
    return len(task.spectrum.input_variances()) * task.context


def _floor_chunks(
    task: TopKTask, basis: FloatArray, coefficients: FloatArray
) -> Callable[[np.random.Generator], FloorChunk]:
    """The kernel with everything but the generator filled in, after validation."""
    check_task(task)
    basis = checked_basis(task, basis)
    coefficients = _checked_coefficients(coefficients, basis.shape[0])
    sqrt_input, teacher = np.sqrt(task.spectrum.input_variances()), task.spectrum.teacher_variances()
    size = chunk_size(_normals(task))

    def draw(rng: np.random.Generator) -> FloorChunk:
        chunk: FloorChunk = floor_chunk(rng, size, sqrt_input, teacher, task.context, task.top_k, basis, coefficients)
        return chunk

    return draw


def check_task(task: TopKTask) -> None:
    """Refuse what cannot be sampled context by context. Raises DomainError."""
    if not isinstance(task, TopKTask):
        raise DomainError(f"task must be a TopKTask, got {task!r}")
    # A spectrum of a task is finite, but the types of the problems cannot say so.
    dim = cast("int", task.spectrum.dim)
    work = task.context * max(dim, task.top_k)
    if work > MAX_CONTEXT_WORK:
        raise DomainError(
            f"task must have context * max(dim, top_k) at most {MAX_CONTEXT_WORK} to be sampled context by context, "
            f"got {task.context} * max({dim}, {task.top_k}) = {work}"
        )
    variances = np.sort(task.spectrum.input_variances())
    rest = float(variances[:-1].sum() / variances[-1])
    if dim > 1 and rest < MIN_REST_OF_SPECTRUM:
        raise DomainError(
            f"task.spectrum must have input variances below the largest that add up to at least "
            f"{MIN_REST_OF_SPECTRUM:g} of it, or cosines cannot be ranked in float64, got {rest:g}"
        )


def checked_basis(task: TopKTask, basis: FloatArray) -> FloatArray:
    """``basis`` as a float64 array (R, dim) whose Gram matrix, depth (50), is the identity. DomainError otherwise."""
    basis = _as_matrix("basis", basis)
    weights = task.spectrum.label_variances()
    if basis.shape[1] != weights.size or not 1 <= basis.shape[0] <= weights.size:
        raise DomainError(
            f"basis must have shape (R, dim) with 1 <= R <= dim = {weights.size}, got shape {basis.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow fails the check below
        defect = float(np.abs((basis * weights) @ basis.T - np.eye(basis.shape[0])).max())
    if not defect <= GRAM_TOLERANCE:
        raise DomainError(
            f"basis must be orthonormal, sum_k omega_k lambda_k psi_i psi_j = delta_ij to {GRAM_TOLERANCE:g}, "
            f"got a difference of {defect:g}"
        )
    return basis


def _checked_coefficients(coefficients: FloatArray, degrees: int) -> FloatArray:
    coefficients = _as_matrix("coefficients", coefficients)
    if coefficients.shape != (degrees, degrees) or np.triu(coefficients, 1).any():
        raise DomainError(
            f"coefficients must be a lower triangular matrix of shape ({degrees}, {degrees}), "
            f"got shape {coefficients.shape} with {np.count_nonzero(np.triu(coefficients, 1))} entries above it"
        )
    return coefficients


def _as_matrix(name: str, value: object) -> FloatArray:
    try:
        matrix = np.ascontiguousarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise DomainError(f"{name} must be a matrix of numbers, got {value!r}") from None
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise DomainError(f"{name} must be a matrix of finite numbers, got {value!r}")
    return matrix
