"""Loss and gradient of one member with diagonal heads on one batch of several tasks, by the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.montecarlo.kernels.multihead_training import (
    inverse_normalisers,
    label_weights,
    sampled_slopes,
    token_scores,
)
from sim.montecarlo.kernels.multitask_training import diagonal_gradient, task_averaged_slopes
from sim.montecarlo.multihead_training import AnyFloatArray, HeadActivation, StepResult, activate
from theory.results import FloatArray


def diagonal_step(
    tokens: AnyFloatArray,
    query: AnyFloatArray,
    omega: AnyFloatArray,
    mu: AnyFloatArray,
    activation: HeadActivation,
    training_context: int,
    losses_and_slopes: Any,
) -> StepResult:
    """One member of heads with omega (h, dim) and mu (h, tasks) on a batch of tokens (tokens, dim, n), query (dim, n).

    losses_and_slopes: (weights, losses, slopes) -> None, fills losses (n,), summed over tasks, and slopes from the
    label weights, (tasks, tokens, n) both; see `task_averaged` and `task_sampled`. Source: multihead (3.2), 5.4.
    """
    count, _, contexts = tokens.shape
    heads, tasks = mu.shape
    scores = np.empty((heads, count, contexts), tokens.dtype)
    token_scores(tokens, omega[:, :, None] * query, scores)
    f, derivative = activate(activation, scores)
    inverse = np.full((heads, contexts), 1 / training_context, tokens.dtype)
    inverse_normalisers(f, activation.normalised, inverse)
    weights = np.empty((tasks, count, contexts), tokens.dtype)
    slopes, losses = np.empty_like(weights), np.empty(contexts, tokens.dtype)
    for task in range(tasks):
        label_weights(f, inverse, np.ascontiguousarray(mu[:, task]), weights[task])
    losses_and_slopes(weights, losses, slopes)
    omega_gradient, mu_gradient = np.empty(omega.shape), np.empty(mu.shape)
    diagonal_gradient(
        tokens, query, f, derivative, inverse, activation.normalised, slopes, mu, omega_gradient, mu_gradient
    )
    return StepResult(float(losses.mean(dtype=np.float64)), omega_gradient / contexts, mu_gradient / contexts)


def task_averaged(
    masks: FloatArray, variance: float, noise: float, tokens: AnyFloatArray, query: AnyFloatArray
) -> Any:
    """The loss averaged over teacher and noise for `diagonal_step`; masks (tasks, dim). Source: multihead (2.5)."""
    return lambda weights, losses, slopes: task_averaged_slopes(
        tokens, query, masks, variance, noise, weights, losses, slopes
    )


def task_sampled(labels: AnyFloatArray, target: AnyFloatArray) -> Any:
    """The loss at drawn labels (tasks, tokens, n) and targets (tasks, n) for `diagonal_step`.

    Source: multihead (2.5).
    """

    def fill(weights: AnyFloatArray, losses: AnyFloatArray, slopes: AnyFloatArray) -> None:
        losses[:] = 0
        one = np.empty_like(losses)
        for task in range(len(weights)):
            sampled_slopes(labels[task], target[task], weights[task], one, slopes[task])
            losses += one

    return fill
