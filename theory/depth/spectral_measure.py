r"""The spectrum as a measure on eigenvalues: :math:`\sum_k \lambda_k\omega_k\, \delta_{\lambda_k}`, short at any dim.

Every population risk of a covariance polynomial is an integral of r(λ)² against this measure, depth (30). Power laws
with many modes have smooth tails, so all but the first eigenvalues are replaced by a few nodes per octave of k, by
the Gauss rule of the discrete uniform measure, and for infinitely many modes the rest by one Gauss-Jacobi rule. For
polynomials up to the stated degree the replacement is exact to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.linalg import eigh_tridiagonal

from theory.problems import PowerLawSpectrum, Spectrum, as_integer, as_real
from theory.results import FloatArray, IntArray

# Spectra up to this size are kept mode by mode; larger ones keep this many leading modes, and at least as many as the
# degree: roots of the residual remove many modes one by one, for which no node can stand (measured at degree 2048,
# a = 2: with 1024 modes the risk is 27 % wrong, with 2048 it has all digits).
DIRECT_MODES = 4096
LEADING_MODES = 1024
# Nodes per octave of k for a degree-0 polynomial: k^-s on [1, 2] has its singularity where the Gauss error falls by
# 34 per node, so 16 nodes leave 1e-24.
OCTAVE_NODES = 16
# Roots that may crowd into one octave, as a share of the degree (measured: 10 digits need 1/8 at degree 128).
CROWDING = 4
# The integral that replaces the far tail of an infinite sum starts here; its relative error is 1/(24 k^2) = 2e-17.
INTEGRAL_FROM = 2**25
# Above this degree the Gauss-Jacobi rule of the far tail would be too large to compute quickly.
MAX_DEGREE = 4096
# Largest source exponent of an infinite spectrum, that of the closed forms on a continuous one.
MAX_ZETA = 1e6
# Neighbouring eigenvalues that differ by less than this share, a few units in the last place, are one.
INDISTINGUISHABLE = 2e-15


@dataclass(frozen=True, eq=False, slots=True)
class SpectralMeasure:
    """Distinct eigenvalues with their label variances.

    largest: the largest eigenvalue λ_1; nodes: eigenvalues divided by λ_1, descending in (0, 1], shape (n,);
    weights: label variances λω > 0, shape (n,). exact: whether the nodes are the eigenvalues themselves, so that a
    polynomial of degree n has no risk.
    """

    largest: float
    nodes: FloatArray
    weights: FloatArray
    exact: bool


def spectral_measure(spectrum: Spectrum, degree: int, *, leading_modes: int = LEADING_MODES) -> SpectralMeasure:
    r"""The measure :math:`\sum_k \lambda_k\omega_k\,\delta_{\lambda_k}` for residual polynomials up to ``degree``.

    spectrum: any; infinitely many modes need a + b > 1 and a > 0. degree: of r, so that r² is integrated to
    rounding error. leading_modes: how many modes of a large power law are kept one by one, at least ``degree``. Modes
    without label variance are dropped and eigenvalues equal to rounding merged, since neither changes any risk.
    Source: depth (30). Raises DomainError where the total label variance diverges.
    """
    degree = as_integer("degree", degree, 0, MAX_DEGREE)
    if isinstance(spectrum, PowerLawSpectrum) and (spectrum.dim is None or spectrum.dim > DIRECT_MODES):
        return _compressed_power_law(spectrum, degree, max(leading_modes, degree))
    eigenvalues, weights = spectrum.input_variances(), spectrum.label_variances()
    kept = weights > 0
    order = np.argsort(-eigenvalues[kept], kind="stable")
    nodes, weights = eigenvalues[kept][order], weights[kept][order]
    first = np.concatenate([[True], nodes[:-1] - nodes[1:] > INDISTINGUISHABLE * nodes[:-1]])
    group = np.cumsum(first) - 1
    return SpectralMeasure(
        float(nodes[0]), nodes[first] / nodes[0], np.bincount(group, weights).astype(np.float64), exact=True
    )


def node_positions(measure: SpectralMeasure, eigenvalues: FloatArray) -> IntArray:
    """Index of the node that stands for each eigenvalue, shape of eigenvalues; the nearest one where none does.

    Source: bookkeeping of `spectral_measure`.
    """
    relative = eigenvalues / measure.largest
    # Nodes fall and each stands for eigenvalues from itself down to the next: the last node at or above.
    return np.maximum(np.searchsorted(-measure.nodes, -relative * (1 - INDISTINGUISHABLE), side="right") - 1, 0)


@lru_cache(maxsize=8)
def _compressed_power_law(spectrum: PowerLawSpectrum, degree: int, leading_modes: int) -> SpectralMeasure:
    a, b = spectrum.input_exponent, spectrum.teacher_exponent
    amplitude = spectrum.input_scale * spectrum.teacher_scale
    if spectrum.dim is None:
        # Raises where the label variance of infinitely many modes diverges.
        zeta = as_real("zeta", spectrum.zeta, 0, MAX_ZETA, open_low=True)
        octaves, remaining = _octave_rule(leading_modes, INTEGRAL_FROM, a, degree)
    else:
        octaves, remaining = _octave_rule(leading_modes, spectrum.dim, a, degree)
    head = np.arange(1, leading_modes + 1, dtype=np.float64)
    modes, counts = np.concatenate([head, octaves]), np.concatenate([np.ones(leading_modes), remaining])
    nodes, weights = modes**-a, amplitude * counts * modes ** -(a + b)
    if spectrum.dim is None:
        far_nodes, far_weights = _far_tail_rule(a, zeta, degree)
        nodes = np.concatenate([nodes, far_nodes[::-1]])
        weights = np.concatenate([weights, amplitude * far_weights[::-1]])
    if a == 0:
        return SpectralMeasure(spectrum.input_scale, np.ones(1), np.array([weights.sum()]), exact=True)
    kept = (weights > 0) & (nodes > 0)
    nodes, weights = nodes[kept], weights[kept]
    for shared in (nodes, weights):  # by all that ask for this measure
        shared.flags.writeable = False
    return SpectralMeasure(spectrum.input_scale, nodes, weights, exact=False)


def _octave_rule(start: int, stop: int, a: float, degree: int) -> tuple[FloatArray, FloatArray]:
    """Positions k and counts that stand for the integers start + 1 .. stop, octave by octave."""
    positions, counts = [], []
    low = start
    while low < stop:
        high = min(2 * low, stop)
        turn = 2 * degree * (np.arcsin(float(low) ** (-a / 2)) - np.arcsin(float(high) ** (-a / 2)))
        k, count = discrete_uniform_rule(low + 1, high, _node_count(degree, turn))
        positions.append(k)
        counts.append(count)
        low = high
    return np.concatenate(positions), np.concatenate(counts)


def _node_count(degree: int, turn: float) -> int:
    """Nodes for a stretch of spectrum on which a continuum residual of this degree turns by the phase ``turn``.

    A degree-L residual turns like cos(2 L arcsin sqrt(λ)) on a continuous spectrum: nodes for its phase come on top,
    and a share of the degree for the roots that crowd where the leading modes are already removed.
    """
    return OCTAVE_NODES + int(np.ceil(turn)) + degree // CROWDING


def discrete_uniform_rule(first: int, last: int, nodes: int) -> tuple[FloatArray, FloatArray]:
    r"""Gauss rule of the sum over the integers first..last, exact for polynomials in k of degree < 2 ``nodes``.

    The orthogonal polynomials are those of Gram (discrete Chebyshev), whose recurrence is known,
    :math:`\beta_n = n^2 (N^2 - n^2)/(4(4n^2-1))` for N integers. Returns positions and counts, each of shape
    (min(nodes, N),); the counts sum to N. With as many nodes as integers it is the sum itself.
    Source: Gautschi, Orthogonal Polynomials, table 1.2; used for depth (30) at large dim.
    """
    total = last - first + 1
    if nodes >= total:
        return np.arange(first, last + 1, dtype=np.float64), np.ones(total)
    n = np.arange(1, nodes, dtype=np.float64)
    half = total / 2  # in units of half the length, so that nothing overflows
    off_diagonal = np.sqrt(n * n * (1 - (n / total) ** 2) / (4 * n * n - 1))
    x, vectors = eigh_tridiagonal(np.zeros(nodes), off_diagonal)
    return (first + last) / 2 + half * x, total * vectors[0] ** 2


def _far_tail_rule(a: float, zeta: float, degree: int) -> tuple[FloatArray, FloatArray]:
    r"""Nodes λ and weights of :math:`\frac1a\int_0^{\lambda_*} \lambda^{\zeta-1} f(\lambda)\,d\lambda`, unit scales.

    It stands for the modes beyond `INTEGRAL_FROM`; Gauss-Jacobi with degree + 1 nodes integrates r²
    exactly; fewer are enough where r turns little below the edge.
    """
    edge = (INTEGRAL_FROM + 0.5) ** -a
    nodes = min(degree + 1, _node_count(degree, 2 * degree * np.arcsin(np.sqrt(edge))))
    x, shares = power_weight_rule(zeta, nodes)
    return edge * x, edge**zeta / (a * zeta) * shares


def power_weight_rule(zeta: float, nodes: int) -> tuple[FloatArray, FloatArray]:
    r"""Gauss rule of the density :math:`\zeta x^{\zeta-1}` on [0, 1], exact for polynomials of degree < 2 ``nodes``.

    zeta > 0. Returns positions in (0, 1] and shares that sum to 1, each of shape (nodes,). The recurrence is that of
    Jacobi polynomials with :math:`\beta = \zeta - 1`, written in ζ: in β, as in ``scipy.special.roots_jacobi``, it
    loses digits as ζ → 0 and overflows from ζ = 1024.
    Source: Gautschi, Orthogonal Polynomials, table 1.1; used for depth (30) with infinitely many modes.
    """
    n = np.arange(1, nodes, dtype=np.float64)
    below, above = 2 * (n - 1) + zeta, 2 * n + zeta
    middle = 2 * n - 1 + zeta
    diagonal = np.concatenate([[zeta / (1 + zeta)], (1 + (zeta - 1) ** 2 / (middle * (middle + 2))) / 2])
    off_diagonal = n * (n - 1 + zeta) / (middle * np.sqrt(below * above))
    x, vectors = eigh_tridiagonal(diagonal, off_diagonal)
    # Rounding may put the lowest node, which holds most of the weight as ζ → 0, below zero.
    return np.clip(x, np.finfo(np.float64).tiny, 1.0), vectors[0] ** 2
