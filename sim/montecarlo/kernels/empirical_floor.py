"""One chunk of contexts of the difficult task, read by polynomials in the empirical covariance of each context.

Everything is drawn in the eigenbasis of the covariances, as in `kernels.floor`; the tokens of a context are kept,
because each degree reads them once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sim.montecarlo.kernels.floor import average_rows, draw_gaussian, insert_token


@njit(nogil=True)
def draw_context(
    rng: Any, sqrt_input: Any, query: Any, tokens: Any, scores: Any, slots: Any, selected: Any, target: Any
) -> None:
    """Draw ``query`` (dim,) and ``tokens`` (P, dim); ``target`` becomes the mean of the tokens of largest cosine.

    scores, slots (top_k,) and selected (top_k, dim): working space. Draws dim normals for the query, then dim for
    each token. Source: depth (41).
    """
    context, dim = tokens.shape
    top_k = scores.size
    direction = query / draw_gaussian(rng, sqrt_input, query)
    for slot in range(top_k):
        slots[slot] = slot
    filled = 0
    for i in range(context):
        token = tokens[i]
        length = draw_gaussian(rng, sqrt_input, token)
        product = 0.0
        for k in range(dim):
            product += direction[k] * token[k]
        filled = insert_token(token, product / length, filled, scores, slots, selected)
    average_rows(selected, target)


@njit(nogil=True)
def apply_covariance(tokens: Any, vector: Any, image: Any) -> None:
    """``image`` becomes S ``vector`` with S = X^T X / P; tokens (P, dim), vector and image (dim,). Depth (19)."""
    context, dim = tokens.shape
    image[:] = 0.0
    for i in range(context):
        product = 0.0
        for k in range(dim):
            product += tokens[i, k] * vector[k]
        product /= context
        for k in range(dim):
            image[k] += product * tokens[i, k]


@njit(nogil=True)
def krylov_vectors(tokens: Any, query: Any, recurrence: Any, vectors: Any) -> None:
    """Fill ``vectors`` (R, dim) with v_j = c_jj (S v_{j-1} - sum_{i<j} c_ji v_i), j = 1..R, and v_0 = q.

    recurrence (R, R), lower triangular: c_ji; its diagonal scales, the rest orthogonalises. v_j is a polynomial of
    degree j in S, without constant term, applied to the query. Source: depth (47) with S in the place of Sigma.
    """
    degrees, dim = vectors.shape
    image = np.empty(dim)
    for j in range(degrees):
        apply_covariance(tokens, query if j == 0 else vectors[j - 1], image)
        for i in range(j):
            for k in range(dim):
                image[k] -= recurrence[j, i] * vectors[i, k]
        for k in range(dim):
            vectors[j, k] = recurrence[j, j] * image[k]


@njit(nogil=True)
def empirical_floor_chunk(
    rng: Any, contexts: int, sqrt_input: Any, teacher: Any, context: int, top_k: int, recurrence: Any
) -> tuple[float, Any, Any]:
    """Means over ``contexts`` contexts of T = t.Omega t, h_j = v_j.Omega t (R,) and G_ij = v_i.Omega v_j (R, R).

    sqrt_input (dim,): sqrt(lambda_k); teacher (dim,): omega_k; context P; recurrence (R, R): of the vectors v_j, see
    `krylov_vectors`. In units of the label variance; means are updated in place (Welford). Source: depth (49) with S.
    """
    degrees, dim = recurrence.shape[0], sqrt_input.size
    query, target, tokens = np.empty(dim), np.empty(dim), np.empty((context, dim))
    scores, slots, selected = np.empty(top_k), np.empty(top_k, np.int64), np.empty((top_k, dim))
    vectors = np.empty((degrees, dim))
    power, cross, gram = 0.0, np.zeros(degrees), np.zeros((degrees, degrees))
    for count in range(1, contexts + 1):
        draw_context(rng, sqrt_input, query, tokens, scores, slots, selected, target)
        krylov_vectors(tokens, query, recurrence, vectors)
        total = 0.0
        for k in range(dim):
            total += teacher[k] * target[k] * target[k]
        power += (total - power) / count
        for j in range(degrees):
            total = 0.0
            for k in range(dim):
                total += teacher[k] * vectors[j, k] * target[k]
            cross[j] += (total - cross[j]) / count
            for i in range(j + 1):
                total = 0.0
                for k in range(dim):
                    total += teacher[k] * vectors[j, k] * vectors[i, k]
                gram[j, i] += (total - gram[j, i]) / count
                gram[i, j] = gram[j, i]
    return power, cross, gram
