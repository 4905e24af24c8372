"""Training of any experiment: one loop, resumable to the bit, and the measurement of what was learned.

Every batch comes from the stream of its step, so a run is a function of its `TrainingConfig` alone: the same bits on
the same machine, whether it runs through or is killed and resumed. Members of an ensemble are trained side by side,
each on the batches of its own seed. Training is float32 on one thread with matmul precision "highest"; everything is
measured in float64 on fresh contexts that are the same for all members and all runs of a problem.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from sim.contexts import SampleSize, estimate_from_chunks
from sim.convergence import Convergence, has_converged
from sim.divergence import Diverged
from sim.experiments.base import Experiment, Loss, checked_fields, experiment_from_json, plain
from sim.origin import UNKNOWN, OtherCodeWarning, distribution_version, source_digest
from sim.runs import HASH_DIGITS, RunFolder, State, content_hash, opened_run
from sim.streams import MAX_SEED, stream
from theory.problems import as_integer, as_real
from theory.results import (
    AttnlawsError,
    DomainError,
    Estimate,
    FloatArray,
    MissingDependencyError,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

Schedule = Literal["cosine", "constant"]
Precision = Literal["float32", "float64"]
Device = Literal["auto", "cpu", "cuda"]
Progress = Callable[[int, float], None]
# A step, and the mean training loss of each member since the entry before.
HistoryEntry = tuple[int, tuple[float | None, ...]]

MATMUL_PRECISION = "highest"
MAX_STEPS = 10**8
MAX_MEMBERS = 2**14
# Part of the identity of every run: raise it when a change of code changes what a configuration means.
FORMAT = 1
# Steps whose mean is the initial loss, and batches over which the loss of predicting zero is taken.
FIRST_STEPS = 10
ZERO_LOSS_BATCHES = 8

# The thread settings of torch belong to the process, so a process trains one run at a time.
_ONE_RUN_PER_PROCESS = threading.RLock()


class TrainingStopped(AttnlawsError):  # noqa: N818
    """Training ended before its last step because the caller asked for it."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """All that determines a training run.

    experiment: what is trained; steps, batch: Adam steps and contexts per step and member; learning_rate, betas: of
    Adam; schedule: ``cosine`` falls to zero at the last step; warmup: steps in which the rate rises linearly first.
    loss: ``teacher_averaged`` takes the mean over the teacher in closed form, ``sampled`` draws one teacher per
    context as the papers do. seeds: of weights and batches, one per member of the ensemble, all different.
    evaluation_seed, evaluation: stream and number of contexts of the evaluation; history_every: steps per entry of the
    history; checkpoint_every: steps per checkpoint of runs on disk, which changes no result and is not part of the
    identity. dtype: of training; device: ``auto`` takes CUDA where it is there; compile: torch.compile.
    stop_when_converged: end early, for constant schedules only. Source: depth section 2.2. Raises DomainError outside
    ranges.
    """

    experiment: Experiment
    steps: int = 2500
    batch: int = 256
    learning_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Schedule = "cosine"
    warmup: int = 0
    loss: Loss = "teacher_averaged"
    seeds: tuple[int, ...] = (0,)
    evaluation_seed: int = 0
    evaluation: SampleSize = field(default_factory=SampleSize)
    history_every: int = 100
    checkpoint_every: int = 500
    dtype: Precision = "float32"
    device: Device = "auto"
    compile: bool = False
    stop_when_converged: Convergence | None = None

    def __post_init__(self) -> None:
        fix = object.__setattr__
        if not isinstance(self.experiment, Experiment):
            raise DomainError(f"experiment must be an Experiment, got {self.experiment!r}")
        fix(self, "steps", as_integer("steps", self.steps, 1, MAX_STEPS))
        fix(self, "batch", as_integer("batch", self.batch, 1, 2**20))
        fix(self, "learning_rate", as_real("learning_rate", self.learning_rate, 0, 1e3, open_low=True))
        fix(self, "betas", _as_betas(self.betas))
        _check_choice("schedule", self.schedule, get_args(Schedule))
        fix(self, "warmup", as_integer("warmup", self.warmup, 0, self.steps - 1))
        _check_choice("loss", self.loss, self.experiment.losses)
        fix(self, "seeds", _as_seeds(self.seeds))
        fix(self, "evaluation_seed", as_integer("evaluation_seed", self.evaluation_seed, 0, MAX_SEED))
        _check_type("evaluation", self.evaluation, SampleSize)
        fix(self, "history_every", as_integer("history_every", self.history_every, 1, MAX_STEPS))
        fix(self, "checkpoint_every", as_integer("checkpoint_every", self.checkpoint_every, 1, MAX_STEPS))
        _check_choice("dtype", self.dtype, get_args(Precision))
        _check_choice("device", self.device, get_args(Device))
        _check_type("compile", self.compile, bool)
        if self.stop_when_converged is not None:
            _check_type("stop_when_converged", self.stop_when_converged, Convergence)
            if self.schedule != "constant":
                raise DomainError("schedule must be constant where stop_when_converged is given, got 'cosine'")

    @property
    def members(self) -> int:
        """Number of models trained side by side."""
        return len(self.seeds)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `config_from_json` reads it back. Source: no equation."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def identity(self) -> str:
        """SHA-256 of all that determines the results; equal runs have equal ones. Source: no equation."""
        content = self.to_json()
        del content["checkpoint_every"]
        return content_hash({"format": FORMAT, **content})


def config_from_json(content: object) -> TrainingConfig:
    """The config that ``to_json`` wrote; fields with a default may be missing.

    Raises DomainError where fields or values are not those of a config. Source: no equation.
    """
    values = checked_fields(TrainingConfig, "training", content)
    values["experiment"] = experiment_from_json(values["experiment"])
    for name, cls in (("evaluation", SampleSize), ("stop_when_converged", Convergence)):
        if values.get(name) is not None:
            values[name] = cls(**checked_fields(cls, name, values[name]))
    return TrainingConfig(**values)


def run_folder(folder: Path, config: TrainingConfig) -> Path:
    """Where `train` keeps a run below ``folder``: named by the first digits of its identity. Source: no equation."""
    return folder / config.identity()[:HASH_DIGITS]


def _as_betas(betas: object) -> tuple[float, float]:
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise DomainError(f"betas must be a pair of numbers in [0, 1), got {betas!r}")
    below_one = math.nextafter(1, 0)
    return as_real("betas[0]", betas[0], 0, below_one), as_real("betas[1]", betas[1], 0, below_one)


def _as_seeds(seeds: object) -> tuple[int, ...]:
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or not 1 <= len(seeds) <= MAX_MEMBERS:
        raise DomainError(f"seeds must be a sequence of 1 to {MAX_MEMBERS} integers, got {seeds!r}")
    numbers = tuple(as_integer(f"seeds[{i}]", seed, 0, MAX_SEED) for i, seed in enumerate(seeds))
    if len(set(numbers)) != len(numbers):
        raise DomainError(f"seeds must all be different, got {numbers!r}")
    return numbers


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DomainError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise DomainError(f"{name} must be a {kind.__name__}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the bits of a run depend on besides its config: types, matmul precision, threads, device, versions, code.

    attnlaws_version, source: of the distribution, and a digest of the source files, see `sim.origin`.
    """

    training_dtype: str
    evaluation_dtype: str
    matmul_precision: str
    threads: int
    device: str
    torch_version: str
    numpy_version: str
    attnlaws_version: str = UNKNOWN
    source: str = UNKNOWN


