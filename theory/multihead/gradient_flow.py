r"""Training dynamics on the approximate loss (4.1): gradient descent, its flow, and the two-head flow in pieces.

Time is that of :math:`\dot\theta = -\tfrac12\nabla\tilde{\mathcal L}` for two opposite heads ω = (w, -w), μ = (m, -m)
taken as one pair of variables, which with c = (1+σ²)/L, X = cd, x = dw² reads

.. math:: \dot m = 2w - 4mw^2 - 4cm\sinh x, \qquad \dot w = 2m - 4m^2w - 4cdm^2w\cosh x.

This equals the plain flow :math:`\dot\theta = -\nabla\tilde{\mathcal L}` over all 2h parameters, since each of w and m
stands for two parameters. The paper's Appendix B, which derives it, is not in the text that we hold; this is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.integrate import quad, solve_ivp

from theory.multihead.approximate_loss import (
    approximate_loss,
    gradient_array,
    heads,
    hessian_array,
    noise_level,
)
from theory.multihead.solution_manifold import effective_mu
from theory.problems import RegressionTask, as_integer, as_real
from theory.results import Certified, DomainError, FloatArray, PrecisionError

# Relative and absolute tolerance of the stiff integrator on parameters; the valley is 10^6 times stiffer than slow.
_RELATIVE = 1e-10
_ABSOLUTE = 1e-12
# Largest agreed error of quadratures along the slow manifold.
_QUADRATURE = 1e-10
# A pattern counts as present where its violation is below this, relative to the largest parameter.
PATTERN_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Parameters along time: times, shape (n,); omega and mu, shape (n, h) each; loss: approximate loss, shape (n,)."""

    times: FloatArray
    omega: FloatArray
    mu: FloatArray
    loss: FloatArray


@dataclass(frozen=True, slots=True)
class Stages:
    r"""First recorded times from which a pattern holds until the end; ``None`` where it never settles.

    sign_matching: all heads but dummies have ω and μ of one sign (4.2); zero_sum: \|Σμ\| small (4.2); optimality:
    (4.3); homogeneity: one \|ω\| over all heads but dummies (4.4); turning: time at which the largest \|ω\| peaks.
    """

    sign_matching: float | None
    zero_sum: float | None
    optimality: float | None
    homogeneity: float | None
    turning: float


@dataclass(frozen=True, slots=True)
class TurningPoint:
    """Where w peaks on the flow out of the origin: w, m, and time since m = w = ``start`` on the linear growth."""

    w: Certified
    m: Certified
    time: Certified


def gradient_descent_path(
    task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike, rate: float, steps: int, record: int = 1
) -> Trajectory:
    r"""Descent :math:`\theta_{t+1} = \theta_t - \eta\nabla\tilde{\mathcal L}(\theta_t)`, kept every ``record`` steps.

    omega, mu: start, shape (h,); rate: η > 0; steps: up to 10^7. Times are step numbers. Source: multihead section
    4.2, first display. Raises PrecisionError where the iteration diverges.
    """
    w, m = _start(omega, mu)
    eta = as_real("rate", rate, 0, 1e3, open_low=True)
    count, every = as_integer("steps", steps, 1, 10**7), as_integer("record", record, 1, 10**7)
    c, d, h = noise_level(task), task.dim, w.size
    theta = np.concatenate([w, m])
    kept = [(0, theta[:h], theta[h:])]
    with np.errstate(over="ignore", invalid="ignore"):  # of a diverging run, which is reported below
        for step in range(1, count + 1):
            theta = theta - eta * gradient_array(c, d, theta[:h], theta[h:])
            if step % every == 0:
                kept.append((step, theta[:h], theta[h:]))
    if not np.isfinite(theta).all():
        raise PrecisionError(f"gradient descent with rate {eta:g} diverged within {count} steps; reduce rate")
    return _trajectory(task, *(np.array(column, dtype=np.float64) for column in zip(*kept, strict=True)))


