"""Claims beyond:...: our own results on the depth paper, without the mean-field floor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np

from sim.contexts import sample_contexts
from sim.montecarlo.empirical_floor import empirical_floor, empirical_moments, jackknife_floors
from sim.streams import stream
from theory.depth import free_polynomial as free
from theory.depth import loss_floor as floor
from theory.depth import repeated_update as repeated
from theory.depth.population_training import fitted_exponent
from theory.problems import ArraySpectrum, PowerLawSpectrum, TopKTask
from theory.results import FloatArray
from validate.claims.depth.loss_floor import ROWS, context_floors, estimate_score, sampled_floors, student_score
from validate.claims.depth.setup import FALSE_ALARM, LINEAR_SIZE, SOFTMAX_SIZE, worst_score, z_score
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical
from validate.tables.comparison import paper_rows

LEDGER = Ledger()
# The statements print exponents with two decimals, not all of them rounded to nearest, and floors with six.
TWO_DECIMALS, SIX_DECIMALS = 0.01, 5.1e-7


def _isotropic(size: tuple[int, int], top_k: int = 2, b: float = 0.0) -> TopKTask:
    return TopKTask(PowerLawSpectrum(0, b, size[0]), size[1], top_k)


# --- A: the settings that the paper does not print --------------------------------------------------------------------


@LEDGER.claim(
    "beyond:linear-sizes",
    "the linear-attention numbers are of dim 128 and context 1,024",
    r"(d,P)=(128,1024):\ \text{floor }59.3802\text{ against the printed }59.3714\pm0.0213",
)
def linear_sizes() -> Iterator[Evidence]:
    row = paper_rows("depth:table-3")[0]

    def score(size: tuple[int, int]) -> float:
        return float((floor.isotropic_floor(_isotropic(size)).floor.value - row["predicted"]) / row["predicted_se"])

    yield statistical(
        score(LINEAR_SIZE), FALSE_ALARM, "the exact floor against the print", "dim 128, context 1,024, top 2"
    )
    others = itertools.product((32, 64, 96, 100, 128, 192, 256), (128, 256, 512, 1000, 1024, 2048, 4096))
    near = sum(abs(score(size)) < 10 for size in others if size not in (LINEAR_SIZE, (128, 1000)))
    yield Evidence(
        Method.EXACT,
        float(near),
        0.0,
        "other round sizes within 10 standard errors",
        "47 sizes, dim 32-256, context 128-4,096",
    )


@LEDGER.claim(
    "beyond:softmax-sizes",
    "the softmax-attention numbers are of dim 16",
    r"a=0:\ L_0(0,b)/L_0(0,0)=\operatorname{tr}\Omega/d\text{ at }d=16",
    reading="the context, 64, shows only in the levels: mean-field floors and trained models",
)
def softmax_sizes() -> Iterator[Evidence]:
    rows = [row for row in paper_rows("depth:table-1") if row["a"] == 0]

    def error(dim: int) -> float:
        k = np.arange(1, dim + 1.0)
        base = float(rows[0]["softmax_L0"])
        return max(abs(float(row["softmax_L0"]) / base / float(np.mean(k ** -row["b"])) - 1) for row in rows[1:])

    yield Evidence(Method.NUMERIC, error(16), 0.002, "largest deviation of the ratios at dim 16", "b 0.25, 0.5, 1")
    nearest = min(error(dim) for dim in range(2, 257) if dim != 16)
    yield Evidence(Method.NUMERIC, 0.01 / nearest, 1.0, "0.01 over the least deviation at any other dim", "dim 2-256")


# --- B: depth exponents -----------------------------------------------------------------------------------------------


@LEDGER.claim(
    "beyond:optimal-residual",
    "the optimal residual of a continuous spectrum and its roots",
    r"r_L(\lambda)=\frac{P_L^{(\zeta,0)}(1-2\lambda/\lambda_1)}{\binom{L+\zeta}L}={}_2F_1(-L,L+\zeta+1;\zeta+1;\lambda/\lambda_1);"
    r"\text{ roots real, simple, in }(0,\lambda_1)",
)
def optimal_residual() -> Iterator[Evidence]:
    worst = 0.0
    with mpmath.workdps(40):
        for zeta, L, x in itertools.product((0.25, 1.0, 3.0), (1, 5, 20), (0.0, 0.1, 0.77, 1.0)):
            exact = mpmath.hyp2f1(-L, L + mpmath.mpf(zeta) + 1, mpmath.mpf(zeta) + 1, mpmath.mpf(x))
            worst = max(worst, float(abs(float(free.continuum_residual(zeta, L, x)) - exact)))
    yield Evidence(
        Method.HIGH_PRECISION, worst, 1e-12, "residual against the hypergeometric sum", "zeta 0.25-3, depth 1-20"
    )
    outside = 0.0
    for (a, b), dim, L in itertools.product(((2.0, 1.0), (0.5, 2.0), (1.0, 0.25)), (64, 10**6), (1, 3, 6)):
        spectrum = PowerLawSpectrum(a, b, dim)
        roots = free.residual_roots(spectrum, L)
        outside += float((roots <= 0).sum() + (roots > 1 + 1e-14).sum() + (np.diff(roots) <= 0).sum())
    yield Evidence(
        Method.SWEEP, outside, 0.0, "roots that are not simple or outside (0, lambda_1]",
        "(a,b) (2,1) (0.5,2) (1,0.25); dim 64, 10^6; depth 1, 3, 6; deeper, roots of learned modes round to the eigenvalues",
    )  # fmt: skip


@LEDGER.claim(
    "beyond:best-step",
    "the best repeated step tends to twice the paper's",
    r"\eta^*=1.56,\,1.79,\,1.92,\,1.98\text{ at }L=4,16,64,256,\ \zeta=2;\quad R(\eta^*)/R(1)\to2^{-\zeta}",
)
def best_step() -> Iterator[Evidence]:
    spectrum = PowerLawSpectrum(1.0, 2.0)
    steps = repeated.continuum_best_step(spectrum, [4, 16, 64, 256])
    gap = float(np.abs(steps - np.array([1.56, 1.79, 1.92, 1.98])).max())
    yield Evidence(Method.NUMERIC, gap, TWO_DECIMALS, "best steps against the stated ones", "zeta 2")
    gain = float(repeated.continuum_risk(spectrum, 10**6, repeated.continuum_best_step(spectrum, 10**6)))
    ratio = gain / float(repeated.continuum_risk(spectrum, 10**6))
    yield Evidence(Method.NUMERIC, ratio * 4 - 1, 1e-3, "gain over 2^-zeta, minus one", "zeta 2, depth 10^6")


@LEDGER.claim(
    "beyond:discrete-exponent",
    "a discrete spectrum decays faster than 2 zeta",
    r"(2+a)\zeta:\ (2,1)\text{ at }d=2\cdot10^5:\ 2.64,3.17,3.53,3.75,3.87,3.94\ (L=2\to4\to\dots\to128);\ (2,2):\ 3.79\dots5.88",
)
def discrete_exponent() -> Iterator[Evidence]:
    depths = 2.0 ** np.arange(1, 8)
    slopes = free.local_exponents(depths, free.finite_risk(PowerLawSpectrum(2, 1, 200_000), depths))
    gap = float(np.abs(slopes - np.array([2.64, 3.17, 3.53, 3.75, 3.87, 3.94])).max())
    yield Evidence(Method.NUMERIC, gap, TWO_DECIMALS, "local exponents against the stated ones", "(2,1), dim 200,000")
    steep = free.local_exponents(depths, free.finite_risk(PowerLawSpectrum(2, 2, 200_000), depths))
    gap = max(abs(float(steep[0]) - 3.79), abs(float(steep[-1]) - 5.88))
    yield Evidence(
        Method.NUMERIC,
        gap,
        TWO_DECIMALS,
        "first and last local exponent against the stated ones",
        "(2,2), dim 200,000",
    )
    for a, b in ((2.0, 1.0), (1.0, 2.0), (0.5, 2.0)):
        infinite = PowerLawSpectrum(a, b)
        deep = free.local_exponents([128, 256], free.finite_risk(infinite, [128, 256]))
        ratio = float(deep[0]) / free.discrete_exponent(infinite) - 1
        yield Evidence(
            Method.NUMERIC,
            ratio,
            0.03,
            "local exponent over (2+a) zeta, minus one",
            f"a={a:g}, b={b:g}, depth 128-256",
        )


@LEDGER.claim(
    "beyond:finite-exponents",
    "at dim 128 and small depth exponents are far from both asymptotes",
    r"(2,2),\ d=128,\ L=1..8:\quad\text{constrained }1.35,\ \text{free }3.75\quad(\zeta=1.5,\ (2+a)\zeta=6)",
    reading="constrained at the best step; at the paper's step it is 1.03",
)
def finite_exponents() -> Iterator[Evidence]:
    spectrum, depths = PowerLawSpectrum(2, 2, 128), [1, 2, 4, 8]
    constrained = fitted_exponent(depths, repeated.best_risk(spectrum, depths))
    yield Evidence(
        Method.NUMERIC,
        constrained - 1.35,
        TWO_DECIMALS,
        "constrained exponent against the stated one",
        "depth 1, 2, 4, 8",
    )
    yield Evidence(
        Method.NUMERIC, fitted_exponent(depths, free.finite_risk(spectrum, depths)) - 3.75, TWO_DECIMALS,
        "free exponent against the stated one", "depth 1, 2, 4, 8",
    )  # fmt: skip


def _gram_risk(a: float, b: float, dim: int, depth: int, digits: int) -> Any:
    """Least risk by the normal equations in ``digits`` decimal digits."""
    with mpmath.workdps(digits):
        k = [mpmath.mpf(i) for i in range(1, dim + 1)]
        x, w = [v ** mpmath.mpf(-a) for v in k], [v ** mpmath.mpf(-(a + b)) for v in k]
        powers = [[wi * xi**r for wi, xi in zip(w, x, strict=True)] for r in range(2 * depth + 1)]
        moments = [mpmath.fsum(row) for row in powers]
        G = mpmath.matrix([[moments[r + s] for s in range(1, depth + 1)] for r in range(1, depth + 1)])
        h = mpmath.matrix(moments[1 : depth + 1])
        solution = mpmath.lu_solve(G, h)
        return moments[0] - mpmath.fsum(h[i] * solution[i] for i in range(depth))


@LEDGER.claim(
    "beyond:bidiagonal",
    "the orthogonal basis keeps all digits where the Gram matrix needs hundreds",
    r"\text{relative error}\le10^{-12}\text{ at }d=64,\ L\le32",
)
def bidiagonal() -> Iterator[Evidence]:
    worst, settled = 0.0, 0.0
    for a, b, L in ((2.0, 0.5, 4), (2.0, 0.5, 20), (2.0, 0.5, 32), (0.5, 1.0, 20)):
        coarse, fine = (_gram_risk(a, b, 64, L, digits) for digits in (200 + 10 * L, 400 + 20 * L))
        settled = max(settled, float(abs(coarse / fine - 1)))
        worst = max(worst, abs(float(free.finite_risk(PowerLawSpectrum(a, b, 64), L)) / float(fine) - 1))
    domain = "(a,b) (2,0.5) (0.5,1); dim 64; depth 4-32"
    yield Evidence(
        Method.HIGH_PRECISION, worst, 1e-12, "finite_risk against normal equations at up to 1,040 digits", domain
    )
    yield Evidence(
        Method.HIGH_PRECISION, settled, 1e-20, "normal equations at half of the digits against all", domain
    )


@LEDGER.claim(
    "beyond:gram",
    "the pseudo-inverse of the Gram matrix has a false plateau in float64",
    r"\lambda=k^{-2},\ \omega=k^{-1/2},\ d=64:\ \text{pinv gives }0.0111\text{ for every }L\ge8;\ \text{right: }1.77\cdot10^{-6}\text{ at }L=20",
)
def gram_plateau() -> Iterator[Evidence]:
    spectrum = PowerLawSpectrum(2, 0.5, 64)
    for L in (8, 20, 32):
        moments = np.array(
            [float(spectrum.label_variances() @ spectrum.input_variances() ** r) for r in range(2 * L + 1)]
        )
        index = np.arange(1, L + 1)
        G, h = moments[np.add.outer(index, index)], moments[index]
        plain = moments[0] - float(h @ np.linalg.pinv(G) @ h)
        exact = float(free.finite_risk(spectrum, L))
        yield Evidence(
            Method.NUMERIC, math.log(plain / 0.0111), math.log(1.3), "log of the pinv risk over 0.0111", f"depth {L}"
        )
        yield Evidence(
            Method.NUMERIC, 2 * exact / plain, 1.0, "twice the exact risk over the pinv risk", f"depth {L}"
        )


@LEDGER.claim(
    "beyond:compressed-tail",
    "the tail of a power law compresses, so cost does not grow with dim",
    r"\text{risks at }d=20{,}000\text{ from a few nodes per octave; }d=10^{12}\text{ is reachable}",
)
def compressed_tail() -> Iterator[Evidence]:
    for a, b in ((2.0, 0.5), (0.5, 1.0)):
        law = PowerLawSpectrum(a, b, 20_000)
        listed = ArraySpectrum(tuple(law.input_variances().tolist()), tuple(law.teacher_variances().tolist()))
        depths = [1, 8, 24]
        ratio = free.finite_risk(law, depths) / free.finite_risk(listed, depths)
        yield Evidence(
            Method.NUMERIC, float(np.abs(ratio - 1).max()), 1e-10, "compressed against all 20,000 modes",
            f"a={a:g}, b={b:g}, depth 1-24",
        )  # fmt: skip
        huge = free.finite_risk(PowerLawSpectrum(a, b, 10**12), 24) / free.finite_risk(PowerLawSpectrum(a, b), 24)
        tail = 10.0 ** (-12 * (a + b - 1))
        yield Evidence(
            Method.NUMERIC,
            float(huge) - 1,
            1e-9 + 1e6 * tail,
            "dim 10^12 over infinite dim, minus one",
            f"a={a:g}, b={b:g}, depth 24",
        )


# --- C: floors --------------------------------------------------------------------------------------------------------


@LEDGER.claim(
    "beyond:isotropic-floor",
    "the isotropic floor by one-dimensional integrals",
    r"(d,P,k)=(128,1024,2):\ T=68.686635,\ h=34.514059,\ \text{floor }59.380227",
)
def isotropic_floor() -> Iterator[Evidence]:
    exact = floor.isotropic_floor(_isotropic(LINEAR_SIZE))
    for name, value, stated in (
        ("T", exact.target_power.value, 68.686635), ("h", exact.alignment.value, 34.514059), ("floor", exact.floor.value, 59.380227),
    ):  # fmt: skip
        yield Evidence(
            Method.NUMERIC,
            value - stated,
            SIX_DECIMALS,
            f"{name} minus the stated value",
            "dim 128, context 1,024, top 2",
        )
    scores = []
    for index, (size, k) in enumerate(((SOFTMAX_SIZE, 2), (SOFTMAX_SIZE, 16), ((3, 12), 1))):
        task = _isotropic(size, k)
        contexts = sample_contexts(task, 6000, stream(53, "beyond floor", index), rotate=False)
        t = np.einsum("np,npk->nk", contexts.target, contexts.tokens)
        small = floor.isotropic_floor(task)
        slope = small.alignment.value / size[0]
        scores.append(z_score(np.sum((t - slope * contexts.query) ** 2, axis=1), small.floor.value))
        scores.append(z_score(np.sum(t**2, axis=1), small.target_power.value))
    yield statistical(
        worst_score(scores),
        FALSE_ALARM / 6,
        "sampled floor and T against the integrals",
        "(16,64) top 2, 16; (3,12) top 1",
    )


@LEDGER.claim(
    "beyond:empirical-floor",
    "the floor in the empirical covariance at the paper's size",
    r"(128,1024,2):\ \text{degree one in }S:\ 58.242,\ E\,t\cdot Sq=1.123\,E\,t\cdot q,\ E|Sq|^2=d(1+(d+1)/P)",
    reading="as first stated by us",
)
def stated_empirical_floor() -> Iterator[Evidence]:
    task = _isotropic(LINEAR_SIZE)
    exact, population = floor.isotropic_empirical_floor(task), floor.isotropic_floor(task)
    domain = "dim 128, context 1,024, top 2"
    yield Evidence(
        Method.NUMERIC,
        exact.feature_power / (128 * (1 + 129 / 1024)) - 1,
        1e-14,
        "E|Sq|^2 over d(1+(d+1)/P), minus one",
        domain,
    )
    yield Evidence(Method.NUMERIC, exact.floor.value - 58.242, 0.0005, "exact floor minus the stated one", domain)
    ratio = exact.alignment.value / population.alignment.value
    yield Evidence(Method.NUMERIC, ratio - 1.123, 0.0005, "exact ratio of alignments minus the stated one", domain)


@LEDGER.correction(
    "beyond:empirical-floor",
    Relation.MISPRINT,
    r"E\,t\cdot Sq=1.1174\,E\,t\cdot q,\ \text{floor }58.3665:\ E[t\cdot Sq]=\tfrac{\bar\chi^2}PE_\tau[m(d\tau^2+(P-k-1)d\,b_2+(k-1)d\,m_2+d+1)]",
    "the stated numbers were sampled; 59,904 contexts give 58.342(30), 0.8 errors from the exact value and 3.3 from 58.242; "
    "the floor is 1.7 % below that of Sigma",
)
def exact_empirical_floor() -> Iterator[Evidence]:
    task = _isotropic(LINEAR_SIZE)
    exact, population = floor.isotropic_empirical_floor(task), floor.isotropic_floor(task)
    domain = "dim 128, context 1,024, top 2"
    yield Evidence(
        Method.NUMERIC, exact.floor.value - 58.3665, 5e-5, "exact floor minus the corrected number", domain
    )
    ratio = exact.alignment.value / population.alignment.value
    yield Evidence(
        Method.NUMERIC, ratio - 1.1174, 5e-5, "exact ratio of alignments minus the corrected number", domain
    )
    scores = []
    for index, (dim, context, k) in enumerate(((16, 64, 2), (16, 64, 16), (3, 8, 2), (8, 16, 1))):
        small = _isotropic((dim, context), k)
        contexts = sample_contexts(small, 12_000, stream(58, "empirical", index), rotate=False)
        t = np.einsum("np,npk->nk", contexts.target, contexts.tokens)
        seen = (
            np.einsum("npk,np->nk", contexts.tokens, np.einsum("npk,nk->np", contexts.tokens, contexts.query))
            / context
        )
        closed = floor.isotropic_empirical_floor(small)
        # The plain alignment is known: as a control variate it removes most of the noise.
        known = floor.isotropic_floor(small).alignment.value
        plain, read = np.sum(t * contexts.query, axis=1), np.sum(t * seen, axis=1)
        control = float(np.cov(read, plain)[0, 1] / np.var(plain))
        scores.append(z_score(read - control * (plain - known), closed.alignment.value))
        scores.append(z_score(np.sum(seen**2, axis=1), closed.feature_power))
    yield statistical(
        worst_score(scores),
        FALSE_ALARM / 8,
        "sampled alignment and feature power",
        "(16,64) top 2, 16; (3,8) top 2; (8,16) top 1",
    )


@LEDGER.claim(
    "beyond:floor-is-passed",
    "the floor of polynomials in Sigma is not a bound at finite context",
    r"\min_a E\|t-p(S)q\|_\Omega^2<\min_aE\|t-p(\Sigma)q\|_\Omega^2",
    reading="isotropic, exactly, at both sizes of the paper; anisotropic, sampled, at (16, 64)",
)
def floor_is_passed() -> Iterator[Evidence]:
    for size in (SOFTMAX_SIZE, LINEAR_SIZE):
        task = _isotropic(size)
        ratio = floor.isotropic_empirical_floor(task).floor.value / floor.isotropic_floor(task).floor.value
        yield Evidence(
            Method.NUMERIC,
            ratio,
            0.99,
            "floor in S over floor in Sigma, degree one",
            f"isotropic, {size}, top 2, exact",
        )
    for a, b in ((0.5, 0.5), (1.0, 0.25)):
        task = TopKTask(PowerLawSpectrum(a, b, SOFTMAX_SIZE[0]), SOFTMAX_SIZE[1], 2)
        empirical = empirical_floor(task, 4, relative_error=0.01, seed=58, max_contexts=40_000).floor
        population = sampled_floors(2, a, b, SOFTMAX_SIZE)[-1]
        z = student_score(empirical.z_score(population.value, population.stderr), population.chunks - 1)
        domain = f"a={a:g}, b={b:g}, degree 4 in S against 8 in Sigma, (16, 64), top 2"
        yield statistical(max(z, 0.0), FALSE_ALARM, "a floor in S above that in Sigma", domain)
        what = "3.1 over the standard errors by which the floor in S is lower (chance would reach it once in 1,000)"
        yield Evidence(Method.NUMERIC, 3.1 / -z if z < 0 else np.inf, 1.0, what, domain)


@LEDGER.claim(
    "beyond:empirical-limit",
    "the floor in S tends to the floor in Sigma",
    r"|R(S)/R(\Sigma)-1|=O(1/P)\text{ at fixed }d;\ \text{it changes sign: only the noise of }S\text{ is left at large }P",
)
def empirical_limit() -> Iterator[Evidence]:
    gaps = []
    for context in (100, 10**4, 10**6, 10**8):
        task = _isotropic((8, context))
        gaps.append(floor.isotropic_empirical_floor(task).floor.value / floor.isotropic_floor(task).floor.value - 1)
    yield Evidence(
        Method.NUMERIC,
        float(not (gaps[0] < 0 < gaps[2])),
        0.0,
        "signs that differ from minus, then plus",
        "dim 8, top 2",
    )
    yield Evidence(
        Method.NUMERIC,
        fitted_exponent([10**6, 10**8], gaps[2:]) - 1,
        0.05,
        "decay exponent minus one",
        "dim 8, top 2, P = 10^6 to 10^8",
    )


@LEDGER.claim(
    "beyond:inner-product-floor",
    "the floor with tokens ranked by inner product, without sampling",
    r"T=\tfrac{\operatorname{tr}\Omega\Sigma}k+(E\bar z^2-\tfrac1k)\sum_k\omega_k\lambda_k^2E\tfrac{q_k^2}V,\quad "
    r"h_j=\gamma\sum_k\omega_k\lambda_k\psi_jE\tfrac{q_k^2}{\sqrt V}",
)
def inner_product_floor() -> Iterator[Evidence]:
    scores = []
    for index, (a, b, k) in enumerate(((0.0, 0.0, 1), (1.0, 0.25, 3), (2.0, 1.0, 2))):
        task = TopKTask(PowerLawSpectrum(a, b, 6), 32, k)
        exact = floor.inner_product_floor(task, 3)
        q, t = _ranked(task, 20_000, index)
        teacher, basis = task.spectrum.teacher_variances(), floor.predictor_basis(task.spectrum, 3)
        best = q * (exact.cross_moments @ basis)
        scores.append(z_score((t - best) ** 2 @ teacher, float(exact.by_degree[-1])))
        scores.append(z_score((t - floor.mean_target(task, q)) ** 2 @ teacher, exact.irreducible))
    yield statistical(
        worst_score(scores),
        FALSE_ALARM / 6,
        "sampled floor and variation",
        "(a,b,k) (0,0,1) (1,0.25,3) (2,1,2), dim 6, context 32",
    )


def _ranked(task: TopKTask, count: int, index: int) -> tuple[FloatArray, FloatArray]:
    rng = stream(53, "inner product", index)
    scale = np.sqrt(task.spectrum.input_variances())
    x = scale * rng.standard_normal((count, task.context, scale.size))
    q = scale * rng.standard_normal((count, scale.size))
    chosen = np.argpartition(-np.einsum("npk,nk->np", x, q), task.top_k - 1, axis=1)[:, : task.top_k]
    return q, np.take_along_axis(x, chosen[..., None], axis=1).mean(axis=1)


@LEDGER.claim(
    "beyond:integrated-contexts",
    "queries whose contexts are integrated have the floors of whole contexts",
    r"E_{q}\big[E[\cdot\,|\,q]\big]=E_{q,X}[\cdot]\text{ for }T,\ h,\ G\text{: 16,384 queries against 640 contexts token by token}",
)
def integrated_contexts() -> Iterator[Evidence]:
    cases = ((2, 0.5, 0.5, SOFTMAX_SIZE), (16, 0.25, 0.25, SOFTMAX_SIZE), (2, 1.0, 0.25, LINEAR_SIZE))
    scores, gains = [], []
    for case in cases:
        for by_query, by_context in zip(sampled_floors(*case), context_floors(*case), strict=True):
            scores.append(estimate_score(by_context, by_query.value, by_query.stderr))
            gains.append(by_query.stderr / by_context.stderr)
    domain = "top 2 and 16 at (16, 64), top 2 at (128, 1,024); degree 1-8"
    yield statistical(
        worst_score(scores), FALSE_ALARM / len(scores), "floors of whole contexts against those of queries", domain
    )
    yield Evidence(Method.NUMERIC, max(gains), 0.25, "standard error by queries over that by whole contexts", domain)


@LEDGER.claim(
    "beyond:ranking-matters",
    "inner products are no substitute for cosines in the floor",
    r"\text{ranked by inner product the floor is 7 \% higher at }a=0\text{ and 1.6 to 2.4 times as high at }a\ge1",
    reading="the approximation behind (45), (46); it selects long tokens, whose excess length cannot be predicted",
)
def ranking_matters() -> Iterator[Evidence]:
    ratio = float(
        floor.inner_product_floor(_isotropic(LINEAR_SIZE), 1).by_degree[0]
        / floor.isotropic_floor(_isotropic(LINEAR_SIZE)).floor.value
    )
    yield Evidence(
        Method.NUMERIC,
        ratio - 1.071,
        0.001,
        "ratio of the floors minus 1.071, exact",
        "isotropic, dim 128, context 1,024, top 2",
    )
    ratios = []
    for k, a, b in ROWS:
        if a >= 1:
            task = TopKTask(PowerLawSpectrum(a, b, LINEAR_SIZE[0]), LINEAR_SIZE[1], k)
            ratios.append(float(floor.inner_product_floor(task, 8).by_degree[-1]) / sampled_floors(k, a, b)[-1].value)
    yield Evidence(
        Method.STATISTICAL,
        1.6 / min(ratios),
        1.0,
        "1.6 over the least ratio of the floors",
        "five rows of Table 3 with a >= 1",
        FALSE_ALARM,
    )
    yield Evidence(
        Method.STATISTICAL,
        max(ratios) / 2.4,
        1.0,
        "largest ratio of the floors over 2.4",
        "five rows of Table 3 with a >= 1",
        FALSE_ALARM,
    )


@LEDGER.claim(
    "beyond:residual-floor-estimator",
    "the jackknife of the least sampled loss is an honest estimate of the floor in S",
    r"\hat R=m\hat R_m-(m-1)\overline{\hat R_{m-1}}\text{ over chunks; isotropic, degree one, against the exact floor}",
)
def jackknife_estimator() -> Iterator[Evidence]:
    for dim, context in ((4, 12), SOFTMAX_SIZE):
        task = _isotropic((dim, context))
        values, errors = jackknife_floors(empirical_moments(task, 1, seed=59, chunks=64))
        exact = floor.isotropic_empirical_floor(task).floor.value
        z = student_score(float((values[0] - exact) / errors[0]), 63)
        yield statistical(
            z,
            FALSE_ALARM,
            "the sampled floor in S against the exact one",
            f"dim {dim}, context {context}, top 2, 16,384 contexts",
        )
