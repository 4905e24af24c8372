"""Plain NumPy twins of the Numba kernels: one context at a time, the formulas as they are printed.

A twin takes the same arguments as its kernel and draws the same bits from the same generator, so results agree to
rounding. Load it from a test with `importlib.util.spec_from_file_location`: tests are not a package.
"""

import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import betaprime


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


def tail_probability(rate, direction, variances):
    """Probability that the cosine of a token with a unit ``direction`` exceeds c(rate), by adaptive quadrature."""
    start = direction**2 * rate * variances / (1 + rate * variances)

    def integrand(y):
        rest = 1 / (1 + rate * np.exp(y * y) * variances)
        return y * np.sqrt(np.prod(rest) / (np.expm1(y * y) * (start @ rest)))

    return np.sqrt(start.sum()) / np.pi * quad(integrand, 0, 8, epsabs=0, epsrel=1e-11, limit=200)[0]


def tail_moments(rate, direction, variances, teacher):
    """F, E[x; cos > c(rate)] and E[x.Omega x; cos > c(rate)] of a token.

    The power is the derivative of the tilted tail E[exp(e x.Omega x); cos > c] at e = 0: the token stays Gaussian, with
    the variances lambda / (1 - 2 e lambda omega), and another rate belongs to the same cosine.
    """
    x = rate * variances / (1 + rate * variances)
    squared_cosine = direction**2 @ x

    def tilted(tilt):
        shrunk = 1 - 2 * tilt * variances * teacher
        spectrum = variances / shrunk
        log_rate = brentq(
            lambda v: direction**2 @ (1 / (1 + np.exp(-v) / spectrum)) - squared_cosine, -99, 99, xtol=1e-13
        )
        return np.prod(shrunk) ** -0.5 * tail_probability(np.exp(log_rate), direction, spectrum)

    mean = direction * x * np.sqrt(squared_cosine / (2 * np.pi * rate * np.prod(1 + rate * variances)))
    tilt = 1e-4 / (variances * teacher).max()
    power = (tilted(tilt) - tilted(-tilt)) / (2 * tilt)
    return tail_probability(rate, direction, variances), mean / (direction**2 @ (x * (1 - x))), power


def conditional_target(query, variances, teacher, context, top_k, points=40):
    """E[t] and E[t.Omega t] of the difficult task given the query: an integral over the (k+1)-th largest cosine."""
    direction, trace = query / np.sqrt((query**2).sum()), teacher @ variances
    grid = np.linspace(*np.log(betaprime(top_k + 1, context - top_k).ppf([1e-9, 1 - 1e-9])), points)
    weights = np.exp((top_k + 1) * grid - (context + 1) * np.log1p(np.exp(grid)))
    mean, power = np.zeros(query.size), 0.0
    for odds, weight in zip(grid, weights / weights.sum(), strict=True):
        side = 1 / (1 + np.exp(abs(odds)))
        log_rate = brentq(lambda v, u=side: tail_probability(np.exp(v), direction, variances) - u, -25, 25)
        tail, first, second = tail_moments(np.exp(log_rate), direction, variances, teacher)
        if odds > 0:
            tail, second = 1 - tail, trace - second
        first = first / tail
        mean += weight * first
        power += weight * (second / tail + (top_k - 1) * (first @ (teacher * first))) / top_k
    return mean, power


def population_risk_chunk(rng, queries, sqrt_input, teacher, layer_steps):
    """Means of omega_k [prod_l (1 - s_l lambda_k) q_k]^2, depth (29) before q is averaged."""
    response = np.prod(1 - np.outer(layer_steps, sqrt_input**2), axis=0)
    draws = sqrt_input * rng.standard_normal((queries, sqrt_input.size))
    return np.mean((draws * response) ** 2, axis=0) * teacher


def context_risk_chunk(rng, contexts, sqrt_input, teacher, layer_steps, context, exact_match, form_covariance):
    """Terms of the mean of q.D' Omega D q, D = (I - s_1 S) ... (I - s_L S) formed as a matrix, depth (22), (26)."""
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
        losses.append(teacher * error**2)
    return np.mean(losses, axis=0)


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


def softmax_risk_chunk(rng, contexts, lanes, dim, context, noise, omega, mu):
    """Twin of the reduced softmax-risk kernel: one context after the other, losses of all predictors at once.

    ``lanes``, the number of contexts that the kernel treats side by side, changes nothing here.
    """
    losses, first_order = [], []
    for _ in range(contexts):
        length = np.sqrt(2 * rng.standard_gamma(0.5 * dim))
        z = rng.standard_normal(context)
        logits = np.multiply.outer(omega, length * z)
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        attention = scores / scores.sum(axis=1, keepdims=True)
        linear = (1 + np.outer(omega, length * (z - z.mean()))) / context
        for weights, record in ((mu @ attention, losses), (mu @ linear, first_order)):
            square = (weights**2).sum(axis=1)
            record.append(((length - weights @ z) ** 2 + (dim - 1) * square) / dim + noise * (1 + square))
    return np.mean(losses, axis=0), np.mean(first_order, axis=0)


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


def regression_weights(kind, matrix, scale, omega, mu, tokens, query):
    """Weights of one predictor of the labels, straight from multihead (3.2), (4.11) and section 5.2."""
    activations = {3: np.exp, 4: lambda x: 1 + np.tanh(x), 5: lambda x: (1 + scale * x) ** 2}
    if kind == 2:
        return tokens @ np.linalg.inv(tokens.T @ tokens + matrix) @ query
    if kind < 2:
        return (tokens - kind * tokens.mean(axis=0)) @ matrix @ query / len(tokens)
    values = activations[kind](np.outer(omega, tokens @ matrix @ query))
    return mu @ (values / values.sum(axis=1, keepdims=True))


def regression_chunk(rng, contexts, context, root, prior, noise, kinds, matrices, scales, omega, mu):
    """Mean losses of predictors on common contexts from the covariance of the labels and the answer."""
    dim = len(root)
    losses = []
    for _ in range(contexts):
        tokens = rng.standard_normal((context, dim)) @ root.T
        query = root @ rng.standard_normal(dim)
        rows = np.vstack([query, tokens])
        covariance = rows @ prior @ rows.T + noise * np.eye(context + 1)
        record = []
        for predictor in zip(kinds, matrices, scales, omega, mu, strict=True):
            residual = np.concatenate([[1.0], -regression_weights(*predictor, tokens, query)])
            record.append(residual @ covariance @ residual)
        losses.append(record)
    return np.mean(losses, axis=0)
