"""Multi-head models at the paper's size: which ensembles are trained, and what is read off them.

Layers are the whole model (2.2) with sampled labels, as in the paper; heads (ω, μ) are the model (3.2). Layers whose
path matters are trained with snapshots, in a folder of their own beside the other runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.contexts import SampleSize
from sim.experiments.multihead import MultiHead, ReducedHeads, losses_by_length
from sim.head_patterns import (
    CircuitPatterns,
    Circuits,
    HeadPatterns,
    circuit_patterns,
    circuits_of,
    head_patterns,
    over_seeds,
    scalars_of,
)
from sim.montecarlo.multihead_training import ActivationName
from sim.snapshots import Snapshots, read_snapshots
from sim.sweep import train_many
from sim.training import Schedule, TrainingConfig, TrainingResult, trained_model
from theory.multihead.softmax_risk import SoftmaxOptimum, optimum
from theory.problems import MultiTaskRegression, RegressionTask
from theory.results import Estimate, FloatArray
from validate.multihead_training import exact_length_risks
from validate.tables.comparison import Progress
from validate.trained.runs import TrainedRuns

# The paper's setting.
TASK = RegressionTask(dim=5, context=40, noise=0.1)
# Heads of the layers that Observations 1 to 4 speak of.
HEADS = (1, 2, 3, 4)
# A member's seed is this times the command's seed, plus its number: no two commands share a member.
SEED_STRIDE = 1024
RUNS_WITH_SNAPSHOTS = "snapshots"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a profile trains.

    members: of every ensemble; layer_steps, head_steps: of Adam, for layers and for heads (ω, μ); learning_rate,
    schedule: of Adam; history_every: steps per snapshot; evaluation: contexts of the measurement, at each length;
    lengths: numbers of tokens that models are tested at.
    """

    members: int
    layer_steps: int
    head_steps: int
    learning_rate: float
    schedule: Schedule
    history_every: int
    evaluation: SampleSize
    lengths: tuple[int, ...] = (10, 20, 40, 60, 80, 100)


PLANS = {
    # Ten times the paper's rate, and falling: the valley's floor is reached in a hundredth of the steps.
    "quick": Plan(8, 3000, 6000, 1e-2, "cosine", 50, SampleSize(16, 2, 512)),
    "paper": Plan(4, 500_000, 500_000, 1e-3, "constant", 5000, SampleSize(64, 8, 512)),
}


def member_seeds(seed: int, members: int) -> tuple[int, ...]:
    """Seeds of the members of an ensemble."""
    return tuple(SEED_STRIDE * seed + member for member in range(members))


def layer_config(
    profile: str,
    seed: int,
    heads: int,
    activation: ActivationName = "exp",
    activation_scale: float = 1.0,
    problem: RegressionTask | MultiTaskRegression = TASK,
) -> TrainingConfig:
    """Layers (2.2) from PyTorch's start, with sampled labels."""
    experiment = MultiHead(problem, heads, activation, activation_scale)
    plan = PLANS[profile]
    return _config(experiment, profile, seed, plan.layer_steps, "sampled")


def heads_config(
    profile: str, seed: int, heads: int, activation: ActivationName = "exp", scale: float = 1.0, **start: Any
) -> TrainingConfig:
    """Heads (ω, μ), (3.2), with the loss averaged over teacher and noise; start: fields of `ReducedHeads`."""
    experiment = ReducedHeads(TASK, heads, activation, scale, **start)
    return _config(experiment, profile, seed, PLANS[profile].head_steps, "teacher_averaged")


def _config(experiment: Any, profile: str, seed: int, steps: int, loss: Any) -> TrainingConfig:
    plan = PLANS[profile]
    return TrainingConfig(
        experiment,
        steps=steps,
        learning_rate=plan.learning_rate,
        schedule=plan.schedule,
        loss=loss,
        seeds=member_seeds(seed, plan.members),
        evaluation_seed=seed,
        evaluation=plan.evaluation,
        history_every=plan.history_every,
    )


