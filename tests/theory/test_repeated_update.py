import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.depth import free_polynomial as free
from theory.depth import repeated_update as repeated
from theory.problems import ArraySpectrum, PowerLawSpectrum
from theory.results import DomainError, PrecisionError

# A handful of roundings, times the exponent 2L of a power near one.
TOLERANCE = 1e-13


def exact_integral(zeta, depth, step):
    """Integral of x^(zeta-1) (1 - step x)^(2 depth) over [0, 1] in 40 digits, positive part by positive part."""
    with mpmath.workdps(40):
        z, s = mpmath.mpf(zeta), mpmath.mpf(step)
        if s <= 1:
            return float(s**-z * mpmath.betainc(z, 2 * depth + 1, 0, s))
        above = mpmath.quad(
            lambda v: (1 + v) ** (z - 1) * v ** (2 * depth), [0, (s - 1) * (1 - mpmath.mpf(1) / (depth + 1)), s - 1]
        )
        return float(s**-z * (mpmath.beta(z, 2 * depth + 1) + above))


@pytest.mark.parametrize("zeta", [0.05, 0.3, 1.5, 7, 20])
@pytest.mark.parametrize("depth", [1, 5, 100, 3000])
@pytest.mark.parametrize("step", [0.2, 0.9, 1, 1.3, 1.9, 2])
def test_continuum_risk_against_high_precision(zeta, depth, step):
    spectrum = PowerLawSpectrum(1, zeta)
    ours = repeated.continuum_risk(spectrum, depth, step)
    assert ours == pytest.approx(exact_integral(zeta, depth, step), rel=TOLERANCE)


@pytest.mark.parametrize("depth", [1, 10**3, 10**6, 10**9])
@pytest.mark.parametrize("zeta", [0.051, 0.5, 2, 19.9])
def test_continuum_risk_to_14_digits_at_any_depth(zeta, depth):
    with mpmath.workdps(50):
        exact = mpmath.beta(mpmath.mpf(zeta), 2 * depth + 1)
    assert repeated.continuum_risk(PowerLawSpectrum(1, zeta), depth) == pytest.approx(float(exact), rel=1e-14)


def test_leading_order():
    spectrum = PowerLawSpectrum(2, 2)
    ratio = repeated.continuum_risk(spectrum, 10**8) / repeated.continuum_asymptote(spectrum, 10**8)
    assert ratio == pytest.approx(1, rel=1e-7)


def test_best_step_of_findings():
    steps = repeated.continuum_best_step(PowerLawSpectrum(1, 2), [4, 16, 64, 256])
    np.testing.assert_allclose(steps, [1.56, 1.79, 1.92, 1.98], atol=0.006)


@pytest.mark.parametrize("zeta", [0.3, 2.0, 9.0])
def test_best_step_is_a_minimum(zeta):
    spectrum = PowerLawSpectrum(1, zeta)
    for depth in (1, 5, 50):
        step = float(repeated.continuum_best_step(spectrum, depth))
        best = float(repeated.continuum_risk(spectrum, depth, step))
        for other in (0.999 * step, min(2.0, 1.001 * step), 1.0):
            assert repeated.continuum_risk(spectrum, depth, other) >= best * (1 - 1e-12)


def test_gain_tends_to_two_to_the_zeta():
    spectrum = PowerLawSpectrum(1, 3)
    best = repeated.continuum_risk(spectrum, 10**7, repeated.continuum_best_step(spectrum, 10**7))
    assert best / repeated.continuum_risk(spectrum, 10**7) == pytest.approx(1 / 8, rel=1e-4)


def test_finite_risk_is_the_sum_over_modes():
    spectrum = PowerLawSpectrum(1.5, 0.5, 100, 2.0, 3.0)
    x, w = spectrum.input_variances() / 2.0, spectrum.label_variances()
    for depth, step in ((0, 1.0), (3, 0.7), (9, 1.9)):
        exact = float(np.sum(w * (1 - step * x) ** (2 * depth)))
        assert repeated.finite_risk(spectrum, depth, step) == pytest.approx(exact, rel=TOLERANCE)


