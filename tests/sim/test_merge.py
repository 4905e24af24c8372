"""Merged estimates against the estimate over all chunks, and what may not be merged."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.contexts import estimate_from_chunks
from sim.montecarlo.merge import MergedEstimate, merge_estimates
from sim.montecarlo.softmax_risk import softmax_risk_estimate
from sim.streams import stream
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import RegressionTask
from theory.results import DomainError, Estimate, Status

# Sums of at most 60 terms of similar size.
ROUNDING = 1e-12


@given(st.lists(st.integers(2, 12), min_size=1, max_size=5), st.integers(1, 1000), st.integers(0, 2**32))
def test_equal_chunks_give_the_estimate_over_all_of_them(counts, size, seed):
    values = np.random.default_rng(seed).normal(3, 2, sum(counts))
    pieces = np.split(values, np.cumsum(counts)[:-1])
    merged = merge_estimates(estimate_from_chunks(p, size * len(p), seed + i) for i, p in enumerate(pieces))
    whole = estimate_from_chunks(values, size * len(values), seed)
    assert merged.value == pytest.approx(whole.value, rel=ROUNDING)
    assert merged.stderr == pytest.approx(whole.stderr, rel=ROUNDING)
    assert (merged.samples, merged.chunks, merged.seed) == (whole.samples, whole.chunks, seed)


def test_a_single_estimate_stays_what_it_is():
    one = Estimate(2.0, 0.1, 100, 10, 7)
    merged = merge_estimates([one])
    assert (merged.value, merged.samples, merged.chunks, merged.seed, merged.parts) == (2.0, 100, 10, 7, (one,))
    assert merged.stderr == pytest.approx(0.1, rel=ROUNDING)


def test_order_and_grouping_do_not_matter():
    parts = [Estimate(1.0 + 0.1 * i, 0.05 * (i + 1), 100 * (i + 1), 4 + i, 10 - i) for i in range(5)]
    whole = merge_estimates(parts)
    shuffled = random.Random(1).sample(parts, len(parts))
    assert merge_estimates(shuffled) == whole
    assert merge_estimates([merge_estimates(shuffled[:2]), *shuffled[2:4], merge_estimates(shuffled[4:])]) == whole


def test_unequal_chunks_are_weighted_and_covered():
    # Parts of 4 chunks of 200 uniform draws and of 40 chunks of 5. The weights are the samples; the number of 1,000
    # intervals that cover leaves 920-975 by chance once in 20,000 seeds.
    covered, repeats = 0, 1000
    for repeat in range(repeats):
        rng = stream(repeat, "unequal chunks")
        few = rng.uniform(0, 2, size=(4, 200)).mean(axis=1)
        many = rng.uniform(0, 2, size=(40, 5)).mean(axis=1)
        merged = merge_estimates([estimate_from_chunks(few, 800, 1), estimate_from_chunks(many, 200, 2)])
        assert merged.value == pytest.approx(0.8 * few.mean() + 0.2 * many.mean(), rel=ROUNDING)
        covered += 1.0 in merged.interval()
    assert 920 <= covered <= 975


def test_sampled_risks_of_several_seeds():
    task, omega, mu = RegressionTask(3, 6, 0.2), [0.5, -0.5], [1.0, -1.0]
    parts = [softmax_risk_estimate(task, omega, mu, relative_error=0.01, seed=seed) for seed in range(6)]
    merged = merge_estimates(parts)
    assert merged.stderr < min(part.stderr for part in parts)
    assert abs(merged.z_score(softmax_risk(task, omega, mu).value)) < 4  # normal to good accuracy: 6e-5, seeds fixed


def test_huge_and_tiny_values_do_not_overflow():
    for scale in (1e-200, 1e200):
        merged = merge_estimates(
            [Estimate(scale, 0.1 * scale, 10, 5, 1), Estimate(1.1 * scale, 0.1 * scale, 10, 5, 2)]
        )
        assert merged.value == pytest.approx(1.05 * scale, rel=ROUNDING)
        assert 0.05 * scale < merged.stderr < 0.1 * scale


def test_exact_values_stay_exact():
    merged = merge_estimates([Estimate(0.0, 0.0, 10, 5, 1), Estimate(0.0, 0.0, 20, 5, 2)])
    assert (merged.value, merged.stderr) == (0.0, 0.0)


def test_status_is_that_of_the_worst_part():
    good = Estimate(1.0, 0.1, 10, 5, 1)
    bad = Estimate(1.0, 0.1, 10, 5, 2, Status.SAMPLE_LIMIT)
    assert merge_estimates([good, Estimate(1.0, 0.1, 10, 5, 3)]).status is Status.DONE
    assert merge_estimates([good, bad]).status is Status.SAMPLE_LIMIT


def test_json_names_the_parts():
    merged = merge_estimates([Estimate(1.0, 0.1, 10, 5, 4), Estimate(2.0, 0.1, 30, 6, 3)])
    content = json.loads(json.dumps(merged.to_json()))
    assert content["parts"] == [{"seed": 3, "samples": 30, "chunks": 6}, {"seed": 4, "samples": 10, "chunks": 5}]
    assert content["value"] == merged.value == 1.75
    assert content["seed"] == 3


def test_the_same_samples_are_not_counted_twice():
    one, two = Estimate(1.0, 0.1, 10, 5, 1), Estimate(2.0, 0.1, 30, 6, 2)
    for estimates in ([one, one], [merge_estimates([one, two]), one], [two, Estimate(1.0, 0.2, 99, 9, 2)]):
        with pytest.raises(DomainError, match=r"different seeds to be independent, got [12] more than once"):
            merge_estimates(estimates)


@pytest.mark.parametrize(("estimates", "words"), [([], "at least one"), ([1.0], "Estimate values, got 1.0")])
def test_what_is_no_estimate_is_refused(estimates, words):
    with pytest.raises(DomainError, match=words):
        merge_estimates(estimates)


def test_merged_estimates_are_estimates():
    merged = merge_estimates([Estimate(1.0, 0.1, 10, 5, 4)])
    assert isinstance(merged, MergedEstimate)
    assert math.isclose(merged.interval().high - 1, 0.1 * 2.7764451052, rel_tol=1e-9)
