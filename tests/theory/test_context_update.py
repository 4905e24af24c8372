import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.depth import context_update as update
from theory.depth import layer_ensemble
from theory.results import DomainError


def random_model(seed, layers, tokens, width=3, batch=()):
    rng = np.random.default_rng(seed)
    attention = rng.dirichlet(np.ones(tokens), (*batch, layers))
    mixing = rng.dirichlet(np.ones(tokens), (*batch, layers, tokens))
    labels = rng.standard_normal((*batch, tokens))
    encoder, readout = rng.standard_normal(width), rng.standard_normal(width)
    return attention, mixing, labels, encoder, readout


def masked_recursion(attention, mixing, labels, encoder, m):
    """Depth (10) with the whole (P+1) x (P+1) attention matrix under the mask (77), token by token."""
    layers, tokens = attention.shape
    mask = update.context_mask(tokens, m)
    state = np.outer(encoder, np.append(labels, 0.0))
    for layer in range(layers):
        full = np.zeros((tokens + 1, tokens + 1))
        full[:tokens, :tokens], full[tokens, :tokens] = mixing[layer], attention[layer]
        full *= mask
        new = state.copy()
        for i, j in itertools.product(range(tokens + 1), repeat=2):
            new[:, i] += full[i, j] * state[:, j] / layers
        state = new
    return state


@pytest.mark.parametrize(("layers", "tokens"), [(1, 1), (2, 4), (5, 3)])
@pytest.mark.parametrize("m", [-2.3, 0.0, 1.5])
def test_all_forms_agree_with_masked_attention(layers, tokens, m):
    attention, mixing, labels, encoder, readout = random_model(layers, layers, tokens)
    exact = masked_recursion(attention, mixing, labels, encoder, m)
    states = update.label_states(attention, mixing, np.outer(encoder, labels), m)
    np.testing.assert_allclose(states.context[-1], exact[:, :-1], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(states.test[-1], exact[:, -1], rtol=1e-12, atol=1e-13)
    output, gain = readout @ exact[:, -1], readout @ encoder
    assert update.prediction(attention, mixing, labels, m, gain) == pytest.approx(output, rel=1e-12)
    rows = update.reading_rows(attention, mixing, m)
    assert gain * np.mean(rows @ labels) == pytest.approx(output, rel=1e-12)
    np.testing.assert_allclose(rows.sum(axis=-1), (1 + m / layers) ** np.arange(layers), rtol=1e-12)
    np.testing.assert_allclose(rows @ labels, update.layer_readings(attention, mixing, labels, m), rtol=1e-12)


def test_a_value_map_acts_on_the_width():
    attention, mixing, labels, encoder, _ = random_model(5, 2, 4)
    W_v = np.random.default_rng(6).standard_normal((3, 3))
    states = update.label_states(attention, mixing, np.outer(encoder, labels), 0.0, W_v)
    expected = W_v @ encoder * (attention.mean(axis=0) @ labels)
    np.testing.assert_allclose(states.test[-1], expected, rtol=1e-12)


@given(st.integers(0, 2**31), st.floats(-5, 5), st.integers(1, 5), st.integers(2, 5))
def test_batches_are_the_same_numbers(seed, m, layers, tokens):
    attention, mixing, labels, _, _ = random_model(seed, layers, tokens, batch=(2, 3))
    batched = update.prediction(attention, mixing, labels, m)
    assert batched.shape == (2, 3)
    single = update.prediction(attention[1, 2], mixing[1, 2], labels[1, 2], m)
    assert float(batched[1, 2]) == pytest.approx(float(single), rel=1e-10, abs=1e-12)


def test_without_update_the_model_is_the_fixed_ensemble():
    attention, mixing, labels, _, _ = random_model(8, 6, 5, batch=(4,))
    fixed = layer_ensemble.layer_predictions(attention, labels).mean(axis=-1)
    np.testing.assert_allclose(update.prediction(attention, mixing, labels, 0.0), fixed, rtol=1e-12)


def test_two_layers_in_closed_form():
    attention, mixing, labels, _, _ = random_model(9, 2, 6, batch=(3,))
    p_1, p_2, A_1 = attention[:, 0], attention[:, 1], mixing[:, 0]
    closed = update.two_layer_prediction(p_1, p_2, A_1, labels, -2.3, 1.7)
    np.testing.assert_allclose(closed, update.prediction(attention, mixing, labels, -2.3, 1.7), rtol=1e-12)
    identity = update.two_layer_prediction(p_1, p_2, np.eye(6), labels, -2.3, 1.7)
    np.testing.assert_allclose(identity, update.identity_prediction(p_1, p_2, labels, -2.3, 1.7), rtol=1e-12)
    rho = 0.0989
    mixed = rho * np.eye(6) + (1 - rho) / 6
    np.testing.assert_allclose(p_2 @ mixed, update.mixed_row(p_2, rho), rtol=1e-12)


def test_the_fit_recovers_what_it_is_given():
    exact = 0.3 * np.eye(5) + 0.7 / 5
    fit = update.identity_uniform_fit(np.array([exact, np.eye(5)]))
    np.testing.assert_allclose(fit.rho, [0.3, 1.0], rtol=1e-14)
    np.testing.assert_allclose(fit.r_squared, [1.0, 1.0], rtol=1e-14)


def test_the_fit_is_the_least_squares_solution():
    A = np.random.default_rng(83).random((6, 6))
    basis = (np.eye(6) - 1 / 6).ravel()
    slope = np.linalg.lstsq(basis[:, None], (A - 1 / 6).ravel(), rcond=None)[0][0]
    fit = update.identity_uniform_fit(A)
    assert float(fit.rho) == pytest.approx(slope, rel=1e-12)
    residual = (A - 1 / 6).ravel() - slope * basis
    assert float(fit.r_squared) == pytest.approx(1 - np.sum(residual**2) / np.sum((A - A.mean()) ** 2), rel=1e-12)


def test_the_average_of_exchangeable_attention_is_identity_plus_uniform():
    rng = np.random.default_rng(84)
    x = rng.standard_normal((4000, 8, 4))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    weights = np.exp(2.0 * x @ np.swapaxes(x, -1, -2))
    weights /= weights.sum(axis=-1, keepdims=True)
    single = update.identity_uniform_fit(weights)
    average = update.identity_uniform_fit(weights.mean(axis=0))
    assert float(average.r_squared) > 0.999
    assert float(single.r_squared.mean()) < 0.7
    assert float(average.rho) == pytest.approx(float(single.rho.mean()), rel=1e-12)


def test_masks_of_the_paper():
    assert update.context_mask(2, -1).tolist() == [[-1, -1, 0], [-1, -1, 0], [1, 1, 0]]
    assert update.context_mask(2, 0).tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: update.context_mask(0, 1), "context must"),
        (lambda: update.prediction(np.ones(3), np.ones((1, 3, 3)), np.ones(3), 1), "attention must"),
        (lambda: update.prediction(np.ones((1, 3)), np.ones((2, 3, 3)), np.ones(3), 1), "mixing must"),
        (lambda: update.prediction(np.ones((1, 3)), np.ones((1, 3, 3)), np.ones(2), 1), "labels must"),
        (lambda: update.label_states(np.ones((1, 3)), np.ones((1, 3, 3)), np.ones((2, 2)), 1), "start must"),
        (lambda: update.identity_uniform_fit(np.ones((3, 3))), "all entries equal"),
        (lambda: update.identity_uniform_fit(np.ones((3, 2))), "square matrices"),
    ],
)
def test_errors_are_sentences(call, words):
    with pytest.raises(DomainError, match=words):
        call()
