from typing import ClassVar

import numpy as np
import pytest

from sim.montecarlo.kernels.exponential import exponentiate
from sim.montecarlo.kernels.softmax_risk import softmax_risk_chunk
from sim.montecarlo.softmax_risk import first_order_risks, softmax_risk_comparison, softmax_risk_estimate
from sim.streams import stream
from tests import naive
from theory.multihead.gradient_descent import debiased_step_risk
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import RegressionTask
from theory.results import DomainError, Status

pytestmark = pytest.mark.long

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


# Two predictors that share heads, one of them with a head that the other lacks.
SHARED = (PAPER, [-0.5, 0.1, 0.5], [[-2.0, 0.0, 2.0], [1.0, 0.5, -0.3]])
# The kernel's exp is within 2 units in the last place; differences of opposite heads lose two digits more.
ROUNDING = 1e-12
# A loss of one context varies by about its mean, so this many contexts resolve a change of 1 %.
CONTEXTS = 50


@pytest.mark.parametrize("lanes", [1, 7, 128])
@pytest.mark.parametrize(("task", "omega", "mu"), [*POINTS, SHARED])
def test_twin_draws_the_same_bits_and_finds_the_same_means(task, omega, mu, lanes):
    arguments = (CONTEXTS, lanes, task.dim, task.context, task.noise, np.array(omega), np.atleast_2d(mu))
    rng, twin_rng = stream(1, "softmax risk"), stream(1, "softmax risk")
    found, expected = softmax_risk_chunk(rng, *arguments), naive.softmax_risk_chunk(twin_rng, *arguments)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)
    assert rng.bit_generator.state == twin_rng.bit_generator.state


