r"""Linear attention: the paper's token matrices with the mask (75), and the same function in its fast forms.

The prediction is linear in the labels and an ordered matrix polynomial in the empirical covariance,
:math:`\hat y = \beta^\top P_L(S) q`. `FaithfulLinearAttention` follows section 2.2 matrix by matrix and is the twin
that tests compare with. The fast forms never form a P x P matrix: they push the query through the layers, last layer
first, :math:`v \leftarrow v - \frac1L S B_\ell v`, where S acts through the tokens, as a d x d matrix, or, for
infinitely many tokens, through its eigenvalues. Vectors of the fast forms have the shape (members, contexts, vectors,
dim): several independent models of one shape are trained in one pass, and several vectors may share one context.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from theory.problems import as_integer
from theory.results import DomainError, FloatArray, MissingDependencyError

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingDependencyError("sim.models needs torch: pip install 'attnlaws[train]'") from error

MAX_WIDTH = 2**16
MAX_LAYERS = 2**14

Action = Callable[[Tensor], Tensor]


def subtracting_mask(context: int) -> Tensor:
    r"""The mask :math:`M = \begin{pmatrix} -1 1^\top & 0 \\ 1^\top & 0\end{pmatrix}`, shape (P + 1, P + 1).

    Context tokens subtract what they read of each other, the test token (last) adds it. Source: depth (75).
    """
    mask = torch.zeros(context + 1, context + 1)
    mask[:-1, :-1] = -1
    mask[-1, :-1] = 1
    return mask


class FaithfulLinearAttention(nn.Module):
    """The linear-attention model of section 2.2, matrix by matrix, with the mask (75) and without any norm.

    dim d; width N >= d; depth L; generator: draws Gaussian matrices, W_x and W_y with variance 1, W_q and W_k with
    variance 1/sqrt(N) and W_v and W_o with variance 1/N. Parameters: W_x (N, d), W_y (N, 1), W_q and W_k (L, N, N),
    W_v (N, N), W_o (1, N), float64. Source: depth (7), (8), (11), (12), (75).
    """

    def __init__(self, dim: int, width: int, depth: int, generator: np.random.Generator) -> None:
        super().__init__()
        dim = as_integer("dim", dim, 1, MAX_WIDTH)
        width = as_integer("width", width, dim, MAX_WIDTH)
        depth = as_integer("depth", depth, 1, MAX_LAYERS)

        def gaussian(deviation: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.tensor(deviation * generator.standard_normal(shape)))

        self.input_encoder = gaussian(1, width, dim)
        self.label_encoder = gaussian(1, width, 1)
        self.query_maps = gaussian(width**-0.25, depth, width, width)
        self.key_maps = gaussian(width**-0.25, depth, width, width)
        self.value_map = gaussian(width**-0.5, width, width)
        self.readout = gaussian(width**-0.5, 1, width)

    def forward(self, tokens: Tensor, query: Tensor, labels: Tensor) -> Tensor:
        """Predictions, shape (n,), from tokens (n, P, d), query (n, d), labels (n, P). Source: depth (7), (8), (11)."""
        inputs = torch.cat([tokens, query[:, None, :]], dim=1).transpose(1, 2)
        known = torch.cat([labels, torch.zeros_like(labels[:, :1])], dim=1)[:, None, :]
        input_states = self.input_encoder @ inputs
        label_states = self.label_encoder @ known
        width, context = len(self.input_encoder), tokens.shape[1]
        mask = subtracting_mask(context).to(tokens)
        for query_map, key_map in zip(self.query_maps, self.key_maps, strict=True):
            queries, keys = query_map @ input_states, key_map @ input_states
            values = self.value_map @ label_states
            attention = mask * (queries.transpose(1, 2) @ keys) / (context * width)
            label_states = label_states + values @ attention.transpose(1, 2) / len(self.query_maps)
        return (self.readout @ label_states)[:, 0, -1]

    def composed(self) -> tuple[Tensor, Tensor]:
        r"""The matrices :math:`B_\ell = \frac1N W_x^\top W_k^\top W_q W_x` and moments :math:`m_r = W_o W_v^r W_y`.

        Shapes (L, d, d) and (L,), r = 1..L. Differentiable. They determine the function. Source: depth (20), (24).
        """
        width = len(self.input_encoder)
        keys, queries = self.key_maps @ self.input_encoder, self.query_maps @ self.input_encoder
        moments: list[Tensor] = []
        state: Tensor = self.label_encoder
        for _ in range(len(self.query_maps)):
            state = self.value_map @ state
            moments.append((self.readout @ state)[0, 0])
        return keys.transpose(1, 2) @ queries / width, torch.stack(moments)


def token_action(tokens: Tensor) -> Action:
    r"""The action of S on vectors through the tokens, :math:`Sv = \frac1P\sum_i x_i (x_i\cdot v)`.

    tokens: shape (..., P, d); vectors: shape (..., c, d). The cheapest where P < d. Source: depth (19).
    """
    return lambda vectors: (vectors @ tokens.transpose(-1, -2)) @ tokens / tokens.shape[-2]


def covariance_action(covariance: Tensor) -> Action:
    """The action of S, symmetric, shape (..., d, d), on vectors of shape (..., c, d). Source: depth (22)."""
    return lambda vectors: vectors @ covariance


def spectrum_action(variances: Tensor) -> Action:
    """The action of the population's Σ in its eigenbasis: mode k times λ_k, shape (d,). Source: depth (29)."""
    return lambda vectors: variances * vectors


