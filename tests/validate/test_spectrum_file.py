"""Spectra from files: `attnlaws exponent --spectrum` and `attnlaws floor --spectrum`."""

import csv
import json
from pathlib import Path

import pandas as pd
import pytest

from tests.validate.command import run
from theory.problems import PowerLawSpectrum
from theory.results import DomainError
from validate.spectrum_file import read_spectrum

HEADER = "eigenvalue,teacher\n"
SMALL = HEADER + "1.0,0.5\n0.6,1.0\n0.1,2.0\n"
# Eigenvalues are written with all digits and sorted again: sums differ in the last place.
ROUNDING = 1e-13


def written(folder, text):
    path = folder / "spectrum.csv"
    path.write_text(text, encoding="utf-8")
    return path


def power_law_file(folder, ending, names=("eigenvalue", "teacher")):
    """A file of the power law that ``-a 2 -b 1 --dim 128`` means, in reverse order."""
    spectrum = PowerLawSpectrum(2, 1, dim=128)
    table = pd.DataFrame({names[0]: spectrum.input_variances(), names[1]: spectrum.teacher_variances()})[::-1]
    path = folder / f"spectrum{ending}"
    table.to_csv(path, index=False) if ending == ".csv" else table.to_parquet(path, index=False)
    return path


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_power_law_in_a_file_has_the_risks_of_the_power_law(capsys, tmp_path, ending):
    path = power_law_file(tmp_path, ending)
    status, out, _ = run(capsys, "exponent", "--spectrum", path, "--depths", "1,2,8", "--json")
    found = json.loads(out)
    expected = json.loads(
        run(capsys, "exponent", "-a", "2", "-b", "1", "--dim", "128", "--depths", "1,2,8", "--json")[1]
    )
    assert status == 0
    assert found.keys() == expected.keys()
    assert (found["file"], found["dim"]) == (str(path), 128)
    for name in (
        "risk_constrained", "risk_constrained_best_step", "risk_free", "local_exponent_constrained",
        "local_exponent_free",
    ):  # fmt: skip
        assert found[name] == pytest.approx(expected[name], rel=ROUNDING)
    absent = {"zeta", "constrained", "free_continuum", "free_discrete", "input_exponent", "teacher_exponent"}
    assert {name for name in absent if found[name] is None} == absent
    assert found["risk_free_continuum"] is None
    assert found["asymptotic_reason"]
    assert expected["asymptotic_reason"] is None


def test_columns_of_other_names(capsys, tmp_path):
    path = power_law_file(tmp_path, ".csv", ("lam", "om"))
    status, _, err = run(capsys, "exponent", "--spectrum", path)
    assert status == 2
    assert "--eigenvalue-column must name a column of the table (lam, om), got 'eigenvalue'" in err
    columns = ["--eigenvalue-column", "lam", "--teacher-column", "om"]
    assert run(capsys, "exponent", "--spectrum", path, *columns, "--depths", "1,2")[0] == 0


