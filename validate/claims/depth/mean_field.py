"""Claims beyond:mean-field-...: the floor of softmax attention with infinitely many layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from sim.contexts import sample_contexts
from sim.montecarlo.mean_field_features import mean_field_features, orthogonal_frames, visible_teachers
from sim.streams import stream
from theory.depth.mean_field import SampledMinimum, finite_depth_loss, product_types, sampled_minimum
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import FloatArray
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical
from validate.mean_field import MeanFieldFloor, mean_field_floors
from validate.tables.comparison import paper_tables

LEDGER = Ledger()
# The sizes behind the paper's softmax numbers.
DIM, CONTEXT = 16, 64
SEED = 0
# "Within 2 %", and the sampling error of the printed floors.
CLOSE = 0.02
PRINTED_ERROR = 0.015
FALSE_ALARM = 1e-4
GAP = 1e-3
# Losses of our trained checks at a = b = 0: top_k, depth, loss and its error.
TRAINED = ((2, 64, 2.032, 0.005), (16, 16, 0.3077, 0.0005), (16, 64, 0.2893, 0.0005))
_SIZES = f"dim {DIM}, context {CONTEXT}"
_LAW = r"\min_{w\ge0}\;T-2h^\top w+w^\top Gw"

Row = tuple[int, float, float]


def task(top_k: int, a: float, b: float) -> TopKTask:
    return TopKTask(PowerLawSpectrum(a, b, DIM), CONTEXT, top_k)


def printed_rows() -> dict[Row, float]:
    """Every fitted floor L0 of the softmax model in Tables 1 and 4, by (top_k, a, b)."""
    rows: dict[Row, float] = {(2, a, b): floor for a, b, floor, _ in paper_tables()["depth:table-1"]["rows"]}
    rows |= {(int(k), a, b): floor for k, a, b, floor, *_ in paper_tables()["depth:table-4"]["rows"]}
    return rows


@cache
def floors() -> dict[Row, MeanFieldFloor]:
    """Mean-field floors of all printed rows and of top 16 at a = b = 0; one run for all claims."""
    rows = [*printed_rows(), (16, 0.0, 0.0)]
    found = mean_field_floors([task(*row) for row in rows], seed=SEED, profile="coarse")
    return dict(zip(rows, found, strict=True))


@cache
def law_minimum(top_k: int, types: tuple[tuple[float, float], ...]) -> SampledMinimum:
    """The programme on a few types alone, isotropic, on contexts that all laws share."""
    f = mean_field_features(task(top_k, 0, 0), np.array(types), seed=SEED, chunks=16)
    return sampled_minimum(
        f.target_power[:, 0], f.cross[:, 0], f.gram[:, 0], f.single_power[:, 0], contexts=f.contexts, seed=SEED
    )


def _worst_z(rows: dict[Row, float]) -> float:
    """Largest |z| of printed floors with their 1.5 % sampling error against ours."""
    return max(abs(floors()[row].floor.z_score(value, PRINTED_ERROR * value)) for row, value in rows.items())


def _same_floors(rows: dict[Row, float]) -> Iterator[Evidence]:
    domain = f"(top_k, a, b) in {' '.join(str(row) for row in rows)}; {_SIZES}"
    yield statistical(_worst_z(rows), FALSE_ALARM, "the printed floors against ours", domain)
    yield from _certified(list(rows))


def _certified(rows: Sequence[Row]) -> Iterator[Evidence]:
    gap = max(floors()[row].dual_gap for row in rows)
    scanned = min(floors()[row].scanned for row in rows)
    yield Evidence(Method.SWEEP, gap, GAP, "relative dual gap", f"{scanned} or more types, alpha and beta up to 230")
    bracket = max(floors()[row].bracket for row in rows)
    yield Evidence(Method.NUMERIC, bracket, 0.005, "cross-fitted minus in-sample loss over the floor", "all rows")


@LEDGER.claim(
    "beyond:mean-field-top-2",
    "mean-field floors of top 2",
    _LAW + r":\ 2.04\,(0,0),\ 0.384\,(0.5,0.5),\ 0.343\,(1,0)",
    reading="the printed floors have a sampling error of 1.5 %",
)
def top_2() -> Iterator[Evidence]:
    yield from _same_floors({(2, 0, 0): 2.04, (2, 0.5, 0.5): 0.384, (2, 1, 0): 0.343})


@LEDGER.claim(
    "beyond:mean-field-top-16",
    "mean-field floors of top 16",
    _LAW + r":\ 0.272\,(0,0),\ 0.1139\,(0.25,0.25)",
    reading="the printed floors have a sampling error of 1.5 %",
)
def top_16() -> Iterator[Evidence]:
    yield from _same_floors({(16, 0, 0): 0.272, (16, 0.25, 0.25): 0.1139})


def _against_table(rows: dict[Row, float]) -> Iterator[Evidence]:
    found = {row: floors()[row].floor for row in rows}
    domain = f"{len(rows)} rows, {_SIZES}"
    above = max(0.0, *(found[row].z_score(value) for row, value in rows.items()))
    yield statistical(above, FALSE_ALARM, "the floor above the fitted L0", domain)
    beyond = max(
        0.0, *((abs(found[row].value - value) - CLOSE * value) / found[row].stderr for row, value in rows.items())
    )
    yield statistical(beyond, FALSE_ALARM, "the distance from the fitted L0 beyond 2 %", domain)
    yield from _certified(list(rows))


@LEDGER.claim(
    "beyond:mean-field-vs-table-1",
    "Table 1 reaches the mean-field floor",
    r"0\le L_0/R_\infty-1\le2\,\%\text{ for every softmax row of Table 1}",
    reading="both bounds up to the sampling error of the floor",
)
def table_1() -> Iterator[Evidence]:
    yield from _against_table({row: value for row, value in printed_rows().items() if row[0] == 2 and 0 in row[1:]})


@LEDGER.claim(
    "beyond:mean-field-vs-table-4",
    "Table 4 reaches the mean-field floor",
    r"0\le L_0/R_\infty-1\le2\,\%\text{ for every row of Table 4}",
    reading="both bounds up to the sampling error of the floor",
)
def table_4() -> Iterator[Evidence]:
    yield from _against_table(
        {row: value for row, value in printed_rows().items() if row[0] == 16 or 0 not in row[1:]}
    )


@LEDGER.claim(
    "beyond:mean-field-isotropic-scaling",
    "at a = 0 the floor scales as the trace of the teacher covariance",
    r"L_0(0,b)/L_0(0,0)=\operatorname{tr}\Omega/d=0.632,\ 0.4165,\ 0.2113\quad(b=\tfrac14,\tfrac12,1)",
)
def isotropic_scaling() -> Iterator[Evidence]:
    rows = printed_rows()
    ours, printed = [], []
    for b in (0.25, 0.5, 1):
        trace = float(PowerLawSpectrum(0, b, DIM).teacher_variances().mean())
        ours.append(floors()[2, 0, b].floor.value / floors()[2, 0, 0].floor.value / trace - 1)
        printed.append(rows[2, 0, b] / rows[2, 0, 0] / trace - 1)
    yield Evidence(Method.NUMERIC, max(ours, key=abs), 1e-12, "our ratios over the trace, minus one", _SIZES)
    yield Evidence(
        Method.NUMERIC, max(printed, key=abs), 0.005, "ratios of Table 1 over the trace, minus one", _SIZES
    )


@LEDGER.claim(
    "beyond:mean-field-law-top-2",
    "optimal law of top 2",
    r"\text{top 2 mixes }(\alpha,\beta)\text{ near }(18,12),(50,8),(50,16)",
    reading="read as: a law on these three types comes within 0.5 % of the best",
)
def law_top_2() -> Iterator[Evidence]:
    yield _excess_over_grid(2, ((18, 12), (50, 8), (50, 16)), 0.005)


@cache
def _best_of_grid(top_k: int) -> float:
    scales = [0, 4, 7, 12, 20, 36, 64, 120]
    return law_minimum(top_k, tuple(tuple(pair) for pair in product_types(scales, scales).tolist())).in_sample


@LEDGER.claim(
    "beyond:mean-field-law-top-16",
    "optimal law of top 16",
    r"\text{top 16 is dominated by large }\beta\text{ near }(18,36),(25,50)",
    reading="read as: a law on these two types comes within 1.5 %, the sampling error of the print, of the best",
)
def law_top_16() -> Iterator[Evidence]:
    yield _excess_over_grid(16, ((18, 36), (25, 50)), PRINTED_ERROR)


@LEDGER.claim(
    "beyond:mean-field-law-flat",
    "the floor of top 16 is well determined, its law is not",
    r"\text{along }\beta\approx1.9\,\alpha\text{ the loss is flat: }(7,13)\text{ alone is within 0.5 \% of the best, }"
    r"(18,36)\text{ and }(25,50)\text{ within 1.5 \%, with }A-C=12\text{ and }20",
)
def law_flat() -> Iterator[Evidence]:
    for types, margin, size in ((((7, 13),), 0.005, 12.0), (((18, 36), (25, 50)), PRINTED_ERROR, 20.0)):
        yield _excess_over_grid(16, types, margin)
        ratio = law_minimum(16, types).disagreement.value / size - 1
        yield Evidence(Method.NUMERIC, ratio, 0.1, f"A - C over {size:g}, minus one", f"law on {types}")


def _excess_over_grid(top_k: int, types: tuple[tuple[float, float], ...], margin: float) -> Evidence:
    excess = law_minimum(top_k, types).in_sample / _best_of_grid(top_k) - 1
    what = f"loss of the best law on {types} over that of a grid of 64 types on the same contexts, minus one"
    return Evidence(Method.NUMERIC, excess, margin, what, f"top {top_k}, {_SIZES}")


@LEDGER.claim(
    "beyond:mean-field-single-layer",
    "one softmax layer at top 2",
    r"R_1=2.106\text{ at }\alpha=14.5",
    reading="isotropic; the printed loss has a sampling error of 1.5 %",
)
def single_layer() -> Iterator[Evidence]:
    found = floors()[2, 0, 0]
    z = found.single_layer.z_score(2.106, PRINTED_ERROR * 2.106)
    yield statistical(z, FALSE_ALARM, "the printed loss against ours", _SIZES)
    alpha, beta = found.single_type
    yield Evidence(Method.NUMERIC, alpha / 14.5 - 1, 0.1, "best alpha over 14.5, minus one", _SIZES)
    yield Evidence(Method.NUMERIC, beta, 0.0, "noise of the best single layer", _SIZES)


@LEDGER.claim(
    "beyond:mean-field-finite-depth",
    "finite-depth correction of the mean-field floor",
    r"R_L=R_\infty+(A-C)/L",
    reading="as a prediction of what training reaches, with A - C of the optimal law; isotropic",
)
def finite_depth() -> Iterator[Evidence]:
    for top_k, depth, loss, _ in TRAINED:
        predicted = float(floors()[top_k, 0, 0].risk(depth))
        domain = f"top {top_k}, depth {depth}, {_SIZES}"
        yield Evidence(Method.NUMERIC, loss / predicted - 1, 0.02, "trained over predicted loss, minus one", domain)


@LEDGER.correction(
    "beyond:mean-field-finite-depth",
    Relation.OVERCLAIM,
    r"R_L=R_\infty+(A-C)/L\text{ for layers drawn independently from the law};\quad "
    r"R_\infty\le R_L^{trained}\le\min_{law}R_L",
    "trained layers repel each other: their shared error C_L lies below the floor (1.985 at top 2, 0.199 at top 16, depth 64), "
    "so that less than (A - C)/L is left",
)
def finite_depth_mended() -> Iterator[Evidence]:
    yield from _independent_layers()
    for top_k, depth, loss, error in TRAINED:
        found = floors()[top_k, 0, 0]
        floor = found.floor
        domain = f"top {top_k}, depth {depth}, {_SIZES}"
        below = max(0.0, floor.z_score(loss, error))
        above = max(0.0, -floor.z_score(floor.value + loss - found.best_at_depth[depth], error))
        yield statistical(below, FALSE_ALARM, "the trained loss below the floor", domain)
        yield statistical(above, FALSE_ALARM, "the trained loss above the best independent layers", domain)


def _attention(cosines: FloatArray, noise: FloatArray, types: FloatArray) -> FloatArray:
    """Softmax weights (n, P) of one layer per context: cosines, noise (n, P) and types (n, 2)."""
    logits = types[:, :1] * cosines + types[:, 1:] * noise
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _layers(
    top_k: int, types: FloatArray, law: FloatArray, count: int, depth: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Attention of ``depth`` layers drawn independently in each of ``count`` contexts, (depth, n, P), with the targets
    (n, P) and the label factors (n, P, dim).
    """
    rng = stream(SEED, "independent layers", top_k)
    contexts = sample_contexts(task(top_k, 0, 0), count, rng, rotate=False)
    rows = []
    for _ in range(depth):
        noise = orthogonal_frames(contexts.query_direction, 1, rng)[:, 0, :1] @ np.swapaxes(contexts.directions, 1, 2)
        rows.append(_attention(contexts.cosines, noise[:, 0], types[rng.choice(len(law), count, p=law)]))
    factors = contexts.tokens * np.sqrt(visible_teachers(contexts.task)[0])
    return np.array(rows), contexts.target, factors


