r"""Trained heads beside the exact theory, and descent without sampling: on the exact risk and on the loss (4.1).

Training by sampled batches has noise in every gradient; `descend` has none, so that what is left to differ between the
two is the noise alone. The flow is :math:`\dot\theta = -\nabla\mathcal L`, as in `theory.multihead.gradient_flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.integrate import solve_ivp

from sim.head_patterns import head_patterns, over_seeds
from theory.multihead.approximate_loss import approximate_loss, gradient_array, heads, noise_level
from theory.multihead.gradient_flow import Trajectory
from theory.multihead.softmax_risk import (
    assemble_derivatives,
    optimum,
    risk_coefficients,
    softmax_risks,
)
from theory.multihead.solution_manifold import membership
from theory.problems import RegressionTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, PrecisionError

Objective = Literal["exact", "approximate"]
Rule = Literal["gradient", "adam"]
# Adam as PyTorch has it.
ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
# On a grid this much coarser a gradient takes half the time and is good to 1e-7 up to |omega| = 1.2.
_FINENESS = 0.75
# Tolerances of the flow on the exact risk, above that error.
_RELATIVE = 1e-6
_ABSOLUTE = 1e-8


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Trained members beside the exact theory; arrays of shape (members,) unless noted.

    omega, mu: shape (members, h); risk: exact, of these heads; excess: above the best risk of as many heads; step:
    Σ ω_h μ_h; gamma: mean abs(ω_h); distance: to the nearest point of the solution manifold at that γ (``None`` for one
    head, which it does not hold); both_signs: whether heads of either sign are left: two heads that start with one
    sign may end in a minimum with one sign.
    """

    omega: FloatArray
    mu: FloatArray
    risk: FloatArray
    excess: FloatArray
    step: FloatArray
    gamma: FloatArray
    distance: FloatArray | None
    both_signs: npt.NDArray[np.bool_]


def exact_gradient(task: RegressionTask, omega: FloatArray, mu: FloatArray) -> FloatArray:
    """Gradient of the exact risk in (omega, mu) stacked, shape (2h,), good to 1e-7.

    Source: `theory.multihead.softmax_risk`.
    """
    return assemble_derivatives(task, risk_coefficients(task, omega, 1, _FINENESS), mu).gradient


def _exact_hessian(task: RegressionTask, omega: FloatArray, mu: FloatArray) -> FloatArray:
    return assemble_derivatives(task, risk_coefficients(task, omega, 2, _FINENESS), mu).hessian


def descend(
    task: RegressionTask,
    omega: npt.ArrayLike,
    mu: npt.ArrayLike,
    rate: float,
    steps: int,
    *,
    objective: Objective = "exact",
    rule: Rule = "gradient",
    record: int = 1,
) -> Trajectory:
    r"""Descent without sampling noise, kept every ``record`` steps; times are step numbers.

    omega, mu: start, shape (h,); rate: η > 0; rule: ``gradient`` for :math:`\theta - \eta\nabla\mathcal L`,
    ``adam`` for Adam with PyTorch's defaults. loss of the result is the objective's. An exact gradient takes 2 to 10
    ms for one head, 5 ms for two at abs(ω) = 0.1 and 50 ms at abs(ω) = 0.6. Source: multihead section 4.2; the exact
    objective beyond the paper. Raises PrecisionError where the iteration diverges.
    """
    w, m = _start(omega, mu)
    eta = as_real("rate", rate, 0, 1e3, open_low=True)
    count, every = as_integer("steps", steps, 1, 10**7), as_integer("record", record, 1, 10**7)
    gradient = _gradient(task, objective)
    if rule not in get_args(Rule):
        raise DomainError(f"rule must be one of {', '.join(get_args(Rule))}, got {rule!r}")
    theta, h = np.concatenate([w, m]), w.size
    mean, square = np.zeros(2 * h), np.zeros(2 * h)
    kept = [(0, theta)]
    with np.errstate(over="ignore", invalid="ignore"):  # of a diverging run, which is reported below
        for step in range(1, count + 1):
            slope = gradient(theta[:h], theta[h:])
            if rule == "adam":
                mean = ADAM_BETAS[0] * mean + (1 - ADAM_BETAS[0]) * slope
                square = ADAM_BETAS[1] * square + (1 - ADAM_BETAS[1]) * slope**2
                bias = 1 - ADAM_BETAS[0] ** step, 1 - ADAM_BETAS[1] ** step
                slope = mean / bias[0] / (np.sqrt(square / bias[1]) + ADAM_EPSILON)
            theta = theta - eta * slope
            if not np.isfinite(theta).all():
                raise PrecisionError(f"descent with rate {eta:g} diverged at step {step}; reduce rate")
            if step % every == 0:
                kept.append((step, theta))
    times, path = np.array([time for time, _ in kept], dtype=np.float64), np.array([point for _, point in kept])
    return _trajectory(task, times, path[:, :h], path[:, h:], objective)


