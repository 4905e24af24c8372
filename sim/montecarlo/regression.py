r"""Predictors of in-context regression on the same whole contexts, for any covariance of tokens and teacher.

Gradient descent, ridge and attention heads all predict :math:`\sum_\ell w_\ell y_\ell` with weights that depend on
tokens and query alone. Given those, the mean loss over the teacher N(0, B) and the label noise is exactly

.. math:: e^\top B e + \sigma^2(1 + |w|^2), \qquad e = x_q - \sum_\ell w_\ell x_\ell,

so that only the inputs are sampled. All predictors read the same contexts: differences of risks have small errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from sim.montecarlo.comparison import CommonSample, draw_common_sample
from sim.montecarlo.kernels.regression import (
    DEBIASED,
    EXPONENTIAL,
    RIDGE,
    SHIFTED_TANH,
    SQUARE,
    VANILLA,
    regression_chunk,
)
from sim.montecarlo.softmax_risk import checked_heads
from sim.montecarlo.stopping import DEFAULT_MAX_CONTEXTS, Progress, chunk_size
from theory.problems import RegressionTask, as_covariance, as_real
from theory.results import DomainError, FloatArray

# Contexts of more numbers than this (0.1 s on one core) are refused.
MAX_CONTEXT_NUMBERS = 2 * 10**7
# Differences of similar predictors are skewer than losses, so chunks hold several times the usual contexts: with 256,
# 95 % intervals of such differences covered 93.2 % where each risk's covered 94.5 %.
CHUNK_FACTOR = 4
# The loss of least squares has a finite variance from this many tokens beyond the dimension.
LEAST_SQUARES_SURPLUS = 4
MAX_COEFFICIENT = 1e100
Activation = Literal["exp", "1+tanh", "(1+Cx)^2"]
ACTIVATION_KINDS = {"exp": EXPONENTIAL, "1+tanh": SHIFTED_TANH, "(1+Cx)^2": SQUARE}


@dataclass(frozen=True, slots=True, eq=False)
class GradientDescent:
    r"""One step from zero, :math:`\frac{\eta}{L}\sum_\ell y_\ell x_\ell^\top G x_q`: linear attention.

    step: η; preconditioner: G, shape (d, d), or ``None`` for the identity; debiased: the mean token is subtracted
    from each token. Source: multihead Observation 3, (4.11), (5.5), (5.6).
    """

    step: float = 1.0
    preconditioner: ArrayLike | None = None
    debiased: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Ridge:
    r"""Ridge regression, :math:`\hat\beta = (X^\top X + \Lambda)^{-1}X^\top y`.

    penalty: Λ, positive definite, shape (d, d), or a number λ > 0 for λI. The Bayes predictor has Λ = σ² B^-1: that
    is λ = dσ² for the prior N(0, I/d). Source: multihead section 4.3.
    """

    penalty: ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class LeastSquares:
    """Ordinary least squares, the limit of `Ridge` without penalty; needs context >= dim + 4.

    Source: multihead section 4.3.
    """


@dataclass(frozen=True, slots=True, eq=False)
class AttentionHeads:
    r"""Normalised attention, :math:`\sum_h\mu_h\sum_\ell y_\ell f(\omega_h s_\ell)/\sum_m f(\omega_h s_m)`.

    omega, mu: one number per head; key_query: Ω, shape (d, d), in the scores :math:`s_\ell = x_\ell^\top\Omega x_q`,
    or ``None`` for the identity; activation: f, "exp" for softmax, "1+tanh" or "(1+Cx)^2" with C = scale. The
    activation 1 + Cx is not there: its normaliser changes sign, and the risk is infinite.
    Source: multihead (3.2), (4.12), (5.4), section 5.2.
    """

    omega: ArrayLike
    mu: ArrayLike
    key_query: ArrayLike | None = None
    activation: Activation = "exp"
    scale: float = 1.0


Predictor = GradientDescent | Ridge | LeastSquares | AttentionHeads
# Kind, matrix, scale, omega and mu, as the kernel takes them.
_Row = tuple[int, FloatArray, float, FloatArray, FloatArray]


def bayes_predictor(task: RegressionTask, prior: ArrayLike | None = None) -> Ridge:
    """The posterior mean, ridge with the penalty σ² B^-1. prior: B, shape (d, d), or ``None`` for I/d.

    Source: multihead section 4.3. Raises DomainError without noise.
    """
    if not task.noise > 0:
        raise DomainError(f"task.noise must be > 0 for the Bayes predictor, got {task.noise}: see LeastSquares")
    return Ridge(task.noise * np.linalg.inv(_prior(task, prior)))


def regression_risks(
    task: RegressionTask,
    predictors: Mapping[str, Predictor],
    *,
    prior: ArrayLike | None = None,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CommonSample:
    """Risks against the noisy label of ``predictors``, by name, on the same contexts.

    prior: covariance B of the teacher, shape (d, d), or ``None`` for I/d. relative_error in (0, 1]: requested
    standard error of every risk over its value. max_contexts: limit on the contexts drawn, at least 32 chunks; where
    it stops the run, the status says so. The contexts depend on task and seed alone: other predictors read the same
    ones in another call, so that estimates of one seed are not independent. Same bits for any number of workers.
    Source: multihead (2.5). Raises DomainError for arguments outside these ranges.
    """
    _check_task(task)
    if not isinstance(predictors, Mapping) or not predictors:
        raise DomainError(f"predictors must map at least one name to a predictor, got {predictors!r}")
    matrix = _prior(task, prior)
    rows = [_row(task, name, predictor) for name, predictor in predictors.items()]
    kinds, matrices, scales = (np.array(column) for column in zip(*(row[:3] for row in rows), strict=True))
    omega, mu = _padded([row[3] for row in rows]), _padded([row[4] for row in rows])
    root = np.linalg.cholesky(task.covariance_matrix())
    size = CHUNK_FACTOR * chunk_size(task.dim * task.context)

    def draw(rng: np.random.Generator) -> FloatArray:
        means: FloatArray = regression_chunk(
            rng, size, task.context, root, matrix, task.noise, kinds, matrices, scales, omega, mu
        )
        return means

    return draw_common_sample(
        draw,
        tuple(predictors),
        stream_name=f"regression contexts {task.canonical()}",
        chunk_contexts=size,
        relative_error=relative_error,
        culprit="predictors",
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )


def _row(task: RegressionTask, name: str, predictor: Predictor) -> _Row:
    """What the kernel takes for one predictor, after validation."""
    none = np.zeros(1)
    if isinstance(predictor, GradientDescent):
        step = as_real(f"{name}: step", predictor.step, -MAX_COEFFICIENT, MAX_COEFFICIENT)
        G = _matrix(f"{name}: preconditioner", predictor.preconditioner, task.dim)
        return (DEBIASED if predictor.debiased else VANILLA), step * G, 1.0, none, none
    if isinstance(predictor, Ridge):
        return RIDGE, _penalty(name, predictor.penalty, task.dim), 1.0, none, none
    if isinstance(predictor, LeastSquares):
        if task.context < task.dim + LEAST_SQUARES_SURPLUS:
            raise DomainError(
                f"{name}: least squares needs task.context >= dim + {LEAST_SQUARES_SURPLUS} "
                f"= {task.dim + LEAST_SQUARES_SURPLUS} for an error bar to exist, got {task.context}"
            )
        return RIDGE, np.zeros((task.dim, task.dim)), 1.0, none, none
    if isinstance(predictor, AttentionHeads):
        if predictor.activation not in ACTIVATION_KINDS:
            allowed = ", ".join(ACTIVATION_KINDS)
            raise DomainError(f"{name}: activation must be one of {allowed}, got {predictor.activation!r}")
        omega, mu = checked_heads(predictor.omega, predictor.mu)
        key_query = _matrix(f"{name}: key_query", predictor.key_query, task.dim)
        scale = as_real(f"{name}: scale", predictor.scale, 0, 1e3, open_low=True)
        return ACTIVATION_KINDS[predictor.activation], key_query, scale, omega, mu
    raise DomainError(f"{name} must be one of the predictors of sim.montecarlo.regression, got {predictor!r}")


def _padded(vectors: list[FloatArray]) -> FloatArray:
    """Vectors as the rows of one matrix, filled up with zeros: heads with mu = 0, which the kernel skips."""
    most = max(vector.size for vector in vectors)
    return np.array([np.pad(vector, (0, most - vector.size)) for vector in vectors])


def _matrix(name: str, value: ArrayLike | None, dim: int) -> FloatArray:
    if value is None:
        return np.eye(dim)
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise DomainError(f"{name} must be a matrix of numbers, got {value!r}") from None
    if matrix.shape != (dim, dim) or not np.isfinite(matrix).all():
        raise DomainError(f"{name} must be a finite matrix of shape ({dim}, {dim}), got {value!r}")
    return matrix


def _penalty(name: str, value: ArrayLike, dim: int) -> FloatArray:
    if np.ndim(cast("Any", value)) == 0:
        return as_real(f"{name}: penalty", value, 0, MAX_COEFFICIENT, open_low=True) * np.eye(dim)
    return np.array(as_covariance(f"{name}: penalty", value, dim))


def _prior(task: RegressionTask, prior: ArrayLike | None) -> FloatArray:
    return np.eye(task.dim) / task.dim if prior is None else np.array(as_covariance("prior", prior, task.dim))


def _check_task(task: RegressionTask) -> None:
    if not isinstance(task, RegressionTask):
        raise DomainError(f"task must be a RegressionTask, got {task!r}")
    numbers = task.dim * max(task.context, task.dim)
    if numbers > MAX_CONTEXT_NUMBERS:
        raise DomainError(
            f"task must have dim * max(context, dim) at most {MAX_CONTEXT_NUMBERS} to be sampled context by context, "
            f"got {task.dim} * max({task.context}, {task.dim}) = {numbers}"
        )