# What `Numerics` tell of the code that made a run, and what to call it.
CODE = {"attnlaws_version": "attnlaws", "source": "source", "torch_version": "torch", "numpy_version": "numpy"}


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Trained members and their measured quantities, losses in units of the squared labels.

    measured: name -> estimates, one per member; what there is depends on the experiment, ``loss`` is always there. In
    place of the estimates of a member whose loss stopped being finite stands what happened, see `Diverged`.
    chunks: name -> means over each chunk of contexts, by member, for paired comparisons of runs; of members that
    diverged, empty. parameters: name -> array whose first axis counts members, NaN for those that diverged. history:
    (step, mean training loss of each member since the entry before, ``None`` once it diverged).
    steps: done; converged: whether the convergence rule ended them. earlier_numerics: those under which earlier parts
    of a resumed run were trained, where they differ. seconds: wall time of training and of evaluation.
    """

    config: TrainingConfig
    measured: dict[str, tuple[Estimate | Diverged, ...]]
    chunks: dict[str, tuple[tuple[float, ...], ...]] = field(repr=False)
    history: tuple[HistoryEntry, ...] = field(repr=False)
    steps: int
    converged: bool
    numerics: Numerics
    earlier_numerics: tuple[Numerics, ...]
    parameters: dict[str, FloatArray] = field(compare=False, repr=False)
    seconds: tuple[float, float] = field(compare=False)

    def estimate(self, name: str, member: int = 0) -> Estimate:
        """A measured quantity of a member. Raises DomainError where it was not measured, DivergedError where the loss
        of the member stopped being finite. Source: no equation.
        """
        if name not in self.measured:
            raise DomainError(f"name must be one of {', '.join(self.measured)}, got {name!r}")
        found = self.measured[name][as_integer("member", member, 0, self.config.members - 1)]
        if isinstance(found, Diverged):
            raise found.error()
        return found

    @property
    def loss(self) -> Estimate:
        """Loss of the first member."""
        return self.estimate("loss")

    @property
    def diverged(self) -> dict[int, Diverged]:
        """Members whose loss stopped being finite, by their number."""
        return {member: one for member, one in enumerate(self.measured["loss"]) if isinstance(one, Diverged)}

    def without_diverged(self) -> TrainingResult:
        """The members that did not diverge as a result of their own, with their seeds only; this one if all are left.

        Source: no equation.
        """
        failed = self.diverged
        if not failed:
            return self
        kept = [member for member in range(self.config.members) if member not in failed]

        def of_kept(rows: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(rows[member] for member in kept)

        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, seeds=of_kept(self.config.seeds)),
            measured={name: of_kept(row) for name, row in self.measured.items()},
            chunks={name: of_kept(row) for name, row in self.chunks.items()},
            history=tuple((step, of_kept(losses)) for step, losses in self.history),
            parameters={name: value[kept] for name, value in self.parameters.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Measured numbers and how they came about, without parameters and history. Source: no equation."""
        return {
            "config": self.config.to_json(),
            "steps": self.steps,
            "converged": self.converged,
            "measured": {name: [one.to_json() for one in all_] for name, all_ in self.measured.items()},
            "numerics": dataclasses.asdict(self.numerics),
            "earlier_numerics": [dataclasses.asdict(one) for one in self.earlier_numerics],
            "seconds": {"training": self.seconds[0], "evaluation": self.seconds[1]},
        }


