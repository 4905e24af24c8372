"""Depth Figure 14: softmax attention over depth with both spectra sloped, and on the broader target, top 16."""

from __future__ import annotations

import time
from functools import partial

from sim.training import TrainingConfig
from validate.figures.panels import panel_figure
from validate.mean_field import MeanFieldFloor
from validate.tables.comparison import Progress, Row, Table
from validate.trained import softmax
from validate.trained.rows import loss_rows
from validate.trained.runs import TrainedRuns
from validate.trained.scaling import convergence_rows, decomposition_panels, excess_panel, improvement_row
from validate.trained.softmax import DepthSeries

NAME = "depth:figure-14"


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of all spectra, those of Table 4."""
    return softmax.configs(softmax.printed_tasks("depth:table-4"), profile, seed)


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Figure 14."""
    started = time.perf_counter()
    rows: list[Row] = []
    sharp: list[tuple[DepthSeries, MeanFieldFloor]] = []
    broad: list[tuple[DepthSeries, MeanFieldFloor]] = []
    tasks = softmax.printed_tasks("depth:table-4")
    for i, task in enumerate(tasks):
        series, found = softmax.series(runs, task, profile, seed), softmax.mean_field(task, profile, seed)
        (sharp if task.top_k == 2 else broad).append((series, found))
        rows += [*loss_rows(series, found), improvement_row(series)]
        if task.top_k == 2:
            rows += convergence_rows(series)
        progress((i + 1) / len(tasks))
    panels = [
        excess_panel("(a) top 2", sharp),
        excess_panel("(b) top 16", broad),
        *decomposition_panels(("(c) top 2", "(d) top 2"), [series for series, _ in sharp]),
    ]
    plan = softmax.PLANS[profile]
    notes = (
        "The fitted floors and exponents of these curves are Table 4.",
        "Losses are drawn over the mean-field floor; dotted: best law of independent layers. Top 16 needs many layers "
        "of large spread, and its finite-depth losses depend on where training starts.",
    )
    settings = {"profile": profile, "seed": seed, "depths": list(plan.depths), "steps": list(plan.steps)}
    return Table(NAME, "softmax attention by depth, broader targets and spectra", tuple(rows), notes,
                 partial(panel_figure, panels), time.perf_counter() - started, settings)  # fmt: skip
