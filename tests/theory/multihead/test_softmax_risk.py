"""Exact softmax risk: oracles, two independent formulas, doubling, derivatives, Monte Carlo, invariants, optima."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.multihead import softmax_risk as module
from theory.multihead.activations import activation_risk, exponential
from theory.multihead.gradient_descent import debiased_step, debiased_step_risk, softmax_prediction
from theory.multihead.softmax_risk import (
    merged_risk,
    optimal_mu,
    optimum,
    query_length_rule,
    risk_coefficients,
    risk_derivatives,
    small_gamma_risk,
    softmax_risk,
    softmax_risks,
)
from theory.multihead.steep_moments import largest_score_rule
from theory.problems import RegressionTask
from theory.results import DomainError, PrecisionError

pytestmark = pytest.mark.long

TASK = RegressionTask(5, 40, 0.1)
# Known to the digits shown.
ORACLES = [([0.52], [1.42], 0.40559717), ([0.1267, -0.1267], [3.5006, -3.5006], 0.24299818)]
ORACLES += [([0.5, -0.5], [2, -2], 1.39576537)]


def numbers(low, high, size):
    return st.lists(st.floats(low, high, allow_subnormal=False), min_size=size, max_size=size)


@pytest.mark.parametrize(("omega", "mu", "expected"), ORACLES)
def test_oracles(omega, mu, expected):
    risk = softmax_risk(TASK, omega, mu)
    assert risk.value == pytest.approx(expected, abs=5.1e-9)
    assert risk.tolerance < 1e-10


@pytest.mark.parametrize(
    ("dim", "context", "omega"),
    [
        (5, 40, 0.127),
        (5, 40, 0.5),
        (1, 3, 0.4),
        (2, 100_000, 0.4),
        (1000, 40, 0.05),
        (30, 7, 0.3),
        (5, 40, 0.9),
        (1, 24, 3.0),
        (1000, 5, 3.0),
        (1000, 100_000, 1.0),
        (1, 3, 2.0),
    ],
)
def test_tolerance_is_honest_under_node_doubling(dim, context, omega):
    task = RegressionTask(dim, context, 0.2)
    w, m = np.array([omega, -0.7 * omega]), np.array([1.0, -1.5])
    claimed = softmax_risk(task, w, m)
    fine = module._risk(task, w[np.newaxis], m[np.newaxis], 1.2)[0][0]
    assert abs(claimed.value - fine) <= claimed.tolerance
    assert claimed.tolerance <= 1e-9 * claimed.value
    assert claimed.value == pytest.approx(fine, rel=1e-11)


@pytest.mark.parametrize(("dim", "context"), [(1000, 40), (300, 3)])
def test_steep_heads_of_one_sign_are_in_range(dim, context):
    task, w, m = RegressionTask(dim, context, 0.1), np.array([3.0, 2.9, -2.0]), np.array([1.0, -0.5, 0.3])
    risk = softmax_risk(task, w, m)
    assert risk.tolerance <= 1e-10 * risk.value
    # As both slopes grow a head is its largest score: 1 + σ² - 2μ E r max/d + μ² (E max²/d + κ).
    r, weight = query_length_rule(dim, 3.0)
    largest, mass = largest_score_rule(context, 60)
    limit = (
        1
        + task.noise
        - 2 * weight @ r / dim * (mass @ largest)
        + (mass @ largest**2) / dim
        + 1
        - 1 / dim
        + task.noise
    )
    assert softmax_risk(task, [3.0], [1.0]).value == pytest.approx(limit, rel=0.1)


def test_second_formula_at_context_two():
    """Directly: p_1 - p_2 = tanh(a x/sqrt 2), one integral over x and one over the length of the query."""
    task, omega, mu = RegressionTask(3, 2, 0.3), np.array([0.8, -0.5]), np.array([1.2, -0.7])
    r = np.linspace(0, 12, 2001)[1:]
    length = r**2 * np.exp(-r * r / 2) * np.sqrt(2 / np.pi) * (r[1] - r[0])
    x = np.linspace(-10, 10, 2001)
    normal = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    h = np.tanh(omega[:, None, None] * r[:, None] * x / np.sqrt(2)) / 2
    total = np.tensordot(mu, h, 1)
    pull = np.sqrt(2) * (total * x) @ normal  # E Σ_h μ_h p·z given r
    f3 = mu.sum() ** 2 / 2 + 2 * total**2 @ normal
    f2 = mu.sum() ** 2 / 2 + 2 * (total * x) ** 2 @ normal
    kappa = 2 / 3 + task.noise
    expected = 1 + task.noise + length @ (-2 / 3 * r * pull + f2 / 3 + kappa * f3)
    assert softmax_risk(task, omega, mu).value == pytest.approx(expected, rel=1e-11)


def test_second_formula_by_the_general_activation():
    # activations integrates E Σ p z itself, where this module uses Stein's identity.
    for gamma, mu in ((0.1267, 3.5006), (0.5, 2.0)):
        other = activation_risk(TASK, exponential(), gamma, mu)
        assert softmax_risk(TASK, [gamma, -gamma], [mu, -mu]).value == pytest.approx(other.value, rel=1e-11)


def test_context_one_and_zero_omega_are_exact():
    mu = np.array([0.4, -1.1, 0.2])
    one = softmax_risk(RegressionTask(4, 1, 0.3), [0.5, 0.1, -2.0], mu).value
    assert one == pytest.approx(1.3 + mu.sum() ** 2 * 1.3, rel=1e-13)
    zero = softmax_risk(RegressionTask(4, 9, 0.3), np.zeros(3), mu).value
    assert zero == pytest.approx(1.3 + mu.sum() ** 2 * 1.3 / 9, rel=1e-13)


@pytest.mark.parametrize(
    ("dim", "context", "omega", "mu"),
    [
        (5, 40, [0.52], [1.42]),
        (5, 40, [0.1267, -0.1267], [3.5006, -3.5006]),
        (5, 40, [0.5, -0.5], [2.0, -2.0]),
        (3, 10, [0.8, -0.2, 0.1], [0.5, -1.0, 0.4]),
        (1, 5, [1.5, -1.0], [0.4, -0.6]),
        (8, 20, [0.3, 0.3, -0.2, 0.0], [1.0, 0.5, -2.0, 0.3]),
    ],
)
def test_monte_carlo(dim, context, omega, mu):
    rng = np.random.default_rng([dim, context, len(omega)])
    n = 40_000
    X, beta = rng.standard_normal((n, context, dim)), rng.standard_normal((n, dim)) / np.sqrt(dim)
    query = rng.standard_normal((n, dim))
    y = (X @ beta[:, :, None])[..., 0] + np.sqrt(0.1) * rng.standard_normal((n, context))
    target = np.sum(beta * query, axis=1) + np.sqrt(0.1) * rng.standard_normal(n)
    loss = (target - softmax_prediction(X, y, query, omega, mu)) ** 2
    z = (loss.mean() - softmax_risk(RegressionTask(dim, context, 0.1), omega, mu).value) / (loss.std() / np.sqrt(n))
    # |z| > 4.5 on about one seed in 10^5 (losses are skewed, so a little more often).
    assert abs(z) < 4.5


def test_derivatives_are_those_of_the_value():
    w, m, h = np.array([0.3, -0.2, 0.15]), np.array([1.0, -2.0, 0.7]), 1e-5
    derivatives = risk_derivatives(TASK, w, m)
    x = np.concatenate([w, m])
    value = lambda y: float(softmax_risks(TASK, y[:3], y[3:]))  # noqa: E731
    gradient = lambda y: risk_derivatives(TASK, y[:3], y[3:]).gradient  # noqa: E731
    numeric = np.array([(value(x + h * e) - value(x - h * e)) / (2 * h) for e in np.eye(6)])
    np.testing.assert_allclose(derivatives.gradient, numeric, atol=2e-9)
    numeric = np.array([(gradient(x + h * e) - gradient(x - h * e)) / (2 * h) for e in np.eye(6)])
    np.testing.assert_allclose(derivatives.hessian, numeric, atol=1e-7)
    assert derivatives.value == pytest.approx(value(x), rel=1e-12)


@settings(max_examples=6)
@given(omega=numbers(-0.3, 0.3, 3), mu=numbers(-3, 3, 3), order=st.permutations(range(3)))
def test_invariants(omega, mu, order):
    w, m = np.array(omega), np.array(mu)
    base = float(softmax_risks(TASK, w, m))
    same = {"rel": 1e-11, "abs": 1e-12}
    assert softmax_risks(TASK, w[order], m[order]) == pytest.approx(base, **same)
    assert softmax_risks(TASK, -w, -m) == pytest.approx(base, **same)
    assert softmax_risks(TASK, np.append(w, 0.2), np.append(m, 0.0)) == pytest.approx(base, **same)
    split = softmax_risks(TASK, np.append(w, w[0]), np.append(m * [0.25, 1, 1], 0.75 * m[0]))
    assert split == pytest.approx(base, **same)
    assert base >= TASK.noise


def test_grids_share_pairs_and_keep_shapes():
    gamma, mu = np.linspace(0.05, 0.4, 4)[:, None, None], np.linspace(0.5, 4, 3)[:, None]
    sign = np.array([1, -1])
    grid = softmax_risks(TASK, gamma * sign, mu * sign)
    assert grid.shape == (4, 3)
    assert grid[2, 1] == pytest.approx(softmax_risk(TASK, gamma[2, 0] * sign, mu[1] * sign).value, rel=1e-11)


def test_query_lengths_have_the_moments_of_chi():
    for dim, omega in ((1, 0.1), (1, 2.0), (5, 0.25), (7, 0.5), (1000, 3.0)):
        r, weight = query_length_rule(dim, omega)
        assert weight.sum() == pytest.approx(1, rel=1e-13)
        assert (weight @ r**2, weight @ r**4) == pytest.approx((dim, dim * (dim + 2)), rel=1e-12)


def test_small_gamma_expansion():
    for task in (TASK, RegressionTask(2, 7, 0.5)):
        limit = float(small_gamma_risk(task, 0))
        assert limit == pytest.approx(float(debiased_step_risk(task, debiased_step(task))), rel=1e-14)
        gains = []
        for gamma in (0.02, 0.04):
            gain = limit - optimal_mu(task, [gamma, -gamma])[1].value
            gains.append(gain / (limit - float(small_gamma_risk(task, gamma))))
        # The next order is γ², so that Richardson's step leaves γ^4.
        assert (4 * gains[0] - gains[1]) / 3 == pytest.approx(1, abs=2e-3)


def test_optimal_mu_is_stationary_and_shares_equal_heads():
    mu, risk = optimal_mu(TASK, [0.3, -0.2, 0.3, 0.0])
    assert mu[0] == mu[2]
    derivatives = risk_derivatives(TASK, [0.3, -0.2, 0.3, 0.0], mu)
    np.testing.assert_allclose(derivatives.gradient[4:], 0, atol=1e-11)
    assert risk.value == pytest.approx(derivatives.value, abs=1e-12)
    with pytest.raises(PrecisionError, match="too close"):
        optimal_mu(TASK, [0.3, 0.3 + 1e-8])
    with pytest.raises(DomainError, match="one number per head"):
        optimal_mu(TASK, [[0.3]])


def test_best_one_and_two_heads():
    one = optimum(TASK, 1)
    assert one.attained
    assert (one.omega[0], one.mu[0], one.risk.value) == pytest.approx((0.517905, 1.49709, 0.403963), rel=2e-6)
    two = optimum(TASK, 2)
    assert (two.omega[0], two.mu[0]) == pytest.approx((0.0712457, 6.17547), rel=5e-6)
    assert two.risk.value == pytest.approx(0.2428240983, abs=1e-10)
    assert two.risk.value < float(debiased_step_risk(TASK, debiased_step(TASK)))
    for best in (one, two):
        assert best.gradient_norm < 1e-9
        assert (best.curvatures > 0).all()
        np.testing.assert_allclose(risk_derivatives(TASK, best.omega, best.mu).gradient, 0, atol=1e-8)
        assert np.linalg.eigvalsh(risk_derivatives(TASK, best.omega, best.mu).hessian)[0] > -1e-10


@pytest.mark.deep
def test_more_heads_merge_a_pair():
    # The start that the scan of optimum(TASK, 4) ranks first; that search takes about a minute.
    four = module._merged_optimum(TASK, np.array([-3.6, -0.15, 0.15, 3.6]) / np.sqrt(5))
    assert not four.attained
    # Two heads have 0.2428240983.
    assert four.risk.value == pytest.approx(0.2428240983 - 1.22145e-3, abs=1e-8)
    assert four.risk.tolerance < 1e-9
    assert four.gradient_norm < 1e-8
    assert four.curvatures.size == 3
    assert (four.curvatures > 0).all()
    assert four.separation > 0
    assert four.omega[2] == pytest.approx(0, abs=1e-6)
    # The limit is approached by models with finite weights.
    distances = []
    for s in (0.02, 0.01):
        distances.append(optimal_mu(TASK, [*four.omega[:2], s, -s])[1].value - four.risk.value)
    assert distances[0] == pytest.approx(4 * distances[1], rel=0.05)


def test_limits_refuse_grids_on_which_they_would_be_wrong():
    with pytest.raises(DomainError, match=r"fineness must be at least 0\.8"):
        merged_risk(TASK, [1.7], 0.0, 0.6)
    rough, fine = (merged_risk(TASK, [0.6], 0.05, fineness).risk for fineness in (0.8, 1.0))
    assert abs(rough - fine) < 1e-8


def test_scan_starts_at_distinct_sets():
    starts, scanned = module._scan(TASK, 2)
    assert scanned == 171
    np.testing.assert_allclose(np.array(starts[0]) * np.sqrt(5), [-0.15, 0.15])
    assert np.abs(starts[0] - starts[1]).max() * np.sqrt(5) > 0.15


def test_separate_heads_are_found_from_an_uneven_start():
    task = RegressionTask(2, 10, 0.5)
    best, two = module._separate_optimum(task, np.array([0.5, -0.65])), optimum(task, 2)
    np.testing.assert_allclose(best.omega, two.omega, rtol=1e-5)
    assert best.gradient_norm < 1e-9
    assert (best.curvatures > 0).all()


def test_three_separate_heads_beat_two_and_the_merged_pair_in_a_small_context():
    # Found by optimum(task, 3) in half a minute; here only its certificate.
    task, omega = RegressionTask(2, 10, 0.5), np.array([1.93146786, -0.44861337, 0.32290744])
    gradient, hessian, mu = module._profiled(task, omega)
    assert np.abs(gradient).max() < 1e-9
    assert np.linalg.eigvalsh(hessian)[0] > 1e-4
    assert 0.7967165 < float(softmax_risks(task, omega, mu)) < 0.7967166  # two heads have 0.79829


def test_a_pair_merged_at_zero_is_debiased_descent():
    merged = merged_risk(TASK, [], 0.0)
    assert merged.risk == pytest.approx(float(debiased_step_risk(TASK, debiased_step(TASK))), rel=1e-12)
    assert merged.slope_weight == pytest.approx(debiased_step(TASK), rel=1e-12)
    np.testing.assert_allclose(merged.mu, 0, atol=1e-12)


def test_orders_of_coefficients():
    full, plain = risk_coefficients(TASK, [0.2, -0.1], 2), risk_coefficients(TASK, [0.2, -0.1])
    np.testing.assert_allclose(plain.quadratic, full.quadratic, rtol=1e-12)
    assert not plain.row_1.any()
    assert full.mixed.any()


@pytest.mark.parametrize(
    ("omega", "mu", "message"),
    [
        ([0.1, 0.2], [1.0], "one number per head"),
        ([], [], "one number"),
        ([np.nan], [1.0], "omega must be finite"),
        ([0.1], [-1e101], r"mu must lie in \[-1e\+100, 1e\+100\], got -1e\+101"),
        ([1e300], [1.0], "omega must lie in"),
    ],
)
def test_bad_heads(omega, mu, message):
    with pytest.raises(DomainError, match=message):
        softmax_risk(TASK, omega, mu)


def test_bad_tasks_and_counts():
    with pytest.raises(DomainError, match="covariance must be None"):
        softmax_risk(RegressionTask(2, 5, 0.1, ((2, 0), (0, 1))), [0.1], [1.0])
    with pytest.raises(DomainError, match="softmax_risks for grids"):
        softmax_risk(TASK, [[0.1]], [[1.0]])
    with pytest.raises(DomainError, match="heads must be an integer from 1 to 4"):
        optimum(TASK, 5)
    with pytest.raises(DomainError, match="at least 2"):
        optimum(RegressionTask(5, 1, 0.1), 2)
    with pytest.raises(PrecisionError, match="did not settle"):
        optimum(RegressionTask(5, 100_000, 0.1), 2)