def train(
    config: TrainingConfig,
    folder: Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    lock_wait: float = 0.0,
    *,
    snapshots: bool = False,
) -> TrainingResult:
    """Train one ensemble and measure it.

    The same config gives the same bits on the same machine. folder: where runs are kept; the run has a folder of its
    own in it, see `run_folder`, goes on from its last checkpoint, and is only read where it is finished; where other
    code made it, an `OtherCodeWarning` says so.
    ``progress(step, loss)`` is called at each entry of the history with the mean loss of the members. stop: asked
    after each step; when it says so, a checkpoint is written and TrainingStopped raised. lock_wait: seconds to wait
    for another process that trains the same run. snapshots: keep the parameters at each entry of the history in the
    folder, see `sim.snapshots`.

    A member whose loss stops being finite is named in the result, and the others go on. Raises DivergedError, which is
    a PrecisionError, where that happens to all members, MissingDependencyError without torch, RunLockedError where
    another process trains the run. Source: depth section 2.2, (12).
    """
    require_torch()
    check_snapshots(folder, snapshots)
    with one_precise_run(config.device):
        if folder is None:
            return _train(Training(config), progress, stop)
        with opened_run(Path(folder), config.to_json(), config.identity(), lock_wait) as run:
            return _train(Training(config, run, snapshots), progress, stop)


def check_snapshots(folder: Path | None, snapshots: bool) -> None:
    """Raises DomainError for snapshots without a folder to keep them in. Source: validation; no equation."""
    if snapshots and folder is None:
        raise DomainError("folder must be given where snapshots are kept, got None")


def _train(training: Training, progress: Progress | None, stop: Callable[[], bool] | None) -> TrainingResult:
    found = training.resume()
    if found is not None:
        return training.result(found)
    while not training.finished:
        training.advance()
        stopping = stop is not None and not training.finished and stop()
        training.keep(stopping, progress)
        if stopping:
            raise training.stopped()
    return training.finish()


