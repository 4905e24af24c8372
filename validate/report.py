"""One HTML page, closed in itself, of all comparisons: tables and figures beside the papers, and the ledger."""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from validate.claims.ledger import Outcome, Verdict
from validate.formulas import statement_html
from validate.tables import view
from validate.tables.comparison import Agreement, Table, drawn

PAPERS = {"depth": "Depth paper", "multihead": "Multi-head paper", "beyond": "Beyond the papers"}
# An id that is a number alone is an equation, with a letter the display before it; others name what they are.
NUMBERED = re.compile(r"(?:([a-z]+)-)?((?:[A-D]\.)?\d+(?:\.\d+)*)([a-z]?)(?:-(.+))?")
KINDS = {
    "conj": "Conjecture", "def": "Definition", "fig": "Figure", "figure": "Figure", "obs": "Observation",
    "prop": "Proposition", "sec": "Section", "table": "Table", "thm": "Theorem",
}  # fmt: skip
# Colours of verdicts in the page: what is as it should be, what is not, and what nobody can help.
GOOD, MILD, BAD, QUIET = "good", "mild", "bad", "quiet"
TONES = {
    Agreement.AGREES.value: GOOD, Agreement.BRACKETED.value: GOOD, Agreement.UNTESTED.value: QUIET,
    Agreement.DIFFERS.value: MILD, Agreement.OUTSIDE.value: MILD, view.CONTRADICTION: BAD,
    Verdict.HOLDS.value: GOOD, Verdict.CONDITIONAL.value: MILD, Verdict.MISPRINT.value: MILD,
    Verdict.OVERCLAIM.value: MILD, Verdict.NOT_REPRODUCIBLE.value: MILD, Verdict.CHECK_FAILED.value: BAD,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What a report shows.

    version: of attnlaws; date, command, profile, seed: when and how it was made; tables, outcomes: what was compared
    and checked; record: the file that the verdicts were read from, empty where the claims were checked anew.
    """

    version: str
    date: str
    command: str
    profile: str
    seed: int
    tables: tuple[Table, ...]
    outcomes: tuple[Outcome, ...]
    record: str = ""

    @property
    def failed(self) -> list[str]:
        """Names of the tables and claims of which something was expected to hold and did not."""
        tables = [f"table {table.name}" for table in self.tables if table.failed]
        return tables + [f"claim {outcome.claim.id}" for outcome in self.outcomes if outcome.failed]

    def to_json(self) -> dict[str, Any]:
        """What was made and how much of it agrees, as plain values."""
        return {
            "version": self.version,
            "profile": self.profile,
            "seed": self.seed,
            "tables": [table.name for table in self.tables],
            "rows": {name.lower(): count for name, count in count_rows(self.tables).items()},
            "claims": count_verdicts(self.outcomes),
            "failed": self.failed,
        }


def count_rows(tables: Iterable[Table]) -> dict[str, int]:
    """Rows of the tables by verdict; those in which our own numbers disagree are counted as such."""
    found = Counter(view.verdict_text(row) for table in tables for row in table.rows)
    return {name: found[name] for name in (*(kind.value for kind in Agreement), view.CONTRADICTION)}


def count_verdicts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Claims by verdict."""
    found = Counter(outcome.verdict.value for outcome in outcomes)
    return {verdict.value: found[verdict.value] for verdict in Verdict}


def used(counts: dict[str, int]) -> list[str]:
    """Verdicts that occur."""
    return [name for name, count in counts.items() if count]


def source_text(identifier: str) -> str:
    """Where in which paper a claim or table has its source, as far as its id tells: "Depth paper, (39)"."""
    paper, _, place = identifier.partition(":")
    title = PAPERS.get(paper, paper)
    match = NUMBERED.fullmatch(place)
    if match is None or paper == "beyond":
        return title
    kind, number, letter, rest = match.groups()
    if kind is None:
        return title if rest else f"{title}, {'display before ' if letter else ''}({number})"
    if kind not in KINDS:
        return title
    part = f" ({rest.partition('-')[0]})" if rest and re.match(r"[iv]+(-|$)", rest) else ""
    return f"{title}, {KINDS[kind]} {number}{letter if kind == 'fig' else ''}{part}"


def anchors(prefix: str, names: Sequence[str]) -> dict[str, str]:
    """Names of targets in the page for each name, all different and free of blanks."""
    found: dict[str, str] = {}
    for name in names:
        plain = f"{prefix}-" + re.sub(r"[^A-Za-z0-9.-]+", "-", name)
        taken = sum(1 for other in found.values() if other == plain or other.startswith(f"{plain}--"))
        found[name] = f"{plain}--{taken}" if taken else plain
    return found


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. kind: number, theory, words, verdict or remark, which sets its width; texts: one a row."""

    kind: str
    head: str
    texts: tuple[str, ...]


def columns(table: Table) -> list[Column]:
    """Settings, quantity, numbers, verdict and remark of the rows; columns without any text are left out."""
    names = view.setting_names(table)
    heads = [("number", name) for name in names] + [("words", "quantity")]
    heads += [("theory" if name == "theory" else "number", name) for name in view.NUMBERS]
    heads += [("verdict", "verdict"), ("remark", "remark")]
    rows = [
        (*view.setting_texts(row, names), row.quantity, *view.number_texts(row), view.verdict_text(row), row.remark)
        for row in table.rows
    ]
    found = [Column(kind, head, tuple(row[i] for row in rows)) for i, (kind, head) in enumerate(heads)]
    return [column for column in found if any(column.texts)]


def figure_address(table: Table) -> str:
    """The table's figure as an SVG image inside an address, where its names cannot meet those of other figures."""
    import matplotlib.pyplot as plt

    figure = table.figure()
    content = drawn(figure, "svg")
    plt.close(figure)
    return f"data:image/svg+xml;base64,{b64encode(content).decode()}"


def by_paper(named: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Items by the title of their paper, in the order of `PAPERS`; others under their own word."""
    groups: dict[str, list[Any]] = {title: [] for title in PAPERS.values()}
    for name, item in named:
        paper = name.partition(":")[0]
        groups.setdefault(PAPERS.get(paper, paper), []).append(item)
    return {title: items for title, items in groups.items() if items}


def render_report(report: Report) -> str:
    """The page. The same report gives the same text.

    Everything that is shown is escaped; styles and figures are inside; a content policy keeps anything else out.
    """
    environment = Environment(
        loader=PackageLoader("validate"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "statement": statement_html, "source": source_text, "columns": columns, "figure": figure_address,
    }  # fmt: skip
    environment.globals |= {"count_rows": count_rows, "count_verdicts": count_verdicts, "used": used, "tones": TONES}
    tables = by_paper((table.name, table) for table in report.tables)
    claims = by_paper((outcome.claim.id, outcome) for outcome in report.outcomes)
    table_anchors = anchors("table", [table.name for table in report.tables])
    return environment.get_template("report.html").render(
        report=report,
        view=view,
        differences=[(table, view.disagreements(table)) for table in report.tables],
        doubtful=[outcome for outcome in report.outcomes if outcome.verdict is not Verdict.HOLDS],
        tables=tables,
        claims=claims,
        table_groups=[(table.name, table_anchors[table.name], [table]) for table in report.tables],
        claim_groups=[(title, f"claims-{i}", items) for i, (title, items) in enumerate(claims.items(), 1)],
        table_anchors=table_anchors,
        claim_anchors=anchors("claim", [outcome.claim.id for outcome in report.outcomes]),
    )
