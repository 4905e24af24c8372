"""The commands ``verify`` and ``reproduce``: the ledger and the papers' tables."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from validate.commands.tools import Number, json_option, print_json, print_lines, print_table, progress_bar

EXIT_FAILED = 1


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--paper", type=click.Choice(["depth", "multihead", "beyond"]), help="Only claims of this paper.")
@click.option("--list", "only_list", is_flag=True, help="List the claims without checking them.")
@json_option
def verify(ids: tuple[str, ...], paper: str | None, only_list: bool, as_json: bool) -> None:
    """Check the papers' equations as printed, and print verdicts with their evidence.

    Exit status 1 where a statement that is expected to hold fails.

    Example:  attnlaws verify depth:39 depth:40
    """
    from validate.claims.ledger import evaluate, load_ledger

    claims = load_ledger().select(ids, paper)
    if only_list:
        listed = [{"id": c.id, "title": c.title, "statement": c.statement} for c in claims]
        print_json({"claims": listed}) if as_json else print_lines(*(f"{c.id:<32}  {c.title}" for c in claims))
        return
    outcomes = []
    with progress_bar("checking claims") as progress:
        for number, claim in enumerate(claims, 1):
            outcomes.append(evaluate(claim))
            progress(number / len(claims))
    if as_json:
        print_json({"claims": [outcome.to_json() for outcome in outcomes]})
    else:
        from validate.ledger_view import ledger_text

        print_lines(*ledger_text(outcomes))
    if any(outcome.failed for outcome in outcomes):
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--profile", type=click.Choice(["quick", "paper"]), default="quick", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option("--seed", type=Number(), default=0, show_default=True, help="Seed of all sampling and training.")
@json_option
def reproduce(names: tuple[str, ...], profile: str, out: Path, seed: int, as_json: bool) -> None:
    """The papers' tables: paper, theory, Monte Carlo, trained models, and verdicts.

    Writes CSV, JSON, PNG and SVG of each table into the output folder, and ends with what differs and why. Names:
    depth:table-1 to depth:table-4; all where none is given.

    Example:  attnlaws reproduce depth:table-3
    """
    from theory.problems import as_integer
    from validate.tables.comparison import save
    from validate.tables.registry import select_tables

    chosen = select_tables(names)
    seed = as_integer("seed", seed, 0, 2**64 - 1)
    tables = []
    for name, build in chosen.items():
        with progress_bar(name) as progress:
            table = build(profile, seed, progress)
        paths = save(table, out)
        tables.append(table)
        if not as_json:
            from validate.tables.view import show_table

            print_table(show_table(table))
            print_lines(*(f"  - {note}" for note in table.notes))
            print_lines("  written: " + ", ".join(str(path) for path in paths), "")
    if as_json:
        print_json({"profile": profile, "tables": [table.to_json() for table in tables]})
    else:
        from validate.tables.view import differences

        print_lines(*differences(tables))
    if any(table.failed for table in tables):
        sys.exit(EXIT_FAILED)
