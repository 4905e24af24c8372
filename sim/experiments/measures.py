r"""Diagnostics of one context that several experiments share; tensors in, tensors out, leading axes kept.

Rows are p_ℓ, shape (..., L, P); target rows t, shape (..., P). Names of the quantities are the same in all experiments:
``loss``, ``shared_error``, ``disagreement``, ``mode_loss_K``, and, free of units, ``attention_mass`` and
``selection_error``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from theory.problems import CopyTask, TopKTask

if TYPE_CHECKING:
    from torch import Tensor

DIMENSIONLESS = frozenset({"attention_mass", "selection_error"})


def attention_measures(rows: Tensor, target: Tensor) -> dict[str, Tensor]:
    r"""Attention on the target tokens and selection error of the mean row :math:`\bar p = \frac1L\sum_\ell p_\ell`.

    .. math:: \sum_{i\in S_k}\bar p_i, \qquad E = \|\bar p - t\|^2

    Source: depth Figure 4(c), (90).
    """
    mean = rows.mean(dim=-2)
    mass = (mean * (target > 0)).sum(dim=-1)
    return {"attention_mass": mass, "selection_error": (mean - target).square().sum(dim=-1)}


def reported_modes(dim: int) -> list[int]:
    """Modes whose losses are measured, counted from 1: powers of two, and the last. Source: no equation."""
    powers = [2**i for i in range(dim.bit_length()) if 2**i <= dim]
    return powers if powers[-1] == dim else [*powers, dim]


def mode_losses(shares: Tensor, problem: TopKTask | CopyTask) -> dict[str, Tensor]:
    r"""Losses of single spectral modes, :math:`\omega_k\,\big[\sum_i (w_i - t_i)\, z_{ik}\big]^2`, shape (...) each.

    shares: squares of F^T (w - t), shape (..., d), whose sum is the loss. Where the input is isotropic the eigenbasis
    of the teacher is hidden and uniform, and mode k has the share ω_k / tr Ω of the loss.
    Source: depth (29) mode by mode, Figures 3(c) and 7.
    """
    modes = reported_modes(shares.shape[-1])
    if not problem.spectrum.isotropic_input:
        return {f"mode_loss_{mode}": shares[..., mode - 1] for mode in modes}
    loss, teacher = shares.sum(dim=-1), problem.spectrum.teacher_variances()
    return {f"mode_loss_{mode}": loss * float(teacher[mode - 1] / teacher.sum()) for mode in modes}
