import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import check_grad, minimize

from theory.depth import free_polynomial, repeated_update
from theory.depth import population_training as training
from theory.depth.covariance_polynomial import ordered_polynomial, population_risk
from theory.problems import ArraySpectrum, PowerLawSpectrum
from theory.results import DomainError, PrecisionError

SPECTRUM = PowerLawSpectrum(1.0, 0.5, 24, 2.0, 0.5)


@pytest.mark.parametrize("gain", [1.0, 0.7])
def test_the_loss_is_that_of_the_ordered_polynomial(gain):
    spectrum = ArraySpectrum((2.0, 0.7, 0.1), (1.0, 2.0, 0.3))
    kappa = np.array([0.3, -0.2, 1.1, 0.4])
    sigma, omega = np.diag(spectrum.input_variances()), np.diag(spectrum.teacher_variances())
    polynomial = ordered_polynomial(sigma, [k * np.eye(3) for k in kappa], np.full(4, gain))
    exact = population_risk(polynomial, omega, sigma)
    assert float(training.population_loss(spectrum, kappa, gain)) == pytest.approx(exact, rel=1e-13)


def test_the_gradient_is_the_symbolic_derivative():
    symbols = sympy.symbols("k1:4")
    eigenvalues, teacher, gain = (2, sympy.Rational(1, 3)), (1, 5), sympy.Rational(3, 4)
    loss = sum(
        x * w * (1 - gain + gain * sympy.prod([1 - k * x / 3 for k in symbols])) ** 2
        for x, w in zip(eigenvalues, teacher, strict=True)
    )
    point = dict(zip(symbols, (sympy.Rational(1, 2), sympy.Rational(3, 2), -1), strict=True))
    exact = [float(sympy.diff(loss, k).subs(point)) for k in symbols]
    spectrum = ArraySpectrum((2.0, 1 / 3), (1.0, 5.0))
    value, gradient = training.population_gradient(spectrum, [0.5, 1.5, -1.0], 0.75)
    assert float(value) == pytest.approx(float(loss.subs(point)), rel=1e-14)
    np.testing.assert_allclose(gradient, exact, rtol=1e-13)


@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(0.2, 1.5))
def test_the_gradient_against_finite_differences(seed, layers, gain):
    kappa = np.random.default_rng(seed).uniform(0, 2, layers)
    error = check_grad(
        lambda k: float(training.population_loss(SPECTRUM, k, gain)),
        lambda k: training.population_gradient(SPECTRUM, k, gain)[1],
        kappa,
    )
    assert error <= 1e-5 * (1 + np.linalg.norm(training.population_gradient(SPECTRUM, kappa, gain)[1]))


def test_leave_one_out_products_survive_zeros():
    factors = np.array([[2.0, 0.0, 3.0, 5.0], [0.0, 0.0, 1.0, 1.0]])
    assert training.leave_one_out_products(factors).tolist() == [[0, 30, 0, 0], [0, 0, 0, 0]]
    assert training.leave_one_out_products([7.0]).tolist() == [1.0]


