"""What trained softmax attention selects, read from its matrices alone: mode-wise losses and selection errors.

Everything here is NumPy on the parameters (B_l, g) of a trained model, a second reading of them beside that of the
training loop.
"""

from __future__ import annotations

import numpy as np

from sim.contexts import Contexts, SampleSize, sample_contexts
from sim.diagnostics import Diagnostics, ModelOutput, diagnose
from sim.streams import stream
from sim.training import TrainingResult
from theory.results import FloatArray
from validate.trained.softmax import DepthSeries


def mean_rows(key_query: FloatArray, directions: FloatArray, query_direction: FloatArray) -> FloatArray:
    r"""Mean attention rows :math:`\bar p = \frac1L\sum_\ell \mathrm{softmax}_i(x_i\cdot B_\ell q)`, shape (n, P).

    key_query: shape (L, d, d); directions: shape (n, P, d); query_direction: shape (n, d). Source: depth (59), (90).
    """
    total = np.zeros(directions.shape[:2])
    for matrix in key_query:
        logits = (directions @ (query_direction @ matrix.T)[:, :, None])[:, :, 0]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total += weights / weights.sum(axis=1, keepdims=True)
    return np.asarray(total / len(key_query))


def selection(result: TrainingResult, seed: int, size: SampleSize, percentiles: tuple[float, ...]) -> Diagnostics:
    """Loss, attention mass and percentiles of the selection error of a trained `SoftmaxAttention`."""
    key_query, gain = result.parameters["key_query"][0], float(result.parameters["gain"][0])

    def model(tokens: FloatArray, query: FloatArray, labels: FloatArray) -> ModelOutput:
        directions = tokens / np.linalg.norm(tokens, axis=2, keepdims=True)
        row = mean_rows(key_query, directions, query / np.linalg.norm(query, axis=1, keepdims=True))
        return ModelOutput(gain * np.sum(row * labels, axis=1), attention=row)

    task = result.config.experiment.problem  # type: ignore[attr-defined]
    return diagnose(model, task, seed=seed, size=size, percentiles=percentiles)


def mode_chunks(series: DepthSeries, seed: int, size: SampleSize) -> FloatArray:
    """Losses of all spectral modes, means over chunks of contexts that are common to all depths; (depths, chunks, d).

    Modes are those of anisotropic inputs, whose eigenbasis the network sees. Source: depth (29) mode by mode, Figure 7.
    """
    rows = np.zeros((len(series.results), size.chunks, len(series.task.spectrum.input_variances())))
    for index in range(size.chunks):
        generator = stream(seed, "mode losses", index)
        for _ in range(size.chunk_batches):
            contexts = sample_contexts(series.task, size.batch, generator)
            for depth, result in enumerate(series.results):
                rows[depth, index] += _mode_losses(result, contexts) / size.chunk_batches
    return series.scale * rows


def _mode_losses(result: TrainingResult, contexts: Contexts) -> FloatArray:
    key_query, gain = result.parameters["key_query"][0], float(result.parameters["gain"][0])
    seen, query = (contexts.rotated(v) for v in (contexts.directions, contexts.query_direction))
    errors = gain * mean_rows(key_query, seen, query) - contexts.target
    shares: FloatArray = ((errors[:, None] @ contexts.label_factors())[:, 0] ** 2).mean(axis=0)
    return shares
