import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.theory.reference import free_risks, power_law
from theory.depth import free_polynomial as free
from theory.depth.covariance_polynomial import polynomial_residual, residual_risk
from theory.depth.spectral_measure import power_weight_rule, spectral_measure
from theory.problems import ArraySpectrum, PowerLawSpectrum
from theory.results import DomainError, PrecisionError

# The target is 1e-10; the algorithm loses a few roundings only.
FINITE_TOLERANCE = 1e-12
CONTINUUM_TOLERANCE = 1e-14
# dim 64, a = 2, b = 1/2, from 700-digit arithmetic.
PRECISE_RISKS = {4: 0.019051702, 10: 0.001068648318, 20: 1.774956974e-6, 32: 2.353776743e-12}


def regular_spectra():
    exponents = st.tuples(st.floats(0.2, 4), st.floats(0, 3), st.integers(1, 200))
    return exponents.filter(lambda t: t[0] + t[1] > 1.01).map(lambda t: PowerLawSpectrum(*t))


@pytest.mark.parametrize("a", [0.5, 1, 1.5, 2])
@pytest.mark.parametrize("b", [0.5, 1, 2])
@pytest.mark.parametrize(("dim", "depth"), [(16, 15), (64, 63), (128, 64), (512, 24)])
def test_finite_risk_against_ball_arithmetic(a, b, dim, depth):
    exact = np.array(free_risks(power_law(a, dim), power_law(b, dim), depth))
    ours = free.finite_risk(PowerLawSpectrum(a, b, dim), np.arange(depth + 1))
    np.testing.assert_allclose(ours, exact, rtol=FINITE_TOLERANCE)


def test_finite_risk_where_the_gram_matrix_fails():
    spectrum = PowerLawSpectrum(2, 0.5, 64)
    for depth, risk in PRECISE_RISKS.items():
        assert free.finite_risk(spectrum, depth) == pytest.approx(risk, rel=1e-9)


def gram_risk(depth, digits):
    """T - h.G^-1 h from moments of the spectrum of `PRECISE_RISKS`, whose Gram matrix is a Hankel matrix."""
    with mpmath.workdps(digits):
        moments = [
            mpmath.fsum(mpmath.mpf(k) ** (-2 * r - 0.5) for k in range(1, 65)) for r in range(1, 2 * depth + 2)
        ]
        gram = mpmath.matrix(depth, depth)
        for i in range(depth):
            for j in range(depth):
                gram[i, j] = moments[i + j + 2]
        cross = mpmath.matrix(moments[1 : depth + 1])
        return float(moments[0] - (cross.T * mpmath.lu_solve(gram, cross))[0])


def test_an_oracle_is_believed_when_doubled_precision_agrees():
    # 120 digits are not enough for 32 layers: doubling them tells.
    digits, previous, risk = 120, math.inf, gram_risk(32, 120)
    assert abs(risk / PRECISE_RISKS[32] - 1) > 1
    while not abs(risk - previous) <= 1e-12 * abs(risk):
        digits, previous, risk = 2 * digits, risk, gram_risk(32, 2 * digits)
    assert digits > 120
    assert risk == pytest.approx(PRECISE_RISKS[32], rel=1e-9)
    assert free.finite_risk(PowerLawSpectrum(2, 0.5, 64), 32) == pytest.approx(risk, rel=1e-10)


def test_binomials_beyond_64_bits():
    # C(62, 31) has 59 bits, but the products that make it in integers overflow; C(200, 100) has 196.
    for n, tolerance in ((31, 1e-13), (100, 1e-11)):
        assert n * float(free.inverse_binomial(n, n)) * math.comb(2 * n, n) == pytest.approx(1, rel=tolerance)


@given(regular_spectra())
def test_finite_risk_is_positive_decreasing_and_ends_at_zero(spectrum):
    risks = free.finite_risk(spectrum, np.arange(spectrum.dim + 3))
    assert (np.diff(risks) <= 0).all()
    assert (risks >= 0).all()
    assert (risks[spectrum.dim :] == 0).all()
    assert risks[0] == pytest.approx(spectrum.label_variances().sum(), rel=1e-13)


@given(regular_spectra(), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(0, 12))
def test_finite_risk_scales_with_both_variances(spectrum, input_scale, teacher_scale, depth):
    scaled = PowerLawSpectrum(
        spectrum.input_exponent, spectrum.teacher_exponent, spectrum.dim, input_scale, teacher_scale
    )
    expected = input_scale * teacher_scale * free.finite_risk(spectrum, depth)
    assert free.finite_risk(scaled, depth) == pytest.approx(float(expected), rel=1e-10)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=2, max_size=20), st.randoms())
