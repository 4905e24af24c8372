"""Tables and figures that are read off trained models, with models of few layers and steps on a tiny profile."""

import csv
import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from sim.contexts import SampleSize, sample_contexts
from sim.streams import stream
from sim.sweep import cost, train_many
from sim.training import trained_model
from tests.validate.command import run
from theory.depth import free_polynomial
from theory.problems import PowerLawSpectrum
from theory.results import DomainError, Estimate
from validate.figures.panels import Curve, Panel, panel_figure
from validate.mean_field import MeanFieldFloor
from validate.tables import (
    comparison,
    depth_figure_3,
    depth_figure_5,
    depth_figure_7,
    depth_figure_12,
    depth_figure_13,
    depth_table_1,
    depth_table_2,
    registry,
)
from validate.tables.comparison import Agreement
from validate.trained import attention, fits, generalised, linear, rows, scaling, softmax
from validate.trained.runs import TrainedRuns, TrainedTable

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

TINY = SampleSize(4, 1, 64)
TINY_MODELS = generalised.ModelPlan((1, 2, 4), 3, TINY)
NAMES = [
    name for name, entry in registry.TABLES.items() if isinstance(entry, TrainedTable) and name.startswith("depth:")
]


def estimate(value, stderr=0.01):
    return Estimate(value, stderr, 100, 10, 0)


def exact_risks(spectrum, family, *_):
    return [estimate(risk, 0.01 * risk) for risk in depth_table_2.exact_risks(spectrum, family)]


