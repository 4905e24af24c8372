"""Rows of trained models: losses between their bounds, fitted laws, and statements turned into checks."""

from __future__ import annotations

from dataclasses import dataclass

from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import Estimate
from validate.mean_field import MeanFieldFloor
from validate.tables.comparison import Agreement, Row
from validate.trained.fits import TrainedFit, fit_losses_by_depth
from validate.trained.softmax import DepthSeries

# Our own numbers are called inconsistent beyond this z: some hundred comparisons at 1e-3 in all.
CONSISTENT_Z = 4.5
# Training is not complete after finitely many steps: two starts differ by some tenths of a per cent.
TRAINING_TOLERANCE = 0.01
# A printed floor, an extrapolation without an error, agrees with a floor of ours within this share.
FLOOR_TOLERANCE = 0.02


def setting_of(task: TopKTask, depth: int | None = None) -> dict[str, float]:
    """A row's parameters: target, exponents and, where given, depth."""
    spectrum = task.spectrum
    assert isinstance(spectrum, PowerLawSpectrum)
    setting: dict[str, float] = {
        "k": task.top_k,
        "a": spectrum.input_exponent,
        "b": spectrum.teacher_exponent,
    }
    return setting if depth is None else {**setting, "L": depth}


def loss_rows(series: DepthSeries, found: MeanFieldFloor) -> list[Row]:
    """The trained loss at each depth between the mean-field floor and the best law of independent layers."""
    return [
        loss_row(series.task, depth, loss, found)
        for depth, loss in zip(series.depths, series.estimates(), strict=True)
    ]


def loss_row(task: TopKTask, depth: int, loss: Estimate, found: MeanFieldFloor) -> Row:
    """One trained loss. Below the floor it contradicts us; above independent layers training is not at its optimum."""
    floor = found.floor
    above = loss.z_score(floor.value, floor.stderr) >= -CONSISTENT_Z
    independent = found.best_at_depth.get(depth)
    text = f"{floor.value:.5g} .. " + ("" if independent is None else f"{independent:.5g}")
    allowed = CONSISTENT_Z * (loss.stderr**2 + floor.stderr**2) ** 0.5
    reached = independent is None or loss.value <= independent * (1 + TRAINING_TOLERANCE) + allowed
    return Row(
        setting_of(task, depth),
        "loss R",
        None,
        theory=independent,
        theory_text=f"bounds {text}",
        trained=loss,
        agreement=Agreement.BRACKETED if above and reached else Agreement.OUTSIDE,
        consistent=above,
        remark="bounds: mean-field floor, best law of independent layers"
        if reached
        else "the model has not reached the best law of independent layers: it needs more steps or another start",
    )


def single_layer_row(series: DepthSeries, found: MeanFieldFloor) -> Row:
    """One trained layer beside the best single softmax, which is its optimum."""
    loss, single = series.estimates()[0], found.single_layer
    equal = (
        abs(loss.value / single.value - 1) <= TRAINING_TOLERANCE + 2 * (loss.stderr + single.stderr) / single.value
    )
    return Row(
        setting_of(series.task, 1),
        "one layer, loss R",
        None,
        theory_text="best single softmax",
        monte_carlo=single,
        trained=loss,
        agreement=Agreement.AGREES if equal else Agreement.DIFFERS,
        consistent=loss.z_score(single.value, single.stderr) >= -CONSISTENT_Z,
        remark="the best single softmax is found without training; training may stop 1 % above it",
    )


@dataclass(frozen=True, slots=True)
class Printed:
    """What the paper prints of a fitted law; ``None`` where it does not."""

    floor: float | None = None
    exponent: float | None = None
    exponent_stderr: float = 0.0


def fit_rows(series: DepthSeries, found: MeanFieldFloor, printed: Printed) -> list[Row]:
    """Floor and exponent fitted to the trained losses beside the printed ones.

    Layers drawn independently from the law of the floor have the exponent 1 exactly. Source: depth (88), (62).
    """
    fit = fit_losses_by_depth(series.depths, series.estimates())
    return [_floor_row(series, found, printed, fit), _exponent_row(series, printed, fit)]


def _floor_row(series: DepthSeries, found: MeanFieldFloor, printed: Printed, fit: TrainedFit) -> Row:
    floor = fit.floor
    if floor is None or not fit.identified or printed.floor is None:
        agreement = Agreement.UNTESTED
    else:
        allowed = FLOOR_TOLERANCE + 2 * floor.stderr / printed.floor
        agreement = Agreement.AGREES if abs(floor.value / printed.floor - 1) <= allowed else Agreement.DIFFERS
    return Row(
        setting_of(series.task),
        "floor fitted to trained losses",
        printed.floor,
        theory=found.floor.value,
        theory_text="(mean field)",
        trained=floor,
        agreement=agreement,
        remark=fit.reason,
    )


def _exponent_row(series: DepthSeries, printed: Printed, fit: TrainedFit) -> Row:
    agreement = Agreement.UNTESTED
    if printed.exponent is not None:
        agreement = fit.agreement(printed.exponent, printed.exponent_stderr)
    return Row(
        setting_of(series.task),
        f"exponent, depth {series.depths[0]}-{series.depths[-1]}",
        printed.exponent,
        printed.exponent_stderr if printed.exponent is not None else None,
        theory=1.0,
        theory_text="(deep independent layers)",
        trained=fit.exponent,
        agreement=agreement,
        remark=fit.reason,
    )


def check_row(
    setting: dict[str, float], quantity: str, statement: str, measured: Estimate | None, holds: bool, remark: str = ""
) -> Row:
    """A statement of the text that was turned into an inequality for a measured quantity."""
    return Row(
        setting,
        quantity,
        None,
        theory_text=statement,
        trained=measured,
        agreement=Agreement.AGREES if holds else Agreement.DIFFERS,
        remark=remark,
    )
