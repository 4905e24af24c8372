"""Linear attention: the paper's token matrices and the fast forms are one function; limits and population losses."""

from __future__ import annotations

import numpy as np
import pytest

from sim.contexts import haar_rotations
from sim.streams import stream
from theory.depth import covariance_polynomial, free_polynomial, repeated_update
from theory.problems import PowerLawSpectrum
from theory.results import DomainError

torch = pytest.importorskip("torch")

from sim.models.linear_attention import (  # noqa: E402
    FaithfulLinearAttention,
    LinearAttention,
    covariance_action,
    key_query_action,
    moment_polynomial,
    population_errors,
    population_losses,
    rotated_covariance,
    scalar_population_errors,
    spectrum_action,
    subtracting_mask,
    token_action,
)

BATCH, CONTEXT, DIM = 5, 7, 3
SIZES = [(3, 1), (3, 4), (6, 3)]
EQUAL = 1e-10
SPECTRUM = PowerLawSpectrum(1.5, 0.5, dim=12)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.tensor(stream(seed, "linear attention").standard_normal(shape))


def inputs(seed: int) -> list[torch.Tensor]:
    return [
        draw(seed + 100 * i, *shape)
        for i, shape in enumerate([(BATCH, CONTEXT, DIM), (BATCH, DIM), (BATCH, CONTEXT)])
    ]


def moment_form(key_query, moments, tokens, query, labels):
    layers = [key_query_action(layer[None]) for layer in key_query]
    read = moment_polynomial(layers, moments, token_action(tokens[None]), query[None])[0]
    # beta^T P_L(S) q needs the teacher: S^-1 X^T y / P is one that makes these labels where tokens span all directions.
    teacher = torch.linalg.lstsq(tokens, labels[..., None]).solution[..., 0]
    return (teacher * read).sum(dim=1)


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_moment_form_equals_the_faithful_model(width: int, depth: int) -> None:
    faithful = FaithfulLinearAttention(DIM, width, depth, stream(1, "faithful"))
    tokens, query, _ = inputs(2)
    labels = (tokens @ draw(3, BATCH, DIM, 1))[..., 0]
    parameters = list(faithful.parameters())
    slow = faithful(tokens, query, labels)
    fast = moment_form(*faithful.composed(), tokens, query, labels)
    assert (slow - fast).abs().max() < EQUAL * slow.abs().max()
    one = torch.autograd.grad(slow.square().sum(), parameters)
    other = torch.autograd.grad(fast.square().sum(), parameters)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine - theirs).abs().max() < EQUAL * mine.abs().max()


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_gain_form_equals_the_faithful_model_whose_values_act_as_one_number(width: int, depth: int) -> None:
    # W_v = v I: the fast form holds v B_l and the gain W_o W_y. Labels need no teacher behind them.
    faithful = FaithfulLinearAttention(DIM, width, depth, stream(4, "faithful"))
    value = 0.7
    faithful.value_map.data = value * torch.eye(width, dtype=torch.float64)
    names = ["input_encoder", "label_encoder", "query_maps", "key_maps", "readout"]
    parameters = [getattr(faithful, name) for name in names]
    tokens, query, labels = (tensor.requires_grad_() for tensor in inputs(5))
    key_query, _ = faithful.composed()
    gain = (faithful.readout @ faithful.label_encoder)[0]
    fast_model = LinearAttention(np.zeros((1, depth, DIM, DIM)), np.zeros(1), depth)
    weights = torch.func.functional_call(
        _Weights(fast_model), {"model.key_query": value * key_query[None], "model.gain": gain}, (tokens, query)
    )
    slow, fast = faithful(tokens, query, labels), (weights * labels).sum(dim=1)
    assert (slow - fast).abs().max() < EQUAL * slow.abs().max()
    one = torch.autograd.grad(slow.square().sum(), [*parameters, tokens, query, labels])
    other = torch.autograd.grad(fast.square().sum(), [*parameters, tokens, query, labels])
    for mine, theirs in zip(one, other, strict=True):
        assert (mine - theirs).abs().max() < EQUAL * mine.abs().max()


