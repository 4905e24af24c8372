"""Laws compared on the same data, the exponent as small depths are dropped, and repeated runs against the law."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import fdtrc

from validate.fits.measured import LossLaw, MeasuredLosses
from validate.fits.solver import EXPONENT, FLOOR
from validate.power_law_fit import FittedNumber, fit_losses, interval_json, is_exact

# With more depths than this some are skipped by the scan.
SCAN_STEPS = 12


@dataclass(frozen=True, slots=True)
class Score:
    """How one law does: its exponent and floor, weighted squares, and AICc where defined (else why not).

    delta: AICc above the lowest of the compared laws.
    """

    law: LossLaw
    exponent: float
    floor: float
    squares: float
    aicc: float | None
    delta: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "law": self.law.formula,
            "exponent": self.exponent,
            "floor": self.floor,
            "squares": self.squares,
            "parameters": len(self.law.free),
            "aicc": self.aicc,
            "delta": self.delta,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class ScanStep:
    """The fit to the depths from ``smallest`` on."""

    smallest: float
    depths: int
    exponent: FittedNumber
    floor: float | None
    identifiable: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "smallest_depth": self.smallest,
            "depths": self.depths,
            "exponent": self.exponent.value,
            "stderr": self.exponent.stderr,
            "interval": interval_json(self.exponent.profile),
            "floor": self.floor,
            "identifiable": self.identifiable,
        }


@dataclass(frozen=True, slots=True)
class RepeatedRuns:
    """Scatter of runs of equal depth, and whether the law misses the means of the depths by more than that.

    stderr: relative error of one loss of average weight, from runs of equal depth, with ``degrees`` degrees of freedom.
    ratio, p_value: F test of lack of fit, None where the law has as many parameters as there are depths.
    """

    stderr: float
    degrees: int
    ratio: float | None
    p_value: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "stderr": self.stderr,
            "degrees_of_freedom": self.degrees,
            "lack_of_fit_ratio": self.ratio,
            "lack_of_fit_p_value": self.p_value,
        }


def corrected_information(squares: float, rows: int, parameters: int) -> float | None:
    r"""AICc :math:`n\log(S/n) + 2K + 2K(K+1)/(n-K-1)`, K parameters with the variance; None where n <= K + 1.

    Up to a constant of the data. Source: the usual criterion; the papers compare no laws.
    """
    K = parameters + 1
    if rows <= K + 1 or squares <= 0:
        return None
    return rows * math.log(squares / rows) + 2 * K + 2 * K * (K + 1) / (rows - K - 1)


def compare_laws(data: MeasuredLosses, law: LossLaw) -> list[Score]:
    """``law`` and its rivals, lowest AICc first: floor or none (a gap has none), exponent fitted or one."""
    if law.gap_floor is not None:
        data = data.below(law.gap_floor)
    floors = (False,) if law.gap_floor is not None else (True, False)
    rivals = [LossLaw(floor, exponent, law.gap_floor) for floor in floors for exponent in (None, 1.0)]
    if law not in rivals:
        rivals.insert(0, law)
    scores = []
    for rival in rivals:
        if data.distinct_depths.size < len(rival.free):
            continue
        found = rival.fit(data.batch())
        squares = float(found.squares[0])
        aicc = None if is_exact(data, squares) else corrected_information(squares, data.losses.size, len(rival.free))
        reason = None
        if aicc is None:
            reason = (
                "the law fits to rounding" if is_exact(data, squares)
                else f"AICc needs at least {len(rival.free) + 3} rows for {len(rival.free)} parameters"
            )  # fmt: skip
        scores.append(
            Score(
                rival, float(found.values[0, EXPONENT]), float(found.values[0, FLOOR]), squares, aicc, reason=reason
            )
        )
    known = [score.aicc for score in scores if score.aicc is not None]
    lowest = min(known, default=0.0)
    scores = [
        Score(s.law, s.exponent, s.floor, s.squares, s.aicc, None if s.aicc is None else s.aicc - lowest, s.reason)
        for s in scores
    ]
    return sorted(scores, key=lambda score: math.inf if score.delta is None else score.delta)


def depth_scan(data: MeasuredLosses, law: LossLaw, level: float = 0.95) -> list[ScanStep]:
    """Fits as the smallest depths are dropped, down to as many depths as the law has parameters.

    A power law that holds only for deep models shows as an exponent that drifts and then settles. At most `SCAN_STEPS`
    fits, evenly spread over the depths; the scan stops where the rest of the losses does not fall.
    """
    steps = []
    depths = data.distinct_depths
    last = depths.size - max(len(law.free), 2)
    for start in np.unique(np.linspace(0, last, min(last + 1, SCAN_STEPS)).round().astype(int)):
        rest = data.from_depth(float(depths[start]))
        if start and not falls(rest, law):
            break
        fit = fit_losses(rest, law, level=level, draws=0, profiles=("exponent",))
        steps.append(
            ScanStep(
                float(depths[start]),
                int(depths.size - start),
                fit.exponent,
                fit.floor.value,
                fit.verdict.identifiable,
            )
        )
    return steps


def falls(data: MeasuredLosses, law: LossLaw) -> bool:
    """Whether a power law without a floor through the data has a positive exponent."""
    if law.gap_floor is not None:
        data = data.below(law.gap_floor)
    return bool(np.isfinite(LossLaw(with_floor=False).fit(data.batch()).squares[0]))


def repeated_runs(data: MeasuredLosses, law: LossLaw) -> RepeatedRuns | None:
    """Scatter between runs of equal depth and the test of lack of fit; None where no depth is repeated."""
    if law.gap_floor is not None:
        data = data.below(law.gap_floor)
    batch = data.batch()
    w, logs = batch.roots**2, batch.logs[0]
    _, group = np.unique(data.depths, return_inverse=True)
    weights = np.bincount(group, w)
    means = np.bincount(group, w * logs) / weights
    within = float(w @ (logs - means[group]) ** 2)
    degrees = logs.size - weights.size
    if degrees < 1:
        return None
    stderr = math.sqrt(within / degrees)
    spare = weights.size - len(law.free)
    if spare < 1 or within == 0:
        return RepeatedRuns(stderr, degrees, None, None)
    beyond = max(float(law.fit(batch).squares[0]) - within, 0.0)
    ratio = (beyond / spare) / (within / degrees)
    return RepeatedRuns(stderr, degrees, ratio, float(fdtrc(spare, degrees, ratio)))
