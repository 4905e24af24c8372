"""The loss of one softmax layer that reads the query itself: the witness of a trained model of depth 1.

The layer's logits are ``scale`` times the cosines and its prediction is ``gain`` times the mean label under the
softmax, that is B = scale I in the fast form of the nonlinear-attention model. Scale and gain are chosen on one
stream and the loss is measured on another, so that the choice does not make the estimate too small.
Source: depth (10), (57)-(60) with L = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.contexts import Contexts, SampleSize, chunk_means, estimate_from_chunks
from theory.problems import TopKTask, as_real
from theory.results import DomainError, Estimate, FloatArray

# Scales that are searched: 0 and the powers of sqrt(2) up to this one, then twice nine points between neighbours.
MAX_SCALE = 1024.0
FIRST_GRID = np.concatenate([[0.0], np.geomspace(0.25, MAX_SCALE, 25)])
ZOOMS = 2
ZOOM_POINTS = 9


@dataclass(frozen=True, slots=True)
class SingleSoftmax:
    """One softmax layer: its scale (the α of B = α I), its gain g, and its loss averaged over teachers and contexts.

    scale and gain are numbers fixed in advance of the contexts of ``loss``. Source: depth (60) with L = 1.
    """

    scale: float
    gain: float
    loss: Estimate


def evaluate_single_softmax(task: TopKTask, scale: float, seed: int, size: SampleSize | None = None) -> SingleSoftmax:
    """One softmax layer of the given ``scale`` in [0, 1e6] with its best gain.

    seed: of both streams; size: contexts of the measurement, by default 131,072; the choice takes one batch of each
    chunk. Source: depth (60) with L = 1.
    """
    size = SampleSize() if size is None else size
    scales = np.array([as_real("scale", scale, 0, 1e6)])
    return _measured(task, *_best_of(task, scales, seed, size), seed, size)


def best_single_softmax(task: TopKTask, seed: int, size: SampleSize | None = None) -> SingleSoftmax:
    """The softmax layer with the best scale in [0, 1024] and the best gain, chosen on common random numbers.

    Arguments as in `evaluate_single_softmax`. The loss is flat at the best scale, so that the resolution of the
    search (1 % of the scale) does not show in it. Raises DomainError where top_k = 1: the loss then falls to zero as
    the scale grows, and no scale is best. Source: depth (60) with L = 1.
    """
    if task.top_k == 1:
        raise DomainError("top_k must be at least 2 for a best scale to exist, got 1: its loss falls as scales grow")
    size = SampleSize() if size is None else size
    scales = FIRST_GRID
    for _ in range(ZOOMS):
        best = int(np.searchsorted(scales, _best_of(task, scales, seed, size)[0]))
        scales = np.linspace(scales[max(best - 1, 0)], scales[min(best + 1, len(scales) - 1)], ZOOM_POINTS)
    return _measured(task, *_best_of(task, scales, seed, size), seed, size)


def softmax_moments(contexts: Contexts, scales: FloatArray) -> FloatArray:
    """Moments ‖r‖², r . t and ‖t‖² of what one softmax reads (r) and should read (t), per scale; (n, 3, scales).

    r = F^T p and t = F^T t_k in the metric of the labels, so that the loss of gain g is g² ‖r‖² - 2 g r . t + ‖t‖².
    scales: shape (scales,). Source: depth (58)-(60).
    """
    logits = scales[:, None] * contexts.cosines[:, None, :]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    factors = contexts.label_factors()
    read = weights @ factors
    target = contexts.target[:, None, :] @ factors
    squares = np.einsum("nsi,nsi->ns", read, read)
    products = np.einsum("nsi,nti->ns", read, target)
    norms = np.broadcast_to(np.einsum("nti,nti->nt", target, target), squares.shape)
    return np.stack([squares, products, norms], axis=1)


def _mean_moments(task: TopKTask, scales: FloatArray, seed: int, name: str, size: SampleSize) -> FloatArray:
    def measure(contexts: Contexts) -> FloatArray:
        return softmax_moments(contexts, scales)

    return chunk_means(measure, task, seed, name, size, rotate=False)


def _losses(moments: FloatArray, gains: FloatArray | float) -> FloatArray:
    squares, products, norms = moments
    losses: FloatArray = gains**2 * squares - 2 * gains * products + norms
    return losses


def _best_of(task: TopKTask, scales: FloatArray, seed: int, size: SampleSize) -> tuple[float, float]:
    # One batch per chunk is enough: errors of scale and gain enter the loss in second order.
    choice = SampleSize(size.chunks, 1, size.batch)
    moments = _mean_moments(task, scales, seed, "single softmax, choice", choice).mean(axis=0)
    gains = moments[1] / moments[0]
    best = int(np.argmin(_losses(moments, gains)))
    return float(scales[best]), float(gains[best])


def _measured(task: TopKTask, scale: float, gain: float, seed: int, size: SampleSize) -> SingleSoftmax:
    chunks = _mean_moments(task, np.array([scale]), seed, "single softmax, loss", size)
    losses = np.array([_losses(moments, gain)[0] for moments in chunks])
    return SingleSoftmax(scale, gain, estimate_from_chunks(losses, size.contexts, seed))
