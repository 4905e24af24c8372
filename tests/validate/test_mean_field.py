import numpy as np
import pytest

from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError, Status
from validate import mean_field
from validate.mean_field import mean_field_floor, mean_field_floors

pytestmark = pytest.mark.long


def task(dim=3, context=6, top_k=2, a=0.0, b=0.0):
    return TopKTask(PowerLawSpectrum(a, b, dim), context, top_k)


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    monkeypatch.setitem(mean_field.PROFILES, "quick", mean_field.Effort(0.05, 3, 5, 2))


@pytest.fixture(scope="module")
def found():
    mean_field.PROFILES["module"] = mean_field.Effort(0.05, 3, 5, 2)
    try:
        return mean_field_floor(task(), seed=3, profile="module")
    finally:
        del mean_field.PROFILES["module"]


def test_floor_lies_below_one_layer_and_finite_depth(found):
    assert 0 < found.floor.value < found.single_layer.value
    assert found.in_sample <= found.cross_fitted
    losses = list(found.best_at_depth.values())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] > found.floor.value
    assert (np.diff(found.risk([1, 2, 4, 1000])) < 0).all()
    # The best law at depth L does no worse than the law of infinite depth; both carry the pilot's noise.
    assert losses[0] <= found.risk(1) * 1.02


def test_law_is_a_probability(found):
    assert found.law.sum() == pytest.approx(1)
    assert (found.law > 0).all()
    assert found.gain > 0


def test_same_bits_for_any_number_of_workers():
    one, two = (mean_field_floor(task(), seed=4, workers=workers) for workers in (1, 2))
    assert one.floor == two.floor
    np.testing.assert_array_equal(one.weights, two.weights)


def test_isotropic_floors_are_proportional_to_the_teacher():
    tasks = [task(b=0.0), task(b=1.0)]
    flat, steep = mean_field_floors(tasks, seed=5)
    ratio = tasks[1].spectrum.teacher_variances().sum() / 3
    assert steep.floor.value == pytest.approx(flat.floor.value * ratio, rel=1e-12)


def test_sample_limit_is_reported_and_progress_rises():
    seen = []
    limited = mean_field_floor(task(a=0.5), relative_error=1e-4, max_contexts=20_000, progress=seen.append)
    assert limited.floor.status is Status.SAMPLE_LIMIT
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mean_field_floor(task(), profile="fast"), "profile"),
        (lambda: mean_field_floor(task(), relative_error=0), "relative_error"),
        (lambda: mean_field_floor(task(), seed=-1), "seed"),
        (lambda: mean_field_floor(task(top_k=1)), "top_k"),
        (lambda: mean_field_floor(task(top_k=6)), "top_k"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(DomainError, match=words):
        call()


def test_risk_needs_a_layer(found):
    with pytest.raises(DomainError, match="depth"):
        found.risk(0)
