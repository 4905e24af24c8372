r"""Features of the mean-field programme of softmax attention: what layers of many types read from common contexts.

A layer type is a pair (α, β): its logits are :math:`\hat x_i\cdot(\alpha\hat q + \beta\eta)`, with η uniform on the
unit vectors orthogonal to the query. A deep model whose layers are drawn from a law on types, with gain, has in the
limit the loss :math:`T - 2h^\top w + w^\top Gw`, where w >= 0 is the law times the gain. Here T, h and G are sampled.
Three things keep the errors small: all types see the same contexts and the same η; the η of one average are a whole
orthonormal frame with both signs; and given all directions, lengths of tokens and teachers are averaged exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from sim.contexts import haar_rotations, sample_contexts
from sim.montecarlo.kernels.mean_field import FRAMES, mean_field_chunk, scan_chunk
from sim.montecarlo.stopping import Progress, draw_until, mean_over_chunks
from sim.streams import MAX_SEED
from theory.problems import MAX_SIZE, CopyTask, TopKTask, as_integer, as_real
from theory.results import DomainError, FloatArray

# Up to this scale no product of the exponentials of a type, at least exp(-3 * 230), is subnormal (which is slow).
MAX_SCALE = 230.0
CONTEXTS_PER_CHUNK = 256
# Numbers in the tokens of one context: larger contexts would need gigabytes per chunk.
MAX_CONTEXT_SIZE = 2**18
MAX_TYPES = 4096
STREAM = "mean field"
# What the kernel returns for one chunk: T (B,), h (B, J), G (B, J, J) and A (B, J).
FeatureChunk = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
_Result = TypeVar("_Result")
_Batch = tuple[FloatArray, FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True, slots=True, eq=False)
class MeanFieldFeatures:
    r"""Means of each of m chunks of equal size for J layer types and B teachers, in units of the label variance.

    types (J, 2): rows (α, β); teachers (B, dim): ω_k; target_power (m, B): T; cross (m, B, J): h; gram
    (m, B, J, J): G, from products of independent draws of the noise; single_power (m, B, J): A, the power of one
    layer, with the same draw in both factors. Source: depth (59)-(63) for layers drawn from a law.
    """

    contexts_per_chunk: int
    types: FloatArray
    teachers: FloatArray
    target_power: FloatArray
    cross: FloatArray
    gram: FloatArray
    single_power: FloatArray

    @property
    def chunks(self) -> int:
        """Number of chunks m."""
        return len(self.target_power)

    @property
    def contexts(self) -> int:
        """Number of contexts in all chunks."""
        return self.chunks * self.contexts_per_chunk


@dataclass(frozen=True, slots=True, eq=False)
class TypeScan:
    """Means over the contexts of a `MeanFieldFeatures` for K other layer types, for given weights.

    types (K, 2); cross (B, K): h_k; slope (B, K): h_k - sum_j G_kj w_j, minus half the gradient of the loss, positive
    where the type would lower it. Source: gradient of depth (60) in the law of the layers.
    """

    types: FloatArray
    cross: FloatArray
    slope: FloatArray


def visible_teachers(task: TopKTask | CopyTask, teachers: FloatArray | None = None) -> FloatArray:
    """Variances ω_k of one teacher per row, (B, dim), as the inputs show them; by default that of the task alone.

    Where the inputs are isotropic they hide the eigenbasis, and every ω_k becomes the mean. Source: depth (3).
    """
    dim = len(task.spectrum.input_variances())
    rows = task.spectrum.teacher_variances()[None] if teachers is None else np.array(teachers, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != dim or len(rows) == 0:
        raise DomainError(f"teachers must have shape (B, {dim}) with B >= 1, got {rows.shape}")
    if not (np.isfinite(rows).all() and (rows >= 0).all() and (rows.max(axis=1) > 0).all()):
        raise DomainError("teachers must be finite and >= 0, with an entry > 0 in every row")
    return np.tile(rows.mean(axis=1, keepdims=True), (1, dim)) if task.spectrum.isotropic_input else rows


def orthogonal_frames(query_direction: FloatArray, count: int, generator: np.random.Generator) -> FloatArray:
    """Uniform orthonormal frames of the space orthogonal to unit queries, (n, count, dim - 1, dim).

    query_direction: (n, dim), dim >= 2. A Haar rotation of dim - 1 coordinates, then the reflection that takes the
    first unit vector to the query. Each vector of a frame is uniform. Source: rotation invariance, depth (3).
    """
    n, dim = query_direction.shape
    frames = np.zeros((n, count, dim - 1, dim))
    frames[..., 1:] = haar_rotations(n * count, dim - 1, generator).reshape(n, count, dim - 1, dim - 1)
    # The reflection from -e_1 or e_1, whichever is farther from the query, loses no digits.
    sign = np.where(query_direction[:, :1] > 0, -1.0, 1.0)
    mirror = -sign * query_direction
    mirror[:, 0] += 1
    mirror /= np.linalg.norm(mirror, axis=1, keepdims=True)
    heights = np.einsum("nfij,nj->nfi", frames, mirror)
    reflected: FloatArray = frames - 2 * heights[..., None] * mirror[:, None, None, :]
    return reflected


def length_moments(dim: int) -> tuple[float, float]:
    r"""Squared mean and variance of the length :math:`\chi_d` of a standard normal vector. Source: depth (4)."""
    mean = math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    return mean**2, dim - mean**2


def mean_field_features(
    task: TopKTask,
    types: FloatArray,
    *,
    seed: int,
    chunks: int,
    teachers: FloatArray | None = None,
    name: str = STREAM,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MeanFieldFeatures:
    """Features of ``types`` from ``chunks`` >= 2 chunks of `CONTEXTS_PER_CHUNK` contexts.

    types (J, 2): rows (α, β) in [0, 230]; teachers (B, dim): ω_k of several teachers on the same inputs, by default
    that of the task. The contexts depend on the inputs, seed and name alone, so features of other types are of the
    same contexts; same bits for any number of workers. Source: depth (59)-(63).
    Raises DomainError for arguments outside these ranges.
    """
    chunks = as_integer("chunks", chunks, 2, 2**32)
    return _features(task, types, teachers, seed, chunks, name, workers, progress, lambda _: math.inf)


def mean_field_features_until(
    task: TopKTask,
    types: FloatArray,
    weights: FloatArray,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int,
    teachers: FloatArray | None = None,
    name: str = STREAM,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MeanFieldFeatures:
    """The same, from as many chunks as the loss at pilot ``weights`` (B, J) needs for ``relative_error``.

    relative_error in (0, 1]: largest standard error of that loss over its value, of any teacher. max_contexts: limit
    on the contexts, at least two chunks. To first order the minimum has the error of the loss at fixed weights near
    it. Source: depth (60). Raises DomainError for arguments outside these ranges.
    """
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    size = CONTEXTS_PER_CHUNK
    max_chunks = as_integer("max_contexts", max_contexts, 2 * size, MAX_SIZE) // size

    def error_ratio(results: list[FeatureChunk]) -> float:
        power, cross, gram, _ = (np.array(column) for column in zip(*results, strict=True))
        losses = losses_at(power, cross, gram, weights)
        pairs = [mean_over_chunks(column) for column in losses.T]
        return max(error / mean if mean > 0 else math.inf for mean, error in pairs) / relative_error

    return _features(task, types, teachers, seed, min(max_chunks, 2**32), name, workers, progress, error_ratio)


def losses_at(power: FloatArray, cross: FloatArray, gram: FloatArray, weights: FloatArray) -> FloatArray:
    """T - 2 h.w + w.G w of every chunk and teacher, (m, B), at ``weights`` (B, J). Source: depth (60), L to infinity.

    power (m, B), cross (m, B, J), gram (m, B, J, J).
    """
    w = np.asarray(weights, dtype=np.float64)
    losses: FloatArray = power - 2 * np.einsum("mbj,bj->mb", cross, w) + np.einsum("bj,mbjk,bk->mb", w, gram, w)
    return losses


def scan_types(
    task: TopKTask,
    types: FloatArray,
    weights: FloatArray,
    scanned: FloatArray,
    *,
    seed: int,
    chunks: int,
    teachers: FloatArray | None = None,
    name: str = STREAM,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TypeScan:
    """Slope of the loss towards ``scanned`` types (K, 2) at ``weights`` (B, J) of ``types`` (J, 2).

    With the seed, name and chunks of a `MeanFieldFeatures` these are the means over its very contexts and noise.
    Source: gradient of depth (60) in the law of the layers. Raises DomainError for arguments outside the ranges.
    """
    rows, order = _checked_types(types)
    scan_rows, scan_order = _checked_types(scanned)
    omega = visible_teachers(task, teachers)
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (len(omega), len(rows)):
        raise DomainError(f"weights must have shape ({len(omega)}, {len(rows)}), got {w.shape}")
    sorted_types, sorted_scan, sorted_weights = rows[order], scan_rows[scan_order], np.ascontiguousarray(w[:, order])
    moments = length_moments(omega.shape[1])

    def draw(rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        result: tuple[FloatArray, FloatArray] = scan_chunk(
            *_draw_batch(task, rng), *_columns(sorted_types), sorted_weights, *_columns(sorted_scan), omega, *moments
        )
        return result

    results = _draw_chunks(task, draw, lambda _: math.inf, seed, chunks, name, workers, progress)
    cross, slope = (np.array(column).mean(axis=0) for column in zip(*results, strict=True))
    back = np.argsort(scan_order)
    return TypeScan(scan_rows, cross[:, back], slope[:, back])


def _features(
    task: TopKTask,
    types: FloatArray,
    teachers: FloatArray | None,
    seed: int,
    max_chunks: int,
    name: str,
    workers: int | None,
    progress: Progress | None,
    error_ratio: Callable[[list[FeatureChunk]], float],
) -> MeanFieldFeatures:
    rows, order = _checked_types(types)
    omega = visible_teachers(task, teachers)
    sorted_types, back = rows[order], np.argsort(order)
    moments = length_moments(omega.shape[1])

    def draw(rng: np.random.Generator) -> FeatureChunk:
        power, cross, gram, single = mean_field_chunk(
            *_draw_batch(task, rng), *_columns(sorted_types), omega, *moments
        )
        return power, cross[:, back], gram[:, back][:, :, back], single[:, back]

    results = _draw_chunks(task, draw, error_ratio, seed, max_chunks, name, workers, progress)
    power, cross, gram, single = (np.array(column) for column in zip(*results, strict=True))
    return MeanFieldFeatures(CONTEXTS_PER_CHUNK, rows, omega, power, cross, gram, single)


def _draw_chunks(
    task: TopKTask,
    draw: Callable[[np.random.Generator], _Result],
    error_ratio: Callable[[list[_Result]], float],
    seed: int,
    max_chunks: int,
    name: str,
    workers: int | None,
    progress: Progress | None,
) -> list[_Result]:
    seed = as_integer("seed", seed, 0, MAX_SEED)
    _check_size(task)
    # Inputs of other spectra, contexts or top_k get independent streams; teachers share theirs.
    shape = f"{task.spectrum.input_variances().tolist()} {task.context} {task.top_k}"
    return draw_until(
        draw,
        error_ratio,
        seed=seed,
        name=f"{name} {shape}",
        max_chunks=max_chunks,
        workers=workers,
        progress=progress,
    )


def _check_size(task: TopKTask) -> None:
    dim = len(task.spectrum.input_variances())
    if dim < 2:
        raise DomainError(f"task must have dim >= 2 for directions orthogonal to the query to exist, got {dim}")
    if task.context * dim > MAX_CONTEXT_SIZE:
        raise DomainError(
            f"task must have context * dim at most {MAX_CONTEXT_SIZE}, got {task.context} * {dim} "
            f"= {task.context * dim}"
        )


def _checked_types(types: FloatArray) -> tuple[FloatArray, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The types as float64 rows and the order in which equal β are neighbours."""
    rows = np.array(types, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != 2 or not 1 <= len(rows) <= MAX_TYPES:
        raise DomainError(f"types must have shape (J, 2) with J from 1 to {MAX_TYPES}, got {rows.shape}")
    if not ((rows >= 0) & (rows <= MAX_SCALE)).all():
        raise DomainError(
            f"types must lie in [0, {MAX_SCALE:g}], got {rows[~((rows >= 0) & (rows <= MAX_SCALE))][0]}"
        )
    return rows, np.lexsort((rows[:, 0], rows[:, 1]))


def _columns(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def _draw_batch(task: TopKTask, rng: np.random.Generator) -> _Batch:
    """Cosines, cosines with the noise, coloured unit tokens and targets of one chunk, as `mean_field_chunk` takes."""
    contexts = sample_contexts(task, CONTEXTS_PER_CHUNK, rng, rotate=False)
    frames = orthogonal_frames(contexts.query_direction, FRAMES, rng)
    noise_cosines = contexts.directions[:, None] @ np.swapaxes(frames, 2, 3)
    whitened = contexts.tokens / np.sqrt(task.spectrum.input_variances())
    tokens = contexts.tokens / np.linalg.norm(whitened, axis=-1, keepdims=True)
    return contexts.cosines, noise_cosines, tokens, contexts.target
