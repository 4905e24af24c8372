"""The layer as printed, its circuits, heads (ω, μ) and the kernels are one function: outputs, gradients and limits."""

from __future__ import annotations

import importlib
import math
import sys

import numpy as np
import pytest

from sim.montecarlo.multihead_training import HeadActivation
from sim.streams import stream
from theory.problems import RegressionTask
from theory.results import DomainError, MissingDependencyError

torch = pytest.importorskip("torch")

from sim.models import multihead_attention as models  # noqa: E402

pytestmark = pytest.mark.long

MEMBERS, HEADS, DIM, OUTPUTS, CONTEXT, BATCH = 2, 3, 4, 2, 7, 5
TRAINING_CONTEXT = 6
ACTIVATIONS = [
    HeadActivation("exp"),
    HeadActivation("1+tanh"),
    HeadActivation("1+Cx", 0.3),
    HeadActivation("(1+Cx)^2", 0.5),
    HeadActivation("x/L"),
]
# Sums of a few hundred terms of order 1 in float64; 1 + Cx has a normaliser near 0 now and then.
EQUAL = 1e-10
SCALE = 0.6


def tensors(seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    generator = stream(seed, "multi-head inputs")
    return [torch.tensor(scale * generator.standard_normal(shape)) for shape in shapes]


def layer(seed: int, outputs: int = OUTPUTS) -> models.MultiHeadAttention:
    generators = [stream(seed, "layer", member) for member in range(MEMBERS)]
    return models.MultiHeadAttention(*models.initial_maps(generators, HEADS, DIM + outputs))


def whole_batch(seed: int, members: int = MEMBERS) -> list[torch.Tensor]:
    width = DIM + OUTPUTS
    return tensors(seed, (members, CONTEXT, width, BATCH), (members, DIM, BATCH), (members, OUTPUTS, BATCH))


def columns(activation: HeadActivation, embedding: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What the test column sees: linear attention has no mask."""
    return embedding if activation.normalised else models.with_query_column(embedding, query)


def relative_gap(one, other) -> float:
    return ((one - other).abs().max() / one.abs().max()).item()


def printed_layer(activation, Z, output, value, key, query):
    """Multihead (2.2) and (5.1) with loops over columns, one sequence, NumPy."""
    functions = {
        "exp": np.exp,
        "1+tanh": lambda x: 1 + np.tanh(x),
        "1+Cx": lambda x: 1 + activation.scale * x,
        "(1+Cx)^2": lambda x: (1 + activation.scale * x) ** 2,
    }
    result = Z.copy()
    for h in range(len(output)):
        for j in range(Z.shape[1]):
            if activation.name == "x/L":
                weights = [(key[h] @ z) @ (query[h] @ Z[:, j]) * SCALE / TRAINING_CONTEXT for z in Z.T]
            else:
                f = [functions[activation.name]((key[h] @ z) @ (query[h] @ Z[:, j]) * SCALE) for z in Z.T[:j]]
                weights = [value / sum(f) for value in f]
            for weight, z in zip(weights, Z.T, strict=False):
                result[:, j] += weight * (output[h] @ value[h] @ z)
    return result


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_the_layer_is_the_printed_one(activation):
    model = layer(1)
    embedding, query, _ = whole_batch(2)
    sequence = models.embed(embedding, query)
    assert sequence.shape == (MEMBERS, BATCH, DIM + OUTPUTS, CONTEXT + 1)
    assert sequence[:, :, DIM:, -1].abs().max() == 0
    result = model(sequence, activation, SCALE, TRAINING_CONTEXT).detach().numpy()
    maps = [getattr(model, f"{name}_maps").detach().numpy() for name in ("output", "value", "key", "query")]
    for member, n in ((0, 0), (1, BATCH - 1)):
        expected = printed_layer(activation, sequence[member, n].numpy(), *(array[member] for array in maps))
        assert result[member, n] == pytest.approx(expected, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_circuits_give_the_read_out_of_the_layer_and_its_gradients(activation):
    model = layer(3)
    embedding, query, target = whole_batch(4)
    slow = model(models.embed(embedding, query), activation, SCALE, TRAINING_CONTEXT)[:, :, DIM:, -1]
    key_query, value = model.circuits(DIM)
    fast = models.circuit_predictions(
        SCALE * key_query, value, columns(activation, embedding, query), query, activation, TRAINING_CONTEXT
    )
    assert relative_gap(slow.transpose(1, 2), fast) < EQUAL
    parameters = list(model.parameters())
    slow_loss = (target.transpose(1, 2) - slow).square().sum()
    slow_gradients = torch.autograd.grad(slow_loss, parameters)
    fast_gradients = torch.autograd.grad((target - fast).square().sum(), parameters)
    for one, other in zip(slow_gradients, fast_gradients, strict=True):
        assert relative_gap(one, other) < EQUAL


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
@pytest.mark.parametrize("members", [1, MEMBERS])
def test_the_circuit_kernel_is_the_torch_form(activation, members):
    shown = whole_batch(5, members)
    key_query, value = tensors(6, (MEMBERS, HEADS, DIM + OUTPUTS, DIM), (MEMBERS, HEADS, OUTPUTS, DIM + OUTPUTS))
    parameters = [(0.2 * key_query).requires_grad_(), value.requires_grad_()]
    kernel = models.circuit_losses(*parameters, tuple(shown), activation, TRAINING_CONTEXT)
    embedding, query, target = shown
    predictions = models.circuit_predictions(*parameters, embedding, query, activation, TRAINING_CONTEXT)
    plain = (target - predictions).square().sum(dim=1).mean(dim=-1)
    assert relative_gap(plain, kernel) < EQUAL
    outer = torch.tensor([1.0, -0.7], dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(plain @ outer, parameters), torch.autograd.grad(kernel @ outer, parameters), strict=True
    ):
        assert relative_gap(one, other) < EQUAL


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_the_scalar_kernel_is_the_torch_form(activation, is_sampled, monkeypatch):
    task = RegressionTask(DIM, TRAINING_CONTEXT, 0.3)
    length, projections, labels, target = tensors(7, (1, BATCH), (1, CONTEXT, BATCH), (1, CONTEXT, BATCH), (1, BATCH))
    batch = (length.abs(), projections, labels, target)[: 4 if is_sampled else 2]
    parameters = [(0.4 * one).requires_grad_() for one in tensors(8, (MEMBERS, HEADS), (MEMBERS, HEADS))]
    kernel = models.scalar_losses(*parameters, batch, task, activation, is_sampled=is_sampled)
    found = torch.autograd.grad(kernel.sum(), parameters)
    monkeypatch.setattr(models, "kernels_apply", lambda *_: False)
    plain = models.scalar_losses(*parameters, batch, task, activation, is_sampled=is_sampled)
    assert relative_gap(plain, kernel) < EQUAL
    for one, other in zip(torch.autograd.grad(plain.sum(), parameters), found, strict=True):
        assert relative_gap(one, other) < EQUAL


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_heads_with_scalar_circuits_are_the_reduced_model(activation):
    omega, mu = np.array([[0.4, -0.3, 0.2], [0.1, 0.2, -0.5]]), np.array([[1.0, -0.7, 0.3], [0.2, 0.4, -2.0]])
    embedding, query = whole_batch(9)[:2]
    embedding = embedding[:, :, : DIM + 1]
    key_query = torch.zeros(MEMBERS, HEADS, DIM + 1, DIM, dtype=torch.float64)
    value = torch.zeros(MEMBERS, HEADS, 1, DIM + 1, dtype=torch.float64)
    key_query[:, :, :DIM] = torch.tensor(omega)[..., None, None] * torch.eye(DIM, dtype=torch.float64)
    value[:, :, 0, DIM] = torch.tensor(mu)
    seen = columns(activation, embedding, query)
    whole = models.circuit_predictions(key_query, value, seen, query, activation, TRAINING_CONTEXT)
    reads = (embedding[:, :, :DIM] * query[:, None]).sum(dim=2)
    heads = models.ScalarHeads(omega, mu)
    weights = models.scalar_label_weights(heads.omega, heads.mu, reads, activation, TRAINING_CONTEXT)
    assert relative_gap(whole[:, 0], (weights * embedding[:, :, DIM]).sum(dim=1)) < EQUAL


def test_averaged_loss_is_the_mean_over_teacher_and_noise():
    task = RegressionTask(3, CONTEXT, 0.5)
    generator = stream(10, "averaged loss")
    tokens, query = generator.standard_normal((CONTEXT, 3)), generator.standard_normal(3)
    weights = generator.standard_normal(CONTEXT)
    # E over beta and noise of (y_q - w.y)^2 = |x_q - X^T w|^2 / d + noise (1 + |w|^2); its parts across the query
    # average to (d - 1) |w|^2 / d over their directions.
    r = np.linalg.norm(query)
    z = tokens @ query / r
    across = tokens - np.outer(z, query / r)
    draws = stream(11, "directions").standard_normal((200_000, CONTEXT))
    sampled_across = (draws @ weights) ** 2 * (task.dim - 1) / task.dim
    exact = ((r - z @ weights) ** 2) / task.dim + task.noise * (1 + weights @ weights)
    found = models.teacher_averaged_losses(
        task, torch.tensor(weights)[None, :, None], torch.tensor([[r]]), torch.tensor(z)[None, :, None]
    ).item()
    stderr = sampled_across.std() / np.sqrt(len(draws))
    assert abs(exact + sampled_across.mean() - found) < 4.5 * stderr  # false alarm 7e-6
    assert np.abs(across @ query).max() < 1e-12


def test_column_that_sees_nothing_gives_zeros_and_finite_gradients():
    for activation in ACTIVATIONS[:4]:
        (scores,) = tensors(12, (2, 4, 4))
        scores.requires_grad_()
        weights = models.causal_weights(activation, scores)
        assert weights[..., 0].abs().max() == 0
        assert torch.allclose(weights[..., 1:].sum(dim=-2), torch.ones(2, 3, dtype=torch.float64))
        assert torch.tril(weights[0]).abs().max() == 0
        (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
        assert torch.isfinite(gradient).all()
        assert torch.tril(gradient[0]).abs().max() == 0


def test_the_first_column_of_the_layer_is_its_input_and_all_gradients_are_finite():
    model = layer(13)
    embedding, query, _ = whole_batch(14)
    sequence = models.embed(embedding, query)
    result = model(sequence)
    assert torch.equal(result[..., 0], sequence[..., 0])
    for gradient in torch.autograd.grad(result.square().sum(), list(model.parameters())):
        assert torch.isfinite(gradient).all()


def test_softmax_of_huge_scores_is_finite():
    task = RegressionTask(DIM, CONTEXT, 0.1)
    length, projections = tensors(15, (1, BATCH), (1, CONTEXT, BATCH))
    for dtype in (torch.float32, torch.float64):
        omega = torch.full((1, 1), 1e4, dtype=dtype, requires_grad=True)
        mu = torch.ones((1, 1), dtype=dtype, requires_grad=True)
        batch = (length.abs().to(dtype), projections.to(dtype))
        loss = models.scalar_losses(omega, mu, batch, task, HeadActivation(), is_sampled=False)
        gradients = torch.autograd.grad(loss.sum(), [omega, mu])
        assert all(torch.isfinite(value).all() for value in (loss, *gradients))


def test_start_is_that_of_a_linear_layer():
    width = 6
    maps = models.initial_maps([stream(seed, "start") for seed in range(200)], 2, width)
    assert maps.shape == (4, 200, 2, width, width)
    bound = 1 / math.sqrt(width)
    assert np.abs(maps).max() < bound
    linear = torch.nn.Linear(width, width, bias=False).weight
    assert linear.abs().max() <= bound
    assert linear.abs().max() > 0.8 * bound  # false alarm 0.8^36 = 3e-4, at torch's unseeded start
    # Mean square of a uniform entry is bound^2 / 3 and its standard deviation bound^2 sqrt(4/45).
    deviation = bound**2 * math.sqrt(4 / 45) / math.sqrt(maps.size)
    assert abs((maps**2).mean() - bound**2 / 3) < 5 * deviation


@pytest.mark.parametrize(("name", "scale"), [("relu", 1.0), ("exp", 0.5), ("1+Cx", 0.0), ("1+Cx", math.nan)])
def test_bad_activations_are_named(name, scale):
    with pytest.raises(DomainError, match="activation"):
        HeadActivation(name, scale)


def test_slopes_are_first_taylor_coefficients():
    step = 1e-6
    for activation in ACTIVATIONS[:4]:
        x = torch.tensor([-step, 0.0, step], dtype=torch.float64)
        low, middle, high = models._activated(activation, x).tolist()
        assert (high - low) / (2 * step) / middle == pytest.approx(activation.slope, rel=1e-8)


def test_a_missing_torch_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "sim.models.multihead_attention")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'attnlaws\[train\]'"):
        importlib.import_module("sim.models.multihead_attention")


def test_a_normaliser_that_vanishes_gives_a_loss_that_is_not_finite():
    task = RegressionTask(2, 2, 0.1)
    batch = (torch.ones(1, 1, dtype=torch.float64), torch.tensor([[[1.0], [-3.0]]], dtype=torch.float64))
    omega = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)  # f = 2 and -2
    loss = models.scalar_losses(omega, omega, batch, task, HeadActivation("1+Cx"), is_sampled=False)
    assert not torch.isfinite(loss).any()
