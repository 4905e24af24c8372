"""Figures of the commands ``softmax-risk`` and ``icl-risk``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from theory.multihead import bayes_risk, gradient_descent
from theory.multihead.approximate_loss import approximate_loss
from theory.multihead.softmax_risk import softmax_risks
from theory.problems import RegressionTask
from validate.figures.comparison import PAPER, SAMPLED, THEORY, TRAINED, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS = 16
SCALES = 41


def context_plot(task: RegressionTask) -> Figure:
    """Risks against context length around the task's own, each at its best step for that length."""
    figure, axes = new_figure(6.4, 4.4)
    contexts = np.unique(np.geomspace(max(2, task.context // 8), 8 * task.context, CONTEXTS).round().astype(int))
    tasks = [replace(task, context=int(n)) for n in contexts]
    steps = gradient_descent.vanilla_step, gradient_descent.debiased_step
    vanilla = [float(gradient_descent.vanilla_step_risk(t, steps[0](t))) for t in tasks]
    debiased = [float(gradient_descent.debiased_step_risk(t, steps[1](t))) for t in tasks]
    bayes = [bayes_risk.bayes_risk(t).value for t in tasks]
    axes.plot(contexts, vanilla, "s-", color=SAMPLED, ms=4, label="vanilla gradient descent")
    axes.plot(contexts, debiased, "o-", color=PAPER, ms=4, label="debiased gradient descent")
    axes.plot(contexts, bayes, "^-", color=THEORY, ms=4, label="Bayes")
    axes.plot(contexts, bayes_risk.bayes_risk_limit(task.dim / contexts, task.noise), "--", color=TRAINED,
              label="Bayes, proportional limit")  # fmt: skip
    axes.axvline(task.context, color=THEORY, lw=0.7, ls=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("context length")
    axes.set_ylabel("risk (noisy labels)")
    axes.set_title(f"dim {task.dim}, noise {task.noise:g}", fontsize=9)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def scale_plot(task: RegressionTask, omega: list[float], mu: list[float]) -> Figure:
    """Exact and approximate risk along the ray that scales all ω up and all μ down, keeping the effective step."""
    figure, axes = new_figure(6.4, 4.4)
    scales = np.geomspace(0.25, 4, SCALES)
    omegas, mus = np.multiply.outer(scales, omega), np.multiply.outer(1 / scales, mu)
    axes.plot(scales, softmax_risks(task, omegas, mus), color=THEORY, label="exact")
    axes.plot(scales, approximate_loss(task, omegas, mus), "--", color=PAPER, label="approximate loss")
    axes.axvline(1, color=THEORY, lw=0.7, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel("scale s: heads (s ω, μ / s)")
    axes.set_ylabel("risk (noisy labels)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
