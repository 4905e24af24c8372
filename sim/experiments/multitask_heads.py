"""Heads that serve several tasks: diagonal key-query matrices ω_h and one output weight μ_hn per task.

What a layer (2.2) is reduced to where its circuits are diagonal and each task is answered from its own labels alone.
Arrays of a batch have members on the first axis and contexts on the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sim.experiments.base import Arrays, Experiment, Loss, Together, register
from sim.experiments.multihead import MAX_HEADS, MAX_WEIGHT
from sim.montecarlo.multihead_training import ActivationName, HeadActivation
from sim.regression_contexts import float32_normals, sample_regression, signal_masks, teacher_variance_of
from theory.problems import MultiTaskRegression, as_integer, as_real
from theory.results import DomainError, FloatArray

if TYPE_CHECKING:
    from torch import Tensor, nn

# Rough microseconds per entry of a token: of its draw, and of reading it by one head.
DRAW_WORK, HEAD_WORK = 0.001, 0.0008


@register
@dataclass(frozen=True, slots=True)
class MultiTaskHeads(Experiment):
    r"""Heads :math:`\hat y_n = \sum_h\mu_{hn}\langle y_n, \mathrm{smax}(X\,\mathrm{diag}(\omega_h)x_q)\rangle`.

    problem: several tasks; heads: 1 to 64; activation, activation_scale: see `HeadActivation`; teacher_variance: τ² of
    each coordinate of β, 1/d where ``None``; initial_scale: standard deviation of the initial ω_hi and μ_hn;
    shared_contexts: all members read the contexts of the first. Scores do not depend on labels, so that the loss can
    be averaged over the teacher and all noise. Measured: loss, summed over tasks, against noisy labels, and loss_1,
    loss_2, ... of each task. Source: multihead (3.2) with vector labels, section 5.4.
    """

    problem: MultiTaskRegression
    heads: int = 4
    activation: ActivationName = "exp"
    activation_scale: float = 1.0
    teacher_variance: float | None = None
    initial_scale: float = 0.1
    shared_contexts: bool = False
    kind: ClassVar[str] = "multi-task heads"
    together: ClassVar[Together] = "faster"

    def __post_init__(self) -> None:
        fix = object.__setattr__
        if not isinstance(self.problem, MultiTaskRegression):
            raise DomainError(f"problem must be a MultiTaskRegression, got {type(self.problem).__name__}")
        fix(self, "heads", as_integer("heads", self.heads, 1, MAX_HEADS))
        fix(self, "activation_scale", HeadActivation(self.activation, self.activation_scale).scale)
        if self.teacher_variance is not None:
            fix(self, "teacher_variance", teacher_variance_of(self.problem, self.teacher_variance))
        fix(self, "initial_scale", as_real("initial_scale", self.initial_scale, 0, MAX_WEIGHT))
        if not isinstance(self.shared_contexts, bool):
            raise DomainError(f"shared_contexts must be true or false, got {self.shared_contexts!r}")

    @property
    def head_activation(self) -> HeadActivation:
        """Activation with its scale."""
        return HeadActivation(self.activation, self.activation_scale)

    @property
    def variance(self) -> float:
        """Variance τ² of each coordinate of the teacher."""
        return teacher_variance_of(self.problem, self.teacher_variance)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """Normal ω and μ of standard deviation ``initial_scale``."""
        from sim.models.multitask_heads import DiagonalHeads

        d = self.problem.dim
        shape = (self.heads, d + len(self.problem.signal_sets))
        drawn = np.array([self.initial_scale * generator.standard_normal(shape) for generator in generators])
        return DiagonalHeads(drawn[..., :d], drawn[..., d:])

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """Tokens (members, L, d, n), queries (members, d, n).

        With sampled loss labels (members, tasks, L, n) and targets (members, tasks, n) too.
        """
        sources, d, L = generators[:1] if self.shared_contexts else generators, self.problem.dim, self.problem.context
        if loss == "sampled":
            drawn = sample_regression(self.problem, count, sources, teacher_variance=self.teacher_variance)
            labels = np.swapaxes(drawn.embedding[:, :, d:], 1, 2)
            return drawn.embedding[:, :, :d], drawn.query, labels, drawn.target  # type: ignore[return-value]
        block = np.empty((len(sources), L + 1, d, count), np.float32)
        for generator, tokens in zip(sources, block, strict=True):
            float32_normals(generator, tokens)
        return block[:, :L], block[:, L]  # type: ignore[return-value]

    def loss(self, model: Any, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean loss of each member, summed over tasks, shape (members,). Source: multihead (2.5)."""
        from sim.models.multitask_heads import diagonal_losses

        return diagonal_losses(model.omega, model.mu, batch, *self._setting())

    def _setting(self) -> tuple[FloatArray, float, float, HeadActivation, int]:
        problem = self.problem
        return signal_masks(problem), self.variance, problem.noise, self.head_activation, problem.context

    def shape(self) -> Hashable:
        """Heads, coordinates, tasks, and tokens that are read."""
        return self.heads, self.problem.dim, len(self.problem.signal_sets), self.problem.context

    def drawn_from(self) -> Hashable:
        """The problem with the variance of its teacher, and whether members share its contexts."""
        return self.problem, self.teacher_variance, self.shared_contexts

    @classmethod
    def losses_together(cls, model: Any, parts: Sequence[tuple[Any, int, tuple[Tensor, ...]]], loss: Loss) -> Tensor:
        """Losses of several settings, kernel by kernel: the bits of `loss`, with one pass backwards."""
        from sim.models.multihead_attention import kernel_losses
        from sim.models.multitask_heads import diagonal_kernel

        steps = [(members, diagonal_kernel(batch, *one._setting())) for one, members, batch in parts]
        return kernel_losses(steps, model.omega, model.mu)

    def work(self) -> float:
        """Drawing a context and reading it, by every head."""
        return self.problem.context * self.problem.dim * (DRAW_WORK + HEAD_WORK * self.heads)

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean loss of predicting 0."""
        if loss == "sampled":
            return batch[3].square().sum(dim=1).mean(dim=-1)
        used = batch[1].new_tensor(signal_masks(self.problem).sum(axis=0))
        signal = self.variance * (used[:, None] * batch[1].square()).sum(dim=1)
        return signal.mean(dim=-1) + len(self.problem.signal_sets) * self.problem.noise

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Loss of each context, averaged over teacher and noise, shape (members, n); any number of tokens."""
        from sim.models.multitask_heads import diagonal_label_weights, task_averaged_losses

        tokens, query = batch
        weights = diagonal_label_weights(model.omega, model.mu, tokens, query, self.head_activation,
                                         self.problem.context)  # fmt: skip
        masks = tokens.new_tensor(signal_masks(self.problem))
        losses = task_averaged_losses(masks, self.variance, self.problem.noise, weights, tokens, query)
        parts = {f"loss_{number}": losses[:, number - 1] for number in range(1, losses.shape[1] + 1)}
        return {"loss": losses.sum(dim=1)} | parts
