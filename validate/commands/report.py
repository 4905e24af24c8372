"""The command ``report``: tables, figures and ledger as one HTML page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from validate.commands.comparison import EXIT_FAILED, build_tables, check_claims, checked_run
from validate.commands.tools import json_option, print_json, print_lines, reproduction_options, require_writable

if TYPE_CHECKING:
    from validate.claims.ledger import Claim
    from validate.report import Report
    from validate.tables.registry import Entry


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--paper", type=click.Choice(["depth", "multihead", "beyond"]), help="Only tables and claims of this paper."
)
@click.option("--no-tables", is_flag=True, help="Leave out the tables and figures.")
@click.option("--no-claims", is_flag=True, help="Leave out the ledger.")
@click.option(
    "--verdicts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the verdicts that `attnlaws verify --json` wrote to this file instead of checking the claims.",
)
@reproduction_options
@click.option(
    "--runs",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("results/runs"),
    show_default=True,
    help="Folder of trained models.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("results/report.html"),
    show_default=True,
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@json_option
def report(
    names: tuple[str, ...], paper: str | None, no_tables: bool, no_claims: bool, verdicts: Path | None, profile: str,
    seed: int, workers: int | None, scheduler: str | None, folder: Path, output: Path, show: bool, as_json: bool,
) -> None:  # fmt: skip
    """Tables, figures and the ledger as one HTML page that needs nothing else.

    Builds what `reproduce` and `verify` show, all of it or the tables and claims that are named, and sets it beside
    each other: what does not agree first, then each table with its figure, then each claim with its evidence. Trained
    models are kept and shared with `reproduce`: an interrupted command goes on from their last checkpoints.

    Exit status 1 where something that is expected to hold fails; the page is written all the same.

    Example:  attnlaws report depth:table-3 depth:39 --open
    """
    tables, claims = select(names, paper, with_tables=not no_tables, with_claims=not no_claims)
    seed, runs = checked_run(seed, workers, scheduler, folder)
    require_writable(output)
    from validate.claims.recorded import recorded_outcomes

    recorded = None if verdicts is None else recorded_outcomes(verdicts, claims)
    built = tuple(build_tables(tables, profile, seed, runs, quiet=as_json))
    outcomes = tuple(check_claims(claims) if recorded is None else recorded)

    from datetime import UTC, datetime
    from importlib.metadata import version

    from validate.files import write_atomically
    from validate.report import Report, render_report

    done = Report(
        version("attnlaws"),
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        shlex.join(["attnlaws", *sys.argv[1:]]),
        profile,
        seed,
        built,
        outcomes,
        "" if verdicts is None else str(verdicts),
    )
    write_atomically(output, render_report(done).encode())
    if as_json:
        print_json({"path": str(output), **done.to_json()})
    else:
        print_lines(*summary(done), f"written: {output}")
    if show:
        open_page(output)
    if done.failed:
        sys.exit(EXIT_FAILED)


def select(
    names: Sequence[str], paper: str | None, *, with_tables: bool, with_claims: bool
) -> tuple[dict[str, Entry], list[Claim]]:
    """The named tables and claims of this paper, all where none is named. A name may be that of both.

    Raises DomainError for unknown names, and where nothing is left.
    """
    from theory.results import DomainError
    from validate.claims.ledger import load_ledger
    from validate.tables.registry import TABLES

    ledger = load_ledger()
    for name in names:
        if name not in TABLES and name not in ledger.claims:
            raise DomainError(
                f"name must be one that `attnlaws reproduce --list` or `attnlaws verify --list` prints, got {name!r}"
            )
    chosen = {name: TABLES[name] for name in names or TABLES if with_tables and name in TABLES}
    tables = {name: entry for name, entry in chosen.items() if paper is None or name.startswith(f"{paper}:")}
    named = [name for name in names if name in ledger.claims]
    claims = ledger.select(named, paper) if with_claims and (named or not names) else []
    if not tables and not claims:
        raise DomainError("names and options must leave a table or a claim to report, but leave none")
    return tables, claims


def summary(done: Report) -> list[str]:
    """How many rows and claims have which verdict, and what failed."""
    lines = []
    content = done.to_json()
    for what, counts in (("rows", content["rows"]), ("claims", content["claims"])):
        if total := sum(counts.values()):
            lines.append(f"{total} {what}: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    if done.failed:
        lines.append("expected to hold, but does not: " + ", ".join(done.failed))
    return lines


def open_page(path: Path) -> None:
    """Show the page in a browser, or say that there is none."""
    import webbrowser

    try:
        opened = webbrowser.open(path.resolve().as_uri())
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        click.echo(f"attnlaws: no browser was found, open {path} in one", err=True)
