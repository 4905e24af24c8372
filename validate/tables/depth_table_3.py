"""Depth Table 3: predicted and measured loss floors of linear attention on the difficult task."""

from __future__ import annotations

import time
from functools import partial

from theory.depth.loss_floor import isotropic_floor
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import Estimate
from validate.figures.comparison import floor_figure
from validate.predictions import sampled_floors
from validate.tables.comparison import Z_LIMIT, Agreement, Progress, Row, Table, compare, paper_rows, share

# The paper's unstated sizes: they reproduce its isotropic floor to five digits.
DIM, CONTEXT = 128, 1024
# Degree of the covariance polynomial; the floors no longer move beyond it.
DEGREE = 8
RELATIVE_ERROR = {"quick": 0.01, "paper": 0.001}
MAX_CONTEXTS = {"quick": 30_000, "paper": 20_000_000}
# The paper calls measured losses within 4.4 % of its predictions close; its own list has no errors.
MEASURED_TOLERANCE = 0.05


def setting_of(task: TopKTask) -> dict[str, float]:
    """The row's parameters."""
    spectrum = task.spectrum
    assert isinstance(spectrum, PowerLawSpectrum)
    return {"k": task.top_k, "a": spectrum.input_exponent, "b": spectrum.teacher_exponent}


def predicted_row(task: TopKTask, paper: float, stderr: float, sampled: Estimate) -> Row:
    """The paper's predicted floor beside the exact one, where there is one, and ours by Monte Carlo."""
    if not task.spectrum.isotropic_input:
        agreement = compare(sampled, paper, stderr)
        return Row(
            setting_of(task), "predicted floor", paper, stderr, theory_text="(by Monte Carlo)", monte_carlo=sampled,
            agreement=agreement,
        )  # fmt: skip
    exact = isotropic_floor(task).floor.value
    return Row(
        setting_of(task),
        "predicted floor",
        paper,
        stderr,
        theory=exact,
        monte_carlo=sampled,
        agreement=Agreement.AGREES if abs(paper - exact) <= Z_LIMIT * stderr else Agreement.DIFFERS,
        consistent=abs(sampled.z_score(exact)) <= Z_LIMIT + 1,
    )


def measured_row(task: TopKTask, paper: float, floor: float) -> Row:
    """The paper's trained loss beside the floor that it should reach."""
    difference = paper / floor - 1
    return Row(
        setting_of(task),
        "trained loss",
        paper,
        theory=floor,
        theory_text=f"({100 * difference:+.1f} %)",
        agreement=Agreement.AGREES if abs(difference) <= MEASURED_TOLERANCE else Agreement.DIFFERS,
        remark="the paper prints no error; within 5 % counts as agreement",
    )


def sample(task: TopKTask, degree: int, profile: str, seed: int, progress: Progress) -> tuple[Estimate, ...]:
    """Floors by degree at the profile's precision."""
    return sampled_floors(
        task,
        degree=degree,
        relative_error=RELATIVE_ERROR[profile],
        seed=seed,
        max_contexts=MAX_CONTEXTS[profile],
        progress=progress,
    )


def build(profile: str, seed: int, progress: Progress) -> Table:
    """Reproduce the table. profile: "quick" or "paper"; seed: of the sampling. Source: depth Table 3."""
    started = time.perf_counter()
    printed = paper_rows("depth:table-3")
    rows: list[Row] = []
    degree_one: list[str] = []
    for i, row in enumerate(printed):
        task = TopKTask(PowerLawSpectrum(row["a"], row["b"], DIM), CONTEXT, row["top_k"])
        floors = sample(task, DEGREE, profile, seed, share(progress, i / len(printed), (i + 1) / len(printed)))
        predicted = predicted_row(task, row["predicted"], row["predicted_se"], floors[-1])
        rows.append(predicted)
        rows.append(measured_row(task, row["measured"], predicted.theory or floors[-1].value))
        excess = floors[0].value / floors[-1].value - 1
        if excess > 0.03:
            degree_one.append(f"({row['a']:g}, {row['b']:g}) top {row['top_k']}: +{100 * excess:.0f} %")
    agreeing = sum(r.agreement is Agreement.AGREES for r in rows if r.quantity == "predicted floor")
    notes = (
        f"{agreeing} of {len(printed)} printed predictions agree with ours at dim {DIM}, context {CONTEXT}, which "
        "the paper does not print; the isotropic floor is exact.",
        "A degree-one predictor, which the paper calls sufficient, has a higher floor: " + "; ".join(degree_one) + "."
        if degree_one
        else "A degree-one predictor is within 3 % of degree eight on every row.",
        "The floor bounds polynomials in the population covariance; the model reads the empirical one, which holds "
        "the selected tokens, so at finite context it may pass the floor by a few per cent.",
        "The measured losses are those of the paper's trained models; Figure 5 trains linear models of ours.",
    )
    settings = {"dim": DIM, "context": CONTEXT, "degree": DEGREE, "profile": profile, "seed": seed}
    draw = partial(floor_figure, rows, "predicted floor", "trained loss")
    return Table(
        "depth:table-3", "loss floors of linear attention, difficult task", tuple(rows), notes, draw,
        time.perf_counter() - started, settings,
    )  # fmt: skip
