"""When training has settled: a rule that noise cannot trigger and the initial plateau cannot either."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theory.problems import as_integer, as_real
from theory.results import FloatArray

BLOCKS = 20
# Standard errors by which the loss must have fallen, and by which the change must be inside the tolerance.
FALL_ERRORS = 3.0
CHANGE_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Convergence:
    """Stop when the loss has fallen below ``fall`` times its reference and no longer changes by ``tolerance``.

    window: steps of each of the two windows compared, at least 20; tolerance: largest relative change from one to the
    next, its error included; fall: share of the reference that the loss must be below, in (0, 1). The reference is
    the smaller of the first losses and the loss of predicting zero. Source: no equation.
    """

    window: int = 1000
    tolerance: float = 0.01
    fall: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", as_integer("window", self.window, BLOCKS, 10**6))
        object.__setattr__(self, "tolerance", as_real("tolerance", self.tolerance, 0, 1, open_low=True))
        object.__setattr__(self, "fall", as_real("fall", self.fall, 0, 1, open_low=True))


def window_mean(losses: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean loss of a window and its standard error from the means of 20 blocks of steps, shape (members,) each.

    losses: shape (steps, members). A drift inside the window counts as error, which makes the rule slower, not
    rasher. Source: no equation.
    """
    blocks = np.array([block.mean(axis=0) for block in np.array_split(losses, BLOCKS)])
    return losses.mean(axis=0), blocks.std(axis=0, ddof=1) / np.sqrt(BLOCKS)


def has_converged(previous: FloatArray, latest: FloatArray, reference: FloatArray, rule: Convergence) -> bool:
    """Whether every member has settled.

    previous, latest: losses of the steps of two windows in a row, shape (window, members); reference: shape
    (members,). The change counts with two standard errors added, so that noisy windows never pass as equal.
    Source: no equation.
    """
    before, before_error = window_mean(previous)
    now, now_error = window_mean(latest)
    fallen = now + FALL_ERRORS * now_error < rule.fall * reference
    change = np.abs(before - now) + CHANGE_ERRORS * np.hypot(before_error, now_error)
    return bool(np.all(fallen & (change <= rule.tolerance * now)))
