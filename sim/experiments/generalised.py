"""The generalised softmax models on both tasks: layer values, context updates, inputs and labels in one stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sim.experiments.base import Arrays, Experiment, Loss, register
from sim.experiments.label_weights import (
    GAIN_RATE,
    LabelWeights,
    attention_work,
    decomposed,
    dim_of,
    fix_softmax_fields,
    initial_key_query,
    label_unit,
    layer_scales,
)
from sim.experiments.measures import DIMENSIONLESS, attention_measures
from theory.problems import CopyTask, TopKTask, as_real
from theory.results import DomainError, FloatArray

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_UPDATE = 1e3
# Rough microseconds per pair of tokens and layer.
PAIR_WORK = 0.003


@register
@dataclass(frozen=True, slots=True)
class LayerValueSoftmax(LabelWeights):
    """Softmax attention whose layers have values, and so gains, of their own.

    problem: a `TopKTask`, or a `CopyTask` with finitely many tokens; depth L >= 1; initial_scales, initial_noise: as in
    `SoftmaxAttention`; gains start at 1. Source: depth (71)-(74). Raises DomainError outside ranges.
    """

    problem: TopKTask | CopyTask
    depth: int
    initial_scales: tuple[float, float] = (1.0, 50.0)
    initial_noise: float = 1.0
    kind: ClassVar[str] = "layer-value softmax"

    def __post_init__(self) -> None:
        fix_softmax_fields(self)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """The fast form with layers of several sharpnesses and gains 1."""
        from sim.models.generalised_attention import LayerValueEnsemble

        key_query = initial_key_query(self, generators)
        return LayerValueEnsemble(key_query, np.ones(key_query.shape[:2]))

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """The matrices at the full rate and the gains at a tenth."""
        return [{"params": [model.key_query], "factor": 1.0}, {"params": [model.gains], "factor": GAIN_RATE}]


@register
@dataclass(frozen=True, slots=True)
class UpdatingSoftmax(LabelWeights):
    r"""Softmax attention whose context labels are updated between layers by a trained scalar m.

    problem, depth, initial_scales, initial_noise: as in `LayerValueSoftmax`; initial_update: initial m, by default that
    of linear attention, as from zero the update can stay out of use for hundreds of steps. Measured in addition, both
    free of units: identity_weight, the weight ρ of the identity in the first layer's context attention, and
    identity_r_squared, the share of the variance of its entries that :math:`\rho I + (1-\rho)J` explains, of each
    context. m itself is the parameter ``update``. Source: depth (77)-(84). Raises DomainError outside ranges.
    """

    problem: TopKTask | CopyTask
    depth: int
    initial_scales: tuple[float, float] = (1.0, 50.0)
    initial_noise: float = 1.0
    initial_update: float = -1.0
    kind: ClassVar[str] = "updating softmax"
    dimensionless: ClassVar[frozenset[str]] = DIMENSIONLESS | {"identity_weight", "identity_r_squared"}

    def __post_init__(self) -> None:
        fix_softmax_fields(self)
        update = as_real("initial_update", self.initial_update, -MAX_UPDATE, MAX_UPDATE)
        object.__setattr__(self, "initial_update", update)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """The fast form with layers of several sharpnesses, gain 1 and the initial m."""
        from sim.models.generalised_attention import UpdatedEnsemble

        ones = np.ones(len(generators))
        return UpdatedEnsemble(initial_key_query(self, generators), ones, self.initial_update * ones)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """The matrices at the full rate, gain and update at a tenth."""
        return [
            {"params": [model.key_query], "factor": 1.0},
            {"params": [model.gain, model.update], "factor": GAIN_RATE},
        ]

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """As for the other models, and the fit of the first context attention. Source: depth (82)-(84), (90)."""
        measured = LabelWeights.measure(self, model, batch)
        return measured | identity_measures(model.context_attention(0, batch[0]))

    def work(self) -> float:
        """As without updates, and attention of every token on every other in all layers but the last."""
        assert self.problem.context is not None
        return LabelWeights.work(self) + PAIR_WORK * (self.depth - 1) * self.problem.context**2

    def _layer_errors(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        directions, query_direction, target, factors = batch
        readings: Tensor = model.readings(directions, query_direction, factors)
        return readings - target[:, :, None] @ factors


@register
@dataclass(frozen=True, slots=True)
class SingleStreamSoftmax(Experiment):
    """Softmax attention with inputs and labels in one stream; tokens and labels have unit mean square entries.

    problem, depth, initial_scales: as in `LayerValueSoftmax`, scales being those of x . Q q at typical lengths, so that
    the maps start at s_ℓ / dim; initial_noise: standard deviation of the entries of all maps, times dim; the readout
    starts at what was read of the labels. The prediction is not linear in the labels, so that the loss is sampled.
    Source: depth (64)-(70). Raises DomainError outside ranges.
    """

    problem: TopKTask | CopyTask
    depth: int
    initial_scales: tuple[float, float] = (1.0, 50.0)
    initial_noise: float = 1.0
    kind: ClassVar[str] = "single-stream softmax"
    losses: ClassVar[tuple[Loss, ...]] = ("sampled",)
    dimensionless: ClassVar[frozenset[str]] = DIMENSIONLESS

    def __post_init__(self) -> None:
        fix_softmax_fields(self)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """The fast form that starts near the two-stream model."""
        from sim.models.generalised_attention import SingleStream

        dim = dim_of(self.problem)
        maps = [self._initial_maps(generator) for generator in generators]
        query_maps, state_maps = (np.stack(values) for values in zip(*maps, strict=True))
        readout = np.zeros((len(generators), dim + 1))
        readout[:, dim] = 1
        return SingleStream(query_maps, state_maps, np.zeros((len(generators), dim)), readout)

    def _initial_maps(self, generator: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        dim = dim_of(self.problem)
        noise = self.initial_noise / dim
        query_maps = noise * generator.standard_normal((self.depth, dim + 1, dim))
        query_maps[:, :dim] += layer_scales(self)[:, None, None] / dim * np.eye(dim)
        return query_maps, noise * generator.standard_normal((self.depth, dim + 1, dim + 1))

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """Tokens with their labels, queries, target rows and target labels, as the network sees them."""
        rows = [self._sample_one(generator, count) for generator in generators]
        return tuple(np.stack(arrays) for arrays in zip(*rows, strict=True))

    def _sample_one(self, generator: np.random.Generator, count: int) -> Arrays:
        import torch

        from sim.models.context_batches import draw_contexts

        contexts = draw_contexts(self.problem, count, generator)
        variances = self.problem.spectrum.input_variances()
        length = math.sqrt(float(variances.mean() / variances.max()))
        tokens, query = (contexts.rotated(value) / length for value in (contexts.tokens, contexts.query))
        known = contexts.labels()
        goal = (contexts.target * known).sum(dim=-1)
        seen = torch.cat([tokens, known[..., None]], dim=-1)
        return tuple(value.numpy() for value in (seen, query, contexts.target, goal))

    def loss(self, model: Any, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean squared error of the prediction."""
        tokens, query, _, goal = batch
        errors: Tensor = model(tokens, query) - goal
        return errors.square().mean(dim=-1)

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean squared target of the batch."""
        return batch[3].square().mean(dim=-1)

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """R, C, A - C by increments of the readout, attention mass, selection error. Source: depth (67)-(70), (90)."""
        from sim.models.generalised_attention import layer_increments

        tokens, query, target, goal = batch
        rows, states = model.readings(tokens, query)
        layers = layer_increments(model.readouts_of(states, query))
        measured = decomposed((layers - goal[..., None])[..., None])
        return measured | attention_measures(rows, target)

    def unit(self) -> float:
        """Mean square of a label."""
        return label_unit(self.problem) ** 2

    def work(self) -> float:
        """Drawing tokens and reading them, by every layer."""
        return attention_work(self.problem, self.depth)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """Maps at the rate over dim, as their entries are that much smaller; readouts at a tenth."""
        return [
            {"params": [model.query_maps, model.state_maps], "factor": 1 / dim_of(self.problem)},
            {"params": [model.query_readout, model.state_readout], "factor": GAIN_RATE},
        ]


def identity_measures(attention: Tensor) -> dict[str, Tensor]:
    r"""Fit of :math:`\rho I + (1-\rho)J` to attention matrices A whose rows have the sum 1, of each context.

    .. math:: \rho = \frac{\operatorname{tr}A - 1}{P - 1}, \qquad R^2 = \frac{\rho^2 (P-1)}{\|A\|_F^2 - 1}

    attention: shape (..., P, P), P >= 2. Returns shape (...) each. Source: depth (83), (84). Raises DomainError where
    all entries are equal, for then R² does not exist.
    """
    tokens = attention.shape[-1]
    weight = (attention.diagonal(dim1=-2, dim2=-1).sum(dim=-1) - 1) / (tokens - 1)
    variation = attention.square().sum(dim=(-1, -2)) - 1
    if not bool((variation > 0).all()):
        raise DomainError(
            "context attention must not be uniform: the share that the identity explains does not exist"
        )
    return {"identity_weight": weight, "identity_r_squared": weight.square() * (tokens - 1) / variation}
