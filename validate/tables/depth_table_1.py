"""Depth Table 1: loss floors of softmax and of linear attention on the difficult task."""

from __future__ import annotations

import time
from functools import partial

from sim.montecarlo.single_softmax import best_single_softmax
from sim.training import TrainingConfig, TrainingResult, train_many
from theory.depth.loss_floor import isotropic_floor
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import Estimate
from validate.figures.comparison import attention_figure
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_rows, share
from validate.tables.depth_table_3 import CONTEXT, DEGREE, DIM, MEASURED_TOLERANCE, sample

TOP_K = 2
# The paper's unstated size of its softmax models (FINDINGS A).
SOFTMAX_DIM, SOFTMAX_CONTEXT = 16, 64
DEPTHS = (1, 4, 16)
# Our own numbers are called inconsistent beyond this z.
CONSISTENT_Z = 4.5
WORKERS = 2


def linear_row(printed: dict[str, float], profile: str, seed: int, progress: Progress) -> Row:
    """The paper's fitted floor of trained linear attention beside the exact or sampled floor."""
    setting = {"a": printed["a"], "b": printed["b"]}
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


def softmax_rows(printed: dict[str, float], results: list[TrainingResult], single: Estimate) -> list[Row]:
    """Trained softmax attention by depth, and its floor between shared error and loss of the deepest model."""
    setting = {"a": printed["a"], "b": printed["b"]}
    rows = []
    for result in results:
        row = Row(setting, f"softmax attention, depth {result.config.depth}", None, trained=result.loss)
        if result.config.depth == 1:
            consistent = abs(result.loss.z_score(single.value, single.stderr)) <= CONSISTENT_Z
            agreement = Agreement.AGREES if consistent else Agreement.DIFFERS
            row = Row(
                setting, row.quantity, None, theory_text="(best single softmax)", monte_carlo=single,
                trained=result.loss, agreement=agreement, consistent=consistent,
                remark="the Monte Carlo is the best single softmax of the cosines, found without training",
            )  # fmt: skip
        rows.append(row)
    return [*rows, floor_row(setting, printed["softmax_L0"], results[-1])]


def floor_row(setting: dict[str, float], paper: float, deepest: TrainingResult) -> Row:
    """The paper's extrapolated floor, which must lie between the shared error C and the loss R of any depth."""
    shared, loss = deepest.shared_error, deepest.loss
    assert shared is not None
    inside = shared.value - 2 * shared.stderr <= paper <= loss.value + 2 * loss.stderr
    return Row(
        setting,
        "softmax attention, floor",
        paper,
        theory_text=f"{shared.value:.4g} .. {loss.value:.4g}",
        trained=loss,
        agreement=Agreement.BRACKETED if inside else Agreement.OUTSIDE,
        remark=f"bounds: shared error C and loss R = C + (A - C)/L of the trained depth-{deepest.config.depth} model",
    )


def trained_spectra(profile: str) -> list[dict[str, float]]:
    """The rows whose softmax models are trained: the isotropic one, or all in the paper profile."""
    printed = paper_rows("depth:table-1")
    return printed if profile == "paper" else printed[:1]


def build(profile: str, seed: int, progress: Progress) -> Table:
    """Reproduce the table. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Table 1."""
    started = time.perf_counter()
    printed = paper_rows("depth:table-1")
    rows: list[Row] = []
    for i, row in enumerate(printed):
        part = share(progress, 0.3 * i / len(printed), 0.3 * (i + 1) / len(printed))
        rows.append(linear_row(row, profile, seed, part))
    chosen = trained_spectra(profile)
    trained_seconds = time.perf_counter()
    for i, row in enumerate(chosen):
        task = TopKTask(PowerLawSpectrum(row["a"], row["b"], SOFTMAX_DIM), SOFTMAX_CONTEXT, TOP_K)
        # Deepest first, so that the workers end together.
        configs = [TrainingConfig(task, depth, seed=seed) for depth in reversed(DEPTHS)]
        part = share(progress, 0.3 + 0.7 * i / len(chosen), 0.3 + 0.7 * (i + 1) / len(chosen))
        results = train_many(configs, WORKERS, progress=part)[::-1]
        rows += softmax_rows(row, results, best_single_softmax(task, seed).loss)
    trained_seconds = time.perf_counter() - trained_seconds
    deepest = rows[-1]
    notes = (
        f"Linear floors: dim {DIM}, context {CONTEXT}; for a = 0 the exact isotropic floor times tr(Omega)/dim. The "
        "printed ones are fits to trained losses and lie within "
        f"{100 * max(_difference(r) for r in rows if r.quantity.startswith('linear')):.1f} % of ours.",
        f"Softmax models: dim {SOFTMAX_DIM}, context {SOFTMAX_CONTEXT}, depths {', '.join(map(str, DEPTHS))}, "
        f"{TrainingConfig(task, 1).steps} steps, trained in {trained_seconds:.0f} s. The printed floor is an "
        f"extrapolation to infinite depth: {deepest.agreement.value}.",
        "The other six softmax floors are trained in the paper profile only." if profile == "quick" else "",
    )
    settings = {"top_k": TOP_K, "profile": profile, "seed": seed, "softmax_depths": list(DEPTHS)}
    return Table(
        "depth:table-1",
        "floors of softmax and linear attention, difficult task",
        tuple(rows),
        tuple(note for note in notes if note),
        partial(attention_figure, rows),
        time.perf_counter() - started,
        settings,
    )


def _difference(row: Row) -> float:
    """Relative distance of a linear row's printed floor from ours."""
    ours = row.theory if row.monte_carlo is None else row.monte_carlo.value
    assert row.paper is not None
    assert ours is not None
    return abs(row.paper / ours - 1)
