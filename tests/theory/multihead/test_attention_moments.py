"""Moments of softmax weights against quadrature at context 2 and 3, Stein identities, symmetries and node doubling."""

import mpmath
import numpy as np
import pytest

from theory.multihead import attention_moments
from theory.multihead.attention_moments import single_slope_moments, slope_pair_moments
from theory.multihead.gauss_rules import discretised_gauss_rule
from theory.multihead.steep_moments import largest_score_rule, steep_pair_moments, steep_single_moments
from theory.results import PrecisionError
from theory.special import normal_top_mean

STEEP = [(115.0, 80.0), (60.0, -60.0), (115.0, -0.3), (40.0, 41.0)]
SLOPES = [(0.1, -0.1), (0.7, 1.9), (1.5, -0.4), (3.0, 2.5), (3.0, -3.0), (6.0, 0.2), (0.0, 1.0)]


def one(value):
    return np.array([float(value)])


def two_tokens(a, b):
    """Context 2 by one integral over the difference of the scores: p_1 = 1/(1 + exp(-a (z_1 - z_2)))."""
    with mpmath.workdps(25):
        normal = lambda x: mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi)  # noqa: E731
        half = lambda s, x: 1 / (1 + mpmath.exp(-s * mpmath.sqrt(2) * x)) - mpmath.mpf(1) / 2  # noqa: E731
        # The steeper softmax bends at a distance 1/slope.
        near = 1 / max(abs(a), abs(b), 1)
        points = (
            [-14, -6, -2, -8 * near, -near, 0, near, 8 * near, 2, 6, 14] if near < 0.2 else [-14, -6, -2, 0, 2, 6, 14]
        )
        # z_1,2 = (y ± x)/sqrt 2: p·z = y/sqrt 2 + sqrt 2 x h(x), p·q = 1/2 + 2 h_a h_b.
        f3 = mpmath.mpf(1) / 2 + 2 * mpmath.quad(lambda x: half(a, x) * half(b, x) * normal(x), points)
        f2 = mpmath.mpf(1) / 2 + 2 * mpmath.quad(lambda x: x * x * half(a, x) * half(b, x) * normal(x), points)
        return float(f2), float(f3)


def three_tokens(a, b):
    """Context 3 by Gauss-Hermite in all three scores; good for gentle slopes."""
    x, w = np.polynomial.hermite_e.hermegauss(60)
    z = np.array(np.meshgrid(x, x, x, indexing="ij")).reshape(3, -1)
    weight = np.einsum("i,j,k->ijk", w, w, w).ravel() / (2 * np.pi) ** 1.5
    p, q = (np.exp(s * z) / np.exp(s * z).sum(axis=0) for s in (a, b))
    return weight @ ((p * z).sum(0) * (q * z).sum(0)), weight @ (p * q).sum(0)


@pytest.mark.parametrize(("a", "b"), [*SLOPES, *STEEP])
def test_context_two_is_one_integral(a, b):
    f2, f3 = slope_pair_moments(one(a), one(b), 2)[:, 0, 0]
    expected = two_tokens(a, b)
    # The stated error, 1e-11 of 1 + |f|.
    assert f2 == pytest.approx(expected[0], abs=1e-11 * (1 + abs(expected[0])))
    assert f3 == pytest.approx(expected[1], abs=1e-11 * (1 + abs(expected[1])))


@pytest.mark.parametrize("context", [10**9, 10**14, 10**18])
def test_long_contexts_are_gaussian_integrals(context):
    """To leading order f_2 = ab and f_3 = exp(ab)/L: with so many tokens the normaliser does not fluctuate."""
    for a, b in ((0.3, -0.2), (0.5, 0.4)):
        f2, f3 = slope_pair_moments(one(a), one(b), context)[:, 0, 0]
        # Corrections are a few times 1/L; the rest is the stated error.
        assert f2 == pytest.approx(a * b, abs=10 / context + 1e-11)
        assert f3 * context == pytest.approx(np.exp(a * b), rel=10 / context + 1e-11)


@pytest.mark.parametrize(("a", "b"), [(0.3, -0.3), (0.5, 0.4), (0.2, 0.6)])
def test_context_three_by_hermite_rules(a, b):
    # Gauss-Hermite with 60 nodes has itself 1e-11 at these slopes.
    np.testing.assert_allclose(slope_pair_moments(one(a), one(b), 3)[:, 0, 0], three_tokens(a, b), atol=1e-11)


