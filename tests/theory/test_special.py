from fractions import Fraction
from math import comb

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad

from theory import special
from theory.results import DomainError, PrecisionError

# Six roundings of a well-conditioned product.
GAMMA_TOLERANCE = 6e-15


@pytest.mark.parametrize("shift", [0.0, 0.051, 0.5, 0.75, 1.0, 1.5, 3.0, 7.3, 19.9, 40.0])
def test_gamma_ratio_against_high_precision(shift):
    arguments = np.array([0.3, 1, 2, 5, 11.5, 12, 30, 171, 200, 1001, 1e6, 1e9, 1e12])
    arguments = arguments[shift * np.log10(arguments + shift) < 300]
    with mpmath.workdps(50):
        exact = [float(mpmath.rf(mpmath.mpf(z), mpmath.mpf(shift))) for z in arguments]
    np.testing.assert_allclose(special.gamma_ratio(arguments, shift), exact, rtol=GAMMA_TOLERANCE)


def test_gamma_ratio_where_usual_routes_fail():
    # gammaln differences give 9.994e-10 here, plain gammas give NaN.
    assert 1 / special.gamma_ratio(1e12 + 0.25, 0.75) == pytest.approx(9.9999999999990625e-10, rel=1e-14)
    # Gamma(n + 1.5)/Gamma(n + 1) at n = 200.
    assert special.gamma_ratio(201.0, 0.5) == pytest.approx(14.168632808627245, rel=1e-14)


@given(st.floats(0.01, 1e6), st.floats(0, 15))
def test_gamma_ratio_recurrence(z, s):
    left = special.gamma_ratio(z, s + 1)
    assert left == pytest.approx(float(special.gamma_ratio(z, s) * (z + s)), rel=4 * GAMMA_TOLERANCE)


@pytest.mark.parametrize(("z", "s"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -0.5), (np.nan, 1.0), (1.0, np.inf)])
def test_gamma_ratio_domain(z, s):
    with pytest.raises(DomainError, match="gamma_ratio"):
        special.gamma_ratio(z, s)


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.999999, 1.0, 1.0000001, 2.0, 7.5, 80.0])
@pytest.mark.parametrize("terms", [1, 2, 64, 65, 128, 1000, 10**6, 10**18])
def test_power_sum_against_hurwitz(exponent, terms):
    with mpmath.workdps(60):
        s = mpmath.mpf(exponent)
        if terms <= 1000:
            exact = mpmath.fsum(mpmath.mpf(k) ** -s for k in range(1, terms + 1))
        elif s == 1:
            exact = mpmath.digamma(terms + 1) + mpmath.euler
        elif s == 0:
            exact = mpmath.mpf(terms)
        else:
            exact = mpmath.zeta(s) - mpmath.zeta(s, terms + 1)
    assert special.power_sum(exponent, terms) == pytest.approx(float(exact), rel=1e-14)


def test_power_sum_harmonic_of_traps():
    assert special.power_sum(1, 10**6) == pytest.approx(14.392726722865724, rel=1e-15)


@pytest.mark.parametrize("exponent", [1.01, 2.0, 49.0, 60.0])
def test_infinite_power_sum(exponent):
    assert special.power_sum(exponent, None) == pytest.approx(float(mpmath.zeta(exponent)), rel=1e-14)


def test_infinite_power_sum_diverges():
    with pytest.raises(DomainError, match="exponent must be > 1"):
        special.power_sum(1.0, None)


@pytest.mark.parametrize(
    ("samples", "top", "exact"),
    [
        (2, 1, 1 / np.sqrt(np.pi)),
        (3, 1, 1.5 / np.sqrt(np.pi)),
        (128, 2, 2.42005514321),
        (128, 16, 1.63041041481),
        (10**6, 1, 4.8628974862),
        (10**6, 2, 4.76375783177),
    ],
)
def test_normal_top_mean(samples, top, exact):
    ours = special.normal_top_mean(samples, top)
    # Reference values are printed to 11 or 12 digits.
    assert ours.value == pytest.approx(exact, rel=1e-11)
    assert ours.tolerance < 1e-11 * exact