def test_finite_risk_ignores_the_order_of_modes(modes, random):
    shuffled = list(modes)
    random.shuffle(shuffled)
    depths = np.arange(4)
    risks = [free.finite_risk(ArraySpectrum(*zip(*order, strict=True)), depths) for order in (modes, shuffled)]
    np.testing.assert_allclose(risks[0], risks[1], rtol=1e-7, atol=1e-13 * risks[0][0])


def test_equal_eigenvalues_are_merged_and_silent_modes_dropped():
    merged = ArraySpectrum((2.0, 1.0), (3.0, 1.0))
    split = ArraySpectrum((2.0, 1.0, 2.0, 5.0), (1.0, 1.0, 2.0, 0.0))
    np.testing.assert_allclose(free.finite_risk(split, [0, 1, 2]), free.finite_risk(merged, [0, 1, 2]), rtol=1e-14)
    assert free.finite_risk(split, 2) == 0


def test_isotropic_inputs_need_one_layer():
    np.testing.assert_array_equal(free.finite_risk(PowerLawSpectrum(0, 1, 50), [1, 2, 9]), 0)
    np.testing.assert_array_equal(free.finite_risk(PowerLawSpectrum(0, 1, 10**12), [1, 2, 9]), 0)


def test_depth_one_by_hand():
    spectrum = ArraySpectrum((1.0, 0.25), (1.0, 2.0))
    w, x = np.array([1.0, 0.5]), np.array([1.0, 0.25])
    slope = (w * x).sum() / (w * x * x).sum()
    assert free.finite_risk(spectrum, 1) == pytest.approx(float((w * (1 - slope * x) ** 2).sum()), rel=1e-14)
    assert free.layer_steps(spectrum, 1) == pytest.approx([slope], rel=1e-14)


@pytest.mark.parametrize(("a", "b"), [(2, 1), (0.5, 2), (1, 0.5), (0.2, 0.2), (0.1, 1), (4, 4)])
def test_compression_at_dim_10_12_by_refining_it(a, b):
    spectrum, depths = PowerLawSpectrum(a, b, 10**12), np.arange(1, 129)
    coarse, fine = (free.finite_risk(spectrum, depths, leading_modes=modes) for modes in (1024, 3000))
    visible = fine > 1e-25
    np.testing.assert_allclose(coarse[visible], fine[visible], rtol=1e-10)


@pytest.mark.parametrize(("a", "b", "dim", "depths"), [(2, 1, 10**6, [1, 2]), (0.5, 2, 10**5, [1, 2, 6])])
def test_compression_against_the_direct_sum(a, b, dim, depths):
    k = np.arange(1, dim + 1.0)
    direct = ArraySpectrum(tuple(k**-a), tuple(k**-b))
    compressed = free.finite_risk(PowerLawSpectrum(a, b, dim), depths)
    np.testing.assert_allclose(compressed, free.finite_risk(direct, depths), rtol=1e-10)


def test_great_depth_against_ball_arithmetic():
    exact = np.array(free_risks(power_law(1.5, 320), power_law(0.5, 320), 280))
    ours = free.finite_risk(PowerLawSpectrum(1.5, 0.5, 320), np.arange(281))
    np.testing.assert_allclose(ours, exact, rtol=FINITE_TOLERANCE)


def test_coefficients_without_vectors_are_those_with_them():
    spectrum = PowerLawSpectrum(2, 2)
    measure = spectral_measure(spectrum, 300)
    vectors = free.bidiagonalise(measure, 300)
    risks = vectors.total / np.cumsum(np.append(1, np.cumprod((vectors.diagonal / vectors.superdiagonal) ** 2)))
    np.testing.assert_allclose(free.finite_risk(spectrum, np.arange(301)), risks, rtol=FINITE_TOLERANCE)


@pytest.mark.parametrize(("a", "b"), [(2, 1), (8, 0.5)])
def test_compression_at_great_depth_against_the_direct_sum(a, b):
    spectrum, depths = PowerLawSpectrum(a, b, 6000), [300, 1024, 1500]
    direct = ArraySpectrum(tuple(spectrum.input_variances()), tuple(spectrum.teacher_variances()))
    np.testing.assert_allclose(free.finite_risk(spectrum, depths), free.finite_risk(direct, depths), rtol=1e-12)


