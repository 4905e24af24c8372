"""Figures that set a table's printed numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from theory.results import FloatArray
from validate.tables.comparison import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER, THEORY, SAMPLED, TRAINED = "#b3432b", "#22313f", "#2b7bb3", "#3a8f4d"


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure that needs no display."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    # Text stays text, and identifiers do not change from run to run.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attnlaws", "font.size": 9})
    return plt.subplots(figsize=(width, height))


def label_of(row: Row) -> str:
    """The row's parameters as a tick label."""
    top = f"top {row.setting['k']:g}\n" if "k" in row.setting else ""
    return f"{top}({row.setting['a']:g}, {row.setting['b']:g})"


def exponent_figure(rows: Sequence[Row]) -> Figure:
    """Exponents of depth Table 2: the bracket of exact finite-dimensional exponents and the measured ones."""
    figure, axes = new_figure(7.2, 4.2)
    repeated = [row for row in rows if row.quantity.startswith("repeated update, depth")]
    free = [row for row in rows if row.quantity.startswith("free polynomial, depth")]
    measured = [row for row in rows if row.quantity == "trained model"]
    x = np.arange(len(measured))
    low = np.array([row.theory for row in repeated], dtype=float)
    high = np.array([row.theory for row in free], dtype=float)
    axes.vlines(x, low, high, color=THEORY, lw=6, alpha=0.25, label="exact, dim 128, depth 1-8: repeated to free")
    for shift, family in ((-0.12, repeated), (-0.12, free)):
        _errorbar(axes, x + shift, family, "Monte Carlo" if family is repeated else "")
    axes.plot(x, _printed(measured), "o", color=PAPER, label="paper, trained")
    _trained_exponents(axes, rows, measured)
    for name, marker, title in (("constrained", "_", "paper's ζ and 2ζ"), ("free", "_", "")):
        quantity = "repeated update, deep limit" if name == "constrained" else "free polynomial, deep limit"
        values = _printed([row for row in rows if row.quantity == quantity])
        axes.plot(x + 0.15, values, marker, color=PAPER, ms=14, mew=1.5, label=title or None)
    axes.set_xticks(x, [label_of(row) for row in measured])
    axes.set_xlabel("(a, b)")
    axes.set_ylabel("depth exponent")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _trained_exponents(axes: Axes, rows: Sequence[Row], measured: Sequence[Row]) -> None:
    """Exponents of models trained here over depth 1-8: open for few steps, filled for many."""
    trained = [row for row in rows if row.quantity.startswith("trained here, depth 1-8,") and row.trained is not None]
    position = {label_of(row): i for i, row in enumerate(measured)}
    budgets = list(dict.fromkeys(row.quantity.rsplit(", ", 1)[1] for row in trained))
    for number, budget in enumerate(budgets):
        own = [row for row in trained if row.quantity.endswith(f", {budget}")]
        face = TRAINED if number == len(budgets) - 1 else "none"
        values = [row.trained.value for row in own if row.trained is not None]
        axes.plot([position[label_of(row)] + 0.12 for row in own], values, "^", mfc=face, color=TRAINED,
                  label=f"trained here, {budget}")  # fmt: skip


