"""Sweeps: the same bits for any number of workers and for dask, dead workers, interrupts, and tables of runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sim.contexts import SampleSize
from sim.experiments.multihead import ReducedHeads
from sim.experiments.softmax_attention import SoftmaxAttention
from sim.origin import OtherCodeWarning
from sim.runs import CHECKPOINT, METRICS, RESULT, CheckpointWarning, read_metrics
from sim.snapshots import read_snapshots
from sim.sweep import WorkerLostError, cost, parted, sweep_configs, train_many
from sim.together import train_all_together, train_together
from sim.training import TrainingConfig, TrainingResult, TrainingStopped, run_folder, train
from theory.problems import PowerLawSpectrum, RegressionTask, TopKTask
from theory.results import DomainError, MissingDependencyError, PrecisionError

pytestmark = pytest.mark.long

pytest.importorskip("torch")

TINY = TrainingConfig(
    SoftmaxAttention(TopKTask(PowerLawSpectrum(0, 0, 3), 6, 2), 2),
    steps=30,
    batch=8,
    evaluation=SampleSize(2, 1, 16),
    history_every=10,
    checkpoint_every=10,
)
# Long enough to be interrupted, whatever the machine.
LONG = replace(TINY, steps=10**6, history_every=10, checkpoint_every=10)


def bits(result: TrainingResult) -> tuple[object, ...]:
    arrays = {name: array.tobytes() for name, array in result.parameters.items()}
    return arrays, result.chunks, result.history


def steps_done(config: TrainingConfig, root: Path) -> int:
    path = run_folder(root, config) / METRICS
    return read_metrics(path)[1]["steps"] if path.exists() else 0


# Local processes


def test_one_and_two_workers_give_the_same_bits_in_order(tmp_path: Path) -> None:
    configs = [replace(TINY, seeds=(seed,)) for seed in (3, 1, 2)]
    configs.append(configs[0])
    here = train_many(configs, workers=1)
    assert [bits(one) for one in here] == [bits(train(one)) for one in configs]
    # A checkpoint that is damaged is found by a worker and named by the parent.
    train(configs[1], tmp_path)
    path = run_folder(tmp_path, configs[1]) / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-1])
    fractions: list[float] = []
    with pytest.warns(CheckpointWarning, match="its checksum does not match"):
        elsewhere = train_many(configs, workers=2, folder=tmp_path, progress=fractions.append)
    assert [bits(one) for one in elsewhere] == [bits(one) for one in here]
    assert [one.config for one in elsewhere] == configs
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert len(fractions) > len(configs)


def heads(**changes: object) -> TrainingConfig:
    fields = {"steps": 30, "batch": 8, "learning_rate": 0.01, "history_every": 10, "checkpoint_every": 10}
    experiment = ReducedHeads(RegressionTask(3, 6, 0.1))
    return TrainingConfig(experiment, evaluation=SampleSize(2, 1, 16), device="cpu", **{**fields, **changes})


def test_runs_of_equal_shape_share_a_pass_and_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [heads(), TINY, heads(learning_rate=0.03), heads(seeds=(1, 2)), heads(batch=9)]
    passes = []
    usual = train_all_together

    def counted(configs: list[TrainingConfig], *arguments: object, **options: bool) -> object:
        passes.append(len(configs))
        return usual(configs, *arguments, **options)

    monkeypatch.setattr("sim.sweep.train_all_together", counted)
    alone = [train(config) for config in configs]
    fractions: list[float] = []
    found = train_many(configs, 1, tmp_path, fractions.append, snapshots=True)
    assert passes == [3]
    assert [bits(one) for one in found] == [bits(one) for one in alone]
    assert (fractions, fractions[-1]) == (sorted(fractions), 1)
    for config, one in zip(configs, found, strict=True):
        assert read_snapshots(one, tmp_path).steps.tolist() == [0, 10, 20, 30]
        assert bits(train(config, tmp_path)) == bits(one)
    # Two processes, of which each has a part of the runs that share a pass.
    assert [bits(one) for one in train_many(configs, 2)] == [bits(one) for one in alone]


def test_runs_are_dealt_out_to_the_workers() -> None:
    configs = [heads(seeds=(seed,), learning_rate=rate) for rate in (0.1, 0.2, 0.3) for seed in (0, 1)]
    assert parted(configs, 1) == [[0, 1, 2, 3, 4, 5]]
    # Those with the same batches stay together.
    assert parted(configs, 2) == [[0, 2, 4], [1, 3, 5]]
    assert sorted(parted(configs, 3)) == [[0, 2], [1, 4], [3, 5]]
    assert sorted(parted(configs, 9)) == [[index] for index in range(6)]
    deep = replace(TINY, experiment=replace(TINY.experiment, depth=50))
    assert parted([TINY, deep, replace(TINY, steps=10**4)], 2) == [[2], [1], [0]]
    assert parted([TINY, deep], 1) == [[0], [1]]


def test_progress_counts_runs_by_their_cost() -> None:
    short, long = TINY, replace(TINY, steps=90)
    assert cost(long) == pytest.approx(3 * cost(short))
    assert cost(replace(short, seeds=(0, 1), batch=16)) == pytest.approx(4 * cost(short))
    fractions: list[float] = []
    train_many([short, long], 1, progress=fractions.append)
    entries = [0.25 * step / 31 for step in (10, 20, 30)] + [0.25]
    entries += [0.25 + 0.75 * step / 91 for step in range(10, 100, 10)] + [1]
    assert fractions == pytest.approx(entries)


def test_runs_of_other_code_are_named_wherever_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [TINY, replace(TINY, seeds=(1,))]
    monkeypatch.setattr("sim.training.source_digest", lambda _: "before")
    train(configs[1], tmp_path)
    monkeypatch.undo()
    for workers in (1, 2):
        with pytest.warns(
            OtherCodeWarning, match=f"{run_folder(tmp_path, configs[1])} .*source before, now"
        ) as caught:
            train_many(configs, workers, tmp_path)
        assert len(caught) == 1


def test_an_error_of_a_run_in_a_shared_pass_is_raised_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [heads(seeds=(seed,)) for seed in range(3)]

    def one_fails(configs: list[TrainingConfig], *arguments: object, **options: bool) -> list[object]:
        return [PrecisionError("the loss must stay finite"), *[train(one, tmp_path) for one in configs[1:]]]

    monkeypatch.setattr("sim.sweep.train_all_together", one_fails)
    for folder in (tmp_path, None):
        with pytest.raises(PrecisionError, match="the loss must stay finite"):
            train_many(configs, 1, folder)


def test_no_config_is_no_work_and_workers_are_validated() -> None:
    assert train_many([]) == []
    with pytest.raises(DomainError, match="workers must be an integer from 1"):
        train_many([TINY], workers=0)


def test_a_run_that_fails_does_not_stop_the_others_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = replace(TINY, steps=40)

    def broken(config: TrainingConfig, *arguments: object, **options: bool) -> TrainingResult:
        if config == bad:
            raise PrecisionError("the loss must stay finite")
        return train(config, *arguments, **options)

    monkeypatch.setattr("sim.sweep.train", broken)
    with pytest.raises(PrecisionError, match="the loss must stay finite"):
        train_many([bad, TINY], workers=1, folder=tmp_path)
    assert (run_folder(tmp_path, TINY) / RESULT).exists()
    with pytest.raises(PrecisionError, match="the loss must stay finite"):
        train_many([bad, LONG], workers=1)


def interrupt_after_a_checkpoint(root: Path, config: TrainingConfig) -> threading.Thread:
    def interrupt() -> None:
        until = time.monotonic() + 120
        while steps_done(config, root) == 0 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def check_that_it_resumes(config: TrainingConfig, root: Path) -> None:
    """The next request goes on from the last checkpoint, and nobody else trains the run."""
    done = steps_done(config, root)
    seen: list[int] = []
    with pytest.raises(TrainingStopped):
        train(config, root, lambda step, _: seen.append(step), lambda: bool(seen))
    assert 0 < done < seen[0] <= done + config.history_every


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_leaves_a_state_that_resumes(workers: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = interrupt_after_a_checkpoint(tmp_path, LONG)
    with pytest.raises(KeyboardInterrupt):
        train_many([LONG, replace(LONG, seeds=(1,))], workers, tmp_path)
    thread.join()
    assert signal.getsignal(signal.SIGINT) == before
    check_that_it_resumes(LONG, tmp_path)


SCRIPT = """
import json, pathlib, sys
from sim.sweep import train_many
from sim.training import config_from_json

