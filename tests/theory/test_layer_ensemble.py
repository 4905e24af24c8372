from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.depth import layer_ensemble as ensemble
from theory.results import DomainError

IDENTITY = 1e-12  # relative, the promise of the module


def pair_sums(predictions, targets):
    """A, C, A - C and R of every context from the definitions, over all ordered pairs, in exact arithmetic."""
    rows = []
    for f, y in zip(predictions, targets, strict=True):
        e = [Fraction(float(v)) - Fraction(float(y)) for v in f]
        L = len(e)
        squares, total = sum(v * v for v in e), sum(e)
        layer = squares / L
        shared = (total * total - squares) / (L * (L - 1))  # the sum over ordered pairs, expanded
        pairs = 2 * L * squares - 2 * total * total
        rows.append((layer, shared, pairs / (2 * L * (L - 1)), (total / L) ** 2))
    return np.array([[float(v) for v in row] for row in rows]).T


@pytest.mark.parametrize("layers", [2, 3, 17, 512])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-7])
def test_the_terms_agree_with_exact_pair_sums_also_where_layers_nearly_agree(layers, spread):
    rng = np.random.default_rng(layers)
    predictions = 3 + spread * rng.standard_normal((6, layers))
    targets = rng.standard_normal(6)
    terms = ensemble.context_terms(predictions, targets)
    layer, shared, gap, risk = pair_sums(predictions, targets)
    np.testing.assert_allclose(terms.layer_risk, layer, rtol=IDENTITY)
    np.testing.assert_allclose(terms.shared, shared, rtol=0, atol=IDENTITY * layer.max())
    np.testing.assert_allclose(terms.risk, risk, rtol=IDENTITY)
    # Each difference of predictions is known to eps * 3, so their squares to eps * 3 / spread.
    np.testing.assert_allclose(terms.disagreement, gap, rtol=max(IDENTITY, 1e-14 / spread))
    np.testing.assert_allclose(terms.risk, terms.shared + terms.disagreement / layers, rtol=IDENTITY)


@pytest.mark.parametrize("layers", [2, 512])
def test_the_three_forms_of_the_disagreement_are_one(layers):
    rng = np.random.default_rng(63)
    attention = rng.dirichlet(np.ones(9), (4, layers))
    labels, gains = rng.standard_normal((4, 9)), rng.standard_normal(layers)
    predictions = ensemble.layer_predictions(attention, labels, gains)
    weighted = gains[:, None] * attention
    # (73) as printed: differences of weighted rows, applied to the labels, over all ordered pairs.
    pairs = np.array(
        [np.sum(((row[:, None] - row[None]) @ y) ** 2) for row, y in zip(weighted, labels, strict=True)]
    ) / (2 * layers * (layers - 1))
    np.testing.assert_allclose(ensemble.disagreement(predictions), pairs, rtol=IDENTITY)


def test_equal_layers_have_exactly_no_disagreement():
    assert ensemble.disagreement(np.full((3, 512), 0.1)).tolist() == [0.0, 0.0, 0.0]


@given(
    st.integers(2, 40),
    st.floats(-1e3, 1e3),
    st.floats(0.01, 100),
    st.integers(0, 2**31),
)
def test_scaling_and_shifting_act_as_they_must(layers, shift, scale, seed):
    rng = np.random.default_rng(seed)
    predictions, targets = rng.standard_normal((5, layers)), rng.standard_normal(5)
    terms = ensemble.ensemble_terms(predictions, targets)
    moved = ensemble.ensemble_terms(scale * predictions + shift, scale * targets + shift)
    tolerance = 1e-12 * (1 + abs(shift) / scale) ** 2 * float(terms.layer_risk)
    for name in ("risk", "layer_risk", "shared", "disagreement"):
        assert abs(float(getattr(moved, name)) / scale**2 - float(getattr(terms, name))) <= tolerance
    assert float(terms.disagreement) >= 0
    assert float(terms.shared) <= float(terms.risk) <= float(terms.layer_risk)


def test_independent_layers_share_only_their_common_error():
    rng = np.random.default_rng(1)
    common = rng.standard_normal(200_000)
    predictions = common[:, None] + 2 * rng.standard_normal((200_000, 4))
    estimate = ensemble.estimate_terms(predictions, np.zeros(200_000), seed=1)
    for term, value in (
        (estimate.shared, 1),
        (estimate.disagreement, 4),
        (estimate.layer_risk, 5),
        (estimate.risk, 2),
    ):
        assert abs(term.z_score(value)) < 4.5
        assert 0 < term.stderr < 0.05
    assert estimate.risk.samples == 200_000
    assert estimate.risk.chunks == ensemble.DEFAULT_CHUNKS
    assert float(ensemble.ensemble_risk(1.0, 4.0, 4)) == 2.0
    np.testing.assert_allclose(ensemble.ensemble_risk([1.0, 2.0], 4.0, [1, 8]), [5, 2.5])


