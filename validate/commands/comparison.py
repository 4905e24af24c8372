"""The commands ``verify`` and ``reproduce``: the ledger, and the papers' tables and figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from validate.commands.tools import (
    json_option,
    print_json,
    print_lines,
    print_table,
    progress_bar,
    reproduction_options,
    require_writable_folder,
)

if TYPE_CHECKING:
    from validate.claims.ledger import Claim, Outcome
    from validate.tables.comparison import Table
    from validate.tables.registry import Entry
    from validate.trained.runs import TrainedRuns

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
    from validate.claims.ledger import load_ledger

    claims = load_ledger().select(ids, paper)
    if only_list:
        listed = [{"id": c.id, "title": c.title, "statement": c.statement} for c in claims]
        print_json({"claims": listed}) if as_json else print_lines(*(f"{c.id:<32}  {c.title}" for c in claims))
        return
    outcomes = check_claims(claims)
    if as_json:
        print_json({"claims": [outcome.to_json() for outcome in outcomes]})
    else:
        from validate.ledger_view import ledger_text

        print_lines(*ledger_text(outcomes))
    if any(outcome.failed for outcome in outcomes):
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@reproduction_options
@click.option("--out", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option(
    "--runs", "folder", type=click.Path(path_type=Path), help="Folder of trained models.  [default: OUT/runs]"
)
@click.option("--list", "only_list", is_flag=True, help="List the names without computing anything.")
@json_option
def reproduce(
    names: tuple[str, ...], profile: str, out: Path, seed: int, folder: Path | None, workers: int | None,
    scheduler: str | None, only_list: bool, as_json: bool,
) -> None:  # fmt: skip
    """The papers' tables and figures: paper, theory, Monte Carlo, trained models, and verdicts.

    Trains the models that the chosen names need, each once, then writes CSV, JSON, PNG and SVG of each name into the
    output folder, and ends with what differs and why. Trained models are kept: an interrupted command goes on from
    its last checkpoints. Names are those of --list; all where none is given.

    Example:  attnlaws reproduce depth:table-3 depth:figure-6
    """
    from validate.tables.comparison import save
    from validate.tables.registry import TABLES, select_tables

    if only_list:
        print_json({"names": list(TABLES)}) if as_json else print_lines(*TABLES)
        return
    chosen = select_tables(names)
    require_writable_folder(out)
    seed, runs = checked_run(seed, workers, scheduler, out / "runs" if folder is None else folder)
    tables = []
    for table in build_tables(chosen, profile, seed, runs, quiet=as_json):
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


def check_claims(claims: Sequence[Claim]) -> list[Outcome]:
    """Outcomes of the claims in their order, under a progress bar."""
    from validate.claims.ledger import evaluate

    outcomes = []
    with progress_bar("checking claims") as progress:
        for number, claim in enumerate(claims, 1):
            outcomes.append(evaluate(claim))
            progress(number / len(claims))
    return outcomes


def checked_run(seed: int, workers: int | None, scheduler: str | None, folder: Path) -> tuple[int, TrainedRuns]:
    """Seed and trained models of a command, from its options. Raises DomainError for numbers out of range."""
    from theory.problems import as_integer
    from validate.trained.runs import TrainedRuns

    seed = as_integer("seed", seed, 0, 2**64 - 1)
    workers = None if workers is None else as_integer("workers", workers, 1, 4096)
    return seed, TrainedRuns(folder, workers, scheduler)


def build_tables(
    chosen: Mapping[str, Entry], profile: str, seed: int, runs: TrainedRuns, *, quiet: bool
) -> Iterator[Table]:
    """Train the models that the chosen tables need, each once, then build the tables one by one.

    quiet: do not say on standard output how many models there were.
    """
    from sim.allocator import keep_freed_memory
    from validate.commands.findings import named_findings
    from validate.tables.registry import build_table, needed_runs

    keep_freed_memory()
    needed = needed_runs(chosen, profile, seed)
    if needed:
        started = time.perf_counter()
        with named_findings(), progress_bar(f"training {len(needed)} models") as progress:
            runs.results(needed, progress)
        if not quiet:
            seconds = time.perf_counter() - started
            print_lines(f"{len(needed)} models trained, or read from {runs.folder}, in {seconds:.0f} s", "")
    for name, entry in chosen.items():
        with named_findings(), progress_bar(name) as progress:
            table = build_table(entry, profile, seed, progress, runs)
        yield table
