"""Training of the softmax ensemble on the difficult task, and the measurement of what it learned.

Every batch comes from the stream of its step, so a run is a function of its `TrainingConfig` alone: the same bits on
the same machine. Training is float32 on one thread with matmul precision "highest"; the loss, the shared error and
the disagreement of layers are measured in float64 on fresh contexts that are the same for all runs of a task.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from sim.contexts import Contexts, SampleSize, chunk_means, estimate_from_chunks, sample_contexts, sample_labels
from sim.streams import MAX_SEED, stream
from theory.problems import TopKTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, MissingDependencyError, PrecisionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sim.models.softmax_attention import SoftmaxEnsemble

Loss = Literal["teacher_averaged", "sampled"]
Schedule = Literal["cosine", "constant"]
Progress = Callable[[int, float], None]

MATMUL_PRECISION = "highest"
# The gain is of order 1 and the entries of the matrices of order 10, so Adam moves the gain in smaller steps.
GAIN_RATE = 0.1
MAX_LAYERS = 2**14
MAX_STEPS = 10**8


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """All that determines a training run.

    task; depth L >= 1; steps, batch: Adam steps and contexts per step; learning_rate: of the entries of B_ℓ (the gain
    takes a tenth); schedule: ``cosine`` falls to zero at the last step; loss: ``teacher_averaged`` takes the mean
    over the teacher in closed form, ``sampled`` draws one teacher per context as the paper does.
    initial_scales: (low, high), layers start at B_ℓ = s_ℓ I + noise with s_ℓ geometric from low to high, as layers of
    one sharpness need thousands of steps to part; initial_noise: standard deviation of each entry of the noise.
    seed: of weights and batches; evaluation_seed, evaluation: stream and number of contexts of the evaluation;
    history_every: steps per entry of the history. Source: depth section 2.2, (12). Raises DomainError outside ranges.
    """

    task: TopKTask
    depth: int
    steps: int = 2500
    batch: int = 256
    learning_rate: float = 0.1
    schedule: Schedule = "cosine"
    loss: Loss = "teacher_averaged"
    initial_scales: tuple[float, float] = (1.0, 50.0)
    initial_noise: float = 1.0
    seed: int = 0
    evaluation_seed: int = 0
    evaluation: SampleSize = field(default_factory=SampleSize)
    history_every: int = 100

    def __post_init__(self) -> None:
        fix = object.__setattr__
        if not isinstance(self.task, TopKTask):
            raise DomainError(f"task must be a TopKTask, got {self.task!r}")
        fix(self, "depth", as_integer("depth", self.depth, 1, MAX_LAYERS))
        fix(self, "steps", as_integer("steps", self.steps, 1, MAX_STEPS))
        fix(self, "batch", as_integer("batch", self.batch, 1, 2**20))
        fix(self, "learning_rate", as_real("learning_rate", self.learning_rate, 0, 1e3, open_low=True))
        _check_choice("schedule", self.schedule, get_args(Schedule))
        _check_choice("loss", self.loss, get_args(Loss))
        fix(self, "initial_scales", _as_scales(self.initial_scales))
        fix(self, "initial_noise", as_real("initial_noise", self.initial_noise, 0, 1e6))
        fix(self, "seed", as_integer("seed", self.seed, 0, MAX_SEED))
        fix(self, "evaluation_seed", as_integer("evaluation_seed", self.evaluation_seed, 0, MAX_SEED))
        if not isinstance(self.evaluation, SampleSize):
            raise DomainError(f"evaluation must be a SampleSize, got {self.evaluation!r}")
        fix(self, "history_every", as_integer("history_every", self.history_every, 1, MAX_STEPS))


def _as_scales(scales: object) -> tuple[float, float]:
    if not isinstance(scales, Sequence) or len(scales) != 2:
        raise DomainError(f"initial_scales must be a pair (low, high) with 0 < low <= high <= 1e6, got {scales!r}")
    low = as_real("initial_scales[0]", scales[0], 0, 1e6, open_low=True)
    return low, as_real("initial_scales[1]", scales[1], low, 1e6)


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DomainError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Numerics:
    """What the bits of a run depend on besides its config: types, matmul precision, threads and library versions."""

    training_dtype: str
    evaluation_dtype: str
    matmul_precision: str
    threads: int
    torch_version: str
    numpy_version: str


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A trained ensemble and its measured errors, in units of the squared labels.

    loss: R; shared_error: C; disagreement: A - C, with R = C + (A - C)/L exactly; the last two are ``None`` at depth
    1, where there is no pair of layers. loss_chunks: R of each chunk of contexts, for paired comparisons of runs.
    gain: g; key_query: B_ℓ, shape (L, d, d); layer_scales, layer_spreads: α_ℓ and β_ℓ, see `scales_and_spreads`.
    history: (step, mean training loss since the entry before). seconds: wall time of training and of evaluation.
    Source: depth (60)-(63).
    """

    config: TrainingConfig
    loss: Estimate
    shared_error: Estimate | None
    disagreement: Estimate | None
    loss_chunks: tuple[float, ...]
    gain: float
    layer_scales: tuple[float, ...]
    layer_spreads: tuple[float, ...]
    history: tuple[tuple[int, float], ...]
    numerics: Numerics
    key_query: FloatArray = field(compare=False, repr=False)
    seconds: tuple[float, float] = field(compare=False)


