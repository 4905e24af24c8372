r"""Power-law fits :math:`L_0 + c L^{-\alpha}` of measured losses, with errors and a verdict on what the data tell.

Least squares of logarithms, the procedure of the depth paper's appendix D.1 and D.4 (88)-(89), (92)-(93). The paper
prints standard errors and R^2 without defining them. Here the standard error is that of least squares in logarithms
with the residual variance on (rows - parameters) degrees of freedom, and R^2 is one minus the residual over the total
squares of the (weighted) logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.streams import MAX_SEED
from theory.problems import as_integer, as_real
from theory.results import DomainError, FloatArray, Interval
from validate.fits.identifiability import SHARE_OF_FALL, Compatible, Verdict, compatible_laws, verdict
from validate.fits.intervals import (
    LARGEST_LOG,
    bootstrap_limits,
    covariances,
    profile_limits,
    quantile,
    sensitivities,
    standard_errors,
    student_limits,
    to_interval,
)
from validate.fits.measured import LossLaw, MeasuredLosses
from validate.fits.solver import COEFFICIENT, EXPONENT, FLOOR, Batch, Solution, fit_line, model_logs
from validate.fits.table_input import read_losses

__all__ = [
    "FittedNumber",
    "LossLaw",
    "MeasuredLosses",
    "PowerLawFit",
    "Verdict",
    "fit_losses",
    "fit_power_law",
    "read_losses",
]

NAMES = ("floor", "coefficient", "exponent")
DEFAULT_DRAWS = 2000
TOO_LARGE = "the decay, continued to depth 1, is beyond 1e300: give depths in larger units"
# With one degree of freedom all residuals are multiples of one pattern: there is nothing to resample.
BOOTSTRAP_DEGREES = 2
# Residuals (root mean square, of logarithms) below this are rounding: nothing is known about errors.
EXACT = 1e-7
NO_SCATTER = "the losses follow the law to rounding, so there is no scatter to judge errors by"
BY_DESIGN = (
    f"the range that the depths do not tell apart ({100 * SHARE_OF_FALL:g} % of the fall), as there is no scatter"
)


@dataclass(frozen=True, slots=True)
class FittedNumber:
    """One parameter: value, standard error and intervals of three kinds, each None for the given ``reason``.

    at_bound: whether the estimate lies on the bound of its domain (a floor of 0, the fastest exponent). Interval ends
    that the data leave open are infinite.
    """

    value: float | None
    stderr: float | None
    student: Interval | None
    profile: Interval | None
    bootstrap: Interval | None
    at_bound: bool = False
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``interval`` is the profile interval, the recommended one."""
        profile = interval_json(self.profile)
        kinds = {
            "student": interval_json(self.student),
            "profile": profile,
            "bootstrap": interval_json(self.bootstrap),
        }
        return {
            "value": self.value,
            "stderr": self.stderr,
            "interval": profile,
            "intervals": kinds,
            "at_bound": self.at_bound,
            "reason": self.reason,
        }


def interval_json(interval: Interval | None) -> dict[str, Any] | None:
    """An interval for JSON: an open upper end is null, with the reason."""
    if interval is None:
        return None
    content: dict[str, Any] = interval.to_json()
    if not math.isfinite(interval.high):
        content |= {"high": None, "reason": "the data set no upper end"}
    return content


