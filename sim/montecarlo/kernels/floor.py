"""One chunk of contexts of the difficult task, drawn token by token: the reference for every faster sampler.

Everything is drawn in the eigenbasis of the covariances. The Haar rotation O of depth (3) drops out: cosines and
Omega-weighted products do not change when query, tokens, Sigma and Omega are rotated together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True)
def draw_gaussian(rng: Any, scale: Any, vector: Any) -> float:
    """Fill ``vector`` with independent normals of standard deviations ``scale``, both (dim,); returns its length.

    Source: depth (4).
    """
    squared_length = 0.0
    for k in range(scale.size):
        vector[k] = scale[k] * rng.standard_normal()
        squared_length += vector[k] * vector[k]
    return math.sqrt(squared_length)


@njit(nogil=True)
def insert_token(token: Any, score: float, filled: int, scores: Any, slots: Any, selected: Any) -> int:
    """Enter ``token`` (dim,) in the list of the best tokens where its ``score`` deserves it; returns the new size.

    The list holds ``filled`` tokens: ``scores`` (top_k,) falls, and the token of ``scores[i]`` is the row
    ``selected[slots[i]]`` of ``selected`` (top_k, dim). A token that only equals a score in the list comes after it,
    so the lowest index wins exact ties. Source: depth (6), (41).
    """
    top_k: int = scores.size
    if filled == top_k and not score > scores[top_k - 1]:
        return filled
    place = min(filled, top_k - 1)
    free_slot = slots[place]
    while place > 0 and score > scores[place - 1]:
        scores[place] = scores[place - 1]
        slots[place] = slots[place - 1]
        place -= 1
    scores[place] = score
    slots[place] = free_slot
    selected[free_slot] = token
    return min(filled + 1, top_k)


@njit(nogil=True)
def average_rows(selected: Any, target: Any) -> None:
    """``target`` (dim,) becomes the mean of the rows of ``selected`` (top_k, dim). Source: depth (41)."""
    top_k, dim = selected.shape
    for k in range(dim):
        total = 0.0
        for slot in range(top_k):
            total += selected[slot, k]
        target[k] = total / top_k


@njit(nogil=True)
def draw_target(
    rng: Any,
    sqrt_input: Any,
    query: Any,
    context: int,
    token: Any,
    scores: Any,
    slots: Any,
    selected: Any,
    target: Any,
) -> None:
    """Draw ``query`` and ``context`` tokens; ``target`` becomes the mean of the tokens of largest cosine.

    query, token, target: (dim,), overwritten; scores, slots (top_k,) and selected (top_k, dim): working space of
    `insert_token`. Draws dim normals for the query, then dim for each token. Source: depth (41).
    """
    dim, top_k = sqrt_input.size, scores.size
    length = draw_gaussian(rng, sqrt_input, query)
    # With the unit query a single mode has cosines of exactly +1 or -1: ties there are exact, not up to rounding.
    direction = query / length
    filled = 0
    for slot in range(top_k):
        slots[slot] = slot
    for _ in range(context):
        length = draw_gaussian(rng, sqrt_input, token)
        product = 0.0
        for k in range(dim):
            product += direction[k] * token[k]
        filled = insert_token(token, product / length, filled, scores, slots, selected)
    average_rows(selected, target)


@njit(nogil=True)
def polynomial_values(coefficients: Any, basis: Any) -> Any:
    """Polynomials of degree r = 1..R on the modes, (R, dim): row r-1 is the sum over j <= r of a_rj psi_j.

    coefficients (R, R), lower triangle; basis (R, dim). Source: depth (42).
    """
    degrees, dim = basis.shape
    values = np.zeros((degrees, dim))
    for r in range(degrees):
        for j in range(r + 1):
            for k in range(dim):
                values[r, k] += coefficients[r, j] * basis[j, k]
    return values


@njit(nogil=True)
def add_context(
    count: int, query: Any, target: Any, spread: float, teacher: Any, basis: Any, polynomials: Any, means: Any
) -> None:
    """Update the ``means`` of `floor_chunk` in place (Welford) with the ``count``-th context.

    target (dim,): t, or its mean over the contexts of this query; spread: what the variance of t about that mean
    adds to t.Omega t, zero where t itself is given; polynomials (R, dim): u_r on the modes; means: arrays of T (1,),
    c (R,), y (R,) and g (R, R).
    """
    power, cross, residual, gradient = means
    degrees, dim = basis.shape
    total = spread
    for k in range(dim):
        total += teacher[k] * target[k] * target[k]
    power[0] += (total - power[0]) / count
    for j in range(degrees):
        total = 0.0
        for k in range(dim):
            total += teacher[k] * basis[j, k] * query[k] * target[k]
        cross[j] += (total - cross[j]) / count
    error = np.empty(dim)
    for r in range(degrees):
        total = spread
        for k in range(dim):
            error[k] = target[k] - polynomials[r, k] * query[k]
            total += teacher[k] * error[k] * error[k]
        residual[r] += (total - residual[r]) / count
        for j in range(r + 1):
            total = 0.0
            for k in range(dim):
                total += teacher[k] * basis[j, k] * query[k] * error[k]
            gradient[r, j] += (total - gradient[r, j]) / count


@njit(nogil=True)
def floor_chunk(
    rng: Any, contexts: int, sqrt_input: Any, teacher: Any, context: int, top_k: int, basis: Any, coefficients: Any
) -> tuple[float, Any, Any, Any]:
    """Means over ``contexts`` contexts of the quadratic forms of depth (48)-(49) at given coefficients.

    sqrt_input (dim,): sqrt(lambda_k); teacher (dim,): omega_k; context P; basis (R, dim): psi_j(lambda_k);
    coefficients (R, R): row r-1 holds the coefficients a_rj, j <= r, of the predictor u_r of degree r, zeros in a
    pilot. With t the target and u_r = sum_j a_rj psi_j(Sigma) q, returns the means of

    - t.Omega t, a scalar: T of depth (49);
    - c_j = (psi_j q).Omega t, (R,): h of depth (49) in this basis;
    - y_r = (t - u_r).Omega (t - u_r), (R,): the loss (48), subtracted before it is averaged;
    - g_rj = (psi_j q).Omega (t - u_r), (R, R): minus half its gradient in a_rj, zero for j > r.

    All in units of the label variance. Means are updated in place (Welford), so that nothing large cancels.
    """
    degrees, dim = basis.shape
    query, token, target = np.empty(dim), np.empty(dim), np.empty(dim)
    scores, slots, selected = np.empty(top_k), np.empty(top_k, np.int64), np.empty((top_k, dim))
    polynomials = polynomial_values(coefficients, basis)
    means = np.zeros(1), np.zeros(degrees), np.zeros(degrees), np.zeros((degrees, degrees))
    for count in range(1, contexts + 1):
        draw_target(rng, sqrt_input, query, context, token, scores, slots, selected, target)
        add_context(count, query, target, 0.0, teacher, basis, polynomials, means)
    power, cross, residual, gradient = means
    return float(power[0]), cross, residual, gradient