class Training:
    """A run in progress: model, optimiser, and what has been seen so far.

    config: of the run; run: its folder, if any; snapshots: whether parameters are kept there along the way. For the
    loops of `train` and of `sim.together`. Source: no equation.
    """

    def __init__(self, config: TrainingConfig, run: RunFolder | None = None, snapshots: bool = False) -> None:
        import torch

        self.config, self.run, self.snapshots = config, run, snapshots
        self.device = resolved_device(config.device)
        self.dtype = getattr(torch, config.dtype)
        experiment = config.experiment
        self.model = self._initial(config.seeds).to(self.device, self.dtype)
        groups = [{"lr": config.learning_rate, **group} for group in experiment.parameter_groups(self.model)]
        self.optimiser = torch.optim.Adam(groups, lr=config.learning_rate, betas=config.betas)
        self.loss_function: Callable[..., Tensor] = experiment.loss
        if config.compile:
            self.loss_function = torch.compile(experiment.loss, dynamic=False)
        self.numerics = _numerics(config, self.device)
        self.earlier_numerics: list[Numerics] = []
        self.step = 0
        self.converged = False
        self.history: list[HistoryEntry] = []
        self.diverged: dict[int, Diverged] = {}
        # Losses of steps by member: since the last entry of the history, first ones, and those of two windows.
        self.since_entry: list[list[float]] = []
        self.first: list[list[float]] = []
        self.recent: list[list[float]] = []
        self.zero_losses: FloatArray | None = None
        self.seconds = 0.0

    def _initial(self, seeds: Sequence[int]) -> nn.Module:
        return self.config.experiment.initial([stream(seed, "initial weights") for seed in seeds])

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.converged or self.step >= self.config.steps

    @property
    def _left(self) -> list[int]:
        """Members that have not diverged."""
        return [member for member in range(self.config.members) if member not in self.diverged]

    def resume(self) -> dict[str, Any] | None:
        """Go on from the last checkpoint, if any; what the run has measured, where it is finished."""
        saved = None if self.run is None else self.run.read_checkpoint()
        if self.run is None or saved is None:
            return None
        now = self.numerics
        self.restore(saved)
        found = self.run.read_result() if self.finished else None
        made_by = [Numerics(**one) for one in saved["numerics"]]
        if found is not None and "numerics" in found:
            made_by.append(Numerics(**found["numerics"]))
        self._tell_of_other_code(made_by, now, finished=found is not None)
        return found

    def _tell_of_other_code(self, made_by: Sequence[Numerics], now: Numerics, *, finished: bool) -> None:
        assert self.run is not None
        for made in made_by:
            differences = [
                f"{title} {getattr(made, name)}, now {getattr(now, name)}"
                for name, title in CODE.items()
                if getattr(made, name) != getattr(now, name)
            ]
            if differences:
                used = "it is used as it is" if finished else f"it goes on from step {self.step}"
                warnings.warn(
                    f"the run in {self.run.path} was made by other code ({'; '.join(differences)}) and {used}: remove "
                    "the folder, or name another one, to train it anew",
                    OtherCodeWarning,
                    stacklevel=5,
                )
                return

    def advance(self) -> None:
        """One step of Adam on the batch of this step."""
        import torch

        started = time.perf_counter()
        config = self.config
        self.set_learning_rate(self.step)
        losses = self.loss_function(self.model, self.batch("training contexts", self.step), config.loss)
        self.optimiser.zero_grad()
        torch.autograd.backward(losses.sum())
        self.optimiser.step()
        self.record(losses.tolist())
        self.seconds += time.perf_counter() - started

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rates of a step."""
        for group in self.optimiser.param_groups:
            group["lr"] = group["factor"] * learning_rate_at(self.config, step)

    def batch(self, name: str, index: int) -> tuple[Tensor, ...]:
        """The batch of a stream's index, for all members."""
        import torch

        config = self.config
        generators = [stream(seed, name, index) for seed in config.seeds]
        arrays = config.experiment.sample(generators, config.batch, config.loss)
        # torch.tensor copies, so that alignment and hence the bits do not depend on where NumPy put the array.
        return tuple(torch.tensor(array, dtype=self.dtype, device=self.device) for array in arrays)

    def record(self, losses: list[float]) -> None:
        """Count a step that was done, with the losses of the members before it."""
        self.step += 1
        self._note_diverged(losses)
        self.since_entry.append(losses)
        if self.config.stop_when_converged is not None:
            self._watch(losses, self.config.stop_when_converged)

    def _note_diverged(self, losses: list[float]) -> None:
        for member, loss in enumerate(losses):
            if not math.isfinite(loss) and member not in self.diverged:
                config = self.config
                self.diverged[member] = Diverged(config.seeds[member], self.step, str(loss), config.learning_rate)
        if len(self.diverged) == self.config.members:
            raise max(self.diverged.values(), key=lambda one: one.step).error()

    def _watch(self, losses: list[float], rule: Convergence) -> None:
        if len(self.first) < FIRST_STEPS:
            self.first.append(losses)
        self.recent.append(losses)
        if len(self.recent) < 2 * rule.window:
            return
        windows, left = np.array(self.recent)[:, self._left], self._left
        reference = self._reference()[left]
        self.converged = has_converged(windows[: rule.window], windows[rule.window :], reference, rule)
        self.recent = self.recent[rule.window :]

    def _reference(self) -> FloatArray:
        """The smaller of the first losses and the loss of predicting zero, shape (members,)."""
        if self.zero_losses is None:
            self.zero_losses = self._zero_losses()
        smaller: FloatArray = np.minimum(np.mean(self.first, axis=0), self.zero_losses)
        return smaller

    def _zero_losses(self) -> FloatArray:
        losses = []
        for index in range(ZERO_LOSS_BATCHES):
            found = self.config.experiment.zero_loss(self.batch("zero loss", index), self.config.loss)
            if found is None:
                return np.full(self.config.members, np.inf)
            losses.append(found.tolist())
        means: FloatArray = np.mean(losses, axis=0)
        return means

    @property
    def at_entry(self) -> bool:
        """Whether the step that was done ends an entry of the history."""
        return self.step % self.config.history_every == 0 or self.finished

    def saves(self, stopping: bool) -> bool:
        """Whether `keep` will write the model."""
        due = self.step % self.config.checkpoint_every == 0 or (self.snapshots and self.at_entry)
        return self.run is not None and (stopping or self.finished or due)

    def keep(self, stopping: bool, progress: Progress | None) -> None:
        """After a step: an entry of the history, snapshot and checkpoint where they are due, and the caller's say."""
        if self.at_entry:
            self._add_history()
        if self.run is not None and self.saves(stopping):
            # Before the checkpoint, which must never be past a snapshot that is not there.
            if self.snapshots and self.at_entry:
                self.run.write_snapshot(self.step, self._arrays())
            self.run.write_checkpoint(self.state())
            self.run.write_metrics(self.metrics(), self.step, complete=self.finished)
        if self.at_entry and progress is not None:
            losses = [loss for loss in self.history[-1][1] if loss is not None]
            progress(self.step, math.fsum(losses) / len(losses))

    def _add_history(self) -> None:
        """An entry of the history: the mean loss of each member since the entry before."""
        unit, count = self.config.experiment.unit(), len(self.since_entry)
        means = tuple(
            None if member in self.diverged else unit * math.fsum(losses) / count
            for member, losses in enumerate(zip(*self.since_entry, strict=True))
        )
        self.history.append((self.step, means))
        self.since_entry.clear()

    def stopped(self) -> TrainingStopped:
        """The error that says where the run was stopped."""
        kept = "run it again to go on from there" if self.run is not None else "nothing was kept"
        return TrainingStopped(f"training was stopped at step {self.step} of {self.config.steps}: {kept}")

    def finish(self) -> TrainingResult:
        """Measure what was trained, and write it."""
        content = self.measure()
        if self.run is not None:
            self.run.write_metrics(self.metrics(), self.step, complete=True)
            self.run.write_result(content)
        return self.result(content)

    def metrics(self) -> dict[str, list[Any]]:
        """The history as columns, one row per step and member; seeds as text, as they may have 128 bits."""
        rows = [
            (step, member, str(seed), loss, learning_rate_at(self.config, step - 1))
            for step, losses in self.history
            for member, (seed, loss) in enumerate(zip(self.config.seeds, losses, strict=True))
        ]
        names = ("step", "member", "seed", "loss", "learning_rate")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def state(self) -> State:
        """All that a resumed run needs, in tensors and plain values."""
        state = {
            "step": self.step,
            "converged": self.converged,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "history": [[step, list(losses)] for step, losses in self.history],
            "since_entry": self.since_entry,
            "first": self.first,
            "recent": self.recent,
            "numerics": [dataclasses.asdict(one) for one in (*self.earlier_numerics, self.numerics)],
            "seconds": self.seconds,
        }
        if self.diverged:
            state["diverged"] = {member: dataclasses.asdict(one) for member, one in self.diverged.items()}
        return state

    def restore(self, state: State) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.converged = state["step"], state["converged"]
        self.history = [(step, tuple(losses)) for step, losses in state["history"]]
        self.since_entry, self.first, self.recent = state["since_entry"], state["first"], state["recent"]
        self.diverged = {member: Diverged(**one) for member, one in state.get("diverged", {}).items()}
        self.seconds = state["seconds"]
        numerics = [Numerics(**one) for one in state["numerics"]]
        if self.finished:
            self.numerics = numerics.pop()
        self.earlier_numerics = [one for one in dict.fromkeys(numerics) if one != self.numerics]

    def measure(self) -> dict[str, Any]:
        """Chunk means of all measured quantities, in units of squared labels, with the time that they took.

        Members that diverged have ``None``, and are named.
        """
        started = time.perf_counter()
        means = self._measured_members()
        content: dict[str, Any] = {
            "chunks": {name: [None if row is None else row.tolist() for row in rows] for name, rows in means.items()},
            "seconds": [self.seconds, time.perf_counter() - started],
            "numerics": dataclasses.asdict(_numerics(self.config, self.device)),
        }
        if self.diverged:
            content["diverged"] = {str(member): one.to_json() for member, one in self.diverged.items()}
        return content

    def _measured_members(self) -> dict[str, list[FloatArray | None]]:
        left = self._left
        if not self.diverged:
            return {
                name: list(rows) for name, rows in evaluation_chunks(self.config, self.model, self.device).items()
            }
        seeds = tuple(self.config.seeds[member] for member in left)
        model = self._initial(seeds).to(self.device, self.dtype)
        model.load_state_dict({name: value[left] for name, value in self.model.state_dict().items()})
        means = evaluation_chunks(dataclasses.replace(self.config, seeds=seeds), model, self.device)
        return {
            name: [rows[left.index(member)] if member in left else None for member in range(self.config.members)]
            for name, rows in means.items()
        }

    def _arrays(self) -> dict[str, Any]:
        return {name: value.detach().cpu().numpy() for name, value in self.model.state_dict().items()}

    def result(self, content: Mapping[str, Any]) -> TrainingResult:
        """The result from what `measure` returned or a finished run holds."""
        size, seed = self.config.evaluation.contexts, self.config.evaluation_seed
        measured: dict[str, tuple[Estimate | Diverged, ...]] = {
            name: tuple(
                self.diverged[member] if row is None else estimate_from_chunks(np.array(row), size, seed)
                for member, row in enumerate(rows)
            )
            for name, rows in content["chunks"].items()
        }
        parameters = {name: value.astype(np.float64) for name, value in self._arrays().items()}
        for value in parameters.values():
            value[list(self.diverged)] = np.nan
        return TrainingResult(
            config=self.config,
            measured=measured,
            chunks={name: tuple(tuple(row or ()) for row in rows) for name, rows in content["chunks"].items()},
            history=tuple(self.history),
            steps=self.step,
            converged=self.converged,
            numerics=self.numerics,
            earlier_numerics=tuple(self.earlier_numerics),
            parameters=parameters,
            seconds=(content["seconds"][0], content["seconds"][1]),
        )


