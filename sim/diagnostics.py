r"""Diagnostics of any model of a context: one's own network, an estimator, a formula.

A model is a callable or a torch module that maps a batch of contexts to predictions, ``model(tokens, query, labels)``
with tokens of shape (n, P, d), query (n, d) and labels (n, P), as the network sees them: every context has its own
rotation. It returns the predictions, shape (n,), or a `ModelOutput` that also holds the predictions of its layers and
its attention. It is measured on fresh contexts that are the same for all models of a task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.contexts import Contexts, SampleSize, estimate_from_chunks, sample_contexts, sample_labels
from sim.streams import stream
from theory.problems import CopyTask, TopKTask, as_real
from theory.results import DomainError, Estimate, FloatArray, PrecisionError

# Relative departures that are put down to single precision: of the mean over layers from the prediction, and of the
# prediction of a sum of labels from the sum of predictions.
TOLERANCE = 1e-3
PERCENTILES = (5.0, 25.0, 50.0, 75.0, 95.0, 99.0)

Model = Callable[..., Any]


@dataclass(frozen=True, eq=False, slots=True)
class ModelOutput:
    """What a model may return besides its predictions.

    predictions: shape (n,); layers: predictions f_ℓ of its layers, whose mean is the prediction, shape (n, L);
    attention: weights of the query on the context tokens, shape (n, P), or (n, L, P) for several layers.
    Source: depth (60), (68), (90).
    """

    predictions: npt.ArrayLike
    layers: npt.ArrayLike | None = None
    attention: npt.ArrayLike | None = None


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """What was measured, each number with its error; ``None`` where the model does not give what it takes.

    loss: mean squared error R; zero_loss: that of predicting 0; shared_error: C and disagreement: A - C of layers, with
    R = C + (A - C)/L; mode_losses: of spectral modes by number, from 1; attention_mass: on the target tokens;
    selection_error: mean of the squared distance of attention and target row; selection_percentiles: of the same by
    percent. Losses are in units of squared labels, the last three are pure numbers.
    Source: depth (12), (61)-(63), (90), (91), Figures 3(c), 4(c) and 7.
    """

    task: TopKTask | CopyTask
    loss: Estimate
    zero_loss: Estimate
    shared_error: Estimate | None = None
    disagreement: Estimate | None = None
    mode_losses: Mapping[int, Estimate] | None = None
    attention_mass: Estimate | None = None
    selection_error: Estimate | None = None
    selection_percentiles: Mapping[float, Estimate] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        content: dict[str, Any] = {"task": self.task.to_json()}
        for name in ("loss", "zero_loss", "shared_error", "disagreement", "attention_mass", "selection_error"):
            value = getattr(self, name)
            content[name] = None if value is None else value.to_json()
        for name in ("mode_losses", "selection_percentiles"):
            values = getattr(self, name)
            content[name] = None if values is None else {f"{key:g}": value.to_json() for key, value in values.items()}
        return content


def diagnose(
    model: Model,
    task: TopKTask | CopyTask,
    *,
    linear: bool = False,
    seed: int = 0,
    size: SampleSize | None = None,
    percentiles: tuple[float, ...] = PERCENTILES,
) -> Diagnostics:
    r"""Measure ``model`` on contexts of ``task``.

    linear: the model is linear in the labels, which is checked; losses are then averaged over the teacher in closed
    form, with less noise, and split into spectral modes, at the price of ``dim`` calls per batch. Otherwise one teacher
    is drawn per context. seed, size: stream and number of contexts, 16 chunks of 256 where ``None``. percentiles: of
    the selection errors, whose errors are those of the percentiles of chunks.

    A torch module is called without gradients on tensors of the type and device of its parameters, in the mode that it
    is in; anything else is called on NumPy arrays. Source: depth (12), (61)-(63), (90), (91). Raises DomainError where
    shapes are wrong, layers do not average to the prediction, or a model is not linear that is said to be;
    PrecisionError where an output is not finite.
    """
    size = SampleSize(chunks=16, chunk_batches=1, batch=256) if size is None else size
    levels = tuple(as_real("percentiles", level, 0, 100) for level in percentiles)
    parts: list[list[dict[str, FloatArray]]] = []
    for index in range(size.chunks):
        context_stream, label_stream = (stream(seed, f"evaluation {name}", index) for name in ("contexts", "labels"))
        batches: list[dict[str, FloatArray]] = []
        for _ in range(size.chunk_batches):
            contexts = sample_contexts(task, size.batch, context_stream)
            if linear and index == 0 and not batches:
                _check_linear(model, contexts, label_stream)
            batches.append(_measure(model, contexts, _columns(contexts, linear, label_stream)))
        parts.append(batches)
    chunks = [{name: np.concatenate([b[name] for b in batches]) for name in batches[0]} for batches in parts]
    values = {name: np.array([chunk[name].mean(axis=0) for chunk in chunks]) for name in chunks[0]}

    def estimate(name: str) -> Estimate | None:
        return estimate_from_chunks(values[name], size.contexts, seed) if name in values else None

    loss, zero = estimate("loss"), estimate("zero_loss")
    assert loss is not None  # every model has a loss
    assert zero is not None
    return Diagnostics(
        task=task,
        loss=loss,
        zero_loss=zero,
        shared_error=estimate("shared_error"),
        disagreement=estimate("disagreement"),
        mode_losses=_mode_estimates(values["shares"], task, size, seed) if linear else None,
        attention_mass=estimate("attention_mass"),
        selection_error=estimate("selection_error"),
        selection_percentiles=_percentile_estimates(chunks, levels, size, seed)
        if "selection_error" in values
        else None,
    )


def _columns(contexts: Contexts, linear: bool, generator: np.random.Generator) -> FloatArray:
    """Label vectors whose squared errors add up to the loss, shape (columns, n, P): one teacher, or all modes."""
    if linear:
        return np.moveaxis(contexts.label_factors(), 2, 0)
    return sample_labels(contexts, generator)[None]


def _measure(model: Model, contexts: Contexts, columns: FloatArray) -> dict[str, FloatArray]:
    """Quantities of each context, shape (n,), and ``shares``, shape (n, columns), whose sum is the loss."""
    outputs = [_call(model, contexts, labels) for labels in columns]
    goals = np.einsum("np,cnp->nc", contexts.target, columns)
    errors = np.stack([output.predictions for output in outputs], axis=1) - goals
    shares, zero_shares = errors**2, goals**2
    measured = {"loss": shares.sum(axis=1), "zero_loss": zero_shares.sum(axis=1), "shares": shares}
    if outputs[0].layers is not None:
        layers = np.stack([np.asarray(output.layers) for output in outputs], axis=2)
        depth = layers.shape[1]
        if depth > 1:
            centred = layers - layers.mean(axis=1, keepdims=True)
            spread = np.sum(centred**2, axis=(1, 2)) / (depth - 1)
            measured |= {"disagreement": spread, "shared_error": measured["loss"] - spread / depth}
    if outputs[0].attention is not None:
        row = np.asarray(outputs[0].attention)
        measured["attention_mass"] = np.sum(row * (contexts.target > 0), axis=1)
        measured["selection_error"] = np.sum((row - contexts.target) ** 2, axis=1)
    return measured


def _call(model: Model, contexts: Contexts, labels: FloatArray) -> ModelOutput:
    """The checked output of a model as float64 arrays, attention averaged over layers."""
    arrays = (contexts.rotated(contexts.tokens), contexts.rotated(contexts.query), labels)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        parameter = next(model.parameters(), torch.empty(0, dtype=torch.float64))
        with torch.no_grad():
            tensors = (torch.tensor(a, dtype=parameter.dtype, device=parameter.device) for a in arrays)
            output = model(*tensors)
    else:
        output = model(*arrays)
    if not isinstance(output, ModelOutput):
        output = ModelOutput(output)
    count, tokens = labels.shape
    predictions = _array("predictions", output.predictions, [(count,)])
    layers = attention = None
    if output.layers is not None:
        layers = _array("layers", output.layers, [(count, None)])
        scale = np.abs(layers).max()
        if np.abs(layers.mean(axis=1) - predictions).max() > TOLERANCE * scale:
            raise DomainError("layers must have the prediction as their mean: see ModelOutput for what they are")
    if output.attention is not None:
        attention = _array("attention", output.attention, [(count, tokens), (count, None, tokens)])
        attention = attention.mean(axis=1) if attention.ndim == 3 else attention
    return ModelOutput(predictions, layers, attention)


def _array(name: str, value: Any, shapes: list[tuple[int | None, ...]]) -> FloatArray:
    """``value`` as a float64 array of one of ``shapes`` (``None`` is any length) with finite entries."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value, dtype=np.float64)
    fits = any(
        len(shape) == array.ndim and all(size in (None, own) for size, own in zip(shape, array.shape, strict=True))
        for shape in shapes
    )
    if array.size == 0 or not fits:
        wanted = " or ".join(str(tuple("any" if size is None else size for size in shape)) for shape in shapes)
        raise DomainError(f"{name} of the model must have shape {wanted}, got {array.shape}")
    if not np.isfinite(array).all():
        raise PrecisionError(f"{name} of the model must be finite, got {array[~np.isfinite(array)][0]}")
    return array


