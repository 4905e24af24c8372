"""Normalised activations: Table 1 predicted, expansion and trichotomy, Monte Carlo, domain."""

import functools

import mpmath
import numpy as np
import pytest

from theory.multihead import activations as act
from theory.multihead.gradient_descent import debiased_step, debiased_step_risk
from theory.multihead.softmax_risk import optimum, softmax_risk
from theory.problems import RegressionTask
from theory.results import DomainError

TASK = RegressionTask(5, 40, 0.1)
LIMIT = float(debiased_step_risk(TASK, debiased_step(TASK)))
BEST = functools.cache(lambda name, scale: act.best_two_heads(TASK, act.activation(name, scale)))
ALL = [act.exponential(), act.shifted_tanh(), act.square(0.5), act.linear(0.8)]


@pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)
def test_taylor_coefficients(activation):
    with mpmath.workdps(40):
        C = activation.slope
        f = {
            "exp": mpmath.exp,
            "1+tanh": lambda x: 1 + mpmath.tanh(x),
            "(1+0.5x)^2": lambda x: (1 + x / 2) ** 2,
            "1+0.8x": lambda x: 1 + mpmath.mpf(0.8) * x,
        }[activation.name]
        series = mpmath.taylor(lambda x: f(x / C), 0, 3)
    np.testing.assert_allclose([float(x) for x in series], [1, 1, activation.second, activation.third], atol=1e-12)
    x = np.linspace(-0.5, 0.5, 5)
    np.testing.assert_allclose(activation.function(x), [float(f(value)) for value in x], rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [("1+tanh", 1, (0.14340, 3.4465, 0.239383)), ("(1+Cx)^2", 0.5, (0.28435, 1.7680, 0.238341))],
)
def test_findings_optima(name, scale, expected):
    activation, best = act.activation(name, scale), BEST(name, scale)
    assert (best.gamma, best.mu) == pytest.approx(expected[:2], rel=3e-5)
    assert best.risk.value == pytest.approx(expected[2], abs=5.1e-7)
    assert best.gain == pytest.approx(LIMIT - best.risk.value, rel=1e-12)
    assert best.step == pytest.approx(act.effective_step(activation, best.gamma, best.mu))
    for factor in (0.95, 1.05):
        gamma = factor * best.gamma
        other = act.activation_risk(TASK, activation, gamma, act.best_mu(TASK, activation, gamma))
        assert other.value > best.risk.value


def test_table_1_is_near_its_prediction():
    rows = [("1+tanh", 1, 0.1504, 3.3362, 1.0035), ("(1+Cx)^2", 0.5, 0.2882, 1.7561, 1.0122)]
    rows += [("(1+Cx)^2", 0.8, 0.1810, 1.7487, 1.0128), ("(1+Cx)^2", 1, 0.1452, 1.7448, 1.0132)]
    for name, C, omega, mu, eta in rows:
        # The scale of the square only rescales γ.
        scale = 0.5 if "^2" in name else 1
        best = BEST(name, scale)
        assert (best.gamma * scale / C, best.mu, best.step) == pytest.approx((omega, mu, eta), rel=0.05)
        # The trained values cost almost nothing: the valley is flat.
        assert act.activation_risk(TASK, act.activation(name, C), omega, mu).value - best.risk.value < 2e-4
    for C, eta in ((0.5, 0.8810), (0.8, 0.8802), (1, 0.8794)):
        assert act.best_two_heads(TASK, act.linear(C)).step == pytest.approx(eta, rel=0.003)


def test_scale_of_the_square_only_rescales_gamma():
    one, half = BEST("(1+Cx)^2", 1), BEST("(1+Cx)^2", 0.5)
    assert one.gamma == pytest.approx(half.gamma / 2, rel=1e-6)
    assert one.risk.value == pytest.approx(half.risk.value, rel=1e-11)


def test_exponential_is_softmax():
    for gamma, mu in ((0.05, 8.0), (0.3, 1.5)):
        own = act.activation_risk(TASK, act.exponential(), gamma, mu)
        soft = softmax_risk(TASK, [gamma, -gamma], [mu, -mu])
        assert abs(own.value - soft.value) <= own.tolerance + soft.tolerance
    best, soft = BEST("exp", 1), optimum(TASK, 2)
    assert best.gamma == pytest.approx(soft.omega[0], rel=1e-6)
    # The heads nearly cancel: each side is known to 1e-12 of terms that add up to 4.
    assert best.risk.value == pytest.approx(soft.risk.value, abs=1e-11)


