r"""Linear attention on both tasks, at finite and infinite context.

The model sees a context only through the empirical covariance S, the query q and the target vector t, the mean of the
target tokens, so that these are drawn and not the tokens: :math:`\hat y - y^* = \beta\cdot(P_L(S) q - t)`. On the copy
task t = q, S comes from a Wishart matrix, and in the limit of infinitely many tokens S = Σ. Everything is drawn in the
eigenbasis, in units where the largest λ is 1 and labels have variance 1; the rotation turns S and q, never tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from sim.contexts import haar_rotations, sample_contexts, sample_teachers, visible_teacher_variances
from sim.experiments.base import Arrays, Experiment, Loss, register
from sim.experiments.label_weights import MAX_LAYERS, as_scales
from sim.experiments.measures import mode_losses
from theory.problems import CopyTask, TopKTask, as_integer, as_real
from theory.results import DomainError, FloatArray

if TYPE_CHECKING:
    from torch import Tensor, nn

Parametrisation = Literal["matrices", "scalars", "shared matrix", "shared scalar"]

# Numbers of tokens held at a time while covariances of the top-k task are formed.
TOKEN_NUMBERS = 2**22
# Rough microseconds per entry of a matrix of the context: of its draws, and of a layer.
ROTATION_WORK, COVARIANCE_WORK, PRODUCT_WORK = 0.03, 0.02, 0.001


@register
@dataclass(frozen=True, slots=True)
class LinearLayers(Experiment):
    r"""L layers of linear attention with the mask (75).

    problem: a `CopyTask` (context ``None`` is the limit of infinitely many tokens) or a `TopKTask`, of finite
    spectrum.dim; depth L >= 1; parametrisation: ``matrices`` B_ℓ, ``scalars`` B_ℓ = κ_ℓ I, or one of them shared by
    all layers; initial_steps: (low, high), layers start at :math:`B_\ell = s_\ell\,(L/\lambda_1)\,(I + noise)` with s_ℓ
    geometric from low to high; shared ones take the geometric mean; initial_noise: standard deviation of the entries of
    the noise times sqrt(dim), relative; of scalars, relative too. The gain starts at 1 and is trained.

    Where the loss is averaged over the teacher and the context is infinite, it is the population loss (29), averaged
    over the query as well: a batch then counts rotations, and scalars need none. ``key_query`` of the trained model is
    B_ℓ λ_1. Measured: loss and mode_loss_K. Source: depth (11), (19)-(30). Raises DomainError outside ranges.
    """

    problem: CopyTask | TopKTask
    depth: int
    parametrisation: Parametrisation = "matrices"
    initial_steps: tuple[float, float] = (0.1, 1.0)
    initial_noise: float = 0.0
    kind: ClassVar[str] = "linear attention"

    def __post_init__(self) -> None:
        fix = object.__setattr__
        if not isinstance(self.problem, CopyTask | TopKTask) or self.problem.spectrum.dim is None:
            raise DomainError(
                f"problem must be a CopyTask or a TopKTask of finite spectrum.dim, got {self.problem!r}"
            )
        fix(self, "depth", as_integer("depth", self.depth, 1, MAX_LAYERS))
        if self.parametrisation not in get_args(Parametrisation):
            allowed = ", ".join(get_args(Parametrisation))
            raise DomainError(f"parametrisation must be one of {allowed}, got {self.parametrisation!r}")
        fix(self, "initial_steps", as_scales("initial_steps", self.initial_steps))
        fix(self, "initial_noise", as_real("initial_noise", self.initial_noise, 0, 1e6))

    @property
    def scalar(self) -> bool:
        """Whether every B_ℓ is a multiple of the identity."""
        return self.parametrisation in ("scalars", "shared scalar")

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """The fast form with layers of the initial steps and gain 1."""
        from sim.models.linear_attention import LinearAttention

        key_query = np.stack([self._initial_key_query(generator) for generator in generators])
        return LinearAttention(key_query, np.ones(len(generators)), self.depth)

    def _initial_key_query(self, generator: np.random.Generator) -> FloatArray:
        layers = 1 if self.parametrisation.startswith("shared") else self.depth
        low, high = self.initial_steps
        scales = self.depth * low * (high / low) ** ((np.arange(layers) + 0.5) / layers)
        if self.scalar:
            return np.asarray(scales * (1 + self.initial_noise * generator.standard_normal(layers)))
        dim = len(self._variances())
        noise = self.initial_noise / np.sqrt(dim) * generator.standard_normal((layers, dim, dim))
        return np.asarray(scales[:, None, None] * (np.eye(dim) + noise))

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """Covariances S, queries q, targets t, rotations O and teachers β; of what is not needed, arrays of size 0."""
        rows = [self._sample_one(generator, count, loss) for generator in generators]
        return tuple(np.stack(arrays) for arrays in zip(*rows, strict=True))

    def _sample_one(self, generator: np.random.Generator, count: int, loss: Loss) -> Arrays:
        covariance = query = target = rotation = teacher = np.empty((count, 0))
        population = self.problem.context is None
        if not population or loss == "sampled":
            covariance, query, target = self._inputs(generator, count)
        if not self.scalar and not self.problem.spectrum.isotropic_input:
            rotation = haar_rotations(count, len(self._variances()), generator)
        if loss == "sampled":
            scale = self.unit() / self._largest()
            teacher = sample_teachers(self.problem, count, generator) / np.sqrt(scale)
        return covariance, query, target, rotation, teacher

    def _inputs(self, generator: np.random.Generator, count: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        if isinstance(self.problem, TopKTask):
            return top_k_statistics(self.problem, count, generator, self._largest())
        deviations = np.sqrt(self._variances())
        query = generator.standard_normal((count, len(deviations))) * deviations
        if self.problem.context is None:
            return np.empty((count, 0)), query, query
        others = wishart_matrices(count, len(deviations), self.problem.context - 1, generator)
        covariance = others * np.outer(deviations, deviations) + query[:, :, None] * query[:, None, :]
        return covariance / self.problem.context, query, query

    def loss(self, model: Any, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Squared error of the prediction at the drawn teachers, or averaged over the teacher."""
        if loss == "sampled":
            errors, teacher = self._errors(model, batch), batch[4]
            return (errors * teacher).sum(dim=-1).square().mean(dim=-1)
        return self._shares(model, batch).sum(dim=-1).mean(dim=-1)

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean squared target of the batch; 1 where the query is averaged over."""
        _, query, target, _, teacher = batch
        if query.shape[-1] == 0:
            return query.new_ones(len(query))
        if loss == "sampled":
            return (target * teacher).sum(dim=-1).square().mean(dim=-1)
        return (target.square() * self._teacher(target)).sum(dim=-1).mean(dim=-1)

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """R and the losses of single modes. Source: depth (26), (29), Figure 3(c)."""
        shares = self._shares(model, batch)
        return {"loss": shares.sum(dim=-1), **mode_losses(shares, self.problem)}

    def _errors(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Errors P_L(S) q - t of each context, shape (members, n, d)."""
        from sim.models.linear_attention import covariance_action, rotated_covariance, spectrum_action

        covariance, query, target, rotation, _ = batch
        known = covariance if covariance.ndim == 4 else self._tensor(query)
        if rotation.ndim == 4:
            action = covariance_action(rotated_covariance(known, rotation))
            read = model.polynomial(action, query[:, :, None] @ rotation.transpose(-1, -2)) @ rotation
        else:
            action = covariance_action(known) if known.ndim == 4 else spectrum_action(known)
            read = model.polynomial(action, query[:, :, None])
        errors: Tensor = read[:, :, 0] - target
        return errors

    def _shares(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Squared errors by mode of the teacher, averaged over the teacher, shape (members, n, d)."""
        from sim.models.linear_attention import population_errors, scalar_population_errors

        _, query, _, rotation, _ = batch
        teacher, variances = self._teacher(query), self._tensor(query)
        if query.shape[-1] > 0:
            return self._errors(model, batch).square() * teacher
        if self.scalar:
            squares = scalar_population_errors(model, variances).square()[:, None]
        else:
            errors = population_errors(model, variances, rotation if rotation.ndim == 4 else None)
            squares = errors.square().sum(dim=-2)
        shares: Tensor = (squares * teacher).expand(-1, query.shape[1], -1)
        return shares

    def _largest(self) -> float:
        return float(self.problem.spectrum.input_variances().max())

    def _variances(self) -> FloatArray:
        """Variances λ_k / λ_1 of the inputs in the units of the model."""
        return self.problem.spectrum.input_variances() / self._largest()

    def _tensor(self, like: Tensor) -> Tensor:
        import torch

        return torch.tensor(self._variances(), dtype=like.dtype, device=like.device)

    def _teacher(self, like: Tensor) -> Tensor:
        import torch

        teacher = visible_teacher_variances(self.problem) * (self._largest() / self.unit())
        return torch.tensor(teacher, dtype=like.dtype, device=like.device)

    def work(self) -> float:
        """Products of matrices, and the draws of covariances and rotations; little of either in closed form."""
        matrices, finite = not self.scalar, self.problem.context is not None
        if not matrices and not finite:
            return Experiment.work(self)
        parts = ROTATION_WORK * matrices + COVARIANCE_WORK * finite + PRODUCT_WORK * self.depth
        return parts * len(self._variances()) ** 2

    def unit(self) -> float:
        """Mean square of a label."""
        return float(self.problem.spectrum.label_variances().sum())

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """B_ℓ at L times the learning rate, which is then that of the steps s_ℓ at every depth, and the gain."""
        return [{"params": [model.key_query], "factor": float(self.depth)}, {"params": [model.gain], "factor": 1.0}]


def wishart_matrices(count: int, dim: int, degrees: int, generator: np.random.Generator) -> FloatArray:
    r"""Sums :math:`\sum_{i\le n} g_i g_i^\top` of n standard normal vectors, shape (count, dim, dim).

    degrees: n >= 0. From n = dim on by Bartlett's triangular factor, with dim (dim + 1)/2 draws instead of n dim.
    Source: depth (19), the law of P S for Σ = I.
    """
    if degrees < dim:
        vectors = generator.standard_normal((count, degrees, dim))
        return np.asarray(np.swapaxes(vectors, 1, 2) @ vectors)
    factor = np.zeros((count, dim, dim))
    rows, columns = np.tril_indices(dim, -1)
    factor[:, rows, columns] = generator.standard_normal((count, len(rows)))
    factor[:, range(dim), range(dim)] = np.sqrt(generator.chisquare(degrees - np.arange(dim), (count, dim)))
    return np.asarray(factor @ np.swapaxes(factor, 1, 2))


def top_k_statistics(
    task: TopKTask, count: int, generator: np.random.Generator, scale: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """S, q and t = mean of the target tokens for inputs divided by sqrt(scale); (count, d, d) and twice (count, d).

    Tokens are drawn for a few contexts at a time. Source: depth (6), (19).
    """
    dim = len(task.spectrum.input_variances())
    group = max(1, TOKEN_NUMBERS // (task.context * dim))
    parts = []
    for first in range(0, count, group):
        contexts = sample_contexts(task, min(group, count - first), generator, rotate=False)
        covariance = np.swapaxes(contexts.tokens, 1, 2) @ contexts.tokens / (task.context * scale)
        target = (contexts.target[:, None] @ contexts.tokens)[:, 0]
        parts.append((covariance, contexts.query / np.sqrt(scale), target / np.sqrt(scale)))
    covariances, queries, targets = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return covariances, queries, targets