def floor_figure(rows: Sequence[Row], predicted: str, measured: str) -> Figure:
    """Floors relative to ours: printed predictions with their errors, our Monte Carlo, and trained losses."""
    figure, axes = new_figure(9.0, 4.2)
    first = [row for row in rows if row.quantity == predicted]
    second = [row for row in rows if row.quantity == measured]
    x = np.arange(len(first))
    ours = np.array([row.theory if row.theory is not None else _value(row) for row in first])
    axes.axhline(0, color=THEORY, lw=1)
    _errorbar(axes, x - 0.15, first, "ours, Monte Carlo (95 %)", ours)
    printed = np.array([row.paper for row in first], dtype=float)
    errors = np.array([2 * (row.paper_stderr or 0.0) for row in first])
    axes.errorbar(
        x,
        100 * (printed / ours - 1),
        100 * errors / ours,
        fmt="s",
        color=PAPER,
        ms=4,
        label="paper, predicted (2 s.e.)",
    )
    losses = np.array([row.paper for row in second], dtype=float)
    axes.plot(x + 0.15, 100 * (losses / ours - 1), "^", color=TRAINED, label="paper, trained")
    axes.set_xticks(x, [label_of(row) for row in first])
    axes.set_ylabel("difference from our floor, %")
    axes.legend(frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def attention_figure(rows: Sequence[Row]) -> Figure:
    """Floors of linear attention, ours and printed, over the trained and printed losses of softmax attention."""
    figure, axes = new_figure(7.2, 4.2)
    linear = [row for row in rows if row.quantity == "linear attention, floor"]
    x = np.arange(len(linear))
    positions = {label_of(row): i for i, row in enumerate(linear)}
    ours = [row.theory if row.theory is not None else _value(row) for row in linear]
    axes.plot(x, ours, "_", color=THEORY, ms=22, mew=2, label="linear, our floor")
    axes.plot(x, _printed(linear), "o", mfc="none", color=PAPER, label="linear, paper")
    softmax = [row for row in rows if row.quantity == "softmax attention, floor"]
    axes.plot([positions[label_of(row)] for row in softmax], [_value(row) for row in softmax], "_", color=SAMPLED,
              ms=22, mew=2, label="softmax, mean-field floor")  # fmt: skip
    axes.plot([positions[label_of(row)] for row in softmax], _printed(softmax), "s", mfc="none", color=PAPER,
              label="softmax, paper (infinite depth)")  # fmt: skip
    depths = [row for row in rows if row.trained is not None and "L" in row.setting]
    for i, row in enumerate(depths):
        assert row.trained is not None
        axes.errorbar(
            positions[label_of(row)] + 0.12, row.trained.value, 2 * row.trained.stderr, fmt=".", color=TRAINED,
            label="softmax, trained here, one layer and deepest" if i == 0 else None,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(x, [label_of(row) for row in linear])
    axes.set_xlabel("(a, b)")
    axes.set_ylabel("loss floor")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def mean_field_figure(rows: Sequence[Row]) -> Figure:
    """Printed floors of softmax attention relative to the mean-field floors with their intervals."""
    figure, axes = new_figure(7.6, 4.0)
    x = np.arange(len(rows))
    ours = np.array([_value(row) for row in rows])
    axes.axhline(0, color=THEORY, lw=1)
    _errorbar(axes, x, rows, "mean-field floor (95 %)", ours)
    axes.plot(x, 100 * (_printed(rows) / ours - 1), "s", color=PAPER, label="paper, extrapolated")
    axes.set_xticks(x, [label_of(row) for row in rows])
    axes.set_ylabel("difference from the mean-field floor, %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _printed(rows: Sequence[Row]) -> FloatArray:
    """The printed numbers of rows that have one."""
    return np.array([row.paper for row in rows], dtype=float)


def _value(row: Row) -> float:
    if row.monte_carlo is None:
        raise AssertionError(f"the row {row.setting} has neither a theory value nor an estimate")
    return row.monte_carlo.value


def _errorbar(
    axes: Axes, x: np.ndarray, rows: Sequence[Row], label: str, relative_to: np.ndarray | None = None
) -> None:
    """Estimates with their 95 % intervals, as values or as differences in per cent."""
    kept = [(i, row.monte_carlo) for i, row in enumerate(rows) if row.monte_carlo is not None]
    values = np.array([estimate.value for _, estimate in kept])
    widths = np.array([estimate.interval().high - estimate.value for _, estimate in kept])
    index = [i for i, _ in kept]
    if relative_to is not None:
        widths = 100 * widths / relative_to[index]
        values = 100 * (values / relative_to[index] - 1)
    axes.errorbar(x[index], values, widths, fmt=".", color=SAMPLED, capsize=2, label=label or None)