def test_a_removed_mode_has_a_gradient_in_high_precision():
    # One layer sits on the root of the first mode: its factor is zero there, the gradient of the others is not lost.
    spectrum = ArraySpectrum((1.0, 0.25), (1.0, 1.0))
    kappa = [2.0, 0.5]  # κ_1 λ_1 / 2 = 1
    with mpmath.workdps(30):
        loss = lambda a, b: sum(  # noqa: E731
            x * ((1 - a * x / 2) * (1 - b * x / 2)) ** 2 for x in (mpmath.mpf(1), mpmath.mpf("0.25"))
        )
        exact = [float(mpmath.diff(loss, (2, mpmath.mpf("0.5")), order)) for order in ((1, 0), (0, 1))]
    np.testing.assert_allclose(training.population_gradient(spectrum, kappa)[1], exact, rtol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_optimum_is_the_free_polynomial(depth):
    kappa = training.optimal_scalars(SPECTRUM, depth)
    loss, gradient = training.population_gradient(SPECTRUM, kappa)
    assert float(loss) == pytest.approx(float(free_polynomial.finite_risk(SPECTRUM, depth)), rel=1e-10)
    # The first root lies on the first eigenvalue: 1 - κλ/L there is rounding.
    assert np.abs(gradient * kappa).max() <= 1e-8 * float(loss)
    nearby = minimize(
        lambda k: tuple(map(lambda v: v if np.ndim(v) else float(v), training.population_gradient(SPECTRUM, k))),  # noqa: C417
        kappa * np.linspace(0.9, 1.1, depth),
        jac=True,
    )
    assert nearby.fun >= float(loss) * (1 - 1e-10)


def test_equal_scalars_are_the_repeated_update_and_stay_equal():
    step = 0.6 * SPECTRUM.input_variances()[0]
    kappa = np.full(6, 0.6 * 6)
    risk = repeated_update.finite_risk(SPECTRUM, 6, step)
    assert float(training.population_loss(SPECTRUM, kappa)) == pytest.approx(float(risk), rel=1e-13)
    path = training.gradient_flow(SPECTRUM, training.start_scalars(6, 0.01), [1e4])
    assert np.ptp(path.scalars[-1]) <= 1e-8 * path.scalars[-1].max()
    best = float(repeated_update.best_risk(SPECTRUM, 6))
    assert best * (1 - 1e-9) <= path.losses[-1] <= best * (1 + 1e-3)


def test_spread_scalars_pass_the_repeated_update_and_stay_above_the_free_optimum():
    path = training.gradient_flow(SPECTRUM, training.start_scalars(4, 0.01, 0.2), [0.0, 1.0, 1e2, 1e4, 1e5])
    assert (np.diff(path.losses) <= 0).all()
    assert path.losses[-1] < float(repeated_update.best_risk(SPECTRUM, 4))
    assert path.losses[-1] >= float(free_polynomial.finite_risk(SPECTRUM, 4)) * (1 - 1e-12)


def test_one_layer_flow_in_closed_form():
    # R = Σ λω (1 - κλ)^2 is quadratic: κ relaxes to its optimum at the rate 2 Σ λ^3 ω.
    eigenvalues, teacher = SPECTRUM.input_variances(), SPECTRUM.teacher_variances()
    rate = 2 * np.sum(eigenvalues**3 * teacher)
    target = np.sum(eigenvalues**2 * teacher) / np.sum(eigenvalues**3 * teacher)
    times = np.array([0.0, 0.01, 0.05, 0.2])
    path = training.gradient_flow(SPECTRUM, [0.1], times)
    np.testing.assert_allclose(path.scalars[:, 0], target + (0.1 - target) * np.exp(-rate * times), rtol=1e-6)


def test_descent_with_a_small_rate_follows_the_flow():
    start = training.start_scalars(3, 0.05, 0.3)
    flow = training.gradient_flow(SPECTRUM, start, [2.0])
    steps = training.gradient_descent(SPECTRUM, start, rate=1e-3, steps=2000)
    assert steps.losses[-1] == pytest.approx(flow.losses[-1], rel=2e-2)
    assert steps.times[0] == 0
    assert steps.times[-1] == 2000
    assert len(steps.times) == 64
    assert training.gradient_flow(SPECTRUM, start, [0.0]).losses[0] == pytest.approx(steps.losses[0], rel=1e-13)


def test_adam_matches_its_textbook_form():
    start, rate = np.array([0.1, 0.4]), 0.05
    kappa, mean, square = start.copy(), np.zeros(2), np.zeros(2)
    for step in range(1, 11):
        gradient = training.population_gradient(SPECTRUM, kappa)[1]
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        kappa = kappa - rate * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    path = training.adam_descent(SPECTRUM, start, rate=rate, steps=10)
    np.testing.assert_allclose(path.scalars[-1], kappa, rtol=1e-12)
    again = training.adam_descent(SPECTRUM, start, rate=rate, steps=10)
    assert (again.scalars == path.scalars).all()


def test_the_exponent_of_a_power_law():
    depths = [1, 2, 4, 16]
    assert training.fitted_exponent(depths, 3.0 * np.array(depths) ** -1.7) == pytest.approx(1.7, rel=1e-13)
    losses = training.trained_losses(
        [1, 2], lambda L: training.gradient_flow(SPECTRUM, training.start_scalars(L, 0.01, 0.1), [1e3])
    )
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: training.population_loss(SPECTRUM, []), DomainError, "scalars must"),
        (lambda: training.population_loss(SPECTRUM, [np.inf]), DomainError, "scalars must"),
        (lambda: training.start_scalars(2, 0.1, 2.0), DomainError, "spread must"),
        (lambda: training.gradient_flow(SPECTRUM, [0.1], [1.0, 1.0]), DomainError, "increasing"),
        (lambda: training.gradient_descent(SPECTRUM, [[0.1]], rate=1, steps=1), DomainError, "one vector"),
        (lambda: training.gradient_descent(SPECTRUM, [0.1], rate=0, steps=1), DomainError, "rate must"),
        (lambda: training.gradient_descent(SPECTRUM, [0.1] * 9, rate=1e5, steps=99), PrecisionError, "diverged"),
        (lambda: training.fitted_exponent([1, 1], [1.0, 2.0]), DomainError, "different depths"),
    ],
)
def test_errors_are_sentences(call, error, words):
    with np.errstate(all="ignore"), pytest.raises(error, match=words):
        call()


def test_a_failed_integration_is_reported(monkeypatch):
    class Failed:
        success, message = False, "no luck"

    monkeypatch.setattr(training, "solve_ivp", lambda *_, **__: Failed())
    with pytest.raises(PrecisionError, match="no luck"):
        training.gradient_flow(SPECTRUM, [0.1], [1.0])
