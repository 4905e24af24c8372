"""Multi-head Figures 4 and 8: risk at other numbers of tokens than in training, beside the exact curves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from sim.experiments.multihead import ReducedHeads, losses_by_length
from sim.training import TrainingConfig
from theory.multihead.bayes_risk import bayes_risk
from theory.multihead.gradient_descent import (
    linear_length_risk,
    softmax_length_risk,
    vanilla_step,
    vanilla_step_risk,
)
from theory.problems import RegressionTask
from theory.results import DomainError, Estimate, FloatArray
from validate.figures.panels import Curve, Panel, estimate_curve, panel_figure
from validate.tables.comparison import Agreement, Progress, Row, Table
from validate.tables.multihead_observations import no_configs
from validate.trained.multihead import (
    PLANS,
    TASK,
    Ensemble,
    core_configs,
    layer_config,
    layers,
    settled_text,
    within,
)
from validate.trained.rows import CONSISTENT_Z, check_row
from validate.trained.runs import TrainedRuns, TrainedTable

FIGURE_4, FIGURE_8 = "multihead:figure-4", "multihead:figure-8"
# A layer's circuits are scalars up to what training left: its risk may be this part off that of its (omega, mu).
CIRCUIT_TOLERANCE = 0.02
# Sampled against exact: the bound, in standard errors.
Z_BOUND = 3.0
# "Coincides with gradient descent": within 2 % of the debiased predictor at the same step.
DESCENT_TOLERANCE = 0.02


def least_squares_risk(task: RegressionTask) -> float:
    r"""Risk of ordinary least squares, :math:`\sigma^2\big(1 + \frac{d}{L-d-1}\big)`, for L > d + 1.

    Source: mean of an inverse Wishart matrix; curve of multihead Figure 4. Raises DomainError for smaller contexts.
    """
    surplus = task.context - task.dim - 1
    if surplus < 1:
        raise DomainError(f"context must be above dim + 1 = {task.dim + 1} for least squares, got {task.context}")
    return task.noise * (1 + task.dim / surplus)


def at_lengths(lengths: Sequence[int]) -> list[RegressionTask]:
    """The paper's task with other numbers of tokens."""
    return [dataclasses.replace(TASK, context=length) for length in lengths]


