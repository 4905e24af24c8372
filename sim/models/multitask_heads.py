"""Heads with diagonal key-query matrices and one output weight per task, for an ensemble: the model of section 5.4.

Losses run through Numba kernels on the CPU and through torch elsewhere; both are the same function. Contexts are on
the last axis, members on the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim.models.multihead_attention import (
    MemberStep,
    attention_rows,
    kernel_losses,
    kernels_apply,
    sampled_losses,
)
from sim.montecarlo.multihead_training import HeadActivation, StepResult
from sim.montecarlo.multitask_training import diagonal_step, task_averaged, task_sampled
from theory.results import FloatArray, MissingDependencyError

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingDependencyError("sim.models needs torch: pip install 'attnlaws[train]'") from error


class DiagonalHeads(nn.Module):
    """``omega``, shape (members, heads, dim), and ``mu``, shape (members, heads, tasks). Source: multihead 5.4."""

    def __init__(self, omega: npt.ArrayLike, mu: npt.ArrayLike) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(np.asarray(omega, dtype=np.float64)))
        self.mu = nn.Parameter(torch.tensor(np.asarray(mu, dtype=np.float64)))


def diagonal_label_weights(
    omega: Tensor, mu: Tensor, tokens: Tensor, query: Tensor, activation: HeadActivation, training_context: int
) -> Tensor:
    """Weights of each task's labels in its prediction, shape (members, tasks, tokens, n).

    omega (members, heads, dim); mu (members, heads, tasks); tokens (members or 1, tokens, dim, n); query (members or
    1, dim, n). Source: multihead (3.2), section 5.4.
    """
    reads = omega[..., None] * query[:, None]
    scores = (tokens[:, None] * reads[:, :, None]).sum(dim=-2)
    rows = attention_rows(activation, scores, training_context)
    return torch.einsum("mht,mhln->mtln", mu, rows)


def task_averaged_losses(
    masks: Tensor, variance: float, noise: float, weights: Tensor, tokens: Tensor, query: Tensor
) -> Tensor:
    r"""Squared error of each task averaged over teacher and noise, shape (members, tasks, n).

    .. math:: \sigma^2\big(1 + |w_n|^2\big) + \tau^2\sum_{i\in S_n}\Big(x_{qi} - \sum_\ell w_{n\ell}x_{\ell i}\Big)^2

    masks (tasks, dim): 1 where a task uses a coordinate; variance: τ² of each coordinate of the teacher; weights as
    from `diagonal_label_weights`. Source: multihead (2.5), Definition 5.1.
    """
    read = torch.einsum("mtln,mlin->mtin", weights, tokens.expand(len(weights), -1, -1, -1))
    errors = masks[:, :, None] * (query[:, None] - read)
    return noise * (1 + weights.square().sum(dim=2)) + variance * errors.square().sum(dim=2)


def diagonal_losses(
    omega: Tensor,
    mu: Tensor,
    batch: tuple[Tensor, ...],
    masks: FloatArray,
    variance: float,
    noise: float,
    activation: HeadActivation,
    training_context: int,
) -> Tensor:
    """Mean losses, summed over tasks, shape (members,): at drawn labels where the batch has them, else averaged.

    batch: tokens (members or 1, tokens, dim, n), query (members or 1, dim, n) and maybe labels (members or 1, tasks,
    tokens, n) and targets (members or 1, tasks, n). Source: multihead (2.5), section 5.4.
    """
    tokens, query, *answers = batch
    if not kernels_apply(omega, tokens):
        weights = diagonal_label_weights(omega, mu, tokens, query, activation, training_context)
        if answers:
            return sampled_losses(weights, *answers).sum(dim=1).mean(dim=-1)
        used = torch.tensor(masks, dtype=tokens.dtype, device=tokens.device)
        return task_averaged_losses(used, variance, noise, weights, tokens, query).sum(dim=1).mean(dim=-1)
    kernel = diagonal_kernel(batch, masks, variance, noise, activation, training_context)
    return kernel_losses([(len(omega), kernel)], omega, mu)


def diagonal_kernel(
    batch: tuple[Tensor, ...],
    masks: FloatArray,
    variance: float,
    noise: float,
    activation: HeadActivation,
    training_context: int,
) -> MemberStep:
    """The kernel of diagonal heads on a batch on the CPU; arguments as in `diagonal_losses`. Source: multihead 5.4."""
    arrays = [tensor.numpy() for tensor in batch]

    def step(member: int, omegas: Any, mus: Any) -> StepResult:
        at = member if len(arrays[0]) > 1 else 0
        parts = [array[at] for array in arrays]
        losses = task_sampled(*parts[2:]) if parts[2:] else task_averaged(masks, variance, noise, *parts)
        return diagonal_step(parts[0], parts[1], omegas, mus, activation, training_context, losses)

    return step