def test_infinite_spectrum_at_great_depth_by_refining_it():
    # 1024 modes one by one, whatever the depth, left a quarter of the risk at depth 2048.
    spectrum, depths = PowerLawSpectrum(2, 1), [256, 1024, 2048]
    fine = free.finite_risk(spectrum, depths, leading_modes=3000)
    np.testing.assert_allclose(free.finite_risk(spectrum, depths), fine, rtol=1e-11)


def test_discrete_exponent_is_reached_at_the_greatest_depth():
    spectrum, depths = PowerLawSpectrum(2, 1), [256, 512, 1024, 2048, 4096]
    missing = free.discrete_exponent(spectrum) - free.local_exponents(depths, free.finite_risk(spectrum, depths))
    # The local exponent lacks a term of order 1/L: each doubling halves it.
    np.testing.assert_allclose(missing[:-1] / missing[1:], 2, rtol=0.05)
    assert 0 < missing[-1] < 0.0025


def test_equal_nodes_are_merged_at_great_depth():
    eigenvalues = tuple(np.repeat(np.arange(1.0, 401.0), 2))
    merged = ArraySpectrum(tuple(np.arange(1.0, 401.0)), (2.0,) * 400)
    doubled = ArraySpectrum(eigenvalues, (1.0,) * 800)
    depths = [10, 300, 399, 400, 500]
    risks = free.finite_risk(doubled, depths)
    np.testing.assert_allclose(risks, free.finite_risk(merged, depths), rtol=FINITE_TOLERANCE)
    assert (risks[:3] > 0).all()
    assert (risks[3:] == 0).all()


def test_infinite_dim_is_the_limit():
    depths = [1, 4, 32]
    limit = free.finite_risk(PowerLawSpectrum(2, 1), depths)
    np.testing.assert_allclose(free.finite_risk(PowerLawSpectrum(2, 1, 10**15), depths), limit, rtol=1e-12)
    with pytest.raises(DomainError, match="must be > 1"):
        free.finite_risk(PowerLawSpectrum(0.5, 0.5), 3)


