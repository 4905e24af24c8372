"""One batch of contexts of the difficult task, read by many softmax layers: what they share and where they disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sim.montecarlo.kernels.exponential import exponentiate_columns


@njit(nogil=True)
def score_tokens(directions: Any, reads: Any, scores: Any) -> None:
    """Logits x_i.u_l / |x_i| into ``scores`` (P, L); directions (P, d): x_i / |x_i|; reads (L, d): u_l.

    Source: depth (10), (59).
    """
    context, dim = directions.shape
    scores[:] = 0.0
    for i in range(context):
        for j in range(dim):
            for layer in range(reads.shape[0]):
                scores[i, layer] += directions[i, j] * reads[layer, j]


@njit(nogil=True)
def layer_errors(scores: Any, total: Any, factors: Any, target: Any, gain: float, errors: Any) -> None:
    """Errors e_l = F'(g p_l - t) of all layers into ``errors`` (d, L), so that E e_l e_m over teachers is e_l.e_m.

    scores (P, L) and total (L,): unnormalised attention and its sums; factors F (P, d); target t (P,); gain: g.
    Source: depth (60), before (61).
    """
    context, dim = factors.shape
    layers = total.size
    errors[:] = 0.0
    for i in range(context):
        for j in range(dim):
            for layer in range(layers):
                errors[j, layer] += scores[i, layer] * factors[i, j]
    for j in range(dim):
        wanted = 0.0
        for i in range(context):
            wanted += target[i] * factors[i, j]
        for layer in range(layers):
            errors[j, layer] = gain * errors[j, layer] / total[layer] - wanted


@njit(nogil=True)
def split_errors(errors: Any, terms: Any) -> None:
    """R, A, C and A - C of one context into ``terms`` (4,), from its errors (d, L), L >= 2, in O(d L).

    R is the square of the mean error and A - C the variance over layers about it, which keeps its digits where
    layers nearly agree; A = R + (A - C)(L - 1)/L and C = R - (A - C)/L. Source: depth (61)-(63).
    """
    dim, layers = errors.shape
    risk, spread = 0.0, 0.0
    for j in range(dim):
        mean = errors[j].sum() / layers
        risk += mean * mean
        for layer in range(layers):
            spread += (errors[j, layer] - mean) ** 2
    disagreement = spread / (layers - 1)
    terms[0], terms[1] = risk, risk + spread / layers
    terms[2], terms[3] = risk - disagreement / layers, disagreement


@njit(nogil=True)
def layer_ensemble_batch(directions: Any, reads: Any, factors: Any, target: Any, gain: float) -> Any:
    """Means of R, A, C and A - C over n contexts, (4,), averaged exactly over the teacher.

    directions (n, P, d): tokens over their lengths; reads (n, L, d): what each layer compares them with, L >= 2;
    factors F (n, P, d) with F F' the covariance of the labels; target (n, P): t; gain: g of the mean of the layers.
    In units of the label variance. Source: depth (59)-(63).
    """
    count, context, dim = directions.shape
    layers = reads.shape[1]
    scores, total, largest = np.empty((context, layers)), np.empty(layers), np.empty(layers)
    power_bits = np.empty(layers, np.int64)
    power = power_bits.view(np.float64)
    errors, terms, means = np.empty((dim, layers)), np.empty(4), np.zeros(4)
    for n in range(count):
        score_tokens(directions[n], reads[n], scores)
        exponentiate_columns(scores, total, largest, power, power_bits)
        layer_errors(scores, total, factors[n], target[n], gain, errors)
        split_errors(errors, terms)
        for k in range(4):
            means[k] += (terms[k] - means[k]) / (n + 1)
    return means
