"""Loss floor of linear attention on the difficult task: queries are drawn, their contexts are integrated.

Given the query, the mean and the power of the selected tokens are integrals over one or two real numbers (see
`average_target`), so a query stands for all its contexts: no token is drawn, nothing is truncated, and the size of the
context costs nothing. What is left to sampling is the query, on scrambled Sobol nets, one per chunk: nets of
different chunks are independent, so the spread between chunks is an honest error. The statistics are those of the
reference over whole contexts, `sim.montecarlo.floor_moments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from scipy.linalg import eigh_tridiagonal
from scipy.special import ndtri
from scipy.stats import qmc

from sim.montecarlo.floor_moments import FloorChunk, FloorEstimate, checked_basis, estimate_floor
from sim.montecarlo.kernels.conditional_floor import conditional_floor_chunk
from sim.montecarlo.stopping import DEFAULT_MAX_CONTEXTS, Progress
from sim.streams import stream
from theory.problems import TopKTask, as_real
from theory.results import DomainError, FloatArray, PrecisionError

# Queries in a chunk: a power of two, as the nets demand; fewer where a chunk would hold more than 2^22 normals.
QUERIES_PER_CHUNK = 1024
MAX_NORMALS = 2**22
MAX_DIM = 10**5
# Modes of largest variance whose numbers form a Sobol net; those of the others are independent.
NET_MODES = 128
# Bits of the coordinates of a net: their cells have midpoints in the open interval (0, 1).
NET_BITS = 52
# Quadrature rules, coarse to fine: nodes for the order statistic and step of the integrals along the cut. A rule is
# good enough where the next one moves the loss by at most this share of the requested error.
RULES = ((5, 0.6), (10, 0.4), (20, 0.3), (40, 0.2))
SHARE_OF_ERROR = 0.05
# Queries on which two rules are compared.
COMPARED_QUERIES = 64
# The law of the order statistic is tabulated at this many points per standard deviation, to where its logarithm is ...
POINTS_PER_DEVIATION = 16
NEGLIGIBLE_LOG_DENSITY = -60.0


@dataclass(frozen=True, slots=True, eq=False)
class Quadrature:
    """Nodes log_odds and weights, both (n,), for the order statistic; step of the integrals along the cut."""

    log_odds: FloatArray
    weights: FloatArray
    step: float


def order_statistic_rule(context: int, top_k: int, nodes: int) -> tuple[FloatArray, FloatArray]:
    r"""Gauss rule for log(U/(1-U)), with U the probability that a token passes the (k+1)-th largest of P cosines.

    .. math:: U \sim \mathrm{Beta}(k + 1, P - k)

    whatever the law of the cosines, if it is continuous. Returns nodes and weights, rising, both (nodes,); both are
    empty where all tokens are selected, k = P. The conditional moments of the tokens are smooth in the logarithm of
    a tail, much less so in the tail itself. Source: depth (41); order statistics of a uniform sample.
    """
    if top_k == context:
        return np.empty(0), np.empty(0)
    mode = (top_k + 1) / (context + 1)
    deviation = 1 / math.sqrt((context + 1) * mode * (1 - mode))
    # Tails fall like exp(-(k+1)|x|) and exp(-(P-k)|x|), to below exp(-60) within 128 deviations.
    points = np.arange(-128 * POINTS_PER_DEVIATION, 128 * POINTS_PER_DEVIATION + 1) / POINTS_PER_DEVIATION
    shifts = deviation * points
    log_density = (top_k + 1) * shifts - (context + 1) * np.log1p(mode * np.expm1(shifts))
    points = points[log_density > NEGLIGIBLE_LOG_DENSITY]
    density = np.exp(log_density[log_density > NEGLIGIBLE_LOG_DENSITY])
    # Lanczos: the Jacobi matrix of the tabulated law, whose eigenvalues are the nodes.
    rows: list[FloatArray] = []
    diagonal, off_diagonal = [], []
    vector = np.sqrt(density / density.sum())
    for _ in range(nodes):
        for row in rows * 2:
            vector = vector - row * (row @ vector)
        off_diagonal.append(float(np.linalg.norm(vector)))
        rows.append(vector / off_diagonal[-1])
        vector = points * rows[-1]
        diagonal.append(float(rows[-1] @ vector))
    values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(off_diagonal[1:]))
    return math.log((top_k + 1) / (context - top_k)) + deviation * values, vectors[0] ** 2


def draw_queries(rng: np.random.Generator, variances: FloatArray, count: int) -> FloatArray:
    """``count`` queries (count, dim), a power of two: a scrambled Sobol net of normals with ``variances`` (dim,).

    Every query has the law of depth (4); together they fill the leading `NET_MODES` modes more evenly than
    independent ones would. Source: depth (4); Owen, scrambled nets.
    """
    dim = variances.size
    leading = np.argsort(-variances, kind="stable")[:NET_MODES]
    normals = rng.standard_normal((count, dim)) if dim > NET_MODES else np.empty((count, dim))
    net = qmc.Sobol(leading.size, bits=NET_BITS, seed=rng).random(count)
    normals[:, leading] = ndtri(net + 2.0 ** -(NET_BITS + 1))
    queries: FloatArray = np.sqrt(variances) * normals
    return queries


def conditional_floor(
    task: TopKTask,
    basis: FloatArray,
    *,
    relative_error: float,
    seed: int,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> FloorEstimate:
    """Loss floor of the difficult task for covariance polynomials of degree 1..R, averaged over contexts exactly.

    Arguments and result are those of `residual_floor`; each query counts as one context, though it stands for all of
    its own, and 24 chunks, the fewest, are 24,576 queries up to dim 4096. Standard errors include the error of the
    quadrature, measured on a few queries as the difference of two rules. The same seed gives the same bits for any
    number of workers. Source: depth (49), (51), (53). Raises DomainError for arguments outside these ranges and for a
    single mode, where all cosines are +1 or -1; PrecisionError where the quadrature cannot reach a twentieth of the
    requested error, as may happen for contexts of a few tokens: draw those whole.
    """
    _check_task(task)
    basis = checked_basis(task, basis)
    relative_error = as_real("relative_error", relative_error, 0, 1, open_low=True)
    variances, teacher = task.spectrum.input_variances(), task.spectrum.teacher_variances()
    size = _chunk_size(variances.size)

    def means(queries: FloatArray, coefficients: FloatArray, rule: Quadrature) -> FloorChunk:
        chunk: FloorChunk = conditional_floor_chunk(
            queries, variances, teacher, task.top_k, rule.log_odds, rule.weights, basis, coefficients, rule.step
        )
        if not math.isfinite(chunk[0]):
            raise PrecisionError(
                f"the cosines of {task.canonical()} cannot be resolved in float64: draw whole contexts"
            )
        return chunk

    def name(part: str) -> str:
        return f"conditional floor {part} {task.canonical()}"

    # Also validates the seed, before any work.
    compared = draw_queries(stream(seed, name("rules")), variances, min(size, COMPARED_QUERIES))
    rule, finer = choose_rule(task, basis.shape[0], relative_error, lambda a, r: means(compared, a, r))

    def sampler(coefficients: FloatArray) -> Callable[[np.random.Generator], FloorChunk]:
        return lambda rng: means(draw_queries(rng, variances, size), coefficients, rule)

    def tolerance(coefficients: FloatArray) -> FloorChunk:
        return _differences(means(compared, coefficients, rule), means(compared, coefficients, finer))

    return estimate_floor(
        sampler, basis=basis, size=size, name=name, relative_error=relative_error, seed=seed,
        max_contexts=max_contexts, workers=workers, progress=progress, tolerance=tolerance,
    )  # fmt: skip


def choose_rule(
    task: TopKTask, degrees: int, relative_error: float, means: Callable[[FloatArray, Quadrature], FloorChunk]
) -> tuple[Quadrature, Quadrature]:
    """The coarsest rule that the next finer one confirms, and that finer one.

    means: of some queries at given coefficients (degrees, degrees) and rule. The losses of all degrees must differ by
    at most `SHARE_OF_ERROR` of the requested error. Source: numerical; no equation. Raises PrecisionError where no
    rule is confirmed.
    """
    rules = [Quadrature(*order_statistic_rule(task.context, task.top_k, nodes), step) for nodes, step in RULES]
    coefficients = np.zeros((degrees, degrees))
    # About the coefficients of the main run, found on these few queries.
    best = np.tril(np.tile(means(coefficients, rules[0])[1], (degrees, 1)))
    coarse = means(best, rules[0])
    for rule, finer in pairwise(rules):
        fine = means(best, finer)
        if (_differences(coarse, fine)[2] <= SHARE_OF_ERROR * relative_error * fine[2]).all():
            return rule, finer
        coarse = fine
    raise PrecisionError(
        f"the average over contexts of {task.context} tokens is not resolved to {SHARE_OF_ERROR * relative_error:.1g}: "
        f"ask for a larger relative_error than {relative_error:g} or draw whole contexts"
    )


def _differences(one: FloorChunk, other: FloorChunk) -> FloorChunk:
    cross, residual, gradient = (np.abs(a - b) for a, b in zip(one[1:], other[1:], strict=True))
    return abs(one[0] - other[0]), cross, residual, gradient


def _chunk_size(dim: int) -> int:
    return int(min(QUERIES_PER_CHUNK, 2 ** int(math.log2(MAX_NORMALS / dim))))


def _check_task(task: TopKTask) -> None:
    if not isinstance(task, TopKTask):
        raise DomainError(f"task must be a TopKTask, got {task!r}")
    # A spectrum of a task is finite, but the types of the problems cannot say so.
    dim = cast("int", task.spectrum.dim)
    if not 2 <= dim <= MAX_DIM:
        raise DomainError(
            f"task.spectrum must have 2 to {MAX_DIM} modes, got {dim}; with one mode all cosines are +1 or -1: "
            "draw whole contexts"
        )