def evaluation_chunks(config: TrainingConfig, model: nn.Module, device: str = "cpu") -> dict[str, FloatArray]:
    """Means of the measured quantities over each chunk of evaluation contexts, shape (members, chunks) each.

    The model is turned into float64. Losses are in units of the squared labels. Source: Monte Carlo averages; no
    equation.
    """
    import torch

    experiment, size = config.experiment, config.evaluation
    model = model.to(torch.float64)
    names: list[str] = []
    rows = []
    with torch.no_grad():
        for index in range(size.chunks):
            generator = stream(config.evaluation_seed, "evaluation contexts", index)
            means = []
            for _ in range(size.chunk_batches):
                arrays = experiment.sample([generator], size.batch, experiment.losses[0])
                tensors = [torch.tensor(array, dtype=torch.float64, device=device) for array in arrays]
                batch = tuple(tensor.expand(config.members, *tensor.shape[1:]) for tensor in tensors)
                measured = experiment.measure(model, batch)
                names = list(measured)
                means.append(torch.stack(list(measured.values()), dim=-1).cpu().numpy().mean(axis=1))
            rows.append(np.mean(means, axis=0))
    values = np.array(rows)
    unit = experiment.unit()
    return {
        name: np.ascontiguousarray(values[:, :, i].T) * (1.0 if name in experiment.dimensionless else unit)
        for i, name in enumerate(names)
    }