def test_normal_top_mean_against_order_statistics():
    n, k = 9, 4
    total = 0.0
    for rank in range(n - k + 1, n + 1):
        density = lambda x, r=rank: (  # noqa: E731
            x * stats.norm.pdf(x) * r * comb(n, r) * stats.norm.cdf(x) ** (r - 1) * stats.norm.sf(x) ** (n - r)
        )
        total += quad(density, -9, 9, epsabs=1e-13)[0]
    assert special.normal_top_mean(n, k).value == pytest.approx(total / k, abs=1e-11)


def test_normal_top_mean_of_all_is_zero():
    assert special.normal_top_mean(7, 7).value == 0


@given(st.integers(2, 10**9), st.integers(1, 50))
def test_top_mean_falls_with_the_number_taken(samples, top):
    if top + 1 > samples:
        return
    more, fewer = special.normal_top_mean(samples, top + 1), special.normal_top_mean(samples, top)
    assert more.value < fewer.value
    assert fewer.value <= np.sqrt(2 * np.log(samples))


@pytest.mark.parametrize(("samples", "rank"), [(1, 1), (5, 1), (5, 5), (1000, 3), (10**9, 17)])
def test_order_statistic_mean_of_uniforms(samples, rank):
    mean = special.mean_over_order_statistic(np.exp, samples, rank)
    assert mean.value == pytest.approx(float(Fraction(rank, samples + 1)), rel=1e-12)
    assert abs(mean.value - rank / (samples + 1)) <= 10 * mean.tolerance


def test_order_statistic_mean_that_never_settles():
    rng = np.random.default_rng(0)
    with pytest.raises(PrecisionError, match="did not settle"):
        special.mean_over_order_statistic(lambda log_v: rng.standard_normal(log_v.shape), 10, 2)


@pytest.mark.parametrize("dim", [1, 2, 5, 128, 10**6])
def test_chi_mean(dim):
    with mpmath.workdps(40):
        exact = mpmath.sqrt(2) * mpmath.gamma(mpmath.mpf(dim + 1) / 2) / mpmath.gamma(mpmath.mpf(dim) / 2)
    assert special.chi_mean(dim) == pytest.approx(float(exact), rel=1e-14)


@pytest.mark.parametrize("dim", [2, 3, 16, 129])
def test_cosine_tail_integrates_the_density(dim):
    for cosine in (-0.9, -0.2, 0.0, 0.1, 0.6, 0.999):
        with mpmath.workdps(25):
            constant = mpmath.exp(special.log_cosine_constant(dim))
            angle = mpmath.acos(mpmath.mpf(cosine))
            # The integrand of a small cap sits at its rim: pieces that halve towards it resolve it.
            pieces = [angle * (1 - mpmath.mpf(2) ** -j) for j in range(12)] + [angle]
            exact = constant * mpmath.quad(lambda t: mpmath.sin(t) ** (dim - 2), pieces)
        assert special.cosine_upper_tail(cosine, dim) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("dim", [2, 3, 129, 10**4, 10**6, 10**12, 10**18])
def test_cosine_constant_in_any_dimension(dim):
    with mpmath.workdps(60):
        d = mpmath.mpf(dim)
        exact = mpmath.loggamma(d / 2) - mpmath.loggamma((d - 1) / 2) - mpmath.log(mpmath.pi) / 2
    # A few roundings of a logarithm of at most 21.
    assert special.log_cosine_constant(dim) == pytest.approx(float(exact), abs=2e-14)


def test_cosine_tail_domain():
    with pytest.raises(DomainError, match="cosine"):
        special.cosine_upper_tail(1.5, 3)
    with pytest.raises(DomainError, match="dim"):
        special.cosine_upper_tail(0.5, 1)
