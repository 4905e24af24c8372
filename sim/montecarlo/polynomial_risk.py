"""Population risk of linear attention on the easy task, whole and mode by mode, by Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from sim.contexts import haar_rotations
from sim.montecarlo.comparison import CommonSample, draw_common_sample
from sim.montecarlo.kernels.polynomial_risk import context_risk_chunk, matrix_risk_batch, population_risk_chunk
from sim.montecarlo.stopping import DEFAULT_MAX_CONTEXTS, Progress, chunk_size
from theory.problems import CopyTask
from theory.results import DomainError, Estimate, FloatArray

# Measured: a multiplication by S takes a quarter of the time of one by a token, whose sums cannot be vectorised.
FORMING_ADVANTAGE = 4
# Contexts that take more than this many multiplications (about a second) are refused.
MAX_CONTEXT_WORK = 10**9
# ... and so are contexts of more numbers than this (160 MB for each worker).
MAX_CONTEXT_NUMBERS = 2 * 10**7
# Each mode has an estimate of its own up to this dimension.
MAX_MODES = 4096


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
    max_contexts: limit on the contexts drawn, at least 32 chunks; where it stops the run, the status says so.
    Returns the risk in units of the label variance, the same bits for any number of workers.
    Source: depth (22), (26). Raises DomainError for arguments outside these ranges.
    """
    steps = _checked_steps(layer_steps)
    work = _checked_work(task, steps.size)
    if not isinstance(exact_match, bool | np.bool_):
        raise DomainError(f"exact_match must be True or False, got {exact_match!r}")
    size = chunk_size(work)
    modes = _risk_chunks(task, steps, bool(exact_match), size)
    sample = draw_common_sample(
        lambda rng: np.array([modes(rng).sum()]),
        ("risk",),
        stream_name=f"polynomial risk, depth {steps.size}, {task.canonical()}",
        chunk_contexts=size,
        relative_error=relative_error,
        culprit="layer_steps",
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )
    return sample.estimate("risk")