class _Weights(torch.nn.Module):
    def __init__(self, model: LinearAttention) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return self.model.label_weights(tokens[None], query[None])[0]


def test_every_form_is_the_ordered_polynomial_of_the_theory() -> None:
    depth = 4
    key_query, gain = draw(6, 1, depth, DIM, DIM), 1.3
    model = LinearAttention(key_query.numpy(), np.array([gain]), depth)
    tokens, query, _ = inputs(7)
    covariance = tokens.transpose(1, 2) @ tokens / CONTEXT
    moments = torch.full((depth,), gain, dtype=torch.float64)
    by_tokens = model.polynomial(token_action(tokens[None]), query[None, :, None])[0, :, 0]
    by_covariance = model.polynomial(covariance_action(covariance[None]), query[None, :, None])[0, :, 0]
    by_moments = moment_polynomial(model.layers(), moments, token_action(tokens[None]), query[None])[0]
    for n in range(BATCH):
        expected = (
            covariance_polynomial.ordered_polynomial(covariance[n], key_query[0].numpy(), moments) @ query[n].numpy()
        )
        for found in (by_tokens, by_covariance, by_moments):
            assert np.abs(found[n].detach().numpy() - expected).max() < EQUAL


def test_shared_layers_and_scalars_are_special_matrices() -> None:
    depth, members = 3, 2
    tokens, query = draw(8, members, BATCH, CONTEXT, DIM), draw(9, members, BATCH, DIM)
    gain = np.array([1.0, 0.8])
    one, scalars = draw(10, members, 1, DIM, DIM).numpy(), draw(11, members, depth).numpy()
    pairs = [
        (one, np.repeat(one, depth, axis=1)),
        (scalars[:, :1], np.repeat(scalars[:, :1], depth, axis=1)),
        (scalars, scalars[:, :, None, None] * np.eye(DIM)),
    ]
    for special, general in pairs:
        weights = [LinearAttention(value, gain, depth).label_weights(tokens, query) for value in (special, general)]
        assert (weights[0] - weights[1]).abs().max() < EQUAL


def test_members_are_independent_models() -> None:
    key_query, gain = draw(12, 3, 2, DIM, DIM).numpy(), np.array([0.5, 1.0, 1.5])
    tokens, query = draw(13, 3, BATCH, CONTEXT, DIM), draw(14, 3, BATCH, DIM)
    together = LinearAttention(key_query, gain, 2).label_weights(tokens, query)
    for i in range(3):
        alone = LinearAttention(key_query[i : i + 1], gain[i : i + 1], 2)
        assert (alone.label_weights(tokens[i : i + 1], query[i : i + 1]) - together[i : i + 1]).abs().max() < EQUAL


def test_rotating_the_covariance_is_rotating_tokens() -> None:
    tokens, _, _ = inputs(16)
    rotation = torch.tensor(haar_rotations(BATCH, DIM, stream(17, "rotations")))
    seen = tokens @ rotation.transpose(1, 2)
    expected = seen.transpose(1, 2) @ seen
    assert (rotated_covariance(tokens.transpose(1, 2) @ tokens, rotation) - expected).abs().max() < EQUAL
    variances = torch.tensor([3.0, 2.0, 0.5], dtype=torch.float64)
    expected = rotated_covariance(torch.diag(variances).expand(BATCH, -1, -1), rotation)
    assert (rotated_covariance(variances, rotation) - expected).abs().max() < EQUAL