@pytest.mark.parametrize("context", [2, 3, 40, 1000, 100_000, 10**18])
@pytest.mark.parametrize(("a", "b"), SLOPES)
def test_halving_all_steps_changes_nothing(context, a, b):
    base = slope_pair_moments(one(a), one(b), context)[:, 0, 0]
    fine = slope_pair_moments(one(a), one(b), context, 0, 2.0)[:, 0, 0]
    # The stated error, 1e-11, less a factor for the exactness of the finer grid.
    assert np.abs(base - fine).max() <= 5e-12 * (1 + np.abs(fine).max())


@pytest.mark.parametrize("context", [1, 2, 40, 5000])
def test_single_and_pair_formulas_agree_at_equal_slopes(context):
    a = np.array([-2.0, 0.1, 0.9, 2.5])
    single = single_slope_moments(a, context, 2)
    pair = slope_pair_moments(a, a, context, 2)
    np.testing.assert_allclose(single[:, 0], pair[:, 0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(single[:, 1], pair[:, 1] + pair[:, 2], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(single[:, 2], pair[:, 3] + 2 * pair[:, 4] + pair[:, 5], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("context", [2, 7, 40])
def test_derivatives_are_those_of_the_values(context):
    a, b, h = np.array([0.3, 1.2, -2.0]), np.array([-0.5, 1.0, 1.5]), 1e-4
    full = slope_pair_moments(a, b, context, 2)
    first = lambda x, y: slope_pair_moments(x, y, context, 1)  # noqa: E731
    by_a, by_b = (first(a + h, b) - first(a - h, b)) / (2 * h), (first(a, b + h) - first(a, b - h)) / (2 * h)
    # Central differences err by h²/6 times a third derivative of order 10.
    np.testing.assert_allclose(full[:, 1:3], np.stack([by_a[:, 0], by_b[:, 0]], axis=1), atol=1e-7)
    np.testing.assert_allclose(full[:, 3:], np.stack([by_a[:, 1], by_a[:, 2], by_b[:, 2]], axis=1), atol=1e-7)


def test_symmetries():
    a, b = np.array([0.4, 1.7, -1.0]), np.array([1.1, -0.6, -2.0])
    base = slope_pair_moments(a, b, 17)
    np.testing.assert_allclose(slope_pair_moments(b, a, 17), base, rtol=1e-12)
    np.testing.assert_allclose(slope_pair_moments(-a, -b, 17), base, rtol=1e-12)


def test_zero_slope_is_the_plain_mean():
    f2, f3 = slope_pair_moments(one(0), one(0), 9)[:, 0, 0]
    assert f2 == pytest.approx(1 / 9, rel=1e-13)
    assert f3 == pytest.approx(1 / 9, rel=1e-13)


def test_large_context_expansion():
    # f3 = e^{ab}/L, f2 = ab + (e^{ab}(1+ab) - ab(e^{aa} + e^{bb}))/L, each up to a relative 1/L.
    a, b, L = 0.6, -0.8, 100_000
    f2, f3 = slope_pair_moments(one(a), one(b), L)[:, 0, 0]
    assert f3 * L == pytest.approx(np.exp(a * b), rel=10 / L)
    first = np.exp(a * b) * (1 + a * b) - a * b * (np.exp(a * a) + np.exp(b * b))
    assert (f2 - a * b) * L == pytest.approx(first, abs=10 / L)


def test_monte_carlo():
    rng = np.random.default_rng(7)
    a, b, L = 1.3, -0.7, 12
    z = rng.standard_normal((200_000, L))
    p, q = (np.exp(s * z) / np.exp(s * z).sum(axis=1, keepdims=True) for s in (a, b))
    samples = np.array([(p * z).sum(1) * (q * z).sum(1), (p * q).sum(1)])
    error = samples.std(axis=1) / np.sqrt(samples.shape[1])
    # Two normal deviates beyond 5 once in 10^6 seeds.
    z_scores = (samples.mean(axis=1) - slope_pair_moments(one(a), one(b), L)[:, 0, 0]) / error
    assert np.abs(z_scores).max() < 5


def test_batches_cover_everything_once(monkeypatch):
    a = np.linspace(-3, 3, 37)
    whole = slope_pair_moments(a, 0.5 * a + 0.1, 40)
    monkeypatch.setattr(attention_moments, "_BATCH_ELEMENTS", 6000)
    np.testing.assert_allclose(slope_pair_moments(a, 0.5 * a + 0.1, 40), whole, rtol=1e-11, atol=1e-13)


def test_slopes_beyond_the_grid_are_refused():
    with pytest.raises(PrecisionError, match="omega times the length of the query"):
        single_slope_moments(one(attention_moments.MAX_SLOPE * 1.01), 40)
    with pytest.raises(PrecisionError, match="got 1e"):
        slope_pair_moments(one(0.1), one(-1e6), 40)


@pytest.mark.parametrize("context", [2, 5, 24, 1000, 100_000])
@pytest.mark.parametrize(
    ("a", "b"), [(8.0, -8.0), (14.0, -0.6), (20.0, 0.6), (7.0, 5.0), (115.0, 80.0), (90.0, -0.5), (1.4, 1.35)]
)
def test_steep_slopes_hold_their_digits(context, a, b):
    base, fine = (slope_pair_moments(one(a), one(b), context, 0, f)[:, 0, 0] for f in (1.0, 1.3))
    assert np.abs(base - fine).max() <= 1e-11 * (1 + np.abs(fine).max())
    base, fine = (single_slope_moments(one(a), context, 0, f)[:, 0, 0] for f in (1.0, 1.4))
    np.testing.assert_allclose(base, fine, rtol=1e-11)


@pytest.mark.parametrize("context", [2, 5, 40, 5000])
@pytest.mark.parametrize(("a", "b"), [(2.0, 1.5), (4.0, 1.0), (3.5, -2.0)])
def test_steep_and_gentle_formulas_agree_where_both_hold(context, a, b):
    """Anchored at the largest score or not: two quadratures of different integrals, derivatives included."""
    anchored = steep_pair_moments(a, b, context, 2, 1.3)
    # Finer grids, with which the plain formula holds here too.
    plain = attention_moments._pair_batch(one(a), one(b), context, 2, 2.4)[:, :, 0]
    np.testing.assert_allclose(anchored, plain, rtol=2e-8, atol=2e-9)
    np.testing.assert_allclose(anchored[:, 0], plain[:, 0], rtol=1e-10, atol=1e-11)
    single = steep_single_moments(a, context, 2, 1.0)
    np.testing.assert_allclose(single, attention_moments._single_batch(one(a), context, 2, 1.6)[:, :, 0], rtol=1e-8)


@pytest.mark.parametrize(("a", "b"), [(9.0, 5.0), (4.0, 9.0), (-9.0, -5.0), (-4.0, -9.0), (30.0, -9.0), (-9.0, 30.0)])
def test_derivatives_of_steep_slopes_whatever_their_order_and_sign(a, b):
    h = 1e-3
    value = lambda x, y: slope_pair_moments(one(x), one(y), 12)[:, 0, 0]  # noqa: E731
    full = slope_pair_moments(one(a), one(b), 12, 2)[:, :, 0]
    by_a, by_b = (value(a + h, b) - value(a - h, b)) / (2 * h), (value(a, b + h) - value(a, b - h)) / (2 * h)
    # Central differences err by h²/6 times a third derivative of order 0.1, and 1e-12/h.
    np.testing.assert_allclose(full[:, 1:3], np.stack([by_a, by_b], axis=1), atol=1e-7)
    mixed = (value(a + h, b + h) - value(a + h, b - h) - value(a - h, b + h) + value(a - h, b - h)) / (4 * h * h)
    np.testing.assert_allclose(full[:, 4], mixed, atol=1e-6)


def test_gauss_rule_of_a_density_integrates_polynomials():
    x = np.linspace(-9, 9, 400)
    fine = 3 * np.exp(-x * x / 2)
    nodes, weights = discretised_gauss_rule(x, fine, 12)
    exact = [fine @ x**k / fine.sum() for k in range(0, 24, 2)]
    np.testing.assert_allclose([weights @ nodes**k for k in range(0, 24, 2)], exact, rtol=1e-11)
    np.testing.assert_allclose(weights @ nodes, 0, atol=1e-13)


def test_largest_score_has_its_known_mean():
    for context in (2, 40, 100_000):
        z, weight = largest_score_rule(context, 40)
        assert weight @ z == pytest.approx(normal_top_mean(context, 1).value, rel=1e-12)


def test_steepest_slopes_pick_the_largest_score():
    for context in (40, 100_000):
        f2, f3 = single_slope_moments(one(120), context)[:, 0, 0]
        # f1 = a (1 - f3) is the mean of the largest score, up to a relative 1/a².
        assert 120 * (1 - f3) == pytest.approx(normal_top_mean(context, 1).value, rel=1e-3)
        opposite = slope_pair_moments(one(120), one(-120), context)[:, 0, 0]
        assert opposite[1] < 1e-20
        # Largest and smallest score are nearly independent.
        assert -opposite[0] == pytest.approx(normal_top_mean(context, 1).value ** 2, rel=0.01)
        assert f2 > -opposite[0]
