"""Predictors against each other, and exact risks against Monte Carlo, sympy-free identities and optimality."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.multihead import gradient_descent as gd
from theory.problems import RegressionTask
from theory.results import DomainError

TASK = RegressionTask(5, 40, 0.1)
KMS = RegressionTask(4, 9, 0.3, tuple(tuple(0.5 ** abs(i - j) for j in range(4)) for i in range(4)))
PRIOR = np.diag([0.5, 0.2, 0.1, 0.4]) + 0.05


def draw(task, prior, n, rng):
    root, teacher = np.linalg.cholesky(task.covariance_matrix()), np.linalg.cholesky(prior)
    X = rng.standard_normal((n, task.context, task.dim)) @ root.T
    query, beta = rng.standard_normal((n, task.dim)) @ root.T, rng.standard_normal((n, task.dim)) @ teacher.T
    y = (X @ beta[:, :, None])[..., 0] + np.sqrt(task.noise) * rng.standard_normal(X.shape[:2])
    return X, y, query, np.sum(beta * query, axis=1) + np.sqrt(task.noise) * rng.standard_normal(n)


@pytest.mark.parametrize(
    ("predict", "risk"), [(gd.vanilla_prediction, gd.vanilla_risk), (gd.debiased_prediction, gd.debiased_risk)]
)
def test_exact_risks_by_monte_carlo(predict, risk):
    rng, n = np.random.default_rng(3), 200_000
    G = rng.standard_normal((4, 4)) / 4 + 0.5 * np.eye(4)
    X, y, query, target = draw(KMS, PRIOR, n, rng)
    loss = (target - predict(X, y, query, 1.0, G)) ** 2
    # 5 standard errors: one seed in 10^6.
    assert abs(loss.mean() - risk(KMS, G, PRIOR)) < 5 * loss.std() / np.sqrt(n)


def test_scalar_and_matrix_forms_agree():
    for step in (0.0, 0.4, 1.3):
        assert gd.vanilla_risk(TASK, step * np.eye(5)) == pytest.approx(float(gd.vanilla_step_risk(TASK, step)))
        assert gd.debiased_risk(TASK, step * np.eye(5)) == pytest.approx(float(gd.debiased_step_risk(TASK, step)))


@pytest.mark.parametrize(("dim", "context", "noise"), [(1, 1, 0.0), (5, 40, 0.1), (30, 7, 2.0)])
def test_best_steps(dim, context, noise):
    task = RegressionTask(dim, context, noise)
    for risk, best in ((gd.vanilla_step_risk, gd.vanilla_step), (gd.debiased_step_risk, gd.debiased_step)):
        step = best(task)
        assert (risk(task, step * np.array([0.9, 1.1])) >= risk(task, step)).all()
        # The risk is a parabola: its exact derivative at the best step vanishes.
        assert risk(task, step + 0.5) - risk(task, step - 0.5) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(gd.vanilla_preconditioner(task), gd.vanilla_step(task) * np.eye(dim), atol=1e-14)
    np.testing.assert_allclose(gd.debiased_preconditioner(task), gd.debiased_step(task) * np.eye(dim), atol=1e-14)


def test_findings_values():
    assert float(gd.debiased_step_risk(TASK, gd.debiased_step(TASK))) == pytest.approx(0.2428571428571, abs=1e-12)
    assert gd.debiased_step(TASK) == pytest.approx(1 / (1 + 1.1 * 5 / 40), rel=1e-15)


@settings(max_examples=25)
@given(entries=st.lists(st.floats(-1, 1), min_size=16, max_size=16), prior=st.sampled_from([None, PRIOR]))
def test_preconditioners_are_optimal_and_the_risks_are_quadratic(entries, prior):
    move = np.array(entries).reshape(4, 4)
    for risk, best in (
        (gd.vanilla_risk, gd.vanilla_preconditioner),
        (gd.debiased_risk, gd.debiased_preconditioner),
    ):
        G = best(KMS, prior)
        up, here, down = (risk(KMS, G + sign * move, prior) for sign in (1, 0, -1))
        assert up == pytest.approx(down, abs=1e-12 * (1 + up))  # stationary in every direction
        assert up >= here


def test_the_papers_matrix_is_optimal_for_vanilla_descent_only():
    inverse = np.linalg.inv(gd.paper_covariance(KMS))
    np.testing.assert_allclose(inverse, gd.vanilla_preconditioner(KMS), rtol=1e-12)
    assert gd.debiased_risk(KMS, gd.debiased_preconditioner(KMS)) < gd.debiased_risk(KMS, inverse) - 1e-5


def test_predictors_agree_where_they_should():
    rng = np.random.default_rng(0)
    X, y, query, _ = draw(KMS, PRIOR, 6, rng)
    O = np.diag([1.0, 2, 3, 4])  # noqa: E741
    two = gd.softmax_prediction(X, y, query, [0.3, -0.3], [2, -2], O)
    np.testing.assert_array_equal(gd.two_head_prediction(X, y, query, 0.3, 2, O), two)
    np.testing.assert_array_equal(
        gd.single_head_prediction(X, y, query, 0.3, 2), gd.softmax_prediction(X, y, query, [0.3], [2])
    )
    small = gd.two_head_prediction(X, y, query, 1e-4, 0.7 / 2e-4, O)
    np.testing.assert_allclose(small, gd.debiased_prediction(X, y, query, 0.7, O), rtol=1e-5)
    weights = np.exp(0.3 * (X @ query[:, :, None])[..., 0])
    loop = [2 * (weight @ label) / weight.sum() for weight, label in zip(weights, y, strict=True)]
    np.testing.assert_allclose(gd.single_head_prediction(X, y, query, 0.3, 2), loop)
    centred = X - X.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        gd.debiased_prediction(X, y, query), np.einsum("nl,nld,nd->n", y, centred, query) / 9, rtol=1e-12
    )


def test_paired_softmax_heads_imitate_linear_ones():
    rng = np.random.default_rng(1)
    Z, OV, KQ = rng.standard_normal((3, 7)), rng.standard_normal((2, 3, 3)), rng.standard_normal((2, 3, 3))
    exact = gd.centred_linear_transformer(Z, OV, KQ)
    errors = [np.abs(gd.paired_softmax_transformer(Z, OV, KQ, g) - exact).max() for g in (0.02, 0.01)]
    assert errors[0] == pytest.approx(4 * errors[1], rel=0.05)
    centred = Z - Z.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        gd.centred_linear_transformer(centred, OV, KQ), gd.linear_transformer(centred, OV, KQ), atol=1e-12
    )


def test_length_generalisation():
    step = gd.debiased_step(TASK)
    lengths = np.arange(1, 400)
    soft, line = gd.softmax_length_risk(TASK, step, lengths), gd.linear_length_risk(TASK, step, lengths)
    assert soft[39] == pytest.approx(float(gd.debiased_step_risk(TASK, step)))
    assert line[39] == pytest.approx(float(gd.vanilla_step_risk(TASK, step)))
    # With one token it predicts 0; a few tokens are worse than none, which the paper's figure, from L' = 10, hides.
    assert soft[1] > soft[0] == pytest.approx(1.1)
    assert (np.diff(soft[1:]) < 0).all()
    assert 35 <= lengths[np.argmin(line)] <= 45
    assert (np.diff(line[50:]) > 0).all()
    floor = gd.infinite_length_risk(TASK.noise, [0.1, -0.1], [step / 0.2, -step / 0.2])
    assert float(gd.softmax_length_risk(TASK, step, 10**9)) == pytest.approx(floor, rel=1e-7)
    assert floor == pytest.approx(0.1 + (1 - step) ** 2)


def test_context_one_makes_debiased_descent_silent():
    assert float(gd.debiased_step_risk(RegressionTask(3, 1, 0.2), 5.0)) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gd.softmax_prediction(np.ones((3, 2)), np.ones(3), np.ones(2), [1.0], [1.0, 2.0]), "one number"),
        (lambda: gd.vanilla_prediction(np.ones((3, 2)), np.ones(4), np.ones(2)), "shapes"),
        (lambda: gd.vanilla_prediction(np.ones((3, 2)), np.ones(3), np.ones(2), 1.0, np.eye(3)), "key_query"),
        (lambda: gd.linear_transformer(np.ones((2, 3)), np.ones((1, 2, 2)), np.ones((1, 3, 3))), "embedding"),
        (lambda: gd.vanilla_step(KMS), "covariance must be None"),
        (lambda: gd.vanilla_risk(KMS, np.eye(3)), "preconditioner must be"),
        (lambda: gd.debiased_risk(KMS, np.eye(4), np.ones((4, 4))), "prior must be positive definite"),
        (lambda: gd.softmax_length_risk(TASK, 1.0, [10, 0.5]), "test_context must be an integer"),
    ],
)
def test_domain_errors(call, message):
    with pytest.raises(DomainError, match=message):
        call()
