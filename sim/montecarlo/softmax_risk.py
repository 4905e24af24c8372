r"""Population risk of multi-head softmax attention on in-context regression, by Monte Carlo over reduced contexts.

A context is reduced to the length r of the query and the components z of the tokens along it: all else is averaged
exactly. What is left varies mostly as the loss of the heads to first order in ω,
:math:`w_\ell = (m_0 + m_1 r(z_\ell-\bar z))/L`, whose mean is known exactly, so that loss is a control variate: its
deviation from its mean, times a coefficient that a pilot run chooses, is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from sim.montecarlo.comparison import CommonSample, draw_common_sample
from sim.montecarlo.kernels.softmax_risk import softmax_risk_chunk
from sim.montecarlo.stopping import NORMALS_PER_CHUNK, Progress
from sim.streams import MAX_SEED, stream
from theory.problems import RegressionTask, as_integer
from theory.results import DomainError, Estimate, FloatArray

# Chunks of reduced contexts are small enough for many looks and large enough that their overhead does not show.
MAX_CHUNK_CONTEXTS = 2**11
MIN_CHUNK_CONTEXTS = 16
DEFAULT_MAX_CONTEXTS = 2 * 10**8
# The coefficient of the control variate costs a relative 1 / (PILOT_CHUNKS - 2) of the remaining variance.
PILOT_CHUNKS = 32
MAX_PILOT_CONTEXTS = 512
# Contexts side by side: their scores stay in the cache (1 MB), and long ones are treated one by one.
MAX_LANES = 128
LANE_NUMBERS = 2**17

Heads = tuple[ArrayLike, ArrayLike]


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
    error over the risk. max_contexts: limit on the contexts drawn besides those of the pilot, at least 32 chunks;
    where it stops the run, the status says so. The same seed gives the same bits for any number of workers.
    Source: multihead (2.5), (3.2). Raises DomainError for arguments outside these ranges.
    """
    sample = softmax_risk_comparison(
        task,
        {"risk": (omega, mu)},
        relative_error=relative_error,
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )
    return sample.estimate("risk")


