"""Loss and gradient of one member of an ensemble on one batch, by the kernels; and the activations that heads use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from sim.montecarlo.kernels.multihead_training import (
    error_slopes,
    inverse_normalisers,
    label_weights,
    query_reads,
    read_slopes,
    sampled_slopes,
    scalar_gradient,
    scalar_scores,
    subtract_largest,
    summed_products,
    teacher_averaged_slopes,
    token_means,
    token_scores,
)
from theory.problems import RegressionTask, as_real
from theory.results import DomainError, FloatArray

ActivationName = Literal["exp", "1+tanh", "1+Cx", "(1+Cx)^2", "x/L"]
# Arrays of one dtype, float32 or float64.
AnyFloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class HeadActivation:
    """How heads turn scores into weights: f(a) / Σ f(a), or a / L for linear attention.

    name: exp (softmax), 1+tanh, 1+Cx, (1+Cx)^2, or x/L, which divides by the training length L whatever the length of
    the context; scale: C, where the name has one. Source: multihead (2.2), (5.1), section 5.2. Raises DomainError
    for other names and for C outside (0, 1e3].
    """

    name: ActivationName = "exp"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(ActivationName):
            raise DomainError(f"activation must be one of {', '.join(get_args(ActivationName))}, got {self.name!r}")
        object.__setattr__(self, "scale", as_real("activation scale", self.scale, 0, 1e3, open_low=True))
        if "C" not in self.name and self.scale != 1:
            raise DomainError(f"activation scale must be 1 for {self.name}, which has none, got {self.scale!r}")

    @property
    def normalised(self) -> bool:
        """Whether weights sum to one."""
        return self.name != "x/L"

    @property
    def slope(self) -> float:
        """First Taylor coefficient C_f of f(x)/f(0), 1 for x/L. Source: multihead section 5.2."""
        return {"1+Cx": self.scale, "(1+Cx)^2": 2 * self.scale}.get(self.name, 1.0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Mean loss over a batch and its gradients in the two parameters of the heads, in their order; float64."""

    loss: float
    first: FloatArray
    second: FloatArray


def activate(activation: HeadActivation, scores: AnyFloatArray) -> tuple[AnyFloatArray, AnyFloatArray]:
    """Activation f and its slope f' at the scores, shape (heads, tokens, contexts).

    For exp the largest score is subtracted first. ``scores`` may be overwritten. Source: multihead section 5.2.
    """
    C = scores.dtype.type(activation.scale)
    match activation.name:
        case "exp":
            subtract_largest(scores)
            f = np.exp(scores, out=scores)
            return f, f
        case "1+tanh":
            f = np.tanh(scores)
            slope = 1 - f * f
            f += 1
            return f, slope
        case "1+Cx":
            return 1 + C * scores, np.full_like(scores, C)
        case "(1+Cx)^2":
            root = 1 + C * scores
            return root * root, 2 * C * root
        case "x/L":
            return scores, np.ones_like(scores)


def scalar_step(
    reads: AnyFloatArray,
    omega: AnyFloatArray,
    mu: AnyFloatArray,
    activation: HeadActivation,
    training_context: int,
    losses_and_slopes: Any,
) -> StepResult:
    """One member of heads (omega_h, mu_h), shape (h,) each, on a batch of scores x_l . x_q, shape (tokens, n).

    losses_and_slopes: (weights, losses, slopes) -> None, fills losses (n,) and slopes (tokens, n) from the label
    weights; see `teacher_averaged` and `sampled`. Source: multihead (3.2).
    """
    tokens, contexts = reads.shape
    scores = np.empty((omega.size, tokens, contexts), reads.dtype)
    scalar_scores(reads, omega, scores)
    f, derivative = activate(activation, scores)
    inverse = np.full((omega.size, contexts), 1 / training_context, reads.dtype)
    inverse_normalisers(f, activation.normalised, inverse)
    weights, slopes, losses = np.empty_like(reads), np.empty_like(reads), np.empty(contexts, reads.dtype)
    label_weights(f, inverse, mu, weights)
    losses_and_slopes(weights, losses, slopes)
    omega_gradient, mu_gradient = np.empty(omega.size), np.empty(omega.size)
    scalar_gradient(reads, f, derivative, inverse, activation.normalised, slopes, mu, omega_gradient, mu_gradient)
    return StepResult(float(losses.mean(dtype=np.float64)), omega_gradient / contexts, mu_gradient / contexts)


def teacher_averaged(task: RegressionTask, length: AnyFloatArray, projections: AnyFloatArray) -> Any:
    """The teacher-averaged loss for `scalar_step`; length (n,), projections (tokens, n). Source: multihead (2.5)."""
    return lambda weights, losses, slopes: teacher_averaged_slopes(
        projections, length, weights, task.dim, task.noise, losses, slopes
    )


def sampled(labels: AnyFloatArray, target: AnyFloatArray) -> Any:
    """The loss at drawn labels (tokens, n) and target (n,) for `scalar_step`. Source: multihead (2.5)."""
    return lambda weights, losses, slopes: sampled_slopes(labels, target, weights, losses, slopes)


def circuit_step(
    embedding: AnyFloatArray,
    query: AnyFloatArray,
    target: AnyFloatArray,
    key_query: AnyFloatArray,
    value: AnyFloatArray,
    activation: HeadActivation,
    training_context: int,
) -> StepResult:
    """One member of heads with circuits KQ (h, width, dim) and OV (h, outputs, width) on a batch of whole contexts.

    embedding (tokens, width, n); query (dim, n); target (outputs, n). The loss is summed over outputs and averaged
    over contexts. Source: multihead (2.3), (2.5).
    """
    tokens, width, contexts = embedding.shape
    heads = len(key_query)
    reads = np.empty((heads, width, contexts), embedding.dtype)
    query_reads(key_query, query, reads)
    scores = np.empty((heads, tokens, contexts), embedding.dtype)
    token_scores(embedding, reads, scores)
    f, derivative = activate(activation, scores)
    inverse = np.full((heads, contexts), 1 / training_context, embedding.dtype)
    inverse_normalisers(f, activation.normalised, inverse)
    means, errors = np.empty_like(reads), np.empty_like(target)
    losses, slopes = np.empty(contexts, embedding.dtype), np.empty_like(reads[0])
    token_means(embedding, f, inverse, means)
    error_slopes(target, means, value, losses, errors)
    key_query_gradient, value_gradient = np.empty(key_query.shape), np.empty(value.shape)
    for head in range(heads):
        summed_products(errors, means[head], value_gradient[head])
        read_slopes(
            embedding,
            derivative[head],
            inverse[head],
            activation.normalised,
            means[head],
            value[head],
            errors,
            slopes,
        )
        summed_products(slopes, query, key_query_gradient[head])
    return StepResult(float(losses.mean(dtype=np.float64)), key_query_gradient / contexts, value_gradient / contexts)
