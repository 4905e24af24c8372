"""One chunk of whole contexts of in-context regression, read by several predictors.

Every predictor is a weighted sum of the labels, sum_l w_l y_l, with weights that depend on the tokens and the query
alone, so that its loss is averaged exactly over the teacher and the label noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

# Kinds of predictors, as integers because kernels take arrays only.
VANILLA, DEBIASED, RIDGE, EXPONENTIAL, SHIFTED_TANH, SQUARE = range(6)


@njit(nogil=True)
def draw_tokens(rng: Any, root: Any, tokens: Any) -> None:
    """Rows ``root`` n with n standard normal into ``tokens`` (L, d); root (d, d), lower triangular.

    Source: multihead section 5.3.
    """
    context, dim = tokens.shape
    normals = np.empty(dim)
    for token in range(context):
        for j in range(dim):
            normals[j] = rng.standard_normal()
        for i in range(dim):
            total = 0.0
            for j in range(i + 1):
                total += root[i, j] * normals[j]
            tokens[token, i] = total


@njit(nogil=True)
def log_activation(kind: int, scale: float, x: float) -> float:
    """Logarithm of exp(x), of (1 + tanh x)/2 or of (1 + C x)^2. Source: multihead section 5.2."""
    if kind == EXPONENTIAL:
        return x
    if kind == SHIFTED_TANH:  # 1 / (1 + exp(-2x)), without overflow for either sign
        return 2 * x - math.log1p(math.exp(2 * x)) if x < 0 else -math.log1p(math.exp(-2 * x))
    base = abs(1 + scale * x)
    return 2 * math.log(base) if base > 0 else -math.inf


@njit(nogil=True)
def add_head(kind: int, scale: float, omega: float, mu: float, scores: Any, weights: Any) -> None:
    """Add mu f(omega s_l) / sum_m f(omega s_m) to ``weights`` (L,); scores s (L,). Source: multihead (3.2), 5.2."""
    logs = np.empty(scores.size)
    for token in range(scores.size):
        logs[token] = log_activation(kind, scale, omega * scores[token])
    largest, total = logs.max(), 0.0
    for token in range(scores.size):
        logs[token] = math.exp(logs[token] - largest)
        total += logs[token]
    for token in range(scores.size):
        weights[token] += mu * logs[token] / total


@njit(nogil=True)
def multiply(matrix: Any, vector: Any, product: Any) -> None:
    """``matrix`` (n, m) times ``vector`` (m,) into ``product`` (n,)."""
    for i in range(matrix.shape[0]):
        total = 0.0
        for j in range(vector.size):
            total += matrix[i, j] * vector[j]
        product[i] = total


@njit(nogil=True)
def solve_positive(matrix: Any, vector: Any) -> None:
    """Solve A x = b by Cholesky's factor: ``matrix`` A (d, d), positive definite, lower half overwritten by the factor.

    vector: b (d,), overwritten by x. Written out because calls of LAPACK take longer for the few dimensions of use.
    """
    dim = vector.size
    for i in range(dim):
        for j in range(i + 1):
            total = matrix[i, j]
            for k in range(j):
                total -= matrix[i, k] * matrix[j, k]
            matrix[i, j] = math.sqrt(total) if i == j else total / matrix[j, j]
    for i in range(dim):
        for k in range(i):
            vector[i] -= matrix[i, k] * vector[k]
        vector[i] /= matrix[i, i]
    for i in range(dim - 1, -1, -1):
        for k in range(i + 1, dim):
            vector[i] -= matrix[k, i] * vector[k]
        vector[i] /= matrix[i, i]


@njit(nogil=True)
def ridge_coefficients(penalty: Any, tokens: Any, query: Any, system: Any, coefficients: Any) -> None:
    """(X'X + penalty)^-1 x_q into ``coefficients`` (d,); tokens X (L, d); system (d, d): working space.

    Source: multihead section 4.3.
    """
    context, dim = tokens.shape
    for i in range(dim):
        coefficients[i] = query[i]
        for j in range(i + 1):
            system[i, j] = penalty[i, j]
    for token in range(context):
        for i in range(dim):
            for j in range(i + 1):
                system[i, j] += tokens[token, i] * tokens[token, j]
    solve_positive(system, coefficients)


@njit(nogil=True)
def fill_weights(
    kind: int, matrix: Any, scale: float, omega: Any, mu: Any, tokens: Any, query: Any, weights: Any
) -> None:
    """Weights of one predictor into ``weights`` (L,).

    tokens X (L, d); query x_q (d,). matrix M (d, d): gradient descent has w = X M x_q / L, debiased with the mean
    token subtracted from each; ridge has w = X (X'X + M)^-1 x_q; heads omega, mu (H,) read the scores X M x_q.
    Source: multihead (3.2), (4.11), (5.4)-(5.6).
    """
    context, dim = tokens.shape
    direction, scores = np.empty(dim), np.empty(context)
    if kind == RIDGE:
        ridge_coefficients(matrix, tokens, query, np.empty((dim, dim)), direction)
        multiply(tokens, direction, weights)
        return
    multiply(matrix, query, direction)
    multiply(tokens, direction, scores)
    mean = scores.mean() if kind == DEBIASED else 0.0
    weights[:] = 0.0
    if kind in (VANILLA, DEBIASED):
        for token in range(context):
            weights[token] = (scores[token] - mean) / context
    else:
        for head in range(omega.size):
            if mu[head] != 0.0:
                add_head(kind, scale, omega[head], mu[head], scores, weights)


@njit(nogil=True)
def averaged_loss(prior: Any, noise: float, tokens: Any, query: Any, weights: Any) -> float:
    """E (y_q - sum_l w_l y_l)^2 over teacher and noise: e.B e + noise (1 + |w|^2) with e = x_q - sum_l w_l x_l.

    prior B (d, d); tokens (L, d); query (d,); weights (L,). Source: multihead (2.5), by direct averaging.
    """
    context, dim = tokens.shape
    error, image = query.copy(), np.empty(dim)
    square, along = 0.0, 0.0
    for token in range(context):
        square += weights[token] * weights[token]
        for i in range(dim):
            error[i] -= weights[token] * tokens[token, i]
    multiply(prior, error, image)
    for i in range(dim):
        along += error[i] * image[i]
    return along + noise * (1 + square)


@njit(nogil=True)
def regression_chunk(
    rng: Any,
    contexts: int,
    context: int,
    root: Any,
    prior: Any,
    noise: float,
    kinds: Any,
    matrices: Any,
    scales: Any,
    omega: Any,
    mu: Any,
) -> Any:
    """Mean losses of K predictors over ``contexts`` common contexts of L tokens, shape (K,), against noisy labels.

    root (d, d): Cholesky factor of the covariance of the tokens; prior B (d, d): covariance of the teacher; noise:
    variance of the label noise. kinds (K,), matrices (K, d, d), scales (K,), omega, mu (K, H): see `fill_weights`;
    heads with mu = 0 are skipped. Draws the tokens, then the query, d normals each. Source: multihead (2.5).
    """
    dim, predictors = root.shape[0], kinds.size
    tokens, query, weights = np.empty((context, dim)), np.empty((1, dim)), np.empty(context)
    means = np.zeros(predictors)
    for count in range(1, contexts + 1):
        draw_tokens(rng, root, tokens)
        draw_tokens(rng, root, query)
        for k in range(predictors):
            fill_weights(kinds[k], matrices[k], scales[k], omega[k], mu[k], tokens, query[0], weights)
            means[k] += (averaged_loss(prior, noise, tokens, query[0], weights) - means[k]) / count
    return means
