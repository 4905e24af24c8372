"""One chunk of queries of the easy task for linear attention, whose risk is split over the modes of the covariances.

Everything is drawn in the eigenbasis of the covariances. For scalar query-key matrices the Haar rotation O of depth
(3) drops out, because the risk depends only on products that do not change when query, tokens, Sigma and Omega are
rotated together. The teacher is averaged exactly: E over beta of (beta.v)^2 is v.Omega v, a sum over modes.
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
def add_to_means(teacher: Any, vector: Any, count: int, means: Any) -> None:
    """Update ``means`` (dim,) by the terms omega_k v_k^2 of E (beta.v)^2 = v.Omega v, of sample number ``count``.

    vector v (dim,); teacher (dim,): omega_k. Source: depth (26), (30).
    """
    for k in range(vector.size):
        means[k] += (teacher[k] * vector[k] * vector[k] - means[k]) / count


@njit(nogil=True)
def multiply_by_tokens(tokens: Any, vector: Any, product: Any) -> None:
    """S v = sum_i x_i (x_i.v) / P into ``product`` (dim,), without forming S; tokens (P, dim); vector v (dim,).

    Source: depth (19).
    """
    context, dim = tokens.shape
    product[:] = 0.0
    for i in range(context):
        score = 0.0
        for k in range(dim):
            score += tokens[i, k] * vector[k]
        for k in range(dim):
            product[k] += score * tokens[i, k]
    for k in range(dim):
        product[k] /= context


@njit(nogil=True)
def subtract_by_tokens(tokens: Any, step: float, vector: Any, change: Any) -> None:
    """One layer, v <- v - s S v, from the tokens (P, dim).

    vector v (dim,), overwritten; change (dim,): working space. Source: depth (19), (22).
    """
    multiply_by_tokens(tokens, vector, change)
    for k in range(vector.size):
        vector[k] -= step * change[k]


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
def population_risk_chunk(rng: Any, queries: int, sqrt_input: Any, teacher: Any, layer_steps: Any) -> Any:
    """Means of omega_k v_k^2, (dim,), over ``queries`` queries for infinite context, v = prod_l (I - s_l Sigma) q.

    sqrt_input (dim,): sqrt(lambda_k); teacher (dim,): omega_k; layer_steps (L,): s_l. In units of the label
    variance. Draws dim normals for each query. Source: depth (26), (29).
    """
    dim = sqrt_input.size
    vector, means = np.empty(dim), np.zeros(dim)
    for count in range(1, queries + 1):
        draw_gaussian(rng, sqrt_input, vector)
        for layer in range(layer_steps.size - 1, -1, -1):
            for k in range(dim):
                vector[k] -= layer_steps[layer] * sqrt_input[k] * sqrt_input[k] * vector[k]
        add_to_means(teacher, vector, count, means)
    return means


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
) -> Any:
    """Means of omega_k v_k^2, (dim,), over ``contexts`` contexts of P tokens, v = (I - s_1 S) ... (I - s_L S) q.

    sqrt_input (dim,): sqrt(lambda_k); teacher (dim,): omega_k; layer_steps (L,): s_l; context: P. exact_match: the
    query is the first token (any other has the same risk), else it is drawn independently. form_covariance: form S,
    which pays for many layers. In units of the label variance. Draws dim normals for each token, then for the query
    where it is independent. Source: depth (5), (22), (26).
    """
    dim = sqrt_input.size
    tokens, vector, change = np.empty((context, dim)), np.empty(dim), np.empty(dim)
    size = dim if form_covariance else 0
    covariance = np.empty((size, size))
    means = np.zeros(dim)
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
        add_to_means(teacher, vector, count, means)
    return means


@njit(nogil=True)
def multiply(matrix: Any, vector: Any, product: Any) -> None:
    """``matrix`` (dim, dim) times ``vector`` (dim,) into ``product`` (dim,)."""
    for j in range(vector.size):
        product[j] = 0.0
        for k in range(vector.size):
            product[j] += matrix[j, k] * vector[k]


@njit(nogil=True)
def matrix_risk_batch(
    tokens: Any, queries: Any, rotations: Any, matrices: Any, input_variances: Any, teacher: Any
) -> Any:
    """Means of omega_k v_k^2, (dim,), for layers with matrices in the frame of the network.

    v = (I - S O'B_1 O) ... (I - S O'B_L O) q in the eigenbasis. tokens (n, P, dim), or P = 0 for infinite context,
    where S is Sigma; queries (n, dim); rotations O (n, dim, dim); matrices (L, dim, dim): B_l, with the factor v / L
    of depth (22) included; input_variances, teacher (dim,): lambda_k, omega_k. Source: depth (22), (26).
    """
    count, context, dim = tokens.shape
    vector, turned, back, change = np.empty(dim), np.empty(dim), np.empty(dim), np.empty(dim)
    means = np.zeros(dim)
    for n in range(count):
        vector[:] = queries[n]
        for layer in range(matrices.shape[0] - 1, -1, -1):
            multiply(rotations[n], vector, turned)
            multiply(matrices[layer], turned, back)
            multiply(rotations[n].T, back, turned)
            if context > 0:
                multiply_by_tokens(tokens[n], turned, change)
            else:
                for k in range(dim):
                    change[k] = input_variances[k] * turned[k]
            for k in range(dim):
                vector[k] -= change[k]
        add_to_means(teacher, vector, n + 1, means)
    return means