def exact_flow(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike, times: npt.ArrayLike) -> Trajectory:
    r"""Flow :math:`\dot\theta = -\nabla\mathcal L` on the exact risk, at the given times from 0 on.

    As `theory.multihead.gradient_flow.gradient_flow`, which has the approximate loss; relative tolerance 1e-6 per step.
    Source: beyond the paper. Raises PrecisionError where the integrator fails.
    """
    w, m = _start(omega, mu)
    grid = np.asarray(times, dtype=np.float64)
    if grid.ndim != 1 or grid.size == 0 or grid[0] < 0 or (np.diff(grid) <= 0).any() or not np.isfinite(grid).all():
        raise DomainError("times must be finite, >= 0 and increasing")
    h = w.size
    solution = solve_ivp(
        lambda _, theta: -exact_gradient(task, theta[:h], theta[h:]),
        (0.0, max(float(grid[-1]), _ABSOLUTE)),
        np.concatenate([w, m]),
        method="LSODA",
        t_eval=grid,
        rtol=_RELATIVE,
        atol=_ABSOLUTE,
        jac=lambda _, theta: -_exact_hessian(task, theta[:h], theta[h:]),
    )
    if not solution.success:
        raise PrecisionError(f"the flow on the exact risk could not be integrated: {solution.message}")
    return _trajectory(task, grid, solution.y[:h].T, solution.y[h:].T, "exact")


def _start(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    w, m = heads(omega, mu)
    if w.ndim != 1:
        raise DomainError(f"omega must hold one number per head, got shape {w.shape}")
    return w, m


def _gradient(task: RegressionTask, objective: Objective) -> Callable[[FloatArray, FloatArray], FloatArray]:
    if objective == "exact":
        return lambda w, m: exact_gradient(task, w, m)
    if objective == "approximate":
        return lambda w, m: gradient_array(noise_level(task), task.dim, w, m)
    raise DomainError(f"objective must be one of {', '.join(get_args(Objective))}, got {objective!r}")


def _trajectory(
    task: RegressionTask, times: FloatArray, omega: FloatArray, mu: FloatArray, objective: Objective
) -> Trajectory:
    losses = softmax_risks if objective == "exact" else approximate_loss
    return Trajectory(times, omega, mu, losses(task, omega, mu))


def compare_with_exact(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> TrainedHeads:
    """Members of softmax heads, shape (members, h) with h from 1 to 4, beside the best heads and the manifold.

    omega: with the factor of the logits. Source: multihead (3.2), (4.7); best heads beyond the paper.
    """
    w, m = heads(omega, mu)
    if w.ndim != 2:
        raise DomainError(f"omega must have axes of members and heads, got shape {w.shape}")
    patterns = head_patterns(w, m)
    risk = softmax_risks(task, w, m)
    distance = None
    if w.shape[1] > 1:
        distance = np.array([membership(task, *pair).distance for pair in zip(w, m, strict=True)])
    excess = risk - optimum(task, w.shape[1]).risk.value
    return TrainedHeads(w, m, risk, excess, patterns.step, patterns.gamma, distance, patterns.both_signs)


def exact_length_risks(
    task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike, lengths: Sequence[int]
) -> FloatArray:
    """Exact risk of each member at other numbers of tokens, shape (lengths, members).

    omega, mu: shape (members, h). Source: multihead Figures 4 and 8; values beyond the paper.
    """
    w, m = heads(omega, mu)
    tasks = [RegressionTask(task.dim, length, task.noise) for length in lengths]
    return np.array([softmax_risks(tested, w, m) for tested in tasks])


def mean_over_members(trained: TrainedHeads, name: str, seeds: Sequence[int], *, settled: bool = True) -> Estimate:
    """Mean of a quantity over members with its standard error.

    name: a field of shape (members,); settled: leave out members whose heads all have one sign, which sit in another
    minimum (they count for one head). Source: no equation. Raises DomainError where fewer than two members are left.
    """
    values = np.asarray(getattr(trained, name), dtype=np.float64)
    keep = trained.both_signs if settled and trained.omega.shape[1] > 1 else np.ones(len(values), dtype=bool)
    return over_seeds(values[keep], [seed for seed, kept in zip(seeds, keep, strict=True) if kept])