def test_contexts_side_by_side_change_no_bit():
    task, omega, mu = SHARED
    runs = [
        softmax_risk_chunk(
            stream(1, "lanes"), CONTEXTS, lanes, task.dim, task.context, task.noise, np.array(omega), np.array(mu)
        )
        for lanes in (1, 3, 50, 64)
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_exponential_to_the_last_digits():
    values = np.concatenate([[0.0, -0.0, -1e-300, -708.0], -np.geomspace(1e-17, 707.9, 5000)])
    bits = np.empty(values.size, np.int64)
    found = values.copy()
    exponentiate(found, bits.view(np.float64), bits)
    np.testing.assert_allclose(found, np.exp(values), rtol=1e-15, atol=0)
    far = np.array([-709.0, -1e300, -np.inf])
    exponentiate(far, bits[:3].view(np.float64), bits[:3])
    np.testing.assert_allclose(far, np.exp(-708.0), rtol=1e-15, atol=0)


def test_steep_heads_pick_the_largest_token():
    # At omega = 1e6 each head reads one token: weights 1 at the largest and -1 at the smallest z.
    losses, _ = softmax_risk_chunk(
        stream(2, "steep"), 20, 8, 3, 6, 0.5, np.array([-1e6, 1e6]), np.array([[-1.0, 1.0]])
    )
    rng, expected = stream(2, "steep"), []
    for _ in range(20):
        length, z = np.sqrt(2 * rng.standard_gamma(1.5)), rng.standard_normal(6)
        expected.append(((length - z.max() + z.min()) ** 2 + 2 * 2) / 3 + 0.5 * 3)
    assert losses[0] == pytest.approx(np.mean(expected), rel=1e-12)


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


class TestControl:
    @pytest.mark.parametrize(("task", "omega", "mu"), POINTS)
    def test_exact_mean_of_the_first_order_losses(self, task, omega, mu):
        arguments = (task.dim, task.context, task.noise, np.array(omega), np.atleast_2d(mu))
        chunks = [softmax_risk_chunk(stream(4, "control", i), 2000, 128, *arguments)[1][0] for i in range(40)]
        exact = first_order_risks(task, np.array(omega), np.atleast_2d(mu))[0]
        z = (np.mean(chunks) - exact) / (np.std(chunks, ddof=1) / np.sqrt(40))
        assert abs(z) < 4  # Student, 39 degrees: false alarm 3e-4 for each of six fixed seeds

    def test_it_is_the_risk_of_debiased_descent(self):
        eta = 0.83
        exact = first_order_risks(PAPER, np.array([0.1, -0.1]), np.array([[eta / 0.2, -eta / 0.2]]))
        assert exact[0] == pytest.approx(float(debiased_step_risk(PAPER, eta)), rel=1e-14)

    def test_it_takes_most_of_the_variance_of_small_opposite_heads(self):
        task, omega, mu = POINTS[1]
        estimate = softmax_risk_estimate(task, omega, mu, relative_error=5e-5, seed=5)
        rng = stream(5, "one by one")
        arguments = (1, 1, task.dim, task.context, task.noise, np.array(omega), np.atleast_2d(mu))
        losses = [softmax_risk_chunk(rng, *arguments)[0][0] for _ in range(2000)]
        # Measured: 105 times; the error of both variances is 15 % together.
        assert np.var(losses, ddof=1) > 60 * estimate.stderr**2 * estimate.samples

    def test_heads_that_cancel_to_first_order(self):
        # sum mu = 0 and mu . omega = 0: the control is the loss of predicting zero.
        omega, mu = np.array([0.4, 0.1, -0.2]), np.array([1.0, -2.0, 1.0])
        assert first_order_risks(PAPER, omega, mu[None])[0] == pytest.approx(1 + PAPER.noise, rel=1e-14)
        estimate = softmax_risk_estimate(PAPER, omega, mu, relative_error=2e-3, seed=6)
        assert abs(estimate.z_score(softmax_risk(PAPER, omega, mu).value)) < 4.5


class TestComparison:
    settings: ClassVar = {
        "near": ([0.1267, -0.1267], [3.5006, -3.5006]),
        "best": ([0.0712457, -0.0712457], [6.17547, -6.17547]),
        "one": ([0.52], [1.42]),
    }

    def test_risks_and_differences_against_exact_ones(self):
        sample = softmax_risk_comparison(PAPER, self.settings, relative_error=5e-4, seed=7)
        exact = {name: softmax_risk(PAPER, *heads).value for name, heads in self.settings.items()}
        for name, estimate in sample.estimates().items():
            assert abs(estimate.z_score(exact[name])) < 4.5  # Student, 15 degrees: 4e-4 each, seed fixed
            assert estimate.stderr <= 5e-4 * estimate.value
        for name, other in (("near", "best"), ("one", "near")):
            assert abs(sample.difference(name, other).z_score(exact[name] - exact[other])) < 4.5

    def test_common_contexts_make_differences_of_neighbours_small(self):
        sample = softmax_risk_comparison(PAPER, self.settings, relative_error=1e-3, seed=8)
        apart = np.hypot(sample.estimate("near").stderr, sample.estimate("best").stderr)
        assert sample.difference("near", "best").stderr < apart
        assert sample.difference("near", "near").stderr == 0
        assert sample.difference("near", "one").value == -sample.difference("one", "near").value

    def test_a_setting_alone_is_the_estimate(self):
        heads = POINTS[0][1:]
        alone = softmax_risk_comparison(PAPER, {"x": heads}, relative_error=0.01, seed=9).estimate("x")
        assert alone == softmax_risk_estimate(PAPER, *heads, relative_error=0.01, seed=9)

    def test_repeated_heads_add_up(self):
        split = softmax_risk_estimate(PAPER, [0.5, 0.5], [1.0, 0.42], relative_error=0.01, seed=9)
        whole = softmax_risk_estimate(PAPER, [0.5], [1.42], relative_error=0.01, seed=9)
        assert split == whole

    @pytest.mark.parametrize("predictors", [{}, None, [1.0]])
    def test_no_predictors_are_refused(self, predictors):
        with pytest.raises(DomainError, match="predictors must map"):
            softmax_risk_comparison(PAPER, predictors, relative_error=0.1, seed=0)

    def test_unknown_names_are_refused(self):
        sample = softmax_risk_comparison(PAPER, {"x": ([0.5], [1.0])}, relative_error=0.1, seed=0)
        with pytest.raises(DomainError, match="name must be one of x, got 'y'"):
            sample.difference("x", "y")


def test_same_bits_for_any_number_of_workers():
    values = {
        softmax_risk_estimate(PAPER, [0.5], [1.0], relative_error=0.01, seed=4, workers=workers).value
        for workers in (1, 2, 8)
    }
    assert len(values) == 1


def test_sample_limit_is_reported():
    chunk = 2**11
    estimate = softmax_risk_estimate(PAPER, [0.5], [1.0], relative_error=1e-9, seed=5, max_contexts=32 * chunk)
    assert estimate.status is Status.SAMPLE_LIMIT
    assert estimate.samples == 32 * chunk


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
