"""Softmax models on the copy task and the generalised models: which are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.contexts import SampleSize
from sim.experiments.base import Experiment
from sim.experiments.generalised import LayerValueSoftmax, SingleStreamSoftmax, UpdatingSoftmax
from sim.training import TrainingConfig, TrainingResult
from theory.problems import CopyTask, PowerLawSpectrum, TopKTask
from theory.results import Estimate
from validate.trained.runs import TrainedRuns
from validate.trained.softmax import CONTEXT, DIM, DepthSeries, softmax_task


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Easy task. depths: with one first; steps: of Adam; times: steps at which the attention is looked at."""

    depths: tuple[int, ...]
    steps: int
    times: tuple[int, ...]
    evaluation: SampleSize


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A generalised model on the difficult task. depths: increasing; steps: of Adam; members: seeds at each depth."""

    depths: tuple[int, ...]
    steps: int
    evaluation: SampleSize
    members: int = 3


_QUICK, _PAPER = SampleSize(32, 2, 256), SampleSize(64, 8, 256)
COPY = {
    "quick": CopyPlan((1, 4), 400, (1, 3, 10, 30, 100, 400), SampleSize(16, 2, 256)),
    "paper": CopyPlan((1, 2, 4, 16), 3000, (1, 3, 10, 30, 100, 300, 1000, 3000), _PAPER),
}
LAYER_VALUES = {
    "quick": ModelPlan((1, 2, 4, 8, 16), 800, _QUICK),
    "paper": ModelPlan((1, 2, 4, 8, 16, 32, 64, 128), 2500, _PAPER),
}
SINGLE_STREAM = {
    "quick": ModelPlan((1, 2, 4, 8), 1500, _QUICK),
    "paper": ModelPlan((1, 2, 4, 8, 16, 32, 64), 10000, _PAPER),
}
UPDATES = {
    "quick": ModelPlan((1, 2, 4), 800, _QUICK),
    "paper": ModelPlan((1, 2, 4, 8, 16, 32), 2500, _PAPER),
}
COPY_RATE = 0.5
SINGLE_STREAM_RATE = 0.1
# (initial_scales, initial_noise, initial_update) by top_k. On top 16 two layers from m = 0 end at a higher loss after
# as many steps, m still falling.
UPDATE_STARTS = {2: ((1.0, 50.0), 1.0, 0.0), 16: ((1.0, 30.0), 0.2, -2.0)}
# Layers of one sharpness, near that of the best single softmax of top 2.
ALIKE_START = ((20.0, 20.0), 0.2, 0.0)


def copy_config(a: float, b: float, depth: int, steps: int, profile: str, seed: int) -> TrainingConfig:
    """Softmax attention on the copy task at a constant rate: fewer steps are the beginning of the same run."""
    task = CopyTask(PowerLawSpectrum(a, b, DIM), CONTEXT)
    return TrainingConfig(
        LayerValueSoftmax(task, depth, (0.1, 0.1), 0.1),
        steps=steps,
        learning_rate=COPY_RATE,
        schedule="constant",
        seeds=(seed,),
        evaluation=COPY[profile].evaluation,
        evaluation_seed=seed,
    )


Model = Callable[[TopKTask, int], Experiment]


def layer_values(task: TopKTask, depth: int) -> Experiment:
    """Layers with values of their own, started as the fixed-context models of top 2."""
    return LayerValueSoftmax(task, depth)


def single_stream(task: TopKTask, depth: int) -> Experiment:
    """Inputs and labels in one stream."""
    return SingleStreamSoftmax(task, depth)


def updating(task: TopKTask, depth: int) -> Experiment:
    """Context updates with a trained m, from the start of `UPDATE_STARTS`."""
    scales, noise, update = UPDATE_STARTS[task.top_k]
    return UpdatingSoftmax(task, depth, scales, noise, update)


def updating_alike(task: TopKTask, depth: int) -> Experiment:
    """Context updates with a trained m, from layers of one sharpness."""
    return UpdatingSoftmax(task, depth, *ALIKE_START)


def model_configs(
    model: Model, plan: ModelPlan, top_k: int, seed: int, learning_rate: float = 0.1
) -> list[TrainingConfig]:
    """Models of one kind on the isotropic task at all depths of the plan, from several seeds side by side."""
    task = softmax_task(0.0, 0.0, top_k)
    configs = []
    for depth in plan.depths:
        experiment = model(task, depth)
        configs.append(
            TrainingConfig(
                experiment,
                steps=plan.steps,
                learning_rate=learning_rate,
                loss=experiment.losses[0],
                seeds=tuple(seed + i for i in range(plan.members)),
                evaluation=plan.evaluation,
                evaluation_seed=seed,
            )
        )
    return configs


def model_series(runs: TrainedRuns, configs: Sequence[TrainingConfig], top_k: int) -> DepthSeries:
    """Trained models of one kind over depth, without members that diverged."""
    results = tuple(result.without_diverged() for result in runs.results(configs))
    return DepthSeries(softmax_task(0.0, 0.0, top_k), results)


def learned_update(result: TrainingResult) -> Estimate:
    """Mean of the trained m over the members and its error; of one member the error is not known and given as 0."""
    values = result.parameters["update"]
    members = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(members) if members > 1 else 0.0
    return Estimate(float(values.mean()), error, max(members, 2), max(members, 2), result.config.seeds[0])


def seeds_remark(result: TrainingResult) -> str:
    """How many trainings stand behind a learned parameter."""
    members = result.config.members
    return f"{members} seeds" if members > 1 else "one training run: its scatter over seeds is not in the error"