def trained_model(result: TrainingResult) -> nn.Module:
    """The trained model, float64 on the CPU, for diagnostics of one's own. Source: no equation."""
    torch = require_torch()
    config = result.config
    model = config.experiment.initial([stream(seed, "initial weights") for seed in config.seeds])
    model.load_state_dict({name: torch.tensor(value) for name, value in result.parameters.items()})
    return model


def paired_difference(
    first: TrainingResult, second: TrainingResult, name: str = "loss", members: tuple[int, int] = (0, 0)
) -> Estimate:
    """A quantity of ``first`` minus that of ``second`` on the contexts that both were measured on.

    name: which quantity; members: of either run. Its error is much smaller than that of either, as the contexts are
    common. Raises DomainError where the contexts are not the same. Source: Monte Carlo with common random numbers; no
    equation.
    """
    for what, one, other in (
        ("problem", _problem(first), _problem(second)),
        ("evaluation", first.config.evaluation, second.config.evaluation),
        ("evaluation_seed", first.config.evaluation_seed, second.config.evaluation_seed),
    ):
        if one != other:
            raise DomainError(f"{what} must be the same in both runs for a paired difference, got {one} and {other}")
    rows = []
    for result, member in zip((first, second), members, strict=True):
        result.estimate(name, member)
        rows.append(np.array(result.chunks[name][member]))
    return estimate_from_chunks(rows[0] - rows[1], first.config.evaluation.contexts, first.config.evaluation_seed)