def rotated_covariance(covariance: Tensor, rotation: Tensor) -> Tensor:
    """The covariance as the network sees it, O S O^T, shape (..., d, d). One S is turned instead of P tokens.

    covariance: S in the eigenbasis, shape (..., d, d), or λ, shape (d,), for S = Σ; rotation: O, shape (..., d, d).
    Source: depth (3), (19).
    """
    turned = rotation * covariance if covariance.ndim == 1 else rotation @ covariance
    return turned @ rotation.transpose(-1, -2)


def key_query_action(layer: Tensor) -> Action:
    r"""The action of one :math:`B_\ell` on vectors of shape (members, n, c, d).

    layer: matrices, shape (members, d, d), or scalars κ of B_ℓ = κ_ℓ I, shape (members,). Source: depth (20), (27).
    """
    if layer.ndim == 1:
        return lambda vectors: layer[:, None, None, None] * vectors
    return lambda vectors: (vectors.flatten(1, 2) @ layer.transpose(-1, -2)).reshape(vectors.shape)


def ordered_residual(layers: list[Action], covariance: Action, query: Tensor) -> tuple[Tensor, Tensor]:
    r"""The query after all layers and the sum of what they read: one pass, last layer first.

    .. math:: v_L = q, \quad v_{\ell-1} = v_\ell - \frac1L S B_\ell v_\ell, \qquad
              v_0 = \prod_{\ell=1}^L\Big(I - \frac1L SB_\ell\Big) q, \quad q - v_0 = \frac1L S\sum_\ell B_\ell v_\ell

    query: shape (members, n, c, d). Returns v_0 and :math:`\sum_\ell B_\ell v_\ell`, shapes of query.
    Source: depth (22), (23) with the value map that acts as one on W_y.
    """
    vector, total = query, torch.zeros_like(query)
    for layer in reversed(layers):
        read = layer(vector)
        total = total + read
        vector = vector - covariance(read) / len(layers)
    return vector, total


def moment_polynomial(layers: list[Action], moments: Tensor, covariance: Action, query: Tensor) -> Tensor:
    r"""The ordered polynomial :math:`P_L(S) q` for any moments, shape (members, n, d), in O(L²) products.

    .. math:: P_L(S) q = \sum_r \frac{(-1)^{r-1} m_r}{L^r}\, e_r, \qquad e_r \leftarrow e_r + S B_\ell\, e_{r-1}
              \ (\ell = L, \dots, 1)

    moments: m_r = W_o W_v^r W_y, shape (L,); query: shape (members, n, d). At m_r = g v^r it is `ordered_residual`
    with B_ℓ times v, which keeps its digits at large L where this alternating sum does not. Source: depth (24).
    """
    depth = len(layers)
    products = torch.cat([query[:, :, None], query.new_zeros(*query.shape[:2], depth, query.shape[-1])], dim=2)
    for layer in reversed(layers):
        longer = products[:, :, 1:] + covariance(layer(products[:, :, :-1]))
        products = torch.cat([products[:, :, :1], longer], dim=2)
    powers = torch.arange(1, depth + 1, dtype=query.dtype, device=query.device)
    coefficients = -moments * (-1.0 / depth) ** powers
    return (coefficients[:, None] * products[:, :, 1:]).sum(dim=2)


