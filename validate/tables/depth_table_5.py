"""Depth Table 5: how the shared error C_L approaches the floor of the loss."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from sim.training import TrainingConfig
from validate.figures.panels import Curve, Panel, panel_figure
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_rows
from validate.trained import softmax
from validate.trained.fits import TrainedFit, fit_gaps_by_depth
from validate.trained.rows import setting_of
from validate.trained.runs import TrainedRuns

NAME = "depth:table-5"


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of all rows, those of Table 1."""
    return softmax.configs(softmax.printed_tasks(NAME), profile, seed)


def gap_row(series: softmax.DepthSeries, fit: TrainedFit, source: str, printed: dict[str, float]) -> Row:
    """The exponent of the gap between one floor and the trained shared errors, or why there is none."""
    depths = series.depths[1:]
    return Row(
        setting_of(series.task),
        f"gap exponent, depth {depths[0]}-{depths[-1]}, L0 {source}",
        printed["alpha"],
        printed["alpha_se"],
        theory=1.0,
        theory_text="(where A - C is constant)",
        trained=fit.exponent,
        agreement=fit.agreement(printed["alpha"], printed["alpha_se"]),
        remark=fit.reason,
    )


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the table. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Table 5."""
    started = time.perf_counter()
    floors = {(row["a"], row["b"]): row["softmax_L0"] for row in paper_rows("depth:table-1")}
    rows: list[Row] = []
    curves: list[Curve] = []
    for i, (printed, task) in enumerate(zip(paper_rows(NAME), softmax.printed_tasks(NAME), strict=True)):
        series = softmax.series(runs, task, profile, seed)
        shared, depths = series.estimates("shared_error"), series.depths[1:]
        by_source = {
            "of Table 1": floors[printed["a"], printed["b"]],
            "of the mean field": softmax.mean_field(task, profile, seed).floor.value,
        }
        for source, floor in by_source.items():
            rows.append(gap_row(series, fit_gaps_by_depth(depths, shared, floor), source, printed))
            gaps = floor - np.array([one.value for one in shared])
            style = "o-" if source == "of Table 1" else "x--"
            label = f"({printed['a']:g}, {printed['b']:g})" if source == "of Table 1" else ""
            curves.append(Curve(label, depths, gaps, style, i))
        progress((i + 1) / len(floors))
    refused = sum(row.trained is None for row in rows)
    unclear = sum(row.agreement is Agreement.UNTESTED for row in rows) - refused
    plan = softmax.PLANS[profile]
    notes = (
        "The floor L0 is not fitted here: once it is the printed one of Table 1, as in the paper, and once the "
        "mean-field floor, which knows nothing of trained models.",
        f"{refused} of {len(rows)} fits are refused because a gap is not positive, and {unclear} do not tell the "
        f"exponent over depths {plan.depths[1]} to {plan.depths[-1]}.",
        "As R - L0 = (A - C)/L - (L0 - C), a loss that falls like 1/L at constant A - C has a gap that falls like 1/L: "
        "the table is no evidence independent of the losses.",
        *(
            ()
            if plan.every
            else ("At a = 0 all gaps are tr(Omega)/dim times those of b = 0 up to the printed digits of L0.",)
        ),
    )
    draw = partial(panel_figure, [Panel("L0 of Table 1 (o), of the mean field (x)", "gap L0 - C", curves)])
    settings = {"profile": profile, "seed": seed, "depths": list(plan.depths), "steps": list(plan.steps)}
    return Table(NAME, "gap of the shared error to the floor", tuple(rows), notes, draw,
                 time.perf_counter() - started, settings)  # fmt: skip
