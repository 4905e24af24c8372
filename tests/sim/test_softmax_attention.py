"""The paper's two-stream model and its fast form are one function: outputs, gradients and limits."""

from __future__ import annotations

import importlib
import math
import sys

import numpy as np
import pytest

from sim.streams import stream
from theory.results import DomainError, MissingDependencyError

torch = pytest.importorskip("torch")

from sim.models.softmax_attention import (  # noqa: E402
    FaithfulSoftmaxAttention,
    SoftmaxEnsemble,
    ensemble_weights,
    fixed_context_mask,
    masked_softmax,
    root_mean_square_norm,
)

BATCH, CONTEXT, DIM = 5, 7, 3
SIZES = [(3, 1), (3, 4), (6, 3)]


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = stream(seed, "attention inputs")
    shapes = [(BATCH, CONTEXT, DIM), (BATCH, DIM), (BATCH, CONTEXT)]
    return tuple(torch.tensor(generator.standard_normal(shape)).requires_grad_() for shape in shapes)


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def fast_prediction(key_query, gain, tokens, query, labels):
    rows = ensemble_weights(key_query, unit(tokens), unit(query))
    return gain * (rows.mean(dim=1) * labels).sum(dim=1)


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_both_forms_agree_in_outputs_and_input_gradients(width: int, depth: int) -> None:
    faithful = FaithfulSoftmaxAttention(DIM, width, depth, stream(1, "faithful"))
    key_query, gain = faithful.composed()
    ensemble = SoftmaxEnsemble(key_query.detach().numpy(), gain.item())
    tokens, query, labels = inputs(2)
    slow = faithful(tokens, query, labels)
    fast = ensemble(unit(tokens), unit(query), labels)
    assert (slow - fast).abs().max() < 1e-10
    cotangent = torch.linspace(-1, 1, BATCH, dtype=torch.float64)
    slow_gradients = torch.autograd.grad(slow @ cotangent, [tokens, query, labels])
    fast_gradients = torch.autograd.grad(fast @ cotangent, [tokens, query, labels])
    for one, other in zip(slow_gradients, fast_gradients, strict=True):
        assert (one - other).abs().max() < 1e-10 * one.abs().max()


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_both_forms_agree_in_parameter_gradients(width: int, depth: int) -> None:
    # W_x is left out: off the semi-orthogonal matrices the pre-norm is no longer the norm of the token.
    faithful = FaithfulSoftmaxAttention(DIM, width, depth, stream(3, "faithful"))
    names = ["label_encoder", "query_maps", "key_maps", "value_map", "readout"]
    parameters = [getattr(faithful, name) for name in names]
    tokens, query, labels = inputs(4)
    slow = torch.autograd.grad(faithful(tokens, query, labels).square().sum(), parameters)
    fast = torch.autograd.grad(
        fast_prediction(*faithful.composed(), tokens, query, labels).square().sum(), parameters
    )
    for one, other in zip(slow, fast, strict=True):
        assert (one - other).abs().max() < 1e-10 * one.abs().max()


def test_fast_form_equals_a_loop_over_tokens() -> None:
    generator = stream(5, "loop")
    key_query = generator.standard_normal((2, DIM, DIM))
    tokens, query, labels = (tensor.detach() for tensor in inputs(6))
    ensemble = SoftmaxEnsemble(key_query, 1.5)
    rows = ensemble.attention(unit(tokens), unit(query))
    assert rows.shape == (BATCH, 2, CONTEXT)
    for n in range(BATCH):
        prediction = 0.0
        for layer in range(2):
            read = key_query[layer] @ unit(query)[n].numpy()
            powers = [math.exp(float(unit(tokens)[n, i].numpy() @ read)) for i in range(CONTEXT)]
            assert rows[n, layer].tolist() == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)
            prediction += 1.5 / 2 * sum(p * y for p, y in zip(powers, labels[n].tolist(), strict=True)) / sum(powers)
        assert ensemble(unit(tokens), unit(query), labels)[n].item() == pytest.approx(prediction, rel=1e-12)


