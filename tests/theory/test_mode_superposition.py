import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from theory.depth import free_polynomial, repeated_update
from theory.depth import mode_superposition as modes
from theory.problems import ArraySpectrum, PowerLawSpectrum
from theory.results import DomainError, PrecisionError

FLOAT64 = 1e-12


@pytest.mark.parametrize("exponent", [1.01, 1.5, 2.0, 4.75, 40.0])
@pytest.mark.parametrize("shortest", [0.5, 3.0, 40.0])
def test_the_incomplete_gamma_form_agrees_with_mpmath(exponent, shortest):
    density = modes.DepthDensity(2.0, exponent, shortest)
    depths = [0, 1, 2, 7, 100, 10**6]
    with mpmath.workdps(40):
        s, start = mpmath.mpf(exponent) - 1, mpmath.mpf(shortest)
        exact = [2 * start**-s / s] + [
            2 * mpmath.mpf(L) ** -s * mpmath.gammainc(s, 0, mpmath.mpf(L) / start) for L in depths[1:]
        ]
    np.testing.assert_allclose(modes.power_law_loss(density, depths), [float(v) for v in exact], rtol=FLOAT64)


def test_the_integral_is_the_one_printed():
    density = modes.DepthDensity(1.5, 2.5, 0.7)
    with mpmath.workdps(25):
        for depth in (1, 10):
            integral = mpmath.quad(
                lambda t, n=depth: 1.5 * t ** mpmath.mpf("-2.5") * mpmath.e ** (-n / t), [0.7, 1, 10, 100, mpmath.inf]
            )
            assert float(modes.power_law_loss(density, depth)) == pytest.approx(float(integral), rel=1e-12)


def test_whole_exponents_in_closed_form():
    x = sympy.Symbol("x", positive=True)
    density = modes.DepthDensity(1.0, 3.0, 1.0)  # s = 2: 1 - (1 + L) e^-L over L^2
    for depth in (1, 5):
        closed = sympy.integrate(x * sympy.exp(-x), (x, 0, depth)) / depth**2
        assert float(modes.power_law_loss(density, depth)) == pytest.approx(float(closed), rel=1e-14)


@given(st.floats(1.05, 20), st.floats(0.1, 50))
def test_the_loss_falls_and_stays_below_its_asymptote(exponent, shortest):
    density = modes.DepthDensity(1.0, exponent, shortest)
    depths = 2 ** np.arange(0, 20)
    losses, bound = modes.power_law_loss(density, depths), modes.power_law_asymptote(density, depths)
    assert (np.diff(losses) < 0).all()
    assert (losses <= bound * (1 + 1e-13)).all()


def test_random_depths_superpose_to_the_power_law():
    rng = np.random.default_rng(56)
    exponent, shortest, count = 2.5, 2.0, 400_000
    depths = shortest * rng.random(count) ** (-1 / (exponent - 1))  # Pareto, density (β-1) τ0^(β-1) τ^-β
    amplitude = (exponent - 1) * shortest ** (exponent - 1)
    density = modes.DepthDensity(amplitude, exponent, shortest)
    for L in (1, 10, 50):
        terms = np.exp(-L / depths)
        z = (terms.mean() - float(modes.power_law_loss(density, L))) / (terms.std() / np.sqrt(count))
        assert abs(z) < 4.5
    whole = modes.superposed_loss(np.full(count, 1 / count), depths, [0, 10])
    np.testing.assert_allclose(whole, [1.0, np.exp(-10 / depths).mean()], rtol=1e-12)


def test_modes_that_go_at_once_or_never():
    losses = modes.superposed_loss([1.0, 2.0, 4.0], [0.0, np.inf, 1.0], [0, 1])
    np.testing.assert_allclose(losses, [7.0, 2 + 4 / np.e], rtol=1e-15)


@pytest.mark.parametrize(("a", "b"), [(2.0, 1.0), (0.5, 2.0), (1.0, 0.25)])
def test_the_repeated_update_superposes_to_its_own_asymptote(a, b):
    spectrum = PowerLawSpectrum(a, b, input_scale=2.0, teacher_scale=3.0)
    depths = np.array([10, 10**4])
    asymptote = modes.power_law_asymptote(modes.repeated_density(spectrum), depths)
    np.testing.assert_allclose(asymptote, repeated_update.continuum_asymptote(spectrum, depths), rtol=1e-13)


