"""The solution manifold: optimality of its points, projection, splits and dummies, the effective model."""

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from theory.multihead import solution_manifold as sm
from theory.multihead.approximate_loss import approximate_gradient, approximate_loss, best_approximate_mu
from theory.multihead.gradient_descent import softmax_prediction, two_head_prediction
from theory.problems import RegressionTask
from theory.results import DomainError

TASK = RegressionTask(5, 40, 0.1)
GAMMA = st.floats(1e-6, 2)


@given(gamma=GAMMA)
def test_norm_and_loss_keep_their_digits(gamma):
    with mpmath.workdps(40):
        g, c = mpmath.mpf(gamma), (1 + mpmath.mpf(0.1)) / 40
        norm = g / (g**2 + c * mpmath.sinh(5 * g**2))
        loss = 1 + mpmath.mpf(0.1) - g * norm
    assert float(sm.manifold_norm(TASK, gamma)) == pytest.approx(float(norm), rel=1e-14)
    assert float(sm.effective_mu(TASK, gamma)) == pytest.approx(float(norm) / 2, rel=1e-14)
    assert float(sm.manifold_loss(TASK, gamma)) == pytest.approx(float(loss), rel=1e-13)


@settings(max_examples=10)
@given(gamma=st.floats(0.01, 1.0))
def test_points_are_the_best_mu_and_all_splits_are_alike(gamma):
    omega, mu = sm.manifold_point(TASK, gamma, (0.25, 0.75), (0.5, 0.2, 0.3), dummies=2)
    assert omega.shape == mu.shape == (7,)
    assert float(approximate_loss(TASK, omega, mu)) == pytest.approx(float(sm.manifold_loss(TASK, gamma)), rel=1e-10)
    assert float(sm.norm_loss(TASK, gamma, np.abs(mu).sum())) == pytest.approx(
        float(approximate_loss(TASK, omega, mu)), rel=1e-10
    )
    np.testing.assert_allclose(best_approximate_mu(TASK, [gamma, -gamma]), sm.effective_mu(TASK, gamma) * [1, -1])
    np.testing.assert_allclose(approximate_gradient(TASK, omega, mu)[1], 0, atol=1e-9 / gamma)
    found = sm.membership(TASK, omega, mu)
    assert found.distance == pytest.approx(0, abs=1e-12 * np.abs(mu).max())
    assert found.gamma == pytest.approx(gamma)
    assert (found.sign_matched, found.homogeneous) == (0, 0)
    assert found.zero_sum == pytest.approx(0, abs=1e-12 * np.abs(mu).max())
    effective = sm.effective_model(omega, mu)
    assert effective == pytest.approx((gamma, mu[mu > 0].sum(), mu[mu < 0].sum()))
    assert sm.in_larger_space(omega, mu)


def test_loss_increases_with_gamma_towards_debiased_descent_at_zero():
    loss = sm.manifold_loss(TASK, np.geomspace(1e-4, 2, 40))
    # d²γ^4/6 is below rounding at first.
    assert (np.diff(loss) >= 0).all()
    assert (np.diff(loss[8:]) > 0).all()
    assert loss[0] == pytest.approx(1.1 - 1 / (1 + 1.1 * 5 / 40), rel=1e-12)
    assert float(sm.small_gamma_mu(TASK, 1e-5) / sm.effective_mu(TASK, 1e-5)) == pytest.approx(1, rel=1e-9)


def test_local_optimality_tends_to_one():
    for gamma, miss in ((0.3, 0.02), (0.03, 2e-6)):
        value = sm.local_optimality(TASK, *sm.manifold_point(TASK, gamma, (1,), (1,)))
        assert 1 - miss < value < 1


@given(
    omega=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    mu=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    signs=st.lists(st.sampled_from([-1, 1]), min_size=3, max_size=3),
)
def test_odd_terms_bound(omega, mu, signs):
    exact, bound = sm.odd_terms_bound(TASK, np.array(omega) * signs, np.array(mu) * signs)
    assert bound <= exact * (1 + 1e-12)
    on_manifold = sm.odd_terms_bound(TASK, [0.3, -0.3], [2.0, -2.0])
    assert on_manifold[0] == pytest.approx(on_manifold[1], rel=1e-12)


def test_predictions_of_all_splits_agree():
    rng = np.random.default_rng(2)
    X, y, query = rng.normal(size=(4, 9, 5)), rng.normal(size=(4, 9)), rng.normal(size=(4, 5))
    omega, mu = sm.manifold_point(TASK, 0.2, (0.4, 0.6), (1.0,), dummies=1)
    gamma, plus, _ = sm.effective_model(omega, mu)
    np.testing.assert_allclose(
        softmax_prediction(X, y, query, omega, mu), two_head_prediction(X, y, query, gamma, plus), atol=1e-12
    )


@settings(max_examples=30)
@given(
    omega=st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3),
    mu=st.lists(st.floats(-4, 4), min_size=3, max_size=3),
    shares=st.tuples(st.floats(0.01, 0.99), st.sampled_from([0, 1, 2])),
)
def test_projection_is_nearest(omega, mu, shares):
    assume(max(abs(np.array(omega) * mu)) > 1e-3)
    found = sm.membership(TASK, omega, mu)
    inside = sm.membership(TASK, found.omega, found.mu, found.gamma)
    assert inside.distance == pytest.approx(0, abs=1e-9)
    # Any other point of the manifold at this γ is farther.
    split, odd = shares
    other_mu = float(sm.effective_mu(TASK, found.gamma)) * np.roll([split, 1 - split, -1], odd)
    other = np.hypot(np.linalg.norm(omega - found.gamma * np.sign(other_mu)), np.linalg.norm(np.array(mu) - other_mu))
    assert found.distance <= other + 1e-12
    flipped = sm.membership(TASK, -np.array(omega), -np.array(mu))
    assert flipped.distance == pytest.approx(found.distance, rel=1e-9, abs=1e-12)


def test_larger_space():
    assert sm.in_larger_space([0.2, -0.2], [1.0, 3.0])  # two heads, which the printed "> 1" would exclude
    assert not sm.in_larger_space([0.2, 0.2], [1.0, 3.0])
    assert not sm.in_larger_space([0.2, -0.3], [1.0, 3.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sm.manifold_norm(TASK, 0.0), "gamma must be > 0"),
        (lambda: sm.manifold_norm(TASK, [0.1, 12.0]), "got 12.0"),
        (lambda: sm.manifold_point(TASK, 0.1, (0.5,), (1.0,)), "positive must hold shares"),
        (lambda: sm.manifold_point(TASK, 0.1, (1.0,), ()), "negative must hold shares"),
        (lambda: sm.effective_model([0.1, -0.2], [1.0, 1.0]), "one magnitude"),
        (lambda: sm.effective_model([0.1, -0.2], [0.0, 0.0]), "at least one number other than zero"),
        (lambda: sm.membership(TASK, [0.1], [1.0]), "2 to 10 heads"),
        (lambda: sm.membership(TASK, [0.1, 0.1], [0.0, 0.0]), "gamma must be given"),
        (lambda: sm.odd_terms_bound(TASK, [0.1, -0.1], [1.0, 1.0]), "same signs"),
    ],
)
def test_domain_errors(call, message):
    with pytest.raises(DomainError, match=message):
        call()


def test_all_dummies_have_a_distance_at_a_given_scale():
    found = sm.membership(TASK, [0.0, 0.0], [0.0, 0.0], 0.2)
    assert found.distance == pytest.approx(np.sqrt(2) * np.hypot(0.2, float(sm.effective_mu(TASK, 0.2))))
    assert found.homogeneous == 0
