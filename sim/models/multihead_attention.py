"""Multi-head attention on in-context regression: matrix by matrix, as circuits, and as heads (ω, μ).

`MultiHeadAttention` holds O, V, K, Q of every head of every member of an ensemble. Its ``forward`` is (2.2) as
printed, on whole sequences with the strict causal mask; its ``circuits`` compose K^T Q and O V, from which
`circuit_predictions` reads the test column alone, (2.3). `ScalarHeads` is the model (3.2) that trained heads settle to.
Fast forms keep contexts on the last axis, members on the first. Losses run through Numba kernels on the CPU and through
torch elsewhere; both are the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.montecarlo.multihead_training import (
    HeadActivation,
    StepResult,
    circuit_step,
    sampled,
    scalar_step,
    teacher_averaged,
)
from theory.problems import RegressionTask
from theory.results import MissingDependencyError

try:
    import torch
    from torch import Tensor, nn
    from torch.autograd.function import once_differentiable
except ImportError as error:
    raise MissingDependencyError("sim.models needs torch: pip install 'attnlaws[train]'") from error


# Loss and gradients of one member, from its number and its two parameters.
MemberStep = Callable[[int, Any, Any], StepResult]


class ScalarHeads(nn.Module):
    """Heads with scalar circuits: ``omega`` and ``mu``, shape (members, heads) each. Source: multihead (3.2)."""

    def __init__(self, omega: npt.ArrayLike, mu: npt.ArrayLike) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(np.asarray(omega, dtype=np.float64)))
        self.mu = nn.Parameter(torch.tensor(np.asarray(mu, dtype=np.float64)))


class MultiHeadAttention(nn.Module):
    """One layer of multi-head attention, (2.2), for an ensemble.

    output_maps, value_maps, key_maps, query_maps: O, V, K, Q, each of shape (members, heads, D, D) with D = dim +
    outputs. Source: multihead (2.2); (5.1) for the activation x/L; section 5.4 for several outputs.
    """

    def __init__(
        self,
        output_maps: npt.ArrayLike,
        value_maps: npt.ArrayLike,
        key_maps: npt.ArrayLike,
        query_maps: npt.ArrayLike,
    ) -> None:
        super().__init__()
        self.output_maps, self.value_maps, self.key_maps, self.query_maps = (
            nn.Parameter(torch.tensor(np.asarray(maps, dtype=np.float64)))
            for maps in (output_maps, value_maps, key_maps, query_maps)
        )

    def forward(
        self,
        sequence: Tensor,
        activation: HeadActivation = HeadActivation(),  # noqa: B008 - frozen
        logit_scale: float = 1.0,
        training_context: int = 1,
    ) -> Tensor:
        """The whole output sequence, shape (members, n, D, T), from Z of the same shape.

        With a normalised activation under the strict causal mask; linear attention, without one. logit_scale: factor on
        the scores; training_context: L, the normaliser of linear attention. Source: multihead (2.2), (5.1).
        """
        Z = sequence[:, :, None]
        scores = logit_scale * (self.key_maps[:, None] @ Z).transpose(-1, -2) @ (self.query_maps[:, None] @ Z)
        weights = causal_weights(activation, scores) if activation.normalised else scores / training_context
        return sequence + (self.output_maps[:, None] @ self.value_maps[:, None] @ Z @ weights).sum(dim=2)

    def circuits(self, dim: int) -> tuple[Tensor, Tensor]:
        """What the prediction depends on: first ``dim`` columns of K^T Q, and rows of O V below the first ``dim``.

        Shapes (members, heads, D, dim) and (members, heads, outputs, D). Differentiable. Source: multihead (2.4).
        """
        key_query = self.key_maps.transpose(-1, -2) @ self.query_maps[..., :dim]
        return key_query, self.output_maps[..., dim:, :] @ self.value_maps


def initial_maps(generators: Sequence[np.random.Generator], heads: int, width: int) -> npt.NDArray[np.float64]:
    r"""O, V, K, Q as PyTorch starts a linear layer without bias, shape (4, members, heads, width, width).

    Entries are uniform on :math:`\pm 1/\sqrt{width}`. One generator per member. Source: multihead section 3.
    """
    bound = 1 / math.sqrt(width)
    drawn = [generator.uniform(-bound, bound, (4, heads, width, width)) for generator in generators]
    return np.stack(drawn, axis=1)


def causal_weights(activation: HeadActivation, scores: Tensor) -> Tensor:
    """Normalised f over the columns' strict past: entry (i, j) is 0 for i >= j; scores: shape (..., T, T).

    Column 0 sees nothing: its weights are 0 and so are its gradients, where a softmax over nothing would give NaN.
    Source: multihead (2.2), the mask below it.
    """
    tokens = scores.shape[-1]
    past = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device), diagonal=1)
    if activation.name == "exp":
        largest = scores.masked_fill(~past, -math.inf).amax(dim=-2, keepdim=True).nan_to_num(neginf=0.0).detach()
        scores = (scores - largest).masked_fill(~past, 0.0)
    f = _activated(activation, scores).masked_fill(~past, 0.0)
    total = f.sum(dim=-2, keepdim=True)
    empty = ~past.any(dim=-2, keepdim=True)
    return f / total.masked_fill(empty, 1.0)


def _activated(activation: HeadActivation, scores: Tensor) -> Tensor:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "exp": torch.exp,
        "1+tanh": lambda a: 1 + torch.tanh(a),
        "1+Cx": lambda a: 1 + activation.scale * a,
        "(1+Cx)^2": lambda a: (1 + activation.scale * a).square(),
    }
    return functions[activation.name](scores)


def attention_rows(activation: HeadActivation, scores: Tensor, training_context: int) -> Tensor:
    """Weights of the tokens for the test column, shape (members, heads, tokens, n) as the scores.

    Source: multihead (2.3), (5.1), section 5.2.
    """
    if activation.name == "exp":
        return torch.softmax(scores, dim=-2)
    if not activation.normalised:
        return scores / training_context
    f = _activated(activation, scores)
    return f / f.sum(dim=-2, keepdim=True)


def scalar_label_weights(
    omega: Tensor, mu: Tensor, reads: Tensor, activation: HeadActivation, training_context: int
) -> Tensor:
    """Weights of the labels in the prediction of heads (ω, μ), shape (members, tokens, n).

    omega: scaled by the logits' factor, shape (members, heads), as mu; reads: x_l . x_q, shape (members or 1,
    tokens, n). Source: multihead (3.2).
    """
    rows = attention_rows(activation, omega[:, :, None, None] * reads[:, None], training_context)
    return (mu[:, :, None, None] * rows).sum(dim=1)


def teacher_averaged_losses(task: RegressionTask, weights: Tensor, length: Tensor, projections: Tensor) -> Tensor:
    r"""Squared error of label weights w averaged over teacher, noise and unseen directions, (members, n).

    .. math:: \frac{(r - z\cdot w)^2 + (d-1)|w|^2}{d} + \sigma^2(1 + |w|^2)

    weights, projections: shape (members or 1, tokens, n); length: r, shape (members or 1, n); isotropic tokens.
    Source: multihead (2.5).
    """
    along, square = (weights * projections).sum(dim=-2), weights.square().sum(dim=-2)
    d = task.dim
    return ((length - along).square() + (d - 1) * square) / d + task.noise * (1 + square)


def sampled_losses(weights: Tensor, labels: Tensor, target: Tensor) -> Tensor:
    """Squared errors (y_q - w . y)², (members, n), at labels (members or 1, tokens, n). Source: multihead (2.5)."""
    return (target - (weights * labels).sum(dim=-2)).square()


def circuit_predictions(
    key_query: Tensor,
    value: Tensor,
    embedding: Tensor,
    query: Tensor,
    activation: HeadActivation,
    training_context: int,
) -> Tensor:
    """Predictions, shape (members, outputs, n), from circuits: the test column of (2.2) alone.

    key_query: K^T Q, scaled by the logits' factor, shape (members, heads, D, dim); value: O V, shape (members,
    heads, outputs, D); embedding: columns z_l, shape (members or 1, tokens, D, n); query: x_q, shape (members or 1,
    dim, n). Source: multihead (2.3).
    """
    reads = torch.einsum("mhji,min->mhjn", key_query, query.expand(len(key_query), -1, -1))
    scores = (embedding[:, None] * reads[:, :, None]).sum(dim=-2)
    rows = attention_rows(activation, scores, training_context)
    means = (rows[:, :, :, None] * embedding[:, None]).sum(dim=2)
    return torch.einsum("mhoj,mhjn->mon", value, means)


def with_query_column(embedding: Tensor, query: Tensor) -> Tensor:
    """Columns of a whole sequence, (members, L + 1, D, n), from z_l (members, L, D, n) and x_q (members, dim, n).

    The query comes last, with 0 for its labels. Source: multihead (2.1).
    """
    blank = query.new_zeros((len(query), embedding.shape[2] - query.shape[1], query.shape[2]))
    return torch.cat([embedding, torch.cat([query, blank], dim=1)[:, None]], dim=1)


def embed(embedding: Tensor, query: Tensor) -> Tensor:
    """The sequence Z as (2.1) has it, shape (members, n, D, L + 1); arguments as in `with_query_column`.

    Source: multihead (2.1).
    """
    return with_query_column(embedding, query).permute(0, 3, 2, 1)


class _KernelLoss(torch.autograd.Function):
    """Mean losses of all members by a kernel, which returns the gradients of its two parameters along with them."""

    @staticmethod
    def forward(ctx: Any, step: MemberStep, first: Tensor, second: Tensor) -> Tensor:
        parameters = first.detach().numpy(), second.detach().numpy()
        results = [step(member, *pair) for member, pair in enumerate(zip(*parameters, strict=True))]
        ctx.save_for_backward(
            torch.tensor(np.array([result.first for result in results]), dtype=first.dtype),
            torch.tensor(np.array([result.second for result in results]), dtype=second.dtype),
        )
        return torch.tensor([result.loss for result in results], dtype=first.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor, Tensor]:
        first, second = ctx.saved_tensors
        (weight,) = outer
        return None, *(weight.reshape(-1, *[1] * (part.dim() - 1)) * part for part in (first, second))


def kernels_apply(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors: on the CPU, and not under torch.compile."""
    return all(tensor.device.type == "cpu" for tensor in tensors) and not torch.compiler.is_compiling()


