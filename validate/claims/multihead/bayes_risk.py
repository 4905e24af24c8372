"""Claim multihead:thm-4.2-iii: the risk of debiased descent against the Bayes risk."""

from __future__ import annotations

from collections.abc import Iterator

import mpmath
import numpy as np

from theory.multihead import bayes_risk as bayes
from theory.multihead.gradient_descent import debiased_step, debiased_step_risk
from theory.problems import RegressionTask
from validate.claims.ledger import Evidence, Ledger, Method

LEDGER = Ledger()
RATIOS = np.geomspace(1e-3, 1e3, 61)
NOISES = np.geomspace(1e-4, 30, 45)


@LEDGER.claim(
    "multihead:thm-4.2-iii",
    "Theorem 4.2 (iii), Bayes risk",
    r"d/L\to\xi,\ \sigma^2+\xi^{-1}>1:\quad\frac{\mathcal E(\hat y_q^{gd}(\eta^*))}{BayesRisk_{\xi,\sigma^2}}\le1+\sigma^{-2}\{(1+\xi\sigma^2)(1+\sigma^2+\xi^{-1})\}^{-1}",
    reading="both risks against the noisy label; the condition is not needed: all ratios are tried",
)
def bayes_bound() -> Iterator[Evidence]:
    xi, noise = RATIOS[:, np.newaxis], NOISES
    ratio = bayes.debiased_risk_limit(xi, noise) / bayes.bayes_risk_limit(xi, noise)
    excess = float((ratio / bayes.paper_ratio_bound(xi, noise)).max())
    yield Evidence(
        Method.SWEEP,
        max(excess - 1, 0.0),
        1e-13,
        "largest relative excess of the ratio over its bound",
        "ratio 0.001-1,000, noise 1e-4 to 30",
    )
    # The two limits are those of the exact finite risks.
    worst = 0.0
    for ratio_, noise_ in ((0.125, 0.1), (0.5, 0.02), (1.0, 0.1), (3.0, 1.0)):
        L = int(240 / max(ratio_, 1.0))
        task = RegressionTask(int(ratio_ * L), L, noise_)
        worst = max(worst, L * abs(bayes.bayes_risk(task).value - float(bayes.bayes_risk_limit(ratio_, noise_))))
        exact = float(debiased_step_risk(task, debiased_step(task)))
        worst = max(worst, L * abs(exact - float(bayes.debiased_risk_limit(ratio_, noise_))))
    yield Evidence(
        Method.SWEEP, worst, 2.0, "L times the distance of finite risks from the limits", "ratio 0.125-3, L 80-240"
    )
    error = 0.0
    with mpmath.workdps(50):
        for x, s in ((1e-3, 1e-4), (0.125, 0.1), (1.0, 1e-4), (1.0, 0.1), (40.0, 0.3), (1e3, 30.0)):
            ratio_, noise_ = mpmath.mpf(x), mpmath.mpf(s)
            # Stieltjes transform of Marchenko-Pastur as the root of its quadratic, in plain form.
            b = 1 - ratio_ + ratio_ * noise_
            value = noise_ + (mpmath.sqrt(b * b + 4 * ratio_**2 * noise_) - b) / (2 * ratio_)
            error = max(error, abs(float(bayes.bayes_risk_limit(x, s) / value - 1)))
    yield Evidence(
        Method.HIGH_PRECISION,
        error,
        1e-13,
        "relative error of bayes_risk_limit",
        "ratio 0.001-1,000, noise 1e-4 to 30",
    )