@pytest.mark.parametrize("step", [0.3, 1.0, 1.7, 2.0])
def test_repeated_modes_are_exponentials(step):
    spectrum = PowerLawSpectrum(1.0, 1.0, 40)
    depths = np.array([0, 1, 5, 30])
    losses = modes.repeated_mode_losses(spectrum, depths, step)
    assert losses.shape == (4, 40)
    tau = modes.repeated_characteristic_depths(spectrum, step)
    np.testing.assert_allclose(losses, modes.exponential_decay(tau, depths), rtol=1e-12, atol=1e-300)
    weights = spectrum.label_variances()
    risk = repeated_update.finite_risk(spectrum, depths, step)
    np.testing.assert_allclose(modes.superposed_loss(weights, tau, depths), risk, rtol=1e-12)


def test_characteristic_depths_at_the_edges():
    spectrum = ArraySpectrum((1.0, 0.5, 1e-18), (1.0, 1.0, 1.0))
    tau = modes.repeated_characteristic_depths(spectrum)
    assert tau[0] == 0
    assert tau[1] == pytest.approx(0.5 / np.log(2), rel=1e-15)
    assert tau[2] == pytest.approx(0.5e18, rel=1e-12)
    assert modes.repeated_characteristic_depths(spectrum, 2.0)[:2].tolist() == [np.inf, 0.0]


def test_free_modes_add_up_to_the_free_risk():
    spectrum = PowerLawSpectrum(1.0, 0.5, 30)
    depths = np.array([[0, 1], [4, 9]])
    losses = modes.free_mode_losses(spectrum, depths)
    assert losses.shape == (2, 2, 30)
    np.testing.assert_allclose(
        losses @ spectrum.label_variances(), free_polynomial.finite_risk(spectrum, depths), rtol=1e-10
    )
    np.testing.assert_allclose(losses[0, 0], 1.0)


def test_stronger_modes_are_learned_first_under_both_references():
    spectrum = PowerLawSpectrum(2.0, 1.0, 32)
    depths = np.arange(0, 33)
    free = modes.depths_below(depths, modes.free_mode_losses(spectrum, depths))
    deep = np.arange(0, 4000, 10)
    repeated = modes.depths_below(deep, modes.repeated_mode_losses(spectrum, deep))
    # The free optimum skips modes and returns to them, but never far out of order.
    assert (np.maximum.accumulate(free) - free).max() == 2
    assert (np.diff(repeated) >= 0).all()
    assert free[-1] <= 32


def test_a_mode_that_comes_back_counts_from_its_last_return():
    curves = np.array([[1.0, 1.0, 0.0], [0.01, 1.0, 0.0], [0.5, 1.0, 0.0], [0.01, 1.0, 0.0]])
    assert modes.depths_below([0, 1, 2, 4], curves).tolist() == [4.0, np.inf, 0.0]
    assert modes.depths_below([0, 1, 2, 4], curves, 0.6).tolist() == [1.0, np.inf, 0.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: modes.DepthDensity(1.0, 1.0, 1.0), "exponent must"),
        (lambda: modes.DepthDensity(0.0, 2.0, 1.0), "amplitude must"),
        (lambda: modes.DepthDensity(1.0, 2.0, 0.0), "shortest must"),
        (lambda: modes.power_law_asymptote(modes.DepthDensity(1, 2, 1), 0), "depth must"),
        (lambda: modes.superposed_loss([1.0], [1.0, 2.0], 1), "one length"),
        (lambda: modes.superposed_loss([-1.0], [1.0], 1), "entries >= 0"),
        (lambda: modes.depths_below([1, 1], np.ones((2, 1))), "depth must increase"),
        (lambda: modes.repeated_mode_losses(PowerLawSpectrum(1, 1, 3), 1, 2.1), "step must"),
        (lambda: modes.repeated_density(PowerLawSpectrum(0, 2, 3)), "input_exponent must"),
    ],
)
def test_errors_are_sentences(call, words):
    with pytest.raises(DomainError, match=words):
        call()


@pytest.mark.parametrize("density", [(1, 150, 1e-3), (1e100, 4, 1e-100), (1e100, 149, 1e-2)])
def test_a_loss_beyond_float64_is_refused(density):
    with pytest.raises(PrecisionError, match="beyond 1e308"):
        modes.power_law_loss(modes.DepthDensity(*density), [0, 1])
