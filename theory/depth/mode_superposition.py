r"""Modes that decay at different rates and the power law that they add up to, depth (55)-(56) and Figure 3(c).

Under the repeated update mode k loses exactly :math:`e^{-L/\tau_k}` of its loss, with a characteristic depth
:math:`\tau_k` that grows like :math:`\lambda_1/\lambda_k`. Under the free optimum modes are removed one after the
other and no curve is an exponential; there the characteristic depth is read off the curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaln, hyp1f1

from theory.depth.free_polynomial import mode_residuals
from theory.problems import PowerLawSpectrum, Spectrum, as_depths, as_real
from theory.results import DomainError, FloatArray, PrecisionError

# Where Figure 3(c) cuts its curves off.
FIGURE_THRESHOLD = 0.02
E_FOLD = float(np.exp(-1))
MAX_EXPONENT = 150.0


@dataclass(frozen=True, slots=True)
class DepthDensity:
    r"""Power-law density of characteristic depths :math:`\rho(\tau) = C\tau^{-\beta}` for τ >= τ_0.

    amplitude: C > 0; exponent: β > 1; shortest: τ_0 > 0. Source: depth (55). Raises DomainError outside these ranges.
    """

    amplitude: float
    exponent: float
    shortest: float

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "amplitude", as_real("amplitude", self.amplitude, 0, 1e100, open_low=True))
        fix(self, "exponent", as_real("exponent", self.exponent, 1, MAX_EXPONENT, open_low=True))
        fix(self, "shortest", as_real("shortest", self.shortest, 0, 1e100, open_low=True))


def superposed_loss(weights: npt.ArrayLike, characteristic_depths: npt.ArrayLike, depth: npt.ArrayLike) -> FloatArray:
    r"""Loss :math:`R_L = \sum_k w_k e^{-L/\tau_k}` of independent exponential modes, shape of depth.

    weights: w_k >= 0, shape (n,); characteristic_depths: τ_k >= 0, shape (n,), 0 for a mode gone after one layer and
    infinity for one that never decays; depth: L >= 0. Source: depth (55), first display of A.4.
    """
    w, tau = np.asarray(weights, dtype=np.float64), np.asarray(characteristic_depths, dtype=np.float64)
    if w.shape != tau.shape or w.ndim != 1 or not (w >= 0).all() or not (tau >= 0).all():
        raise DomainError("weights and characteristic_depths must be vectors of one length with entries >= 0")
    return np.asarray(exponential_decay(tau, as_depths(depth)) @ w)


def exponential_decay(characteristic_depths: npt.ArrayLike, depth: npt.ArrayLike) -> FloatArray:
    r"""Normalised losses :math:`e^{-L/\tau_k}`, shape depth.shape + tau.shape; one at L = 0 whatever τ.

    Source: depth, first display of A.4.
    """
    L, tau = as_depths(depth), np.asarray(characteristic_depths, dtype=np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        rate = np.where(tau > 0, 1 / np.where(tau > 0, tau, 1.0), np.inf)
    layers = L[(..., *([np.newaxis] * tau.ndim))]
    with np.errstate(invalid="ignore"):
        exponent = np.where(layers > 0, layers * rate, 0.0)
    return np.asarray(np.exp(-exponent))


def power_law_loss(density: DepthDensity, depth: npt.ArrayLike) -> FloatArray:
    r"""Loss of a power-law density of characteristic depths, exactly.

    .. math:: R_L = C\int_{\tau_0}^\infty \tau^{-\beta}e^{-L/\tau}d\tau = C L^{1-\beta}\,\gamma(\beta-1, L/\tau_0)

    depth: L >= 0, shape (...). Below L/τ_0 = β the lower incomplete Gamma function is taken as Kummer's series of
    positive terms, which has the limit :math:`C\tau_0^{1-\beta}/(\beta-1)` at L = 0. Relative error 1e-13.
    Source: depth (55), (56). Raises PrecisionError where the loss is beyond 1e308.
    """
    s, x = density.exponent - 1, as_depths(depth) / density.shortest
    small = np.minimum(x, s + 1)
    series = np.exp(-small) * hyp1f1(1.0, s + 1, small) / s
    large = np.maximum(x, s + 1)
    closed = np.exp(gammaln(s) - s * np.log(large)) * gammainc(s, large)
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        front = density.amplitude * np.float64(density.shortest) ** -s
        loss = front * np.where(x <= s + 1, series, closed)
    if not np.isfinite(loss).all():
        raise PrecisionError("the loss is beyond 1e308: choose a smaller amplitude or exponent, or a larger shortest")
    return np.asarray(loss)


def power_law_asymptote(density: DepthDensity, depth: npt.ArrayLike) -> FloatArray:
    r"""Leading order :math:`C\,\Gamma(\beta-1)\,L^{-(\beta-1)}` for L >> τ_0, an upper bound at every depth.

    depth: L >= 1, shape (...). Source: depth (56).
    """
    s, L = density.exponent - 1, as_depths(depth)
    if (L < 1).any():
        raise DomainError("depth must be >= 1 for the asymptote, got 0")
    return np.asarray(density.amplitude * np.exp(gammaln(s) - s * np.log(L)))


def repeated_density(spectrum: PowerLawSpectrum) -> DepthDensity:
    r"""Density of characteristic depths of weak modes under the repeated update at the paper's step.

    .. math:: \tau_k \approx \frac{\lambda_1}{2\lambda_k} = \frac{k^a}2 \quad\Rightarrow\quad
              \rho(\tau) = \frac{c_\lambda c_\omega}{a}\,2^{-\zeta}\,\tau^{-(1+\zeta)},\qquad \tau_0 = \tfrac12

    so that β - 1 = ζ and (56) becomes (34), constant included. Source: depth (34), (55) together (beyond the paper).
    Raises DomainError where zeta <= 0.
    """
    zeta = spectrum.zeta
    amplitude = spectrum.input_scale * spectrum.teacher_scale / spectrum.input_exponent
    return DepthDensity(amplitude * 2**-zeta, 1 + zeta, 0.5)


def repeated_mode_losses(spectrum: Spectrum, depth: npt.ArrayLike, step: float = 1.0) -> FloatArray:
    r"""Normalised losses :math:`(1-\eta\lambda_k/\lambda_1)^{2L}` of the modes under the repeated update.

    depth: L >= 0, shape (...); step: η in (0, 2]. Returns shape (..., dim), in the order of the spectrum.
    Source: depth (33) mode by mode; Figure 3(c).
    """
    L = as_depths(depth)[..., np.newaxis]
    return np.asarray((1 - _relative(spectrum, step)) ** (2 * L))


def repeated_characteristic_depths(spectrum: Spectrum, step: float = 1.0) -> FloatArray:
    r"""Characteristic depths :math:`\tau_k = -1/(2\log|1-\eta\lambda_k/\lambda_1|)` of the repeated update, (dim,).

    step: η in (0, 2]. Zero for a mode removed by one layer; infinite for one that is reflected for ever (η = 2).
    Source: depth (33), (55).
    """
    x = _relative(spectrum, step)
    with np.errstate(divide="ignore"):
        log_factor = np.where(x < 1, np.log1p(-np.minimum(x, 1.0)), np.log(np.maximum(x - 1, 0.0)))
        return np.asarray(0.5 / np.abs(log_factor))


def _relative(spectrum: Spectrum, step: float) -> FloatArray:
    """Products ηλ_k/λ_1, shape (dim,)."""
    eigenvalues = spectrum.input_variances()
    return np.asarray(as_real("step", step, 0, 2, open_low=True) * eigenvalues / eigenvalues.max())


def free_mode_losses(spectrum: Spectrum, depth: npt.ArrayLike) -> FloatArray:
    r"""Normalised losses :math:`r_L(\lambda_k)^2` of the modes under the best polynomial, shape (..., dim).

    spectrum: at most 4096 modes with label variance > 0; depth: L >= 0, shape (...). Errors of the root are those of
    `free_polynomial.mode_residuals`. Source: depth (37) mode by mode; Figure 3(c).
    """
    depths = as_depths(depth)
    distinct, position = np.unique(depths, return_inverse=True)
    losses = np.array([mode_residuals(spectrum, int(L)) ** 2 for L in distinct])
    return np.asarray(losses[position].reshape(*depths.shape, -1))


def depths_below(depth: npt.ArrayLike, losses: npt.ArrayLike, threshold: float = FIGURE_THRESHOLD) -> FloatArray:
    """Depth from which the normalised loss of each mode stays at or below ``threshold``, infinite where never.

    depth: increasing, shape (n,); losses: shape (n, dim), as the functions above return; threshold in (0, 1), 0.02
    as in Figure 3(c) or 1/e (`E_FOLD`). "Stays" within the depths given: a root of the free polynomial may pass a
    mode that comes back. Shape (dim,). Source: characteristic depths of depth Figure 3(c).
    """
    L, curves = as_depths(depth), np.asarray(losses, dtype=np.float64)
    limit = as_real("threshold", threshold, 0, 1, open_low=True)
    if L.ndim != 1 or L.size == 0 or (np.diff(L) <= 0).any() or curves.ndim != 2 or curves.shape[0] != L.size:
        raise DomainError("depth must increase and losses must hold one row per depth")
    above = curves > limit
    # The row after the last one above the threshold.
    after_last = np.where(above.any(axis=0), L.size - np.argmax(above[::-1], axis=0), 0)
    return np.asarray(np.append(L, np.inf)[after_last])
