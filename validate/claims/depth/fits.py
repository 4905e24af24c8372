"""Claims depth:88, depth:89, depth:92 and depth:93: the power-law fits and the gap between floor and shared error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from sim.streams import stream
from theory.depth.layer_ensemble import ensemble_risk
from theory.depth.population_training import fitted_exponent
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method, Relation

LEDGER = Ledger()
DEPTHS: FloatArray = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256])
TRUTHS = tuple(itertools.product((0.0, 0.05, 2.0), (0.02, 3.0), (0.5, 1.0, 1.7)))
_TRUTHS = "L_0 0, 0.05, 2; c 0.02, 3; alpha 0.5, 1, 1.7; L 1-256"


def _objective(floor: float, losses: FloatArray, depths: FloatArray = DEPTHS) -> float:
    """The objective of (89) at a given floor, minimised over c and alpha."""
    start = np.array([np.log(max(losses[0] - floor, 1e-9)), 1.0])

    def residual(parameters: FloatArray) -> FloatArray:
        return np.asarray(np.log(losses) - np.log(floor + np.exp(parameters[0]) * depths ** -parameters[1]))

    fit = least_squares(residual, start, xtol=1e-15, ftol=1e-15, gtol=1e-15)
    return 2 * float(fit.cost)


@LEDGER.claim(
    "depth:88",
    "loss model with a floor",
    r"\mathcal R_L=L_0+cL^{-\alpha},\quad c>0,\ \alpha>0",
    reading="as a model: three depths determine it, so that L_0, c and alpha are meaningful numbers",
)
def loss_model() -> Iterator[Evidence]:
    worst = 0.0
    for floor, c, alpha in TRUTHS:
        # Depths 1, 2, 4: ratios of differences give 2^-alpha without any fit.
        R = floor + c * np.array([1.0, 2.0, 4.0]) ** -alpha
        rate = -np.log2((R[1] - R[2]) / (R[0] - R[1]))
        limit = R[0] - (R[0] - R[1]) / (1 - 2**-rate)
        worst = max(worst, abs(rate / alpha - 1) * c / R[0], abs(limit - floor) / R[0])
    yield Evidence(Method.NUMERIC, worst, 1e-9, "parameters recovered from three depths, relative error", _TRUTHS)


@LEDGER.claim(
    "depth:89",
    "log-space least squares",
    r"(\hat L_0,\hat c,\hat\alpha)=\arg\min\sum_i\big[\log\mathcal R_{L_i}-\log(L_0+cL_i^{-\alpha})\big]^2",
    reading="the logarithms stand in one rendering of the text and are lost in the other",
)
def log_least_squares() -> Iterator[Evidence]:
    at_truth, elsewhere, linear = 0.0, np.inf, 0.0
    for floor, c, alpha in TRUTHS:
        losses = floor + c * DEPTHS**-alpha
        at_truth = max(at_truth, _objective(floor, losses))
        if floor > 0:
            elsewhere = min(elsewhere, _objective(0.9 * floor, losses))
        else:
            linear = max(linear, abs(fitted_exponent(DEPTHS, losses) - alpha))
        # Relative errors count alike at all depths: a change of units changes nothing.
        scaled = _objective(7 * floor, 7 * losses)
        at_truth = max(at_truth, scaled)
    yield Evidence(Method.NUMERIC, at_truth, 1e-18, "objective at the true floor, in two units", _TRUTHS)
    yield Evidence(
        Method.NUMERIC,
        1e-12 / elsewhere,
        1.0,
        "1e-12 over the objective at a floor 10 % too low",
        _TRUTHS,
    )
    yield Evidence(
        Method.NUMERIC, linear, 1e-12, "exponent of the L_0 = 0 fit, which is linear, minus alpha", _TRUTHS
    )


@LEDGER.claim(
    "depth:92",
    "the gap between floor and shared error is a power law of exponent near one",
    r"L_0-C_L=cL^{-\alpha}",
    reading="what (62) and (88) imply together, for any A_L - C_L that has a limit",
)
def gap_law() -> Iterator[Evidence]:
    worst = 0.0
    for limit, slope in itertools.product((1.0, 6.0), (0.3, 0.8)):
        # R_L = L_0 + slope limit / L and A_L - C_L = limit: then C_L is fixed by (62).
        losses = 2.0 + slope * limit / DEPTHS
        shared = losses - limit / DEPTHS
        worst = max(worst, float(np.abs(ensemble_risk(shared, limit, DEPTHS) / losses - 1).max()))
        worst = max(worst, abs(fitted_exponent(DEPTHS, 2.0 - shared) - 1))
    yield Evidence(
        Method.NUMERIC, worst, 1e-12, "exponent of L_0 - C_L minus one where R_L - L_0 is c/L", "four laws, L 1-256"
    )
    gaps = []
    for limit in (1.0, 6.0):
        # Layers from one law: C_L is constant, and the gap is zero at all depths.
        gaps.append(float(np.abs(2.0 - (ensemble_risk(2.0, limit, DEPTHS) - limit / DEPTHS)).max()))
    yield Evidence(
        Method.NUMERIC, float(max(gaps) > 1e-12), 0.0, "laws of independent layers with a gap, where (92) has c = 0",
        "limits 1, 6",
    )  # fmt: skip


def _gap_fit(gaps: FloatArray, *, logarithms: bool) -> float:
    """Exponent that minimises (93) with both logarithms, or with the first one missing as in one rendering."""
    x = np.log(DEPTHS)
    if logarithms:
        return fitted_exponent(DEPTHS, gaps)

    def cost(alpha: float) -> float:
        # log c is free, so the mean residual vanishes.
        residual = gaps + alpha * x
        return float(np.sum((residual - residual.mean()) ** 2))

    return float(minimize_scalar(cost, bracket=(0.0, 2.0)).x)


@LEDGER.claim(
    "depth:93",
    "fit of the gap",
    r"(\hat c,\hat\alpha)=\arg\min_{c,\alpha>0}\sum_i\big[\log(L_0-C_{L_i})-\log(cL_i^{-\alpha})\big]^2",
    reading="both logarithms stand in one rendering of the text; in the other the first looks lost; both readings are tried",
)
def gap_fit() -> Iterator[Evidence]:
    worst, other, start = 0.0, np.inf, 0.0
    for c, alpha in itertools.product((0.02, 3.0), (0.5, 1.0, 1.7)):
        gaps = c * DEPTHS**-alpha
        worst = max(worst, abs(_gap_fit(gaps, logarithms=True) - alpha))
        other = min(other, abs(_gap_fit(gaps, logarithms=False) - alpha))
        noisy = gaps * np.exp(0.01 * stream(93, f"{c} {alpha}").standard_normal(9))
        # The fit is linear in (log c, alpha): a numerical search must end at the closed form from any start.
        search = least_squares(lambda p, g=noisy: np.log(g) - p[0] + p[1] * np.log(DEPTHS), [3.0, -4.0])
        start = max(start, abs(float(search.x[1]) - _gap_fit(noisy, logarithms=True)))
    domain = "c 0.02, 3; alpha 0.5, 1, 1.7; L 1-256"
    yield Evidence(Method.NUMERIC, worst, 1e-12, "error of alpha with both logarithms", domain)
    yield Evidence(Method.NUMERIC, worst / other, 1e-6, "the same over the error without the first logarithm", domain)
    yield Evidence(Method.NUMERIC, start, 1e-7, "closed form against a search from a far start, 1 % noise", domain)


@LEDGER.claim(
    "depth:sec-D.4-fixed-floor",
    "a fitted floor may be held fixed in the gap fit",
    r"L_0\text{ fixed at its estimate}\Rightarrow\text{small uncertainties of }\alpha\text{ in }L_0-C_L=cL^{-\alpha}",
    reading="the printed errors of Table 5 (down to 0.005) do not contain the error of L_0; an L_0 off by 0.1 % should move "
    "alpha by no more than those errors",
)
def fixed_floor() -> Iterator[Evidence]:
    yield Evidence(
        Method.NUMERIC,
        _bias(0.001),
        0.005,
        "change of alpha when L_0 = 2 is off by 0.1 %",
        "gap 3/L, L 1-256, (93) linear fit",
    )


def _bias(error: float) -> float:
    gaps = 3.0 / DEPTHS
    return abs(fitted_exponent(DEPTHS, gaps + 2.0 * error) - fitted_exponent(DEPTHS, gaps))


@LEDGER.correction(
    "depth:sec-D.4-fixed-floor",
    Relation.OVERCLAIM,
    r"d\alpha/dL_0\ne0:\ \text{an error of }0.1\,\%\text{ in }L_0=2\text{ moves }\alpha\text{ by }0.03\text{ over }L=1..256",
    "the last gaps are of the size of the error of L_0, so the deviations of Table 5 from one (0.006 to 0.023, all below) "
    "are inside the error that fixing L_0 leaves out",
)
def fixed_floor_error() -> Iterator[Evidence]:
    spread = [_bias(error) for error in (0.0005, 0.001)]
    yield Evidence(
        Method.NUMERIC, 0.02 / spread[1], 1.0, "0.02 over the change of alpha at 0.1 %", "gap 3/L, L 1-256"
    )
    yield Evidence(
        Method.NUMERIC, spread[1] / spread[0] - 2, 0.3, "change at 0.1 % over that at 0.05 %, minus two", "same"
    )
