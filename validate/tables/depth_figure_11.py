"""Depth Figure 11: softmax attention with context updates over depth, and the learned update m."""

from __future__ import annotations

import time
from functools import partial

from sim.training import TrainingConfig
from theory.results import Estimate
from validate.figures.panels import Panel, estimate_curve, panel_figure
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_tables
from validate.trained import softmax
from validate.trained.generalised import (
    UPDATE_STARTS,
    UPDATES,
    learned_update,
    model_configs,
    model_series,
    seeds_remark,
    updating,
)
from validate.trained.rows import check_row, setting_of
from validate.trained.runs import TrainedRuns
from validate.trained.scaling import risk_panel
from validate.trained.softmax import DepthSeries

NAME = "depth:figure-11"
TARGETS = (2, 16)
# "Depth does not improve the loss": by less than this from two layers to the deepest. "Continues to decrease": by more
# than two standard errors, as without updates (Figure 6), where all that depth can remove is 6 % of one layer's loss.
SATURATED = 0.02
# "Remains near -2.3": the text prints two digits, and m and the sharpness of the first layer trade against each other.
UPDATE_TOLERANCE = 0.5


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Models of both targets at all depths, isotropic."""
    return [config for top_k in TARGETS for config in _configs(top_k, profile, seed)]


def _configs(top_k: int, profile: str, seed: int) -> list[TrainingConfig]:
    return model_configs(updating, UPDATES[profile], top_k, seed)


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Figure 11."""
    started = time.perf_counter()
    rows: list[Row] = []
    entries = []
    for i, top_k in enumerate(TARGETS):
        series = model_series(runs, _configs(top_k, profile, seed), top_k)
        found = softmax.mean_field(series.task, profile, seed)
        entries.append((series, found))
        for depth, loss in zip(series.depths, series.estimates(), strict=True):
            below = loss.value < found.floor.value
            rows.append(
                Row(setting_of(series.task, depth), "loss R", None, theory=found.floor.value,
                    theory_text="floor without updates", trained=loss,
                    remark="below every model without updates" if below else "")
            )  # fmt: skip
        rows.append(_saturation_row(series))
        rows += _update_rows(series)
        progress((i + 1) / 2)
    panels = [
        risk_panel(f"({letter}) top {s.task.top_k}", [(s, f)]) for letter, (s, f) in zip("ab", entries, strict=True)
    ]
    panels += [
        Panel(
            f"({letter}) top {s.task.top_k}",
            "learned m",
            [estimate_curve("", s.depths[1:], _updates(s)[1:])],
            log_y=False,
        )
        for letter, (s, _) in zip("cd", entries, strict=True)
    ]
    plan = UPDATES[profile]
    notes = (
        "With one layer nothing reads the updated context, and m stays where it starts.",
        f"Depths {plan.depths[0]} to {plan.depths[-1]}, {plan.steps} steps, {plan.members} seeds, whose "
        "scatter is in the errors. Dashed: mean-field floor without updates; a loss below it needs the update.",
        f"m starts at {UPDATE_STARTS[2][2]:g} for top 2 and at {UPDATE_STARTS[16][2]:g} for top 16. It learns slowly "
        "and trades against what the first layers attend to, so that it depends on the start more than the loss does.",
    )
    settings = {"profile": profile, "seed": seed, "depths": list(plan.depths), "steps": plan.steps}
    return Table(NAME, "softmax attention with context updates", tuple(rows), notes, partial(panel_figure, panels),
                 time.perf_counter() - started, settings)  # fmt: skip


def _updates(series: DepthSeries) -> list[Estimate]:
    """Learned m at each depth, over the seeds."""
    return [learned_update(result) for result in series.results]


def _saturation_row(series: DepthSeries) -> Row:
    """Whether depth beyond two layers helps: on top 2 it is said to, on top 16 not."""
    ratio = series.ratio(-1, 1)
    sharp = series.task.top_k == 2
    statement = "< 1: depth helps" if sharp else f"> {1 - SATURATED:g}: depth does not help"
    deepest, second = series.depths[-1], series.depths[1]
    holds = ratio.value + 2 * ratio.stderr < 1 if sharp else ratio.value > 1 - SATURATED
    return check_row(
        setting_of(series.task, deepest),
        f"R at depth {deepest} over R at depth {second}",
        statement,
        ratio,
        holds,
        "" if holds else "no gain at these depths" if sharp else "depth helps here",
    )


def _update_rows(series: DepthSeries) -> list[Row]:
    printed = paper_tables()["depth:84"]["m_top16"] if series.task.top_k == 16 else None
    rows = []
    for depth, update, result in zip(series.depths, _updates(series), series.results, strict=True):
        if depth == 1:
            continue
        agreement = Agreement.UNTESTED
        if printed is not None:
            near = abs(update.value - printed) <= UPDATE_TOLERANCE + 2 * update.stderr
            agreement = Agreement.AGREES if near else Agreement.DIFFERS
        rows.append(
            Row(setting_of(series.task, depth), "learned m", printed, trained=update, agreement=agreement,
                remark=seeds_remark(result))
        )  # fmt: skip
    return rows
