"""The ``attnlaws`` command. Every subcommand imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

    from theory.problems import TopKTask
    from validate.tables.comparison import Progress

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
PLOT_ENDINGS = (".png", ".svg", ".pdf")
DEFAULT_DEPTHS = "1,2,4,8,16,32,64"


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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="attnlaws")
def cli() -> None:
    """Exact laws of attention and in-context regression, checked and compared with simulation.

    Start with:  attnlaws exponent -a 2 -b 1 --dim 128
    """


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object with full precision.")


def check_ending(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file name whose ending names no format, before anything is computed."""
    if path is not None and path.suffix.lower() not in PLOT_ENDINGS:
        raise click.BadParameter(f"{str(path)!r} must end in {', '.join(PLOT_ENDINGS)}")
    return path


plot_option = click.option(
    "--plot",
    type=click.Path(path_type=Path),
    callback=check_ending,
    help="Draw it to this file; the ending chooses PNG, SVG or PDF.",
)


def spectrum_options(command: Any) -> Any:
    """The two exponents that every command about a power-law spectrum takes."""
    for option in (
        click.option(
            "-b", "--teacher-exponent", type=Number(), required=True, help="Exponent b of ω_k = k^-b, >= 0."
        ),
        click.option("-a", "--input-exponent", type=Number(), required=True, help="Exponent a of λ_k = k^-a, >= 0."),
    ):
        command = option(command)
    return command


