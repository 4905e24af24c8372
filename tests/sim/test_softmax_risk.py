import numpy as np
import pytest

from sim.montecarlo.kernels.softmax_risk import softmax_risk_chunk
from sim.montecarlo.softmax_risk import softmax_risk_estimate
from sim.streams import stream
from tests import naive
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import RegressionTask
from theory.results import DomainError, Status

PAPER = RegressionTask(5, 40, 0.1)
# Task, omega, mu: one to four heads, small and large dim, context and noise.
POINTS = (
    (PAPER, [0.52], [1.42]),
    (PAPER, [0.1267, -0.1267], [3.5006, -3.5006]),
    (PAPER, [0.5, -0.5], [2.0, -2.0]),
    (RegressionTask(2, 5, 0.0), [1.0, -0.3], [0.7, 0.4]),
    (RegressionTask(20, 10, 1.0), [0.2, -0.1, 0.05], [0.5, -1.0, 0.3]),
    (RegressionTask(3, 12, 0.5), [0.8, -0.8, 0.1, 0.0], [0.3, -0.3, 1.0, -0.5]),
)


@pytest.mark.parametrize(("task", "omega", "mu"), POINTS)
def test_twin_draws_the_same_bits_and_finds_the_same_mean(task, omega, mu):
    arguments = (50, task.dim, task.context, task.noise, np.array(omega), np.array(mu))
    rng, twin_rng = stream(1, "softmax risk"), stream(1, "softmax risk")
    assert softmax_risk_chunk(rng, *arguments) == pytest.approx(
        naive.softmax_risk_chunk(twin_rng, *arguments), rel=1e-12
    )
    assert rng.bit_generator.state == twin_rng.bit_generator.state


@pytest.mark.parametrize(("task", "omega", "mu"), POINTS)
def test_reduced_contexts_against_the_exact_risk(task, omega, mu):
    estimate = softmax_risk_estimate(task, omega, mu, relative_error=1e-3, seed=2)
    assert estimate.status is Status.DONE
    assert abs(estimate.z_score(softmax_risk(task, omega, mu).value)) < 4.5  # false alarm 4e-5 for all six


def test_reduced_contexts_against_whole_ones():
    task, omega, mu = POINTS[3]
    losses = naive.softmax_regression_losses(stream(3, "whole"), 100_000, 2, 5, 0.0, np.array(omega), np.array(mu))
    estimate = softmax_risk_estimate(task, omega, mu, relative_error=2e-3, seed=3)
    stderr = losses.std(ddof=1) / np.sqrt(losses.size)
    assert abs(estimate.z_score(losses.mean(), stderr)) < 4.5


def test_same_bits_for_any_number_of_workers():
    values = {
        softmax_risk_estimate(PAPER, [0.5], [1.0], relative_error=0.01, seed=4, workers=workers).value
        for workers in (1, 2, 8)
    }
    assert len(values) == 1


def test_sample_limit_is_reported():
    chunk = 2**25 // (8 * 40)
    estimate = softmax_risk_estimate(PAPER, [0.5], [1.0], relative_error=1e-9, seed=5, max_contexts=16 * chunk)
    assert estimate.status is Status.SAMPLE_LIMIT
    assert estimate.samples == 16 * chunk


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: softmax_risk_estimate(5, [1.0], [1.0], relative_error=0.1, seed=0), "RegressionTask"),
        (lambda: softmax_risk_estimate(PAPER, [1.0], [1.0, 2.0], relative_error=0.1, seed=0), "per head"),
        (lambda: softmax_risk_estimate(PAPER, [np.nan], [1.0], relative_error=0.1, seed=0), "omega"),
        (lambda: softmax_risk_estimate(PAPER, [1.0], [np.inf], relative_error=0.1, seed=0), "mu"),
        (lambda: softmax_risk_estimate(PAPER, [1.0], [1.0], relative_error=0, seed=0), "relative_error"),
        (
            lambda: softmax_risk_estimate(PAPER, [1.0], [1.0], relative_error=0.1, seed=0, max_contexts=5),
            "max_contexts",
        ),
        (
            lambda: softmax_risk_estimate(
                RegressionTask(1, 3, 0.1, ((2.0,),)), [1.0], [1.0], relative_error=0.1, seed=0
            ),
            "covariance",
        ),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(DomainError, match=words):
        call()
