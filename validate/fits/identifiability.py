"""Whether the data tell the exponent, apart from how exactly least squares returns one.

Two questions, each answered by a range of exponents that must lie within a factor `FACTOR`:

- noise: the profile-likelihood interval at the requested level;
- design: the exponents whose best law follows the fitted one to within `SHARE_OF_FALL` of its total fall, at every
  measured depth. This does not shrink as residuals do: five depths from 8 to 16 cannot tell an exponent of a quarter
  from one of one, however small the noise, as soon as the law itself is only approximately true.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from theory.results import FloatArray, Interval
from validate.fits.measured import LossLaw
from validate.fits.solver import Batch, Solution, model_logs

FACTOR = 2.0
SHARE_OF_FALL = 0.025
# Exponents are followed down to this share of the estimate: there the law is a straight line in log depth.
SLOWEST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Compatible:
    """Laws that follow the fitted one to within ``deviation`` (natural logarithm of the loss) at every depth.

    deviation: `SHARE_OF_FALL` of the fall of the fitted law over the depths. Intervals have level 1: nothing here is
    random. Ends that the depths leave open are 0 or infinite.
    """

    deviation: float
    floor: Interval
    coefficient: Interval
    exponent: Interval


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the exponent is identified, and the reason in one sentence."""

    identifiable: bool
    reason: str


def within_factor(interval: Interval) -> bool:
    """Whether both ends are positive, finite and within `FACTOR` of each other."""
    return interval.low > 0 and interval.high <= FACTOR * interval.low


def compatible_laws(batch: Batch, solution: Solution, law: LossLaw) -> Compatible:
    """The laws that this design does not tell from the fitted one, see `Compatible`. One data set (B = 1)."""
    depths = np.unique(batch.t)
    fitted = model_logs(solution.parameters, depths)
    deviation = SHARE_OF_FALL * float(np.ptp(fitted))
    exact = Batch(depths, fitted, np.ones_like(depths))

    def nearest(log_exponent: float) -> tuple[float, FloatArray]:
        held = LossLaw(law.with_floor, fixed_exponent=float(np.exp(log_exponent)))
        found = held.fit(exact)
        return float(np.abs(fitted - model_logs(found.parameters, depths)).max()), found.values[0]

    estimate = float(solution.parameters[0, 2])
    highest = float(np.log(batch.fastest))
    ends = []
    for bound, step in ((estimate + np.log(SLOWEST_SHARE), -0.05), (highest, 0.05)):
        inside = outside = estimate
        open_end = False
        while nearest(outside)[0] <= deviation:
            if outside == bound:
                open_end = True
                break
            inside, outside = outside, max(outside + step, bound) if step < 0 else min(outside + step, bound)
            step *= 1.5
        if open_end:
            ends.append((0.0 if step < 0 else np.inf, nearest(bound)[1]))
            continue
        end = outside if inside == outside else float(
            brentq(lambda value: nearest(value)[0] - deviation, inside, outside, xtol=1e-9)
        )  # fmt: skip
        ends.append((float(np.exp(end)), nearest(end)[1]))
    (low, at_low), (high, at_high) = ends
    best = solution.values[0]
    spans = [Interval(float(min(p)), float(max(p)), 1.0) for p in zip(at_low, at_high, best, strict=True)]
    return Compatible(deviation, spans[0], spans[1], Interval(low, high, 1.0))


def verdict(
    depths: FloatArray, law: LossLaw, degrees: int, profile: Interval | None, compatible: Compatible
) -> Verdict:
    """The verdict on the exponent. profile: None where there are no degrees of freedom, or no scatter to judge by."""
    distinct = np.unique(depths)
    where = f"depths {distinct[0]:g} to {distinct[-1]:g}"
    if degrees < 1:
        return Verdict(
            False,
            f"{depths.size} rows leave no degree of freedom beside {len(law.free)} parameters: any error would do",
        )
    if law.fixed_exponent is not None:
        return Verdict(True, "the exponent is held fixed, and the other parameters are determined by the rows")
    span = compatible.exponent
    if not np.isfinite(span.high):
        return Verdict(
            False, f"only the smallest depth lies above the floor: every exponent above {span.low:.3g} fits alike"
        )
    if not within_factor(span):
        return Verdict(
            False,
            f"{where} do not tell exponents from {span.low:.3g} to {span.high:.3g} apart: all follow the fitted law to "
            f"within {100 * np.expm1(compatible.deviation):.2g} % ({100 * SHARE_OF_FALL:g} % of its fall)",
        )
    if profile is None:
        return Verdict(
            True,
            f"the losses follow the law without scatter, and only exponents from {span.low:.3g} to {span.high:.3g} "
            f"come within {100 * SHARE_OF_FALL:g} % of its fall",
        )
    if not within_factor(profile):
        high = f"{profile.high:.3g}" if np.isfinite(profile.high) else "any size"
        return Verdict(
            False,
            f"the scatter of the losses leaves exponents from {profile.low:.3g} to {high} "
            f"({100 * profile.level:g} % profile interval)",
        )
    return Verdict(
        True,
        f"the {100 * profile.level:g} % profile interval of the exponent, {profile.low:.3g} to {profile.high:.3g}, "
        f"lies within a factor {FACTOR:g}, and so do all laws within {100 * SHARE_OF_FALL:g} % of the fall",
    )
