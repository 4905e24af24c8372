"""Tiny training runs: the same bits again, exact identities, and agreement with the single softmax layer."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

from sim.contexts import SampleSize, sample_contexts, sample_labels
from sim.montecarlo.single_softmax import best_single_softmax
from sim.streams import stream
from sim.training import (
    TrainingConfig,
    TrainingResult,
    initial_key_query,
    label_unit,
    layer_decomposition,
    learning_rate_at,
    paired_difference,
    sampled_losses,
    scales_and_spreads,
    teacher_averaged_losses,
    train,
    train_many,
)
from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError, MissingDependencyError, PrecisionError

torch = pytest.importorskip("torch")

TASK = TopKTask(PowerLawSpectrum(0, 0, 4), 8, 2)
STEEP = TopKTask(PowerLawSpectrum(1, 0.5, 4), 8, 2)
EVALUATION = SampleSize(chunks=16, chunk_batches=2, batch=128)
TINY = TrainingConfig(TASK, depth=3, steps=150, batch=64, evaluation=EVALUATION, history_every=50)


@pytest.fixture(scope="module")
def tiny() -> TrainingResult:
    return train(TINY)


def mean_squared_target(task: TopKTask) -> float:
    contexts = sample_contexts(task, 4000, stream(0, "squared target"))
    return float(np.mean(np.sum(np.einsum("np,npi->ni", contexts.target, contexts.label_factors()) ** 2, axis=1)))


def same_bits(first: TrainingResult, second: TrainingResult) -> bool:
    return first == second and first.key_query.tobytes() == second.key_query.tobytes()


def test_the_same_seed_gives_the_same_bits_in_this_process_and_in_workers(tiny: TrainingResult) -> None:
    other = replace(TINY, seed=1, steps=20)
    in_workers = train_many([TINY, other], workers=2)
    assert same_bits(in_workers[0], tiny)
    assert same_bits(in_workers[1], train(other))
    assert not same_bits(in_workers[1], train(replace(other, seed=2)))


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
    result = train(replace(TINY, task=task, loss=loss))
    assert result.loss.value < 0.35 * mean_squared_target(task)
    assert result.history[-1][1] < result.history[0][1]


def test_loss_is_shared_error_plus_disagreement_over_depth(tiny: TrainingResult) -> None:
    assert tiny.shared_error is not None
    assert tiny.disagreement is not None
    assert tiny.disagreement.value > 0
    right = tiny.shared_error.value + tiny.disagreement.value / TINY.depth
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
    result = train(TrainingConfig(TASK, depth=1, steps=600, batch=128, evaluation=EVALUATION))
    assert result.shared_error is None
    assert result.disagreement is None
    single = best_single_softmax(TASK, 0, EVALUATION)
    assert abs(result.loss.z_score(single.loss.value, single.loss.stderr)) < 4
    assert result.layer_scales[0] == pytest.approx(single.scale, rel=0.1)
    assert result.layer_spreads[0] < 0.1 * single.scale
    assert result.gain == pytest.approx(single.gain, rel=0.05)


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
    scaled = train(replace(TINY, task=scaled_task))
    assert scaled.key_query.tobytes() == tiny.key_query.tobytes()
    assert scaled.loss.value == 4.0**50 * tiny.loss.value
    assert label_unit(scaled_task) == 2.0**50 * label_unit(TASK)
    assert scaled.history[-1][1] == pytest.approx(4.0**50 * tiny.history[-1][1], rel=1e-15)


def test_progress_sees_the_history(tiny: TrainingResult) -> None:
    seen: list[tuple[int, float]] = []
    train(replace(TINY, steps=110), lambda step, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == [50, 100, 110]
    assert [step for step, _ in tiny.history] == [50, 100, 150]


def test_paired_difference_is_sharper_than_the_losses(tiny: TrainingResult) -> None:
    other = train(replace(TINY, seed=5))
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
    config = replace(TINY, depth=4, initial_scales=(1, 16), initial_noise=0)
    scales, spreads = scales_and_spreads(initial_key_query(config))
    assert scales == pytest.approx([2**0.5, 2**1.5, 2**2.5, 2**3.5], rel=1e-14)
    assert spreads == pytest.approx(0, abs=1e-14)
    assert scales_and_spreads(initial_key_query(replace(config, depth=1)))[0] == pytest.approx(4)


def test_schedules() -> None:
    assert learning_rate_at(TINY, 0) == TINY.learning_rate
    assert learning_rate_at(TINY, 75) == pytest.approx(TINY.learning_rate / 2)
    assert learning_rate_at(TINY, 149) < 1e-3 * TINY.learning_rate
    assert learning_rate_at(replace(TINY, schedule="constant"), 149) == TINY.learning_rate


def test_results_survive_pickling(tiny: TrainingResult) -> None:
    assert same_bits(pickle.loads(pickle.dumps(tiny)), tiny)


def test_a_loss_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.training.initial_key_query", lambda _config: np.full((3, 4, 4), np.nan))
    with pytest.raises(PrecisionError, match="the loss must stay finite, got nan at step 1"):
        train(TINY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", PowerLawSpectrum(0, 0, 4)),
        ("depth", 0),
        ("steps", 1.5),
        ("batch", 0),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("schedule", "linear"),
        ("loss", "mean"),
        ("initial_scales", 2.0),
        ("initial_scales", (2.0,)),
        ("initial_scales", (2.0, 1.0)),
        ("initial_scales", (0.0, 1.0)),
        ("initial_noise", -1),
        ("seed", -1),
        ("evaluation_seed", "a"),
        ("evaluation", 4096),
        ("history_every", 0),
    ],
)
def test_configs_are_validated(name: str, value: object) -> None:
    with pytest.raises(DomainError, match=name):
        replace(TINY, **{name: value})


def test_configs_compare_by_value_and_hash() -> None:
    assert replace(TINY, learning_rate=1) == replace(TINY, learning_rate=1.0)
    assert len({TINY, replace(TINY), replace(TINY, seed=9)}) == 2


def test_workers_are_validated_and_no_config_is_no_work() -> None:
    assert train_many([]) == []
    with pytest.raises(DomainError, match="workers must be an integer from 1"):
        train_many([TINY], workers=0)


def test_a_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'attnlaws\[train\]'"):
        train(TINY)