def test_the_standard_errors_are_honest():
    rng = np.random.default_rng(2)
    zs = []
    for _ in range(200):
        predictions = rng.standard_normal((320, 3))
        zs.append(ensemble.estimate_terms(predictions, np.zeros(320), seed=0, chunks=16).disagreement.z_score(1.0))
    assert 0.8 < np.std(zs) < 1.35  # Student t with 15 degrees: 1.07


def test_increments_of_a_cascade_average_to_its_output():
    rng = np.random.default_rng(67)
    readouts = rng.standard_normal((7, 33)).cumsum(axis=1)
    predictions = ensemble.increment_predictions(readouts)
    np.testing.assert_allclose(predictions.mean(axis=-1), readouts[:, -1], rtol=1e-12, atol=1e-12)
    targets = rng.standard_normal(7)
    terms = ensemble.ensemble_terms(predictions, targets)
    np.testing.assert_allclose(terms.risk, np.mean((readouts[:, -1] - targets) ** 2), rtol=1e-12)
    layers = predictions.shape[-1]
    last_form = np.mean(np.sum((predictions - readouts[:, -1:]) ** 2, axis=1)) / (layers - 1)
    np.testing.assert_allclose(terms.disagreement, last_form, rtol=1e-12)


def test_the_target_averages_the_labels_of_the_most_similar_tokens():
    tokens = np.array([[1.0, 0.0], [1e200, 1e200], [0.0, 2.0], [1e-200, 0.0], [-3.0, 0.0]])
    scores = ensemble.cosine_similarities(tokens, np.array([2.0, 0.0]))
    np.testing.assert_allclose(scores, [1, 0.5**0.5, 0, 1, -1], atol=1e-15)
    assert ensemble.top_indices(scores, 3).tolist() == [0, 3, 1]  # the lowest index first on ties
    row = ensemble.target_rows(scores, 3)
    np.testing.assert_allclose(row, [1 / 3, 1 / 3, 0, 1 / 3, 0])
    labels = np.array([3.0, 6.0, 100.0, 9.0, 100.0])
    assert row @ labels == pytest.approx(6.0)
    assert ensemble.layer_predictions(row[None], labels, 2.0).tolist() == pytest.approx([12.0])


def test_selection_errors_and_their_percentiles():
    target = np.array([0.5, 0.5, 0.0, 0.0])
    sharp, flat = np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]), np.full((3, 4), 0.25)
    assert ensemble.selection_errors(sharp, target) == pytest.approx(0.0)
    assert ensemble.selection_errors(flat, target) == pytest.approx(0.25)
    shuffled = [2, 0, 3, 1]
    assert ensemble.selection_errors(sharp[:, shuffled], target[shuffled]) == pytest.approx(0.0)
    errors = np.arange(101.0)
    np.testing.assert_allclose(ensemble.error_percentiles(errors[::-1], [0, 25, 100]), [0, 25, 100])
    np.testing.assert_allclose(ensemble.percentile_gain(2 * errors, errors, [0, 50, 100]), [0, 50, 100])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ensemble.disagreement(np.ones((3, 1))), "at least 2 layers"),
        (lambda: ensemble.context_terms(np.ones((3, 2)), np.ones(2)), "targets must"),
        (lambda: ensemble.estimate_terms(np.ones((3, 2)), np.ones(3), seed=0, chunks=2), "chunks must divide"),
        (lambda: ensemble.cosine_similarities(np.zeros((2, 2)), np.ones(2)), "zero vectors"),
        (lambda: ensemble.increment_predictions(np.ones(1)), "at least one layer"),
        (lambda: ensemble.layer_predictions(np.ones((2, 3)), np.ones(2)), "one entry per token"),
        (lambda: ensemble.disagreement([[1.0, np.nan]]), "finite numbers"),
        (lambda: ensemble.target_rows(np.ones(3), 4), "top_k must"),
        (lambda: ensemble.ensemble_risk(1, 1, 0), "depth must be"),
        (lambda: ensemble.error_percentiles(np.ones(3), 101), "percentile must"),
    ],
)
def test_errors_are_sentences(call, words):
    with pytest.raises(DomainError, match=words):
        call()
