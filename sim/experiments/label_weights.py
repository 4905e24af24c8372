"""What experiments share whose prediction is a row of weights times the labels: fields, batches, losses, measures."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sim.experiments.base import Arrays, Experiment, Loss, Together
from sim.experiments.measures import DIMENSIONLESS, attention_measures, mode_losses
from theory.problems import CopyTask, TopKTask, as_integer, as_real
from theory.results import DomainError, FloatArray

if TYPE_CHECKING:
    from torch import Tensor

# Gains are of order 1 and the entries of the matrices of order 10, so Adam moves gains in smaller steps.
GAIN_RATE = 0.1
MAX_LAYERS = 2**14
# Rough microseconds per entry of a token: of its draws, and of a layer that reads it.
TOKEN_WORK, ROW_WORK = 0.015, 0.0005


class LabelWeights(Experiment):
    """What models share whose prediction is a row of weights times the labels: batches, losses and measures."""

    __slots__ = ()
    dimensionless: ClassVar[frozenset[str]] = DIMENSIONLESS
    # Drawing and products of matrices take all the time, and it is the same for a member whoever is beside it.
    together: ClassVar[Together] = "possible"
    problem: TopKTask | CopyTask
    depth: int

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """Directions of tokens and query as the network sees them, target rows, and label factors or labels."""
        rows = [self._sample_one(generator, count, loss) for generator in generators]
        return tuple(np.stack(arrays) for arrays in zip(*rows, strict=True))

    def _sample_one(self, generator: np.random.Generator, count: int, loss: Loss) -> Arrays:
        from sim.models.context_batches import draw_contexts

        contexts = draw_contexts(self.problem, count, generator)
        answers = contexts.label_factors() if loss == "teacher_averaged" else contexts.labels()
        seen, seen_query = (contexts.rotated(value) for value in (contexts.directions, contexts.query_direction))
        return tuple(value.numpy() for value in (seen, seen_query, contexts.target, answers))

    def loss(self, model: Any, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Squared error of the prediction, averaged over the batch and, where asked for, over the teacher."""
        directions, query_direction, target, answers = batch
        return _losses(model.label_weights(directions, query_direction), target, answers, loss).mean(dim=-1)

    def shape(self) -> Hashable:
        """Layers, modes and tokens."""
        return self.depth, dim_of(self.problem), self.problem.context

    def drawn_from(self) -> Hashable:
        """The problem."""
        return self.problem

    @classmethod
    def losses_together(cls, model: Any, parts: Sequence[tuple[Any, int, tuple[Tensor, ...]]], loss: Loss) -> Tensor:
        """Losses of several settings, which enter through their batches alone; equal to those apart to rounding."""
        import torch

        batch = tuple(torch.cat(arrays) for arrays in zip(*(batch for _, _, batch in parts), strict=True))
        own: Tensor = parts[0][0].loss(model, batch, loss)
        return own

    def work(self) -> float:
        """Drawing tokens and reading them, by every layer."""
        return attention_work(self.problem, self.depth)

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean squared target of the batch."""
        _, _, target, answers = batch
        return _losses(0 * target, target, answers, loss).mean(dim=-1)

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """R, C, A - C, losses of modes, attention mass and selection error. Source: depth (61)-(63), (73), (90)."""
        directions, query_direction, target, _ = batch
        errors = self._layer_errors(model, batch)
        measured = decomposed(errors)
        measured |= mode_losses(errors.mean(dim=-2).square(), self.problem)
        return measured | attention_measures(model.attention(directions, query_direction), target)

    def _layer_errors(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Errors e_ℓ = F^T (row_ℓ - t) of the layers' predictions, shape (members, n, L, d)."""
        directions, query_direction, target, factors = batch
        errors: Tensor = (model.layer_weights(directions, query_direction) - target[:, :, None]) @ factors
        return errors

    def unit(self) -> float:
        """Mean square of a label."""
        return label_unit(self.problem) ** 2


def _losses(weights: Tensor, target: Tensor, answers: Tensor, loss: Loss) -> Tensor:
    errors = teacher_averaged_losses if loss == "teacher_averaged" else sampled_losses
    return errors(weights, target, answers)


def decomposed(errors: Tensor) -> dict[str, Tensor]:
    """R and, from two layers on, C and A - C, from errors of the layers, shape (..., L, d). Source: depth (61)-(63)."""
    if errors.shape[-2] == 1:
        return {"loss": errors.square().sum(dim=(-1, -2))}
    names = ("loss", "shared_error", "disagreement")
    return dict(zip(names, layer_decomposition(errors), strict=True))


