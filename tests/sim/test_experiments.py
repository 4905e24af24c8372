"""The base of experiments: kinds, JSON, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from sim.contexts import SampleSize
from sim.experiments import base
from sim.experiments.base import Arrays, Experiment, Loss, experiment_from_json, experiment_kinds, register
from sim.experiments.softmax_attention import SoftmaxAttention
from sim.streams import stream
from sim.training import TrainingConfig, train
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError

torch = pytest.importorskip("torch")

MODEL = SoftmaxAttention(TopKTask(PowerLawSpectrum(1, 0.5, 4), 8, 2), 3, (1, 5))


@dataclass(frozen=True, slots=True)
class MeanOfNormals(Experiment):
    """One parameter learns the mean of unit normals around ``mean``; the excess loss is its squared error."""

    mean: float
    kind: ClassVar[str] = "mean of normals"
    losses: ClassVar[tuple[Loss, ...]] = ("sampled",)
    dimensionless: ClassVar[frozenset[str]] = frozenset({"positive"})

    def initial(self, generators: Sequence[np.random.Generator]) -> Any:
        model = torch.nn.Module()
        model.guess = torch.nn.Parameter(torch.zeros(len(generators), dtype=torch.float64))
        return model

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        return (np.stack([self.mean + generator.standard_normal(count) for generator in generators]),)

    def loss(self, model: Any, batch: Any, loss: Loss) -> Any:
        return (model.guess[:, None] - batch[0]).square().mean(dim=-1)

    def measure(self, model: Any, batch: Any) -> Any:
        return {"loss": (model.guess[:, None] - batch[0]).square(), "positive": (batch[0] > 0).double()}

    def unit(self) -> float:
        return 9.0


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type[MeanOfNormals]:
    monkeypatch.setattr(base, "_KINDS", dict(experiment_kinds()))
    return register(MeanOfNormals)


def test_every_kind_is_found_and_names_its_class() -> None:
    kinds = experiment_kinds()
    assert kinds["softmax attention"] is SoftmaxAttention
    for kind, cls in kinds.items():
        assert cls.kind == kind
        assert issubclass(cls, Experiment)


def test_experiments_survive_json() -> None:
    assert experiment_from_json(MODEL.to_json()) == MODEL
    assert MODEL.to_json()["initial_scales"] == [1.0, 5.0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (3, "experiment must be a table of fields, got 3"),
        ({}, "kind must be one of .*softmax attention.*, got None"),
        ({"kind": ["softmax attention"]}, "kind must be one of"),
        ({"kind": "softmax attention"}, "softmax attention needs the field 'problem'"),
        ({**MODEL.to_json(), "rate": 1}, "softmax attention has the fields problem, depth, .* unknown field 'rate'"),
        ({**MODEL.to_json(), "problem": {"type": "Task"}}, "type must be one of"),
        ({**MODEL.to_json(), "problem": 3}, "problem must be a TopKTask, or a CopyTask .*, got 3"),
    ],
)
def test_wrong_tables_are_refused(content: object, sentence: str) -> None:
    with pytest.raises(DomainError, match=sentence):
        experiment_from_json(content)


def test_a_class_of_ones_own_is_trained_and_measured(registered: type[MeanOfNormals]) -> None:
    assert experiment_from_json({"kind": "mean of normals", "mean": 2.0}) == MeanOfNormals(2.0)
    config = TrainingConfig(
        MeanOfNormals(2.0), steps=400, batch=32, loss="sampled", seeds=(0, 1), evaluation=SampleSize(20, 1, 500)
    )
    result = train(config)
    # Adam ends within some hundredths of the mean; the loss is then 1, or 9 in the user's unit, to 5 standard errors.
    assert result.parameters["guess"] == pytest.approx(2.0, abs=0.1)
    assert abs(result.estimate("loss", 1).z_score(9.0)) < 5
    assert abs(result.estimate("positive").z_score(0.97725)) < 5
    with pytest.raises(DomainError, match="loss must be one of sampled, got 'teacher_averaged'"):
        TrainingConfig(MeanOfNormals(2.0))


def test_a_kind_names_one_class(registered: type[MeanOfNormals]) -> None:
    @dataclass(frozen=True)
    class Other(MeanOfNormals):
        pass

    with pytest.raises(DomainError, match="kind must name one experiment"):
        register(Other)
    assert register(MeanOfNormals) is registered


def test_listing_kinds_needs_no_torch() -> None:
    code = "import sys, sim.experiments.base as b; b.experiment_kinds(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_loss_of_predicting_zero_is_the_mean_squared_target() -> None:
    batch = tuple(map(torch.tensor, MODEL.sample([stream(0, "zero")], 50, "sampled")))
    expected = (batch[2] * batch[3]).sum(dim=-1).square().mean(dim=-1)
    assert torch.allclose(MODEL.zero_loss(batch, "sampled"), expected)