def polynomial_mode_risks(
    task: CopyTask,
    layers: ArrayLike,
    *,
    relative_error: float,
    seed: int,
    exact_match: bool = False,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CommonSample:
    r"""The risk of `polynomial_risk` split over the eigenmodes, and for layers with matrices of any kind.

    .. math:: R = \sum_k R_k, \qquad R_k = \omega_k\, E\,(D q)_k^2, \qquad
              D = (I - S B_1)(I - S B_2) \cdots (I - S B_L)

    layers: s_1..s_L, shape (L,), as in `polynomial_risk`; or B_1..B_L, shape (L, dim, dim), each with the factor v/L
    of depth (22) included, in the frame of the network, to which every context is rotated afresh. relative_error is
    that of the whole risk; other arguments as in `polynomial_risk`. The sample has the names "risk" and "mode 1" to
    "mode d", with d at most 4096; modes count as the spectrum lists them. At infinite context and equal scalar steps
    R_k is the term of depth (30); at finite context S mixes the modes.
    Source: depth (22), (26), (30). Raises DomainError for arguments outside these ranges.
    """
    array = np.asarray(layers)
    if array.ndim == 1:
        steps = _checked_steps(layers)
        work, kind = _checked_work(task, steps.size), f"depth {steps.size}"
    else:
        steps = _checked_matrices(task, layers)
        work, kind = _matrix_work(task, len(steps)), f"matrices, depth {len(steps)}"
    if not isinstance(exact_match, bool | np.bool_):
        raise DomainError(f"exact_match must be True or False, got {exact_match!r}")
    dim = len(task.spectrum.input_variances())
    if dim > MAX_MODES:
        raise DomainError(f"task.spectrum.dim must be at most {MAX_MODES} for estimates of each mode, got {dim}")
    size = chunk_size(work)
    chunks = _risk_chunks if array.ndim == 1 else _matrix_chunks
    modes = chunks(task, steps, bool(exact_match), size)

    def draw(rng: np.random.Generator) -> FloatArray:
        means = modes(rng)
        return np.append(means.sum(), means)

    return draw_common_sample(
        draw,
        ("risk", *(f"mode {k}" for k in range(1, dim + 1))),
        stream_name=f"polynomial risk, {kind}, {task.canonical()}",
        chunk_contexts=size,
        relative_error=relative_error,
        culprit="layers",
        judged=("risk",),
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )


def _risk_chunks(
    task: CopyTask, steps: FloatArray, exact_match: bool, size: int
) -> Callable[[np.random.Generator], FloatArray]:
    """The kernel with everything but the generator filled in: the risk of each mode, shape (dim,)."""
    sqrt_input, teacher = np.sqrt(task.spectrum.input_variances()), task.spectrum.teacher_variances()
    context = task.context
    if context is None:
        return lambda rng: np.asarray(population_risk_chunk(rng, size, sqrt_input, teacher, steps))
    form_covariance = _forming_pays(sqrt_input.size, context, steps.size)
    return lambda rng: np.asarray(
        context_risk_chunk(rng, size, sqrt_input, teacher, steps, context, exact_match, form_covariance)
    )


def _matrix_chunks(
    task: CopyTask, matrices: FloatArray, exact_match: bool, size: int
) -> Callable[[np.random.Generator], FloatArray]:
    """The same for layers with matrices (L, dim, dim)."""
    variances, teacher = task.spectrum.input_variances(), task.spectrum.teacher_variances()

    def draw(rng: np.random.Generator) -> FloatArray:
        tokens = rng.standard_normal((size, task.context or 0, len(variances))) * np.sqrt(variances)
        from_tokens = exact_match and task.context is not None
        queries = tokens[:, 0] if from_tokens else rng.standard_normal((size, len(variances))) * np.sqrt(variances)
        rotations = haar_rotations(size, len(variances), rng)
        return np.asarray(matrix_risk_batch(tokens, queries, rotations, matrices, variances, teacher))

    return draw


def _forming_pays(dim: int, context: int, depth: int) -> bool:
    """Whether forming S takes less time than reading the tokens twice in each layer."""
    return dim * dim * (context + depth) < FORMING_ADVANTAGE * 2 * context * dim * depth


def _work(dim: int, context: int | None, depth: int) -> int:
    """Numbers drawn and multiplications done for one context."""
    if context is None:
        return dim * (1 + depth)
    layers = dim * dim * (context + depth) if _forming_pays(dim, context, depth) else 2 * context * dim * depth
    return dim * (context + 1) + layers


def _checked_steps(layer_steps: ArrayLike) -> FloatArray:
    try:
        steps = np.ascontiguousarray(layer_steps, dtype=np.float64)
    except (TypeError, ValueError):
        raise DomainError(f"layer_steps must be a sequence of numbers, got {layer_steps!r}") from None
    if np.ndim(layer_steps) != 1 or not np.isfinite(steps).all():
        raise DomainError(f"layer_steps must be a sequence of finite numbers, got {layer_steps!r}")
    return steps


def _checked_matrices(task: CopyTask, layers: ArrayLike) -> FloatArray:
    dim = task.spectrum.dim if isinstance(task, CopyTask) else None
    try:
        matrices = np.ascontiguousarray(layers, dtype=np.float64)
    except (TypeError, ValueError):
        raise DomainError(f"layers must be a sequence of numbers or of matrices, got {layers!r}") from None
    if matrices.ndim != 3 or matrices.shape[1:] != (dim, dim) or not np.isfinite(matrices).all():
        raise DomainError(
            f"layers must be finite steps of shape (L,) or matrices of shape (L, dim, dim) with dim {dim}, "
            f"got shape {matrices.shape}"
        )
    return matrices


def _matrix_work(task: CopyTask, depth: int) -> int:
    """Numbers drawn and multiplications done for one context and its rotation."""
    dim = len(task.spectrum.input_variances())
    work = _checked_work(task, depth) + dim * dim * (3 * depth + dim)
    if work > MAX_CONTEXT_WORK:
        raise DomainError(
            f"task must need at most {MAX_CONTEXT_WORK} multiplications for {depth} layers with matrices, "
            f"got dim {dim}, context {task.context}: {work}"
        )
    return work


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
