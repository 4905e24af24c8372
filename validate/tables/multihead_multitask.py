"""Multi-task regression (multi-head section 5.4): which heads serve which task, and the rule they implement.

Two models: whole layers (2.2), whose output matrices may answer a task from the labels of another, and reduced heads
with a diagonal key-query matrix and one output weight per task, which read each task's own labels.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.experiments.multitask_heads import MultiTaskHeads
from sim.head_patterns import circuits_of, over_seeds, vectors_of
from sim.training import TrainingConfig, TrainingResult
from theory.multihead import multitask
from theory.multihead.activations import best_two_heads, exponential
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
# Heads are a pair where what their omega and mu leave of each other is at most this part of them: pairs come together
# as training goes on, and heads that are none leave half and more.
OPPOSITE = 0.2


def task() -> MultiTaskRegression:
    """The paper's two tasks on six coordinates."""
    printed = paper_tables()["multihead:multitask"]
    sets = tuple(tuple(members) for members in printed["tasks"])
    return MultiTaskRegression(printed["dim"], printed["context"], printed["noise"], sets)


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """Layers with two, three and four heads, and reduced heads of the same numbers."""
    wide = [layer_config(profile, seed, heads, problem=task()) for heads in HEADS]
    return wide + [reduced_config(one, heads) for one, heads in zip(wide, HEADS, strict=True)]


def reduced_config(layers: TrainingConfig, heads: int) -> TrainingConfig:
    """Reduced heads trained as ``layers`` are, with the loss averaged over teacher and noise, at twice their rate."""
    rate = 2 * layers.learning_rate
    experiment = MultiTaskHeads(task(), heads)
    return dataclasses.replace(layers, experiment=experiment, loss="teacher_averaged", learning_rate=rate)


def serving(omega: FloatArray, output: FloatArray, mask: FloatArray) -> npt.NDArray[np.bool_]:
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
    layers, reduced = results[: len(HEADS)], results[len(HEADS) :]
    for i, (heads, result) in enumerate(zip(HEADS, layers, strict=True)):
        rows += _rows(heads, result, rule, problem)
        maps += _maps(heads, result, problem)
        progress((i + 1) / len(results))
    for heads, result in zip(HEADS, reduced, strict=True):
        rows += _reduced_rows(heads, result, rule, problem)
        maps.append(CircuitMap(f"{heads} reduced heads", result.parameters["omega"][0], result.parameters["mu"][0].T))
    progress(1.0)
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
        "Reduced heads have one output weight per task and read its own labels only; their loss is averaged over the "
        f"teacher. Exact risk of a pair per task at its best scale: {_pairs_risk(problem):.5g}.",
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
    best, least = multitask.best_rule(problem, heads)
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


def _pairs_row(
    setting: dict[str, float], served: npt.NDArray[np.bool_], omega: FloatArray, mu: FloatArray, model: str = ""
) -> Row:
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
    why = "pairs may mix the tasks" if model else "a rule on own labels only, which does worse"
    text = f"in {count} of {len(served)} members{mean}"
    return Row(setting, f"{model}one +- pair per task", None, theory_text=text, remark=f"the paper's reading; {why}")


def _pairs_risk(problem: MultiTaskRegression) -> float:
    """Exact risk, all tasks, of heads that are one ± pair per task at their best scale."""
    alone = [multitask.task_alone(problem, number) for number in range(1, len(problem.signal_sets) + 1)]
    return sum(factor * best_two_heads(one, exponential()).risk.value for one, factor in alone)


def pair_departure(omega: FloatArray, mu: FloatArray) -> FloatArray:
    r"""How far an even number of heads is from ± pairs, (members,): 0 where they are.

    The least, over ways to pair them, of the largest :math:`|v_a + v_b|/(|v_a| + |v_b|)` over pairs, v being ω or μ.
    omega: (members, heads, d); mu: (members, heads, tasks). Source: multihead section 5.4.
    """
    left = np.maximum(_leftover(omega), _leftover(mu))
    worst = [np.max([left[:, a, b] for a, b in pairing], axis=0) for pairing in _pairings(range(omega.shape[1]))]
    return np.asarray(np.min(worst, axis=0))


def _leftover(vectors: FloatArray) -> FloatArray:
    """What each two of the vectors, (members, heads, n), leave of each other, (members, heads, heads)."""
    size = np.linalg.norm(vectors, axis=-1)
    both = size[:, :, None] + size[:, None, :]
    sums = np.linalg.norm(vectors[:, :, None] + vectors[:, None, :], axis=-1)
    return np.asarray(sums / np.where(both == 0, 1.0, both))


