r"""The mean-field floor of softmax attention with fixed context states: a convex programme over laws of layers.

A layer reads with logits :math:`\hat x_i\cdot u`. By convexity, and because every context carries its own rotation,
the best law of infinitely many layers makes :math:`u = \alpha\hat q + \beta\eta` with η uniform on the unit vectors
orthogonal to the query: it is a measure on types (α, β). With w >= 0 the measure times the gain,

.. math:: R(w) = T - 2h^\top w + w^\top G w, \qquad h_j = E[\bar p_j y\, y^*], \quad
          G_{jk} = E[\bar p_j y\, \bar p_k y]

where :math:`\bar p_j` is the attention of type j averaged over η. The moments come from `sim`; this module has the
programme, its certificate, what layers drawn from the law reach at finite depth, and the sampling error of it all.
Source: depth (57)-(63), Appendix B, in the limit of many layers (beyond the paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from theory.problems import as_depths, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, PrecisionError

# Eigenvalues of a sampled Gram matrix below this share of the largest are noise: they are raised to it.
GRAM_TOLERANCE = 1e-10
DEFAULT_FOLDS = 8
_MAX_STEPS = 500
_STEP_TOLERANCE = 1e-9


def mean_field_loss(target_power: float, cross: npt.ArrayLike, gram: npt.ArrayLike, weights: npt.ArrayLike) -> float:
    r"""Loss :math:`T - 2h^\top w + w^\top G w` of infinitely many layers.

    cross h, weights w (J,); gram G (J, J). Source: depth (60), (63) with L to infinity.
    """
    h, G, w = _checked(cross, gram, weights)
    return float(target_power - 2 * h @ w + w @ G @ w)


def loss_slope(cross: npt.ArrayLike, gram: npt.ArrayLike, weights: npt.ArrayLike) -> FloatArray:
    r"""Minus half the gradient, :math:`h - Gw`, shape (J,): positive where more of a type lowers the loss.

    At the optimum it is zero where w > 0 and not positive elsewhere (Karush-Kuhn-Tucker). Source: gradient of
    `mean_field_loss`.
    """
    h, G, w = _checked(cross, gram, weights)
    return np.asarray(h - G @ w)


def best_weights(cross: npt.ArrayLike, gram: npt.ArrayLike) -> FloatArray:
    r"""Minimiser w >= 0 of :math:`w^\top G w - 2h^\top w`, shape (J,).

    cross h (J,); gram G (J, J), symmetric. A sampled G is positive only up to noise: eigenvalues below 1e-10 of the
    largest are raised to that, and `gram_defect` says how negative the most negative was. Non-negative least squares
    on the eigenvector factor (Lawson and Hanson), then one Newton step on the support with G itself where that keeps
    it positive. Source: the convex mean-field programme. Raises PrecisionError where G has no positive eigenvalue.
    """
    h, G, _ = _checked(cross, gram, cross)
    values, vectors = np.linalg.eigh(G)
    if not values[-1] > 0:
        raise PrecisionError(f"gram must have a positive eigenvalue, got {float(values[-1])!r} as the largest")
    roots = np.sqrt(np.maximum(values, GRAM_TOLERANCE * values[-1]))
    weights, _ = nnls((vectors * roots).T, (vectors / roots).T @ h, maxiter=30 * len(h))
    return _polished(h, G, np.asarray(weights))


def _polished(h: FloatArray, G: FloatArray, weights: FloatArray) -> FloatArray:
    """The stationary point of the programme on the support of ``weights``, where it is a minimum inside the cone."""
    support = np.flatnonzero(weights > 0)
    block = G[np.ix_(support, support)]
    if len(support) == 0 or np.linalg.eigvalsh(block)[0] <= GRAM_TOLERANCE * np.trace(block):
        return weights
    solution = np.linalg.solve(block, h[support])
    if not (solution > 0).all():
        return weights
    polished = np.zeros_like(weights)
    polished[support] = solution
    return polished


def gram_defect(gram: npt.ArrayLike) -> float:
    """How far a sampled Gram matrix is from positive: its most negative eigenvalue over its largest, 0 if none.

    gram (J, J), symmetric. Source: accuracy of `best_weights`; no equation.
    """
    values = np.linalg.eigvalsh(np.asarray(gram, dtype=np.float64))
    return float(max(0.0, -values[0] / values[-1]))


def excess_slope(cross: npt.ArrayLike, slope: npt.ArrayLike) -> float:
    r"""Smallest θ >= 0 with :math:`h_k \le (1+\theta)(Gw)_k` for every type k; infinite where none exists.

    cross h_k and slope h_k - (Gw)_k, shape (K,), of all types among which the law may choose. Zero at the optimum.
    Source: dual feasibility, see `dual_bound`.
    """
    h, s = np.asarray(cross, dtype=np.float64), np.asarray(slope, dtype=np.float64)
    improving = s > 0
    read = (h - s)[improving]
    if not improving.any():
        return 0.0
    return float((s[improving] / read).max()) if (read > 0).all() else math.inf


def dual_bound(target_power: float, read_power: float, excess: float) -> float:
    r"""Lower bound :math:`T - (1+\theta)^2\, w^\top G w` on the loss of every law and gain.

    .. math:: h^\top v \le (1+\theta)\, w^\top G v \le (1+\theta)\sqrt{w^\top G w}\,\sqrt{v^\top G v}
              \;\Rightarrow\; R(v) \ge T - (1+\theta)^2\, w^\top G w \quad\text{for all } v \ge 0

    target_power: T; read_power: :math:`w^\top G w` of any weights w; excess: θ of `excess_slope`, over all types that
    v may use. At the optimum it equals the loss. Source: duality of the mean-field programme.
    """
    return target_power - (1 + excess) ** 2 * read_power


def finite_depth_loss(
    target_power: float,
    cross: npt.ArrayLike,
    gram: npt.ArrayLike,
    single_power: npt.ArrayLike,
    weights: npt.ArrayLike,
    depth: npt.ArrayLike,
) -> FloatArray:
    r"""Loss of L layers drawn independently from the law of given weights, :math:`R_L = R_\infty + (A - C)/L`.

    .. math:: A - C = \Big(\sum_j w_j\Big)\Big(\sum_j w_j A_j\Big) - w^\top G w

    single_power A_j = E (p_j y)^2 with one draw of η, (J,); depth: L >= 1, shape (...). Returns shape (...). Some
    fixed choice of L layers does at least as well. Source: depth (63) for independent layers.
    """
    layers = as_depths(depth)
    if (layers < 1).any():
        raise DomainError(f"depth must hold integers >= 1, got {float(layers.min())!r}")
    limit = mean_field_loss(target_power, cross, gram, weights)
    return np.asarray(limit + disagreement(gram, single_power, weights) / layers)


def disagreement(gram: npt.ArrayLike, single_power: npt.ArrayLike, weights: npt.ArrayLike) -> float:
    """Variance A - C of one layer drawn from the law of ``weights`` (J,), gain included. Source: depth (61), (63)."""
    A, G, w = _checked(single_power, gram, weights)
    return float(w.sum() * (A @ w) - w @ G @ w)


def best_weights_at_depth(
    cross: npt.ArrayLike, gram: npt.ArrayLike, single_power: npt.ArrayLike, depth: int
) -> FloatArray:
    r"""Weights that minimise the loss of L independent layers, shape (J,).

    .. math:: -2h^\top w + \Big(1 - \frac1L\Big) w^\top G w + \frac1L \Big(\sum_j w_j\Big)\Big(\sum_j A_j w_j\Big)

    The last product is at most :math:`\tfrac12(\kappa(\sum w)^2 + (\sum Aw)^2/\kappa)`, with equality at
    :math:`\kappa = \sum Aw/\sum w`: each step solves the convex programme with that bound and never raises the loss.
    depth: L >= 1; one layer chooses a single type. Source: depth (60), (63) for independent layers.
    """
    L = as_integer("depth", depth, 1)
    h, G, A = _checked(cross, gram, single_power)
    single = best_single_type(h, A)
    if L == 1:
        return single
    starts = [single, best_weights(h, G)]
    candidates = [_descend(h, G, A, L, start) for start in starts]
    return min(candidates, key=lambda w: float(finite_depth_loss(0.0, h, G, A, w, L)))


def _descend(h: FloatArray, G: FloatArray, A: FloatArray, L: int, weights: FloatArray) -> FloatArray:
    loss = float(finite_depth_loss(0.0, h, G, A, weights, L))
    for _ in range(_MAX_STEPS):
        ratio = float(A @ weights / weights.sum())
        convex = (1 - 1 / L) * G + (ratio + np.multiply.outer(A, A) / ratio) / (2 * L)
        candidate = best_weights(h, convex)
        reached = float(finite_depth_loss(0.0, h, G, A, candidate, L))
        if not reached < loss - _STEP_TOLERANCE * abs(loss):
            break
        weights, loss = candidate, reached
    return weights


def best_single_type(cross: npt.ArrayLike, single_power: npt.ArrayLike) -> FloatArray:
    r"""Weights of the best single layer: the type that maximises :math:`h_j^2/A_j` with its gain :math:`h_j/A_j`.

    cross h, single_power A > 0, (J,). Its loss is T - max h²/A. Source: depth (60) with L = 1.
    """
    h, A = np.asarray(cross, dtype=np.float64), np.asarray(single_power, dtype=np.float64)
    if h.shape != A.shape or h.ndim != 1 or not (A > 0).all():
        raise DomainError(f"single_power must be > 0 and have the shape of cross, got {A.shape} and {h.shape}")
    weights = np.zeros_like(h)
    best = int(np.argmax(np.maximum(h, 0) ** 2 / A))
    weights[best] = max(h[best], 0) / A[best]
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class SampledMinimum:
    """Minimum of a programme whose moments are means over independent chunks of contexts.

    floor: the estimate, corrected for its bias by the jackknife; in_sample: the minimum over the sample, too small on
    average; cross_fitted: loss of weights chosen without the contexts on which it is measured, too large on average;
    weights (J,): of the whole sample; disagreement: A - C of these weights; defect: see `gram_defect`.
    """

    floor: Estimate
    in_sample: float
    cross_fitted: float
    weights: FloatArray
    disagreement: Estimate
    defect: float

    @property
    def bracket(self) -> float:
        """Distance of the two bounds, relative to the floor: what choosing weights by the sample can have changed."""
        return (self.cross_fitted - self.in_sample) / self.floor.value


def sampled_minimum(
    target_power: FloatArray,
    cross: FloatArray,
    gram: FloatArray,
    single_power: FloatArray,
    *,
    contexts: int,
    seed: int,
    folds: int = DEFAULT_FOLDS,
) -> SampledMinimum:
    r"""Minimum over w >= 0 of the mean programme of m chunks, with delete-one jackknife errors.

    .. math:: E \min_w \hat R(w) \;\le\; \min_w R(w) \;\le\; E\, \hat R_{fold}\big(\hat w_{without\ fold}\big)

    target_power (m,), cross (m, J), gram (m, J, J), single_power (m, J): means of each chunk; contexts: their number
    in all; folds: groups of chunks for the upper bound, at least 2 and no more than m.
    Source: sampling error of the mean-field programme. Raises DomainError for other shapes.
    """
    T, h, G, A = (np.asarray(item, dtype=np.float64) for item in (target_power, cross, gram, single_power))
    m = len(T)
    folds = min(as_integer("folds", folds, 2), m)
    if m < 3 or h.shape[:1] != (m,) or G.shape != (*h.shape, h.shape[-1]) or A.shape != h.shape:
        raise DomainError(
            "sampled_minimum needs at least 3 chunks and shapes (m,), (m, J), (m, J, J), (m, J), "
            f"got {T.shape}, {h.shape}, {G.shape}, {A.shape}"
        )
    weights = best_weights(h.mean(axis=0), G.mean(axis=0))
    in_sample = mean_field_loss(float(T.mean()), h.mean(axis=0), G.mean(axis=0), weights)
    without_one = np.array([_minimum_without(T, h, G, np.arange(m) == i) for i in range(m)])
    bias = (m - 1) * (without_one.mean() - in_sample)
    spread = math.sqrt((m - 1) / m) * math.hypot(*(without_one - without_one.mean()))
    variances = np.array([disagreement(g, a, weights) for g, a in zip(G, A, strict=True)])
    variance_error = float(variances.std(ddof=1)) / math.sqrt(m)
    return SampledMinimum(
        floor=Estimate(in_sample - bias, spread, contexts, m, seed),
        in_sample=in_sample,
        cross_fitted=_cross_fitted(T, h, G, folds),
        weights=weights,
        disagreement=Estimate(float(variances.mean()), variance_error, contexts, m, seed),
        defect=gram_defect(G.mean(axis=0)),
    )


def _minimum_without(T: FloatArray, h: FloatArray, G: FloatArray, left_out: npt.NDArray[np.bool_]) -> float:
    kept = ~left_out
    cross, gram = h[kept].mean(axis=0), G[kept].mean(axis=0)
    return mean_field_loss(float(T[kept].mean()), cross, gram, best_weights(cross, gram))


def _cross_fitted(T: FloatArray, h: FloatArray, G: FloatArray, folds: int) -> float:
    """Mean over chunks of their loss at the weights of the other folds."""
    fold_of = np.arange(len(T)) % folds
    total = 0.0
    for fold in range(folds):
        inside = fold_of == fold
        weights = best_weights(h[~inside].mean(axis=0), G[~inside].mean(axis=0))
        total += sum(
            mean_field_loss(t, c, g, weights) for t, c, g in zip(T[inside], h[inside], G[inside], strict=True)
        )
    return float(total / len(T))


def scale_grid(points: int, largest: float, smallest: float = 1.0) -> FloatArray:
    """Zero and ``points`` >= 2 scales from ``smallest`` to ``largest`` in equal ratios, shape (points + 1,).

    Source: discretisation of the laws on (α, β); no equation.
    """
    smallest = as_real("smallest", smallest, 0, 1e100, open_low=True)
    largest = as_real("largest", largest, smallest, 1e100, open_low=True)
    return np.concatenate([[0.0], np.geomspace(smallest, largest, as_integer("points", points, 2, 10**6))])


def product_types(alphas: npt.ArrayLike, betas: npt.ArrayLike) -> FloatArray:
    """All pairs (α, β), shape (betas * alphas, 2), α running fastest. Source: discretisation; no equation."""
    a, b = np.meshgrid(np.asarray(alphas, dtype=np.float64), np.asarray(betas, dtype=np.float64))
    return np.stack([a.ravel(), b.ravel()], axis=1)


def improving_types(
    alphas: FloatArray, betas: FloatArray, slope: npt.ArrayLike, threshold: float = 0.0
) -> FloatArray:
    """Local maxima above ``threshold`` of a slope on a grid, and the top of the paraboloid through each.

    alphas (A,), betas (B,): increasing; slope: of `product_types`, shape (B * A,). Returns types (n, 2), to be added
    to the programme. Source: refinement of the discretised law; no equation.
    """
    values = np.asarray(slope, dtype=np.float64).reshape(len(betas), len(alphas))
    padded = np.pad(values, 1, constant_values=-np.inf)
    rows, columns = values.shape
    around = [padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
    peaks = np.argwhere((values == np.max(around, axis=0)) & (values > threshold))
    found = [_vertex(alphas, betas, padded[i : i + 3, j : j + 3], i, j) for i, j in peaks]
    found += [(float(alphas[j]), float(betas[i])) for i, j in peaks]
    return np.unique(np.array(found, dtype=np.float64).reshape(-1, 2), axis=0)


def critical_types(
    alphas: FloatArray, betas: FloatArray, values: npt.ArrayLike, threshold: float, parts: int = 3
) -> FloatArray:
    """Finer grid of the cells with a corner above ``threshold``: where a smooth slope may be positive unseen.

    alphas (A,), betas (B,): increasing; values: of `product_types`, shape (B * A,); parts >= 2: of each side of a
    cell. Returns types (n, 2), cell corners included. Source: refinement of the discretised law; no equation.
    """
    parts = as_integer("parts", parts, 2, 100)
    corners = np.asarray(values, dtype=np.float64).reshape(len(betas), len(alphas)) > threshold
    cells = np.argwhere(corners[1:, 1:] | corners[1:, :-1] | corners[:-1, 1:] | corners[:-1, :-1])
    steps = np.arange(parts + 1)
    places = {(parts * i + down, parts * j + across) for i, j in cells for down in steps for across in steps}
    rows, columns = np.array(sorted(places), dtype=np.float64).reshape(-1, 2).T / parts
    return np.stack([_between(alphas, columns), _between(betas, rows)], axis=1)


def _between(coordinates: FloatArray, places: FloatArray) -> FloatArray:
    """Coordinates at fractional places of an increasing grid."""
    return np.asarray(np.interp(places, np.arange(len(coordinates)), coordinates))


def separated_maxima(types: FloatArray, values: npt.ArrayLike, *, count: int = 4, ratio: float = 1.25) -> FloatArray:
    """At most ``count`` types of largest positive value, in falling order, no two within ``ratio`` of each other.

    types (n, 2); values (n,). Two types are near where both scales, each plus one, differ by less than the factor.
    Source: refinement of the discretised law; no equation.
    """
    v = np.asarray(values, dtype=np.float64)
    logs, chosen = np.log1p(types), list[int]()
    for index in np.argsort(-v, kind="stable"):
        if v[index] <= 0 or len(chosen) == count:
            break
        if all(np.abs(logs[index] - logs[other]).max() >= math.log(ratio) for other in chosen):
            chosen.append(int(index))
    return np.asarray(types[chosen]).reshape(-1, 2)


def _vertex(alphas: FloatArray, betas: FloatArray, patch: FloatArray, row: int, column: int) -> tuple[float, float]:
    """Type at the top of the paraboloid through a peak (row, column) and its eight neighbours, at most one step off.

    patch (3, 3): values, -inf beyond an edge, where the peak keeps its coordinate.
    """
    shift = np.zeros(2)
    if np.isfinite(patch).all():
        gradient = np.array([patch[1, 2] - patch[1, 0], patch[2, 1] - patch[0, 1]]) / 2
        cross = (patch[2, 2] - patch[2, 0] - patch[0, 2] + patch[0, 0]) / 4
        across = patch[1, 2] - 2 * patch[1, 1] + patch[1, 0]
        down = patch[2, 1] - 2 * patch[1, 1] + patch[0, 1]
        if across < 0 and across * down > cross**2:
            shift = np.clip(-np.linalg.solve([[across, cross], [cross, down]], gradient), -1, 1)
    return (
        float(_between(alphas, np.array(column + shift[0]))),
        float(_between(betas, np.array(row + shift[1]))),
    )


def _checked(
    cross: npt.ArrayLike, gram: npt.ArrayLike, weights: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    h, G, w = (np.asarray(item, dtype=np.float64) for item in (cross, gram, weights))
    if h.ndim != 1 or w.shape != h.shape or G.shape != (len(h), len(h)):
        raise DomainError(
            f"cross, gram and weights must have shapes (J,), (J, J), (J,), got {h.shape}, {G.shape}, {w.shape}"
        )
    return h, G, w