def train(config: TrainingConfig, progress: Progress | None = None) -> TrainingResult:
    """Train one ensemble and measure it; ``progress(step, loss)`` is called at each entry of the history.

    The same config gives the same bits on the same machine. Raises PrecisionError where the loss stops being finite,
    MissingDependencyError without torch. Source: depth section 2.2, (12), (60)-(63).
    """
    torch = _require_torch()
    with _one_precise_thread():
        started = time.perf_counter()
        model = _initial_model(config)
        history = tuple(_optimise(model, config, progress))
        trained = time.perf_counter()
        model = model.to(torch.float64)
        chunks = evaluation_chunks(model, config)
        evaluated = time.perf_counter()
        numerics = _numerics()
    key_query = model.key_query.detach().numpy().copy()
    scales, spreads = scales_and_spreads(key_query)
    loss, shared, disagreement = _estimates(chunks, config)
    return TrainingResult(
        config=config,
        loss=loss,
        shared_error=shared,
        disagreement=disagreement,
        loss_chunks=tuple(chunks[:, 0].tolist()),
        gain=model.gain.item(),
        layer_scales=tuple(scales.tolist()),
        layer_spreads=tuple(spreads.tolist()),
        history=history,
        numerics=numerics,
        key_query=key_query,
        seconds=(trained - started, evaluated - trained),
    )


