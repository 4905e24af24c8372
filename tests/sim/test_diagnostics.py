"""Diagnostics of models of one's own: what they return is what training measures, and wrong models are refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from sim.contexts import SampleSize, sample_contexts
from sim.diagnostics import ModelOutput, diagnose
from sim.streams import stream
from theory.problems import CopyTask, PowerLawSpectrum, TopKTask
from theory.results import DomainError, PrecisionError

SPECTRUM = PowerLawSpectrum(1, 0.5, dim=4, input_scale=3, teacher_scale=5)
TASKS = [TopKTask(SPECTRUM, 8, 2), TopKTask(PowerLawSpectrum(0, 1, dim=4), 8, 3), CopyTask(SPECTRUM, 8)]
SMALL = SampleSize(chunks=4, chunk_batches=2, batch=32)
# Two linear maps of the same numbers in another order.
ROUNDING = 1e-12
# |z| < 4.5 fails by chance with probability 7e-6.
Z_LIMIT = 4.5


def directions(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def kernel_regression(tokens, query, labels, sharpness=(3.0, 8.0), gain=1.0):
    cosines = np.einsum("npd,nd->np", directions(tokens), directions(query))
    rows = np.exp(cosines[:, None] * np.array(sharpness)[:, None])
    rows /= rows.sum(axis=-1, keepdims=True)
    layers = gain * np.einsum("nlp,np->nl", rows, labels)
    return ModelOutput(layers.mean(axis=1), layers, rows)


def predictions_only(tokens, query, labels):
    return kernel_regression(tokens, query, labels).predictions


def zero(tokens, query, labels):
    return np.zeros(len(query))


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_averaged_and_sampled_losses_agree_and_decompose(task) -> None:
    size = SampleSize(chunks=16, chunk_batches=1, batch=256)
    averaged = diagnose(kernel_regression, task, linear=True, size=size)
    sampled = diagnose(kernel_regression, task, size=size)
    for name in ("loss", "zero_loss", "shared_error", "disagreement"):
        one, other = getattr(averaged, name), getattr(sampled, name)
        assert abs(other.z_score(one.value, one.stderr)) < Z_LIMIT
    for found in (averaged, sampled):
        assert found.shared_error.value + found.disagreement.value / 2 == pytest.approx(
            found.loss.value, rel=ROUNDING
        )
        assert found.attention_mass == averaged.attention_mass  # the same contexts
    assert sum(mode.value for mode in averaged.mode_losses.values()) == pytest.approx(
        averaged.loss.value, rel=ROUNDING
    )
    assert list(averaged.mode_losses) == [1, 2, 3, 4]
    assert sampled.mode_losses is None


def test_selection_is_that_of_the_mean_row() -> None:
    task = TASKS[0]
    found = diagnose(kernel_regression, task, size=SMALL, percentiles=(0, 50, 100))
    errors, masses = [], []
    for chunk in range(SMALL.chunks):
        generator = stream(0, "evaluation contexts", chunk)
        for _ in range(SMALL.chunk_batches):
            contexts = sample_contexts(task, SMALL.batch, generator)
            row = kernel_regression(contexts.tokens, contexts.query, np.zeros_like(contexts.target)).attention.mean(
                axis=1
            )
            errors.append(((row - contexts.target) ** 2).sum(axis=1))
            masses.append((row * (contexts.target > 0)).sum(axis=1))
    assert found.selection_error.value == pytest.approx(np.mean(errors), rel=ROUNDING)
    assert found.attention_mass.value == pytest.approx(np.mean(masses), rel=ROUNDING)
    percentiles = [estimate.value for estimate in found.selection_percentiles.values()]
    assert percentiles == pytest.approx(np.percentile(errors, [0, 50, 100]), rel=1e-9)


def test_predicting_zero_has_the_loss_of_zero() -> None:
    found = diagnose(zero, TASKS[2], linear=True, size=SMALL)
    assert found.loss == found.zero_loss
    # The target of the copy task is the label of one token, of variance sum λω, whatever the context.
    assert abs(found.loss.z_score(SPECTRUM.label_variances().sum())) < Z_LIMIT
    assert (found.shared_error, found.attention_mass, found.selection_percentiles) == (None, None, None)


def test_results_are_json_and_repeat() -> None:
    found = diagnose(kernel_regression, TASKS[0], linear=True, size=SMALL, seed=3)
    again = diagnose(kernel_regression, TASKS[0], linear=True, size=SMALL, seed=3)
    assert found == again
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert content["mode_losses"]["1"]["value"] == found.mode_losses[1].value
    assert content["selection_percentiles"]["50"]["seed"] == 3
    assert content["task"] == TASKS[0].to_json()


def wrong_shape(tokens, query, labels):
    return np.zeros((len(query), 2))


def not_finite(tokens, query, labels):
    return np.full(len(query), math.nan)


def layers_that_add_up(tokens, query, labels):
    output = kernel_regression(tokens, query, labels)
    return ModelOutput(output.predictions, 0.5 * np.asarray(output.layers))


def wrong_attention(tokens, query, labels):
    return ModelOutput(np.zeros(len(query)), attention=np.zeros((len(query), 3)))


def squared(tokens, query, labels):
    return labels[:, 0] ** 2


@pytest.mark.parametrize(
    ("model", "linear", "error", "message"),
    [
        (wrong_shape, False, DomainError, r"predictions of the model must have shape \(32,\), got \(32, 2\)"),
        (not_finite, False, PrecisionError, "predictions of the model must be finite, got nan"),
        (layers_that_add_up, False, DomainError, "layers must have the prediction as their mean"),
        (
            wrong_attention,
            False,
            DomainError,
            r"attention of the model must have shape \(32, 8\) or \(32, 'any', 8\)",
        ),
        (squared, True, DomainError, "linear must be False"),
    ],
)
def test_wrong_models_are_refused(model, linear: bool, error, message: str) -> None:
    with pytest.raises(error, match=message):
        diagnose(model, TASKS[0], linear=linear, size=SMALL)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(DomainError, match="percentiles must be"):
        diagnose(zero, TASKS[0], percentiles=(101,))
    with pytest.raises(DomainError, match="context must be finite"):
        diagnose(zero, CopyTask(SPECTRUM))


def test_a_model_without_layers_or_attention_is_enough() -> None:
    found = diagnose(predictions_only, TASKS[1], size=SMALL)
    assert found.loss == diagnose(kernel_regression, TASKS[1], size=SMALL).loss


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    def test_a_trained_ensemble_measures_as_in_training(self) -> None:
        import torch

        from sim.experiments.softmax_attention import SoftmaxAttention
        from sim.training import TrainingConfig, train, trained_model

        class Wrapped(torch.nn.Module):
            def __init__(self, ensemble):
                super().__init__()
                self.ensemble = ensemble

            def forward(self, tokens, query, labels):
                unit = [
                    vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) for vectors in (tokens, query)
                ]
                rows = self.ensemble.attention(unit[0][None], unit[1][None])[0]
                layers = self.ensemble.gain * (rows @ labels[..., None])[..., 0]
                return ModelOutput(layers.mean(dim=1), layers, rows)

        size = SampleSize(chunks=32, chunk_batches=1, batch=128)
        config = TrainingConfig(SoftmaxAttention(TASKS[0], 2), steps=3, batch=8, evaluation=size)
        result = train(config)
        found = diagnose(Wrapped(trained_model(result)), TASKS[0], linear=True, size=size)
        for name in ("loss", "shared_error", "disagreement"):
            # Contexts of their own: beyond 5 errors once in 1e5 (Student, 31 degrees at least).
            trained = result.estimate(name)
            assert abs(getattr(found, name).z_score(trained.value, trained.stderr)) < 5
        assert found.selection_percentiles is not None

    def test_modules_get_tensors_of_their_own_type(self) -> None:
        import torch

        class Mean(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.gain = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float32))

            def forward(self, tokens, query, labels):
                assert tokens.dtype == query.dtype == labels.dtype == torch.float32
                assert not torch.is_grad_enabled()
                return self.gain * labels.mean(dim=1)

        found = diagnose(Mean(), TASKS[0], linear=True, size=SMALL)
        plain = diagnose(lambda tokens, query, labels: 0.5 * labels.mean(axis=1), TASKS[0], linear=True, size=SMALL)
        assert found.loss.value == pytest.approx(plain.loss.value, rel=1e-5)