def test_predictions_are_label_weights_times_labels() -> None:
    ensemble = SoftmaxEnsemble(stream(7, "weights").standard_normal((3, DIM, DIM)), 0.7)
    tokens, query, labels = inputs(8)
    weights = ensemble.label_weights(unit(tokens), unit(query))
    assert torch.allclose(weights.sum(dim=1), torch.tensor(0.7, dtype=torch.float64), rtol=1e-14)
    assert torch.allclose((weights * labels).sum(dim=1), ensemble(unit(tokens), unit(query), labels), rtol=1e-14)


def test_the_faithful_model_reads_neither_scale_nor_order_of_tokens() -> None:
    faithful = FaithfulSoftmaxAttention(DIM, 5, 2, stream(9, "faithful"))
    tokens, query, labels = (tensor.detach() for tensor in inputs(10))
    plain = faithful(tokens, query, labels)
    assert torch.allclose(faithful(1e-90 * tokens, 1e90 * query, labels), plain, rtol=1e-12)
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    assert torch.allclose(faithful(tokens[:, order], query, labels[:, order]), plain, rtol=1e-12)


def test_mask_of_fixed_contexts() -> None:
    assert fixed_context_mask(2).tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]


def test_masked_softmax_normalises_over_allowed_positions_only() -> None:
    scores = torch.tensor([[[1.0, 2.0, 50.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    mask = torch.tensor([[-2.0, -2.0, 0.0], [1.0, 0.0, 0.0]])
    weights = masked_softmax(scores, mask)
    first = 1 / (1 + math.e)
    assert weights[0, 0].tolist() == pytest.approx([-2 * first, -2 * (1 - first), 0], rel=1e-14)
    assert weights[0, 1].tolist() == [1, 0, 0]


def test_a_row_that_may_read_nothing_gives_zeros_and_finite_gradients() -> None:
    scores = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    strictly_causal = torch.tril(torch.ones(3, 3), diagonal=-1)
    weights = masked_softmax(scores, strictly_causal)
    assert weights[:, 0].abs().max() == 0
    assert torch.allclose(weights[:, 1:].sum(dim=2), torch.ones(2, 2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
    assert torch.isfinite(gradient).all()
    assert gradient[:, 0].abs().max() == 0


def test_pre_norm_has_unit_mean_square_and_no_scale() -> None:
    states = inputs(11)[0].detach()
    normalised = root_mean_square_norm(states)
    assert torch.allclose(normalised.square().mean(dim=1), torch.ones(BATCH, DIM, dtype=torch.float64), rtol=1e-14)
    assert torch.allclose(root_mean_square_norm(1e-100 * states), normalised, rtol=1e-14)


def test_composition_needs_a_semi_orthogonal_encoder() -> None:
    faithful = FaithfulSoftmaxAttention(DIM, 4, 1, stream(12, "faithful"))
    with torch.no_grad():
        faithful.input_encoder.mul_(1.01)
    with pytest.raises(DomainError, match="input_encoder must be semi-orthogonal"):
        faithful.composed()


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 4, 1), "dim"), ((3, 2, 1), "width"), ((3, 4, 0), "depth"), ((3, 3.5, 1), "width")]
)
def test_sizes_are_validated(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(DomainError, match=f"{name} must be an integer"):
        FaithfulSoftmaxAttention(*sizes, stream(0, "sizes"))


def test_initial_matrices_are_those_of_the_stream() -> None:
    first, second = (FaithfulSoftmaxAttention(DIM, 4, 2, stream(13, "faithful")) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    gram = first.input_encoder.T @ first.input_encoder
    assert np.abs(gram.detach().numpy() - np.eye(DIM)).max() < 1e-14


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sim.models.softmax_attention")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'attnlaws\[train\]'"):
        importlib.import_module("sim.models.softmax_attention")


def test_members_are_models_of_their_own() -> None:
    generator = stream(14, "members")
    key_query, gain = generator.standard_normal((2, 3, DIM, DIM)), generator.standard_normal(2)
    batches = [[tensor.detach() for tensor in inputs(seed)] for seed in (15, 16)]
    tokens, query, labels = (torch.stack(pair) for pair in zip(*batches, strict=True))
    together = SoftmaxEnsemble(key_query, gain)(unit(tokens), unit(query), labels)
    for member in range(2):
        alone = SoftmaxEnsemble(key_query[member], gain[member])
        expected = alone(unit(tokens[member]), unit(query[member]), labels[member])
        assert torch.allclose(together[member], expected, rtol=1e-13)
