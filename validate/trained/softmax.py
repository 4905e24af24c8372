"""Softmax attention by depth at the paper's size: which models are trained, and the losses read off them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sim.contexts import SampleSize, estimate_from_chunks
from sim.experiments.softmax_attention import SoftmaxAttention
from sim.training import TrainingConfig, TrainingResult
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import Estimate, FloatArray
from validate.mean_field import MeanFieldFloor, mean_field_floors
from validate.tables.comparison import Progress, paper_rows
from validate.trained.runs import TrainedRuns

# The paper's unstated size of its softmax models.
DIM, CONTEXT = 16, 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What a profile trains.

    depths: increasing; steps: of Adam at each depth; evaluation: contexts of the measurement; floors: profile of the
    mean-field floors; every: whether each spectrum is trained, or isotropic inputs once for all teachers.
    """

    depths: tuple[int, ...]
    steps: tuple[int, ...]
    evaluation: SampleSize
    floors: str
    every: bool

    @property
    def stated_steps(self) -> str:
        """The numbers of steps in words."""
        low, high = min(self.steps), max(self.steps)
        return f"{low} steps" if low == high else f"{low} to {high} steps"


PLANS = {
    # Deep models need more steps: with 800 steps sixteen layers are no better than eight.
    "quick": Plan((1, 2, 4, 8, 16), (800, 800, 800, 1200, 1600), SampleSize(64, 2, 256), "quick", every=False),
    "paper": Plan((1, 2, 4, 8, 16, 32, 64, 128, 256), (2500,) * 9, SampleSize(64, 8, 256), "paper", every=True),
}
# Starts by top_k: (initial_scales, initial_noise), close to the laws of layers that the mean field finds best.
STARTS = {2: ((1.0, 50.0), 1.0), 16: ((1.0, 30.0), 1.0)}


@dataclass(frozen=True, slots=True)
class DepthSeries:
    """Trained models of one task at increasing depths.

    task: the task; results: one per depth; scale: factor that turns their losses into those of the task.
    """

    task: TopKTask
    results: tuple[TrainingResult, ...]
    scale: float = 1.0

    @property
    def depths(self) -> list[int]:
        """The depths."""
        return [depth_of(result) for result in self.results]

    def chunks(self, name: str) -> list[FloatArray]:
        """Means over each chunk of the common contexts, (members, chunks), at each depth that has the quantity."""
        return [self.scale * np.array(r.chunks[name]) for r in self.results if name in r.chunks]

    def estimates(self, name: str = "loss") -> list[Estimate]:
        """A measured quantity at the depths that have it, over the seeds: the decomposition starts at two layers."""
        found = [over_seeds(result, name) for result in self.results if name in result.measured]
        return [scaled(one, self.scale) for one in found]

    def ratio(self, over: int, under: int, name: str = "loss") -> Estimate:
        """A quantity at one depth over that at another, by index, with the error on common contexts and over seeds."""
        rows = self.chunks(name)
        return ratio_of_means(rows[over], rows[under], self.results[0])


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """An estimate in other units."""
    return replace(estimate, value=factor * estimate.value, stderr=abs(factor) * estimate.stderr)


def over_seeds(result: TrainingResult, name: str) -> Estimate:
    """Mean of a measured quantity over the members of a run, with the error of `mean_over_seeds`."""
    if len(result.chunks[name]) == 1:
        return result.estimate(name)
    return mean_over_seeds(np.array(result.chunks[name]), result)


def mean_over_seeds(rows: FloatArray, result: TrainingResult) -> Estimate:
    """Mean of chunk means, (members, chunks), on common contexts: their error, and the scatter of the trainings.

    Members are measured on the same contexts, so that their scatter is that of training alone, and both errors add in
    squares. Degrees of freedom are Welch's, rounded down.
    """
    config = result.config
    sampled = estimate_from_chunks(rows.mean(axis=0), config.evaluation.contexts, config.evaluation_seed)
    members = len(rows)
    if members == 1:
        return sampled
    scatter = float(rows.mean(axis=1).std(ddof=1)) / math.sqrt(members)
    total = math.hypot(sampled.stderr, scatter)
    parts = sampled.stderr**4 / (sampled.chunks - 1) + scatter**4 / (members - 1)
    freedom = int(total**4 / parts) if parts > 0 else sampled.chunks - 1
    return replace(sampled, stderr=total, chunks=1 + max(freedom, 1))


