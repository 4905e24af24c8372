"""One chunk of contexts of in-context regression, reduced to what softmax attention along the query can see.

Several contexts are treated side by side, token by token: the inner loops run over contexts, so that LLVM turns them
into vector instructions without changing the order of any sum.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from sim.montecarlo.kernels.exponential import exponentiate_columns


@njit(nogil=True)
def draw_lanes(rng: Any, lanes: int, dim: int, lengths: Any, z: Any) -> None:
    """``lanes`` reduced contexts: lengths r ~ chi_d into (lanes,), normals z into (L, lanes), context by context."""
    for lane in range(lanes):
        lengths[lane] = math.sqrt(2.0 * rng.standard_gamma(0.5 * dim))
        for token in range(z.shape[0]):
            z[token, lane] = rng.standard_normal()


@njit(nogil=True)
def token_moments(z: Any, mean: Any, variance: Any) -> None:
    """Mean and variance over tokens of ``z`` (L, n), into ``mean`` and ``variance`` (n,)."""
    context, lanes = z.shape
    mean[:] = 0.0
    variance[:] = 0.0
    for token in range(context):
        for lane in range(lanes):
            mean[lane] += z[token, lane]
    mean /= context
    for token in range(context):
        for lane in range(lanes):
            variance[lane] += (z[token, lane] - mean[lane]) ** 2
    variance /= context


@njit(nogil=True)
def averaged_loss(dim: int, noise: float, miss: float, square: float) -> float:
    """Loss of weights w over teacher, noise and unseen directions: miss = r - z.w, square = |w|^2.

    Source: multihead (2.5), by direct averaging.
    """
    return (miss * miss + (dim - 1) * square) / dim + noise * (1 + square)


@njit(nogil=True)
def softmax_risk_chunk(
    rng: Any, contexts: int, lanes: int, dim: int, context: int, noise: float, omega: Any, mu: Any
) -> tuple[Any, Any]:
    """Mean losses of S predictors over ``contexts`` contexts, averaged over teacher, noise and unseen directions.

    omega (H,): heads shared by all predictors; mu (S, H): predictor s weights token l by w_l = sum_h mu_sh p_hl, with
    p_h the softmax over tokens of omega_h x_l.x_q = omega_h r z_l, r the length of the query and z_l standard normal.
    The parts of the tokens orthogonal to the query, the teacher N(0, I/dim) and the label noise do not enter w, and
    the mean over them is that of `averaged_loss`. Returns the mean losses (S,), and those of the same predictors to
    first order in omega (4.10), (S,). Draws one gamma variate and ``context`` normals for each context; ``lanes``
    contexts are treated side by side, which changes no draw.
    Source: multihead (2.5), (3.2), by direct averaging.
    """
    heads, predictors = omega.size, mu.shape[0]
    lengths, z = np.zeros(lanes), np.zeros((context, lanes))
    scores, total = np.empty((heads, context, lanes)), np.empty((heads, lanes))
    largest, gain = np.empty(lanes), np.empty((heads, lanes))
    power_bits = np.empty(lanes, np.int64)
    power = power_bits.view(np.float64)
    along, square, weight = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    mean, variance = np.empty(lanes), np.empty(lanes)
    losses, first_order = np.zeros(predictors), np.zeros(predictors)
    for start in range(0, contexts, lanes):
        used = min(lanes, contexts - start)  # the last lanes may repeat old contexts, which are not counted
        draw_lanes(rng, used, dim, lengths, z)
        token_moments(z, mean, variance)
        for h in range(heads):
            for token in range(context):
                for lane in range(lanes):
                    scores[h, token, lane] = omega[h] * lengths[lane] * z[token, lane]
            exponentiate_columns(scores[h], total[h], largest, power, power_bits)
        for s in range(predictors):
            for h in range(heads):
                for lane in range(lanes):
                    gain[h, lane] = mu[s, h] / total[h, lane]
            along[:] = 0.0
            square[:] = 0.0
            for token in range(context):
                weight[:] = 0.0
                for h in range(heads):
                    if mu[s, h] == 0.0:
                        continue
                    for lane in range(lanes):
                        weight[lane] += gain[h, lane] * scores[h, token, lane]
                for lane in range(lanes):
                    along[lane] += z[token, lane] * weight[lane]
                    square[lane] += weight[lane] * weight[lane]
            output, product = mu[s].sum(), (mu[s] * omega).sum()
            for lane in range(used):
                count = start + lane + 1
                loss = averaged_loss(dim, noise, lengths[lane] - along[lane], square[lane])
                losses[s] += (loss - losses[s]) / count
                step = product * lengths[lane]  # to first order w_l = (m0 + m1 r (z_l - mean z)) / L
                miss = lengths[lane] - output * mean[lane] - step * variance[lane]
                loss = averaged_loss(dim, noise, miss, (output * output + step * step * variance[lane]) / context)
                first_order[s] += (loss - first_order[s]) / count
    return losses, first_order
