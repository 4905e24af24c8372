"""Sections 5.3 and 5.4 on trained ensembles: the matrix of two heads, and which heads serve which of two tasks.

Whole layers (2.2) with sampled labels, and reduced heads that read each task's own labels only. The best rule of a
rank is known exactly, see `theory.multihead.multitask.best_rule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from scipy.stats import t as student_t

from sim.contexts import SampleSize
from sim.experiments.multihead import MultiHead
from sim.experiments.multitask_heads import MultiTaskHeads
from sim.head_patterns import circuits_of, vectors_of
from sim.streams import stream
from sim.training import TrainingConfig, TrainingResult, train
from theory.multihead import gradient_descent as descent
from theory.multihead import multitask
from theory.problems import MultiTaskRegression
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical
from validate.claims.multihead.extensions import ANISOTROPIC, MULTITASK
from validate.claims.multihead.setup import FALSE_ALARM, worst_score, z_score
from validate.tables.multihead_figure_12 import distance, preconditioners
from validate.tables.multihead_multitask import (
    OPPOSITE,
    learned_rules,
    pair_departure,
    rule_distance,
    serving,
    zero_sums,
)

LEDGER = Ledger()
MEMBERS, RATE = 4, 0.01
# Three and four heads of a layer rest at rules of lower rank on the way.
STEPS = {2: 1500, 3: 3000, 4: 3000}
# Averaged over the teacher, twice the rate is as calm, and brings four heads to pairs.
REDUCED_RATE = 0.02
HEADS = (2, 3, 4)
# What public code trains on: unscaled teachers and a context of 48, for which a step of 0.91 to 0.93 is reported.
PUBLIC = MultiTaskRegression(6, 48, 0.1, MULTITASK.signal_sets)
# Distinct rules are three times as far apart; zero sums are as exact as training is complete.
NEAR, ZERO_SUM, CLOSE = 0.1, 0.05, 0.02
# One-sided bounds on measured losses: standard errors of a mean over chunks.
CHUNKS, DEVIATIONS = 16, 5.0


def _training(heads: int, rate: float = RATE) -> str:
    return f"{MEMBERS} members, {STEPS[heads]} Adam steps at {rate:g}, falling"


@lru_cache(maxsize=12)
def _trained(experiment: MultiHead | MultiTaskHeads) -> TrainingResult:
    reduced = isinstance(experiment, MultiTaskHeads)
    return train(
        TrainingConfig(
            experiment,
            steps=STEPS[experiment.heads],
            learning_rate=REDUCED_RATE if reduced else RATE,
            loss="teacher_averaged" if reduced else "sampled",
            seeds=tuple(range(MEMBERS)),
            evaluation=SampleSize(CHUNKS, 2, 512),
        )
    )


def _layers(heads: int) -> TrainingResult:
    return _trained(MultiHead(MULTITASK, heads))


def _domain(heads: int) -> str:
    return f"layers (2.2) with {heads} heads, the paper's two tasks, {_training(heads)}"


def _reduced_domain(heads: int) -> str:
    return f"{heads} reduced heads, the paper's two tasks, {_training(heads, REDUCED_RATE)}"


def _served(result: TrainingResult) -> FloatArray:
    """How many tasks each head of each member serves, (members, heads)."""
    circuits = circuits_of(result.parameters, MULTITASK.dim)
    output = circuits.output_value[..., MULTITASK.dim :, MULTITASK.dim :]
    counts = serving(vectors_of(circuits)[0], output, multitask.signal_mask(MULTITASK)).sum(axis=2)
    return np.asarray(counts, dtype=np.float64)


@LEDGER.claim(
    "multihead:fig-18-trained",
    "four heads on two tasks take a task each",
    r"H>N:\ \text{distinct task-specific attention patterns, implementing multiple pre-conditioned GD updates in parallel}",
    reading="layers (2.2) with four heads on the two tasks of section 5.4: no head serves both, and each task is "
    "answered from its own labels",
)
def heads_by_task() -> Iterator[Evidence]:
    result = _layers(4)
    both = (_served(result) > 1).any(axis=1)
    yield Evidence(Method.SWEEP, float(both.mean()), 0.0, "part of members with a head for both tasks", _domain(4))
    rules, _ = learned_rules(result, MULTITASK)
    own = np.abs(np.einsum("mnni->mni", rules)).max(axis=(1, 2))
    cross = np.abs(np.stack([rules[:, 0, 1], rules[:, 1, 0]])).max(axis=(0, 2))
    yield Evidence(
        Method.SWEEP,
        float(np.median(cross / own)),
        NEAR,
        "largest step on the other task's labels over the largest on its own, median member",
        _domain(4),
    )


@LEDGER.correction(
    "multihead:fig-18-trained",
    Relation.OVERCLAIM,
    r"g_{nn'i}=\sum_h(OV_{22}^{(h)})_{nn'}\omega_{hi}\ \text{of rank}\le H-1,\ \text{near the best of that rank}",
    "the teacher is shared, so that labels of the other task help where signal sets overlap; a pair of heads per task "
    "is a rule of rank two with a risk of 0.3674, four heads reach a rule of rank three with 0.3383",
)
def heads_by_rank() -> Iterator[Evidence]:
    for heads in HEADS:
        result = _layers(heads)
        rules, sums = learned_rules(result, MULTITASK)
        best, _ = multitask.best_rule(MULTITASK, heads)
        sizes = np.abs(
            circuits_of(result.parameters, MULTITASK.dim).output_value[..., MULTITASK.dim :, MULTITASK.dim :]
        )
        left = np.abs(sums).max(axis=(1, 2)) / sizes.sum(axis=1).max(axis=(1, 2))
        yield Evidence(Method.SWEEP, left.max(), ZERO_SUM, "sum of OV_22 over its magnitudes", _domain(heads))
        far = float(np.median(rule_distance(rules, best)))
        what = f"relative distance from the best rule of rank {heads - 1}, median member"
        yield Evidence(Method.SWEEP, far, NEAR, what, _domain(heads))
    own = float(multitask.rule_risk(MULTITASK, multitask.descent_rule(MULTITASK)).sum())
    loss = _layers(4).estimate("loss", int(np.argmin([one.value for one in _layers(4).measured["loss"]])))
    bound = loss.value + DEVIATIONS * loss.stderr
    chance = MEMBERS * float(student_t.sf(DEVIATIONS, CHUNKS - 1))
    what = f"measured loss of the best member plus {DEVIATIONS:g} standard errors, over that of a pair per task"
    yield Evidence(Method.STATISTICAL, bound / own, 1.0, what, _domain(4), chance)


@LEDGER.claim(
    "multihead:fig-19-trained",
    "three heads on two tasks superpose them",
    r"H<2N:\ \text{individual heads encode multiple tasks simultaneously}",
    reading="layers (2.2) with three heads, and reduced heads: in every member some head has a tenth or more of the "
    "step of either task",
)
def three_heads_superpose() -> Iterator[Evidence]:
    layers = (_served(_layers(3)) > 1).any(axis=1)
    yield Evidence(Method.SWEEP, float((~layers).mean()), 0.0, "part of members without such a head", _domain(3))
    reduced = (_reduced_served(_trained(MultiTaskHeads(MULTITASK, 3))) > 1).any(axis=1)
    yield Evidence(
        Method.SWEEP,
        float((~reduced).mean()),
        0.0,
        "part of members without such a head",
        _reduced_domain(3),
    )


def _reduced_served(result: TrainingResult) -> FloatArray:
    omega, mu = result.parameters["omega"], result.parameters["mu"]
    counts = serving(omega, mu[..., None] * np.eye(2), multitask.signal_mask(MULTITASK)).sum(axis=2)
    return np.asarray(counts, dtype=np.float64)


@LEDGER.claim(
    "beyond:multi-task-ranks",
    "the best risk that two, three and four heads can have on two tasks",
    r"\min_{\mathrm{rank}\,g\le H-1}\mathcal L(g)=0.4218,\ 0.3656,\ 0.3383;\quad\text{own labels only: }0.4219,\ 0.3674,\ 0.3674",
)
def best_risks() -> Iterator[Evidence]:
    stated = {(2, False): 0.4218, (3, False): 0.3656, (4, False): 0.3383, (2, True): 0.4219, (3, True): 0.3674,
              (4, True): 0.3674}  # fmt: skip
    gap, gain, scores = 0.0, 0.0, []
    for index, ((heads, own), value) in enumerate(stated.items()):
        rule, risk = multitask.best_rule(MULTITASK, heads, own_labels=own)
        gap = max(gap, abs(risk - value))
        rng = stream(69, "beyond:multi-task-ranks", index)
        gain = max(gain, risk - _best_change(rule, heads - 1, own, rng))
        scores.append(z_score(_sampled_losses(rule, rng), risk))
    domain = "two to four heads, with and without the other task's labels"
    yield Evidence(Method.NUMERIC, gap, 5.1e-5, "risk minus its stated value", domain)
    what = "gain by the best of 200 random changes of both factors of the rule"
    yield Evidence(Method.SWEEP, max(gain, 0.0), 1e-12, what, domain)
    yield statistical(worst_score(scores), FALSE_ALARM / 6, "sampled risk against best_rule", domain)


def _best_change(rule: FloatArray, rank: int, own: bool, rng: np.random.Generator) -> float:
    """The least risk after small random changes of the factors of a rule."""
    tasks = len(rule)
    flat = np.einsum("nni->ni", rule) if own else rule.reshape(tasks**2, -1)
    U, s, V = np.linalg.svd(flat, full_matrices=False)
    left, right = U[:, :rank] * s[:rank], V[:rank]
    risks = []
    for size in np.repeat((0.1, 0.01, 0.001, 1e-4), 50):
        A, B = left + size * rng.standard_normal(left.shape), right + size * rng.standard_normal(right.shape)
        changed = A @ B if own else (A @ B).reshape(rule.shape)
        risks.append(float(multitask.rule_risk(MULTITASK, changed).sum()))
    return min(risks)


def _sampled_losses(rule: FloatArray, rng: np.random.Generator) -> FloatArray:
    task, count = MULTITASK, 5000
    mask, deviation = multitask.signal_mask(task), np.sqrt(task.noise)
    X = rng.standard_normal((count, task.context, task.dim))
    query, beta = rng.standard_normal((2, count, task.dim))
    beta /= np.sqrt(task.dim)
    Y = (X * beta[:, np.newaxis]) @ mask.T + deviation * rng.standard_normal((count, task.context, len(mask)))
    label = (query * beta) @ mask.T + deviation * rng.standard_normal((count, len(mask)))
    features = np.einsum("mln,mli->mni", Y, X - X.mean(axis=1, keepdims=True)) / task.context
    guess = np.einsum("nai,mai,mi->mn", rule, features, query)
    return np.asarray(((label - guess) ** 2).sum(axis=1))


@LEDGER.claim(
    "beyond:multi-task-trained",
    "heads that read own labels take the step of descent; four are two pairs, which mix the tasks",
    r"\sum_h\mu_{hn}\approx0,\quad\sum_h\mu_{hn}\omega_{hi}\approx\frac{1\{i\in S_n\}}{1+(|S_n|+\sigma^2/\tau^2)/L}:\ 0.897,\ "
    r"\text{and }0.921\text{ for }\tau^2=1,\ L=48",
    reading="reduced heads, one output weight per task, three and four of them",
    measurement=True,
)
def reduced_heads() -> Iterator[Evidence]:
    for task, tau, heads in ((MULTITASK, None, 3), (MULTITASK, None, 4), (PUBLIC, 1.0, 4)):
        mask, rule = multitask.signal_mask(task), multitask.descent_rule(task, tau)
        result = _trained(MultiTaskHeads(task, heads, teacher_variance=tau))
        omega, mu = result.parameters["omega"], result.parameters["mu"]
        variance = 1 / task.dim if tau is None else tau
        domain = f"{heads} heads, d = 6, L = {task.context}, tau^2 = {variance:.3g}, {_training(heads, REDUCED_RATE)}"
        yield Evidence(Method.SWEEP, zero_sums(mu).max(), ZERO_SUM, "sum of mu over its magnitudes", domain)
        found = np.einsum("mhn,mhi->mni", mu, omega)
        step = float((found * mask).sum() / (len(found) * mask.sum()) / rule.max() - 1)
        yield Evidence(Method.NUMERIC, step, CLOSE, "mean step against that of descent", domain)
        rest = np.abs(found * (1 - mask)).max() / rule.max()
        yield Evidence(Method.SWEEP, rest, NEAR, "largest step elsewhere over that of descent", domain)
        if heads == 4:
            yield Evidence(
                Method.SWEEP, pair_departure(omega, mu).max(), OPPOSITE, "departure from two pairs", domain
            )
    apart = (_reduced_served(_trained(MultiTaskHeads(MULTITASK, 4))) == 1).all(axis=1)
    yield Evidence(
        Method.SWEEP, float(apart.mean()), 0.5, "part of members with a task to each head", _reduced_domain(4)
    )


def _matrices() -> FloatArray:
    """Matrices of the members that have heads of either sign, (members, d, d)."""
    result = _trained(MultiHead(ANISOTROPIC[0], 2))
    circuits = circuits_of(result.parameters, ANISOTROPIC[0].dim)
    mu = vectors_of(circuits)[1][..., 0]
    return np.asarray(preconditioners(result, ANISOTROPIC[0].dim)[mu.min(axis=1) * mu.max(axis=1) < 0])


_CORRELATED = f"two heads, d = 5, L = 40, noise 0.1, rho = 0.5, {_training(2)}"


@LEDGER.claim(
    "multihead:fig-12-trained",
    "the trained matrix is nearer to that of (5.6) than to the inverse covariance",
    r"\|\Omega-\tilde\Sigma^{-1}\|<\|\Omega-\Sigma^{-1}\|",
    reading="Omega as the whole matrix that acts, the sum of mu KQ_11; Frobenius norms, every member with heads of "
    "either sign",
    measurement=True,
)
def nearer_to_the_printed_matrix() -> Iterator[Evidence]:
    found, task = _matrices(), ANISOTROPIC[0]
    printed = distance(found, descent.vanilla_preconditioner(task))
    inverse = distance(found, np.asarray(np.linalg.inv(task.covariance_matrix())))
    yield Evidence(Method.NUMERIC, float(len(found) < 2), 0.0, "1 if fewer than two members have both", _CORRELATED)
    worst = float((printed / inverse).max())
    yield Evidence(Method.SWEEP, worst, 1.0, "ratio of relative distances, worst member", _CORRELATED)


@LEDGER.claim(
    "beyond:trained-preconditioner",
    "the trained matrix is that of debiased descent, which two heads implement, and not that of (5.6)",
    r"\textstyle\sum_h\mu_hKQ_{11}^{(h)}\approx\Big(\Sigma+\frac{tr(\Sigma)+d\sigma^2}LI_d\Big)^{-1}",
    reading="the two differ by the factor 1 + 1/L before the covariance, mostly in scale",
    measurement=True,
)
def debiased_matrix() -> Iterator[Evidence]:
    found, task = _matrices(), ANISOTROPIC[0]
    best, printed = descent.debiased_preconditioner(task), descent.vanilla_preconditioner(task)
    yield Evidence(Method.SWEEP, distance(found, best).max(), 0.05, "relative distance, worst member", _CORRELATED)
    mean = found.mean(axis=0, keepdims=True)
    ratio = float(distance(mean, best)[0] / distance(mean, printed)[0])
    what = "distance of the members' mean, over that from the matrix of (5.6)"
    yield Evidence(Method.NUMERIC, ratio, 1.0, what, _CORRELATED)
