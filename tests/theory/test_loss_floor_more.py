import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betainc
from scipy.stats import norm

from theory.depth import loss_floor as floor
from theory.problems import ArraySpectrum, PowerLawSpectrum, TopKTask
from theory.results import DomainError, PrecisionError
from theory.special import normal_top_mean

Z_LIMIT = 4.5  # 7e-6 for a true statement


def draw_targets(task, count, rng, *, by_cosine):
    """Queries and targets of ``count`` contexts, (count, dim) each, in the eigenbasis."""
    scale = np.sqrt(task.spectrum.input_variances())
    tokens = scale * rng.standard_normal((count, task.context, scale.size))
    query = scale * rng.standard_normal((count, scale.size))
    scores = np.einsum("npk,nk->np", tokens, query)
    if by_cosine:
        scores /= np.linalg.norm(tokens, axis=-1)
    chosen = np.argsort(-scores, axis=-1)[:, : task.top_k]
    return tokens, query, np.take_along_axis(tokens, chosen[..., None], axis=1).mean(axis=1)


def z_score(values, exact):
    return (values.mean() - exact) / (values.std(ddof=1) / np.sqrt(len(values)))


# --- Gaussian conditioning and the predictable component, (44)-(46) -------------------------------------------------


def test_conditioning_is_regression_on_the_score():
    spectrum = ArraySpectrum((3.0, 1.0, 0.2), (1.0, 2.0, 3.0))
    query = np.array([0.3, -1.0, 2.0])
    sigma = np.diag(spectrum.input_variances())
    assert float(floor.score_variance(spectrum, query)) == pytest.approx(query @ sigma @ query, rel=1e-15)
    expected = sigma @ query / (query @ sigma @ query) * 0.7
    np.testing.assert_allclose(floor.conditional_token(spectrum, query, 0.7), expected, rtol=1e-15)


def test_conditional_tokens_against_samples():
    spectrum = ArraySpectrum((3.0, 1.0, 0.2), (1.0, 2.0, 3.0))
    rng = np.random.default_rng(44)
    query = np.array([0.3, -1.0, 2.0])
    tokens = np.sqrt(spectrum.input_variances()) * rng.standard_normal((200_000, 3))
    scores = tokens @ query
    residual = tokens - floor.conditional_token(spectrum, np.tile(query, (200_000, 1)), scores)
    for k in range(3):
        assert abs(z_score(residual[:, k] * scores, 0)) < Z_LIMIT
        assert abs(z_score(residual[:, k] * np.sign(scores), 0)) < Z_LIMIT


@pytest.mark.parametrize(("a", "dim"), [(0.0, 128), (0.5, 16), (2.0, 128)])
def test_moments_of_the_score_variance(a, dim):
    spectrum = PowerLawSpectrum(a, 0, dim)
    mean, variance = floor.score_variance_moments(spectrum)
    k = np.arange(1, dim + 1.0)
    assert mean == pytest.approx(np.sum(k ** (-2 * a)), rel=1e-13)
    assert variance == pytest.approx(2 * np.sum(k ** (-4 * a)), rel=1e-13)
    assert floor.score_variation(spectrum) == pytest.approx(variance / mean**2, rel=1e-14)
    query = np.sqrt(spectrum.input_variances()) * np.random.default_rng(1).standard_normal((100_000, dim))
    assert abs(z_score(floor.score_variance(spectrum, query), mean)) < Z_LIMIT
    if a == 0:
        assert floor.score_variation(spectrum) == pytest.approx(2 / dim)


def test_the_mean_target_is_the_mean_for_inner_products():
    task = TopKTask(PowerLawSpectrum(1.0, 0, 4), 24, 3)
    tokens, query, target = draw_targets(task, 60_000, np.random.default_rng(45), by_cosine=False)
    residual = target - floor.mean_target(task, query)
    probes = [query, query * floor.score_variance(task.spectrum, query)[:, None], np.sign(query)]
    for probe in probes:
        for k in range(4):
            assert abs(z_score(residual[:, k] * probe[:, k], 0)) < Z_LIMIT
    del tokens


