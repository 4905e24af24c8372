"""Multi-task rules: optimality, Monte Carlo, the paper's example, patterns of heads and when they must superpose."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from theory.multihead import multitask as mt
from theory.multihead.gradient_descent import debiased_risk, debiased_step
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import MultiTaskRegression, RegressionTask
from theory.results import DomainError

TASK = MultiTaskRegression(6, 40, 0.1, ((1, 2, 3, 4), (3, 4, 5, 6)))
RULE = mt.descent_rule(TASK)


def features(task, n, rng):
    X, beta = rng.normal(size=(n, task.context, task.dim)), rng.normal(size=(n, task.dim)) / np.sqrt(task.dim)
    query, mask = rng.normal(size=(n, task.dim)), mt.signal_mask(task)
    N = len(mask)
    y = np.einsum("mli,ni,mi->mln", X, mask, beta) + np.sqrt(task.noise) * rng.normal(size=(n, task.context, N))
    target = np.einsum("mi,ni,mi->mn", query, mask, beta) + np.sqrt(task.noise) * rng.normal(size=(n, N))
    return X, y, query, target, np.einsum("mln,mli->mni", y, X - X.mean(1, keepdims=True)) / task.context


def test_risks_by_monte_carlo():
    _, _, query, target, v = features(TASK, 60_000, np.random.default_rng(0))
    for rule in (np.eye(2)[:, :, None] * RULE[:, None], mt.cross_task_rule(TASK)):
        loss = (target - np.einsum("nai,mai,mi->mn", rule, v, query)) ** 2
        z = (loss.mean(0) - mt.rule_risk(TASK, rule)) / (loss.std(0) / np.sqrt(len(loss)))
        assert np.abs(z).max() < 5  # four deviates: two seeds in 10^6


def test_one_task_on_all_coordinates_is_debiased_descent():
    task = MultiTaskRegression(5, 40, 0.1, (range(1, 6),))
    single = RegressionTask(5, 40, 0.1)
    np.testing.assert_allclose(mt.descent_rule(task), debiased_step(single), rtol=1e-14)
    expected = debiased_risk(single, 0.7 * np.eye(5))
    assert mt.rule_risk(task, 0.7 * np.ones((1, 5)))[0] == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(mt.cross_task_rule(task)[0], mt.descent_rule(task), rtol=1e-13)


def test_values_of_the_findings():
    trained = MultiTaskRegression(6, 48, 0.1, TASK.signal_sets)
    assert mt.descent_rule(trained, 1.0)[0, 0] == pytest.approx(0.9213, abs=5e-5)
    assert RULE[0].tolist() == pytest.approx([0.8968609865470852] * 4 + [0, 0])
    # Reading the other task's labels gains eight per cent.
    own, cross = mt.rule_risk(TASK, RULE), mt.rule_risk(TASK, mt.cross_task_rule(TASK))
    assert (own / cross).tolist() == pytest.approx([1.086, 1.086], abs=1e-3)


@settings(max_examples=40)
@given(move=st.lists(st.floats(-1, 1), min_size=24, max_size=24))
def test_rules_are_optimal(move):
    change = np.array(move)
    own = change[:12].reshape(2, 6)
    up, here, down = (mt.rule_risk(TASK, RULE + sign * own * mt.signal_mask(TASK)).sum() for sign in (1, 0, -1))
    assert up == pytest.approx(down, rel=1e-12)
    assert min(up, mt.rule_risk(TASK, RULE + own).sum()) >= here - 1e-15
    cross, both = mt.cross_task_rule(TASK), change.reshape(2, 2, 6)
    up, here, down = (mt.rule_risk(TASK, cross + sign * both).sum() for sign in (1, 0, -1))
    assert up == pytest.approx(down, rel=1e-12)
    assert up >= here - 1e-15


def test_best_rules_of_few_heads_are_those_of_any_rank_from_there_on():
    for heads in (4, 5, 9):
        rule, risk = mt.best_rule(TASK, heads)
        np.testing.assert_allclose(rule, mt.cross_task_rule(TASK), rtol=1e-12, atol=1e-14)
        assert risk == pytest.approx(mt.rule_risk(TASK, rule).sum(), rel=1e-14)
    rule, risk = mt.best_rule(TASK, 3, own_labels=True)
    np.testing.assert_allclose(rule, np.eye(2)[:, :, None] * RULE[:, None], rtol=1e-12)
    assert risk == pytest.approx(mt.rule_risk(TASK, RULE).sum(), rel=1e-14)
    none, risk = mt.best_rule(TASK, 1)
    assert not none.any()
    assert risk == pytest.approx(2 * 0.1 + 8 / 6, rel=1e-14)  # of predicting 0: noise, and 1/6 per coordinate used
    risks = [mt.best_rule(TASK, heads)[1] for heads in (1, 2, 3, 4)]
    assert (np.diff(risks) < 0).all()


def test_two_heads_on_own_labels_in_high_precision():
    # Tasks alike: one step where both use a coordinate, one where either does, and the other's label is read in vain.
    mpmath.mp.dps = 40
    L, noise, tau = mpmath.mpf(40), mpmath.mpf("0.1"), mpmath.mpf(1) / 6
    spread = (4 * tau + noise) / L
    steps = [tau / (tau + spread)] * 2 + [tau / (tau + 2 * spread)] * 4
    rho = (L - 1) / L
    gain = 2 * rho * tau * steps[0] + 2 * 2 * rho * tau * steps[2] / 2
    exact = 2 * (noise + 4 * tau) - gain * 2
    rule, risk = mt.best_rule(TASK, 2, own_labels=True)
    assert risk == pytest.approx(float(exact), rel=1e-12)
    assert np.einsum("nni->ni", rule) == pytest.approx(
        np.array([[float(steps[i]) for i in (2, 3, 0, 1, 4, 5)]] * 2), rel=1e-6
    )


@pytest.mark.parametrize("sets", [TASK.signal_sets, ((1, 2, 4), (1,), (5,)), ((3,), (1, 4, 5, 6), (1,))])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("own_labels", [True, False])
def test_best_rules_are_not_beaten_by_a_search_over_factors(sets, heads, own_labels):
    task = MultiTaskRegression(6, 12, 0.3, sets)
    N, R = len(sets), heads - 1
    rows = N if own_labels else N * N
    rule, risk = mt.best_rule(task, heads, own_labels=own_labels)
    flat = np.einsum("nni->ni", rule) if own_labels else rule.reshape(rows, 6)
    assert np.linalg.matrix_rank(flat, tol=1e-8) <= R
    assert risk == pytest.approx(mt.rule_risk(task, rule).sum(), rel=1e-14)

    def product(x):
        M = x[: rows * R].reshape(rows, R) @ x[rows * R :].reshape(R, 6)
        return M if own_labels else M.reshape(N, N, 6)

    rng = np.random.default_rng(5)
    for _ in range(3):
        end = minimize(lambda x: mt.rule_risk(task, product(x)).sum(), rng.normal(0, 0.5, (rows + 6) * R))
        assert end.fun >= risk - 1e-7  # finite differences end a little above a minimum


def test_best_rules_by_monte_carlo():
    _, _, query, target, v = features(TASK, 20_000, np.random.default_rng(3))
    for heads in (2, 3):
        rule, risk = mt.best_rule(TASK, heads)
        loss = ((target - np.einsum("nai,mai,mi->mn", rule, v, query)) ** 2).sum(axis=1)
        assert abs(loss.mean() - risk) < 5 * loss.std() / np.sqrt(len(loss))  # two deviates: one seed in 10^6


def test_a_task_that_heads_serve_alone():
    alone, factor = mt.task_alone(TASK, 2)
    assert (alone.dim, alone.context) == (4, 40)
    assert (alone.noise, factor) == (pytest.approx(0.15, rel=1e-15), pytest.approx(4 / 6, rel=1e-15))
    # The limit: descent on its own labels, as a single regression and as one of several.
    step = debiased_step(alone)
    assert step == pytest.approx(RULE[1, 2], rel=1e-14)
    assert factor * debiased_risk(alone, step * np.eye(4)) == pytest.approx(mt.rule_risk(TASK, RULE)[1], rel=1e-13)
    # Any scale: heads on both sides of zero, and one that reads the other task.
    X, y, query, target, _ = features(TASK, 20_000, np.random.default_rng(4))
    omega, mu = np.zeros((3, 6)), np.zeros((3, 2))
    omega[:2, 2:], mu[:2, 1] = [[0.4], [-0.3]], (1.2, -1.5)
    omega[2, :4], mu[2, 0] = 0.2, 1.0
    loss = (target - mt.multitask_prediction(X, y, query, omega, mu))[:, 1] ** 2
    exact = factor * softmax_risk(alone, (0.4, -0.3), (1.2, -1.5)).value
    assert abs(loss.mean() - exact) < 5 * loss.std() / np.sqrt(len(loss))  # one seed in 10^6
    assert mt.task_alone(TASK, 1, 1.0) == (RegressionTask(4, 40, 0.025), 4.0)


def test_heads_needed_and_superposition():
    assert mt.heads_needed(RULE) == 3
    assert mt.superposition_forced(RULE, 3)
    assert not mt.superposition_forced(RULE, 4)
    same = np.array([RULE[0], RULE[0]])
    assert mt.heads_needed(same) == 2
    assert mt.superposition_forced(same, 2)
    assert mt.heads_needed(np.zeros((2, 3))) == 1
    with pytest.raises(DomainError, match="heads must be at least 3"):
        mt.superposition_forced(RULE, 2)


@pytest.mark.parametrize("heads", [3, 4, 6])
def test_patterns_implement_the_rule(heads):
    X, y, query, _, v = features(TASK, 300, np.random.default_rng(1))
    wanted = np.einsum("ni,mni,mi->mn", RULE, v, query)
    errors = []
    for gamma in (0.01, 0.005):
        pattern = mt.descent_pattern(RULE, heads, gamma)
        sums, rule = mt.implemented_rule(pattern.omega, pattern.mu)
        np.testing.assert_allclose(sums, 0, atol=1e-10)
        np.testing.assert_allclose(rule, RULE, atol=1e-12)
        assert pattern.superposed == (heads == 3)
        errors.append(np.abs(mt.multitask_prediction(X, y, query, pattern.omega, pattern.mu) - wanted).max())
    # A simplex errs at order γ, pairs at order γ².
    assert errors[0] / errors[1] == pytest.approx(2 if heads == 3 else 4, rel=0.05)


@settings(max_examples=30)
@given(
    tasks=st.integers(1, 5),
    extra=st.integers(0, 6),
    seed=st.integers(0, 10**6),
    rank=st.integers(1, 5),
)
def test_patterns_for_any_rule(tasks, extra, seed, rank):
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=(tasks, rank)) @ rng.normal(size=(rank, 7))
    needed = mt.heads_needed(rule)
    assert needed == min(tasks, rank) + 1
    pattern = mt.descent_pattern(rule, needed + extra, 0.1)
    sums, found = mt.implemented_rule(pattern.omega, pattern.mu)
    np.testing.assert_allclose(sums, 0, atol=1e-10 * np.abs(pattern.mu).max())
    np.testing.assert_allclose(found, rule, atol=1e-10 * np.abs(rule).max())
    assert not (pattern.superposed and not mt.superposition_forced(rule, needed + extra))


def test_zero_rule_needs_dummies_only():
    pattern = mt.descent_pattern(np.zeros((2, 3)), 2, 0.1)
    assert not pattern.mu.any()
    assert not pattern.superposed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mt.rule_risk(TASK, np.ones((3, 6))), "rule must have shape"),
        (lambda: mt.descent_rule(TASK, 0.0), "teacher_variance must be"),
        (lambda: mt.descent_rule(RegressionTask(5, 40, 0.1)), "signal_sets|MultiTask"),
        (lambda: mt.cross_task_rule(MultiTaskRegression(6, 1, 0.1, ((1,),))), "at least 2"),
        (lambda: mt.implemented_rule(np.ones((2, 3)), np.ones((3, 3))), "omega and mu must be finite"),
        (lambda: mt.heads_needed([1.0, 2.0]), "rule must be a finite matrix"),
        (lambda: mt.best_rule(TASK, 0), "heads must be"),
        (lambda: mt.best_rule(RegressionTask(5, 40, 0.1), 2), "MultiTask"),
        (lambda: mt.task_alone(TASK, 3), "number must be"),
    ],
)
def test_domain_errors(call, message):
    with pytest.raises(DomainError, match=message):
        call()