@dataclass(frozen=True)
class Ensemble:
    """Trained members with scalar circuits, and their path where it was kept.

    trained, recorded: result and path of all members; those whose loss stopped being finite are counted in
    ``diverged`` and left out of all else. omega, mu: shape (members, heads), ω with the factor of the logits; settled:
    members whose heads have both signs, all where there is one head: heads that start with one sign may be trapped in
    a minimum of one sign.
    """

    trained: TrainingResult
    recorded: Snapshots | None = None

    @cached_property
    def result(self) -> TrainingResult:
        """The members that did not diverge."""
        return self.trained.without_diverged()

    @cached_property
    def snapshots(self) -> Snapshots | None:
        """Their path."""
        kept = [member for member in range(self.trained.config.members) if member not in self.trained.diverged]
        return None if self.recorded is None else self.recorded.of_members(kept)

    @property
    def diverged(self) -> int:
        """Members whose loss stopped being finite."""
        return len(self.trained.diverged)

    @property
    def experiment(self) -> MultiHead | ReducedHeads:
        """What was trained."""
        experiment = self.result.config.experiment
        assert isinstance(experiment, MultiHead | ReducedHeads)
        return experiment

    @property
    def heads(self) -> int:
        """Heads of each member."""
        return self.experiment.heads

    @cached_property
    def circuits(self) -> Circuits:
        """Circuits of layers."""
        return circuits_of(self.result.parameters, self.experiment.problem.dim, self.experiment.logit_scale)

    @cached_property
    def _scalars(self) -> tuple[FloatArray, FloatArray]:
        return self._scalars_of(self.result.parameters)

    def _scalars_of(self, parameters: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
        if isinstance(self.experiment, ReducedHeads):
            return self.experiment.logit_scale * parameters["omega"], parameters["mu"]
        return scalars_of(circuits_of(parameters, self.experiment.problem.dim, self.experiment.logit_scale))

    @property
    def omega(self) -> FloatArray:
        """ω of every head."""
        return self._scalars[0]

    @property
    def mu(self) -> FloatArray:
        """μ of every head."""
        return self._scalars[1]

    @cached_property
    def patterns(self) -> HeadPatterns:
        """Patterns of the trained heads."""
        return head_patterns(self.omega, self.mu, slope=self.experiment.head_activation.slope)

    @cached_property
    def departures(self) -> CircuitPatterns:
        """How far the circuits of layers are from scalars."""
        return circuit_patterns(self.circuits)

    @property
    def settled(self) -> npt.NDArray[np.bool_]:
        """Members that are not trapped."""
        return self.patterns.both_signs if self.heads > 1 else np.ones(len(self.omega), dtype=bool)

    @property
    def shown(self) -> int:
        """The member that figures show: the first settled one."""
        return int(np.argmax(self.settled))

    def over_members(self, values: FloatArray) -> Estimate | None:
        """Mean over settled members and its standard error; ``None`` for fewer than two of them."""
        seeds = [seed for seed, kept in zip(self.result.config.seeds, self.settled, strict=True) if kept]
        return over_seeds(np.asarray(values)[self.settled], seeds) if len(seeds) > 1 else None

    def path(self) -> tuple[npt.NDArray[np.int64], FloatArray, FloatArray]:
        """Steps, shape (n,), and ω and μ at them, shape (n, members, heads) each."""
        assert self.snapshots is not None
        return self.snapshots.steps, *self._scalars_of(self.snapshots.parameters)

    def losses_at(self, lengths: Sequence[int], seed: int) -> list[Estimate | None]:
        """Measured loss at other lengths, mean over settled members.

        All members are tested on the same contexts, so that the error is that of one of them, not smaller.
        """
        size = self.result.config.evaluation
        rows = losses_by_length(self.experiment, trained_model(self.result), lengths, size=size, seed=seed)
        return [self._common_mean(row) for row in rows]

    def measured_loss(self) -> Estimate | None:
        """Measured loss at the length of training, as `losses_at`."""
        members = range(self.result.config.members)
        return self._common_mean([self.result.estimate("loss", member) for member in members])

    def _common_mean(self, estimates: Sequence[Estimate]) -> Estimate | None:
        kept = [one for one, settled in zip(estimates, self.settled, strict=True) if settled]
        if not kept:
            return None
        value = float(np.mean([one.value for one in kept]))
        stderr = max(one.stderr for one in kept)
        return Estimate(value, stderr, kept[0].samples, kept[0].chunks, kept[0].seed)

    def exact_losses_at(self, lengths: Sequence[int]) -> FloatArray:
        """Exact risk of the members' (ω, μ) at other lengths, mean over settled members; softmax only."""
        risks = exact_length_risks(TASK, self.omega[self.settled], self.mu[self.settled], lengths)
        return np.asarray(risks.mean(axis=1))


def layers(
    runs: TrainedRuns, configs: Sequence[TrainingConfig], progress: Progress = lambda _: None
) -> list[Ensemble]:
    """Ensembles with their paths; those that are not on disk yet are trained, as all runs are."""
    folder = (_temporary_folder() if runs.folder is None else runs.folder) / RUNS_WITH_SNAPSHOTS
    found = train_many(configs, runs.processes, folder, progress, runs.scheduler, snapshots=True)
    return [Ensemble(one, read_snapshots(one, folder)) for one in found]


def core_configs(profile: str, seed: int, heads: Sequence[int] = HEADS) -> list[TrainingConfig]:
    """Softmax layers of each head count."""
    return [layer_config(profile, seed, count) for count in heads]


@lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    """Where paths are kept when the command keeps no runs: until the process ends."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="attnlaws-"))
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def merged_spread(ensemble: Ensemble) -> FloatArray:
    """Off-diagonal part of the μ-weighted sums of KQ_11 over heads of one sign, relative, (members,)."""
    d = TASK.dim
    key_query = ensemble.circuits.key_query[..., :d, :d]
    found = []
    for sign in (1, -1):
        weight = ensemble.mu * (np.sign(ensemble.mu) == sign)
        total = np.einsum("mh,mhij->mij", weight, key_query)
        mean = np.trace(total, axis1=1, axis2=2) / d
        rest = total - mean[:, None, None] * np.eye(d)
        size = np.where(mean == 0, 1.0, np.abs(mean))
        found.append(np.sqrt((rest**2).sum(axis=(1, 2)) / d) / size)
    return np.asarray(np.max(found, axis=0))


@lru_cache(maxsize=4)
def best_heads(heads: int) -> SoftmaxOptimum:
    """The best heads of the paper's task for the exact risk, one or two. Source: beyond the paper."""
    return optimum(TASK, heads)


def settled_text(ensemble: Ensemble) -> str:
    """How many members are settled, for a row's remark."""
    trapped = int((~ensemble.settled).sum())
    total = len(ensemble.settled)
    remarks = [
        f"mean over {total - trapped} of {total + ensemble.diverged} members",
        *([f"{trapped} trapped with heads of one sign"] if trapped else []),
        *([f"{ensemble.diverged} diverged"] if ensemble.diverged else []),
    ]
    return "; ".join(remarks)


def within(value: float, reference: float, share: float, stderr: float = 0.0) -> bool:
    """Whether a number lies within a share of another, plus two standard errors."""
    return abs(value - reference) <= share * abs(reference) + 2 * stderr
