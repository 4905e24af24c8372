"""Softmax attention with fixed context states on both tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sim.experiments.base import register
from sim.experiments.label_weights import GAIN_RATE, LabelWeights, fix_softmax_fields, initial_key_query
from theory.problems import CopyTask, TopKTask
from theory.results import FloatArray

if TYPE_CHECKING:
    from torch import Tensor, nn


@register
@dataclass(frozen=True, slots=True)
class SoftmaxAttention(LabelWeights):
    """L softmax rows with matrices B_ℓ and one gain, trained to copy a label or to average those of the top-k tokens.

    problem: a `TopKTask`, or a `CopyTask` with finitely many tokens; depth L >= 1; initial_scales: (low, high), layers
    start at B_ℓ = s_ℓ I + noise with s_ℓ geometric from low to high, as layers of one sharpness need thousands of steps
    to part; initial_noise: standard deviation of each entry of the noise. Measured: loss R and, from two layers on,
    shared_error C and disagreement A - C, with R = C + (A - C)/L exactly; mode_loss_K, attention_mass and
    selection_error, see `sim.experiments.measures`. Source: depth section 2.2, (12), (60)-(63), (90). Raises
    DomainError outside ranges.
    """

    problem: TopKTask | CopyTask
    depth: int
    initial_scales: tuple[float, float] = (1.0, 50.0)
    initial_noise: float = 1.0
    kind: ClassVar[str] = "softmax attention"

    def __post_init__(self) -> None:
        fix_softmax_fields(self)

    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """The fast form with matrices of `initial_key_query` and gain 1."""
        from sim.models.softmax_attention import SoftmaxEnsemble

        return SoftmaxEnsemble(initial_key_query(self, generators), np.ones(len(generators)))

    def _layer_errors(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Errors e_ℓ = F^T (g p_ℓ - t) of the layers' predictions, shape (members, n, L, d)."""
        directions, query_direction, target, factors = batch
        rows = model.attention(directions, query_direction)
        errors: Tensor = (model.gain[:, None, None, None] * rows - target[:, :, None]) @ factors
        return errors

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """The matrices at the full rate and the gain at a tenth."""
        return [{"params": [model.key_query], "factor": 1.0}, {"params": [model.gain], "factor": GAIN_RATE}]


def scales_and_spreads(key_query: FloatArray) -> tuple[FloatArray, FloatArray]:
    r"""How layers read the query on average over its direction: B q = α q + rest with mean square length β².

    α = tr(B)/d and β = ‖B - α I‖_F / sqrt(d); key_query: shape (..., L, d, d); returns both, shape (..., L).
    Source: beyond the paper, the law of (α, β) of the mean field.
    """
    dim = key_query.shape[-1]
    scales = np.trace(key_query, axis1=-2, axis2=-1) / dim
    rests = key_query - scales[..., None, None] * np.eye(dim)
    return scales, np.linalg.norm(rests, axis=(-2, -1)) / math.sqrt(dim)