def test_the_slope_is_the_mean_target_at_the_mean_variance():
    task = TopKTask(PowerLawSpectrum(0.0, 0, 9), 100, 5)
    query = np.ones(9)  # its score variance is the mean one
    np.testing.assert_allclose(floor.mean_target(task, query), floor.predictable_slope(task) * query, rtol=1e-13)


def test_features_and_losses_of_given_coefficients():
    task = TopKTask(ArraySpectrum((2.0, 0.5), (1.0, 3.0)), 20, 2)
    features = floor.predictor_features(task.spectrum, [[1.0, -2.0]], 3)
    np.testing.assert_allclose(features[0], [[2, 4, 8], [-1.0, -0.5, -0.25]])
    _, query, target = draw_targets(task, 5000, np.random.default_rng(48), by_cosine=True)
    omega, a = task.spectrum.teacher_variances(), np.array([0.4, -0.1])
    phi = floor.predictor_features(task.spectrum, query, 2)
    direct = np.mean((target - phi @ a) ** 2 @ omega)
    T = np.mean(target**2 @ omega)
    h = np.einsum("nkr,k,nk->r", phi, omega, target) / 5000
    G = np.einsum("nkr,k,nks->rs", phi, omega, phi) / 5000
    assert floor.coefficient_risk(T, h, G, a) == pytest.approx(direct, rel=1e-12)
    best = np.linalg.solve(G, h)
    assert floor.coefficient_risk(T, h, G, best) == pytest.approx(T - h @ best, rel=1e-10)


# --- The floor by inner product ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "top"), [(2, 1), (5, 2), (64, 16), (1024, 2)])
def test_mean_square_of_the_top_mean(samples, top):
    ours = floor.normal_top_square(samples, top)
    rank = samples - top  # the (top+1)-th largest is the (samples-top)-th smallest

    def integrand(z):
        density = float(np.exp(rank_log_density(z, samples, rank)))
        tail = float(np.exp(norm.logpdf(z) - norm.logsf(z)))
        return density * ((1 + z * tail) / top + (top - 1) / top * tail**2)

    value = float(mpmath.quad(lambda z: integrand(float(z)), np.linspace(-8, 8, 33)))
    assert ours.value == pytest.approx(value, rel=1e-8)
    assert ours.value > normal_top_mean(samples, top).value ** 2


def rank_log_density(z, samples, rank):
    from scipy.special import betaln

    return (
        (rank - 1) * norm.logcdf(z)
        + (samples - rank) * norm.logsf(z)
        + norm.logpdf(z)
        - betaln(rank, samples - rank + 1)
    )


def test_mean_square_where_all_are_taken():
    assert floor.normal_top_square(7, 7).value == pytest.approx(1 / 7)


@pytest.mark.parametrize("dim", [1, 2, 5, 128])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_ratio_means_in_closed_form_for_isotropic_inputs(dim, power):
    # V = λ |q|², and E q_k²/|q|^(2p) = E |q|^(2-2p) / d.
    spectrum = PowerLawSpectrum(0, 0, dim, input_scale=3.0)
    with mpmath.workdps(30):
        d = mpmath.mpf(dim)
        moment = 1 if power == 1 else mpmath.sqrt(2) * mpmath.gamma((d + 1) / 2) / mpmath.gamma(d / 2)
        exact = float(moment / d) * 3.0 ** (1 - 2 * power)
    np.testing.assert_allclose(floor.query_ratio_means(spectrum, power), exact, rtol=1e-11)


def test_ratio_means_of_two_modes_against_polar_quadrature():
    spectrum = ArraySpectrum((1.0, 0.2), (1.0, 1.0))
    with mpmath.workdps(20):
        # Directions of (g_1, g_2) are uniform; lengths enter as E r^(2-2p).
        def mean(first, power):
            radius = 1 if power == 1 else mpmath.sqrt(mpmath.pi / 2)

            def integrand(t):
                numerator = mpmath.cos(t) ** 2 if first else 0.2 * mpmath.sin(t) ** 2
                return numerator / (mpmath.cos(t) ** 2 + 0.04 * mpmath.sin(t) ** 2) ** mpmath.mpf(power)

            return float(radius * mpmath.quad(integrand, mpmath.linspace(0, mpmath.pi / 2, 5)) * 2 / mpmath.pi)

        for power in (0.5, 1.0):
            ours = floor.query_ratio_means(spectrum, power)
            np.testing.assert_allclose(ours, [mean(True, power), mean(False, power)], rtol=1e-10)


