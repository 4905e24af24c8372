"""Multi-head attention on in-context regression: the layer (2.2), heads (ω, μ), and their losses at other lengths.

Arrays of a batch have members on the first axis and contexts on the last, where the kernels want them; the axes between
are tokens, then coordinates. With ``shared_contexts`` all members of an ensemble read the contexts of the first one:
their losses are then correlated, and a member is no longer the run of its own seed, but drawing costs the same for any
number of members.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from sim.contexts import SampleSize, estimate_from_chunks
from sim.experiments.base import Arrays, Experiment, Loss, Together, register
from sim.montecarlo.multihead_training import ActivationName, HeadActivation
from sim.regression_contexts import (
    posterior_predictive,
    sample_reduced_regression,
    sample_regression,
    signal_masks,
    teacher_variance_of,
)
from sim.streams import stream
from theory.problems import MultiTaskRegression, RegressionTask, as_integer, as_real
from theory.results import DomainError, Estimate

if TYPE_CHECKING:
    from torch import Tensor, nn

LogitScaling = Literal["none", "root width"]
MAX_HEADS = 64
MAX_WEIGHT = 1e6
# Rough microseconds per token: of its draws, for one entry of its column, and of reading it by one head.
DRAW_WORK, SCALAR_WORK, CIRCUIT_WORK = 0.005, 0.005, 0.0015


@register
@dataclass(frozen=True, slots=True)
class ReducedHeads(Experiment):
    """Heads (ω_h, μ_h) on isotropic tokens, trained as such: the model (3.2).

    problem: isotropic; heads: 1 to 64; activation, activation_scale: see `HeadActivation`; logit_scaling: ``root
    width`` divides scores by sqrt(d + 1), so that ω acts as ω/sqrt(d + 1); initial_scale: standard deviation of the
    initial ω_h and μ_h, unless initial_omega and initial_mu give them, one number per head; shared_contexts: see the
    module. Contexts are drawn reduced to the query's length and L normals, with the law of whole contexts.
    Measured: loss, against the noisy label. Source: multihead (3.2), (5.1), section 5.2.
    """

    problem: RegressionTask
    heads: int = 2
    activation: ActivationName = "exp"
    activation_scale: float = 1.0
    logit_scaling: LogitScaling = "none"
    initial_scale: float = 0.1
    initial_omega: tuple[float, ...] | None = None
    initial_mu: tuple[float, ...] | None = None
    shared_contexts: bool = False
    kind: ClassVar[str] = "reduced multi-head attention"
    together: ClassVar[Together] = "faster"

    def __post_init__(self) -> None:
        fix = object.__setattr__
        if not isinstance(self.problem, RegressionTask) or self.problem.covariance is not None:
            raise DomainError(f"problem must be a RegressionTask with isotropic tokens, got {self.problem!r}")
        _check_heads(self)
        fix(self, "initial_scale", as_real("initial_scale", self.initial_scale, 0, MAX_WEIGHT))
        fix(self, "initial_omega", _as_weights("initial_omega", self.initial_omega, self.heads))
        fix(self, "initial_mu", _as_weights("initial_mu", self.initial_mu, self.heads))

    @property
    def head_activation(self) -> HeadActivation:
        """Activation with its scale."""
        return HeadActivation(self.activation, self.activation_scale)

    @property
    def logit_scale(self) -> float:
        """Factor on the scores: 1, or 1/sqrt(d + 1)."""
        return _logit_scale(self.logit_scaling, self.problem.dim + 1)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """Normal ω and μ of standard deviation ``initial_scale``, or those given."""
        from sim.models.multihead_attention import ScalarHeads

        drawn = np.array(
            [self.initial_scale * generator.standard_normal((2, self.heads)) for generator in generators]
        )
        for row, given in enumerate((self.initial_omega, self.initial_mu)):
            if given is not None:
                drawn[:, row] = given
        return ScalarHeads(drawn[:, 0], drawn[:, 1])

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """Lengths (members, n), projections (members, L, n), and with sampled loss labels and targets alike."""
        sources = _sources(generators, self.shared_contexts)
        drawn = sample_reduced_regression(self.problem, count, sources, labels=loss == "sampled")
        if loss == "sampled":
            return drawn.length, drawn.projections, drawn.labels, drawn.target  # type: ignore[return-value]
        return drawn.length, drawn.projections  # type: ignore[return-value]

    def loss(self, model: Any, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean loss of each member, shape (members,). Source: multihead (2.5)."""
        from sim.models.multihead_attention import scalar_losses

        omega = self.logit_scale * model.omega
        return scalar_losses(omega, model.mu, batch, self.problem, self.head_activation, is_sampled=loss == "sampled")

    def shape(self) -> Hashable:
        """Heads, and tokens that are read."""
        return self.heads, self.problem.context

    def drawn_from(self) -> Hashable:
        """The problem, and whether members share its contexts."""
        return self.problem, self.shared_contexts

    @classmethod
    def losses_together(cls, model: Any, parts: Sequence[tuple[Any, int, tuple[Tensor, ...]]], loss: Loss) -> Tensor:
        """Losses of several settings by the kernels: the bits of `loss`, in one pass of automatic differentiation."""
        from sim.models.multihead_attention import kernel_losses, scalar_kernel

        steps = [
            (members, scalar_kernel(batch, one.problem, one.head_activation, is_sampled=loss == "sampled"))
            for one, members, batch in parts
        ]
        return kernel_losses(steps, _logit_scales(parts, model.omega) * model.omega, model.mu)

    def work(self) -> float:
        """Drawing a context and reading it, by every head."""
        return self.problem.context * (DRAW_WORK + SCALAR_WORK * self.heads)

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean loss of predicting 0."""
        if loss == "sampled":
            return batch[3].square().mean(dim=-1)
        return batch[0].square().mean(dim=-1) / self.problem.dim + self.problem.noise

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Loss of each context, averaged over teacher and noise, shape (members, n); any number of tokens."""
        from sim.models.multihead_attention import scalar_label_weights, teacher_averaged_losses

        length, projections = batch
        weights = scalar_label_weights(
            self.logit_scale * model.omega,
            model.mu,
            length[:, None] * projections,
            self.head_activation,
            self.problem.context,
        )
        return {"loss": teacher_averaged_losses(self.problem, weights, length, projections)}


