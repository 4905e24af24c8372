"""One row per number of a paper's table: paper, theory, Monte Carlo, trained, and the verdict that follows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theory.results import DomainError, Estimate
from validate.files import strict_json, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[float], None]
# Two-sided level of the comparison of two numbers with errors: 1e-3 per row.
Z_LIMIT = 3.29


class Agreement(Enum):
    """What a row's numbers say about each other."""

    AGREES = "agrees"
    DIFFERS = "differs"
    BRACKETED = "within the theory's bounds"
    OUTSIDE = "outside the theory's bounds"
    UNTESTED = "not tested"

    @property
    def failed(self) -> bool:
        """Whether the row shows a disagreement."""
        return self in (Agreement.DIFFERS, Agreement.OUTSIDE)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    setting: the row's parameters, by name; quantity: what is compared; paper, paper_stderr: the printed number;
    theory: our prediction, with ``theory_text`` for bounds or a reason why there is none; monte_carlo, trained:
    estimates; agreement: paper against ours; consistent: our own numbers against each other, the part that must
    hold; remark: what differs and why.
    """

    setting: dict[str, float]
    quantity: str
    paper: float | None
    paper_stderr: float | None = None
    theory: float | None = None
    theory_text: str = ""
    monte_carlo: Estimate | None = None
    trained: Estimate | None = None
    agreement: Agreement = Agreement.UNTESTED
    consistent: bool = True
    remark: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "setting": self.setting,
            "quantity": self.quantity,
            "paper": self.paper,
            "paper_stderr": self.paper_stderr,
            "theory": self.theory,
            "theory_text": self.theory_text,
            "monte_carlo": None if self.monte_carlo is None else self.monte_carlo.to_json(),
            "trained": None if self.trained is None else self.trained.to_json(),
            "verdict": self.agreement.value,
            "consistent": self.consistent,
            "remark": self.remark,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """A reproduced table. name: ``depth:table-3``; notes: what differs and why; figure: draws the comparison."""

    name: str
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    figure: Callable[[], Figure]
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether our own numbers contradict each other, which no paper can excuse."""
        return not all(row.consistent for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "settings": self.settings,
            "seconds": self.seconds,
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }


def z_between(left: Estimate, right: float, right_stderr: float | None) -> float:
    """Difference in combined standard errors."""
    return left.z_score(right, right_stderr or 0.0)


def compare(estimate: Estimate, paper: float, paper_stderr: float | None) -> Agreement:
    """Agreement of a sampled number with a printed one that carries a standard error."""
    return Agreement.AGREES if abs(z_between(estimate, paper, paper_stderr)) <= Z_LIMIT else Agreement.DIFFERS


@lru_cache(maxsize=1)
def paper_tables() -> dict[str, Any]:
    """The numbers printed in the papers, by table."""
    content: dict[str, Any] = json.loads(files("validate").joinpath("paper_tables.json").read_text(encoding="utf-8"))
    return content


def paper_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a printed table as dicts. Raises DomainError for unknown tables."""
    tables = paper_tables()
    if name not in tables or "rows" not in tables[name]:
        raise DomainError(f"table must be one of the printed ones, got {name!r}")
    return [dict(zip(tables[name]["columns"], row, strict=True)) for row in tables[name]["rows"]]


CSV_COLUMNS = (
    "quantity", "paper", "paper_stderr", "theory", "theory_text", "monte_carlo", "monte_carlo_stderr",
    "monte_carlo_low", "monte_carlo_high", "trained", "trained_stderr", "verdict", "consistent", "remark",
)  # fmt: skip


def to_csv(table: Table) -> str:
    """The table as CSV with 17 digits: settings first, then one column per number."""
    names = list(dict.fromkeys(name for row in table.rows for name in row.setting))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*names, *CSV_COLUMNS])
    for row in table.rows:
        sampled, trained = row.monte_carlo, row.trained
        interval = None if sampled is None else sampled.interval()
        writer.writerow(
            [_text(row.setting.get(name)) for name in names]
            + [row.quantity, _text(row.paper), _text(row.paper_stderr), _text(row.theory), row.theory_text]
            + [_text(None if sampled is None else sampled.value), _text(None if sampled is None else sampled.stderr)]
            + [_text(None if interval is None else interval.low), _text(None if interval is None else interval.high)]
            + [_text(None if trained is None else trained.value), _text(None if trained is None else trained.stderr)]
            + [row.agreement.value, str(row.consistent).lower(), row.remark]
        )
    return buffer.getvalue()


def _text(number: float | None) -> str:
    return "" if number is None else repr(float(number))


def save(table: Table, folder: Path) -> list[Path]:
    """Write CSV, JSON, PNG and SVG of the table into ``folder``; returns the paths."""
    import matplotlib.pyplot as plt

    stem = table.name.replace(":", "-")
    paths = [folder / f"{stem}.{ending}" for ending in ("csv", "json", "png", "svg")]
    write_atomically(paths[0], to_csv(table).encode())
    write_atomically(paths[1], (strict_json(table.to_json(), indent=1) + "\n").encode())
    figure = table.figure()
    for path in paths[2:]:
        write_atomically(path, drawn(figure, path.suffix[1:]))
    plt.close(figure)
    return paths


def drawn(figure: Figure, ending: str) -> bytes:
    """The figure as a file of the format that ``ending`` names; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    # The date would make every file another one.
    metadata = {"Date": None} if ending == "svg" else None
    figure.savefig(buffer, format=ending, dpi=160, bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()


def share(progress: Progress, start: float, end: float) -> Progress:
    """A progress callback for a part of the work that fills the bar from ``start`` to ``end``."""
    return lambda fraction: progress(start + (end - start) * min(1.0, max(0.0, fraction)))