def _read_power(weights: FloatArray, factors: FloatArray) -> FloatArray:
    return np.asarray((np.einsum("np,npk->nk", weights, factors) ** 2).sum(axis=1))


def _independent_layers() -> Iterator[Evidence]:
    types, weights, depth = np.array([[18.0, 12.0], [50.0, 8.0]]), np.array([0.7, 0.4]), 4
    f = mean_field_features(task(2, 0, 0), types, seed=SEED, chunks=16)
    moments = [(f.target_power[i, 0], f.cross[i, 0], f.gram[i, 0], f.single_power[i, 0]) for i in range(f.chunks)]
    predicted = np.array([float(finite_depth_loss(*m, weights, depth)) for m in moments])
    gain = weights.sum()
    attention, target, factors = _layers(2, types, weights / gain, 8192, depth)
    losses = _read_power(gain * attention.mean(axis=0) - target, factors)
    error = np.hypot(losses.std() / np.sqrt(len(losses)), predicted.std(ddof=1) / np.sqrt(len(predicted)))
    z = float((losses.mean() - predicted.mean()) / error)
    yield statistical(
        z, FALSE_ALARM, "the simulated loss of independent layers against (63)", f"depth {depth}, top 2"
    )


@LEDGER.claim(
    "beyond:mean-field-shared-noise",
    "the price of one set of noise draws in both factors",
    r"\text{estimating with }M\text{ shared draws adds }(A-C)/M,\ 0.03\text{ at }M=200"
    r"\text{ for top 16 (10 \% of the floor)}",
    reading="0.03 within half, for independent draws and the printed law",
)
def shared_noise() -> Iterator[Evidence]:
    yield from _shared_noise_excess()
    added = law_minimum(16, ((18, 36), (25, 50))).disagreement.value / 200
    yield Evidence(
        Method.NUMERIC, added / 0.03 - 1, 0.5, "(A - C)/200 over 0.03, minus one", f"printed law, {_SIZES}"
    )


