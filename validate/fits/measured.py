"""Measured losses and the laws that may be fitted to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from theory.problems import as_real
from theory.results import DomainError, FloatArray
from validate.fits.solver import COEFFICIENT, EXPONENT, FLOOR, Batch, Solution, fit_floor, fit_line, hold_exponent
from validate.table_file import listed

# Losses, depths and errors are at most this, and at least its inverse: their squares must fit into float64.
LARGEST = 1e100
MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLosses:
    """Losses at depths, one row per run; rows of equal depth are repeated runs.

    depths, losses: > 0 and finite, shape (n,). stderrs: standard errors of the losses, > 0, shape (n,), or None where
    all losses are equally exact relative to their size. rows: what messages call each row, such as "line 3".
    notes: what was noticed in reading them.
    """

    depths: FloatArray
    losses: FloatArray
    stderrs: FloatArray | None = None
    rows: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("depths", "losses", "stderrs"):
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, np.array(value, dtype=np.float64))
                except (TypeError, ValueError):
                    raise DomainError(f"{name} must be an array of numbers, got {value!r}") from None
        shape = self.depths.shape
        if (
            self.depths.ndim != 1
            or self.losses.shape != shape
            or (self.stderrs is not None and self.stderrs.shape != shape)
        ):
            raise DomainError(
                f"depths, losses and stderrs must have one common length, got shapes {shape} and {self.losses.shape}"
                + ("" if self.stderrs is None else f" and {self.stderrs.shape}")
            )
        if shape[0] > MAX_ROWS:
            raise DomainError(
                f"a fit takes at most {MAX_ROWS} rows, got {shape[0]}: average runs of equal depth first"
            )
        if not self.rows:
            object.__setattr__(self, "rows", tuple(f"row {i}" for i in range(1, shape[0] + 1)))
        for name, array in (("depth", self.depths), ("loss", self.losses), ("stderr", self.stderrs)):
            if array is not None:
                self._refuse(name, array)

    def _refuse(self, name: str, array: FloatArray) -> None:
        bad = ~((array >= 1 / LARGEST) & (array <= LARGEST))
        if bad.any():
            found = [f"{self.rows[i]} has {array[i]:.6g}" for i in np.flatnonzero(bad)]
            raise DomainError(f"each {name} must be a finite number > 0, from 1e-100 to 1e100: {listed(found)}")

    @property
    def distinct_depths(self) -> FloatArray:
        """The depths without repetition, increasing."""
        return np.unique(self.depths)

    def from_depth(self, smallest: float) -> MeasuredLosses:
        """The rows of depth ``smallest`` and above."""
        return self.select(self.depths >= smallest)

    def select(self, kept: npt.NDArray[np.bool_]) -> MeasuredLosses:
        """The rows where ``kept`` (n,) is true."""
        stderrs = None if self.stderrs is None else self.stderrs[kept]
        rows = tuple(row for row, keep in zip(self.rows, kept, strict=True) if keep)
        return MeasuredLosses(self.depths[kept], self.losses[kept], stderrs, rows)

    def below(self, floor: float) -> MeasuredLosses:
        r"""Gaps :math:`L_0 - C_L` between ``floor`` and these losses, all of them > 0. Source: depth (92)."""
        gaps = floor - self.losses
        bad = gaps <= 0
        if bad.any():
            found = [f"{self.rows[i]} has {float(self.losses[i])!r}" for i in np.flatnonzero(bad)]
            raise DomainError(f"the gap to the floor {floor!r} must be > 0 at all depths: {listed(found)}")
        return MeasuredLosses(self.depths, gaps, self.stderrs, self.rows, self.notes)

    def batch(self) -> Batch:
        """One least-squares problem in logarithms; weights are inverse squares of relative errors, 1 on average."""
        roots = np.ones_like(self.losses)
        if self.stderrs is not None:
            roots = self.losses / self.stderrs
            roots = roots / np.sqrt(np.mean(roots**2))
        return Batch(np.log(self.depths), np.log(self.losses)[None], roots)


@dataclass(frozen=True, slots=True)
class LossLaw:
    r"""A law :math:`L_0 + c L^{-\alpha}`, or one of its special cases.

    with_floor: whether L_0 >= 0 is fitted or zero. fixed_exponent: α where it is not fitted. gap_floor: where given,
    the data are shared errors C_L and the law is :math:`L_0 - C_L = c L^{-\alpha}` with this L_0, which has no floor of
    its own. Source: depth (88), (92).
    """

    with_floor: bool = True
    fixed_exponent: float | None = None
    gap_floor: float | None = None

    def __post_init__(self) -> None:
        if self.fixed_exponent is not None:
            value = as_real("fixed_exponent", self.fixed_exponent, 0, LARGEST, open_low=True)
            object.__setattr__(self, "fixed_exponent", value)
        if self.gap_floor is not None:
            object.__setattr__(self, "gap_floor", as_real("gap", self.gap_floor, 0, LARGEST, open_low=True))
            object.__setattr__(self, "with_floor", False)

    @property
    def free(self) -> tuple[int, ...]:
        """The parameters that are fitted."""
        free = [FLOOR] if self.with_floor else []
        return (*free, COEFFICIENT) if self.fixed_exponent is not None else (*free, COEFFICIENT, EXPONENT)

    @property
    def held(self) -> tuple[int, ...]:
        """The parameters that are not."""
        return tuple(i for i in (FLOOR, COEFFICIENT, EXPONENT) if i not in self.free)

    @property
    def formula(self) -> str:
        """The law in words."""
        exponent = "exponent" if self.fixed_exponent is None else f"{self.fixed_exponent:g}"
        decay = f"coefficient * depth^-{exponent}"
        if self.gap_floor is not None:
            return f"{self.gap_floor!r} - loss = {decay}"
        return f"loss = floor + {decay}" if self.with_floor else f"loss = {decay}"

    def fit(self, batch: Batch) -> Solution:
        """Least squares in logarithms, global. Source: depth (89), (93)."""
        exponent = None if self.fixed_exponent is None else np.full(len(batch.logs), self.fixed_exponent)
        if self.with_floor:
            return fit_floor(batch) if exponent is None else hold_exponent(batch, exponent)
        return fit_line(batch, exponent=exponent)
