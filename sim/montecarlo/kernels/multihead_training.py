"""Loss and gradient of multi-head attention in one pass over a batch, contexts on the last axis.

Every inner loop runs over contexts, so that it vectorises without reordering a single sum. The activation f and its
slope f' at the scores are computed between the two passes by NumPy, whose vectorised exponential is the fast part.
Head h has the weights p_hl = f(a_hl) / S_h with S_h the sum of f(a_hl) over tokens where ``normalised``, else a
constant. Arrays are float32 or float64 throughout, sums over contexts float64. Source: multihead (2.3), (3.2), (5.1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True)
def noise_to_labels(columns: Any, teacher: Any, masks: Any, deviation: Any) -> None:
    """Turn the noise below each token into its labels, y_o = sum_i masks_oi beta_i x_i + deviation e_o, in place.

    columns (tokens, dim + outputs, contexts): x above, standard normal e below; teacher (dim, contexts); masks
    (outputs, dim): 0 or 1. Source: multihead section 2, Definition 5.1.
    """
    tokens, _, contexts = columns.shape
    outputs, dim = masks.shape
    for token in range(tokens):
        for output in range(outputs):
            label = columns[token, dim + output]
            for n in range(contexts):
                label[n] *= deviation
            for row in range(dim):
                if masks[output, row] != 0:
                    entry, coefficient = columns[token, row], teacher[row]
                    for n in range(contexts):
                        label[n] += entry[n] * coefficient[n]


@njit(nogil=True)
def scalar_scores(reads: Any, slopes: Any, scores: Any) -> None:
    """Scores a_hl = slope_h read_l into ``scores`` (heads, tokens, contexts).

    reads (tokens, contexts): x_l . x_q; slopes (heads,): omega_h times the scale of the logits.
    Source: multihead (3.2).
    """
    for head in range(slopes.size):
        for token in range(reads.shape[0]):
            row, score = reads[token], scores[head, token]
            for n in range(row.size):
                score[n] = slopes[head] * row[n]


@njit(nogil=True)
def query_reads(key_query: Any, query: Any, reads: Any) -> None:
    """Query side u_h = KQ_h x_q into ``reads`` (heads, width, contexts).

    key_query (heads, width, dim), scaled; query (dim, contexts). Source: multihead (2.3).
    """
    heads, width, dim = key_query.shape
    for head in range(heads):
        for row in range(width):
            out = reads[head, row]
            for n in range(out.size):
                out[n] = 0
            for column in range(dim):
                factor, entry = key_query[head, row, column], query[column]
                for n in range(out.size):
                    out[n] += factor * entry[n]


@njit(nogil=True)
def token_scores(embedding: Any, reads: Any, scores: Any) -> None:
    """Scores a_hl = z_l . u_h into ``scores`` (heads, tokens, contexts).

    embedding (tokens, width, contexts): columns z_l; reads (heads, width, contexts): u_h. Source: multihead (2.3).
    """
    tokens, width, _ = embedding.shape
    for token in range(tokens):
        for head in range(reads.shape[0]):
            score = scores[head, token]
            for n in range(score.size):
                score[n] = 0
            for row in range(width):
                entry, read = embedding[token, row], reads[head, row]
                for n in range(score.size):
                    score[n] += entry[n] * read[n]


@njit(nogil=True)
def subtract_largest(scores: Any) -> None:
    """Take the largest score over tokens from each (head, context), which leaves a softmax as it is."""
    heads, tokens, contexts = scores.shape
    largest = np.empty(contexts, scores.dtype)
    for head in range(heads):
        first = scores[head, 0]
        for n in range(contexts):
            largest[n] = first[n]
        for token in range(1, tokens):
            score = scores[head, token]
            for n in range(contexts):
                largest[n] = score[n] if score[n] > largest[n] else largest[n]
        for token in range(tokens):
            score = scores[head, token]
            for n in range(contexts):
                score[n] -= largest[n]


@njit(nogil=True, error_model="numpy")
def inverse_normalisers(activation: Any, normalised: bool, inverse: Any) -> None:
    """1/S_h into ``inverse`` (heads, contexts), which holds its constant already where not ``normalised``."""
    if not normalised:
        return
    heads, tokens, contexts = activation.shape
    for head in range(heads):
        out = inverse[head]
        for n in range(contexts):
            out[n] = 0
        for token in range(tokens):
            value = activation[head, token]
            for n in range(contexts):
                out[n] += value[n]
        for n in range(contexts):
            out[n] = 1 / out[n]


@njit(nogil=True)
def label_weights(activation: Any, inverse: Any, mu: Any, weights: Any) -> None:
    """Weights w_l = sum_h mu_h p_hl of the labels into ``weights`` (tokens, contexts). Source: multihead (3.2)."""
    heads, tokens, contexts = activation.shape
    scale = np.empty(contexts, weights.dtype)
    weights[:] = 0
    for head in range(heads):
        for n in range(contexts):
            scale[n] = mu[head] * inverse[head, n]
        for token in range(tokens):
            value, weight = activation[head, token], weights[token]
            for n in range(contexts):
                weight[n] += scale[n] * value[n]


@njit(nogil=True)
def teacher_averaged_slopes(
    projections: Any, length: Any, weights: Any, dim: int, noise: float, losses: Any, slopes: Any
) -> None:
    """Losses averaged over teacher and noise, and their slopes in the weights, isotropic tokens.

    projections z (tokens, contexts): x_l . x_q / r; length r (contexts,). Into ``losses`` (contexts,):
    ((r - z.w)^2 + (d-1) |w|^2) / d + noise (1 + |w|^2); ``slopes`` (tokens, contexts). Source: multihead (2.5), (3.2).
    """
    tokens, contexts = projections.shape
    along, square = np.zeros(contexts, losses.dtype), np.zeros(contexts, losses.dtype)
    for token in range(tokens):
        z, w = projections[token], weights[token]
        for n in range(contexts):
            along[n] += z[n] * w[n]
            square[n] += w[n] * w[n]
    inverse = losses.dtype.type(1 / dim)
    spread = losses.dtype.type((dim - 1) / dim + noise)
    floor = losses.dtype.type(noise)
    for n in range(contexts):
        along[n] = length[n] - along[n]
        losses[n] = inverse * along[n] * along[n] + spread * square[n] + floor
    for token in range(tokens):
        z, w, slope = projections[token], weights[token], slopes[token]
        for n in range(contexts):
            half = spread * w[n] - inverse * along[n] * z[n]
            slope[n] = half + half


@njit(nogil=True)
def sampled_slopes(labels: Any, target: Any, weights: Any, losses: Any, slopes: Any) -> None:
    """Squared errors (y_q - w.y)^2 at drawn labels into ``losses``, and their slopes in the weights.

    labels (tokens, contexts); target (contexts,). Source: multihead (2.5), (3.2).
    """
    tokens, contexts = labels.shape
    error = target.copy()
    for token in range(tokens):
        y, w = labels[token], weights[token]
        for n in range(contexts):
            error[n] -= w[n] * y[n]
    for n in range(contexts):
        losses[n] = error[n] * error[n]
        error[n] += error[n]
    for token in range(tokens):
        y, slope = labels[token], slopes[token]
        for n in range(contexts):
            slope[n] = -error[n] * y[n]


@njit(nogil=True)
def scalar_gradient(
    reads: Any,
    activation: Any,
    derivative: Any,
    inverse: Any,
    normalised: bool,
    slopes: Any,
    mu: Any,
    omega_gradient: Any,
    mu_gradient: Any,
) -> None:
    """Sums over contexts of the gradients in the slopes of `scalar_scores` and in mu, (heads,) float64 each.

    slopes (tokens, contexts): of the loss in the label weights; derivative: f' at the scores, of the shape of
    ``activation``. With g the slopes, dL/dmu_h = g.p_h and dL/da_hl = mu_h f'_hl (g_l - g.p_h) / S_h, without the
    second term where not ``normalised``. Source: chain rule on multihead (3.2).
    """
    heads, tokens, contexts = activation.shape
    mean, total = np.empty(contexts, mu.dtype), np.empty(contexts, mu.dtype)
    for head in range(heads):
        for n in range(contexts):
            mean[n] = 0
            total[n] = 0
        for token in range(tokens):
            value, slope = activation[head, token], slopes[token]
            for n in range(contexts):
                mean[n] += slope[n] * value[n]
        gradient = 0.0
        for n in range(contexts):
            mean[n] *= inverse[head, n]
            gradient += mean[n]
        mu_gradient[head] = gradient
        if not normalised:
            mean[:] = 0
        for token in range(tokens):
            change, slope, read = derivative[head, token], slopes[token], reads[token]
            for n in range(contexts):
                total[n] += change[n] * (slope[n] - mean[n]) * read[n]
        gradient = 0.0
        for n in range(contexts):
            gradient += total[n] * inverse[head, n]
        omega_gradient[head] = mu[head] * gradient


@njit(nogil=True)
def token_means(embedding: Any, activation: Any, inverse: Any, means: Any) -> None:
    """What each head reads, s_h = sum_l p_hl z_l, into ``means`` (heads, width, contexts).

    embedding (tokens, width, contexts); activation (heads, tokens, contexts); inverse (heads, contexts).
    Source: multihead (2.3).
    """
    tokens, width, contexts = embedding.shape
    heads = activation.shape[0]
    means[:] = 0
    for token in range(tokens):
        for head in range(heads):
            weight = activation[head, token]
            for row in range(width):
                entry, mean = embedding[token, row], means[head, row]
                for n in range(contexts):
                    mean[n] += weight[n] * entry[n]
    for head in range(heads):
        for row in range(width):
            mean, factor = means[head, row], inverse[head]
            for n in range(contexts):
                mean[n] *= factor[n]


@njit(nogil=True)
def error_slopes(target: Any, means: Any, value: Any, losses: Any, slopes: Any) -> None:
    """Losses sum_o (yhat_o - y_o)^2 into ``losses`` (contexts,), and 2 (yhat_o - y_o) into ``slopes``.

    target, slopes (outputs, contexts); value: rows of OV that are read, (heads, outputs, width); yhat_o is the sum
    over heads of OV_ho . s_h. Source: multihead (2.3), (2.5).
    """
    heads, outputs, width = value.shape
    for n in range(losses.size):
        losses[n] = 0
    for output in range(outputs):
        error, label = slopes[output], target[output]
        for n in range(losses.size):
            error[n] = -label[n]
        for head in range(heads):
            for row in range(width):
                factor, mean = value[head, output, row], means[head, row]
                for n in range(losses.size):
                    error[n] += factor * mean[n]
        for n in range(losses.size):
            losses[n] += error[n] * error[n]
            error[n] += error[n]


@njit(nogil=True)
def summed_products(left: Any, right: Any, gradient: Any) -> None:
    """Sums over contexts of left_i right_j into ``gradient`` (i, j), float64; left, right (i or j, contexts)."""
    for i in range(left.shape[0]):
        for j in range(right.shape[0]):
            one, other, total = left[i], right[j], 0.0
            for n in range(one.size):
                total += one[n] * other[n]
            gradient[i, j] = total


@njit(nogil=True)
def read_slopes(
    embedding: Any, derivative: Any, inverse: Any, normalised: bool, mean: Any, value: Any, errors: Any, slopes: Any
) -> None:
    """Slopes of the losses in the query side u of one head, into ``slopes`` (width, contexts).

    embedding (tokens, width, contexts); derivative: f' at the scores, (tokens, contexts); inverse (contexts,); mean: s,
    (width, contexts); value (outputs, width); errors: from `error_slopes`. With c = sum_o errors_o OV_o the slope
    in the score of token l is f'_l (c . z_l - c . s) / S, without the second term where not ``normalised``.
    Source: chain rule on multihead (2.3).
    """
    tokens, width, contexts = embedding.shape
    pull = np.zeros((width, contexts), slopes.dtype)
    along, change = np.zeros(contexts, slopes.dtype), np.empty(contexts, slopes.dtype)
    slopes[:] = 0
    for row in range(width):
        out, read = pull[row], mean[row]
        for output in range(value.shape[0]):
            factor, error = value[output, row], errors[output]
            for n in range(contexts):
                out[n] += factor * error[n]
        if normalised:
            for n in range(contexts):
                along[n] += out[n] * read[n]
    for token in range(tokens):
        slope = derivative[token]
        for n in range(contexts):
            change[n] = -along[n]
        for row in range(width):
            out, entry = pull[row], embedding[token, row]
            for n in range(contexts):
                change[n] += out[n] * entry[n]
        for n in range(contexts):
            change[n] *= slope[n] * inverse[n]
        for row in range(width):
            out, entry = slopes[row], embedding[token, row]
            for n in range(contexts):
                out[n] += change[n] * entry[n]
