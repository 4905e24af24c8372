"""Intervals of three kinds for floor, coefficient and exponent: Student, profile likelihood, bootstrap.

All work on `solver.Batch`: one data set for a user, thousands at once for bootstrap and coverage studies. An end that
the data leave open is infinite (or the bound 0); results for people and machines say so in words.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

from sim.streams import stream
from theory.results import FloatArray, Interval
from validate.fits.solver import (
    COEFFICIENT,
    EXPONENT,
    FLOOR,
    Batch,
    Solution,
    fit_line,
    hold_coefficient,
    hold_exponent,
    hold_floor,
    lowest_of,
    model_logs,
)

Fit = Callable[[Batch], Solution]
Limits = tuple[float, float]
# Columns of a scaled Jacobian whose smallest singular value is below this cannot be told apart.
RANK = 1e-10
# A profile is followed until its parameter has changed by this factor (log 2^60).
FARTHEST = 41.6
# A coefficient beyond exp(700) = 1e304 counts as without upper end.
LARGEST_LOG = 700.0
# Numbers in one array of bootstrap draws.
CHUNK = 10**6


def quantile(degrees: int, level: float) -> float:
    """Two-sided Student quantile; its square is that of F with (1, degrees)."""
    return float(-stdtrit(degrees, (1 - level) / 2))


def sensitivities(batch: Batch, solution: Solution) -> FloatArray:
    """Derivatives of the weighted model logarithms by F, log c and α, shape (B, n, 3)."""
    logs = model_logs(solution.parameters, batch.t)
    share = np.exp(solution.parameters[:, 1:2] - np.exp(solution.parameters[:, 2:]) * batch.t - logs)
    return np.asarray(np.stack([np.exp(-logs), share, -batch.t * share], axis=2) * batch.roots[:, None])


def covariances(batch: Batch, solution: Solution, held: tuple[int, ...] = (), *, bounded: bool = True) -> FloatArray:
    r"""Covariances of (F, log c, α) per unit residual variance, :math:`(J^\top J)^{-1}`, shape (B, 3, 3).

    Rows and columns of parameters in ``held``, and of floors on their bound 0, are zero: errors of the rest come from
    the free parameters alone, unless ``bounded`` is false. Infinite where the free parameters cannot be told apart.
    """
    J = sensitivities(batch, solution)
    free = np.ones((len(J), 3), dtype=bool)
    free[:, list(held)] = False
    if bounded:
        free[:, FLOOR] &= np.isfinite(solution.parameters[:, FLOOR])
    J = J * free[:, None, :]
    scale = np.sqrt(np.sum(J * J, axis=1))
    scale = np.where(scale > 0, scale, 1.0)
    normal = np.einsum("bni,bnj->bij", J / scale[:, None, :], J / scale[:, None, :])
    normal += ~free[:, :, None] * np.eye(3)
    smallest = np.linalg.eigvalsh(normal)[:, 0]
    singular = smallest < RANK
    normal[singular] = np.eye(3)
    inverse = np.linalg.inv(normal)
    inverse[singular] = np.inf
    both = free[:, :, None] & free[:, None, :]
    return np.asarray(np.where(both, inverse / (scale[:, :, None] * scale[:, None, :]), 0.0))


def standard_errors(batch: Batch, solution: Solution, degrees: FloatArray, held: tuple[int, ...] = ()) -> FloatArray:
    """Standard errors of (F, log c, α), (B, 3), with residual variance = squares over ``degrees`` (B,)."""
    variances = np.diagonal(covariances(batch, solution, held), axis1=1, axis2=2)
    return np.asarray(np.sqrt(variances * (solution.squares / degrees)[:, None]))


def student_limits(solution: Solution, errors: FloatArray, degrees: FloatArray, level: float) -> FloatArray:
    """Student limits (B, 3, 2) of floor, coefficient (on its logarithm) and exponent, within their domains."""
    widths = -stdtrit(degrees, (1 - level) / 2)[:, None] * errors
    values = solution.values
    centre = np.stack([values[:, FLOOR], solution.parameters[:, COEFFICIENT], values[:, EXPONENT]], axis=1)
    limits = np.stack([centre - widths, centre + widths], axis=2)
    with np.errstate(over="ignore"):  # a coefficient beyond 1e308 has no upper end
        limits[:, COEFFICIENT] = np.exp(limits[:, COEFFICIENT])
    return np.asarray(np.maximum(limits, 0.0))


def profile_squares(
    batch: Batch, parameter: int, values: FloatArray, *, floor: bool, exponent: float | None, near: FloatArray | None
) -> FloatArray:
    """Least squares over the other parameters with ``parameter`` held at ``values`` (B,).

    floor: whether the model has one; exponent: its value where the model holds it; near: further starts (S, B, 3).
    """
    if not floor:
        held = np.full(len(values), exponent) if exponent is not None else None
        if parameter == EXPONENT:
            return fit_line(batch, exponent=values).squares
        if held is None:
            return fit_line(batch, coefficient=values).squares
        residuals = batch.roots * (batch.logs - np.log(values)[:, None] + held[:, None] * batch.t)
        return np.asarray(np.sum(residuals**2, axis=1))
    if exponent is not None:
        return _fixed_exponent_squares(batch, parameter, values, exponent)
    if parameter == EXPONENT:
        return hold_exponent(batch, values).squares
    hold = hold_floor if parameter == FLOOR else hold_coefficient
    return hold(batch, values, near).squares


def _fixed_exponent_squares(batch: Batch, parameter: int, values: FloatArray, exponent: float) -> FloatArray:
    """Least squares over the one parameter that is left when the exponent and another one are held."""
    other = COEFFICIENT if parameter == FLOOR else FLOOR
    losses = np.exp(batch.logs)
    starts = []
    for fraction in (0.02, 0.3, 0.9):
        start = np.empty((len(values), 3))
        start[:, EXPONENT] = np.log(exponent)
        start[:, parameter] = np.log(np.maximum(values, 1e-300))
        scale = losses.min(axis=1) if other == FLOOR else (losses * np.exp(exponent * batch.t)).mean(axis=1)
        start[:, other] = np.log(fraction * scale)
        starts.append(start)
    found = lowest_of(batch, np.stack(starts), (other,)).squares
    if parameter == COEFFICIENT:
        line = batch.roots * (batch.logs - np.log(values)[:, None] + exponent * batch.t)
        return np.asarray(np.minimum(found, np.sum(line**2, axis=1)))
    return np.where(values > 0, found, fit_line(batch, exponent=np.full(len(values), exponent)).squares)


def profile_limits(
    batch: Batch, solution: Solution, parameter: int, allowed: float, *, floor: bool, exponent: float | None
) -> Limits:
    """Ends of the range of ``parameter`` around its estimate where the profile exceeds the minimum by ``allowed``.

    0 or infinity where the profile never does on that side. One data set at a time (B = 1).
    """
    log_estimate = float(solution.parameters[0, parameter])
    minimum = float(solution.squares[0])
    near = solution.parameters[None]

    def excess(log_value: float) -> float:
        value = np.array([np.exp(log_value)])
        squares = profile_squares(batch, parameter, value, floor=floor, exponent=exponent, near=near)
        # The root of the excess is nearly linear in the parameter, which a root finder likes.
        return float(np.sqrt(max(squares[0] - minimum, 0.0)) - np.sqrt(allowed))

    if parameter == FLOOR:
        return _floor_limits(batch, solution, excess, allowed, exponent)
    ends = []
    highest = np.log(batch.fastest) if parameter == EXPONENT else LARGEST_LOG
    for sign in (-1, 1):
        inside, step = log_estimate, 0.01
        while True:
            outside = min(log_estimate + sign * step, highest)
            if excess(outside) > 0:
                ends.append(float(np.exp(brentq(excess, inside, outside, xtol=1e-12, rtol=1e-12))))
                break
            if step > FARTHEST or outside == highest:
                ends.append(0.0 if sign < 0 else np.inf)
                break
            inside, step = outside, step * 2
    return ends[0], ends[1]


def _floor_limits(
    batch: Batch, solution: Solution, excess: Callable[[float], float], allowed: float, exponent: float | None
) -> Limits:
    """The same for the floor, whose lower end may be its bound and whose upper end always exists."""
    value = float(solution.values[0, FLOOR])
    line = fit_line(batch, exponent=None if exponent is None else np.array([exponent]))
    low = 0.0
    if value > 0 and float(line.squares[0] - solution.squares[0]) > allowed:
        inside = outside = np.log(value)
        step = 0.01
        while excess(outside) <= 0 and step < FARTHEST:
            inside, outside, step = outside, np.log(value) - step, step * 2
        if excess(outside) > 0:
            low = float(np.exp(brentq(excess, outside, inside, xtol=1e-12, rtol=1e-12)))
    smallest = float(batch.logs.min())
    inside = outside = np.log(value) if value > 0 else smallest - FARTHEST
    step = 0.01
    while excess(outside) <= 0:
        # From a floor on its bound the first steps go through many orders of magnitude.
        inside, outside, step = outside, min(outside + step, smallest + 5 + step), step * 2
    return low, float(np.exp(brentq(excess, inside, outside, xtol=1e-12, rtol=1e-12)))


def bootstrap_limits(
    batch: Batch, solution: Solution, fit: Fit, degrees: int, draws: int, seed: int, level: float,
    held: tuple[int, ...] = (),
) -> FloatArray:  # fmt: skip
    """Studentised residual bootstrap: limits (3, 2) of floor, coefficient and exponent. One data set (B = 1).

    Each draw is the fitted curve plus residuals drawn with replacement, in units of their weights, after division by
    the root of one minus their leverage (least squares makes residuals too small) and centring. Its fit gives
    (estimate - fitted value) / standard error, and the quantiles of that ratio replace Student's. Plain percentiles of
    the estimates would cover about 80 % with five depths where these cover 95 %.
    """
    fitted = model_logs(solution.parameters, batch.t)[0]
    leverage = leverages(batch, solution, held)[0]
    residuals = batch.roots * (batch.logs[0] - fitted) / np.sqrt(np.maximum(1 - leverage, 1e-3))
    residuals = residuals - residuals.mean()
    generator = stream(seed, "bootstrap of a power-law fit")
    drawn = generator.choice(residuals, size=(draws, residuals.size))
    resampled = Batch(batch.t, fitted + drawn / batch.roots, batch.roots)
    parts = np.array_split(resampled.logs, max(1, drawn.size // CHUNK))
    fits = [fit(Batch(batch.t, logs, batch.roots)) for logs in parts]
    found = Solution(np.concatenate([f.parameters for f in fits]), np.concatenate([f.squares for f in fits]))
    centre, error = _pivots(batch, solution, degrees, held)
    values, errors = _pivots(resampled, found, degrees, held)
    # A draw whose losses do not fall has no power law: it counts as a constant, an exponent of 0.
    constant = ~np.isfinite(found.squares)
    level_of_draw = resampled.logs @ batch.roots**2 / np.sum(batch.roots**2)
    values[constant] = np.stack([np.zeros_like(level_of_draw), level_of_draw, np.zeros_like(level_of_draw)], axis=1)[
        constant
    ]
    errors[constant] = error
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors > 0, (values - centre) / errors, np.sign(values - centre) * np.inf)
    # Held parameters have neither error nor deviation.
    ratios = np.where((values == centre) | (error == 0), 0.0, ratios)
    tail = (1 - level) / 2
    low = np.quantile(ratios, tail, axis=0, method="lower")
    high = np.quantile(ratios, 1 - tail, axis=0, method="higher")
    limits = np.stack([centre[0] - high * error[0], centre[0] - low * error[0]], axis=1)
    with np.errstate(over="ignore"):
        limits[COEFFICIENT] = np.exp(limits[COEFFICIENT])
    return np.asarray(np.maximum(limits, 0.0))


def _pivots(batch: Batch, solution: Solution, degrees: int, held: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """Estimates of (F, log c, α) and standard errors, (B, 3); a floor on its bound keeps the error of a free one."""
    count = np.full(len(solution.squares), float(degrees))
    squares = np.where(np.isfinite(solution.squares), solution.squares, 0.0)
    solution = Solution(solution.parameters, squares)
    errors = standard_errors(batch, solution, count, held)
    if FLOOR not in held:
        unbounded = np.diagonal(covariances(batch, solution, held, bounded=False), axis1=1, axis2=2)
        errors[:, FLOOR] = np.sqrt(unbounded[:, FLOOR] * squares / count)
    values = solution.values
    return np.stack([values[:, FLOOR], solution.parameters[:, COEFFICIENT], values[:, EXPONENT]], axis=1), errors


def leverages(batch: Batch, solution: Solution, held: tuple[int, ...] = ()) -> FloatArray:
    """Diagonal of the hat matrix of the linearised fit, (B, n)."""
    J = sensitivities(batch, solution)
    covariance = covariances(batch, solution, held)
    covariance = np.where(np.isfinite(covariance), covariance, 0.0)
    return np.asarray(np.einsum("bni,bij,bnj->bn", J, covariance, J))


def to_interval(limits: Limits | FloatArray, level: float) -> Interval:
    """Two limits as an `Interval`."""
    return Interval(float(limits[0]), float(limits[1]), level)
