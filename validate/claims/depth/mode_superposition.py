"""Claims depth:55, depth:56 and Figure 3(c): modes that decay at different depths and their superposition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import numpy as np
import sympy

from theory.depth import mode_superposition as theory
from theory.depth import repeated_update
from theory.depth.population_training import fitted_exponent
from theory.problems import PowerLawSpectrum
from validate.claims.ledger import Evidence, Ledger, Method, Relation

LEDGER = Ledger()
DENSITIES = tuple(itertools.product((1.3, 2.0, 3.5), (0.5, 4.0)))
_DENSITIES = "beta 1.3, 2, 3.5; tau_0 0.5, 4"
# Spectra of Figure 3, at the size that the paper's other numbers give away.
SPECTRA = ((2.0, 0.5), (2.0, 2.0), (0.5, 2.0), (1.0, 2.0))
DIM = 128
_SPECTRA = "(a,b) in (2,0.5) (2,2) (0.5,2) (1,2), dim 128"


def _spectra() -> list[PowerLawSpectrum]:
    return [PowerLawSpectrum(a, b, DIM) for a, b in SPECTRA]


@LEDGER.claim(
    "depth:55a",
    "modes decay exponentially at characteristic depths",
    r"\mathcal R_k(L)=w_ke^{-L/\tau_k},\quad\mathcal R_L=\sum_kw_ke^{-L/\tau_k}",
    reading="a model; checked for the references of the paper: repeated updates and free polynomials",
)
def exponential_modes() -> Iterator[Evidence]:
    yield from _repeated_modes()
    worst = 0.0
    for spectrum in _spectra():
        depths = np.arange(1, 9)
        losses = theory.free_mode_losses(spectrum, depths)[:, 20:40]
        rates = -np.diff(np.log(losses), axis=0)
        worst = max(worst, float((rates.max(axis=0) / rates.min(axis=0) - 1).max()))
    yield Evidence(
        Method.NUMERIC, worst, 0.1, "variation over depth of a mode's decay rate under the free optimum",
        f"{_SPECTRA}, modes 21-40, depth 1-8",
    )  # fmt: skip


def _repeated_modes() -> Iterator[Evidence]:
    worst, total = 0.0, 0.0
    for spectrum, step in itertools.product(_spectra(), (1.0, 1.7)):
        tau, depths = theory.repeated_characteristic_depths(spectrum, step), np.array([0, 1, 10, 100])
        losses = theory.repeated_mode_losses(spectrum, depths, step)
        worst = max(worst, float(np.abs(losses - theory.exponential_decay(tau, depths)).max()))
        risk = repeated_update.finite_risk(spectrum, depths, step)
        summed = theory.superposed_loss(spectrum.label_variances(), tau, depths)
        total = max(total, float(np.abs(summed / risk - 1).max()))
    domain = f"{_SPECTRA}, steps 1 and 1.7, depth 0-100"
    yield Evidence(
        Method.NUMERIC, worst, 1e-12, "normalised mode losses of the repeated update against exponentials", domain
    )
    yield Evidence(Method.NUMERIC, total, 1e-11, "their weighted sum over the risk, minus one", domain)


@LEDGER.correction(
    "depth:55a",
    Relation.CONDITIONS,
    r"\text{repeated updates: exactly, with }\tau_k=-1/(2\log|1-\eta\lambda_k/\lambda_1|)",
    "the free optimum removes modes one after the other, faster than any exponential",
)
def exponential_modes_of_repeated_updates() -> Iterator[Evidence]:
    yield from _repeated_modes()


def _integrand(beta: float, depth: int, start: float) -> Callable[[Any], Any]:
    """The integrand of (55) in x = tau_0 / tau, which maps the half line to (0, 1]."""
    return lambda x: start * (start / x) ** (-beta) * mpmath.exp(-depth * x / start) / x**2


@LEDGER.claim(
    "depth:55",
    "aggregate loss of a power-law density of characteristic depths",
    r"\rho(\tau)=C\tau^{-\beta}\ (\tau\ge\tau_0):\quad\mathcal R_L\approx\int_{\tau_0}^\infty\rho(\tau)e^{-L/\tau}d\tau",
)
def aggregate_loss() -> Iterator[Evidence]:
    worst = 0.0
    with mpmath.workdps(20):
        for beta, start in DENSITIES:
            for depth in (0, 1, 30):
                exact = mpmath.quad(_integrand(beta, depth, start), [0, 0.01, 0.1, 1])
                ours = float(theory.power_law_loss(theory.DepthDensity(1.0, beta, start), depth))
                worst = max(worst, abs(ours / float(exact) - 1))
    yield Evidence(
        Method.HIGH_PRECISION, worst, 1e-7, "closed form against the integral", f"{_DENSITIES}; depth 0, 1, 30"
    )
    # A sum over modes at the quantiles of the density, as the display before it has.
    for beta, start in ((2.0, 0.5), (3.5, 4.0)):
        count = 200_000
        quantile = (np.arange(count) + 0.5) / count
        tau = start * quantile ** (-1 / (beta - 1))
        whole = start ** (1 - beta) / (beta - 1)
        summed = theory.superposed_loss(np.full(count, whole / count), tau, 10)
        ratio = float(summed / theory.power_law_loss(theory.DepthDensity(1.0, beta, start), 10)) - 1
        yield Evidence(
            Method.NUMERIC, ratio, 1e-3, "sum over 200,000 modes against the integral", f"beta {beta}, depth 10"
        )


@LEDGER.claim(
    "depth:56",
    "the aggregate loss is a power law",
    r"\mathcal R_L\approx CL^{1-\beta}\int_0^{L/\tau_0}x^{\beta-2}e^{-x}dx\sim C\,\Gamma(\beta-1)L^{-(\beta-1)},\quad L\gg\tau_0",
)
def power_law() -> Iterator[Evidence]:
    L, t, b, x = sympy.symbols("L tau beta x", positive=True)
    integrand = (t**-b * sympy.exp(-L / t)).subs(t, L / x) * L / x**2
    ratio = sympy.simplify(
        sympy.powsimp(sympy.expand_power_base(integrand / (L ** (1 - b) * x ** (b - 2) * sympy.exp(-x))))
    )
    yield Evidence(
        Method.SYMBOLIC, float(sympy.simplify(sympy.log(ratio).expand(force=True)) != 0), 0.0,
        "substitution x = L/tau that leaves a factor", "all L, tau, beta > 0",
    )  # fmt: skip
    worst, leading = 0.0, 0.0
    with mpmath.workdps(30):
        for beta, start in DENSITIES:
            density = theory.DepthDensity(1.0, beta, start)
            for depth in (1, 8, 1000):
                s = mpmath.mpf(beta) - 1
                exact = mpmath.mpf(depth) ** -s * mpmath.gammainc(s, 0, mpmath.mpf(depth) / mpmath.mpf(start))
                worst = max(worst, float(abs(float(theory.power_law_loss(density, depth)) / exact - 1)))
            far = float(theory.power_law_loss(density, 40 * start) / theory.power_law_asymptote(density, 40 * start))
            leading = max(leading, abs(far - 1))
    yield Evidence(
        Method.HIGH_PRECISION, worst, 1e-12, "closed form against the incomplete Gamma function", _DENSITIES
    )
    yield Evidence(
        Method.NUMERIC, leading, 1e-9, "leading order over the exact loss, minus one", f"{_DENSITIES}; L = 40 tau_0"
    )


@LEDGER.claim(
    "depth:56a",
    "superposition yields the spectrum-dependent power law",
    r"\text{individual modes converge exponentially at different depths; their superposition yields spectrum-dependent }"
    r"\text{power-law scaling}",
    reading="for the repeated update: beta - 1 = zeta and the constant of (34)",
)
def superposition_is_the_reference() -> Iterator[Evidence]:
    constants, exponents = 0.0, 0.0
    for a, b in SPECTRA:
        infinite = PowerLawSpectrum(a, b)
        density = theory.repeated_density(infinite)
        constants = max(
            constants,
            float(
                abs(theory.power_law_asymptote(density, 64) / repeated_update.continuum_asymptote(infinite, 64) - 1)
            ),
        )
        depths = np.array([512, 1024])
        exponents = max(
            exponents,
            abs(fitted_exponent(depths, repeated_update.finite_risk(infinite, depths)) - density.exponent + 1),
        )
    domain = "(a,b) in (2,0.5) (2,2) (0.5,2) (1,2)"
    yield Evidence(Method.NUMERIC, constants, 1e-12, "leading order of (56) over that of (34), minus one", domain)
    yield Evidence(
        Method.NUMERIC,
        exponents,
        0.02,
        "exponent of the risk minus (beta - 1)",
        f"{domain}, infinite dim, depth 512-1,024",
    )


@LEDGER.claim(
    "depth:fig-3c",
    "stronger modes are learned first",
    r"\text{stronger modes are learned almost perfectly within a few layers, weaker modes need substantially greater depth}",
    reading="depth from which the normalised loss stays below 2 % (the figure's line): at most 3 layers for mode 1, rising "
    "with k up to five layers of disorder, and at least 3 times larger for mode 64; for both references",
)
def modes_in_order() -> Iterator[Evidence]:
    for spectrum in _spectra():
        shallow, deep = np.arange(0, 65), np.unique(np.geomspace(1, 200_000, 300).round())
        families = (
            ("free optimum", theory.depths_below(shallow, theory.free_mode_losses(spectrum, shallow))),
            ("repeated update", theory.depths_below(deep, theory.repeated_mode_losses(spectrum, deep))),
        )
        for family, reached in families:
            domain = f"a={spectrum.input_exponent:g}, b={spectrum.teacher_exponent:g}, dim 128, {family}"
            disorder = float(np.max(np.maximum.accumulate(reached)[:64] - reached[:64]))
            yield Evidence(Method.NUMERIC, float(reached[0]), 3.0, "layers that the first mode needs", domain)
            yield Evidence(
                Method.NUMERIC, disorder, 5.0, "layers by which a weaker mode is ahead of a stronger one", domain
            )
            yield Evidence(
                Method.NUMERIC, float(reached[0] / reached[63]), 1 / 3, "layers of mode 1 over mode 64", domain
            )


@LEDGER.claim(
    "beyond:characteristic-depths",
    "the free optimum learns each mode in far fewer layers than repeated updates",
    r"\tau_k^{con}\approx\lambda_1/(2\lambda_k),\quad\text{free: about }\sqrt{\lambda_1/\lambda_k}\text{ layers or fewer}",
)
def characteristic_depths() -> Iterator[Evidence]:
    for a, b in ((0.5, 2.0), (1.0, 2.0)):
        spectrum = PowerLawSpectrum(a, b, DIM)
        tau = theory.repeated_characteristic_depths(spectrum)
        weak = np.arange(16, 64)
        limit = float(np.abs(2 * tau[weak] * spectrum.input_variances()[weak] - 1).max())
        shallow = np.arange(0, 40)
        free = theory.depths_below(shallow, theory.free_mode_losses(spectrum, shallow), theory.E_FOLD)
        slower = float((free[weak] * np.sqrt(spectrum.input_variances()[weak])).max())
        domain = f"a={a:g}, b={b:g}, dim 128, modes 17-64"
        yield Evidence(Method.NUMERIC, limit, 0.15, "repeated update: 2 tau_k lambda_k/lambda_1, minus one", domain)
        yield Evidence(Method.NUMERIC, slower, 2.0, "free: layers to 1/e times sqrt(lambda_k/lambda_1)", domain)
