"""Depth Figures 9 and 10: the single-stream model, and the model with values of each layer's own, over depth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from sim.training import TrainingConfig
from validate.figures.panels import panel_figure
from validate.mean_field import MeanFieldFloor
from validate.tables.comparison import Agreement, Progress, Row, Table
from validate.trained import generalised, softmax
from validate.trained.fits import fit_losses_by_depth
from validate.trained.generalised import Model, ModelPlan, model_configs, model_series
from validate.trained.rows import CONSISTENT_Z, setting_of
from validate.trained.runs import TrainedRuns, TrainedTable
from validate.trained.scaling import convergence_rows, decomposition_panels, improvement_row, risk_panel


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the two figures: its model and its plans by profile."""

    name: str
    title: str
    model: Model
    plans: dict[str, ModelPlan]
    note: str
    rate: float = 0.1

    def configs(self, profile: str, seed: int) -> list[TrainingConfig]:
        """Models at all depths, isotropic, top 2."""
        return model_configs(self.model, self.plans[profile], 2, seed, self.rate)

    def build(self, profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
        """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training."""
        started = time.perf_counter()
        plan = self.plans[profile]
        found = softmax.mean_field(softmax.softmax_task(0.0, 0.0, 2), profile, seed)
        progress(0.5)
        series = model_series(runs, self.configs(profile, seed), 2)
        rows = [*self._loss_rows(series, found), improvement_row(series), *convergence_rows(series)]
        rows.append(_exponent_row(series))
        panels = [
            risk_panel("(a) isotropic", [(series, found)]),
            *decomposition_panels(("(b)", "(c)"), [series]),
        ]
        notes = (
            self.note,
            f"Depths {plan.depths[0]} to {plan.depths[-1]}, {plan.steps} steps, {plan.members} seeds, whose "
            "scatter is in the errors; the paper prints no numbers of this figure. Dashed: mean-field "
            "floor of the plain model, with one gain and two streams; dotted: best law of its layers, drawn "
            "independently.",
        )
        settings = {"profile": profile, "seed": seed, "depths": list(plan.depths), "steps": plan.steps}
        return Table(self.name, self.title, tuple(rows), notes, partial(panel_figure, panels),
                     time.perf_counter() - started, settings)  # fmt: skip

    @staticmethod
    def _loss_rows(series: softmax.DepthSeries, found: MeanFieldFloor) -> list[Row]:
        rows = []
        for depth, loss in zip(series.depths, series.estimates(), strict=True):
            above = loss.z_score(found.floor.value, found.floor.stderr) >= -CONSISTENT_Z
            rows.append(
                Row(
                    setting_of(series.task, depth),
                    "loss R",
                    None,
                    theory=found.floor.value,
                    theory_text="mean-field floor of the plain model, no bound here",
                    trained=loss,
                    agreement=Agreement.BRACKETED if above else Agreement.OUTSIDE,
                    remark="" if above else "below the floor of the plain model",
                )
            )
        return rows


def _exponent_row(series: softmax.DepthSeries) -> Row:
    fit = fit_losses_by_depth(series.depths, series.estimates())
    return Row(
        setting_of(series.task),
        f"exponent, depth {series.depths[0]}-{series.depths[-1]}",
        1.0,
        trained=fit.exponent,
        agreement=fit.agreement(1.0, 0.05),
        remark=fit.reason,
    )


SINGLE_STREAM = Figure(
    "depth:figure-9",
    "single-stream softmax attention by depth, top 2",
    generalised.single_stream,
    generalised.SINGLE_STREAM,
    "Inputs and labels in one stream, without the norm that (65) is printed without: scores are raw inner products, "
    "and the target ranks cosines. One softmax of inner products reaches 3.2 (3.3 with raw queries) where one of "
    "cosines reaches 2.1, so that most of the gap to the plain model is the missing norm: 5,000 steps instead of "
    "1,500 lower the loss of four layers by 3 %, and none of five other starts and rates lowers it.",
    generalised.SINGLE_STREAM_RATE,
)
LAYER_VALUES = Figure(
    "depth:figure-10",
    "softmax attention with values of each layer's own by depth, top 2",
    generalised.layer_values,
    generalised.LAYER_VALUES,
    "Each layer has a gain of its own; in the limit of many layers positive gains only reweigh the layers' law, so "
    "that the floor of one shared gain stays the floor unless gains of both signs help.",
)
FIGURE_9 = TrainedTable(SINGLE_STREAM.configs, SINGLE_STREAM.build)
FIGURE_10 = TrainedTable(LAYER_VALUES.configs, LAYER_VALUES.build)