@register
@dataclass(frozen=True, slots=True)
class MultiHead(Experiment):
    """The layer (2.2) with O, V, K, Q of every head, from PyTorch's default start.

    problem: one or several regressions, any covariance, noise > 0; heads: 1 to 64; activation: with x/L the linear
    attention (5.1), which also reads the query's own column; logit_scaling: ``root width`` divides scores by
    sqrt(D), D = d + outputs; teacher_variance: of each coordinate of β, 1/d where ``None``; shared_contexts: see the
    module. The ``teacher_averaged`` loss takes the mean over teacher and query noise given the context, where the Bayes
    prediction replaces the label; scores may depend on labels, so that no more can be averaged. Measured: loss, summed
    over outputs, and with several outputs loss_1, loss_2, ... of each. Source: multihead (2.2)-(2.5), (5.1), 5.2-5.4.
    """

    problem: RegressionTask | MultiTaskRegression
    heads: int = 2
    activation: ActivationName = "exp"
    activation_scale: float = 1.0
    logit_scaling: LogitScaling = "none"
    teacher_variance: float | None = None
    shared_contexts: bool = False
    kind: ClassVar[str] = "multi-head attention"
    together: ClassVar[Together] = "faster"

    def __post_init__(self) -> None:
        if not isinstance(self.problem, RegressionTask | MultiTaskRegression):
            raise DomainError(
                f"problem must be a RegressionTask or a MultiTaskRegression, got {type(self.problem).__name__}"
            )
        if self.problem.noise == 0:
            raise DomainError("problem.noise must be > 0, for the mean over the teacher given the context, got 0.0")
        _check_heads(self)
        if self.teacher_variance is not None:
            variance = teacher_variance_of(self.problem, self.teacher_variance)
            object.__setattr__(self, "teacher_variance", variance)

    @property
    def head_activation(self) -> HeadActivation:
        """Activation with its scale."""
        return HeadActivation(self.activation, self.activation_scale)

    @property
    def width(self) -> int:
        """Length D = dim + outputs of a column."""
        return self.problem.dim + len(signal_masks(self.problem))

    @property
    def logit_scale(self) -> float:
        """Factor on the scores: 1, or 1/sqrt(D)."""
        return _logit_scale(self.logit_scaling, self.width)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """Entries of O, V, K, Q uniform on ±1/sqrt(D)."""
        from sim.models.multihead_attention import MultiHeadAttention, initial_maps

        return MultiHeadAttention(*initial_maps(generators, self.heads, self.width))

    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """Columns (members, L, D, n), queries (members, d, n), targets (members, outputs, n).

        With teacher_averaged loss targets are Bayes predictions, and their errors' variances come fourth.
        """
        sources = _sources(generators, self.shared_contexts)
        contexts = sample_regression(self.problem, count, sources, teacher_variance=self.teacher_variance)
        if loss == "sampled":
            return contexts.embedding, contexts.query, contexts.target  # type: ignore[return-value]
        mean, variance = posterior_predictive(self.problem, contexts, teacher_variance=self.teacher_variance)
        return contexts.embedding, contexts.query, mean, variance  # type: ignore[return-value]

    def loss(self, model: Any, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean loss of each member, shape (members,). Source: multihead (2.5)."""
        from sim.models.multihead_attention import circuit_losses

        key_query, value = model.circuits(self.problem.dim)
        embedding, query, target, *variance = batch
        shown = (self._columns(embedding, query), query, target)
        losses = circuit_losses(
            self.logit_scale * key_query, value, shown, self.head_activation, self.problem.context
        )
        return losses + variance[0].sum(dim=1).mean(dim=-1) if variance else losses

    def shape(self) -> Hashable:
        """Heads, entries of a column, outputs among them, and tokens that are read."""
        return self.heads, self.width, self.problem.dim, self.problem.context

    def drawn_from(self) -> Hashable:
        """The problem with the variance of its teacher, and whether members share its contexts."""
        return self.problem, self.teacher_variance, self.shared_contexts

    @classmethod
    def losses_together(cls, model: Any, parts: Sequence[tuple[Any, int, tuple[Tensor, ...]]], loss: Loss) -> Tensor:
        """Losses of several settings by the kernels: the bits of `loss`, in one pass of automatic differentiation."""
        import torch

        from sim.models.multihead_attention import circuit_kernel, kernel_losses

        key_query, value = model.circuits(parts[0][0].problem.dim)
        steps, added = [], []
        for one, members, (embedding, query, target, *variance) in parts:
            shown = (one._columns(embedding, query), query, target)
            steps.append((members, circuit_kernel(shown, one.head_activation, one.problem.context)))
            added += [part.sum(dim=1).mean(dim=-1).expand(members) for part in variance]
        losses = kernel_losses(steps, _logit_scales(parts, key_query) * key_query, value)
        return losses + torch.cat(added) if added else losses

    def work(self) -> float:
        """Drawing a context and reading it, by every head."""
        return self.problem.context * self.width * (DRAW_WORK + CIRCUIT_WORK * self.heads)

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean loss of predicting 0."""
        mean = batch[2].square().sum(dim=1).mean(dim=-1)
        return mean + batch[3].sum(dim=1).mean(dim=-1) if loss == "teacher_averaged" else mean

    def measure(self, model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Loss of each context given what is shown, shape (members, n); any number of tokens."""
        from sim.models.multihead_attention import circuit_predictions

        embedding, query, target, variance = batch
        key_query, value = model.circuits(self.problem.dim)
        predictions = circuit_predictions(
            self.logit_scale * key_query,
            value,
            self._columns(embedding, query),
            query,
            self.head_activation,
            self.problem.context,
        )
        losses = (target - predictions).square() + variance
        measured = {"loss": losses.sum(dim=1)}
        if losses.shape[1] > 1:
            measured |= {f"loss_{number}": losses[:, number - 1] for number in range(1, losses.shape[1] + 1)}
        return measured

    def _columns(self, embedding: Tensor, query: Tensor) -> Tensor:
        """What the test column reads: the context, and in linear attention, which has no mask, itself."""
        from sim.models.multihead_attention import with_query_column

        return embedding if self.head_activation.normalised else with_query_column(embedding, query)


def _check_heads(experiment: ReducedHeads | MultiHead) -> None:
    fix = object.__setattr__
    fix(experiment, "heads", as_integer("heads", experiment.heads, 1, MAX_HEADS))
    checked = HeadActivation(experiment.activation, experiment.activation_scale)
    fix(experiment, "activation_scale", checked.scale)
    if experiment.logit_scaling not in get_args(LogitScaling):
        raise DomainError(
            f"logit_scaling must be one of {', '.join(get_args(LogitScaling))}, got {experiment.logit_scaling!r}"
        )
    if not isinstance(experiment.shared_contexts, bool):
        raise DomainError(f"shared_contexts must be true or false, got {experiment.shared_contexts!r}")


def _as_weights(name: str, values: object, heads: int) -> tuple[float, ...] | None:
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != heads:
        raise DomainError(f"{name} must hold one number for each of {heads} heads, got {values!r}")
    return tuple(as_real(f"{name}[{head}]", value, -MAX_WEIGHT, MAX_WEIGHT) for head, value in enumerate(values))


def _logit_scale(scaling: LogitScaling, width: int) -> float:
    return 1.0 if scaling == "none" else 1 / math.sqrt(width)


def _logit_scales(parts: Sequence[tuple[Any, int, Any]], like: Tensor) -> Tensor:
    """Factor on the scores of every member, to be multiplied with ``like``, whose first axis counts them."""
    scales = [one.logit_scale for one, members, _ in parts for _ in range(members)]
    return like.new_tensor(scales).reshape(-1, *[1] * (like.dim() - 1))


def _sources(generators: Sequence[np.random.Generator], shared: bool) -> Sequence[np.random.Generator]:
    return generators[:1] if shared else generators


def losses_by_length(
    experiment: ReducedHeads | MultiHead,
    model: nn.Module,
    lengths: Sequence[int],
    *,
    size: SampleSize,
    seed: int,
) -> list[list[Estimate]]:
    """Loss of each member at other numbers of tokens: a row per length, an `Estimate` per member.

    model: trained, as `Experiment.initial` makes it; it is measured in float64. All members read the same contexts, and
    every length has its own streams. Linear attention keeps the normaliser of the length it was trained at.
    Source: multihead section 5.1, Figures 4 and 8.
    """
    import copy

    import torch

    exact = copy.deepcopy(model).to(device="cpu", dtype=torch.float64)
    rows = []
    for length in lengths:
        problem: Any = dataclasses.replace(experiment.problem, context=length)
        other = dataclasses.replace(experiment, problem=problem)
        chunks = []
        for index in range(size.chunks):
            generator = stream(seed, f"loss at {length} tokens", index)
            means = [_mean_losses(experiment, other, exact, generator, size.batch) for _ in range(size.chunk_batches)]
            chunks.append(np.mean(means, axis=0))
        columns = np.array(chunks).T
        rows.append([estimate_from_chunks(column, size.contexts, seed) for column in columns])
    return rows


def _mean_losses(
    trained: ReducedHeads | MultiHead,
    tested: ReducedHeads | MultiHead,
    model: nn.Module,
    generator: np.random.Generator,
    count: int,
) -> Any:
    import torch

    arrays = tested.sample([generator], count, tested.losses[0])
    batch = tuple(torch.tensor(array, dtype=torch.float64) for array in arrays)
    with torch.no_grad():
        return trained.measure(model, batch)["loss"].mean(dim=-1).numpy()