def test_population_loss_is_the_theory_and_the_limit_of_many_tokens() -> None:
    depth, dim = 3, 5
    spectrum = PowerLawSpectrum(1, 0.5, dim=dim)
    variances, teacher = (torch.tensor(v) for v in (spectrum.input_variances(), spectrum.teacher_variances()))
    key_query = np.eye(dim) + 0.3 * draw(18, depth, dim, dim).numpy()
    model = LinearAttention(key_query[None], np.array([0.9]), depth)
    rotation = haar_rotations(2, dim, stream(19, "rotations"))
    losses = population_losses(population_errors(model, variances, torch.tensor(rotation[None])), teacher)[0]
    for loss, O in zip(losses, rotation, strict=True):  # noqa: E741
        sigma, omega = (O @ np.diag(v.numpy()) @ O.T for v in (variances, teacher))
        polynomial = covariance_polynomial.ordered_polynomial(sigma, list(key_query), np.full(depth, 0.9))
        assert loss.item() == pytest.approx(
            covariance_polynomial.population_risk(polynomial, omega, sigma), rel=1e-12
        )
    # A million tokens: S departs from the population by about 1e-3.
    tokens = torch.tensor(stream(20, "tokens").standard_normal((1, 10**6, dim))) * variances.sqrt()
    query = draw(21, 1, 1, 1, dim)
    finite = model.polynomial(token_action(tokens[None]), query)
    assert (finite - model.polynomial(spectrum_action(variances), query)).abs().max() < 1e-2


def test_scalar_layers_reach_the_free_polynomial_and_the_repeated_update() -> None:
    variances, teacher = (torch.tensor(v) for v in (SPECTRUM.input_variances(), SPECTRUM.teacher_variances()))
    for depth in (1, 2, 5):
        steps = depth * free_polynomial.layer_steps(SPECTRUM, depth) / SPECTRUM.input_variances()[0]
        free = LinearAttention(steps[None], np.ones(1), depth)
        loss = (scalar_population_errors(free, variances).square() * teacher).sum().item()
        assert loss == pytest.approx(free_polynomial.finite_risk(SPECTRUM, depth).item(), rel=1e-10)
        shared = LinearAttention(np.full((1, 1), depth * 1.2), np.ones(1), depth)
        loss = (scalar_population_errors(shared, variances).square() * teacher).sum().item()
        assert loss == pytest.approx(repeated_update.finite_risk(SPECTRUM, depth, 1.2).item(), rel=1e-12)


def test_scalars_as_matrices_need_no_rotation() -> None:
    variances, teacher = (torch.tensor(v) for v in (SPECTRUM.input_variances(), SPECTRUM.teacher_variances()))
    scalars = np.array([[0.5, 1.0, 2.5]])
    diagonal = scalar_population_errors(LinearAttention(scalars, np.ones(1), 3), variances)
    matrices = LinearAttention(scalars[:, :, None, None] * np.eye(SPECTRUM.dim), np.ones(1), 3)
    rotation = torch.tensor(haar_rotations(1, SPECTRUM.dim, stream(22, "rotations"))[None])
    for errors in (population_errors(matrices, variances), population_errors(matrices, variances, rotation)):
        assert (torch.diagonal(errors[0, 0]) - diagonal[0]).abs().max() < 1e-13
        assert population_losses(errors, teacher).item() == pytest.approx((diagonal**2 * teacher).sum().item())


def test_mask_subtracts_within_the_context() -> None:
    assert subtracting_mask(2).tolist() == [[-1, -1, 0], [-1, -1, 0], [1, 1, 0]]


def test_shapes_are_validated() -> None:
    with pytest.raises(DomainError, match="width must be an integer"):
        FaithfulLinearAttention(3, 2, 1, stream(0, "sizes"))
    with pytest.raises(DomainError, match="key_query must have shape"):
        LinearAttention(np.zeros((1, 2, 3, 3)), np.ones(1), 3)
    with pytest.raises(DomainError, match="key_query must have shape"):
        LinearAttention(np.zeros((2, 3)), np.ones(1), 3)
    with pytest.raises(DomainError, match="one scalar per layer"):
        scalar_population_errors(LinearAttention(np.zeros((1, 2, 3, 3)), np.ones(1), 2), torch.ones(3))
