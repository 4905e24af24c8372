import itertools

import numpy as np
import pytest

from sim.montecarlo import empirical_floor as empirical
from sim.montecarlo.kernels.empirical_floor import apply_covariance, empirical_floor_chunk
from sim.streams import stream
from theory.depth.loss_floor import isotropic_empirical_floor, isotropic_floor
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError, Status

pytestmark = pytest.mark.long

Z_LIMIT = 4.5  # 7e-6 for a true statement


def naive_chunk(rng, contexts, sqrt_input, teacher, context, top_k, recurrence):
    """The kernel's twin in plain NumPy: S is formed, and its powers are combined by the recurrence."""
    dim, degrees = sqrt_input.size, len(recurrence)
    records = []
    for _ in range(contexts):
        query = sqrt_input * rng.standard_normal(dim)
        tokens = sqrt_input * rng.standard_normal((context, dim))
        cosines = tokens @ query / np.linalg.norm(tokens, axis=1)
        target = tokens[np.argsort(-cosines, kind="stable")[:top_k]].mean(axis=0)
        S = tokens.T @ tokens / context
        vectors = [query]
        for j in range(degrees):
            rest = sum((recurrence[j, i] * vectors[i + 1] for i in range(j)), np.zeros(dim))
            vectors.append(recurrence[j, j] * (S @ vectors[-1] - rest))
        v = np.array(vectors[1:])
        records.append((target @ (teacher * target), v @ (teacher * target), (v * teacher) @ v.T))
    return tuple(np.mean(np.array(column), axis=0) for column in zip(*records, strict=True))


@pytest.mark.parametrize(("dim", "context", "top_k"), [(2, 3, 1), (5, 9, 2), (8, 4, 4)])
def test_the_kernel_and_its_twin_draw_the_same_bits(dim, context, top_k):
    recurrence = np.tril(np.random.default_rng(0).uniform(0.1, 0.5, (3, 3)))
    k = np.arange(1, dim + 1.0)
    arguments = (6, k**-0.5, k**-0.25, context, top_k, recurrence)
    ours = empirical_floor_chunk(stream(1, "twin"), *arguments)
    theirs = naive_chunk(stream(1, "twin"), *arguments)
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-13)


def test_the_covariance_is_applied_token_by_token():
    tokens, vector, image = np.random.default_rng(1).standard_normal((7, 4)), np.arange(4.0), np.empty(4)
    apply_covariance(tokens, vector, image)
    np.testing.assert_allclose(image, tokens.T @ tokens @ vector / 7, rtol=1e-13)


@pytest.mark.parametrize("a", [0.0, 1.0, 2.0])
def test_the_pilot_basis_is_nearly_orthonormal_on_fresh_contexts(a):
    task = TopKTask(PowerLawSpectrum(a, 0.5, 16), 128, 2)
    moments = empirical.empirical_moments(task, 6, seed=3, chunks=8)
    assert np.linalg.cond(moments.gram.mean(axis=0)) < 1e3


@pytest.mark.parametrize(("dim", "context", "top_k"), [(3, 12, 2), (16, 64, 2)])
def test_degree_one_is_the_exact_isotropic_floor(dim, context, top_k):
    task = TopKTask(PowerLawSpectrum(0, 0, dim), context, top_k)
    estimate = empirical.empirical_floor(task, 1, relative_error=0.01, seed=5)
    assert abs(estimate.floor.z_score(isotropic_empirical_floor(task).floor.value)) < Z_LIMIT
    assert estimate.status is Status.DONE
    assert estimate.floor.stderr <= 0.01 * estimate.floor.value


def test_the_population_floor_is_passed_at_finite_context():
    task = TopKTask(PowerLawSpectrum(0, 0, 16), 32, 2)
    estimate = empirical.empirical_floor(task, 4, relative_error=0.005, seed=2)
    values = [floor.value for floor in estimate.by_degree]
    assert all(high >= low - 1e-9 for high, low in itertools.pairwise(values))
    assert estimate.floor.z_score(isotropic_floor(task).floor.value) < -5
    assert estimate.target_power.value > values[0]
    assert estimate.pilot_contexts == empirical.PILOT_CONTEXTS


def test_the_jackknife_error_is_honest_and_its_bias_small():
    task = TopKTask(PowerLawSpectrum(1.0, 0.5, 6), 16, 2)
    runs = [empirical.empirical_moments(task, 3, seed=seed, chunks=16) for seed in range(40)]
    values, errors = np.array([empirical.jackknife_floors(run) for run in runs]).swapaxes(0, 1)
    spread = values.std(axis=0, ddof=1)
    assert (np.abs(spread / errors.mean(axis=0) - 1) < 0.4).all()


def test_the_same_bits_for_any_number_of_workers():
    task = TopKTask(PowerLawSpectrum(1.0, 0, 4), 8, 2)
    one, two = (empirical.empirical_moments(task, 2, seed=1, chunks=4, workers=w) for w in (1, 2))
    assert (one.gram == two.gram).all()
    assert (one.cross_moments == two.cross_moments).all()


def test_the_limit_is_reported():
    task = TopKTask(PowerLawSpectrum(1.0, 0, 4), 8, 2)
    estimate = empirical.empirical_floor(task, 2, relative_error=1e-6, seed=1, max_contexts=16 * 256)
    assert estimate.status is Status.SAMPLE_LIMIT


@pytest.mark.parametrize("degree", [0, 33, 1.5])
def test_degrees_outside_the_range_are_refused(degree):
    with pytest.raises(DomainError, match="degree must be an integer from 1 to 32"):
        empirical.pilot_recurrence(TopKTask(PowerLawSpectrum(1.0, 0, 20), 8, 2), degree, 0)


def test_degrees_that_the_pilot_cannot_resolve_are_refused(monkeypatch):
    monkeypatch.setattr(empirical, "PILOT_CONTEXTS", 2)
    task = TopKTask(PowerLawSpectrum(0, 0, 1), 8, 2)  # two contexts of one mode: two numbers S
    assert empirical.pilot_recurrence(task, 2, 0)[0].shape == (2, 2)
    with pytest.raises(DomainError, match="degree must be at most 2"):
        empirical.pilot_recurrence(task, 3, 0)
