"""Contexts of the difficult task against naive twins, exact moments and the traps of sampling them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sim.contexts import (
    Contexts,
    SampleSize,
    chunk_means,
    estimate_from_chunks,
    haar_rotations,
    sample_contexts,
    sample_labels,
    target_rows,
    top_indices,
    unit_directions,
    visible_teacher_variances,
)
from sim.streams import stream
from theory.problems import ArraySpectrum, PowerLawSpectrum, TopKTask
from theory.results import DomainError, FloatArray

ISOTROPIC = TopKTask(PowerLawSpectrum(0, 0, 4), 6, 2)
HIDDEN_TEACHER = TopKTask(PowerLawSpectrum(0, 1.5, 4), 6, 2)
STEEP = TopKTask(PowerLawSpectrum(1, 0.5, 4), 6, 2)
TASKS = [ISOTROPIC, HIDDEN_TEACHER, STEEP]


def z_score(values: FloatArray, mean: float) -> float:
    return float((values.mean() - mean) / (values.std(ddof=1) / np.sqrt(len(values))))


def test_rotations_are_haar() -> None:
    rotations = haar_rotations(20_000, 8, stream(3, "haar test"))
    assert np.abs(rotations @ np.swapaxes(rotations, 1, 2) - np.eye(8)).max() < 1e-13
    traces = np.trace(rotations, axis1=1, axis2=2)
    assert abs(z_score(traces, 0.0)) < 4
    assert abs(z_score(traces**2, 1.0)) < 4
    for row, column in [(0, 0), (0, 7), (5, 2)]:
        assert abs(z_score(rotations[:, row, column] ** 2, 1 / 8)) < 4


def test_raw_qr_would_fail_the_test_of_the_trace() -> None:
    raw = np.linalg.qr(stream(3, "haar test").standard_normal((20_000, 8, 8)))[0]
    assert abs(z_score(np.trace(raw, axis1=1, axis2=2), 0.0)) > 100


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_ties_take_the_lowest_index(top_k: int) -> None:
    scores = stream(1, "ties").integers(0, 3, (200, 9)).astype(float)
    expected = [sorted(range(9), key=lambda i, row=row: (-row[i], i))[:top_k] for row in scores]
    assert top_indices(scores, top_k).tolist() == expected
    target = target_rows(scores, top_k)
    assert np.allclose(target.sum(axis=1), 1)
    assert [np.flatnonzero(row).tolist() for row in target] == [sorted(row) for row in expected]


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_directions_are_free_of_scale(scale: float) -> None:
    vectors = stream(2, "directions").standard_normal((5, 3, 4))
    directions = unit_directions(scale * vectors)
    assert np.allclose(directions, vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_vectors_without_direction_are_refused(bad: float) -> None:
    vectors = np.ones((2, 3))
    vectors[1] = bad
    with pytest.raises(DomainError, match="vectors must be finite and not zero"):
        unit_directions(vectors)


@pytest.mark.parametrize("task", TASKS)
def test_contexts_are_consistent(task: TopKTask) -> None:
    contexts = sample_contexts(task, 50, stream(4, "consistent"))
    tokens, queries = contexts.rotated(contexts.tokens), contexts.rotated(contexts.query)
    lengths = np.linalg.norm(tokens, axis=2) * np.linalg.norm(queries, axis=1)[:, None]
    cosines = np.einsum("npi,ni->np", tokens, queries) / lengths
    assert np.allclose(contexts.cosines, cosines, atol=1e-13)
    assert np.allclose(np.linalg.norm(contexts.directions, axis=-1), 1)
    assert np.allclose(np.linalg.norm(contexts.query_direction, axis=-1), 1)
    assert contexts.target.tolist() == target_rows(contexts.cosines, task.top_k).tolist()
    assert (contexts.rotation is None) == task.spectrum.isotropic_input


def test_tokens_have_the_spectrum_in_the_eigenbasis_and_none_in_the_frame_of_the_network() -> None:
    contexts = sample_contexts(STEEP, 4000, stream(5, "covariance"))
    variances = STEEP.spectrum.input_variances()
    tokens, seen = contexts.tokens[:, 0], contexts.rotated(contexts.tokens)[:, 0]
    for mode in range(4):
        assert abs(z_score(tokens[:, mode] ** 2, variances[mode])) < 4
        assert abs(z_score(seen[:, mode] ** 2, variances.mean())) < 4
    assert abs(z_score(seen[:, 0] * seen[:, 1], 0.0)) < 4


def test_rotation_may_be_switched_off_without_a_change_of_cosines() -> None:
    with_rotation = sample_contexts(STEEP, 10, stream(6, "off"))
    without = sample_contexts(STEEP, 10, stream(6, "off"), rotate=False)
    assert without.rotation is None
    assert without.cosines.tolist() == with_rotation.cosines.tolist()


def test_an_isotropic_input_hides_the_basis_of_the_teacher() -> None:
    omega = HIDDEN_TEACHER.spectrum.teacher_variances()
    assert np.allclose(visible_teacher_variances(HIDDEN_TEACHER), omega.mean())
    assert np.allclose(visible_teacher_variances(STEEP), STEEP.spectrum.teacher_variances())
    contexts = sample_contexts(HIDDEN_TEACHER, 1, stream(7, "hidden"))
    read = contexts.target[0] @ contexts.tokens[0]
    turned = haar_rotations(20_000, 4, stream(7, "turns")) @ read
    averaged = float(np.sum((contexts.target[0] @ contexts.label_factors()[0]) ** 2))
    assert abs(z_score(turned**2 @ omega, averaged)) < 4


@pytest.mark.parametrize("task", TASKS)
def test_labels_have_the_second_moment_of_their_factors(task: TopKTask) -> None:
    generator = stream(8, "labels")
    contexts = sample_contexts(task, 20_000, generator)
    labels = sample_labels(contexts, generator)
    weights = contexts.target - 0.1
    averaged = np.einsum("np,npi->ni", weights, contexts.label_factors())
    difference = (weights * labels).sum(axis=1) ** 2 - (averaged**2).sum(axis=1)
    assert abs(z_score(difference, 0.0)) < 4


def test_labels_of_isotropic_inputs_have_the_fourth_moment_of_a_turned_teacher() -> None:
    # E (β.x)^4 = 3 (2 Σ ω² + (Σ ω)²) for x ~ N(0, I): a Gaussian teacher of the same trace would give less.
    generator = stream(9, "fourth moment")
    labels = sample_labels(sample_contexts(HIDDEN_TEACHER, 40_000, generator), generator)
    omega = HIDDEN_TEACHER.spectrum.teacher_variances()
    assert abs(z_score(labels[:, 0] ** 4, 3 * float(2 * (omega**2).sum() + omega.sum() ** 2))) < 4


def test_streams_are_reproducible_and_chunks_independent() -> None:
    def measure(contexts: Contexts) -> FloatArray:
        return contexts.cosines[:, :2]

    size = SampleSize(chunks=3, chunk_batches=2, batch=5)
    first, second = (chunk_means(measure, STEEP, 11, "chunks", size) for _ in range(2))
    assert first.shape == (3, 2)
    assert first.tolist() == second.tolist()
    assert len(np.unique(first)) == 6
    longer = chunk_means(measure, STEEP, 11, "chunks", SampleSize(chunks=4, chunk_batches=2, batch=5))
    assert longer[:3].tolist() == first.tolist()
    assert size.contexts == 30


def test_estimate_from_chunks() -> None:
    estimate = estimate_from_chunks(np.array([1.0, 2.0, 3.0]), 30, 5)
    assert (estimate.value, estimate.chunks, estimate.samples, estimate.seed) == (2.0, 3, 30, 5)
    assert estimate.stderr == pytest.approx(1 / np.sqrt(3), rel=1e-15)
    with pytest.raises(DomainError, match="chunks must be an integer from 2"):
        estimate_from_chunks(np.array([1.0]), 30, 5)


@pytest.mark.parametrize("field", ["chunks", "chunk_batches", "batch"])
def test_sample_sizes_are_validated(field: str) -> None:
    with pytest.raises(DomainError, match=f"{field} must be an integer"):
        SampleSize(**{field: 0})


def test_count_is_validated() -> None:
    with pytest.raises(DomainError, match="count must be an integer from 1"):
        sample_contexts(ISOTROPIC, 0, stream(0, "count"))


def test_extreme_scales_keep_the_targets() -> None:
    plain = sample_contexts(TopKTask(ArraySpectrum((1.0, 1.0), (1.0, 1.0)), 5, 2), 20, stream(1, "scale"))
    tiny = sample_contexts(TopKTask(ArraySpectrum((1e-100, 1e-100), (1.0, 1.0)), 5, 2), 20, stream(1, "scale"))
    assert plain.target.tolist() == tiny.target.tolist()


def test_sampling_and_configuration_need_no_torch() -> None:
    code = (
        "import sys, sim, sim.contexts, sim.training, sim.montecarlo.single_softmax; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