@LEDGER.correction(
    "beyond:mean-field-shared-noise",
    Relation.MISPRINT,
    r"\text{estimating with }M\text{ shared draws adds }(A-C)/M,\ 0.10\text{ at }M=200\text{ for the printed law},\ "
    r"0.06\text{ for the best one}",
    "0.03 is the value for the disagreement 5.8 of the trained model of depth 64, not for the law of the floor",
)
def shared_noise_mended() -> Iterator[Evidence]:
    yield from _shared_noise_excess()
    for types, size in ((((18, 36), (25, 50)), 0.10), (((7, 13),), 0.06)):
        added = law_minimum(16, types).disagreement.value / 200
        yield Evidence(
            Method.NUMERIC, added / size - 1, 0.1, f"(A - C)/200 over {size}, minus one", f"law on {types}"
        )


def _shared_noise_excess() -> Iterator[Evidence]:
    """Loss with M shared draws minus the mean product of distinct draws, against (A - C)/M, on the same draws."""
    draws, gain = 8, 1.32
    attention, _, factors = _layers(16, np.array([[18.0, 36.0]]), np.ones(1), 2048, draws)
    f = mean_field_features(task(16, 0, 0), np.array([[18.0, 36.0]]), seed=SEED, chunks=16)
    expected = gain**2 * (f.single_power - f.gram[..., 0])[:, 0, 0] / draws
    total = _read_power(gain * attention.mean(axis=0), factors)
    own = np.mean([_read_power(gain * row, factors) for row in attention], axis=0)
    distinct = (draws * total - own) / (draws - 1)
    excess = total - distinct
    error = np.hypot(excess.std() / np.sqrt(len(excess)), expected.std(ddof=1) / np.sqrt(len(expected)))
    z = float((excess.mean() - expected.mean()) / error)
    yield statistical(
        z, FALSE_ALARM, "the excess of shared draws against (A - C)/M", f"M = {draws}, top 16, {_SIZES}"
    )