def kernel_losses(parts: Sequence[tuple[int, MemberStep]], first: Tensor, second: Tensor) -> Tensor:
    """Mean losses of all members by the kernels, shape (members,).

    parts: of each setting its number of members and its kernel, which counts its own members from 0; first, second:
    the two parameters of all of them, one setting after the other. Source: no equation.
    """
    places = [(step, member) for count, step in parts for member in range(count)]

    def step(place: int, *parameters: Any) -> StepResult:
        own, member = places[place]
        return own(member, *parameters)

    result: Tensor = _KernelLoss.apply(step, first, second)  # type: ignore[no-untyped-call]
    return result


def scalar_losses(
    omega: Tensor,
    mu: Tensor,
    batch: tuple[Tensor, ...],
    task: RegressionTask,
    activation: HeadActivation,
    *,
    is_sampled: bool,
) -> Tensor:
    """Mean losses of heads (ω, μ), shape (members,).

    batch: r (members or 1, n), z (members or 1, tokens, n) and, where ``is_sampled``, labels of the shape of z and
    targets of that of r. Source: multihead (2.5), (3.2).
    """
    length, projections, *answers = batch
    if not kernels_apply(omega, projections):
        weights = scalar_label_weights(omega, mu, length[:, None] * projections, activation, task.context)
        if is_sampled:
            return sampled_losses(weights, *answers).mean(dim=-1)
        return teacher_averaged_losses(task, weights, length, projections).mean(dim=-1)
    return kernel_losses([(len(omega), scalar_kernel(batch, task, activation, is_sampled=is_sampled))], omega, mu)


