"""Fast float32 contexts have the law of the exact ones: moments, targets, rotations, ties."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.contexts import sample_contexts, sample_labels
from sim.streams import stream
from theory.problems import ArraySpectrum, CopyTask, PowerLawSpectrum, TopKTask
from theory.results import DomainError

torch = pytest.importorskip("torch")

from sim.models.context_batches import draw_contexts, top_indices  # noqa: E402

STEEP = PowerLawSpectrum(1, 0.5, 4, input_scale=3, teacher_scale=5)
HIDDEN = PowerLawSpectrum(0, 1.5, 4)
TASKS = [TopKTask(STEEP, 6, 2), TopKTask(HIDDEN, 6, 2), TopKTask(STEEP, 6, 6), CopyTask(STEEP, 6)]
COUNT = 20_000
# Rounding of float32 in sums of a few terms of order one.
ROUNDING = 2e-6
# |z| < 4.5 fails by chance with probability 7e-6; there are about 60 such comparisons.
Z_LIMIT = 4.5


def z_score(values, other) -> float:
    values, other = np.asarray(values, dtype=float), np.asarray(other, dtype=float)
    variance = values.var(ddof=1) / len(values) + other.var(ddof=1) / len(other)
    return float((values.mean() - other.mean()) / math.sqrt(variance))


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_moments_are_those_of_exact_contexts(task) -> None:
    fast = draw_contexts(task, COUNT, stream(1, "fast"))
    generator = stream(2, "exact")
    exact = sample_contexts(task, COUNT, generator)
    unit = math.sqrt(task.spectrum.label_variances().sum())
    labels, exact_labels = fast.labels().numpy(), sample_labels(exact, generator) / unit
    factors, exact_factors = fast.label_factors().numpy(), exact.label_factors() / unit
    target = fast.target.numpy()
    seen = fast.rotated(fast.directions).numpy()
    exact_seen = exact.rotated(exact.directions)
    pairs = [
        ((labels * target).sum(axis=1) ** 2, (exact_labels * exact.target).sum(axis=1) ** 2),
        (labels[:, 0] ** 2, exact_labels[:, 0] ** 2),
        (labels[:, 0] * labels[:, 1], exact_labels[:, 0] * exact_labels[:, 1]),
        (
            ((factors * target[..., None]).sum(axis=1) ** 2).sum(axis=1),
            exact_target_power(exact_factors, exact.target),
        ),
        (seen[:, 0, 0] ** 2, exact_seen[:, 0, 0] ** 2),
        (seen[:, 0, 0] * seen[:, 1, 0], exact_seen[:, 0, 0] * exact_seen[:, 1, 0]),
        ((seen[:, 0] * seen[:, 1]).sum(axis=1) ** 2, (exact_seen[:, 0] * exact_seen[:, 1]).sum(axis=1) ** 2),
    ]
    pairs += [(factors[:, 2, mode] ** 2, exact_factors[:, 2, mode] ** 2) for mode in range(4)]
    for one, other in pairs:
        assert abs(z_score(one, other)) < Z_LIMIT


def exact_target_power(factors, target):
    return (np.einsum("np,npd->nd", target, factors) ** 2).sum(axis=1)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_contexts_are_consistent(task) -> None:
    batch = draw_contexts(task, 50, stream(3, "consistent"))
    tokens, query = batch.tokens.numpy().astype(float), batch.query.numpy().astype(float)
    cosines = np.einsum("npd,nd->np", tokens, query)
    cosines /= np.linalg.norm(tokens, axis=2) * np.linalg.norm(query, axis=1)[:, None]
    chosen = 1 if isinstance(task, CopyTask) else task.top_k
    for row, cosine in zip(batch.target.numpy(), cosines, strict=True):
        assert sorted(np.flatnonzero(row)) == sorted(np.argsort(-cosine)[:chosen])
        assert row.sum() == pytest.approx(1, abs=ROUNDING)
    if isinstance(task, CopyTask):
        assert np.allclose(np.einsum("np,npd->nd", batch.target.numpy(), tokens), query)
    assert torch.linalg.vector_norm(batch.directions, dim=-1).numpy() == pytest.approx(1, abs=ROUNDING)
    if batch.rotation is not None:
        product = batch.rotation @ batch.rotation.transpose(1, 2)
        assert (product - torch.eye(4)).abs().max() < ROUNDING
        seen = (batch.rotated(batch.tokens)[:, 0] * batch.rotated(batch.query)).sum(dim=1)
        assert torch.allclose(seen, (batch.tokens[:, 0] * batch.query).sum(dim=1), atol=10 * ROUNDING)


def test_rotations_are_haar() -> None:
    rotation = draw_contexts(TASKS[0], COUNT, stream(4, "haar")).rotation
    assert rotation is not None
    traces = rotation.diagonal(dim1=1, dim2=2).sum(dim=1).numpy().astype(float)
    assert abs(traces.mean() / (traces.std() / math.sqrt(COUNT))) < Z_LIMIT
    squares = traces**2
    assert abs((squares.mean() - 1) / (squares.std() / math.sqrt(COUNT))) < Z_LIMIT


@pytest.mark.parametrize("top_k", [1, 2, 5, 9])
def test_ties_take_the_lowest_index(top_k: int) -> None:
    scores = torch.tensor(stream(5, "ties").integers(0, 3, (200, 9)).astype(np.float32))
    expected = [sorted(range(9), key=lambda i, row=row: (-row[i], i))[:top_k] for row in scores.tolist()]
    assert [sorted(row) for row in top_indices(scores, top_k).tolist()] == [sorted(row) for row in expected]


def test_steep_spectra_keep_their_directions() -> None:
    # Every token is shorter than float32 can square; its direction is a sign.
    task = TopKTask(ArraySpectrum((1e-90,), (1.0,)), 5, 2)
    batch = draw_contexts(task, 10, stream(6, "small"))
    assert batch.directions.abs().numpy() == pytest.approx(1)
    steep = TopKTask(PowerLawSpectrum(100, 0, 3), 5, 2)
    assert torch.isfinite(draw_contexts(steep, 10, stream(7, "steep")).directions).all()


def test_equal_streams_give_equal_bits_and_bad_input_is_refused() -> None:
    first, second = (draw_contexts(TASKS[0], 5, stream(8, "bits")) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.labels(), second.labels())
    with pytest.raises(DomainError, match="context must be finite"):
        draw_contexts(CopyTask(STEEP), 5, stream(0, "infinite"))
