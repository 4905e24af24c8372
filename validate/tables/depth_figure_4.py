"""Depth Figure 4: one softmax layer solves the easy task by attending to the matching token."""

from __future__ import annotations

import time
from functools import partial

from sim.training import TrainingConfig, TrainingResult
from theory.problems import PowerLawSpectrum
from theory.results import Estimate
from validate.figures.panels import Panel, estimate_curve, panel_figure
from validate.tables.comparison import Agreement, Progress, Row, Table
from validate.trained.generalised import COPY, copy_config
from validate.trained.rows import check_row
from validate.trained.runs import TrainedRuns
from validate.trained.softmax import CONTEXT, DIM, scaled

NAME = "depth:figure-4"
INPUTS, TEACHERS = (0.0, 0.25, 0.5, 1.0), (0.0, 0.25, 0.5, 1.0)
MASS_OF = (1.0, 0.0)
# "Zero loss": less than this share of the label variance. The limit is zero, and training goes on for ever.
SOLVED = 0.01
# "Approaches one" and, at the start, "nearly uniform": within a factor two of one over the number of tokens.
FOCUSED, UNIFORM = 0.95, 2.0


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Models by input spectrum and depth, and the beginnings of one run."""
    plan = COPY[profile]
    by_depth = [copy_config(a, 0.0, depth, plan.steps, profile, seed) for a in INPUTS for depth in plan.depths]
    return by_depth + _mass_configs(profile, seed)


def _mass_configs(profile: str, seed: int) -> list[TrainingConfig]:
    return [copy_config(*MASS_OF, 1, steps, profile, seed) for steps in COPY[profile].times]


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of the training. Source: depth Figure 4."""
    started = time.perf_counter()
    plan = COPY[profile]
    rows: list[Row] = []
    panels = {"(a) b = 0, by a": [], "(b) a = 0, by b": []}  # type: ignore[var-annotated]
    for i, (a, b) in enumerate([*((a, 0.0) for a in INPUTS), *((0.0, b) for b in TEACHERS[1:])]):
        results = runs.results([copy_config(a, 0.0, depth, plan.steps, profile, seed) for depth in plan.depths])
        losses = [_share(result) for result in results]
        rows += _loss_rows(a, b, plan.depths, losses)
        for title, fixed, label in zip(panels, (b, a), (f"a = {a:g}", f"b = {b:g}"), strict=True):
            if fixed == 0:
                total = float(PowerLawSpectrum(a, b, DIM).label_variances().sum())
                curve = [scaled(share, total) for share in losses]
                panels[title].append(estimate_curve(label, plan.depths, curve, len(panels[title])))
        progress((i + 1) / 7)
    beginnings = runs.results(_mass_configs(profile, seed))
    masses = [result.estimate("attention_mass") for result in beginnings]
    rows += _mass_rows(plan.times, masses)
    drawn = [Panel(title, "loss R", curves) for title, curves in panels.items()]
    drawn.append(
        Panel(f"(c) a = {MASS_OF[0]:g}, b = {MASS_OF[1]:g}", "mass on the match",
              [estimate_curve("", plan.times, masses)], "steps", log_y=False,
              lines=[(1 / CONTEXT, "uniform", 5), (1.0, "", 5)])
    )  # fmt: skip
    notes = (
        f"Exact-match copy task, dim {DIM}, context {CONTEXT}, constant rate from nearly uniform attention. With one "
        "token equal to the query the loss goes to zero as the scale of the logits grows, at any depth, so that what "
        f"is left after {plan.steps} steps measures training and not the model.",
        "At a = 0 the loss is tr(Omega)/dim times that of b = 0; as a share of the label variance all b are one curve.",
        "Panel (c) shows one run: with a constant rate, fewer steps are its beginning.",
    )
    settings = {"dim": DIM, "context": CONTEXT, "depths": list(plan.depths), "steps": plan.steps, "profile": profile,
                "seed": seed}  # fmt: skip
    return Table(NAME, "softmax attention on the easy task", tuple(rows), notes, partial(panel_figure, drawn),
                 time.perf_counter() - started, settings)  # fmt: skip


def _share(result: TrainingResult) -> Estimate:
    """Loss over the mean squared label."""
    return scaled(result.loss, 1 / result.config.experiment.unit())


def _loss_rows(a: float, b: float, depths: tuple[int, ...], losses: list[Estimate]) -> list[Row]:
    total = float(PowerLawSpectrum(a, b, DIM).label_variances().sum())
    rows = []
    for depth, share in zip(depths, losses, strict=True):
        solved = share.value < SOLVED
        rows.append(
            Row(
                {"a": a, "b": b, "L": depth},
                "R over label variance",
                0.0,
                theory=0.0,
                theory_text=f"limit; {SOLVED:g} counts as solved",
                trained=share,
                agreement=Agreement.AGREES if solved else Agreement.DIFFERS,
                consistent=share.value < 1,
                remark=f"R = {share.value * total:.3g}",
            )
        )
    return rows


def _mass_rows(times: tuple[int, ...], masses: list[Estimate]) -> list[Row]:
    setting = {"a": MASS_OF[0], "b": MASS_OF[1], "L": 1.0}
    rows = [
        Row({**setting, "steps": steps}, "attention on the match", None, trained=mass)
        for steps, mass in zip(times, masses, strict=True)
    ]
    uniform = masses[0].value < UNIFORM / CONTEXT
    focused = masses[-1].value > FOCUSED
    rows.append(check_row(setting, f"attention on the match after {times[0]} steps",
                          f"< {UNIFORM:g}/{CONTEXT}: nearly uniform", masses[0], uniform))  # fmt: skip
    rows.append(check_row(setting, f"attention on the match after {times[-1]} steps", f"> {FOCUSED:g}: approaches one",
                          masses[-1], focused))  # fmt: skip
    return rows