def _problem(result: TrainingResult) -> object:
    experiment = result.config.experiment
    return getattr(experiment, "problem", experiment)


def learning_rate_at(config: TrainingConfig, step: int) -> float:
    """Learning rate of step 0 <= step < steps.

    Source: a linear rise over the warm-up, then half a cosine, or constant; no equation.
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.learning_rate
    done, steps = step - config.warmup, config.steps - config.warmup
    return config.learning_rate * (1 + math.cos(math.pi * done / steps)) / 2


def resolved_device(device: Device) -> str:
    """``cpu`` or ``cuda``: the device meant by ``auto``. Raises DomainError for CUDA that is not there.

    Source: no equation.
    """
    torch = require_torch()
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise DomainError("device must be cpu or auto where torch finds no CUDA device, got 'cuda'")
    return "cuda" if there and device != "cpu" else "cpu"


def _numerics(config: TrainingConfig, device: str) -> Numerics:
    import torch

    return Numerics(
        training_dtype=config.dtype,
        evaluation_dtype="float64",
        matmul_precision=torch.get_float32_matmul_precision(),
        threads=torch.get_num_threads(),
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        torch_version=str(torch.__version__),
        numpy_version=np.__version__,
        attnlaws_version=distribution_version(),
        source=source_digest(type(config.experiment)),
    )


def require_torch() -> Any:
    """The module torch. Raises MissingDependencyError where it is not installed. Source: no equation."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("training needs torch: pip install 'attnlaws[train]'") from error
    return torch


@contextmanager
def one_precise_run(device: Device) -> Iterator[None]:
    """The process to oneself, on one torch thread, with full precision; settings are the caller's afterwards.

    Source: no equation.
    """
    # Small batched products collapse on several threads of a shared machine.
    with _ONE_RUN_PER_PROCESS, _one_precise_thread(device):
        yield


@contextmanager
def _one_precise_thread(device: Device) -> Iterator[None]:
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(MATMUL_PRECISION)
    if resolved_device(device) == "cuda":
        # cuBLAS reads this when it starts; without it equal products may differ in their last bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