def test_finite_risk_compressed_against_the_sum():
    k = np.arange(1, 10**6 + 1.0)
    exact = float(np.sum(k**-2.0 * (1 - k**-1.0) ** 100))
    assert repeated.finite_risk(PowerLawSpectrum(1, 1, 10**6), 50) == pytest.approx(exact, rel=1e-11)


def test_finite_tends_to_continuum_when_deep():
    spectrum = PowerLawSpectrum(2, 1)
    ratio = repeated.finite_risk(spectrum, [1, 8, 256]) / repeated.continuum_risk(spectrum, [1, 8, 256])
    assert abs(ratio[2] - 1) < 1e-9 < abs(ratio[0] - 1)


@given(st.floats(0.1, 3), st.floats(0, 3), st.integers(2, 60), st.integers(1, 12))
def test_free_polynomial_never_loses_to_repeated_updates(a, b, dim, depth):
    spectrum = PowerLawSpectrum(a, b, dim)
    best = float(repeated.best_risk(spectrum, depth))
    assert free.finite_risk(spectrum, depth) <= best * (1 + 1e-9)
    assert best <= repeated.finite_risk(spectrum, depth) * (1 + 1e-12)


@given(st.floats(0.1, 3), st.floats(0, 3), st.integers(2, 60))
def test_one_layer_is_one_family(a, b, dim):
    spectrum = PowerLawSpectrum(a, b, dim)
    np.testing.assert_allclose(repeated.best_risk(spectrum, 1), free.finite_risk(spectrum, 1), rtol=1e-9, atol=1e-14)


@given(st.integers(1, 30))
def test_best_step_of_a_finite_spectrum_is_stationary(depth):
    spectrum = ArraySpectrum((1.0, 0.5, 0.01), (1.0, 1.0, 1000.0))
    step = float(repeated.best_step(spectrum, depth))
    best = repeated.finite_risk(spectrum, depth, step)
    assert repeated.finite_risk(spectrum, depth, step * 1.0001) >= best
    assert repeated.finite_risk(spectrum, depth, step / 1.0001) >= best


def test_best_step_may_exceed_two_on_weak_leading_modes():
    assert repeated.best_step(ArraySpectrum((1.0, 0.01), (1e-9, 1.0)), 1) > 2
    assert repeated.best_step(ArraySpectrum((1.0, 1.0), (1.0, 2.0)), 5) == 1


def test_predictor_coefficients_match_the_residual():
    x, update = np.linspace(0, 1, 5), 0.8
    for depth in (1, 2, 6):
        powers = x[:, None] ** np.arange(1, depth + 1)
        residual = 1 - powers @ repeated.predictor_coefficients(depth, update)
        np.testing.assert_allclose(residual, repeated.repeated_residual(depth, update / depth, x), atol=1e-14)


def test_contraction_condition():
    assert repeated.is_contraction(4, 1.0, 2.0)
    assert not repeated.is_contraction(4, 4.0, 2.0)
    assert not repeated.is_contraction(4, 0.0, 2.0)


@pytest.mark.parametrize("step", [0.0, -1.0, 2.1, np.nan])
def test_step_domain(step):
    with pytest.raises(DomainError, match="step"):
        repeated.continuum_risk(PowerLawSpectrum(1, 1), 3, step)


def test_underflow_is_refused():
    steep = PowerLawSpectrum(0.005, 2.5)
    with pytest.raises(PrecisionError, match=r"step\^zeta must be above 1e-308, got 0\.01\^301"):
        repeated.continuum_risk(steep, 3, 0.01)
    with pytest.raises(PrecisionError, match="below 1e-308 at depth 4096"):
        repeated.continuum_best_step(steep, [1, 4096])
    # At depth 1 the best step is (zeta + 2)/(zeta + 1).
    assert repeated.continuum_best_step(steep, 1) == pytest.approx(303 / 302, rel=1e-12)


def test_best_step_needs_a_layer():
    for function in (repeated.continuum_best_step, repeated.best_step):
        with pytest.raises(DomainError, match="depth"):
            function(PowerLawSpectrum(1, 1, 5), 0)