@given(st.floats(0, 3), st.integers(1, 40), st.floats(0.25, 1))
def test_ratio_means_obey_their_sum_rule(a, dim, power):
    # At p = 1, Σ λ_k q_k² / V = 1 whatever the query; scaling λ by s scales the means by s^(1-2p).
    spectrum = PowerLawSpectrum(a, 0, dim)
    whole = spectrum.input_variances() @ floor.query_ratio_means(spectrum, 1.0)
    assert whole == pytest.approx(1.0, rel=1e-10)
    scaled = PowerLawSpectrum(a, 0, dim, input_scale=4.0)
    np.testing.assert_allclose(
        floor.query_ratio_means(scaled, power),
        floor.query_ratio_means(spectrum, power) * 4 ** (1 - 2 * power),
        rtol=1e-9,
    )


@pytest.mark.parametrize(("a", "b", "top"), [(0.0, 0.0, 1), (1.0, 0.25, 3), (2.0, 1.0, 2)])
def test_the_inner_product_floor_against_samples(a, b, top):
    task = TopKTask(PowerLawSpectrum(a, b, 6), 32, top)
    exact = floor.inner_product_floor(task, 3)
    _, query, target = draw_targets(task, 60_000, np.random.default_rng(53), by_cosine=False)
    omega = task.spectrum.teacher_variances()
    assert abs(z_score(target**2 @ omega, exact.target_power)) < Z_LIMIT
    basis = floor.predictor_basis(task.spectrum, 3)
    for psi, moment in zip(basis, exact.cross_moments, strict=True):
        assert abs(z_score((psi * query * target) @ omega, moment)) < Z_LIMIT
    best = query * (exact.cross_moments @ basis)
    assert abs(z_score((target - best) ** 2 @ omega, exact.by_degree[-1])) < Z_LIMIT
    residual = (target - floor.mean_target(task, query)) ** 2 @ omega
    assert abs(z_score(residual, exact.irreducible)) < Z_LIMIT
    assert exact.irreducible <= exact.by_degree[-1]


def test_no_selection_leaves_the_variance_of_a_mean():
    task = TopKTask(PowerLawSpectrum(1.0, 0.5, 8), 5, 5)
    exact = floor.inner_product_floor(task, 2)
    expected = task.spectrum.label_variances().sum() / 5
    assert exact.irreducible == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(exact.by_degree, expected, rtol=1e-12)


# --- The floor at finite context -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "context", "top"), [(2, 5, 1), (3, 8, 2), (6, 40, 3), (4, 6, 5)])
def test_the_empirical_floor_against_samples(dim, context, top):
    task = TopKTask(PowerLawSpectrum(0, 0, dim), context, top)
    exact = floor.isotropic_empirical_floor(task)
    tokens, query, target = draw_targets(task, 80_000, np.random.default_rng(dim), by_cosine=True)
    seen = np.einsum("npk,np->nk", tokens, np.einsum("npk,nk->np", tokens, query)) / context
    assert abs(z_score(np.sum(target * seen, axis=1), exact.alignment.value)) < Z_LIMIT
    assert abs(z_score(np.sum(seen**2, axis=1), exact.feature_power)) < Z_LIMIT
    slope = exact.alignment.value / exact.feature_power
    assert abs(z_score(np.sum((target - slope * seen) ** 2, axis=1), exact.floor.value)) < Z_LIMIT


