"""Softmax attention with fixed context states: the paper's two-stream model, and the same function in its fast form.

With the mask (76) only the test token is updated, so each layer reads the same labels and the model is an ensemble of
L softmax rows with one gain. `FaithfulSoftmaxAttention` follows section 2.2 matrix by matrix and is the twin that
tests compare with; `SoftmaxEnsemble` forms the query side first (u_ℓ = B_ℓ q, then x_i . u_ℓ) and never a P x P
matrix. Both are linear in the labels: the prediction is ``label_weights`` times labels.
"""

from __future__ import annotations

import math

import numpy as np

from theory.problems import as_integer
from theory.results import DomainError, FloatArray, MissingDependencyError

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingDependencyError("sim.models needs torch: pip install 'attnlaws[train]'") from error

# Largest departure of W_x^T W_x from the identity that is put down to rounding, in float64.
ORTHOGONALITY_TOLERANCE = 1e-12
MAX_WIDTH = 2**16


def root_mean_square_norm(states: Tensor) -> Tensor:
    """Each column divided by the root mean square of its entries; states: shape (n, width, tokens).

    The pre-norm of the input stream, read as RMS norm without learned parameters and without an epsilon, so that it
    is free of scale; the paper does not say which norm it uses. Source: depth section 2.2, before (9).
    """
    normalised: Tensor = states * (math.sqrt(states.shape[1]) / torch.linalg.vector_norm(states, dim=1, keepdim=True))
    return normalised


def fixed_context_mask(context: int) -> Tensor:
    """The mask M(0): the test token (last) reads the context and nothing else is read; shape (P + 1, P + 1).

    Source: depth (76).
    """
    mask = torch.zeros(context + 1, context + 1)
    mask[-1, :-1] = 1
    return mask


def masked_softmax(scores: Tensor, mask: Tensor, allowed: Tensor | None = None) -> Tensor:
    """``mask`` times the softmax of each row over the ``allowed`` positions, those where ``mask`` is not zero if None.

    scores: shape (n, rows, columns); mask, allowed: shape (rows, columns); a trained mask may pass through zero
    where attention stays allowed. A row without allowed positions gives zeros and finite gradients, not the NaN of a
    softmax over nothing. Source: depth (10) and section 2.2, masks.
    """
    allowed = mask != 0 if allowed is None else allowed
    empty = ~allowed.any(dim=-1, keepdim=True)
    finite = scores.masked_fill(~allowed & ~empty, -math.inf)
    return mask.to(scores.dtype) * torch.softmax(finite, dim=-1)


