"""How often 95 % intervals of the Monte Carlo estimators hold the exact value, with optional stopping at work.

Every case is a small problem whose answer is known exactly, from theory or by hand, estimated with 2,000 seeds. Run
one case or several at a time, each takes about a minute:

    python docs/studies/estimator_coverage.py CASE ... [--repeats N]

The rows of these cases are replaced in estimator_coverage.csv, and estimator_coverage.md is written anew.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sim.contexts import SampleSize
from sim.montecarlo.comparison import CommonSample
from sim.montecarlo.empirical_floor import empirical_floor
from sim.montecarlo.floor_moments import residual_floor
from sim.montecarlo.layer_ensemble import matrix_layer_terms
from sim.montecarlo.mean_field_features import mean_field_features_until
from sim.montecarlo.merge import merge_estimates
from sim.montecarlo.polynomial_risk import polynomial_mode_risks, polynomial_risk
from sim.montecarlo.regression import (
    AttentionHeads,
    GradientDescent,
    LeastSquares,
    bayes_predictor,
    regression_risks,
)
from sim.montecarlo.single_softmax import evaluate_single_softmax
from sim.montecarlo.softmax_risk import softmax_risk_comparison, softmax_risk_estimate
from sim.montecarlo.stopping import mean_over_chunks
from theory.multihead import activations, gradient_descent
from theory.multihead.bayes_risk import bayes_risk
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import CopyTask, PowerLawSpectrum, RegressionTask, TopKTask
from theory.results import Estimate

FOLDER = Path(__file__).parent
REPEATS = 2000
FIRST_SEED = 10_000
LEVEL = 0.95
# A rate of 95 % leaves these bounds by chance for one quantity in 500: its standard deviation is 0.49 %.
BOUNDS = (0.935, 0.965)

# Name of a quantity, its estimate and its exact value.
Row = tuple[str, Estimate, float]
Case = Callable[[int], Iterator[Row]]


def exact_in_three_dimensions(context: int, top_k: int) -> tuple[float, float, float]:
    """Floor, T and E t.q of the isotropic difficult task in three dimensions, where cosines are uniform numbers."""
    P, k = context, top_k
    pairs = sum(
        2 * (1 - 2 * (i + j) / (P + 1) + 4 * i * (j + 1) / ((P + 1) * (P + 2)))
        for i in range(1, k + 1)
        for j in range(i + 1, k + 1)
    )
    power = 3 / k + 8 / math.pi * pairs / k**2
    cross = 8 / math.pi * (1 - (k + 1) / (P + 1))
    return power - cross**2 / 3, power, cross


ISOTROPIC = TopKTask(PowerLawSpectrum(0, 0, 3), 8, 2)
# Two tokens in one dimension, the first of those with the sign of the query is selected, or else the first.
TWO_TOKENS = TopKTask(PowerLawSpectrum(0, 0, 1), 2, 1)
REGRESSION = RegressionTask(2, 8, 0.4)
SKEW = RegressionTask(2, 6, 0.3, ((1.0, 0.5), (0.5, 1.0)))
PRIOR = ((0.5, 0.1), (0.1, 0.3))


def floor_moments_case(seed: int) -> Iterator[Row]:
    """Floor (53) and its moments, whole contexts, pilot and jackknife."""
    floor, power, cross = exact_in_three_dimensions(8, 2)
    basis = np.full((1, 3), 1 / math.sqrt(3))
    run = residual_floor(ISOTROPIC, basis, relative_error=0.011, seed=seed, workers=1)
    yield "floor", run.floor, floor
    yield "target power", run.target_power, power
    yield "cross moment", run.cross_moments[0], cross / math.sqrt(3)


def empirical_floor_case(seed: int) -> Iterator[Row]:
    """Floor of polynomials in S: E t^2 = 1, E t S q = 3 / (2 pi) and E S^2 q^2 = 2 for two tokens."""
    run = empirical_floor(TWO_TOKENS, 1, relative_error=0.025, seed=seed, workers=1)
    yield "floor", run.floor, 1 - (1.5 / math.pi) ** 2 / 2
    yield "target power", run.target_power, 1.0


def polynomial_case(seed: int) -> Iterator[Row]:
    """Risk (26) of one layer at finite context, whole and by modes, and of three layers at infinite context."""
    spectrum, step, context = PowerLawSpectrum(1.5, 0.5, 2), 0.7, 4
    lam, omega = spectrum.input_variances(), spectrum.teacher_variances()
    modes = lam * omega * ((1 - step * lam) ** 2 + step**2 * (lam**2 + lam @ lam) / context)
    task = CopyTask(spectrum, context)
    yield "risk", polynomial_risk(task, [step], relative_error=0.02, seed=seed, workers=1), float(modes.sum())
    sample = polynomial_mode_risks(task, step * np.eye(2)[None], relative_error=0.02, seed=seed, workers=1)
    for k, exact in enumerate(modes, 1):
        yield f"mode {k}, matrices", sample.estimate(f"mode {k}"), float(exact)
    steps = np.array([1.3, 0.6, 0.9])
    response = np.prod(1 - np.outer(steps, lam), axis=0)
    estimate = polynomial_risk(CopyTask(spectrum), steps, relative_error=0.0125, seed=seed, workers=1)
    yield "risk, infinite context", estimate, float(lam * omega @ response**2)


def _comparison(sample: CommonSample, exact: dict[str, float], pairs: tuple[tuple[str, str], ...]) -> Iterator[Row]:
    for name, value in exact.items():
        yield name, sample.estimate(name), value
    for one, other in pairs:
        yield f"{one} - {other}", sample.difference(one, other), exact[one] - exact[other]


SOFTMAX = {"two heads": ([0.3, -0.3], [1.2, -1.2]), "one head": ([0.6], [1.0]), "steep": ([1.5, -0.5], [0.6, -0.6])}
SOFTMAX_EXACT = {name: softmax_risk(REGRESSION, *heads).value for name, heads in SOFTMAX.items()}

FEW_TOKENS = RegressionTask(2, 3, 0.4)
FEW_TOKENS_EXACT = softmax_risk(FEW_TOKENS, *SOFTMAX["steep"]).value


def softmax_case(seed: int) -> Iterator[Row]:
    """Risk of softmax heads from reduced contexts with a control variate, and differences."""
    sample = softmax_risk_comparison(REGRESSION, SOFTMAX, relative_error=0.0022, seed=seed, workers=1)
    yield from _comparison(sample, SOFTMAX_EXACT, (("one head", "two heads"), ("steep", "one head")))


def merged_case(seed: int) -> Iterator[Row]:
    """Three softmax risks of unequal size, each stopped by itself, merged."""
    errors = (0.0026, 0.003, 0.006)
    parts = [
        softmax_risk_estimate(FEW_TOKENS, *SOFTMAX["steep"], relative_error=error, seed=3 * seed + i, workers=1)
        for i, error in enumerate(errors)
    ]
    yield "risk", merge_estimates(parts), FEW_TOKENS_EXACT


def _regression_predictors() -> tuple[dict[str, object], dict[str, float]]:
    d, L, noise = REGRESSION.dim, REGRESSION.context, REGRESSION.noise
    step, heads = gradient_descent.debiased_step(REGRESSION), SOFTMAX["two heads"]
    predictors = {
        "vanilla descent": GradientDescent(0.6),
        "debiased descent": GradientDescent(step, debiased=True),
        "Bayes": bayes_predictor(REGRESSION),
        "least squares": LeastSquares(),
        "two heads": AttentionHeads(*heads),
        "1+tanh": AttentionHeads(*heads, activation="1+tanh"),
        "(1+x/2)^2": AttentionHeads(*heads, activation="(1+Cx)^2", scale=0.5),
    }
    exact = {
        "vanilla descent": float(gradient_descent.vanilla_step_risk(REGRESSION, 0.6)),
        "debiased descent": float(gradient_descent.debiased_step_risk(REGRESSION, step)),
        "Bayes": bayes_risk(REGRESSION).value,
        "least squares": noise * (1 + d / (L - d - 1)),
        "two heads": SOFTMAX_EXACT["two heads"],
        "1+tanh": activations.activation_risk(REGRESSION, activations.shifted_tanh(), 0.3, 1.2).value,
        "(1+x/2)^2": activations.activation_risk(REGRESSION, activations.square(0.5), 0.3, 1.2).value,
    }
    return predictors, exact


PREDICTORS, PREDICTOR_RISKS = _regression_predictors()


def regression_case(seed: int) -> Iterator[Row]:
    """Predictors on common whole contexts, and differences from debiased descent."""
    sample = regression_risks(REGRESSION, PREDICTORS, relative_error=0.0036, seed=seed, workers=1)
    pairs = tuple((name, "debiased descent") for name in PREDICTORS if name != "debiased descent")
    yield from _comparison(sample, PREDICTOR_RISKS, pairs)


def covariance_case(seed: int) -> Iterator[Row]:
    """Preconditioned descent with correlated tokens and a teacher prior, and the difference of both kinds."""
    G = np.array([[0.7, -0.2], [0.1, 0.6]])
    predictors = {"vanilla": GradientDescent(1.0, G), "debiased": GradientDescent(1.0, G, debiased=True)}
    exact = {
        "vanilla": gradient_descent.vanilla_risk(SKEW, G, PRIOR),
        "debiased": gradient_descent.debiased_risk(SKEW, G, PRIOR),
    }
    sample = regression_risks(SKEW, predictors, prior=PRIOR, relative_error=0.0078, seed=seed, workers=1)
    yield from _comparison(sample, exact, (("vanilla", "debiased"),))


def mean_field_case(seed: int) -> Iterator[Row]:
    """Features of the uniform layer: T of order statistics, G = A = tr(Sigma Omega) / P."""
    features = mean_field_features_until(
        ISOTROPIC, np.array([[0.0, 0.0]]), np.array([[0.3]]), relative_error=0.004, seed=seed, max_contexts=10**5,
        workers=1,
    )  # fmt: skip

    def estimate(means: np.ndarray) -> Estimate:
        return Estimate(*mean_over_chunks(means), features.contexts, features.chunks, seed)

    _, power, _ = exact_in_three_dimensions(8, 2)
    yield "target power", estimate(features.target_power[:, 0]), power
    yield "gram", estimate(features.gram[:, 0, 0, 0]), 3 / 8
    yield "single power", estimate(features.single_power[:, 0, 0]), 3 / 8


def single_softmax_case(seed: int) -> Iterator[Row]:
    """One softmax of scale 0 and gain g on two tokens: loss g^2/2 - g + 1, on 16 chunks without a stopping rule."""
    layer = evaluate_single_softmax(TWO_TOKENS, 0.0, seed, SampleSize(16, 1, 128))
    yield "loss", layer.loss, layer.gain**2 / 2 - layer.gain + 1


ENSEMBLE_SCALES, ENSEMBLE_GAIN = (0.5, 2.0, 3.0), 0.8


def _exact_ensemble() -> dict[str, float]:
    """Terms of three layers on two tokens: sums over the signs; E x^2 = 1 and E |x y| = 2/pi."""
    pairs = np.zeros((3, 3))
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        target = np.array([0.0, 1.0]) if signs == (-1, 1) else np.array([1.0, 0.0])
        powers = np.exp(np.outer(ENSEMBLE_SCALES, signs))
        errors = ENSEMBLE_GAIN * powers / powers.sum(axis=1, keepdims=True) - target
        product = 2 / math.pi * signs[0] * signs[1]
        pairs += errors @ np.array([[1.0, product], [product, 1.0]]) @ errors.T / 4
    layer, risk = np.trace(pairs) / 3, pairs.mean()
    shared = (9 * risk - 3 * layer) / 6
    return {"risk": risk, "layer risk": layer, "shared": shared, "disagreement": layer - shared}


ENSEMBLE_EXACT = _exact_ensemble()


def layer_ensemble_case(seed: int) -> Iterator[Row]:
    """R, A, C and A - C of three layers on two tokens."""
    matrices = np.array(ENSEMBLE_SCALES)[:, None, None]
    sample = matrix_layer_terms(TWO_TOKENS, matrices, ENSEMBLE_GAIN, relative_error=0.0175, seed=seed, workers=1)
    yield from _comparison(sample, ENSEMBLE_EXACT, ())


CASES: dict[str, Case] = {
    "floor_moments": floor_moments_case,
    "empirical_floor": empirical_floor_case,
    "polynomial_risk": polynomial_case,
    "softmax_risk": softmax_case,
    "merge": merged_case,
    "regression": regression_case,
    "regression, covariance": covariance_case,
    "mean_field_features": mean_field_case,
    "single_softmax": single_softmax_case,
    "layer_ensemble": layer_ensemble_case,
}


def coverage(case: Case, seeds: range) -> dict[str, dict[str, float]]:
    """Rate of intervals that hold the exact value, mean chunks and share stopped at the first look, by quantity."""
    records: dict[str, list[tuple[bool, int, float]]] = {}
    for seed in seeds:
        for name, estimate, exact in case(seed):
            held = exact in estimate.interval(LEVEL)
            records.setdefault(name, []).append((held, estimate.chunks, estimate.z_score(exact)))
    table = {}
    for name, rows in records.items():
        held, chunks, z = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        table[name] = {
            "repeats": len(rows),
            "covered": int(held.sum()),
            "rate": held.mean(),
            "mean_z": z.mean(),
            "fewest_chunks": int(chunks.min()),
            "mean_chunks": chunks.mean(),
            "most_chunks": int(chunks.max()),
        }
    return table


COLUMNS = ("estimator", "quantity", "repeats", "covered", "rate", "mean_z", "fewest_chunks", "mean_chunks",
           "most_chunks", "within")  # fmt: skip


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _formatted(case: str, name: str, row: dict[str, float]) -> dict[str, str]:
    within = "yes" if BOUNDS[0] <= row["rate"] <= BOUNDS[1] else "no"
    numbers = {key: f"{value:.4f}" if isinstance(value, float) else f"{value}" for key, value in row.items()}
    return {"estimator": case, "quantity": name, **numbers, "within": within}


def _write(rows: list[dict[str, str]]) -> None:
    order = list(CASES)
    rows.sort(key=lambda row: order.index(row["estimator"]))
    with (FOLDER / "estimator_coverage.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        PREAMBLE,
        "| estimator | quantity | covered | rate | mean z | chunks (fewest, mean, most) |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        chunks = f"{row['fewest_chunks']}, {float(row['mean_chunks']):.1f}, {row['most_chunks']}"
        rate = f"{100 * float(row['rate']):.1f} %" + ("" if row["within"] == "yes" else " (outside)")
        quantity = row["quantity"].replace("|", "\\|")
        lines.append(
            f"| {row['estimator']} | {quantity} | {row['covered']} of {row['repeats']} | {rate} "
            f"| {float(row['mean_z']):+.3f} | {chunks} |"
        )
    outside = sum(row["within"] != "yes" for row in rows)
    lines.append("")
    lines.append(f"{len(rows) - outside} of {len(rows)} rates lie within 93.5 % and 96.5 %.")
    (FOLDER / "estimator_coverage.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


PREAMBLE = """# Coverage of the Monte Carlo intervals

