"""Figures of the commands ``exponent`` and ``floor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from validate.figures.comparison import PAPER, SAMPLED, THEORY, TRAINED, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from validate.mean_field import MeanFieldFloor


def exponent_plot(prediction: dict[str, Any]) -> Figure:
    """Risk against depth for the two families, on logarithmic axes; a risk of zero cannot be drawn and is counted."""
    figure, axes = new_figure(6.4, 4.4)
    depths = np.array(prediction["depths"], dtype=float)
    curves = (
        ("risk_constrained", "repeated update", PAPER, "o-"),
        ("risk_constrained_best_step", "repeated update, best step", SAMPLED, "s-"),
        ("risk_free", "free polynomial", THEORY, "^-"),
        ("risk_free_continuum", "free polynomial, continuum", TRAINED, "--"),
    )
    hidden = 0
    for key, label, colour, style in curves:
        if prediction[key] is None:  # no continuum
            continue
        risks = np.array(prediction[key])
        visible = risks > 0
        hidden += int((~visible).sum())
        axes.plot(depths[visible], risks[visible], style, color=colour, ms=4, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("depth L")
    axes.set_ylabel("risk (mean squared error on labels)")
    power_law = prediction["input_exponent"] is not None
    title = "spectrum of one's own"
    if power_law:
        title = f"a = {prediction['input_exponent']:g}, b = {prediction['teacher_exponent']:g}"
    size = "infinite" if prediction["dim"] is None else prediction["dim"]
    note = f"; not shown: {hidden} of zero risk" if hidden else ""
    axes.set_title(f"{title}, dim {size}{note}", fontsize=9)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def floor_plot(prediction: dict[str, Any]) -> Figure:
    """Floor against degree with 95 % intervals."""
    figure, axes = new_figure(6.4, 4.0)
    rows = prediction["floors_by_degree"]
    degrees = [row["degree"] for row in rows]
    values = np.array([row["value"] for row in rows])
    widths = np.array([row["interval"]["high"] - row["value"] for row in rows])
    axes.errorbar(degrees, values, widths, fmt="o", color=SAMPLED, capsize=3, label=prediction["method"])
    axes.set_xlabel("degree of the covariance polynomial")
    axes.set_ylabel("loss floor")
    axes.set_xticks(degrees)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def mean_field_plot(found: MeanFieldFloor) -> Figure:
    """Loss of the best law at finite depth above the mean-field floor, on logarithmic axes."""
    figure, axes = new_figure(6.4, 4.2)
    depths = np.array(list(found.best_at_depth), dtype=float)
    losses = np.array(list(found.best_at_depth.values()))
    axes.plot(depths, losses, "o-", color=SAMPLED, ms=4, label="best law of L independent layers")
    axes.plot(depths, found.risk(depths), "--", color=THEORY, label="best law of infinite depth: R + (A - C)/L")
    interval = found.floor.interval()
    axes.axhspan(interval.low, interval.high, color=PAPER, alpha=0.4, lw=0, label="mean-field floor, 95 %")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("depth L")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
