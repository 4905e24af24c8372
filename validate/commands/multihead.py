"""The commands ``softmax-risk``, ``icl-risk`` and ``optimum``: predictions of the multi-head paper's wing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from validate.commands.tools import (
    Number,
    NumberList,
    busy,
    json_option,
    plot_option,
    print_json,
    print_lines,
    write_plot,
)


def regression_options(command: Any) -> Any:
    """Sizes of the in-context regression."""
    for option in (
        click.option("--noise", type=Number(), required=True, help="Label noise variance, >= 0."),
        click.option("--context", type=Number(), required=True, help="Number of labelled tokens."),
        click.option("--dim", type=Number(), required=True, help="Input dimension."),
    ):
        command = option(command)
    return command


@click.command()
@regression_options
@click.option("--omega", type=NumberList(), required=True, help="Key-query scalar of each head.")
@click.option("--mu", type=NumberList(), required=True, help="Output-value scalar of each head.")
@plot_option
@json_option
def softmax_risk(
    dim: int, context: int, noise: float, omega: list[float], mu: list[float], plot: Path | None, as_json: bool
) -> None:
    """Exact risk of multi-head softmax attention, and the paper's approximation.

    Example:  attnlaws softmax-risk --dim 5 --context 40 --noise 0.1 --omega 0.1267,-0.1267 --mu 3.5006,-3.5006
    """
    from theory.problems import RegressionTask
    from validate.multihead_predictions import softmax_risk_prediction

    task = RegressionTask(dim, context, noise)
    prediction = softmax_risk_prediction(task, omega, mu)
    if plot is not None:
        from validate.figures.multihead import scale_plot

        write_plot(lambda: scale_plot(task, omega, mu), plot)
    if as_json:
        print_json(prediction)
        return
    print_lines(
        f"Softmax attention with {len(omega)} heads, dim {task.dim}, context {task.context}, noise {task.noise:g}",
        f"  exact risk          {prediction['exact']:.12g}  (within {prediction['tolerance']:.1e})",
        f"  approximate risk    {_number_or_reason(prediction, 'approximate', 'approximate_reason')}",
        f"  effective step      {prediction['effective_step']:.6g}",
        f"  at infinite length  {prediction['infinite_test_length']:.6g}",
    )
    if prediction["best_mu"] is None:
        print_lines(f"  best mu             undetermined: {prediction['best_mu_reason']}")
        return
    best = ", ".join(f"{value:.6g}" for value in prediction["best_mu"])
    print_lines(f"  best mu             {best}: risk {prediction['best_mu_risk']:.12g}")


@click.command()
@regression_options
@plot_option
@json_option
def icl_risk(dim: int, context: int, noise: float, plot: Path | None, as_json: bool) -> None:
    """Exact risks of one step of gradient descent, vanilla and debiased, and of Bayes.

    Example:  attnlaws icl-risk --dim 5 --context 40 --noise 0.1
    """
    from theory.problems import RegressionTask
    from validate.multihead_predictions import icl_risk_prediction

    task = RegressionTask(dim, context, noise)
    prediction = icl_risk_prediction(task)
    if plot is not None:
        from validate.figures.multihead import context_plot

        write_plot(lambda: context_plot(task), plot)
    if as_json:
        print_json(prediction)
        return
    bayes = _number_or_reason(prediction, "bayes", "bayes_reason")
    within = "" if prediction["bayes"] is None else f"  (within {prediction['bayes_tolerance']:.1e})"
    print_lines(
        f"In-context regression, dim {task.dim}, context {task.context}, noise {task.noise:g} (noisy labels)",
        f"  vanilla gradient descent   {prediction['vanilla']:.12g}  at step {prediction['step_vanilla']:.6g}",
        f"  debiased gradient descent  {prediction['debiased']:.12g}  at step {prediction['step_debiased']:.6g}",
        f"  Bayes                      {bayes}{within}",
        f"  Bayes, proportional limit  {prediction['bayes_limit']:.12g}",
        f"  debiased over Bayes        {_number_or_reason(prediction, 'ratio_debiased_bayes', 'ratio_reason', 6)}",
        f"  bound at this size         {_number_or_reason(prediction, 'ratio_bound', 'bound_reason', 6)}",
        f"  the paper's, in the limit  {_number_or_reason(prediction, 'ratio_bound_paper', 'bound_paper_reason', 6)}",
    )


@click.command()
@regression_options
@click.option("--heads", type=Number(), required=True, help="Number of heads, 1 to 4.")
@click.option(
    "--activation",
    type=click.Choice(["exp", "1+tanh", "1+Cx", "(1+Cx)^2"]),
    default="exp",
    show_default=True,
    help="Normalised activation; others than exp with two heads.",
)
@click.option("--scale", type=Number(), default=1.0, show_default=True, help="The constant C of 1+Cx and (1+Cx)^2.")
@json_option
def optimum(dim: int, context: int, noise: float, heads: int, activation: str, scale: float, as_json: bool) -> None:
    """The heads with the least exact risk, with a certificate of stationarity.

    Example:  attnlaws optimum --dim 5 --context 40 --noise 0.1 --heads 2
    """
    from theory.problems import RegressionTask, as_integer
    from theory.results import DomainError
    from validate.multihead_predictions import optimum_prediction

    task = RegressionTask(dim, context, noise)
    if "C" not in activation and scale != 1:
        raise DomainError(f"scale must be 1 for {activation}, which has no constant C, got {scale!r}")
    with busy("searching for the best heads"):
        prediction = optimum_prediction(task, as_integer("heads", heads, 1, 4), activation, scale)
    if as_json:
        print_json(prediction)
        return
    print_lines(
        f"Best {heads} heads ({activation}), dim {task.dim}, context {task.context}, noise {task.noise:g}",
        f"  omega           {_numbers(prediction['omega'])}",
        f"  mu              {_numbers(prediction['mu'])}",
        f"  effective step  {prediction['effective_step']:.8g}",
        f"  risk            {prediction['risk']:.12g}  (within {prediction['tolerance']:.1e})",
        f"  debiased descent {prediction['debiased']:.12g}",
    )
    if prediction["limit"]:
        print_lines(f"  a limit: {prediction['limit']}")
    if "gradient_norm" in prediction:
        curvatures = ", ".join(f"{value:.3g}" for value in prediction["curvatures"])
        print_lines(f"  gradient {prediction['gradient_norm']:.1e}, curvatures {curvatures}")


def _numbers(values: list[float] | None) -> str:
    return "none" if values is None else ", ".join(f"{value:.8g}" for value in values)


def _number_or_reason(prediction: dict[str, Any], name: str, reason: str, digits: int = 12) -> str:
    value = prediction[name]
    return f"undetermined: {prediction[reason]}" if value is None else f"{value:.{digits}g}"
