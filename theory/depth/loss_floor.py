r"""The floor that linear attention cannot pass on the difficult task, depth (41)-(53).

A covariance polynomial p(Σ)q predicts the mean t of the selected tokens; its risk is
:math:`T - 2 a^\top h + a^\top G a`, and the floor is the minimum over coefficients. Here the polynomials are taken in
the orthonormal basis of G, so that G = I and the floors of all degrees come from one vector h. Isotropic inputs need
no sampling at all; other spectra take their moments from `sim`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betainccinv, betaincinv, binom

from theory.depth.free_polynomial import bidiagonalise
from theory.depth.spectral_measure import SpectralMeasure, spectral_measure
from theory.problems import Spectrum, TopKTask, as_integer
from theory.results import Certified, DomainError, FloatArray
from theory.special import chi_mean, log_cosine_constant, mean_over_order_statistic

MAX_BASIS_DEGREE = 64
# Relative rounding error of the few operations that follow the quadratures.
_ROUNDING = 4e-14


@dataclass(frozen=True, slots=True)
class IsotropicFloor:
    r"""Moments and floor of the difficult task with isotropic inputs.

    target_power: T = E[t^T Ω t]; alignment: E[t·q] for unit-variance inputs; floor: T - h²/G, the same for every
    degree. Each with its guaranteed absolute tolerance.
    """

    target_power: Certified
    alignment: Certified
    floor: Certified


def isotropic_floor(task: TopKTask) -> IsotropicFloor:
    r"""Exact floor for isotropic inputs, any teacher spectrum, dim, context and top_k.

    .. math:: T_1 = \frac dk + \frac{k-1}{k}\,\bar\chi^2\, E[m^2], \quad h_1 = \bar\chi^2\, E[m], \quad
              R_{irr} = \lambda\,\frac{\operatorname{tr}\Omega}{d}\Big(T_1 - \frac{h_1^2}{d}\Big)

    with :math:`\bar\chi = E|x|` and m the mean cosine beyond the (k+1)-th largest one: lengths and directions of
    isotropic tokens are independent, and given that order statistic the k selected cosines are independent draws
    from the tail. Relative tolerance about 1e-12. Source: depth (49)-(53) in closed form (beyond the paper,
    FINDINGS C). Raises DomainError where the inputs are not isotropic.
    """
    spectrum = task.spectrum
    if not spectrum.isotropic_input:
        raise DomainError(f"spectrum must have equal eigenvalues for the exact floor, got {spectrum.to_json()}")
    d, k = _dim(spectrum), task.top_k
    scale = float(spectrum.label_variances().sum()) / d
    first, second = _selected_cosine_moments(d, task.context, k)
    length = chi_mean(d) ** 2
    power = d / k + (k - 1) / k * length * second.value
    alignment = length * first.value
    power_error = length * second.tolerance + _ROUNDING * power
    alignment_error = length * first.tolerance + _ROUNDING * alignment
    floor_error = power_error + 2 * alignment * alignment_error / d
    return IsotropicFloor(
        target_power=Certified(scale * power, scale * power_error),
        alignment=Certified(alignment, alignment_error),
        floor=Certified(scale * (power - alignment**2 / d), scale * floor_error),
    )


def _dim(spectrum: Spectrum) -> int:
    if spectrum.dim is None:
        raise DomainError("spectrum.dim must be finite for the difficult task, got None")
    return spectrum.dim


def _selected_cosine_moments(dim: int, context: int, top_k: int) -> tuple[Certified, Certified]:
    """Mean of a selected cosine and mean product of two different selected cosines."""
    if top_k == context:
        return Certified(0.0, 0.0), Certified(0.0, 0.0)
    if dim == 1:
        return _sign_moments(context, top_k)

    def tail_mean(log_v: FloatArray) -> FloatArray:
        return tail_cosine(log_v, dim)

    first = mean_over_order_statistic(tail_mean, context, top_k + 1)
    second = mean_over_order_statistic(lambda log_v: tail_mean(log_v) ** 2, context, top_k + 1)
    return first, second


def tail_cosine(log_tail: npt.ArrayLike, dim: int) -> FloatArray:
    r"""Mean cosine of a uniform direction, given that it lies in the upper tail of probability v.

    .. math:: m = \frac{c_d\,(1-\tau^2)^{(d-1)/2}}{(d-1)\,v}, \qquad P(C > \tau) = v

    log_tail: log v <= 0, shape (...); dim: d >= 2. The quantile is taken from whichever of τ² and 1-τ² is small.
    Source: beyond the paper, FINDINGS C; the exact counterpart of the normal tail in depth (45).
    """
    log_v = np.asarray(log_tail, dtype=np.float64)
    half = (as_integer("dim", dim, 2) - 1) / 2
    v = np.exp(log_v)
    doubled = 2 * np.minimum(v, -np.expm1(log_v))
    square, rest = betainccinv(0.5, half, doubled), betaincinv(half, 0.5, doubled)
    log_rest = np.where(
        rest < 0.5, np.log(np.maximum(rest, np.finfo(float).tiny)), np.log1p(-np.minimum(square, 0.9))
    )
    return np.asarray(np.exp(log_cosine_constant(dim) + half * log_rest - log_v) / (2 * half))


def _sign_moments(context: int, top_k: int) -> tuple[Certified, Certified]:
    """The same for dim 1, where cosines are fair signs: sums over the binomial number of positive ones."""
    if context > 1000:
        raise DomainError(f"context must be at most 1000 at dim 1, got {context}")
    positive = np.arange(context + 1)
    weight = binom(context, positive) * 0.5**context
    total = 2 * np.minimum(positive, top_k) - top_k
    first = float(weight @ total) / top_k
    second = float(weight @ (total**2 - top_k)) / (top_k * (top_k - 1)) if top_k > 1 else 0.0
    return Certified(first, 1e-12), Certified(second, 1e-12)


def predictor_basis(spectrum: Spectrum, degree: int) -> FloatArray:
    r"""Orthonormal covariance polynomials without constant term, at every mode: ψ_j(λ_k), shape (rank, dim).

    .. math:: \sum_k \omega_k\lambda_k\,\psi_i(\lambda_k)\psi_j(\lambda_k) = \delta_{ij}, \qquad
              \psi_j(\lambda) = \lambda\,\varphi_j(\lambda), \quad j = 1..\text{rank}

    degree: R in 1..64; the rank is min(R, number of distinct eigenvalues with label variance). The Gram matrix (50)
    of monomials has condition numbers beyond 1e16 from degree 8; in this basis it is the identity.
    Source: depth (47), (50) orthogonalised.
    """
    steps = as_integer("degree", degree, 1, MAX_BASIS_DEGREE)
    measure = spectral_measure(spectrum, steps)
    if not measure.exact:
        raise DomainError("dim must be at most 4096 for the basis of the loss floor")
    weights = measure.weights * (measure.largest * measure.nodes) ** 2
    tilted = SpectralMeasure(measure.largest, measure.nodes, weights, exact=True)
    vectors = bidiagonalise(tilted, steps - 1).right
    values = measure.largest * measure.nodes * vectors / np.sqrt(weights)
    eigenvalues = spectrum.input_variances()
    position = np.searchsorted(-measure.nodes, -eigenvalues / measure.largest)
    return np.asarray(values[:, np.minimum(position, len(measure.nodes) - 1)])


def gram_matrix(spectrum: Spectrum, degree: int) -> FloatArray:
    r"""Gram matrix of the monomials, :math:`G_{rs} = \operatorname{tr}(\Omega\Sigma^{r+s+1})`.

    Shape (degree, degree). For reference: never invert it, see `predictor_basis`. Source: depth (50).
    """
    powers = np.arange(1, as_integer("degree", degree, 1, MAX_BASIS_DEGREE) + 1)
    exponent = np.add.outer(powers, powers) + 1
    eigenvalues, teacher = spectrum.input_variances(), spectrum.teacher_variances()
    return np.asarray(np.sum(teacher * eigenvalues ** exponent[..., None], axis=-1))


def floors_by_degree(target_power: float, cross_moments: npt.ArrayLike) -> FloatArray:
    r"""Floors :math:`T - \sum_{j\le r} h_j^2` of degrees r = 1..R in the orthonormal basis, shape (R,).

    target_power: T; cross_moments: h_j = E[(ψ_j(Σ)q)^T Ω t], shape (R,). Never increasing in the degree.
    Source: depth (51), (53) with G = I.
    """
    h = np.asarray(cross_moments, dtype=np.float64)
    return np.asarray(target_power - np.cumsum(h**2))