if __name__ == "__main__":
    train_many([config_from_json(one) for one in json.loads(sys.argv[2])], 2, pathlib.Path(sys.argv[1]))
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    configs = [LONG, replace(LONG, seeds=(1,))]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), json.dumps([one.to_json() for one in configs])]
    with subprocess.Popen(command) as process:
        until = time.monotonic() + 120
        while not all((run_folder(tmp_path, config) / "lock").exists() for config in configs):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    for config in configs:
        with pytest.raises(TrainingStopped):
            train(config, tmp_path, stop=lambda: True, lock_wait=30)


def test_a_dead_worker_process_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    killer = threading.Thread(target=kill_a_worker, args=(tmp_path,))
    killer.start()
    with pytest.raises(WorkerLostError, match="the same command goes on from the last checkpoints"):
        train_many([LONG, replace(LONG, seeds=(1,))], workers=2, folder=tmp_path)
    killer.join()
    with pytest.raises(TrainingStopped):
        train(LONG, tmp_path, stop=lambda: True, lock_wait=30)


def kill_a_worker(root: Path) -> None:
    """Kill one of our worker processes, once it trains."""
    until = time.monotonic() + 120
    while not (run_folder(root, LONG) / "lock").exists() and time.monotonic() < until:
        time.sleep(0.05)
    multiprocessing.active_children()[0].kill()


