"""Power laws through trained losses and shared errors, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from theory.results import DomainError, Estimate
from validate.power_law_fit import FittedNumber, PowerLawFit, fit_power_law
from validate.tables.comparison import Agreement

# A printed exponent agrees with a fitted one within this many standard errors of both: 1e-2 per row by Student's t of
# two degrees, as the quick profile has few depths, and less with more.
EXPONENT_LEVEL = 0.99


@dataclass(frozen=True, slots=True)
class TrainedFit:
    """A fitted law, or ``None`` with the reason. Numbers without an error are ``None``."""

    fit: PowerLawFit | None
    reason: str

    @property
    def identified(self) -> bool:
        """Whether the depths tell the exponent."""
        return self.fit is not None and self.fit.verdict.identifiable

    @property
    def exponent(self) -> Estimate | None:
        """The exponent with the error of its Student interval."""
        return None if self.fit is None else as_estimate(self.fit.exponent, self.fit)

    @property
    def floor(self) -> Estimate | None:
        """The fitted floor likewise."""
        return None if self.fit is None else as_estimate(self.fit.floor, self.fit)

    def agreement(self, paper: float, stderr: float) -> Agreement:
        """Verdict on a printed exponent: none where ours is not identified."""
        if not self.identified or self.exponent is None:
            return Agreement.UNTESTED
        interval = self.exponent.interval(EXPONENT_LEVEL)
        wide = (interval.high - interval.low) / 2 + 3 * stderr
        return Agreement.AGREES if abs(self.exponent.value - paper) <= wide else Agreement.DIFFERS


def fit_losses_by_depth(depths: Sequence[int], losses: Sequence[Estimate]) -> TrainedFit:
    """The law with a floor through trained losses, as the paper fits it: unweighted. Source: depth (88), (89)."""
    return _fitted(depths, losses, None)


def fit_gaps_by_depth(depths: Sequence[int], shared_errors: Sequence[Estimate], floor: float) -> TrainedFit:
    """The law of the gap between a given floor and shared errors. Source: depth (92), (93)."""
    return _fitted(depths, shared_errors, floor)


def _fitted(depths: Sequence[int], losses: Sequence[Estimate], gap_floor: float | None) -> TrainedFit:
    try:
        fit = fit_power_law(
            list(depths),
            [loss.value for loss in losses],
            gap_floor=gap_floor,
            draws=0,
            profiles=("exponent",),
        )
    except DomainError as refusal:
        return TrainedFit(None, f"no fit: {refusal}")
    return TrainedFit(fit, fit.verdict.reason)


def as_estimate(number: FittedNumber, fit: PowerLawFit) -> Estimate | None:
    """A fitted number whose interval is that of Student's t with the fit's degrees of freedom."""
    if number.value is None or number.stderr is None or fit.degrees < 1 or not np.isfinite(number.stderr):
        return None
    rows = int(fit.data.depths.size)
    return Estimate(number.value, number.stderr, rows, fit.degrees + 1, fit.seed)
