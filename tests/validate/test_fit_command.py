"""The command ``attnlaws fit``: JSON, tables for people, plots, and refusals in one sentence."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from sim.streams import stream
from tests.validate.command import run
from validate.power_law_fit import fit_power_law

DEPTHS = 2.0 ** np.arange(9)


@pytest.fixture
def losses(tmp_path):
    """A file of noisy losses."""
    path = tmp_path / "losses.csv"
    values = (0.5 + 0.5 / DEPTHS) * np.exp(0.01 * stream(8, "command").standard_normal(9))
    pd.DataFrame({"depth": DEPTHS.astype(int), "loss": values}).to_csv(path, index=False)
    return path


def csv(tmp_path, depths, values, name="table.csv"):
    path = tmp_path / name
    path.write_text("depth,loss\n" + "".join(f"{x},{y!r}\n" for x, y in zip(depths, map(float, values), strict=True)))
    return path


def test_json_has_the_promised_keys(capsys, losses):
    status, out, _ = run(capsys, "fit", losses, "--json", "--draws", "200")
    content = json.loads(out)
    assert status == 0
    assert {"floor", "coefficient", "exponent", "r2", "identifiable", "reason"} <= set(content)
    for name in ("floor", "coefficient", "exponent"):
        number = content[name]
        assert {"value", "stderr", "interval"} <= set(number)
        assert set(number["intervals"]) == {"student", "profile", "bootstrap"}
        assert number["interval"]["low"] < number["value"] < number["interval"]["high"]
    assert content["identifiable"] is True
    assert [step["smallest_depth"] for step in content["scan"]] == DEPTHS[:7].tolist()
    assert len(content["models"]) == 4
    assert content["repeated_runs"] is None
    # The file has been read to the last digit.
    values = pd.read_csv(losses, dtype=str)["loss"].map(float)
    assert content["exponent"]["value"] == fit_power_law(DEPTHS, values, draws=0).exponent.value


def test_tables_for_people(capsys, losses, tmp_path):
    plot = tmp_path / "fit.svg"
    status, out, _ = run(capsys, "fit", losses, "--draws", "100", "--plot", plot)
    assert status == 0
    for words in ("identified", "Student", "profile", "bootstrap", "laws compared", "from the smallest depth on"):
        assert words in out
    assert "residual, %" in plot.read_text()


def test_the_plot_counts_points_that_a_log_axis_cannot_show(capsys, tmp_path):
    path = csv(tmp_path, DEPTHS, [9, 1.01, 1, 0.99, 1, 1, 1.01, 1, 1])
    plot = tmp_path / "fit.svg"
    assert run(capsys, "fit", path, "--plot", plot, "--draws", "0")[0] == 0
    text = plot.read_text()
    assert "at or below the floor" in text
    assert "exponent not identified" in text


def test_trap_1_by_the_command(capsys, tmp_path):
    content = json.loads(run(capsys, "fit", csv(tmp_path, DEPTHS, 0.5 + 0.02 / DEPTHS), "--json")[1])
    assert content["exponent"]["value"] == pytest.approx(1, abs=1e-6)
    assert content["identifiable"] is True


def test_trap_3_by_the_command(capsys, tmp_path):
    depths = np.array([8.0, 10, 12, 14, 16])
    status, out, _ = run(capsys, "fit", csv(tmp_path, depths, 0.3 + depths**-0.5), "--json")
    content = json.loads(out)
    assert status == 0
    assert content["identifiable"] is False
    assert content["exponent"]["interval"]["low"] < 0.25
    assert content["exponent"]["interval"]["high"] > 1
    assert "NOT IDENTIFIED" in run(capsys, "fit", csv(tmp_path, depths, 0.3 + depths**-0.5))[1]


def test_open_ends_are_null_with_a_reason(capsys, tmp_path):
    path = csv(tmp_path, DEPTHS, [9, 1.01, 1, 0.99, 1, 1, 1.01, 1, 1])
    content = json.loads(run(capsys, "fit", path, "--json", "--draws", "0")[1])
    assert content["exponent"]["interval"]["high"] is None
    assert content["exponent"]["interval"]["reason"]
    assert "open" in run(capsys, "fit", path, "--draws", "0")[1]


def test_variants(capsys, losses, tmp_path):
    pure = json.loads(run(capsys, "fit", losses, "--no-floor", "--json", "--draws", "50")[1])
    assert (pure["floor"]["value"], pure["floor"]["reason"]) == (0, "held at 0")
    one = json.loads(run(capsys, "fit", losses, "--exponent-one", "--json", "--draws", "50")[1])
    assert (one["exponent"]["value"], one["exponent"]["reason"]) == (1, "held fixed")
    gap = json.loads(run(capsys, "fit", csv(tmp_path, DEPTHS, 2 - 0.3 / DEPTHS), "--gap", "2", "--json")[1])
    assert gap["exponent"]["value"] == pytest.approx(1, rel=1e-10)
    assert gap["law"].startswith("2.0 - loss")


def test_repeated_runs_and_weights(capsys, tmp_path):
    depths = np.repeat(DEPTHS[:6], 2)
    values = (0.5 + 0.5 / depths) * np.exp(0.01 * stream(9, "runs").standard_normal(12))
    path = tmp_path / "runs.tsv"
    pd.DataFrame({"depth": depths, "loss": values, "stderr": 0.01 * values}).to_csv(path, sep="\t", index=False)
    status, out, _ = run(capsys, "fit", path, "--stderr", "stderr", "--draws", "50")
    assert status == 0
    assert "repeated runs scatter by" in out
    assert "average weight" in out
    content = json.loads(run(capsys, "fit", path, "--json", "--draws", "0")[1])
    assert content["repeated_runs"]["degrees_of_freedom"] == 6
    assert "--stderr stderr" in content["notes"][0]


def test_the_same_seed_gives_the_same_output(capsys, losses):
    one = run(capsys, "fit", losses, "--json", "--exponent-one", "--seed", "3", "--draws", "50")[1]
    assert run(capsys, "fit", losses, "--json", "--exponent-one", "--seed", "3", "--draws", "50")[1] == one


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--x", "width"], ["--x", "width", "depth, loss"]),
        (["--level", "1"], ["level", "1"]),
        (["--level", "x"], ["--level", "'x'"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--draws", "0.5"], ["draws", "0.5"]),
        (["--gap", "0.6"], ["gap to the floor 0.6 must be > 0", "line 2"]),
        (["--gap", "2", "--no-floor"], ["--gap"]),
        (["--gap", "nan"], ["gap", "nan"]),
        (["--plot", "fit.bmp"], ["--plot", "fit.bmp"]),
        (["--stderr", "error"], ["--stderr", "error"]),
    ],
)
def test_bad_options_are_one_sentence(capsys, losses, arguments, words):
    status, out, err = run(capsys, "fit", losses, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ("depth,loss\n1,1\n2,0.7\n", ["3 or more different depths", "2"]),
        ("depth,loss\n1,1\n2,0\n4,0.5\n8,0.4\n", ["line 3", "not positive"]),
        ("depth,loss\n1,1\n2,nan\n4,0.5\n8,0.4\n", ["line 3", "missing"]),
        ("depth,loss\n1,1\n2,1.1\n4,1.2\n8,1.3\n", ["must fall with depth"]),
        (b"PAR1\x00\x00", ["Parquet"]),
    ],
)
def test_bad_files_are_one_sentence(capsys, tmp_path, content, words):
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = run(capsys, "fit", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in err


def test_help_has_an_example_and_a_missing_file_is_named(capsys, tmp_path):
    status, out, _ = run(capsys, "fit", "--help")
    assert status == 0
    assert "Example:  attnlaws fit" in out
    status, _, err = run(capsys, "fit", tmp_path / "nowhere.csv")
    assert status == 2
    assert "nowhere.csv" in err


def test_help_of_the_command_imports_no_pandas():
    code = "import sys, validate.commands.group; print('pandas' in sys.modules or 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
