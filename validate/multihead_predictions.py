"""What the commands ``softmax-risk``, ``icl-risk`` and ``optimum`` print: predictions as plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from theory.problems import RegressionTask
from theory.results import DomainError, PrecisionError

_Value = TypeVar("_Value")
BEYOND_FLOAT = "it is beyond 1e308"


def softmax_risk_prediction(task: RegressionTask, omega: list[float], mu: list[float]) -> dict[str, Any]:
    """Exact and approximate risk of softmax attention with one ω and one μ per head, and the best μ for these ω.

    Only the exact risk must exist; what else is not known is ``None``, with its reason.
    """
    from theory.multihead.approximate_loss import approximate_loss
    from theory.multihead.gradient_descent import infinite_length_risk
    from theory.multihead.softmax_risk import optimal_mu, softmax_risk

    exact = softmax_risk(task, omega, mu)
    with np.errstate(over="ignore"):  # an overflow is named as the reason
        approximate, approximate_reason = known_number(lambda: float(approximate_loss(task, omega, mu)))
    content: dict[str, Any] = {
        "task": task.to_json(),
        "omega": [float(w) for w in omega],
        "mu": [float(m) for m in mu],
        "exact": exact.value,
        "tolerance": exact.tolerance,
        "approximate": approximate,
        "approximate_reason": approximate_reason,
        "effective_step": float(np.dot(omega, mu)),
        "infinite_test_length": infinite_length_risk(task.noise, omega, mu),
        "best_mu": None,
        "best_mu_risk": None,
        "best_mu_reason": "heads with equal omega share their mu in any way",
    }
    if len(set(omega)) == len(omega):
        best, reason = known(lambda: optimal_mu(task, omega))
        content["best_mu_reason"] = reason
        if best is not None:
            content |= {"best_mu": best[0].tolist(), "best_mu_risk": best[1].value}
    return content


def icl_risk_prediction(task: RegressionTask) -> dict[str, Any]:
    """Risks of vanilla and debiased gradient descent at their best steps, of Bayes, and bounds on their ratio.

    What is not known at this size is ``None``, with its reason.
    """
    from theory.multihead import bayes_risk, gradient_descent

    step_vanilla, step_debiased = gradient_descent.vanilla_step(task), gradient_descent.debiased_step(task)
    vanilla = float(gradient_descent.vanilla_step_risk(task, step_vanilla))
    debiased = float(gradient_descent.debiased_step_risk(task, step_debiased))
    bayes, bayes_reason = known(lambda: bayes_risk.bayes_risk(task))
    size = task.dim / task.context
    ratio_reason: str | None
    if bayes is None:
        ratio, ratio_reason = None, "the Bayes risk is not known"
    elif bayes.value == 0:
        ratio, ratio_reason = None, "the Bayes risk is zero"
    else:
        ratio, ratio_reason = known_number(lambda: debiased / bayes.value)
    with np.errstate(over="ignore", divide="ignore"):  # tiny noise: an overflow is named as the reason
        bound, bound_reason = known_number(lambda: bayes_risk.sharp_ratio_bound(task))
        paper_bound, paper_reason = known_number(lambda: float(bayes_risk.paper_ratio_bound(size, task.noise)))
    return {
        "task": task.to_json(),
        "labels": "noisy: the irreducible noise is part of every risk",
        "vanilla": vanilla,
        "debiased": debiased,
        "bayes": None if bayes is None else bayes.value,
        "bayes_tolerance": None if bayes is None else bayes.tolerance,
        "bayes_reason": bayes_reason,
        "bayes_limit": float(bayes_risk.bayes_risk_limit(size, task.noise)),
        "step_vanilla": step_vanilla,
        "step_debiased": step_debiased,
        "ratio_debiased_bayes": ratio,
        "ratio_reason": ratio_reason,
        "ratio_bound": bound,
        "ratio_bound_paper": paper_bound,
        "bound_reason": bound_reason,
        "bound_paper_reason": paper_reason,
    }


def known(compute: Callable[[], _Value]) -> tuple[_Value | None, str | None]:
    """A value that may lie beyond what is known, with None for the reason, or None with the reason."""
    try:
        return compute(), None
    except (DomainError, PrecisionError) as failure:
        return None, str(failure)


def known_number(compute: Callable[[], float]) -> tuple[float | None, str | None]:
    """As `known`, for a number that may also overflow."""
    number, reason = known(compute)
    if number is None or np.isfinite(number):
        return number, reason
    return None, BEYOND_FLOAT


def optimum_prediction(task: RegressionTask, heads: int, activation: str, scale: float) -> dict[str, Any]:
    """The heads with the least exact risk, beside debiased gradient descent.

    heads: 1 to 4 for exp; activations other than exp are known for two heads.
    """
    from theory.multihead.gradient_descent import debiased_step, debiased_step_risk

    debiased = float(debiased_step_risk(task, debiased_step(task)))
    content: dict[str, Any] = {"task": task.to_json(), "heads": heads, "activation": activation, "debiased": debiased}
    if activation == "exp":
        return content | _softmax_optimum(task, heads)
    if heads != 2:
        raise DomainError(f"heads must be 2 for the activation {activation}, got {heads!r}")
    return content | _activation_optimum(task, activation, scale)


def _softmax_optimum(task: RegressionTask, heads: int) -> dict[str, Any]:
    from theory.multihead.softmax_risk import optimum

    found = optimum(task, heads)
    return {
        "attained": found.attained,
        "omega": found.omega.tolist(),
        "mu": found.mu.tolist(),
        "slope_weight": found.slope_weight,
        "effective_step": float(found.omega[: found.mu.size] @ found.mu) + found.slope_weight,
        "risk": found.risk.value,
        "tolerance": found.risk.tolerance,
        "gradient_norm": found.gradient_norm,
        "curvatures": found.curvatures.tolist(),
        "limit": None if found.attained else "two heads merge at the last omega with opposite, growing mu",
        "sets_compared": found.scanned,
        "risk_by_start": [risk if np.isfinite(risk) else None for risk in found.ends],
    }


def _activation_optimum(task: RegressionTask, name: str, scale: float) -> dict[str, Any]:
    from theory.multihead.activations import activation, best_two_heads

    found = best_two_heads(task, activation(name, scale))
    attained = found.gamma is not None and found.mu is not None
    return {
        "scale": scale,
        "attained": attained,
        "omega": [found.gamma, -found.gamma] if found.gamma is not None else None,
        "mu": [found.mu, -found.mu] if found.mu is not None else None,
        "effective_step": found.step,
        "risk": found.risk.value,
        "tolerance": found.risk.tolerance,
        "limit": None if attained else "omega tends to 0 and mu to infinity: debiased gradient descent",
    }
