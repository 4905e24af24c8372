"""Runs on disk: kill -9 at any moment, damaged files, and the same bits as a run that was left alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sim.origin
from sim.contexts import SampleSize
from sim.convergence import Convergence
from sim.experiments.softmax_attention import SoftmaxAttention
from sim.origin import OtherCodeWarning, distribution_version, source_digest
from sim.runs import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    PREVIOUS,
    REFUSED,
    RESULT,
    CheckpointWarning,
    RunLockedError,
    canonical_json,
    content_hash,
    opened_run,
    read_metrics,
    write_durably,
)
from sim.training import Training, TrainingConfig, TrainingResult, TrainingStopped, run_folder, train
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

CONFIG_OF_RUN = TrainingConfig(
    SoftmaxAttention(TopKTask(PowerLawSpectrum(0.5, 0, 3), 6, 2), 2),
    steps=20,
    batch=8,
    seeds=(0, 1),
    evaluation=SampleSize(2, 1, 16),
    history_every=4,
    checkpoint_every=6,
    device="cpu",
)


def bits(result: TrainingResult) -> tuple[object, ...]:
    arrays = {name: array.tobytes() for name, array in result.parameters.items()}
    return arrays, result.measured, result.chunks, result.history, result.steps


@pytest.fixture(scope="module")
def plain() -> TrainingResult:
    return train(CONFIG_OF_RUN)


def stopped_after(config: TrainingConfig, root: Path, step: int) -> None:
    count = iter(range(1, config.steps + 1))
    with pytest.raises(TrainingStopped, match=f"stopped at step {step} of {config.steps}: run it again"):
        train(config, root, stop=lambda: next(count) == step)


def files(root: Path, config: TrainingConfig = CONFIG_OF_RUN) -> Path:
    return run_folder(root, config)


# Identities and canonical text


def test_canonical_text_has_one_form_per_number() -> None:
    assert (
        canonical_json({"b": 1.0, "a": (1, 2.5)}) == canonical_json({"a": [1, 2.5], "b": 1}) == '{"a":[1,2.5],"b":1}'
    )
    assert content_hash(0.1) != content_hash(np.nextafter(0.1, 1).item())
    assert content_hash(-0.0) == content_hash(0)
    assert content_hash(True) != content_hash(1)
    assert content_hash(1e22) == content_hash(10**22)
    for bad in (float("nan"), float("inf"), {"a": object()}):
        with pytest.raises(DomainError, match="a configuration must hold finite numbers"):
            content_hash(bad)


# A run and its files


def test_a_run_leaves_its_files_and_is_read_back_without_training(tmp_path: Path, plain: TrainingResult) -> None:
    assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)
    folder = files(tmp_path)
    assert {path.name for path in folder.iterdir()} == {CONFIG, METRICS, RESULT, CHECKPOINT, PREVIOUS, "lock"}
    assert folder.name == CONFIG_OF_RUN.identity()[:16]
    assert json.loads((folder / CONFIG).read_text())["config"] == CONFIG_OF_RUN.to_json()
    columns, about = read_metrics(folder / METRICS)
    assert about == {"run": CONFIG_OF_RUN.identity(), "steps": 20, "complete": True}
    assert columns["step"] == [step for step in (4, 8, 12, 16, 20) for _ in range(2)]
    assert columns["loss"] == [loss for _, losses in plain.history for loss in losses]
    assert columns["seed"][:2] == ["0", "1"]
    before = (folder / CHECKPOINT).stat().st_mtime_ns
    seen: list[int] = []
    again = train(CONFIG_OF_RUN, tmp_path, progress=lambda step, _: seen.append(step))
    assert bits(again) == bits(plain)
    assert seen == []
    assert (folder / CHECKPOINT).stat().st_mtime_ns == before


@pytest.mark.parametrize("step", [1, 6, 7, 19])
def test_a_stopped_run_resumes_to_the_same_bits(step: int, tmp_path: Path, plain: TrainingResult) -> None:
    stopped_after(CONFIG_OF_RUN, tmp_path, step)
    columns, about = read_metrics(files(tmp_path) / METRICS)
    assert (about["steps"], about["complete"]) == (step, False)
    assert max(columns["step"], default=0) <= step
    assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)


def test_the_convergence_rule_survives_interruption(tmp_path: Path) -> None:
    config = replace(
        CONFIG_OF_RUN,
        experiment=replace(CONFIG_OF_RUN.experiment, initial_scales=(0.1, 0.1), initial_noise=0.1),
        steps=200,
        batch=64,
        schedule="constant",
        stop_when_converged=Convergence(20, 0.9, 0.99),
    )
    whole = train(config)
    assert whole.converged
    stopped_after(config, tmp_path, 25)
    assert bits(train(config, tmp_path)) == bits(whole)
    assert train(config, tmp_path).converged


def test_a_stop_without_a_folder_says_that_nothing_was_kept() -> None:
    with pytest.raises(TrainingStopped, match="nothing was kept"):
        train(CONFIG_OF_RUN, stop=lambda: True)


def test_another_machine_is_recorded(tmp_path: Path) -> None:
    stopped_after(CONFIG_OF_RUN, tmp_path, 8)
    with opened_run(tmp_path, {}, CONFIG_OF_RUN.identity()) as run:
        state = run.read_checkpoint()
        assert state is not None
        state["numerics"][-1]["threads"] = 4
        run.write_checkpoint(state)
    result = train(CONFIG_OF_RUN, tmp_path)
    assert [one.threads for one in result.earlier_numerics] == [4]
    assert result.numerics.threads == 1
    assert train(CONFIG_OF_RUN, tmp_path) == result


# Other code


def test_runs_record_the_code_that_made_them(plain: TrainingResult) -> None:
    numerics = plain.numerics
    assert (numerics.torch_version, numerics.numpy_version) == (torch.__version__, np.__version__)
    assert numerics.attnlaws_version == distribution_version()
    assert numerics.source == source_digest(SoftmaxAttention)
    assert plain.to_json()["numerics"]["source"] == numerics.source


def made_by(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr("sim.training.source_digest", lambda _: source)


def test_a_run_that_other_code_goes_on_with_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: TrainingResult
) -> None:
    made_by(monkeypatch, "before")
    stopped_after(CONFIG_OF_RUN, tmp_path, 8)
    made_by(monkeypatch, "after")
    sentence = rf"{files(tmp_path)} was made by other code \(source before, now after\) and it goes on from step 8"
    with pytest.warns(OtherCodeWarning, match=sentence) as caught:
        result = train(CONFIG_OF_RUN, tmp_path)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert bits(result) == bits(plain)
    assert [one.source for one in result.earlier_numerics] == ["before"]
    # What was mixed stays mixed, and is told each time.
    with pytest.warns(OtherCodeWarning, match="source before, now after.*is used as it is"):
        assert train(CONFIG_OF_RUN, tmp_path) == result


def test_a_finished_run_of_other_code_is_named_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(CONFIG_OF_RUN, tmp_path)
    train(CONFIG_OF_RUN, tmp_path)
    monkeypatch.setattr("sim.training.distribution_version", lambda: "9.9")
    sentence = f"attnlaws {distribution_version()}, now 9.9.*it is used as it is: remove the folder, or name another"
    with pytest.warns(OtherCodeWarning, match=sentence):
        again = train(CONFIG_OF_RUN, tmp_path)
    assert again == first
    assert again.numerics.attnlaws_version == distribution_version()


def test_a_run_measured_by_other_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(CONFIG_OF_RUN, tmp_path)
    (files(tmp_path) / RESULT).unlink()
    made_by(monkeypatch, "later")
    with pytest.warns(OtherCodeWarning, match="now later"):
        train(CONFIG_OF_RUN, tmp_path)
    monkeypatch.undo()
    with pytest.warns(OtherCodeWarning, match="source later, now"):
        train(CONFIG_OF_RUN, tmp_path)


def test_a_run_from_before_the_code_was_recorded_is_read_and_named(tmp_path: Path, plain: TrainingResult) -> None:
    train(CONFIG_OF_RUN, tmp_path)
    with opened_run(tmp_path, {}, CONFIG_OF_RUN.identity()) as run:
        state, result = run.read_checkpoint(), run.read_result()
        assert state is not None
        assert result is not None
        for name in ("source", "attnlaws_version"):
            del state["numerics"][0][name]
        del result["numerics"]
        run.write_checkpoint(state)
        run.write_result(result)
    with pytest.warns(OtherCodeWarning, match=r"attnlaws not recorded, now .*; source not recorded, now"):
        assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)


def test_the_digest_sees_the_source_and_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own_experiment.py"
    own.write_text("class Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_experiment

    package = tmp_path / "sim"
    shutil.copytree(Path(sim.origin.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("sim.origin.__file__", str(package / "origin.py"))
    digest_of = source_digest.__wrapped__
    usual, first = digest_of(SoftmaxAttention), digest_of(own_experiment.Own)
    assert first != usual
    own.write_text("class Own:\n    more = 1\n")
    assert digest_of(own_experiment.Own) != first
    assert digest_of(type("Typed", (), {"__module__": "typed_in"})) == usual
    with (package / "training.py").open("a") as file:
        file.write("# changed\n")
    assert digest_of(SoftmaxAttention) != usual


# Members that diverge


def test_a_member_that_diverged_is_kept_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: TrainingResult
) -> None:
    usual = Training.batch

    def spoilt(training: Training, name: str, index: int) -> tuple[torch.Tensor, ...]:
        directions, *rest = usual(training, name, index)
        if index >= 9:
            directions[1] = float("nan")
        return directions, *rest

    monkeypatch.setattr(Training, "batch", spoilt)
    whole = train(CONFIG_OF_RUN)
    assert whole.diverged[1].step == 10
    stopped_after(CONFIG_OF_RUN, tmp_path, 13)
    # Loss and batch are fine again after it: what diverged stays so.
    monkeypatch.setattr(Training, "batch", usual)
    assert train(CONFIG_OF_RUN, tmp_path) == whole
    assert train(CONFIG_OF_RUN, tmp_path) == whole
    assert whole.history[1][1][0] == plain.history[1][1][0]
    columns, _ = read_metrics(files(tmp_path) / METRICS)
    assert columns["loss"][1::2] == [plain.history[0][1][1], plain.history[1][1][1], None, None, None]
    content = json.loads((files(tmp_path) / RESULT).read_text(), parse_constant=pytest.fail)["result"]
    assert content["diverged"] == {"1": whole.diverged[1].to_json()}
    assert content["chunks"]["loss"][1] is None


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_in_the_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


def replace_by_a_pickle(path: Path) -> None:
    torch.save({"step": 3}, path)


def replace_by_another_run(path: Path) -> None:
    other = replace(CONFIG_OF_RUN, seeds=(5, 6))
    train(other, path.parent.parent)
    path.write_bytes((run_folder(path.parent.parent, other) / CHECKPOINT).read_bytes())


DAMAGE = {
    truncate: "its checksum does not match",
    empty: "is not a checkpoint of attnlaws",
    flip: "its checksum does not match",
    flip_in_the_header: "its checksum does not match",
    replace_by_a_pickle: "is not a checkpoint of attnlaws",
    replace_by_another_run: "belongs to another run",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("finished", [False, True])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    damage, finished: bool, tmp_path: Path, plain: TrainingResult
) -> None:
    train(CONFIG_OF_RUN, tmp_path) if finished else stopped_after(CONFIG_OF_RUN, tmp_path, 14)
    path = files(tmp_path) / CHECKPOINT
    damage(path)
    seen: list[int] = []
    with pytest.warns(CheckpointWarning, match=f"{CHECKPOINT}.*{DAMAGE[damage]}.*the one before is used"):
        result = train(CONFIG_OF_RUN, tmp_path, progress=lambda step, _: seen.append(step))
    assert bits(result) == bits(plain)
    assert seen[0] == (20 if finished else 16)
    assert path.with_name(CHECKPOINT + REFUSED).exists()
    assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)


def test_a_missing_checkpoint_leaves_the_one_before(tmp_path: Path, plain: TrainingResult) -> None:
    stopped_after(CONFIG_OF_RUN, tmp_path, 14)
    (files(tmp_path) / CHECKPOINT).unlink()
    seen: list[int] = []
    assert bits(train(CONFIG_OF_RUN, tmp_path, progress=lambda step, _: seen.append(step))) == bits(plain)
    assert seen[0] == 16


def test_two_damaged_checkpoints_start_the_run_anew(tmp_path: Path, plain: TrainingResult) -> None:
    stopped_after(CONFIG_OF_RUN, tmp_path, 14)
    for name in (CHECKPOINT, PREVIOUS):
        flip(files(tmp_path) / name)
    with pytest.warns(CheckpointWarning) as caught:
        assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)
    assert [str(one.message).rpartition("; ")[2] for one in caught] == [
        "the one before is used",
        "the run starts anew",
    ]


def test_a_single_damaged_checkpoint_starts_the_run_anew(tmp_path: Path, plain: TrainingResult) -> None:
    stopped_after(CONFIG_OF_RUN, tmp_path, 3)
    flip(files(tmp_path) / CHECKPOINT)
    with pytest.warns(CheckpointWarning, match="the run starts anew"):
        assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"identity": "x"'])
def test_damaged_results_and_configs_are_written_anew(content: bytes, tmp_path: Path, plain: TrainingResult) -> None:
    train(CONFIG_OF_RUN, tmp_path)
    for name in (RESULT, CONFIG):
        (files(tmp_path) / name).write_bytes(content)
    with pytest.warns(CheckpointWarning) as caught:
        assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)
    assert ["config.json is damaged" in str(one.message) for one in caught] == [True, False]
    assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)


def test_a_changed_digit_in_a_result_is_seen(tmp_path: Path, plain: TrainingResult) -> None:
    train(CONFIG_OF_RUN, tmp_path)
    path = files(tmp_path) / RESULT
    digits = repr(plain.chunks["loss"][0][0])
    # The third digit, which no rounding takes back.
    changed = digits[:4] + str((int(digits[4]) + 1) % 10) + digits[5:]
    assert path.read_text().count(digits) == 1
    path.write_text(path.read_text().replace(digits, changed))
    with pytest.warns(CheckpointWarning, match=r"result.json is damaged; the run is measured again"):
        assert bits(train(CONFIG_OF_RUN, tmp_path)) == bits(plain)


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    train(CONFIG_OF_RUN, tmp_path)
    other = replace(CONFIG_OF_RUN, seeds=(7, 8))
    files(tmp_path).rename(run_folder(tmp_path, other))
    with pytest.raises(DomainError, match="must hold the run it is named by"):
        train(other, tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DomainError, match="the run folder must be writable"):
        train(CONFIG_OF_RUN, tmp_path / "file")
    with pytest.raises(DomainError, match="the run folder must be writable"):
        write_durably(tmp_path / "file" / "x", b"")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_durably(tmp_path / "file", b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DomainError, match="file could not be written: No space left on device"):
        write_durably(tmp_path / "file", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


# Locks and kill -9


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        opened_run(tmp_path, CONFIG_OF_RUN.to_json(), CONFIG_OF_RUN.identity()),
        pytest.raises(RunLockedError, match="another process trains the run"),
    ):
        train(CONFIG_OF_RUN, tmp_path)
    train(CONFIG_OF_RUN, tmp_path)


# One process that has imported everything, but used nothing that starts threads, forks children that are killed.
KILLS = textwrap.dedent(
    """
    import dataclasses, hashlib, json, os, pathlib, random, signal, sys, time, warnings
    import pandas, pyarrow.parquet
    from sim.runs import METRICS, read_metrics
    from sim.training import config_from_json, run_folder, train

    root, config = pathlib.Path(sys.argv[1]), config_from_json(json.loads(sys.argv[2]))
    warnings.simplefilter("error")
    train(dataclasses.replace(config, steps=1))  # what torch and Arrow import late
    pyarrow.table({"step": [1]})

    def forked(action):
        # Only children train and read Parquet, whose threads would not survive a fork.
        pid = os.fork()
        if pid == 0:
            try:
                action()
                os._exit(0)
            except BaseException as failure:
                print("child failed", repr(failure), file=sys.stderr, flush=True)
                os._exit(1)
        return pid

    def run(folder):
        result = train(config, folder)
        digest = hashlib.sha256(b"".join(array.tobytes() for array in result.parameters.values()))
        digest.update(repr((result.history, result.chunks)).encode())
        (folder / "digest").write_text(digest.hexdigest())

    def state_of(pid):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def check_metrics(folder):
        path = run_folder(folder, config) / METRICS
        if path.exists():
            columns, about = read_metrics(path)
            assert len(columns["step"]) == len(config.seeds) * (about["steps"] // config.history_every), about
            assert about["complete"] == (about["steps"] == config.steps)

    def honest(folder):
        assert state_of(forked(lambda: check_metrics(folder))) == 0

    def kill_at(number):
        # SIGKILL just before the given call that changes the disk.
        calls = [0]
        def killing(function):
            def wrapped(*arguments, **options):
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls[0] += 1
                return function(*arguments, **options)
            return wrapped
        os.replace, os.fsync = killing(os.replace), killing(os.fsync)

    def every_call():
        number = 0
        while True:
            folder = root / f"call-{number}"
            folder.mkdir()
            status = state_of(forked(lambda: (kill_at(number), run(folder))))
            honest(folder)
            if status != 0:
                assert status == -signal.SIGKILL, status
                assert state_of(forked(lambda: run(folder))) == 0
            yield (folder / "digest").read_text()
            if status == 0:
                return
            number += 1

    def random_moments(kills, longest):
        folder, delays, done = root / "random", random.Random(3), 0
        folder.mkdir()
        while done < kills:
            pid = forked(lambda: run(folder))
            time.sleep(delays.uniform(0.005, longest))
            os.kill(pid, signal.SIGKILL)
            if state_of(pid) == 0:
                break
            done += 1
            honest(folder)
        assert state_of(forked(lambda: run(folder))) == 0
        return done, (folder / "digest").read_text()

    before_calls = list(every_call())
    config = config_from_json(json.loads(sys.argv[3]))
    print(json.dumps([before_calls, random_moments(5, 0.3)]))
    """
)


def digest(result: TrainingResult) -> str:
    digest = hashlib.sha256(b"".join(array.tobytes() for array in result.parameters.values()))
    digest.update(repr((result.history, result.chunks)).encode())
    return digest.hexdigest()


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    short = replace(CONFIG_OF_RUN, steps=12)
    long = replace(CONFIG_OF_RUN, steps=4000, checkpoint_every=20)
    command = [sys.executable, "-c", KILLS, str(tmp_path), *(json.dumps(one.to_json()) for one in (short, long))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    before_calls, (kills, at_random) = json.loads(done.stdout)
    # Killed before each call that changes the disk: config, two checkpoints, three metrics and the result, with three
    # calls each and one for keeping the checkpoint before.
    assert before_calls == (3 * 7 + 1 + 1) * [digest(train(short))]
    # A fast machine may be done before the last kill.
    assert kills >= 3
    assert at_random == digest(train(long))
    leftovers = [path for path in run_folder(tmp_path / "random", long).iterdir() if path.name.startswith(".")]
    assert leftovers == []


@pytest.fixture(autouse=True)
def _no_unexpected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        warnings.simplefilter("error", OtherCodeWarning)
        yield
