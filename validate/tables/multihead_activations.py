"""Multi-head Figures 9 to 11: two heads with other normalised activations: circuits, paths, and risk by length."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sim.head_patterns import Circuits, dynamics, head_patterns
from sim.montecarlo.multihead_training import ActivationName
from sim.training import TrainingConfig
from theory.multihead import activations
from theory.multihead.gradient_descent import softmax_length_risk
from theory.results import Estimate, FloatArray
from validate.figures.multihead_heads import CircuitMap, HeadPath, circuit_maps, heads_figure
from validate.figures.panels import Curve, Panel, estimate_curve, panel_figure
from validate.tables import multihead_table_1
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_rows
from validate.tables.multihead_lengths import DESCENT_TOLERANCE, Z_BOUND, at_lengths
from validate.tables.multihead_observations import (
    DIAGONAL,
    HOMOGENEOUS,
    PEAK,
    SAME_SIGN,
    ZERO_SUM,
    no_configs,
)
from validate.trained.multihead import PLANS, TASK, Ensemble, layer_config, layers, settled_text, within
from validate.trained.rows import CONSISTENT_Z, check_row
from validate.trained.runs import TrainedRuns, TrainedTable

FIGURE_9, FIGURE_10, FIGURE_11 = "multihead:figure-9", "multihead:figure-10", "multihead:figure-11"
HEADS = 2
# The three activations that the figures show.
SHOWN: tuple[tuple[ActivationName, float], ...] = (("1+Cx", 1.0), ("(1+Cx)^2", 0.5), ("1+tanh", 1.0))
# 1 + Cx has infinite gradients now and then; larger rates throw its weights far away.
LINEAR_RATE_FACTOR = 0.2
# An estimate with a larger relative error is of an infinite mean, and is not judged.
SENSIBLE_ERROR = 0.1


def shown_configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Two-head layers with the three activations."""
    configs = []
    for name, scale in SHOWN:
        config = layer_config(profile, seed, HEADS, name, scale)
        if name == "1+Cx":
            config = dataclasses.replace(config, learning_rate=LINEAR_RATE_FACTOR * config.learning_rate)
        configs.append(config)
    return configs


def _name(ensemble: Ensemble) -> str:
    experiment = ensemble.experiment
    return experiment.activation.replace("C", f"{experiment.activation_scale:g}")


def _figure(name: str, title: str, profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    started = time.perf_counter()
    ensembles = layers(runs, shown_configs(profile, seed), progress)
    rows: list[Row] = []
    maps: list[CircuitMap] = []
    paths: list[HeadPath] = []
    for ensemble in ensembles:
        if name == FIGURE_9:
            rows += _pattern_rows(ensemble)
            maps += _maps(ensemble)
        else:
            rows += _path_rows(ensemble)
            steps, omega, mu = ensemble.path()
            paths.append(HeadPath(_name(ensemble), steps, omega[:, ensemble.shown], mu[:, ensemble.shown]))
    plan = PLANS[profile]
    notes = (
        f"Layers (2.2) with two heads, {plan.members} members each, {plan.layer_steps} steps from PyTorch's start; for "
        f"1 + x at {LINEAR_RATE_FACTOR:g} of the rate.",
        "The risk of 1 + x is infinite wherever omega is not 0. From this start |omega| first grows, as with every "
        "activation, and there normalisers vanish in every few batches, which throws the weights about; members that "
        "have not come back to the valley show no pattern. The path of the other two is that of softmax.",
    )
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.layer_steps}
    return Table(name, title, tuple(rows), notes, partial(heads_figure, maps, paths), time.perf_counter() - started,
                 settings)  # fmt: skip


def _pattern_rows(ensemble: Ensemble) -> list[Row]:
    """Observations 1 and 2 for one activation."""
    patterns, remark, name = ensemble.patterns, settled_text(ensemble), _name(ensemble)
    rows = [
        Row({}, f"{name}: trapped members", None,
            theory_text=f"{int((~ensemble.settled).sum())} of {len(ensemble.settled)}",
            remark="all heads of one sign")
    ]  # fmt: skip
    for what, values, limit in (
        ("KQ_11 - omega I, largest head", ensemble.departures.spread.max(axis=1), DIAGONAL),
        ("OV_21, largest head", ensemble.departures.input_writes.max(axis=1), DIAGONAL),
        ("omega and mu of different sign", patterns.sign_mismatch, SAME_SIGN),
        ("zero sum of mu", patterns.zero_sum, ZERO_SUM),
        ("spread of |omega|", patterns.homogeneity, HOMOGENEOUS),
    ):
        mean = ensemble.over_members(values)
        row = Row({}, f"{name}: {what}", None, theory_text=f"<= {limit:g}", remark=remark)
        rows.append(
            row if mean is None
            else check_row({}, row.quantity, row.theory_text, mean, mean.value <= limit, _lost(ensemble, remark))
        )  # fmt: skip
    return rows


def _lost(ensemble: Ensemble, remark: str) -> str:
    if ensemble.experiment.activation != "1+Cx":
        return remark
    return f"from this start training rests where normalisers vanish; {remark}"


def _path_rows(ensemble: Ensemble) -> list[Row]:
    """Whether |ω| rises first and then falls."""
    _, omega, mu = ensemble.path()
    seen = dynamics(head_patterns(omega, mu))
    peak = ensemble.over_members(seen.peak_ratio)
    name, remark = _name(ensemble), settled_text(ensemble)
    statement = f">= {PEAK:g}" if ensemble.experiment.activation == "1+tanh" else ""
    quantity = f"{name}: largest |omega| over the last"
    if peak is None:
        return [Row({}, quantity, None, theory_text=statement, remark=remark)]
    if not statement:
        return [Row({}, quantity, None, trained=peak, remark=f"the paper calls this path more complicated; {remark}")]
    return [check_row({}, quantity, statement, peak, peak.value >= PEAK, remark)]


