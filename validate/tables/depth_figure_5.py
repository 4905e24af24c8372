"""Depth Figure 5: linear attention on the difficult task reaches a plateau within one or two layers."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from sim.training import TrainingConfig, TrainingResult
from theory.depth.loss_floor import isotropic_floor
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import Estimate
from validate.figures.panels import Curve, Panel, estimate_curve, panel_figure
from validate.predictions import sampled_floors
from validate.tables.comparison import Agreement, Progress, Row, Table
from validate.trained import linear
from validate.trained.rows import check_row, setting_of
from validate.trained.runs import TrainedRuns
from validate.trained.softmax import ratio_of_means, scaled

NAME = "depth:figure-5"
# The spectra of Table 1, which the figure shares.
SPECTRA = ((0.0, 0.0), (0.0, 0.25), (0.0, 0.5), (0.0, 1.0), (0.25, 0.0), (0.5, 0.0), (1.0, 0.0))
DEGREE = 4
FLOOR_ERROR = {"quick": 0.01, "paper": 0.003}
MAX_CONTEXTS = {"quick": 30_000, "paper": 1_000_000}
# "Little further benefit": beyond two layers the loss falls by less than this; on the easy task it falls by factors.
PLATEAU = 0.03
# The model reads the empirical covariance, which holds the selected tokens, and may pass the floor by some per cent.
FLOOR_TOLERANCE = 0.05


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Models on all inputs: the loss at a = 0 is proportional to tr Ω, so that one teacher stands for all."""
    return linear.hard_configs(_trained_tasks(profile), profile, seed)


def _trained_tasks(profile: str) -> list[TopKTask]:
    plan = linear.HARD[profile]
    return [linear.hard_task(a, b, plan) for a, b in SPECTRA if b == 0]


def floor_of(task: TopKTask, profile: str, seed: int) -> Estimate | float:
    """The irreducible floor: exact for isotropic inputs, else sampled. Source: depth (53)."""
    if task.spectrum.isotropic_input:
        return isotropic_floor(task).floor.value
    return sampled_floors(
        task, degree=DEGREE, relative_error=FLOOR_ERROR[profile], seed=seed, max_contexts=MAX_CONTEXTS[profile],
        progress=lambda _: None,
    )[-1]  # fmt: skip


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Figure 5."""
    started = time.perf_counter()
    plan = linear.HARD[profile]
    inputs = [a for a, b in SPECTRA if b == 0]
    grouped = _grouped(runs.results(configs(profile, seed)), len(plan.depths))
    trained = dict(zip(inputs, grouped, strict=True))
    rows: list[Row] = []
    panels: dict[str, list[Curve]] = {"(a) a = 0, by b": [], "(b) b = 0, by a": []}
    for i, (a, b) in enumerate(SPECTRA):
        task = linear.hard_task(a, b, plan)
        results = trained[a]
        scale = _total(task) / _total(results[0].config.experiment.problem)  # type: ignore[attr-defined]
        losses = [scaled(result.loss, scale) for result in results]
        found = floor_of(task, profile, seed)
        rows += _rows(task, plan.depths, results, losses, found)
        value = found.value if isinstance(found, Estimate) else found
        for title, label in zip(panels, (f"b = {b:g}", f"a = {a:g}"), strict=True):
            if (a if title.startswith("(a)") else b) == 0:
                colour = len(panels[title]) // 2
                panels[title].append(estimate_curve(label, plan.depths, losses, colour))
                panels[title].append(Curve("", plan.depths, np.full(len(plan.depths), value), "--", colour))
        progress((i + 1) / len(SPECTRA))
    drawn = [Panel(title, "loss R", curves) for title, curves in panels.items()]
    notes = (
        f"Layer scalars, dim {plan.dim}, context {plan.context}, top 2, {plan.steps} steps of batch {plan.batch}. "
        "Dashed: the floor (53) of polynomials in the population covariance.",
        "The plateaus at the paper's size, dim 128 and context 1024, are the linear column of Table 1, and Table 3."
        if plan.dim != linear.DIM
        else "Models and floors are of the paper's size.",
        "At a = 0 all curves are one, times tr(Omega)/dim.",
    )
    settings = {
        "dim": plan.dim, "context": plan.context, "depths": list(plan.depths), "steps": plan.steps, "profile": profile,
        "seed": seed,
    }  # fmt: skip
    return Table(NAME, "linear attention by depth, difficult task", tuple(rows), notes, partial(panel_figure, drawn),
                 time.perf_counter() - started, settings)  # fmt: skip


def _rows(
    task: TopKTask, depths: tuple[int, ...], results: list[TrainingResult], losses: list[Estimate],
    found: Estimate | float,
) -> list[Row]:  # fmt: skip
    sampled = found if isinstance(found, Estimate) else None
    exact = None if isinstance(found, Estimate) else found
    floor = found.value if isinstance(found, Estimate) else found
    rows = []
    for depth, loss in zip(depths, losses, strict=True):
        difference = loss.value / floor - 1
        near = abs(difference) <= FLOOR_TOLERANCE
        rows.append(
            Row(
                setting_of(task, depth),
                "loss R",
                None,
                theory=exact,
                theory_text=f"floor (53), {100 * difference:+.1f} %",
                monte_carlo=sampled,
                trained=loss,
                agreement=Agreement.AGREES if near else Agreement.DIFFERS,
                remark=""
                if near
                else "one layer cannot form the best polynomial"
                if depth == 1
                else "not at the floor",
            )
        )
    first = min(1, len(results) - 1)
    ratio = ratio_of_means(
        np.array(results[-1].chunks["loss"][0]), np.array(results[first].chunks["loss"][0]), results[-1]
    )
    holds = ratio.value > 1 - PLATEAU
    rows.append(
        check_row(
            setting_of(task, depths[-1]),
            f"R at depth {depths[-1]} over R at depth {depths[first]}",
            f"> {1 - PLATEAU:g}: a plateau",
            ratio,
            holds,
            "" if holds else "depth beyond two layers helps",
        )
    )
    return rows


def _grouped(results: list[TrainingResult], size: int) -> list[list[TrainingResult]]:
    return [results[i : i + size] for i in range(0, len(results), size)]


def _total(task: TopKTask) -> float:
    assert isinstance(task.spectrum, PowerLawSpectrum)
    return float(task.spectrum.label_variances().sum())