def floor_of(task):
    """A mean-field floor whose numbers are plausible: a fifth of the label variance, and 1/L above it."""
    value = 0.2 * float(task.spectrum.label_variances().sum())
    return MeanFieldFloor(
        task, estimate(value), value, value, 1e-4, 10, np.array([[1.0, 2.0]]), np.array([1.0]), estimate(value),
        (2.0, 0.0), 1.0, estimate(2 * value), {2**i: value * (1 + 2.0**-i) for i in range(9)}, 0.0, 100,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    """The profile "tiny" in every plan, on tiny sizes."""
    plans = (
        (softmax.PLANS, softmax.Plan((1, 2, 4, 8), (3, 3, 3, 3), TINY, "tiny", every=False)),
        (linear.EASY, linear.EasyPlan((1, 2, 4, 8), (3, 6))),
        (linear.HARD, linear.HardPlan(6, 24, (1, 2), 3, 16, TINY)),
        (generalised.COPY, generalised.CopyPlan((1, 2), 3, (1, 3), TINY)),
        (generalised.LAYER_VALUES, TINY_MODELS),
        (generalised.SINGLE_STREAM, TINY_MODELS),
        (generalised.UPDATES, TINY_MODELS),
        (depth_figure_5.FLOOR_ERROR, 0.2),
        (depth_figure_5.MAX_CONTEXTS, 30_000),
        (depth_figure_7.SIZES, TINY),
        (depth_table_2.RELATIVE_ERROR, 0.2),
    )
    sizes = (
        (softmax, "DIM", 4), (softmax, "CONTEXT", 20), (generalised, "DIM", 4), (generalised, "CONTEXT", 20),
        (linear, "DIM", 16), (depth_table_2, "DIM", 16), (depth_figure_3, "MODES", (1, 4, 16)),
        (depth_figure_7, "MODES", (1, 2, 4)), (depth_figure_12, "CONTEXTS", 16), (depth_figure_13, "SIZE", TINY),
        # What has kernels to compile is replaced; it has tests of its own.
        (depth_table_1, "sample", lambda *_: (estimate(2.0),)),
        (depth_figure_5, "sampled_floors", lambda *_, **__: (estimate(2.0),)),
        (depth_table_2, "sampled_risks", exact_risks),
        (softmax, "mean_field_floors", lambda tasks, **_: [floor_of(task) for task in tasks]),
    )  # fmt: skip
    softmax._floors.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for profiles, plan in plans:
            patch.setitem(profiles, "tiny", plan)
        for module, name, value in sizes:
            patch.setattr(module, name, value)
        yield "tiny"
    softmax._floors.cache_clear()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return TrainedRuns(tmp_path_factory.mktemp("runs"), workers=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_built_from_the_models_it_asks_for(name, tiny, runs, tmp_path):
    entry = registry.TABLES[name]
    assert isinstance(entry, TrainedTable)
    runs.results(entry.configs(tiny, 3))
    before = len(runs._known)
    table = entry.build(tiny, 3, lambda _: None, runs)
    assert len(runs._known) == before, "the table trained a model that it had not asked for"
    assert table.name == name
    assert table.rows
    paths = comparison.save(table, tmp_path)
    assert all(path.stat().st_size > 0 for path in paths)
    content = json.loads(paths[1].read_text(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert len(content["rows"]) == len(table.rows) == len(list(csv.DictReader(paths[0].read_text().splitlines())))


def test_models_are_trained_once_and_kept(tiny, tmp_path, monkeypatch):
    asked = []

    def counted(configs, *rest):
        asked.append([config.identity() for config in configs])
        return train_many(configs, *rest)

    monkeypatch.setattr("validate.trained.runs.train_many", counted)
    wanted = registry.needed_runs(registry.select_tables(["depth:table-1", "depth:figure-6"]), tiny, 3)
    # Four inputs at four depths; teachers of isotropic inputs share their models.
    assert len(wanted) == 16
    kept = TrainedRuns(tmp_path, workers=1)
    first = kept.results(wanted)
    assert kept.results(wanted[:2]) == first[:2]
    assert [len(names) for names in asked] == [16]
    costs = [cost(config) for config in wanted]
    assert [cost(result.config) for result in first] == costs
    again = TrainedRuns(tmp_path, workers=1).results(wanted)
    assert [one.measured for one in again] == [one.measured for one in first]


def test_losses_of_isotropic_inputs_are_those_of_the_teacher_trained_on(tiny, runs):
    plain, sloped = (softmax.softmax_task(0.0, b, 2) for b in (0.0, 1.0))
    series = softmax.series(runs, sloped, tiny, 3)
    config = dataclasses.replace(
        series.results[-1].config,
        experiment=dataclasses.replace(series.results[-1].config.experiment, problem=sloped),
    )
    own = runs.results([config])[0]
    assert series.estimates()[-1].value == pytest.approx(own.loss.value, rel=1e-5)  # float32 training
    assert series.scale == pytest.approx(sum(1 / k for k in range(1, 5)) / 4)
    assert softmax.series(runs, plain, tiny, 3).scale == 1


def test_seeds_of_teachers_differ_where_each_is_trained(tiny, monkeypatch):
    monkeypatch.setitem(softmax.PLANS, tiny, dataclasses.replace(softmax.PLANS[tiny], every=True))
    tasks = [softmax.softmax_task(0.0, b, 2) for b in (0.0, 0.25)]
    assert len({config.seeds for config in softmax.configs(tasks, tiny, 3)}) == 2


def test_rows_of_attention_are_those_of_the_trained_model(tiny, runs):
    series = softmax.series(runs, softmax.softmax_task(1.0, 0.0, 2), tiny, 3)
    result = series.results[-1]
    contexts = sample_contexts(series.task, 5, stream(0, "rows"))
    seen, query = contexts.rotated(contexts.directions), contexts.rotated(contexts.query_direction)
    model = trained_model(result)
    tensors = (torch.tensor(np.ascontiguousarray(v))[None] for v in (seen, query))
    wanted = model.attention(*tensors).mean(dim=-2)[0].detach().numpy()
    found = attention.mean_rows(result.parameters["key_query"][0], seen, query)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_mode_losses_add_up_to_the_loss(tiny, runs):
    series = softmax.series(runs, softmax.softmax_task(1.0, 0.0, 2), tiny, 3)
    size = SampleSize(8, 4, 128)
    losses = attention.mode_chunks(series, 11, size).sum(axis=2)
    for depth, result in enumerate(series.results):
        total = softmax.estimate_from_chunks(losses[depth], size.contexts, 11)
        # Two samples of contexts: |z| < 5 fails by chance with probability 6e-7, or 1e-4 at few chunks.
        assert abs(total.z_score(result.loss.value, result.loss.stderr)) < 5


def test_normalised_modes_start_at_one_and_end_at_zero():
    falls = np.array([[4.0, 8.0], [2.0, 5.0], [1.0, 4.0]])[:, None, :] * np.ones((3, 6, 1))
    curves = depth_figure_7.normalised(falls)
    np.testing.assert_allclose(curves, [[1, 1], [1 / 3, 1 / 4], [0, 0]])
    assert depth_figure_7._weak_over_strong(falls) == pytest.approx((1 / 2) / (3 / 4))


def test_scatter_over_seeds_is_part_of_the_error(tiny, runs):
    result = generalised.model_series(
        runs, generalised.model_configs(generalised.updating, TINY_MODELS, 2, 3), 2
    ).results[0]
    chunks = 1 + 0.1 * stream(2, "chunks").standard_normal(16)
    sampled = softmax.mean_over_seeds(chunks[None], result)
    assert sampled == softmax.mean_over_seeds(np.tile(chunks, (3, 1)), result)
    shifted = softmax.mean_over_seeds(chunks + np.array([[-0.3], [0.0], [0.3]]), result)
    assert shifted.value == pytest.approx(sampled.value)
    assert shifted.stderr == pytest.approx(np.hypot(sampled.stderr, 0.3 / np.sqrt(3)))
    assert shifted.chunks == 3  # Welch: 2.1 degrees of freedom where the scatter of three dominates
    # Members that scatter alike at both depths have no scatter in the ratio.
    members = chunks * np.array([[0.5], [1.0], [1.5]])
    ratio = softmax.ratio_of_means(2 * members, members, result)
    assert (ratio.value, ratio.stderr) == (pytest.approx(2), pytest.approx(0, abs=1e-12))


def test_generalised_models_are_trained_from_several_seeds(tiny, runs):
    configs = generalised.model_configs(generalised.updating, TINY_MODELS, 2, 3)
    series = generalised.model_series(runs, configs, 2)
    assert [config.seeds for config in configs] == [(3, 4, 5)] * 3
    updates = [generalised.learned_update(result) for result in series.results]
    assert updates[0].stderr == 0  # one layer reads no updated context
    assert updates[1].stderr > 0
    assert generalised.seeds_remark(series.results[0]) == "3 seeds"
    alone = dataclasses.replace(configs[1], seeds=(4,))
    own = runs.results([alone])[0]
    assert series.results[1].estimate("loss", 1).value == pytest.approx(own.loss.value, rel=1e-5)  # float32 training
    assert generalised.learned_update(own).stderr == 0
    assert "not in the error" in generalised.seeds_remark(own)


def test_ratio_of_means_uses_common_contexts(tiny, runs):
    result = softmax.series(runs, softmax.softmax_task(0.0, 0.0, 2), tiny, 3).results[0]
    under = 1 + 0.5 * stream(0, "chunks").random(16)
    exact = softmax.ratio_of_means(0.5 * under, under, result)
    assert exact.value == pytest.approx(0.5)
    assert exact.stderr < 1e-15


@pytest.mark.parametrize(
    ("losses", "identified", "agreement"),
    [
        (lambda L: 2 + 1 / L, True, Agreement.AGREES),
        (lambda L: 2 + L**-0.4, True, Agreement.DIFFERS),
        (lambda L: 2 + 0 * L, False, Agreement.UNTESTED),
    ],
)
def test_fitted_exponents_against_a_printed_one(losses, identified, agreement):
    depths = np.array([1.0, 2, 4, 8, 16, 32])
    # A scatter of 0.01 %, without which there would be no error.
    scatter = 1 + 1e-4 * stream(1, "scatter").standard_normal(6)
    fit = fits.fit_losses_by_depth(depths, [estimate(v) for v in losses(depths) * scatter])
    assert fit.identified is identified
    assert fit.agreement(1.0, 0.02) is agreement
    assert fit.reason


def test_gaps_that_are_not_positive_are_refused_with_the_reason():
    fit = fits.fit_gaps_by_depth([2, 4, 8], [estimate(v) for v in (1.0, 1.9, 2.1)], 2.0)
    assert fit.fit is None
    assert fit.exponent is None
    assert "must be > 0" in fit.reason
    assert fit.agreement(1.0, 0.1) is Agreement.UNTESTED


def test_a_loss_below_the_floor_is_our_own_contradiction():
    task = softmax.softmax_task(0.0, 0.0, 2)
    found = floor_of(task)
    low, inside, high = (rows.loss_row(task, 4, estimate(f * found.floor.value), found) for f in (0.9, 1.1, 1.5))
    assert (low.consistent, low.agreement) == (False, Agreement.OUTSIDE)
    assert (inside.consistent, inside.agreement) == (True, Agreement.BRACKETED)
    assert (high.consistent, high.agreement) == (True, Agreement.OUTSIDE)


def test_no_linear_loss_lies_below_the_free_polynomial(tiny, runs):
    spectrum = PowerLawSpectrum(2, 1, 16)
    results = linear.easy_results(runs, spectrum, 6, tiny, 3)
    free = free_polynomial.finite_risk(spectrum, (1, 2, 4, 8))
    assert all(result.loss.value >= risk for result, risk in zip(results, free, strict=True))
    exponent = linear.fitted_exponent((1, 2, 4), [3.0, 1.5, 0.75])
    assert exponent is None or exponent.value == pytest.approx(1)


def test_convergence_is_seen_and_its_absence_too(runs):
    task = softmax.softmax_task(0.0, 0.0, 2)

    def series(shared):
        chunks = np.array(shared)[:, None] * (1 + 1e-3 * stream(0, "chunks").standard_normal(8))
        results = tuple(
            types.SimpleNamespace(
                config=types.SimpleNamespace(
                    experiment=types.SimpleNamespace(depth=2**i), evaluation=TINY, evaluation_seed=0
                ),
                chunks={"shared_error": [row], "disagreement": [row]},
                measured={"shared_error": None, "disagreement": None},
                estimate=lambda _name, row=row: estimate(float(row.mean())),
            )
            for i, row in enumerate(chunks)
        )
        return softmax.DepthSeries(task, results)

    settled = scaling.convergence_rows(series([1.0, 1.5, 1.75, 1.875]))
    assert [row.agreement for row in settled] == [Agreement.AGREES] * 2
    growing = scaling.convergence_rows(series([1.0, 1.5, 2.5, 4.5]))
    assert [row.agreement for row in growing] == [Agreement.DIFFERS] * 2


def test_points_that_a_logarithmic_axis_drops_are_counted():
    import matplotlib.pyplot as plt

    figure = panel_figure(
        [Panel("t", "y", [Curve("c", [1, 2, 4], [1.0, -1.0, 0.0]), Curve("d", [1], [1.0], errors=[2])])]
    )
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["2 values at or below zero are not shown"]
    plt.close(figure)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(DomainError, match="depth:figure-14"):
        registry.select_tables(["depth:figure-8"])


@pytest.fixture
def tiny_figure_13(tiny, monkeypatch):
    """The name depth:figure-13, two models, on the tiny profile whatever the command asks for."""
    configs, build = registry.TABLES["depth:figure-13"].configs, registry.TABLES["depth:figure-13"].build
    entry = TrainedTable(lambda _, seed: configs(tiny, seed), lambda _, *rest: build(tiny, *rest))
    monkeypatch.setitem(registry.TABLES, "depth:figure-13", entry)
    return entry


def test_command_trains_once_keeps_the_models_and_writes_the_table(tiny_figure_13, tmp_path, capsys, monkeypatch):
    arguments = ("reproduce", "depth:figure-13", "--out", str(tmp_path), "--workers", "1", "--seed", "3")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "percentile" in out
    kept = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(kept) >= 2
    first = (tmp_path / "depth-figure-13.csv").read_text()
    assert run(capsys, *arguments)[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == kept
    assert (tmp_path / "depth-figure-13.csv").read_text() == first


@pytest.mark.deep
def test_command_on_a_dask_cluster_of_processes_gives_the_bits_of_a_local_one(
    tiny_figure_13, tmp_path, capsys, monkeypatch
):
    distributed = pytest.importorskip("distributed")
    arguments = ("reproduce", "depth:figure-13", "--seed", "3", "--out")
    assert run(capsys, *arguments, str(tmp_path / "here"), "--workers", "1")[0] == 0
    with (
        dask_settings(),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        there = (*arguments, str(tmp_path / "there"), "--scheduler", cluster.scheduler_address)
        status, out, _ = run(capsys, *there)
        with distributed.Client(cluster, set_as_default=False) as client:
            (trained,) = {"sim.training" in modules for modules in client.run(loaded_modules).values()}
    assert (status, trained) == (0, True)
    assert "percentile" in out
    results = []
    for place in ("here", "there"):
        configs = tiny_figure_13.configs("any", 3)
        kept = TrainedRuns(tmp_path / place / "runs", workers=1)
        monkeypatch.setattr("sim.training.Training.advance", lambda _: pytest.fail("a run was not finished"))
        results.append([(one.chunks, one.history, parameter_bits(one)) for one in kept.results(configs)])
        monkeypatch.undo()
    assert results[0] == results[1]
    tables = [(tmp_path / place / "depth-figure-13.csv").read_bytes() for place in ("here", "there")]
    assert tables[0] == tables[1]


def dask_settings():
    import dask

    return dask.config.set({"distributed.admin.tick.limit": "60s", "distributed.worker.daemon": True})


def loaded_modules():
    return sorted(sys.modules)


def parameter_bits(result):
    return {name: array.tobytes() for name, array in result.parameters.items()}


def test_command_lists_the_names(capsys, monkeypatch):
    status, out, _ = run(capsys, "reproduce", "--list")
    assert status == 0
    assert set(NAMES) <= set(out.split())
    status, _, err = run(capsys, "reproduce", "--workers", "0", "depth:table-5")
    assert status == 2
    assert "workers" in err
