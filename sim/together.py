"""Several settings of equal shape trained in one pass: one batched step for all, and every run as if it were alone.

Runs keep their own streams, history, checkpoints and folders; what is shared is the work of a step. Batches that
several runs would draw alike are drawn once, losses of all members go through one pass of automatic differentiation,
and runs of equal learning rates through one call of Adam. Runs at different steps, as after an interruption, wait for
the last one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.divergence import DivergedError
from sim.runs import opened_run
from sim.training import (
    Training,
    TrainingConfig,
    TrainingResult,
    check_snapshots,
    learning_rate_at,
    one_precise_run,
    require_torch,
    resolved_device,
)
from theory.results import AttnlawsError, DomainError

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int, float], None]
# What Adam keeps of each parameter, besides the step.
MOMENTS = ("exp_avg", "exp_avg_sq")


def train_together(
    configs: Sequence[TrainingConfig],
    folder: Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    lock_wait: float = 0.0,
    *,
    snapshots: bool = False,
) -> list[TrainingResult]:
    """Results of ``configs`` in their order, trained in one pass.

    configs: of one `shape_of`; they may differ in all else, for example in noise, activation, learning rate, start,
    spectrum, seeds or number of steps. Other arguments are those of `sim.training.train`, with the number of the config
    before the arguments of ``progress``. Runs on disk are those of each config alone: trained either way, they are
    found and resumed either way. Multi-head layers and reduced heads have the bits of `sim.training.train`; softmax
    attention agrees to the rounding of float32, as products of more matrices at a time may round differently.

    Raises DomainError where the configs cannot be trained in one pass, and after all others have ended the error of the
    first run that failed. Source: no equation.
    """
    found = train_all_together(configs, folder, progress, stop, lock_wait, snapshots=snapshots)
    for one in found:
        if isinstance(one, AttnlawsError):
            raise one
    return [one for one in found if isinstance(one, TrainingResult)]


def train_all_together(
    configs: Sequence[TrainingConfig],
    folder: Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    lock_wait: float = 0.0,
    *,
    snapshots: bool = False,
) -> list[TrainingResult | AttnlawsError]:
    """As `train_together`, with the error of a run that failed in place of its result. Source: no equation."""
    require_torch()
    check_snapshots(folder, snapshots)
    identities = [config.identity() for config in configs]
    shapes = {shape_of(config) for config in configs}
    if None in shapes or len(shapes) > 1:
        raise DomainError(
            "configs must have one shape to be trained in one pass: experiments of a kind that can, on the CPU, with "
            f"equal sizes, batch, loss, betas and dtype; got {len(configs)} of which not all do"
        )
    if len(set(identities)) != len(identities):
        raise DomainError("configs must all be different to be trained in one pass, got one of them twice")
    if not configs:
        return []
    with one_precise_run("cpu"), ExitStack() as stack:
        runs: list[Any] = [None] * len(configs)
        if folder is not None:
            # In one order everywhere, so that two processes never wait for each other.
            for index in sorted(range(len(configs)), key=identities.__getitem__):
                opening = opened_run(Path(folder), configs[index].to_json(), identities[index], lock_wait)
                runs[index] = stack.enter_context(opening)
        trainings = [Training(config, run, snapshots) for config, run in zip(configs, runs, strict=True)]
        return _train_group(trainings, progress, stop)


def shape_of(config: TrainingConfig) -> Hashable | None:
    """What runs must agree in to be trained in one pass; ``None`` where that is not possible for this one.

    Source: no equation.
    """
    experiment = config.experiment
    if experiment.together == "no" or config.compile or resolved_device(config.device) != "cpu":
        return None
    return type(experiment), experiment.shape(), config.batch, config.loss, config.betas, config.dtype


def is_faster_together(config: TrainingConfig) -> bool:
    """Whether runs like this one were measured to train faster in one pass. Source: no equation."""
    return config.experiment.together == "faster" and shape_of(config) is not None


def _train_group(
    trainings: Sequence[Training], progress: Progress | None, stop: Callable[[], bool] | None
) -> list[TrainingResult | AttnlawsError]:
    found: dict[int, TrainingResult | AttnlawsError] = {}
    for index, training in enumerate(trainings):
        content = training.resume()
        if content is not None:
            found[index] = training.result(content)
    while left := {index: one for index, one in enumerate(trainings) if index not in found}:
        ended = {index: one for index, one in left.items() if one.finished}
        if ended:
            found |= {index: one.finish() for index, one in ended.items()}
        else:
            found |= _train_earliest(left, progress, stop)
    return [found[index] for index in range(len(trainings))]


def _train_earliest(
    left: Mapping[int, Training], progress: Progress | None, stop: Callable[[], bool] | None
) -> dict[int, AttnlawsError]:
    """Train the runs at the earliest step until one ends or they reach the next run's step; those that failed."""
    first, *later = sorted({one.step for one in left.values()})
    joint = sorted(
        (index for index in left if left[index].step == first), key=lambda index: _rates(left[index].config)
    )
    shared = _SharedStep([left[index] for index in joint])
    while True:
        failed = {joint[place]: failure for place, failure in shared.advance().items()}
        going = {index: left[index] for index in joint if index not in failed}
        ended = [one for one in going.values() if one.finished]
        stopping = stop is not None and len(ended) < len(going) and stop()
        changed = bool(failed or ended or (later and shared.step == later[0]))
        if changed or any(one.saves(stopping) for one in going.values()):
            shared.write_back()
        for index, one in going.items():
            one.keep(stopping, None if progress is None else partial(progress, index))
        if stopping:
            raise next(one for one in going.values() if not one.finished).stopped()
        if changed:
            return failed


