"""Observations 1 to 4 on trained ensembles of layers (2.2): fewer steps than the paper's, at ten times its rate."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from sim.contexts import SampleSize
from sim.experiments.multihead import MultiHead
from sim.head_patterns import dynamics, head_patterns
from sim.snapshots import train_with_snapshots
from sim.training import TrainingConfig
from theory.multihead.softmax_risk import softmax_risks
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method
from validate.trained.multihead import TASK, Ensemble, best_heads, merged_spread

LEDGER = Ledger()
MEMBERS, RATE = 6, 0.01
# Those of the quick reproduction; of two heads the slowest member takes 2,000.
STEPS = {1: 1000, 2: 3000, 4: 3000}
# As in the reproduction: what a heat map shows as white; sums and signs; trained numbers beside the exact optimum.
SMALL, ZERO_SUM, SAME_SIGN, CLOSE = 0.1, 0.05, 0.01, 0.02
# At this point of the valley the exact risk is 1 to 2 % above its lowest, for any number of heads; they differ by less.
SAME_RISK = 0.005


@lru_cache(maxsize=4)
def _layers(heads: int) -> Ensemble:
    config = TrainingConfig(
        MultiHead(TASK, heads),
        steps=STEPS[heads],
        learning_rate=RATE,
        loss="sampled",
        seeds=tuple(range(MEMBERS)),
        evaluation=SampleSize(2, 1, 64),
        history_every=50,
    )
    with tempfile.TemporaryDirectory(prefix="attnlaws-") as folder:
        return Ensemble(*train_with_snapshots(config, Path(folder)))


def _domain(heads: int) -> str:
    layers = _layers(heads)
    trapped = int((~layers.settled).sum())
    left_out = f", {trapped} of them trapped and left out" if trapped else ""
    return f"{heads} heads, {MEMBERS} members{left_out}, {STEPS[heads]} Adam steps at {RATE:g}"


def _worst(heads: int, values: FloatArray, limit: float, what: str) -> Evidence:
    """The worst settled member."""
    figure = float(np.abs(values[_layers(heads).settled]).max())
    return Evidence(Method.SWEEP, figure, limit, what, _domain(heads))


@LEDGER.claim(
    "multihead:obs-1-trained",
    "Observation 1 on trained layers: circuits are scalars, and signs match",
    r"KQ_{11}^{(h)}\approx\omega^{(h)}I,\ KQ_{21}^{(h)}\approx0,\ OV_{21}^{(h)}\approx0,\ \omega^{(h)}\mu^{(h)}>0",
    reading="one and two heads; root mean squares of what should vanish over the largest head; more heads: see "
    "beyond:trained-heads-together",
    measurement=True,
)
def circuits_are_scalars() -> Iterator[Evidence]:
    for heads in (1, 2):
        found = _layers(heads).departures
        yield _worst(heads, found.spread.max(axis=1), SMALL, "rest of KQ_11")
        yield _worst(heads, found.label_reads.max(axis=1), SMALL, "KQ_21")
        yield _worst(heads, found.input_writes.max(axis=1), SMALL, "OV_21")
        yield _worst(heads, _layers(heads).patterns.sign_mismatch, SAME_SIGN, "part of the step with unlike signs")


@LEDGER.claim(
    "multihead:obs-2-trained",
    "Observation 2 on trained layers: scales are alike, and output weights sum to zero",
    r"|\omega^{(h)}|\approx\gamma,\qquad \langle\mu,1\rangle\approx0\qquad(H\ge2)",
    reading="two and four heads; spread of |omega|, weighted by |mu|, over its mean",
    measurement=True,
)
def heads_are_alike() -> Iterator[Evidence]:
    for heads in (2, 4):
        patterns = _layers(heads).patterns
        yield _worst(heads, patterns.homogeneity, SMALL, "spread of |omega|")
        yield _worst(heads, patterns.zero_sum, ZERO_SUM, "|sum of mu| over the sum of |mu|")


@LEDGER.claim(
    "multihead:obs-3-trained",
    "Observation 3 on trained layers: two heads beat one, and four are like two",
    r"\mathcal L_{H=2}<\mathcal L_{H=1},\qquad \mathcal L_{H=4}\approx\mathcal L_{H=2}",
    reading="exact risks of the trained (omega, mu)",
    measurement=True,
)
def more_heads() -> Iterator[Evidence]:
    one, two, four = (_risks(heads) for heads in (1, 2, 4))
    yield Evidence(
        Method.SWEEP, two.max() / one.min(), 0.7, "worst risk of two heads over the best of one", _domain(2)
    )
    ratio = four.mean() / two.mean() - 1
    yield Evidence(Method.NUMERIC, ratio, SAME_RISK, "mean risk of four heads over that of two, minus 1", _domain(4))


def _risks(heads: int) -> FloatArray:
    layers = _layers(heads)
    return softmax_risks(TASK, layers.omega[layers.settled], layers.mu[layers.settled])


@LEDGER.claim(
    "multihead:obs-4-trained",
    "Observation 4 on trained layers: scales rise and fall, output weights only grow",
    r"|\omega^{(h)}|\ \text{first increases, then decreases},\qquad \textstyle\sum_{h\in H_+}\mu^{(h)}\ \text{increases}",
    reading="two heads; mean |omega| peaks by more than a tenth over its end; the sum ends within 2 % of its largest "
    "value, as it has the noise of the rate on it",
    measurement=True,
)
def paths() -> Iterator[Evidence]:
    layers = _layers(2)
    _, omega, mu = layers.path()
    patterns = head_patterns(omega, mu)
    yield _worst(2, 1 / dynamics(patterns).peak_ratio, 1 / 1.1, "last mean |omega| over the largest")
    loss = 1 - patterns.positive[-1] / patterns.positive.max(axis=0)
    yield _worst(2, loss, CLOSE, "fall of the sum of mu > 0 below its largest value, at the end")


@LEDGER.claim(
    "beyond:trained-one-head",
    "one trained head ends at the exact optimum, which the printed mu is 5 % below",
    r"H=1:\quad (|\omega|,|\mu|)\to(0.5179,1.4971)",
    measurement=True,
)
def one_head() -> Iterator[Evidence]:
    layers, best = _layers(1), best_heads(1)
    for name, values, exact in (("omega", layers.omega, best.omega), ("mu", layers.mu, best.mu)):
        mean = float(np.abs(values).mean() / abs(exact[0]) - 1)
        yield Evidence(Method.NUMERIC, mean, CLOSE, f"mean |{name}| against the exact optimum", _domain(1))


@LEDGER.claim(
    "beyond:trained-step",
    "trained heads take the exact step long before they reach its scale",
    r"H\ge2:\quad \textstyle\sum_h\omega^{(h)}\mu^{(h)}\approx 0.880\ \text{while}\ \gamma\gg\gamma^*=0.0712",
    measurement=True,
)
def effective_step() -> Iterator[Evidence]:
    best = best_heads(2)
    for heads in (2, 4):
        layers = _layers(heads)
        step = float(layers.patterns.step[layers.settled].mean() / (best.omega @ best.mu) - 1)
        yield Evidence(Method.NUMERIC, step, CLOSE, "mean step against that of the exact optimum", _domain(heads))
        scale = layers.patterns.gamma[layers.settled].min() / np.abs(best.omega).max()
        yield Evidence(Method.SWEEP, 1 / scale, 0.5, "best gamma over the least trained one", _domain(heads))


@LEDGER.claim(
    "beyond:trained-trapped",
    "two trained heads of one sign stay a single head",
    r"\omega^{(1)}\omega^{(2)}>0:\quad \mathcal L\approx\min_{H=1}\mathcal L",
    measurement=True,
)
def trapped() -> Iterator[Evidence]:
    layers = _layers(2)
    kept = ~layers.settled
    yield Evidence(Method.NUMERIC, float(not kept.any()), 0.5, "1 if no member is trapped", _domain(2))
    if kept.any():
        risk = softmax_risks(TASK, layers.omega[kept], layers.mu[kept])
        excess = float(np.abs(risk / best_heads(1).risk.value - 1).max())
        yield Evidence(Method.SWEEP, excess, CLOSE, "exact risk against the best single head", _domain(2))


@LEDGER.claim(
    "beyond:trained-heads-together",
    "what trained heads of one sign have off the diagonal cancels between them",
    r"\textstyle\sum_{h\in H_\pm}\mu^{(h)}KQ_{11}^{(h)}\approx\Big(\sum_{h\in H_\pm}\mu^{(h)}\omega^{(h)}\Big)I",
    reading="four heads; single heads are off by more than twice as much",
    measurement=True,
)
def heads_together() -> Iterator[Evidence]:
    layers = _layers(4)
    together = merged_spread(layers)
    alone = (layers.departures.spread * (layers.patterns.groups != 0)).max(axis=1)
    yield _worst(4, together, SMALL, "rest of the sums over heads of one sign")
    yield Evidence(
        Method.NUMERIC, together.mean() / alone.mean(), 0.5, "mean of the same over that of single heads", _domain(4)
    )