@pytest.mark.parametrize(("a", "b"), [(2, 1), (1, 1e-3), (1, 1e-6), (1, 1e-12), (9e-4, 2), (1e-5, 1.5), (2e-6, 2.5)])
@pytest.mark.parametrize("deepest", [1, 16, 128])
def test_infinite_spectra_by_zeta_functions_at_depth_one(a, b, deepest):
    """R = m_0 - m_1²/m_2 with moments m_n = ζ((n+1)a + b), from nearly divergent sums to nearly equal eigenvalues."""
    with mpmath.workdps(40):
        m = [mpmath.zeta(mpmath.mpf(a) * (n + 1) + mpmath.mpf(b)) for n in range(3)]
        exact = float(m[0] - m[1] ** 2 / m[2])
    assert free.finite_risk(PowerLawSpectrum(a, b), [1, deepest])[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("zeta", [1e-12, 1e-3, 0.5, 1, 7.3, 900, 1e6])
@pytest.mark.parametrize("nodes", [1, 2, 17, 200])
def test_power_weight_rule_is_exact_for_polynomials(zeta, nodes):
    x, share = power_weight_rule(zeta, nodes)
    for power in {0, 1, min(2 * nodes - 1, 30)}:
        assert share @ x**power == pytest.approx(zeta / (zeta + power), rel=FINITE_TOLERANCE)


def test_infinite_spectra_with_too_large_zeta_are_refused():
    with pytest.raises(DomainError, match=r"zeta must be a finite number in \(0, 1e\+06\]"):
        free.finite_risk(PowerLawSpectrum(1e-300, 2), 1)


def test_discrete_exponent_of_findings():
    depths = 2 ** np.arange(1, 8)
    slopes = free.local_exponents(depths, free.finite_risk(PowerLawSpectrum(2, 1, 200_000), depths))
    np.testing.assert_allclose(slopes, [2.64, 3.17, 3.53, 3.75, 3.87, 3.94], atol=0.006)
    assert free.discrete_exponent(PowerLawSpectrum(2, 1)) == 4
    assert free.discrete_exponent(PowerLawSpectrum(2, 2)) == 6


@pytest.mark.parametrize("zeta", [0.051, 0.3, 1, 1.5, 4.2, 19.9])
@pytest.mark.parametrize("depth", [0, 1, 2, 17, 1000, 10**6, 10**9])
def test_continuum_risk_to_14_digits(zeta, depth):
    with mpmath.workdps(60):
        z = mpmath.mpf(zeta)
        exact = z * (mpmath.gamma(z) / mpmath.rf(mpmath.mpf(depth + 1), z)) ** 2
    ours = float(free.continuum_risk(PowerLawSpectrum(1, zeta), depth))
    if exact < 1e-290:
        assert ours <= 1e-289
    else:
        assert ours == pytest.approx(float(exact), rel=CONTINUUM_TOLERANCE)


def test_continuum_risk_at_extreme_zeta():
    with mpmath.workdps(60):
        exact = 50 * mpmath.beta(50, 31) ** 2
    assert free.continuum_risk(PowerLawSpectrum(1, 50), 30) == pytest.approx(float(exact), rel=1e-11)


def test_continuum_amplitude_of_scales():
    plain, scaled = PowerLawSpectrum(2, 1), PowerLawSpectrum(2, 1, None, 3.0, 5.0)
    ratio = free.continuum_risk(scaled, [0, 5]) / free.continuum_risk(plain, [0, 5])
    np.testing.assert_allclose(ratio, 15, rtol=1e-15)


def test_continuum_local_exponent_is_the_derivative():
    spectrum = PowerLawSpectrum(2, 2)
    with mpmath.workdps(30):
        for depth in (1, 7, 400):
            log_risk = lambda n: 2 * (mpmath.loggamma(n + 1) - mpmath.loggamma(n + 2.5))  # noqa: E731
            exact = -depth * mpmath.diff(log_risk, depth)
            assert free.continuum_local_exponent(spectrum, depth) == pytest.approx(float(exact), rel=1e-12)


def test_christoffel_sum_telescopes():
    for zeta in (0.25, 1.0, 3.5):
        terms = [free.jacobi_basis(n, zeta, 0.0, 2.0) ** 2 for n in range(9)]
        assert free.christoffel_sum(zeta, 8, 2.0) == pytest.approx(float(np.sum(terms)), rel=1e-12)


def test_christoffel_sum_overflow_is_named():
    with pytest.raises(PrecisionError, match="continuum_risk"):
        free.christoffel_sum(20.0, 10**9)


def test_continuum_residual_is_the_hypergeometric_polynomial():
    for zeta in (0.3, 1.5, 6.0):
        x = np.linspace(0, 1, 11)
        with mpmath.workdps(40):
            exact = [float(mpmath.hyp2f1(-9, 10 + zeta, zeta + 1, mpmath.mpf(float(t)))) for t in x]
        np.testing.assert_allclose(free.continuum_residual(zeta, 9, x), exact, atol=1e-14)


def test_continuum_residual_at_high_degree():
    # A float degree loses the recurrence from 1,500 on, the monomial basis from 40 on.
    with mpmath.workdps(30):
        exact = mpmath.jacobi(1500, 0.5, 0, mpmath.mpf("-0.9")) / mpmath.binomial(1500.5, 1500)
    ours = float(free.continuum_residual(0.5, 1500, 0.95))
    assert ours == pytest.approx(float(exact), rel=1e-10)
    scale = np.sqrt(80 + 1.5)
    assert free.jacobi_basis(40, 1.5, 0.995) / scale == pytest.approx(0.0818430642, rel=1e-8)


def test_continuum_residual_domain():
    with pytest.raises(DomainError, match="eigenvalue"):
        free.continuum_residual(1.0, 3, 1.5)


@given(regular_spectra(), st.integers(1, 10))
def test_roots_are_simple_and_inside(spectrum, depth):
    if depth > spectrum.dim:
        with pytest.raises(DomainError, match="distinct eigenvalues"):
            free.residual_roots(spectrum, depth)
        return
    roots = free.residual_roots(spectrum, depth)
    assert (np.diff(roots) > 0).all()
    assert roots[0] > 0
    assert roots[-1] <= 1 + 1e-14


def test_roots_of_a_full_depth_are_the_eigenvalues():
    spectrum = PowerLawSpectrum(1, 1, 7, 3.0)
    np.testing.assert_allclose(free.residual_roots(spectrum, 7), spectrum.input_variances()[::-1], rtol=1e-14)


def test_continuum_roots_are_the_limit_of_dense_ones():
    zeta, cells, depth = 1.5, 20_000, 5
    edges = np.linspace(0, 1, cells + 1)
    nodes = (edges[1:] + edges[:-1]) / 2
    spectrum = ArraySpectrum(tuple(nodes), tuple(np.diff(edges**zeta) / nodes))
    residual = free.continuum_residual(zeta, depth, free.residual_roots(spectrum, depth))
    np.testing.assert_allclose(residual, 0, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_layer_steps_attain_the_free_risk(depth):
    spectrum = PowerLawSpectrum(2, 1, 128, 2.0, 3.0)
    steps = free.layer_steps(spectrum, depth)
    risk = residual_risk(spectrum, lambda x: free.product_residual(steps, x), depth)
    # At depth 8 the largest root lies within 1e-9 of the top eigenvalue: rounding of the steps shows at 1e-8.
    assert risk == pytest.approx(float(free.finite_risk(spectrum, depth)), rel=1e-6)


def test_no_other_steps_do_better():
    spectrum = PowerLawSpectrum(1.5, 0.5, 40)
    steps, best = free.layer_steps(spectrum, 3), float(free.finite_risk(spectrum, 3))
    rng = np.random.default_rng(0)
    for _ in range(200):
        other = steps * (1 + 0.1 * rng.standard_normal(3))
        assert residual_risk(spectrum, lambda x, s=other: free.product_residual(s, x), 3) >= best


@pytest.mark.parametrize("depth", [0, 1, 5, 20, 40])
def test_mode_residuals_sum_to_the_risk(depth):
    spectrum = PowerLawSpectrum(1, 1, 300)
    residual = free.mode_residuals(spectrum, depth)
    risk = float(np.sum(spectrum.label_variances() * residual**2))
    assert risk == pytest.approx(float(free.finite_risk(spectrum, depth)), rel=1e-12)


def test_mode_residuals_follow_the_order_of_the_spectrum():
    spectrum = ArraySpectrum((0.2, 3.0, 1.0, 3.0), (1.0, 2.0, 0.5, 1.0))
    expected = free.product_residual(free.layer_steps(spectrum, 2), spectrum.input_variances())
    np.testing.assert_allclose(free.mode_residuals(spectrum, 2), expected, atol=1e-13)
    np.testing.assert_array_equal(free.mode_residuals(spectrum, 3), 0)


def test_mode_residuals_domain():
    with pytest.raises(DomainError, match="dim"):
        free.mode_residuals(PowerLawSpectrum(1, 1, 5000), 2)
    with pytest.raises(DomainError, match="label variance"):
        free.mode_residuals(ArraySpectrum((1.0, 2.0), (1.0, 0.0)), 1)


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_polynomial_coefficients_give_the_same_residual(depth):
    spectrum = PowerLawSpectrum(1, 1, 30)
    x = spectrum.input_variances()
    residual = polynomial_residual(free.polynomial_coefficients(spectrum, depth), x)
    np.testing.assert_allclose(residual, free.mode_residuals(spectrum, depth), atol=1e-7)


def test_polynomial_coefficients_overflow_is_named():
    with pytest.raises(PrecisionError, match="layer_steps"):
        free.polynomial_coefficients(PowerLawSpectrum(4, 1, 400), 60)


def test_product_residual_survives_extreme_factors():
    steps = np.concatenate([np.full(60, 1e8), np.full(60, 1.0)])
    with mpmath.workdps(50):
        exact = (1 - mpmath.mpf(10) ** 8 * mpmath.mpf("0.999")) ** 60 * (1 - mpmath.mpf("0.999")) ** 60
    assert free.product_residual(steps, 0.999) == pytest.approx(float(exact), rel=1e-9)
    assert free.product_residual([2.0], 0.5) == 0


def test_local_exponents_domain():
    with pytest.raises(DomainError, match="increasing depths"):
        free.local_exponents([2, 1], [1.0, 0.5])
    with pytest.raises(DomainError, match="risks > 0"):
        free.local_exponents([1, 2], [1.0, 0.0])


def test_indistinguishable_eigenvalues_are_one():
    spectrum = ArraySpectrum((1.0, np.nextafter(1.0, 2.0), 0.5), (1.0, 1.0, 1.0))
    assert free.finite_risk(spectrum, 2) == 0
    np.testing.assert_array_equal(free.mode_residuals(spectrum, 1)[0], free.mode_residuals(spectrum, 1)[1])


def test_depths_are_vectorised_and_validated():
    spectrum = PowerLawSpectrum(2, 1, 128)
    grid = free.finite_risk(spectrum, [[1, 2], [4, 200]])
    assert grid.shape == (2, 2)
    assert grid[1, 1] == 0
    for bad in (-1, 1.5, np.nan, 5000):
        with pytest.raises(DomainError, match="depth"):
            free.finite_risk(spectrum, bad)


def test_oracles():
    path = Path(__file__).parent / "oracles.json"
    oracles = json.loads(path.read_text())["free_risk"]
    for entry in oracles:
        spectrum = PowerLawSpectrum(entry["a"], entry["b"], entry["dim"])
        assert free.finite_risk(spectrum, entry["depth"]) == pytest.approx(entry["value"], rel=1e-12)
