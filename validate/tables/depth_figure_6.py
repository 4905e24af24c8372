"""Depth Figure 6: loss, shared error and disagreement of softmax attention over depth, top 2."""

from __future__ import annotations

import time
from functools import partial

from sim.training import TrainingConfig
from validate.figures.panels import panel_figure
from validate.tables.comparison import Progress, Row, Table, paper_rows
from validate.trained import softmax
from validate.trained.rows import Printed, fit_rows, loss_rows
from validate.trained.runs import TrainedRuns
from validate.trained.scaling import convergence_rows, decomposition_panels, excess_panel, improvement_row

NAME = "depth:figure-6"
# The figure's exponents are said to be close to one; a printed one of 1 stands for them, with the scatter of Table 5.
CLOSE_TO_ONE = (1.0, 0.05)


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of all spectra, those of Table 1."""
    return softmax.configs(softmax.printed_tasks("depth:table-1"), profile, seed)


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Figure 6."""
    started = time.perf_counter()
    rows: list[Row] = []
    entries = []
    printed, tasks = paper_rows("depth:table-1"), softmax.printed_tasks("depth:table-1")
    for i, (row, task) in enumerate(zip(printed, tasks, strict=True)):
        series, found = softmax.series(runs, task, profile, seed), softmax.mean_field(task, profile, seed)
        entries.append((row, series, found))
        rows += [*loss_rows(series, found), improvement_row(series)]
        rows += fit_rows(series, found, Printed(row["softmax_L0"], *CLOSE_TO_ONE))[1:]
        if row["b"] == 0:
            rows += convergence_rows(series)
        progress((i + 1) / len(tasks))
    fixed_a = [(series, found) for row, series, found in entries if row["a"] == 0]
    fixed_b = [(series, found) for row, series, found in entries if row["b"] == 0]
    panels = [
        excess_panel("(a) a = 0, by b", fixed_a),
        excess_panel("(b) b = 0, by a", fixed_b),
        *decomposition_panels(("(c) b = 0", "(d) b = 0"), [series for series, _ in fixed_b]),
    ]
    plan = softmax.PLANS[profile]
    notes = (
        "The text prints no numbers of this figure but says that the exponents are close to one in the deep regime "
        f"and that C and A - C converge. Here depths are {plan.depths[0]} to {plan.depths[-1]} and every trained loss "
        "is set between the mean-field floor and the best law of independent layers.",
        "Losses are drawn over the mean-field floor; dotted: best law of independent layers.",
    )
    settings = {"profile": profile, "seed": seed, "depths": list(plan.depths), "steps": list(plan.steps)}
    return Table(NAME, "softmax attention by depth, top 2", tuple(rows), notes, partial(panel_figure, panels),
                 time.perf_counter() - started, settings)  # fmt: skip
