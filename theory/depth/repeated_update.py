r"""The constrained reference, depth (27)-(34): one update in every layer, residual :math:`(1 - \gamma\lambda/L)^L`.

The step is written η = γ λ_1 / L, in units of the inverse of the largest eigenvalue: the paper takes η = 1; the best
value lies between 1 and 2 on a continuous spectrum and tends to 2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import betainc, binom, gamma, hyp2f1

from theory.depth.free_polynomial import continuum_amplitude, inverse_binomial
from theory.depth.spectral_measure import MAX_DEGREE, SpectralMeasure, spectral_measure
from theory.problems import PowerLawSpectrum, Spectrum, as_depths, as_integer
from theory.results import DomainError, FloatArray, PrecisionError

PAPER_STEP = 1.0
# brentq stops at this relative width; the risk is flat at its minimum, so its own error is the square of that.
_STEP_TOLERANCE = 1e-15


def predictor_coefficients(depth: int, update: float) -> FloatArray:
    r"""Coefficients :math:`a_r = (-1)^{r-1}\binom{L}{r}(\gamma/L)^r` of the repeated update, r = 1..L.

    depth: L >= 1; update: γ. Source: depth (28) with m_r = v^r, γ = κv.
    """
    n = as_integer("depth", depth, 1, 1000)
    r = np.arange(1, n + 1)
    return np.asarray(-((-update / n) ** r) * binom(n, r))


def repeated_residual(depth: npt.ArrayLike, step: npt.ArrayLike, relative_eigenvalue: npt.ArrayLike) -> FloatArray:
    r"""Residual :math:`r_L = (1 - \eta\lambda/\lambda_1)^L`. All arguments broadcast. Source: depth (33)."""
    x = np.asarray(relative_eigenvalue, dtype=np.float64)
    return np.asarray((1 - np.asarray(step) * x) ** as_depths(depth))


def is_contraction(depth: int, update: float, largest: float) -> bool:
    r"""Whether :math:`|1 - \gamma\lambda_1/L| < 1`, that is 0 < γ < 2L/λ_1. Source: depth, display before (34)."""
    return abs(1 - update * largest / depth) < 1


def continuum_risk(spectrum: PowerLawSpectrum, depth: npt.ArrayLike, step: npt.ArrayLike = PAPER_STEP) -> FloatArray:
    r"""Risk of the repeated update on a continuous power-law spectrum, exactly, at any step in (0, 2].

    .. math:: R(L) = \frac{c_\lambda c_\omega}{a}\int_0^1 x^{\zeta-1}(1-\eta x)^{2L}\,dx, \qquad
              R(L) = \frac{c_\lambda c_\omega}{a} B(\zeta, 2L+1) \text{ at } \eta = 1

    depth: L >= 0 and step: η in (0, 2] broadcast together. Decays as L^-zeta.
    Source: depth (34), as the Beta integral that it approximates. Raises DomainError where zeta <= 0.
    """
    depths, steps = np.broadcast_arrays(as_depths(depth), np.asarray(step, dtype=np.float64))
    if not ((steps > 0) & (steps <= 2)).all():
        raise DomainError("step must lie in (0, 2]: beyond 2 the leading mode is amplified")
    integral = np.vectorize(_power_integral, otypes=[float])(spectrum.zeta, depths, steps)
    return np.asarray(continuum_amplitude(spectrum) * integral)


def _power_integral(zeta: float, depth: float, step: float) -> float:
    r"""Integral of x^(ζ-1) (1 - ηx)^(2L) over [0, 1]: two positive parts, below and above the zero at x = 1/η."""
    degree, scale = 2 * depth, step**zeta
    if scale < np.finfo(np.float64).tiny:
        raise PrecisionError(f"step^zeta must be above 1e-308, got {step:g}^{zeta:g}")
    below = float(inverse_binomial(degree, zeta))
    if step <= 1:
        return float(below * betainc(zeta, degree + 1, step) / scale)
    excess = step - 1
    above = excess ** (degree + 1) / (degree + 1) * float(hyp2f1(1 - zeta, degree + 1, degree + 2, -excess))
    return float((below + above) / scale)


def continuum_asymptote(spectrum: PowerLawSpectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""Leading order :math:`\frac{c_\lambda c_\omega}{a}\Gamma(\zeta)(2L)^{-\zeta}` of the risk at the paper's step.

    depth: L >= 1, shape (...). Source: depth (34), last line with its constant.
    """
    zeta = spectrum.zeta
    return np.asarray(continuum_amplitude(spectrum) * gamma(zeta) * (2 * as_depths(depth)) ** -zeta)


