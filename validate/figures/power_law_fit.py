"""Figure of the command ``fit``: losses with the fitted law, the same above the floor, and residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from validate.figures.comparison import PAPER, SAMPLED, THEORY, new_figure
from validate.power_law_fit import PowerLawFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_POINTS = 200
# The curve goes this far beyond the data on both sides, as a factor of depth.
MARGIN = 1.3


def fit_plot(fit: PowerLawFit, depth_name: str = "depth L", loss_name: str = "loss") -> Figure:
    """Three panels on a common logarithmic depth axis; points at or below the floor cannot be drawn and are counted."""
    figure, axes = new_figure(9.0, 4.6)
    axes.remove()
    panels = figure.subplot_mosaic([["losses", "decay"], ["residuals", "decay"]], height_ratios=[2.2, 1])
    panels["residuals"].sharex(panels["losses"])
    law_and_data(panels["losses"], fit)
    panels["losses"].set_ylabel(loss_name if fit.law.gap_floor is None else "gap to the floor")
    above_floor(panels["decay"], fit)
    residual_panel(panels["residuals"], fit)
    for name in ("decay", "residuals"):
        panels[name].set_xlabel(depth_name)
    for panel in panels.values():
        panel.set_xscale("log")
        panel.spines[["top", "right"]].set_visible(False)
    sentence = "" if fit.verdict.identifiable else "exponent not identified: "
    exponent = f"α = {fit.exponent.value:.4g}"
    if fit.exponent.profile is not None:
        high = "open" if np.isinf(fit.exponent.profile.high) else f"{fit.exponent.profile.high:.3g}"
        exponent += f" ({fit.exponent.profile.low:.3g} to {high})"
    figure.suptitle(f"{sentence}{exponent}, floor {fit.floor.value:.4g}", fontsize=9)
    figure.tight_layout()
    return figure


def curve_depths(fit: PowerLawFit) -> np.ndarray:
    """Depths at which the law is drawn."""
    depths = fit.data.depths
    return np.geomspace(depths.min() / MARGIN, depths.max() * MARGIN, CURVE_POINTS)


def law_and_data(axes: Axes, fit: PowerLawFit) -> None:
    """Losses, the law and its band on logarithmic axes."""
    x = curve_depths(fit)
    band = fit.band(x)
    if band is not None:
        axes.fill_between(x, *band, color=SAMPLED, alpha=0.25, lw=0, label=f"{100 * fit.level:g} % band")
    axes.plot(x, fit.predict(x), color=THEORY, lw=1.2, label="fit")
    errors = None if fit.data.stderrs is None else fit.data.stderrs
    axes.errorbar(fit.data.depths, fit.data.losses, errors, fmt="o", ms=4, color=PAPER, label="measured")
    axes.set_yscale("log")
    plain_ticks(axes)
    axes.legend(frameon=False)


def plain_ticks(axes: Axes) -> None:
    """Plain numbers on a logarithmic loss axis of less than a decade, where powers of ten would say nothing."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(MaxNLocator(6) if high < 10 * low else LogLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    if high < 10 * low:
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(LogLocator(subs=()))


def above_floor(axes: Axes, fit: PowerLawFit) -> None:
    """What decays: losses minus the fitted floor, a straight line on logarithmic axes."""
    floor = float(fit.solution.values[0, 0])
    x = curve_depths(fit)
    decay = fit.data.losses - floor
    visible = decay > 0
    hidden = int((~visible).sum())
    axes.plot(x, fit.predict(x) - floor, color=THEORY, lw=1.2)
    axes.plot(fit.data.depths[visible], decay[visible], "o", ms=4, color=PAPER)
    axes.set_yscale("log")
    axes.set_ylabel("loss - floor")
    note = f"not shown: {hidden} at or below the floor" if hidden else "all points shown"
    axes.set_title(note, fontsize=8)


def residual_panel(axes: Axes, fit: PowerLawFit) -> None:
    """Relative distances of the losses from the law, in per cent."""
    residuals = 100 * (fit.data.losses / fit.predict(fit.data.depths) - 1)
    axes.axhline(0, color=THEORY, lw=0.8)
    axes.plot(fit.data.depths, residuals, "o", ms=4, color=PAPER)
    axes.set_ylabel("residual, %")
