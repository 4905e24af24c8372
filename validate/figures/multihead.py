"""Figures of the commands ``softmax-risk`` and ``icl-risk``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from theory.multihead import bayes_risk, gradient_descent
from theory.multihead.approximate_loss import approximate_loss
from theory.multihead.softmax_risk import softmax_risks
from theory.problems import MAX_SIZE, RegressionTask
from theory.results import DomainError, FloatArray, PrecisionError
from validate.figures.comparison import PAPER, SAMPLED, THEORY, TRAINED, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTEXTS = 16
SCALES = 41


def context_plot(task: RegressionTask) -> Figure:
    """Risks against context length around the task's own, each at its best step for that length."""
    figure, axes = new_figure(6.4, 4.4)
    most = min(8 * task.context, MAX_SIZE)
    contexts = np.unique(np.geomspace(max(2, task.context // 8), most, CONTEXTS).round().astype(int)).clip(max=most)
    tasks = [replace(task, context=int(n)) for n in contexts]
    steps = gradient_descent.vanilla_step, gradient_descent.debiased_step
    vanilla = [float(gradient_descent.vanilla_step_risk(t, steps[0](t))) for t in tasks]
    debiased = [float(gradient_descent.debiased_step_risk(t, steps[1](t))) for t in tasks]
    axes.plot(contexts, vanilla, "s-", color=SAMPLED, ms=4, label="vanilla gradient descent")
    axes.plot(contexts, debiased, "o-", color=PAPER, ms=4, label="debiased gradient descent")
    drawn = plot_where_known(
        axes, contexts, lambda i: bayes_risk.bayes_risk(tasks[i]).value, "^-", color=THEORY, ms=4, label="Bayes"
    )
    axes.plot(contexts, bayes_risk.bayes_risk_limit(task.dim / contexts, task.noise), "--", color=TRAINED,
              label="Bayes, proportional limit")  # fmt: skip
    axes.axvline(task.context, color=THEORY, lw=0.7, ls=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("context length")
    axes.set_ylabel("risk (noisy labels)")
    axes.set_title(f"dim {task.dim}, noise {task.noise:g}{not_shown('Bayes', drawn, len(contexts))}", fontsize=9)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def scale_plot(task: RegressionTask, omega: list[float], mu: list[float]) -> Figure:
    """Exact and approximate risk along the ray that scales all ω up and all μ down, keeping the effective step."""
    figure, axes = new_figure(6.4, 4.4)
    scales = np.geomspace(0.25, 4, SCALES)
    omegas, mus = np.multiply.outer(scales, omega), np.multiply.outer(1 / scales, mu)
    exact = plot_where_known(
        axes, scales, lambda i: float(softmax_risks(task, omegas[i], mus[i])), "-", color=THEORY, label="exact"
    )
    approximate = plot_where_known(
        axes, scales, lambda i: float(approximate_loss(task, omegas[i], mus[i])), "--", color=PAPER,
        label="approximate loss",
    )  # fmt: skip
    axes.axvline(1, color=THEORY, lw=0.7, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel("scale s: heads (s ω, μ / s)")
    hidden = not_shown("exact", exact, SCALES) + not_shown("approximate", approximate, SCALES)
    axes.set_title(f"dim {task.dim}, context {task.context}, noise {task.noise:g}{hidden}", fontsize=9)
    axes.set_ylabel("risk (noisy labels)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_where_known(
    axes: Axes, positions: FloatArray, value: Callable[[int], float], style: str, **drawing: Any
) -> int:
    """Draw ``value(i)`` at ``positions[i]`` where it is known and finite; returns at how many."""
    known = {}
    for i, position in enumerate(positions):
        with suppress(DomainError, PrecisionError), np.errstate(over="ignore"):
            known[position] = value(i)
    finite = {position: number for position, number in known.items() if np.isfinite(number)}
    axes.plot(list(finite), list(finite.values()), style, **drawing)
    return len(finite)


def not_shown(name: str, drawn: int, total: int) -> str:
    """Words for a title on values that are not known, none where all are drawn."""
    return "" if drawn == total else f"; {name} not shown: {total - drawn} of {total}, not known"
