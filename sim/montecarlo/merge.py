"""One estimate from several that were computed independently: on other machines, on other days, with other seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from theory.results import DomainError, Estimate, Status


@dataclass(frozen=True, slots=True)
class MergedEstimate(Estimate):
    """An `Estimate` that was put together from ``parts``, in ascending order of their seeds.

    ``seed`` is that of the first part; all of them together reproduce the value. Source: Monte Carlo; no equation.
    """

    parts: tuple[Estimate, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for JSON, with the seed, chunks and samples of each part."""
        own = Estimate(self.value, self.stderr, self.samples, self.chunks, self.seed, self.status).to_json()
        parts = [{"seed": part.seed, "samples": part.samples, "chunks": part.chunks} for part in self.parts]
        return {**own, "parts": parts}


def merge_estimates(estimates: Iterable[Estimate]) -> MergedEstimate:
    r"""The mean over all samples of independent estimates of one quantity, with its standard error.

    .. math:: \bar y = \frac{\sum_i N_i y_i}{\sum_i N_i}, \qquad
              s^2 = \frac{\sum_i n_i m_i (m_i-1)\,\mathrm{se}_i^2 + \sum_i N_i (y_i-\bar y)^2}{\sum_i m_i - 1}, \qquad
              \mathrm{se}^2 = \frac{s^2}{\sum_i N_i}

    estimates: at least one; part i has :math:`N_i` samples in :math:`m_i` chunks of :math:`n_i = N_i/m_i`. A chunk's
    mean has the variance :math:`s^2/n_i`, so that chunks of unequal size are weighted; for chunks of one size this
    is the mean and error over all chunks, to rounding. Merged estimates may be merged again: what counts is their
    parts. It is DONE where every part is. The order of the estimates does not matter.
    Raises DomainError where two parts have the same seed: their samples would be the same ones, counted twice.
    That all parts estimate the same quantity is the caller's to know. Source: Chan's update of sums of squares.
    """
    parts = sorted((part for estimate in estimates for part in _parts(estimate)), key=lambda part: part.seed)
    if not parts:
        raise DomainError("estimates must hold at least one estimate to merge, got none")
    for one, next_one in pairwise(parts):
        if one.seed == next_one.seed:
            raise DomainError(f"estimates must have different seeds to be independent, got {one.seed} more than once")
    samples, chunks = sum(part.samples for part in parts), sum(part.chunks for part in parts)
    value = math.fsum(part.samples / samples * part.value for part in parts)
    # Lengths of vectors instead of sums of squares, which might overflow; each in units of the root of s^2.
    within = (math.sqrt(part.samples * (part.chunks - 1)) * part.stderr for part in parts)
    between = (math.sqrt(part.samples) * (part.value - value) for part in parts)
    stderr = math.hypot(*within, *between) / math.sqrt((chunks - 1) * samples)
    status = Status.DONE if all(part.status is Status.DONE for part in parts) else Status.SAMPLE_LIMIT
    return MergedEstimate(value, stderr, samples, chunks, parts[0].seed, status, tuple(parts))


def _parts(estimate: object) -> tuple[Estimate, ...]:
    if isinstance(estimate, MergedEstimate):
        return estimate.parts
    if not isinstance(estimate, Estimate):
        raise DomainError(f"estimates must hold Estimate values, got {estimate!r}")
    return (estimate,)