def gradient_flow(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike, times: npt.ArrayLike) -> Trajectory:
    r"""Flow :math:`\dot\theta = -\nabla\tilde{\mathcal L}(\theta)` of any number of heads, at the given times.

    omega, mu: start at time 0, shape (h,); times: increasing, >= 0, shape (n,). LSODA, which turns to
    implicit steps with the exact Hessian in the stiff valley of late times, at relative tolerance 1e-10 per step: 1e-7
    over all. One gradient-descent step of rate
    η advances the time by η. Source: multihead section 4.2 and Appendix B (flow limit). Raises PrecisionError where
    the integrator fails.
    """
    w, m = _start(omega, mu)
    grid = np.asarray(times, dtype=np.float64)
    if grid.ndim != 1 or grid.size == 0 or grid[0] < 0 or (np.diff(grid) <= 0).any() or not np.isfinite(grid).all():
        raise DomainError("times must be finite, >= 0 and increasing")
    c, d, h = noise_level(task), task.dim, w.size

    def velocity(_: float, theta: FloatArray) -> FloatArray:
        return -gradient_array(c, d, theta[:h], theta[h:])

    def jacobian(_: float, theta: FloatArray) -> FloatArray:
        return -hessian_array(c, d, theta[:h], theta[h:])

    solution = solve_ivp(
        velocity,
        (0.0, max(float(grid[-1]), _ABSOLUTE)),
        np.concatenate([w, m]),
        method="LSODA",
        t_eval=grid,
        rtol=_RELATIVE,
        atol=_ABSOLUTE,
        jac=jacobian,
    )
    if not solution.success:
        raise PrecisionError(f"the gradient flow could not be integrated: {solution.message}")
    return _trajectory(task, grid, solution.y[:h].T, solution.y[h:].T)