class FaithfulSoftmaxAttention(nn.Module):
    """The nonlinear-attention model of section 2.2, matrix by matrix, with the mask (76).

    dim d; width N >= d; depth L; generator: draws the initial matrices, W_x semi-orthogonal (W_x^T W_x = I) and the
    others Gaussian with variance 1/N. Parameters: W_x (N, d), W_y (N, 1), W_q and W_k (L, N, N), W_v (N, N),
    W_o (1, N), float64. Source: depth (7)-(10), (12), (76).
    """

    def __init__(self, dim: int, width: int, depth: int, generator: np.random.Generator) -> None:
        super().__init__()
        dim = as_integer("dim", dim, 1, MAX_WIDTH)
        width = as_integer("width", width, dim, MAX_WIDTH)
        depth = as_integer("depth", depth, 1, MAX_WIDTH)

        def gaussian(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.tensor(generator.standard_normal(shape) / math.sqrt(width)))

        self.input_encoder = nn.Parameter(torch.tensor(np.linalg.qr(generator.standard_normal((width, dim)))[0]))
        self.label_encoder = gaussian(width, 1)
        self.query_maps = gaussian(depth, width, width)
        self.key_maps = gaussian(depth, width, width)
        self.value_map = gaussian(width, width)
        self.readout = gaussian(1, width)

    def forward(self, tokens: Tensor, query: Tensor, labels: Tensor) -> Tensor:
        """Predictions, shape (n,), from tokens (n, P, d), query (n, d) and labels (n, P). Source: depth (7)-(12)."""
        inputs = torch.cat([tokens, query[:, None, :]], dim=1).transpose(1, 2)
        known = torch.cat([labels, torch.zeros_like(labels[:, :1])], dim=1)[:, None, :]
        normalised = root_mean_square_norm(self.input_encoder @ inputs)
        label_states = self.label_encoder @ known
        mask, allowed = self.mask(tokens.shape[1])
        for layer, (query_map, key_map) in enumerate(zip(self.query_maps, self.key_maps, strict=True)):
            queries, keys = query_map @ normalised, key_map @ normalised
            values = self.layer_value_map(layer) @ label_states
            attention = masked_softmax(queries.transpose(1, 2) @ keys, mask, allowed)
            label_states = label_states + values @ attention.transpose(1, 2) / len(self.query_maps)
        return (self.readout @ label_states)[:, 0, -1]

    def mask(self, context: int) -> tuple[Tensor, Tensor]:
        """The mask and where attention is allowed, shape (P + 1, P + 1) each. Source: depth (76)."""
        mask = fixed_context_mask(context)
        return mask, mask != 0

    def layer_value_map(self, layer: int) -> Tensor:
        """The value map of one layer, shape (N, N): here the same for all. Source: depth (9)."""
        return self.value_map

    def composed(self) -> tuple[Tensor, Tensor]:
        """The matrices B_ℓ = N W_x^T W_k^T W_q W_x, shape (L, d, d), and the gain W_o W_v W_y of the fast form.

        The factor N comes from the pre-norm, whose columns have length sqrt(N). Differentiable. Raises DomainError
        where W_x is not semi-orthogonal: the norm of W_x x is then not the norm of x. Source: depth (9), (10), (60).
        """
        return self.composed_key_query(), (self.readout @ self.value_map @ self.label_encoder)[0, 0]

    def composed_key_query(self) -> Tensor:
        """The matrices B_ℓ of `composed`, shape (L, d, d)."""
        width, dim = self.input_encoder.shape
        encoder = self.input_encoder.detach()
        gram = encoder.T @ encoder
        departure = float((gram - torch.eye(dim, dtype=gram.dtype)).abs().max())
        if not departure <= ORTHOGONALITY_TOLERANCE:
            raise DomainError(
                "input_encoder must be semi-orthogonal for the fast form to be equal: W_x^T W_x may differ from the "
                f"identity by at most {ORTHOGONALITY_TOLERANCE:g}, got {departure:g}"
            )
        keys, queries = self.key_maps @ self.input_encoder, self.query_maps @ self.input_encoder
        return width * (keys.transpose(1, 2) @ queries)


def ensemble_weights(key_query: Tensor, directions: Tensor, query_direction: Tensor) -> Tensor:
    """Attention rows p_ℓ = softmax_i(x_i . B_ℓ q) of the test token, shape (..., n, L, P).

    key_query: B_ℓ, shape (..., L, d, d); directions: x_i / ‖x_i‖, shape (..., n, P, d); query_direction: q / ‖q‖,
    shape (..., n, d). Leading axes are members of an ensemble of models. Source: depth (9), (10), (59).
    """
    *members, depth, dim, _ = key_query.shape
    reads = query_direction @ key_query.reshape(*members, depth * dim, dim).transpose(-1, -2)
    return torch.softmax(reads.reshape(*reads.shape[:-1], depth, dim) @ directions.transpose(-1, -2), dim=-1)


class SoftmaxEnsemble(nn.Module):
    """The fast form: L softmax rows over the context, averaged and multiplied by one gain.

    key_query: initial B_ℓ, shape (L, d, d); gain: initial g. With leading axes, key_query (members, L, d, d) and gain
    (members,), it is as many models side by side, each on contexts of its own. Source: depth (59), (60).
    """

    def __init__(self, key_query: FloatArray, gain: float | FloatArray, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.key_query = nn.Parameter(torch.tensor(key_query, dtype=dtype))
        self.gain = nn.Parameter(torch.tensor(gain, dtype=dtype))

    def attention(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Attention rows p_ℓ, shape (..., n, L, P); arguments as in `ensemble_weights`. Source: depth (59)."""
        return ensemble_weights(self.key_query, directions, query_direction)

    def label_weights(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Weights w = g mean_ℓ p_ℓ of the labels in the prediction, shape (..., n, P). Source: depth (60)."""
        return self.gain[..., None, None] * self.attention(directions, query_direction).mean(dim=-2)

    def forward(self, directions: Tensor, query_direction: Tensor, labels: Tensor) -> Tensor:
        """Predictions w y, shape (..., n), from labels of shape (..., n, P). Source: depth (60)."""
        return (self.label_weights(directions, query_direction) * labels).sum(dim=-1)
