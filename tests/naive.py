"""Plain NumPy twins of the Numba kernels: one context at a time, the formulas as they are printed.

A twin takes the same arguments as its kernel and draws the same bits from the same generator, so results agree to
rounding. Load it from a test with `importlib.util.spec_from_file_location`: tests are not a package.
"""

import numpy as np


def floor_chunk(rng, contexts, sqrt_input, teacher, context, top_k, basis, coefficients):
    """Means of T, c_j, y_r and g_rj of the difficult task, depth (48)-(49), from the Gram form of each context."""
    dim = sqrt_input.size
    records = []
    for _ in range(contexts):
        query = sqrt_input * rng.standard_normal(dim)
        tokens = sqrt_input * rng.standard_normal((context, dim))
        cosines = tokens @ (query / np.sqrt((query**2).sum())) / np.sqrt((tokens**2).sum(axis=1))
        best = np.argsort(-cosines, kind="stable")[:top_k]
        target = tokens[best].mean(axis=0)
        power = target @ (teacher * target)
        cross = basis @ (teacher * query * target)
        gram = (basis * teacher * query**2) @ basis.T
        residual = np.array([power - 2 * a @ cross + a @ gram @ a for a in coefficients])
        gradient = np.tril(np.array([cross - gram @ a for a in coefficients]))
        records.append((power, cross, residual, gradient))
    return tuple(np.mean(np.array(column), axis=0) for column in zip(*records, strict=True))


def population_risk_chunk(rng, queries, sqrt_input, teacher, layer_steps):
    """Mean of sum_k omega_k [prod_l (1 - s_l lambda_k) q_k]^2, depth (29) before q is averaged."""
    response = np.prod(1 - np.outer(layer_steps, sqrt_input**2), axis=0)
    draws = sqrt_input * rng.standard_normal((queries, sqrt_input.size))
    return np.mean((draws * response) ** 2 @ teacher)


def context_risk_chunk(rng, contexts, sqrt_input, teacher, layer_steps, context, exact_match, form_covariance):
    """Mean of q.D' Omega D q with D = (I - s_1 S) ... (I - s_L S) formed as a matrix, depth (22), (26)."""
    dim = sqrt_input.size
    losses = []
    for _ in range(contexts):
        tokens = sqrt_input * rng.standard_normal((context, dim))
        query = tokens[0] if exact_match else sqrt_input * rng.standard_normal(dim)
        covariance = tokens.T @ tokens / context
        product = np.eye(dim)
        for step in layer_steps:
            product = product @ (np.eye(dim) - step * covariance)
        error = product @ query
        losses.append(error @ (teacher * error))
    return np.mean(losses)


def label_propagation_loss(beta, tokens, query, layer_steps):
    """Squared error of one context by the recursion depth (21) on labels: B_l = I, s_l = v/L, W_y = 1."""
    context = len(tokens)
    labels, prediction = tokens @ beta, 0.0
    for step in layer_steps:
        change = step / context * labels
        prediction += change @ (tokens @ query)
        labels = labels - change @ (tokens @ tokens.T)
    return (prediction - beta @ query) ** 2


def linear_attention_prediction(U, q, beta, W_x, W_y, W_v, W_o, W_q, W_k):
    """Linear attention with mask (75), token by token, straight from depth (8) and (11)."""
    (depth, width, _), tokens = np.shape(W_q), [*np.transpose(U), q]
    context = len(tokens) - 1
    states = [W_y * (beta @ x) for x in tokens[:-1]] + [np.zeros(width)]
    for layer in range(depth):
        updated = []
        for i, receiver in enumerate(tokens):
            sign = 1 if i == context else -1
            change = np.zeros(width)
            for j in range(context):
                score = (W_q[layer] @ W_x @ receiver) @ (W_k[layer] @ W_x @ tokens[j]) / (context * width)
                change += sign * score * (W_v @ states[j])
            updated.append(states[i] + change / depth)
        states = updated
    return float(W_o @ states[-1])


def softmax_risk_chunk(rng, contexts, dim, context, noise, omega, mu):
    """Twin of the reduced softmax-risk kernel, whole arrays at a time for one context."""
    losses = []
    for _ in range(contexts):
        length = np.sqrt(2 * rng.standard_gamma(0.5 * dim))
        z = rng.standard_normal(context)
        logits = np.multiply.outer(omega, length * z)
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights = mu @ (scores / scores.sum(axis=1, keepdims=True))
        square = weights @ weights
        losses.append(((length - z @ weights) ** 2 + (dim - 1) * square) / dim + noise * (1 + square))
    return np.mean(losses)


def softmax_regression_losses(rng, contexts, dim, context, noise, omega, mu):
    """Squared errors of softmax attention on whole contexts with sampled teachers and label noise."""
    tokens = rng.standard_normal((contexts, context, dim))
    query = rng.standard_normal((contexts, dim))
    teacher = rng.standard_normal((contexts, dim)) / np.sqrt(dim)
    labels = np.einsum("nld,nd->nl", tokens, teacher) + np.sqrt(noise) * rng.standard_normal((contexts, context))
    answer = np.einsum("nd,nd->n", query, teacher) + np.sqrt(noise) * rng.standard_normal(contexts)
    logits = np.einsum("h,nld,nd->nhl", omega, tokens, query)
    scores = np.exp(logits - logits.max(axis=2, keepdims=True))
    attention = scores / scores.sum(axis=2, keepdims=True)
    return (answer - np.einsum("h,nhl,nl->n", mu, attention, labels)) ** 2
