"""What the commands share: option types, output for machines and people, progress."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

    from theory.problems import Spectrum
    from validate.tables.comparison import Progress

PLOT_ENDINGS = (".png", ".svg", ".pdf")


class Number(click.ParamType[Any]):
    """An integer or a real in any usual notation; the problem types decide which values are allowed."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """The number that ``value`` spells."""
        if isinstance(value, int | float):
            return value
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
        raise click.BadParameter(f"{value!r} is not a number", ctx, param)


class NumberList(click.ParamType[Any]):
    """Numbers separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int | float]:
        """The numbers that ``value`` spells."""
        if isinstance(value, list):
            return value
        return [Number().convert(item.strip(), param, ctx) for item in str(value).split(",")]


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object with full precision.")


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed, and leave nothing behind.

    Raises DomainError.
    """
    from validate.files import require_replaceable

    require_replaceable(path)
    require_writable_folder(path.resolve().parent)


def require_writable_folder(folder: Path) -> None:
    """Refuse a folder in which nothing can be written or which cannot be made. Raises DomainError."""
    from theory.results import DomainError

    try:
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as failure:
        raise DomainError(f"the output folder must be writable, got {folder}: {failure.strerror}") from None


def check_output(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything is computed."""
    if path is not None:
        require_writable(path)
    return path


def check_plot_file(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written or whose ending names no format, before anything is computed."""
    if path is not None and path.suffix.lower() not in PLOT_ENDINGS:
        raise click.BadParameter(f"{str(path)!r} must end in {', '.join(PLOT_ENDINGS)}")
    return check_output(_ctx, _param, path)


plot_option = click.option(
    "--plot",
    type=click.Path(path_type=Path),
    callback=check_plot_file,
    help="Draw it to this file; the ending chooses PNG, SVG or PDF.",
)


def spectrum_options(command: Any) -> Any:
    """A spectrum: two exponents, or a file with every mode. See `chosen_spectrum`."""
    for option in (
        click.option("--teacher-column", help="Column of ω_k in that file.  [default: teacher]"),
        click.option("--eigenvalue-column", help="Column of λ_k in that file.  [default: eigenvalue]"),
        click.option(
            "--spectrum",
            "spectrum_file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="CSV or Parquet file with a row per mode, instead of -a, -b and --dim.",
        ),
        click.option("-b", "--teacher-exponent", type=Number(), help="Exponent b of ω_k = k^-b, >= 0."),
        click.option("-a", "--input-exponent", type=Number(), help="Exponent a of λ_k = k^-a, >= 0."),
    ):
        command = option(command)
    return command


def chosen_spectrum(
    a: float | None, b: float | None, dim: int | None, file: Path | None, eigenvalue: str | None, teacher: str | None
) -> Spectrum:
    """The spectrum that the options describe; infinitely many modes where neither ``dim`` nor a file is given."""
    from theory.problems import PowerLawSpectrum

    if file is not None:
        for name, value in (("-a", a), ("-b", b), ("--dim", dim)):
            if value is not None:
                raise click.UsageError(f"--spectrum holds every mode: leave {name} out")
        from validate.spectrum_file import EIGENVALUE_COLUMN, TEACHER_COLUMN, read_spectrum

        return read_spectrum(file, eigenvalue or EIGENVALUE_COLUMN, teacher or TEACHER_COLUMN)
    for name, column in (("--eigenvalue-column", eigenvalue), ("--teacher-column", teacher)):
        if column is not None:
            raise click.UsageError(f"{name} names a column of the file that --spectrum gives, and there is none")
    if a is None or b is None:
        name = "'-a' / '--input-exponent'" if a is None else "'-b' / '--teacher-exponent'"
        raise click.UsageError(f"Missing option {name}, or '--spectrum' instead of both exponents.")
    return PowerLawSpectrum(a, b, dim)


def reproduction_options(command: Any) -> Any:
    """How much is computed, from which seed, and who trains: for every command that builds the papers' tables."""
    for option in (
        click.option("--scheduler", metavar="ADDRESS", help="Train on a running dask scheduler instead."),
        click.option("--workers", type=Number(), help="Processes that train.  [default: one per usable core]"),
        click.option(
            "--seed", type=Number(), default=0, show_default=True, help="Seed of all sampling and training."
        ),
        click.option("--profile", type=click.Choice(["quick", "paper"]), default="quick", show_default=True),
    ):
        command = option(command)
    return command


def print_json(content: Any) -> None:
    """One strict JSON object on standard output."""
    from validate.files import strict_json

    click.echo(strict_json(content))


def print_lines(*lines: str) -> None:
    """Plain lines on standard output; letters that the terminal cannot show are replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        click.echo(line.encode(encoding, errors="replace").decode(encoding))


def write_plot(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure and write it in the format that the ending names."""
    import io

    from validate.files import write_atomically

    figure, buffer = draw(), io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().lstrip("."), dpi=160, bbox_inches="tight")
    write_atomically(path, buffer.getvalue())


def print_table(table: RichTable) -> None:
    """A table as wide as it needs to be where output is not a terminal, else fitted to the terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200, safe_box=True)
    with console.capture() as capture:
        console.print(table)
    print_lines(*capture.get().rstrip("\n").split("\n"))


@contextmanager
def busy(title: str) -> Iterator[None]:
    """A moving sign on standard error for work whose length is not known beforehand, shown on terminals only."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar with the time left on standard error, shown on terminals only."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)
