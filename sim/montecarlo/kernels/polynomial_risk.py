"""One chunk of queries of the easy task for linear attention whose layers have scalar query-key matrices.

Everything is drawn in the eigenbasis of the covariances: the Haar rotation O of depth (3) drops out, because the risk
depends only on products that do not change when query, tokens, Sigma and Omega are rotated together. The teacher is
averaged exactly: E over beta of (beta.v)^2 is v.Omega v.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True)
def draw_gaussian(rng: Any, scale: Any, vector: Any) -> None:
    """Fill ``vector`` with independent normals of standard deviations ``scale``, both (dim,). Source: depth (4)."""
    for k in range(scale.size):
        vector[k] = scale[k] * rng.standard_normal()


@njit(nogil=True)
def teacher_average(teacher: Any, vector: Any) -> float:
    """E (beta.v)^2 = v.Omega v for ``vector`` v and variances ``teacher``, both (dim,). Source: depth (26)."""
    total = 0.0
    for k in range(vector.size):
        total += teacher[k] * vector[k] * vector[k]
    return total


@njit(nogil=True)
def subtract_by_tokens(tokens: Any, step: float, vector: Any, change: Any) -> None:
    """One layer, v <- v - s S v, with S v = sum_i x_i (x_i.v) / P: S is not formed.

    tokens (P, dim); vector v (dim,), overwritten; change (dim,): working space. Source: depth (19), (22).
    """
    context, dim = tokens.shape
    change[:] = 0.0
    for i in range(context):
        score = 0.0
        for k in range(dim):
            score += tokens[i, k] * vector[k]
        for k in range(dim):
            change[k] += score * tokens[i, k]
    for k in range(dim):
        vector[k] -= step * change[k] / context


@njit(nogil=True)
def subtract_by_covariance(covariance: Any, step: float, vector: Any, change: Any) -> None:
    """One layer, v <- v - s S v, with S at hand.

    covariance S (dim, dim), symmetric; vector v (dim,), overwritten; change (dim,): working space.
    Source: depth (22).
    """
    dim = vector.size
    change[:] = 0.0
    for j in range(dim):
        for k in range(dim):  # S is symmetric: its rows are its columns
            change[k] += covariance[j, k] * vector[j]
    for k in range(dim):
        vector[k] -= step * change[k]


@njit(nogil=True)
def empirical_covariance(tokens: Any, covariance: Any) -> None:
    """S = sum_i x_i x_i^T / P into ``covariance`` (dim, dim); tokens (P, dim). Source: depth (19)."""
    context, dim = tokens.shape
    covariance[:] = 0.0
    for i in range(context):
        for j in range(dim):
            for k in range(dim):
                covariance[j, k] += tokens[i, j] * tokens[i, k]
    for j in range(dim):
        for k in range(dim):
            covariance[j, k] /= context


@njit(nogil=True)
def population_risk_chunk(rng: Any, queries: int, sqrt_input: Any, teacher: Any, layer_steps: Any) -> float:
    """Mean of v.Omega v over ``queries`` queries for infinite context, v = prod_l (I - s_l Sigma) q.

    sqrt_input (dim,): sqrt(lambda_k); teacher (dim,): omega_k; layer_steps (L,): s_l. In units of the label
    variance. Draws dim normals for each query. Source: depth (26), (29).
    """
    dim = sqrt_input.size
    vector = np.empty(dim)
    mean = 0.0
    for count in range(1, queries + 1):
        draw_gaussian(rng, sqrt_input, vector)
        for layer in range(layer_steps.size - 1, -1, -1):
            for k in range(dim):
                vector[k] -= layer_steps[layer] * sqrt_input[k] * sqrt_input[k] * vector[k]
        mean += (teacher_average(teacher, vector) - mean) / count
    return mean


@njit(nogil=True)
def context_risk_chunk(
    rng: Any,
    contexts: int,
    sqrt_input: Any,
    teacher: Any,
    layer_steps: Any,
    context: int,
    exact_match: bool,
    form_covariance: bool,
) -> float:
    """Mean of v.Omega v over ``contexts`` contexts of P tokens, v = (I - s_1 S) ... (I - s_L S) q.

    sqrt_input (dim,): sqrt(lambda_k); teacher (dim,): omega_k; layer_steps (L,): s_l; context: P. exact_match: the
    query is the first token (any other has the same risk), else it is drawn independently. form_covariance: form S,
    which pays for many layers. In units of the label variance. Draws dim normals for each token, then for the query
    where it is independent. Source: depth (5), (22), (26).
    """
    dim = sqrt_input.size
    tokens, vector, change = np.empty((context, dim)), np.empty(dim), np.empty(dim)
    size = dim if form_covariance else 0
    covariance = np.empty((size, size))
    mean = 0.0
    for count in range(1, contexts + 1):
        for i in range(context):
            draw_gaussian(rng, sqrt_input, tokens[i])
        if exact_match:
            vector[:] = tokens[0]
        else:
            draw_gaussian(rng, sqrt_input, vector)
        if form_covariance:
            empirical_covariance(tokens, covariance)
        for layer in range(layer_steps.size - 1, -1, -1):
            if form_covariance:
                subtract_by_covariance(covariance, layer_steps[layer], vector, change)
            else:
                subtract_by_tokens(tokens, layer_steps[layer], vector, change)
        mean += (teacher_average(teacher, vector) - mean) / count
    return mean