def _check_linear(model: Model, contexts: Contexts, generator: np.random.Generator) -> None:
    first, second = (sample_labels(contexts, generator) for _ in range(2))
    one, other, both = (
        np.asarray(_call(model, contexts, labels).predictions) for labels in (first, second, first - 2 * second)
    )
    departure = np.abs(both - (one - 2 * other)).max()
    if departure > TOLERANCE * (np.abs(one).max() + np.abs(other).max()):
        raise DomainError(
            f"linear must be False for a model that is not linear in the labels: superposition fails by {departure:g}"
        )


def _mode_estimates(
    shares: FloatArray, task: TopKTask | CopyTask, size: SampleSize, seed: int
) -> dict[int, Estimate]:
    """Losses of all modes; where the input is isotropic, shares ω_k / tr Ω of the loss, see `mode_losses`."""
    if task.spectrum.isotropic_input:
        teacher = task.spectrum.teacher_variances()
        shares = shares.sum(axis=1)[:, None] * teacher / teacher.sum()
    columns = (shares[:, mode] for mode in range(shares.shape[1]))
    return {mode: estimate_from_chunks(column, size.contexts, seed) for mode, column in enumerate(columns, 1)}


def _percentile_estimates(
    chunks: list[dict[str, FloatArray]], levels: tuple[float, ...], size: SampleSize, seed: int
) -> dict[float, Estimate] | None:
    """Percentiles over all contexts, with the standard error that the percentiles of single chunks give."""
    if "selection_error" not in chunks[0]:
        return None
    pooled = np.percentile(np.concatenate([chunk["selection_error"] for chunk in chunks]), levels)
    single = np.array([np.percentile(chunk["selection_error"], levels) for chunk in chunks])
    errors = single.std(axis=0, ddof=1) / np.sqrt(size.chunks)
    numbers = zip(levels, pooled, errors, strict=True)
    return {level: Estimate(value, error, size.contexts, size.chunks, seed) for level, value, error in numbers}