def _maps(ensemble: Ensemble) -> list[CircuitMap]:
    member = ensemble.shown
    circuits = Circuits(ensemble.circuits.key_query[member], ensemble.circuits.output_value[member], TASK.dim)
    return circuit_maps(circuits, [f"{_name(ensemble)}, head {head + 1}" for head in range(HEADS)])


def _printed_rows() -> list[dict[str, Any]]:
    wanted = [(name, scale if "C" in name else None) for name, scale in SHOWN]
    return [row for row in paper_rows(multihead_table_1.NAME) if (row["activation"], row["C"]) in wanted]


def figure_11_configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Heads (ω, μ) of Table 1 with the three activations."""
    return [multihead_table_1.row_config(printed, profile, seed) for printed in _printed_rows()]


def build_figure_11(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce Figure 11. profile: "quick" or "paper"; seed: of training and tests. Source: multihead Figure 11."""
    started = time.perf_counter()
    lengths = PLANS[profile].lengths
    rows: list[Row] = []
    panels = []
    results = runs.results(figure_11_configs(profile, seed))
    for i, (printed, result) in enumerate(zip(_printed_rows(), results, strict=True)):
        ensemble = Ensemble(result)
        act = activations.activation(printed["activation"], printed["C"] or 1.0)
        measured = ensemble.losses_at(lengths, seed)
        step = float(ensemble.patterns.step[ensemble.settled].mean())
        debiased = softmax_length_risk(TASK, step, lengths)
        exact = exact_losses(ensemble, act, lengths) if act.nonnegative else None
        rows += _length_rows(_name(ensemble), lengths, measured, debiased, exact, settled_text(ensemble))
        panels.append(_length_panel(_name(ensemble), lengths, measured, debiased, exact))
        progress((i + 1) / len(results))
    plan = PLANS[profile]
    notes = (
        f"Heads (omega, mu) of Table 1, {plan.members} members each. Debiased: gradient descent at the effective step "
        "of the trained heads. Exact: risk of the trained heads, where it is finite.",
        "With 1 + x the measured risk has no finite mean; what is measured is that contexts with a small normaliser "
        "are rare at the scale that was reached, and less so with fewer tokens.",
    )
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.head_steps}
    return Table(FIGURE_11, "activations at other numbers of tokens", tuple(rows), notes, partial(panel_figure, panels),
                 time.perf_counter() - started, settings)  # fmt: skip


def exact_losses(ensemble: Ensemble, act: activations.Activation, lengths: Sequence[int]) -> FloatArray:
    """Exact risk at other lengths of opposite heads with the members' mean magnitudes, mean over settled members."""
    kept = ensemble.settled
    gammas, mus = np.abs(ensemble.omega[kept]).mean(axis=1), np.abs(ensemble.mu[kept]).mean(axis=1)
    gamma, mu = float(gammas.mean()), float(mus.mean())
    return np.array([activations.activation_risk(task, act, gamma, mu).value for task in at_lengths(lengths)])


def _length_rows(
    name: str, lengths: Sequence[int], measured: Sequence[Estimate | None], debiased: FloatArray,
    exact: FloatArray | None, remark: str,
) -> list[Row]:  # fmt: skip
    rows = []
    for number, (length, estimate, descent) in enumerate(zip(lengths, measured, debiased, strict=True)):
        setting: dict[str, float] = {"tokens": length}
        if estimate is None:
            rows.append(Row(setting, f"{name}: risk", None, remark=remark))
            continue
        if exact is not None:
            z = estimate.z_score(float(exact[number]))
            rows.append(
                Row(setting, f"{name}: risk", None, theory=float(exact[number]), theory_text="exact", trained=estimate,
                    agreement=Agreement.AGREES if abs(z) <= Z_BOUND else Agreement.DIFFERS,
                    consistent=abs(z) <= CONSISTENT_Z or within(estimate.value, float(exact[number]), 0.005),
                    remark=f"z = {z:+.1f}; {remark}")
            )  # fmt: skip
        close = within(estimate.value, float(descent), DESCENT_TOLERANCE, estimate.stderr)
        agreement = Agreement.AGREES if close else Agreement.DIFFERS
        why = "" if close else "a finite scale does better than debiased descent with this step; "
        if estimate.stderr > SENSIBLE_ERROR * estimate.value:
            agreement, why = Agreement.UNTESTED, "the risk is infinite, and some contexts show it; "
        rows.append(
            Row(setting, f"{name}: risk against descent", None, theory=float(descent),
                theory_text="debiased, same step", trained=estimate,
                agreement=agreement, remark=f"{why}{remark}")
        )  # fmt: skip
    return rows


def _length_panel(
    name: str, lengths: Sequence[int], measured: Sequence[Estimate | None], debiased: FloatArray,
    exact: FloatArray | None,
) -> Panel:  # fmt: skip
    kept = [(length, one) for length, one in zip(lengths, measured, strict=True) if one is not None]
    curves = [
        estimate_curve("trained", [length for length, _ in kept], [one for _, one in kept], 0, "o"),
        Curve("debiased descent", lengths, debiased, "--", 1),
    ]
    if exact is not None:
        curves.append(Curve("exact", lengths, exact, "-", 0))
    return Panel(name, "risk", curves, "tokens")


FIGURE_9_ENTRY = TrainedTable(no_configs, partial(_figure, FIGURE_9, "circuits of two heads with other activations"))
FIGURE_10_ENTRY = TrainedTable(no_configs, partial(_figure, FIGURE_10, "paths of two heads with other activations"))
FIGURE_11_ENTRY = TrainedTable(figure_11_configs, build_figure_11)
