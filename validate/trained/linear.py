"""Linear attention on both tasks: which models are trained, and their exponents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.contexts import SampleSize
from sim.experiments.linear_attention import LinearLayers
from sim.training import TrainingConfig, TrainingResult
from theory.problems import CopyTask, PowerLawSpectrum, TopKTask
from theory.results import DomainError, Estimate, PrecisionError
from validate.power_law_fit import fit_power_law
from validate.tables.comparison import paper_rows
from validate.trained.fits import as_estimate
from validate.trained.runs import TrainedRuns

# The paper's unstated size of its linear models.
DIM, CONTEXT = 128, 1024
# The population loss is exact: every context gives the same number.
EXACT = SampleSize(chunks=2, chunk_batches=1, batch=1)
# Layers start at steps that part by a factor of ten around the repeated update's.
EASY_START, HARD_START = (0.1, 1.0), (0.5, 2.0)
# At 0.1 products of eight layers are thrown to places from where they do not come back.
EASY_RATE, HARD_RATE = 0.03, 0.03


@dataclass(frozen=True, slots=True)
class EasyPlan:
    """Easy task, infinite context. depths: increasing; budgets: steps of Adam, increasing."""

    depths: tuple[int, ...]
    budgets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HardPlan:
    """Difficult task. dim, context: size of the models; batch, steps: of Adam; evaluation: of the measurement."""

    dim: int
    context: int
    depths: tuple[int, ...]
    steps: int
    batch: int
    evaluation: SampleSize


EASY = {
    "quick": EasyPlan((1, 2, 4, 8), (300, 2000)),
    "paper": EasyPlan((1, 2, 4, 8, 16, 32), (300, 2000, 20000)),
}
# At a quarter of both sizes one step costs a sixteenth; the ratio of the two, on which the finite context tells, stays.
HARD = {
    "quick": HardPlan(32, 256, (1, 2, 4), 250, 64, SampleSize(32, 4, 64)),
    "paper": HardPlan(128, 1024, (1, 2, 4, 8), 1000, 128, SampleSize(64, 8, 64)),
}


def easy_config(spectrum: PowerLawSpectrum, depth: int, steps: int, seed: int) -> TrainingConfig:
    """Layer scalars on the exact population loss, float64, as its values fall far below one."""
    experiment = LinearLayers(CopyTask(spectrum), depth, "scalars", EASY_START)
    return TrainingConfig(
        experiment,
        steps=steps,
        batch=1,
        learning_rate=EASY_RATE,
        seeds=(seed,),
        evaluation=EXACT,
        evaluation_seed=seed,
        dtype="float64",
    )


def easy_configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Models of all printed spectra, depths and budgets."""
    plan = EASY[profile]
    return [
        easy_config(spectrum, depth, steps, seed)
        for spectrum in printed_spectra()
        for steps in plan.budgets
        for depth in plan.depths
    ]


def easy_results(
    runs: TrainedRuns, spectrum: PowerLawSpectrum, steps: int, profile: str, seed: int
) -> list[TrainingResult]:
    """Models of one spectrum and budget, one per depth."""
    return runs.results([easy_config(spectrum, depth, steps, seed) for depth in EASY[profile].depths])


def printed_spectra() -> list[PowerLawSpectrum]:
    """The spectra of Table 2, dim 128."""
    return [PowerLawSpectrum(row["a"], row["b"], DIM) for row in paper_rows("depth:table-2")]


def fitted_exponent(depths: Sequence[int], losses: Sequence[float]) -> Estimate | None:
    """Exponent of a law without floor with its standard error, ``None`` where there is none. Source: depth (89)."""
    try:
        fit = fit_power_law(list(depths), list(losses), with_floor=False, draws=0, profiles=())
    except (DomainError, PrecisionError):
        return None
    return as_estimate(fit.exponent, fit)


def hard_task(a: float, b: float, plan: HardPlan) -> TopKTask:
    """The difficult task of the linear models, top 2."""
    return TopKTask(PowerLawSpectrum(a, b, plan.dim), plan.context, 2)


def hard_configs(tasks: Sequence[TopKTask], profile: str, seed: int) -> list[TrainingConfig]:
    """Layer scalars on the difficult task at all depths of the profile, task by task."""
    plan = HARD[profile]
    return [
        TrainingConfig(
            LinearLayers(task, depth, "scalars", HARD_START),
            steps=plan.steps,
            batch=plan.batch,
            learning_rate=HARD_RATE,
            seeds=(seed,),
            evaluation=plan.evaluation,
            evaluation_seed=seed,
        )
        for task in tasks
        for depth in plan.depths
    ]