def _rates(config: TrainingConfig) -> tuple[Any, ...]:
    """What the learning rate of a step depends on; runs that agree in it share one Adam."""
    return config.learning_rate, config.schedule, config.warmup, config.steps


class _SharedStep:
    """Runs at one step, sorted by their rates, whose parameters lie one after the other in one model."""

    def __init__(self, trainings: Sequence[Training]) -> None:
        import torch

        self.trainings = trainings
        ends = list(accumulate(one.config.members for one in trainings))
        self.slices = [slice(end - one.config.members, end) for one, end in zip(trainings, ends, strict=True)]
        self.model = copy.deepcopy(trainings[0].model)
        with torch.no_grad():
            parts = zip(*(one.model.parameters() for one in trainings), strict=True)
            for joint, own in zip(self.model.parameters(), parts, strict=True):
                joint.data = torch.cat(own)
        self.groups = trainings[0].config.experiment.parameter_groups(self.model)
        places = range(len(trainings))
        self.blocks = [
            _Block(self, list(block)) for _, block in groupby(places, lambda place: _rates(trainings[place].config))
        ]

    @property
    def step(self) -> int:
        """Steps done."""
        return self.trainings[0].step

    def advance(self) -> dict[int, AttnlawsError]:
        """One step of all runs; the errors of those whose members have all diverged, by place."""
        import torch

        started = time.perf_counter()
        config = self.trainings[0].config
        losses = config.experiment.losses_together(self.model, self._parts(), config.loss)
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.autograd.backward(losses.sum())
        for block in self.blocks:
            block.advance(self.step)
        values = losses.tolist()
        failed: dict[int, AttnlawsError] = {}
        for place, (one, members) in enumerate(zip(self.trainings, self.slices, strict=True)):
            try:
                one.record(values[members])
            except DivergedError as failure:
                failed[place] = failure
        seconds = time.perf_counter() - started
        for one in self.trainings:
            one.seconds += seconds * one.config.members / len(values)
        return failed

    def _parts(self) -> list[tuple[Any, int, tuple[Tensor, ...]]]:
        drawn: dict[Hashable, tuple[Tensor, ...]] = {}
        parts = []
        for one in self.trainings:
            source = one.config.experiment.drawn_from(), one.config.seeds
            if source not in drawn:
                drawn[source] = one.batch("training contexts", one.step)
            parts.append((one.config.experiment, one.config.members, drawn[source]))
        return parts

    def write_back(self) -> None:
        """Give every run its parameters and the state of its Adam, as if it had been alone."""
        import torch

        with torch.no_grad():
            for one, members in zip(self.trainings, self.slices, strict=True):
                for joint, own in zip(self.model.parameters(), one.model.parameters(), strict=True):
                    own.copy_(joint[members])
        for block in self.blocks:
            block.write_back(self.step)


class _Block:
    """Adam on the members of runs with equal rates, whose parameters are views of those of the shared step."""

    def __init__(self, shared: _SharedStep, places: Sequence[int]) -> None:
        import torch

        self.trainings = [shared.trainings[place] for place in places]
        start = shared.slices[places[0]].start
        self.members = slice(start, shared.slices[places[-1]].stop)
        self.slices = [slice(own.start - start, own.stop - start) for own in (shared.slices[p] for p in places)]
        self.joint = [parameter for group in shared.groups for parameter in group["params"]]
        views = iter([torch.nn.Parameter(parameter.data[self.members]) for parameter in self.joint])
        groups = [{**group, "params": [next(views) for _ in group["params"]]} for group in shared.groups]
        self.config = self.trainings[0].config
        self.adam = torch.optim.Adam(groups, lr=self.config.learning_rate, betas=self.config.betas)
        self.views = _parameters(self.adam)
        if self.trainings[0].step > 0:
            for place, view in enumerate(self.views):
                states = [one.optimiser.state[_parameters(one.optimiser)[place]] for one in self.trainings]
                self.adam.state[view] = {
                    "step": states[0]["step"].clone(),
                    **{name: torch.cat([state[name] for state in states]) for name in MOMENTS},
                }

    def advance(self, step: int) -> None:
        """A step of Adam with the gradients of the shared step."""
        for view, parameter in zip(self.views, self.joint, strict=True):
            view.grad = parameter.grad[self.members]
        for group in self.adam.param_groups:
            group["lr"] = group["factor"] * learning_rate_at(self.config, step)
        self.adam.step()

    def write_back(self, step: int) -> None:
        """Give every run its part of the moments."""
        for one, members in zip(self.trainings, self.slices, strict=True):
            for own, view in zip(_parameters(one.optimiser), self.views, strict=True):
                state = self.adam.state[view]
                one.optimiser.state[own] = {
                    "step": state["step"].clone(),
                    **{name: state[name][members].clone() for name in MOMENTS},
                }
            one.set_learning_rate(step - 1)


def _parameters(optimiser: Any) -> list[Any]:
    """Parameters of an optimiser in the order of its groups."""
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
