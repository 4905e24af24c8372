"""Descent without sampling noise, and trained heads beside the exact theory."""

from __future__ import annotations

import numpy as np
import pytest

from theory.multihead.gradient_flow import gradient_descent_path, gradient_flow
from theory.multihead.softmax_risk import risk_derivatives, softmax_risk
from theory.multihead.solution_manifold import manifold_point
from theory.problems import RegressionTask
from theory.results import DomainError, PrecisionError
from validate.multihead_training import (
    compare_with_exact,
    descend,
    exact_flow,
    exact_gradient,
    exact_length_risks,
    mean_over_members,
)

pytestmark = pytest.mark.long

PAPER = RegressionTask(5, 40, 0.1)
SMALL = RegressionTask(3, 8, 0.2)


@pytest.mark.parametrize(("omega", "mu"), [([0.5], [1.4]), ([0.3, -0.2], [2.0, -1.0]), ([0.6, -0.6], [1.0, -1.2])])
def test_the_fast_gradient_is_the_gradient(omega, mu):
    w, m = np.array(omega), np.array(mu)
    exact = risk_derivatives(PAPER, w, m).gradient
    assert np.abs(exact_gradient(PAPER, w, m) - exact).max() < 1e-7


def test_descent_on_the_approximate_loss_is_that_of_the_theory():
    start = ([0.1, -0.12], [0.1, -0.05])
    ours = descend(PAPER, *start, 0.01, 40, objective="approximate", record=10)
    theirs = gradient_descent_path(PAPER, *start, 0.01, 40, record=10)
    assert ours.times.tolist() == theirs.times.tolist()
    assert ours.omega == pytest.approx(theirs.omega, rel=1e-12)
    assert ours.mu == pytest.approx(theirs.mu, rel=1e-12)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)


def test_adam_is_that_of_torch():
    torch = pytest.importorskip("torch")
    path = descend(SMALL, [0.1], [0.2], 0.01, 6, rule="adam")
    parameters = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([parameters], lr=0.01)
    for _ in range(6):
        values = parameters.detach().numpy()
        parameters.grad = torch.tensor(exact_gradient(SMALL, values[:1], values[1:]))
        optimiser.step()
    assert [path.omega[-1, 0], path.mu[-1, 0]] == pytest.approx(parameters.tolist(), rel=1e-12)


def test_descent_on_the_exact_risk_reaches_the_best_head():
    path = descend(PAPER, [0.4], [1.0], 0.4, 120, record=30)
    assert (np.diff(path.loss) < 0).all()
    assert path.omega[-1, 0] == pytest.approx(0.517905, rel=1e-3)
    assert path.mu[-1, 0] == pytest.approx(1.49709, rel=1e-3)
    assert path.loss[-1] == pytest.approx(softmax_risk(PAPER, path.omega[-1], path.mu[-1]).value, abs=1e-11)


def test_small_steps_follow_the_flow():
    start = ([0.3], [0.8])
    flow = exact_flow(SMALL, *start, [0.0, 0.4])
    path = descend(SMALL, *start, 0.002, 200, record=200)
    assert flow.omega[0] == pytest.approx(start[0])
    assert path.omega[-1] == pytest.approx(flow.omega[-1], abs=2e-3)  # first order in the rate
    assert path.mu[-1] == pytest.approx(flow.mu[-1], abs=2e-3)


def test_the_flow_on_both_objectives_agrees_where_they_do():
    # (4.1) is the leading order in omega and 1/L: small heads and a long context.
    task = RegressionTask(2, 10_000, 0.1)
    start = ([0.02, -0.03], [0.02, -0.01])
    exact, approximate = exact_flow(task, *start, [0.5]), gradient_flow(task, *start, [0.5])
    assert exact.omega == pytest.approx(approximate.omega, rel=2e-3)
    assert exact.mu == pytest.approx(approximate.mu, rel=2e-3)


def test_trained_heads_are_set_beside_the_best_ones():
    omega, mu = manifold_point(PAPER, 0.1, [1.0], [1.0])
    trained = compare_with_exact(PAPER, [omega, [0.5, 0.5]], [mu, [0.75, 0.75]])
    assert trained.risk[0] == pytest.approx(softmax_risk(PAPER, omega, mu).value, abs=1e-11)
    assert trained.excess.min() > 0
    assert trained.step == pytest.approx([2 * 0.1 * mu[0], 0.75])
    assert trained.distance[0] < 1e-12
    assert trained.distance[1] > 1
    assert trained.both_signs.tolist() == [True, False]
    with pytest.raises(DomainError, match="2 or more seeds"):
        mean_over_members(trained, "step", (0, 1))
    assert mean_over_members(trained, "step", (0, 1), settled=False).value == pytest.approx(trained.step.mean())
    with pytest.raises(DomainError, match="members and heads"):
        compare_with_exact(PAPER, omega, mu)


def test_risks_at_other_lengths_are_those_of_other_tasks():
    risks = exact_length_risks(PAPER, [[0.5], [0.2]], [[1.4], [1.0]], [10, 60])
    assert risks.shape == (2, 2)
    assert risks[1, 0] == pytest.approx(softmax_risk(RegressionTask(5, 60, 0.1), [0.5], [1.4]).value, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: descend(PAPER, [0.1], [0.1], 0.0, 1), DomainError, "rate"),
        (lambda: descend(PAPER, [0.1], [0.1], 0.1, 1, rule="newton"), DomainError, "rule"),
        (lambda: descend(PAPER, [0.1], [0.1], 0.1, 1, objective="true"), DomainError, "objective"),
        (lambda: descend(PAPER, [[0.1]], [[0.1]], 0.1, 1), DomainError, "per head"),
        (lambda: exact_flow(PAPER, [0.1], [0.1], [1.0, 0.5]), DomainError, "times"),
        (lambda: descend(PAPER, [0.5], [9.0], 50.0, 30, objective="approximate"), PrecisionError, "reduce rate"),
    ],
)
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
