"""A comparison table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table as RichTable

from theory.results import Estimate
from validate.tables.comparison import Table

# Rows named in full in the summary of differences.
MAX_PLACES = 3
_STYLES = {"agrees": "green", "within the theory's bounds": "green", "not tested": "dim"}


def show_table(table: Table) -> RichTable:
    """The rows with paper, theory, Monte Carlo with its 95 % interval, trained with its error, and verdict."""
    view = RichTable(title=f"{table.name}  {table.title}")
    names = list(dict.fromkeys(name for row in table.rows for name in row.setting))
    for name in (*names, "quantity"):
        view.add_column(name, justify="left" if name == "quantity" else "right")
    for name in ("paper", "theory", "Monte Carlo [95 %]", "trained"):
        view.add_column(name, justify="right")
    view.add_column("verdict")
    for row in table.rows:
        settings = [f"{row.setting[name]:g}" if name in row.setting else "" for name in names]
        paper = "" if row.paper is None else f"{row.paper:g}"
        if row.paper_stderr is not None:
            paper += f" ± {row.paper_stderr:g}"
        theory = row.theory_text if row.theory is None else f"{row.theory:.5g} {row.theory_text}".strip()
        verdict = row.agreement.value if row.consistent else "OUR NUMBERS DISAGREE"
        style = _STYLES.get(verdict, "yellow" if row.consistent else "red")
        view.add_row(
            *settings, row.quantity, paper, theory, _interval(row.monte_carlo), _error(row.trained),
            f"[{style}]{verdict}[/]",
        )  # fmt: skip
    return view


def differences(tables: Sequence[Table]) -> Iterator[str]:
    """What differs from the papers and why, a line for each table and reason."""
    yield "What differs:"
    found = False
    for table in tables:
        reasons: dict[str, list[str]] = {}
        for row in table.rows:
            if row.agreement.failed or not row.consistent:
                reason = row.remark if row.consistent else "our own numbers disagree: please report this"
                where = ", ".join(f"{name} {value:g}" for name, value in row.setting.items())
                reasons.setdefault(reason, []).append(f"{row.quantity} ({where})")
        for reason, places in reasons.items():
            found = True
            listed = "; ".join(places[:MAX_PLACES]) + ("; ..." if len(places) > MAX_PLACES else "")
            yield f"  {table.name}: {len(places)} of {len(table.rows)} rows: {listed}"
            yield f"      because {reason}" if reason else "      for a reason that is not known"
    if not found:
        yield "  nothing"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    interval = estimate.interval()
    return f"{estimate.value:.5g} [{interval.low:.4g}, {interval.high:.4g}]"


def _error(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.5g} ± {estimate.stderr:.1g}"
