"""The commands ``exponent`` and ``floor``: predictions of the depth paper's wing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from validate.commands.tools import (
    Number,
    NumberList,
    busy,
    check_output,
    chosen_spectrum,
    json_option,
    plot_option,
    print_json,
    print_lines,
    print_table,
    progress_bar,
    spectrum_options,
    write_plot,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from theory.problems import TopKTask

FLOOR_UNIT = "mean squared error"
DEFAULT_DEGREE = 8
DEFAULT_DEPTHS = "1,2,4,8,16,32,64"


@click.command()
@spectrum_options
@click.option("--dim", type=Number(), help="Number of modes, up to 10^18; infinitely many where left out.")
@click.option(
    "--depths",
    type=NumberList(),
    default=DEFAULT_DEPTHS,
    show_default=True,
    help="Increasing layer counts, 1 to 4096.",
)
@click.option("--modes", type=NumberList(), help="Modes whose normalised losses to show; needs --dim.")
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(path_type=Path),
    callback=check_output,
    help="Write the table of depths to this file with all digits.",
)
@plot_option
@json_option
def exponent(
    input_exponent: float | None,
    teacher_exponent: float | None,
    spectrum_file: Path | None,
    eigenvalue_column: str | None,
    teacher_column: str | None,
    dim: int | None,
    depths: list[int],
    modes: list[int] | None,
    csv_file: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Depth exponents and risks of linear attention on the easy task.

    The spectrum is a power law, or a file with columns eigenvalue and teacher, a row per mode.

    Example:  attnlaws exponent -a 2 -b 1 --dim 128 --depths 1,2,4,8
    """
    from validate.predictions import depth_table, exponent_prediction, mode_prediction

    spectrum = chosen_spectrum(
        input_exponent, teacher_exponent, dim, spectrum_file, eigenvalue_column, teacher_column
    )
    with busy("computing risks"):  # some seconds at depth 4096
        prediction = exponent_prediction(spectrum, depths)
        if modes is not None:
            prediction["modes"] = mode_prediction(spectrum, depths, modes)
    if plot is not None:
        from validate.figures.predictions import exponent_plot

        write_plot(lambda: exponent_plot(prediction), plot)
    if csv_file is not None:
        from validate.files import write_atomically

        write_atomically(csv_file, depth_table(prediction).encode())
    prediction = {"file": None if spectrum_file is None else str(spectrum_file), **prediction}
    if as_json:
        print_json(prediction)
        return
    from rich.table import Table

    where = "infinitely many modes" if prediction["dim"] is None else f"{prediction['dim']} modes"
    variance = f"  variance of the labels, the risk of predicting zero   {prediction['label_variance']:.6g}"
    if prediction["file"] is not None:
        print_lines(
            f"Linear attention, easy task: {where} of {prediction['file']}",
            f"  no asymptotic exponents: {prediction['asymptotic_reason']}",
            variance,
        )
    else:
        print_lines(
            f"Linear attention, easy task: λ_k = k^-{prediction['input_exponent']:g}, "
            f"ω_k = k^-{prediction['teacher_exponent']:g}, {where}",
            f"  one update repeated in every layer   L^-{prediction['constrained']:.4g}   (ζ)",
            f"  best polynomial, continuous spectrum  L^-{prediction['free_continuum']:.4g}   (2ζ)",
            f"  best polynomial, discrete spectrum    L^-{prediction['free_discrete']:.4g}   ((2+a)ζ)",
            variance,
        )
    table = Table(title="risk: mean squared error on labels; exponents to the next depth")
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


@click.command()
@spectrum_options
@click.option("--dim", type=Number(), help="Input dimension; needed with -a and -b.")
@click.option("--context", type=Number(), required=True, help="Number of context tokens.")
@click.option("--top-k", type=Number(), required=True, help="Number of tokens averaged by the target.")
@click.option(
    "--attention",
    type=click.Choice(["linear", "softmax"]),
    default="linear",
    show_default=True,
    help="Floor of linear attention, or mean-field floor of softmax attention with infinitely many layers.",
)
@click.option(
    "--degree",
    type=Number(),
    help=f"Degree of the covariance polynomial (linear attention only).  [default: {DEFAULT_DEGREE}]",
)
@click.option(
    "--method",
    type=click.Choice(["auto", "queries", "contexts"]),
    default="auto",
    show_default=True,
    help="How the floor of linear attention is found: exactly where inputs are isotropic, else by sampling queries "
    "and integrating their contexts, or by drawing whole contexts, which takes any error but more time.",
)
@click.option("--rel-error", type=Number(), default=0.01, show_default=True, help="Relative standard error to reach.")
@click.option("--seed", type=Number(), default=0, show_default=True, help="Seed of the sampled floor.")
@click.option("--max-contexts", type=Number(), default=10**6, show_default=True, help="Most contexts to draw.")
@plot_option
@json_option
def floor(
    input_exponent: float | None,
    teacher_exponent: float | None,
    spectrum_file: Path | None,
    eigenvalue_column: str | None,
    teacher_column: str | None,
    dim: int | None,
    context: int,
    top_k: int,
    attention: str,
    degree: int | None,
    method: str,
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
    from theory.problems import TopKTask
    from validate.predictions import floor_prediction

    if attention == "softmax" and (degree is not None or method != "auto"):
        option = "--degree" if degree is not None else "--method"
        raise click.UsageError(f"{option} is for linear attention: leave it out with --attention softmax")
    if dim is None and spectrum_file is None:
        raise click.UsageError("Missing option '--dim', or '--spectrum' instead of it and both exponents.")
    spectrum = chosen_spectrum(
        input_exponent, teacher_exponent, dim, spectrum_file, eigenvalue_column, teacher_column
    )
    task = TopKTask(spectrum, context, top_k)
    if attention == "softmax":
        softmax_floor(task, rel_error, seed, max_contexts, plot, as_json)
        return
    with progress_bar("sampling contexts") as progress:
        prediction = floor_prediction(
            task,
            degree=DEFAULT_DEGREE if degree is None else degree,
            relative_error=rel_error,
            seed=seed,
            max_contexts=max_contexts,
            progress=progress,
            method=method,
        )
    if plot is not None:
        from validate.figures.predictions import floor_plot

        write_plot(lambda: floor_plot(prediction), plot)
    if as_json:
        print_json(prediction)
        return
    from rich.table import Table

    table = Table(title=f"floor of linear attention, {prediction['method']} ({FLOOR_UNIT})")
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
        f"Softmax attention, infinitely many layers, fixed context states ({FLOOR_UNIT})",
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
