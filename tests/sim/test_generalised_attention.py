"""Layer values, context updates and one stream: the paper's matrices and the fast forms are one function."""

from __future__ import annotations

import numpy as np
import pytest

from sim.streams import stream
from theory.depth import context_update, layer_ensemble
from theory.results import DomainError

torch = pytest.importorskip("torch")

from sim.models.generalised_attention import (  # noqa: E402
    FaithfulSingleStream,
    LayerValueAttention,
    LayerValueEnsemble,
    SingleStream,
    UpdatedEnsemble,
    UpdatingAttention,
    layer_increments,
    moment_prediction,
    updated_row,
    updating_mask,
)
from sim.models.softmax_attention import FaithfulSoftmaxAttention, SoftmaxEnsemble, ensemble_weights  # noqa: E402

BATCH, CONTEXT, DIM = 5, 7, 3
SIZES = [(3, 1), (3, 4), (7, 3)]
EQUAL = 1e-10


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.tensor(stream(seed, "generalised attention").standard_normal(shape))


def inputs(seed: int) -> list[torch.Tensor]:
    shapes = [(BATCH, CONTEXT, DIM), (BATCH, DIM), (BATCH, CONTEXT)]
    return [draw(seed + 100 * i, *shape).requires_grad_() for i, shape in enumerate(shapes)]


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def call(model: torch.nn.Module, parameters: dict, *arguments: torch.Tensor) -> torch.Tensor:
    """The fast form at parameters that depend on the faithful ones, with a leading axis of one member."""
    values = {name: value[None] for name, value in parameters.items()}
    return torch.func.functional_call(model, values, tuple(argument[None] for argument in arguments))[0]


def assert_equal_in_values_and_gradients(slow, fast, variables) -> None:
    assert (slow - fast).abs().max() < EQUAL * slow.abs().max()
    one, other = (torch.autograd.grad(value.square().sum(), variables) for value in (slow, fast))
    for mine, theirs in zip(one, other, strict=True):
        assert (mine - theirs).abs().max() < EQUAL * mine.abs().max()


def inner_parameters(faithful: torch.nn.Module) -> list[torch.Tensor]:
    # W_x is left out where the pre-norm needs it semi-orthogonal: off that set the fast form is another function.
    return [value for name, value in faithful.named_parameters() if name != "input_encoder"]


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_layer_values(width: int, depth: int) -> None:
    faithful = LayerValueAttention(DIM, width, depth, stream(1, "faithful"))
    key_query, gains = faithful.composed()
    ensemble = LayerValueEnsemble(np.zeros((1, depth, DIM, DIM)), np.zeros((1, depth)))
    tokens, query, labels = inputs(2)
    fast = call(ensemble, {"key_query": key_query, "gains": gains}, unit(tokens), unit(query), labels)
    variables = [*inner_parameters(faithful), tokens, query, labels]
    assert_equal_in_values_and_gradients(faithful(tokens, query, labels), fast, variables)


def test_equal_layer_values_are_one_gain() -> None:
    key_query = draw(3, 4, DIM, DIM).numpy()
    tokens, query, labels = inputs(4)
    one = SoftmaxEnsemble(key_query, 0.7)(unit(tokens), unit(query), labels)
    many = LayerValueEnsemble(key_query, np.full(4, 0.7))
    assert (many(unit(tokens), unit(query), labels) - one).abs().max() < EQUAL
    assert (
        many.layer_weights(unit(tokens), unit(query)).mean(dim=-2) - many.label_weights(unit(tokens), unit(query))
    ).abs().max() < EQUAL


