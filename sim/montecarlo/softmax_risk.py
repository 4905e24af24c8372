"""Population risk of multi-head softmax attention on in-context regression, by Monte Carlo over reduced contexts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sim.montecarlo.kernels.softmax_risk import softmax_risk_chunk
from sim.montecarlo.stopping import FIRST_LOOK, NORMALS_PER_CHUNK, Progress, draw_until, mean_over_chunks
from sim.streams import MAX_SEED
from theory.problems import MAX_SIZE, RegressionTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, Status

# Chunks of reduced contexts are small enough for many looks and large enough that their overhead does not show.
MAX_CHUNK_CONTEXTS = 2**17
MIN_CHUNK_CONTEXTS = 16
DEFAULT_MAX_CONTEXTS = 2 * 10**8


def softmax_risk_estimate(
    task: RegressionTask,
    omega: ArrayLike,
    mu: ArrayLike,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Estimate:
    """Risk against the noisy label of heads (omega_h, mu_h), averaged exactly over all that attention cannot see.

    task: isotropic tokens; omega, mu: one number per head, shape (h,). relative_error in (0, 1]: requested standard
    error over the risk. max_contexts: limit on the contexts drawn, at least 16 chunks; where it stops the run, the
    status says so. The same seed gives the same bits for any number of workers.
    Source: multihead (2.5), (3.2). Raises DomainError for arguments outside these ranges.
    """
    w, m = _heads(task, omega, mu)
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    seed = as_integer("seed", seed, 0, MAX_SEED)
    size = _chunk_size(task.context * w.size)
    max_contexts = as_integer("max_contexts", max_contexts, FIRST_LOOK * size, MAX_SIZE)

    def draw(rng: np.random.Generator) -> float:
        return float(softmax_risk_chunk(rng, size, task.dim, task.context, task.noise, w, m))

    def error_ratio(means: list[float]) -> float:
        value, stderr = mean_over_chunks(np.array(means))
        return stderr / (value * relative_error) if value > 0 else 0.0  # a risk of exactly 0 has no error

    means = draw_until(
        draw,
        error_ratio,
        seed=seed,
        name=f"softmax risk {w.tolist()} {m.tolist()} {task.canonical()}",
        max_chunks=min(max_contexts // size, 2**32),
        workers=workers,
        progress=progress,
    )
    value, stderr = mean_over_chunks(np.array(means))
    status = Status.DONE if error_ratio(means) <= 1 else Status.SAMPLE_LIMIT
    return Estimate(value, stderr, len(means) * size, len(means), seed, status)


def _chunk_size(work: int) -> int:
    """Contexts in a chunk, fixed by the problem alone."""
    return max(MIN_CHUNK_CONTEXTS, min(MAX_CHUNK_CONTEXTS, NORMALS_PER_CHUNK // (8 * work)))


def _heads(task: RegressionTask, omega: ArrayLike, mu: ArrayLike) -> tuple[FloatArray, FloatArray]:
    if not isinstance(task, RegressionTask):
        raise DomainError(f"task must be a RegressionTask, got {task!r}")
    if task.covariance is not None:
        raise DomainError("task.covariance must be None (isotropic tokens) for reduced contexts, got a matrix")
    if task.context > NORMALS_PER_CHUNK:
        raise DomainError(f"task.context must be at most {NORMALS_PER_CHUNK} to be sampled, got {task.context}")
    w, m = np.array(omega, dtype=np.float64), np.array(mu, dtype=np.float64)
    if w.ndim != 1 or w.shape != m.shape or w.size == 0:
        raise DomainError(f"omega and mu must hold one number per head each, got shapes {w.shape} and {m.shape}")
    for name, values in (("omega", w), ("mu", m)):
        if not np.isfinite(values).all():
            raise DomainError(f"{name} must be finite, got {float(values[~np.isfinite(values)][0])!r}")
    return w, m
