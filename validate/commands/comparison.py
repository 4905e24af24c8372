"""The commands ``verify`` and ``reproduce``: the ledger, and the papers' tables and figures."""

from __future__ import annotations

import sys
import time
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
@click.option(
    "--runs", "folder", type=click.Path(path_type=Path), help="Folder of trained models.  [default: OUT/runs]"
)
@click.option("--workers", type=Number(), help="Processes that train.  [default: one per usable core]")
@click.option("--scheduler", metavar="ADDRESS", help="Train on a running dask scheduler instead.")
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
    from theory.problems import as_integer
    from validate.tables.comparison import save
    from validate.tables.registry import TABLES, build_table, needed_runs, select_tables
    from validate.trained.runs import TrainedRuns

    if only_list:
        print_json({"names": list(TABLES)}) if as_json else print_lines(*TABLES)
        return
    chosen = select_tables(names)
    seed = as_integer("seed", seed, 0, 2**64 - 1)
    workers = None if workers is None else as_integer("workers", workers, 1, 4096)
    runs = TrainedRuns(out / "runs" if folder is None else folder, workers, scheduler)
    needed = needed_runs(chosen, profile, seed)
    if needed:
        started = time.perf_counter()
        with progress_bar(f"training {len(needed)} models") as progress:
            runs.results(needed, progress)
        if not as_json:
            seconds = time.perf_counter() - started
            print_lines(f"{len(needed)} models trained, or read from {runs.folder}, in {seconds:.0f} s", "")
    tables = []
    for name, entry in chosen.items():
        with progress_bar(name) as progress:
            table = build_table(entry, profile, seed, progress, runs)
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
