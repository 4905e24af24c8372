"""Contexts of in-context regression, drawn for training: float32, contexts on the last axis, one pass per member.

A context is L tokens x_l ~ N(0, Σ), a query x_q, a teacher β ~ N(0, I/d) and labels y = β . x + ε with noise of
variance σ² that enters once per label, the query's own included: losses are against the noisy label. Where a model
sees tokens only through their products with the query (isotropic tokens, scalar key-query circuits) the length of the
query and L normals have the same law as whole contexts; see `sample_reduced_regression`.
Source: multihead section 2, (2.1), Definitions 5.1 and 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.montecarlo.kernels.multihead_training import noise_to_labels
from sim.montecarlo.kernels.normals import fill_normals
from theory.problems import MAX_SCALE, MultiTaskRegression, RegressionTask, as_integer, as_real
from theory.results import DomainError, FloatArray

Float32Array = npt.NDArray[np.float32]

MAX_CONTEXTS = 2**22
# Generators side by side: enough to vectorise, few enough that starting them costs little.
LANES = 256


@dataclass(frozen=True, slots=True)
class RegressionContexts:
    """n whole contexts for each of m members: what a transformer is shown, and what it should answer.

    embedding: columns z_l = (x_l; y_l), shape (m, context, dim + outputs, n); query: x_q, shape (m, dim, n); target:
    noisy labels of the query, shape (m, outputs, n); teacher: β, shape (m, dim, n). Source: multihead (2.1).
    """

    embedding: Float32Array
    query: Float32Array
    target: Float32Array
    teacher: Float32Array


@dataclass(frozen=True, slots=True)
class ReducedContexts:
    """n contexts for each of m members, as heads with scalar circuits see them; isotropic tokens.

    length: r = ‖x_q‖, shape (m, n); projections: z_l = x_l . x_q / r, shape (m, context, n); labels: y_l, of the
    shape of projections; target: y_q, of that of length; the last two are ``None`` where they were not asked for.
    Source: multihead (3.2).
    """

    length: Float32Array
    projections: Float32Array
    labels: Float32Array | None
    target: Float32Array | None


def float32_normals(generator: np.random.Generator, out: Float32Array) -> None:
    """Fill ``out`` with independent standard normals, ten times faster than NumPy draws them one by one.

    The generator starts `LANES` generators of a kernel that vectorises. Values stay below 6.8 in magnitude and have
    the spacing of 32-bit uniforms; in training, neither shows. out: contiguous, any shape. Source: `sim.montecarlo.
    kernels.normals`. Raises DomainError where ``out`` is not contiguous.
    """
    if not out.flags.c_contiguous:
        raise DomainError(f"out must be contiguous to be filled in place, got strides {out.strides}")
    fill_normals(generator.integers(0, 2**32, (4, LANES), dtype=np.uint32), out.reshape(-1))


def signal_masks(task: RegressionTask | MultiTaskRegression) -> FloatArray:
    """1 where an output uses a coordinate, shape (outputs, dim): all of them for one task. Source: Definition 5.1."""
    if isinstance(task, RegressionTask):
        return np.ones((1, task.dim))
    if not isinstance(task, MultiTaskRegression):
        raise DomainError(f"task must be a RegressionTask or a MultiTaskRegression, got {task!r}")
    masks = np.zeros((len(task.signal_sets), task.dim))
    for row, members in zip(masks, task.signal_sets, strict=True):
        row[np.array(members) - 1] = 1
    return masks


def teacher_variance_of(task: RegressionTask | MultiTaskRegression, teacher_variance: float | None) -> float:
    """Variance τ² of each coordinate of β: as given, 1/d where ``None``. Source: multihead section 2."""
    if teacher_variance is None:
        return 1 / task.dim
    return as_real("teacher_variance", teacher_variance, 0, MAX_SCALE, open_low=True)


def sample_regression(
    task: RegressionTask | MultiTaskRegression,
    count: int,
    generators: Sequence[np.random.Generator],
    *,
    teacher_variance: float | None = None,
) -> RegressionContexts:
    """``count`` independent whole contexts of ``task`` from each generator, that is for each member.

    teacher_variance: τ² of β ~ N(0, τ² I), 1/d where ``None``. Source: multihead (2.1), Definitions 5.1 and 5.2.
    """
    count = as_integer("count", count, 1, MAX_CONTEXTS)
    masks = signal_masks(task)
    outputs, dim = masks.shape
    deviation = np.float32(math.sqrt(teacher_variance_of(task, teacher_variance)))
    noise = np.float32(math.sqrt(task.noise))
    # The query comes as one more token: x_q, and the noise of its labels.
    block = np.empty((len(generators), task.context + 1, dim + outputs, count), np.float32)
    teachers = np.empty((len(generators), dim, count), np.float32)
    for generator, columns, teacher in zip(generators, block, teachers, strict=True):
        float32_normals(generator, columns)
        float32_normals(generator, teacher)
        teacher *= deviation
        _correlate(task, columns[:, :dim])
        noise_to_labels(columns, teacher, masks, noise)
    return RegressionContexts(block[:, :-1], block[:, -1, :dim], block[:, -1, dim:], teachers)


def _correlate(task: RegressionTask | MultiTaskRegression, tokens: Float32Array) -> None:
    """Give standard normal tokens, shape (context, dim, n), the covariance of the task, in place."""
    if isinstance(task, MultiTaskRegression) or task.covariance is None:
        return
    factor = np.linalg.cholesky(task.covariance_matrix()).astype(np.float32)
    for row in range(task.dim - 1, -1, -1):  # from below: row i of the lower factor reads rows up to i only
        tokens[:, row] *= factor[row, row]
        for column in range(row):
            tokens[:, row] += factor[row, column] * tokens[:, column]


def posterior_predictive(
    task: RegressionTask | MultiTaskRegression, contexts: RegressionContexts, *, teacher_variance: float | None = None
) -> tuple[FloatArray, FloatArray]:
    r"""Mean and variance of each label of the query given all that is shown, shape (m, outputs, n) each.

    .. math:: S = \Big(\frac{I}{\tau^2} + \frac1{\sigma^2}\sum_{n,\ell} m_n m_n^\top \odot x_\ell x_\ell^\top\Big)^{-1},
              \quad \bar y_n = (m_n \odot x_q)^\top S\, \frac1{\sigma^2}\sum_{n',\ell} m_{n'} \odot x_\ell y_{n'\ell},
              \quad v_n = \sigma^2 + (m_n \odot x_q)^\top S\, (m_n \odot x_q)

    m_n: indicator of the coordinates of output n. Averaging the loss over the teacher and the query's noise given the
    context gives (ȳ - ŷ)² + v. Source: Gaussian conditioning; the Bayes predictor of multihead section 4.3. Raises
    DomainError where the noise is 0.
    """
    if task.noise == 0:
        raise DomainError("noise must be > 0 for the posterior of the teacher, got 0.0")
    masks = signal_masks(task)
    dim = task.dim
    embedding = np.moveaxis(contexts.embedding, -1, 1).astype(np.float64)
    tokens, labels = embedding[..., :dim], embedding[..., dim:]
    gram = np.swapaxes(tokens, -1, -2) @ tokens
    precision = gram * (masks.T @ masks) / task.noise
    precision += np.eye(dim) / teacher_variance_of(task, teacher_variance)
    moment = ((np.swapaxes(tokens, -1, -2) @ labels) * masks.T).sum(axis=-1) / task.noise
    query = np.moveaxis(contexts.query, -1, 1)[..., None].astype(np.float64) * masks.T
    solved = np.linalg.solve(precision, query)
    mean = (solved * moment[..., None]).sum(axis=-2)
    variance = task.noise + (solved * query).sum(axis=-2)
    return np.swapaxes(mean, -1, -2), np.swapaxes(variance, -1, -2)


def sample_reduced_regression(
    task: RegressionTask, count: int, generators: Sequence[np.random.Generator], *, labels: bool
) -> ReducedContexts:
    r"""``count`` independent contexts from each generator, reduced to what heads with scalar circuits see.

    With β split along and across the query, :math:`\beta^\top x_\ell = \beta_\parallel z_\ell + |\beta_\perp| g_\ell`
    and g_l standard normal, independent of all else, so that with the label noise

    .. math:: y_\ell = \beta_\parallel z_\ell + \sqrt{|\beta_\perp|^2 + \sigma^2}\, g_\ell, \qquad
              y_q = \beta_\parallel r + \varepsilon_q,

    with r ~ χ_d, β_∥ ~ N(0, 1/d), d ‖β_⊥‖² ~ χ²_{d-1}: the law of whole contexts. labels: draw the labels too.
    Source: rotation invariance of multihead (2.1). Raises DomainError where the covariance is not the identity.
    """
    if not isinstance(task, RegressionTask) or task.covariance is not None:
        raise DomainError(f"task must be a RegressionTask with isotropic tokens for reduced contexts, got {task!r}")
    count = as_integer("count", count, 1, MAX_CONTEXTS)
    members = len(generators)
    length = np.empty((members, count), np.float32)
    projections = np.empty((members, task.context, count), np.float32)
    drawn = np.empty_like(projections if labels else projections[:0])
    target = np.empty_like(length)
    for member, generator in enumerate(generators):
        length[member] = np.sqrt(2 * generator.standard_gamma(task.dim / 2, count))
        float32_normals(generator, projections[member])
        if labels:
            _fill_labels(task, generator, length[member], projections[member], drawn[member], target[member])
    return ReducedContexts(length, projections, drawn if labels else None, target if labels else None)


def _fill_labels(
    task: RegressionTask,
    generator: np.random.Generator,
    length: Float32Array,
    projections: Float32Array,
    labels: Float32Array,
    target: Float32Array,
) -> None:
    float32_normals(generator, labels)
    along, noise = generator.standard_normal((2, length.size), dtype=np.float32)
    along /= np.float32(math.sqrt(task.dim))
    across = task.noise * np.ones(length.size)
    if task.dim > 1:
        across += 2 * generator.standard_gamma((task.dim - 1) / 2, length.size) / task.dim
    labels *= np.sqrt(across).astype(np.float32)
    labels += along * projections
    target[:] = along * length + np.float32(math.sqrt(task.noise)) * noise
