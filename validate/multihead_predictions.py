"""What the commands ``softmax-risk``, ``icl-risk`` and ``optimum`` print: predictions as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from theory.problems import RegressionTask
from theory.results import DomainError


def softmax_risk_prediction(task: RegressionTask, omega: list[float], mu: list[float]) -> dict[str, Any]:
    """Exact and approximate risk of softmax attention with one ω and one μ per head, and the best μ for these ω."""
    from theory.multihead.approximate_loss import approximate_loss
    from theory.multihead.gradient_descent import infinite_length_risk
    from theory.multihead.softmax_risk import optimal_mu, softmax_risk

    exact = softmax_risk(task, omega, mu)
    approximate = float(approximate_loss(task, omega, mu))
    content: dict[str, Any] = {
        "task": task.to_json(),
        "omega": [float(w) for w in omega],
        "mu": [float(m) for m in mu],
        "exact": exact.value,
        "tolerance": exact.tolerance,
        "approximate": approximate if np.isfinite(approximate) else None,
        "effective_step": float(np.dot(omega, mu)),
        "infinite_test_length": infinite_length_risk(task.noise, omega, mu),
        "best_mu": None,
        "best_mu_risk": None,
        "best_mu_reason": "heads with equal omega share their mu in any way",
    }
    if len(set(omega)) == len(omega):
        best, risk = optimal_mu(task, omega)
        content |= {"best_mu": best.tolist(), "best_mu_risk": risk.value, "best_mu_reason": None}
    return content


def icl_risk_prediction(task: RegressionTask) -> dict[str, Any]:
    """Risks of vanilla and debiased gradient descent at their best steps, of Bayes, and bounds on their ratio."""
    from theory.multihead import bayes_risk, gradient_descent

    step_vanilla, step_debiased = gradient_descent.vanilla_step(task), gradient_descent.debiased_step(task)
    vanilla = float(gradient_descent.vanilla_step_risk(task, step_vanilla))
    debiased = float(gradient_descent.debiased_step_risk(task, step_debiased))
    bayes, ratio = bayes_risk.bayes_risk(task), task.dim / task.context
    limit = float(bayes_risk.bayes_risk_limit(ratio, task.noise))
    noisy, positive = task.noise > 0, bayes.value > 0
    return {
        "task": task.to_json(),
        "labels": "noisy: the irreducible noise is part of every risk",
        "vanilla": vanilla,
        "debiased": debiased,
        "bayes": bayes.value,
        "bayes_tolerance": bayes.tolerance,
        "bayes_limit": limit,
        "step_vanilla": step_vanilla,
        "step_debiased": step_debiased,
        "ratio_debiased_bayes": debiased / bayes.value if positive else None,
        "ratio_reason": None if positive else "the Bayes risk is zero",
        "ratio_bound": bayes_risk.sharp_ratio_bound(task) if noisy else None,
        "ratio_bound_paper": float(bayes_risk.paper_ratio_bound(ratio, task.noise)) if noisy else None,
        "bound_reason": None if noisy else "the bounds need noise > 0",
    }


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
