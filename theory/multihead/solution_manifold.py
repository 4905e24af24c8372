r"""The solution manifold (4.7): equal \|ω\|, zero-sum μ, and the two-head model that all its points stand for.

omega, mu: one number per head, shape (h,). γ is the common scale of the heads that are not dummies, c = (1+σ²)/L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from theory.multihead.approximate_loss import heads, noise_level
from theory.problems import RegressionTask, as_integer, as_real
from theory.results import DomainError, FloatArray

# Below this argument the series of sinh(x)/x - 1 is exact to rounding and the difference is not.
_SERIES_BELOW = 0.5
# d γ² beyond this overflows sinh.
_MAX_ARGUMENT = 700.0


@dataclass(frozen=True, slots=True)
class Membership:
    """How far a model is from the manifold, and its nearest point.

    distance: Euclidean in (omega, mu) for the given gamma; gamma: the scale of the nearest point; omega, mu: that
    point, shape (h,) each; sign_matched, zero_sum, homogeneous: the three conditions of (4.2) and (4.4) by themselves,
    as the sizes of their violation (0 where they hold).
    """

    distance: float
    gamma: float
    omega: FloatArray
    mu: FloatArray
    sign_matched: float
    zero_sum: float
    homogeneous: float


def manifold_norm(task: RegressionTask, gamma: npt.ArrayLike) -> FloatArray:
    r"""The norm :math:`\|\mu\|_1 = 2\mu_\gamma = \gamma/(\gamma^2 + c\sinh(d\gamma^2))` on the manifold, shape of γ.

    gamma: γ > 0; behaves as :math:`1/(\gamma(1+cd))` near 0, see (4.8). Source: multihead (4.6). Raises DomainError
    where γ <= 0 or dγ² > 700.
    """
    g = _scales(task, gamma)
    return np.asarray(1 / (g * (1 + noise_level(task) * task.dim * (1 + _sinh_excess(task.dim * g * g)))))


def effective_mu(task: RegressionTask, gamma: npt.ArrayLike) -> FloatArray:
    r"""The weight μ_γ of each group of heads, half of `manifold_norm`, shape of γ. Source: multihead (4.6)."""
    return np.asarray(manifold_norm(task, gamma) / 2)


def small_gamma_mu(task: RegressionTask, gamma: npt.ArrayLike) -> FloatArray:
    r"""Leading order :math:`\mu_\gamma \asymp 1/(2\gamma(1+(1+\sigma^2)d/L))` as γ → 0. Source: multihead (4.8)."""
    return np.asarray(1 / (2 * _scales(task, gamma) * (1 + noise_level(task) * task.dim)))


def manifold_loss(task: RegressionTask, gamma: npt.ArrayLike) -> FloatArray:
    r"""Approximate loss on the manifold, :math:`1+\sigma^2-(1+c\sinh(d\gamma^2)/\gamma^2)^{-1}`, shape of γ.

    Increases with γ from :math:`1+\sigma^2-(1+cd)^{-1}` at 0, so that the infimum is at γ → 0.
    Source: multihead (4.6) in the display before it; Theorem 4.2 (ii).
    """
    g = _scales(task, gamma)
    sinh_ratio = noise_level(task) * task.dim * (1 + _sinh_excess(task.dim * g * g))
    return np.asarray(task.noise + sinh_ratio / (1 + sinh_ratio))


def norm_loss(task: RegressionTask, gamma: npt.ArrayLike, norm: npt.ArrayLike) -> FloatArray:
    r"""Approximate loss under (4.2) and (4.4), :math:`\sigma^2+(1-\gamma\|\mu\|_1)^2+c\sinh(d\gamma^2)\|\mu\|_1^2`.

    gamma, norm: γ > 0 and ‖μ‖₁, broadcast. The paper prints ‖μ‖₁ for ‖μ‖₁² in the last term.
    Source: multihead, display before (4.6).
    """
    g, n = _scales(task, gamma), np.asarray(norm, dtype=np.float64)
    sinh = task.dim * g * g * (1 + _sinh_excess(task.dim * g * g))
    return np.asarray(task.noise + (1 - g * n) ** 2 + noise_level(task) * sinh * n**2)


def odd_terms_bound(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[float, float]:
    r"""Both sides of the inequality for sign-matched heads.

    .. math:: \sum_{k\ge1}\frac{d^k}{k!}\langle\mu,\omega^k\rangle^2 \ge
              \|\mu\|_1^2\sinh\big(d\langle|\mu|,|\omega|\rangle^2/\|\mu\|_1^2\big)

    They agree exactly on heads of one \|ω\| with zero sum. The paper prints :math:`|\omega|^{\odot k}` for
    :math:`|\omega|` on its right-hand side. Source: multihead (4.5), the odd series summed. Raises DomainError where
    the signs of omega and mu disagree or all mu are zero.
    """
    w, m = heads(omega, mu)
    norm = float(np.abs(m).sum())
    if (w * m < 0).any() or norm == 0:
        raise DomainError("omega and mu must have the same signs and not all mu be zero for the bound (4.5)")
    exact = float(m @ np.expm1(task.dim * np.outer(w, w)) @ m)
    return exact, float(norm**2 * np.sinh(task.dim * (w @ m) ** 2 / norm**2))


def local_optimality(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> FloatArray:
    r"""The number :math:`(1+(1+\sigma^2)d/L)\langle\mu,\omega\rangle` that Stage I drives to 1, shape (...).

    Source: multihead (4.3) and Figure 7.
    """
    w, m = heads(omega, mu)
    return np.asarray((1 + noise_level(task) * task.dim) * np.sum(w * m, axis=-1))


def manifold_point(
    task: RegressionTask, gamma: float, positive: Sequence[float], negative: Sequence[float], dummies: int = 0
) -> tuple[FloatArray, FloatArray]:
    r"""A point of the manifold with any split: (omega, mu), shape (h,) each; positive heads first, dummies last.

    positive, negative: shares of μ_γ per head, each list > 0 and summing to 1 (up to 1e-12); dummies: number of heads
    at zero. Source: multihead (4.7). Raises DomainError where a list is empty or its shares do not sum to 1.
    """
    gamma_ = as_real("gamma", gamma, 0, 1e3, open_low=True)
    weight = float(effective_mu(task, gamma_))
    shares = []
    for name, values in (("positive", positive), ("negative", negative)):
        share = np.asarray(values, dtype=np.float64)
        if share.ndim != 1 or share.size == 0 or not (share > 0).all() or abs(share.sum() - 1) > 1e-12:
            raise DomainError(f"{name} must hold shares > 0 that sum to 1, got {values!r}")
        shares.append(share)
    zeros = np.zeros(as_integer("dummies", dummies, 0, 10**6))
    omega = np.concatenate([np.full(shares[0].size, gamma_), np.full(shares[1].size, -gamma_), zeros])
    return omega, np.concatenate([weight * shares[0], -weight * shares[1], zeros])


def effective_model(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[float, float, float]:
    r"""The two-head model that heads ±γ (and dummies) stand for: (γ, Σμ over positive, Σμ over negative heads).

    Exact for heads of one \|ω\|: softmax heads of equal ω add. Dummies (μ = 0) are left out. Source: multihead (4.9).
    Raises DomainError where the \|ω\| of heads with μ ≠ 0 differ by more than 1e-12, or none is left.
    """
    w, m = heads(omega, mu)
    active = m != 0
    if w.ndim != 1 or not active.any():
        raise DomainError("mu must hold at least one number other than zero for an effective model")
    sizes = np.abs(w[active])
    gamma = float(sizes.max())
    if gamma == 0 or float(sizes.max() - sizes.min()) > 1e-12 * gamma:
        raise DomainError(
            f"omega must have one magnitude > 0 over heads with mu != 0, got {sizes.min():g} to {gamma:g}"
        )
    return gamma, float(m[active & (w > 0)].sum()), float(m[active & (w < 0)].sum())


def in_larger_space(omega: npt.ArrayLike, mu: npt.ArrayLike, tolerance: float = 1e-9) -> bool:
    r"""Whether heads lie in the larger space of (4.13): \|ω\| equal or 0, both signs present.

    The paper asks for more than one head of each sign, which would exclude its own two-head models; at least one is
    meant. tolerance: relative, on \|ω\|. Source: multihead (4.13).
    """
    w, _ = heads(omega, mu)
    sizes = np.abs(w[w != 0])
    if not ((w > 0).any() and (w < 0).any()):
        return False
    return bool(sizes.max() - sizes.min() <= tolerance * sizes.max())


def membership(
    task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike, gamma: float | None = None
) -> Membership:
    r"""Distance to the manifold and projection onto it, at a given γ or at the mean \|ω\| of the active heads.

    The projection at fixed γ is exact: each head is positive, negative or a dummy; given the groups, μ moves by
    equal amounts within a group (clipped at 0 where a head would change sign), and the best of all groupings is
    taken. omega, mu: shape (h,), h from 2 to 10. Source: multihead (4.2), (4.4), (4.7). Raises DomainError otherwise.
    """
    w, m = heads(omega, mu)
    if w.ndim != 1 or not 2 <= w.size <= 10:
        raise DomainError(f"omega must hold 2 to 10 heads for a projection, got shape {w.shape}")
    scale = _scale(w, m) if gamma is None else as_real("gamma", gamma, 0, 1e3, open_low=True)
    weight = float(effective_mu(task, scale))
    best: tuple[float, FloatArray, FloatArray] = (np.inf, w, m)
    for number in range(3**w.size):
        group = np.array([number // 3**h % 3 - 1 for h in range(w.size)])
        if (group == 1).any() and (group == -1).any():
            point = np.zeros(w.size)
            for sign in (1, -1):
                point[group == sign] = sign * _simplex_projection(sign * m[group == sign], weight)
            target = scale * np.sign(point)
            distance = float(np.hypot(np.linalg.norm(w - target), np.linalg.norm(m - point)))
            if distance < best[0]:
                best = (distance, target, point)
    size = float(np.abs(m).max()) or 1.0
    mismatch = float(np.max(-np.minimum(w * m, 0)))
    active = np.abs(m) > 1e-12 * size
    spread = float(np.ptp(np.abs(w[active]))) if active.any() else 0.0
    return Membership(best[0], scale, best[1], best[2], mismatch, abs(float(m.sum())), spread)


def _scale(omega: FloatArray, mu: FloatArray) -> float:
    """Mean magnitude of omega, each head weighted by its mu."""
    total = float(np.abs(mu).sum())
    scale = float(np.abs(omega) @ np.abs(mu)) / total if total else 0.0
    if scale == 0:
        raise DomainError("gamma must be given where all heads are dummies, got None")
    return scale


def _simplex_projection(values: FloatArray, total: float) -> FloatArray:
    """Nearest point of the simplex of vectors >= 0 that sum to ``total`` (Held, Wolfe, Crowder 1974)."""
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - total) / np.arange(1, values.size + 1)
    shift = excess[np.flatnonzero(ordered > excess)[-1]]
    return np.asarray(np.maximum(values - shift, 0))


def _scales(task: RegressionTask, gamma: npt.ArrayLike) -> FloatArray:
    g = np.asarray(gamma, dtype=np.float64)
    bad = ~(np.isfinite(g) & (g > 0) & (task.dim * g * g <= _MAX_ARGUMENT))
    if bad.any():
        raise DomainError(f"gamma must be > 0 with dim gamma^2 <= {_MAX_ARGUMENT:g}, got {float(g[bad].flat[0])!r}")
    return g


def _sinh_excess(x: FloatArray) -> FloatArray:
    """sinh(x)/x - 1, without cancellation at small x >= 0."""
    square = x * x
    series = np.zeros_like(square)
    for k in range(8, 0, -1):
        series = (1 + series) * square / ((2 * k) * (2 * k + 1))
    safe = np.where(x > _SERIES_BELOW, x, 1.0)
    return np.asarray(np.where(x > _SERIES_BELOW, np.sinh(safe) / safe - 1, series))