@dataclass(frozen=True, slots=True, eq=False)
class PowerLawFit:
    """A fitted law with its errors, see `fit_losses`.

    squares: weighted squares of residual logarithms; degrees: rows minus parameters; residual_stderr: root of their
    ratio, None without degrees: for small values the relative error of one loss of average weight.
    data: what the law was fitted to, the gaps where the law is that of a gap.
    """

    law: LossLaw
    data: MeasuredLosses
    floor: FittedNumber
    coefficient: FittedNumber
    exponent: FittedNumber
    r2: float
    squares: float
    degrees: int
    residual_stderr: float | None
    level: float
    seed: int
    verdict: Verdict
    compatible: Compatible
    notes: tuple[str, ...]
    solution: Solution

    @property
    def exact(self) -> bool:
        """Whether the residuals are rounding."""
        return is_exact(self.data, self.squares)

    def predict(self, depths: npt.ArrayLike) -> FloatArray:
        """The fitted law at ``depths`` > 0, shape (...): losses, or gaps. Source: depth (88), (92)."""
        x = np.asarray(depths, dtype=np.float64)
        if not (np.isfinite(x) & (x > 0)).all():
            raise DomainError("depths must be finite and > 0")
        logs = model_logs(self.solution.parameters, np.log(x).ravel())[0]
        return np.asarray(np.exp(logs).reshape(x.shape))

    def band(self, depths: npt.ArrayLike) -> tuple[FloatArray, FloatArray] | None:
        """Student limits of the law at each depth (n,), from its linearisation; None without errors."""
        if self.degrees < 1 or self.exact:
            return None
        t = np.log(np.asarray(depths, dtype=np.float64))
        covariance = covariances(self.data.batch(), self.solution, self.law.held)[0]
        if not np.isfinite(covariance).all():
            return None
        J = sensitivities(Batch(t, np.zeros((1, t.size)), np.ones_like(t)), self.solution)[0]
        degrees = self.degrees + self.floor.at_bound
        spread = np.sqrt(np.einsum("ni,ij,nj->n", J, covariance, J) * self.squares / degrees)
        factor = np.exp(np.minimum(quantile(degrees, self.level) * spread, 700.0))
        middle = self.predict(depths)
        return middle / factor, middle * factor

    def to_json(self) -> dict[str, Any]:
        """Plain values with full precision."""
        return {
            "law": self.law.formula,
            **{name: getattr(self, name).to_json() for name in NAMES},
            "r2": self.r2,
            "identifiable": self.verdict.identifiable,
            "reason": self.verdict.reason,
            "compatible_exponents": {
                **(interval_json(self.compatible.exponent) or {}),
                "relative_deviation": math.expm1(self.compatible.deviation),
                "share_of_fall": SHARE_OF_FALL,
            },
            "residual_stderr": self.residual_stderr,
            "degrees_of_freedom": self.degrees,
            "rows": int(self.data.depths.size),
            "depths": self.data.distinct_depths.tolist(),
            "level": self.level,
            "seed": self.seed,
            "notes": list(self.notes),
        }


def is_exact(data: MeasuredLosses, squares: float) -> bool:
    """Whether residuals of this weighted sum of squares are rounding."""
    return math.sqrt(squares / data.losses.size) < EXACT


def fit_power_law(
    depths: npt.ArrayLike,
    losses: npt.ArrayLike,
    stderrs: npt.ArrayLike | None = None,
    *,
    with_floor: bool = True,
    fixed_exponent: float | None = None,
    gap_floor: float | None = None,
    level: float = 0.95,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
    profiles: tuple[str, ...] = NAMES,
) -> PowerLawFit:
    """`fit_losses` of arrays (n,): losses, and where known their standard errors, at depths; see `LossLaw`."""
    data = MeasuredLosses(depths, losses, stderrs)  # type: ignore[arg-type]  # converted and checked there
    law = LossLaw(with_floor, fixed_exponent, gap_floor)
    return fit_losses(data, law, level=level, draws=draws, seed=seed, profiles=profiles)


def fit_losses(
    data: MeasuredLosses,
    law: LossLaw | None = None,
    *,
    level: float = 0.95,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
    profiles: tuple[str, ...] = NAMES,
) -> PowerLawFit:
    r"""The law that minimises :math:`\sum_i w_i [\log R_i - \log(L_0 + c L_i^{-\alpha})]^2`, with errors and a verdict.

    The minimum is global and depends on no start. Intervals, each at ``level``: Student (rows - parameters degrees;
    the coefficient's on its logarithm), profile likelihood (F with 1 and the same degrees), studentised residual
    bootstrap with ``draws`` draws from ``seed`` (none where they are too few, see `needed_draws`). ``profiles``:
    parameters whose profile intervals are wanted, all unless time matters. A floor on its bound 0 has no standard
    error, and those of the rest come from the free parameters, with one degree more. Standard errors of the losses
    enter as weights; their common scale is estimated. Repeated depths enter row by row.

    Raises DomainError where there are fewer different depths than parameters, or losses do not fall with depth, or the
    gap of depth (92) is not positive. Source: depth (88)-(89), (92)-(93).
    """
    law = LossLaw() if law is None else law
    level = as_real("level", level, 0, 1, open_low=True)
    if level == 1:
        raise DomainError("level must lie strictly between 0 and 1, got 1.0")
    draws = as_integer("draws", draws, 0, 10**6)
    seed = as_integer("seed", seed, 0, MAX_SEED)
    if law.gap_floor is not None:
        data = data.below(law.gap_floor)
    check_design(data, law)
    batch = data.batch()
    solution = law.fit(batch)
    squares = float(solution.squares[0])
    degrees = data.losses.size - len(law.free)
    exact = is_exact(data, squares)
    compatible = compatible_laws(batch, solution, law)
    minimum = _Minimum(batch, solution, law, degrees, exact, compatible, level)
    needed = needed_draws(level)
    numbers = _numbers(minimum, draws if draws >= needed else 0, seed, profiles)
    notes = data.notes + _notes(data, law, numbers, degrees)
    if 0 < draws < needed:
        notes += (f"no bootstrap intervals: at level {level:g} they need {needed} draws or more, got {draws}",)
    profile = None if exact or law.fixed_exponent is not None else numbers[EXPONENT].profile
    total = batch.roots**2 @ (batch.logs[0] - np.average(batch.logs[0], weights=batch.roots**2)) ** 2
    return PowerLawFit(
        law=law,
        data=data,
        floor=numbers[FLOOR],
        coefficient=numbers[COEFFICIENT],
        exponent=numbers[EXPONENT],
        r2=float(1 - squares / total),
        squares=squares,
        degrees=degrees,
        residual_stderr=math.sqrt(squares / degrees) if degrees > 0 else None,
        level=level,
        seed=seed,
        verdict=verdict(data.depths, law, degrees, profile, compatible),
        compatible=compatible,
        notes=notes,
        solution=solution,
    )