def train_many(
    configs: Sequence[TrainingConfig], workers: int = 2, progress: Callable[[float], None] | None = None
) -> list[TrainingResult]:
    """Results of ``configs`` in their order, trained in ``workers`` processes of one torch thread each.

    The bits are those of `train`. With one worker or one config everything runs in this process. Scripts must guard
    their entry (``if __name__ == "__main__"``), as processes are spawned. progress is called with the fraction of runs
    done. Source: no equation.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    workers = min(as_integer("workers", workers, 1, 4096), len(configs))
    report = progress or (lambda _: None)
    with ExitStack() as stack:
        if workers > 1:
            pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=get_context("spawn")))
            runs = pool.map(train, configs)
        else:
            runs = map(train, configs)
        results = []
        for result in runs:
            results.append(result)
            report(len(results) / len(configs))
    return results


def paired_difference(first: TrainingResult, second: TrainingResult) -> Estimate:
    """R of ``first`` minus R of ``second`` on the contexts that both were measured on.

    Its error is much smaller than that of either loss, as the contexts are common. Raises DomainError where task,
    evaluation or evaluation_seed differ. Source: Monte Carlo with common random numbers; no equation.
    """
    for name in ("task", "evaluation", "evaluation_seed"):
        one, other = getattr(first.config, name), getattr(second.config, name)
        if one != other:
            raise DomainError(f"{name} must be the same in both runs for a paired difference, got {one} and {other}")
    differences = np.array(first.loss_chunks) - np.array(second.loss_chunks)
    return estimate_from_chunks(differences, first.config.evaluation.contexts, first.config.evaluation_seed)


def scales_and_spreads(key_query: FloatArray) -> tuple[FloatArray, FloatArray]:
    r"""How layers read the query on average over its direction: B q = α q + rest with mean square length β².

    α = tr(B)/d and β = ‖B - α I‖_F / sqrt(d); key_query: shape (L, d, d); returns both, shape (L,).
    Source: beyond the paper, the law of (α, β) of the mean field.
    """
    dim = key_query.shape[-1]
    scales = np.trace(key_query, axis1=1, axis2=2) / dim
    rests = key_query - scales[:, None, None] * np.eye(dim)
    return scales, np.linalg.norm(rests, axis=(1, 2)) / math.sqrt(dim)


def label_unit(task: TopKTask) -> float:
    """Root mean square of a label, sqrt(Σ λ_k ω_k), in which labels are trained so that float32 fits every scale.

    Source: depth (1), (3), the trace of ΣΩ.
    """
    return math.sqrt(float(task.spectrum.label_variances().sum()))


def learning_rate_at(config: TrainingConfig, step: int) -> float:
    """Learning rate of step 0 <= step < steps. Source: half a cosine, or constant; no equation."""
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (1 + math.cos(math.pi * step / config.steps)) / 2


def initial_key_query(config: TrainingConfig) -> FloatArray:
    """Initial B_ℓ = s_ℓ I + noise, shape (L, d, d), with s_ℓ geometric; one layer takes the geometric mean.

    Source: see `TrainingConfig`; no equation.
    """
    low, high = config.initial_scales
    fractions = (np.arange(config.depth) + 0.5) / config.depth
    scales = low * (high / low) ** fractions
    dim = config.task.spectrum.dim
    assert dim is not None  # TopKTask holds finite spectra only
    noise = stream(config.seed, "initial weights").standard_normal((config.depth, dim, dim))
    matrices: FloatArray = scales[:, None, None] * np.eye(dim) + config.initial_noise * noise
    return matrices


def teacher_averaged_losses(weights: Tensor, target: Tensor, factors: Tensor) -> Tensor:
    r"""Squared errors averaged over the teacher, :math:`|F^T (w - t)|^2`, shape (n,).

    weights w, target t: shape (n, P); factors F: shape (n, P, d). Source: depth (12) and (3).
    """
    return ((weights - target)[:, None, :] @ factors).square().sum(dim=(1, 2))


def sampled_losses(weights: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Squared errors ((w - t) y)² at drawn labels, shape (n,); all arguments of shape (n, P). Source: depth (12)."""
    return ((weights - target) * labels).sum(dim=1).square()


