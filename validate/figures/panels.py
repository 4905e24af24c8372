"""Figures of several panels with curves over depth, step, mode or percentile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from theory.results import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2b7bb3", "#b3432b", "#3a8f4d", "#8a5aa8", "#c98a1b", "#22313f", "#4fb0ae", "#a8557b")
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 3.3
COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve. style: of matplotlib; errors: half widths of whiskers; colour: number in `COLOURS`."""

    label: str
    x: npt.ArrayLike
    y: npt.ArrayLike
    style: str = "o-"
    colour: int = 0
    errors: npt.ArrayLike | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. lines: horizontal references as (value, label, colour)."""

    title: str
    ylabel: str
    curves: Sequence[Curve]
    xlabel: str = "depth"
    log_x: bool = True
    log_y: bool = True
    lines: Sequence[tuple[float, str, int]] = field(default=())


def estimate_curve(
    label: str, x: npt.ArrayLike, estimates: Sequence[Estimate], colour: int = 0, style: str = "o-"
) -> Curve:
    """A curve of estimates with whiskers of two standard errors."""
    values, errors = [e.value for e in estimates], [2 * e.stderr for e in estimates]
    return Curve(label, x, values, style, colour, errors)


def panel_figure(panels: Sequence[Panel]) -> Figure:
    """Draw the panels side by side, three to a row, four as a square."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attnlaws", "font.size": 9})
    columns = 2 if len(panels) == 4 else min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows), squeeze=False, layout="constrained"
    )
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    hidden = 0
    for curve in panel.curves:
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        shown = np.isfinite(y) & ((y > 0) | (not panel.log_y))
        hidden += int((~shown).sum())
        colour = COLOURS[curve.colour % len(COLOURS)]
        if curve.errors is None:
            axes.plot(x[shown], y[shown], curve.style, color=colour, ms=3.5, lw=1.2, label=curve.label or None)
            continue
        errors = np.asarray(curve.errors, dtype=float)[shown]
        # A whisker that would reach below zero ends inside a logarithmic axis.
        low = np.minimum(errors, 0.9 * y[shown]) if panel.log_y else errors
        axes.errorbar(
            x[shown], y[shown], [low, errors], fmt=curve.style, color=colour, ms=3.5, lw=1.2, capsize=1.5,
            label=curve.label or None,
        )  # fmt: skip
    for value, label, number in panel.lines:
        axes.axhline(value, color=COLOURS[number % len(COLOURS)], lw=0.9, ls="--", label=label or None)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    if any(curve.label for curve in panel.curves) or any(label for _, label, _ in panel.lines):
        axes.legend(fontsize=7, framealpha=0.7, edgecolor="none")
    if hidden:
        note = f"{hidden} values at or below zero are not shown"
        axes.annotate(note, (0.02, 0.02), xycoords="axes fraction", fontsize=7)
