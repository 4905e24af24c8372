r"""The generalised softmax models: layers with values of their own, updated contexts, inputs and labels in one stream.

Each comes as the paper writes it, matrix by matrix on P + 1 tokens, and in a fast form with leading axes of members:

- layer values (71)-(72): `LayerValueAttention` and `LayerValueEnsemble`, one gain per layer;
- context updates (77)-(82): `UpdatingAttention` and `UpdatedEnsemble`, which carries one row over the original labels
  through the layers, last layer first, instead of all label states;
- one stream (64)-(68): `FaithfulSingleStream` and `SingleStream`, whose only state is what the test token has read, a
  vector of d + 1 numbers whatever the width.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim.models.softmax_attention import (
    FaithfulSoftmaxAttention,
    ensemble_weights,
    fixed_context_mask,
    masked_softmax,
)
from theory.problems import as_integer
from theory.results import DomainError, FloatArray, MissingDependencyError

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingDependencyError("sim.models needs torch: pip install 'attnlaws[train]'") from error

MAX_WIDTH = 2**16
MAX_LAYERS = 2**14


class LayerValueAttention(FaithfulSoftmaxAttention):
    """The two-stream model with a value map of its own in every layer, W_v of shape (L, N, N).

    The pre-norm of (9) is kept, although the display of (71) is printed without its hat: only the values are said to
    change. Source: depth (71).
    """

    def __init__(self, dim: int, width: int, depth: int, generator: np.random.Generator) -> None:
        super().__init__(dim, width, depth, generator)
        values = generator.standard_normal((depth, width, width)) / math.sqrt(width)
        self.value_map = nn.Parameter(torch.tensor(values))

    def layer_value_map(self, layer: int) -> Tensor:
        """The value map of one layer, shape (N, N). Source: depth (71)."""
        return self.value_map[layer]

    def composed(self) -> tuple[Tensor, Tensor]:
        """B_ℓ, shape (L, d, d), and gains g_ℓ = W_o W_v^ℓ W_y, shape (L,), of the fast form. Source: depth (72)."""
        return self.composed_key_query(), (self.readout @ self.value_map @ self.label_encoder)[:, 0, 0]


class LayerValueEnsemble(nn.Module):
    r"""The fast form of layer values: softmax rows, each with its own gain, :math:`w = \frac1L\sum_\ell g_\ell p_\ell`.

    key_query: initial B_ℓ, shape (..., L, d, d); gains: initial g_ℓ, shape (..., L). Source: depth (72).
    """

    def __init__(self, key_query: FloatArray, gains: FloatArray, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        if np.shape(gains) != np.shape(key_query)[:-2]:
            raise DomainError(
                f"gains must have one entry per matrix, shape {np.shape(key_query)[:-2]}, got {np.shape(gains)}"
            )
        self.key_query = nn.Parameter(torch.tensor(key_query, dtype=dtype))
        self.gains = nn.Parameter(torch.tensor(gains, dtype=dtype))

    def attention(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Attention rows p_ℓ, shape (..., n, L, P); arguments as in `ensemble_weights`. Source: depth (59)."""
        return ensemble_weights(self.key_query, directions, query_direction)

    def layer_weights(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Weights g_ℓ p_ℓ of the labels in each layer's prediction, shape (..., n, L, P). Source: depth (72)."""
        return self.gains[..., None, :, None] * self.attention(directions, query_direction)

    def label_weights(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Weights w of the labels in the prediction, shape (..., n, P). Source: depth (72)."""
        rows = self.attention(directions, query_direction)
        return (self.gains[..., None, None, :] @ rows)[..., 0, :] / rows.shape[-2]

    def forward(self, directions: Tensor, query_direction: Tensor, labels: Tensor) -> Tensor:
        """Predictions w y, shape (..., n), from labels of shape (..., n, P). Source: depth (72)."""
        return (self.label_weights(directions, query_direction) * labels).sum(dim=-1)


def updating_mask(context: int, update: Tensor) -> Tensor:
    r"""The mask :math:`M(m) = \begin{pmatrix} m 1 1^\top & 0 \\ 1^\top & 0\end{pmatrix}`, shape (P + 1, P + 1).

    update: m, shape (). Differentiable in m. Source: depth (77).
    """
    mask = torch.ones(context + 1, context + 1, dtype=update.dtype, device=update.device)
    mask[:, -1] = 0
    factor = torch.cat([update.expand(context), torch.ones_like(update)[None]])
    return factor[:, None] * mask


class UpdatingAttention(FaithfulSoftmaxAttention):
    """The two-stream model whose context labels are updated: mask (77) with a trained scalar m.

    update: initial m; the rest as in `FaithfulSoftmaxAttention`. Source: depth (9), (10), (77).
    """

    def __init__(self, dim: int, width: int, depth: int, generator: np.random.Generator, update: float) -> None:
        super().__init__(dim, width, depth, generator)
        self.update = nn.Parameter(torch.tensor(update, dtype=torch.float64))

    def mask(self, context: int) -> tuple[Tensor, Tensor]:
        """The mask M(m) and where attention is allowed, at any m, zero included. Source: depth (77)."""
        return updating_mask(context, self.update), updating_mask(context, torch.ones(())) != 0

    def moments(self) -> Tensor:
        """Moments W_o W_v^r W_y, r = 1..L, shape (L,): g v^(r-1) where W_v W_y = v W_y. Source: depth (9), (81)."""
        moments: list[Tensor] = []
        state: Tensor = self.label_encoder
        for _ in range(len(self.query_maps)):
            state = self.value_map @ state
            moments.append((self.readout @ state)[0, 0])
        return torch.stack(moments)


class _UpdatedRow(torch.autograd.Function):
    """Horner's rule for the row over the labels: P x P numbers are made, read a few times, and never differentiated.

    The gradient goes the other way, from the first layer to the last, with one row as well. Written out because
    automatic differentiation keeps and passes over many more arrays of P x P numbers, which bound the time.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, key_query: Tensor, step: Tensor, keys: Tensor) -> Tensor:
        members, contexts, depth, tokens = rows.shape
        flat, steps = keys.flatten(0, 1), _per_context(step, contexts)
        attentions: list[Tensor] = []
        totals = [rows[:, :, -1].reshape(-1, 1, tokens)]
        scores = keys.new_empty(len(flat), tokens, tokens)
        for layer in range(depth - 2, -1, -1):
            torch.bmm(_context_reads(key_query[:, layer], keys).flatten(0, 1), flat.transpose(1, 2), out=scores)
            attentions.append(torch.softmax(scores, dim=-1))
            mixed = torch.bmm(totals[-1], attentions[-1])
            totals.append(mixed.mul_(steps).add_(totals[-1]).add_(rows[:, :, layer].reshape(-1, 1, tokens)))
        ctx.save_for_backward(key_query, step, keys, *totals[::-1], *attentions[::-1])
        return totals[-1].reshape(members, contexts, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # With A = softmax(S), h = A γ and γ the gradient of c_ℓ: dS_ij = (m/L) c_(ℓ+1)i A_ij (γ_j - h_i), and the
        # gradient of c_(ℓ+1) is γ + (m/L) h.
        key_query, step, keys, *stored = ctx.saved_tensors
        depth = key_query.shape[1]
        totals, attentions = stored[:depth], stored[depth:]
        flat, steps = keys.flatten(0, 1), _per_context(step, keys.shape[1])
        key_query_gradient, step_gradient = torch.zeros_like(key_query), torch.zeros_like(step)
        key_gradient = torch.zeros_like(flat) if ctx.needs_input_grad[3] else None
        scores = torch.empty_like(attentions[0]) if attentions else None
        incoming = gradient.reshape(-1, 1, gradient.shape[-1])
        row_gradients = [incoming]
        for layer, attention in enumerate(attentions):
            # As the transpose of a contiguous row: a column of another layout takes a path many times slower.
            mean = torch.bmm(attention, incoming.transpose(1, 2))
            total = totals[layer + 1].transpose(1, 2)
            weight = torch.sub(incoming, mean, out=scores).mul_(attention)
            read_gradient = torch.bmm(weight, flat).mul_(steps * total)
            per_member = read_gradient.view(keys.shape).flatten(1, 2)
            key_query_gradient[:, layer] = per_member.transpose(1, 2) @ keys.flatten(1, 2)
            step_gradient += (total * mean).view(len(step), -1).sum(dim=1)
            if key_gradient is not None:
                reads = _context_reads(key_query[:, layer], keys).flatten(0, 1)
                key_gradient += torch.bmm(weight.transpose(1, 2), steps * total * reads)
                key_gradient += (per_member @ key_query[:, layer]).view_as(flat)
            incoming = torch.addcmul(incoming, steps, mean.transpose(1, 2))
            row_gradients.append(incoming)
        row_gradient = torch.cat(row_gradients, dim=1).view(*keys.shape[:2], depth, -1)
        key_gradient = None if key_gradient is None else key_gradient.view_as(keys)
        return row_gradient, key_query_gradient, step_gradient, key_gradient


def _per_context(step: Tensor, contexts: int) -> Tensor:
    """A number per member, shape (members,), for each of its contexts, shape (members * contexts, 1, 1)."""
    return step.repeat_interleave(contexts)[:, None, None]


def _context_reads(key_query: Tensor, keys: Tensor) -> Tensor:
    """Reads B x_i from B of shape (members, d, d) and x_i of shape (members, n, P, d), shape (members, n, P, d)."""
    return (keys.flatten(1, 2) @ key_query.transpose(1, 2)).view(keys.shape)


def updated_row(rows: Tensor, key_query: Tensor, step: Tensor, keys: Tensor) -> Tensor:
    r"""The row :math:`c_1`, shape (members, n, P), of :math:`c_\ell = p_\ell + c_{\ell+1}(I + sA_\ell)` from c_L = p_L.

    rows: p_ℓ, shape (members, n, L, P); key_query: B_ℓ, shape (members, L, d, d), of which the last is not used; step:
    s, shape (members,); keys: x_i, shape (members, n, P, d); A_ℓ is the softmax of x_j . B_ℓ x_i over j. Gradients are
    of first order only. Source: depth (82) by Horner's rule.
    """
    result: Tensor = _UpdatedRow.apply(rows, key_query, step, keys)  # type: ignore[no-untyped-call]
    return result


class UpdatedEnsemble(nn.Module):
    r"""The fast form of context updates: one row over the original labels, built from the last layer to the first.

    .. math:: c_L = p_L, \qquad c_\ell = p_\ell + c_{\ell+1}\Big(I + \frac mL A_\ell\Big), \qquad
              \hat y = \frac gL\, c_1 y

    key_query: initial B_ℓ, shape (members, L, d, d); gain, update: initial g and m, shape (members,). The value map
    acts as W_v W_y = v W_y with v inside g and m. The attention of the context of layer L is never used.
    Source: depth (82) by Horner's rule.
    """

    def __init__(
        self, key_query: FloatArray, gain: FloatArray, update: FloatArray, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        members = np.shape(key_query)[:1]
        if np.ndim(key_query) != 4 or np.shape(gain) != members or np.shape(update) != members:
            raise DomainError(
                "key_query must have shape (members, L, dim, dim), gain and update shape (members,), got "
                f"{np.shape(key_query)}, {np.shape(gain)} and {np.shape(update)}"
            )
        self.key_query = nn.Parameter(torch.tensor(key_query, dtype=dtype))
        self.gain = nn.Parameter(torch.tensor(gain, dtype=dtype))
        self.update = nn.Parameter(torch.tensor(update, dtype=dtype))

    def attention(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Attention rows p_ℓ of the test token, shape (members, n, L, P). Source: depth (59)."""
        return ensemble_weights(self.key_query, directions, query_direction)

    def context_reads(self, layer: int, directions: Tensor) -> Tensor:
        """Reads B_ℓ x_i of the context tokens, shape (members, n, P, d). Source: depth (9)."""
        return _context_reads(self.key_query[:, layer], directions)

    def context_attention(self, layer: int, directions: Tensor) -> Tensor:
        """Context attention A_ℓ, shape (members, n, P, P), rows i reading columns j. Source: depth (10), (78)."""
        return torch.softmax(self.context_reads(layer, directions) @ directions.transpose(-1, -2), dim=-1)

    def label_weights(self, directions: Tensor, query_direction: Tensor) -> Tensor:
        """Weights of the original labels in the prediction, shape (members, n, P). Source: depth (82)."""
        rows = self.attention(directions, query_direction)
        depth = rows.shape[2]
        total = updated_row(rows, self.key_query, self.update / depth, directions)
        return self.gain[:, None, None] / depth * total

    def forward(self, directions: Tensor, query_direction: Tensor, labels: Tensor) -> Tensor:
        """Predictions, shape (members, n), from labels of shape (members, n, P). Source: depth (82)."""
        return (self.label_weights(directions, query_direction) * labels).sum(dim=-1)

    def readings(self, directions: Tensor, query_direction: Tensor, columns: Tensor) -> Tensor:
        r"""Readings :math:`g\,p_\ell (I + \frac mL A_{\ell-1})\cdots(I + \frac mL A_1) Y` of every layer.

        columns: Y, shape (members, n, P, c). Returns shape (members, n, L, c), whose mean over layers is the
        prediction. Source: depth (81), (82).
        """
        rows = self.attention(directions, query_direction)
        depth = rows.shape[2]
        step = (self.update / depth)[:, None, None, None]
        state, readings = columns, []
        for layer in range(depth):
            readings.append(rows[:, :, layer, None, :] @ state)
            if layer < depth - 1:
                state = state + step * (self.context_attention(layer, directions) @ state)
        return self.gain[:, None, None, None] * torch.cat(readings, dim=2)


def moment_prediction(rows: Tensor, mixing: list[Tensor], labels: Tensor, update: Tensor, moments: Tensor) -> Tensor:
    r"""Prediction with any value map, from its moments m_r = W_o W_v^r W_y, shape (n,).

    .. math:: \hat y = \frac1L\sum_\ell\sum_r m_{r+1}\, p_\ell z^{(r)}_{\ell-1}, \qquad
              z^{(r)}_\ell = z^{(r)}_{\ell-1} + \frac mL A_\ell z^{(r-1)}_{\ell-1}

    rows: p_ℓ, shape (n, L, P); mixing: A_1..A_(L-1), each (n, P, P); labels: (n, P); moments: r = 1..L, shape (L,).
    At m_r = g v^(r-1) it is `UpdatedEnsemble` with gain g and update m v. Source: depth (9), (81), (82).
    """
    depth = rows.shape[1]
    states = torch.cat([labels[:, :, None], labels.new_zeros(*labels.shape, depth - 1)], dim=2)
    total = labels.new_zeros(len(labels))
    for layer in range(depth):
        total = total + (rows[:, layer, None, :] @ states)[:, 0] @ moments
        if layer < depth - 1:
            mixed = mixing[layer] @ states[:, :, :-1]
            states = torch.cat([states[:, :, :1], states[:, :, 1:] + update / depth * mixed], dim=2)
    return total / depth


class FaithfulSingleStream(nn.Module):
    r"""Inputs and labels in one stream, :math:`H^0 = W_x X + W_y y`, with the mask (76): only the test token moves.

    dim d; width N >= d; depth L; generator: draws Gaussian matrices, W_x and W_y with variance 1/N, W_q and W_k with
    variance 1/N, W_v and W_o with variance 1/N. No norm, as (65) is printed. Parameters as in
    `FaithfulSoftmaxAttention`. Source: depth (64)-(66), (12).
    """

    def __init__(self, dim: int, width: int, depth: int, generator: np.random.Generator) -> None:
        super().__init__()
        dim = as_integer("dim", dim, 1, MAX_WIDTH)
        width = as_integer("width", width, dim, MAX_WIDTH)
        depth = as_integer("depth", depth, 1, MAX_LAYERS)

        def gaussian(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.tensor(generator.standard_normal(shape) / math.sqrt(width)))

        self.input_encoder = gaussian(width, dim)
        self.label_encoder = gaussian(width, 1)
        self.query_maps = gaussian(depth, width, width)
        self.key_maps = gaussian(depth, width, width)
        self.value_map = gaussian(width, width)
        self.readout = gaussian(1, width)

    def readouts(self, tokens: Tensor, query: Tensor, labels: Tensor) -> Tensor:
        """Readouts z_0..z_L of the test token, shape (n, L + 1). Source: depth (64)-(67)."""
        inputs = torch.cat([tokens, query[:, None, :]], dim=1).transpose(1, 2)
        known = torch.cat([labels, torch.zeros_like(labels[:, :1])], dim=1)[:, None, :]
        states = self.input_encoder @ inputs + self.label_encoder @ known
        mask = fixed_context_mask(tokens.shape[1])
        readouts = [(self.readout @ states)[:, 0, -1]]
        for query_map, key_map in zip(self.query_maps, self.key_maps, strict=True):
            queries, keys, values = query_map @ states, key_map @ states, self.value_map @ states
            attention = masked_softmax(queries.transpose(1, 2) @ keys, mask)
            states = states + values @ attention.transpose(1, 2) / len(self.query_maps)
            readouts.append((self.readout @ states)[:, 0, -1])
        return torch.stack(readouts, dim=1)

    def forward(self, tokens: Tensor, query: Tensor, labels: Tensor) -> Tensor:
        """Predictions z_L, shape (n,), from tokens (n, P, d), query (n, d) and labels (n, P). Source: depth (12)."""
        return self.readouts(tokens, query, labels)[:, -1]

    def composed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Parameters of the fast form, with the encoder :math:`E = [W_x, W_y]` of a token and its label.

        :math:`E^\top W_k^\top W_q W_x`, shape (L, d + 1, d); :math:`E^\top W_k^\top W_q W_v E`, shape
        (L, d + 1, d + 1); :math:`W_o W_x`, shape (d,); :math:`W_o W_v E`, shape (d + 1,). Differentiable.
        Source: depth (64)-(67).
        """
        encoder = torch.cat([self.input_encoder, self.label_encoder], dim=1)
        key_query = (self.key_maps @ encoder).transpose(1, 2) @ self.query_maps
        values = self.value_map @ encoder
        return (
            key_query @ self.input_encoder,
            key_query @ values,
            (self.readout @ self.input_encoder)[0],
            (self.readout @ values)[0],
        )


class SingleStream(nn.Module):
    r"""The fast form of one stream: the state of the test token is q and the mean c of what it has read.

    .. math:: p_\ell = \mathrm{softmax}_i\big(s_i\cdot(Q_\ell q + C_\ell c_{\ell-1})\big), \quad
              c_\ell = c_{\ell-1} + \frac1L\sum_i p_{\ell i} s_i, \quad z_\ell = o_q\cdot q + o_c\cdot c_\ell

    with tokens s_i = (x_i, y_i) of d + 1 entries. query_maps: initial Q_ℓ, shape (members, L, d + 1, d); state_maps:
    C_ℓ, (members, L, d + 1, d + 1); query_readout: o_q, (members, d); state_readout: o_c, (members, d + 1). A width
    N >= 2d + 1 reaches every value of these parameters. Not linear in the labels. Source: depth (64)-(67).
    """

    def __init__(
        self,
        query_maps: FloatArray,
        state_maps: FloatArray,
        query_readout: FloatArray,
        state_readout: FloatArray,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        members, depth, _, dim = np.shape(query_maps)
        shapes = [
            (members, depth, dim + 1, dim),
            (members, depth, dim + 1, dim + 1),
            (members, dim),
            (members, dim + 1),
        ]
        given = [np.shape(value) for value in (query_maps, state_maps, query_readout, state_readout)]
        if given != shapes:
            raise DomainError(f"parameters of a single stream must have shapes {shapes}, got {given}")
        self.query_maps = nn.Parameter(torch.tensor(query_maps, dtype=dtype))
        self.state_maps = nn.Parameter(torch.tensor(state_maps, dtype=dtype))
        self.query_readout = nn.Parameter(torch.tensor(query_readout, dtype=dtype))
        self.state_readout = nn.Parameter(torch.tensor(state_readout, dtype=dtype))

    def readings(self, tokens: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attention rows p_ℓ, shape (members, n, L, P), and states c_0..c_L, shape (members, n, L + 1, d + 1).

        tokens: s_i = (x_i, y_i), shape (members, n, P, d + 1); query: q, shape (members, n, d).
        Source: depth (65), (66).
        """
        members, depth, size, dim = self.query_maps.shape
        fixed = query @ self.query_maps.reshape(members, depth * size, dim).transpose(-1, -2)
        reads = fixed.reshape(*fixed.shape[:-1], depth, size)
        state, keys = tokens.new_zeros(*query.shape[:2], size), tokens.transpose(-1, -2)
        rows, states = [], [state]
        for layer in range(depth):
            read = reads[:, :, layer] + state @ self.state_maps[:, layer].transpose(-1, -2)
            row = torch.softmax((read[..., None, :] @ keys)[..., 0, :], dim=-1)
            state = state + (row[..., None, :] @ tokens)[..., 0, :] / depth
            rows.append(row)
            states.append(state)
        return torch.stack(rows, dim=2), torch.stack(states, dim=2)

    def readouts(self, tokens: Tensor, query: Tensor) -> Tensor:
        """Readouts z_0..z_L of the test token, shape (members, n, L + 1). Source: depth (67)."""
        _, states = self.readings(tokens, query)
        return self.readouts_of(states, query)

    def readouts_of(self, states: Tensor, query: Tensor) -> Tensor:
        """Readouts of the states that `readings` returned, shape (members, n, L + 1). Source: depth (67)."""
        base = (query @ self.query_readout[..., None])[..., 0]
        read: Tensor = (states @ self.state_readout[:, None, :, None])[..., 0]
        return base[..., None] + read

    def forward(self, tokens: Tensor, query: Tensor) -> Tensor:
        """Predictions z_L, shape (members, n). Source: depth (12), (67)."""
        return self.readouts(tokens, query)[..., -1]


def layer_increments(readouts: Tensor) -> Tensor:
    r"""Effective layer predictions :math:`f_\ell = z_0 + L(z_\ell - z_{\ell-1})`, shape (..., L), with mean z_L.

    readouts: z_0..z_L, shape (..., L + 1). Source: depth (67), (68).
    """
    depth = readouts.shape[-1] - 1
    return readouts[..., :1] + depth * readouts.diff(dim=-1)
