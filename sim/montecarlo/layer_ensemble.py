r"""Terms of the layer ensemble of given softmax layers on the difficult task, by Monte Carlo.

With :math:`e_\ell = g\,p_\ell y - y^*` the loss splits exactly into what all layers share and what averaging divides by
L: :math:`R = C + (A-C)/L`. Layers are given by their matrices, or as types (α, β) that read
:math:`\alpha\hat q + \beta\eta` with a fresh unit vector η orthogonal to the query in every layer and context: for
these C is the limit of infinite depth, and A - C what finite depth adds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from sim.contexts import Contexts, sample_contexts, unit_directions
from sim.montecarlo.comparison import CommonSample, draw_common_sample
from sim.montecarlo.kernels.layer_ensemble import layer_ensemble_batch
from sim.montecarlo.stopping import DEFAULT_MAX_CONTEXTS, Progress
from theory.problems import TopKTask, as_real
from theory.results import DomainError, FloatArray

TERMS = ("risk", "layer risk", "shared", "disagreement")
CHUNK_CONTEXTS = 256
# Numbers of one context that are worked on: tokens, scores and reads.
MAX_CONTEXT_NUMBERS = 2**18
MAX_READ = 1e6

# Contexts and a generator -> what each layer compares tokens with, shape (n, L, d).
_Reads = Callable[[Contexts, np.random.Generator], FloatArray]


def matrix_layer_terms(
    task: TopKTask,
    key_query: ArrayLike,
    gain: float = 1.0,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CommonSample:
    r"""R, A, C and A - C of layers with the logits :math:`\hat x_i^\top B_\ell\hat q`, on common contexts.

    key_query: B_1..B_L, shape (L, d, d), L >= 2, in the frame of the network, to which every context is rotated
    afresh; gain: g. relative_error in (0, 1]: requested standard error of R over its value. max_contexts: limit on
    the contexts drawn, at least 8192; where it stops the run, the status says so. The sample has the names "risk",
    "layer risk", "shared" and "disagreement", in units of the label variance; same bits for any number of workers.
    Source: depth (10), (59)-(63). Raises DomainError for arguments outside these ranges.
    """
    B = _checked("key_query", key_query, task, 3)
    if B.shape[1:] != (_dim(task), _dim(task)):
        raise DomainError(f"key_query must have shape (L, {_dim(task)}, {_dim(task)}), got {B.shape}")

    def reads(contexts: Contexts, _: np.random.Generator) -> FloatArray:
        query = contexts.rotated(contexts.query_direction)
        in_network: FloatArray = np.einsum("lij,nj->nli", B, query)
        if contexts.rotation is None:
            return in_network
        # Back to the eigenbasis, where the tokens are: u -> O' u.
        return np.ascontiguousarray(in_network @ contexts.rotation)

    return _terms(task, reads, B.shape[0], gain, "key_query", relative_error, seed, max_contexts, workers, progress)


def typed_layer_terms(
    task: TopKTask,
    types: ArrayLike,
    gain: float = 1.0,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CommonSample:
    r"""R, A, C and A - C of layers that read :math:`\alpha_\ell\hat q + \beta_\ell\eta_\ell`, on common contexts.

    types: rows (α, β), one for each layer, shape (L, 2), L >= 2; η: independent and uniform on the unit vectors
    orthogonal to the query. Other arguments and the names as in `matrix_layer_terms`. C then estimates the quadratic
    form of the mean-field programme, from products of independent draws. Needs dim >= 2.
    Source: depth (59)-(63). Raises DomainError for arguments outside these ranges.
    """
    rows = _checked("types", types, task, 2)
    if rows.shape[1] != 2 or _dim(task) < 2:
        raise DomainError(f"types must have shape (L, 2), for a task of dim >= 2, got {rows.shape} and {_dim(task)}")
    alpha, beta = rows.T

    def reads(contexts: Contexts, rng: np.random.Generator) -> FloatArray:
        query = contexts.query_direction[:, None, :]
        noise = rng.standard_normal((len(query), len(rows), query.shape[-1]))
        orthogonal = unit_directions(noise - (noise @ np.swapaxes(query, 1, 2)) * query)
        result: FloatArray = alpha[:, None] * query + beta[:, None] * orthogonal
        return result

    return _terms(task, reads, len(rows), gain, "types", relative_error, seed, max_contexts, workers, progress)


def _terms(
    task: TopKTask,
    reads: _Reads,
    layers: int,
    gain: float,
    kind: str,
    relative_error: float,
    seed: int,
    max_contexts: int,
    workers: int | None,
    progress: Progress | None,
) -> CommonSample:
    gain = as_real("gain", gain, -MAX_READ, MAX_READ)
    numbers = (task.context + layers) * (_dim(task) + layers)
    if numbers > MAX_CONTEXT_NUMBERS:
        raise DomainError(
            f"task must have (context + layers) * (dim + layers) at most {MAX_CONTEXT_NUMBERS}, got "
            f"({task.context} + {layers}) * ({_dim(task)} + {layers}) = {numbers}"
        )

    def draw(rng: np.random.Generator) -> FloatArray:
        contexts = sample_contexts(task, CHUNK_CONTEXTS, rng, rotate=kind == "key_query")
        means: FloatArray = layer_ensemble_batch(
            contexts.directions, reads(contexts, rng), contexts.label_factors(), contexts.target, gain
        )
        return means

    return draw_common_sample(
        draw,
        TERMS,
        stream_name=f"layer ensemble, {kind}, {task.canonical()}",
        chunk_contexts=CHUNK_CONTEXTS,
        relative_error=relative_error,
        culprit=kind,
        judged=TERMS[:1],
        seed=seed,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )


def _dim(task: TopKTask) -> int:
    return len(task.spectrum.input_variances())


def _checked(name: str, value: ArrayLike, task: TopKTask, axes: int) -> FloatArray:
    if not isinstance(task, TopKTask):
        raise DomainError(f"task must be a TopKTask, got {task!r}")
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise DomainError(f"{name} must be an array of numbers, got {value!r}") from None
    if array.ndim != axes or len(array) < 2:
        raise DomainError(f"{name} must have {axes} axes and at least 2 layers, got shape {array.shape}")
    if not (np.isfinite(array).all() and np.abs(array).max() <= MAX_READ):
        raise DomainError(f"{name} must be finite and at most {MAX_READ:g} in magnitude")
    return array
