"""Tiny training runs: the same bits again, ensembles, exact identities, and the single softmax layer."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim.contexts import SampleSize, sample_contexts, sample_labels
from sim.convergence import Convergence
from sim.divergence import DivergedError
from sim.experiments.label_weights import (
    initial_key_query,
    label_unit,
    layer_decomposition,
    sampled_losses,
    teacher_averaged_losses,
)
from sim.experiments.softmax_attention import SoftmaxAttention, scales_and_spreads
from sim.montecarlo.single_softmax import best_single_softmax
from sim.streams import stream
from sim.training import (
    Training,
    TrainingConfig,
    TrainingResult,
    config_from_json,
    learning_rate_at,
    paired_difference,
    resolved_device,
    train,
    trained_model,
)
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError, MissingDependencyError, PrecisionError

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

TASK = TopKTask(PowerLawSpectrum(0, 0, 4), 8, 2)
STEEP = TopKTask(PowerLawSpectrum(1, 0.5, 4), 8, 2)
EVALUATION = SampleSize(chunks=16, chunk_batches=2, batch=128)
MODEL = SoftmaxAttention(TASK, depth=3)
TINY = TrainingConfig(MODEL, steps=150, batch=64, evaluation=EVALUATION, history_every=50)


def with_model(config: TrainingConfig, **changes: Any) -> TrainingConfig:
    return replace(config, experiment=replace(config.experiment, **changes))


@pytest.fixture(scope="module")
def tiny() -> TrainingResult:
    return train(TINY)


def mean_squared_target(task: TopKTask) -> float:
    contexts = sample_contexts(task, 4000, stream(0, "squared target"))
    return float(np.mean(np.sum(np.einsum("np,npi->ni", contexts.target, contexts.label_factors()) ** 2, axis=1)))


def same_bits(first: TrainingResult, second: TrainingResult) -> bool:
    weights = [[array.tobytes() for array in result.parameters.values()] for result in (first, second)]
    return first == second and weights[0] == weights[1]


def test_the_same_seed_gives_the_same_bits(tiny: TrainingResult) -> None:
    assert same_bits(train(TINY), tiny)
    assert not same_bits(train(replace(TINY, seeds=(1,))), tiny)


def test_the_number_of_threads_of_the_caller_does_not_matter_and_is_restored(tiny: TrainingResult) -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("medium")
        assert same_bits(train(TINY), tiny)
        assert torch.get_num_threads() == 2
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert (tiny.numerics.threads, tiny.numerics.matmul_precision) == (1, "highest")
    assert (tiny.numerics.training_dtype, tiny.numerics.evaluation_dtype) == ("float32", "float64")
    assert tiny.numerics.torch_version == torch.__version__


@pytest.mark.parametrize("task", [TASK, STEEP])
@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
def test_the_loss_falls_well_below_the_squared_target(task: TopKTask, loss: str) -> None:
    result = train(with_model(replace(TINY, loss=loss), problem=task))
    assert result.loss.value < 0.35 * mean_squared_target(task)
    assert result.history[-1][1][0] < result.history[0][1][0]


def test_loss_is_shared_error_plus_disagreement_over_depth(tiny: TrainingResult) -> None:
    disagreement = tiny.estimate("disagreement").value
    assert disagreement > 0
    right = tiny.estimate("shared_error").value + disagreement / MODEL.depth
    assert tiny.loss.value == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("depth", [2, 5])
def test_decomposition_equals_its_definition_over_pairs(depth: int) -> None:
    errors = torch.tensor(stream(1, "decomposition").standard_normal((6, depth, 3)))
    loss, shared, disagreement = layer_decomposition(errors)
    gram = (errors @ errors.transpose(1, 2)).numpy()
    pairs = depth * (depth - 1)
    for n in range(6):
        average = np.trace(gram[n]) / depth
        expected = (gram[n].sum() - np.trace(gram[n])) / pairs
        assert shared[n].item() == pytest.approx(expected, rel=1e-12)
        assert disagreement[n].item() == pytest.approx(average - expected, rel=1e-12)
        assert loss[n].item() == pytest.approx(gram[n].sum() / depth**2, rel=1e-12)
    assert torch.allclose(loss, shared + disagreement / depth, rtol=1e-12, atol=0)


def test_one_layer_has_no_pairs_and_learns_the_single_softmax() -> None:
    result = train(TrainingConfig(SoftmaxAttention(TASK, 1), steps=600, batch=128, evaluation=EVALUATION))
    assert not {"shared_error", "disagreement"} & set(result.measured)
    with pytest.raises(DomainError, match=r"name must be one of loss, .*, got 'shared_error'"):
        result.estimate("shared_error")
    single = best_single_softmax(TASK, 0, EVALUATION)
    assert abs(result.loss.z_score(single.loss.value, single.loss.stderr)) < 4
    scales, spreads = scales_and_spreads(result.parameters["key_query"][0])
    assert scales[0] == pytest.approx(single.scale, rel=0.1)
    assert spreads[0] < 0.1 * single.scale
    assert result.parameters["gain"][0] == pytest.approx(single.gain, rel=0.05)


@pytest.mark.parametrize("task", [TASK, STEEP, TopKTask(PowerLawSpectrum(0, 1.5, 4), 8, 2)])
def test_averaging_over_teachers_keeps_the_expected_loss(task: TopKTask) -> None:
    generator = stream(2, "losses")
    contexts = sample_contexts(task, 20_000, generator)
    labels = torch.tensor(sample_labels(contexts, generator))
    weights = torch.softmax(3 * torch.tensor(contexts.cosines), dim=1)
    target, factors = torch.tensor(contexts.target), torch.tensor(contexts.label_factors())
    difference = sampled_losses(weights, target, labels) - teacher_averaged_losses(weights, target, factors)
    assert abs(difference.mean() / (difference.std() / len(difference) ** 0.5)) < 4


def test_units_of_tokens_and_labels_do_not_matter(tiny: TrainingResult) -> None:
    # Powers of 4 change no mantissa, so that even the bits of the weights are the same.
    scaled_task = TopKTask(PowerLawSpectrum(0, 0, 4, input_scale=4.0**30, teacher_scale=4.0**20), 8, 2)
    scaled = train(with_model(TINY, problem=scaled_task))
    assert scaled.parameters["key_query"].tobytes() == tiny.parameters["key_query"].tobytes()
    assert scaled.loss.value == 4.0**50 * tiny.loss.value
    assert label_unit(scaled_task) == 2.0**50 * label_unit(TASK)
    assert scaled.history[-1][1][0] == pytest.approx(4.0**50 * tiny.history[-1][1][0], rel=1e-15)


def test_progress_sees_the_history(tiny: TrainingResult) -> None:
    seen: list[tuple[int, float]] = []
    train(replace(TINY, steps=110), progress=lambda step, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == [50, 100, 110]
    assert [step for step, _ in tiny.history] == [50, 100, 150]


def test_paired_difference_is_sharper_than_the_losses(tiny: TrainingResult) -> None:
    other = train(replace(TINY, seeds=(5,)))
    difference = paired_difference(tiny, other)
    assert difference.value == pytest.approx(tiny.loss.value - other.loss.value, abs=1e-14)
    assert difference.stderr < 0.5 * np.hypot(tiny.loss.stderr, other.loss.stderr)
    elsewhere = replace(tiny, config=replace(TINY, evaluation_seed=1))
    with pytest.raises(DomainError, match="evaluation_seed must be the same in both runs"):
        paired_difference(tiny, elsewhere)


def test_scales_and_spreads_are_means_over_directions() -> None:
    key_query = stream(3, "spreads").standard_normal((2, 4, 4)) + 3 * np.eye(4)
    scales, spreads = scales_and_spreads(key_query)
    directions = stream(3, "directions").standard_normal((100_000, 4))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    for layer in range(2):
        read = directions @ key_query[layer].T
        assert (read * directions).sum(axis=1).mean() == pytest.approx(scales[layer], abs=0.02)
        rest = read - scales[layer] * directions
        assert (rest**2).sum(axis=1).mean() == pytest.approx(spreads[layer] ** 2, rel=0.02)


def test_initial_layers_differ_in_scale() -> None:
    model = replace(MODEL, depth=4, initial_scales=(1, 16), initial_noise=0)
    scales, spreads = scales_and_spreads(initial_key_query(model, [stream(0, "start")])[0])
    assert scales == pytest.approx([2**0.5, 2**1.5, 2**2.5, 2**3.5], rel=1e-14)
    assert spreads == pytest.approx(0, abs=1e-14)
    assert scales_and_spreads(initial_key_query(replace(model, depth=1), [stream(0, "start")])[0])[
        0
    ] == pytest.approx(4)


def test_schedules() -> None:
    assert learning_rate_at(TINY, 0) == TINY.learning_rate
    assert learning_rate_at(TINY, 75) == pytest.approx(TINY.learning_rate / 2)
    assert learning_rate_at(TINY, 149) < 1e-3 * TINY.learning_rate
    assert learning_rate_at(replace(TINY, schedule="constant"), 149) == TINY.learning_rate


def test_warm_up_rises_linearly_and_then_follows_the_schedule() -> None:
    warm = replace(TINY, learning_rate=1.0, warmup=50)
    assert [learning_rate_at(warm, step) for step in (0, 24, 49, 50)] == [0.02, 0.5, 1.0, 1.0]
    assert learning_rate_at(warm, 100) == pytest.approx(0.5)
    flat = replace(warm, schedule="constant")
    assert [learning_rate_at(flat, step) for step in (0, 49, 50, 149)] == [0.02, 1.0, 1.0, 1.0]


# float32 products of other shapes round differently, and 60 steps of Adam carry that on: measured below 1e-5.
SAME_MEMBER = 1e-3


@pytest.mark.parametrize("loss", ["teacher_averaged", "sampled"])
def test_members_of_an_ensemble_are_single_runs(loss: str) -> None:
    config = replace(TINY, steps=60, loss=loss)
    together = train(replace(config, seeds=(4, 9, 0)))
    for member, seed in enumerate((4, 9, 0)):
        alone = train(replace(config, seeds=(seed,)))
        for name in alone.measured:
            right = alone.estimate(name).value
            assert together.estimate(name, member).value == pytest.approx(right, rel=SAME_MEMBER)
        assert together.history[0][1][member] == pytest.approx(alone.history[0][1][0], rel=SAME_MEMBER)


def test_members_in_float64_are_single_runs_to_rounding() -> None:
    config = replace(TINY, steps=40, dtype="float64")
    together = train(replace(config, seeds=(4, 9)))
    alone = train(replace(config, seeds=(9,)))
    for name, array in alone.parameters.items():
        assert together.parameters[name][1] == pytest.approx(array[0], rel=1e-9, abs=1e-9)
    difference = paired_difference(together, alone, members=(1, 0))
    assert abs(difference.value) < 1e-12
    assert together.numerics.training_dtype == "float64"


def test_the_trained_model_gives_the_measured_loss(tiny: TrainingResult) -> None:
    model = trained_model(tiny)
    arrays = MODEL.sample([stream(0, "evaluation contexts", 0)], EVALUATION.batch, "teacher_averaged")
    generator = stream(0, "evaluation contexts", 0)
    batches = [MODEL.sample([generator], EVALUATION.batch, "teacher_averaged") for _ in range(2)]
    assert batches[0][0].tobytes() == arrays[0].tobytes()
    with torch.no_grad():
        doubles = [tuple(torch.tensor(array, dtype=torch.float64) for array in batch) for batch in batches]
        losses = [MODEL.measure(model, batch)["loss"].mean().item() for batch in doubles]
    expected = np.mean(losses) * label_unit(TASK) ** 2
    assert tiny.chunks["loss"][0][0] == pytest.approx(expected, rel=1e-12)


def test_training_stops_where_the_loss_has_settled() -> None:
    rule = Convergence(window=100, tolerance=0.2, fall=0.9)
    config = replace(TINY, steps=2000, learning_rate=0.05, schedule="constant", stop_when_converged=rule)
    result = train(config)
    assert result.converged
    assert 200 <= result.steps < 2000
    assert result.history[-1][0] == result.steps
    assert not train(replace(config, stop_when_converged=None, steps=result.steps)).converged


def test_a_model_at_rest_has_not_converged() -> None:
    # A learning rate too small to move anything: the loss is constant, and it is the initial one.
    rule = Convergence(window=50, tolerance=0.5)
    config = replace(TINY, steps=200, learning_rate=1e-12, schedule="constant", stop_when_converged=rule)
    result = train(config)
    assert (result.converged, result.steps) == (False, 200)


def test_a_plateau_at_the_loss_of_predicting_zero_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # After a bad start the model rests at predicting zero: the loss has fallen and settled, and nothing is learned.
    rule = Convergence(window=50, tolerance=0.5, fall=0.9)
    config = replace(TINY, steps=100, learning_rate=1e-12, schedule="constant", stop_when_converged=rule)

    def at_rest() -> bool:
        training = Training(config)
        training.model.load_state_dict({**training.model.state_dict(), "gain": torch.zeros(1)})
        training.first = [[1e6]] * 10
        while training.step < config.steps:
            training.advance()
        return training.converged

    assert not at_rest()
    monkeypatch.setattr(SoftmaxAttention, "zero_loss", lambda *_: None)
    assert at_rest()


def test_results_survive_pickling(tiny: TrainingResult) -> None:
    assert same_bits(pickle.loads(pickle.dumps(tiny)), tiny)


def spoil(monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, ...], step: int = 1) -> None:
    """Make the loss of some members NaN from a step on."""
    usual = Training.batch

    def spoilt(training: Training, name: str, index: int) -> tuple[Any, ...]:
        directions, *rest = usual(training, name, index)
        for member, seed in enumerate(training.config.seeds):
            if seed in seeds and index >= step - 1:
                directions[member] = float("nan")
        return directions, *rest

    monkeypatch.setattr(Training, "batch", spoilt)


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, (7,))
    with pytest.raises(PrecisionError, match="the loss must stay finite, got nan at step 1 with seed 7: lower"):
        train(replace(TINY, seeds=(7,)))
    spoil(monkeypatch, (7, 8), step=3)
    with pytest.raises(DivergedError, match=r"got nan at step 3 with seed 8: lower learning_rate, 0\.1, or"):
        train(replace(TINY, seeds=(7, 8)))


SHORT = replace(TINY, steps=60, history_every=20, seeds=(4, 9, 0))


def test_members_go_on_when_one_of_them_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(SHORT)
    spoil(monkeypatch, (9,), step=30)
    result = train(SHORT)
    assert {member: (one.member_seed, one.step) for member, one in result.diverged.items()} == {1: (9, 30)}
    assert whole.diverged == {}
    for member in (0, 2):
        for name, array in whole.parameters.items():
            assert result.parameters[name][member].tobytes() == array[member].tobytes()
        assert [losses[member] for _, losses in result.history] == [losses[member] for _, losses in whole.history]
        # Fewer members in one product of the evaluation, in float64.
        assert result.estimate("loss", member).value == pytest.approx(whole.estimate("loss", member).value, rel=1e-12)
    assert [losses[1] for _, losses in result.history] == [whole.history[0][1][1], None, None]
    assert np.isnan(result.parameters["key_query"][1]).all()


def test_a_member_that_diverged_says_so_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, (4,), step=30)
    result = train(SHORT)
    sentence = "got nan at step 30 with seed 4: lower learning_rate, 0.1, or leave this seed out"
    for read in (
        lambda: result.loss,
        lambda: result.estimate("shared_error", 0),
        lambda: result.measured["loss"][0].value,
        lambda: result.measured["loss"][0].interval(),
        lambda: paired_difference(result, result, members=(1, 0)),
    ):
        with pytest.raises(DivergedError, match=sentence):
            read()
    with pytest.raises(AttributeError, match="has no 'colour'"):
        _ = result.measured["loss"][0].colour
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["measured"]["loss"][0] == {
        "value": None,
        "reason": "diverged: the loss was nan at step 30",
        "seed": 4,
    }
    assert pickle.loads(pickle.dumps(result)) == copy.copy(result) == result
    assert str(pickle.loads(pickle.dumps(result.measured["loss"][0].error()))) == str(
        result.measured["loss"][0].error()
    )


def test_results_without_the_members_that_diverged(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(replace(SHORT, seeds=(4, 0)))
    assert whole.without_diverged() is whole
    spoil(monkeypatch, (9,), step=30)
    left = train(SHORT).without_diverged()
    assert left.config.seeds == (4, 0)
    assert left.diverged == {}
    for member in (0, 1):
        assert left.estimate("loss", member).value == pytest.approx(
            whole.estimate("loss", member).value, rel=SAME_MEMBER
        )
    assert [len(losses) for _, losses in left.history] == [2, 2, 2]
    assert trained_model(left).key_query.shape == (2, 3, 4, 4)
    assert np.isfinite(left.parameters["key_query"]).all()


def test_the_convergence_rule_looks_at_the_members_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Convergence(window=100, tolerance=0.2, fall=0.9)
    config = replace(
        TINY, steps=2000, learning_rate=0.05, schedule="constant", stop_when_converged=rule, seeds=(0, 1)
    )
    alone = train(replace(config, seeds=(0,)))
    spoil(monkeypatch, (1,), step=150)
    result = train(config)
    assert result.converged
    assert abs(result.steps - alone.steps) <= 200  # other rounding may move the noisy end by a window or two


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("experiment", TASK),
        ("steps", 1.5),
        ("batch", 0),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("schedule", "linear"),
        ("warmup", 150),
        ("loss", "mean"),
        ("seeds", ()),
        ("seeds", (1, 1.0)),
        ("seeds", (-1,)),
        ("seeds", 3),
        ("evaluation_seed", "a"),
        ("evaluation", 4096),
        ("history_every", 0),
        ("checkpoint_every", 0),
        ("dtype", "bfloat16"),
        ("device", "tpu"),
        ("compile", 1),
        ("stop_when_converged", True),
        ("schedule", "constant "),
    ],
)
def test_configs_are_validated(name: str, value: object) -> None:
    with pytest.raises(DomainError, match=name):
        replace(TINY, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("problem", PowerLawSpectrum(0, 0, 4)),
        ("depth", 0),
        ("initial_scales", 2.0),
        ("initial_scales", (2.0,)),
        ("initial_scales", (2.0, 1.0)),
        ("initial_scales", (0.0, 1.0)),
        ("initial_noise", -1),
    ],
)
def test_experiments_are_validated(name: str, value: object) -> None:
    with pytest.raises(DomainError, match=name):
        replace(MODEL, **{name: value})


def test_stopping_early_needs_a_constant_schedule() -> None:
    with pytest.raises(DomainError, match="schedule must be constant where stop_when_converged is given"):
        replace(TINY, stop_when_converged=Convergence())


def test_configs_compare_by_value_and_hash() -> None:
    assert replace(TINY, learning_rate=1) == replace(TINY, learning_rate=1.0)
    assert len({TINY, replace(TINY), replace(TINY, seeds=(9,))}) == 2


def test_equal_runs_have_one_identity_and_different_runs_two() -> None:
    steep = with_model(TINY, problem=TopKTask(PowerLawSpectrum(1, 0.5, 4.0), 8, 2))
    assert steep.identity() == with_model(TINY, problem=STEEP).identity()
    assert replace(TINY, learning_rate=1).identity() == replace(TINY, learning_rate=1.0).identity()
    almost = math.nextafter(0.1, 1)
    assert f"{almost:g}" == "0.1"
    assert replace(TINY, learning_rate=almost).identity() != TINY.identity()
    assert replace(TINY, seeds=(0, 1)).identity() != replace(TINY, seeds=(1, 0)).identity()
    assert replace(TINY, checkpoint_every=7).identity() == TINY.identity()


def test_configs_survive_json() -> None:
    full = replace(TINY, schedule="constant", seeds=(3, 2**100), stop_when_converged=Convergence(40, 0.1, 0.5))
    for config in (TINY, full):
        assert config_from_json(config.to_json()) == config
    with pytest.raises(DomainError, match=r"training has the fields .* got the unknown field 'rate'"):
        config_from_json({**TINY.to_json(), "rate": 1})
    with pytest.raises(DomainError, match="training needs the field 'experiment'"):
        config_from_json({})
    with pytest.raises(DomainError, match="evaluation has the fields"):
        config_from_json({**TINY.to_json(), "evaluation": {"size": 3}})


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (resolved_device("auto"), resolved_device("cuda"), resolved_device("cpu")) == ("cuda", "cuda", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved_device("auto") == "cpu"
    with pytest.raises(DomainError, match="device must be cpu or auto where torch finds no CUDA device"):
        train(replace(TINY, device="cuda"))


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'attnlaws\[train\]'"):
        train(TINY)
