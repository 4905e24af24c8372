"""Multi-task regression (multi-head section 5.4): which heads serve which task, and the rule they implement."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import minimize

from sim.head_patterns import circuits_of, over_seeds, vectors_of
from sim.streams import stream
from sim.training import TrainingConfig, TrainingResult
from theory.multihead import multitask
from theory.problems import MultiTaskRegression
from theory.results import Estimate, FloatArray
from validate.figures.multihead_heads import CircuitMap, heads_figure
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_tables
from validate.trained.multihead import PLANS, layer_config, within
from validate.trained.rows import check_row
from validate.trained.runs import TrainedRuns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "multihead:multitask"
HEADS = (2, 3, 4)
# A head serves a task where its share of that task's step is at least this.
SERVES = 0.1
# Fixed before training: sums of mu over its sum of magnitudes, and steps off the rule, over the rule's.
ZERO_SUM = 0.05
RULE_TOLERANCE = 0.05
RISK_TOLERANCE = 0.02
# A member implements a rule where it is this near, relative, or nearer: distinct rules are three times as far apart.
NEAR = 0.1
# Starts of the search for the best rule of a rank: nearly all lead to the same risk.
RANK_STARTS = 6


def task() -> MultiTaskRegression:
    """The paper's two tasks on six coordinates."""
    printed = paper_tables()["multihead:multitask"]
    sets = tuple(tuple(members) for members in printed["tasks"])
    return MultiTaskRegression(printed["dim"], printed["context"], printed["noise"], sets)


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Layers with two, three and four heads."""
    return [layer_config(profile, seed, heads, problem=task()) for heads in HEADS]


def serving(omega: FloatArray, output: FloatArray, mask: FloatArray) -> FloatArray:
    r"""Which heads serve which task, (members, heads, tasks), bool.

    A head's share of task n is :math:`\sum_{n'}|(OV_{22}^{(h)})_{nn'}\sum_{i\in S_n}\omega_{hi}|` over all heads' sum.
    omega: (members, heads, d); output: OV_22, (members, heads, tasks, tasks); mask: (tasks, d). Source: multihead
    section 5.4; labels of other tasks beyond the paper.
    """
    parts = np.abs(output).sum(axis=3) * np.abs(np.einsum("mhi,ni->mhn", omega, mask))
    total = parts.sum(axis=1, keepdims=True)
    return np.asarray(parts / np.where(total == 0, 1.0, total) >= SERVES)


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Train and compare. profile: "quick" or "paper"; seed: of the training. Source: multihead section 5.4."""
    started = time.perf_counter()
    problem = task()
    rule = multitask.descent_rule(problem)
    rows: list[Row] = []
    maps: list[CircuitMap] = []
    results = runs.results(configs(profile, seed))
    for i, (heads, result) in enumerate(zip(HEADS, results, strict=True)):
        rows += _rows(heads, result, rule, problem)
        maps += _maps(heads, result, problem)
        progress((i + 1) / len(HEADS))
    plan = PLANS[profile]
    own = float(multitask.rule_risk(problem, rule).sum())
    cross = float(multitask.rule_risk(problem, multitask.cross_task_rule(problem)).sum())
    notes = (
        f"Two tasks on the coordinates 1-4 and 3-6 of 6, context {problem.context}, teachers of variance 1/6 per "
        f"coordinate; {plan.members} members each, {plan.layer_steps} steps.",
        f"Debiased descent of each task on its own labels has steps {rule.max():.4g}, risk {own:.4g} and rank two, so "
        "that it takes three heads: with three, some head must serve both tasks, and with four each can have a pair.",
        f"The teacher is shared, so that the other task's labels help: the best rule that reads both has risk "
        f"{cross:.4g} and rank three, which is what four heads can implement with full output matrices. The "
        "paper's reading, a pair of heads per task, is a rule that does worse.",
    )
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.layer_steps}
    return Table(NAME, "two tasks served by two, three and four heads", tuple(rows), notes, partial(_figure, maps),
                 time.perf_counter() - started, settings)  # fmt: skip