def scalar_kernel(
    batch: tuple[Tensor, ...], task: RegressionTask, activation: HeadActivation, *, is_sampled: bool
) -> MemberStep:
    """The kernel of heads (ω, μ) on a batch on the CPU; arguments as in `scalar_losses`. Source: multihead (3.2)."""
    arrays = [tensor.numpy() for tensor in batch]
    read = arrays[0][:, None] * arrays[1]

    def step(member: int, omegas: Any, mus: Any) -> StepResult:
        at = member if len(read) > 1 else 0
        parts = [array[at] for array in arrays]
        losses = sampled(*parts[2:]) if is_sampled else teacher_averaged(task, *parts)
        return scalar_step(read[at], omegas, mus, activation, task.context, losses)

    return step


def circuit_losses(
    key_query: Tensor, value: Tensor, batch: tuple[Tensor, ...], activation: HeadActivation, training_context: int
) -> Tensor:
    """Mean losses of circuits, shape (members,), summed over outputs; parameters as in `circuit_predictions`.

    batch: embedding (members or 1, tokens, D, n), query (members or 1, dim, n), target (members or 1, outputs, n).
    Source: multihead (2.3), (2.5).
    """
    embedding, query, target = batch
    if not kernels_apply(key_query, embedding):
        predictions = circuit_predictions(key_query, value, embedding, query, activation, training_context)
        return (target - predictions).square().sum(dim=1).mean(dim=-1)
    step = circuit_kernel(batch, activation, training_context)
    return kernel_losses([(len(key_query), step)], key_query, value)


def circuit_kernel(batch: tuple[Tensor, ...], activation: HeadActivation, training_context: int) -> MemberStep:
    """The kernel of circuits on a batch on the CPU; arguments as in `circuit_losses`. Source: multihead (2.3)."""
    arrays = [tensor.numpy() for tensor in batch]

    def step(member: int, circuit: Any, output: Any) -> StepResult:
        at = member if len(arrays[0]) > 1 else 0
        columns, queries, targets = (array[at] for array in arrays)
        return circuit_step(columns, queries, targets, circuit, output, activation, training_context)

    return step
