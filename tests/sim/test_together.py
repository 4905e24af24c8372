"""Settings of equal shape in one pass: each run is what it is alone, in memory, on disk, and after kill -9."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.contexts import SampleSize
from sim.convergence import Convergence
from sim.divergence import DivergedError
from sim.experiments.linear_attention import LinearLayers
from sim.experiments.multihead import MultiHead, ReducedHeads
from sim.experiments.softmax_attention import SoftmaxAttention
from sim.runs import CHECKPOINT, CONFIG, METRICS, PREVIOUS, RESULT, RunLockedError, checkpoint_state, opened_run
from sim.snapshots import read_snapshots, train_with_snapshots
from sim.together import is_faster_together, shape_of, train_all_together, train_together
from sim.training import Training, TrainingConfig, TrainingResult, TrainingStopped, run_folder, train
from theory.problems import CopyTask, PowerLawSpectrum, RegressionTask, TopKTask
from theory.results import DomainError

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

COMMON: dict[str, Any] = {
    "steps": 12,
    "batch": 8,
    "learning_rate": 0.01,
    "evaluation": SampleSize(2, 1, 16),
    "history_every": 4,
    "checkpoint_every": 6,
    "device": "cpu",
}


def heads(kind: Any = ReducedHeads, noise: float = 0.1, **fields: Any) -> Any:
    return kind(RegressionTask(3, 6, noise), **fields)


def settings(kind: Any, loss: str) -> list[TrainingConfig]:
    """Other noise, activations, starts, rates, schedules, seeds, and numbers of members and steps."""
    start = {"initial_omega": (0.2, -0.1), "initial_mu": (0.5, -0.5)} if kind is ReducedHeads else {}
    linear = {"activation": "x/L", "logit_scaling": "root width"}
    return [
        TrainingConfig(heads(kind), loss=loss, seeds=(0, 1), **COMMON),
        TrainingConfig(heads(kind, 0.3, activation="1+tanh"), loss=loss, seeds=(0, 1), **COMMON),
        TrainingConfig(
            heads(kind, activation="(1+Cx)^2", activation_scale=0.5, **start),
            loss=loss,
            seeds=(0, 1),
            **{**COMMON, "learning_rate": 0.03, "schedule": "constant", "warmup": 3},
        ),
        TrainingConfig(heads(kind, **linear), loss=loss, seeds=(7, 8, 9), **{**COMMON, "steps": 9}),
        TrainingConfig(heads(kind, shared_contexts=True), loss=loss, seeds=(2, 3), **COMMON),
        TrainingConfig(heads(kind), loss=loss, seeds=(5,), **COMMON),
    ]


def spectra(loss: str, members: int = 2) -> list[TrainingConfig]:
    """Softmax attention on other spectra, from other starts, at other rates."""
    models = [
        SoftmaxAttention(TopKTask(PowerLawSpectrum(a, b, 4), 8, k), 3, (1, high))
        for a, b, k, high in ((0, 0, 2, 50), (1, 0.5, 2, 20), (0.5, 0, 3, 50))
    ]
    return [
        TrainingConfig(
            model,
            loss=loss,
            seeds=tuple(range(3 * i, 3 * i + members)),
            **{**COMMON, "learning_rate": 0.05 * (1 + i)},
        )
        for i, model in enumerate(models)
    ]


def bits(result: TrainingResult) -> tuple[object, ...]:
    arrays = {name: array.tobytes() for name, array in result.parameters.items()}
    return arrays, result.measured, result.chunks, result.history, result.steps, result.converged, result.config


@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
@pytest.mark.parametrize("kind", [ReducedHeads, MultiHead])
def test_heads_in_one_pass_have_the_bits_of_heads_alone(kind: Any, loss: str) -> None:
    configs = settings(kind, loss)
    assert [bits(one) for one in train_together(configs)] == [bits(train(config)) for config in configs]


# float32 products of more matrices at a time may round differently, and steps of Adam carry that on. Measured: no
# difference for three members, below 1e-5 for single ones.
SAME_RUN = 1e-3


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
def test_softmax_attention_in_one_pass_is_softmax_attention_alone(loss: str, members: int) -> None:
    configs = spectra(loss, members)
    for together, config in zip(train_together(configs), configs, strict=True):
        alone = train(config)
        assert (together.config, together.steps) == (config, alone.steps)
        for name, array in alone.parameters.items():
            assert together.parameters[name] == pytest.approx(array, rel=SAME_RUN, abs=SAME_RUN)
        for name in alone.measured:
            for member in range(members):
                right = alone.estimate(name, member).value
                assert together.estimate(name, member).value == pytest.approx(right, rel=SAME_RUN, abs=1e-9)


def test_which_runs_can_share_a_pass() -> None:
    first, second, *_ = settings(MultiHead, "sampled")
    linear = TrainingConfig(LinearLayers(CopyTask(PowerLawSpectrum(1, 1, 4)), 2), device="cpu")
    softmax = spectra("sampled")[0]
    assert shape_of(first) == shape_of(second) != shape_of(replace(first, batch=9))
    assert shape_of(first) != shape_of(replace(first, loss="teacher_averaged"))
    assert shape_of(linear) is shape_of(replace(first, compile=True)) is None
    assert [is_faster_together(one) for one in (first, softmax, linear)] == [True, False, False]
    for configs in ([first, replace(first, batch=9)], [linear], [first, softmax]):
        with pytest.raises(DomainError, match="configs must have one shape to be trained in one pass"):
            train_together(configs)
    with pytest.raises(DomainError, match="configs must all be different"):
        train_together([first, replace(first, checkpoint_every=5)])
    with pytest.raises(DomainError, match="folder must be given where snapshots are kept"):
        train_together([first], snapshots=True)
    assert train_together([]) == []


def test_batches_that_runs_have_in_common_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    usual = Training.batch
    monkeypatch.setattr(Training, "batch", lambda one, name, step: drawn.append(step) or usual(one, name, step))
    first = settings(ReducedHeads, "sampled")[0]
    train_together([first, replace(first, learning_rate=0.1), replace(first, seeds=(0, 2))])
    assert drawn == [step for step in range(12) for _ in range(2)]


# On disk


def check_files(root: Path, config: TrainingConfig) -> None:
    names = {path.name for path in run_folder(root, config).iterdir()}
    assert names == {CONFIG, METRICS, RESULT, CHECKPOINT, PREVIOUS, "lock"}


def no_step(step: int, loss: float) -> None:
    pytest.fail("a finished run was trained again")


def test_runs_in_one_pass_leave_the_files_of_runs_alone(tmp_path: Path) -> None:
    configs = settings(MultiHead, "sampled")[:4]
    seen: list[tuple[int, int]] = []
    together = train_together(configs, tmp_path / "together", lambda index, step, _: seen.append((index, step)))
    assert [step for index, step in seen if index == 3] == [4, 8, 9]
    assert [step for index, step in seen if index == 0] == [4, 8, 12]
    for config, result in zip(configs, together, strict=True):
        alone = train(config, tmp_path / "alone")
        for root in (tmp_path / "together", tmp_path / "alone"):
            check_files(root, config)
        states = [
            checkpoint_state(run_folder(root, config) / CHECKPOINT, config.identity())
            for root in (tmp_path / "together", tmp_path / "alone")
        ]
        assert_equal(states[0], states[1])
        # Found again by the config alone, and the other way round.
        assert bits(train(config, tmp_path / "together", no_step)) == bits(result) == bits(alone)
    again = train_together(configs, tmp_path / "alone", lambda *_: pytest.fail("trained again"))
    assert [bits(one) for one in again] == [bits(one) for one in together]


def assert_equal(first: Any, second: Any, name: str = "") -> None:
    """The same content; only times may differ."""
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second), name
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_equal(value, second[key], f"{name}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other, name)
    elif not name.endswith("seconds"):
        assert first == second, name


def stopped_after(configs: list[TrainingConfig], root: Path, step: int) -> None:
    count = iter(range(1, 1000))
    with pytest.raises(TrainingStopped, match=f"stopped at step {step} of .*: run it again"):
        train_together(configs, root, stop=lambda: next(count) == step)


@pytest.mark.parametrize("step", [1, 6, 11])
def test_runs_that_were_stopped_in_one_pass_resume_in_any_company(step: int, tmp_path: Path) -> None:
    configs = settings(ReducedHeads, "sampled")
    whole = [bits(train(config)) for config in configs]
    stopped_after(configs, tmp_path, step)
    assert bits(train(configs[1], tmp_path)) == whole[1]
    assert [bits(one) for one in train_together(configs[:3], tmp_path)] == whole[:3]
    assert [bits(one) for one in train_together(configs, tmp_path)] == whole


def test_runs_at_different_steps_wait_for_the_last(tmp_path: Path) -> None:
    configs = settings(MultiHead, "sampled")[:3]
    whole = [bits(train(config)) for config in configs]
    for config, step in zip(configs, (3, 8), strict=False):
        stopped_after([config], tmp_path, step)
    seen: list[tuple[int, int]] = []
    results = train_together(configs, tmp_path, lambda index, step, _: seen.append((step, index)))
    assert [bits(one) for one in results] == whole
    assert seen == [(4, 0), (4, 2), (8, 0), (8, 2), (12, 0), (12, 1), (12, 2)]


def test_another_process_is_respected(tmp_path: Path) -> None:
    configs = settings(ReducedHeads, "sampled")[:2]
    with (
        opened_run(tmp_path, configs[1].to_json(), configs[1].identity()),
        pytest.raises(RunLockedError, match="another process trains the run"),
    ):
        train_together(configs, tmp_path)
    train_together(configs, tmp_path)


def test_runs_that_converge_leave_the_others(tmp_path: Path) -> None:
    rule = Convergence(20, 0.9, 0.99)
    config = TrainingConfig(
        heads(initial_omega=(0.3, -0.3), initial_mu=(0.5, -0.5)),
        **{**COMMON, "steps": 200, "batch": 32, "schedule": "constant"},
        stop_when_converged=rule,
    )
    configs = [config, replace(config, seeds=(1, 2), learning_rate=0.03), replace(config, stop_when_converged=None)]
    alone = [train(one) for one in configs]
    assert alone[0].converged
    assert not alone[2].converged
    stopped_after(configs, tmp_path, 25)
    assert [bits(one) for one in train_together(configs, tmp_path)] == [bits(one) for one in alone]


def test_snapshots_of_runs_in_one_pass(tmp_path: Path) -> None:
    configs = settings(ReducedHeads, "sampled")[:4]
    results = train_together(configs, tmp_path / "together", snapshots=True)
    for config, result in zip(configs, results, strict=True):
        _, alone = train_with_snapshots(config, tmp_path / "alone")
        found = read_snapshots(result, tmp_path / "together")
        assert found.steps.tolist() == alone.steps.tolist()
        assert all(np.array_equal(found.parameters[name], alone.parameters[name]) for name in ("omega", "mu"))


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = settings(ReducedHeads, "sampled")
    whole = [train(config) for config in configs]
    usual = Training.batch

    def spoilt(training: Training, name: str, step: int) -> tuple[torch.Tensor, ...]:
        length, *rest = usual(training, name, step)
        if training.config.seeds == (5,) and step >= 6:
            length[0] = float("nan")
        if training.config.seeds == (7, 8, 9) and step >= 3:
            length[1] = float("nan")
        return length, *rest

    monkeypatch.setattr(Training, "batch", spoilt)
    found = train_all_together(configs, tmp_path)
    assert isinstance(found[5], DivergedError)
    assert found[5].args[0].startswith("the loss must stay finite, got nan at step 7 with seed 5")
    assert [bits(found[index]) for index in (0, 1, 2, 4)] == [bits(whole[index]) for index in (0, 1, 2, 4)]
    assert isinstance(found[3], TrainingResult)
    assert list(found[3].diverged) == [1]
    assert bits(train(configs[3], tmp_path))[1:] == bits(found[3])[1:]
    with pytest.raises(DivergedError, match="got nan at step 7 with seed 5"):
        train_together(configs)


# One process that has imported everything forks children that are killed before some of their calls to the disk.
KILLS = textwrap.dedent(
    """
    import hashlib, json, os, pathlib, signal, sys, warnings
    import pandas, pyarrow.parquet
    from sim.together import train_together
    from sim.training import config_from_json

    root, configs = pathlib.Path(sys.argv[1]), [config_from_json(one) for one in json.loads(sys.argv[2])]
    warnings.simplefilter("error")
    train_together(configs)  # what torch and Numba load late

    def forked(action):
        pid = os.fork()
        if pid == 0:
            try:
                action()
                os._exit(0)
            except BaseException as failure:
                print("child failed", repr(failure), file=sys.stderr, flush=True)
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def run(folder):
        digest = hashlib.sha256()
        for result in train_together(configs, folder, snapshots=True):
            digest.update(b"".join(array.tobytes() for array in result.parameters.values()))
            digest.update(repr((result.history, result.chunks)).encode())
        (folder / "digest").write_text(digest.hexdigest())

    def kill_at(number):
        calls = [0]
        def killing(function):
            def wrapped(*arguments, **options):
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls[0] += 1
                return function(*arguments, **options)
            return wrapped
        os.replace, os.fsync = killing(os.replace), killing(os.fsync)

    digests, number, status = [], 0, None
    while status != 0:
        folder = root / f"call-{number}"
        folder.mkdir()
        status = forked(lambda: (kill_at(number), run(folder)))
        if status != 0:
            assert status == -signal.SIGKILL, status
            assert forked(lambda: run(folder)) == 0
        digests.append((folder / "digest").read_text())
        number += 11
    print(json.dumps(digests))
    """
)


@pytest.mark.deep
def test_kill_9_loses_nothing_of_runs_in_one_pass(tmp_path: Path) -> None:
    first, second, _, third, *_ = settings(ReducedHeads, "sampled")
    configs = [replace(one, checkpoint_every=3) for one in (first, second, third)]
    command = [sys.executable, "-c", KILLS, str(tmp_path), json.dumps([one.to_json() for one in configs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256()
    for result in (train(one) for one in configs):
        digest.update(b"".join(array.tobytes() for array in result.parameters.values()))
        digest.update(repr((result.history, result.chunks)).encode())
    digests = json.loads(done.stdout)
    # Three runs make more than 140 calls that change the disk; every eleventh was the last one of a process.
    assert len(digests) > 12
    assert set(digests) == {digest.hexdigest()}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
