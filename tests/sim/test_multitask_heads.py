"""Diagonal heads on several tasks: the layer with those circuits, the kernels and torch are one function."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from sim.contexts import SampleSize
from sim.experiments.base import experiment_from_json
from sim.experiments.multitask_heads import MultiTaskHeads
from sim.regression_contexts import sample_regression, signal_masks
from sim.streams import stream
from sim.training import TrainingConfig, config_from_json, train
from theory.multihead.multitask import descent_pattern, descent_rule, multitask_prediction, rule_risk, task_alone
from theory.multihead.softmax_risk import softmax_risk
from theory.problems import MultiTaskRegression, RegressionTask
from theory.results import DomainError

torch = pytest.importorskip("torch")

from sim.models import multitask_heads as models  # noqa: E402
from sim.models.multihead_attention import MultiHeadAttention, circuit_losses, embed  # noqa: E402
from sim.montecarlo.kernels import multitask_training as kernels  # noqa: E402
from sim.montecarlo.multihead_training import HeadActivation  # noqa: E402

pytestmark = pytest.mark.long

TASK = MultiTaskRegression(4, 7, 0.2, ((1, 2), (2, 3, 4), (4,)))
PAPER = MultiTaskRegression(6, 40, 0.1, ((1, 2, 3, 4), (3, 4, 5, 6)))
MEMBERS, HEADS, BATCH = 2, 3, 6
ACTIVATIONS = [
    HeadActivation("exp"),
    HeadActivation("1+tanh"),
    HeadActivation("(1+Cx)^2", 0.5),
    HeadActivation("x/L"),
]
# Sums of a few hundred terms of order 1 in float64.
EQUAL = 1e-10


def experiment_of(activation=ACTIVATIONS[0], **fields):
    return MultiTaskHeads(TASK, HEADS, activation.name, activation.scale, initial_scale=0.6, **fields)


def model_of(experiment, members=MEMBERS):
    return experiment.initial([stream(seed, "weights") for seed in range(members)])


def batch_of(experiment, loss, seed=1, count=BATCH, members=MEMBERS):
    arrays = experiment.sample([stream(seed, "batch", member) for member in range(members)], count, loss)
    return tuple(torch.tensor(array, dtype=torch.float64) for array in arrays)


def layer_of(model):
    """The layer (2.2) whose circuits are those of the heads: diagonals of K and O, with identities beside them."""
    omega, mu = model.omega, model.mu
    members, heads, d = omega.shape
    width = d + mu.shape[2]
    maps = torch.zeros((4, members, heads, width, width), dtype=omega.dtype)
    layer = MultiHeadAttention(*maps.numpy())
    unit = torch.eye(width, dtype=omega.dtype)
    inputs, outputs = (torch.arange(width) < d).to(omega.dtype), (torch.arange(width) >= d).to(omega.dtype)
    zeros = torch.zeros_like(mu)
    built = {
        "output_maps": torch.diag_embed(torch.cat([torch.zeros_like(omega), mu], dim=-1)),
        "value_maps": (unit * outputs).expand(members, heads, width, width),
        "key_maps": torch.diag_embed(torch.cat([omega, zeros], dim=-1)),
        "query_maps": (unit * inputs).expand(members, heads, width, width),
    }
    return layer, built


def relative_gap(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: one.name)
def test_predictions_are_those_of_the_whole_layer(activation):
    experiment = experiment_of(activation)
    model = model_of(experiment)
    tokens, query, labels, _ = batch_of(experiment, "sampled")
    weights = models.diagonal_label_weights(model.omega, model.mu, tokens, query, activation, TASK.context)
    predicted = (weights * labels).sum(dim=2)
    layer, built = layer_of(model)
    sequence = embed(torch.cat([tokens, labels.transpose(1, 2)], dim=2), query)
    output = torch.func.functional_call(
        layer, built, (sequence,), {"activation": activation, "training_context": TASK.context}
    )
    whole = output[..., TASK.dim :, -1].transpose(1, 2)
    assert relative_gap(predicted, whole) < EQUAL
    # Gradients in omega and mu of the sampled loss, through every matrix of the layer and by the kernel.
    target = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    through = torch.autograd.grad((whole - target).square().sum(dim=1).mean(), [model.omega, model.mu])
    fast = models.diagonal_losses(model.omega, model.mu, (tokens, query, labels, target),
                                  *experiment._setting()).mean()  # fmt: skip
    direct = torch.autograd.grad(fast, [model.omega, model.mu])
    assert max(relative_gap(*pair) for pair in zip(direct, through, strict=True)) < EQUAL


def test_sampled_loss_is_that_of_the_fast_layer():
    experiment = experiment_of()
    model = model_of(experiment)
    tokens, query, labels, target = batch_of(experiment, "sampled")
    _, built = layer_of(model)
    key_query = built["key_maps"].transpose(-1, -2) @ built["query_maps"][..., : TASK.dim]
    value = (built["output_maps"] @ built["value_maps"])[..., TASK.dim :, :]
    shown = (torch.cat([tokens, labels.transpose(1, 2)], dim=2), query, target)
    whole = circuit_losses(key_query.contiguous(), value.contiguous(), shown, ACTIVATIONS[0], TASK.context)
    assert relative_gap(experiment.loss(model, (tokens, query, labels, target), "sampled"), whole) < EQUAL


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: one.name)
@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
def test_kernels_and_torch_are_one_function(activation, loss, monkeypatch):
    experiment = experiment_of(activation)
    model, batch = model_of(experiment), batch_of(experiment, loss)
    found = []
    for apply in (True, False):
        monkeypatch.setattr(models, "kernels_apply", lambda *_, apply=apply: apply)
        losses = experiment.loss(model, batch, loss)
        found.append([losses, *torch.autograd.grad(losses @ torch.tensor([1.0, 0.3]).double(), model.parameters())])
    assert max(relative_gap(*pair) for pair in zip(*found, strict=True)) < EQUAL


def test_gradients_by_finite_differences():
    experiment = experiment_of()
    model = model_of(experiment)
    batch = batch_of(experiment, "teacher_averaged")
    assert torch.autograd.gradcheck(
        lambda omega, mu: models.task_averaged_losses(
            torch.tensor(signal_masks(TASK)), 0.25, TASK.noise,
            models.diagonal_label_weights(omega, mu, batch[0], batch[1], ACTIVATIONS[0], TASK.context), *batch,
        ),
        (model.omega, model.mu),
    )  # fmt: skip


@pytest.mark.parametrize("normalised", [True, False])
def test_kernels_are_their_plain_twins(normalised):
    generator = stream(3, "twins")
    tokens, query = generator.normal(size=(5, 4, 3)), generator.normal(size=(4, 3))
    masks, mu, weights = signal_masks(TASK), generator.normal(size=(2, 3)), generator.normal(size=(3, 5, 3))
    f, derivative, inverse = (generator.uniform(1, 2, shape) for shape in ((2, 5, 3), (2, 5, 3), (2, 3)))
    if normalised:
        inverse = 1 / f.sum(axis=1)
    results = []
    for averaged, gradient in (
        (kernels.task_averaged_slopes, kernels.diagonal_gradient),
        (kernels.task_averaged_slopes.py_func, kernels.diagonal_gradient.py_func),
    ):
        losses, slopes, by_omega, by_mu = np.empty(3), np.empty_like(weights), np.empty((2, 4)), np.empty((2, 3))
        averaged(tokens, query, masks, 0.5, 0.2, weights, losses, slopes)
        gradient(tokens, query, f, derivative, inverse, normalised, slopes, mu, by_omega, by_mu)
        results.append([losses, slopes, by_omega, by_mu])
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    errors = (query - np.einsum("tln,lin->tin", weights, tokens)) * masks[:, :, None]
    expected = 0.2 * (len(masks) + (weights**2).sum(axis=(0, 1))) + 0.5 * (errors**2).sum(axis=(0, 1))
    assert results[0][0] == pytest.approx(expected, rel=1e-12)
    rest = np.einsum("tln,hln,hn->htn", results[0][1], f, inverse)
    assert results[0][3] == pytest.approx(rest.sum(axis=-1), rel=1e-12)
    change = np.einsum("ht,tln->hln", mu, results[0][1])
    change -= normalised * np.einsum("ht,htn->hn", mu, rest)[:, None]
    expected = np.einsum("hln,lin,in->hi", change * derivative * inverse[:, None], tokens, query)
    assert results[0][2] == pytest.approx(expected, rel=1e-12)


def test_predictions_are_those_of_theory():
    experiment = MultiTaskHeads(PAPER, 3)
    model = model_of(experiment, 1)
    tokens, query, labels, _ = batch_of(experiment, "sampled", members=1)
    weights = models.diagonal_label_weights(model.omega, model.mu, tokens, query, ACTIVATIONS[0], PAPER.context)
    ours = (weights * labels).sum(dim=2)[0].T.detach().numpy()
    theory = multitask_prediction(tokens[0].permute(2, 0, 1), labels[0].permute(2, 1, 0), query[0].T,
                                  model.omega[0].detach(), model.mu[0].detach())  # fmt: skip
    assert ours == pytest.approx(theory, rel=1e-10)


def mean_loss(experiment, model, loss, count=40_000, chunks=20):
    values = [experiment.loss(model, batch_of(experiment, loss, 100 + chunk, count // chunks, 1), loss).item()
              for chunk in range(chunks)]  # fmt: skip
    return np.mean(values), np.std(values, ddof=1) / np.sqrt(chunks)


@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
def test_losses_are_exact_risks(loss):
    # A pair on the first task, which it has to itself, and idle heads: known exactly at any scale.
    alone, factor = task_alone(PAPER, 1)
    omega, mu = np.zeros((1, 2, 6)), np.zeros((1, 2, 2))
    omega[0, :, :4], mu[0, :, 0] = [[0.4], [-0.3]], (1.2, -1.5)
    experiment = MultiTaskHeads(PAPER, 2)
    value, stderr = mean_loss(experiment, models.DiagonalHeads(omega, mu), loss)
    # The second task is answered by 0.
    exact = factor * softmax_risk(alone, (0.4, -0.3), (1.2, -1.5)).value + PAPER.noise + 4 / 6
    assert abs(value - exact) < 5 * stderr  # t with 19 degrees beyond 5: 8e-5


def test_small_heads_have_the_risk_of_their_rule():
    rule = descent_rule(PAPER)
    pattern = descent_pattern(rule, 4, 0.01)
    model = models.DiagonalHeads(pattern.omega[None], pattern.mu[None])
    value, stderr = mean_loss(MultiTaskHeads(PAPER, 4), model, "teacher_averaged")
    # At this scale heads are off the rule by 1e-4 of it, and the risk by less; t with 19 degrees beyond 5: 8e-5.
    assert abs(value - rule_risk(PAPER, rule).sum()) < 5 * stderr


@pytest.mark.parametrize("variance", [None, 1.0])
def test_both_losses_and_the_loss_of_zero_have_the_same_means(variance):
    experiment = experiment_of(teacher_variance=variance)
    model = model_of(experiment, 1)
    zero = models.DiagonalHeads(np.zeros((1, 1, 4)), np.zeros((1, 1, 3)))
    for one in (model, zero):
        (a, sa), (b, sb) = (mean_loss(experiment, one, loss) for loss in ("teacher_averaged", "sampled"))
        assert abs(a - b) < 5 * np.hypot(sa, sb)  # t with about 19 degrees beyond 5: 8e-5 each
    for loss in ("teacher_averaged", "sampled"):
        batch = batch_of(experiment, loss, members=1)
        assert experiment.zero_loss(batch, loss) == pytest.approx(experiment.loss(zero, batch, loss).detach())


def test_measured_losses_are_those_of_training_and_add_up():
    experiment = experiment_of()
    model, batch = model_of(experiment), batch_of(experiment, "teacher_averaged")
    measured = experiment.measure(model, batch)
    assert torch.allclose(measured["loss"].mean(dim=1), experiment.loss(model, batch, "teacher_averaged"), rtol=1e-12)
    assert torch.allclose(measured["loss_1"] + measured["loss_2"] + measured["loss_3"], measured["loss"])


def test_contexts_are_those_of_the_layer_and_shared_where_asked():
    experiment = experiment_of()
    generators = [[stream(seed, "shared") for seed in range(3)] for _ in range(3)]
    drawn = sample_regression(TASK, 4, generators[0])
    tokens, query, labels, target = experiment.sample(generators[1], 4, "sampled")
    assert np.array_equal(np.concatenate([tokens, np.swapaxes(labels, 1, 2)], axis=2), drawn.embedding)
    assert np.array_equal(query, drawn.query)
    assert np.array_equal(target, drawn.target)
    shared = experiment_of(shared_contexts=True).sample(generators[2], 4, "sampled")
    assert all(
        np.array_equal(one[:1], other) for one, other in zip((tokens, query, labels, target), shared, strict=True)
    )


@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
def test_a_member_is_the_run_of_its_seed_and_settings_do_not_mix(loss):
    one, other = experiment_of(), experiment_of(HeadActivation("1+tanh"))
    common = {"steps": 4, "batch": 16, "learning_rate": 0.01, "loss": loss, "evaluation": SampleSize(2, 1, 8)}
    ensemble = train(TrainingConfig(one, seeds=(5, 6, 7), **common))
    single = train(TrainingConfig(one, seeds=(6,), **common))
    for name, values in single.parameters.items():
        assert np.array_equal(ensemble.parameters[name][1], values[0])
    assert one.shape() == other.shape()
    pair = [model_of(each) for each in (one, other)]
    batches = [batch_of(each, loss, seed) for seed, each in enumerate((one, other))]
    parameters = [np.concatenate([getattr(each, name).detach() for each in pair]) for name in ("omega", "mu")]
    stacked = models.DiagonalHeads(*parameters)
    together = MultiTaskHeads.losses_together(stacked, list(zip((one, other), (2, 2), batches, strict=True)), loss)
    apart = [each.loss(model, batch, loss) for each, model, batch in zip((one, other), pair, batches, strict=True)]
    assert torch.equal(together, torch.cat(apart))


def test_two_heads_become_a_pair_that_serves_both_tasks():
    result = train(TrainingConfig(MultiTaskHeads(PAPER, 2), steps=1200, learning_rate=0.02, seeds=(1, 3),
                                  evaluation=SampleSize(2, 1, 64)))  # fmt: skip
    omega, mu = result.parameters["omega"], result.parameters["mu"]
    assert np.abs(omega.sum(axis=1)).max() < 0.1 * np.abs(omega).max()
    assert np.abs(mu.sum(axis=1)).max() < 0.1 * np.abs(mu).max()
    # One rule for both tasks: where they overlap the step of a task alone, elsewhere less, as labels have signal there.
    step = np.einsum("mhn,mhi->mni", mu, omega).mean(axis=(0, 1))
    assert step[2:4] == pytest.approx(0.897, rel=0.05)
    assert step[[0, 1, 4, 5]] == pytest.approx(0.813, rel=0.05)


def test_json_and_toml_read_it():
    experiment = experiment_of(teacher_variance=1, shared_contexts=True)
    assert experiment_from_json(experiment.to_json()) == experiment
    text = """
    steps = 2
    loss = "sampled"
    [experiment]
    kind = "multi-task heads"
    heads = 3
    problem = {type = "MultiTaskRegression", dim = 4, context = 7, noise = 0.2, signal_sets = [[1, 2], [3, 4]]}
    """
    config = config_from_json(tomllib.loads(text))
    assert config.experiment == MultiTaskHeads(MultiTaskRegression(4, 7, 0.2, ((1, 2), (3, 4))), 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MultiTaskHeads(RegressionTask(2, 3, 0.1)), "problem must be a MultiTaskRegression"),
        (lambda: MultiTaskHeads(TASK, 0), "heads"),
        (lambda: MultiTaskHeads(TASK, activation="relu"), "activation"),
        (lambda: MultiTaskHeads(TASK, activation_scale=2.0), "activation scale"),
        (lambda: MultiTaskHeads(TASK, teacher_variance=0), "teacher_variance"),
        (lambda: MultiTaskHeads(TASK, initial_scale=-1), "initial_scale"),
        (lambda: MultiTaskHeads(TASK, shared_contexts=1), "shared_contexts"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(DomainError, match=words):
        call()
