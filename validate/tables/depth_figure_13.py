"""Depth Figure 13: percentiles of the selection error of one layer and of many."""

from __future__ import annotations

import time
from functools import partial

from sim.contexts import SampleSize
from sim.training import TrainingConfig
from theory.problems import TopKTask
from theory.results import Estimate
from validate.figures.panels import Curve, Panel, estimate_curve, panel_figure
from validate.tables.comparison import Progress, Row, Table
from validate.trained import softmax
from validate.trained.attention import selection
from validate.trained.rows import check_row, setting_of
from validate.trained.runs import TrainedRuns

NAME = "depth:figure-13"
# As many contexts as the paper draws.
SIZE = SampleSize(chunks=40, chunk_batches=1, batch=256)
PERCENTILES = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0)
# Tails of the text's two statements: the lowest percentiles and the upper tail.
LOW, HIGH = 5.0, 95.0


def _tasks() -> list[TopKTask]:
    return [softmax.softmax_task(0.0, 0.0, 2)]


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """One layer and the deepest model, isotropic, top 2."""
    every = softmax.configs(_tasks(), profile, seed)
    return [every[0], every[-1]]


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training. Source: depth (90), (91)."""
    started = time.perf_counter()
    results = runs.results(configs(profile, seed))
    found = []
    for i, result in enumerate(results):
        percentiles = selection(result, seed, SIZE, PERCENTILES).selection_percentiles
        assert percentiles is not None
        found.append(percentiles)
        progress((i + 1) / 2)
    deep = softmax.depth_of(results[1])
    task = _tasks()[0]
    rows: list[Row] = []
    gains = {}
    for percent in PERCENTILES:
        for depth, percentiles in zip((1, deep), found, strict=True):
            name = f"selection error, percentile {percent:g}"
            rows.append(Row(setting_of(task, depth), name, None, trained=percentiles[percent]))
        one, other = (percentiles[percent] for percentiles in found)
        stderr = (one.stderr**2 + other.stderr**2) ** 0.5
        gains[percent] = Estimate(one.value - other.value, stderr, one.samples, one.chunks, one.seed)
    for percent, sign, statement in (
        (LOW, -1, "< 0: one layer is slightly better on easy contexts"),
        (HIGH, 1, "> 0: depth is better on hard contexts"),
    ):
        holds = sign * gains[percent].value > 0
        rows.append(
            check_row(
                setting_of(task),
                f"gain of depth {deep}, percentile {percent:g}",
                statement,
                gains[percent],
                holds,
                "" if holds else "the sign is the other one at this depth",
            )
        )
    panels = [
        Panel("(a) percentiles", "selection error", [
            estimate_curve(f"depth {depth}", PERCENTILES, [p[q] for q in PERCENTILES], colour)
            for colour, (depth, p) in enumerate(zip((1, deep), found, strict=True))
        ], "percentile", log_x=False, log_y=False),
        Panel("(b) one layer minus deep", "difference", [
            estimate_curve("", PERCENTILES, [gains[q] for q in PERCENTILES], 2),
            Curve("", [0, 100], [0, 0], "-", 5),
        ], "percentile", log_x=False, log_y=False),
    ]  # fmt: skip
    notes = (
        f"Isotropic, top 2, {SIZE.contexts} contexts; the paper compares one layer with 256, here with {deep}.",
        "The selection error is the squared distance of the mean attention row from (1/2, 1/2, 0, ...): it does not "
        "see the gain, and the loss that is trained weighs errors by the tokens they fall on.",
    )
    settings = {"profile": profile, "seed": seed, "depths": [1, deep], "contexts": SIZE.contexts}
    return Table(NAME, "selection errors of one layer and of many", tuple(rows), notes, partial(panel_figure, panels),
                 time.perf_counter() - started, settings)  # fmt: skip
