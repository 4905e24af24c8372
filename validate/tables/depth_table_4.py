"""Depth Table 4: fitted floors and exponents of softmax attention on broader targets and spectra."""

from __future__ import annotations

import time
from functools import partial

from sim.training import TrainingConfig
from validate.figures.comparison import mean_field_figure
from validate.tables.comparison import Progress, Row, Table, paper_rows
from validate.tables.depth_table_1 import mean_field_row
from validate.trained import softmax
from validate.trained.rows import Printed, fit_rows, loss_rows, setting_of
from validate.trained.runs import TrainedRuns

NAME = "depth:table-4"


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of all rows."""
    return softmax.configs(softmax.printed_tasks(NAME), profile, seed)


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the table. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Table 4."""
    started = time.perf_counter()
    printed, tasks = paper_rows(NAME), softmax.printed_tasks(NAME)
    floors: list[Row] = []
    trained: list[Row] = []
    shares: list[float] = []
    for i, (row, task) in enumerate(zip(printed, tasks, strict=True)):
        found = softmax.mean_field(task, profile, seed)
        shares.append(found.disagreement.value / found.floor.value)
        floors.append(mean_field_row(setting_of(task), row["L0"], found))
        series = softmax.series(runs, task, profile, seed)
        trained.append(loss_rows(series, found)[-1])
        trained += fit_rows(series, found, Printed(row["L0"], row["alpha"], row["alpha_se"]))
        progress((i + 1) / len(printed))
    plan = softmax.PLANS[profile]
    notes = (
        f"Sizes dim {softmax.DIM}, context {softmax.CONTEXT}, which the paper does not print. The mean-field floor is "
        "the lowest loss of infinitely many layers on fixed context states, found without training.",
        f"Layers drawn independently from the best law lose (A - C)/L more, {min(shares):.2g} to {max(shares):.2g} "
        "floors at one layer; trained layers are not independent and lose less.",
        f"Exponents are fitted over depths {plan.depths[0]} to {plan.depths[-1]}; the paper does not print its depths "
        "and calls them deep. Where the depths do not tell the exponent, it is not tested.",
    )
    settings = {
        "dim": softmax.DIM, "context": softmax.CONTEXT, "profile": profile, "seed": seed,
        "depths": list(plan.depths), "steps": list(plan.steps),
    }  # fmt: skip
    return Table(
        NAME,
        "floors and exponents of softmax attention, broader targets and spectra",
        (*floors, *trained),
        notes,
        partial(mean_field_figure, floors),
        time.perf_counter() - started,
        settings,
    )
