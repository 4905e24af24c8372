"""One chunk of queries of the difficult task, each averaged over all its contexts by integrals instead of draws.

Given the query, the tokens are independent, and given the (k+1)-th largest cosine c so are the k selected ones: each
follows the law of a token whose cosine exceeds c. Three functions of c say all that the floor needs: the probability
F of that event, and the mean and the power of a token on it. Each is found from the moment-generating function of the
quadratic form ``(p.x)^2 - c^2 |x|^2``, whose sign decides: F and the power by a positive integral along the cut of
that function, the mean by the residue at its pole.

Everything is written with a rate rho in [0, inf) in place of the cosine, and x_k(r) = r lambda_k / (1 + r lambda_k).
With the unit query p, c^2 = sum_k p_k^2 x_k(rho).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from sim.montecarlo.kernels.floor import add_context, polynomial_values

# The integrals are cut where the integrand has fallen to this fraction of its sum.
NEGLIGIBLE = 1e-14
# Products of factors below one are turned into logarithms before they underflow.
SMALL_PRODUCT = 1e-200
# A rate is accepted after a secant step from a point whose error in the logit is below this: the step squares it.
NEARLY_SOLVED = 0.001
MAX_SECANT_STEPS = 200
MAX_LOG_RATE = 700.0
# Added to the half trace in the step, so that broad integrands are resolved as well.
STEP_SOFTENING = 6.0
# Least distance of a tail from one half: below it the quadrature cannot tell them apart.
SMALLEST_GAP = 1e-15


@njit(nogil=True)
def log_product(rate: float, variances: Any) -> float:
    """Sum over the modes of ``log(1 + rate * lambda_k)``."""
    logarithm, product = 0.0, 1.0
    for k in range(variances.size):
        product /= 1 + rate * variances[k]
        if product < SMALL_PRODUCT:
            logarithm -= math.log(product)
            product = 1.0
    return logarithm - math.log(product)


@njit(nogil=True)
def power_factor(rate: float, variances: Any, teacher: Any, shares: Any) -> float:
    r"""What turns the integrand of F at r = ``rate`` into that of the power, by an integration by parts.

    .. math:: \frac1r \Big[\sum_k \omega_k x_k + \frac{W_2 (\sum_k x_k - 4 B_2 / B_1) + 4 W_3}{B_1}\Big],
        \quad W_n = \sum_k \omega_k p_k^2 x_k^n, \quad B_n = \sum_k p_k^2 x_k^n (1 - x_k)
    """
    trace, teacher_trace, second, third, slope, curvature = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(variances.size):
        rest = 1 / (1 + rate * variances[k])
        x = rate * variances[k] * rest
        trace += x
        teacher_trace += teacher[k] * x
        weight = teacher[k] * shares[k] * x * x
        second += weight
        third += weight * x
        weight = shares[k] * x * rest
        slope += weight
        curvature += weight * x
    return (teacher_trace + (second * (trace - 4 * curvature / slope) + 4 * third) / slope) / rate


@njit(nogil=True)
def cosine_tail(
    rate: float, variances: Any, teacher: Any, shares: Any, step: float, with_power: bool
) -> tuple[float, float, float]:
    r"""Probability F that a token's cosine exceeds c(rate) > 0, and its power there; ``log F``, S and the slope.

    variances, teacher, shares: lambda_k, omega_k and p_k^2, all (dim,); step: of the trapezoidal rule, in units of
    the width of the integrand where that is narrow.

    .. math:: F = \frac{c}{2\pi} \int_\rho^\infty \prod_k (1 + r\lambda_k)^{-1/2}
        \Big[\sum_k p_k^2 (x_k(r) - x_k(\rho))\Big]^{-1/2} \frac{dr}{r}

    S = E[x.Omega x; cosine > c] is the same integral with `power_factor` inside, and 0 without ``with_power``. With
    r = rho exp(y^2) the integrand is even and analytic in y, so the trapezoidal rule converges exponentially. The
    third number, minus half the sum of x_k(rho), is about the derivative of log F in log rho.
    """
    dim = variances.size
    half_trace, squared_cosine = 0.0, 0.0
    start = np.empty(dim)
    for k in range(dim):
        x = rate * variances[k] / (1 + rate * variances[k])
        half_trace += x / 2
        start[k] = shares[k] * x
        squared_cosine += start[k]
    # The integrand falls at least like exp(-half_trace y^2), and its singularities are at |Im y| of about 1 or more.
    step = step / math.sqrt(half_trace + STEP_SOFTENING)
    log_start = log_product(rate, variances)
    tail, power = 0.0, 0.0
    y = step / 2
    while True:
        growth = math.expm1(y * y)
        point = rate * (1 + growth)
        gap, logarithm, product = 0.0, 0.0, 1.0
        for k in range(dim):
            rest = 1 / (1 + point * variances[k])
            gap += start[k] * rest
            product *= rest
            if product < SMALL_PRODUCT:
                logarithm += math.log(product)
                product = 1.0
        if not gap > 0:  # a rate so large or so small that float64 cannot tell its cosine from 1 or 0
            return math.nan, math.nan, -half_trace
        term = y * math.exp((logarithm + math.log(product) + log_start) / 2) / math.sqrt(growth * gap)
        tail += term
        if with_power:
            power += term * power_factor(point, variances, teacher, shares)
        if term < NEGLIGIBLE * tail:
            break
        y += step
    scale = math.log(step * math.sqrt(squared_cosine) / math.pi) - log_start / 2
    return scale + math.log(tail), power * math.exp(scale), -half_trace


@njit(nogil=True)
def solve_rate(
    logit: float, guess: float, slope: float, variances: Any, teacher: Any, shares: Any, step: float
) -> tuple[float, float]:
    """``log rho`` at which ``log(F / (1/2 - F))`` is ``logit``, and the slope there; the first is NaN if not found.

    The logit falls from infinity to minus infinity and is nearly linear in log rho at both ends, so a bracketed
    secant iteration from any ``guess`` and a negative ``slope`` (or 0 for none) arrives.
    """
    low, high, stride = -math.inf, math.inf, 2.0
    last, last_error = 0.0, 0.0
    for count in range(MAX_SECANT_STEPS):
        if not abs(guess) < MAX_LOG_RATE:
            break
        log_tail, _, fallback = cosine_tail(math.exp(guess), variances, teacher, shares, step, False)
        error = log_tail - math.log(max(0.5 - math.exp(log_tail), SMALLEST_GAP)) - logit
        if error > 0:
            low = guess
        else:
            high = guess
        if count > 0 and guess != last and (error - last_error) / (guess - last) < 0:
            slope = (error - last_error) / (guess - last)
        elif not slope < 0:
            slope = fallback - 0.5
        last, last_error = guess, error
        guess -= error / slope
        if abs(error) < NEARLY_SOLVED:
            return guess, slope
        if not low < guess < high:
            if math.isinf(low):
                guess = high - stride
            elif math.isinf(high):
                guess = low + stride
            else:
                guess = (low + high) / 2
            stride *= 2
    return math.nan, slope


@njit(nogil=True)
def average_target(
    query: Any, variances: Any, teacher: Any, top_k: int, log_odds: Any, weights: Any, step: float, guess: float,
    target: Any,
) -> tuple[float, float]:  # fmt: skip
    r"""Mean of the target t over the contexts of one ``query``: written to ``target`` (dim,); returns its spread.

    log_odds, weights (n,): quadrature rule for log(U / (1 - U)), rising, where U is the probability that a token
    passes the (k+1)-th largest cosine; empty where all tokens are selected. guess: of the first log rho. With
    m = E[x; cosine > c] and S as in `cosine_tail`, both at F = U,

    .. math:: E[t] = E_U \frac{m}{U}, \qquad E[t^\top\Omega t] = E_U\Big[\frac{S}{kU}
        + \frac{k-1}{k}\,\frac{m^\top\Omega m}{U^2}\Big], \qquad
        m_k = \frac{c}{\sqrt{2\pi\rho}} \prod_j (1 + \rho\lambda_j)^{-1/2}\, \frac{p_k x_k}{\sum_j p_j^2 x_j (1 - x_j)}

    Where U > 1/2 the cosine is negative: m is that of -c, and what is left to U and S are their complements. Returns
    E[t.Omega t] - E[t].Omega E[t] >= 0, NaN where no rate was found, and the first log rho. Source: depth (41), (49).
    """
    dim = variances.size
    length, trace = 0.0, 0.0
    for k in range(dim):
        length += query[k] * query[k]
        trace += teacher[k] * variances[k]
        target[k] = 0.0
    if log_odds.size == 0:
        return trace / top_k, guess
    length = math.sqrt(length)
    shares, mean = np.empty(dim), np.empty(dim)
    for k in range(dim):
        shares[k] = (query[k] / length) ** 2
    power, slope, first, logit = 0.0, 0.0, guess, 0.0
    for i in range(log_odds.size):
        side = 1 / (1 + math.exp(abs(log_odds[i])))
        last_logit, logit = logit, math.log(side) - math.log(max(0.5 - side, SMALLEST_GAP))
        if i > 0:
            guess += (logit - last_logit) / slope
        guess, slope = solve_rate(logit, guess, slope, variances, teacher, shares, step)
        if math.isnan(guess):
            return math.nan, first
        if i == 0:
            first = guess
        rate = math.exp(guess)
        log_tail, tail_power, _ = cosine_tail(rate, variances, teacher, shares, step, True)
        tail = math.exp(log_tail)
        squared_cosine, pole = 0.0, 0.0
        for k in range(dim):
            rest = 1 / (1 + rate * variances[k])
            mean[k] = query[k] / length * rate * variances[k] * rest
            squared_cosine += shares[k] * rate * variances[k] * rest
            pole += shares[k] * rate * variances[k] * rest * rest
        scale = math.sqrt(squared_cosine / (2 * math.pi * rate)) / pole
        scale *= math.exp(-log_product(rate, variances) / 2)
        if log_odds[i] > 0:
            tail, tail_power = 1 - tail, trace - tail_power
        total = 0.0
        for k in range(dim):
            mean[k] *= scale / tail
            total += teacher[k] * mean[k] * mean[k]
            target[k] += weights[i] * mean[k]
        power += weights[i] * (tail_power / tail + (top_k - 1) * total) / top_k
    for k in range(dim):
        power -= teacher[k] * target[k] * target[k]
    return power, first


@njit(nogil=True)
def conditional_floor_chunk(
    queries: Any, variances: Any, teacher: Any, top_k: int, log_odds: Any, weights: Any, basis: Any, coefficients: Any,
    step: float,
) -> tuple[float, Any, Any, Any]:  # fmt: skip
    """The means of `floor_chunk` over ``queries`` (n, dim), each averaged over its contexts.

    variances, teacher (dim,): lambda_k and omega_k; log_odds, weights, step: as in `average_target`; basis (R, dim) and
    coefficients (R, R): as in `floor_chunk`. All means are NaN where a rate was not found. Source: depth (48), (49).
    """
    degrees, dim = basis.shape
    polynomials = polynomial_values(coefficients, basis)
    target = np.empty(dim)
    means = np.zeros(1), np.zeros(degrees), np.zeros(degrees), np.zeros((degrees, degrees))
    guess = -math.log(variances.max())
    for i in range(queries.shape[0]):
        spread, guess = average_target(queries[i], variances, teacher, top_k, log_odds, weights, step, guess, target)
        add_context(i + 1, queries[i], target, spread, teacher, basis, polynomials, means)
    power, cross, residual, gradient = means
    return float(power[0]), cross, residual, gradient
