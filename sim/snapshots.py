"""Parameters along a training run: kept at every entry of the history, beside the run's other files.

A snapshot is read from the checkpoint that the loop has just written, so that it survives what the run survives: an
interrupted run goes on from its last checkpoint and keeps the snapshots it has.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sim.runs import CHECKPOINT, checkpoint_state, write_durably
from sim.streams import stream
from sim.training import TrainingConfig, TrainingResult, run_folder, train
from theory.results import DomainError, FloatArray, IntArray

SNAPSHOTS = "snapshots"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Parameters along a run.

    steps: done at each snapshot, from 0 on, shape (n,); parameters: name -> array of shape (n, members, ...).
    """

    steps: IntArray
    parameters: dict[str, FloatArray] = field(repr=False)


def train_with_snapshots(
    config: TrainingConfig, folder: Path, progress: Callable[[int, float], None] | None = None
) -> tuple[TrainingResult, Snapshots]:
    """Train as `sim.training.train` does, with the same bits, and keep the parameters every ``history_every`` steps.

    folder: where runs are kept; a finished run is only read. Raises DomainError where a run in it has passed steps
    without snapshots, as `train` alone leaves it. Source: no equation.
    """
    checkpointed = dataclasses.replace(config, checkpoint_every=config.history_every)
    run, identity = run_folder(folder, checkpointed), checkpointed.identity()

    def keep(step: int, loss: float) -> None:
        state = checkpoint_state(run / CHECKPOINT, identity)
        buffer = io.BytesIO()
        np.savez(buffer, **{name: value.numpy() for name, value in state["model"].items()})
        write_durably(run / SNAPSHOTS / f"{step}.npz", buffer.getvalue())
        if progress is not None:
            progress(step, loss)

    result = train(checkpointed, folder, keep)
    return result, _read(config, result, run / SNAPSHOTS)


def _read(config: TrainingConfig, result: TrainingResult, folder: Path) -> Snapshots:
    model = config.experiment.initial([stream(seed, "initial weights") for seed in config.seeds])
    rows = [{name: value.detach().numpy() for name, value in model.state_dict().items()}]
    steps = [0]
    for step, _ in result.history:
        path = folder / f"{step}.npz"
        if not path.exists():
            raise DomainError(
                f"a run must be trained with snapshots from its first step, got none of step {step} in {folder}: "
                "give it a folder of its own"
            )
        with np.load(path) as arrays:
            rows.append({name: arrays[name] for name in arrays.files})
        steps.append(step)
    names = rows[0]
    parameters = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in names}
    return Snapshots(np.array(steps, dtype=np.int64), parameters)
