r"""Least squares of :math:`\log y = \log(F + c x^{-\alpha})` for many data sets at once, independent of any start.

In :math:`\log y = m + \log(q + (1-q) e^{\alpha(T-t)})`, t = log x, T its largest value and q the share of the floor in
the last loss, the constant m is linear: a grid over (α, q) therefore sees the whole surface of the objective without a
search. The best cells are then polished by damped Gauss-Newton steps in (log F, log c, log α), where every admissible
point is an interior one. The bound F = 0 is a straight line in logarithms, solved in closed form and compared with the
result. Data sets, starts and values of a held parameter all run along one axis of the arrays, so that bootstrap,
profiles and coverage studies cost a few array operations each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theory.results import FloatArray

# Parameters, in the order of the last axis of all arrays here.
FLOOR, COEFFICIENT, EXPONENT = 0, 1, 2
# Fall of log(x^-alpha) over all depths at which the grid of exponents starts, and over the two smallest depths at which
# it ends: there the second loss has reached the floor to 17 digits.
SLOWEST, FASTEST = 0.02, 38.0
EXPONENTS, SHARES = 56, 28
# Smallest relative fall of the losses that the grid resolves, as a logarithm.
LEAST_FALL = 18.0
STARTS = 8
# Of each loss at least this share is taken to be decay, or floor, where the held parameter leaves none.
LEAST_SHARE = 0.02
STEPS = 200
# A step that lowers the squares by a smaller share than this is the last one: it moves parameters by some 1e-7 of their
# standard errors. Squares of data without scatter fall to rounding.
GAIN = 1e-14
SMALLEST_STEP, STRONGEST_DAMPING = 1e-13, 1e8
# After a few steps only the most promising starts go on.
FIRST_STEPS, PROMISING = 12, 2
# Longest steps of log F, log c and log α. A floor on its way to 0 has far to go, an exponent has not.
LONGEST_STEPS = np.array([2.0, 2.0, 0.5])
# A floor below this share of every loss is none: float64 cannot tell.
NO_FLOOR = -36.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Least-squares problems that share their depths.

    t: logarithms of depths (n,), increasing or not; logs: of losses (B, n); roots: square roots of weights (n,).
    """

    t: FloatArray
    logs: FloatArray
    roots: FloatArray

    @property
    def span(self) -> float:
        """Logarithm of the ratio of largest and smallest depth."""
        return float(self.t.max() - self.t.min())

    @property
    def fastest(self) -> float:
        """Exponent beyond which only the smallest depth lies above the floor."""
        distinct = np.unique(self.t)
        return FASTEST / float(distinct[1] - distinct[0])


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Minima: parameters (B, 3) as logarithms of floor, coefficient and exponent, and weighted squares (B,).

    A floor on its bound 0 has logarithm -inf.
    """

    parameters: FloatArray
    squares: FloatArray

    @property
    def values(self) -> FloatArray:
        """Floor, coefficient and exponent, (B, 3)."""
        with np.errstate(over="ignore"):  # a coefficient beyond 1e308, in some draw of a bootstrap
            return np.asarray(np.exp(self.parameters))

    def better(self, other: Solution, margin: float = 0.0) -> Solution:
        """Of two solutions of the same problems the lower one; ``other`` also where it is at most ``margin`` higher."""
        take = other.squares <= self.squares * (1 + margin)
        return Solution(
            np.where(take[:, None], other.parameters, self.parameters), np.where(take, other.squares, self.squares)
        )


def model_logs(parameters: FloatArray, t: FloatArray) -> FloatArray:
    r"""Logarithms of :math:`F + c e^{-\alpha t}`, (B, n), for parameters (B, 3) in logarithms and t (n,).

    Source: depth (88).
    """
    floor, coefficient, exponent = parameters[:, :1], parameters[:, 1:2], parameters[:, 2:]
    return np.asarray(np.logaddexp(floor, coefficient - np.exp(exponent) * t))


def _residuals(batch: Batch, parameters: FloatArray) -> FloatArray:
    return np.asarray(batch.roots * (batch.logs - model_logs(parameters, batch.t)))


def _jacobian(batch: Batch, parameters: FloatArray) -> FloatArray:
    """Derivatives of the weighted model logarithms by the logarithms of the parameters, (B, n, 3)."""
    decay = np.exp(parameters[:, 2:])
    share = np.exp(parameters[:, 1:2] - decay * batch.t - model_logs(parameters, batch.t))
    floor_share = np.exp(parameters[:, :1] - model_logs(parameters, batch.t))
    return np.asarray(np.stack([floor_share, share, -decay * batch.t * share], axis=2) * batch.roots[:, None])


def polish(batch: Batch, start: FloatArray, free: tuple[int, ...], steps: int = STEPS) -> Solution:
    """Damped Gauss-Newton (Levenberg-Marquardt) from ``start`` (B, 3) in the ``free`` parameters, others held.

    Each problem stops by itself once a step changes neither its parameters nor its squares. Exponents end at the
    fastest one that the depths can tell.
    """
    theta = np.array(start, dtype=np.float64)
    squares = np.sum(_residuals(batch, theta) ** 2, axis=1)
    damping = np.full(len(theta), 1e-3)
    active = np.arange(len(theta))
    for _ in range(steps):
        if active.size == 0:
            break
        part = Batch(batch.t, batch.logs[active], batch.roots)
        trial = _damped_step(part, theta[active], list(free), damping[active])
        moved = np.abs(trial - theta[active]).max(axis=1)
        reached = np.sum(_residuals(part, trial) ** 2, axis=1)
        gain = squares[active] - reached
        accepted = gain > 0
        done = (moved < SMALLEST_STEP) | (accepted & (gain <= GAIN * squares[active]))
        done |= ~accepted & (damping[active] > STRONGEST_DAMPING)
        theta[active[accepted]] = trial[accepted]
        squares[active[accepted]] = reached[accepted]
        damping[active] = np.where(accepted, damping[active] / 5, np.maximum(damping[active], 1e-12) * 6)
        active = active[~done]
    return Solution(theta, squares)


def _damped_step(batch: Batch, theta: FloatArray, columns: list[int], damping: FloatArray) -> FloatArray:
    """Where one damped step from ``theta`` (B, 3) in these columns leads, within the bounds; damping: (B,)."""
    low, high = np.full_like(theta, -np.inf), np.full_like(theta, np.inf)
    low[:, FLOOR] = batch.logs.min(axis=1) + NO_FLOOR
    low[:, EXPONENT], high[:, EXPONENT] = np.log(1e-9 / batch.span), np.log(batch.fastest)
    low, high, here = low[:, columns], high[:, columns], theta[:, columns]
    J, residuals = _jacobian(batch, theta)[:, :, columns], _residuals(batch, theta)
    slope = np.einsum("bni,bn->bi", J, residuals)
    # A parameter on its bound that would leave it is held, else the others stop short of their minimum.
    held = ((here >= high) & (slope > 0)) | ((here <= low) & (slope < 0))
    J = np.where(held[:, None, :], 0.0, J)
    scale = np.sqrt(np.maximum(np.sum(J * J, axis=1), 1e-280))
    J = J / scale[:, None, :]
    gradient = np.einsum("bni,bn->bi", J, residuals)
    # The last term keeps columns of zeros solvable.
    normal = np.einsum("bni,bnj->bij", J, J) + (damping[:, None, None] + 1e-15) * np.eye(len(columns))
    step = np.linalg.solve(normal, gradient[:, :, None])[:, :, 0] / scale
    trial = theta.copy()
    trial[:, columns] = np.clip(here + np.clip(step, -LONGEST_STEPS[columns], LONGEST_STEPS[columns]), low, high)
    return trial


def lowest_of(batch: Batch, starts: FloatArray, free: tuple[int, ...]) -> Solution:
    """The lowest minimum reached from several starts, (S, B, 3)."""
    if len(starts) > PROMISING:
        begun = _from_each(batch, starts, free, FIRST_STEPS)
        order = np.argsort(begun.squares, axis=0, kind="stable")[:PROMISING]
        starts = np.take_along_axis(begun.parameters, order[:, :, None], axis=0)
    found = _from_each(batch, starts, free, STEPS)
    best, index = np.argmin(found.squares, axis=0), np.arange(starts.shape[1])
    return Solution(found.parameters[best, index], found.squares[best, index])


def _from_each(batch: Batch, starts: FloatArray, free: tuple[int, ...], steps: int) -> Solution:
    """Where each start (S, B, 3) leads: parameters (S, B, 3) and squares (S, B)."""
    repeats = len(starts)
    flat = Batch(batch.t, np.tile(batch.logs, (repeats, 1)), batch.roots)
    found = polish(flat, starts.reshape(-1, 3), free, steps)
    return Solution(found.parameters.reshape(starts.shape), found.squares.reshape(repeats, -1))


def fit_line(batch: Batch, exponent: FloatArray | None = None, coefficient: FloatArray | None = None) -> Solution:
    r"""Pure power laws: :math:`\log y = \log c - \alpha t`, linear least squares; source depth (89) with L_0 = 0.

    exponent, coefficient: held values (B,), as numbers, of α or c. Problems whose losses do not fall have no positive
    exponent: their squares are infinite.
    """
    w = batch.roots**2
    if coefficient is not None:
        intercept = np.log(coefficient)
        slope = -((batch.logs - intercept[:, None]) @ (w * batch.t)) / (w @ batch.t**2)
    else:
        centre = (w @ batch.t) / w.sum()
        mean = (batch.logs @ w) / w.sum()
        x = batch.t - centre
        slope = -(batch.logs @ (w * x)) / (w @ x**2) if exponent is None else exponent
        intercept = mean + slope * centre
    fitted = intercept[:, None] - slope[:, None] * batch.t
    squares = np.sum((batch.roots * (batch.logs - fitted)) ** 2, axis=1)
    falling = slope > 0
    logs = np.log(np.where(falling, slope, 1.0))
    parameters = np.stack([np.full_like(slope, -np.inf), intercept, logs], axis=1)
    return Solution(parameters, np.where(falling, squares, np.inf))


def _shapes(batch: Batch, exponents: FloatArray) -> tuple[FloatArray, FloatArray]:
    """-log(1 - q) (K, S), 1 - q the share of the decay in the last loss, and centred model logarithms (K, S, n)."""
    depth_of_share = np.linspace(0.0, 1.0, SHARES + 1)[1:] ** 2 * (exponents[:, None] * batch.span + LEAST_FALL)
    rising = exponents[:, None, None] * (batch.t.max() - batch.t)
    floors = np.log(-np.expm1(-depth_of_share))[:, :, None]
    shapes = np.logaddexp(floors, rising - depth_of_share[:, :, None])
    w = batch.roots**2 / np.sum(batch.roots**2)
    return depth_of_share, shapes - (shapes @ w)[:, :, None]


def _from_share(batch: Batch, exponent: FloatArray, depth_of_share: FloatArray) -> FloatArray:
    """Parameters (B, 3) with this exponent (B,), -log(1 - q) (B,) as in `_shapes`, and the best scale."""
    floor, decay = np.log(-np.expm1(-depth_of_share)), exponent * batch.t.max() - depth_of_share
    unscaled = np.stack([floor, decay, np.log(exponent)], axis=1)
    w = batch.roots**2 / np.sum(batch.roots**2)
    level = (batch.logs - model_logs(unscaled, batch.t)) @ w
    unscaled[:, :2] += level[:, None]
    return unscaled


def grid_starts(batch: Batch, exponents: FloatArray) -> FloatArray:
    """Starts (2, B, 3): the lowest grid cell, and the lowest one away from it that is a minimum along the exponents."""
    depth_of_share, shapes = _shapes(batch, exponents)
    w = batch.roots**2
    centred = batch.logs - (batch.logs @ w / w.sum())[:, None]
    cross = (centred * w) @ shapes.reshape(-1, shapes.shape[2]).T
    squares = (np.einsum("ksn,n->ks", shapes**2, w).ravel() - 2 * cross).reshape(-1, *depth_of_share.shape)
    along = squares.min(axis=2)
    share_index = squares.argmin(axis=2)
    rows = np.arange(len(along))
    first = along.argmin(axis=1)
    padded = np.pad(along, ((0, 0), (1, 1)), constant_values=np.inf)
    minimum = (along <= padded[:, :-2]) & (along <= padded[:, 2:])
    minimum[rows, first] = False
    second = np.where(minimum, along, np.inf).argmin(axis=1)
    chosen = [(exponents[j], depth_of_share[j, share_index[rows, j]]) for j in (first, second)]
    return np.stack([_from_share(batch, exponent, share) for exponent, share in chosen])


def exponent_grid(batch: Batch) -> FloatArray:
    """Exponents from nearly constant losses to losses that reach the floor at the second depth."""
    return np.geomspace(SLOWEST / batch.span, batch.fastest, EXPONENTS)


# Squares that differ by less than this are rounding, and the simpler law is kept: a floor on its bound.
TIE = 1e-9


def fit_floor(batch: Batch) -> Solution:
    """Global minima over floor >= 0, coefficient > 0 and exponent > 0. Source: depth (89)."""
    interior = lowest_of(batch, grid_starts(batch, exponent_grid(batch)), (FLOOR, COEFFICIENT, EXPONENT))
    return interior.better(fit_line(batch), TIE)


def hold_exponent(batch: Batch, exponent: FloatArray) -> Solution:
    """Minima over floor and coefficient at held exponents (B,)."""
    starts = np.empty((1, len(exponent), 3))
    for value in np.unique(exponent):
        rows = exponent == value
        part = Batch(batch.t, batch.logs[rows], batch.roots)
        starts[0, rows] = grid_starts(part, np.array([value]))[0]
    interior = lowest_of(batch, starts, (FLOOR, COEFFICIENT))
    return interior.better(fit_line(batch, exponent=exponent), TIE)


def hold_floor(batch: Batch, floor: FloatArray, near: FloatArray | None = None) -> Solution:
    """Minima over coefficient and exponent at held floors (B,) >= 0; ``near`` (S, B, 3) are further starts."""
    F = np.maximum(floor, 1e-300)
    losses = np.exp(batch.logs)
    above = np.log(np.maximum(losses - F[:, None], LEAST_SHARE * losses))
    w = batch.roots**2 / np.sum(batch.roots**2)
    starts = []
    for alpha in start_exponents(batch):
        level = (above + alpha * batch.t) @ w
        starts.append(np.stack([np.log(F), level, np.full_like(level, np.log(alpha))], axis=1))
    all_starts = np.stack(starts if near is None else [*starts, *near])
    all_starts[:, :, FLOOR] = np.log(F)
    interior = lowest_of(batch, all_starts, (COEFFICIENT, EXPONENT))
    line, zero = fit_line(batch), floor <= 0
    return Solution(
        np.where(zero[:, None], line.parameters, interior.parameters), np.where(zero, line.squares, interior.squares)
    )


def hold_coefficient(batch: Batch, coefficient: FloatArray, near: FloatArray | None = None) -> Solution:
    """Minima over floor and exponent at held coefficients (B,) > 0 of x^-α; ``near`` (S, B, 3) are further starts."""
    c = np.log(coefficient)
    losses = np.exp(batch.logs)
    w = batch.roots**2 / np.sum(batch.roots**2)
    starts = []
    for alpha in start_exponents(batch):
        with np.errstate(over="ignore"):  # a decay beyond float64 leaves the least share for the floor
            decay = np.exp(c[:, None] - alpha * batch.t)
        rest = np.log(np.maximum(losses - decay, LEAST_SHARE * losses)) @ w
        starts.append(np.stack([rest, c, np.full_like(c, np.log(alpha))], axis=1))
    all_starts = np.stack(starts if near is None else [*starts, *near])
    all_starts[:, :, COEFFICIENT] = c
    # A start on the bound has no way back.
    all_starts[:, :, FLOOR] = np.maximum(all_starts[:, :, FLOOR], batch.logs.min(axis=1) - 12)
    interior = lowest_of(batch, all_starts, (FLOOR, EXPONENT))
    return interior.better(fit_line(batch, coefficient=coefficient), TIE)


def start_exponents(batch: Batch) -> FloatArray:
    """A few exponents from slow to fast, as starts where the scale is not linear."""
    return np.geomspace(0.5 / batch.span, batch.fastest / 4, STARTS)
