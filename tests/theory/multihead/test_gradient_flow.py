"""Dynamics on the approximate loss: pieces of the two-head flow against the integrator, exponents, stages."""

import mpmath
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from theory.multihead import gradient_flow as gf
from theory.multihead.approximate_loss import approximate_gradient, approximate_loss
from theory.multihead.solution_manifold import manifold_loss
from theory.problems import RegressionTask
from theory.results import DomainError, PrecisionError

TASK = RegressionTask(5, 40, 0.1)


@pytest.fixture(scope="module")
def long_path():
    return gf.gradient_flow(TASK, [0.01, -0.01], [0.01, -0.01], np.geomspace(0.1, 1e8, 150))


def exponent(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def test_velocity_is_the_gradient():
    w, m = 0.3, 1.2
    by_omega, by_mu = approximate_gradient(TASK, [w, -w], [m, -m])
    assert gf.two_head_velocity(TASK, w, m) == pytest.approx((-by_omega[0], -by_mu[0]), rel=1e-13)
    h = 1e-6
    loss = lambda w, m: float(approximate_loss(TASK, [w, -w], [m, -m]))  # noqa: E731
    numeric = [-(loss(w + h, m) - loss(w - h, m)) / (4 * h), -(loss(w, m + h) - loss(w, m - h)) / (4 * h)]
    assert gf.two_head_velocity(TASK, w, m) == pytest.approx(numeric, rel=1e-7)


def test_late_exponents_and_laws(long_path):
    late = slice(-15, None)
    t, w = long_path.times[late], long_path.omega[late, 0]
    excess = long_path.loss[late] - float(manifold_loss(TASK, 1e-6))
    assert exponent(t, w) == pytest.approx(-1 / 6, rel=0.01)
    assert exponent(t, excess) == pytest.approx(-2 / 3, rel=0.01)
    np.testing.assert_allclose(gf.late_scale(TASK, t), w, rtol=1e-4)
    np.testing.assert_allclose(gf.late_excess(TASK, t), excess, rtol=1e-3)
    np.testing.assert_allclose(long_path.mu[late, 0], gf.slow_manifold_mu(TASK, w), rtol=1e-4)


def test_conserved_and_monotone_quantities(long_path):
    w, m = long_path.omega[:, 0], long_path.mu[:, 0]
    np.testing.assert_allclose(long_path.omega[:, 1], -w, atol=1e-10)
    np.testing.assert_allclose(long_path.mu[:, 1], -m, rtol=1e-9)
    assert (np.diff(long_path.loss) <= 1e-14).all()
    assert (np.diff(m) > 0).all()
    assert (np.diff(m**2 - w**2) > -1e-15).all()
    # d(m² - w²)/dt integrates to the change: trapezoid in log t is good to its step squared.
    rate = gf.imbalance_growth(TASK, w, m) * long_path.times
    step = np.diff(np.log(long_path.times))
    total = np.sum(step * (rate[1:] + rate[:-1]) / 2)
    assert total == pytest.approx((m**2 - w**2)[-1] - (m**2 - w**2)[0], rel=5e-3)


def test_slow_manifold_time(long_path):
    w, t = long_path.omega[:, 0], long_path.times
    predicted = gf.slow_manifold_time(TASK, w[-40], w[-1])
    assert predicted.value == pytest.approx(t[-1] - t[-40], rel=1e-4)
    assert predicted.tolerance < 1e-8 * predicted.value
    # By the late law w^-6 = 8 c d³ t.
    low = gf.slow_manifold_time(TASK, 2e-3, 1e-3).value
    assert low == pytest.approx((1e-3**-6 - 2e-3**-6) / (8 * 1.1 / 40 * 125), rel=1e-4)


def test_imbalance_growth_keeps_its_digits():
    for w in (1e-5, 0.1, 0.4, 0.447, 0.448, 1.5):
        x = mpmath.mpf(5) * mpmath.mpf(w) ** 2
        exact = 8 * mpmath.mpf(1.1) / 40 * 4 * (x * mpmath.cosh(x) - mpmath.sinh(x))
        with mpmath.workdps(40):
            x = mpmath.mpf(5) * mpmath.mpf(w) ** 2
            exact = 8 * mpmath.mpf(1.1) / 40 * 4 * (x * mpmath.cosh(x) - mpmath.sinh(x))
        assert float(gf.imbalance_growth(TASK, w, 2.0)) == pytest.approx(float(exact), rel=1e-13)


def test_early_growth():
    t = np.array([0.5, 1.0])
    path = gf.gradient_flow(TASK, [1e-4, -1e-4], [3e-4, -3e-4], t)
    w, m = gf.linear_growth(1e-4, 3e-4, t)
    np.testing.assert_allclose(path.omega[:, 0], w, rtol=1e-5)
    np.testing.assert_allclose(path.mu[:, 0], m, rtol=1e-5)
    # The logistic curve, where dw² is small: many tokens in low dimension.
    task = RegressionTask(1, 40, 0.0)
    grid = np.linspace(0.2, 3, 8)
    path = gf.gradient_flow(task, [0.02, -0.02], [0.02, -0.02], grid)
    product = gf.logistic_growth(task, 0.02**2, grid)
    np.testing.assert_allclose(path.omega[:, 0] * path.mu[:, 0], product, rtol=0.01)


def test_turning_point(long_path):
    turn = gf.turning_point(TASK)
    assert turn.w.value == pytest.approx(0.5763, abs=5e-5)
    x = 5 * turn.w.value**2
    assert 2 * turn.m.value * turn.w.value * (1 + 1.1 * 5 / 40 * np.cosh(x)) == pytest.approx(1, abs=1e-9)
    assert gf.turning_point(TASK, 1e-3).w.value == pytest.approx(turn.w.value, abs=1e-9)
    assert long_path.omega.max() <= turn.w.value + 1e-6
    # The largest omega stays of order sqrt(log d / d), as section 4.1 says of the proportional regime.
    ratios = [gf.turning_point(RegressionTask(d, 8 * d, 0.1)).w.value / np.sqrt(np.log(d) / d) for d in (20, 1000)]
    assert ratios == pytest.approx([1.0326, 0.9927], abs=1e-3)


def test_the_integrator_agrees_with_another():
    start = [0.03, -0.02, 0.05], [0.01, 0.04, -0.03]
    path = gf.gradient_flow(TASK, *start, [0.0, 1.0, 30.0])
    velocity = lambda _, x: -np.concatenate(approximate_gradient(TASK, x[:3], x[3:]))  # noqa: E731
    other = solve_ivp(velocity, (0, 30), np.concatenate(start), method="DOP853", rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([path.omega[-1], path.mu[-1]]), other.y[:, -1], atol=1e-7)
    np.testing.assert_allclose(path.omega[0], start[0])


def test_descent_follows_the_flow():
    errors = []
    for rate in (0.01, 0.005):
        path = gf.gradient_descent_path(TASK, [0.01, -0.01], [0.01, -0.01], rate, round(6 / rate), round(1 / rate))
        flow = gf.gradient_flow(TASK, [0.01, -0.01], [0.01, -0.01], rate * path.times)
        errors.append(np.abs(path.mu - flow.mu).max())
    assert errors[0] == pytest.approx(2 * errors[1], rel=0.1)
    assert path.times.tolist() == [0, 200, 400, 600, 800, 1000, 1200]


def test_stages_and_head_permutation():
    rng = np.random.default_rng(1)
    omega, mu = rng.normal(size=(2, 4)) * 0.05
    times = np.geomspace(0.1, 1e4, 100)
    path = gf.gradient_flow(TASK, omega, mu, times)
    stages = gf.detect_stages(TASK, path)
    assert stages.sign_matching < stages.optimality < 100
    assert stages.homogeneity < 100
    assert stages.zero_sum < 100
    assert 0.5 < stages.turning < 20
    order = [2, 0, 3, 1]
    other = gf.gradient_flow(TASK, -omega[order], -mu[order], times)
    np.testing.assert_allclose(other.omega, -path.omega[:, order], atol=1e-6)
    # Too early for any pattern to have settled.
    early = gf.detect_stages(TASK, gf.gradient_flow(TASK, omega, mu, [0.0, 1e-3]))
    assert early.zero_sum is None
    assert early.optimality is None


def test_dummies_at_the_origin_stay():
    path = gf.gradient_flow(TASK, [0.0, 0.0], [0.0, 0.0], [1.0])
    assert not path.omega.any()
    assert gf.sign_violation(path)[0] == gf.zero_sum_violation(path)[0] == gf.homogeneity_violation(path)[0] == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gf.gradient_descent_path(TASK, [5.0], [5.0], 1.0, 50), PrecisionError, "diverged"),
        (lambda: gf.gradient_flow(TASK, [[0.1]], [[0.1]], [1.0]), DomainError, "one number per head"),
        (lambda: gf.gradient_flow(TASK, [0.1], [0.1], [1.0, 0.5]), DomainError, "times must be"),
        (lambda: gf.slow_manifold_time(TASK, 0.1, 0.2), DomainError, "low must be"),
        (lambda: gf.turning_point(TASK, 0.5), DomainError, "start must be"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_failures_of_the_integrator_are_reported(monkeypatch):
    class Failed:
        success, message, t_events = False, "step too small", [np.array([])]

    monkeypatch.setattr(gf, "solve_ivp", lambda *_, **__: Failed)
    with pytest.raises(PrecisionError, match="step too small"):
        gf.gradient_flow(TASK, [0.1], [0.1], [1.0])
    with pytest.raises(PrecisionError, match="did not peak"):
        gf.turning_point(TASK)
