"""Snapshots hold the parameters that the run passed through, and survive an interruption."""

from __future__ import annotations

import numpy as np
import pytest

from sim.contexts import SampleSize
from sim.experiments.multihead import ReducedHeads
from sim.snapshots import train_with_snapshots
from sim.training import TrainingConfig, train
from theory.problems import RegressionTask
from theory.results import DomainError

pytestmark = pytest.mark.long

pytest.importorskip("torch")


def config(steps: int = 6, history_every: int = 2) -> TrainingConfig:
    return TrainingConfig(
        ReducedHeads(RegressionTask(2, 4, 0.1)),
        steps=steps,
        batch=8,
        learning_rate=0.01,
        schedule="constant",
        seeds=(1, 2),
        history_every=history_every,
        evaluation=SampleSize(2, 1, 8),
    )


def test_snapshots_are_the_parameters_of_shorter_runs(tmp_path):
    result, snapshots = train_with_snapshots(config(steps=5), tmp_path)
    assert snapshots.steps.tolist() == [0, 2, 4, 5]
    assert snapshots.parameters["omega"].shape == (4, 2, 2)
    shorter = train(config(steps=4))
    for name, values in snapshots.parameters.items():
        assert np.array_equal(values[-1], result.parameters[name])
        assert np.array_equal(values[2], shorter.parameters[name])
    assert not np.array_equal(snapshots.parameters["omega"][0], snapshots.parameters["omega"][1])


def test_training_with_snapshots_has_the_bits_of_training(tmp_path):
    result, first = train_with_snapshots(config(), tmp_path)
    assert np.array_equal(result.parameters["mu"], train(config()).parameters["mu"])
    _, again = train_with_snapshots(config(), tmp_path)
    assert np.array_equal(first.parameters["mu"], again.parameters["mu"])


def test_an_interrupted_run_keeps_its_snapshots(tmp_path):
    class PowerCutError(Exception):
        pass

    def cut(step: int, loss: float) -> None:
        if step == 4:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        train_with_snapshots(config(), tmp_path / "cut", cut)
    _, resumed = train_with_snapshots(config(), tmp_path / "cut")
    _, whole = train_with_snapshots(config(), tmp_path / "whole")
    assert resumed.steps.tolist() == whole.steps.tolist()
    for name, values in whole.parameters.items():
        assert np.array_equal(values, resumed.parameters[name])


def test_a_run_without_snapshots_is_refused(tmp_path):
    train(config(), tmp_path)
    with pytest.raises(DomainError, match="from its first step"):
        train_with_snapshots(config(), tmp_path)