def ratio_of_means(over: FloatArray, under: FloatArray, result: TrainingResult) -> Estimate:
    """Ratio of the means of chunk means on the same contexts, (chunks,) or (members, chunks), by linearisation."""
    # Depths may have lost different members; the others are as good as any.
    kept = min(len(np.atleast_2d(row)) for row in (over, under))
    over, under = np.atleast_2d(over)[:kept], np.atleast_2d(under)[:kept]
    ratio = over.mean() / under.mean()
    return mean_over_seeds(ratio + (over - ratio * under) / under.mean(), result)


def depth_of(result: TrainingResult) -> int:
    """Number of layers of a trained model."""
    depth: int = result.config.experiment.depth  # type: ignore[attr-defined]
    return depth


def softmax_task(a: float, b: float, top_k: int) -> TopKTask:
    """The difficult task at the size of the softmax models."""
    return TopKTask(PowerLawSpectrum(a, b, DIM), CONTEXT, top_k)


def configs(tasks: Sequence[TopKTask], profile: str, seed: int) -> list[TrainingConfig]:
    """Models of the tasks at all depths of the profile."""
    return [config for task in tasks for config in _series_configs(task, profile, seed)]


def series(runs: TrainedRuns, task: TopKTask, profile: str, seed: int) -> DepthSeries:
    """The trained models of a task, from the isotropic ones where the profile trains those only.

    With isotropic inputs the loss is proportional to tr Ω, models and contexts being the same.
    """
    trained = _trained_task(task, PLANS[profile])
    scale = float(task.spectrum.label_variances().sum() / trained.spectrum.label_variances().sum())
    return DepthSeries(task, tuple(runs.results(_series_configs(task, profile, seed))), scale)


def _trained_task(task: TopKTask, plan: Plan) -> TopKTask:
    shared = task.spectrum.isotropic_input and not plan.every
    return replace(task, spectrum=PowerLawSpectrum(0, 0, task.spectrum.dim)) if shared else task


def _series_configs(task: TopKTask, profile: str, seed: int) -> list[TrainingConfig]:
    plan = PLANS[profile]
    trained = _trained_task(task, plan)
    scales, noise = STARTS[task.top_k]
    return [
        TrainingConfig(
            SoftmaxAttention(trained, depth, scales, noise),
            steps=steps,
            seeds=(_seed_of(trained, seed),),
            evaluation=plan.evaluation,
            evaluation_seed=seed,
        )
        for depth, steps in zip(plan.depths, plan.steps, strict=True)
    ]


def _seed_of(task: TopKTask, seed: int) -> int:
    # Teachers on the same isotropic inputs would else be the same run in other units.
    assert isinstance(task.spectrum, PowerLawSpectrum)
    return seed + round(2**32 * task.spectrum.teacher_exponent)


@lru_cache(maxsize=32)
def _floors(a: float, top_k: int, profile: str, seed: int) -> dict[float, MeanFieldFloor]:
    exponents = printed_teachers(a, top_k)
    tasks = [softmax_task(a, b, top_k) for b in exponents]
    return dict(zip(exponents, mean_field_floors(tasks, seed=seed, profile=PLANS[profile].floors), strict=True))


def mean_field(task: TopKTask, profile: str, seed: int, progress: Progress = lambda _: None) -> MeanFieldFloor:
    """The mean-field floor of a printed task, computed once per process together with those on the same inputs."""
    spectrum = task.spectrum
    assert isinstance(spectrum, PowerLawSpectrum)
    found = _floors(spectrum.input_exponent, task.top_k, profile, seed)[spectrum.teacher_exponent]
    progress(1.0)
    return found


def printed_tasks(name: str) -> list[TopKTask]:
    """Tasks of the softmax models in the rows of a printed table; top 2 where it has no column for it."""
    return [softmax_task(row["a"], row["b"], int(row.get("top_k", 2))) for row in paper_rows(name)]


def printed_teachers(a: float, top_k: int) -> list[float]:
    """Teacher exponents that the paper prints with an input exponent, increasing; 0 always."""
    tasks = [*printed_tasks("depth:table-1"), *printed_tasks("depth:table-4")]
    found = {0.0}
    for task in tasks:
        assert isinstance(task.spectrum, PowerLawSpectrum)
        if task.top_k == top_k and task.spectrum.input_exponent == a:
            found.add(float(task.spectrum.teacher_exponent))
    return sorted(found)