# dask


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    distributed = pytest.importorskip("distributed")
    import dask

    settings = {"distributed.admin.tick.limit": "60s", "distributed.worker.daemon": True}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        yield cluster


def kill_dask_worker(cluster, root: Path, config: TrainingConfig) -> None:
    """Kill the worker that has run 0 of a sweep, once that has written a checkpoint."""
    import distributed

    until = time.monotonic() + 120
    while steps_done(config, root) == 0 and time.monotonic() < until:
        time.sleep(0.05)
    with distributed.Client(cluster, set_as_default=False) as client:
        (address,) = [at for at, keys in client.processing().items() if any(key.endswith("-0") for key in keys)]
        (process,) = client.run(os.getpid, workers=[address]).values()
        os.kill(process, signal.SIGKILL)


def test_a_killed_dask_worker_loses_nothing(tmp_path: Path, cluster) -> None:
    victim = replace(TINY, steps=1000, seeds=(7,))
    configs = [victim, TINY]
    here = [train(config) for config in configs]
    killer = threading.Thread(target=kill_dask_worker, args=(cluster, tmp_path, victim))
    killer.start()
    fractions: list[float] = []
    results = train_many(configs, folder=tmp_path, scheduler=cluster.scheduler_address, progress=fractions.append)
    killer.join()
    assert [bits(one) for one in results] == [bits(one) for one in here]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


@pytest.mark.deep
def test_a_killed_dask_worker_loses_nothing_of_runs_in_one_pass(tmp_path: Path, cluster) -> None:
    # Two workers have two runs each of one pass.
    configs = [heads(steps=1200, history_every=100, checkpoint_every=100, seeds=(seed,)) for seed in range(4)]
    here = train_together(configs)
    killer = threading.Thread(target=kill_dask_worker, args=(cluster, tmp_path, configs[0]))
    killer.start()
    results = train_many(configs, folder=tmp_path, scheduler=cluster.scheduler_address)
    killer.join()
    assert [bits(one) for one in results] == [bits(one) for one in here]


