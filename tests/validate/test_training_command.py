"""The command ``train``: files, presets, output, resuming, and refusals in one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.validate.command import run
from validate.cli import EXIT_BAD_INPUT
from validate.commands.training import differences, preset_names, read_configs

pytest.importorskip("torch")

FILE = """
[experiment]
kind = "softmax attention"
depth = 1
[experiment.problem]
type = "TopKTask"
spectrum = { type = "PowerLawSpectrum", input_exponent = 0, teacher_exponent = 0, dim = 3 }
context = 6
top_k = 2
[training]
steps = 12
batch = 8
seeds = [5, 6]
checkpoint_every = 6
evaluation = { chunks = 2, chunk_batches = 1, batch = 16 }
[sweep]
experiment.depth = [2, 1]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf" + FILE.encode())
    assert len(read_configs(path, None)) == 2


def test_runs_are_trained_measured_and_read_back(file: Path, monkeypatch, capsys) -> None:
    status, out, err = run(capsys, "train", str(file), "--workers", "1", "--json")
    assert (status, err) == (0, "")
    runs = json.loads(out)["runs"]
    assert [one["config"]["experiment"]["depth"] for one in runs] == [2, 1]
    assert {"loss", "shared_error", "disagreement"} <= set(runs[0]["measured"])
    assert not {"shared_error", "disagreement"} & set(runs[1]["measured"])
    assert all(len(one["measured"]["loss"]) == 2 for one in runs)
    assert all(Path(one["folder"], "result.json").exists() for one in runs)
    assert {Path(one["folder"]).parent for one in runs} == {Path("runs")}
    status, table, _ = run(capsys, "train", str(file), "--workers", "1", "--out", "runs")
    assert status == 0
    for one in runs:
        assert one["folder"] in table
        assert f"depth {one['config']['experiment']['depth']}" in table
        assert f"{one['measured']['loss'][1]['value']:.6g}" in table


def test_a_damaged_checkpoint_is_named(file: Path, monkeypatch, capsys) -> None:
    _, out, _ = run(capsys, "train", str(file), "--workers", "1", "--json")
    path = Path(json.loads(out)["runs"][0]["folder"]) / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-5])
    status, again, err = run(capsys, "train", str(file), "--workers", "1", "--json")
    assert status == 0
    assert err.count("\n") == 1
    assert err.startswith(f"attnlaws: checkpoint {path} is damaged") or str(path) in err
    assert [one["measured"] for one in json.loads(again)["runs"]] == [
        one["measured"] for one in json.loads(out)["runs"]
    ]


def test_runs_of_other_code_are_named(file: Path, monkeypatch, capsys) -> None:
    with monkeypatch.context() as before:
        before.setattr("sim.training.source_digest", lambda _: "before")
        status, _, err = run(capsys, "train", str(file), "--workers", "1", "--json")
    assert (status, err) == (0, "")
    status, out, err = run(capsys, "train", str(file), "--workers", "1", "--json")
    assert status == 0
    summary, line = err.splitlines()
    assert summary == "attnlaws: 2 runs were made by other code; the first:"
    assert line.startswith("attnlaws: the run in ")
    folder = json.loads(out)["runs"][0]["folder"]
    assert f"{folder} was made by other code (source before, now " in line


def test_a_member_that_diverged_is_shown_as_such(file: Path, monkeypatch, capsys) -> None:
    from sim.training import Training

    usual = Training.batch

    def spoilt(training, name: str, step: int):
        directions, *rest = usual(training, name, step)
        if step >= 6:
            directions[1] = float("nan")
        return directions, *rest

    monkeypatch.setattr(Training, "batch", spoilt)
    status, out, _ = run(capsys, "train", str(file), "--workers", "1", "--json")
    assert status == 0
    first, second = json.loads(out)["runs"][0]["measured"]["loss"]
    assert first["value"] > 0
    assert (second["value"], second["reason"]) == (None, "diverged: the loss was nan at step 7")
    status, table, _ = run(capsys, "train", str(file), "--workers", "1")
    assert status == 0
    assert "diverged, step 7" in table


def test_an_interrupt_says_how_to_go_on(file: Path, monkeypatch, capsys) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.sweep.train_many", interrupted)
    status, _, err = run(capsys, "train", str(file))
    assert status == 130
    assert "the same command goes on from the last checkpoints" in err


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("steps = 12", "step = 12", "unknown field 'step'"),
        ("steps = 12", "steps = 0", "steps must be an integer from 1 to 100000000, got 0"),
        ("steps = 12", "steps = nan", "steps must be an integer"),
        ("steps = 12", "steps = 1979-05-27", "steps must be an integer"),
        ("top_k = 2", "top_k = 7", "top_k must be at most context (6), got 7"),
        ('kind = "softmax attention"', 'kind = "softmax"', "kind must be one of"),
        ("[training]", "[trainings]", "must have the table experiment"),
        ("depth = [2, 1]", "depth = [2, 0]", "depth must be an integer from 1"),
        ("steps = 12", "steps = ", "config.toml must be a TOML file: Invalid value"),
    ],
)
def test_wrong_files_are_refused_in_one_sentence(
    old: str, new: str, sentence: str, file: Path, monkeypatch, capsys
) -> None:
    file.write_text(FILE.replace(old, new))
    status, out, err = run(capsys, "train", str(file))
    assert (status, out) == (EXIT_BAD_INPUT, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


def test_bytes_that_are_not_text_are_refused(file: Path, monkeypatch, capsys) -> None:
    file.write_bytes(b"\xff\xfe")
    status, _, err = run(capsys, "train", str(file))
    assert status == EXIT_BAD_INPUT
    assert "must be a TOML file" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "CONFIG or --preset must be given, and not both"),
        (["config.toml", "--preset", "softmax-tiny"], "CONFIG or --preset must be given, and not both"),
        (["--preset", "huge"], "preset must be one of"),
        (["nowhere.toml"], "does not exist"),
        (["config.toml", "--workers", "0"], "workers must be an integer from 1"),
        (["config.toml", "--scheduler", "tcp://127.0.0.1:x"], "scheduler must be the address of a running"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], sentence: str, file: Path, monkeypatch, capsys) -> None:
    status, _, err = run(capsys, "train", *arguments)
    assert status == EXIT_BAD_INPUT
    assert sentence in err


def test_without_torch_it_names_the_extra(file: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, err = run(capsys, "train", str(file))
    assert status == EXIT_BAD_INPUT
    assert "pip install 'attnlaws[train]'" in err


def test_every_preset_is_a_valid_file(monkeypatch, capsys) -> None:
    status, out, _ = run(capsys, "train", "--list-presets")
    assert status == 0
    assert out.split() == preset_names()
    assert json.loads(run(capsys, "train", "--list-presets", "--json")[1]) == {"presets": preset_names()}
    for name in preset_names():
        configs = read_configs(None, name)
        assert len({one.identity() for one in configs}) == len(configs)
        assert len(set(differences(configs))) == len(configs)
