"""Multi-task rules: optimality, Monte Carlo, the paper's example, patterns of heads and when they must superpose."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.multihead import multitask as mt
from theory.multihead.gradient_descent import debiased_risk, debiased_step
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
    ],
)
def test_domain_errors(call, message):
    with pytest.raises(DomainError, match=message):
        call()
