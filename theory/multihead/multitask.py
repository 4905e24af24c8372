r"""Several regressions in one context (section 5.4): the descent rule heads should implement, and how few heads can.

Task n sees :math:`y_n = \beta_{S_n}^\top x_{S_n} + \epsilon_n`, all tasks one β ~ N(0, τ²I), tokens N(0, I). Heads have
diagonal key-query matrices, rows of ω, shape (h, d), and output weights μ, shape (h, N); as ω → 0 they act as

.. math:: \hat y_n = \sum_i \frac{G_{ni}}{L}\sum_\ell y_{n\ell}\,\bar x_{\ell i}x_{qi}, \qquad
          \sum_h\mu_{hn} = 0, \quad G_{ni} = \sum_h\mu_{hn}\omega_{hi}.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import softmax

from theory.problems import MAX_SCALE, MultiTaskRegression, RegressionTask, as_integer, as_real
from theory.results import DomainError, FloatArray

# Singular values below this, relative to the largest, do not count towards the rank of a rule.
_RANK_TOLERANCE = 1e-10
# Starts of the search for the best rule of a rank: sets of columns of the best rule of any rank, and generic ones.
_COLUMN_STARTS, _GENERIC_STARTS = 16, 16
# What column starts get of a generic one: by themselves they may lie on ridges, where tasks do not mix.
_SHIFT = 0.1
# Gradient at which a search ends: risks are then good to its square.
_SLOPE = 1e-8


@dataclass(frozen=True, slots=True)
class HeadPattern:
    """Heads that implement a rule as gamma → 0.

    omega: shape (h, d); mu: shape (h, N); superposed: whether some head serves more than one task.
    """

    omega: FloatArray
    mu: FloatArray
    superposed: bool


def signal_mask(task: MultiTaskRegression) -> FloatArray:
    """Indicator of the signal sets, shape (N, d). Source: multihead Definition 5.1."""
    if not isinstance(task, MultiTaskRegression):
        raise DomainError(f"task must be a MultiTaskRegression, got {type(task).__name__}")
    mask = np.zeros((len(task.signal_sets), task.dim))
    for n, members in enumerate(task.signal_sets):
        mask[n, np.array(members) - 1] = 1
    return mask


def multitask_prediction(
    tokens: npt.ArrayLike, labels: npt.ArrayLike, query: npt.ArrayLike, omega: npt.ArrayLike, mu: npt.ArrayLike
) -> FloatArray:
    r"""Prediction :math:`\hat y_n = \sum_h\mu_{hn}\langle y_n, \mathrm{smax}(X\,\mathrm{diag}(\omega_h)x_q)\rangle`.

    tokens: shape (..., L, d); labels: (..., L, N); query: (..., d); omega: (h, d); mu: (h, N). Returns (..., N).
    Source: multihead (3.2) with vector labels, section 5.4.
    """
    X, y, x_q = (np.asarray(value, dtype=np.float64) for value in (tokens, labels, query))
    w, m = _heads(omega, mu)
    logits = X @ np.swapaxes(x_q[..., np.newaxis, :] * w, -1, -2)
    weights = softmax(logits, axis=-2)
    return np.asarray(np.einsum("...lh,...ln,hn->...n", weights, y, m))


def _heads(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    w, m = np.asarray(omega, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    if w.ndim != 2 or m.ndim != 2 or len(w) != len(m) or not (np.isfinite(w).all() and np.isfinite(m).all()):
        raise DomainError(f"omega and mu must be finite, of shapes (h, d) and (h, N), got {w.shape} and {m.shape}")
    return w, m


def descent_rule(task: MultiTaskRegression, teacher_variance: float | None = None) -> FloatArray:
    r"""Best debiased descent of each task on its own labels, G of shape (N, d).

    .. math:: G_{ni} = \frac{1\{i\in S_n\}}{1 + (|S_n| + \sigma^2/\tau^2)/L}

    exactly optimal at every d and L. teacher_variance: τ² > 0, by default 1/d. With unscaled β (τ² = 1) and context
    48, 4 active dimensions have 0.921. Source: beyond the paper; multihead section 5.4.
    """
    mask, tau = signal_mask(task), _teacher_variance(task, teacher_variance)
    size = mask.sum(axis=1, keepdims=True)
    return np.asarray(mask / (1 + (size + task.noise / tau) / task.context))


def cross_task_rule(task: MultiTaskRegression, teacher_variance: float | None = None) -> FloatArray:
    r"""Best debiased descent that also reads the other tasks' labels, g of shape (N, N, d): target, source, coordinate.

    The teacher is shared, so where signal sets overlap the labels of one task tell about the other's coefficients; per
    coordinate :math:`g_{n\cdot i} = Q_i^{-1}c_{ni}` with the moments in `rule_risk`. Heads need a full N x N output
    matrix for it. teacher_variance: τ² > 0, by default 1/d. Source: beyond the paper.
    """
    Q, c = _moments(task, teacher_variance)
    return np.asarray(np.moveaxis(np.linalg.solve(Q, np.moveaxis(c, 2, 0)), 0, 2).swapaxes(0, 1))


def best_rule(
    task: MultiTaskRegression, heads: int, *, own_labels: bool = False, teacher_variance: float | None = None
) -> tuple[FloatArray, float]:
    r"""Debiased rule of least risk that ``heads`` heads can implement, g of shape (N, N, d), and its risk, all tasks.

    Since :math:`\sum_hOV_{22}^{(h)} = 0`, g as a matrix M of N² rows has at most rank R = h - 1, as G has where each
    task reads its own labels only. With M = AB the best columns of B are a linear problem, which leaves

    .. math:: \max_A \sum_i (A^\top c_i)^\top(A^\top W_iA)^{-1}A^\top c_i ,

    W_i and c_i the moments in `rule_risk`, searched from 32 starts; from their rank on the result is
    `cross_task_rule` or `descent_rule`. own_labels: labels of other tasks are not read; teacher_variance:
    τ² > 0, by default 1/d. Source: beyond the paper; multihead section 5.4.
    """
    mask, R = signal_mask(task), as_integer("heads", heads, 1, 10**6) - 1
    return _best_rule(task, min(R, mask.shape[1]), own_labels, _teacher_variance(task, teacher_variance))


@lru_cache(maxsize=64)
def _best_rule(task: MultiTaskRegression, R: int, own_labels: bool, tau: float) -> tuple[FloatArray, float]:
    Q, c = _moments(task, tau)
    N, d = len(c), task.dim
    free = descent_rule(task, tau) if own_labels else cross_task_rule(task, tau).reshape(N * N, d)
    if own_labels:
        weights = Q[:, np.arange(N), np.arange(N)][:, :, np.newaxis] * np.eye(N)
        wanted = np.einsum("nni->in", c)
    else:
        weights = np.einsum("nm,iab->inamb", np.eye(N), Q).reshape(d, N * N, N * N)
        wanted = np.moveaxis(c, 2, 0).reshape(d, N * N)
    M = free if _rank(free) <= R else _best_of_rank(free, weights, wanted, R)
    g = np.eye(N)[:, :, np.newaxis] * M[:, np.newaxis, :] if own_labels else M.reshape(N, N, d)
    g.flags.writeable = False
    return g, float(rule_risk(task, g, tau).sum())


def _best_of_rank(free: FloatArray, weights: FloatArray, wanted: FloatArray, R: int) -> FloatArray:
    """Minimiser of the sum over columns m_i of m.W_i m - 2 c_i.m at rank R, below that of ``free``."""
    if R == 0:
        return np.zeros_like(free)
    K = len(free)

    def columns(A: FloatArray) -> FloatArray:
        return np.asarray(np.linalg.solve(A.T @ weights @ A, (wanted @ A)[:, :, np.newaxis])[:, :, 0], np.float64)

    def loss(x: FloatArray) -> tuple[float, FloatArray]:
        A = x.reshape(K, R)
        B = columns(A)
        M = B @ A.T
        slope = np.einsum("iab,ib->ia", weights, M) - wanted
        return -float(np.sum(wanted * M)), np.asarray(2 * slope.T @ B).ravel()

    distinct = np.unique(free.T.round(12), axis=0)
    starts = itertools.islice(itertools.combinations(distinct[np.abs(distinct).max(axis=1) > 0], R), _COLUMN_STARTS)
    generic = [_generic(K, R, number) for number in range(_GENERIC_STARTS)]
    bases = [np.stack(chosen, axis=1) + _SHIFT * generic[0] for chosen in starts] + generic
    found = [minimize(loss, np.linalg.qr(A)[0].ravel(), jac=True, method="BFGS", options={"gtol": _SLOPE})
             for A in bases]  # fmt: skip
    A = min(found, key=lambda end: float(end.fun)).x.reshape(K, R)
    return np.asarray((columns(A) @ A.T).T)


def _generic(K: int, R: int, number: int) -> FloatArray:
    """A matrix of shape (K, R) without symmetries: quadratic phases with irrational steps."""
    index = np.arange(1, K * R + 1, dtype=np.float64)
    return np.asarray(np.cos(index**2 * np.sqrt(2 + number) + index * np.sqrt(3))).reshape(K, R)


def task_alone(
    task: MultiTaskRegression, number: int, teacher_variance: float | None = None
) -> tuple[RegressionTask, float]:
    r"""The single regression that heads see which serve one task alone, and the factor of its risk.

    Heads with ω_hi = ω_h on S_n, 0 elsewhere, and with μ_hn' = 0 for n' ≠ n, have on task n the risk of (ω_h,
    μ_hn) on :math:`|S_n|` dimensions with noise :math:`\sigma^2/(\tau^2|S_n|)`, times :math:`\tau^2|S_n|`; exactly,
    at any scale. number: n from 1; teacher_variance: τ² > 0, by default 1/d. Source: multihead (3.2), section 5.4.
    """
    mask, tau = signal_mask(task), _teacher_variance(task, teacher_variance)
    size = int(mask[as_integer("number", number, 1, len(mask)) - 1].sum())
    return RegressionTask(size, task.context, task.noise / (tau * size)), tau * size


def rule_risk(task: MultiTaskRegression, rule: npt.ArrayLike, teacher_variance: float | None = None) -> FloatArray:
    r"""Exact risk of each task under a debiased rule, against its noisy label, shape (N,).

    .. math:: \sigma^2 + \tau^2|S_n| + \sum_i\big(-2c_{ni}^\top g_{ni} + g_{ni}^\top Q_ig_{ni}\big), \qquad
              Q_{i,nn'} = \rho\Big\{\tau^21\{i\in S_n\cap S_{n'}\} + \frac{\tau^2|S_n\cap S_{n'}|
              + \sigma^2\delta_{nn'}}{L}\Big\}, \quad \rho = \frac{L-1}{L}

    and c_{ni} the row n of ρτ² 1{i ∈ S_n ∩ S_n'}. rule: G of shape (N, d), own labels only, or g of shape (N, N, d).
    Source: beyond the paper; second moments of a Wishart matrix of L-1 degrees.
    """
    Q, c = _moments(task, teacher_variance)
    N, d = len(task.signal_sets), task.dim
    g = np.asarray(rule, dtype=np.float64)
    if g.shape == (N, d):
        g = np.eye(N)[:, :, np.newaxis] * g[:, np.newaxis, :]
    if g.shape != (N, N, d):
        raise DomainError(f"rule must have shape ({N}, {d}) or ({N}, {N}, {d}), got {g.shape}")
    label = _teacher_variance(task, teacher_variance) * signal_mask(task).sum(axis=1)
    quadratic = np.einsum("nai,iab,nbi->n", g, Q, g)
    return np.asarray(task.noise + label - 2 * np.sum(c * g, axis=(1, 2)) + quadratic)


def _moments(task: MultiTaskRegression, teacher_variance: float | None) -> tuple[FloatArray, FloatArray]:
    """Q, shape (d, N, N), and c, shape (N, N, d): second moments of the descent features, and with the target."""
    mask, tau, L = signal_mask(task), _teacher_variance(task, teacher_variance), task.context
    if L < 2:
        raise DomainError(f"context must be at least 2 for debiased descent, got {L}")
    shared = mask[:, np.newaxis, :] * mask[np.newaxis, :, :]
    spread = (tau * shared.sum(axis=2) + task.noise * np.eye(len(mask))) / L
    rho = (L - 1) / L
    Q = rho * (tau * np.moveaxis(shared, 2, 0) + spread)
    return Q, rho * tau * shared


def _teacher_variance(task: MultiTaskRegression, value: float | None) -> float:
    return 1 / task.dim if value is None else as_real("teacher_variance", value, 0, MAX_SCALE, open_low=True)


def implemented_rule(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    r"""What heads do as ω → 0: sums :math:`\sum_h\mu_{hn}`, shape (N,), and :math:`\sum_h\mu_{hn}\omega_{hi}`, (N, d).

    A descent rule needs the former to vanish. Source: multihead section 5.4 with (4.10).
    """
    w, m = _heads(omega, mu)
    return np.asarray(m.sum(axis=0)), np.asarray(m.T @ w)


def heads_needed(rule: npt.ArrayLike) -> int:
    r"""Fewest heads that implement a rule: its rank plus one, because each row of μ sums to zero.

    rule: G, shape (N, d). Source: beyond the paper; rank(μᵀω) <= h - 1 where μᵀ1 = 0, attained by a simplex.
    """
    return _rank(_rule(rule)) + 1


def superposition_forced(rule: npt.ArrayLike, heads: int) -> bool:
    r"""Whether some head must serve several tasks for ``heads`` heads to implement a rule of N non-zero rows.

    A task served alone takes two heads, so 2N heads need not share; with rank + 1 <= h < 2N they must. (The paper's
    contribution (f) has N between h and 2h instead, where no rule of rank N can be implemented; its own example is
    h = 3, N = 2.) rule: G, shape (N, d). Source: multihead section 5.4; proof beyond the paper. Raises DomainError
    where the heads are too few for the rule.
    """
    G = _rule(rule)
    h = as_integer("heads", heads, 1)
    if h < heads_needed(G):
        raise DomainError(f"heads must be at least {heads_needed(G)} for this rule, got {h}")
    return h < 2 * int(np.count_nonzero(np.abs(G).sum(axis=1)))


def descent_pattern(rule: npt.ArrayLike, heads: int, gamma: float) -> HeadPattern:
    r"""Heads that implement a rule as γ → 0: a ± pair per task where there are enough, else a superposed simplex.

    With 2N heads: ω = ±γG_n/\|G_n\|_∞, μ = ±\|G_n\|_∞/(2γ) on task n alone, and dummies. With fewer: G = AB of
    rank R and R+1 corners e_h of a centred simplex, Σe_h = 0, Σe_he_hᵀ = I: ω_h = γBᵀe_h, μ_h = Ae_h/γ; then dummies.
    Pairs err at order γ², a simplex at order γ. rule: G, shape (N, d); heads: at least `heads_needed`; gamma: γ > 0.
    Source: multihead section 5.4; construction beyond the paper.
    """
    G, h = _rule(rule), as_integer("heads", heads, 1, 10**6)
    scale = as_real("gamma", gamma, 0, MAX_SCALE, open_low=True)
    forced = superposition_forced(G, h)
    omega, mu = np.zeros((h, G.shape[1])), np.zeros((h, len(G)))
    if not forced:
        for pair, n in enumerate(np.flatnonzero(np.abs(G).sum(axis=1))):
            size = np.abs(G[n]).max()
            for sign, head in ((1, 2 * pair), (-1, 2 * pair + 1)):
                omega[head] = sign * scale * G[n] / size
                mu[head, n] = sign * size / (2 * scale)
    else:
        R = _rank(G)
        U, s, V = np.linalg.svd(G, full_matrices=False)
        corners = _simplex(R)
        omega[: R + 1] = scale * corners @ V[:R]
        mu[: R + 1] = corners @ (U[:, :R] * s[:R]).T / scale
    used = np.abs(mu) > _RANK_TOLERANCE * np.abs(mu).max(initial=0)
    return HeadPattern(omega, mu, bool((used.sum(axis=1) > 1).any()))


def _simplex(R: int) -> FloatArray:
    """Corners of a centred regular simplex, shape (R + 1, R), with orthonormal columns that sum to zero."""
    centred = np.eye(R + 1) - 1 / (R + 1)
    return np.asarray(np.linalg.svd(centred)[0][:, :R])


def _rule(rule: npt.ArrayLike) -> FloatArray:
    G = np.asarray(rule, dtype=np.float64)
    if G.ndim != 2 or G.size == 0 or not np.isfinite(G).all():
        raise DomainError(f"rule must be a finite matrix of shape (N, d), got shape {G.shape}")
    return G


def _rank(G: FloatArray) -> int:
    values = np.linalg.svd(G, compute_uv=False)
    return int(np.count_nonzero(values > _RANK_TOLERANCE * values[0])) if values[0] > 0 else 0