def build_figure_4(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce Figure 4. profile: "quick" or "paper"; seed: of training and tests. Source: multihead Figure 4."""
    started = time.perf_counter()
    lengths = PLANS[profile].lengths
    rows: list[Row] = []
    curves: list[Curve] = []
    ensembles = layers(runs, core_configs(profile, seed), progress)
    measured: dict[int, list[Estimate | None]] = {}
    for number, ensemble in enumerate(ensembles):
        measured[ensemble.heads] = ensemble.losses_at(lengths, seed)
        exact = ensemble.exact_losses_at(lengths)
        rows += length_rows(ensemble, lengths, measured[ensemble.heads], exact)
        rows += _scalar_rows(ensemble, lengths, seed)
        curves += [
            _measured_curve(f"{_heads_text(ensemble)}, trained", lengths, measured[ensemble.heads], number),
            Curve(f"{_heads_text(ensemble)}, exact" if ensemble.heads < 3 else "", lengths, exact, "-", number),
        ]
    two = next(one for one in ensembles if one.heads == 2)
    step = float(two.patterns.step[two.settled].mean())
    rows += _reference_rows(lengths, measured[2], step)
    panels = [
        Panel("(a) heads", "risk", curves, "tokens", log_y=False),
        Panel("(b) estimators", "risk", _reference_curves(lengths, measured[2], step), "tokens", log_y=False),
    ]
    notes = (
        "Exact: the risk of the trained (omega, mu), mean over settled members. All members and lengths' tests share "
        "contexts, so that the error is that of one member.",
        "The layers differ from (omega, mu) by what training left off the pattern; heads with exactly these (omega, "
        "mu) are tested as well, and must agree with the exact risk.",
        f"Gradient descent takes the step of the two trained heads, {step:.4g}, at every length; ridge is tuned to the "
        "noise, and is Bayes.",
    )
    return _table(FIGURE_4, "risk against the number of tokens", rows, notes, panels, profile, seed, started)


def _heads_text(ensemble: Ensemble) -> str:
    return "1 head" if ensemble.heads == 1 else f"{ensemble.heads} heads"


def length_rows(
    ensemble: Ensemble, lengths: Sequence[int], measured: Sequence[Estimate | None], exact: npt.ArrayLike
) -> list[Row]:
    """Measured risk of trained layers beside the exact risk of their (ω, μ)."""
    rows = []
    for length, estimate, risk in zip(lengths, measured, np.asarray(exact), strict=True):
        setting: dict[str, float] = {"heads": ensemble.heads, "tokens": length}
        if estimate is None:
            rows.append(Row(setting, "risk of the layer", None, theory=float(risk), remark=settled_text(ensemble)))
            continue
        z = estimate.z_score(float(risk))
        close = within(estimate.value, float(risk), CIRCUIT_TOLERANCE, estimate.stderr)
        rows.append(
            Row(setting, "risk of the layer", None, theory=float(risk), theory_text="exact, trained (omega, mu)",
                trained=estimate, agreement=Agreement.AGREES if abs(z) <= Z_BOUND else Agreement.DIFFERS,
                consistent=close,
                remark=f"z = {z:+.1f}; {settled_text(ensemble)}" + (
                    "" if abs(z) <= Z_BOUND else "; circuits are not quite scalars"))
        )  # fmt: skip
    return rows


def _scalar_rows(ensemble: Ensemble, lengths: Sequence[int], seed: int) -> list[Row]:
    """The same (ω, μ) as heads of exactly that form, tested by sampling: this must agree."""
    from sim.models.multihead_attention import ScalarHeads

    member = ensemble.shown
    omega, mu = ensemble.omega[member : member + 1], ensemble.mu[member : member + 1]
    size = ensemble.result.config.evaluation
    model = ScalarHeads(omega, mu)
    sampled = losses_by_length(ReducedHeads(TASK, ensemble.heads), model, lengths, size=size, seed=seed)
    from validate.multihead_training import exact_length_risks

    exact = exact_length_risks(TASK, omega, mu, lengths)[:, 0]
    rows = []
    for length, (estimate,), risk in zip(lengths, sampled, exact, strict=True):
        z = estimate.z_score(float(risk))
        rows.append(
            Row({"heads": ensemble.heads, "tokens": length}, "risk of heads (omega, mu)", None, theory=float(risk),
                theory_text="exact", monte_carlo=estimate, trained=None,
                agreement=Agreement.AGREES if abs(z) <= Z_BOUND else Agreement.DIFFERS,
                consistent=abs(z) <= CONSISTENT_Z, remark=f"z = {z:+.1f}; one trained member")
        )  # fmt: skip
    return rows


def _reference_rows(lengths: Sequence[int], measured: Sequence[Estimate | None], step: float) -> list[Row]:
    """Two trained heads beside gradient descent at their step."""
    rows = []
    for length, estimate, debiased in zip(lengths, measured, softmax_length_risk(TASK, step, lengths), strict=True):
        if estimate is None:
            continue
        holds = within(estimate.value, float(debiased), DESCENT_TOLERANCE, estimate.stderr)
        rows.append(
            Row({"heads": 2, "tokens": length}, "two heads against debiased descent", None, theory=float(debiased),
                theory_text="debiased, same step", trained=estimate,
                agreement=Agreement.AGREES if holds else Agreement.DIFFERS,
                remark="" if holds else "gamma is not small at this point of the valley")
        )  # fmt: skip
    return rows


def _reference_curves(lengths: Sequence[int], measured: Sequence[Estimate | None], step: float) -> list[Curve]:
    tasks = at_lengths(lengths)
    return [
        _measured_curve("two heads, trained", lengths, measured, 1),
        Curve("debiased descent", lengths, softmax_length_risk(TASK, step, lengths), "-", 5),
        Curve("vanilla descent", lengths, [float(vanilla_step_risk(task, step)) for task in tasks], "--", 3),
        Curve("ridge (Bayes)", lengths, [bayes_risk(task).value for task in tasks], "-", 2),
        Curve("least squares", lengths, [least_squares_risk(task) for task in tasks], "--", 4),
    ]


def _measured_curve(label: str, lengths: Sequence[int], measured: Sequence[Estimate | None], colour: int) -> Curve:
    kept = [(length, one) for length, one in zip(lengths, measured, strict=True) if one is not None]
    return estimate_curve(label, [length for length, _ in kept], [one for _, one in kept], colour, "o")


def linear_config(profile: str, seed: int) -> TrainingConfig:
    """Linear attention (5.1) with one head."""
    return layer_config(profile, seed, 1, "x/L")


def figure_8_configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Linear attention; softmax layers are trained with their paths."""
    return [linear_config(profile, seed)]


def build_figure_8(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce Figure 8. profile: "quick" or "paper"; seed: of training and tests. Source: multihead Figure 8."""
    started = time.perf_counter()
    lengths = PLANS[profile].lengths
    linear = Ensemble(runs.results(figure_8_configs(profile, seed))[0])
    rows: list[Row] = []
    curves: list[Curve] = []
    measured = linear.losses_at(lengths, seed)
    exact = np.mean([linear_length_risk(TASK, step, lengths) for step in linear.patterns.step], axis=0)
    rows += _linear_rows(linear, lengths, measured, exact)
    step = float(linear.patterns.step.mean())
    line = np.arange(lengths[0], lengths[-1] + 1)
    curves += [
        _measured_curve("linear attention", lengths, measured, 0),
        Curve("exact", line, linear_length_risk(TASK, step, line), "-", 0),
    ]
    for number, ensemble in enumerate(layers(runs, core_configs(profile, seed, (1, 2)), progress), 1):
        losses = ensemble.losses_at(lengths, seed)
        exact = ensemble.exact_losses_at(lengths)
        rows += length_rows(ensemble, lengths, losses, exact)
        rows.append(_length_check(ensemble, lengths, losses, grows=False))
        name = "one head" if ensemble.heads == 1 else "two heads"
        curves += [_measured_curve(name, lengths, losses, number), Curve("", lengths, exact, "-", number)]
    notes = (
        "Linear attention divides by the length it was trained at, so that its step grows with the number of tokens: "
        "its risk is least near the training length over the step, and then grows as the square.",
        "Softmax divides by what it sees.",
    )
    panels = [Panel("trained at 40 tokens", "risk", curves, "tokens")]
    return _table(FIGURE_8, "linear against softmax attention at other lengths", rows, notes, panels, profile, seed,
                  started)  # fmt: skip


def _linear_rows(
    linear: Ensemble, lengths: Sequence[int], measured: Sequence[Estimate | None], exact: FloatArray
) -> list[Row]:
    best = vanilla_step(TASK)
    step = linear.over_members(linear.patterns.step)
    rows = [
        Row({"heads": 1}, "step of linear attention", None, theory=best, theory_text="best vanilla step", trained=step,
            agreement=Agreement.AGREES if step is not None and within(step.value, best, 0.02, step.stderr)
            else Agreement.DIFFERS)
    ]  # fmt: skip
    for row in length_rows(linear, lengths, measured, exact):
        rows.append(dataclasses.replace(row, quantity="risk of linear attention", theory_text="exact, trained step"))
    rows.append(_length_check(linear, lengths, measured, grows=True))
    return rows


def _length_check(
    ensemble: Ensemble, lengths: Sequence[int], measured: Sequence[Estimate | None], *, grows: bool
) -> Row:
    """Whether the risk at the longest context is above that at the training length."""
    kind = "linear" if grows else "softmax"
    at_training, longest = measured[list(lengths).index(TASK.context)], measured[-1]
    setting: dict[str, float] = {"heads": ensemble.heads, "tokens": lengths[-1]}
    if at_training is None or longest is None:
        return Row(setting, f"{kind}: risk over that at {TASK.context} tokens", None, remark=settled_text(ensemble))
    ratio = longest.value / at_training.value
    relative = np.hypot(longest.stderr / longest.value, at_training.stderr / at_training.value)
    estimate = Estimate(ratio, ratio * float(relative), longest.samples, longest.chunks, longest.seed)
    return check_row(setting, f"{kind}: risk over that at {TASK.context} tokens", "> 1" if grows else "< 1", estimate,
                     (ratio > 1) == grows)  # fmt: skip


def _table(
    name: str, title: str, rows: Sequence[Row], notes: tuple[str, ...], panels: Sequence[Panel], profile: str,
    seed: int, started: float,
) -> Table:  # fmt: skip
    plan = PLANS[profile]
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.layer_steps}
    return Table(name, title, tuple(rows), notes, partial(panel_figure, panels), time.perf_counter() - started,
                 settings)  # fmt: skip


FIGURE_4_ENTRY = TrainedTable(no_configs, build_figure_4)
FIGURE_8_ENTRY = TrainedTable(figure_8_configs, build_figure_8)
