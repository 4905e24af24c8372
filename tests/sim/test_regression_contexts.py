"""Laws of the drawn contexts: normals, tokens, labels with their noise once, reduced contexts, posterior."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from sim.montecarlo.kernels.normals import fill_normals, radii, split_by_angle
from sim.regression_contexts import (
    LANES,
    RegressionContexts,
    float32_normals,
    posterior_predictive,
    sample_reduced_regression,
    sample_regression,
    signal_masks,
)
from sim.streams import stream
from theory.problems import MultiTaskRegression, RegressionTask
from theory.results import DomainError

CORRELATED = ((1.0, 0.5, 0.2), (0.5, 2.0, -0.3), (0.2, -0.3, 0.7))
TWO_TASKS = MultiTaskRegression(3, 4, 0.5, ((1, 2), (2, 3)))
COUNT = 60_000
# Two-sided tail of a z-score beyond 5 is 6e-7; no test below looks at more than 60 of them.
SIGMAS = 5.0


def normals(seed: int, *shape: int) -> np.ndarray:
    out = np.empty(shape, np.float32)
    float32_normals(stream(seed, "normals"), out)
    return out


def whole(task, count, generator, **options) -> RegressionContexts:
    """Contexts of one member, without the axis of members."""
    contexts = sample_regression(task, count, [generator], **options)
    return RegressionContexts(*(getattr(contexts, f.name)[0] for f in dataclasses.fields(contexts)))


def assert_mean(values: np.ndarray, expected: float) -> None:
    values = np.asarray(values, dtype=np.float64)
    assert abs(values.mean() - expected) < SIGMAS * values.std() / np.sqrt(values.size)


def test_normals_are_normal():
    drawn = normals(1, 500_001).astype(np.float64)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        assert_mean(drawn**power, moment)
    tail = (np.abs(drawn) > 4).mean()
    expected = 2 * stats.norm.sf(4)
    assert abs(tail - expected) < SIGMAS * np.sqrt(expected / drawn.size)


def test_both_normals_of_a_pair_are_independent():
    drawn = normals(2, 2 * LANES * 500).astype(np.float64).reshape(500, 2, LANES)
    first, second = drawn[:, 0], drawn[:, 1]
    assert_mean(first * second, 0)
    assert_mean(first**2 * second**2, 1)
    assert_mean(first**3 * second, 0)


def test_lanes_follow_their_generator_and_the_rule_of_box_and_muller():
    state = stream(3, "lanes").integers(0, 2**32, (4, 8), dtype=np.uint32)
    words = [[int(word) for word in lane] for lane in state.T]

    def rotated(word: int, by: int) -> int:
        return (word << by | word >> (32 - by)) & 0xFFFFFFFF

    def drawn(lane: list[int]) -> int:  # xoshiro128++, on Python's integers
        result = (rotated((lane[0] + lane[3]) & 0xFFFFFFFF, 7) + lane[0]) & 0xFFFFFFFF
        shifted = lane[1] << 9 & 0xFFFFFFFF
        lane[2] ^= lane[0]
        lane[3] ^= lane[1]
        lane[1] ^= lane[2]
        lane[0] ^= lane[3]
        lane[2] ^= shifted
        lane[3] = rotated(lane[3], 11)
        return result

    expected = []
    for _ in range(40):
        radii = [math.sqrt(-2 * math.log((drawn(lane) + 0.5) / 2**32)) for lane in words]
        pairs = []
        for radius, word in zip(radii, [drawn(lane) for lane in words], strict=True):
            signed = word - 2**32 if word >= 2**31 else word
            angle = math.pi / 4 * signed / 2**31 + math.pi / 2 * (word & 1) + math.pi * (word >> 1 & 1)
            pairs.append((radius * math.cos(angle), radius * math.sin(angle)))
        expected += [first for first, _ in pairs] + [second for _, second in pairs]
    found = np.empty(len(expected), np.float32)
    fill_normals(state, found)
    # Float32 rounds u near 1, where the radius is small, by 3e-8: the radius then errs by the root of that.
    assert np.abs(found - np.array(expected)).max() < 5e-4
    assert np.median(np.abs(found - np.array(expected))) < 2e-7
    assert [[int(word) for word in lane] for lane in state.T] == words


@pytest.mark.parametrize("extreme", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_extreme_bits_give_finite_normals(extreme):
    bits = np.full(8, extreme, np.uint32)
    mantissa, radius, first, second = np.empty((4, 8), np.float32)
    radii(bits, mantissa, mantissa.view(np.int32), radius)
    assert radius[0] == pytest.approx(math.sqrt(-2 * math.log((extreme + 0.5) / 2**32)), rel=3e-7, abs=5e-4)
    split_by_angle(bits, radius, first, second)
    assert np.hypot(first[0], second[0]) == pytest.approx(radius[0], rel=3e-7)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 511, 512, 513, 1025])
def test_normals_of_any_size_are_those_of_the_stream(size):
    drawn = normals(3, size)
    assert np.isfinite(drawn).all()
    assert np.array_equal(drawn, normals(3, size))


def test_normals_need_a_contiguous_array():
    with pytest.raises(DomainError, match="contiguous"):
        float32_normals(stream(0, "normals"), np.empty((4, 4), np.float32)[:, :3])


@pytest.mark.parametrize("task", [RegressionTask(3, 4, 0.5), RegressionTask(3, 4, 0.5, CORRELATED)])
def test_whole_contexts_have_their_moments_and_noise_once(task):
    contexts = whole(task, COUNT, stream(4, "whole"))
    assert contexts.embedding.shape == (4, 4, COUNT)
    tokens, labels = contexts.embedding[:, :3].astype(float), contexts.embedding[:, 3].astype(float)
    covariance = task.covariance_matrix()
    for i in range(3):
        assert_mean(contexts.teacher[i] ** 2, 1 / 3)
        for j in range(3):
            assert_mean(tokens[1, i] * tokens[1, j], covariance[i, j])
            assert_mean(contexts.query[i] * contexts.query[j], covariance[i, j])
            assert_mean(tokens[0, i] * tokens[1, j], 0)
    for noisy, seen in ((labels[2], tokens[2]), (contexts.target[0], contexts.query)):
        noise = noisy - (contexts.teacher * seen).sum(axis=0)
        assert_mean(noise**2, task.noise)
        assert_mean(noisy**2, np.trace(covariance) / 3 + task.noise)


def test_noise_of_labels_is_independent():
    task = RegressionTask(2, 3, 1.5)
    contexts = whole(task, COUNT, stream(5, "whole"))
    clean = np.einsum("in,lin->ln", contexts.teacher, contexts.embedding[:, :2])
    noise = np.vstack(
        [contexts.embedding[:, 2] - clean, contexts.target - (contexts.teacher * contexts.query).sum(0)]
    )
    for i in range(4):
        for j in range(i):
            assert_mean(noise[i] * noise[j], 0)


def test_labels_of_several_tasks_use_their_coordinates_of_one_teacher():
    contexts = whole(TWO_TASKS, COUNT, stream(6, "tasks"), teacher_variance=2.0)
    assert contexts.embedding.shape == (4, 5, COUNT)
    assert signal_masks(TWO_TASKS).tolist() == [[1, 1, 0], [0, 1, 1]]
    assert_mean(contexts.teacher[0] ** 2, 2.0)
    for output, members in enumerate(((0, 1), (1, 2))):
        for labels, tokens in (
            (contexts.embedding[1, 3 + output], contexts.embedding[1, :3]),
            (contexts.target[output], contexts.query),
        ):
            clean = sum(contexts.teacher[i] * tokens[i] for i in members)
            assert_mean((labels - clean) ** 2, 0.5)
            assert_mean((labels - clean) * clean, 0)


@pytest.mark.parametrize("task", [RegressionTask(3, 4, 0.5, CORRELATED), TWO_TASKS])
def test_posterior_is_gaussian_conditioning(task):
    contexts = sample_regression(task, 5, [stream(7, "posterior"), stream(8, "posterior")], teacher_variance=0.7)
    mean, variance = posterior_predictive(task, contexts, teacher_variance=0.7)
    masks = signal_masks(task)
    for member, n in itertools.product(range(2), range(5)):
        embedding = contexts.embedding[member, :, :, n].astype(float)
        tokens, labels = embedding[:, :3], embedding[:, 3:]
        design = (masks[:, None, :] * tokens[None]).reshape(-1, 3)  # labels of output 1, then of output 2
        joint = 0.7 * design @ design.T + task.noise * np.eye(len(design))
        for output, mask in enumerate(masks):
            seen = mask * contexts.query[member, :, n]
            cross = 0.7 * design @ seen
            assert mean[member, output, n] == pytest.approx(
                cross @ np.linalg.solve(joint, labels.T.ravel()), rel=1e-10
            )
            expected = task.noise + 0.7 * seen @ seen - cross @ np.linalg.solve(joint, cross)
            assert variance[member, output, n] == pytest.approx(expected, rel=1e-10)


def test_posterior_needs_noise():
    task = RegressionTask(2, 3, 0.0)
    with pytest.raises(DomainError, match="noise must be > 0"):
        posterior_predictive(task, sample_regression(task, 2, [stream(0, "posterior")]))


@pytest.mark.parametrize("dim", [1, 4])
def test_reduced_contexts_have_the_moments_of_whole_ones(dim):
    task = RegressionTask(dim, 3, 0.4)
    reduced = sample_reduced_regression(task, COUNT, [stream(8, "reduced")], labels=True)
    contexts = whole(task, COUNT, stream(9, "whole"))
    length = np.sqrt((contexts.query.astype(float) ** 2).sum(axis=0))
    projections = np.einsum("in,lin->ln", contexts.query, contexts.embedding[:, :dim]) / length
    drawn = (length, projections, contexts.embedding[:, dim], contexts.target[0])
    names = ("length", "projections", "labels", "target")

    def statistics(r, z, y, target):
        return [
            r**2,
            r**4,
            z[0] ** 2,
            z[0] * z[1],
            y[0] ** 2,
            y[0] ** 4,
            y[0] * y[1],
            y[0] ** 2 * y[1] ** 2,
            z[0] * z[1] * y[0] * y[1],
            z[0] * y[0] * r * target,
            target**2,
            target**4,
            y[0] ** 2 * target**2,
            r**2 * target**2,
        ]

    ours = statistics(*(getattr(reduced, name)[0].astype(float) for name in names))
    theirs = statistics(*(array.astype(float) for array in drawn))
    for one, other in zip(ours, theirs, strict=True):
        gap = (one.mean() - other.mean()) / np.sqrt((one.var() + other.var()) / COUNT)
        assert abs(gap) < SIGMAS


def test_reduced_contexts_without_labels_leave_them_out():
    reduced = sample_reduced_regression(RegressionTask(2, 3, 0.1), 4, [stream(10, "reduced")], labels=False)
    assert reduced.labels is None
    assert reduced.target is None


@pytest.mark.parametrize("task", [RegressionTask(3, 4, 0.5, CORRELATED), TWO_TASKS])
def test_only_isotropic_tokens_reduce(task):
    with pytest.raises(DomainError, match="isotropic"):
        sample_reduced_regression(task, 2, [stream(0, "reduced")], labels=False)