def _vectors(result: TrainingResult, problem: MultiTaskRegression) -> tuple[FloatArray, FloatArray]:
    return vectors_of(circuits_of(result.parameters, problem.dim))


def learned_rules(result: TrainingResult, problem: MultiTaskRegression) -> tuple[FloatArray, FloatArray]:
    r"""Rules of the members as ω → 0, :math:`g_{nn'i} = \sum_h(OV_{22}^{(h)})_{nn'}\omega_{hi}`, and sums of OV_22.

    Shapes (members, N, N, d) and (members, N, N): heads have full output matrices, so that they may read the labels of
    one task for another. Source: multihead section 5.4 with (4.10); full output matrices beyond the paper.
    """
    circuits = circuits_of(result.parameters, problem.dim)
    omega, _ = vectors_of(circuits)
    output = circuits.output_value[..., problem.dim :, problem.dim :]
    return np.einsum("mhab,mhi->mabi", output, omega), output.sum(axis=1)


@lru_cache(maxsize=8)
def _best_rule(problem: MultiTaskRegression, rank: int) -> tuple[tuple[float, ...], float]:
    shape = (len(problem.signal_sets) ** 2, problem.dim)
    split = shape[0] * rank

    def rule_of(x: FloatArray) -> FloatArray:
        product = x[:split].reshape(shape[0], rank) @ x[split:].reshape(rank, shape[1])
        return np.asarray(product.reshape(len(problem.signal_sets), -1, problem.dim))

    def risk(x: FloatArray) -> float:
        return float(multitask.rule_risk(problem, rule_of(x)).sum())

    found = []
    for start in range(RANK_STARTS):
        generator = stream(start, "best rule of a rank")
        found.append(minimize(risk, generator.normal(0, 0.5, split + rank * shape[1]), method="BFGS"))
    best = min(found, key=lambda end: float(end.fun))
    return tuple(rule_of(best.x).ravel().tolist()), float(best.fun)


def best_rule(problem: MultiTaskRegression, heads: int) -> tuple[FloatArray, float]:
    r"""The debiased rule of least risk that ``heads`` heads can implement, (N, N, d), and its risk over all tasks.

    Where :math:`\sum_hOV_{22}^{(h)} = 0`, g as a matrix of N² rows has at most rank h - 1. Minimised over the factors
    of such matrices from several starts. Source: beyond the paper.
    """
    values, risk = _best_rule(problem, heads - 1)
    return np.array(values).reshape(len(problem.signal_sets), -1, problem.dim), risk


def rule_distance(found: FloatArray, target: FloatArray) -> FloatArray:
    """Relative distance of each rule, (members, N, N, d), from ``target`` or its mirror image, (members,).

    The two tasks and the order of coordinates can be exchanged without changing the problem.
    """
    mirrored = target[::-1, ::-1, ::-1]
    distances = [np.sqrt(((found - one) ** 2).sum(axis=(1, 2, 3)) / (one**2).sum()) for one in (target, mirrored)]
    return np.asarray(np.min(distances, axis=0))


def _rows(heads: int, result: TrainingResult, rule: FloatArray, problem: MultiTaskRegression) -> list[Row]:
    setting: dict[str, float] = {"heads": heads}
    omega, mu = _vectors(result, problem)
    seeds = result.config.seeds
    mask = multitask.signal_mask(problem)
    best, least = best_rule(problem, heads)
    found, sums = learned_rules(result, problem)
    own = np.einsum("mnni->mni", found)
    step = over_seeds((own * mask).sum(axis=(1, 2)) / mask.sum(), seeds)
    theory = float((np.einsum("nni->ni", best) * mask).sum() / mask.sum())
    output = circuits_of(result.parameters, problem.dim).output_value[..., problem.dim :, problem.dim :]
    size = np.abs(output)
    total = over_seeds(np.abs(sums).max(axis=(1, 2)) / size.sum(axis=1).max(axis=(1, 2)), seeds)
    served = serving(omega, output, mask)
    both = (served.sum(axis=2) > 1).any(axis=1)
    distances = rule_distance(found, best)
    near = f"{int((distances <= NEAR).sum())} of {len(distances)} members within {NEAR:g}"
    agrees = within(step.value, theory, RULE_TOLERANCE, step.stderr)
    why = "" if agrees else "some members implement another rule of nearly the same risk"
    rows = [
        Row(setting, "own step on a task's coordinates", None, theory=theory,
            theory_text=f"best rule of rank {heads - 1}", trained=step,
            agreement=Agreement.AGREES if agrees else Agreement.DIFFERS, remark=why),
        Row(setting, "distance of the rule from the best", None, theory=0.0, theory_text=near,
            trained=over_seeds(distances, seeds)),
        check_row(setting, "zero sum of OV_22, largest entry", f"<= {ZERO_SUM:g}", total, total.value <= ZERO_SUM),
        _superposition_row(setting, both, rule, heads),
    ]  # fmt: skip
    if heads == 4:
        rows.append(_pairs_row(setting, served, omega, mu))
    rows.append(_risk_row(setting, result, rule, problem, least))
    return rows