def test_the_empirical_alignment_in_three_dimensions_in_closed_form():
    # Cosines are uniform on [-1, 1]: c = 1 - 2V with V_(i) the order statistics of P uniform numbers.
    dim, context, top = 3, 7, 2
    with mpmath.workdps(30):
        P, k = context, top
        density = lambda c: (  # noqa: E731 of the (k+1)-th largest cosine
            mpmath.factorial(P)
            / (mpmath.factorial(k) * mpmath.factorial(P - k - 1))
            * ((1 - c) / 2) ** k
            * ((1 + c) / 2) ** (P - k - 1)
            / 2
        )
        mean = lambda c: (1 + c) / 2  # noqa: E731
        second = lambda c: (1 + c + c * c) / 3  # noqa: E731
        below = lambda c: (1 - c + c * c) / 3  # noqa: E731
        inner = lambda c: mean(c) * (3 * (c * c + (P - k - 1) * below(c) + (k - 1) * second(c)) + 4)  # noqa: E731
        exact = mpmath.quad(lambda c: density(c) * inner(c), [-1, 0, 1]) * 8 / mpmath.pi / P
    task = TopKTask(PowerLawSpectrum(0, 0, dim), context, top)
    assert floor.isotropic_empirical_floor(task).alignment.value == pytest.approx(float(exact), rel=1e-12)


def test_the_empirical_floor_tends_to_the_population_floor():
    for context in (10**4, 10**6, 10**9):
        task = TopKTask(PowerLawSpectrum(0, 0.5, 8, 2.0, 3.0), context, 2)
        empirical, population = floor.isotropic_empirical_floor(task), floor.isotropic_floor(task)
        assert abs(1 - empirical.floor.value / population.floor.value) < 100 / context
        assert empirical.alignment.value / population.alignment.value == pytest.approx(1, abs=20 / context)


def test_the_paper_size():
    task = TopKTask(PowerLawSpectrum(0, 0, 128), 1024, 2)
    exact = floor.isotropic_empirical_floor(task)
    # Sampled with 59,904 contexts by sim.montecarlo.empirical_floor at seed 1: 58.342 +- 0.030.
    assert exact.floor.value == pytest.approx(58.36648903, abs=1e-7)
    assert exact.feature_power == 144.125


def test_all_tokens_taken_leave_nothing_to_predict():
    task = TopKTask(PowerLawSpectrum(0, 0, 4), 6, 6)
    exact = floor.isotropic_empirical_floor(task)
    assert exact.alignment.value == 0
    assert exact.floor.value == floor.isotropic_floor(task).floor.value


@pytest.mark.parametrize("dim", [2, 3, 17, 128])
def test_the_cosine_quantile_inverts_the_tail(dim):
    v = np.array([0.01, 0.3, 0.5, 0.8, 0.999])
    cosine = floor.cosine_quantile(np.log(v), dim)
    tail = 0.5 * betainc((dim - 1) / 2, 0.5, 1 - cosine**2)
    np.testing.assert_allclose(np.where(cosine >= 0, tail, 1 - tail), v, rtol=1e-7)
    assert (np.diff(cosine) <= 0).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: floor.isotropic_empirical_floor(TopKTask(PowerLawSpectrum(1, 0, 4), 6, 2)), "equal eigenvalues"),
        (lambda: floor.isotropic_empirical_floor(TopKTask(PowerLawSpectrum(0, 0, 1), 6, 2)), "dim must"),
        (lambda: floor.query_ratio_means(PowerLawSpectrum(1, 0, 5000), 1.0), "dim must be at most 4096"),
        (lambda: floor.query_ratio_means(PowerLawSpectrum(1, 0, 5), 2.0), "power must"),
        (lambda: floor.normal_top_square(3, 4), "top must"),
        (lambda: floor.predictor_features(PowerLawSpectrum(1, 0, 2), [1.0, 1.0], 0), "degree must"),
    ],
)
def test_errors_are_sentences(call, words):
    with pytest.raises(DomainError, match=words):
        call()


def test_averages_that_do_not_settle_are_refused(monkeypatch):
    monkeypatch.setattr(floor, "_MAX_RATIO_HALVINGS", 1)
    with pytest.raises(PrecisionError, match="did not settle"):
        floor.query_ratio_means(PowerLawSpectrum(1, 0, 5), 1.0)
