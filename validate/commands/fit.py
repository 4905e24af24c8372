"""The command ``fit``: a power law through the user's measured losses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from validate.commands.tools import (
    Number,
    busy,
    json_option,
    plot_option,
    print_json,
    print_lines,
    print_table,
    write_plot,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from theory.results import Interval
    from validate.fits.comparison import RepeatedRuns, ScanStep, Score
    from validate.power_law_fit import PowerLawFit


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--x", help="Column of depths; guessed where its name leaves no doubt.")
@click.option("--y", help="Column of losses; guessed likewise.")
@click.option("--stderr", help="Column of standard errors of the losses, which become weights.")
@click.option("--no-floor", is_flag=True, help="Pure power law, floor 0.")
@click.option("--exponent-one", is_flag=True, help="Hold the exponent at one.")
@click.option("--gap", type=Number(), help="Fit this floor minus the column, a pure power law (depth (92)).")
@click.option("--level", type=Number(), default=0.95, show_default=True, help="Level of all intervals.")
@click.option("--draws", type=Number(), default=2000, show_default=True, help="Bootstrap draws; 0 for none.")
@click.option("--seed", type=Number(), default=0, show_default=True, help="Seed of the bootstrap.")
@plot_option
@json_option
def fit(
    file: Path,
    x: str | None,
    y: str | None,
    stderr: str | None,
    no_floor: bool,
    exponent_one: bool,
    gap: float | None,
    level: float,
    draws: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Power-law fit of measured losses: floor + coefficient * depth^-exponent, with errors and a verdict.

    FILE is a CSV (any usual delimiter) or Parquet table with a row per depth, or per run. The verdict says whether the
    depths and the scatter of the losses determine the exponent at all.

    Example:  attnlaws fit losses.csv --x depth --y loss --plot fit.png
    """
    from validate.fits.comparison import compare_laws, depth_scan, repeated_runs
    from validate.power_law_fit import LossLaw, fit_losses, read_losses

    if gap is not None and no_floor:
        raise click.UsageError("--gap has no floor of its own: leave --no-floor out")
    data = read_losses(file, x, y, stderr)
    law = LossLaw(not no_floor, 1.0 if exponent_one else None, gap)
    with busy("fitting"):
        found = fit_losses(data, law, level=level, draws=draws, seed=seed)
        scores = compare_laws(data, law)
        steps = depth_scan(data, law, level) if not exponent_one else []
        runs = repeated_runs(data, law)
    if plot is not None:
        from validate.figures.power_law_fit import fit_plot

        write_plot(lambda: fit_plot(found), plot)
    if as_json:
        print_json(fit_json(file, found, scores, steps, runs))
        return
    show_fit(file, found, scores, steps, runs)


def fit_json(
    file: Path, found: PowerLawFit, scores: list[Score], steps: list[ScanStep], runs: RepeatedRuns | None
) -> dict[str, Any]:
    """All that the command found, for JSON."""
    return {
        "file": str(file),
        **found.to_json(),
        "repeated_runs": None if runs is None else runs.to_json(),
        "models": [score.to_json() for score in scores],
        "scan": [step.to_json() for step in steps],
    }


def interval_text(interval: Interval | None) -> str:
    """An interval for people."""
    if interval is None:
        return "-"
    high = f"{interval.high:.5g}" if interval.high < float("inf") else "open"
    return f"{interval.low:.5g} to {high}"


def show_fit(
    file: Path, found: PowerLawFit, scores: list[Score], steps: list[ScanStep], runs: RepeatedRuns | None
) -> None:
    """Tables for people."""
    data = found.data
    print_lines(
        f"{file}: {data.losses.size} rows at {data.distinct_depths.size} depths",
        f"  law       {found.law.formula}",
        f"  R^2       {found.r2:.6g} (of logarithms)",
        "  residual  " + residual_text(found),
        f"  exponent  {'identified' if found.verdict.identifiable else 'NOT IDENTIFIED'}: {found.verdict.reason}",
    )
    print_table(parameter_table(found))
    for name in ("floor", "coefficient", "exponent"):
        reason = getattr(found, name).reason
        if reason is not None:
            print_lines(f"  {name}: {reason}")
    if runs is not None:
        test = "" if runs.p_value is None else f"; the law misses the means with p = {runs.p_value:.3g}"
        print_lines(f"  repeated runs scatter by {100 * runs.stderr:.3g} % ({runs.degrees} degrees of freedom){test}")
    print_lines(*(f"  note: {note}" for note in found.notes))
    print_table(score_table(scores))
    if len(steps) > 1:
        print_table(scan_table(steps, found.level))


def residual_text(found: PowerLawFit) -> str:
    """The size of the residuals in words."""
    if found.residual_stderr is None:
        return "unknown: no degrees of freedom"
    weight = " for a loss of average weight" if found.data.stderrs is not None else ""
    return f"{100 * found.residual_stderr:.3g} %{weight}, {found.degrees} degrees of freedom"


def parameter_table(found: PowerLawFit) -> RichTable:
    """Values, standard errors and three kinds of intervals."""
    from rich.table import Table

    table = Table(title=f"{100 * found.level:g} % intervals; profile is the one to quote")
    for name in ("", "value", "standard error", "Student", "profile", "bootstrap"):
        table.add_column(name, justify="right")
    for name in ("floor", "coefficient", "exponent"):
        number = getattr(found, name)
        table.add_row(
            name,
            "-" if number.value is None else f"{number.value:.7g}",
            "-" if number.stderr is None else f"{number.stderr:.2g}",
            *(interval_text(getattr(number, kind)) for kind in ("student", "profile", "bootstrap")),
        )
    return table


def score_table(scores: list[Score]) -> RichTable:
    """Laws by AICc."""
    from rich.table import Table

    table = Table(title="laws compared (AICc above the lowest; 2 is little, 10 decides)")
    for name in ("law", "exponent", "floor", "AICc"):
        table.add_column(name, justify="left" if name == "law" else "right")
    for score in scores:
        aicc = f"+{score.delta:.2f}" if score.delta is not None else f"- ({score.reason})"
        table.add_row(score.law.formula, f"{score.exponent:.5g}", f"{score.floor:.5g}", aicc)
    return table


def scan_table(steps: list[ScanStep], level: float) -> RichTable:
    """The exponent as small depths are dropped."""
    from rich.table import Table

    table = Table(title="from the smallest depth on")
    for name in (
        "depth",
        "depths",
        "exponent",
        "standard error",
        f"{100 * level:g} % profile",
        "floor",
        "identified",
    ):
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(
            f"{step.smallest:g}",
            str(step.depths),
            f"{step.exponent.value:.5g}",
            "-" if step.exponent.stderr is None else f"{step.exponent.stderr:.2g}",
            interval_text(step.exponent.profile),
            "-" if step.floor is None else f"{step.floor:.5g}",
            "yes" if step.identifiable else "no",
        )
    return table
