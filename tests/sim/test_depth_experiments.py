"""Linear attention and the generalised softmax models as experiments: batches, losses, measures and short training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.contexts import SampleSize, sample_contexts
from sim.experiments.base import experiment_from_json
from sim.experiments.generalised import LayerValueSoftmax, SingleStreamSoftmax, UpdatingSoftmax, identity_measures
from sim.experiments.linear_attention import LinearLayers, wishart_matrices
from sim.experiments.measures import mode_losses, reported_modes
from sim.streams import stream
from sim.training import TrainingConfig, train
from theory.depth import context_update, free_polynomial, layer_ensemble, repeated_update
from theory.problems import CopyTask, PowerLawSpectrum, TopKTask
from theory.results import DomainError

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

SPECTRUM = PowerLawSpectrum(1, 0.5, dim=4, input_scale=3, teacher_scale=5)
TOP_K = TopKTask(SPECTRUM, context=8, top_k=2)
COPY = CopyTask(SPECTRUM, context=8)
INFINITE = CopyTask(SPECTRUM)
ISOTROPIC = TopKTask(PowerLawSpectrum(0, 1, dim=4), context=8, top_k=3)
SOFTMAX = [LayerValueSoftmax, UpdatingSoftmax, SingleStreamSoftmax]
EXPERIMENTS = [
    *(kind(problem, 3) for kind in SOFTMAX for problem in (TOP_K, COPY, ISOTROPIC)),
    *(
        LinearLayers(problem, 3, parametrisation, initial_noise=0.2)
        for problem in (TOP_K, COPY, INFINITE, ISOTROPIC)
        for parametrisation in ("matrices", "scalars", "shared matrix", "shared scalar")
    ),
]
SMALL = SampleSize(chunks=2, chunk_batches=1, batch=16)
# |z| < 4.5 fails by chance with probability 7e-6; there are about 25 such comparisons in this file.
Z_LIMIT = 4.5


def generators(count: int, name: str) -> list[np.random.Generator]:
    return [stream(7, name, index) for index in range(count)]


def draw(experiment, count: int, loss: str, members: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.tensor(array, dtype=torch.float64)
        for array in experiment.sample(generators(members, "draw"), count, loss)
    )


def z_score(values, mean: float, variance: float = 0.0) -> float:
    values = np.asarray(values)
    return float((values.mean() - mean) / math.sqrt(values.var(ddof=1) / len(values) + variance))


def short_name(experiment) -> str:
    problem = type(experiment.problem).__name__
    return f"{experiment.kind} {getattr(experiment, 'parametrisation', '')} {problem} {experiment.problem.context}"


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=short_name)
def test_experiments_hold_to_the_protocol(experiment) -> None:
    assert experiment_from_json(experiment.to_json()) == experiment
    assert hash(experiment) == hash(experiment_from_json(experiment.to_json()))
    members, count = 2, 6
    model = experiment.initial(generators(members, "weights"))
    alone = experiment.initial(generators(1, "weights"))
    assert all(parameter.shape[0] == members for parameter in model.parameters())
    for loss in experiment.losses:
        batch = draw(experiment, count, loss)
        assert all(array.shape[:2] == (members, count) for array in batch)
        losses = experiment.loss(model, batch, loss)
        assert losses.shape == (members,)
        assert experiment.zero_loss(batch, loss).shape == (members,)
        # The first member depends on its own generator only.
        first = tuple(array[:1] for array in batch)
        assert experiment.loss(alone, first, loss).item() == pytest.approx(losses[0].item(), rel=1e-12)
        losses.sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    grouped = [parameter for group in experiment.parameter_groups(model) for parameter in group["params"]]
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in model.parameters()}
    loss = experiment.losses[0]
    batch = draw(experiment, count, loss)
    measured = experiment.measure(model, batch)
    assert all(value.shape == (members, count) for value in measured.values())
    assert torch.allclose(measured["loss"].mean(dim=1), experiment.loss(model, batch, loss), rtol=1e-10)
    if "shared_error" in measured:
        total = measured["shared_error"] + measured["disagreement"] / experiment.depth
        assert torch.allclose(total, measured["loss"], rtol=1e-9)
    modes = [value for name, value in measured.items() if name.startswith("mode_loss_")]
    assert len(modes) == (0 if isinstance(experiment, SingleStreamSoftmax) else 3)


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if len(e.losses) == 2], ids=short_name)
def test_sampled_loss_has_the_mean_of_the_averaged_loss(experiment) -> None:
    model = experiment.initial(generators(1, "weights"))
    with torch.no_grad():
        averaged, sampled = (
            [experiment.loss(model, draw_one(experiment, loss, index), loss).item() for index in range(40)]
            for loss in ("teacher_averaged", "sampled")
        )
        zero = [
            [experiment.zero_loss(draw_one(experiment, loss, index), loss).item() for index in range(40)]
            for loss in ("teacher_averaged", "sampled")
        ]
    for one, other in ((averaged, sampled), zero):
        assert abs(z_score(other, float(np.mean(one)), np.var(one, ddof=1) / len(one))) < Z_LIMIT


def draw_one(experiment, loss: str, index: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.tensor(array, dtype=torch.float64) for array in experiment.sample([stream(8, loss, index)], 200, loss)
    )


def test_linear_top_k_losses_are_those_of_weights_on_labels() -> None:
    from sim.models.linear_attention import LinearAttention

    experiment = LinearLayers(TOP_K, 3, initial_noise=0.2)
    model = experiment.initial(generators(1, "weights"))
    arrays = experiment.sample([stream(9, "contexts")], 20, "teacher_averaged")
    found = (
        experiment.measure(model, tuple(torch.tensor(array, dtype=torch.float64) for array in arrays))["loss"][0]
        * experiment.unit()
    )
    # The same contexts with the tokens at hand, in the units of the problem, as the network sees them.
    generator = stream(9, "contexts")
    contexts = sample_contexts(TOP_K, 20, generator, rotate=False)
    rotation = arrays[3][0]
    tokens, query = contexts.tokens @ np.swapaxes(rotation, 1, 2), (rotation @ contexts.query[..., None])[..., 0]
    twin = LinearAttention(model.key_query.detach().numpy() / 3, np.ones(1), 3)
    weights = twin.label_weights(torch.tensor(tokens[None]), torch.tensor(query[None]))[0].detach().numpy()
    errors = np.einsum("np,npd->nd", weights - contexts.target, contexts.label_factors())
    assert np.allclose(found.detach().numpy(), (errors**2).sum(axis=1), rtol=1e-10)


@pytest.mark.parametrize("context", [3, 12])
def test_linear_copy_losses_are_those_of_drawn_tokens(context: int) -> None:
    task = CopyTask(SPECTRUM, context)
    experiment = LinearLayers(task, 2, "scalars")
    model = experiment.initial(generators(1, "weights"))
    arrays = experiment.sample([stream(10, "statistics")], 20_000, "teacher_averaged")
    losses = (
        experiment.measure(model, tuple(torch.tensor(array, dtype=torch.float64) for array in arrays))["loss"][0]
        .detach()
        .numpy()
    )
    contexts = sample_contexts(task, 20_000, stream(11, "tokens"), rotate=False)
    covariance = np.swapaxes(contexts.tokens, 1, 2) @ contexts.tokens / context
    error = -contexts.query
    for scalar in model.key_query.detach().numpy()[0, ::-1]:
        error = error - scalar / 3 / 2 * (covariance @ error[..., None])[..., 0]
    expected = (error**2 * SPECTRUM.teacher_variances()).sum(axis=1) / experiment.unit()
    assert abs(z_score(losses, expected.mean(), expected.var(ddof=1) / len(expected))) < Z_LIMIT


@pytest.mark.parametrize("degrees", [0, 2, 3, 7])
def test_wishart_matrices_have_the_moments_of_sums_of_squares(degrees: int) -> None:
    matrices = wishart_matrices(20_000, 3, degrees, stream(12, "wishart", degrees))
    if degrees == 0:
        assert not matrices.any()
        return
    assert np.linalg.matrix_rank(matrices[0]) == min(3, degrees)
    for i, j in [(0, 0), (2, 2), (1, 0)]:
        values = matrices[:, i, j]
        assert abs(z_score(values, degrees * (i == j))) < Z_LIMIT
        assert abs(z_score((values - degrees * (i == j)) ** 2, degrees * (1 + (i == j)))) < Z_LIMIT


@pytest.mark.parametrize("parametrisation", ["matrices", "scalars", "shared matrix", "shared scalar"])
def test_population_loss_of_equal_steps_is_the_repeated_update(parametrisation: str) -> None:
    experiment = LinearLayers(INFINITE, 3, parametrisation, initial_steps=(1.3, 1.3))
    model = experiment.initial(generators(1, "weights"))
    measured = experiment.measure(model, draw(experiment, 2, "teacher_averaged", members=1))
    expected = repeated_update.finite_risk(SPECTRUM, 3, 1.3).item()
    assert measured["loss"][0, 0].item() * experiment.unit() == pytest.approx(expected, rel=1e-10)
    modes = SPECTRUM.label_variances() * (1 - 1.3 * SPECTRUM.input_variances() / 3) ** 6
    for mode in (1, 2, 4):
        found = measured[f"mode_loss_{mode}"][0, 0].item() * experiment.unit()
        assert found == pytest.approx(modes[mode - 1], rel=1e-10, abs=1e-15)


def test_training_linear_layers_reaches_the_free_polynomial() -> None:
    # Training is deterministic; the gap of 0.5 % is more than its steps leave.
    experiment = LinearLayers(INFINITE, 2, "scalars", initial_steps=(0.5, 2.0))
    result = train(TrainingConfig(experiment, steps=300, batch=1, learning_rate=0.1, evaluation=SMALL))
    free, repeated = free_polynomial.finite_risk(SPECTRUM, 2).item(), repeated_update.best_risk(SPECTRUM, 2).item()
    assert free * (1 - 1e-9) <= result.estimate("loss").value < free * 1.005 < repeated


@pytest.mark.parametrize("kind", SOFTMAX)
def test_training_softmax_models_lowers_the_loss(kind) -> None:
    experiment = kind(TOP_K, 2, initial_scales=(1.0, 5.0))
    settings = {"steps": 60, "batch": 64, "learning_rate": 0.1, "evaluation": SMALL, "history_every": 10}
    result = train(TrainingConfig(experiment, loss=experiment.losses[0], **settings))
    measured = {name: result.estimate(name).value for name in ("loss", "shared_error", "disagreement")}
    assert measured["shared_error"] + measured["disagreement"] / 2 == pytest.approx(measured["loss"], rel=1e-9)
    assert 0 < result.estimate("attention_mass").value < 1
    assert result.history[-1][1] < result.history[0][1]


def test_measures_are_those_of_the_theory() -> None:
    experiment = UpdatingSoftmax(TOP_K, 2, initial_update=-1.0)
    model = experiment.initial(generators(1, "weights"))
    batch = draw(experiment, 10, "teacher_averaged", members=1)
    measured = experiment.measure(model, batch)
    rows = model.attention(*batch[:2])[0].detach().numpy()
    target = batch[2][0].numpy()
    errors = layer_ensemble.selection_errors(rows, target)
    assert np.allclose(measured["selection_error"][0].detach().numpy(), errors, rtol=1e-12)
    masses = [sum(row[target[n] > 0]) for n, row in enumerate(rows.mean(axis=1))]
    assert np.allclose(measured["attention_mass"][0].detach().numpy(), masses, rtol=1e-12)
    fit = context_update.identity_uniform_fit(model.context_attention(0, batch[0])[0].detach().numpy())
    assert np.allclose(measured["identity_weight"][0].detach().numpy(), fit.rho, rtol=1e-10)
    assert np.allclose(measured["identity_r_squared"][0].detach().numpy(), fit.r_squared, rtol=1e-10)
    with pytest.raises(DomainError, match="must not be uniform"):
        identity_measures(torch.full((4, 4), 0.25))


def test_losses_of_all_modes_add_up() -> None:
    shares = torch.tensor([[1.0, 4.0]])
    steep, hidden = (CopyTask(PowerLawSpectrum(a, 1, dim=2), 3) for a in (1, 0))
    assert [value.item() for value in mode_losses(shares, steep).values()] == [1, 4]
    assert [value.item() for value in mode_losses(shares, hidden).values()] == pytest.approx([5 * 2 / 3, 5 / 3])
    assert [reported_modes(dim) for dim in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearLayers(TOP_K, 0), "depth must be an integer"),
        (lambda: LinearLayers(CopyTask(PowerLawSpectrum(1, 1)), 2), "finite spectrum.dim"),
        (lambda: LinearLayers(TOP_K, 1, "vectors"), "parametrisation must be one of matrices"),
        (lambda: LinearLayers(TOP_K, 1, initial_steps=(2, 1)), r"initial_steps\[1\]"),
        (lambda: UpdatingSoftmax(INFINITE, 1), "finite context"),
        (lambda: LayerValueSoftmax(TOP_K, 1, initial_noise=-1), "initial_noise"),
        (lambda: SingleStreamSoftmax(TOP_K, 1, initial_scales=3), "initial_scales must be a pair"),
    ],
)
def test_fields_are_validated(make, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        make()
