"""Tables and figures of the multi-head paper that are read off trained models, on a tiny profile."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest

from sim.contexts import SampleSize
from sim.divergence import Diverged
from sim.head_patterns import Circuits
from sim.snapshots import Snapshots
from sim.training import Numerics, TrainingResult
from theory.multihead.gradient_descent import debiased_preconditioner, vanilla_preconditioner
from theory.multihead.multitask import cross_task_rule, descent_pattern, descent_rule, signal_mask
from theory.problems import RegressionTask
from theory.results import DomainError, Estimate
from validate.figures.multihead_heads import HeadPath, circuit_maps, heads_figure
from validate.tables import (
    comparison,
    multihead_activations,
    multihead_figure_12,
    multihead_figures_6_7,
    multihead_lengths,
    multihead_multitask,
    multihead_observations,
    multihead_table_1,
    multihead_valley,
    registry,
)
from validate.tables.comparison import Agreement
from validate.trained import multihead
from validate.trained.runs import TrainedRuns, TrainedTable

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

NAMES = [name for name in registry.TABLES if name.startswith("multihead:")]


@pytest.fixture(scope="module")
def tiny():
    """The profile "tiny" in every plan."""
    plan = multihead.Plan(3, 4, 4, 0.02, "cosine", 2, SampleSize(4, 1, 32), (10, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(multihead.PLANS, "tiny", plan)
        patch.setitem(multihead_figures_6_7.GRID, "tiny", 3)
        patch.setattr(multihead_figures_6_7, "STEPS", 200)
        patch.setattr(multihead_valley, "SETTINGS", multihead_valley.SETTINGS[-2:])
        patch.setattr(multihead_valley, "RATES", (0,))
        patch.setattr(multihead_valley, "BATCHES", (1,))
        yield plan


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    return TrainedRuns(tmp_path_factory.mktemp("runs"), workers=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_built_and_saved(name, tiny, runs, tmp_path):
    table = registry.build_table(registry.TABLES[name], "tiny", 0, lambda _: None, runs)
    assert table.name == name
    assert table.rows
    assert table.notes
    paths = comparison.save(table, tmp_path)
    assert all(path.stat().st_size > 0 for path in paths)
    with paths[0].open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(table.rows)
    json.loads(paths[1].read_text(encoding="utf-8"))


def test_needed_runs_are_those_that_builders_ask_for(tiny):
    entries = {name: registry.TABLES[name] for name in NAMES}
    needed = registry.needed_runs(entries, "tiny", 0)
    assert len(needed) == len({one.identity() for one in needed})
    # Eight activations, linear attention, correlated tokens, and three head counts on two tasks, of two models.
    assert len(needed) == 8 + 1 + 1 + 2 * 3
    assert sum(isinstance(entry, TrainedTable) for entry in entries.values()) == len(NAMES) - 2


def test_seeds_of_different_commands_share_no_member():
    assert multihead.member_seeds(0, 4) == (0, 1, 2, 3)
    assert not set(multihead.member_seeds(0, 8)) & set(multihead.member_seeds(1, 8))


def fake_ensemble(omega, mu, heads=2, diverged=()):
    """Heads that were not trained, as an ensemble of layers would hold them; some members may have diverged."""
    config = multihead.heads_config("quick", 0, heads)
    config = dataclasses.replace(config, seeds=tuple(range(len(omega))))
    parameters = {"omega": np.array(omega), "mu": np.array(mu)}
    losses = [
        Diverged(member, 7, "nan", 0.1) if member in diverged else Estimate(0.25, 0.01, 10, 5, 0)
        for member in range(len(omega))
    ]
    numerics = Numerics("float32", "float64", "highest", 1, "cpu", "", "")
    rows = {"loss": tuple(losses)}, {"loss": ((),) * len(omega)}
    result = TrainingResult(config, *rows, (), 10, False, numerics, (), parameters, (0.0, 0.0))
    return multihead.Ensemble(
        result, Snapshots(np.array([0, 10]), {k: np.array([v, v]) for k, v in parameters.items()})
    )


def test_members_that_diverged_are_counted_and_left_out():
    nan = [math.nan, math.nan]
    ensemble = fake_ensemble([[0.2, -0.2], nan, [0.22, -0.22]], [[2.0, -2.0], nan, [2.0, -2.0]], diverged=(1,))
    assert ensemble.settled.tolist() == [True, True]
    assert ensemble.over_members(ensemble.patterns.gamma).value == pytest.approx(0.21)
    assert ensemble.path()[1].tolist() == [[[0.2, -0.2], [0.22, -0.22]]] * 2
    assert ensemble.measured_loss().value == pytest.approx(0.25)
    assert multihead.settled_text(ensemble) == "mean over 2 of 3 members; 1 diverged"


def test_trapped_members_are_counted_and_left_out():
    ensemble = fake_ensemble([[0.2, -0.2], [0.5, 0.6], [0.22, -0.22]], [[2.0, -2.0], [0.8, 0.7], [2.0, -2.0]])
    assert ensemble.settled.tolist() == [True, False, True]
    assert ensemble.over_members(ensemble.patterns.gamma).value == pytest.approx(0.21)
    assert ensemble.over_members(ensemble.patterns.gamma).stderr == pytest.approx(0.01)
    assert multihead.settled_text(ensemble) == "mean over 2 of 3 members; 1 trapped with heads of one sign"
    assert fake_ensemble([[0.5, 0.6]], [[0.8, 0.7]]).over_members(np.ones(1)) is None


def test_one_head_is_never_trapped():
    ensemble = fake_ensemble([[0.5], [-0.5]], [[1.5], [-1.5]], heads=1)
    assert ensemble.settled.all()
    assert multihead.settled_text(ensemble) == "mean over 2 of 2 members"


def test_exact_losses_at_other_lengths_are_those_of_the_settled():
    ensemble = fake_ensemble([[0.2, -0.2], [0.5, 0.6]], [[2.0, -2.0], [0.8, 0.7]])
    alone = fake_ensemble([[0.2, -0.2]], [[2.0, -2.0]])
    assert ensemble.exact_losses_at([10, 40]) == pytest.approx(alone.exact_losses_at([10, 40]), rel=1e-12)


def test_a_pattern_that_breaks_late_has_not_settled_early():
    ensemble = fake_ensemble([[0.2, -0.2]] * 2, [[2.0, -2.0]] * 2)
    mismatch = np.array([[0.5, 0.0], [0.0, 0.0]])
    first = multihead_observations._first_time(ensemble, mismatch, np.zeros((2, 2)))
    assert first.tolist() == [10, 0]


def test_heads_of_one_sign_together():
    d = multihead.TASK.dim
    key_query = np.zeros((1, 3, d + 1, d + 1))
    rest = np.eye(d)[::-1]
    key_query[0, 0, :d, :d] = 0.2 * np.eye(d) + 0.1 * rest
    key_query[0, 1, :d, :d] = 0.2 * np.eye(d) - 0.1 * rest
    key_query[0, 2, :d, :d] = -0.2 * np.eye(d)
    output_value = np.zeros((1, 3, d + 1, d + 1))
    output_value[0, :, d, d] = (1.0, 1.0, -2.0)

    class Layers:
        circuits = Circuits(key_query, output_value, d)
        mu = output_value[..., d, d]

    assert multihead.merged_spread(Layers()) == pytest.approx([0.0], abs=1e-12)
    Layers.mu = np.array([[1.0, 0.5, -2.0]])
    assert multihead.merged_spread(Layers())[0] > 0.05


def test_a_determined_number_agrees_only_where_both_do():
    good = fake_ensemble([[0.5179], [0.518]], [[1.497], [1.4971]], heads=1)
    rows = multihead_observations._values(good)
    assert [row.agreement for row in rows] == [Agreement.AGREES, Agreement.DIFFERS]
    assert "printed number is -5" in rows[1].remark


def test_least_squares():
    assert multihead_lengths.least_squares_risk(RegressionTask(5, 40, 0.1)) == pytest.approx(0.1 * 39 / 34)
    with pytest.raises(DomainError, match="context must be above dim"):
        multihead_lengths.least_squares_risk(RegressionTask(5, 6, 0.1))


def test_distances_between_matrices():
    task = multihead_figure_12.task()
    best, printed = debiased_preconditioner(task), vanilla_preconditioner(task)
    found = np.array([best, 2 * best, printed])
    assert multihead_figure_12.distance(found, best) == pytest.approx([0, 1, np.linalg.norm(printed - best) /
                                                                       np.linalg.norm(best)])  # fmt: skip
    assert multihead_figure_12.shape_distance(found, best)[:2] == pytest.approx([0, 0], abs=1e-7)
    assert 0 < multihead_figure_12.shape_distance(found, best)[2] < multihead_figure_12.distance(found, best)[2]


def test_the_covariance_of_figure_12():
    assert multihead_figure_12.kac_murdock_szego(3, 0.5).tolist() == [[1, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 1]]


def test_heads_that_serve_a_task_are_told_from_those_that_do_not():
    task = multihead_multitask.task()
    rule, mask = descent_rule(task), signal_mask(task)
    pairs, superposed = (descent_pattern(rule, heads, 0.1) for heads in (4, 3))
    served = multihead_multitask.serving(pairs.omega[None], pairs.mu[None, :, None] * np.eye(2), mask)[0]
    assert served.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert served.sum(axis=0).tolist() == [2, 2]
    shared = multihead_multitask.serving(superposed.omega[None], superposed.mu[None, :, None] * np.eye(2), mask)[0]
    assert (shared.sum(axis=1) > 1).any()


def test_rules_are_compared_up_to_exchange_of_the_tasks():
    cross = cross_task_rule(multihead_multitask.task())
    assert multihead_multitask.rule_distance(np.array([cross, 2 * cross]), cross) == pytest.approx([0, 1])


def test_pairs_of_heads_are_found_in_any_order():
    rng = np.random.default_rng(0)
    one, other, mu = rng.normal(size=6), rng.normal(size=6), rng.normal(size=(2, 2))
    omega = np.array([[one, other, -other, -one], [one, other, -1.2 * other, -one], [one, one, other, other]])
    weights = np.array([[mu[0], mu[1], -mu[1], -mu[0]]] * 3)
    found = multihead_multitask.pair_departure(omega, weights)
    assert found[:2] == pytest.approx([0, 0.2 / 2.2])
    assert found[2] > 0.5
    assert multihead_multitask.zero_sums(weights) == pytest.approx([0, 0, 0])
    assert multihead_multitask.zero_sums(np.array([[[1.0, 1.0], [1.0, -0.5]]])) == pytest.approx([1])


def test_reduced_heads_that_have_not_split_are_counted_and_left_out():
    problem = multihead_multitask.task()
    rule = descent_rule(problem)
    pattern = descent_pattern(rule, 4, 0.1)
    omega, mu = np.array([pattern.omega] * 3), np.array([pattern.mu] * 3)
    mu[2, 0] = 5.0
    config = multihead_multitask.configs("quick", 0)[-1]
    config = dataclasses.replace(config, seeds=(0, 1, 2))
    losses = [Estimate(value, 0.001, 10, 5, 0) for value in (0.3674, 0.3676, 1.0)]
    result = type("Result", (), {"config": config, "parameters": {"omega": omega, "mu": mu},
                                 "estimate": lambda self, name, member: losses[member]})()  # fmt: skip
    rows = {row.quantity.removeprefix("reduced heads: "): row
            for row in multihead_multitask._reduced_rows(4, result, rule, problem)}  # fmt: skip
    assert rows["sums of mu vanish"].theory_text == "in 2 of 3 members"
    assert rows["risk, both tasks"].trained.value == pytest.approx(0.3675)
    assert rows["risk, both tasks"].agreement is Agreement.AGREES
    assert rows["distance of the rule from the best"].trained.value == pytest.approx(0, abs=1e-12)
    assert rows["one +- pair per task"].theory_text.startswith("in 2 of 2 members")
    mu[1, 0] = 5.0
    assert len(multihead_multitask._reduced_rows(4, result, rule, problem)) == 1


def test_the_landscapes_meet_at_small_heads_and_part_at_large_ones(tiny):
    _, mu, exact, approximate = multihead_figures_6_7.landscapes(3)
    assert exact[:, 0] == pytest.approx(1.1)
    assert approximate[0, 1] == pytest.approx(exact[0, 1], rel=0.01)
    assert abs(approximate[-1, -1] / exact[-1, -1] - 1) > 0.2
    assert mu[0] == 0


def test_only_finite_risks_have_exact_activation_curves(tiny):
    linear = [config for config in multihead_table_1.configs("tiny", 0) if config.experiment.activation == "1+Cx"]
    assert [config.experiment.initial_omega[0] for config in linear] == [0.6, 0.3 / 0.8, 0.3]
    assert len(multihead_activations.figure_11_configs("tiny", 0)) == 3


def test_a_figure_has_a_row_of_maps_for_each_chunk():
    rng = np.random.default_rng(0)
    circuits = Circuits(rng.normal(size=(4, 3, 3)), rng.normal(size=(4, 3, 3)), 2)
    maps = circuit_maps(circuits, ["a", "b", "c", "d"])
    assert maps[0].key_query.shape == (3, 2)
    assert maps[0].output_value == pytest.approx(circuits.output_value[0, 2])
    path = HeadPath("run", np.arange(3), rng.normal(size=(3, 2)), rng.normal(size=(3, 2)))
    figure = heads_figure(maps, [path], columns=2)
    assert len(figure.subfigs) == 3
    import matplotlib.pyplot as plt

    plt.close(figure)
