r"""Softmax attention whose context labels are updated between layers, depth (75)-(87).

Context labels pass through :math:`I + (m/L) A_\ell` before the test token reads them, so that layer ℓ reads with the
row :math:`p_\ell (I + \frac mL A_{\ell-1}) \cdots (I + \frac mL A_1)`. Arrays may carry leading axes for batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from theory.problems import as_integer, as_real
from theory.results import DomainError, FloatArray

MAX_UPDATE = 1e6


@dataclass(frozen=True, eq=False, slots=True)
class LabelStates:
    """Label states of all layers: context Z_0..Z_L, shape (..., L + 1, N, P), and test h_0..h_L, (..., L + 1, N)."""

    context: FloatArray
    test: FloatArray


@dataclass(frozen=True, eq=False, slots=True)
class IdentityUniformFit:
    r"""Least-squares fit :math:`A \approx \rho I + (1-\rho)J` of each matrix.

    rho: weight of the identity, shape (...); r_squared: share of the variance of the entries that it explains, shape
    (...). Source: depth (83), (84).
    """

    rho: FloatArray
    r_squared: FloatArray


def context_mask(context: int, update: float) -> FloatArray:
    r"""Mask :math:`M(m) = \begin{pmatrix} m\,1 1^\top & 0 \\ 1^\top & 0\end{pmatrix}`, shape (P + 1, P + 1).

    context: P >= 1; update: m, -1 for linear attention, 0 for a fixed context. Row i receives from column j, the
    test token comes last. Source: depth (75)-(77).
    """
    P = as_integer("context", context, 1, 10**5)
    mask = np.zeros((P + 1, P + 1))
    mask[:P, :P] = as_real("update", update, -MAX_UPDATE, MAX_UPDATE)
    mask[P, :P] = 1
    return mask


def _rows(attention: npt.ArrayLike) -> FloatArray:
    p = np.asarray(attention, dtype=np.float64)
    if p.ndim < 2 or not np.isfinite(p).all():
        raise DomainError(f"attention must hold finite rows, shape (..., L, P), got shape {p.shape}")
    return p


def _mixers(mixing: npt.ArrayLike, layers: int, tokens: int) -> FloatArray:
    A = np.asarray(mixing, dtype=np.float64)
    if A.ndim < 3 or A.shape[-3:] != (layers, tokens, tokens) or not np.isfinite(A).all():
        raise DomainError(
            f"mixing must hold finite matrices, shape (..., {layers}, {tokens}, {tokens}), got shape {A.shape}"
        )
    return A


def label_states(
    attention: npt.ArrayLike,
    mixing: npt.ArrayLike,
    start: npt.ArrayLike,
    update: float,
    value: npt.ArrayLike | None = None,
) -> LabelStates:
    r"""Label states of every layer.

    .. math:: Z_\ell = Z_{\ell-1} + \tfrac mL W_v Z_{\ell-1}A_\ell^\top, \qquad
              h_\ell = h_{\ell-1} + \tfrac1L W_v Z_{\ell-1}p_\ell^\top

    attention: test rows p_1..p_L, shape (..., L, P); mixing: A_1..A_L, shape (..., L, P, P); start: Z_0 = W_y y,
    shape (..., N, P); update: m; value: W_v, shape (N, N), the identity where ``None``. h_0 = 0.
    Source: depth (10) with mask (77); (78), (81).
    """
    p = _rows(attention)
    L, P = p.shape[-2:]
    A, Z = _mixers(mixing, L, P), np.asarray(start, dtype=np.float64)
    m = as_real("update", update, -MAX_UPDATE, MAX_UPDATE)
    if Z.ndim < 2 or Z.shape[-1] != P:
        raise DomainError(f"start must have shape (..., N, {P}), got {Z.shape}")
    W_v = np.eye(Z.shape[-2]) if value is None else np.asarray(value, dtype=np.float64)
    contexts, tests = [Z], [np.zeros(Z.shape[:-1])]
    for layer in range(L):
        V = W_v @ contexts[-1]
        contexts.append(contexts[-1] + m / L * V @ np.swapaxes(A[..., layer, :, :], -1, -2))
        tests.append(tests[-1] + np.einsum("...np,...p->...n", V, p[..., layer, :]) / L)
    shape = np.broadcast_shapes(*(state.shape for state in contexts))
    return LabelStates(
        np.stack([np.broadcast_to(state, shape) for state in contexts], axis=-3),
        np.stack([np.broadcast_to(state, shape[:-1]) for state in tests], axis=-2),
    )


def layer_readings(
    attention: npt.ArrayLike, mixing: npt.ArrayLike, labels: npt.ArrayLike, update: float
) -> FloatArray:
    r"""What each layer reads, :math:`p_\ell (I + \tfrac mL A_{\ell-1})\cdots(I + \tfrac mL A_1)\, y`, shape (..., L).

    attention: p_ℓ, shape (..., L, P); mixing: A_ℓ, shape (..., L, P, P), of which the last is not used; labels: y,
    shape (..., P); update: m. Labels pass through the layers one by one, in O(L P²). Source: depth (82).
    """
    p = _rows(attention)
    L, P = p.shape[-2:]
    A, m = _mixers(mixing, L, P), as_real("update", update, -MAX_UPDATE, MAX_UPDATE)
    state = np.asarray(labels, dtype=np.float64)
    if state.shape[-1:] != (P,):
        raise DomainError(f"labels must have one entry per token ({P}), got shape {state.shape}")
    readings = []
    for layer in range(L):
        readings.append(np.einsum("...p,...p->...", p[..., layer, :], state))
        state = state + m / L * np.einsum("...ij,...j->...i", A[..., layer, :, :], state)
    return np.stack(np.broadcast_arrays(*readings), axis=-1)


def prediction(
    attention: npt.ArrayLike, mixing: npt.ArrayLike, labels: npt.ArrayLike, update: float, gain: float = 1.0
) -> FloatArray:
    r"""Prediction :math:`\hat y_L = \frac gL \sum_\ell p_\ell (I + \tfrac mL A_{\ell-1})\cdots y`, shape (...).

    Arguments as in `layer_readings`; gain: g = W_o W_y. Source: depth (82).
    """
    return np.asarray(gain * layer_readings(attention, mixing, labels, update).mean(axis=-1))


def reading_rows(attention: npt.ArrayLike, mixing: npt.ArrayLike, update: float) -> FloatArray:
    r"""Rows on the original labels, :math:`p_\ell (I + \tfrac mL A_{\ell-1})\cdots(I + \tfrac mL A_1)`, (..., L, P).

    With them the updated model is an ensemble of fixed rows, as in `layer_ensemble`. Every row of softmax weights has
    the sum :math:`(1 + m/L)^{\ell-1}`. O(L P³). Source: depth (82).
    """
    p = _rows(attention)
    L, P = p.shape[-2:]
    A, m = _mixers(mixing, L, P), as_real("update", update, -MAX_UPDATE, MAX_UPDATE)
    product = np.eye(P)
    rows = []
    for layer in range(L):
        rows.append(np.einsum("...p,...pq->...q", p[..., layer, :], product))
        product = product + m / L * A[..., layer, :, :] @ product
    return np.stack(np.broadcast_arrays(*rows), axis=-2)


def two_layer_prediction(
    first: npt.ArrayLike, second: npt.ArrayLike, mixing: npt.ArrayLike, labels: npt.ArrayLike, update: float,
    gain: float = 1.0,
) -> FloatArray:  # fmt: skip
    r"""Two-layer prediction :math:`\hat y_2 = g(\bar p + \frac m4 p_2 A_1)\,y` with :math:`\bar p = (p_1+p_2)/2`.

    first, second: p_1, p_2, shape (..., P); mixing: A_1, shape (..., P, P); labels: y, shape (..., P).
    Source: depth (79), (80), (87).
    """
    p_1, p_2, A_1, y = (np.asarray(value, dtype=np.float64) for value in (first, second, mixing, labels))
    row = (p_1 + p_2) / 2 + update / 4 * np.einsum("...p,...pq->...q", p_2, A_1)
    return np.asarray(gain * np.einsum("...p,...p->...", row, y))


def identity_prediction(
    first: npt.ArrayLike, second: npt.ArrayLike, labels: npt.ArrayLike, update: float, gain: float = 1.0
) -> FloatArray:
    r"""Two-layer prediction where A_1 is the identity, :math:`\frac g2 p_1 y + \frac g2 (1 + \frac m2)\, p_2 y`.

    first, second: p_1, p_2, shape (..., P); labels: y, shape (..., P). Source: depth (85).
    """
    p_1, p_2, y = (np.asarray(value, dtype=np.float64) for value in (first, second, labels))
    return np.asarray(gain / 2 * np.einsum("...p,...p->...", p_1 + (1 + update / 2) * p_2, y))


def mixed_row(row: npt.ArrayLike, rho: npt.ArrayLike) -> FloatArray:
    r"""Row :math:`p\,[\rho I + (1-\rho) J] = \rho p + (1-\rho)\, s\, u`, shape (..., P).

    row: p, shape (..., P), of sum s (1 for a softmax); u has all entries 1/P; rho: shape (...). Source: depth (86).
    """
    p, weight = np.asarray(row, dtype=np.float64), np.asarray(rho, dtype=np.float64)[..., np.newaxis]
    return np.asarray(weight * p + (1 - weight) * p.mean(axis=-1, keepdims=True))


def identity_uniform_fit(mixing: npt.ArrayLike) -> IdentityUniformFit:
    r"""Least-squares fit of :math:`\rho I + (1-\rho)J`, with J = 11ᵀ/P, to square matrices.

    .. math:: \rho = \frac{\operatorname{tr}A - 1^\top A 1/P}{P - 1}, \qquad
              R^2 = 1 - \frac{\|A - \rho I - (1-\rho)J\|_F^2}{\|A - \bar A\|_F^2}

    mixing: A, shape (..., P, P), P >= 2; the average over contexts of any exchangeable attention has R² = 1, so R² of
    an averaged matrix says nothing about single contexts. Source: depth (83), (84). Raises DomainError where all
    entries are equal, for then R² does not exist.
    """
    A = np.asarray(mixing, dtype=np.float64)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] < 2 or not np.isfinite(A).all():
        raise DomainError(f"mixing must hold finite square matrices of size >= 2, got shape {A.shape}")
    P = A.shape[-1]
    trace, total = np.trace(A, axis1=-2, axis2=-1), A.sum(axis=(-2, -1))
    rho = (trace - total / P) / (P - 1)
    weight = rho[..., np.newaxis, np.newaxis]
    residual = np.sum((A - weight * np.eye(P) - (1 - weight) / P) ** 2, axis=(-2, -1))
    variation = np.sum((A - total[..., np.newaxis, np.newaxis] / P**2) ** 2, axis=(-2, -1))
    if not (variation > 0).all():
        raise DomainError("mixing must not have all entries equal: R² does not exist there")
    return IdentityUniformFit(np.asarray(rho), np.asarray(1 - residual / variation))
