"""The study of the valley: its page is what its table says, and its parts are what they are called."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from theory.multihead.softmax_risk import softmax_risks

pytest.importorskip("torch")

pytestmark = [pytest.mark.tree, pytest.mark.long]
STUDY = Path(__file__).parents[2] / "docs" / "studies" / "valley.py"


@pytest.fixture(scope="module")
def study():
    specification = importlib.util.spec_from_file_location("valley_study", STUDY)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table():
    return pd.read_csv(STUDY.with_suffix(".csv"))


def test_the_page_is_what_the_table_says(study, table):
    assert STUDY.with_suffix(".md").read_text(encoding="utf-8") == study.page(table)
    assert len(table) == len(list(study.settings())) * len(study.STEPS) * study.MEMBERS


def test_what_the_page_says_in_words_is_in_the_table(study, table):
    powers = study.exponents(table)
    assert powers["batch"][0] == pytest.approx(powers["steps"][0] / 2, rel=0.25)
    assert -0.25 < powers["steps"][0] < -0.15
    means = table.groupby(["loss", "rate", "batch", "steps"])["gamma"].mean()
    quiet = means["teacher_averaged"]
    assert (quiet < means["sampled"].reindex(quiet.index)).all()
    for rate in study.RATES:
        assert study.noiseless()[rate][study.STEPS[-1]] < quiet[rate].min()


def test_powers_of_made_up_places_are_found(study, table):
    own = table.assign(gamma=2 * study.effective_time(table) ** -0.2)
    found = study.exponents(own)
    assert [found[name][0] for name in ("rate", "batch", "steps")] == pytest.approx([-0.2, -0.1, -0.2])
    assert study.collapse(own) == pytest.approx((0, 0), abs=1e-10)


def test_the_interpolated_risk_is_the_exact_one(study):
    linear, square = study.valley_risk()
    for gamma, mu in ((0.05, 8.0), (0.137, 3.0), (0.39, 1.1)):
        exact = softmax_risks(study.TASK, (gamma, -gamma), (mu, -mu))
        assert 1.1 - linear(gamma) * mu + square(gamma) * mu**2 == pytest.approx(float(exact), abs=1e-9)


def test_a_recorded_place_is_found_again(study, table, monkeypatch):
    setting = study.Setting(0.003, 64, "sampled")
    monkeypatch.setattr(study, "STEPS", (study.STEPS[0],))
    monkeypatch.setattr(study, "MEMBERS", 2)
    monkeypatch.setattr(
        study.Setting, "config", lambda self, base=study.Setting.config: base(self, 2, study.STEPS[0])
    )
    found = study.trained(setting)
    recorded = table[(table["rate"] == 0.003) & (table["batch"] == 64) & (table["steps"] == study.STEPS[0])]
    # Members do not depend on each other; other machines round otherwise, and noise makes that grow.
    assert found["gamma"].to_numpy() == pytest.approx(recorded["gamma"].to_numpy()[:2], rel=0.02)
    assert np.isfinite(found["excess"]).all()