@cli.command()
@spectrum_options
@click.option("--dim", type=Number(), help="Number of modes, up to 10^18; infinitely many where left out.")
@click.option(
    "--depths", type=NumberList(), default=DEFAULT_DEPTHS, show_default=True, help="Increasing layer counts."
)
@click.option("--modes", type=NumberList(), help="Modes whose normalised losses to show; needs --dim.")
@plot_option
@json_option
def exponent(
    input_exponent: float,
    teacher_exponent: float,
    dim: int | None,
    depths: list[int],
    modes: list[int] | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Depth exponents and risks of linear attention on the easy task.

    Example:  attnlaws exponent -a 2 -b 1 --dim 128 --depths 1,2,4,8
    """
    from validate.predictions import exponent_prediction, mode_prediction

    prediction = exponent_prediction(input_exponent, teacher_exponent, dim, depths)
    if modes is not None:
        prediction["modes"] = mode_prediction(input_exponent, teacher_exponent, dim, depths, modes)
    if plot is not None:
        from validate.figures.predictions import exponent_plot

        write_plot(lambda: exponent_plot(prediction), plot)
    if as_json:
        print_json(prediction)
        return
    from rich.table import Table

    where = "infinitely many modes" if dim is None else f"{prediction['dim']} modes"
    print_lines(
        f"Linear attention, easy task: λ_k = k^-{prediction['input_exponent']:g}, "
        f"ω_k = k^-{prediction['teacher_exponent']:g}, {where}",
        f"  one update repeated in every layer   L^-{prediction['constrained']:.4g}   (ζ)",
        f"  best polynomial, continuous spectrum  L^-{prediction['free_continuum']:.4g}   (2ζ)",
        f"  best polynomial, discrete spectrum    L^-{prediction['free_discrete']:.4g}   ((2+a)ζ)",
    )
    table = Table(title="risk in units of the label variance; exponents to the next depth")
    for name in (
        "depth",
        "repeated update",
        "at its best step",
        "(step)",
        "free polynomial",
        "exponent",
        "free exponent",
    ):
        table.add_column(name, justify="right")
    for i, depth in enumerate(prediction["depths"]):
        slopes = [prediction[f"local_exponent_{kind}"] for kind in ("constrained", "free")]
        table.add_row(
            str(depth),
            f"{prediction['risk_constrained'][i]:.6g}",
            f"{prediction['risk_constrained_best_step'][i]:.6g}",
            f"{prediction['best_step'][i]:.4f}",
            f"{prediction['risk_free'][i]:.6g}",
            *("" if i >= len(slope) or slope[i] is None else f"{slope[i]:.4f}" for slope in slopes),
        )
    print_table(table)
    if prediction["local_exponent_reason"]:
        print_lines(prediction["local_exponent_reason"])
    if modes is not None:
        print_table(mode_table(prediction))


@cli.command()
@spectrum_options
@click.option("--dim", type=Number(), required=True, help="Input dimension.")
@click.option("--context", type=Number(), required=True, help="Number of context tokens.")
@click.option("--top-k", type=Number(), required=True, help="Number of tokens averaged by the target.")
@click.option(
    "--attention",
    type=click.Choice(["linear", "softmax"]),
    default="linear",
    show_default=True,
    help="Floor of linear attention, or mean-field floor of softmax attention with infinitely many layers.",
)
@click.option("--degree", type=Number(), default=8, show_default=True, help="Degree of the covariance polynomial.")
@click.option("--rel-error", type=Number(), default=0.01, show_default=True, help="Relative standard error to reach.")
@click.option("--seed", type=Number(), default=0, show_default=True, help="Seed of the sampled floor.")
@click.option("--max-contexts", type=Number(), default=10**6, show_default=True, help="Most contexts to draw.")
@plot_option
@json_option
def floor(
    input_exponent: float,
    teacher_exponent: float,
    dim: int,
    context: int,
    top_k: int,
    attention: str,
    degree: int,
    rel_error: float,
    seed: int,
    max_contexts: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Irreducible floor of attention on the difficult task.

    Linear attention: isotropic inputs (a = 0) are exact; other spectra are sampled until the requested error.
    Softmax attention: the best mixture of infinitely many layers, and what finite depth adds.

    Example:  attnlaws floor -a 0 -b 0 --dim 128 --context 1024 --top-k 2
    """
    from theory.problems import PowerLawSpectrum, TopKTask
    from validate.predictions import floor_prediction

    task = TopKTask(PowerLawSpectrum(input_exponent, teacher_exponent, dim), context, top_k)
    if attention == "softmax":
        softmax_floor(task, rel_error, seed, max_contexts, plot, as_json)
        return
    with progress_bar("sampling contexts") as progress:
        prediction = floor_prediction(
            task, degree=degree, relative_error=rel_error, seed=seed, max_contexts=max_contexts, progress=progress
        )
    if plot is not None:
        from validate.figures.predictions import floor_plot

        write_plot(lambda: floor_plot(prediction), plot)
    if as_json:
        print_json(prediction)
        return
    from rich.table import Table

    table = Table(title=f"floor of linear attention, {prediction['method']}, units of the label variance")
    for name in ("degree", "floor", "standard error", "95 % interval"):
        table.add_column(name, justify="right")
    for row in prediction["floors_by_degree"]:
        low, high = row["interval"]["low"], row["interval"]["high"]
        table.add_row(str(row["degree"]), f"{row['value']:.10g}", f"{row['stderr']:.2g}", f"{low:.7g} .. {high:.7g}")
    print_table(table)
    print_lines(prediction["status"])
    finite = prediction.get("floor_finite_context_degree_1")
    if finite is not None:
        print_lines(f"Degree one in the empirical covariance of the context itself reaches {finite:.7g}.")


def softmax_floor(
    task: TopKTask, rel_error: float, seed: int, max_contexts: int, plot: Path | None, as_json: bool
) -> None:
    """The softmax branch of ``floor``: mean-field floor, its law, and the best losses at finite depth."""
    from validate.mean_field import mean_field_floor

    with progress_bar("mean-field floor") as progress:
        found = mean_field_floor(
            task, relative_error=rel_error, seed=seed, max_contexts=max_contexts, progress=progress
        )
    if plot is not None:
        from validate.figures.predictions import mean_field_plot

        write_plot(lambda: mean_field_plot(found), plot)
    if as_json:
        print_json({"method": "mean field", **found.to_json()})
        return
    from rich.table import Table

    low, high = found.floor.interval().low, found.floor.interval().high
    print_lines(
        "Softmax attention, infinitely many layers, fixed context states (units of the label variance)",
        f"  floor           {found.floor.value:.6g}, standard error {found.floor.stderr:.2g}",
        f"  95 % interval   {low:.6g} .. {high:.6g}",
        f"  dual gap        {100 * found.dual_gap:.2g} % over {found.scanned} kinds of layer",
        f"  layers differ   A - C = {found.disagreement.value:.4g}; L layers of the best law lose (A - C)/L more",
        f"  best one layer  {found.single_layer.value:.6g} at sharpness {found.single_type[0]:.3g}",
    )
    law = Table(title="the best law: layers read with u = alpha q + beta noise")
    for name in ("alpha", "beta", "probability"):
        law.add_column(name, justify="right")
    for (alpha, beta), probability in zip(found.types, found.law, strict=True):
        law.add_row(f"{alpha:.4g}", f"{beta:.4g}", f"{probability:.3f}")
    print_table(law)
    depths = Table(title="loss of the best law at finite depth")
    for name in ("depth", "loss"):
        depths.add_column(name, justify="right")
    for depth, loss in found.best_at_depth.items():
        depths.add_row(str(depth), f"{loss:.5g}")
    print_table(depths)
    print_lines(found.floor.status.value)


@cli.command()
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


@cli.command()
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


def print_json(content: Any) -> None:
    """One strict JSON object on standard output."""
    from validate.files import strict_json

    click.echo(strict_json(content))


def print_lines(*lines: str) -> None:
    """Plain lines on standard output; letters that the terminal cannot show are replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        click.echo(line.encode(encoding, errors="replace").decode(encoding))


def mode_table(prediction: dict[str, Any]) -> RichTable:
    """Normalised losses of single modes, repeated update and free polynomial at each depth."""
    from rich.table import Table

    table = Table(title="normalised loss of single modes: repeated update / free polynomial")
    for name in ("mode", "label share", "tau", *(f"depth {depth}" for depth in prediction["depths"])):
        table.add_column(name, justify="right")
    for mode in prediction["modes"]:
        pairs = zip(mode["loss_repeated"], mode["loss_free"], strict=True)
        cells = (f"{repeated:.3g} / {free:.3g}" for repeated, free in pairs)
        depth = mode["characteristic_depth_repeated"]
        table.add_row(str(mode["mode"]), f"{mode['label_share']:.3g}", f"{depth:.4g}", *cells)
    return table


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


def main() -> None:
    """Entry point: exit 0 done, 1 something expected to hold failed, 2 bad input in one sentence, 130 interrupted."""
    from theory.results import AttnlawsError

    try:
        cli(standalone_mode=False)
    except click.ClickException as failure:
        fail(failure.format_message())
    except AttnlawsError as failure:
        fail(str(failure))
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)


def fail(sentence: str) -> None:
    """Print one sentence on standard error and exit with the status for bad input."""
    text = " ".join(sentence.split())
    encoding = sys.stderr.encoding or "utf-8"
    click.echo(f"attnlaws: {text}".encode(encoding, errors="replace").decode(encoding), err=True)
    sys.exit(EXIT_BAD_INPUT)
