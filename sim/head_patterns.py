r"""What trained heads look like: the patterns of Observations 1 to 4, as numbers.

Arrays in, arrays out; leading axes (members of an ensemble, snapshots of a run) are kept. ω_h is the mean diagonal of
KQ_11, with the factor that the logits are scaled by, and μ_h the entry OV_22. Violations are relative to the largest
head, so that dummy heads, which are small all over, count as little as they matter; 0 is the pattern itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from theory.problems import as_real
from theory.results import DomainError, Estimate, FloatArray, IntArray

# A head whose share ω_h μ_h of the step is below this part of the largest does nothing to speak of.
DUMMY_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Circuits:
    """Circuits of every head: key_query, shape (..., h, D, D), and output_value, shape (..., h, D, D).

    The first ``dim`` rows and columns belong to the input, the others to labels. Source: multihead (2.4).
    """

    key_query: FloatArray
    output_value: FloatArray
    dim: int


@dataclass(frozen=True, slots=True)
class CircuitPatterns:
    r"""How far circuits are from (3.1), shape (..., h) each, as root mean squares of entries over the largest head.

    spread: of KQ_11 - ω_h I per row; label_reads: of KQ_21; input_writes: of OV_21. Zero is Observation 1.
    """

    spread: FloatArray
    label_reads: FloatArray
    input_writes: FloatArray


@dataclass(frozen=True, slots=True)
class HeadPatterns:
    r"""Patterns of heads (ω_h, μ_h), shape (...) unless noted.

    groups: 1 for positive, -1 for negative, 0 for dummy heads, shape (..., h); both_signs: whether there are heads of
    either sign; sign_mismatch: part of Σabs(ω_h μ_h) in heads with signs that differ; zero_sum: abs(Σμ_h)/Σabs(μ_h);
    homogeneity: spread of abs(ω_h) over its mean, both weighted by abs(μ_h); gamma: that mean; step: Σ ω_h μ_h times
    the slope of the activation, 2γμ for two opposite heads; positive, negative: Σ μ_h over the heads of either sign.
    Source: multihead Observations 1 and 2, (4.2), (4.4), Table 1.
    """

    groups: IntArray
    both_signs: npt.NDArray[np.bool_]
    sign_mismatch: FloatArray
    zero_sum: FloatArray
    homogeneity: FloatArray
    gamma: FloatArray
    step: FloatArray
    positive: FloatArray
    negative: FloatArray


@dataclass(frozen=True, slots=True)
class Dynamics:
    """Observation 4 along a run, shape (members,) each.

    peak: index of the snapshot at which gamma is largest; peak_ratio: its largest over its last value, above 1 where
    it first rose and then fell; largest_drop: the largest fall of Σμ over positive heads below an earlier value, over
    its last value, 0 where it only rose.
    """

    peak: IntArray
    peak_ratio: FloatArray
    largest_drop: FloatArray


def circuits_of(parameters: Mapping[str, FloatArray], dim: int, logit_scale: float = 1.0) -> Circuits:
    """Circuits K^T Q (scaled) and O V from parameters named as in `MultiHeadAttention`, each (..., h, D, D).

    Source: multihead section 2. Raises DomainError where one is missing.
    """
    names = ("output_maps", "value_maps", "key_maps", "query_maps")
    missing = [name for name in names if name not in parameters]
    if missing:
        raise DomainError(f"parameters must hold {', '.join(names)}, got no {missing[0]}")
    output, value, key, query = (np.asarray(parameters[name], dtype=np.float64) for name in names)
    return Circuits(logit_scale * np.swapaxes(key, -1, -2) @ query, output @ value, dim)


def scalars_of(circuits: Circuits) -> tuple[FloatArray, FloatArray]:
    """ω_h and μ_h of heads with one output, shape (..., h) each. Source: multihead (3.1).

    Raises DomainError for several outputs; see `vectors_of`.
    """
    omega, mu = vectors_of(circuits)
    if mu.shape[-1] != 1:
        raise DomainError(f"circuits must have one output to be summarised by (omega, mu), got {mu.shape[-1]}")
    return omega.mean(axis=-1), mu[..., 0]


def vectors_of(circuits: Circuits) -> tuple[FloatArray, FloatArray]:
    """Diagonals of KQ_11, shape (..., h, dim), and of OV_22, shape (..., h, outputs). Source: multihead 5.4."""
    d = circuits.dim
    omega = np.diagonal(circuits.key_query[..., :d, :d], axis1=-2, axis2=-1)
    mu = np.diagonal(circuits.output_value[..., d:, d:], axis1=-2, axis2=-1)
    return omega, mu


def circuit_patterns(circuits: Circuits) -> CircuitPatterns:
    """Departures from (3.1), for one output. Source: multihead Observation 1."""
    omega, mu = scalars_of(circuits)
    d = circuits.dim
    rest = circuits.key_query[..., :d, :d] - omega[..., None, None] * np.eye(d)
    largest_omega = _positive(np.abs(omega).max(axis=-1, keepdims=True))
    largest_mu = _positive(np.abs(mu).max(axis=-1, keepdims=True))
    return CircuitPatterns(
        np.sqrt((rest**2).sum(axis=(-2, -1)) / d) / largest_omega,
        np.sqrt((circuits.key_query[..., d, :d] ** 2).mean(axis=-1)) / largest_omega,
        np.sqrt((circuits.output_value[..., d, :d] ** 2).mean(axis=-1)) / largest_mu,
    )


def head_patterns(
    omega: FloatArray, mu: FloatArray, *, slope: float = 1.0, tolerance: float = DUMMY_TOLERANCE
) -> HeadPatterns:
    """Patterns of heads, omega and mu of shape (..., h).

    slope: C_f of the activation; tolerance: below this part of the largest abs(ω_h μ_h) a head is a dummy.
    Source: multihead Observations 1 and 2.
    """
    w, m = np.asarray(omega, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    if w.shape != m.shape or w.ndim == 0 or w.shape[-1] == 0:
        raise DomainError(f"omega and mu must hold one number per head each, got shapes {w.shape} and {m.shape}")
    tolerance = as_real("tolerance", tolerance, 0, 1)
    products = w * m
    sizes = np.abs(products)
    groups = np.where(sizes > tolerance * sizes.max(axis=-1, keepdims=True), np.sign(w), 0).astype(np.int64)
    share = np.abs(m) / _positive(np.abs(m).sum(axis=-1, keepdims=True))
    gamma = (share * np.abs(w)).sum(axis=-1)
    spread = np.sqrt((share * (np.abs(w) - gamma[..., None]) ** 2).sum(axis=-1))
    return HeadPatterns(
        groups=groups,
        both_signs=np.asarray((groups > 0).any(axis=-1) & (groups < 0).any(axis=-1)),
        sign_mismatch=np.maximum(-products, 0).sum(axis=-1) / _positive(sizes.sum(axis=-1)),
        zero_sum=np.abs(m.sum(axis=-1)) / _positive(np.abs(m).sum(axis=-1)),
        homogeneity=spread / _positive(gamma),
        gamma=gamma,
        step=slope * products.sum(axis=-1),
        positive=np.where(w > 0, m, 0).sum(axis=-1),
        negative=np.where(w < 0, m, 0).sum(axis=-1),
    )


def dynamics(patterns: HeadPatterns) -> Dynamics:
    """Observation 4 from patterns of snapshots on the first axis and members on the second.

    Source: multihead Observation 4.
    """
    gamma, positive = patterns.gamma, patterns.positive
    if gamma.ndim != 2:
        raise DomainError(f"patterns must have axes of snapshots and members, got shape {gamma.shape}")
    drop = np.maximum.accumulate(positive, axis=0) - positive
    return Dynamics(
        gamma.argmax(axis=0),
        gamma.max(axis=0) / _positive(gamma[-1]),
        drop.max(axis=0) / _positive(np.abs(positive[-1])),
    )


def over_seeds(values: FloatArray, seeds: Sequence[int]) -> Estimate:
    """Mean over members and its standard error; values: shape (members,), at least 2. Source: no equation."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size < 2 or array.size != len(seeds):
        raise DomainError(f"values must hold one number for each of 2 or more seeds, got shape {array.shape}")
    return Estimate(array.mean(), array.std(ddof=1) / np.sqrt(array.size), array.size, array.size, seeds[0])


def _positive(values: FloatArray) -> FloatArray:
    """Values with 1 for 0: what they divide is 0 then too."""
    return np.where(values == 0, 1.0, values)