def _start(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    w, m = heads(omega, mu)
    if w.ndim != 1:
        raise DomainError(f"omega must hold one number per head, got shape {w.shape}")
    return w, m


def _trajectory(task: RegressionTask, times: FloatArray, omega: FloatArray, mu: FloatArray) -> Trajectory:
    return Trajectory(times, omega, mu, approximate_loss(task, omega, mu))


def sign_violation(path: Trajectory) -> FloatArray:
    r"""Largest :math:`-\omega_h\mu_h` over the largest :math:`|\omega_h\mu_h|`, 0 where signs match, shape (n,).

    Source: multihead (4.2).
    """
    products = path.omega * path.mu
    return np.asarray(np.max(-np.minimum(products, 0), axis=1) / _positive(np.abs(products).max(axis=1)))


def zero_sum_violation(path: Trajectory) -> FloatArray:
    r""":math:`|\sum_h\mu_h|/\sum_h|\mu_h|`, shape (n,). Source: multihead (4.2)."""
    return np.asarray(np.abs(path.mu.sum(axis=1)) / _positive(np.abs(path.mu).sum(axis=1)))


def optimality_violation(task: RegressionTask, path: Trajectory) -> FloatArray:
    r""":math:`|(1+(1+\sigma^2)d/L)\langle\mu,\omega\rangle - 1|`, shape (n,). Source: multihead (4.3)."""
    return np.asarray(np.abs((1 + noise_level(task) * task.dim) * np.sum(path.omega * path.mu, axis=1) - 1))


def homogeneity_violation(path: Trajectory) -> FloatArray:
    r"""Weighted spread of \|ω\| over its mean, each head weighted by \|μ\| so that dummies drop out, shape (n,).

    Source: multihead (4.4).
    """
    weight = np.abs(path.mu) / _positive(np.abs(path.mu).sum(axis=1))[:, np.newaxis]
    mean = np.sum(weight * np.abs(path.omega), axis=1)
    spread = np.sqrt(np.sum(weight * (np.abs(path.omega) - mean[:, np.newaxis]) ** 2, axis=1))
    return np.asarray(spread / _positive(mean))


def _positive(values: FloatArray) -> FloatArray:
    """Values with 1 for 0: what they divide is 0 then too."""
    return np.where(values == 0, 1.0, values)


def detect_stages(task: RegressionTask, path: Trajectory, tolerance: float = PATTERN_TOLERANCE) -> Stages:
    """Times from which each pattern holds for good, within ``tolerance``.

    Source: multihead (4.2)-(4.4), Observation 4 for the turning.
    """
    largest = np.abs(path.omega).max(axis=1)
    return Stages(
        _settled(path.times, sign_violation(path), tolerance),
        _settled(path.times, zero_sum_violation(path), tolerance),
        _settled(path.times, optimality_violation(task, path), tolerance),
        _settled(path.times, homogeneity_violation(path), tolerance),
        float(path.times[int(np.argmax(largest))]),
    )


def _settled(times: FloatArray, violation: FloatArray, tolerance: float) -> float | None:
    broken = np.flatnonzero(violation > tolerance)
    if broken.size == 0:
        return float(times[0])
    return None if broken[-1] + 1 == times.size else float(times[broken[-1] + 1])


def two_head_velocity(task: RegressionTask, w: npt.ArrayLike, m: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    r"""Velocities (ẇ, ṁ) of two opposite heads, shapes of the broadcast arguments.

    Source: beyond the paper, from multihead (4.1); the module's first display.
    """
    w_, m_ = np.broadcast_arrays(np.asarray(w, dtype=np.float64), np.asarray(m, dtype=np.float64))
    c, d = noise_level(task), task.dim
    x = d * w_ * w_
    w_dot = 2 * m_ - 4 * m_**2 * w_ * (1 + c * d * np.cosh(x))
    m_dot = 2 * w_ - 4 * m_ * (w_**2 + c * np.sinh(x))
    return np.asarray(w_dot), np.asarray(m_dot)


def imbalance_growth(task: RegressionTask, w: npt.ArrayLike, m: npt.ArrayLike) -> FloatArray:
    r"""Rate :math:`\frac{d}{dt}(m^2-w^2) = 8cm^2(x\cosh x-\sinh x) \ge 0`, so that m² - w² never falls.

    Source: beyond the paper.
    """
    w_, m_ = np.asarray(w, dtype=np.float64), np.asarray(m, dtype=np.float64)
    return np.asarray(8 * noise_level(task) * m_**2 * _cosh_minus_sinh(task.dim * w_ * w_))


def _cosh_minus_sinh(x: npt.ArrayLike) -> FloatArray:
    """The function x cosh x - sinh x = Σ 2k x^(2k+1)/(2k+1)!, without cancellation at small x >= 0."""
    x_ = np.asarray(x, dtype=np.float64)
    series = 2 * x_ * _weighted(np.minimum(x_, 1.0) ** 2)
    return np.asarray(np.where(x_ <= 1.0, series, x_ * np.cosh(x_) - np.sinh(x_)))


def _weighted(square: FloatArray) -> FloatArray:
    """Σ_k k x^(2k)/(2k+1)! for x² = ``square`` <= 1."""
    total, power, factorial = np.zeros_like(square), np.ones_like(square), 1.0
    for k in range(1, 12):
        power = power * square
        factorial *= (2 * k) * (2 * k + 1)
        total = total + k * power / factorial
    return total


def linear_growth(start_w: float, start_m: float, time: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    r"""Early flow :math:`\dot m = 2w, \dot w = 2m`: the sum grows as e^{2t}, the difference decays as e^{-2t}.

    Returns (w, m), shapes of time. Source: beyond the paper; sign-matching term of multihead 4.2.1.
    """
    t = np.asarray(time, dtype=np.float64)
    total, difference = (start_m + start_w) * np.exp(2 * t), (start_m - start_w) * np.exp(-2 * t)
    return np.asarray((total - difference) / 2), np.asarray((total + difference) / 2)


def logistic_growth(task: RegressionTask, start_product: float, time: npt.ArrayLike) -> FloatArray:
    r"""Product p = mw while w = m and dw² is small: :math:`\dot p = 4p(1-2(1+X)p)`, a logistic curve, shape of time.

    .. math:: p(t) = \frac{p_0e^{4t}}{1+2(1+X)p_0(e^{4t}-1)}, \qquad X = (1+\sigma^2)d/L

    It saturates at the local optimality condition (4.3), 2mw = 1/(1+X). Source: beyond the paper.
    """
    t = np.asarray(time, dtype=np.float64)
    decay = np.exp(-4 * t)
    X = noise_level(task) * task.dim
    return np.asarray(start_product / (decay + 2 * (1 + X) * start_product * (1 - decay)))


def turning_point(task: RegressionTask, start: float = 1e-4) -> TurningPoint:
    r"""Peak of w, where :math:`2mw(1+X\cosh dw^2) = 1`, on the flow that leaves the origin along m = w.

    start: m = w at time 0, in (0, 0.01]; its trace in w and m at the peak is of order start^4 and part of their
    tolerance. Integrated with an event. Source: beyond the paper; multihead Observation 4.
    """
    first = as_real("start", start, 0, 0.01, open_low=True)

    def velocity(_: float, state: FloatArray) -> FloatArray:
        return np.array(two_head_velocity(task, state[0], state[1]))

    def peak(_: float, state: FloatArray) -> float:
        return float(two_head_velocity(task, state[0], state[1])[0])

    peak.terminal, peak.direction = True, -1  # type: ignore[attr-defined]
    ends = []
    for tolerance in (1e-11, 1e-12):
        solution = solve_ivp(
            velocity, (0, 1e3), [first, first], method="DOP853", events=peak, rtol=tolerance, atol=1e-16
        )
        if not solution.t_events[0].size:
            raise PrecisionError(f"w did not peak by time 1000 from start {first:g}")
        ends.append((*solution.y_events[0][0], solution.t_events[0][0]))
    coarse, fine = np.array(ends)
    slack = 10 * np.abs(coarse - fine) + 1e-11 + 10 * first**4
    return TurningPoint(*(Certified(value, error) for value, error in zip(fine, slack, strict=True)))


def slow_manifold_mu(task: RegressionTask, w: npt.ArrayLike) -> FloatArray:
    r"""Slow manifold after the turning, :math:`m = w/(2w^2+2c\sinh dw^2)`, to leading order in the stiffness.

    It is μ_γ of (4.6) at γ = w, where ṁ = 0. Source: multihead (4.6); as slow manifold beyond the paper.
    """
    return effective_mu(task, w)


def slow_manifold_time(task: RegressionTask, high: float, low: float) -> Certified:
    r"""Time in which w slides from ``high`` down to ``low`` along :math:`m = \mu_w`, by quadrature.

    .. math:: t = \int_{low}^{high}\frac{\frac{d}{dw}(w^2-\mu_w^2)}{8c\mu_w^2(x\cosh x-\sinh x)}dw

    from the growth of m² - w². high, low: 0 < low < high with d high² <= 50. Source: beyond the paper.
    """
    d, c = task.dim, noise_level(task)
    top = as_real("high", high, 0, float(np.sqrt(50 / d)), open_low=True)
    bottom = as_real("low", low, 0, top, open_low=True)

    def integrand(log_w: float) -> float:
        w = np.exp(log_w)
        x = d * w * w
        mu = float(effective_mu(task, w))
        # μ = w/(2D), D = w² + c sinh x: μ'/μ = 1/w - D'/D.
        D = w * w + c * np.sinh(x)
        mu_slope = mu * (1 / w - 2 * w * (1 + c * d * np.cosh(x)) / D)
        return float(w * (2 * w - 2 * mu * mu_slope) / (8 * c * mu**2 * _cosh_minus_sinh(x)))

    value, error = quad(integrand, np.log(bottom), np.log(top), epsabs=0, epsrel=_QUADRATURE, limit=200)
    return Certified(value, error + 1e-14 * abs(value))


def late_scale(task: RegressionTask, time: npt.ArrayLike) -> FloatArray:
    r"""Late-time law :math:`w \simeq (8cd^3t)^{-1/6}` of two opposite heads, shape of time.

    Other head counts keep the exponent with another constant. Source: beyond the paper.
    """
    return np.asarray((8 * noise_level(task) * task.dim**3 * np.asarray(time, dtype=np.float64)) ** (-1 / 6))


def late_excess(task: RegressionTask, time: npt.ArrayLike) -> FloatArray:
    r"""Late-time excess of the loss over its infimum, :math:`\frac{X}{6(1+X)^2}d^2w^4 \propto t^{-2/3}`, shape of time.

    For two opposite heads, as `late_scale`. Source: beyond the paper.
    """
    X = noise_level(task) * task.dim
    return np.asarray(X / (6 * (1 + X) ** 2) * task.dim**2 * late_scale(task, time) ** 4)