def test_an_interrupted_dask_sweep_stops_its_runs(tmp_path: Path, cluster) -> None:
    thread = interrupt_after_a_checkpoint(tmp_path, LONG)
    with pytest.raises(KeyboardInterrupt):
        train_many([LONG], folder=tmp_path, scheduler=cluster.scheduler_address)
    thread.join()
    check_that_it_resumes(LONG, tmp_path)


def test_schedulers_need_a_folder_and_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(DomainError, match="folder must be given with a scheduler"):
        train_many([TINY], scheduler="tcp://127.0.0.1:1")
    monkeypatch.setattr("sim.sweep.CONNECT_SECONDS", 0.5)
    with pytest.raises(DomainError, match="scheduler must be the address of a running dask scheduler, got 'tcp:"):
        train_many([TINY], folder=tmp_path, scheduler="tcp://127.0.0.1:1")
    with pytest.raises(DomainError, match="scheduler must be the address"):
        train_many([TINY], folder=tmp_path, scheduler="no such thing")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'attnlaws\[distributed\]'"):
        train_many([TINY], folder=tmp_path, scheduler="tcp://127.0.0.1:1")


# Tables of runs


TABLE = {
    "experiment": TINY.experiment.to_json(),
    "training": {"steps": 30, "batch": 8, "history_every": 10, "checkpoint_every": 10, "evaluation": {"chunks": 2}},
}


def test_a_table_without_a_sweep_is_one_run() -> None:
    (config,) = sweep_configs(TABLE)
    assert config == replace(TINY, evaluation=SampleSize(chunks=2))


def test_axes_are_combined_with_the_last_one_fastest() -> None:
    spectra = [{"input_exponent": 1}, {"teacher_exponent": 0.5}]
    sweep = {
        "experiment": {"problem": {"spectrum": spectra}, "depth": [1, 4]},
        "training": {"seeds": [[0], [1, 2]]},
    }
    configs = sweep_configs({**TABLE, "sweep": sweep})
    found = [
        (
            one.experiment.problem.spectrum.input_exponent,
            one.experiment.problem.spectrum.teacher_exponent,
            one.experiment.depth,
            one.seeds,
        )
        for one in configs
    ]
    right = [(a, b, depth, seeds) for a, b in ((1, 0), (0, 0.5)) for depth in (1, 4) for seeds in ((0,), (1, 2))]
    assert found == right
    assert len({one.identity() for one in configs}) == 8


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trainig": {}}, "a training file must have the table experiment"),
        ({"experiment": 3}, "experiment must be a table of fields, got 3"),
        ({"experiment": {"kind": "softmax"}}, "kind must be one of"),
        (
            {"experiment": {**TABLE["experiment"], "dept": 3}},
            "softmax attention has the fields .* unknown field 'dept'",
        ),
        ({"training": {"step": 3}}, "training has the fields .* unknown field 'step'"),
        ({"training": {"experiment": {}}}, "training must not have the field 'experiment'"),
        ({"training": {"steps": 0}}, "steps must be an integer from 1"),
        ({"sweep": {"experiment": {"depth": 3}}}, "sweep must hold lists of values .* got experiment.depth"),
        ({"sweep": {"depth": [3]}}, "sweep must hold lists of values .* got depth"),
        ({"sweep": {"experiment": {"depth": []}}}, "sweep must describe 1 to"),
        ({"sweep": {"experiment": {"depth": {"x": [1]}}}}, "sweep must name fields of tables"),
        ({"sweep": {"experiment": {"dept": [1]}}}, "unknown field 'dept'"),
    ],
)
def test_wrong_tables_are_refused_in_one_sentence(change: dict, sentence: str) -> None:
    with pytest.raises(DomainError, match=sentence):
        sweep_configs({**TABLE, **change})
    with pytest.raises(DomainError, match="a training file must have"):
        sweep_configs([TABLE])
