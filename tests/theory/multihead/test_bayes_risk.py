"""Bayes risk against closed forms in one dimension, mpmath in two and three, moments, Monte Carlo and the limit."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.multihead.bayes_risk import (
    bayes_risk,
    bayes_risk_limit,
    debiased_bayes_ratio,
    debiased_risk_limit,
    paper_ratio_bound,
    sharp_ratio_bound,
    sharp_ratio_bound_limit,
)
from theory.multihead.gradient_descent import debiased_step, debiased_step_risk
from theory.problems import RegressionTask
from theory.results import DomainError


def task(dim, context, noise):
    return RegressionTask(dim, context, noise)


def test_oracles():
    assert bayes_risk(task(5, 40, 0.1)).value == pytest.approx(0.11445493947, abs=5e-12)
    # Kept from this code, on two panel counts that agree; a regression test.
    assert bayes_risk(task(5, 40, 0.1)).value == pytest.approx(0.11445493947015019, rel=1e-13)
    assert bayes_risk_limit(0.125, 0.1) == pytest.approx(0.114056677439347, abs=1e-15)
    assert bayes_risk_limit(1, 0.1) == pytest.approx(0.370156211871642, abs=1e-15)


@pytest.mark.parametrize(("context", "noise"), [(1, 0.3), (3, 0.1), (40, 2.0), (7, 1e-6)])
def test_one_dimension_in_closed_form(context, noise):
    """E 1/(χ²_L + s) = e^{s/2} s^{L/2-1} 2^{-L/2} Γ(1 - L/2, s/2)."""
    with mpmath.workdps(40):
        L, s = mpmath.mpf(context), mpmath.mpf(noise)
        mean = mpmath.exp(s / 2) * s ** (L / 2 - 1) / 2 ** (L / 2) * mpmath.gammainc(1 - L / 2, s / 2)
        expected = float(s * (1 + mean))
    assert bayes_risk(task(1, context, noise)).value == pytest.approx(expected, rel=1e-13)
    # One token in L dimensions: the same mean, and L - 1 directions that it says nothing about.
    wide = bayes_risk(task(context, 1, noise / context)).value
    assert wide == pytest.approx(float(noise / context * (1 + mean)) + (context - 1) / context, rel=1e-13)


@pytest.mark.parametrize(("context", "noise"), [(2, 0.1), (3, 1.0), (9, 0.4)])
def test_two_dimensions_by_double_integral(context, noise):
    """Density of eigenvalues t_1² < t_2² in polar coordinates: (t_2² - t_1²)(t_1 t_2)^(L-2) exp(-(t_1²+t_2²)/2)."""
    x, w = np.polynomial.legendre.leggauss(200)
    rho, angle = 7 * (1 + x), np.pi / 8 * (1 + x)
    first, second = np.outer(rho, np.sin(angle)), np.outer(rho, np.cos(angle))
    density = (second**2 - first**2) * (first * second) ** (context - 2) * np.exp(-(rho**2)[:, None] / 2)
    density = density * np.outer(w * rho, w)
    s = 2 * noise
    mean = np.sum(density * (1 / (first**2 + s) + 1 / (second**2 + s))) / density.sum()
    assert bayes_risk(task(2, context, noise)).value == pytest.approx(noise * (1 + mean), rel=1e-12)


@pytest.mark.parametrize(("dim", "context"), [(3, 4), (10, 9), (13, 40), (60, 60), (60, 31), (100, 100)])
def test_large_noise_series(dim, context):
    """E tr(W + s)^-1 = Σ (-1)^k E tr W^k / s^(k+1) with tr W = dL, tr W² = dL(d+L+1), tr W³ known."""
    d, L, noise = dim, context, 1e5
    s = d * noise
    third = d * L * (L * L + 3 * L * (d + 1) + d * d + 3 * d + 4)
    mean = d / s - d * L / s**2 + d * L * (d + L + 1) / s**3 - third / s**4
    assert bayes_risk(task(d, L, noise)).value == pytest.approx(noise * (1 + mean), rel=1e-13)


@pytest.mark.parametrize(("dim", "context"), [(3, 6), (8, 20), (61, 90), (60, 100)])
def test_small_noise_limit(dim, context):
    """E tr W^-1 = d/(L-d-1), reached with an error of order σ²."""
    mean = (bayes_risk(task(dim, context, 1e-9)).value - 1e-9) / 1e-9
    assert mean == pytest.approx(dim / (context - dim - 1), rel=1e-5)


def test_monte_carlo():
    rng = np.random.default_rng(5)
    for dim, context, noise in ((6, 4, 0.2), (7, 9, 0.05)):
        X = rng.standard_normal((40_000, context, dim))
        inverse = np.linalg.inv(X.swapaxes(1, 2) @ X + dim * noise * np.eye(dim))
        values = noise * (1 + np.trace(inverse, axis1=1, axis2=2))
        error = values.std() / 200
        # 5 standard errors: one seed in 10^6.
        assert abs(values.mean() - bayes_risk(task(dim, context, noise)).value) < 5 * error


def test_both_parities_continue_each_other():
    """Fourth differences in the dimension of a smooth quantity are small, whatever the parity."""
    values = [bayes_risk(task(d, 200, 0.1)).value for d in range(40, 50)]
    assert np.abs(np.diff(values, 4)).max() < 1e-8


@pytest.mark.parametrize("sizes", [(5, 10**12), (5, 10**17), (10**17, 5), (10**15, 300)])
def test_very_unequal_sizes_approach_the_limit(sizes):
    # The correction to the proportional limit is of the order of the square of the small ratio of sizes.
    risk = bayes_risk(task(*sizes, 0.1))
    assert risk.value == pytest.approx(float(bayes_risk_limit(sizes[0] / sizes[1], 0.1)), rel=1e-14)


def test_noise_zero_and_bad_input():
    assert bayes_risk(task(5, 3, 0)).value == pytest.approx(0.4, rel=1e-15)
    assert bayes_risk(task(5, 5, 0)).value == 0
    with pytest.raises(DomainError, match=r"min\(dim, context\) must be at most 300"):
        bayes_risk(task(301, 301, 0.1))
    for sizes in ((5, 10**18), (10**18, 5)):
        with pytest.raises(DomainError, match=r"max\(dim, context\) must be at most 1e\+17"):
            bayes_risk(task(*sizes, 0.1))
    with pytest.raises(DomainError, match="covariance must be None"):
        bayes_risk(RegressionTask(1, 5, 0.1, ((2.0,),)))
    with pytest.raises(DomainError, match=r"ratio must be finite and > 0, got 0\.0"):
        bayes_risk_limit([1, 0.0], 0.1)
    with pytest.raises(DomainError, match=r"noise must be finite and >= 0, got -1\.0"):
        bayes_risk_limit(1, [-1.0])
    with pytest.raises(DomainError, match="noise must be > 0"):
        paper_ratio_bound(1, 0)
    with pytest.raises(DomainError, match="noise must be > 0"):
        sharp_ratio_bound(task(5, 40, 0))
    with pytest.raises(DomainError, match="covariance must be None"):
        sharp_ratio_bound(RegressionTask(1, 5, 0.1, ((2.0,),)))
    with pytest.raises(DomainError, match="Bayes risk is zero"):
        debiased_bayes_ratio(task(5, 40, 0))


@pytest.mark.parametrize("dim", [100, 200])
def test_limit_is_approached_like_one_over_dim(dim):
    for xi in (0.5, 1.0, 2.0):
        gap = dim * (bayes_risk(task(dim, int(dim / xi), 0.3)).value - float(bayes_risk_limit(xi, 0.3)))
        other = 50 * (bayes_risk(task(50, int(50 / xi), 0.3)).value - float(bayes_risk_limit(xi, 0.3)))
        assert gap == pytest.approx(other, rel=0.05)


@settings(max_examples=60)
@given(xi=st.floats(1e-3, 1e3), noise=st.floats(0, 10) | st.sampled_from([0.0, 1e-300, 1e-12]))
def test_limit_keeps_its_digits(xi, noise):
    with mpmath.workdps(340):
        x, v = mpmath.mpf(xi), mpmath.mpf(noise)
        b = 1 - x + x * v
        expected = v + (mpmath.sqrt(b * b + 4 * x * x * v) - b) / (2 * x)
        value = float(bayes_risk_limit(xi, noise))
        # b itself rounds, which counts near the edge b = 0.
        slack = 1e-14 + 4e-16 * float((1 + x) / mpmath.sqrt(b * b + 4 * x * x * v) if b or v else 0)
        assert abs(value - expected) <= slack * expected + mpmath.mpf(10) ** -320


def test_limit_at_the_edges():
    assert bayes_risk_limit([0.5, 1.0, 4.0], 0.0) == pytest.approx([0.0, 0.0, 0.75], abs=1e-300)


@settings(max_examples=25)
@given(dim=st.integers(1, 40), context=st.integers(1, 60), noise=st.floats(1e-3, 5))
def test_sharp_bound_holds_at_every_size(dim, context, noise):
    problem = task(dim, context, noise)
    ratio = debiased_bayes_ratio(problem)
    assert ratio.value + ratio.tolerance >= 1
    assert ratio.value <= sharp_ratio_bound(problem) + ratio.tolerance
    risk = float(debiased_step_risk(problem, debiased_step(problem)))
    assert ratio.value == pytest.approx(risk / bayes_risk(problem).value, rel=1e-12)


@settings(max_examples=60)
@given(xi=st.floats(1e-3, 1e3), noise=st.floats(1e-3, 50))
def test_bounds_in_the_limit(xi, noise):
    ratio = float(debiased_risk_limit(xi, noise) / bayes_risk_limit(xi, noise))
    sharp, paper = float(sharp_ratio_bound_limit(xi, noise)), float(paper_ratio_bound(xi, noise))
    assert 1 - 1e-12 <= ratio <= sharp * (1 + 1e-12)
    assert sharp <= paper * (1 + 1e-12)
    big = RegressionTask(10**9, max(1, round(10**9 / xi)), noise)
    assert sharp_ratio_bound(big) == pytest.approx(
        float(sharp_ratio_bound_limit(10**9 / big.context, noise)), rel=1e-5
    )
