"""Terms of the layer ensemble: twin, sums over pairs, single layers, the mean-field features and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from sim.contexts import SampleSize, sample_contexts, visible_teacher_variances
from sim.montecarlo.kernels.layer_ensemble import layer_ensemble_batch
from sim.montecarlo.layer_ensemble import matrix_layer_terms, typed_layer_terms
from sim.montecarlo.mean_field_features import mean_field_features
from sim.montecarlo.single_softmax import evaluate_single_softmax
from sim.montecarlo.stopping import mean_over_chunks
from sim.streams import stream
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError, Status

pytestmark = pytest.mark.long

SMALL = TopKTask(PowerLawSpectrum(1, 0.5, 4), 8, 2)
ISOTROPIC = TopKTask(PowerLawSpectrum(0, 0, 4), 8, 2)
ROUNDING = 1e-12


def naive_terms(contexts, reads, gain):
    """R, A, C and A - C from depth (61) and (63), pair by pair, with the covariance of the labels."""
    layers = reads.shape[1]
    records = []
    for n in range(len(reads)):
        tokens, target = contexts.tokens[n], contexts.target[n]
        covariance = (tokens * visible_teacher_variances(contexts.task)) @ tokens.T
        rows = []
        for u in reads[n]:
            powers = np.exp(contexts.directions[n] @ u)
            rows.append(gain * powers / powers.sum() - target)
        E = np.array(rows) @ covariance @ np.array(rows).T
        pairs = [(i, j) for i in range(layers) for j in range(layers) if i != j]
        shared = sum(E[p] for p in pairs) / len(pairs)
        apart = sum(E[i, i] + E[j, j] - 2 * E[i, j] for i, j in pairs) / (2 * len(pairs))
        records.append((E.mean(), np.trace(E) / layers, shared, apart))
    return np.mean(records, axis=0)


@pytest.mark.parametrize("task", [SMALL, ISOTROPIC])
def test_twin_by_pairs(task):
    rng = stream(1, "layers")
    contexts = sample_contexts(task, 12, rng, rotate=False)
    reads = 5 * rng.standard_normal((12, 3, 4))
    found = layer_ensemble_batch(contexts.directions, reads, contexts.label_factors(), contexts.target, 0.9)
    np.testing.assert_allclose(found, naive_terms(contexts, reads, 0.9), rtol=ROUNDING)


def test_the_loss_splits_exactly():
    sample = typed_layer_terms(SMALL, [(2, 1), (5, 0), (3, 8)], 1.1, relative_error=0.05, seed=1)
    risk, layer, shared, apart = sample.chunk_means.T
    np.testing.assert_allclose(risk, shared + apart / 3, rtol=ROUNDING)
    np.testing.assert_allclose(layer, shared + apart, rtol=ROUNDING)
    assert (apart > 0).all()


def test_equal_layers_do_not_disagree_and_are_one_softmax():
    # Student with 15 degrees or more: |z| > 4.5 by chance in 4e-4 of seeds, fixed here.
    single = evaluate_single_softmax(SMALL, 6.0, 2, SampleSize(16, 4, 256))
    for sample in (
        typed_layer_terms(SMALL, [(6, 0)] * 3, single.gain, relative_error=0.01, seed=2),
        matrix_layer_terms(SMALL, [6 * np.eye(4)] * 3, single.gain, relative_error=0.01, seed=2),
    ):
        estimate = sample.estimate("risk")
        assert estimate.status is Status.DONE
        assert abs(estimate.z_score(single.loss.value, single.loss.stderr)) < 4.5
        assert sample.estimate("disagreement").value < 1e-25
        assert sample.difference("layer risk", "shared").value == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("task", [SMALL, ISOTROPIC])
def test_terms_of_a_type_are_those_of_the_mean_field_features(task):
    # Independent code and independent contexts: C = T - 2 g h + g^2 G, A = T - 2 g h + g^2 (power of one layer).
    alpha, beta, gain, chunks = 4.0, 3.0, 1.2, 60
    features = mean_field_features(task, np.array([[alpha, beta]]), seed=3, chunks=chunks)
    linear = features.target_power[:, 0] - 2 * gain * features.cross[:, 0, 0]
    shared = mean_over_chunks(linear + gain**2 * features.gram[:, 0, 0, 0])
    layer = mean_over_chunks(linear + gain**2 * features.single_power[:, 0, 0])
    sample = typed_layer_terms(task, [(alpha, beta)] * 4, gain, relative_error=0.01, seed=4)
    assert abs(sample.estimate("shared").z_score(*shared)) < 4.5
    assert abs(sample.estimate("layer risk").z_score(*layer)) < 4.5


@pytest.mark.parametrize("task", [SMALL, ISOTROPIC])
def test_matrices_see_rotated_contexts(task):
    # A rotation of the frame of the network changes no risk, and matrices are not read in the eigenbasis.
    B = 6 * np.eye(4) + 3 * stream(5, "matrices").standard_normal((3, 4, 4))
    turn, _ = np.linalg.qr(stream(6, "turn").standard_normal((4, 4)))
    one = matrix_layer_terms(task, B, relative_error=0.01, seed=7)
    other = matrix_layer_terms(task, turn @ B @ turn.T, relative_error=0.01, seed=8)
    for name in one.names:
        expected = other.estimate(name)
        assert abs(one.estimate(name).z_score(expected.value, expected.stderr)) < 4.5


def test_same_bits_for_any_number_of_workers():
    runs = [typed_layer_terms(SMALL, [(2, 1), (5, 0)], relative_error=0.02, seed=9, workers=w) for w in (1, 2, 8)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.chunk_means, runs[0].chunk_means)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda **k: typed_layer_terms(5, [(1, 1), (1, 1)], **k), "task must be a TopKTask"),
        (lambda **k: typed_layer_terms(SMALL, [(1, 1)], **k), "at least 2 layers"),
        (lambda **k: typed_layer_terms(SMALL, [(1, 1, 1)] * 2, **k), "types must have shape"),
        (lambda **k: typed_layer_terms(SMALL, [(1, np.nan)] * 2, **k), "types must be finite"),
        (lambda **k: typed_layer_terms(SMALL, "no", **k), "types must be an array"),
        (lambda **k: typed_layer_terms(SMALL, [(1, 1)] * 2, np.inf, **k), "gain"),
        (lambda **k: typed_layer_terms(SMALL, np.ones((600, 2)), **k), "at most 262144"),
        (lambda **k: matrix_layer_terms(SMALL, np.ones((2, 3, 3)), **k), r"shape \(L, 4, 4\)"),
        (lambda **k: matrix_layer_terms(SMALL, np.ones((4, 4)), **k), "3 axes"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(DomainError, match=words):
        call(relative_error=0.1, seed=0)
