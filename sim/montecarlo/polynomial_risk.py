"""Population risk of linear attention with one scalar step per layer on the easy task, by Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from sim.montecarlo.kernels.polynomial_risk import context_risk_chunk, population_risk_chunk
from sim.montecarlo.stopping import (
    DEFAULT_MAX_CONTEXTS,
    FIRST_LOOK,
    Progress,
    chunk_size,
    draw_until,
    mean_over_chunks,
)
from sim.streams import MAX_SEED
from theory.problems import MAX_SIZE, CopyTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, Status

# Measured: a multiplication by S takes a quarter of the time of one by a token, whose sums cannot be vectorised.
FORMING_ADVANTAGE = 4
# Contexts that take more than this many multiplications (about a second) are refused.
MAX_CONTEXT_WORK = 10**9
# ... and so are contexts of more numbers than this (160 MB for each worker).
MAX_CONTEXT_NUMBERS = 2 * 10**7


def polynomial_risk(
    task: CopyTask,
    layer_steps: ArrayLike,
    *,
    relative_error: float,
    seed: int,
    exact_match: bool = False,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Estimate:
    r"""Risk of depth-L linear attention with the mask (75) and layers B_l = kappa_l I, averaged over the teacher.

    .. math:: R = E\, q^T D^T \Omega D q, \qquad D = (I - s_1 S)(I - s_2 S) \cdots (I - s_L S)

    task: spectra and context P; S is the empirical covariance of the context, or Sigma where ``task.context`` is
    ``None``. layer_steps: s_1..s_L, shape (L,), L >= 0; s_l = kappa_l v / L in the notation of depth (27), in units
    of an inverse input variance. exact_match: the query is one of the tokens, as in depth (5), else an independent
    draw; without effect at infinite context. relative_error in (0, 1]: requested standard error over the risk.
    max_contexts: limit on the contexts drawn, at least 16 chunks; where it stops the run, the status says so.
    Returns the risk in units of the label variance, the same bits for any number of workers.
    Source: depth (22), (26). Raises DomainError for arguments outside these ranges.
    """
    steps = _checked_steps(layer_steps)
    work = _checked_work(task, steps.size)
    if not isinstance(exact_match, bool | np.bool_):
        raise DomainError(f"exact_match must be True or False, got {exact_match!r}")
    seed = as_integer("seed", seed, 0, MAX_SEED)
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    size = chunk_size(work)
    max_contexts = as_integer("max_contexts", max_contexts, FIRST_LOOK * size, MAX_SIZE)

    def error_ratio(means: list[float]) -> float:
        value, stderr = _checked_mean(means)
        return stderr / (value * relative_error) if value > 0 else 0.0  # a risk of exactly 0 has no error

    means = draw_until(
        _risk_chunks(task, steps, bool(exact_match), size),
        error_ratio,
        seed=seed,
        name=f"polynomial risk, depth {steps.size}, {task.canonical()}",
        max_chunks=min(max_contexts // size, 2**32),
        workers=workers,
        progress=progress,
    )
    value, stderr = _checked_mean(means)
    status = Status.DONE if error_ratio(means) <= 1 else Status.SAMPLE_LIMIT
    return Estimate(value, stderr, len(means) * size, len(means), seed, status)


def _risk_chunks(
    task: CopyTask, steps: FloatArray, exact_match: bool, size: int
) -> Callable[[np.random.Generator], float]:
    """The kernel with everything but the generator filled in."""
    sqrt_input, teacher = np.sqrt(task.spectrum.input_variances()), task.spectrum.teacher_variances()
    context = task.context
    if context is None:
        return lambda rng: float(population_risk_chunk(rng, size, sqrt_input, teacher, steps))
    form_covariance = _forming_pays(sqrt_input.size, context, steps.size)
    return lambda rng: float(
        context_risk_chunk(rng, size, sqrt_input, teacher, steps, context, exact_match, form_covariance)
    )


def _forming_pays(dim: int, context: int, depth: int) -> bool:
    """Whether forming S takes less time than reading the tokens twice in each layer."""
    return dim * dim * (context + depth) < FORMING_ADVANTAGE * 2 * context * dim * depth


def _work(dim: int, context: int | None, depth: int) -> int:
    """Numbers drawn and multiplications done for one context."""
    if context is None:
        return dim * (1 + depth)
    layers = dim * dim * (context + depth) if _forming_pays(dim, context, depth) else 2 * context * dim * depth
    return dim * (context + 1) + layers


def _checked_mean(means: list[float]) -> tuple[float, float]:
    array = np.array(means)
    if not np.isfinite(array).all():
        raise DomainError("layer_steps must keep the risk finite in float64, got steps that make it overflow")
    return mean_over_chunks(array)


def _checked_steps(layer_steps: ArrayLike) -> FloatArray:
    try:
        steps = np.ascontiguousarray(layer_steps, dtype=np.float64)
    except (TypeError, ValueError):
        raise DomainError(f"layer_steps must be a sequence of numbers, got {layer_steps!r}") from None
    if np.ndim(layer_steps) != 1 or not np.isfinite(steps).all():
        raise DomainError(f"layer_steps must be a sequence of finite numbers, got {layer_steps!r}")
    return steps


def _checked_work(task: CopyTask, depth: int) -> int:
    if not isinstance(task, CopyTask):
        raise DomainError(f"task must be a CopyTask, got {task!r}")
    dim = task.spectrum.dim
    if dim is None:
        raise DomainError("task.spectrum.dim must be finite for sampling, got None")
    numbers = dim if task.context is None else dim * max(task.context, dim)
    work = _work(dim, task.context, depth)
    if numbers > MAX_CONTEXT_NUMBERS or work > MAX_CONTEXT_WORK:
        raise DomainError(
            f"task must have dim * max(context, dim) at most {MAX_CONTEXT_NUMBERS} and need at most "
            f"{MAX_CONTEXT_WORK} multiplications for {depth} layers, got dim {dim}, context {task.context}: "
            f"{numbers} and {work}"
        )
    return work