def layer_decomposition(errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss R, shared error C and disagreement A - C of each context, shape (n,) each, for L >= 2 layers.

    errors: e_ℓ = F^T (g p_ℓ - t) in the metric of the labels, shape (n, L, d). C is the mean of e_ℓ . e_m over pairs,
    (L R - A)/(L - 1), and A - C the sample variance of the layers; R = C + (A - C)/L. Source: depth (61)-(63), (69).
    """
    depth = errors.shape[1]
    mean = errors.mean(dim=1, keepdim=True)
    loss = mean.square().sum(dim=(1, 2))
    average = errors.square().sum(dim=2).mean(dim=1)
    shared = (depth * loss - average) / (depth - 1)
    disagreement = (errors - mean).square().sum(dim=(1, 2)) / (depth - 1)
    return loss, shared, disagreement


def evaluation_chunks(model: SoftmaxEnsemble, config: TrainingConfig) -> FloatArray:
    """R, C and A - C of a float64 model per chunk of evaluation contexts, shape (chunks, 3); (chunks, 1) at depth 1.

    Source: depth (61)-(63).
    """
    torch = _require_torch()

    def measure(contexts: Contexts) -> FloatArray:
        batch = _Batch(contexts, torch.float64)
        layers = model.gain * model.layer_weights(batch.directions, batch.query_direction)
        errors = (layers - batch.target[:, None, :]) @ batch.factors
        if errors.shape[1] == 1:
            losses: FloatArray = errors.square().sum(dim=2).numpy()
            return losses
        rows: FloatArray = torch.stack(layer_decomposition(errors), dim=1).numpy()
        return rows

    with torch.no_grad():
        chunks = chunk_means(measure, config.task, config.evaluation_seed, "evaluation contexts", config.evaluation)
    return chunks * label_unit(config.task) ** 2


class _Batch:
    """The arrays of `Contexts` as tensors: rotated as the network sees them, labels in units of `label_unit`."""

    def __init__(self, contexts: Contexts, dtype: torch.dtype) -> None:
        import torch

        # torch.tensor copies, so that alignment and hence the bits do not depend on where NumPy put the array.
        self.directions = torch.tensor(contexts.rotated(contexts.directions), dtype=dtype)
        self.query_direction = torch.tensor(contexts.rotated(contexts.query_direction), dtype=dtype)
        self.target = torch.tensor(contexts.target, dtype=dtype)
        self.factors = torch.tensor(contexts.label_factors() / label_unit(contexts.task), dtype=dtype)


def _initial_model(config: TrainingConfig) -> SoftmaxEnsemble:
    import torch

    from sim.models.softmax_attention import SoftmaxEnsemble

    return SoftmaxEnsemble(initial_key_query(config), 1.0, torch.float32)


def _training_loss(model: SoftmaxEnsemble, config: TrainingConfig, step: int) -> Tensor:
    import torch

    generator = stream(config.seed, "training contexts", step)
    contexts = sample_contexts(config.task, config.batch, generator)
    batch = _Batch(contexts, torch.float32)
    weights = model.label_weights(batch.directions, batch.query_direction)
    if config.loss == "sampled":
        labels = torch.tensor(sample_labels(contexts, generator) / label_unit(config.task), dtype=torch.float32)
        return sampled_losses(weights, batch.target, labels).mean()
    return teacher_averaged_losses(weights, batch.target, batch.factors).mean()


def _optimise(
    model: SoftmaxEnsemble, config: TrainingConfig, progress: Progress | None
) -> Iterator[tuple[int, float]]:
    import torch

    matrices: dict[str, Any] = {"params": [model.key_query], "factor": 1.0}
    gain: dict[str, Any] = {"params": [model.gain], "factor": GAIN_RATE}
    optimiser = torch.optim.Adam([matrices, gain], lr=config.learning_rate)
    window: list[float] = []
    for step in range(config.steps):
        for group in optimiser.param_groups:
            group["lr"] = group["factor"] * learning_rate_at(config, step)
        loss = _training_loss(model, config, step)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        window.append(loss.item())
        if not math.isfinite(window[-1]):
            rate = config.learning_rate
            raise PrecisionError(
                f"the loss must stay finite, got {window[-1]} at step {step + 1}: lower learning_rate, {rate:g}"
            )
        if (step + 1) % config.history_every == 0 or step + 1 == config.steps:
            mean = label_unit(config.task) ** 2 * math.fsum(window) / len(window)
            window.clear()
            if progress is not None:
                progress(step + 1, mean)
            yield step + 1, mean


def _estimates(chunks: FloatArray, config: TrainingConfig) -> tuple[Estimate, Estimate | None, Estimate | None]:
    samples, seed = config.evaluation.contexts, config.evaluation_seed
    estimates = [estimate_from_chunks(column, samples, seed) for column in chunks.T]
    if config.depth == 1:
        return estimates[0], None, None
    loss, shared, disagreement = estimates
    return loss, shared, disagreement


def _numerics() -> Numerics:
    import torch

    return Numerics(
        training_dtype="float32",
        evaluation_dtype="float64",
        matmul_precision=torch.get_float32_matmul_precision(),
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        numpy_version=np.__version__,
    )


def _require_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("training needs torch: pip install 'attnlaws[train]'") from error
    return torch


@contextmanager
def _one_precise_thread() -> Iterator[None]:
    # Small batched products collapse on several threads of a shared machine; the setting is the caller's afterwards.
    import torch

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(MATMUL_PRECISION)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
