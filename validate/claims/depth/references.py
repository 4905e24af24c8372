"""Claims depth:31 to depth:40: the continuum, the repeated-update and the free reference, and their exponents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import mpmath
import numpy as np
import sympy

from sim.streams import stream
from theory.depth import free_polynomial as free
from theory.depth import repeated_update as repeated
from theory.depth.covariance_polynomial import residual_risk
from theory.problems import ArraySpectrum, PowerLawSpectrum
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method, Relation

LEDGER = Ledger()
# Exponents of the paper's Table 2 and two flatter spectra: the regimes in which every asymptotic claim is tried.
REGIMES = ((2.0, 0.5), (2.0, 1.0), (2.0, 2.0), (0.5, 2.0), (1.0, 2.0), (0.5, 0.75), (1.0, 0.25))
_REGIMES = "(a, b) in " + " ".join(f"({a:g},{b:g})" for a, b in REGIMES)
ZETAS = (0.05, 0.25, 0.75, 1.0, 1.5, 3.0, 6.0, 20.0)
_ZETAS = "zeta in " + " ".join(f"{zeta:g}" for zeta in ZETAS)
# What "is approximately" must mean for a user who reads numbers off the formula.
APPROXIMATELY = 0.1
# Agreement of closed forms in float64 with high precision.
FLOAT64 = 1e-13
# How near a local exponent must be to its limit to count as reached.
EXPONENT_TOLERANCE = 0.01


def _spectra(dim: int | None) -> list[PowerLawSpectrum]:
    return [PowerLawSpectrum(a, b, dim) for a, b in REGIMES]


def _slope(depths: FloatArray, risks: FloatArray) -> float:
    return float(free.local_exponents(depths, risks)[-1])


@LEDGER.claim(
    "depth:31a",
    "from mode index to eigenvalue",
    r"k=(c_\lambda/\lambda)^{1/a},\quad |dk/d\lambda|=\tfrac{c_\lambda^{1/a}}a\lambda^{-1-1/a},\quad \zeta=\tfrac{a+b-1}a",
)
def change_of_variables() -> Iterator[Evidence]:
    a, b, c, x = sympy.symbols("a b c x", positive=True)
    k = (c / x) ** (1 / a)
    jacobian = sympy.simplify(-sympy.diff(k, x) / (c ** (1 / a) / a * x ** (-1 - 1 / a)))
    weight = sympy.simplify(
        sympy.powsimp(sympy.expand_power_base(k ** -(a + b) * c ** (1 / a) / a * x ** (-1 - 1 / a)))
    )
    zeta = (a + b - 1) / a
    ratio = sympy.simplify(
        sympy.powsimp(sympy.expand_power_base(weight * c * a / (c ** (1 - zeta) * x ** (zeta - 1))))
    )
    wrong = float(jacobian != 1) + float(sympy.simplify(sympy.log(ratio).expand(force=True)) != 0)
    yield Evidence(Method.SYMBOLIC, wrong, 0.0, "identities that do not simplify to one", "all a, b, c, lambda > 0")


def _continuum_errors(risk: FloatArray, spectrum: PowerLawSpectrum, depths: FloatArray) -> float:
    return float(np.abs(risk / repeated.continuum_risk(spectrum, depths) - 1).max())


@LEDGER.claim(
    "depth:31",
    "the mode sum is approximated by its continuum integral",
    r"\mathcal R_L^{pop}\approx\frac{c_\omega c_\lambda^{1-\zeta}}a\int_{\lambda_d}^{\lambda_1}\lambda^{\zeta-1}r_L^2\,d\lambda",
    reading="'approximately' is read as within 10 %",
)
def continuum_integral() -> Iterator[Evidence]:
    a, b, c = 2, 1, 3
    k, x = sympy.symbols("k x", positive=True)
    for degree in (1, 3):
        residual = (1 - x / 4) ** degree
        left = sympy.integrate(sympy.expand(k ** -(a + b) * c * residual.subs(x, c * k**-a) ** 2), (k, 1, 10))
        zeta = sympy.Rational(a + b - 1, a)
        right = sympy.integrate(sympy.expand(x ** (zeta - 1) * residual**2), (x, sympy.Rational(c, 100), c))
        gap = sympy.simplify(left - c ** (1 - zeta) / a * right)
        yield Evidence(
            Method.SYMBOLIC, float(gap != 0), 0.0, "prefactor of the integral", f"a=2, b=1, c=3, degree {degree}"
        )
    depths = np.array([0.0, 1, 4, 16])
    worst = max(_continuum_errors(repeated.finite_risk(s, depths), s, depths) for s in _spectra(None))
    yield Evidence(Method.SWEEP, worst, APPROXIMATELY, "relative error of the integral", f"{_REGIMES}; depth 0-16")


@LEDGER.correction(
    "depth:31",
    Relation.CONDITIONS,
    r"\text{for the repeated update } r_L=(1-\lambda/\lambda_1)^L\text{ at } L\ge64",
    "at small depth the first modes dominate and a sum is not an integral; at large depth the integrand vanishes to "
    "order 2L at the first mode, so the error falls faster than any power; for the free optimum see depth:35",
)
def continuum_integral_when_deep() -> Iterator[Evidence]:
    depths = np.array([64.0, 256.0])
    worst = max(_continuum_errors(repeated.finite_risk(s, depths), s, depths) for s in _spectra(None))
    yield Evidence(
        Method.SWEEP, worst, 1e-3, "relative error of the integral", f"{_REGIMES}; infinite dim; depth 64, 256"
    )


@LEDGER.claim(
    "depth:32",
    "the cutoff at the smallest eigenvalue does not matter at large dim",
    r"\mathcal R_L^{pop}\propto\int_0^{\lambda_1}\lambda^{\zeta-1}r_L(\lambda)^2\,d\lambda\quad(d\ \text{large},\ a+b>1)",
)
def no_cutoff() -> Iterator[Evidence]:
    for spectrum in _spectra(None):
        a, zeta = spectrum.input_exponent, spectrum.zeta
        fractions = []
        for dim in (10**6, 10**12, 10**18):
            cut = float(dim) ** -a
            # Below the cutoff r is between (1 - cut)^L and 1, so the cut part lies below cut^zeta / zeta.
            whole = float(repeated.continuum_risk(spectrum, 16)) * a
            fractions.append(cut**zeta / zeta / whole)
        domain = f"a={a:g}, b={spectrum.teacher_exponent:g}, depth 16, dim 10^6 to 10^18"
        falls = fractions[2] / fractions[0]
        rate = (1e12**-a) ** zeta
        yield Evidence(Method.NUMERIC, fractions[2], APPROXIMATELY, "share of the risk below the cutoff", domain)
        yield Evidence(Method.NUMERIC, falls / rate - 1, 1e-9, "its decay against dim^-(a+b-1)", domain)


@LEDGER.claim(
    "depth:33",
    "repeated updates contract every mode by the same rule",
    r"p_L=\sum_r(-1)^{r-1}\tbinom Lr(\gamma\lambda/L)^r=1-(1-\gamma\lambda/L)^L,\quad r_L=(1-\gamma\lambda/L)^L",
)
def repeated_residual() -> Iterator[Evidence]:
    x = sympy.Symbol("x")
    wrong = 0
    for L in (1, 2, 3, 7, 12):
        p = sum((-1) ** (r - 1) * sympy.binomial(L, r) * (x / L) ** r for r in range(1, L + 1))
        wrong += int(sympy.expand(p - 1 + (1 - x / L) ** L) != 0)
    yield Evidence(
        Method.SYMBOLIC, float(wrong), 0.0, "depths at which the binomial sum differs", "depth 1, 2, 3, 7, 12"
    )
    values = repeated.repeated_residual(8, 0.5, np.array([0.0, 0.5, 1.0])) - np.array([1.0, 0.75**8, 0.5**8])
    yield Evidence(
        Method.NUMERIC, float(np.abs(values).max()), 1e-15, "error of repeated_residual", "depth 8, step 1/2"
    )


@LEDGER.claim(
    "depth:34a",
    "contraction condition",
    r"|1-\gamma\lambda_1/L|<1\iff0<\gamma<2L/\lambda_1",
)
def contraction() -> Iterator[Evidence]:
    L, top = sympy.symbols("L lambda_1", positive=True)
    wrong = 0
    for ratio in (sympy.Rational(-1, 2), sympy.Integer(0), sympy.Rational(1, 3), sympy.Integer(1), sympy.Rational(19, 10),
                  sympy.Integer(2), sympy.Rational(7, 3)):  # fmt: skip
        value = ratio * L / top
        inside = bool(sympy.Abs(sympy.simplify(1 - value * top / L)) < 1)
        wrong += int(inside != (0 < ratio < 2)) + int(
            repeated.is_contraction(5, float(ratio) * 5 / 3.0, 3.0) != (0 < ratio < 2)
        )
    yield Evidence(
        Method.SYMBOLIC, float(wrong), 0.0, "steps on the wrong side", "gamma lambda_1 / L from -1/2 to 7/3"
    )


@LEDGER.claim(
    "depth:34b",
    "estimate of the best scale",
    r"\gamma^*\approx L/\lambda_1",
    reading="'approximately' is read as within 10 %",
)
def best_scale() -> Iterator[Evidence]:
    depths = np.array([4.0, 64.0, 1024.0])
    worst = max(float(np.abs(repeated.continuum_best_step(s, depths) - 1).max()) for s in _spectra(None))
    yield Evidence(Method.SWEEP, worst, APPROXIMATELY, "relative error of the best step", f"{_REGIMES}; depth 4-1024")


@LEDGER.correction(
    "depth:34b",
    Relation.OVERCLAIM,
    r"\gamma^*\lambda_1/L\in(1,2),\ \to2\text{ as }L\to\infty;\quad R(\gamma^*)/R(L/\lambda_1)\to2^{-\zeta}",
    "the exponent is unchanged, the prefactor is not: at zeta = 3 the paper's step costs a factor 8",
)
def best_scale_tends_to_two() -> Iterator[Evidence]:
    for spectrum in _spectra(None):
        zeta = spectrum.zeta
        domain = f"a={spectrum.input_exponent:g}, b={spectrum.teacher_exponent:g}"
        steps = repeated.continuum_best_step(spectrum, [4, 64, 1024, 10**7])
        outside = float(max(0.0, 1 - steps.min(), steps.max() - 2, -np.diff(steps).min()))
        yield Evidence(Method.NUMERIC, outside, 0.0, "best steps outside (1, 2) or falling with depth", domain)
        gain = float(repeated.continuum_risk(spectrum, 10**7, steps[-1]) / repeated.continuum_risk(spectrum, 10**7))
        yield Evidence(
            Method.NUMERIC, 2 - float(steps[-1]), 1e-4, "distance of the best step from 2", f"{domain}, depth 10^7"
        )
        yield Evidence(Method.NUMERIC, gain * 2**zeta - 1, 1e-3, "gain against 2^-zeta", f"{domain}, depth 10^7")


@LEDGER.claim(
    "depth:34",
    "risk of the repeated update",
    r"\mathcal R_L^{con}\approx\frac{c_\omega c_\lambda^{1-\zeta}}a\int_0^{\lambda_1}\lambda^{\zeta-1}(1-\tfrac\lambda{\lambda_1})"
    r"^{2L}d\lambda\sim\frac{c_\omega c_\lambda^{1-\zeta}}a\Big(\frac{\lambda_1}{2L}\Big)^\zeta\Gamma(\zeta)\propto L^{-\zeta}",
)
def repeated_risk() -> Iterator[Evidence]:
    worst, ratio, slope = 0.0, 0.0, 0.0
    with mpmath.workdps(40):
        for zeta, L in itertools.product(ZETAS, (1, 10, 10**4)):
            spectrum = PowerLawSpectrum(1.0, zeta)
            exact = mpmath.beta(mpmath.mpf(zeta), 2 * L + 1)
            worst = max(worst, float(abs(float(repeated.continuum_risk(spectrum, L)) / exact - 1)))
    for zeta in ZETAS:
        spectrum = PowerLawSpectrum(1.0, zeta)
        ratio = max(
            ratio,
            abs(float(repeated.continuum_risk(spectrum, 10**6) / repeated.continuum_asymptote(spectrum, 10**6)) - 1),
        )
        depths = np.array([10**6, 2 * 10**6])
        slope = max(slope, abs(_slope(depths, repeated.continuum_risk(spectrum, depths)) - zeta))
    yield Evidence(
        Method.HIGH_PRECISION,
        worst,
        FLOAT64,
        "relative error of the integral as a Beta function",
        f"{_ZETAS}; depth 1, 10, 10^4",
    )
    yield Evidence(Method.NUMERIC, ratio, 1e-3, "leading order against the exact value", f"{_ZETAS}; depth 10^6")
    yield Evidence(Method.NUMERIC, slope, 1e-3, "local exponent minus zeta", f"{_ZETAS}; depth 10^6")
    deep = np.array([256.0, 512.0])
    for s in _spectra(None):
        gap = _slope(deep, repeated.finite_risk(s, deep)) - s.zeta
        yield Evidence(
            Method.NUMERIC, gap, 0.02 * s.zeta, "exponent on the discrete infinite spectrum minus zeta",
            f"a={s.input_exponent:g}, b={s.teacher_exponent:g}, depth 256-512",
        )  # fmt: skip


def _shape_variation(dim: int | None, depths: FloatArray) -> float:
    """Largest variation over depth of the exact free risk divided by the continuum minimum, over the regimes."""
    worst = 0.0
    for spectrum in _spectra(dim):
        ratio = free.finite_risk(spectrum, depths) / free.continuum_risk(spectrum, depths)
        worst = max(worst, float(ratio.max() / ratio.min() - 1))
    return worst


@LEDGER.claim(
    "depth:35",
    "the free reference is proportional to the continuum minimum",
    r"\mathcal R_L^{pop}=\sum_k\lambda_k\omega_k[1-p_L(\lambda_k)]^2,\quad "
    r"\mathcal R_L^{free}\propto\min_{\deg r\le L,\,r(0)=1}\int_0^{\lambda_1}\lambda^{\zeta-1}r(\lambda)^2d\lambda",
    reading="proportional is read as a ratio that varies by at most 10 % over the depths",
)
def free_reference() -> Iterator[Evidence]:
    depths = np.array([4.0, 8, 16, 32, 64])
    variation = _shape_variation(None, depths)
    yield Evidence(
        Method.SWEEP, variation, APPROXIMATELY, "variation of the ratio", f"{_REGIMES}; infinite dim; depth 4-64"
    )


@LEDGER.correction(
    "depth:35",
    Relation.OVERCLAIM,
    r"\min_r\sum_k\lambda_k\omega_kr(\lambda_k)^2\text{ is the continuum minimum only for a dense measure;}"
    r"\text{ on } \lambda_k=c_\lambda k^{-a}\text{ it decays as }L^{-(2+a)\zeta}",
    "the residual puts single roots on the leading eigenvalues, which a continuum does not allow",
)
def free_reference_is_discrete() -> Iterator[Evidence]:
    yield from _discrete_exponents()
    # The continuum as the limit of ever denser discrete spectra: the measure of depth (32) cut into n equal cells.
    for zeta in (0.75, 1.5):
        exact = float(free.continuum_risk(PowerLawSpectrum(1.0, zeta), 6))
        dense = _dense_measure_risk(zeta, 6, 20_000)
        what = "minimum over a dense discretisation against the closed form"
        yield Evidence(Method.NUMERIC, dense / exact - 1, 1e-4, what, f"zeta {zeta:g}, depth 6, 20,000 cells")


def _dense_measure_risk(zeta: float, depth: int, cells: int) -> float:
    edges = np.linspace(0, 1, cells + 1)
    masses = np.diff(edges**zeta) / zeta
    nodes = (edges[:-1] + edges[1:]) / 2
    return float(free.finite_risk(ArraySpectrum(tuple(nodes), tuple(masses / nodes)), depth))


def _discrete_exponents() -> Iterator[Evidence]:
    depths = np.array([32.0, 64, 128, 256])
    for spectrum in _spectra(None):
        limit = free.discrete_exponent(spectrum)
        slopes = free.local_exponents(depths, free.finite_risk(spectrum, depths))
        domain = f"a={spectrum.input_exponent:g}, b={spectrum.teacher_exponent:g}, infinite dim, depth 32-256"
        # Local exponents approach their limit geometrically in log depth: one Aitken step extrapolates.
        first, second = np.diff(slopes)
        extrapolated = slopes[2] + second**2 / (first - second) if first > second > 0 else slopes[2]
        yield Evidence(
            Method.NUMERIC,
            extrapolated / limit - 1,
            EXPONENT_TOLERANCE,
            "extrapolated exponent against (2+a) zeta",
            domain,
        )


@LEDGER.claim(
    "depth:36",
    "Cauchy-Schwarz bound",
    r"1=\Big(\sum_nd_n\varphi_n(0)\Big)^2\le\Big(\sum_nd_n^2\Big)\Big(\sum_n\varphi_n(0)^2\Big)",
)
def cauchy_schwarz() -> Iterator[Evidence]:
    violation = 0.0
    for index, (zeta, L) in enumerate(itertools.product(ZETAS, (1, 5, 30))):
        rng = stream(36, "depth:36", index)
        endpoint = np.array([float(free.jacobi_basis(n, zeta, 0.0)) for n in range(L + 1)])
        d = rng.standard_normal((1000, L + 1))
        d /= (d @ endpoint)[:, None]
        violation = max(violation, 1 - float(((d**2).sum(axis=1) * (endpoint**2).sum()).min()))
    yield Evidence(
        Method.SWEEP,
        max(violation, 0.0),
        1e-12,
        "largest violation",
        f"{_ZETAS}; depth 1, 5, 30; 1,000 random d each",
    )


@LEDGER.claim(
    "depth:37",
    "the optimum is the Christoffel function",
    r"d_n^*=\varphi_n(0)\Big/\sum_m\varphi_m(0)^2,\quad \mathcal R_L^{free}\propto\Big[\sum_n\varphi_n(0)^2\Big]^{-1}",
)
def christoffel_optimum() -> Iterator[Evidence]:
    worst, residual_error = 0.0, 0.0
    x = sympy.Symbol("x")
    for zeta, L in itertools.product((sympy.Rational(1, 4), sympy.Rational(3, 2), sympy.Integer(6)), (1, 2, 4)):
        # Least squares in exact arithmetic: minimise the integral over the coefficients of r = 1 + sum c_j x^j.
        moments = [[1 / (zeta + i + j) for j in range(1, L + 1)] for i in range(1, L + 1)]
        right = [-1 / (zeta + i) for i in range(1, L + 1)]
        c = sympy.Matrix(moments).LUsolve(sympy.Matrix(right))
        minimum = 1 / zeta + sum(c[j] / (zeta + j + 1) for j in range(L))
        spectrum = PowerLawSpectrum(1.0, float(zeta))
        worst = max(worst, abs(float(free.continuum_risk(spectrum, L)) / float(minimum) - 1))
        residual = sympy.lambdify(x, 1 + sum(c[j] * x ** (j + 1) for j in range(L)))
        nodes = np.linspace(0, 1, 9)
        ours = free.continuum_residual(float(zeta), L, nodes)
        residual_error = max(
            residual_error,
            float(np.abs(ours - np.array([float(residual(sympy.Rational(n, 8))) for n in range(9)])).max()),
        )
    yield Evidence(
        Method.SYMBOLIC, worst, FLOAT64, "closed form against exact least squares", "zeta 1/4, 3/2, 6; depth 1, 2, 4"
    )
    yield Evidence(
        Method.SYMBOLIC,
        residual_error,
        1e-12,
        "optimal residual against exact least squares",
        "zeta 1/4, 3/2, 6; depth 1, 2, 4",
    )
    gap = 0.0
    for spectrum, L in itertools.product(_spectra(64), (1, 5, 12)):
        # The optimum of a finite spectrum, evaluated as an ordinary sum over its modes.
        values = free.mode_residuals(spectrum, L)
        risk = float(np.sum(spectrum.label_variances() * values**2))
        gap = max(gap, abs(risk / float(free.finite_risk(spectrum, L)) - 1))
    yield Evidence(
        Method.SWEEP, gap, 1e-12, "Christoffel risk against the sum over modes", f"{_REGIMES}; dim 64; depth 1, 5, 12"
    )


@LEDGER.claim(
    "depth:38",
    "the basis is Jacobi's",
    r"\varphi_n(\lambda)=\sqrt{\frac{2n+\zeta}{\lambda_1^\zeta}}\,P_n^{(\zeta-1,0)}(1-2\lambda/\lambda_1)",
    reading="the square root is lost in the extracted text; without it the basis is not normalised",
)
def jacobi_basis() -> Iterator[Evidence]:
    worst, error = 0.0, 0.0
    with mpmath.workdps(60):
        for zeta, top in itertools.product((0.25, 1.0, 1.5, 6.0), (1.0, 3.0)):
            for n, m in ((0, 0), (1, 0), (3, 3), (7, 4), (12, 12)):
                product = _jacobi_inner_product(n, m, zeta, top)
                worst = max(worst, float(abs(product - (n == m))))
                point = mpmath.mpf("0.37") * top
                exact = mpmath.sqrt((2 * n + zeta) / mpmath.mpf(top) ** zeta) * mpmath.jacobi(
                    n, zeta - 1, 0, 1 - 2 * point / top
                )
                ours = float(free.jacobi_basis(n, zeta, float(point), top))
                error = max(
                    error, float(abs(ours - exact)) / float(mpmath.sqrt((2 * n + zeta) / mpmath.mpf(top) ** zeta))
                )
    yield Evidence(
        Method.HIGH_PRECISION,
        worst,
        1e-20,
        "departure from orthonormality",
        "zeta 1/4, 1, 3/2, 6; lambda_1 1, 3; degree 0-12",
    )
    yield Evidence(
        Method.HIGH_PRECISION, error, 1e-12, "error of jacobi_basis", "same degrees at lambda = 0.37 lambda_1"
    )


def _jacobi_inner_product(n: int, m: int, zeta: float, top: float) -> mpmath.mpf:
    """Inner product of two basis polynomials, by exact moments of their monomials."""
    z = mpmath.mpf(zeta)

    def coefficients(degree: int) -> list[mpmath.mpf]:
        # P_n^(z-1,0)(1-2x) = sum_j binom(n+z-1, n) (-n)_j (n+z)_j / ((z)_j j!) x^j
        lead = mpmath.binomial(degree + z - 1, degree)
        return [
            lead * mpmath.rf(-degree, j) * mpmath.rf(degree + z, j) / (mpmath.rf(z, j) * mpmath.factorial(j))
            for j in range(degree + 1)
        ]

    left, right = coefficients(n), coefficients(m)
    total = mpmath.fsum(c * e / (z + i + j) for i, c in enumerate(left) for j, e in enumerate(right))
    # x = lambda / top turns the weight into top^zeta x^(zeta-1), which the normalisation divides out.
    scale = mpmath.mpf(top) ** z / mpmath.mpf(top) ** z
    return mpmath.sqrt((2 * n + z) * (2 * m + z)) * total * scale


@LEDGER.claim(
    "depth:39a",
    "endpoint values",
    r"\varphi_n(0)^2=\frac{2n+\zeta}{\lambda_1^\zeta}\Big[\frac{\Gamma(n+\zeta)}{\Gamma(\zeta)\Gamma(n+1)}\Big]^2"
    r"\sim\frac{2}{\lambda_1^\zeta\Gamma(\zeta)^2}n^{2\zeta-1}",
)
def endpoint_values() -> Iterator[Evidence]:
    worst, ratio = 0.0, 0.0
    with mpmath.workdps(30):
        for zeta, n, top in itertools.product(ZETAS, (0, 1, 7, 40), (1.0, 2.5)):
            z = mpmath.mpf(zeta)
            exact = (2 * n + z) / mpmath.mpf(top) ** z * (mpmath.rf(n + 1, z - 1) / mpmath.gamma(z)) ** 2
            value = (mpmath.sqrt((2 * n + z) / mpmath.mpf(top) ** z) * mpmath.jacobi(n, z - 1, 0, 1)) ** 2
            worst = max(worst, float(abs(value / exact - 1)))
            n_large = mpmath.mpf(10) ** 7
            large = (2 * n_large + z) * (mpmath.rf(n_large + 1, z - 1) / mpmath.gamma(z)) ** 2
            leading = 2 / mpmath.gamma(z) ** 2 * n_large ** (2 * z - 1)
            ratio = max(ratio, float(abs(large / leading - 1)))
    yield Evidence(
        Method.HIGH_PRECISION, worst, 1e-25, "printed value against the polynomial at 1", f"{_ZETAS}; degree 0-40"
    )
    yield Evidence(Method.HIGH_PRECISION, ratio, 1e-4, "leading order against the value", f"{_ZETAS}; degree 10^7")


def _christoffel_ratio(zeta: float, factor: float) -> float:
    """Printed leading order (times ``factor``) over the sum at depth 10^9, minus one."""
    L = 10.0**9
    leading = factor * L ** (2 * zeta) / float(mpmath.gamma(zeta)) ** 2
    return float(leading / float(free.christoffel_sum(zeta, L)) - 1)


# zeta up to 6: beyond it the sum at depth 10^9 leaves float64.
_MODERATE = tuple(zeta for zeta in ZETAS if zeta <= 6)


@LEDGER.claim(
    "depth:39",
    "Christoffel sum",
    r"\sum_{n=0}^{L}\varphi_n(0)^2\sim\frac{2}{\lambda_1^\zeta\Gamma(\zeta)^2}\int_0^Ln^{2\zeta-1}dn"
    r"=\frac{L^{2\zeta}}{\lambda_1^\zeta\Gamma(\zeta)^2}",
    reading="read as printed in the extracted text, without a factor 1/zeta; the other reading is the correction",
)
def christoffel_sum() -> Iterator[Evidence]:
    worst = max((_christoffel_ratio(zeta, 1.0) for zeta in _MODERATE), key=abs)
    yield Evidence(
        Method.SWEEP, worst, 1e-6, "printed leading order over the sum, minus one", "zeta 0.05-6; depth 10^9"
    )


@LEDGER.correction(
    "depth:39",
    Relation.MISPRINT,
    r"\sum_{n=0}^{L}\varphi_n(0)^2=\frac{\lambda_1^{-\zeta}}\zeta\Big[\frac{\Gamma(L+1+\zeta)}{\Gamma(\zeta)L!}\Big]^2"
    r"\sim\frac{L^{2\zeta}}{\zeta\,\lambda_1^\zeta\Gamma(\zeta)^2}",
    "the integral gives L^(2 zeta)/(2 zeta): a factor 1/zeta is missing in print (or lost in the text); the exponent stands",
)
def christoffel_sum_mended() -> Iterator[Evidence]:
    n, z = sympy.symbols("n zeta", positive=True)
    term = (2 * n + z) * (sympy.gamma(n + z) / sympy.gamma(n + 1)) ** 2
    total = (sympy.gamma(n + 1 + z) / sympy.gamma(n + 1)) ** 2 / z
    step = sympy.simplify(sympy.gammasimp((total - total.subs(n, n - 1)) / term))
    start = sympy.simplify(sympy.gammasimp(total.subs(n, 0) / term.subs(n, 0)))
    yield Evidence(
        Method.SYMBOLIC,
        float(step != 1) + float(start != 1),
        0.0,
        "failures of the telescoping sum",
        "all n >= 0, zeta > 0",
    )
    worst = 0.0
    with mpmath.workdps(40):
        for zeta, L in itertools.product(_MODERATE, (0, 3, 25, 200)):
            z_exact = mpmath.mpf(zeta)
            exact = mpmath.fsum(
                (2 * m + z_exact) * (mpmath.rf(m + 1, z_exact - 1) / mpmath.gamma(z_exact)) ** 2 for m in range(L + 1)
            )
            worst = max(worst, float(abs(float(free.christoffel_sum(zeta, L)) / exact - 1)))
    yield Evidence(Method.HIGH_PRECISION, worst, FLOAT64, "closed form against the sum", "zeta 0.05-6; depth 0-200")
    ratio = max((_christoffel_ratio(zeta, 1 / zeta) for zeta in _MODERATE), key=abs)
    yield Evidence(
        Method.SWEEP, ratio, 1e-6, "mended leading order over the sum, minus one", "zeta 0.05-6; depth 10^9"
    )


@LEDGER.claim(
    "depth:40",
    "exponents of the two families",
    r"\mathcal R_L^{con}\propto L^{-\zeta},\quad\mathcal R_L^{free}\propto L^{-2\zeta}",
    reading="for the risks as depth (35) defines them: sums over the modes of the power-law spectrum (2)",
)
def exponents() -> Iterator[Evidence]:
    yield from _constrained_exponents()
    depths = np.array([128.0, 256.0])
    for spectrum in _spectra(None):
        slope = _slope(depths, free.finite_risk(spectrum, depths))
        domain = f"a={spectrum.input_exponent:g}, b={spectrum.teacher_exponent:g}, infinite dim, depth 128-256"
        yield Evidence(Method.NUMERIC, slope / (2 * spectrum.zeta) - 1, 0.05, "free exponent against 2 zeta", domain)


def _constrained_exponents() -> Iterator[Evidence]:
    depths = np.array([256.0, 512.0])
    for spectrum in _spectra(None):
        slope = _slope(depths, repeated.finite_risk(spectrum, depths))
        domain = f"a={spectrum.input_exponent:g}, b={spectrum.teacher_exponent:g}, infinite dim, depth 256-512"
        yield Evidence(Method.NUMERIC, slope / spectrum.zeta - 1, 0.05, "constrained exponent against zeta", domain)


@LEDGER.correction(
    "depth:40",
    Relation.OVERCLAIM,
    r"\mathcal R_L^{con}\propto L^{-\zeta};\quad\mathcal R_L^{free}\propto L^{-2\zeta}\text{ on a continuous spectrum, }"
    r"\propto L^{-(2+a)\zeta}\text{ on }\lambda_k=c_\lambda k^{-a}",
    "the free reference of Table 2 is too slow for the spectrum it is applied to",
)
def exponents_mended() -> Iterator[Evidence]:
    yield from _constrained_exponents()
    worst = 0.0
    for zeta in _MODERATE:
        spectrum = PowerLawSpectrum(1.0, zeta)
        depths = np.array([10.0**6, 2.0 * 10**6])
        worst = max(worst, abs(_slope(depths, free.continuum_risk(spectrum, depths)) / (2 * zeta) - 1))
    yield Evidence(Method.SWEEP, worst, 1e-4, "continuum free exponent against 2 zeta", "zeta 0.05-6; depth 10^6")
    yield from _discrete_exponents()


@LEDGER.claim(
    "beyond:layer-steps",
    "the free reference is reached by layer scalars",
    r"\kappa_\ell v/L=1/\text{root}_\ell:\ \prod_\ell(1-\lambda/\text{root}_\ell)=r_L(\lambda)",
)
def layer_steps() -> Iterator[Evidence]:
    worst = 0.0
    for spectrum, L in itertools.product(_spectra(64), (1, 3, 6)):
        residual = partial(free.product_residual, free.layer_steps(spectrum, L))
        worst = max(worst, abs(residual_risk(spectrum, residual, L) / float(free.finite_risk(spectrum, L)) - 1))
    yield Evidence(
        Method.SWEEP,
        worst,
        1e-9,
        "risk of the layer scalars over the free risk, minus one",
        f"{_REGIMES}; dim 64; depth 1, 3, 6",
    )