def _pairings(heads: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All ways to split an even number of heads into pairs."""
    if not heads:
        return [[]]
    first, rest = heads[0], heads[1:]
    return [
        [(first, other), *pairing]
        for i, other in enumerate(rest)
        for pairing in _pairings([*rest[:i], *rest[i + 1 :]])
    ]


def zero_sums(mu: FloatArray) -> FloatArray:
    """The largest sum of μ over heads, relative to the sum of magnitudes, (members,); mu: (members, heads, tasks).

    Source: multihead section 5.4.
    """
    return np.asarray((np.abs(mu.sum(axis=1)) / np.abs(mu).sum(axis=1)).max(axis=1))


def _reduced_rows(heads: int, result: TrainingResult, rule: FloatArray, problem: MultiTaskRegression) -> list[Row]:
    setting: dict[str, float] = {"heads": heads}
    omega, mu = result.parameters["omega"], result.parameters["mu"]
    mask = multitask.signal_mask(problem)
    best, least = multitask.best_rule(problem, heads, own_labels=True)
    settled = zero_sums(mu) <= ZERO_SUM
    count = f"{int(settled.sum())} of {len(settled)} members"
    why = "" if settled.all() else "the others are left out: heads of some task have not split yet"
    rows = [Row(setting, "reduced heads: sums of mu vanish", None, theory_text=f"in {count}", remark=why)]
    if settled.sum() < 2:
        return rows
    found = np.einsum("mhn,mhi->mni", mu, omega)[settled]
    wanted = np.einsum("nni->ni", best)
    seeds = [seed for seed, kept in zip(result.config.seeds, settled, strict=True) if kept]
    step = over_seeds((found * mask).sum(axis=(1, 2)) / mask.sum(), seeds)
    theory = float((wanted * mask).sum() / mask.sum())
    both = (_own_serving(omega, mu, mask).sum(axis=2) > 1).any(axis=1)[settled]
    forced = heads < 2 * len(mask)
    loss = _common_loss(result, settled)
    whole = multitask.best_rule(problem, heads)[1]
    rows += [
        Row(setting, "reduced heads: step on a task's coordinates", None, theory=theory,
            theory_text="best on own labels", trained=step, remark=f"mean over {count}",
            agreement=_agreement(within(step.value, theory, RULE_TOLERANCE, step.stderr))),
        Row(setting, "reduced heads: distance of the rule from the best", None, theory=0.0,
            trained=over_seeds(np.sqrt(((found - wanted) ** 2).sum(axis=(1, 2)) / (wanted**2).sum()), seeds)),
        Row(setting, "reduced heads: some head serves both tasks", None,
            theory_text=f"{'must' if forced else 'need not'}; in {int(both.sum())} of {len(both)} members",
            agreement=_agreement(bool(both.all())) if forced else Agreement.UNTESTED),
    ]  # fmt: skip
    if heads == 4:
        departure = pair_departure(omega, mu)[settled]
        rows.append(
            check_row(setting, "reduced heads: departure from two +- pairs", f"<= {OPPOSITE:g}",
                      over_seeds(departure, seeds), bool(departure.max() <= OPPOSITE))
        )  # fmt: skip
        rows.append(_pairs_row(setting, _own_serving(omega, mu, mask)[settled], omega[settled], mu[settled],
                               "reduced heads: "))  # fmt: skip
    rows.append(
        Row(setting, "reduced heads: risk, both tasks", None, theory=least,
            theory_text=f"best on own labels; layers that read both: {whole:.4g}", trained=loss,
            agreement=_agreement(within(loss.value, least, RISK_TOLERANCE, loss.stderr)))
    )  # fmt: skip
    return rows


def _own_serving(omega: FloatArray, mu: FloatArray, mask: FloatArray) -> npt.NDArray[np.bool_]:
    return serving(omega, mu[..., None] * np.eye(len(mask)), mask)


def _agreement(agrees: bool) -> Agreement:
    return Agreement.AGREES if agrees else Agreement.DIFFERS


def _common_loss(result: TrainingResult, kept: npt.NDArray[np.bool_]) -> Estimate:
    """Mean loss over members; they share their test contexts, so that its error is that of one of them."""
    estimates = [result.estimate("loss", int(member)) for member in np.flatnonzero(kept)]
    value = float(np.mean([one.value for one in estimates]))
    first = estimates[0]
    return Estimate(value, max(one.stderr for one in estimates), first.samples, first.chunks, first.seed)


def _risk_row(
    setting: dict[str, float], result: TrainingResult, rule: FloatArray, problem: MultiTaskRegression, least: float
) -> Row:
    own = float(multitask.rule_risk(problem, rule).sum())
    mean = _common_loss(result, np.ones(result.config.members, dtype=bool))
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
