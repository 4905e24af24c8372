"""A comparison table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table as RichTable

from theory.results import Estimate
from validate.tables.comparison import Row, Table

# Rows named in full in the summary of differences.
MAX_PLACES = 3
NUMBERS = ("paper", "theory", "Monte Carlo [95 %]", "trained")
CONTRADICTION = "OUR NUMBERS DISAGREE"
UNKNOWN_REASON = "for a reason that is not known"
_STYLES = {"agrees": "green", "within the theory's bounds": "green", "not tested": "dim"}


def show_table(table: Table) -> RichTable:
    """The rows with paper, theory, Monte Carlo with its 95 % interval, trained with its error, and verdict."""
    view = RichTable(title=f"{table.name}  {table.title}")
    names = setting_names(table)
    for name in (*names, "quantity", *NUMBERS):
        view.add_column(name, justify="left" if name == "quantity" else "right")
    view.add_column("verdict")
    for row in table.rows:
        verdict = verdict_text(row)
        style = _STYLES.get(verdict, "yellow" if row.consistent else "red")
        view.add_row(*setting_texts(row, names), row.quantity, *number_texts(row), f"[{style}]{verdict}[/]")
    return view


def setting_names(table: Table) -> list[str]:
    """Names of the settings of any row, in the order of their first use."""
    return list(dict.fromkeys(name for row in table.rows for name in row.setting))


def setting_texts(row: Row, names: Sequence[str]) -> list[str]:
    """The row's settings of these names; empty where it has none."""
    return [f"{row.setting[name]:g}" if name in row.setting else "" for name in names]


def number_texts(row: Row) -> list[str]:
    """The row's numbers in the columns `NUMBERS`, with their errors; empty where there are none."""
    paper = "" if row.paper is None else f"{row.paper:g}"
    if row.paper_stderr is not None:
        paper += f" ± {row.paper_stderr:g}"
    theory = row.theory_text if row.theory is None else f"{row.theory:.5g} {row.theory_text}".strip()
    return [paper, theory, _interval(row.monte_carlo), _error(row.trained)]


def verdict_text(row: Row) -> str:
    """The row's verdict; that our own numbers disagree goes before what they say of the paper's."""
    return row.agreement.value if row.consistent else CONTRADICTION


def differences(tables: Sequence[Table]) -> Iterator[str]:
    """What differs from the papers and why, a line for each table and reason."""
    yield "What differs:"
    found = False
    for table in tables:
        for reason, places in disagreements(table).items():
            found = True
            yield f"  {table.name}: {len(places)} of {len(table.rows)} rows: {listed(places)}"
            yield f"      because {reason}" if reason else f"      {UNKNOWN_REASON}"
    if not found:
        yield "  nothing"


def disagreements(table: Table) -> dict[str, list[str]]:
    """Where the table differs from its paper, or from itself, as lists of places by reason."""
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        if row.agreement.failed or not row.consistent:
            reason = row.remark if row.consistent else "our own numbers disagree: please report this"
            where = ", ".join(f"{name} {value:g}" for name, value in row.setting.items())
            reasons.setdefault(reason, []).append(f"{row.quantity} ({where})" if where else row.quantity)
    return reasons


def listed(places: Sequence[str]) -> str:
    """The first places in full, and whether there are more."""
    return "; ".join(places[:MAX_PLACES]) + ("; ..." if len(places) > MAX_PLACES else "")


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    interval = estimate.interval()
    return f"{estimate.value:.5g} [{interval.low:.4g}, {interval.high:.4g}]"


def _error(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.5g} ± {estimate.stderr:.1g}"