def needed_draws(level: float) -> int:
    """Draws without which the outer quantiles of a bootstrap are no more than its extremes."""
    return math.ceil(2 / (1 - level) - 1e-9)


def check_design(data: MeasuredLosses, law: LossLaw) -> None:
    """Refuse data that cannot determine the law: too few different depths, or losses that do not fall."""
    distinct = data.distinct_depths
    needed = max(len(law.free), 2)
    if distinct.size < needed:
        raise DomainError(
            f"a law with {len(law.free)} free parameters needs losses at {needed} or more different depths, "
            f"got {distinct.size}"
        )
    if not np.isfinite(fit_line(data.batch()).squares[0]):
        what = "gaps" if law.gap_floor is not None else "losses"
        raise DomainError(
            f"{what} must fall with depth for a power law: from depth {distinct[0]:g} to {distinct[-1]:g} they do not"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Minimum:
    """A fitted law before its errors, with what all of them need."""

    batch: Batch
    solution: Solution
    law: LossLaw
    degrees: int
    exact: bool
    compatible: Compatible
    level: float

    @property
    def floor_on_bound(self) -> bool:
        """Whether a fitted floor is 0."""
        return self.law.with_floor and float(self.solution.values[0, FLOOR]) == 0

    @property
    def at_bound(self) -> tuple[bool, bool, bool]:
        """Whether each parameter lies on a bound of its domain."""
        fastest = self.law.fixed_exponent is None and self.solution.values[0, EXPONENT] >= 0.999 * self.batch.fastest
        return self.floor_on_bound, False, bool(fastest)

    @property
    def coefficient_too_large(self) -> bool:
        """Whether the decay, continued to depth 1, is beyond float64."""
        return bool(self.solution.parameters[0, COEFFICIENT] > LARGEST_LOG)

    def student(self) -> tuple[FloatArray, FloatArray]:
        """Standard errors of floor, coefficient and exponent (3,), and their Student limits (3, 2)."""
        degrees = np.array([float(self.degrees + self.floor_on_bound)])
        errors = standard_errors(self.batch, self.solution, degrees, self.law.held)
        limits = student_limits(self.solution, errors, degrees, self.level)[0]
        if not self.coefficient_too_large:
            errors[0, COEFFICIENT] *= self.solution.values[0, COEFFICIENT]
        return errors[0], limits

    def profile(self, parameter: int) -> Interval:
        """The profile-likelihood interval of one parameter."""
        allowed = quantile(self.degrees, self.level) ** 2 * float(self.solution.squares[0]) / self.degrees
        law = self.law
        limits = profile_limits(
            self.batch, self.solution, parameter, allowed, floor=law.with_floor, exponent=law.fixed_exponent
        )
        return to_interval(limits, self.level)

    def bootstrap(self, draws: int, seed: int) -> FloatArray | None:
        """Bootstrap limits (3, 2), None where nothing is to be drawn."""
        if draws == 0 or self.degrees < BOOTSTRAP_DEGREES:
            return None
        law = self.law
        return bootstrap_limits(self.batch, self.solution, law.fit, self.degrees, draws, seed, self.level, law.held)

    def without_scatter(self, parameter: int, stderr: float | None) -> FittedNumber:
        """A parameter of exact data: its interval is the range that the design does not tell apart."""
        value, at_bound = float(self.solution.values[0, parameter]), self.at_bound[parameter]
        span: Interval = getattr(self.compatible, NAMES[parameter])
        return FittedNumber(value, stderr, None, span, None, at_bound, f"{NO_SCATTER}; {BY_DESIGN}")


def _numbers(found: _Minimum, draws: int, seed: int, profiles: tuple[str, ...]) -> list[FittedNumber]:
    """The three parameters with their errors."""
    values, law = found.solution.values[0], found.law
    if found.degrees < 1:
        return [_without_errors(found, i) for i in range(3)]
    errors, student = found.student()
    bootstrap = None if found.exact else found.bootstrap(draws, seed)
    numbers = []
    for i, name in enumerate(NAMES):
        at_bound = found.at_bound[i]
        known = math.isfinite(errors[i]) and not at_bound
        stderr = float(errors[i]) if known else None
        if i in law.held:
            numbers.append(_held_number(i, law))
            continue
        if i == COEFFICIENT and found.coefficient_too_large:
            numbers.append(FittedNumber(None, None, None, None, None, reason=TOO_LARGE))
            continue
        if found.exact:
            numbers.append(found.without_scatter(i, stderr))
            continue
        # Draws around a floor on its bound never leave it on one side: such a bootstrap is wrong.
        limits = None if bootstrap is None or (at_bound and i == FLOOR) else bootstrap[i]
        numbers.append(
            FittedNumber(
                float(values[i]),
                stderr,
                to_interval(student[i], found.level) if known else None,
                found.profile(i) if name in profiles else None,
                None if limits is None else to_interval(limits, found.level),
                at_bound,
                _reason(i, at_bound, known),
            )
        )
    return numbers


def _without_errors(found: _Minimum, parameter: int) -> FittedNumber:
    """A parameter of a law with as many parameters as rows."""
    if parameter in found.law.held:
        return _held_number(parameter, found.law)
    if parameter == COEFFICIENT and found.coefficient_too_large:
        return FittedNumber(None, None, None, None, None, reason=TOO_LARGE)
    value, at_bound = float(found.solution.values[0, parameter]), found.at_bound[parameter]
    return FittedNumber(value, None, None, None, None, at_bound, "as many parameters as rows: the errors are unknown")


def _held_number(parameter: int, law: LossLaw) -> FittedNumber:
    """A parameter that the law does not fit."""
    if parameter == EXPONENT:
        return FittedNumber(law.fixed_exponent, None, None, None, None, reason="held fixed")
    if law.gap_floor is not None:
        return FittedNumber(
            law.gap_floor, None, None, None, None, reason="given; its error is not part of the others"
        )
    return FittedNumber(0.0, None, None, None, None, reason="held at 0")


def _reason(parameter: int, at_bound: bool, known: bool) -> str | None:
    if at_bound and parameter == FLOOR:
        return "on its bound 0: no standard error, and those of the rest come from the free parameters only"
    if at_bound:
        return "on its upper bound: the second depth has reached the floor"
    return None if known else "the depths do not tell the parameters apart: the standard error is infinite"


def _notes(data: MeasuredLosses, law: LossLaw, numbers: list[FittedNumber], degrees: int) -> tuple[str, ...]:
    """What users should know beside the numbers."""
    notes = []
    interval = numbers[FLOOR].profile
    if numbers[FLOOR].at_bound:
        notes.append("the floor is on its bound 0: the losses show none")
    elif law.with_floor and interval is not None and interval.low == 0:
        notes.append("the floor is not told from 0")
    if degrees > 0 and data.distinct_depths.size == len(law.free):
        notes.append("as many parameters as different depths: the form of the law cannot be tested")
    if law.gap_floor is not None:
        shift = _gap_shift(data, law)
        notes.append(
            f"the given floor counts as exact; were it 0.1 % higher, the exponent would change by {shift:+.2g}"
        )
    return tuple(notes)


def _gap_shift(data: MeasuredLosses, law: LossLaw) -> float:
    """Change of the gap's exponent where the given floor is 0.1 % higher."""
    if law.gap_floor is None or law.fixed_exponent is not None:
        return 0.0
    moved = MeasuredLosses(data.depths, data.losses + 1e-3 * law.gap_floor, data.stderrs, data.rows)
    both = [float(law.fit(d.batch()).values[0, EXPONENT]) for d in (data, moved)]
    return both[1] - both[0]
