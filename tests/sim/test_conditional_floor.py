import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import betainc, digamma, polygamma
from scipy.stats import binom

from sim.montecarlo import conditional_floor as module
from sim.montecarlo.conditional_floor import conditional_floor, draw_queries, order_statistic_rule
from sim.montecarlo.floor_moments import estimate_floor, minimal_risks, residual_floor
from sim.montecarlo.kernels.conditional_floor import (
    average_target,
    conditional_floor_chunk,
    cosine_tail,
    log_product,
    solve_rate,
)
from sim.montecarlo.stopping import FIRST_LOOK
from sim.streams import stream
from theory.depth.loss_floor import isotropic_floor, predictor_basis
from theory.problems import ArraySpectrum, PowerLawSpectrum, TopKTask
from theory.results import DomainError, PrecisionError, Status

pytestmark = pytest.mark.long

_SPEC = importlib.util.spec_from_file_location("naive", Path(__file__).parents[1] / "naive.py")
naive = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(naive)

# A step at which the trapezoidal rule is converged to rounding.
FINE = 0.15
# Two quadratures at their limits: finite differences of the twin (1e-8) and its truncated order statistic (1e-8).
TWIN_TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The shortest run of 24 chunks draws 3,072 queries instead of 24,576."""
    monkeypatch.setattr(module, "QUERIES_PER_CHUNK", 128)


def spectrum_arrays(spectrum):
    return spectrum.input_variances(), spectrum.teacher_variances()


def sample(task, degree=3, **changes):
    arguments = {"relative_error": 0.02, "seed": 1, "workers": 1} | changes
    return conditional_floor(task, predictor_basis(task.spectrum, degree), **arguments)


class TestKernel:
    @pytest.mark.parametrize("dim", [2, 3, 16, 128])
    @pytest.mark.parametrize("squared_cosine", [1e-6, 0.1, 0.4, 0.9])
    def test_isotropic_tail_is_a_beta_tail(self, dim, squared_cosine):
        # P(cosine > c) = I_{1-c^2}((d-1)/2, 1/2)/2, and lengths are independent of directions.
        rate, ones = squared_cosine / (1 - squared_cosine), np.ones(dim)
        log_tail, power, _ = cosine_tail(rate, ones, 2 * ones, np.eye(dim)[0], FINE, True)
        tail = betainc((dim - 1) / 2, 0.5, 1 - squared_cosine) / 2
        assert math.exp(log_tail) == pytest.approx(tail, rel=1e-9)
        assert power == pytest.approx(2 * dim * tail, rel=1e-9)

    def test_log_product_does_not_overflow(self):
        variances = np.full(500, 2.0)
        assert log_product(1e50, variances) == pytest.approx(500 * math.log(2e50), rel=1e-13)

    @pytest.mark.parametrize("log_rate", [-20.0, -3.0, 0.0, 2.0, 30.0])
    @pytest.mark.parametrize("guess", [-40.0, 0.0, 40.0])
    def test_rate_is_found_from_any_guess(self, log_rate, guess):
        variances, teacher = np.array([3.0, 1.0, 0.01]), np.ones(3)
        shares = np.array([0.5, 0.3, 0.2])
        log_tail, *_ = cosine_tail(math.exp(log_rate), variances, teacher, shares, 0.3, False)
        logit = log_tail - math.log(0.5 - math.exp(log_tail))
        found, slope = solve_rate(logit, guess, 0.0, variances, teacher, shares, 0.3)
        assert found == pytest.approx(log_rate, abs=1e-5)
        assert slope < 0

    @pytest.mark.parametrize(("dim", "context", "top_k"), [(3, 20, 2), (4, 18, 12)])
    def test_twin_by_adaptive_quadrature(self, dim, context, top_k):
        variances, teacher = spectrum_arrays(PowerLawSpectrum(1, 0.5, dim))
        query, target = np.sqrt(variances) * stream(1, "twin").standard_normal(dim), np.empty(dim)
        rule = order_statistic_rule(context, top_k, 20)
        spread, _ = average_target(query, variances, teacher, top_k, *rule, 0.3, 0.0, target)
        mean, power = naive.conditional_target(query, variances, teacher, context, top_k)
        np.testing.assert_allclose(target, mean, rtol=TWIN_TOLERANCE)
        assert spread + target @ (teacher * target) == pytest.approx(power, rel=TWIN_TOLERANCE)

    @pytest.mark.parametrize(("context", "top_k"), [(16, 1), (16, 3), (16, 14), (40, 20)])
    def test_average_over_drawn_contexts_of_one_query(self, context, top_k):
        # 20,000 contexts; the largest of 5 scores passes 4.5 once in 3e4 seeds (two-sided normal, 4 cases).
        variances, teacher = spectrum_arrays(PowerLawSpectrum(1.5, 0.5, 4))
        rng, target = stream(2, f"contexts {context} {top_k}"), np.empty(4)
        query = np.sqrt(variances) * rng.standard_normal(4)
        tokens = np.sqrt(variances) * rng.standard_normal((20_000, context, 4))
        order = np.argsort(-(tokens @ query) / np.linalg.norm(tokens, axis=2), axis=1)[:, :top_k]
        drawn = np.take_along_axis(tokens, order[:, :, None], axis=1).mean(axis=1)
        powers = (drawn**2) @ teacher
        rule = order_statistic_rule(context, top_k, 12)
        spread, _ = average_target(query, variances, teacher, top_k, *rule, 0.4, 0.0, target)
        assert spread > 0
        errors = np.append(drawn.mean(axis=0) - target, powers.mean() - spread - target @ (teacher * target))
        scatter = np.append(drawn.std(axis=0), powers.std()) / math.sqrt(20_000)
        assert (np.abs(errors) < 4.5 * scatter).all()

    def test_chunk_is_the_mean_over_its_queries(self):
        spectrum = PowerLawSpectrum(1, 0.5, 5)
        variances, teacher = spectrum_arrays(spectrum)
        basis, coefficients = predictor_basis(spectrum, 2), np.array([[0.4, 0.0], [0.3, -0.2]])
        queries, rule = draw_queries(stream(3, "chunk"), variances, 8), order_statistic_rule(30, 3, 6)
        found = conditional_floor_chunk(queries, variances, teacher, 3, *rule, basis, coefficients, 0.6)
        records, target = [], np.empty(5)
        for query in queries:
            spread, _ = average_target(query, variances, teacher, 3, *rule, 0.6, 0.0, target)
            errors = target - coefficients @ basis * query
            cross, gradient = basis @ (teacher * query * target), np.tril(errors @ (basis * teacher * query).T)
            losses = spread + (errors**2) @ teacher
            records.append((spread + (target**2) @ teacher, cross, losses, gradient))
        for mean, column in zip(found, zip(*records, strict=True), strict=True):
            # Warm starts differ, and a rate is solved to 1e-6.
            np.testing.assert_allclose(mean, np.mean(np.array(column), axis=0), rtol=1e-6, atol=1e-7)

    def test_a_rate_that_does_not_exist_is_nan(self):
        # In one dimension half of all cosines exceed any c in (-1, 1).
        one, rule = np.ones(1), order_statistic_rule(32, 1, 3)
        spread, _ = average_target(one, one, one, 1, *rule, 0.6, 0.0, np.empty(1))
        assert math.isnan(spread)


class TestRules:
    @pytest.mark.parametrize(("context", "top_k"), [(2, 1), (64, 16), (1024, 2), (1000, 999), (10**18, 3)])
    def test_moments_of_the_log_odds(self, context, top_k):
        nodes, weights = order_statistic_rule(context, top_k, 5)
        mean = digamma(top_k + 1) - digamma(context - top_k)
        variance = polygamma(1, top_k + 1) + polygamma(1, context - top_k)
        assert weights.sum() == pytest.approx(1, rel=1e-12)
        assert weights @ nodes == pytest.approx(mean, rel=1e-9)
        assert weights @ (nodes - mean) ** 2 == pytest.approx(variance, rel=1e-8)

    def test_no_order_statistic_where_all_are_selected(self):
        assert [part.size for part in order_statistic_rule(4, 4, 5)] == [0, 0]

    @pytest.mark.parametrize("dim", [3, 128, 200])
    def test_queries_have_their_variances(self, dim):
        variances, _ = spectrum_arrays(PowerLawSpectrum(1, 0, dim))
        queries = np.vstack([draw_queries(stream(4, "net", i), variances, 1024) for i in range(8)])
        scores = ((queries**2).mean(axis=0) / variances - 1) / math.sqrt(2 / len(queries))
        # Nets err less than independent draws, so 5 is passed in fewer than 1 of 1e4 seeds over 200 modes.
        assert (np.abs(scores) < 5).all()
        assert (np.abs(scores[:3]) < 0.5).all()

    def test_a_net_beats_independent_queries(self):
        variances = np.array([1.0, 0.25])
        nets = [(draw_queries(stream(5, "net", i), variances, 1024) ** 2).sum(axis=1).mean() for i in range(32)]
        free = stream(5, "free").standard_normal((32, 1024, 2)) ** 2 @ variances
        assert np.var(nets) < 0.1 * free.mean(axis=1).var()


class TestExactValues:
    """Each |z| < 4 fails by chance for one seed in 1,000 or fewer (Student, 15 degrees); seeds are fixed."""

    @pytest.mark.parametrize(("dim", "context", "top_k"), [(2, 30, 2), (3, 64, 16), (16, 64, 2), (16, 17, 16)])
    def test_isotropic(self, dim, context, top_k):
        task = TopKTask(PowerLawSpectrum(0, 0, dim), context, top_k)
        exact, found = isotropic_floor(task), sample(task)
        assert found.status is Status.DONE
        assert abs(found.floor.z_score(exact.floor.value)) < 4
        assert abs(found.target_power.z_score(exact.target_power.value)) < 4
        assert abs(found.cross_moments[0].z_score(exact.alignment.value / math.sqrt(dim))) < 4
        assert 0 < found.floor.stderr <= 0.02 * found.floor.value

    @pytest.mark.parametrize("scale", [1e100, 1e-80])
    def test_scale_drops_out(self, scale):
        spectrum, scaled = PowerLawSpectrum(1, 1, 4), PowerLawSpectrum(1, 1, 4, scale, scale)
        basis = predictor_basis(spectrum, 2)
        one, other = (
            conditional_floor(TopKTask(s, 32, 2), b, relative_error=0.02, seed=1).floor
            for s, b in ((spectrum, basis), (scaled, basis / scale))
        )
        assert abs(other.value / scale**2 - one.value) < 4 * math.hypot(one.stderr, other.stderr / scale**2)
        assert 0 < other.stderr <= 0.02 * other.value

    @pytest.mark.parametrize("context", [1, 6])
    def test_all_tokens_selected(self, context):
        spectrum = PowerLawSpectrum(1, 0.5, 3)
        found = sample(TopKTask(spectrum, context, context), 2)
        assert found.floor.value == pytest.approx(spectrum.label_variances().sum() / context, rel=1e-14)
        assert found.floor.stderr < 1e-14

    def test_huge_context(self):
        task = TopKTask(PowerLawSpectrum(0, 0, 8), 10**15, 2)
        assert abs(sample(task).floor.z_score(isotropic_floor(task).floor.value)) < 4


class TestAgainstWholeContexts:
    """Six cases of three scores; |z| < 4.5 fails by chance in fewer than one of 1,000 seeds in all."""

    @pytest.mark.parametrize(
        ("spectrum", "context", "top_k"),
        [
            (PowerLawSpectrum(0.5, 0.5, 8), 40, 16),
            (PowerLawSpectrum(1, 1, 8), 64, 2),
            (PowerLawSpectrum(2, 0, 6), 32, 4),
            (PowerLawSpectrum(4, 1, 2), 24, 1),
            (PowerLawSpectrum(1, 0, 5), 18, 15),
            (ArraySpectrum((0.5, 2.0, 2.0, 1e-3), (1.0, 0.0, 3.0, 5.0)), 20, 3),
        ],
    )
    def test_floors_of_all_degrees(self, spectrum, context, top_k):
        task = TopKTask(spectrum, context, top_k)
        basis = predictor_basis(spectrum, 3)
        fast = conditional_floor(task, basis, relative_error=0.02, seed=6)
        whole = residual_floor(task, basis, relative_error=0.005, seed=7)
        pairs = [*zip(fast.by_degree, whole.by_degree, strict=True), (fast.target_power, whole.target_power)]
        for ours, reference in pairs:
            assert abs(ours.value - reference.value) < 4.5 * math.hypot(ours.stderr, reference.stderr)


class TestErrors:
    def test_intervals_cover(self):
        # 200 sets of 16 nets; a right interval covers too rarely or too often for the bounds below once in 5e3.
        spectrum, context, top_k = PowerLawSpectrum(0, 0, 3), 16, 2
        variances, teacher = spectrum_arrays(spectrum)
        floor = isotropic_floor(TopKTask(spectrum, context, top_k)).floor.value
        basis, rule = predictor_basis(spectrum, 1), order_statistic_rule(context, top_k, 8)
        scores = []
        for repeat in range(200):
            chunks = [
                conditional_floor_chunk(
                    draw_queries(stream(repeat, "coverage", i), variances, 16), variances, teacher, top_k, *rule,
                    basis, np.array([[1.2]]), 0.6,
                )
                for i in range(16)
            ]  # fmt: skip
            value, error = minimal_risks(np.array([c[2] for c in chunks]), np.array([c[3] for c in chunks]))
            scores.append((value[0] - floor) / error[0])
        covered = np.sum(np.abs(scores) < 2.1314)  # Student, 15 degrees, 95 %
        low, high = binom.ppf([1e-4, 1 - 1e-4], 200, 0.95)
        assert low <= covered <= high
        assert abs(np.mean(scores)) < 4 / math.sqrt(200)

    def test_quadrature_error_is_added(self):
        task = TopKTask(PowerLawSpectrum(1, 1, 4), 16, 2)
        basis = predictor_basis(task.spectrum, 1)
        added = 0.25, np.array([0.5]), np.array([0.125]), np.array([[0.0]])

        def run(tolerance):
            return estimate_floor(
                lambda _: lambda rng: (rng.random(), rng.random(1), 10 + rng.random(1), rng.random((1, 1))),
                basis=basis, size=1, name=str, relative_error=0.1, seed=1, max_contexts=100, workers=1, progress=None,
                tolerance=tolerance,
            )  # fmt: skip

        plain, wide = run(None), run(lambda _: added)
        assert wide.floor.stderr == pytest.approx(plain.floor.stderr + 0.125)
        assert wide.target_power.stderr == pytest.approx(plain.target_power.stderr + 0.25)
        assert wide.cross_moments[0].stderr == pytest.approx(plain.cross_moments[0].stderr + 0.5)
        assert wide.floor.value == plain.floor.value

    def test_rule_is_refined_until_it_is_confirmed(self, monkeypatch):
        task = TopKTask(PowerLawSpectrum(4, 1, 6), 16, 2)
        seen = []
        choose = module.choose_rule
        monkeypatch.setattr(module, "choose_rule", lambda *a: seen.append(choose(*a)) or seen[-1])
        sample(task, relative_error=0.5)
        sample(task, relative_error=0.003, max_contexts=3_100)
        assert [rule.step for rule, _ in seen] == [0.6, 0.4]
        assert [finer.step for _, finer in seen] == [0.4, 0.3]

    def test_unresolved_context_is_refused(self):
        with pytest.raises(PrecisionError, match="draw whole contexts"):
            sample(TopKTask(PowerLawSpectrum(4, 1, 6), 2, 1), relative_error=0.01)

    def test_a_rate_that_was_not_found_is_refused(self, monkeypatch):
        nothing = math.nan, np.zeros(1), np.zeros(1), np.zeros((1, 1))
        monkeypatch.setattr(module, "conditional_floor_chunk", lambda *_: nothing)
        with pytest.raises(PrecisionError, match="float64"):
            sample(TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2), 1)


class TestChunks:
    def test_same_bits_for_any_number_of_workers(self):
        task = TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2)
        one, two, eight = (sample(task, relative_error=2e-3, seed=8, workers=workers) for workers in (1, 2, 8))
        assert one == two == eight
        assert one.floor.chunks > FIRST_LOOK

    def test_seeds_and_tasks_have_their_own_bits(self):
        spectrum, other = PowerLawSpectrum(1, 1, 3), ArraySpectrum((1.0, 0.5, 1 / 3), (1.0, 0.5, 1 / 3))
        values = {sample(TopKTask(s, 32, 2), seed=seed).floor.value for s in (spectrum, other) for seed in (1, 2)}
        assert len(values) == 4

    def test_sample_limit(self):
        seen = []
        found = sample(
            TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2),
            relative_error=1e-6,
            max_contexts=25 * 128 + 5,
            progress=seen.append,
        )
        assert found.status is Status.SAMPLE_LIMIT
        assert found.floor.samples == 17 * module.QUERIES_PER_CHUNK
        assert found.pilot_contexts == 8 * module.QUERIES_PER_CHUNK
        assert seen == sorted(seen)
        assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("name", "task", "changes"),
    [
        ("task", PowerLawSpectrum(1, 1, 3), {}),
        ("task.spectrum", TopKTask(PowerLawSpectrum(1, 1, 1), 32, 2), {}),
        ("task.spectrum", TopKTask(PowerLawSpectrum(1, 1, 10**6), 32, 2), {}),
        ("basis", TopKTask(PowerLawSpectrum(1, 1, 4), 32, 2), {}),
        ("relative_error", TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2), {"relative_error": 0}),
        ("seed", TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2), {"seed": -1}),
        ("max_contexts", TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2), {"max_contexts": 24 * 128 - 1}),
        ("workers", TopKTask(PowerLawSpectrum(1, 1, 3), 32, 2), {"workers": 0}),
    ],
)
def test_bad_arguments_are_refused(name, task, changes):
    basis = predictor_basis(PowerLawSpectrum(1, 1, 3), 2)
    with pytest.raises(DomainError, match=f"^{re.escape(name)} "):
        conditional_floor(task, basis, **({"relative_error": 0.1, "seed": 1} | changes))
