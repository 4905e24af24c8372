"""Parameters along a training run: kept at every entry of the history, beside the run's other files.

Each is written before the checkpoint of its step, so that it survives what the run survives: an interrupted run goes
on from its last checkpoint and has all snapshots up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sim.runs import SNAPSHOTS
from sim.streams import stream
from sim.training import TrainingConfig, TrainingResult, run_folder, train
from theory.results import DomainError, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Parameters along a run.

    steps: done at each snapshot, from 0 on, shape (n,); parameters: name -> array of shape (n, members, ...).
    """

    steps: IntArray
    parameters: dict[str, FloatArray] = field(repr=False)

    def of_members(self, members: Sequence[int]) -> Snapshots:
        """Those of some members only. Source: no equation."""
        return Snapshots(self.steps, {name: values[:, list(members)] for name, values in self.parameters.items()})


def train_with_snapshots(
    config: TrainingConfig, folder: Path, progress: Callable[[int, float], None] | None = None
) -> tuple[TrainingResult, Snapshots]:
    """Train as `sim.training.train` does, with the same bits, and keep the parameters every ``history_every`` steps.

    folder: where runs are kept; a finished run is only read. Raises DomainError where a run in it has passed steps
    without snapshots, as `train` alone leaves it. Source: no equation.
    """
    result = train(config, folder, progress, snapshots=True)
    return result, read_snapshots(result, folder)


def read_snapshots(result: TrainingResult, folder: Path) -> Snapshots:
    """The snapshots of a run that was trained with them below ``folder``.

    Members that diverged hold what the loop left of them, NaN among it. Raises DomainError where the run has passed
    steps without snapshots. Source: no equation.
    """
    config, own = result.config, run_folder(folder, result.config) / SNAPSHOTS
    model = config.experiment.initial([stream(seed, "initial weights") for seed in config.seeds])
    rows = [{name: value.detach().numpy() for name, value in model.state_dict().items()}]
    steps = [0]
    for step, _ in result.history:
        path = own / f"{step}.npz"
        if not path.exists():
            raise DomainError(
                f"a run must be trained with snapshots from its first step, got none of step {step} in {own}: "
                "give it a folder of its own"
            )
        with np.load(path) as arrays:
            rows.append({name: arrays[name] for name in arrays.files})
        steps.append(step)
    names = rows[0]
    parameters = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in names}
    return Snapshots(np.array(steps, dtype=np.int64), parameters)
