r"""Layers as an ensemble of predictors, depth (57)-(74), and their selection errors, (90)-(91).

With layer predictions f_ℓ, errors e_ℓ = f_ℓ - y* and the output their mean, the loss splits exactly into an error
that all layers share and the disagreement that averaging divides by L: :math:`R = C + (A - C)/L`. Everything here
costs O(L): the disagreement is the variance over layers, from centred predictions, so that it keeps its digits where
layers nearly agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from theory.problems import as_depths, as_integer
from theory.results import DomainError, Estimate, FloatArray, IntArray

DEFAULT_CHUNKS = 64


@dataclass(frozen=True, eq=False, slots=True)
class EnsembleTerms:
    r"""The terms of :math:`R = C + (A-C)/L`, of one average or of each context: numbers or arrays of one shape.

    risk: R; layer_risk: A, the mean squared error of a single layer; shared: C; disagreement: A - C >= 0.
    Source: depth (61)-(63).
    """

    layers: int
    risk: FloatArray
    layer_risk: FloatArray
    shared: FloatArray
    disagreement: FloatArray


@dataclass(frozen=True, slots=True)
class EnsembleEstimate:
    """The terms of `EnsembleTerms` as means over sampled contexts, with errors. Source: depth (61)-(63)."""

    layers: int
    risk: Estimate
    layer_risk: Estimate
    shared: Estimate
    disagreement: Estimate


def _array(name: str, value: npt.ArrayLike, least_axes: int) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim < least_axes or array.size == 0 or not np.isfinite(array).all():
        raise DomainError(
            f"{name} must be a non-empty array of finite numbers with at least {least_axes} axes, got {array.shape}"
        )
    return array


def cosine_similarities(tokens: npt.ArrayLike, query: npt.ArrayLike) -> FloatArray:
    r"""Relevance :math:`s_i = x_{test}^\top x_i / (\|x_{test}\|\,\|x_i\|)`, shape (..., P).

    tokens: shape (..., P, d); query: shape (..., d). Vectors are divided by their largest entry first, so that no
    length over- or underflows. Source: depth (6), (57). Raises DomainError for a vector of zeros.
    """
    x, q = _array("tokens", tokens, 2), _array("query", query, 1)
    return np.asarray(np.einsum("...pd,...d->...p", _directions(x), _directions(q)))


def _directions(vectors: FloatArray) -> FloatArray:
    largest = np.abs(vectors).max(axis=-1, keepdims=True)
    if not (largest > 0).all():
        raise DomainError("tokens and query must not be zero vectors: they have no direction")
    scaled = vectors / largest
    return np.asarray(scaled / np.sqrt(np.sum(scaled**2, axis=-1, keepdims=True)))


def top_indices(scores: npt.ArrayLike, top_k: int) -> IntArray:
    """Indices of the ``top_k`` largest scores, best first, the lowest index first on ties, shape (..., top_k).

    scores: shape (..., P). Source: depth (6), (57). Raises DomainError where top_k exceeds P.
    """
    s = _array("scores", scores, 1)
    k = as_integer("top_k", top_k, 1, s.shape[-1])
    return np.asarray(np.argsort(-s, axis=-1, kind="stable")[..., :k], dtype=np.int64)


def target_rows(scores: npt.ArrayLike, top_k: int) -> FloatArray:
    r"""Target row :math:`t_{k,i} = 1/k` at the ``top_k`` largest scores, 0 elsewhere, shape (..., P).

    scores: shape (..., P). The target is then :math:`y^* = t_k y`. Source: depth (58).
    """
    chosen = top_indices(scores, top_k)
    rows = np.zeros(np.shape(scores))
    np.put_along_axis(rows, chosen, 1 / top_k, axis=-1)
    return rows


def layer_predictions(attention: npt.ArrayLike, labels: npt.ArrayLike, gain: npt.ArrayLike = 1.0) -> FloatArray:
    r"""Predictions :math:`f_\ell = g_\ell\, p_\ell\, y` of the two-stream layers, shape (..., L).

    attention: rows p_ℓ, shape (..., L, P); labels: y, shape (..., P); gain: one number g_L for shared values, or
    g_ℓ of shape (..., L) for layers with values of their own. Source: depth (60), (72).
    """
    p, y = _array("attention", attention, 2), _array("labels", labels, 1)
    if p.shape[-1] != y.shape[-1]:
        raise DomainError(f"labels must have one entry per token ({p.shape[-1]}), got {y.shape[-1]}")
    return np.asarray(np.asarray(gain, dtype=np.float64) * np.einsum("...lp,...p->...l", p, y))


def increment_predictions(readouts: npt.ArrayLike) -> FloatArray:
    r"""Effective predictions :math:`f_\ell = z_0 + L(z_\ell - z_{\ell-1})` of a single-stream model, shape (..., L).

    readouts: z_0..z_L of the test token, shape (..., L + 1). Their mean is z_L. Source: depth (67), (68).
    """
    z = _array("readouts", readouts, 1)
    layers = z.shape[-1] - 1
    if layers < 1:
        raise DomainError("readouts must hold z_0 and at least one layer, got one readout")
    return np.asarray(z[..., :1] + layers * np.diff(z, axis=-1))


def disagreement(predictions: npt.ArrayLike) -> FloatArray:
    r"""Disagreement A - C of each context, the unbiased variance over layers, shape (...).

    .. math:: A - C = \frac1{2L(L-1)}\sum_{\ell\ne m}(f_\ell - f_m)^2 = \frac1{L-1}\sum_\ell (f_\ell - \hat y)^2

    predictions: f_ℓ, shape (..., L), L >= 2. Centred in two passes, so equal layers give exactly zero.
    Source: depth (63), (69), (73). Raises DomainError for one layer.
    """
    f = _array("predictions", predictions, 1)
    if f.shape[-1] < 2:
        raise DomainError("predictions must have at least 2 layers for a disagreement, got 1")
    return np.asarray(np.sum(_centred(f) ** 2, axis=-1) / (f.shape[-1] - 1))


def _centred(f: FloatArray) -> FloatArray:
    """Predictions minus their mean over layers; shifting by the first layer makes equal layers exactly zero."""
    shifted = f - f[..., :1]
    shifted -= shifted.mean(axis=-1, keepdims=True)
    return np.asarray(shifted - shifted.mean(axis=-1, keepdims=True))


def context_terms(predictions: npt.ArrayLike, targets: npt.ArrayLike) -> EnsembleTerms:
    r"""The terms R, A, C, A - C of every context, each of shape (...).

    .. math:: R = \bar e^2, \quad A - C = \tfrac1{L-1}\textstyle\sum_\ell(f_\ell-\hat y)^2, \quad
              A = R + \tfrac{L-1}L(A-C), \quad C = R - \tfrac1L(A-C)

    predictions: f_ℓ, shape (..., L), L >= 2; targets: y*, shape (...). C of a single context may be negative.
    Source: depth (61)-(63), (68)-(70), (72)-(74) before E, in O(L).
    """
    f, y = _array("predictions", predictions, 1), np.asarray(targets, dtype=np.float64)
    if f.shape[:-1] != y.shape or not np.isfinite(y).all():
        raise DomainError(f"targets must be finite and have shape {f.shape[:-1]}, got {y.shape}")
    spread = disagreement(f)
    layers = f.shape[-1]
    risk = np.asarray(np.mean(f - y[..., np.newaxis], axis=-1) ** 2)
    layer_risk, shared = risk + spread * ((layers - 1) / layers), risk - spread / layers
    return EnsembleTerms(layers, risk, np.asarray(layer_risk), np.asarray(shared), spread)


def ensemble_terms(predictions: npt.ArrayLike, targets: npt.ArrayLike) -> EnsembleTerms:
    r"""The terms of :math:`R = C + (A-C)/L` averaged over all contexts: arrays of shape ().

    predictions: shape (..., L), L >= 2; targets: shape (...). Source: depth (61)-(63), (70), (74).
    """
    terms = context_terms(predictions, targets)
    means = (np.asarray(np.mean(v)) for v in (terms.risk, terms.layer_risk, terms.shared, terms.disagreement))
    return EnsembleTerms(terms.layers, *means)


def estimate_terms(
    predictions: npt.ArrayLike, targets: npt.ArrayLike, *, seed: int, chunks: int = DEFAULT_CHUNKS
) -> EnsembleEstimate:
    """Unbiased estimates of R, A, C and A - C over independent contexts, with standard errors.

    predictions: shape (contexts, L); targets: shape (contexts,); chunks: number of equal groups, a divisor of the
    number of contexts; seed: of the contexts, recorded only. Each term is a mean of one number per context, so it has
    no bias at any number of contexts. Source: depth (61)-(63). Raises DomainError where chunks does not divide.
    """
    terms = context_terms(predictions, targets)
    contexts = terms.risk.size
    groups = as_integer("chunks", chunks, 2)
    if terms.risk.ndim != 1 or contexts % groups:
        raise DomainError(f"chunks must divide the number of contexts ({contexts}), got {groups}")

    def estimate(values: FloatArray) -> Estimate:
        means = values.reshape(groups, -1).mean(axis=1)
        return Estimate(float(means.mean()), float(means.std(ddof=1) / np.sqrt(groups)), contexts, groups, seed)

    fields = (terms.risk, terms.layer_risk, terms.shared, terms.disagreement)
    return EnsembleEstimate(terms.layers, *(estimate(values) for values in fields))


def ensemble_risk(shared: npt.ArrayLike, disagreement: npt.ArrayLike, depth: npt.ArrayLike) -> FloatArray:
    r"""Loss :math:`R_L = C + (A-C)/L`; arguments broadcast; depth: L >= 1. Source: depth (17), (62), (70), (74)."""
    layers = as_depths(depth)
    if (layers < 1).any():
        raise DomainError("depth must be >= 1 for an ensemble, got 0")
    return np.asarray(np.asarray(shared) + np.asarray(disagreement) / layers)


def selection_errors(attention: npt.ArrayLike, target: npt.ArrayLike) -> FloatArray:
    r"""Selection error :math:`E_L(c) = \|\bar p_L(c) - p^*\|_2^2` of every context, shape (...).

    attention: p_ℓ, shape (..., L, P); target: p*, shape (..., P), in the same order of tokens (sorting both by
    similarity changes nothing). Source: depth (90).
    """
    p, row = _array("attention", attention, 2), _array("target", target, 1)
    return np.asarray(np.sum((p.mean(axis=-2) - row) ** 2, axis=-1))


def error_percentiles(errors: npt.ArrayLike, percentile: npt.ArrayLike) -> FloatArray:
    r"""Percentiles :math:`Q_L(q)` of the selection errors of n contexts, shape of percentile.

    errors: shape (n,); percentile: q in [0, 100], linear between order statistics. Source: depth (91).
    """
    q = np.asarray(percentile, dtype=np.float64)
    if not ((q >= 0) & (q <= 100)).all():
        raise DomainError(f"percentile must lie in [0, 100], got {q.tolist()}")
    return np.asarray(np.percentile(_array("errors", errors, 1), q))


def percentile_gain(shallow: npt.ArrayLike, deep: npt.ArrayLike, percentile: npt.ArrayLike) -> FloatArray:
    r"""Gain of depth :math:`\Delta Q(q) = Q_{shallow}(q) - Q_{deep}(q)`, positive where the deep model is better.

    shallow, deep: selection errors, shape (n,) each; percentile: q in [0, 100]. Source: depth (91).
    """
    return error_percentiles(shallow, percentile) - error_percentiles(deep, percentile)