class LinearAttention(nn.Module):
    r"""The fast form: layers :math:`v \leftarrow v - \frac1L SB_\ell v` and one gain, for several members at once.

    key_query: initial B_ℓ, shape (members, L, d, d), or κ_ℓ of B_ℓ = κ_ℓ I, shape (members, L); with 1 in place of L
    all layers share one (the repeated update); gain: initial g = W_o W_y, shape (members,); depth: L >= 1. The value
    map acts as W_v W_y = v W_y with v inside B_ℓ. Source: depth (20)-(27). Raises DomainError for other shapes.
    """

    def __init__(
        self, key_query: FloatArray, gain: FloatArray, depth: int, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.depth = as_integer("depth", depth, 1, MAX_LAYERS)
        matrices, gains = np.asarray(key_query), np.asarray(gain)
        square = matrices.ndim == 2 or (matrices.ndim == 4 and matrices.shape[2] == matrices.shape[3])
        if not square or matrices.shape[1] not in (1, self.depth) or gains.shape != matrices.shape[:1]:
            raise DomainError(
                f"key_query must have shape (members, {self.depth} or 1) or (members, {self.depth} or 1, dim, dim) and "
                f"gain shape (members,), got {matrices.shape} and {gains.shape}"
            )
        self.key_query = nn.Parameter(torch.tensor(matrices, dtype=dtype))
        self.gain = nn.Parameter(torch.tensor(gains, dtype=dtype))

    def layers(self) -> list[Action]:
        """The actions of B_1..B_L. Source: depth (20), (27)."""
        distinct = [key_query_action(layer) for layer in self.key_query.unbind(dim=1)]
        return distinct if len(distinct) == self.depth else distinct * self.depth

    def polynomial(self, covariance: Action, query: Tensor) -> Tensor:
        r"""Vectors :math:`P_L(S) q = g\,(q - v_0)`, shape of query, (members, n, c, d). Source: depth (23)-(25)."""
        residual, _ = ordered_residual(self.layers(), covariance, query)
        return self.gain[:, None, None, None] * (query - residual)

    def label_weights(self, tokens: Tensor, query: Tensor) -> Tensor:
        r"""Weights :math:`w_i = \frac{g}{LP}\, x_i\cdot\sum_\ell B_\ell v_\ell` of the labels, shape (members, n, P).

        tokens: shape (members, n, P, d); query: shape (members, n, d). Source: depth (21)-(23).
        """
        _, total = ordered_residual(self.layers(), token_action(tokens), query[:, :, None])
        scale = self.gain / (self.depth * tokens.shape[-2])
        return scale[:, None, None] * (total @ tokens.transpose(-1, -2))[:, :, 0]

    def forward(self, tokens: Tensor, query: Tensor, labels: Tensor) -> Tensor:
        """Predictions w y, shape (members, n), from labels of shape (members, n, P). Source: depth (23)."""
        return (self.label_weights(tokens, query) * labels).sum(dim=-1)


def population_errors(model: LinearAttention, variances: Tensor, rotation: Tensor | None = None) -> Tensor:
    r"""Errors :math:`(P_L(\Sigma) - I)\sqrt{\lambda_j}\,e_j` of every mode j of the query, for infinitely many tokens.

    variances: λ, shape (d,); rotation: O, shape (members, n, d, d), or ``None`` for one context without rotation.
    Returns shape (members, n, d, d) in the eigenbasis, row j for the query's mode j; the population loss is the sum of
    squares weighted by ω over columns. Scalar layers have diagonal errors and need no rotation: see
    `scalar_population_errors`. Source: depth (29).
    """
    modes = torch.diag(variances.sqrt())
    if rotation is None:
        query = modes.expand(len(model.gain), 1, -1, -1)
        return model.polynomial(spectrum_action(variances), query) - query
    query = modes @ rotation.transpose(-1, -2)
    seen = model.polynomial(covariance_action(rotated_covariance(variances, rotation)), query)
    return (seen - query) @ rotation


def scalar_population_errors(model: LinearAttention, variances: Tensor) -> Tensor:
    r"""Errors :math:`-\sqrt{\lambda_k}\,r(\lambda_k)` of the modes for layers B_ℓ = κ_ℓ I, shape (members, d).

    .. math:: r(\lambda) = 1 - g + g\prod_\ell\Big(1 - \frac{\kappa_\ell}{L}\lambda\Big)

    variances: λ, shape (d,). Source: depth (30), (33).
    """
    if model.key_query.ndim != 2:
        raise DomainError(
            f"key_query must hold one scalar per layer, shape (members, L), got {tuple(model.key_query.shape)}"
        )
    deviations = variances.sqrt()
    query = deviations.expand(len(model.gain), 1, 1, -1)
    return (model.polynomial(spectrum_action(variances), query) - query)[:, 0, 0]


def population_losses(errors: Tensor, teacher: Tensor) -> Tensor:
    r"""Losses :math:`\operatorname{tr}[D^\top\Omega D\Sigma]` of each context, shape (members, n).

    errors: of `population_errors`; teacher: ω, shape (d,). Source: depth (29).
    """
    return (errors.square() * teacher).sum(dim=(-1, -2))