def _superposition_row(setting: dict[str, float], both: FloatArray, rule: FloatArray, heads: int) -> Row:
    text = f"in {int(both.sum())} of {len(both)} members"
    name = "some head serves both tasks"
    if heads < multitask.heads_needed(rule):
        return Row(setting, name, None, theory_text=text, remark="two heads cannot implement a rule per task")
    if multitask.superposition_forced(rule, heads):
        agreement = Agreement.AGREES if both.all() else Agreement.DIFFERS
        return Row(setting, name, None, theory_text=f"must; {text}", agreement=agreement,
                   remark="fewer than two heads per task")  # fmt: skip
    return Row(setting, name, None, theory_text=f"need not; {text}",
               remark="reading the other task's labels takes superposition, and lowers the risk")  # fmt: skip


def _pairs_row(setting: dict[str, float], served: FloatArray, omega: FloatArray, mu: FloatArray) -> Row:
    """Members whose four heads are one ± pair per task."""
    count = 0
    sizes = []
    for own, w, m in zip(served, omega, mu, strict=True):
        pairs = (own.sum(axis=1) == 1).all() and (own.sum(axis=0) == 2).all()
        count += int(pairs)
        if pairs:
            sizes.append((np.abs(w).max(axis=1).mean(), np.abs(m).max(axis=1).mean()))
    mean = ""
    if sizes:
        w, m = np.mean(sizes, axis=0)
        mean = f"; there |omega| = {w:.3g}, |mu| = {m:.3g}"
    return Row(setting, "one +- pair per task", None, theory_text=f"in {count} of {len(served)} members{mean}",
               remark="the paper's reading; a rule on own labels only, which does worse")  # fmt: skip


def _risk_row(
    setting: dict[str, float], result: TrainingResult, rule: FloatArray, problem: MultiTaskRegression, least: float
) -> Row:
    own = float(multitask.rule_risk(problem, rule).sum())
    losses = result.measured["loss"]
    # Members share their test contexts: the error of the mean is that of one of them.
    mean = Estimate(float(np.mean([one.value for one in losses])), max(one.stderr for one in losses),
                    losses[0].samples, losses[0].chunks, losses[0].seed)  # fmt: skip
    close = within(mean.value, least, RISK_TOLERANCE, mean.stderr)
    return Row(setting, "risk, both tasks", None, theory=least,
               theory_text=f"best of rank {int(setting['heads']) - 1}; own labels only: {own:.4g}", trained=mean,
               agreement=Agreement.AGREES if close else Agreement.DIFFERS,
               remark="" if close else "training has not come to the best rule, or gamma is not small")  # fmt: skip


def _maps(heads: int, result: TrainingResult, problem: MultiTaskRegression) -> list[CircuitMap]:
    """Diagonals of the first member: ω over coordinates, and μ over tasks."""
    omega, mu = _vectors(result, problem)
    return [CircuitMap(f"{heads} heads", omega[0], mu[0].T)]


def _figure(maps: list[CircuitMap]) -> Figure:
    return heads_figure(maps, names=("omega: heads by coordinates", "mu"))
