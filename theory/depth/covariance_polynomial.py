r"""Linear attention is an ordered matrix polynomial in the covariance, depth (19)-(30).

Matrices carry the paper's letters inside the functions: S the empirical covariance, B_ℓ the effective query-key
matrices, Ω the teacher covariance. With P tokens in d dimensions, hidden width N and L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from theory.depth.spectral_measure import spectral_measure
from theory.problems import Spectrum, as_integer
from theory.results import DomainError, FloatArray


def empirical_covariance(tokens: npt.ArrayLike) -> FloatArray:
    r"""Empirical input covariance :math:`S = UU^\top/P`, shape (d, d).

    tokens: U, one token per column, shape (d, P). Source: depth (19).
    """
    U = _matrix("tokens", tokens)
    return np.asarray(U @ U.T / U.shape[1])


def effective_query_key(encoder: npt.ArrayLike, key: npt.ArrayLike, query: npt.ArrayLike) -> FloatArray:
    r"""Effective query-key matrix :math:`B = \frac1N W_x^\top W_k^\top W_q W_x`, shape (d, d).

    encoder: W_x, shape (N, d); key, query: W_k, W_q, shape (N, N). Source: depth (20).
    """
    W_x, W_k, W_q = _matrix("encoder", encoder), _matrix("key", key), _matrix("query", query)
    N = W_x.shape[0]
    if W_k.shape != (N, N) or W_q.shape != (N, N):
        raise DomainError(f"key and query must have shape ({N}, {N}), got {W_k.shape} and {W_q.shape}")
    return np.asarray(W_x.T @ W_k.T @ W_q @ W_x / N)


def label_states(
    covariance: npt.ArrayLike, query_keys: Sequence[npt.ArrayLike], value: npt.ArrayLike, start: npt.ArrayLike
) -> list[FloatArray]:
    r"""Label states :math:`F_\ell = F_{\ell-1} - \frac1L W_v F_{\ell-1} S B_\ell`, ℓ = 0..L, each of shape (N, d).

    covariance: S; query_keys: B_1..B_L; value: W_v, shape (N, N); start: F_0 = W_y β^T, shape (N, d). The context
    states are F_ℓ U and the test state is (F_0 - F_ℓ) q. Source: depth (22).
    """
    S, W_v = _matrix("covariance", covariance), _matrix("value", value)
    states = [_matrix("start", start)]
    for B in query_keys:
        states.append(states[-1] - W_v @ states[-1] @ S @ _matrix("query_keys", B) / len(query_keys))
    return states


def readout_prediction(states: Sequence[FloatArray], readout: npt.ArrayLike, query: npt.ArrayLike) -> float:
    r"""Prediction :math:`\hat y = W_o (F_0 - F_L) q`. readout: W_o, shape (N,); query: q, shape (d,).

    Source: depth (23).
    """
    return float(np.asarray(readout) @ (states[0] - states[-1]) @ np.asarray(query))


def ordered_polynomial(
    covariance: npt.ArrayLike, query_keys: Sequence[npt.ArrayLike], moments: npt.ArrayLike
) -> FloatArray:
    r"""The ordered matrix polynomial of linear attention, for arbitrary B_ℓ, shape (d, d).

    .. math:: P_L(S) = \sum_{r=1}^{L} \frac{(-1)^{r-1} m_r}{L^r} \sum_{\ell_1 < \dots < \ell_r} SB_{\ell_1}\cdots
              SB_{\ell_r}

    covariance: S; query_keys: B_1..B_L; moments: m_r = W_o W_v^r W_y, r = 1..L. The 2^L products are summed by one
    pass over the layers, in O(L² d³). Source: depth (24).
    """
    S = _matrix("covariance", covariance)
    L, m = len(query_keys), np.asarray(moments, dtype=np.float64)
    if m.shape != (L,):
        raise DomainError(f"moments must hold one number per layer ({L}), got shape {m.shape}")
    symmetric = [np.eye(len(S)), *(np.zeros_like(S) for _ in range(L))]
    for layer, B in enumerate(query_keys, 1):
        SB = S @ _matrix("query_keys", B)
        for r in range(layer, 0, -1):
            symmetric[r] = symmetric[r] + symmetric[r - 1] @ SB
    terms = ((-1) ** (r - 1) * m[r - 1] / L**r * symmetric[r] for r in range(1, L + 1))
    return np.asarray(sum(terms, np.zeros_like(S)))


def readout_moments(readout: npt.ArrayLike, value: npt.ArrayLike, encoder: npt.ArrayLike, depth: int) -> FloatArray:
    r"""Readout coefficients :math:`m_r = W_o W_v^r W_y`, r = 1..L, shape (depth,). Source: depth, before (24)."""
    W_v, state = _matrix("value", value), np.asarray(encoder, dtype=np.float64)
    moments = []
    for _ in range(as_integer("depth", depth, 1)):
        state = W_v @ state
        moments.append(float(np.asarray(readout) @ state))
    return np.array(moments)


def query_risk(polynomial: npt.ArrayLike, teacher: npt.ArrayLike, query: npt.ArrayLike) -> float:
    r"""Risk :math:`q^\top D^\top \Omega D q`, D = I - P_L(S), at fixed tokens and query, averaged over the teacher.

    polynomial: P_L(S), shape (d, d); teacher: Ω, shape (d, d); query: q, shape (d,). Source: depth (26).
    """
    miss = np.asarray(query) - _matrix("polynomial", polynomial) @ np.asarray(query)
    return float(miss @ _matrix("teacher", teacher) @ miss)


def population_risk(polynomial: npt.ArrayLike, teacher: npt.ArrayLike, covariance: npt.ArrayLike) -> float:
    r"""Population risk :math:`\operatorname{tr}[D^\top\Omega D\Sigma]`, D = I - P_L(Σ).

    polynomial: P_L(Σ); teacher: Ω; covariance: Σ; all of shape (d, d). Source: depth (29).
    """
    D = np.eye(len(np.asarray(polynomial))) - _matrix("polynomial", polynomial)
    return float(np.trace(D.T @ _matrix("teacher", teacher) @ D @ _matrix("covariance", covariance)))


def residual_risk(spectrum: Spectrum, residual: Callable[[FloatArray], FloatArray], degree: int) -> float:
    r"""Population risk :math:`\sum_k\lambda_k\omega_k r(\lambda_k)^2` of any residual polynomial.

    residual: maps eigenvalues, shape (n,), to r, shape (n,), with r(0) = 1; degree: of r, which sets how finely a
    large spectrum is sampled. Source: depth (30).
    """
    measure = spectral_measure(spectrum, degree)
    values = np.asarray(residual(measure.largest * measure.nodes))
    return float(np.sum(measure.weights * values**2))


def polynomial_residual(coefficients: npt.ArrayLike, eigenvalue: npt.ArrayLike) -> FloatArray:
    r"""Residual :math:`r(\lambda) = 1 - \sum_{r=1}^L a_r\lambda^r` by Horner's rule, shape of eigenvalue.

    coefficients: a_1..a_L, shape (L,). Loses digits at high degree: `free_polynomial.product_residual` does not.
    Source: depth (28), (30).
    """
    value = np.zeros(np.shape(eigenvalue))
    x = np.asarray(eigenvalue, dtype=np.float64)
    for a in np.asarray(coefficients, dtype=np.float64)[::-1]:
        value = (value + a) * x
    return np.asarray(1 - value)


def _matrix(name: str, value: npt.ArrayLike) -> FloatArray:
    matrix = np.asarray(value, dtype=np.float64)
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise DomainError(f"{name} must be a finite matrix, got shape {matrix.shape}")
    return matrix
