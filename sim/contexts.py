"""Contexts of both tasks, drawn in the eigenbasis of the input covariance, and averages over them.

A context is P tokens x_i = O z_i and a query q = O z with z ~ N(0, diag λ), a rotation O of its own, a teacher
β = O γ with γ ~ N(0, diag ω), and the target row that averages the labels of the top-k tokens. On the copy task the
query is one of the tokens and the target is its label. Norms, cosines, labels and losses do not depend on O, so tokens
are kept in the eigenbasis; only what a network sees is rotated. Where the input is isotropic the tokens look the same
in every basis and O only turns the teacher: its direction is then uniform given the inputs, with
E β β^T = (tr Ω / d) I, and no rotation is drawn. Source: depth (3)-(6), (57)-(58).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sim.streams import stream
from theory.problems import CopyTask, TopKTask, as_integer
from theory.results import DomainError, Estimate, FloatArray, IntArray

# Vectors with lengths between these bounds have squares well inside the range of float64; others are rescaled first.
SMALLEST_LENGTH = 1e-140
LARGEST_LENGTH = 1e140
MAX_BATCH = 2**20


@dataclass(frozen=True, slots=True)
class Contexts:
    """A batch of n contexts of a `TopKTask`, or of a `CopyTask` with finitely many tokens.

    task: where they come from; tokens: z_i in the eigenbasis, shape (n, context, dim); query: z, shape (n, dim);
    directions, query_direction: the same divided by their lengths; cosines: of the tokens with the query, shape
    (n, context); target: the row t with 1/k at the top-k tokens, or 1 at the token that is the query, and 0 elsewhere,
    shape (n, context); rotation: O, shape (n, dim, dim), or ``None`` for the identity.
    Source: depth (3)-(6), (57)-(58).
    """

    task: TopKTask | CopyTask
    tokens: FloatArray
    query: FloatArray
    directions: FloatArray
    query_direction: FloatArray
    cosines: FloatArray
    target: FloatArray
    rotation: FloatArray | None

    def rotated(self, vectors: FloatArray) -> FloatArray:
        """Vectors of the eigenbasis as a network sees them, O v, shape (n, ..., dim) as given. Source: depth (3)."""
        if self.rotation is None:
            return vectors
        rows = vectors.reshape(len(vectors), -1, vectors.shape[-1])
        return (rows @ np.swapaxes(self.rotation, 1, 2)).reshape(vectors.shape)

    def label_factors(self) -> FloatArray:
        r"""Factors F with :math:`E[y y^T] = F F^T` over the teacher, given what the network sees; (n, context, dim).

        The squared error of weights w, averaged over the teacher, is then :math:`E (w y)^2 = |F^T w|^2`: the squared
        length of :math:`\sum_i w_i x_i` in the metric of Ω. Source: depth (1), (3), (12).
        """
        return self.tokens * np.sqrt(visible_teacher_variances(self.task))


def visible_teacher_variances(task: TopKTask | CopyTask) -> FloatArray:
    """Variances of the teacher in the basis of the tokens, given what the network sees, shape (dim,).

    They are ω_k where the inputs show the eigenbasis, and the mean of all ω_k where the inputs are isotropic and hide
    it. Source: depth (3).
    """
    variances = task.spectrum.teacher_variances()
    return np.full_like(variances, variances.mean()) if task.spectrum.isotropic_input else variances


def unit_directions(vectors: FloatArray) -> FloatArray:
    """``vectors`` of shape (..., dim) divided by their lengths, whatever the scale: no clamp of small lengths.

    Raises DomainError where a vector is zero or not finite. Source: the cosine of depth (57).
    """
    with np.errstate(over="ignore", under="ignore"):
        lengths = np.sqrt(np.einsum("...i,...i->...", vectors, vectors))
    if not ((lengths > SMALLEST_LENGTH) & (lengths < LARGEST_LENGTH)).all():
        return _directions_of_any_length(vectors)
    directions: FloatArray = vectors / lengths[..., None]
    return directions


def _directions_of_any_length(vectors: FloatArray) -> FloatArray:
    largest = np.abs(vectors).max(axis=-1, keepdims=True)
    bad = ~(np.isfinite(largest) & (largest > 0))
    if bad.any():
        raise DomainError(
            f"vectors must be finite and not zero to have a direction, got largest entry {largest[bad][0]}"
        )
    scaled = vectors / largest
    directions: FloatArray = scaled / np.linalg.norm(scaled, axis=-1, keepdims=True)
    return directions


def top_indices(scores: FloatArray, top_k: int) -> IntArray:
    """Indices of the ``top_k`` largest scores of each row, the lowest index first on ties, shape (n, top_k).

    scores: shape (n, context). Source: depth (6).
    """
    order: IntArray = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
    return order


def target_rows(cosines: FloatArray, top_k: int) -> FloatArray:
    """Rows t with 1/k at the ``top_k`` largest cosines and 0 elsewhere, shape (n, context). Source: depth (58)."""
    target = np.zeros_like(cosines)
    np.put_along_axis(target, top_indices(cosines, top_k), 1 / top_k, axis=-1)
    return target


def haar_rotations(count: int, dim: int, generator: np.random.Generator) -> FloatArray:
    """Uniform (Haar) orthogonal matrices, shape (count, dim, dim).

    The QR factor of a Gaussian matrix is Haar only after each column takes the sign of the diagonal of R: without it
    the factor depends on the sign convention of the library. Source: depth (3).
    """
    orthogonal, triangular = np.linalg.qr(generator.standard_normal((count, dim, dim)))
    signs = np.where(np.diagonal(triangular, axis1=1, axis2=2) < 0, -1.0, 1.0)
    rotations: FloatArray = orthogonal * signs[:, None, :]
    return rotations


def sample_contexts(
    task: TopKTask | CopyTask, count: int, generator: np.random.Generator, *, rotate: bool = True
) -> Contexts:
    """``count`` independent contexts of ``task``.

    rotate: draw a Haar rotation per context; it is skipped where the input is isotropic, and may be switched off by
    callers that use cosines alone, which no rotation changes. On the copy task the query is one of the tokens, every
    one with equal chance. Source: depth (3)-(6). Raises DomainError for infinitely many tokens.
    """
    count = as_integer("count", count, 1, MAX_BATCH)
    if task.context is None:
        raise DomainError("context must be finite for contexts to be drawn, got None")
    deviations = np.sqrt(task.spectrum.input_variances())
    dim = len(deviations)
    tokens = generator.standard_normal((count, task.context, dim)) * deviations
    if isinstance(task, CopyTask):
        match = generator.integers(task.context, size=count)
        query = tokens[np.arange(count), match]
    else:
        query = generator.standard_normal((count, dim)) * deviations
    rotation = haar_rotations(count, dim, generator) if rotate and not task.spectrum.isotropic_input else None
    directions, query_direction = unit_directions(tokens), unit_directions(query)
    cosines = (directions @ query_direction[:, :, None])[:, :, 0]
    if isinstance(task, CopyTask):
        target = np.zeros_like(cosines)
        target[np.arange(count), match] = 1
    else:
        target = target_rows(cosines, task.top_k)
    return Contexts(task, tokens, query, directions, query_direction, cosines, target, rotation)


def sample_teachers(task: TopKTask | CopyTask, count: int, generator: np.random.Generator) -> FloatArray:
    """Teachers of ``count`` contexts in the basis of their tokens, shape (count, dim).

    In the eigenbasis the teacher is γ ~ N(0, diag ω). Where the input is isotropic it has the length of γ and a
    uniform direction instead, which is how the rotation leaves it. Source: depth (3), (4).
    """
    deviations = np.sqrt(task.spectrum.teacher_variances())
    teachers: FloatArray = generator.standard_normal((count, len(deviations))) * deviations
    if task.spectrum.isotropic_input:
        lengths = np.sqrt(np.einsum("ni,ni->n", teachers, teachers))
        teachers = lengths[:, None] * unit_directions(generator.standard_normal(teachers.shape))
    return teachers


def sample_labels(contexts: Contexts, generator: np.random.Generator) -> FloatArray:
    """Labels y_i = β . x_i with one teacher drawn per context, shape (n, context). Source: depth (1), (3), (4)."""
    teachers = sample_teachers(contexts.task, len(contexts.query), generator)
    labels: FloatArray = (contexts.tokens @ teachers[:, :, None])[:, :, 0]
    return labels


@dataclass(frozen=True, slots=True)
class SampleSize:
    """How many contexts to average over: ``chunks`` independent streams of ``chunk_batches`` batches of ``batch``.

    Memory is bounded by one batch; the standard error comes from the chunks, so there are at least 2.
    Source: Monte Carlo averages; no equation.
    """

    chunks: int = 64
    chunk_batches: int = 8
    batch: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", as_integer("chunks", self.chunks, 2, MAX_BATCH))
        object.__setattr__(self, "chunk_batches", as_integer("chunk_batches", self.chunk_batches, 1, MAX_BATCH))
        object.__setattr__(self, "batch", as_integer("batch", self.batch, 1, MAX_BATCH))

    @property
    def contexts(self) -> int:
        """Number of contexts in all."""
        return self.chunks * self.chunk_batches * self.batch


def chunk_means(
    measure: Callable[[Contexts], FloatArray],
    task: TopKTask | CopyTask,
    seed: int,
    name: str,
    size: SampleSize,
    *,
    rotate: bool = True,
) -> FloatArray:
    """Means over contexts of the quantities that ``measure`` returns, one row per chunk, shape (chunks, quantities).

    measure: contexts -> quantities of each context, shape (n, quantities). Chunk i draws its batches one after the
    other from ``stream(seed, name, i)``; rotate: as in `sample_contexts`. Source: Monte Carlo averages; no equation.
    """
    rows = []
    for index in range(size.chunks):
        generator = stream(seed, name, index)
        batches = (sample_contexts(task, size.batch, generator, rotate=rotate) for _ in range(size.chunk_batches))
        rows.append(np.mean([measure(contexts).mean(axis=0) for contexts in batches], axis=0))
    return np.array(rows)


def estimate_from_chunks(values: FloatArray, samples: int, seed: int) -> Estimate:
    """The mean of equal, independent chunks with its standard error; values: shape (chunks,), at least 2.

    samples: number of contexts in all chunks together; seed: of their stream. Source: Monte Carlo; no equation.
    """
    chunks = as_integer("chunks", len(values), 2)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(chunks)), samples, chunks, seed)
