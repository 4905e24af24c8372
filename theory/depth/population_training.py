r"""Training the linear model's layer scalars on the population loss of the easy task.

With B_ℓ = κ_ℓ I, a value map that acts as one and the readout gain g, the model of depth (24) has the residual
:math:`r(\lambda) = 1 - g\,[1 - \prod_\ell(1 - \kappa_\ell\lambda/L)]`, and its loss :math:`\sum_k\lambda_k\omega_k
r(\lambda_k)^2` is an explicit function of L numbers. Equal scalars stay equal under every symmetric rule, so that
training starts on the repeated update (33) and must break the symmetry of the layers to approach the free polynomial
(35): after finite training the loss, and the exponent fitted to it, lie between the two references of depth (40).
Everything here is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.integrate import solve_ivp

from theory.depth.free_polynomial import layer_steps
from theory.depth.spectral_measure import SpectralMeasure, spectral_measure
from theory.problems import Spectrum, as_depths, as_integer, as_real
from theory.results import DomainError, FloatArray, PrecisionError

MAX_LAYERS = 512
MAX_STEPS = 10**6
# Relative error per step of the flow; its loss at the end is good to about this.
_FLOW_TOLERANCE = 1e-8
# Adam's usual constants.
_ADAM_MEAN, _ADAM_SQUARE, _ADAM_FLOOR = 0.9, 0.999, 1e-8


@dataclass(frozen=True, eq=False, slots=True)
class Training:
    """Scalars on the way.

    times: steps or flow times, shape (n,); losses: population losses, shape (n,); scalars: κ, shape (n, L).
    """

    times: FloatArray
    losses: FloatArray
    scalars: FloatArray


def _scalars(value: npt.ArrayLike) -> FloatArray:
    kappa = np.asarray(value, dtype=np.float64)
    if kappa.ndim < 1 or not 1 <= kappa.shape[-1] <= MAX_LAYERS or not np.isfinite(kappa).all():
        raise DomainError(f"scalars must be finite, one per layer, 1 to {MAX_LAYERS} layers, got shape {kappa.shape}")
    return kappa


def _measure(spectrum: Spectrum, layers: int) -> SpectralMeasure:
    return spectral_measure(spectrum, layers)


def population_loss(spectrum: Spectrum, scalars: npt.ArrayLike, gain: float = 1.0) -> FloatArray:
    r"""Population loss of the linear model with layer scalars κ.

    .. math:: R = \sum_k\lambda_k\omega_k\,r(\lambda_k)^2, \qquad
              r(\lambda) = 1 - g + g\prod_\ell\Big(1 - \frac{\kappa_\ell}L\lambda\Big)

    spectrum: any; scalars: κ_ℓ (times the value scalar v), shape (..., L); gain: g = W_o W_y. Returns shape (...), in
    units of the label variance. Source: depth (24), (29) with B_ℓ = κ_ℓ I; at equal κ it is (30) with (33).
    """
    kappa = _scalars(scalars)
    measure = _measure(spectrum, kappa.shape[-1])
    residual = 1 - gain + gain * _factors(measure, kappa).prod(axis=-1)
    return np.asarray(residual**2 @ measure.weights)


def _factors(measure: SpectralMeasure, kappa: FloatArray) -> FloatArray:
    """Factors 1 - κ_ℓ λ_k / L, shape (..., n, L)."""
    eigenvalues = measure.largest * measure.nodes
    return np.asarray(1 - eigenvalues[:, np.newaxis] * (kappa / kappa.shape[-1])[..., np.newaxis, :])


def leave_one_out_products(factors: npt.ArrayLike) -> FloatArray:
    r"""Products :math:`\prod_{m\ne\ell} F_m` over the last axis, shape of factors, without division.

    Products of what lies before and after, so that factors of zero, which every learned mode has, do no harm.
    Source: derivative of the product in depth (24) with B_ℓ = κ_ℓ I.
    """
    F = np.asarray(factors, dtype=np.float64)
    before, after = np.ones_like(F), np.ones_like(F)
    before[..., 1:] = np.cumprod(F[..., :-1], axis=-1)
    after[..., :-1] = np.cumprod(F[..., :0:-1], axis=-1)[..., ::-1]
    return np.asarray(before * after)


def population_gradient(
    spectrum: Spectrum, scalars: npt.ArrayLike, gain: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    r"""Loss and its gradient in the layer scalars.

    .. math:: \frac{\partial R}{\partial\kappa_\ell} = -\frac{2g}L\sum_k\lambda_k^2\omega_k\, r(\lambda_k)
              \prod_{m\ne\ell}\Big(1 - \frac{\kappa_m}L\lambda_k\Big)

    scalars: κ, shape (..., L); gain: g. Returns shapes (...) and (..., L). O(n L). Source: depth (24), (29).
    """
    kappa = _scalars(scalars)
    return _loss_and_gradient(_measure(spectrum, kappa.shape[-1]), kappa, gain)


def _loss_and_gradient(measure: SpectralMeasure, kappa: FloatArray, gain: float) -> tuple[FloatArray, FloatArray]:
    factors = _factors(measure, kappa)
    others = leave_one_out_products(factors)
    residual = 1 - gain + gain * others[..., 0] * factors[..., 0]
    weighted = measure.weights * residual
    slope = -2 * gain / kappa.shape[-1] * measure.largest * measure.nodes
    gradient = np.einsum("...k,...kl->...l", weighted * slope, others)
    return np.asarray(np.sum(weighted * residual, axis=-1)), np.asarray(gradient)


def optimal_scalars(spectrum: Spectrum, depth: int) -> FloatArray:
    r"""Scalars :math:`\kappa_\ell = L/\text{root}_\ell` with the least population loss at g = 1, ascending, (depth,).

    They attain the free polynomial. Source: beyond the paper; compare depth (35), (37).
    """
    return np.asarray(depth * layer_steps(spectrum, depth)[::-1])


def start_scalars(depth: int, size: float, spread: float = 0.0) -> FloatArray:
    r"""Small scalars to start from, :math:`\kappa_\ell = \epsilon(1 + \delta x_\ell)`, x_ℓ even in [-1, 1], (depth,).

    depth: L >= 1; size: ε; spread: δ in [0, 1], 0 for equal scalars. A deterministic stand-in for random weights.
    Source: initial condition of the trained linear model; no equation.
    """
    layers = as_integer("depth", depth, 1, MAX_LAYERS)
    position = np.linspace(-1, 1, layers) if layers > 1 else np.zeros(1)
    return np.asarray(as_real("size", size, -1e6, 1e6) * (1 + as_real("spread", spread, 0, 1) * position))


def gradient_flow(spectrum: Spectrum, start: npt.ArrayLike, times: npt.ArrayLike, gain: float = 1.0) -> Training:
    r"""Gradient flow :math:`\dot\kappa_\ell = -L\,\partial R/\partial\kappa_\ell` at the given times.

    start: κ(0), shape (L,); times: increasing, >= 0, shape (n,). The factor L is the mean-field unit of time: the sum
    of the layers then moves at a rate that does not depend on depth. Stiff solver, relative error 1e-8 per step.
    Source: population training of depth (24), (29). Raises PrecisionError where the integration fails.
    """
    kappa = _scalars(start)
    t = np.asarray(times, dtype=np.float64)
    if kappa.ndim != 1 or t.ndim != 1 or t.size == 0 or not (t >= 0).all() or (np.diff(t) <= 0).any():
        raise DomainError("start must be one vector and times a non-empty increasing sequence >= 0")
    layers = kappa.size
    measure = _measure(spectrum, layers)
    if t[-1] == 0:
        return Training(t, population_loss(spectrum, kappa[np.newaxis], gain), kappa[np.newaxis])
    solution = solve_ivp(
        lambda _, k: -layers * _loss_and_gradient(measure, k, gain)[1],
        (0.0, t[-1]),
        kappa,
        method="LSODA",
        t_eval=t,
        rtol=_FLOW_TOLERANCE,
        atol=_FLOW_TOLERANCE * 1e-3,
    )
    if not solution.success:
        raise PrecisionError(f"the gradient flow could not be integrated to time {t[-1]:g}: {solution.message}")
    path = np.asarray(solution.y.T)
    return Training(t, population_loss(spectrum, path, gain), path)


def gradient_descent(
    spectrum: Spectrum, start: npt.ArrayLike, *, rate: float, steps: int, gain: float = 1.0, records: int = 64
) -> Training:
    r"""Gradient descent :math:`\kappa \leftarrow \kappa - \eta L\,\nabla R`, recorded at about ``records`` steps.

    start: κ, shape (L,); rate: η > 0 in the unit of time of `gradient_flow`; steps: 0 to 10^6.
    Source: population training of depth (24), (29). Raises PrecisionError where the loss diverges.
    """
    rate = as_real("rate", rate, 0, 1e6, open_low=True)

    def update(_: int, gradient: FloatArray) -> FloatArray:
        return rate * gradient.size * gradient

    return _descend(spectrum, start, update, steps, gain, records)


def adam_descent(
    spectrum: Spectrum, start: npt.ArrayLike, *, rate: float, steps: int, gain: float = 1.0, records: int = 64
) -> Training:
    r"""Adam on the exact gradient, with the usual constants (0.9, 0.999, 1e-8), recorded at about ``records`` steps.

    start: κ, shape (L,); rate: size of a step in each κ, > 0; steps: 0 to 10^6. Source: population training of depth
    (24), (29) with the paper's kind of optimiser. Raises PrecisionError where the loss diverges.
    """
    rate = as_real("rate", rate, 0, 1e6, open_low=True)
    mean = np.zeros(_scalars(start).shape)
    square = np.zeros_like(mean)

    def update(step: int, gradient: FloatArray) -> FloatArray:
        nonlocal mean, square
        mean = _ADAM_MEAN * mean + (1 - _ADAM_MEAN) * gradient
        square = _ADAM_SQUARE * square + (1 - _ADAM_SQUARE) * gradient**2
        unbiased = np.sqrt(square / (1 - _ADAM_SQUARE**step))
        return np.asarray(rate * mean / (1 - _ADAM_MEAN**step) / (unbiased + _ADAM_FLOOR))

    return _descend(spectrum, start, update, steps, gain, records)


def _descend(
    spectrum: Spectrum,
    start: npt.ArrayLike,
    update: Callable[[int, FloatArray], FloatArray],
    steps: int,
    gain: float,
    records: int,
) -> Training:
    kappa = _scalars(start)
    if kappa.ndim != 1:
        raise DomainError(f"start must be one vector of scalars, got shape {kappa.shape}")
    count = as_integer("steps", steps, 0, MAX_STEPS)
    measure = _measure(spectrum, kappa.size)
    kept = set(np.unique(np.linspace(0, count, as_integer("records", records, 2)).round()).astype(int).tolist())
    times, losses, path = [], [], []
    for step in range(count + 1):
        loss, gradient = _loss_and_gradient(measure, kappa, gain)
        if not np.isfinite(loss):
            raise PrecisionError(f"training diverged at step {step}: lower the rate")
        if step in kept:
            times.append(float(step))
            losses.append(float(loss))
            path.append(kappa)
        kappa = kappa - update(step + 1, gradient)
    return Training(np.array(times), np.array(losses), np.array(path))


def trained_losses(depths: npt.ArrayLike, train: Callable[[int], Training]) -> FloatArray:
    """Last loss of ``train(depth)`` at each depth, shape of depths (one axis).

    Source: population training of depth (24), (29); the measured column of Table 2 in miniature.
    """
    layers = as_depths(depths)
    return np.array([train(int(depth)).losses[-1] for depth in layers])


def fitted_exponent(depths: npt.ArrayLike, losses: npt.ArrayLike) -> float:
    r"""Least-squares exponent α of :math:`R = cL^{-\alpha}` in logarithms. depths, losses: > 0, shape (n,), n >= 2.

    Source: depth (88), (89) with L_0 = 0, as for the easy task.
    """
    L, R = as_depths(depths), np.asarray(losses, dtype=np.float64)
    if L.ndim != 1 or L.shape != R.shape or np.unique(L).size < 2 or not ((L > 0).all() and (R > 0).all()):
        raise DomainError("a fitted exponent needs two or more different depths > 0 with losses > 0")
    x = np.log(L) - np.log(L).mean()
    return float(-(x @ np.log(R)) / (x @ x))