def test_equal_rows_are_modes_of_their_own(tmp_path):
    spectrum = read_spectrum(written(tmp_path, HEADER + "1,1\n0.5,0\n0.5,0\n"))
    assert spectrum.eigenvalues == (1.0, 0.5, 0.5)
    assert spectrum.teacher == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER + "1,1\n0,1\n0.5,-1\n,1\n", "line 3: eigenvalue 0 is not positive, line 4: teacher -1 is negative"),
        (HEADER + "1,x\n", r"line 2: teacher 'x' is not a number"),
        (HEADER + "1e999,1\n", "line 2: eigenvalue inf is not finite"),
        (HEADER, "no rows"),
        (HEADER + "1,0\n2,0\n", "at least one entry > 0"),
        ("eigenvalue,eigenvalue\n1,2\n", "more than once"),
        ("eigenvalue\n1\n", "--teacher-column must name a column"),
        ("1,2\n3,4\n", "must name the columns"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, text, words):
    with pytest.raises(DomainError, match=words):
        read_spectrum(written(tmp_path, text))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exponent", "--spectrum", "FILE", "-a", "2"], "leave -a out"),
        (["exponent", "--spectrum", "FILE", "--dim", "2"], "leave --dim out"),
        (["exponent", "-a", "2", "-b", "1", "--teacher-column", "x"], "--teacher-column"),
        (["exponent", "--spectrum", "FILE.none"], "No such file"),
        (["exponent", "--spectrum", "FILE", "--modes", "4"], "modes"),
        (["exponent"], "Missing option '-a' / '--input-exponent'"),
        (["floor", "-a", "1", "-b", "1", "--context", "8", "--top-k", "2"], "Missing option '--dim'"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(capsys, tmp_path, arguments, words):
    path = str(written(tmp_path, SMALL))
    status, out, err = run(capsys, *(text.replace("FILE", path) for text in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_table_of_depths_as_csv(capsys, tmp_path):
    path = tmp_path / "risks.csv"
    arguments = ["exponent", "--spectrum", written(tmp_path, SMALL), "--depths", "1,2,4"]
    content = json.loads(run(capsys, *arguments, "--csv", path, "--json")[1])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["depth"] for row in rows] == ["1", "2", "4"]
    for name in ("risk_constrained", "risk_constrained_best_step", "best_step", "risk_free"):
        assert [float(row[name]) for row in rows] == content[name]
    # Three modes: no risk at depth 4, so no exponent towards it, and none beyond the last depth.
    assert [row["local_exponent_free"] for row in rows] == [repr(content["local_exponent_free"][0]), "", ""]
    assert [row["risk_free_continuum"] for row in rows] == ["", "", ""]
    infinite = ["exponent", "-a", "2", "-b", "1", "--depths", "1,2"]
    content = json.loads(run(capsys, *infinite, "--csv", path, "--json")[1])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["risk_free_continuum"]) for row in rows] == content["risk_free_continuum"]


def test_csv_in_an_unwritable_place_is_named_first(capsys, tmp_path, monkeypatch):
    from validate import predictions

    monkeypatch.setattr(predictions, "exponent_prediction", lambda *_: pytest.fail("computed"))
    path = written(tmp_path, SMALL)
    status, _, err = run(capsys, "exponent", "--spectrum", path, "--csv", path / "risks.csv")
    assert status == 2
    assert "folder must be writable" in err


def test_text_modes_and_figure(capsys, tmp_path):
    figure = tmp_path / "risks.svg"
    path = written(tmp_path, SMALL)
    status, out, _ = run(capsys, "exponent", "--spectrum", path, "--depths", "1,2", "--modes", "3", "--plot", figure)
    assert status == 0
    assert "3 modes of" in out
    assert "no asymptotic exponents" in out
    assert "normalised loss" in out
    assert "dim 3" in figure.read_text()
    assert "continuum" not in figure.read_text()


def test_floor_of_a_spectrum_from_a_file(capsys, tmp_path):
    arguments = ["--context", "32", "--top-k", "2", "--rel-error", "0.02", "--json"]
    file = json.loads(run(capsys, "floor", "--spectrum", written(tmp_path, SMALL), *arguments)[1])
    assert file["task"]["spectrum"]["eigenvalues"] == [1.0, 0.6, 0.1]
    assert file["degree"] == 3
    assert 0 < file["value"] < 1.3  # the label variance, which predicting zero reaches
    # Isotropic spectra from a file are exact as those of a power law.
    same = written(tmp_path, HEADER + "1,1\n" * 4)
    exact = json.loads(run(capsys, "floor", "--spectrum", same, *arguments)[1])
    law = json.loads(run(capsys, "floor", "-a", "0", "-b", "0", "--dim", "4", *arguments)[1])
    assert exact["method"] == "exact"
    assert exact["value"] == pytest.approx(law["value"], rel=1e-12)


@pytest.mark.tree
def test_example_of_the_documentation(capsys):
    path = Path(__file__).parents[2] / "docs" / "examples" / "spectrum.csv"
    content = json.loads(run(capsys, "exponent", "--spectrum", path, "--json")[1])
    assert content["dim"] == 5
    assert content["risk_free"][-1] == 0
