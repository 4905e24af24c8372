r"""The approximate population loss (4.1) of Proposition 4.1, and its replacement that is exact to first order in 1/L.

(4.1) puts d for \|x_q\|² and drops terms of order 1/L beside (1+σ²)/L; the replacement averages over
\|x_q\|² ~ χ²_d and keeps them. Risks are against the noisy label; omega, mu hold one number per head along the last
axis, shape (..., h).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from theory.multihead.softmax_risk import softmax_risks
from theory.problems import RegressionTask, as_integer
from theory.results import DomainError, FloatArray

# exp beyond this exponent leaves float64.
_MAX_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class ApproximateDerivatives:
    """Value, gradients in omega and mu, shape (h,) each, and Hessian, shape (2h, 2h), in (omega, mu) stacked."""

    value: float
    omega: FloatArray
    mu: FloatArray
    hessian: FloatArray


def approximate_loss(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> FloatArray:
    r"""Approximate loss, shape (...).

    .. math:: \tilde{\mathcal L} = 1+\sigma^2-2\mu^\top\omega
              + \mu^\top\Big(\omega\omega^\top + \frac{1+\sigma^2}{L}\exp(d\,\omega\omega^\top)\Big)\mu

    omega, mu: shape (..., h), broadcast. Source: multihead Proposition 4.1 and (4.1). Raises DomainError where
    d ω_h ω_k > 700, beyond which the exponential overflows.
    """
    w, m = heads(omega, mu)
    product = np.sum(w * m, axis=-1)
    kernel = np.exp(_exponent(task, w))
    return np.asarray(1 + task.noise - 2 * product + product**2 + noise_level(task) * _form(kernel, m))


def heads(omega: npt.ArrayLike, mu: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Both as broadcast float arrays, shape (..., h), h >= 1.

    Source: the parametrisation multihead (3.1). Raises DomainError where shapes disagree or a number is not finite.
    """
    w, m = np.asarray(omega, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    if w.ndim == 0 or m.ndim == 0 or w.shape[-1] != m.shape[-1] or w.shape[-1] == 0:
        raise DomainError(f"omega and mu must hold one number per head each, got shapes {w.shape} and {m.shape}")
    for name, values in (("omega", w), ("mu", m)):
        if not np.isfinite(values).all():
            raise DomainError(f"{name} must be finite, got {float(values[~np.isfinite(values)][0])!r}")
    w, m = np.broadcast_arrays(w, m)
    return w, m


def noise_level(task: RegressionTask) -> float:
    r"""The constant :math:`c = (1+\sigma^2)/L`. Source: multihead (4.1). Raises DomainError for a covariance."""
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for the approximate loss, got a matrix")
    return (1 + task.noise) / task.context


def _exponent(task: RegressionTask, omega: FloatArray) -> FloatArray:
    exponent = task.dim * omega[..., :, np.newaxis] * omega[..., np.newaxis, :]
    if exponent.max(initial=0) > _MAX_EXPONENT:
        raise DomainError(
            f"dim * omega^2 must be at most {_MAX_EXPONENT:g} for the approximate loss, got {float(exponent.max()):g}"
        )
    return np.asarray(exponent)


def _form(kernel: FloatArray, mu: FloatArray) -> FloatArray:
    return np.asarray(np.sum(mu[..., :, np.newaxis] * kernel * mu[..., np.newaxis, :], axis=(-2, -1)))


def taylor_loss(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike, terms: int) -> FloatArray:
    r"""Taylor form of the approximate loss, truncated after ``terms`` powers, shape (...).

    .. math:: \sigma^2 + (1-\langle\mu,\omega\rangle)^2 + \frac{1+\sigma^2}{L}\langle\mu,\mathbf 1\rangle^2
              + \frac{1+\sigma^2}{L}\sum_{k=1}^{K}\frac{d^k}{k!}\langle\mu,\omega^{\odot k}\rangle^2

    terms: K >= 0; grows to `approximate_loss` from below. Source: multihead, display before (4.5).
    """
    w, m = heads(omega, mu)
    total = np.sum(m, axis=-1) ** 2
    power = m.astype(np.float64)
    factor = 1.0
    for k in range(1, as_integer("terms", terms, 0, 10_000) + 1):
        power = power * w
        factor *= task.dim / k
        total = total + factor * np.sum(power, axis=-1) ** 2
    product = np.sum(w * m, axis=-1)
    return np.asarray(task.noise + (1 - product) ** 2 + noise_level(task) * total)


def approximate_derivatives(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> ApproximateDerivatives:
    r"""Value, gradients and Hessian of the approximate loss at one model of h heads.

    .. math:: \tfrac12\nabla_\mu = -(1-\langle\mu,\omega\rangle)\omega + cE\mu, \quad
              \tfrac12\nabla_\omega = -(1-\langle\mu,\omega\rangle)\mu + cd\,\mu\odot E(\mu\odot\omega),
              \quad E = \exp(d\,\omega\omega^\top)

    omega, mu: shape (h,). Source: multihead, updates before (4.3), with the series summed.
    """
    w, m = heads(omega, mu)
    if w.ndim != 1:
        raise DomainError(f"omega must hold one number per head, got shape {w.shape}")
    _exponent(task, w)
    c, d = noise_level(task), task.dim
    gradient = gradient_array(c, d, w, m)
    value = float(approximate_loss(task, w, m))
    return ApproximateDerivatives(value, gradient[: w.size], gradient[w.size :], hessian_array(c, d, w, m))


def approximate_gradient(
    task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Gradients of the approximate loss in omega and in mu, shape (..., h) each.

    Formulas in `approximate_derivatives`. Source: multihead, updates before (4.3), with the series summed.
    """
    w, m = heads(omega, mu)
    _exponent(task, w)
    gradient = gradient_array(noise_level(task), task.dim, w, m)
    return gradient[..., : w.shape[-1]], gradient[..., w.shape[-1] :]


def gradient_array(c: float, d: int, omega: FloatArray, mu: FloatArray) -> FloatArray:
    """Gradient in (omega, mu) stacked, shape (..., 2h), unchecked; infinite where the exponential overflows.

    c: (1+σ²)/L. Source: as `approximate_gradient`; the inner loop of the dynamics.
    """
    w, m = omega, mu
    with np.errstate(over="ignore", invalid="ignore"):
        E = np.exp(d * w[..., :, np.newaxis] * w[..., np.newaxis, :])
        miss = 1 - np.sum(w * m, axis=-1, keepdims=True)
        by_mu = -2 * miss * w + 2 * c * (E @ m[..., np.newaxis])[..., 0]
        by_omega = -2 * miss * m + 2 * c * d * m * (E @ (m * w)[..., np.newaxis])[..., 0]
    return np.concatenate([by_omega, by_mu], axis=-1)


def hessian_array(c: float, d: int, omega: FloatArray, mu: FloatArray) -> FloatArray:
    """Hessian in (omega, mu) stacked, shape (2h, 2h), unchecked; infinite where the exponential overflows.

    c: (1+σ²)/L; omega, mu: shape (h,). Source: second derivatives of multihead (4.1).
    """
    w, m, h = omega, mu, omega.size
    with np.errstate(over="ignore", invalid="ignore"):
        E = np.exp(d * np.outer(w, w))
        hessian = np.empty((2 * h, 2 * h))
        hessian[:h, :h] = 2 * np.outer(m, m) * (1 + c * d * E * (1 + d * np.outer(w, w)))
        hessian[:h, :h] += np.diag(2 * c * d * d * m * (E @ (m * w * w)))
        hessian[h:, h:] = 2 * np.outer(w, w) + 2 * c * E
        cross = 2 * np.outer(m, w) * (1 + c * d * E) + np.diag(2 * (w @ m - 1) + 2 * c * d * (E @ (m * w)))
    hessian[:h, h:], hessian[h:, :h] = cross, cross.T
    return hessian


def best_approximate_mu(task: RegressionTask, omega: npt.ArrayLike) -> FloatArray:
    r"""The μ with the least approximate loss at given ω, :math:`(\omega\omega^\top + cE)^{-1}\omega`, shape (h,).

    Heads with equal ω share their weight equally. Source: minimum of multihead (4.1) in μ; (4.6) is the case ±γ.
    """
    w, _ = heads(omega, omega)
    distinct, inverse, counts = np.unique(w, return_inverse=True, return_counts=True)
    kernel = np.outer(distinct, distinct) + noise_level(task) * np.exp(_exponent(task, distinct))
    return np.asarray((np.linalg.solve(kernel, distinct) / counts)[inverse])


def single_head_optimum(task: RegressionTask) -> tuple[float, float]:
    r"""Minimiser of the approximate loss for one head, :math:`\omega^* = 1/\sqrt d`,
    :math:`\mu^* = \sqrt d\,(1+e(1+\sigma^2)d/L)^{-1}`.

    Source: multihead, after (4.12).
    """
    d = task.dim
    return 1 / np.sqrt(d), np.sqrt(d) / (1 + np.e * noise_level(task) * d)


def approximation_error(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> FloatArray:
    r"""Exact minus approximate loss, :math:`\mathcal L-\tilde{\mathcal L}`, shape (...).

    omega, mu: shape (..., h). Accuracy as in `softmax_risks`. Source: multihead Figure 6 (a), Proposition 4.1.
    """
    return np.asarray(softmax_risks(task, omega, mu) - approximate_loss(task, omega, mu))


def first_order_loss(task: RegressionTask, omega: npt.ArrayLike, mu: npt.ArrayLike) -> FloatArray:
    r"""The population loss to first order in 1/L at fixed ω, μ and d, shape (...).

    .. math:: 1+\sigma^2 - 2\sum_h\mu_h\omega_h\Big(1-\frac{g_{hh}}{L}\Big) + \sum_{hk}\mu_h\mu_k\Big\{\omega_h\omega_k
              + \frac{1+\sigma^2}{L}s_{hk}^{-d/2} + \frac{\omega_h\omega_k}{L}(g_{hk}-g_{hh}-g_{kk})\Big\},
              \quad s_{hk} = 1-2\omega_h\omega_k, \quad g = s^{-d/2-1}

    (4.1) has :math:`e^{d\omega\omega'}` for :math:`s^{-d/2} = E\,e^{\omega\omega'|x_q|^2}` and no g. The error is of
    order 1/L² while \|ω\| < 1/2, where its coefficient exists; at γ → 0 in opposite heads it gives debiased descent
    exactly. Source: beyond the paper, from the expansion of softmax weights around their mean. Raises
    DomainError where \|ω\| >= 1/sqrt(2): the mean over \|x_q\| diverges.
    """
    w, m = heads(omega, mu)
    if w.size and float(np.abs(w).max()) >= np.sqrt(0.5):
        raise DomainError(
            f"omega must be below 1/sqrt(2) in magnitude for the 1/L expansion, got {np.abs(w).max():g}"
        )
    d, L, c = task.dim, task.context, noise_level(task)
    products = w[..., :, np.newaxis] * w[..., np.newaxis, :]
    log_s = np.log1p(-2 * products)
    g = np.exp(-(d / 2 + 1) * log_s)
    own = np.exp(-(d / 2 + 1) * np.log1p(-2 * w * w))
    kernel = products + c * np.exp(-d / 2 * log_s)
    kernel = kernel + products / L * (g - own[..., :, np.newaxis] - own[..., np.newaxis, :])
    return np.asarray(1 + task.noise - 2 * np.sum(m * w * (1 - own / L), axis=-1) + _form(kernel, m))