def continuum_best_step(spectrum: PowerLawSpectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""The step η* in (1, 2) with the least continuum risk, shape of depth (L >= 1).

    The optimum solves :math:`\zeta F(\eta) = (1-\eta)^{2L}` with F the integral in `continuum_risk`, because
    :math:`\eta F' + \zeta F = (1-\eta)^{2L}`. It tends to 2, not to the paper's 1, and gains a factor tending to
    2^-zeta. Source: beyond the paper; compare the estimate before depth (34).
    """
    zeta = spectrum.zeta

    def best(n: float) -> float:
        if n < 1:
            raise DomainError(f"depth must be >= 1 for a best step to exist, got {n:g}")

        def slope(step: float) -> float:
            """Logarithm of ζ F(η)/(η-1)^(2L), which has the sign of minus the derivative of F."""
            integral = _power_integral(zeta, n, step)
            if integral == 0:
                raise PrecisionError(f"the risk is below 1e-308 at depth {n:g}, where no best step can be told")
            return float(np.log(zeta * integral) - 2 * n * np.log(step - 1))

        return float(brentq(slope, 1 + 1e-9, 2.0, xtol=_STEP_TOLERANCE, rtol=_STEP_TOLERANCE))

    return np.asarray(np.vectorize(best, otypes=[float])(as_depths(depth)))


def finite_risk(spectrum: Spectrum, depth: npt.ArrayLike, step: npt.ArrayLike = PAPER_STEP) -> FloatArray:
    r"""Risk of the repeated update on the given spectrum.

    .. math:: R(L) = \sum_k\lambda_k\omega_k\,(1-\eta\lambda_k/\lambda_1)^{2L}

    spectrum: as in `free_polynomial.finite_risk`; depth: L from 0 to 4096 and step: η > 0 broadcast together.
    Source: depth (30) with (33).
    """
    depths, steps = np.broadcast_arrays(as_depths(depth), np.asarray(step, dtype=np.float64))
    measure = _measure(spectrum, depths)
    return np.asarray(np.vectorize(lambda n, s: _measure_risk(measure, n, s), otypes=[float])(depths, steps))


def _measure(spectrum: Spectrum, depths: FloatArray) -> SpectralMeasure:
    return spectral_measure(spectrum, as_integer("depth", float(depths.max(initial=0)), 0, MAX_DEGREE))


def _measure_risk(measure: SpectralMeasure, depth: float, step: float) -> float:
    return float(np.sum(measure.weights * (1 - step * measure.nodes) ** (2 * depth)))


def best_step(spectrum: Spectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""The step η* with the least risk on the given spectrum, shape of depth (L >= 1).

    The risk is convex in η; its derivative changes sign between 1 and λ_1/λ_min. At L = 1 the optimum is the free
    polynomial's. Source: beyond the paper; compare the estimate before depth (34).
    """
    depths = as_depths(depth)
    measure = _measure(spectrum, depths)
    return np.asarray(np.vectorize(lambda n: _best_measure_step(measure, n), otypes=[float])(depths))


def _best_measure_step(measure: SpectralMeasure, depth: float) -> float:
    if depth < 1:
        raise DomainError(f"depth must be >= 1 for a best step to exist, got {depth:g}")
    nodes, weights = measure.nodes, measure.weights
    if len(nodes) == 1:
        return PAPER_STEP

    def slope(step: float) -> float:
        factors = 1 - step * nodes
        # Scaled by the largest factor, so that deep residuals do not underflow; the sign is what counts.
        return float(
            np.sum(weights * nodes * np.sign(factors) * (np.abs(factors) / np.abs(factors).max()) ** (2 * depth - 1))
        )

    high = 2.0
    while slope(high) > 0:
        high = min(2 * high, 1 / float(nodes[-1]))
    return float(brentq(slope, 1.0, high, xtol=_STEP_TOLERANCE, rtol=_STEP_TOLERANCE))


def best_risk(spectrum: Spectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""Risk of the repeated update at its best step on the given spectrum, shape of depth (L >= 1).

    Source: beyond the paper: minimum over γ of depth (30) with (33).
    """
    return finite_risk(spectrum, depth, best_step(spectrum, depth))