def teacher_averaged_losses(weights: Tensor, target: Tensor, factors: Tensor) -> Tensor:
    r"""Squared errors averaged over the teacher, :math:`|F^T (w - t)|^2`, shape (..., n).

    weights w, target t: shape (..., n, P); factors F: shape (..., n, P, d). Source: depth (12) and (3).
    """
    return ((weights - target)[..., None, :] @ factors).square().sum(dim=(-1, -2))


def sampled_losses(weights: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Squared errors ((w - t) y)² at drawn labels, shape (..., n); arguments (..., n, P). Source: depth (12)."""
    return ((weights - target) * labels).sum(dim=-1).square()


def layer_decomposition(errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss R, shared error C and disagreement A - C of each context, shape (..., n) each, for L >= 2 layers.

    errors: e_ℓ = F^T (g p_ℓ - t) in the metric of the labels, shape (..., n, L, d). C is the mean of e_ℓ . e_m over
    pairs, (L R - A)/(L - 1), and A - C the sample variance of the layers; R = C + (A - C)/L.
    Source: depth (61)-(63), (69).
    """
    depth = errors.shape[-2]
    mean = errors.mean(dim=-2, keepdim=True)
    loss = mean.square().sum(dim=(-1, -2))
    average = errors.square().sum(dim=-1).mean(dim=-1)
    shared = (depth * loss - average) / (depth - 1)
    disagreement = (errors - mean).square().sum(dim=(-1, -2)) / (depth - 1)
    return loss, shared, disagreement


def label_unit(task: TopKTask | CopyTask) -> float:
    """Root mean square of a label, sqrt(Σ λ_k ω_k), in which labels are trained so that float32 fits every scale.

    Source: depth (1), (3), the trace of ΣΩ.
    """
    return math.sqrt(float(task.spectrum.label_variances().sum()))


def attention_work(problem: TopKTask | CopyTask, depth: int) -> float:
    """Rough microseconds of a context in one step, see `Experiment.work`. Source: no equation."""
    assert problem.context is not None
    return problem.context * dim_of(problem) * (TOKEN_WORK + ROW_WORK * depth)


def dim_of(problem: TopKTask | CopyTask) -> int:
    """Number of modes d of a finite spectrum. Source: depth (2)."""
    return len(problem.spectrum.input_variances())


def fix_softmax_fields(experiment: Any) -> None:
    """Validation of the fields that softmax experiments share. Raises DomainError.

    Source: validation; no equation.
    """
    fix = object.__setattr__
    problem = experiment.problem
    if not isinstance(problem, TopKTask | CopyTask) or problem.context is None or problem.spectrum.dim is None:
        raise DomainError(
            f"problem must be a TopKTask, or a CopyTask with finite context and finite spectrum.dim, got {problem!r}"
        )
    fix(experiment, "depth", as_integer("depth", experiment.depth, 1, MAX_LAYERS))
    fix(experiment, "initial_scales", as_scales("initial_scales", experiment.initial_scales))
    fix(experiment, "initial_noise", as_real("initial_noise", experiment.initial_noise, 0, 1e6))


def as_scales(name: str, scales: object) -> tuple[float, float]:
    """``scales`` as a pair (low, high) with 0 < low <= high <= 1e6. Raises DomainError otherwise.

    Source: validation of the starting point; no equation.
    """
    if not isinstance(scales, Sequence) or isinstance(scales, str) or len(scales) != 2:
        raise DomainError(f"{name} must be a pair (low, high) with 0 < low <= high <= 1e6, got {scales!r}")
    low = as_real(f"{name}[0]", scales[0], 0, 1e6, open_low=True)
    return low, as_real(f"{name}[1]", scales[1], low, 1e6)


def layer_scales(experiment: Any) -> FloatArray:
    """Scales s_ℓ, geometric from low to high, shape (L,); one layer takes the geometric mean.

    Source: the starting point of training; no equation.
    """
    low, high = experiment.initial_scales
    scales: FloatArray = low * (high / low) ** ((np.arange(experiment.depth) + 0.5) / experiment.depth)
    return scales


def initial_key_query(experiment: Any, generators: Sequence[np.random.Generator]) -> FloatArray:
    """Initial B_ℓ = s_ℓ I + noise of every member, shape (members, L, d, d).

    Source: the starting point of training; no equation.
    """
    dim = dim_of(experiment.problem)
    noise = np.stack([generator.standard_normal((experiment.depth, dim, dim)) for generator in generators])
    matrices: FloatArray = layer_scales(experiment)[:, None, None] * np.eye(dim) + experiment.initial_noise * noise
    return matrices
