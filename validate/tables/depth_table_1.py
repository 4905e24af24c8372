"""Depth Table 1: loss floors of softmax and of linear attention on the difficult task."""

from __future__ import annotations

import time
from functools import partial

from sim.training import TrainingConfig
from theory.depth.loss_floor import isotropic_floor
from theory.problems import PowerLawSpectrum, TopKTask
from validate.figures.comparison import attention_figure
from validate.mean_field import MeanFieldFloor
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_rows, share
from validate.tables.depth_table_3 import CONTEXT, DEGREE, DIM, MEASURED_TOLERANCE, sample
from validate.trained import softmax
from validate.trained.rows import FLOOR_TOLERANCE, Printed, fit_rows, loss_rows, setting_of, single_layer_row
from validate.trained.runs import TrainedRuns
from validate.trained.softmax import CONTEXT as SOFTMAX_CONTEXT
from validate.trained.softmax import DIM as SOFTMAX_DIM

NAME = "depth:table-1"
TOP_K = 2


def linear_row(printed: dict[str, float], profile: str, seed: int, progress: Progress) -> Row:
    """The paper's fitted floor of trained linear attention beside the exact or sampled floor."""
    setting = {"k": TOP_K, "a": printed["a"], "b": printed["b"]}
    task = TopKTask(PowerLawSpectrum(printed["a"], printed["b"], DIM), CONTEXT, TOP_K)
    theory, sampled = None, None
    if task.spectrum.isotropic_input:
        theory = isotropic_floor(task).floor.value
        progress(1.0)
    else:
        sampled = sample(task, DEGREE, profile, seed, progress)[-1]
    floor = theory if sampled is None else sampled.value
    assert floor is not None
    difference = printed["linear_L0"] / floor - 1
    return Row(
        setting,
        "linear attention, floor",
        printed["linear_L0"],
        theory=theory,
        theory_text="exact" if sampled is None else "(by Monte Carlo)",
        monte_carlo=sampled,
        agreement=Agreement.AGREES if abs(difference) <= MEASURED_TOLERANCE else Agreement.DIFFERS,
        remark=f"the paper fits trained losses without an error; {100 * difference:+.1f} % here",
    )


def mean_field_row(setting: dict[str, float], paper: float, found: MeanFieldFloor) -> Row:
    """The paper's extrapolated floor of softmax attention beside the mean-field floor."""
    difference = paper / found.floor.value - 1
    allowed = FLOOR_TOLERANCE + 2 * found.floor.stderr / found.floor.value
    return Row(
        setting,
        "softmax attention, floor",
        paper,
        theory_text=f"mean field, dual gap {100 * found.dual_gap:.2g} %",
        monte_carlo=found.floor,
        agreement=Agreement.AGREES if abs(difference) <= allowed else Agreement.DIFFERS,
        remark=f"the paper extrapolates trained losses to infinite depth; {100 * difference:+.1f} % here",
    )


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of the softmax column."""
    return softmax.configs(softmax.printed_tasks(NAME), profile, seed)


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the table. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Table 1."""
    started = time.perf_counter()
    printed, tasks = paper_rows(NAME), softmax.printed_tasks(NAME)
    rows: list[Row] = []
    for i, row in enumerate(printed):
        part = share(progress, 0.4 * i / len(printed), 0.4 * (i + 1) / len(printed))
        rows.append(linear_row(row, profile, seed, part))
    trained: list[Row] = []
    for i, (row, task) in enumerate(zip(printed, tasks, strict=True)):
        found = softmax.mean_field(task, profile, seed)
        rows.append(mean_field_row(setting_of(task), row["softmax_L0"], found))
        series = softmax.series(runs, task, profile, seed)
        trained += [single_layer_row(series, found), loss_rows(series, found)[-1]]
        trained.append(fit_rows(series, found, Printed(floor=row["softmax_L0"]))[0])
        progress(0.4 + 0.6 * (i + 1) / len(printed))
    rows += trained
    plan = softmax.PLANS[profile]
    return Table(
        NAME,
        "floors of softmax and linear attention, difficult task",
        tuple(rows),
        _notes(rows, tasks, plan),
        partial(attention_figure, rows),
        time.perf_counter() - started,
        {
            "top_k": TOP_K,
            "profile": profile,
            "seed": seed,
            "softmax_depths": list(plan.depths),
            "steps": list(plan.steps),
        },
    )


def _notes(rows: list[Row], tasks: list[TopKTask], plan: softmax.Plan) -> tuple[str, ...]:
    linear = max(_difference(row) for row in rows if row.quantity == "linear attention, floor")
    floors = max(_difference(row) for row in rows if row.quantity == "softmax attention, floor")
    notes = [
        f"Linear floors: dim {DIM}, context {CONTEXT}; for a = 0 the exact isotropic floor times tr(Omega)/dim. The "
        f"printed ones are fits to trained losses and lie within {100 * linear:.1f} % of ours.",
        f"Softmax models: dim {SOFTMAX_DIM}, context {SOFTMAX_CONTEXT}, depths {plan.depths[0]} to {plan.depths[-1]}, "
        f"{plan.stated_steps}. The mean-field floor is the lowest loss of infinitely many layers, found without "
        f"training; the printed floors are extrapolations and lie within {100 * floors:.1f} % of it.",
        "The two columns are of different sizes, so their ratio is not the gain of softmax over linear attention: at "
        f"dim {SOFTMAX_DIM}, context {SOFTMAX_CONTEXT} the isotropic floor of linear attention is "
        f"{isotropic_floor(tasks[0]).floor.value:.4g}.",
    ]
    if not plan.every:
        notes.append(
            "At a = 0 the loss is tr(Omega)/dim times that of b = 0 for the same model and contexts, so that the four "
            "rows with a = 0 come from one set of models; the paper profile trains each with a seed of its own."
        )
    return tuple(notes)


def _difference(row: Row) -> float:
    """Relative distance of a printed floor from ours."""
    ours = row.theory if row.monte_carlo is None else row.monte_carlo.value
    assert row.paper is not None
    assert ours is not None
    return abs(row.paper / ours - 1)
