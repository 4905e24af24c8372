"""The example losses and the coverage study are what their scripts write."""

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest

pytestmark = pytest.mark.tree
DOCS = Path(__file__).parents[2] / "docs"


def script(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_losses_are_what_their_script_writes():
    assert (DOCS / "examples/fit_losses.csv").read_text() == script("examples/fit_losses").text()


def test_the_study_page_is_what_its_table_says():
    study = script("studies/fit_coverage")
    table = pd.read_csv(DOCS / "studies/fit_coverage.csv")
    assert (DOCS / "studies/fit_coverage.md").read_text() == study.page(table)
    counted = table[table["group"] != "bootstrap"]
    assert len(counted) == len(list(study.settings()))
    # What the page on fits says of 5 to 9 depths from one on, and of designs that identify nothing.
    regular = counted[counted["group"] == "floor and decay alike"]
    profile, student = regular[study.KINDS["profile"]], regular[study.KINDS["student"]]
    assert profile.min().min() >= study.TARGET[0]
    assert profile.max().max() <= study.TARGET[1]
    assert student.min().min() >= study.TARGET[0]
    assert student.max().max() <= 0.97
    hopeless = counted[counted["group"] == "hopeless design"]
    assert hopeless["student_exponent"].min() < 0.6
    assert hopeless[study.KINDS["profile"]].min().min() >= study.TARGET[0]


def test_one_setting_of_the_study_is_recounted():
    study = script("studies/fit_coverage")
    table = pd.read_csv(DOCS / "studies/fit_coverage.csv")
    row = study.coverage(next(study.settings()))
    recorded = table.iloc[0]
    # Two in 2,000 repeats may lie so close to an end that rounding decides.
    assert {name: recorded[name] for name in row} == pytest.approx(row, abs=0.001)