def softmax_risk_comparison(
    task: RegressionTask,
    predictors: Mapping[str, Heads],
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CommonSample:
    """Risks of several settings of the heads on the same contexts: their differences have small errors.

    predictors: name -> (omega, mu), each with one number per head; a head that several settings share is computed
    once. Every risk reaches ``relative_error``; other arguments as in `softmax_risk_estimate`.
    Source: multihead (2.5), (3.2). Raises DomainError for arguments outside these ranges.
    """
    _check_task(task)
    names, omega, mu = _shared_heads(predictors)
    seed = as_integer("seed", seed, 0, MAX_SEED)
    size = _chunk_size(task.context * omega.size)
    name = f"softmax risk {omega.tolist()} {mu.tolist()} {task.canonical()}"
    expected = first_order_risks(task, omega, mu)
    coefficients = _control_coefficients(_losses(task, omega, mu, _pilot_contexts(size)), name, seed)
    losses = _losses(task, omega, mu, size)

    def draw(rng: np.random.Generator) -> FloatArray:
        sampled, first_order = losses(rng)
        controlled: FloatArray = sampled - coefficients * (first_order - expected)
        return controlled

    return draw_common_sample(
        draw,
        names,
        stream_name=name,
        chunk_contexts=size,
        relative_error=relative_error,
        culprit="omega and mu",
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )


def first_order_risks(task: RegressionTask, omega: FloatArray, mu: FloatArray) -> FloatArray:
    r"""Exact mean loss of the weights :math:`(m_0 + m_1 r (z_\ell - \bar z))/L` of each predictor, shape (S,).

    .. math:: 1 + \sigma^2 - 2m_1\frac{L-1}{L} + m_1^2\frac{L^2-1}{L^2} + \frac{m_0^2}{dL}
              + \kappa\Big(\frac{m_0^2}{L} + m_1^2\frac{d(L-1)}{L^2}\Big), \quad \kappa = \frac{d-1}d + \sigma^2

    omega (H,), mu (S, H); :math:`m_0 = \sum_h\mu_h`, :math:`m_1 = \sum_h\mu_h\omega_h`. It follows from
    :math:`E r^2 = d` and the first two moments of the variance of L normals.
    Source: multihead (4.10), averaged directly.
    """
    d, L, noise = task.dim, task.context, task.noise
    output, product = mu.sum(axis=1), mu @ omega
    kappa = (d - 1) / d + noise
    along = 1 - 2 * product * (L - 1) / L + product**2 * (L * L - 1) / L**2 + output**2 / (d * L)
    risks: FloatArray = along + noise + kappa * (output**2 / L + product**2 * d * (L - 1) / L**2)
    return risks


def _losses(
    task: RegressionTask, omega: FloatArray, mu: FloatArray, contexts: int
) -> Callable[[np.random.Generator], tuple[FloatArray, FloatArray]]:
    """The kernel with everything but the generator filled in."""
    lanes = max(1, min(MAX_LANES, LANE_NUMBERS // (task.context * (omega.size + 1))))

    def draw(rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        means: tuple[FloatArray, FloatArray] = softmax_risk_chunk(
            rng, contexts, lanes, task.dim, task.context, task.noise, omega, mu
        )
        return means

    return draw


def _control_coefficients(
    losses: Callable[[np.random.Generator], tuple[FloatArray, FloatArray]], name: str, seed: int
) -> FloatArray:
    """Regression coefficients of the losses on their controls, (S,), from chunks of a stream of their own."""
    rng = stream(seed, f"{name}, pilot")
    sampled, control = (np.array(column) for column in zip(*(losses(rng) for _ in range(PILOT_CHUNKS)), strict=True))
    deviation = control - control.mean(axis=0)
    coefficients: FloatArray = (deviation * sampled).sum(axis=0) / (deviation**2).sum(axis=0)
    return coefficients


def _chunk_size(work: int) -> int:
    """Contexts in a chunk, fixed by the problem alone."""
    return max(MIN_CHUNK_CONTEXTS, min(MAX_CHUNK_CONTEXTS, NORMALS_PER_CHUNK // (8 * work)))


def _pilot_contexts(size: int) -> int:
    """Contexts in a pilot chunk: the pilot costs at most half of the shortest main run."""
    return min(MAX_PILOT_CONTEXTS, size // 4)


def _check_task(task: RegressionTask) -> None:
    if not isinstance(task, RegressionTask):
        raise DomainError(f"task must be a RegressionTask, got {task!r}")
    if task.covariance is not None:
        raise DomainError("task.covariance must be None (isotropic tokens) for reduced contexts, got a matrix")
    if task.context > NORMALS_PER_CHUNK:
        raise DomainError(f"task.context must be at most {NORMALS_PER_CHUNK} to be sampled, got {task.context}")


def _shared_heads(predictors: Mapping[str, Heads]) -> tuple[tuple[str, ...], FloatArray, FloatArray]:
    """Names, the distinct omega of all predictors (H,) and the mu of each for each of them (S, H)."""
    if not isinstance(predictors, Mapping) or not predictors:
        raise DomainError(f"predictors must map at least one name to (omega, mu), got {predictors!r}")
    heads = [checked_heads(*pair) for pair in predictors.values()]
    omega = np.unique(np.concatenate([w for w, _ in heads]))
    mu = np.zeros((len(heads), omega.size))
    for row, (w, m) in zip(mu, heads, strict=True):
        np.add.at(row, np.searchsorted(omega, w), m)
    return tuple(predictors), omega, mu


def checked_heads(omega: ArrayLike, mu: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Heads omega and mu as float64 arrays with one finite number per head. Raises DomainError otherwise.

    Source: validation of multihead (3.2); no equation.
    """
    w, m = np.array(omega, dtype=np.float64), np.array(mu, dtype=np.float64)
    if w.ndim != 1 or w.shape != m.shape or w.size == 0:
        raise DomainError(f"omega and mu must hold one number per head each, got shapes {w.shape} and {m.shape}")
    for name, values in (("omega", w), ("mu", m)):
        if not np.isfinite(values).all():
            raise DomainError(f"{name} must be finite, got {float(values[~np.isfinite(values)][0])!r}")
    return w, m