Every estimator of `sim/montecarlo` is run with 2,000 seeds on a small problem whose answer is known exactly, and the
table counts how often its 95 % Student interval holds the answer. Requested errors are chosen so that runs stop at
different looks, so optional stopping is part of what is measured (except for the single softmax, whose sample size is
fixed). The standard deviation of a rate is 0.49 %, so that a coverage of 94.5 % leaves the range of 93.5 % to 96.5 %
by chance for one quantity in 50; quantities of one run share their contexts, so their rates are
correlated. The mean z of an unbiased estimate with an independent error is 0, with a standard deviation of 0.022. Here
it may be a little below: losses are skewed, so that a run whose mean comes out small has a small error too and stops
earlier. A mean z of -0.1 is a bias of a tenth of the standard error.

The exact answers: order statistics of uniform cosines in three dimensions (floor, target power); sums over signs for
two tokens in one dimension (floor in S, single softmax, layer ensemble); Wishart moments (polynomial risk, gradient
descent, least squares); and the quadratures of `theory.multihead` (softmax, activations, Bayes).

Written by `estimator_coverage.py`, next to this page; numbers with all digits are in `estimator_coverage.csv`.
"""


def main() -> None:
    """Run the cases named on the command line and rewrite the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    for name in arguments.cases:
        started = time.perf_counter()
        table = coverage(CASES[name], range(FIRST_SEED, FIRST_SEED + arguments.repeats))
        # Read only now, so that cases may run side by side.
        rows = [row for row in _read(FOLDER / "estimator_coverage.csv") if row["estimator"] != name]
        _write(rows + [_formatted(name, quantity, row) for quantity, row in table.items()])
        for quantity, row in table.items():
            print(f"{name}, {quantity}: {row}")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
