"""Claims multihead:prop-4.1 to multihead:4.1: the approximate loss, where it is close to the exact one and where not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import sympy

from theory.multihead import approximate_loss as approximate
from theory.multihead import gradient_descent as descent
from theory.multihead import gradient_flow as flow
from theory.multihead import softmax_risk as exact
from theory.multihead.solution_manifold import manifold_loss
from theory.problems import RegressionTask
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method, Relation
from validate.claims.multihead.setup import APPROXIMATELY, PAPER

LEDGER = Ledger()
_CONTEXTS = (30, 300, 3000, 30_000)


def _error_ratios(constant: float) -> FloatArray:
    r"""|exact - approximate| over d H^2 L^(-1/5) on the border of Proposition 4.1, d the least integer above log L.

    ω = constant sqrt(log L/d) and μ = L^(1/5): one head, and two opposite heads where the constant is small.
    """
    ratios = []
    for L in _CONTEXTS:
        task = RegressionTask(int(np.log(L)) + 1, L, 0.1)
        w, m = constant * np.sqrt(np.log(L) / task.dim), L**0.2
        error = abs(float(approximate.approximation_error(task, [w], [m])))
        if constant <= 0.5:
            error = max(error, abs(float(approximate.approximation_error(task, [w, -w], [m, -m]))) / 4)
        ratios.append(error / (task.dim * L**-0.2))
    return np.array(ratios)


@LEDGER.claim(
    "multihead:prop-4.1",
    "the population loss is close to a simple one",
    r"d>\log L,\ \|\omega\|_\infty\lesssim\sqrt{\log L/d},\ \|\mu\|_\infty\lesssim L^{1/5}\Rightarrow"
    r"\mathcal L=1+\sigma^2-2\mu^\top\omega+\mu^\top(\omega\omega^\top+(1+\sigma^2)L^{-1}e^{d\omega\omega^\top})\mu+O(dH^2L^{-1/5})",
    reading="'lesssim' with any constant, as the paper defines it; tried with 1/2 and 1; O(.) as a ratio below one",
)
def approximation() -> Iterator[Evidence]:
    for constant in (0.5, 1.0):
        ratios = _error_ratios(constant)
        domain = f"|omega| = {constant:g} sqrt(log L/d), |mu| = L^(1/5), L 30-30,000, noise 0.1"
        yield Evidence(Method.SWEEP, float(ratios.max()), 1.0, "error over d H^2 L^(-1/5)", domain)


@LEDGER.correction(
    "multihead:prop-4.1",
    Relation.CONDITIONS,
    r"\|\omega\|_\infty\le\tfrac12\sqrt{\log L/d}",
    "at constant 1 the approximate weight of a head, (1+sigma^2) e^{d omega^2}/L, is of order one where the largest "
    "token already holds the softmax: the error grows as L^{2/5}, and as a power of L for every larger constant",
)
def approximation_for_small_omega() -> Iterator[Evidence]:
    for constant in (0.2, 0.5):
        ratios = _error_ratios(constant)
        domain = f"|omega| = {constant:g} sqrt(log L/d), |mu| = L^(1/5), L 30-30,000, noise 0.1"
        yield Evidence(Method.SWEEP, float(ratios.max()), 0.1, "error over d H^2 L^(-1/5)", domain)
    steep = _error_ratios(1.0)
    growth = np.log(steep[-1] / steep[-2]) / np.log(10)
    yield Evidence(
        Method.NUMERIC,
        0.2 / growth,
        1.0,
        "0.2 over the power of L by which the ratio grows",
        "constant 1, L 3,000-30,000",
    )


@LEDGER.claim(
    "multihead:4.1b",
    "the flow stays where the approximation holds",
    r"d/L\to\xi:\quad\max_t|\omega^{(h)}(t)|=O(\sqrt{\log d/d})",
    reading="on the two-head flow from a small start; O(.) as a ratio below 1.5",
)
def largest_omega() -> Iterator[Evidence]:
    ratios = []
    for xi in (0.05, 0.125, 1.0, 4.0):
        for d in (5, 50, 500, 5000):
            w = flow.turning_point(RegressionTask(d, max(2, round(d / xi)), 0.1)).w.value
            ratios.append(w / np.sqrt(np.log(d) / d))
    yield Evidence(Method.SWEEP, max(ratios), 1.5, "peak of omega over sqrt(log d/d)", "ratio 0.05-4, d 5-5,000")
    yield Evidence(Method.SWEEP, 0.4 / min(ratios), 1.0, "0.4 over the same", "same")


@LEDGER.claim(
    "multihead:4.1",
    "the approximate loss",
    r"\tilde{\mathcal L}(\omega,\mu)=1+\sigma^2-2\mu^\top\omega+\mu^\top(\omega\omega^\top+(1+\sigma^2)L^{-1}\exp(d\omega\omega^\top))\mu"
    r"\approx\mathcal L",
    reading="a good approximation (Figure 6) as within 10 % of the loss at its minimum over the manifold, gamma -> 0",
)
def close_to_the_loss() -> Iterator[Evidence]:
    for task in (PAPER, RegressionTask(1, 40, 0.1), RegressionTask(5, 40, 0.0), RegressionTask(100, 200, 0.1)):
        limit = float(descent.debiased_step_risk(task, descent.debiased_step(task)))
        gap = float(manifold_loss(task, 1e-4)) / limit - 1
        yield Evidence(
            Method.NUMERIC,
            gap,
            APPROXIMATELY,
            "relative error at gamma -> 0",
            f"({task.dim},{task.context},{task.noise:g})",
        )


@LEDGER.correction(
    "multihead:4.1",
    Relation.CONDITIONS,
    r"\mathcal L-\tilde{\mathcal L}\to\eta^*/L\text{ at }\gamma\to0:\text{ an error of }1/(d(1+\sigma^2))\text{ of the excess over }\sigma^2,"
    r"\text{ at most }10\,\%\text{ for }d\ge10",
    "terms of order 1/L beside (1+sigma^2)/L were dropped; at the paper's d = 5, L = 40 the risk is 9 % too low, its "
    "excess over the noise 15 %",
)
def error_of_the_approximation() -> Iterator[Evidence]:
    d, L, s = sympy.symbols("d L s", positive=True)
    best = L / (L + d * (1 + s))
    debiased = 1 + s - (L - 1) / L * best
    infimum = 1 + s - 1 / (1 + (1 + s) * d / L)
    wrong = float(sympy.simplify(debiased - infimum - best / L) != 0)
    share = sympy.simplify((debiased - infimum) / (infimum - s) - 1 / (d * (1 + s)))
    yield Evidence(Method.SYMBOLIC, wrong + float(share != 0), 0.0, "identities that fail", "all d, L, noise")
    # The exact excess is the approximate one times 1 + 1/D with D = d(1+σ²), so that its share is 1/(1+D) at γ -> 0.
    # The terms left out of that limit are relative powers of d γ².
    limit, drift = 0.0, 0.0
    for task in (RegressionTask(10, 10, 0.0), RegressionTask(10, 1000, 0.0), RegressionTask(100, 200, 0.1)):
        limit = max(limit, 1 / (1 + task.dim * (1 + task.noise)))
        for x in (0.01, 0.1, 0.3):
            gamma = np.sqrt(x / task.dim)
            mu = float(approximate.best_approximate_mu(task, [gamma, -gamma])[0])
            loss = exact.softmax_risk(task, [gamma, -gamma], [mu, -mu]).value
            share = (loss - float(manifold_loss(task, gamma))) / (loss - task.noise)
            drift = max(drift, abs(share * (1 + task.dim * (1 + task.noise)) - 1) / x)
    domain = "d 10-100, L 10-1,000, noise 0, 0.1"
    yield Evidence(
        Method.SWEEP,
        limit,
        APPROXIMATELY,
        "error over the exact excess risk at gamma -> 0, 1/(1+d(1+sigma^2))",
        domain,
    )
    yield Evidence(
        Method.SWEEP,
        drift,
        1.0,
        "relative distance of that share, on the manifold, from its limit, over d gamma^2",
        f"{domain}, d gamma^2 0.01-0.3",
    )
    for heads, stated in ((([0.52], [1.42]), 0.3828), (([0.1267, -0.1267], [3.5006, -3.5006]), 0.2211)):
        value = float(approximate.approximate_loss(PAPER, *heads))
        yield Evidence(
            Method.NUMERIC,
            value - stated,
            5.1e-5,
            "approximate loss against its stated value",
            "printed trained models",
        )
