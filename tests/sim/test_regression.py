"""Predictors on common contexts: twin, exact risks, labels by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from sim.montecarlo.kernels import regression as kernels
from sim.montecarlo.regression import (
    AttentionHeads,
    GradientDescent,
    LeastSquares,
    Ridge,
    bayes_predictor,
    regression_risks,
)
from sim.streams import stream
from tests import naive
from theory.multihead import activations, gradient_descent
from theory.multihead.bayes_risk import bayes_risk
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import RegressionTask
from theory.results import DomainError, Status

pytestmark = pytest.mark.long

# Sums over a few hundred products, and the inverse of a well-conditioned matrix.
ROUNDING = 1e-10
SMALL = RegressionTask(3, 10, 0.4)
# The neighbouring correlations of section 5.3, and a teacher that is neither isotropic nor aligned with them.
COVARIANCE = tuple(tuple(0.5 ** abs(i - j) for j in range(3)) for i in range(3))
PRIOR = ((0.5, 0.1, 0.0), (0.1, 0.3, -0.1), (0.0, -0.1, 0.8))
SKEW = RegressionTask(3, 10, 0.4, COVARIANCE)
RIDGE, EXP, TANH, SQUARE = kernels.RIDGE, kernels.EXPONENTIAL, kernels.SHIFTED_TANH, kernels.SQUARE


def kernel_arguments():
    """One predictor of each kind, with matrices that are not symmetric where they need not be."""
    rng = np.random.default_rng(0)
    kinds = np.array([kernels.VANILLA, kernels.DEBIASED, RIDGE, EXP, TANH, SQUARE])
    matrices = 0.3 * rng.standard_normal((6, 3, 3))
    matrices[2] = matrices[2] @ matrices[2].T + np.eye(3)
    omega, mu = rng.normal(0, 0.5, (6, 2)), rng.normal(0, 1, (6, 2))
    mu[3, 1] = 0.0
    root = np.linalg.cholesky(np.array(COVARIANCE))
    return 10, root, np.array(PRIOR), 0.4, kinds, matrices, np.full(6, 0.7), omega, mu


class TestKernel:
    def test_twin_draws_the_same_bits_and_finds_the_same_means(self):
        rng, twin_rng = stream(1, "regression"), stream(1, "regression")
        found = kernels.regression_chunk(rng, 30, *kernel_arguments())
        np.testing.assert_allclose(
            found, naive.regression_chunk(twin_rng, 30, *kernel_arguments()), rtol=ROUNDING, atol=0
        )
        assert rng.bit_generator.state == twin_rng.bit_generator.state

    def test_averaged_loss_is_the_mean_over_teachers_and_labels(self):
        # One context, 200,000 teachers and label noises: |z| > 4 by chance once in 16,000 seeds.
        rng = stream(2, "labels")
        tokens, query, weights = rng.standard_normal((6, 3)), rng.standard_normal(3), rng.standard_normal(6)
        teachers = rng.multivariate_normal(np.zeros(3), PRIOR, 200_000)
        labels = teachers @ np.vstack([query, tokens]).T + np.sqrt(0.4) * rng.standard_normal((200_000, 7))
        losses = (labels[:, 0] - labels[:, 1:] @ weights) ** 2
        exact = kernels.averaged_loss(np.array(PRIOR), 0.4, tokens, query, weights)
        assert abs(losses.mean() - exact) < 4 * losses.std() / np.sqrt(losses.size)

    def test_predictors_are_those_of_theory(self):
        rng = stream(3, "predictors")
        tokens, query, labels = rng.standard_normal((10, 3)), rng.standard_normal(3), rng.standard_normal(10)
        G, omega, mu = rng.standard_normal((3, 3)), np.array([0.4, -0.3]), np.array([1.5, -0.7])
        expected = {
            kernels.VANILLA: gradient_descent.vanilla_prediction(tokens, labels, query, 1.0, G),
            kernels.DEBIASED: gradient_descent.debiased_prediction(tokens, labels, query, 1.0, G),
            EXP: gradient_descent.softmax_prediction(tokens, labels, query, omega, mu, G),
        }
        for kind, prediction in expected.items():
            weights = np.empty(10)
            kernels.fill_weights(kind, G, 1.0, omega, mu, tokens, query, weights)
            assert weights @ labels == pytest.approx(float(prediction), rel=ROUNDING)

    @pytest.mark.parametrize("x", [-800.0, -1e-9, 0.0, 3.0, 800.0])
    def test_activations_neither_overflow_nor_lose_digits(self, x):
        assert kernels.log_activation(TANH, 1.0, x) == pytest.approx(-np.logaddexp(0, -2 * x), rel=1e-14)
        assert kernels.log_activation(SQUARE, 0.5, x) == pytest.approx(2 * np.log(abs(1 + 0.5 * x)), rel=1e-14)
        assert kernels.log_activation(EXP, 1.0, x) == x
        assert kernels.log_activation(SQUARE, 0.5, -2.0) == -np.inf


def isotropic_predictors():
    """Predictors of the small task with their exact risks."""
    d, L, noise = SMALL.dim, SMALL.context, SMALL.noise
    steps = gradient_descent.vanilla_step(SMALL), gradient_descent.debiased_step(SMALL)
    tanh, square = activations.shifted_tanh(), activations.square(0.5)
    two, one = ([0.3, -0.3], [1.2, -1.2]), ([0.6], [1.0])
    return {
        "vanilla": (GradientDescent(steps[0]), float(gradient_descent.vanilla_step_risk(SMALL, steps[0]))),
        "debiased": (
            GradientDescent(steps[1], debiased=True),
            float(gradient_descent.debiased_step_risk(SMALL, steps[1])),
        ),
        "bayes": (bayes_predictor(SMALL), bayes_risk(SMALL).value),
        # Inverse Wishart: E tr W^-1 = d / (L - d - 1).
        "least squares": (LeastSquares(), noise * (1 + d / (L - d - 1))),
        "one head": (AttentionHeads(*one), softmax_risk(SMALL, *one).value),
        "two heads": (AttentionHeads(*two), softmax_risk(SMALL, *two).value),
        "tanh": (
            AttentionHeads(*two, activation="1+tanh"), activations.activation_risk(SMALL, tanh, 0.3, 1.2).value,
        ),
        "square": (
            AttentionHeads(*two, activation="(1+Cx)^2", scale=0.5),
            activations.activation_risk(SMALL, square, 0.3, 1.2).value,
        ),
    }  # fmt: skip


class TestExactRisks:
    """Student with 50 degrees or more: |z| > 4.5 by chance in 4e-5 of seeds, 36 comparisons at fixed seeds."""

    def test_isotropic_risks_and_all_differences(self):
        table = isotropic_predictors()
        sample = regression_risks(
            SMALL, {name: predictor for name, (predictor, _) in table.items()}, relative_error=2e-3, seed=1
        )
        assert sample.status is Status.DONE
        for name, (_, exact) in table.items():
            estimate = sample.estimate(name)
            assert estimate.chunks > 50
            assert estimate.stderr <= 2e-3 * estimate.value
            assert abs(estimate.z_score(exact)) < 4.5
            for other, (_, other_exact) in table.items():
                if name < other:
                    assert abs(sample.difference(name, other).z_score(exact - other_exact)) < 4.5
        # Common contexts: the two kinds of descent differ by 0.6 %, which separate samples would not resolve.
        apart = np.hypot(sample.estimate("vanilla").stderr, sample.estimate("debiased").stderr)
        assert sample.difference("vanilla", "debiased").stderr < apart / 2

    def test_any_covariance_and_prior(self):
        G = np.array([[0.7, 0.1, 0.0], [-0.2, 0.6, 0.1], [0.0, 0.3, 0.5]])
        best = gradient_descent.debiased_preconditioner(SKEW, PRIOR)
        table = {
            "vanilla": (GradientDescent(1.0, G), gradient_descent.vanilla_risk(SKEW, G, PRIOR)),
            "step": (GradientDescent(0.5, G), gradient_descent.vanilla_risk(SKEW, 0.5 * G, PRIOR)),
            "debiased": (GradientDescent(1.0, G, True), gradient_descent.debiased_risk(SKEW, G, PRIOR)),
            "best": (GradientDescent(1.0, best, True), gradient_descent.debiased_risk(SKEW, best, PRIOR)),
        }
        sample = regression_risks(
            SKEW,
            {name: predictor for name, (predictor, _) in table.items()},
            prior=PRIOR,
            relative_error=5e-3,
            seed=2,
        )
        for name, (_, exact) in table.items():
            assert abs(sample.estimate(name).z_score(exact)) < 4.5

    def test_small_scores_make_two_heads_debiased_descent(self):
        # (5.4) tends to (5.5): at gamma = 1e-4 the weights differ by 1e-8, and the risks on common contexts too.
        key_query, gamma = np.diag([0.5, 0.8, 1.1]), 1e-4
        predictors = {
            "heads": AttentionHeads([gamma, -gamma], [0.9 / (2 * gamma), -0.9 / (2 * gamma)], key_query),
            "descent": GradientDescent(0.9, key_query, debiased=True),
        }
        sample = regression_risks(SKEW, predictors, prior=PRIOR, relative_error=0.05, seed=3)
        assert abs(sample.difference("heads", "descent").value) < 1e-6

    def test_nothing_beats_the_bayes_predictor(self):
        predictors = {
            "bayes": bayes_predictor(SKEW, PRIOR),
            "wrong prior": bayes_predictor(SKEW),
            "ridge": Ridge(0.5),
            "descent": GradientDescent(1.0, gradient_descent.vanilla_preconditioner(SKEW, PRIOR)),
        }
        sample = regression_risks(SKEW, predictors, prior=PRIOR, relative_error=0.01, seed=4)
        for name in ("wrong prior", "ridge", "descent"):
            # In every single context the posterior mean has the least averaged loss.
            assert (sample.chunk_means[:, sample.names.index(name)] > sample.chunk_means[:, 0]).all()

    def test_without_noise_least_squares_is_exact(self):
        sample = regression_risks(RegressionTask(2, 8, 0.0), {"x": LeastSquares()}, relative_error=1.0, seed=5)
        assert sample.estimate("x").value < 1e-25


class TestChunks:
    def test_same_bits_for_any_number_of_workers(self):
        predictors = {"bayes": bayes_predictor(SMALL), "descent": GradientDescent(0.7)}
        runs = [
            regression_risks(SMALL, predictors, relative_error=0.01, seed=6, workers=workers) for workers in (1, 2, 8)
        ]
        for run in runs[1:]:
            np.testing.assert_array_equal(run.chunk_means, runs[0].chunk_means)

    def test_contexts_depend_on_task_and_seed_alone(self):
        alone = regression_risks(SMALL, {"x": Ridge(1.0)}, relative_error=1.0, seed=7)
        among = regression_risks(SMALL, {"y": LeastSquares(), "x": Ridge(1.0)}, relative_error=1.0, seed=7)
        np.testing.assert_array_equal(among.chunk_means[:, 1], alone.chunk_means[:, 0])
        other = regression_risks(SMALL, {"x": Ridge(1.0)}, relative_error=1.0, seed=8)
        assert (other.chunk_means != alone.chunk_means).all()

    def test_sample_limit_is_reported(self):
        sample = regression_risks(SMALL, {"x": Ridge(1.0)}, relative_error=1e-9, seed=9, max_contexts=32 * 1024)
        assert (sample.status, sample.samples) == (Status.SAMPLE_LIMIT, 32 * 1024)
        assert sample.estimate("x").status is Status.SAMPLE_LIMIT


@pytest.mark.parametrize(
    ("task", "predictors", "changes", "words"),
    [
        (5, {"x": Ridge(1.0)}, {}, "task must be a RegressionTask"),
        (RegressionTask(10**4, 10**4, 0.1), {"x": Ridge(1.0)}, {}, "dim \\* max\\(context, dim\\)"),
        (SMALL, {}, {}, "predictors must map"),
        (SMALL, {"x": 1.0}, {}, "x must be one of the predictors"),
        (SMALL, {"x": GradientDescent(np.inf)}, {}, "x: step"),
        (SMALL, {"x": GradientDescent(1.0, np.eye(2))}, {}, "x: preconditioner must be a finite matrix"),
        (SMALL, {"x": GradientDescent(1.0, "no")}, {}, "x: preconditioner must be a matrix of numbers"),
        (SMALL, {"x": Ridge(0.0)}, {}, "x: penalty"),
        (SMALL, {"x": Ridge(-np.eye(3))}, {}, "x: penalty must be positive definite"),
        (RegressionTask(3, 6, 0.1), {"x": LeastSquares()}, {}, "context >= dim \\+ 4 = 7"),
        (SMALL, {"x": AttentionHeads([1.0], [1.0, 2.0])}, {}, "one number per head"),
        (SMALL, {"x": AttentionHeads([1.0], [np.nan])}, {}, "mu must be finite"),
        (SMALL, {"x": AttentionHeads([1.0], [1.0], activation="1+Cx")}, {}, "x: activation must be one of"),
        (SMALL, {"x": AttentionHeads([1.0], [1.0], scale=-1.0)}, {}, "x: scale"),
        (SMALL, {"x": Ridge(1.0)}, {"prior": np.zeros((3, 3))}, "prior must be positive definite"),
        (SMALL, {"x": Ridge(1.0)}, {"relative_error": 0}, "relative_error"),
        (SMALL, {"x": Ridge(1.0)}, {"seed": -1}, "seed"),
        (SMALL, {"x": Ridge(1.0)}, {"max_contexts": 5}, "max_contexts"),
        (SMALL, {"x": GradientDescent(1e99, 1e99 * np.eye(3))}, {}, "predictors must keep the risk finite"),
    ],
)
def test_bad_arguments_are_named(task, predictors, changes, words):
    with pytest.raises(DomainError, match=words):
        regression_risks(task, predictors, **{"relative_error": 0.1, "seed": 0, **changes})


def test_bayes_needs_noise():
    with pytest.raises(DomainError, match=r"task\.noise must be > 0"):
        bayes_predictor(RegressionTask(3, 10, 0.0))
