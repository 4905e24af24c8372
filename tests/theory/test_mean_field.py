"""The convex programme of the mean-field floor: exact small problems, its certificate, and honest errors."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from theory.depth.mean_field import (
    best_single_type,
    best_weights,
    best_weights_at_depth,
    disagreement,
    dual_bound,
    excess_slope,
    finite_depth_loss,
    gram_defect,
    improving_types,
    loss_slope,
    mean_field_loss,
    product_types,
    sampled_minimum,
    scale_grid,
)
from theory.results import DomainError, PrecisionError


def problem(seed, types=6, dim=4, shared=1.0):
    """Reads r_j in R^dim with a common part, and a target: T, h, G of an exact programme."""
    rng = np.random.default_rng(seed)
    reads = rng.standard_normal((types, dim)) + shared
    target = rng.standard_normal(dim) + 0.7
    return float(target @ target), reads @ target, reads @ reads.T


def noisy_layers(seed, types=3, draws=3, dim=4):
    """Equally likely reads r_js of each type: every moment is an exact finite mean."""
    rng = np.random.default_rng(seed)
    reads = 0.6 * rng.standard_normal((types, draws, dim)) + rng.standard_normal((types, 1, dim)) + 1
    target = rng.standard_normal(dim) + 1
    means = reads.mean(axis=1)
    return reads, target, (means @ target, means @ means.T, (reads**2).sum(axis=2).mean(axis=1))


seeds = st.integers(0, 10**6)


def test_single_type_has_its_least_squares_gain():
    weights = best_weights([0.6], [[1.5]])
    assert weights == pytest.approx([0.4], rel=1e-15)
    assert mean_field_loss(1.0, [0.6], [[1.5]], weights) == pytest.approx(1 - 0.6**2 / 1.5, rel=1e-15)


def test_two_types_by_hand():
    # Inside the cone the normal equations hold; with a negative solution the better type stands alone.
    assert best_weights([1.0, 1.0], [[2.0, 1.0], [1.0, 3.0]]) == pytest.approx([0.4, 0.2], rel=1e-13)
    assert best_weights([1.0, 0.2], [[1.0, 0.9], [0.9, 1.0]]) == pytest.approx([1.0, 0.0], abs=1e-15)


def test_types_against_the_target_are_not_used():
    assert best_weights([-1.0, -0.5], np.eye(2)).tolist() == [0.0, 0.0]


@given(seeds, st.integers(1, 8), st.integers(1, 6))
def test_conditions_of_optimality(seed, types, dim):
    power, h, G = problem(seed, types, dim)
    weights = best_weights(h, G)
    slope = loss_slope(h, G, weights)
    scale = np.abs(h).max()
    assert (weights >= 0).all()
    assert slope.max() <= 1e-7 * scale
    assert np.abs(slope[weights > 0]).max(initial=0) <= 1e-7 * scale
    assert mean_field_loss(power, h, G, weights) >= -1e-9 * power


@pytest.mark.parametrize("seed", range(6))
def test_minimum_against_a_general_minimiser(seed):
    power, h, G = problem(seed, types=4, dim=6)
    found = minimize(
        lambda w: w @ G @ w - 2 * h @ w,
        np.ones(4),
        jac=lambda w: 2 * (G @ w - h),
        bounds=[(0, None)] * 4,
        method="L-BFGS-B",
        options={"ftol": 1e-15, "gtol": 1e-12, "maxiter": 10000},
    )
    weights = best_weights(h, G)
    assert mean_field_loss(power, h, G, weights) <= power + found.fun + 1e-12
    assert weights == pytest.approx(found.x, abs=1e-5)


@given(seeds)
def test_order_and_copies_of_types_do_not_matter(seed):
    power, h, G = problem(seed)
    loss = mean_field_loss(power, h, G, best_weights(h, G))
    order = np.random.default_rng(seed).permutation(len(h))
    doubled = np.concatenate([order, order])
    for chosen in (order, doubled):
        again = mean_field_loss(
            power, h[chosen], G[np.ix_(chosen, chosen)], best_weights(h[chosen], G[np.ix_(chosen, chosen)])
        )
        assert again == pytest.approx(loss, abs=1e-8 * power)


@given(seeds)
def test_more_types_never_raise_the_minimum(seed):
    power, h, G = problem(seed, types=7)
    losses = [mean_field_loss(power, h[:n], G[:n, :n], best_weights(h[:n], G[:n, :n])) for n in range(1, 8)]
    assert (np.diff(losses) <= 1e-8 * power).all()


@given(seeds)
def test_scale_of_labels_and_of_reads(seed):
    power, h, G = problem(seed)
    loss, weights = mean_field_loss(power, h, G, best_weights(h, G)), best_weights(h, G)
    scaled = best_weights(1e-6 * h, 1e-6 * G)
    assert mean_field_loss(1e-6 * power, 1e-6 * h, 1e-6 * G, scaled) == pytest.approx(1e-6 * loss, abs=1e-14 * power)
    gains = best_weights(3 * h, 9 * G)
    assert mean_field_loss(power, 3 * h, 9 * G, gains) == pytest.approx(loss, abs=1e-8 * power)
    assert gains.sum() == pytest.approx(weights.sum() / 3, rel=1e-4)


@given(seeds, st.floats(0, 1))
def test_dual_bound_lies_below_every_law(seed, distance):
    """Weights on some types, away from their optimum: no weights on all types reach below the bound."""
    power, h, G = problem(seed)
    weights = np.zeros(6)
    weights[:3] = best_weights(h[:3], G[:3, :3]) + 0.3 * distance
    bound = dual_bound(power, float(weights @ G @ weights), excess_slope(h, loss_slope(h, G, weights)))
    best = mean_field_loss(power, h, G, best_weights(h, G))
    assert bound <= best + 1e-9 * power


@given(seeds)
def test_dual_bound_meets_the_loss_at_the_optimum(seed):
    power, h, G = problem(seed)
    weights = best_weights(h, G)
    slope = loss_slope(h, G, weights)
    if weights.any() and (h - slope).min() > 1e-3:
        bound = dual_bound(power, float(weights @ G @ weights), excess_slope(h, slope))
        assert bound == pytest.approx(mean_field_loss(power, h, G, weights), abs=1e-5 * power)


def test_excess_slope_without_a_bound():
    assert excess_slope([1.0, 2.0], [-0.5, 0.0]) == 0
    assert excess_slope([1.0, 2.0], [0.5, 0.5]) == 1.0
    assert excess_slope([0.1], [0.2]) == math.inf
    assert dual_bound(1.0, 0.5, math.inf) == -math.inf


def test_indefinite_gram_is_reported_and_survived():
    _, h, G = problem(3, types=5, dim=3)
    noise = 1e-7 * np.diag([-1.0, 1, -1, 1, -1])
    assert gram_defect(G) < 1e-15
    assert 1e-9 < gram_defect(G + noise) < 1e-6
    weights = best_weights(h, G + noise)
    assert mean_field_loss(0.0, h, G, weights) == pytest.approx(
        mean_field_loss(0.0, h, G, best_weights(h, G)), abs=1e-4
    )
    with pytest.raises(PrecisionError, match="positive eigenvalue"):
        best_weights([1.0, 1.0], -np.eye(2))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_finite_depth_against_every_choice_of_layers(depth):
    """All sequences of (type, draw) of L layers with their probabilities: the loss (63) to rounding."""
    reads, target, (h, G, A) = noisy_layers(5)
    weights = np.array([0.5, 0.2, 0.4])
    gain, law = weights.sum(), weights / weights.sum()
    exact = 0.0
    for layers in itertools.product(itertools.product(range(3), range(3)), repeat=depth):
        probability = math.prod(law[j] / 3 for j, _ in layers)
        prediction = gain * np.mean([reads[j, s] for j, s in layers], axis=0)
        exact += probability * ((prediction - target) ** 2).sum()
    power = float(target @ target)
    assert finite_depth_loss(power, h, G, A, weights, depth) == pytest.approx(exact, rel=1e-13)


def test_finite_depth_is_an_inverse_law_above_the_limit():
    _, target, (h, G, A) = noisy_layers(2)
    power, weights = float(target @ target), best_weights(h, G)
    depths = np.array([[1, 2, 64], [512, 10**6, 10**9]])
    losses = finite_depth_loss(power, h, G, A, weights, depths)
    limit = mean_field_loss(power, h, G, weights)
    assert losses.shape == (2, 3)
    assert (losses - limit) * depths == pytest.approx(disagreement(G, A, weights), rel=1e-5)
    assert disagreement(G, A, weights) > 0
    with pytest.raises(DomainError, match="depth"):
        finite_depth_loss(power, h, G, A, weights, 0)


@pytest.mark.parametrize("depth", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_best_law_at_finite_depth_against_a_general_minimiser(seed, depth):
    _, _, (h, G, A) = noisy_layers(seed, types=4)

    def loss(w):
        return float(finite_depth_loss(0.0, h, G, A, w, depth))

    ours = loss(best_weights_at_depth(h, G, A, depth))
    starts = np.random.default_rng(seed).uniform(0, 0.5, (20, 4))
    theirs = min(minimize(loss, s, bounds=[(0, None)] * 4, method="L-BFGS-B").fun for s in starts)
    assert ours <= theirs + 1e-5 * abs(theirs)
    assert ours <= loss(best_weights(h, G)) + 1e-12
    assert ours <= loss(best_single_type(h, A)) + 1e-12


def test_best_single_type():
    weights = best_single_type([1.0, 2.0, -5.0], [0.5, 4.0, 1.0])
    assert weights.tolist() == [2.0, 0.0, 0.0]
    assert best_weights_at_depth([1.0, 2.0, -5.0], np.eye(3), [0.5, 4.0, 1.0], 1).tolist() == [2.0, 0.0, 0.0]
    with pytest.raises(DomainError, match="single_power"):
        best_single_type([1.0], [0.0])


def sample(rng, chunks, noise=0.8, contexts=4):
    """Chunks of a programme whose reads and target fluctuate: means of a few contexts each, true moments known."""
    base = np.random.default_rng(0).standard_normal((5, 4)) + 1
    truth = np.array([1.0, 0.6, 0.9, 1.2])
    reads = base + noise * rng.standard_normal((chunks, contexts, 5, 4))
    target = truth + noise * rng.standard_normal((chunks, contexts, 4))
    power = (target**2).sum(axis=2).mean(axis=1)
    cross = np.einsum("cnjd,cnd->cj", reads, target) / contexts
    gram = np.einsum("cnjd,cnkd->cjk", reads, reads) / contexts
    own = np.einsum("cnjd,cnjd->cj", reads, reads) / contexts
    true_gram = base @ base.T + 4 * noise**2 * np.eye(5)
    true_power = truth @ truth + 4 * noise**2
    floor = mean_field_loss(float(true_power), base @ truth, true_gram, best_weights(base @ truth, true_gram))
    return floor, (power, cross, gram, own)


def test_sampled_minimum_is_bracketed_and_its_error_honest():
    rng = np.random.default_rng(11)
    results = []
    for _ in range(200):
        floor, moments = sample(rng, 12)
        results.append(sampled_minimum(*moments, contexts=48, seed=0, folds=4))
    values = np.array([r.floor.value for r in results])
    errors = np.array([r.floor.stderr for r in results])
    # Means of 200 runs, whose spread over sqrt(200) is the error of the mean.
    spread = values.std(ddof=1) / math.sqrt(200)
    assert np.mean([r.in_sample for r in results]) < floor - 2 * spread
    assert np.mean([r.cross_fitted for r in results]) > floor + 2 * spread
    assert abs(values.mean() - floor) < 4 * spread
    assert 0.8 < errors.mean() / values.std(ddof=1) < 1.25
    assert all(r.bracket > 0 for r in results)


def test_sampled_minimum_without_noise_is_exact():
    floor, moments = sample(np.random.default_rng(0), 6, noise=0.0)
    found = sampled_minimum(*moments, contexts=24, seed=3)
    assert found.floor.value == pytest.approx(floor, abs=1e-9)
    assert found.floor.stderr < 1e-9
    assert found.cross_fitted == pytest.approx(found.in_sample, abs=1e-9)
    assert (found.floor.samples, found.floor.chunks, found.floor.seed) == (24, 6, 3)


@pytest.mark.parametrize("change", [lambda m: (m[0][:2], *m[1:]), lambda m: (m[0], m[1], m[2][:, :2], m[3])])
def test_sampled_minimum_refuses_other_shapes(change):
    _, moments = sample(np.random.default_rng(0), 4)
    with pytest.raises(DomainError, match="shapes"):
        sampled_minimum(*change(moments), contexts=16, seed=0)


def test_grids():
    assert scale_grid(3, 9) == pytest.approx([0, 1, 3, 9])
    assert scale_grid(2, 8, 2) == pytest.approx([0, 2, 8])
    assert product_types([0, 1], [5, 6, 7]).tolist() == [[0, 5], [1, 5], [0, 6], [1, 6], [0, 7], [1, 7]]
    with pytest.raises(DomainError, match="largest"):
        scale_grid(3, 0.5)


def test_improving_types_find_the_top_of_a_tilted_paraboloid():
    alphas, betas = np.arange(6.0), np.arange(7.0)
    a, b = product_types(alphas, betas).T
    slope = 1 - (a - 2.3) ** 2 - 1.5 * (b - 4.4) ** 2 - 1.2 * (a - 2.3) * (b - 4.4)
    found = improving_types(alphas, betas, slope)
    assert len(found) == 2
    assert np.abs(found - [2.3, 4.4]).sum(axis=1).min() < 1e-12
    assert [3.0, 4.0] in found.tolist()


def test_improving_types_at_edges_and_below_the_threshold():
    alphas, betas = np.array([0.0, 1, 2]), np.array([0.0, 10])
    a, b = product_types(alphas, betas).T
    assert improving_types(alphas, betas, a + b).tolist() == [[2, 10]]
    assert improving_types(alphas, betas, -1 - a).shape == (0, 2)
    assert improving_types(alphas, betas, a, threshold=5).shape == (0, 2)


@pytest.mark.parametrize(
    "arguments", [([1.0], np.eye(2), [1.0]), ([1.0, 2.0], np.eye(2), [1.0]), ([[1.0]], np.eye(1), [[1.0]])]
)
def test_shapes_are_checked(arguments):
    with pytest.raises(DomainError, match="shapes"):
        loss_slope(*arguments)