@pytest.mark.parametrize(("width", "depth"), SIZES)
@pytest.mark.parametrize("update", [-2.3, 0.0, 1.5])
def test_context_updates_with_values_that_act_as_one_number(width: int, depth: int, update: float) -> None:
    faithful = UpdatingAttention(DIM, width, depth, stream(5, "faithful"), update)
    value = 0.8
    faithful.value_map.data = value * torch.eye(width, dtype=torch.float64)
    ensemble = UpdatedEnsemble(np.zeros((1, depth, DIM, DIM)), np.zeros(1), np.zeros(1))
    tokens, query, labels = inputs(6)
    key_query, gain = faithful.composed()
    composed = {"key_query": key_query, "gain": gain, "update": value * faithful.update}
    fast = call(ensemble, composed, unit(tokens), unit(query), labels)
    names = ["query_maps", "key_maps", "label_encoder", "readout"]
    if depth > 1:  # one layer never reads an updated context
        names.append("update")
    variables = [*(getattr(faithful, name) for name in names), tokens, query, labels]
    assert_equal_in_values_and_gradients(faithful(tokens, query, labels), fast, variables)


@pytest.mark.parametrize(("width", "depth"), [(3, 2), (7, 4)])
def test_context_updates_with_any_values_by_moments(width: int, depth: int) -> None:
    faithful = UpdatingAttention(DIM, width, depth, stream(7, "faithful"), -1.2)
    tokens, query, labels = inputs(8)
    key_query, _ = faithful.composed()
    rows = ensemble_weights(key_query, unit(tokens), unit(query))
    mixing = [
        torch.softmax(unit(tokens) @ layer.T @ unit(tokens).transpose(1, 2), dim=-1) for layer in key_query[:-1]
    ]
    fast = moment_prediction(rows, mixing, labels, faithful.update, faithful.moments())
    assert_equal_in_values_and_gradients(faithful(tokens, query, labels), fast, inner_parameters(faithful))


def test_updated_ensemble_is_the_theory_and_reads_layer_by_layer() -> None:
    depth, update, gain = 4, -1.7, 1.2
    model = UpdatedEnsemble(3 * draw(9, 1, depth, DIM, DIM).numpy(), np.array([gain]), np.array([update]))
    tokens, query, labels = (tensor.detach() for tensor in inputs(10))
    arguments = unit(tokens)[None], unit(query)[None]
    rows = model.attention(*arguments)[0].detach().numpy()
    mixing = np.stack(
        [model.context_attention(layer, arguments[0])[0].detach().numpy() for layer in range(depth)], axis=1
    )
    expected = context_update.prediction(rows, mixing, labels.numpy(), update, gain)
    assert np.abs(model(*arguments, labels[None])[0].detach().numpy() - expected).max() < EQUAL
    readings = model.readings(*arguments, labels[None, ..., None])[0, ..., 0].detach().numpy()
    assert np.abs(readings - gain * context_update.layer_readings(rows, mixing, labels.numpy(), update)).max() < EQUAL


def test_without_update_the_context_is_fixed() -> None:
    tokens, query, labels = inputs(11)
    faithful = UpdatingAttention(DIM, 5, 3, stream(12, "faithful"), 0.0)
    fixed = FaithfulSoftmaxAttention(DIM, 5, 3, stream(12, "faithful"))
    assert (faithful(tokens, query, labels) - fixed(tokens, query, labels)).abs().max() < EQUAL
    (gradient,) = torch.autograd.grad(faithful(tokens, query, labels).square().sum(), [faithful.update])
    assert gradient.abs() > 1e-6  # m leaves zero: attention stays allowed where the mask passes through it
    assert updating_mask(2, torch.tensor(-2.0)).tolist() == [[-2, -2, 0], [-2, -2, 0], [1, 1, 0]]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_gradients_of_the_updated_row(depth: int) -> None:
    members, contexts, tokens, dim = 2, 3, 4, 3
    rows, key_query = draw(13, members, contexts, depth, tokens), draw(14, members, depth, dim, dim)
    variables = [value.requires_grad_() for value in (rows, key_query, draw(15, members))]
    keys = draw(29, members, contexts, tokens, dim).requires_grad_()
    assert torch.autograd.gradcheck(updated_row, (*variables, keys), atol=1e-8)
    assert torch.autograd.gradcheck(lambda *values: updated_row(*values, keys.detach()), variables, atol=1e-8)
    plain = rows[:, :, -1]
    for layer in range(depth - 2, -1, -1):
        reads = keys @ key_query[:, None, layer].transpose(2, 3)
        attention = torch.softmax(reads @ keys.transpose(2, 3), dim=-1)
        mixed = (plain[:, :, None] @ attention)[:, :, 0]
        plain = rows[:, :, layer] + plain + variables[2][:, None, None] * mixed
    fast = updated_row(*variables, keys)
    used = [rows, key_query, *variables[2:], keys] if depth > 1 else [rows]
    assert_equal_in_values_and_gradients(plain, fast, used)


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_single_stream(width: int, depth: int) -> None:
    faithful = FaithfulSingleStream(DIM, width, depth, stream(16, "faithful"))
    names = ["query_maps", "state_maps", "query_readout", "state_readout"]
    composed = dict(zip(names, faithful.composed(), strict=True))
    zeros = [np.zeros((1, *value.shape)) for value in composed.values()]
    model = SingleStream(*zeros)
    tokens, query, labels = inputs(17)
    seen = torch.cat([tokens, labels[..., None]], dim=-1)
    variables = [*faithful.parameters(), tokens, query, labels]
    slow, fast = faithful(tokens, query, labels), call(model, composed, seen, query)
    assert_equal_in_values_and_gradients(slow, fast, variables)


