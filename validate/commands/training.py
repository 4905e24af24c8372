"""The command ``train``: runs described by a file, resumable and measured."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from validate.commands.findings import named_findings
from validate.commands.tools import Number, json_option, print_json, print_lines, print_table, progress_bar

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from sim.divergence import Diverged
    from sim.training import TrainingConfig, TrainingResult
    from theory.results import Estimate

ENDING = ".toml"


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--preset", metavar="NAME", help="A file that comes with attnlaws instead of one's own.")
@click.option("--list-presets", is_flag=True, help="List the presets and stop.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--workers", type=Number(), help="Processes of one thread each; as many as cores where left out.")
@click.option("--scheduler", metavar="ADDRESS", help="Train on the workers of this dask scheduler.")
@json_option
def train(
    config: Path | None,
    preset: str | None,
    list_presets: bool,
    out: Path,
    workers: int | None,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Train the models that a TOML file describes, and measure them.

    Every run has a folder of its own below --out. The same command resumes what was interrupted and reads what is
    finished.

    Example:  attnlaws train --preset softmax-tiny
    """
    if list_presets:
        names = preset_names()
        print_json({"presets": names}) if as_json else print_lines(*names)
        return
    configs = read_configs(config, preset)
    from sim.allocator import keep_freed_memory
    from sim.streams import default_workers
    from sim.sweep import train_many
    from sim.training import require_torch, run_folder

    require_torch()
    keep_freed_memory()
    try:
        with named_findings(), progress_bar(f"training {len(configs)} run{'s' * (len(configs) > 1)}") as progress:
            results = train_many(configs, default_workers() if workers is None else workers, out, progress, scheduler)
    except KeyboardInterrupt:
        click.echo("attnlaws: the same command goes on from the last checkpoints", err=True)
        raise
    folders = [run_folder(out, one) for one in configs]
    if as_json:
        runs = [{"folder": str(folder), **one.to_json()} for folder, one in zip(folders, results, strict=True)]
        print_json({"runs": runs})
    else:
        print_table(results_table(results, folders))


def read_configs(path: Path | None, preset: str | None) -> list[TrainingConfig]:
    """The runs of a file or of a preset. Raises DomainError where there is not one of them or it cannot be read."""
    from sim.sweep import sweep_configs
    from theory.results import DomainError

    if (path is None) == (preset is None):
        raise DomainError("CONFIG or --preset must be given, and not both")
    if path is None:
        if preset not in preset_names():
            raise DomainError(f"preset must be one of {', '.join(preset_names())}, got {preset!r}")
        content = files("validate").joinpath("presets", f"{preset}{ENDING}").read_bytes()
    else:
        content = path.read_bytes()
    try:
        # TOML knows no byte order mark, but editors write one.
        table = tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as failure:
        raise DomainError(f"{path} must be a TOML file: {failure}") from None
    return sweep_configs(table)


def preset_names() -> list[str]:
    """Names of the presets, sorted."""
    found = (item.name for item in files("validate").joinpath("presets").iterdir())
    return sorted(name.removesuffix(ENDING) for name in found if name.endswith(ENDING))


def results_table(results: Sequence[TrainingResult], folders: Sequence[Path]) -> RichTable:
    """A row per run and member: what sets it apart, where it is, and what was measured, single modes left out."""
    from rich.table import Column, Table

    measured = dict.fromkeys(name for result in results for name in result.measured)
    names = [name for name in measured if not name.startswith("mode_loss_")]
    table = Table(*("setting", "seed", "steps", *names), Column("folder", overflow="fold"))
    for result, setting, folder in zip(results, differences([one.config for one in results]), folders, strict=True):
        for member, seed in enumerate(result.config.seeds):
            values = [result.measured[name][member] if name in result.measured else None for name in names]
            texts = [_measured_text(one) for one in values]
            table.add_row(setting, str(seed), str(result.steps), *texts, str(folder))
    return table


def _measured_text(one: Estimate | Diverged | None) -> str:
    from sim.divergence import Diverged

    if one is None:
        return ""
    return f"diverged, step {one.step}" if isinstance(one, Diverged) else f"{one.value:.6g} ± {one.stderr:.2g}"


def differences(configs: Sequence[TrainingConfig]) -> list[str]:
    """For each run the fields in which the runs differ, seeds excepted, or the kind where they do not."""
    flat = [dict(_leaves(one.to_json(), "")) for one in configs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key != "seeds"]
    different = [key for key in keys if len({repr(one.get(key)) for one in flat}) > 1]
    return [
        ", ".join(f"{key.rpartition('.')[2]} {one[key]}" for key in different if key in one)
        or str(one["experiment.kind"])
        for one in flat
    ]


def _leaves(content: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
