r"""Predictors of the paper as functions of arrays, and exact finite-sample risks of one-step gradient descent.

Arrays: tokens X, shape (..., L, d); labels y, shape (..., L); query x_q, shape (..., d). Risks are means of
(y_q - ŷ)² over tokens, noise and teacher β ~ N(0, B), against the noisy label of (2.5). B is I/d unless given. With

.. math:: \text{vanilla} = \frac1L\sum_\ell y_\ell x_\ell^\top G x_q, \qquad
          \text{debiased} = \frac1L\sum_\ell y_\ell \bar x_\ell^\top G x_q, \quad \bar x_\ell = x_\ell - \bar x,

the risk is a quadratic in the preconditioner G, whose moments are those of a Wishart matrix of L or L-1 degrees.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from theory.problems import RegressionTask, as_covariance, as_integer
from theory.results import DomainError, FloatArray


def softmax_prediction(
    tokens: npt.ArrayLike,
    labels: npt.ArrayLike,
    query: npt.ArrayLike,
    omega: npt.ArrayLike,
    mu: npt.ArrayLike,
    key_query: npt.ArrayLike | None = None,
) -> FloatArray:
    r"""Softmax attention :math:`\hat y_q = \sum_h\mu_h\langle y, \mathrm{smax}(\omega_h X\Omega x_q)\rangle`.

    omega, mu: one number per head, shape (h,); key_query: Ω, shape (d, d), or ``None`` for the identity. Returns shape
    (...). Source: multihead (3.2); with two heads ±γ (4.9), with one (4.12), with Ω (5.4).
    """
    X, y, x_q = _context(tokens, labels, query)
    w, m = np.asarray(omega, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    if w.ndim != 1 or w.shape != m.shape or w.size == 0:
        raise DomainError(f"omega and mu must hold one number per head each, got shapes {w.shape} and {m.shape}")
    logits = (X @ _apply(key_query, x_q)[..., np.newaxis])[..., 0]
    weights = softmax(logits[..., np.newaxis, :] * w[:, np.newaxis], axis=-1)
    return np.asarray(np.sum(m * np.sum(weights * y[..., np.newaxis, :], axis=-1), axis=-1))


def two_head_prediction(
    tokens: npt.ArrayLike,
    labels: npt.ArrayLike,
    query: npt.ArrayLike,
    gamma: float,
    mu: float,
    key_query: npt.ArrayLike | None = None,
) -> FloatArray:
    """Prediction of two opposite heads (γ, -γ), (μ, -μ), shape (...). Source: multihead (4.9), (5.4)."""
    return softmax_prediction(tokens, labels, query, (gamma, -gamma), (mu, -mu), key_query)


def single_head_prediction(
    tokens: npt.ArrayLike, labels: npt.ArrayLike, query: npt.ArrayLike, omega: float, mu: float
) -> FloatArray:
    """Prediction of one head, a Nadaraya-Watson estimator, shape (...). Source: multihead (4.12)."""
    return softmax_prediction(tokens, labels, query, (omega,), (mu,))


def vanilla_prediction(
    tokens: npt.ArrayLike,
    labels: npt.ArrayLike,
    query: npt.ArrayLike,
    step: float = 1.0,
    preconditioner: npt.ArrayLike | None = None,
) -> FloatArray:
    r"""One step of gradient descent from zero, :math:`\frac{\eta}{L}\sum_\ell y_\ell x_\ell^\top G x_q`, shape (...).

    preconditioner: G, shape (d, d), or ``None`` for the identity. Source: multihead Observation 3, (5.6).
    """
    X, y, x_q = _context(tokens, labels, query)
    scores = (X @ _apply(preconditioner, x_q)[..., np.newaxis])[..., 0]
    return np.asarray(step * np.mean(y * scores, axis=-1))


def debiased_prediction(
    tokens: npt.ArrayLike,
    labels: npt.ArrayLike,
    query: npt.ArrayLike,
    step: float = 1.0,
    preconditioner: npt.ArrayLike | None = None,
) -> FloatArray:
    r"""Debiased gradient descent :math:`\frac{\eta}{L}\sum_\ell y_\ell \bar x_\ell^\top G x_q`, shape (...).

    Source: multihead (4.11), and with a preconditioner (5.5).
    """
    X = np.asarray(tokens, dtype=np.float64)
    return vanilla_prediction(X - X.mean(axis=-2, keepdims=True), labels, query, step, preconditioner)


def _context(tokens: npt.ArrayLike, labels: npt.ArrayLike, query: npt.ArrayLike) -> tuple[FloatArray, ...]:
    X, y, x_q = (np.asarray(value, dtype=np.float64) for value in (tokens, labels, query))
    if X.ndim < 2 or y.shape[-1:] != X.shape[-2:-1] or x_q.shape[-1:] != X.shape[-1:] or X.shape[-2] == 0:
        raise DomainError(
            "tokens, labels and query must have shapes (..., L, d), (..., L) and (..., d) with L >= 1, "
            f"got {X.shape}, {y.shape} and {x_q.shape}"
        )
    return X, y, x_q


def _apply(matrix: npt.ArrayLike | None, vector: FloatArray) -> FloatArray:
    """Matrix times vectors, shape (..., d)."""
    if matrix is None:
        return vector
    M = np.asarray(matrix, dtype=np.float64)
    d = vector.shape[-1]
    if M.shape != (d, d):
        raise DomainError(f"key_query and preconditioner must have shape ({d}, {d}), got {M.shape}")
    return np.asarray(vector @ M.T)


def linear_transformer(embedding: npt.ArrayLike, value: npt.ArrayLike, key_query: npt.ArrayLike) -> FloatArray:
    r"""Linear attention :math:`Z + \frac1n\sum_h OV_h\, Z\, Z^\top KQ_h Z`, shape (D, n).

    embedding: Z, shape (D, n), of n columns; value, key_query: O V and K^T Q per head, shape (h, D, D).
    Source: multihead (5.1), which divides by L although Z has L + 1 columns; here by the columns there are.
    """
    Z, OV, KQ = _circuits(embedding, value, key_query)
    return np.asarray(Z + np.sum(OV @ Z @ Z.T @ KQ @ Z, axis=0) / Z.shape[1])


def paired_softmax_transformer(
    embedding: npt.ArrayLike, value: npt.ArrayLike, key_query: npt.ArrayLike, gamma: float
) -> FloatArray:
    r"""The 2h softmax heads ±γ that imitate h linear heads, shape (D, n).

    .. math:: Z + \sum_h\sum_{j=0,1}\frac{(-1)^j}{2\gamma}OV_h Z\,\mathrm{smax}\big((-1)^j\gamma Z^\top KQ_h Z\big)

    Arguments as in `linear_transformer`; gamma: γ > 0. Source: multihead, display before (5.2).
    """
    Z, OV, KQ = _circuits(embedding, value, key_query)
    scores = Z.T @ KQ @ Z
    difference = softmax(gamma * scores, axis=-2) - softmax(-gamma * scores, axis=-2)
    return np.asarray(Z + np.sum(OV @ Z @ difference, axis=0) / (2 * gamma))


def centred_linear_transformer(
    embedding: npt.ArrayLike, value: npt.ArrayLike, key_query: npt.ArrayLike
) -> FloatArray:
    r"""Limit γ → 0 of the paired softmax heads: linear attention minus its mean-token term, shape (D, n).

    .. math:: \mathrm{LinTF}(Z) - \sum_h OV_h\,\bar Z\bar Z^\top KQ_h Z, \qquad \bar Z = \tfrac1n Z\mathbf 1

    Source: multihead (5.2).
    """
    Z, OV, KQ = _circuits(embedding, value, key_query)
    mean = Z.mean(axis=1, keepdims=True)
    return np.asarray(linear_transformer(Z, OV, KQ) - np.sum(OV @ mean @ mean.T @ KQ @ Z, axis=0))


def _circuits(embedding: npt.ArrayLike, value: npt.ArrayLike, key_query: npt.ArrayLike) -> tuple[FloatArray, ...]:
    Z, OV, KQ = (np.asarray(item, dtype=np.float64) for item in (embedding, value, key_query))
    D = Z.shape[0] if Z.ndim == 2 else 0
    if D == 0 or OV.ndim != 3 or OV.shape[1:] != (D, D) or KQ.shape != OV.shape:
        raise DomainError(
            "embedding, value and key_query must have shapes (D, n), (h, D, D) and (h, D, D), "
            f"got {Z.shape}, {OV.shape} and {KQ.shape}"
        )
    return Z, OV, KQ


def vanilla_step_risk(task: RegressionTask, step: npt.ArrayLike) -> FloatArray:
    r"""Risk of vanilla gradient descent on isotropic tokens, shape of step.

    .. math:: 1 + \sigma^2 - 2\eta + \eta^2\Big(1 + \frac{d+1+d\sigma^2}{L}\Big)

    Source: beyond the paper; predictor of multihead Observation 3.
    """
    d, L, noise = _isotropic(task)
    eta = np.asarray(step, dtype=np.float64)
    return np.asarray(1 + noise - 2 * eta + eta**2 * (1 + (d + 1 + d * noise) / L))


def debiased_step_risk(task: RegressionTask, step: npt.ArrayLike) -> FloatArray:
    r"""Risk of debiased gradient descent on isotropic tokens, shape of step.

    .. math:: 1 + \sigma^2 - 2\eta\frac{L-1}{L} + \eta^2\frac{(L-1)(L+d+d\sigma^2)}{L^2}

    Source: beyond the paper; predictor of multihead (4.11).
    """
    d, L, noise = _isotropic(task)
    eta = np.asarray(step, dtype=np.float64)
    return np.asarray(1 + noise + (L - 1) / L * (-2 * eta + eta**2 * (L + d + d * noise) / L))


def vanilla_step(task: RegressionTask) -> float:
    r"""Best step :math:`L/(L+d+1+d\sigma^2)` of vanilla gradient descent on isotropic tokens.

    Source: beyond the paper.
    """
    d, L, noise = _isotropic(task)
    return L / (L + d + 1 + d * noise)


def debiased_step(task: RegressionTask) -> float:
    r"""Best step :math:`\eta^* = (1 + (1+\sigma^2)d/L)^{-1}` of debiased gradient descent on isotropic tokens.

    The paper has it as a limit of the approximate loss; it is exactly optimal at every d and L.
    Source: multihead Theorem 4.2 (ii); exactness beyond the paper.
    """
    d, L, noise = _isotropic(task)
    return L / (L + d * (1 + noise))


def _isotropic(task: RegressionTask) -> tuple[int, int, float]:
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for a scalar step, got a matrix")
    return task.dim, task.context, task.noise


def vanilla_risk(task: RegressionTask, preconditioner: npt.ArrayLike, prior: npt.ArrayLike | None = None) -> float:
    r"""Exact risk of preconditioned vanilla gradient descent for any token and teacher covariance.

    .. math:: \sigma^2 + \operatorname{tr}B\Sigma - 2\operatorname{tr}B\Sigma G\Sigma
              + \Big(1+\frac1L\Big)\operatorname{tr}B\Sigma G\Sigma G^\top\Sigma
              + \frac{\operatorname{tr}B\Sigma+\sigma^2}{L}\operatorname{tr}G\Sigma G^\top\Sigma

    preconditioner: G, shape (d, d), step included; prior: B, shape (d, d), or ``None`` for I/d.
    Source: beyond the paper; predictor of multihead (5.6).
    """
    cross, fourth, spread, label = _traces(task, preconditioner, prior)
    L, noise = task.context, task.noise
    return noise + label - 2 * cross + (1 + 1 / L) * fourth + (label + noise) / L * spread


def debiased_risk(task: RegressionTask, preconditioner: npt.ArrayLike, prior: npt.ArrayLike | None = None) -> float:
    r"""Exact risk of preconditioned debiased gradient descent for any token and teacher covariance.

    .. math:: \sigma^2 + \operatorname{tr}B\Sigma + \frac{L-1}{L}\Big\{-2\operatorname{tr}B\Sigma G\Sigma
              + \operatorname{tr}B\Sigma G\Sigma G^\top\Sigma
              + \frac{\operatorname{tr}B\Sigma+\sigma^2}{L}\operatorname{tr}G\Sigma G^\top\Sigma\Big\}

    Arguments as in `vanilla_risk`. Source: beyond the paper; predictor of multihead (5.5).
    """
    cross, fourth, spread, label = _traces(task, preconditioner, prior)
    L, noise = task.context, task.noise
    return noise + label + (L - 1) / L * (-2 * cross + fourth + (label + noise) / L * spread)


def _traces(
    task: RegressionTask, preconditioner: npt.ArrayLike, prior: npt.ArrayLike | None
) -> tuple[float, float, float, float]:
    """Traces tr BΣGΣ, tr BΣGΣG'Σ, tr GΣG'Σ and tr BΣ."""
    S, B = task.covariance_matrix(), _prior(task, prior)
    G = np.asarray(preconditioner, dtype=np.float64)
    if G.shape != S.shape or not np.isfinite(G).all():
        raise DomainError(f"preconditioner must be a finite matrix of shape {S.shape}, got shape {G.shape}")
    GS, BS = G @ S, B @ S
    square = GS @ G.T @ S
    return tuple(float(np.trace(M)) for M in (BS @ GS, BS @ square, square, BS))  # type: ignore[return-value]


def _prior(task: RegressionTask, prior: npt.ArrayLike | None) -> FloatArray:
    d = task.dim
    return np.eye(d) / d if prior is None else np.array(as_covariance("prior", prior, d))


def vanilla_preconditioner(task: RegressionTask, prior: npt.ArrayLike | None = None) -> FloatArray:
    r"""Best G of vanilla descent, :math:`[(1+\frac1L)B\Sigma+\frac1L(\operatorname{tr}B\Sigma+\sigma^2)I]^{-1}B`.

    With B = I/d this is the inverse of the paper's matrix in (5.6). prior: B, shape (d, d), or ``None`` for I/d.
    Source: multihead (5.6); any prior beyond the paper.
    """
    return _best_preconditioner(task, prior, 1 + 1 / task.context)


def debiased_preconditioner(task: RegressionTask, prior: npt.ArrayLike | None = None) -> FloatArray:
    r"""Best G of debiased gradient descent, :math:`[B\Sigma + \frac{\operatorname{tr}B\Sigma+\sigma^2}{L}I]^{-1}B`.

    It lacks the factor 1 + 1/L of (5.6), which is optimal for the vanilla estimator only, while two softmax heads
    emulate the debiased one. Arguments as in `vanilla_preconditioner`. Source: beyond the paper.
    """
    return _best_preconditioner(task, prior, 1.0)


def _best_preconditioner(task: RegressionTask, prior: npt.ArrayLike | None, factor: float) -> FloatArray:
    S, B = task.covariance_matrix(), _prior(task, prior)
    spread = (np.trace(B @ S) + task.noise) / task.context
    return np.linalg.solve(factor * B @ S + spread * np.eye(task.dim), B)


def paper_covariance(task: RegressionTask) -> FloatArray:
    r"""Matrix :math:`\tilde\Sigma = (1+\frac1L)\Sigma + \frac1L(\operatorname{tr}\Sigma+d\sigma^2)I`, shape (d, d).

    Source: multihead (5.6).
    """
    S, d, L = task.covariance_matrix(), task.dim, task.context
    return np.asarray((1 + 1 / L) * S + (np.trace(S) + d * task.noise) / L * np.eye(d))


def softmax_length_risk(task: RegressionTask, step: float, test_context: npt.ArrayLike) -> FloatArray:
    r"""Risk at other context lengths of two softmax heads with small γ, that is of debiased descent with a fixed step.

    step: η = 2γμ as trained; test_context: L' >= 1, shape (...). It is 1 + σ² at L' = 1, where
    the prediction is 0, mostly more at L' = 2, and falls from there to σ² + (1-η)².
    Source: multihead section 5.1 and Figure 8; formula beyond the paper.
    """
    d, _, noise = _isotropic(task)
    L = _contexts(test_context)
    return np.asarray(1 + noise + (L - 1) / L * (-2 * step + step**2 * (L + d + d * noise) / L))


def linear_length_risk(task: RegressionTask, step: float, test_context: npt.ArrayLike) -> FloatArray:
    r"""Risk at other context lengths of linear attention, whose normaliser stays that of training.

    .. math:: \hat y = \frac{\eta}{L}\sum_{\ell\le L'}y_\ell x_\ell^\top x_q, \qquad
              1+\sigma^2-2\eta\rho+\eta^2\rho^2\Big(1+\frac{d+1+d\sigma^2}{L'}\Big), \quad \rho = \frac{L'}{L}

    task.context: the training length L; step: η; test_context: L' >= 1, shape (...). Least near L' = L/η, then grows
    as L'². Source: multihead section 5.1 and Figure 8; formula beyond the paper.
    """
    d, L, noise = _isotropic(task)
    test = _contexts(test_context)
    eta = step * test / L
    return np.asarray(1 + noise - 2 * eta + eta**2 * (1 + (d + 1 + d * noise) / test))


def infinite_length_risk(noise: float, omega: npt.ArrayLike, mu: npt.ArrayLike) -> float:
    r"""Floor in test length of softmax on isotropic tokens, :math:`\sigma^2 + (1-\langle\mu,\omega\rangle)^2`.

    As L → ∞ a head's average of tilted normal tokens tends to ω x_q. omega, mu: shape (h,).
    Source: beyond the paper.
    """
    return float(noise + (1 - np.dot(np.asarray(omega, dtype=np.float64), np.asarray(mu, dtype=np.float64))) ** 2)


def _contexts(value: npt.ArrayLike) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    for item in array.ravel():
        as_integer("test_context", item, 1)
    return array