def test_single_stream_layers_are_increments_of_the_readout() -> None:
    faithful = FaithfulSingleStream(DIM, 7, 3, stream(18, "faithful"))
    tokens, query, labels = (tensor.detach() for tensor in inputs(19))
    readouts = faithful.readouts(tokens, query, labels).detach()
    model = SingleStream(*(value.detach().numpy()[None] for value in faithful.composed()))
    seen = torch.cat([tokens, labels[..., None]], dim=-1)[None]
    assert (model.readouts(seen, query[None])[0] - readouts).abs().max() < EQUAL
    layers = layer_increments(readouts)
    assert np.abs(layers.numpy() - layer_ensemble.increment_predictions(readouts.numpy())).max() < 1e-14
    assert (layers.mean(dim=1) - readouts[:, -1]).abs().max() < EQUAL


def test_members_are_independent_models() -> None:
    members, depth = 3, 2
    tokens, query, labels = (
        draw(20, members, BATCH, CONTEXT, DIM),
        draw(21, members, BATCH, DIM),
        draw(22, members, BATCH, CONTEXT),
    )
    key_query, numbers = draw(23, members, depth, DIM, DIM).numpy(), draw(24, members, 2).numpy()
    updated = (key_query, numbers[:, 0], numbers[:, 1])
    together = UpdatedEnsemble(*updated)(unit(tokens), unit(query), labels)
    values = (
        draw(25, members, depth, DIM + 1, DIM),
        draw(26, members, depth, DIM + 1, DIM + 1),
        draw(27, members, DIM),
        draw(28, members, DIM + 1),
    )
    seen = torch.cat([tokens, labels[..., None]], dim=-1)
    streams = SingleStream(*(value.numpy() for value in values))(seen, query)
    for i in range(members):
        mine = slice(i, i + 1)
        alone = UpdatedEnsemble(*(value[mine] for value in updated))(
            unit(tokens[mine]), unit(query[mine]), labels[mine]
        )
        assert (alone - together[mine]).abs().max() < EQUAL
        alone = SingleStream(*(value[mine].numpy() for value in values))(seen[mine], query[mine])
        assert (alone - streams[mine]).abs().max() < EQUAL


def test_shapes_are_validated() -> None:
    with pytest.raises(DomainError, match="gains must have one entry per matrix"):
        LayerValueEnsemble(np.zeros((2, 3, 3)), np.zeros(3))
    with pytest.raises(DomainError, match="gain and update shape"):
        UpdatedEnsemble(np.zeros((1, 2, 3, 3)), np.zeros(2), np.zeros(1))
    with pytest.raises(DomainError, match="single stream must have shapes"):
        SingleStream(np.zeros((1, 2, 4, 3)), np.zeros((1, 2, 4, 4)), np.zeros((1, 3)), np.zeros((1, 3)))
    with pytest.raises(DomainError, match="width must be an integer"):
        FaithfulSingleStream(3, 2, 1, stream(0, "sizes"))
