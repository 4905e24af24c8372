"""Losses and their decomposition over depth: checks of convergence and panels, for softmax models of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from theory.results import FloatArray
from validate.figures.panels import Curve, Panel, estimate_curve
from validate.mean_field import MeanFieldFloor
from validate.tables.comparison import Agreement, Row
from validate.trained.rows import check_row, setting_of
from validate.trained.softmax import DepthSeries, ratio_of_means

# A - C counts as converged where the last doubling of the depth changes it by less than this: trained models scatter
# by some per cent in it, and a quantity that grows like log L or L would change by more at the depths trained.
SETTLED = 0.15
# A ratio of steps with a larger error says nothing.
UNRESOLVED = 0.5


def improvement_row(series: DepthSeries) -> Row:
    """Whether the last doubling of depth still lowers the loss, on common contexts."""
    ratio = series.ratio(-1, -2)
    depths = series.depths
    return check_row(
        setting_of(series.task, depths[-1]),
        f"R at depth {depths[-1]} over R at depth {depths[-2]}",
        "< 1: depth helps",
        ratio,
        ratio.value + 2 * ratio.stderr < 1,
        "" if ratio.value + 2 * ratio.stderr < 1 else "the deepest model is not better than the one before",
    )


def convergence_rows(series: DepthSeries) -> list[Row]:
    """Whether C and A - C tend to constants: the steps of C shrink, and A - C has settled. Source: depth (18)."""
    shared, disagreement = series.chunks("shared_error"), series.estimates("disagreement")
    depths = series.depths
    rows = []
    if len(shared) > 2:
        last, before = (_difference(shared[i], shared[i - 1]) for i in (-1, -2))
        share = ratio_of_means(last, before, series.results[0])
        lost = share.stderr > UNRESOLVED
        holds = abs(share.value) < 1
        remark = "the shared error has not begun to settle at these depths"
        row = check_row(
            setting_of(series.task, depths[-1]),
            "C: last step of a doubling over the one before",
            "< 1: converges (1/2 for 1/L)",
            share,
            holds,
            "" if holds else remark,
        )
        if lost:
            row = replace(row, agreement=Agreement.UNTESTED, remark="the steps are lost in the error")
        rows.append(row)
    if len(disagreement) > 1:
        ratio = series.ratio(-1, -2, "disagreement")
        holds = abs(ratio.value - 1) < SETTLED
        rows.append(
            check_row(
                setting_of(series.task, depths[-1]),
                "A - C: last doubling of the depth",
                f"1 within {100 * SETTLED:.0f} %",
                ratio,
                holds,
                "" if holds else "the disagreement has not settled at these depths",
            )
        )
    return rows


def _difference(rows: FloatArray, others: FloatArray) -> FloatArray:
    """Difference member by member, of those that both have."""
    members = min(len(rows), len(others))
    return rows[:members] - others[:members]


def label_of(series: DepthSeries) -> str:
    """The spectrum as a legend entry."""
    setting = setting_of(series.task)
    return f"({setting['a']:g}, {setting['b']:g})"


def risk_panel(title: str, entries: Sequence[tuple[DepthSeries, MeanFieldFloor | None]]) -> Panel:
    """Trained losses over depth with the losses of independent layers (dotted) and mean-field floors (dashed)."""
    curves: list[Curve] = []
    lines = []
    for colour, (series, found) in enumerate(entries):
        curves.append(estimate_curve(label_of(series), series.depths, series.estimates(), colour))
        if found is not None:
            known = [depth for depth in series.depths if depth in found.best_at_depth]
            curves.append(Curve("", known, [found.best_at_depth[d] for d in known], ":", colour))
            lines.append((found.floor.value, "", colour))
    return Panel(title, "loss R", curves, log_y=False, lines=lines)


def excess_panel(title: str, entries: Sequence[tuple[DepthSeries, MeanFieldFloor]]) -> Panel:
    """What losses lie above the mean-field floor, relative to it, trained and of independent layers (dotted)."""
    curves: list[Curve] = []
    for colour, (series, found) in enumerate(entries):
        floor, losses = found.floor.value, series.estimates()
        errors = [2 * loss.stderr / floor for loss in losses]
        excess = [loss.value / floor - 1 for loss in losses]
        curves.append(Curve(label_of(series), series.depths, excess, "o-", colour, errors))
        known = [depth for depth in series.depths if depth in found.best_at_depth]
        curves.append(Curve("", known, [found.best_at_depth[d] / floor - 1 for d in known], ":", colour))
    return Panel(title, "R over mean-field floor, less one", curves)


def decomposition_panels(titles: tuple[str, str], all_series: Sequence[DepthSeries]) -> list[Panel]:
    """Shared error and disagreement over depth, from two layers on."""
    names = (("shared_error", "shared error C"), ("disagreement", "disagreement A - C"))
    return [
        Panel(
            title,
            label,
            [
                estimate_curve(label_of(series), series.depths[-len(found) :], found, colour)
                for colour, series in enumerate(all_series)
                if (found := series.estimates(name))
            ],
        )
        for title, (name, label) in zip(titles, names, strict=True)
    ]
