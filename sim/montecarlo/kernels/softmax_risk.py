"""One chunk of contexts of in-context regression, reduced to what softmax attention along the query can see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True)
def softmax_risk_chunk(rng: Any, contexts: int, dim: int, context: int, noise: float, omega: Any, mu: Any) -> float:
    """Mean loss over ``contexts`` contexts, averaged exactly over teacher, label noise and unseen directions.

    omega, mu (heads,). Head h weights token l by the softmax over tokens of omega_h x_l.x_q = omega_h r z_l, with r
    the length of the query and z_l standard normal; the prediction is sum_l w_l y_l with w = sum_h mu_h p_h. The
    parts of the tokens orthogonal to the query, the teacher N(0, I/dim) and the label noise do not enter w, and the
    mean over them is ((r - z.w)^2 + (dim - 1) |w|^2) / dim + noise (1 + |w|^2). Draws one gamma variate and
    ``context`` normals for each context. Source: multihead (2.5), (3.2), by direct averaging.
    """
    z, weights, scores = np.empty(context), np.empty(context), np.empty(context)
    mean = 0.0
    for count in range(1, contexts + 1):
        length = math.sqrt(2.0 * rng.standard_gamma(0.5 * dim))
        for token in range(context):
            z[token] = rng.standard_normal()
            weights[token] = 0.0
        for head in range(omega.size):
            slope = omega[head] * length
            largest = -math.inf
            for token in range(context):
                largest = max(largest, slope * z[token])
            total = 0.0
            for token in range(context):
                scores[token] = math.exp(slope * z[token] - largest)
                total += scores[token]
            for token in range(context):
                weights[token] += mu[head] * scores[token] / total
        along, square = 0.0, 0.0
        for token in range(context):
            along += z[token] * weights[token]
            square += weights[token] * weights[token]
        miss = length - along
        loss = (miss * miss + (dim - 1) * square) / dim + noise * (1 + square)
        mean += (loss - mean) / count
    return mean
