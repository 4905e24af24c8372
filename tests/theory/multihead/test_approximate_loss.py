"""The approximate loss: its forms against each other, derivatives, minimisers, and distance to the exact risk."""

import numpy as np
import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.multihead.approximate_loss import (
    approximate_derivatives,
    approximate_gradient,
    approximate_loss,
    approximation_error,
    best_approximate_mu,
    first_order_loss,
    single_head_optimum,
    taylor_loss,
)
from theory.multihead.gradient_descent import debiased_step_risk
from theory.multihead.softmax_risk import softmax_risks
from theory.problems import RegressionTask
from theory.results import DomainError

TASK = RegressionTask(5, 40, 0.1)
VECTOR = st.lists(st.floats(-1, 1), min_size=3, max_size=3)


def test_symbolic_derivatives():
    w, m, d, c, s = sp.symbols("w1:3"), sp.symbols("m1:3"), 5, sp.Rational(11, 400), sp.Rational(1, 10)
    pair = [(i, j) for i in range(2) for j in range(2)]
    loss = 1 + s - 2 * sum(m[i] * w[i] for i in range(2))
    loss += sum(m[i] * m[j] * (w[i] * w[j] + c * sp.exp(d * w[i] * w[j])) for i, j in pair)
    at = dict(zip((*w, *m), (sp.Rational(3, 10), sp.Rational(-1, 5), sp.Rational(3, 2), -2), strict=True))
    got = approximate_derivatives(TASK, [0.3, -0.2], [1.5, -2])
    assert got.value == pytest.approx(float(loss.subs(at)), rel=1e-14)
    gradient = [float(sp.diff(loss, x).subs(at)) for x in (*w, *m)]
    np.testing.assert_allclose(np.concatenate([got.omega, got.mu]), gradient, rtol=1e-13)
    hessian = sp.hessian(loss, (*w, *m)).subs(at)
    np.testing.assert_allclose(got.hessian, np.array(hessian.evalf(20), dtype=float), rtol=1e-12)


@given(omega=VECTOR, mu=VECTOR)
def test_taylor_form_grows_to_the_loss(omega, mu):
    values = [float(taylor_loss(TASK, omega, mu, k)) for k in (0, 1, 3, 10, 60)]
    exact = float(approximate_loss(TASK, omega, mu))
    assert values[-1] == pytest.approx(exact, rel=1e-12, abs=1e-12)
    assert (np.diff(values) >= -1e-13).all()


@given(omega=VECTOR, mu=VECTOR, order=st.permutations(range(3)))
def test_invariants(omega, mu, order):
    w, m = np.array(omega), np.array(mu)
    base = float(approximate_loss(TASK, w, m))
    same = pytest.approx(base, rel=1e-12, abs=1e-12)
    assert float(approximate_loss(TASK, w[order], m[order])) == same
    assert float(approximate_loss(TASK, -w, -m)) == same
    assert float(approximate_loss(TASK, np.append(w, 0.4), np.append(m, 0))) == same
    assert base >= TASK.noise - 1e-12


def test_batches():
    w, m = np.random.default_rng(0).normal(size=(2, 4, 5, 3)) * 0.3
    by_omega, by_mu = approximate_gradient(TASK, w, m)
    one = approximate_derivatives(TASK, w[2, 3], m[2, 3])
    np.testing.assert_allclose(by_omega[2, 3], one.omega, rtol=1e-13)
    np.testing.assert_allclose(by_mu[2, 3], one.mu, rtol=1e-13)
    assert approximate_loss(TASK, w, m).shape == (4, 5)


def test_single_head_optimum_and_best_mu():
    omega, mu = single_head_optimum(TASK)
    derivatives = approximate_derivatives(TASK, [omega], [mu])
    np.testing.assert_allclose([*derivatives.omega, *derivatives.mu], 0, atol=1e-14)
    assert np.linalg.eigvalsh(derivatives.hessian)[0] > 0
    assert best_approximate_mu(TASK, [omega])[0] == pytest.approx(mu, rel=1e-14)
    best = best_approximate_mu(TASK, [0.2, -0.3, 0.2])
    assert best[0] == best[2]
    np.testing.assert_allclose(approximate_derivatives(TASK, [0.2, -0.3, 0.2], best).mu, 0, atol=1e-14)


def test_findings_values():
    for omega, mu, value in (
        ([0.52], [1.42], 0.3828),
        ([0.1267, -0.1267], [3.5006, -3.5006], 0.2211),
        ([0.5, -0.5], [2, -2], 1.8048),
    ):
        assert float(approximate_loss(TASK, omega, mu)) == pytest.approx(value, abs=5.1e-5)


def test_first_order_is_accurate_to_the_square_of_one_over_context():
    w, m = [0.2, -0.1], [1.0, -2.0]
    scaled, first = [], []
    for context in (1000, 10_000):
        task = RegressionTask(5, context, 0.1)
        scaled.append(context**2 * float(softmax_risks(task, w, m) - first_order_loss(task, w, m)))
        first.append(context * float(approximation_error(task, w, m)))
    assert scaled[0] == pytest.approx(scaled[1], rel=0.01)
    # (4.1) is off by a term of order 1/L that does not vanish.
    assert first[0] == pytest.approx(first[1], rel=0.01)
    assert abs(first[1]) > 0.5


def test_first_order_gives_debiased_descent_at_small_gamma():
    for eta in (0.5, 1.0):
        g = 1e-4
        limit = float(first_order_loss(TASK, [g, -g], [eta / (2 * g), -eta / (2 * g)]))
        # Debiased descent up to terms of order 1/L².
        assert abs(limit - float(debiased_step_risk(TASK, eta))) < 2 * eta**2 * 5 / TASK.context**2


def test_error_over_the_range_of_figure_6():
    gamma, mu = np.meshgrid(np.linspace(0.05, 0.5, 4), np.linspace(0.5, 4, 4))
    sign = np.array([1, -1])
    error = np.abs(approximation_error(TASK, gamma[..., None] * sign, mu[..., None] * sign))
    assert error[0, 0] < 0.01
    assert error.max() == error[-1, -1]  # worst where both are large


@settings(max_examples=20)
@given(size=st.floats(0.708, 5))
def test_first_order_is_refused_where_its_mean_diverges(size):
    with pytest.raises(DomainError, match="below 1/sqrt"):
        first_order_loss(TASK, [size], [1.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: approximate_loss(TASK, [20.0], [1.0]), "at most 700"),
        (lambda: approximate_loss(TASK, [1.0, 2.0], [1.0]), "one number per head"),
        (lambda: approximate_loss(TASK, [np.inf], [1.0]), "omega must be finite, got inf"),
        (lambda: approximate_loss(RegressionTask(1, 5, 0.1, ((2.0,),)), [1.0], [1.0]), "covariance must be None"),
        (lambda: approximate_derivatives(TASK, [[0.1]], [[1.0]]), "one number per head, got shape"),
        (lambda: taylor_loss(TASK, [0.1], [1.0], -1), "terms must be an integer"),
    ],
)
def test_domain_errors(call, message):
    with pytest.raises(DomainError, match=message):
        call()
