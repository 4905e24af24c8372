"""Claims depth:table-1 to depth:table-5 and the conditions printed after Table 2."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from theory.depth import free_polynomial, repeated_update
from theory.depth import population_training as training
from theory.depth.loss_floor import isotropic_empirical_floor, isotropic_floor
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import FloatArray
from validate.claims.depth.loss_floor import STUDENT_NOISE, estimate_score, sampled_floors
from validate.claims.depth.setup import FALSE_ALARM, LINEAR_SIZE, SOFTMAX_SIZE
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical
from validate.tables.comparison import paper_rows

LEDGER = Ledger()
# Tables print three or four digits.
PRINTED = 5e-4
# Depths over which finite references are fitted; the paper does not print its own.
DEPTHS = np.array([1, 2, 4, 8])
# What a trained loss may differ from a predicted floor: the largest "difference" that Table 3 itself prints is 4.38 %.
TRAINED = 0.045


def _mean_teacher(b: float, dim: int) -> float:
    """tr(Omega)/d, by which every loss scales at a = 0."""
    return float(np.mean(np.arange(1, dim + 1.0) ** -b))


def _isotropic(b: float, size: tuple[int, int]) -> TopKTask:
    return TopKTask(PowerLawSpectrum(0, b, size[0]), size[1], 2)


@LEDGER.claim(
    "depth:table-1",
    "irreducible losses of nonlinear and linear attention",
    r"L_0^{nonlinear}\text{ substantially below }L_0^{linear},\text{ row by row}",
    measurement=True,
    reading="the comparison needs both columns to be of one task: at a = 0 every loss is proportional to tr(Omega)/d, which "
    "shows the dim of each column",
)
def table_1() -> Iterator[Evidence]:
    rows = paper_rows("depth:table-1")
    yield Evidence(
        Method.EXACT,
        max(row["softmax_L0"] / row["linear_L0"] for row in rows),
        0.5,
        "largest ratio of the two columns",
        "7 rows",
    )
    base, flat = rows[0], [row for row in rows if row["a"] == 0 and row["b"] > 0]
    for column in ("softmax_L0", "linear_L0"):
        worst = max(abs(row[column] / base[column] / _mean_teacher(row["b"], LINEAR_SIZE[0]) - 1) for row in flat)
        yield Evidence(
            Method.NUMERIC,
            worst,
            0.02,
            f"{column} over its (0,0) row against tr(Omega)/d at d = 128",
            "b 0.25, 0.5, 1",
        )


@LEDGER.correction(
    "depth:table-1",
    Relation.OVERCLAIM,
    r"\text{the linear column is of }(d,P)=(128,1024),\text{ the nonlinear one of }(16,64);\text{ at }(16,64)\text{ the linear "
    r"floor is }6.065\,\operatorname{tr}\Omega/d\ (5.479\text{ in the empirical }S):\ 2.7\text{ to }3.5\text{ times, not 6 to 30 times, the nonlinear }L_0",
    "the statement 'substantially lower' stands, the factors do not; the linear losses agree with the exact floor within "
    "0.8 %, and the rows with b > 0 lie below it, as the empirical covariance allows",
)
def table_1_sizes() -> Iterator[Evidence]:
    rows = paper_rows("depth:table-1")
    base, flat = rows[0], [row for row in rows if row["a"] == 0 and row["b"] > 0]
    for column, size, tolerance in (("softmax_L0", SOFTMAX_SIZE, 0.002), ("linear_L0", LINEAR_SIZE, 0.02)):
        worst = max(abs(row[column] / base[column] / _mean_teacher(row["b"], size[0]) - 1) for row in flat)
        yield Evidence(
            Method.NUMERIC, worst, tolerance, f"{column} against tr(Omega)/d at d = {size[0]}", "b 0.25, 0.5, 1"
        )
    for row in rows:
        domain = f"a={row['a']:g}, b={row['b']:g}, top 2"
        if row["a"] == 0:
            low = isotropic_empirical_floor(_isotropic(row["b"], LINEAR_SIZE)).floor.value
            high = isotropic_floor(_isotropic(row["b"], LINEAR_SIZE)).floor.value
            same = isotropic_empirical_floor(_isotropic(row["b"], SOFTMAX_SIZE)).floor.value
            yield Evidence(
                Method.NUMERIC,
                row["linear_L0"] / high - 1,
                0.01,
                "linear column over the exact floor, minus one",
                domain,
            )
            yield Evidence(
                Method.NUMERIC,
                max(0.0, low / row["linear_L0"] - 1),
                0.0,
                "share by which it passes the floor in S",
                domain,
            )
        else:
            floor = sampled_floors(2, row["a"], row["b"])[-1]
            noise = STUDENT_NOISE * floor.stderr / floor.value
            gap = max(abs(row["linear_L0"] / floor.value - 1) - noise, 0.0)
            what = "linear column over the sampled floor, minus one, beyond noise"
            yield Evidence(Method.STATISTICAL, gap, 0.01, what, domain, FALSE_ALARM)
            same = sampled_floors(2, row["a"], row["b"], SOFTMAX_SIZE)[-1].value
        yield Evidence(
            Method.NUMERIC, row["softmax_L0"] / same, 0.4, "nonlinear L_0 over the linear floor at (16, 64)", domain
        )


@LEDGER.claim(
    "depth:table-2",
    "measured exponents lie between the references",
    r"\zeta\le\alpha_{measured}\le2\zeta,\quad\zeta=(a+b-1)/a",
    measurement=True,
    reading="the columns as printed, and the ordering",
)
def table_2() -> Iterator[Evidence]:
    wrong, outside = 0.0, 0.0
    for row in paper_rows("depth:table-2"):
        zeta = PowerLawSpectrum(row["a"], row["b"]).zeta
        wrong = max(wrong, abs(row["constrained"] - zeta), abs(row["free"] - 2 * zeta))
        outside += float(not zeta <= row["measured"] <= 2 * zeta)
    yield Evidence(
        Method.NUMERIC, wrong, PRINTED, "printed zeta and 2 zeta against (a+b-1)/a", "7 rows, three decimals"
    )
    yield Evidence(Method.EXACT, outside, 0.0, "measured exponents outside [zeta, 2 zeta]", "7 rows")


def _trained_exponent(spectrum: PowerLawSpectrum, time: float) -> float:
    losses = training.trained_losses(
        DEPTHS, lambda L: training.gradient_flow(spectrum, training.start_scalars(L, 0.01, 0.1), [time])
    )
    return training.fitted_exponent(DEPTHS, losses)


@LEDGER.claim(
    "beyond:table-2-placement",
    "exact references at finite dim and depth, and finite training, bracket the measured exponents",
    r"\alpha(\text{best repeated update})\le\alpha_{measured}\le\alpha(\text{free}),\ \text{both at }d=128,\ L=1..8;\ \text{and the "
    r"exponent grows with training time towards the free one}",
    reading="layer scalars trained by gradient flow from small, slightly unequal values, to times 10^2, 10^3 and 10^5 (in units "
    "of the mean field)",
)
def table_2_placement() -> Iterator[Evidence]:
    for row in paper_rows("depth:table-2"):
        spectrum = PowerLawSpectrum(row["a"], row["b"], LINEAR_SIZE[0])
        low = training.fitted_exponent(DEPTHS, repeated_update.best_risk(spectrum, DEPTHS))
        high = training.fitted_exponent(DEPTHS, free_polynomial.finite_risk(spectrum, DEPTHS))
        domain = f"a={row['a']:g}, b={row['b']:g}, dim 128, depth 1-8"
        place = (row["measured"] - low) / (high - low)
        yield Evidence(
            Method.NUMERIC, 2 * place - 1, 1.0, "place of the measured exponent, -1 repeated to 1 free", domain
        )
    for a, b in ((2.0, 1.0), (1.0, 2.0)):
        spectrum = PowerLawSpectrum(a, b, LINEAR_SIZE[0])
        values = np.array([_trained_exponent(spectrum, time) for time in (1e2, 1e3, 1e5)])
        high = training.fitted_exponent(DEPTHS, free_polynomial.finite_risk(spectrum, DEPTHS))
        falls = float((np.diff(values) <= 0).sum() + (values >= high).sum())
        yield Evidence(
            Method.NUMERIC, falls, 0.0, "training times at which the exponent does not grow or passes the free one",
            f"a={a:g}, b={b:g}: {values[0]:.3f}, {values[1]:.3f}, {values[2]:.3f} towards {high:.3f}",
        )  # fmt: skip


@LEDGER.claim(
    "beyond:symmetric-layers",
    "from equal layers, gradient training never leaves the repeated update",
    r"\kappa_1=\dots=\kappa_L\text{ is invariant under gradient flow; its loss tends to that of the best repeated update}",
)
def symmetric_layers() -> Iterator[Evidence]:
    for a, b in ((2.0, 1.0), (0.5, 2.0)):
        spectrum = PowerLawSpectrum(a, b, LINEAR_SIZE[0])
        equal = training.gradient_flow(spectrum, training.start_scalars(8, 0.01), [1e6])
        spread = training.gradient_flow(spectrum, training.start_scalars(8, 0.01, 0.1), [1e6])
        best = float(repeated_update.best_risk(spectrum, 8))
        domain = f"a={a:g}, b={b:g}, dim 128, depth 8, flow time 10^6"
        yield Evidence(
            Method.NUMERIC,
            float(equal.losses[-1]) / best - 1,
            1e-3,
            "loss from equal scalars over the best repeated update, minus one",
            domain,
        )
        yield Evidence(
            Method.NUMERIC,
            float(np.ptp(equal.scalars[-1]) / equal.scalars[-1].max()),
            1e-6,
            "relative spread of the scalars",
            domain,
        )
        yield Evidence(
            Method.NUMERIC,
            float(spread.losses[-1]) / best,
            0.9,
            "loss from scalars 10 % unequal over the same",
            domain,
        )


def _cutoff_ratios(depth_of: str) -> Iterator[tuple[str, float, float]]:
    """(domain, finite over infinite risk of the repeated update, the same of the free optimum) at the stated depth."""
    for a, b, dim in ((1.0, 1.0, 400), (1.0, 2.0, 400), (2.0, 1.0, 40), (2.0, 2.0, 40)):
        ratio = float(dim) ** a
        depth = max(1, round(0.1 * (ratio if depth_of == "ratio" else ratio**0.5)))
        finite, infinite = PowerLawSpectrum(a, b, dim), PowerLawSpectrum(a, b)
        yield (
            f"a={a:g}, b={b:g}, lambda_1/lambda_d = {ratio:g}, L = {depth}",
            float(repeated_update.finite_risk(finite, depth) / repeated_update.finite_risk(infinite, depth)),
            float(free_polynomial.finite_risk(finite, depth) / free_polynomial.finite_risk(infinite, depth)),
        )


@LEDGER.claim(
    "depth:table-2a",
    "depths at which repeated updates do not feel the smallest eigenvalue",
    r"1\ll L\ll\lambda_1/\lambda_d",
    reading="'much less' is read as a tenth, 'does not feel' as a risk within 20 % of that of infinitely many modes",
)
def constrained_depths() -> Iterator[Evidence]:
    for domain, constrained, _ in _cutoff_ratios("ratio"):
        yield Evidence(Method.NUMERIC, 1 - constrained, 0.2, "share of the risk that the cutoff removes", domain)


@LEDGER.claim(
    "depth:table-2b",
    "depths at which free polynomials do not feel the smallest eigenvalue",
    r"1\ll L\ll\lambda_1/\lambda_d",
    reading="printed like the condition for repeated updates; a square root, which the text loses elsewhere, would make the "
    "two differ; read literally here, with the root in the correction",
)
def free_depths() -> Iterator[Evidence]:
    for domain, _, free in _cutoff_ratios("ratio"):
        yield Evidence(Method.NUMERIC, 1 - free, 0.2, "share of the risk that the cutoff removes", domain)


@LEDGER.correction(
    "depth:table-2b",
    Relation.MISPRINT,
    r"1\ll L\ll\sqrt{\lambda_1/\lambda_d}",
    "a polynomial of degree L resolves eigenvalues down to lambda_1/L^2, so the free risk falls exponentially beyond the root",
)
def free_depths_with_root() -> Iterator[Evidence]:
    for domain, _, free in _cutoff_ratios("root"):
        yield Evidence(Method.NUMERIC, 1 - free, 0.2, "share of the risk that the cutoff removes", domain)


@LEDGER.claim(
    "depth:table-3",
    "the predicted irreducible loss matches the plateau of the trained model",
    r"\hat{\mathcal R}_{irr}\pm SE\text{ and measured losses, differences at most }4.38\,\%",
    measurement=True,
    reading="the unstated sizes are dim 128 and context 1,024; the degree of the polynomials is not stated either: eight",
)
def table_3() -> Iterator[Evidence]:
    rows = paper_rows("depth:table-3")
    for row in rows:
        a, b, k = row["a"], row["b"], int(row["top_k"])
        domain = f"a={a:g}, b={b:g}, top {k}, dim 128, context 1,024"
        if a == 0:
            exact = isotropic_floor(_isotropic(b, LINEAR_SIZE)).floor.value
            yield statistical(
                (row["predicted"] - exact) / row["predicted_se"],
                FALSE_ALARM,
                "the printed prediction against the exact floor",
                domain,
            )
        else:
            floor = sampled_floors(k, a, b)[-1]
            z = estimate_score(floor, row["predicted"], row["predicted_se"])
            yield statistical(z, FALSE_ALARM, "our floor against the printed prediction", domain)
    printed = (0.80, 0.39, 2.40, 0.11, 1.22, 4.38, 0.67, 1.11, 1.75)
    worst = max(
        abs(100 * abs(row["measured"] - row["predicted"]) / row["measured"] - value)
        / (0.005 + 0.01 / row["measured"])
        for row, value in zip(rows, printed, strict=True)
    )
    yield Evidence(
        Method.NUMERIC, worst, 1.0, "printed differences minus |measured - predicted|/measured, over what rounding allows",
        "9 rows",
    )  # fmt: skip
    yield Evidence(
        Method.NUMERIC,
        max(abs(r["measured"] / r["predicted"] - 1) for r in rows),
        TRAINED,
        "largest difference",
        "9 rows",
    )


@LEDGER.claim(
    "depth:table-3a",
    "degree one gives the predicted floors",
    r"\hat{\mathcal R}_{irr}\text{ of Table 3 at }L=1",
    reading="which degree the printed predictions have is not stated; 'can already be represented by degree one' suggests one",
)
def table_3_degree() -> Iterator[Evidence]:
    for row in paper_rows("depth:table-3"):
        if row["a"] >= 1:
            k = int(row["top_k"])
            z = estimate_score(sampled_floors(k, row["a"], row["b"])[0], row["predicted"], row["predicted_se"])
            yield statistical(
                z, FALSE_ALARM, "our degree-one floor against the print", f"a={row['a']:g}, b={row['b']:g}, top {k}"
            )


@LEDGER.correction(
    "depth:table-3a",
    Relation.OVERCLAIM,
    r"\text{the predictions of Table 3 are of degree two or more}",
    "at a >= 1 degree one is several standard errors off; degree two and eight both agree",
)
def table_3_degree_two() -> Iterator[Evidence]:
    for row in paper_rows("depth:table-3"):
        if row["a"] >= 1:
            k = int(row["top_k"])
            z = estimate_score(sampled_floors(k, row["a"], row["b"])[1], row["predicted"], row["predicted_se"])
            yield statistical(
                z, FALSE_ALARM, "our degree-two floor against the print", f"a={row['a']:g}, b={row['b']:g}, top {k}"
            )


@LEDGER.claim(
    "depth:table-4",
    "exponents remain close to one across broader targets and spectra",
    r"\alpha\text{ close to one for top-2 and top-16}",
    measurement=True,
    reading="close to one is read as within 0.1",
)
def table_4() -> Iterator[Evidence]:
    for row in paper_rows("depth:table-4"):
        domain = f"a={row['a']:g}, b={row['b']:g}, top {row['top_k']:g}"
        yield Evidence(Method.EXACT, row["alpha"] - 1, 0.1, "printed exponent minus one", domain)


@LEDGER.correction(
    "depth:table-4",
    Relation.CONDITIONS,
    r"\text{top-2: within }0.1;\quad\text{top-16: }0.79\text{ to }0.88,\ \text{4 to 11 standard errors below one}",
    "the text says so, the caption does not; the floors L_0 at a = 0 scale like tr(Omega)/d at d = 16, as they must",
)
def table_4_by_target() -> Iterator[Evidence]:
    rows = paper_rows("depth:table-4")
    for row in rows:
        if row["top_k"] == 2:
            yield Evidence(
                Method.EXACT,
                row["alpha"] - 1,
                0.1,
                "printed exponent minus one",
                f"a={row['a']:g}, b={row['b']:g}, top 2",
            )
    wide = [row for row in rows if row["top_k"] == 16]
    nearest = max((row["alpha"] - 1) / row["alpha_se"] for row in wide)
    yield Evidence(
        Method.EXACT,
        3 / -nearest,
        1.0,
        "3 over the standard errors by which top-16 is below one, nearest row",
        "4 rows",
    )
    first, second = (row for row in wide if row["a"] == 0)
    ratio = second["L0"] / first["L0"] * _mean_teacher(0.25, 16) / _mean_teacher(0.5, 16)
    other = second["L0"] / first["L0"] * _mean_teacher(0.25, 128) / _mean_teacher(0.5, 128)
    yield Evidence(
        Method.NUMERIC,
        ratio - 1,
        0.005,
        "L_0 of (0,0.5) over (0,0.25), top 16, against tr(Omega)/d at d = 16",
        "d = 16",
    )
    yield Evidence(
        Method.NUMERIC, (ratio - 1) / (other - 1), 0.1, "the same over the deviation at d = 128", "d = 16 and 128"
    )


@LEDGER.claim(
    "depth:table-5",
    "the gap between floor and shared error decays inversely with depth",
    r"L_0-C_L=cL^{-\alpha},\quad\alpha\text{ close to one}",
    measurement=True,
    reading="close to one is read as within 0.03; the errors leave out that of L_0, see depth:sec-D.4-fixed-floor",
)
def table_5() -> Iterator[Evidence]:
    rows = paper_rows("depth:table-5")
    for row in rows:
        yield Evidence(
            Method.EXACT, row["alpha"] - 1, 0.03, "printed exponent minus one", f"a={row['a']:g}, b={row['b']:g}"
        )
    noise = [float(_slope_error(row["alpha"], row["r2"])) / row["alpha_se"] for row in rows]
    # R^2 and the error of a straight-line fit determine each other, given the number of depths.
    best = min(range(4, 14), key=lambda n: max(abs(np.log(v / np.sqrt(n - 2))) for v in noise))
    spread = max(abs(np.log(v / np.sqrt(best - 2))) for v in noise)
    yield Evidence(
        Method.NUMERIC, spread, 0.35, "log of the printed errors over those that R^2 implies",
        f"7 rows; best with {best} depths",
    )  # fmt: skip


def _slope_error(alpha: float, r_squared: float) -> FloatArray:
    """Error of the slope of a line with this R^2, times the root of (depths - 2)."""
    return np.asarray(alpha * np.sqrt(1 / r_squared - 1))
