import itertools

import numpy as np
import pytest

from tests.naive import linear_attention_prediction
from theory.depth import covariance_polynomial as cov
from theory.depth.spectral_measure import discrete_uniform_rule, spectral_measure
from theory.problems import ArraySpectrum, PowerLawSpectrum
from theory.results import DomainError

# Products of a few 4 x 4 matrices.
TOLERANCE = 1e-11


@pytest.fixture
def model():
    rng = np.random.default_rng(3)
    depth, dim, width, tokens = 4, 3, 5, 6
    return {
        "U": rng.standard_normal((dim, tokens)),
        "q": rng.standard_normal(dim),
        "beta": rng.standard_normal(dim),
        "W_x": rng.standard_normal((width, dim)),
        "W_y": rng.standard_normal(width),
        "W_v": rng.standard_normal((width, width)) / width,
        "W_o": rng.standard_normal(width),
        "W_q": rng.standard_normal((depth, width, width)),
        "W_k": rng.standard_normal((depth, width, width)),
    }


def test_polynomial_equals_the_token_by_token_model(model):
    B = [cov.effective_query_key(model["W_x"], k, q) for k, q in zip(model["W_k"], model["W_q"], strict=True)]
    S = cov.empirical_covariance(model["U"])
    moments = cov.readout_moments(model["W_o"], model["W_v"], model["W_y"], len(B))
    prediction = model["beta"] @ cov.ordered_polynomial(S, B, moments) @ model["q"]
    states = cov.label_states(S, B, model["W_v"], np.outer(model["W_y"], model["beta"]))
    expected = linear_attention_prediction(**model)
    assert prediction == pytest.approx(expected, rel=1e-9)
    assert cov.readout_prediction(states, model["W_o"], model["q"]) == pytest.approx(expected, rel=1e-9)


def test_ordered_polynomial_against_all_subsets():
    rng = np.random.default_rng(5)
    S, B, m = rng.standard_normal((3, 3)), rng.standard_normal((4, 3, 3)), rng.standard_normal(4)
    total = np.zeros((3, 3))
    for r in range(1, 5):
        for layers in itertools.combinations(range(4), r):
            product = np.eye(3)
            for layer in layers:
                product = product @ S @ B[layer]
            total += (-1) ** (r - 1) * m[r - 1] / 4**r * product
    np.testing.assert_allclose(cov.ordered_polynomial(S, B, m), total, rtol=TOLERANCE)


def test_risks_agree_for_commuting_matrices():
    spectrum = PowerLawSpectrum(1, 0.5, 6)
    sigma, omega = np.diag(spectrum.input_variances()), np.diag(spectrum.teacher_variances())
    coefficients = [0.7, -0.2]
    polynomial = 0.7 * sigma - 0.2 * sigma @ sigma
    trace = cov.population_risk(polynomial, omega, sigma)
    modes = cov.residual_risk(spectrum, lambda x: cov.polynomial_residual(coefficients, x), 2)
    assert trace == pytest.approx(modes, rel=1e-13)
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((100_000, 6)) * np.sqrt(spectrum.input_variances())
    sampled = np.array([cov.query_risk(polynomial, omega, q) for q in queries[:2000]])
    z = (sampled.mean() - trace) / (sampled.std(ddof=1) / np.sqrt(sampled.size))
    assert abs(z) < 4  # false alarm 6e-5


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: cov.empirical_covariance([1.0, 2.0]), "tokens"),
        (lambda: cov.effective_query_key(np.eye(2), np.eye(3), np.eye(2)), "key"),
        (lambda: cov.ordered_polynomial(np.eye(2), [np.eye(2)], [1.0, 2.0]), "moments"),
        (lambda: cov.population_risk(np.full((2, 2), np.nan), np.eye(2), np.eye(2)), "polynomial"),
    ],
)
def test_bad_matrices_are_named(call, name):
    with pytest.raises(DomainError, match=name):
        call()


@pytest.mark.parametrize(("first", "last"), [(1, 1), (3, 9), (1025, 2048), (10**12, 2 * 10**12)])
def test_discrete_uniform_rule_is_exact_for_polynomials(first, last):
    nodes, counts = discrete_uniform_rule(first, last, 5)
    total = last - first + 1
    assert counts.sum() == pytest.approx(total, rel=1e-14)
    centre = (first + last) / 2
    assert counts @ (nodes - centre) == pytest.approx(0, abs=1e-9 * total * total)
    assert counts @ (nodes - centre) ** 2 == pytest.approx(total * (total**2 - 1) / 12, rel=1e-12, abs=1e-300)


def test_compressed_measure_keeps_moments():
    spectrum = PowerLawSpectrum(0.7, 0.4, 10**6, 2.0, 0.5)
    measure = spectral_measure(spectrum, 4)
    assert not measure.exact
    assert len(measure.nodes) < 2000
    k = np.arange(1, 10**6 + 1.0)
    for power in (0, 1, 4):
        exact = np.sum(k**-1.1 * k ** (-0.7 * power))
        assert measure.weights @ measure.nodes**power == pytest.approx(exact, rel=1e-12)


def test_measure_of_infinite_flat_spectrum_is_refused():
    with pytest.raises(DomainError, match="input_exponent"):
        spectral_measure(PowerLawSpectrum(0, 2), 3)


def test_measure_drops_silent_modes():
    measure = spectral_measure(ArraySpectrum((3.0, 2.0, 1.0), (0.0, 1.0, 1.0)), 2)
    assert measure.largest == 2
    np.testing.assert_array_equal(measure.nodes, [1, 0.5])
