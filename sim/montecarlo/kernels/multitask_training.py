"""Loss and gradient of heads with diagonal key-query matrices on several tasks, contexts on the last axis.

As in `multihead_training`, whose kernels score the tokens: inner loops run over contexts, arrays are float32 or float64
throughout, sums over contexts float64. Source: multihead (3.2), section 5.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True)
def task_averaged_slopes(
    tokens: Any, query: Any, masks: Any, variance: float, noise: float, weights: Any, losses: Any, slopes: Any
) -> None:
    """Losses averaged over teacher and noise, summed over tasks, and their slopes in the label weights.

    tokens x (tokens, dim, contexts); query (dim, contexts); masks (tasks, dim): 0 or 1; variance: of each coordinate
    of the teacher; weights w (tasks, tokens, contexts). With e_ni = x_qi - sum_l w_nl x_li, into ``losses``
    (contexts,): sum_n noise (1 + |w_n|^2) + variance sum_i masks_ni e_ni^2; ``slopes`` as weights.
    Source: multihead (2.5), Definition 5.1.
    """
    count, dim, contexts = tokens.shape
    floor = losses.dtype.type(noise * masks.shape[0])
    twice_noise, twice_variance = losses.dtype.type(2 * noise), losses.dtype.type(2 * variance)
    half = losses.dtype.type(0.5)
    error = np.empty(contexts, losses.dtype)
    for n in range(contexts):
        losses[n] = floor
    for task in range(masks.shape[0]):
        for token in range(count):
            w, slope = weights[task, token], slopes[task, token]
            for n in range(contexts):
                slope[n] = twice_noise * w[n]
                losses[n] += half * slope[n] * w[n]
        for row in range(dim):
            if masks[task, row] == 0:
                continue
            wanted = query[row]
            for n in range(contexts):
                error[n] = wanted[n]
            for token in range(count):
                w, x = weights[task, token], tokens[token, row]
                for n in range(contexts):
                    error[n] -= w[n] * x[n]
            for n in range(contexts):
                losses[n] += half * twice_variance * error[n] * error[n]
                error[n] *= twice_variance
            for token in range(count):
                x, slope = tokens[token, row], slopes[task, token]
                for n in range(contexts):
                    slope[n] -= error[n] * x[n]


@njit(nogil=True)
def diagonal_gradient(
    tokens: Any,
    query: Any,
    activation: Any,
    derivative: Any,
    inverse: Any,
    normalised: bool,
    slopes: Any,
    mu: Any,
    omega_gradient: Any,
    mu_gradient: Any,
) -> None:
    """Sums over contexts of the gradients in omega and mu, (heads, dim) and (heads, tasks) float64.

    tokens (tokens, dim, contexts); query (dim, contexts); activation, derivative (heads, tokens, contexts): f and f' at
    the scores; inverse (heads, contexts); slopes (tasks, tokens, contexts): of the loss in the label weights; mu
    (heads, tasks). With g_n the slopes, dL/dmu_hn = g_n.p_h and, for c_h = sum_n mu_hn g_n,
    dL/da_hl = f'_hl (c_hl - c_h.p_h) / S_h, without the second term where not ``normalised``; a_hl = sum_i omega_hi
    x_li x_qi. Source: chain rule on multihead (3.2).
    """
    heads, count, contexts = activation.shape
    dim = tokens.shape[1]
    read, change = np.empty(contexts, mu.dtype), np.empty(contexts, mu.dtype)
    mean, total = np.empty(contexts, mu.dtype), np.empty((dim, contexts), mu.dtype)
    for head in range(heads):
        mean[:] = 0
        total[:] = 0
        for task in range(mu.shape[1]):
            read[:] = 0
            for token in range(count):
                value, slope = activation[head, token], slopes[task, token]
                for n in range(contexts):
                    read[n] += value[n] * slope[n]
            gradient = 0.0
            for n in range(contexts):
                read[n] *= inverse[head, n]
                gradient += read[n]
                mean[n] += mu[head, task] * read[n]
            mu_gradient[head, task] = gradient
        if not normalised:
            mean[:] = 0
        for token in range(count):
            for n in range(contexts):
                change[n] = -mean[n]
            for task in range(mu.shape[1]):
                factor, slope = mu[head, task], slopes[task, token]
                for n in range(contexts):
                    change[n] += factor * slope[n]
            steepness = derivative[head, token]
            for n in range(contexts):
                change[n] *= steepness[n] * inverse[head, n]
            for row in range(dim):
                out, x = total[row], tokens[token, row]
                for n in range(contexts):
                    out[n] += change[n] * x[n]
        for row in range(dim):
            entry, gradient = query[row], 0.0
            for n in range(contexts):
                gradient += total[row, n] * entry[n]
            omega_gradient[head, row] = gradient
