from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.depth.free_polynomial import bidiagonalise
from theory.depth.quotient_difference import quotients_and_differences
from theory.depth.spectral_measure import power_weight_rule, spectral_measure
from theory.problems import PowerLawSpectrum

LONG = np.finfo(np.longdouble).eps < 1e-18
# A dozen roundings per node, hidden where long doubles are longer than doubles, but for the last square root.
ROUNDING = 2e-15 if LONG else 1e-13
# At thousands of nodes; measured 2e-15, and 1e-11 in doubles.
MANY_NODES = 1e-13 if LONG else 1e-9
# The smallest nodes of a Gauss rule are known to a few units in the last place of the largest; measured 1.3e-13.
GAUSS_NODES = 1e-12 if LONG else 1e-9


def exact_coefficients(nodes, weights, count):
    """q and e in rational arithmetic, from the recurrence of the monic polynomials (Stieltjes)."""
    x, w = [Fraction(float(v)) for v in nodes], [Fraction(float(v)) for v in weights]
    before, now = [Fraction(0)] * len(x), [Fraction(1)] * len(x)
    norm, beta, e = sum(w), Fraction(0), Fraction(0)
    found = []
    for _ in range(count):
        alpha = sum(m * v * p * p for m, v, p in zip(w, x, now, strict=True)) / norm
        before, now = now, [(v - alpha) * p - beta * o for v, p, o in zip(x, now, before, strict=True)]
        following = sum(m * p * p for m, p in zip(w, now, strict=True))
        norm, beta = following, following / norm
        q = alpha - e
        e = beta / q
        found.append((q, e))
    return np.array([float(q) for q, _ in found]), np.array([float(e) for _, e in found])


def measures():
    """Distinct nodes over thirty decades and weights over ten."""
    node = st.floats(-30, 0).map(lambda u: 10.0**u)
    pairs = st.lists(st.tuples(node, st.floats(1e-10, 1)), min_size=2, max_size=9, unique_by=lambda pair: pair[0])
    return pairs.map(lambda pairs: np.array(sorted(pairs, reverse=True)).T)


@given(measures())
def test_coefficients_against_rational_arithmetic(measure):
    nodes, weights = measure
    q, e = exact_coefficients(nodes, weights, len(nodes) - 1)
    root_q, root_e = quotients_and_differences(nodes, weights, len(nodes) - 1)
    np.testing.assert_allclose(root_q**2, q, rtol=ROUNDING)
    np.testing.assert_allclose(root_e**2, e, rtol=ROUNDING)


@given(measures(), st.data())
def test_fewer_coefficients_are_the_first_ones(measure, data):
    nodes, weights = measure
    count = data.draw(st.integers(0, len(nodes) - 1))
    for fewer, more in zip(
        quotients_and_differences(nodes, weights, count),
        quotients_and_differences(nodes, weights, len(nodes) - 1),
        strict=True,
    ):
        np.testing.assert_array_equal(fewer, more[:count])


def test_coefficients_against_those_of_orthogonal_vectors():
    measure = spectral_measure(PowerLawSpectrum(1.5, 0.75), 300)
    vectors = bidiagonalise(measure, 300)
    diagonal, superdiagonal = quotients_and_differences(measure.nodes, measure.weights, 300)
    np.testing.assert_allclose(diagonal, vectors.diagonal, rtol=MANY_NODES)
    np.testing.assert_allclose(superdiagonal, vectors.superdiagonal, rtol=MANY_NODES)


@pytest.mark.parametrize("zeta", [0.3, 2.5])
def test_coefficients_of_a_gauss_rule_are_those_of_its_density(zeta):
    # On [0, 1] with density x^(zeta - 1): q_k = (k - 1 + zeta)^2 / ((2k - 2 + zeta)(2k - 1 + zeta)), and
    # e_k = k^2 / ((2k - 1 + zeta)(2k + zeta)); the products are the squared entries of `power_weight_rule`.
    nodes, shares = power_weight_rule(zeta, 800)
    root_q, root_e = quotients_and_differences(nodes[::-1], shares[::-1], 700)
    k = np.arange(1, 701)
    np.testing.assert_allclose(
        root_q**2, (k - 1 + zeta) ** 2 / ((2 * k - 2 + zeta) * (2 * k - 1 + zeta)), rtol=GAUSS_NODES
    )
    np.testing.assert_allclose(root_e**2, k**2 / ((2 * k - 1 + zeta) * (2 * k + zeta)), rtol=GAUSS_NODES)


def test_weights_that_underflow_leave_finite_coefficients():
    nodes, weights = np.array([1.0, 0.5, 0.25]), np.array([1.0, 1e-300, 1e-300])
    for coefficients in quotients_and_differences(nodes, weights, 2):
        assert np.isfinite(coefficients).all()
