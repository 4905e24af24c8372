"""One chunk of contexts of the difficult task, read by softmax layers with noisy queries, averaged over the noise.

A layer reads with logits ``alpha c_i + beta e_i``: c_i is the cosine of token i with the query and e_i its cosine
with a random unit vector eta orthogonal to the query. The exponential factorises, so all layers of one beta share the
exponentials of the noise. Each context comes with two independent sets of noise vectors, and products are taken
between the averages over one set and over the other: the noise biases no product. Source: depth (10), (57)-(63).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

FRAMES = 2


# Sums may be reordered and fused, which vectorises them; NaN and infinities keep their meaning.
@njit(nogil=True, fastmath={"reassoc", "contract"})
def mean_attention(tilt: Any, exponentials: Any, inverse: Any, attention: Any) -> None:
    """Softmax weights averaged over the draws of the noise.

    tilt (P,): exp(alpha c_i); exponentials (P, M): exp(beta e_i) for each of M draws; inverse (M,): becomes one over
    the sum of the unnormalised weights; attention (P,): becomes the mean weights. Source: depth (10).
    """
    context, draws = exponentials.shape
    inverse[:] = 0.0
    for i in range(context):
        for m in range(draws):
            inverse[m] += tilt[i] * exponentials[i, m]
    for m in range(draws):
        inverse[m] = 1 / inverse[m]
    for i in range(context):
        total = 0.0
        for m in range(draws):
            total += exponentials[i, m] * inverse[m]
        attention[i] = tilt[i] * total / draws


@njit(nogil=True, fastmath={"reassoc", "contract"})
def apply_label_covariance(
    tokens: Any, teacher: Any, mean_product: float, excess: float, weights: Any, image: Any
) -> None:
    """``image`` (P,) becomes K w for ``weights`` w (P,), K the covariance of the labels given all directions.

    .. K_ij = mean_product a_i.Omega a_j + [i = j] excess |a_i|^2_Omega

    tokens a (P, dim): whitened to unit length, then coloured, so that x_i = chi_i a_i with independent lengths chi_i;
    teacher (dim,): omega_k; mean_product: (E chi)^2; excess: Var chi. Source: depth (1)-(4), (12).
    """
    context, dim = tokens.shape
    read = np.zeros(dim)
    for i in range(context):
        for k in range(dim):
            read[k] += weights[i] * tokens[i, k]
    for i in range(context):
        product, square = 0.0, 0.0
        for k in range(dim):
            product += teacher[k] * tokens[i, k] * read[k]
            square += teacher[k] * tokens[i, k] * tokens[i, k]
        image[i] = mean_product * product + excess * square * weights[i]


@njit(nogil=True)
def fill_exponentials(beta: float, noise_cosines: Any, exponentials: Any) -> None:
    """exp(beta e) for D noise vectors and for their opposites.

    noise_cosines e (F, P, D), one set of draws per frame; exponentials (F, P, 2 D). Source: depth (10).
    """
    frames, context, draws = noise_cosines.shape
    for f in range(frames):
        for i in range(context):
            for m in range(draws):
                value = np.exp(beta * noise_cosines[f, i, m])
                exponentials[f, i, m] = value
                exponentials[f, i, draws + m] = 1 / value


@njit(nogil=True)
def fill_tilt(alpha: float, cosines: Any, tilt: Any) -> None:
    """exp(alpha (c_i - max c)) for ``cosines`` c (P,) into ``tilt`` (P,). Source: depth (10)."""
    largest = cosines.max()
    for i in range(cosines.size):
        tilt[i] = np.exp(alpha * (cosines[i] - largest))


@njit(nogil=True, fastmath={"reassoc", "contract"})
def dot(left: Any, right: Any) -> float:
    """Product of two vectors (n,)."""
    total = 0.0
    for i in range(left.size):
        total += left[i] * right[i]
    return total


@njit(nogil=True)
def read_context(
    cosines: Any, noise_cosines: Any, alphas: Any, betas: Any, samples: int, attention: Any, single: Any
) -> None:
    """Mean attention of every layer type in one context, and the attention of single draws.

    cosines (P,); noise_cosines (F, P, D); alphas, betas (J,), fastest where equal betas are neighbours; attention
    (F, J, P): means over the 2 D draws of each frame; single (F, J, samples, P): of the first draws of each frame,
    with samples <= D. Source: depth (10), (58).
    """
    frames, context, draws = noise_cosines.shape
    exponentials, inverse = np.empty((frames, context, 2 * draws)), np.empty(2 * draws)
    tilt = np.empty(context)
    for j in range(alphas.size):
        if j == 0 or betas[j] != betas[j - 1]:
            fill_exponentials(betas[j], noise_cosines, exponentials)
        fill_tilt(alphas[j], cosines, tilt)
        for f in range(frames):
            mean_attention(tilt, exponentials[f], inverse, attention[f, j])
            for m in range(samples):
                for i in range(context):
                    single[f, j, m, i] = tilt[i] * exponentials[f, i, m] * inverse[m]


@njit(nogil=True)
def mean_field_chunk(
    cosines: Any,
    noise_cosines: Any,
    tokens: Any,
    target: Any,
    alphas: Any,
    betas: Any,
    teachers: Any,
    mean_product: float,
    excess: float,
) -> tuple[Any, Any, Any, Any]:
    """Means over n contexts of the quadratic forms of the mean-field programme, for B teachers and J layer types.

    cosines (n, P); noise_cosines (n, 2, P, D); tokens (n, P, dim), mean_product, excess: see
    `apply_label_covariance`; target (n, P): the row t; alphas, betas (J,); teachers (B, dim): omega_k. With
    K the covariance of the labels and p, p' the attention averaged over the two sets of draws, returns the means of

    - t K t, (B,): T;
    - (p_j + p'_j) K t / 2, (B, J): h;
    - (p_j K p'_l + p_l K p'_j) / 2, (B, J, J): G;
    - s_j K s_j with s the attention of a single draw, (B, J): the power A of one layer.

    Source: depth (59)-(63) for layers drawn independently from a law.
    """
    count, context = cosines.shape
    types, laws = alphas.size, teachers.shape[0]
    power, cross = np.zeros(laws), np.zeros((laws, types))
    gram, single_power = np.zeros((laws, types, types)), np.zeros((laws, types))
    attention, single = np.empty((FRAMES, types, context)), np.empty((FRAMES, types, 1, context))
    image, image_of_target = np.empty((types, context)), np.empty(context)
    for c in range(count):
        read_context(cosines[c], noise_cosines[c], alphas, betas, 1, attention, single)
        for b in range(laws):
            apply_label_covariance(tokens[c], teachers[b], mean_product, excess, target[c], image_of_target)
            power[b] += dot(target[c], image_of_target)
            for j in range(types):
                cross[b, j] += dot(attention[0, j], image_of_target) / 2
                cross[b, j] += dot(attention[1, j], image_of_target) / 2
                for f in range(FRAMES):
                    sample = single[f, j, 0]
                    apply_label_covariance(tokens[c], teachers[b], mean_product, excess, sample, image[j])
                    single_power[b, j] += dot(sample, image[j]) / FRAMES
                apply_label_covariance(tokens[c], teachers[b], mean_product, excess, attention[1, j], image[j])
            for j in range(types):
                for k in range(types):
                    gram[b, j, k] += dot(attention[0, j], image[k])
    for b in range(laws):
        for j in range(types):
            for k in range(j + 1):
                mean = (gram[b, j, k] + gram[b, k, j]) / 2
                gram[b, j, k], gram[b, k, j] = mean, mean
    return power / count, cross / count, gram / count, single_power / count


@njit(nogil=True)
def scan_chunk(
    cosines: Any,
    noise_cosines: Any,
    tokens: Any,
    target: Any,
    alphas: Any,
    betas: Any,
    weights: Any,
    scan_alphas: Any,
    scan_betas: Any,
    teachers: Any,
    mean_product: float,
    excess: float,
) -> tuple[Any, Any]:
    """Means of the products of K other layer types with the target and with the residual of given weights.

    alphas, betas (J,) and weights (B, J): the predictor, one row per teacher; scan_alphas, scan_betas (K,); the other
    arguments are those of `mean_field_chunk`. Returns the means of p_k K t and of p_k K (t - sum_j w_j p'_j), both
    (B, K) and averaged over the two ways to assign the sets of draws: the same numbers that `mean_field_chunk` gives
    for the types together, without their Gram matrix. Source: the gradient of depth (60) in the law of the layers.
    """
    count, context = cosines.shape
    types, scanned, laws = alphas.size, scan_alphas.size, teachers.shape[0]
    cross, product = np.zeros((laws, scanned)), np.zeros((laws, scanned))
    attention, single = np.empty((FRAMES, types, context)), np.empty((FRAMES, types, 0, context))
    scan_attention, scan_single = np.empty((FRAMES, scanned, context)), np.empty((FRAMES, scanned, 0, context))
    image, image_of_target, residual = np.empty(context), np.empty(context), np.empty(context)
    for c in range(count):
        read_context(cosines[c], noise_cosines[c], alphas, betas, 0, attention, single)
        read_context(cosines[c], noise_cosines[c], scan_alphas, scan_betas, 0, scan_attention, scan_single)
        for b in range(laws):
            apply_label_covariance(tokens[c], teachers[b], mean_product, excess, target[c], image_of_target)
            for f in range(FRAMES):
                residual[:] = target[c]
                for j in range(types):
                    for i in range(context):
                        residual[i] -= weights[b, j] * attention[1 - f, j, i]
                apply_label_covariance(tokens[c], teachers[b], mean_product, excess, residual, image)
                for k in range(scanned):
                    cross[b, k] += dot(scan_attention[f, k], image_of_target) / FRAMES
                    product[b, k] += dot(scan_attention[f, k], image) / FRAMES
    return cross / count, product / count