@pytest.mark.parametrize("activation", [ALL[0], ALL[1], ALL[2]], ids=lambda a: a.name)
@pytest.mark.parametrize("task", [TASK, RegressionTask(2, 9, 0.4)], ids=["d5", "d2"])
def test_small_gamma_coefficient(activation, task):
    limit = float(debiased_step_risk(task, debiased_step(task)))
    ratios = []
    for scale in (0.02, 0.04):
        gamma = scale / activation.slope
        risk = act.activation_risk(task, activation, gamma, act.best_mu(task, activation, gamma)).value
        ratios.append((risk - limit) / scale**2)
    assert (4 * ratios[0] - ratios[1]) / 3 == pytest.approx(act.small_gamma_coefficient(task, activation), rel=0.01)


def test_trichotomy():
    assert act.regime(act.exponential()) is act.Regime.BORDERLINE
    assert act.regime(act.linear()) is act.Regime.BORDERLINE
    assert act.regime(act.square()) is act.Regime.FINITE
    assert act.regime(act.shifted_tanh()) is act.Regime.FINITE
    assert act.small_gamma_coefficient(TASK, act.linear(0.3)) == 0
    steep = act.Activation("cosh-like", lambda x: np.exp(x) + x**4, 1.0, 0.1, 0.4, True)
    assert act.regime(steep) is act.Regime.VANISHING
    best = act.best_two_heads(TASK, steep)
    assert best.gamma is None
    assert best.risk.value == LIMIT


def test_asymptotic_gain():
    ratios = []
    for context in (400, 4000):
        task = RegressionTask(5, context, 0.1)
        ratios.append(act.best_two_heads(task, act.square(0.5)).gain / act.asymptotic_gain(task))
    assert abs(ratios[1] - 1) < 0.01
    assert abs(ratios[1] - 1) < abs(ratios[0] - 1) / 5


@pytest.mark.parametrize("activation", [ALL[1], ALL[2]], ids=lambda a: a.name)
def test_tolerance_and_monte_carlo(activation):
    gamma, mu = 0.4, 1.1
    claimed = act.activation_risk(TASK, activation, gamma, mu)
    linear, quadratic = act._two_head_terms(TASK, activation, gamma, 1.6)
    assert abs(claimed.value - (1.1 - 2 * mu * linear + mu**2 * quadratic)) <= claimed.tolerance
    rng, n = np.random.default_rng(11), 40_000
    X, beta, query = rng.normal(size=(n, 40, 5)), rng.normal(size=(n, 5)) / np.sqrt(5), rng.normal(size=(n, 5))
    y = (X @ beta[:, :, None])[..., 0] + np.sqrt(0.1) * rng.normal(size=(n, 40))
    score = gamma * (X @ query[:, :, None])[..., 0]
    p, q = activation.function(score), activation.function(-score)
    prediction = mu * np.sum(y * (p / p.sum(1, keepdims=True) - q / q.sum(1, keepdims=True)), axis=1)
    loss = (np.sum(beta * query, axis=1) + np.sqrt(0.1) * rng.normal(size=n) - prediction) ** 2
    # 4.5 standard errors: about one seed in 10^5.
    assert abs(loss.mean() - claimed.value) < 4.5 * loss.std() / np.sqrt(n)


def test_names():
    assert act.activation("1+Cx", 0.5).name == "1+0.5x"
    assert act.activation("(1+Cx)^2").slope == 2
    assert act.activation("1+tanh").name == "1+tanh"
    assert act.activation("exp").third == 1 / 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: act.activation("relu"), "activation must be one of exp, 1"),
        (lambda: act.activation("exp", np.nan), "scale must be a finite number"),
        (lambda: act.activation_risk(TASK, act.linear(), 0.2, 1.0), "normaliser vanishes"),
        (lambda: act.activation_risk(TASK, act.exponential(), 0.0, 1.0), "gamma must be"),
        (lambda: act.activation_risk(RegressionTask(5, 4, 0.1), act.exponential(), 0.1, 1.0), "at least 5"),
        (
            lambda: act.best_mu(RegressionTask(1, 9, 0.1, ((2.0,),)), act.exponential(), 0.1),
            "covariance must be None",
        ),
        (
            lambda: act.small_gamma_coefficient(RegressionTask(1, 9, 0.1, ((2.0,),)), act.exponential()),
            "covariance must be None",
        ),
    ],
)
def test_domain_errors(call, message):
    with pytest.raises(DomainError, match=message):
        call()


def test_the_linear_activation_has_no_second_moment():
    """1/D² with D = 1 + a z̄ normal: the mean over a sample grows with what is cut out around D = 0."""
    a, L = 2.0, 5
    density_at_zero = np.exp(-L / (2 * a * a)) * np.sqrt(L / (2 * np.pi)) / a
    cut = np.array([1e-2, 1e-4])
    x = [np.concatenate([np.linspace(-12, -c, 400_001), np.linspace(c, 12, 400_001)]) for c in cut]
    mass = [np.sum(np.exp(-((d - 1) ** 2) * L / (2 * a * a)) / d**2 * np.gradient(d)) for d in x]
    growth = (mass[1] - mass[0]) * np.sqrt(L / (2 * np.pi)) / a
    assert growth > 50 * density_at_zero
