"""Observations 1 to 4 of the multi-head paper as numbers, and its Figures 1, 3 and 5."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from sim.head_patterns import dynamics, head_patterns
from sim.training import TrainingConfig
from theory.multihead.solution_manifold import membership
from theory.results import Estimate, FloatArray
from validate.figures.multihead_heads import CircuitMap, HeadPath, circuit_maps, heads_figure
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_tables
from validate.trained.multihead import (
    PLANS,
    TASK,
    Ensemble,
    best_heads,
    core_configs,
    layers,
    merged_spread,
    settled_text,
    within,
)
from validate.trained.rows import check_row
from validate.trained.runs import TrainedRuns, TrainedTable

OBSERVATIONS, FIGURE_1, FIGURE_3, FIGURE_5 = (
    "multihead:observations", "multihead:figure-1", "multihead:figure-3", "multihead:figure-5",
)  # fmt: skip
# Thresholds for the words of the observations, fixed before training. "Approximately zero" entries, and "nearly
# identical" scales: a tenth of the largest head, which is what a heat map shows as white.
DIAGONAL = 0.1
HOMOGENEOUS = 0.1
# "Sum to zero": a twentieth of the sum of magnitudes. "Share the same sign": all but a hundredth of the step.
ZERO_SUM = 0.05
SAME_SIGN = 0.01
# Trained numbers within this share of the theory's: the issue of a finite number of steps, not of sampling.
TRAINED_TOLERANCE = 0.02
# "Nearly identical predictors": risks within 1 %, a tenth of what separates them from the least-squares floor.
SAME_RISK = 0.01
# "First increases and then decreases": by at least a tenth. "Monotonically increases": never falls by a fiftieth.
PEAK, FALL = 1.1, 0.02
# "Early": a tenth of the run; the pattern at a snapshot is judged at twice the thresholds of the end.
EARLY = 0.1
EARLY_FACTOR = 2


def no_configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Layers with paths are trained by `layers`, not with the other runs."""
    return []


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Observations 1 to 4. profile: "quick" or "paper"; seed: of the training. Source: multihead section 3."""
    started = time.perf_counter()
    ensembles = layers(runs, core_configs(profile, seed), progress)
    rows: list[Row] = []
    for ensemble in ensembles:
        rows += _values(ensemble) + _circuits(ensemble)
        if ensemble.heads > 1:
            rows += _heads(ensemble) + _path(ensemble)
    rows += _comparison(ensembles)
    plan = PLANS[profile]
    notes = (
        f"Layers (2.2), {plan.members} members each, {plan.layer_steps} steps, sampled loss. Errors are over members.",
        "Members whose heads all take one sign are trapped in a minimum that is no better than one head; they are "
        "counted, and left out of the means.",
        "Heads of one sign act together: what one has off the diagonal another can undo. Their sum, weighted by mu, is "
        "diagonal even where single heads are not.",
    )
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.layer_steps}
    return Table(OBSERVATIONS, "patterns of trained heads", tuple(rows), notes, partial(_risk_figure, ensembles),
                 time.perf_counter() - started, settings)  # fmt: skip


def _values(ensemble: Ensemble) -> list[Row]:
    """ω and μ beside the exact optimum: determined for one head; for two the step is."""
    setting, remark = _setting(ensemble), settled_text(ensemble)
    best = best_heads(min(ensemble.heads, 2))
    gamma = ensemble.over_members(ensemble.patterns.gamma)
    sizes = ensemble.over_members(np.maximum(ensemble.patterns.positive, -ensemble.patterns.negative))
    step = ensemble.over_members(ensemble.patterns.step)
    printed = paper_tables()["multihead:trained"]["one_head" if ensemble.heads == 1 else "two_heads"]
    w, m = float(np.abs(best.omega).max()), float(np.abs(best.mu).max())
    if ensemble.heads == 1:
        return [
            _value_row(setting, "|omega|", printed["omega"], w, gamma, remark),
            _value_row(setting, "|mu|", printed["mu"], m, sizes, remark),
        ]
    place = f"place along the valley; {remark}"
    return [
        Row(setting, "|omega|", printed["omega"], theory=w, theory_text="optimum of 2 heads", trained=gamma,
            remark=place),
        Row(setting, "sum of |mu| of one sign", printed["mu"], theory=m, theory_text="optimum of 2 heads",
            trained=sizes, remark=place),
        _value_row(setting, "effective step", None, float(best.omega @ best.mu), step, remark),
    ]  # fmt: skip


def _value_row(
    setting: dict[str, float], name: str, paper: float | None, theory: float, trained: Estimate | None, remark: str
) -> Row:
    """A determined number: trained here within 2 % of the theory, and printed likewise."""
    if trained is None:
        return Row(setting, name, paper, theory=theory, remark=remark)
    ours = within(trained.value, theory, TRAINED_TOLERANCE, trained.stderr)
    printed = paper is None or within(paper, theory, TRAINED_TOLERANCE)
    if ours and not printed:
        assert paper is not None
        remark = (
            f"the printed number is {100 * (paper / theory - 1):+.1f} % off the exact optimum, ours is not; {remark}"
        )
    return Row(setting, name, paper, theory=theory, trained=trained,
               agreement=Agreement.AGREES if ours and printed else Agreement.DIFFERS, remark=remark)  # fmt: skip


def _setting(ensemble: Ensemble) -> dict[str, float]:
    return {"heads": ensemble.heads}


def _circuits(ensemble: Ensemble) -> list[Row]:
    """Observation 1: circuits that are scalars. Dummy heads, which do nothing, are left out."""
    active = ensemble.patterns.groups != 0
    remark = settled_text(ensemble)
    rows = []
    for name, values in (
        ("KQ_11 - omega I, largest head", (ensemble.departures.spread * active).max(axis=1)),
        ("KQ_11 - omega I, heads of one sign together", merged_spread(ensemble)),
        ("KQ_21, largest head", (ensemble.departures.label_reads * active).max(axis=1)),
        ("OV_21, largest head", (ensemble.departures.input_writes * active).max(axis=1)),
    ):
        rows.append(_check(ensemble, name, values, DIAGONAL, remark))
    return rows


def _check(ensemble: Ensemble, name: str, values: FloatArray, limit: float, remark: str) -> Row:
    mean = ensemble.over_members(values)
    if mean is None:
        return Row(_setting(ensemble), name, None, theory=0.0, remark=remark)
    holds = mean.value <= limit
    if not holds and name.startswith("KQ_11 - omega I, largest"):
        remark = f"heads of one sign undo each other's rest, and that decays slowly; see them together; {remark}"
    return check_row(_setting(ensemble), name, f"<= {limit:g}", mean, holds, remark)


def _heads(ensemble: Ensemble) -> list[Row]:
    """Observations 1 (c) and 2, and the manifold."""
    patterns, remark = ensemble.patterns, settled_text(ensemble)
    trapped, total = int((~ensemble.settled).sum()), len(ensemble.settled)
    dummies = (patterns.groups == 0).sum(axis=1).astype(float)
    distance = np.array([membership(TASK, *pair).distance for pair in zip(ensemble.omega, ensemble.mu, strict=True)])
    risk = ensemble.exact_losses_at([TASK.context])
    best = best_heads(2).risk.value
    return [
        Row(_setting(ensemble), "trapped members", None, theory_text=f"{trapped} of {total}",
            remark="all heads of one sign; the paper does not mention them"),
        _check(ensemble, "omega and mu of different sign", patterns.sign_mismatch, SAME_SIGN, remark),
        _check(ensemble, "zero sum of mu", patterns.zero_sum, ZERO_SUM, remark),
        _check(ensemble, "spread of |omega|", patterns.homogeneity, HOMOGENEOUS, remark),
        Row(_setting(ensemble), "dummy heads", None, trained=ensemble.over_members(dummies),
            remark="not guaranteed, as the paper says"),
        Row(_setting(ensemble), "distance to the manifold", None, theory=0.0,
            trained=ensemble.over_members(distance), remark="in mu, at the gamma that was reached"),
        Row(_setting(ensemble), "exact risk of (omega, mu)", None, theory=best, theory_text="best 2 heads",
            trained=ensemble.measured_loss(), monte_carlo=None,
            agreement=Agreement.AGREES if within(float(risk[0]), best, TRAINED_TOLERANCE) else Agreement.DIFFERS,
            remark=f"exact, at the trained heads: {float(risk[0]):.5g}; trained column: measured loss of the layer"),
    ]  # fmt: skip


def _path(ensemble: Ensemble) -> list[Row]:
    """Observation 4."""
    steps, omega, mu = ensemble.path()
    patterns = head_patterns(omega, mu)
    seen = dynamics(patterns)
    remark = settled_text(ensemble)
    early = ensemble.over_members(_first_time(ensemble, patterns.sign_mismatch, patterns.zero_sum) / steps[-1])
    peak, fall = ensemble.over_members(seen.peak_ratio), ensemble.over_members(seen.largest_drop)
    if early is None or peak is None or fall is None:
        return [Row(_setting(ensemble), "path", None, remark=remark)]
    rises = bool((patterns.positive[-1] >= (1 - FALL) * patterns.positive.max(axis=0))[ensemble.settled].all())
    falls = f"it ends within {100 * FALL:g} % of its largest: the falls are noise of this rate; {remark}"
    return [
        check_row(_setting(ensemble), "signs and zero sum settle after, of the run", f"<= {EARLY:g}", early,
                  early.value <= EARLY, remark),
        check_row(_setting(ensemble), "largest |omega| over the last", f">= {PEAK:g}", peak, peak.value >= PEAK,
                  remark),
        check_row(_setting(ensemble), "largest fall of the sum of mu > 0", f"<= {FALL:g}", fall, fall.value <= FALL,
                  remark if fall.value <= FALL or not rises else falls),
    ]  # fmt: skip


def _first_time(ensemble: Ensemble, mismatch: FloatArray, zero_sum: FloatArray) -> FloatArray:
    """Step from which on signs and sum keep to (twice) the thresholds until the end, (members,)."""
    steps, _, _ = ensemble.path()
    kept = (mismatch <= EARLY_FACTOR * SAME_SIGN) & (zero_sum <= EARLY_FACTOR * ZERO_SUM)
    broken = np.where(kept, -1, np.arange(len(steps))[:, None]).max(axis=0)
    return np.asarray(steps[np.minimum(broken + 1, len(steps) - 1)], dtype=np.float64)


def _comparison(ensembles: Sequence[Ensemble]) -> list[Row]:
    """Observation 3: two heads beat one, and more are like two."""
    losses = {ensemble.heads: ensemble.measured_loss() for ensemble in ensembles}
    one, two = losses[1], losses[2]
    rows = []
    if one is not None and two is not None:
        rows.append(_ratio_row(2, 1, two, one, "< 1", two.value < one.value))
    for heads in (3, 4):
        more = losses[heads]
        if more is not None and two is not None:
            same = within(more.value, two.value, SAME_RISK)
            rows.append(_ratio_row(heads, 2, more, two, f"1 within {100 * SAME_RISK:g} %", same))
    return rows


def _ratio_row(heads: int, others: int, over: Estimate, under: Estimate, statement: str, holds: bool) -> Row:
    ratio = over.value / under.value
    # All are tested on common contexts; the error of the ratio is at most the larger relative one.
    stderr = ratio * max(over.stderr / over.value, under.stderr / under.value)
    estimate = Estimate(ratio, stderr, over.samples, over.chunks, over.seed)
    return check_row(
        {"heads": heads}, f"loss over that of {others} head" + "s" * (others > 1), statement, estimate, holds
    )


def _risk_figure(ensembles: Sequence[Ensemble]):  # type: ignore[no-untyped-def]
    """Heads of all members: where they end in (ω, μ)."""
    from validate.figures.multihead_heads import scatter_figure

    return scatter_figure([(f"{one.heads} head" + "s" * (one.heads > 1), one.omega, one.mu) for one in ensembles])


def _maps(ensemble: Ensemble) -> list[CircuitMap]:
    """Heat maps of the member that is shown."""
    member = ensemble.shown
    names = [f"head {head + 1}" for head in range(ensemble.heads)]
    circuits = type(ensemble.circuits)(
        ensemble.circuits.key_query[member], ensemble.circuits.output_value[member], TASK.dim
    )
    return circuit_maps(circuits, names)


def _head_path(ensemble: Ensemble) -> HeadPath:
    steps, omega, mu = ensemble.path()
    member = ensemble.shown
    return HeadPath(f"{ensemble.heads} heads", steps, omega[:, member], mu[:, member])


def _figure(name: str, title: str, heads: tuple[int, ...], profile: str, seed: int, progress: Progress,
            runs: TrainedRuns) -> Table:  # fmt: skip
    started = time.perf_counter()
    ensembles = layers(runs, core_configs(profile, seed, heads), progress)
    rows = [row for one in ensembles for row in (_values(one) + _circuits(one))]
    if name == FIGURE_5:
        rows = _path(ensembles[0]) + _pattern_rows(ensembles[0])
        maps = _snapshot_maps(ensembles[0])
        paths: list[HeadPath] = []
        columns = len(maps) // ensembles[0].heads
    else:
        maps = _maps(ensembles[0])
        columns = len(maps)
        paths = [_head_path(ensembles[-1])]
        if len(ensembles) > 1:
            rows += _heads(ensembles[-1])
    notes = (
        "Shown is the first member that is not trapped; numbers are means over all of those. Heat maps: the columns of "
        "KQ that act, and the last row of OV.",
        "KQ is scaled so that scores are x KQ x_q; columns for the query's label do not act and are not shown.",
    )
    plan = PLANS[profile]
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.layer_steps}
    return Table(name, title, tuple(rows), notes, partial(heads_figure, maps, paths, columns=columns),
                 time.perf_counter() - started, settings)  # fmt: skip


def _snapshot_indices(ensemble: Ensemble) -> list[int]:
    """Start, a twentieth, a tenth, a third and the end of the run."""
    last = len(ensemble.path()[0]) - 1
    return sorted({0, max(1, last // 20), max(1, last // 10), max(1, last // 3), last})


def _snapshot_circuits(ensemble: Ensemble, index: int):  # type: ignore[no-untyped-def]
    from sim.head_patterns import circuits_of

    assert ensemble.snapshots is not None
    parameters = {name: values[index] for name, values in ensemble.snapshots.parameters.items()}
    return circuits_of(parameters, TASK.dim, ensemble.experiment.logit_scale)


def _snapshot_maps(ensemble: Ensemble) -> list[CircuitMap]:
    steps, _, _ = ensemble.path()
    maps = []
    for head in range(ensemble.heads):
        for index in _snapshot_indices(ensemble):
            circuits = _snapshot_circuits(ensemble, index)
            member = type(circuits)(
                circuits.key_query[ensemble.shown, head : head + 1],
                circuits.output_value[ensemble.shown, head : head + 1],
                TASK.dim,
            )
            maps += circuit_maps(member, [f"head {head + 1}, step {steps[index]}"])
    return maps


def _pattern_rows(ensemble: Ensemble) -> list[Row]:
    """The diagonal pattern along the run."""
    from sim.head_patterns import circuit_patterns

    steps, _, _ = ensemble.path()
    rows = []
    for index in _snapshot_indices(ensemble):
        spread = circuit_patterns(_snapshot_circuits(ensemble, index)).spread.max(axis=1)
        rows.append(
            Row({"heads": ensemble.heads, "step": float(steps[index])}, "KQ_11 - omega I, largest head", None,
                theory=0.0, trained=ensemble.over_members(spread), remark=settled_text(ensemble))
        )  # fmt: skip
    return rows


OBSERVATIONS_ENTRY = TrainedTable(no_configs, build)
FIGURE_1_ENTRY = TrainedTable(no_configs, partial(_figure, FIGURE_1, "two trained heads, and their path", (2,)))
FIGURE_3_ENTRY = TrainedTable(
    no_configs, partial(_figure, FIGURE_3, "one trained head, and the path of four", (1, 4))
)
FIGURE_5_ENTRY = TrainedTable(no_configs, partial(_figure, FIGURE_5, "circuits of two heads along the run", (2,)))
