import dataclasses
import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from sim.montecarlo.floor_moments import MAX_CONTEXT_WORK, PILOT_CHUNKS, floor_moments, minimal_risks, residual_floor
from sim.montecarlo.kernels.floor import floor_chunk, insert_token
from sim.montecarlo.stopping import (
    CONTEXTS_PER_CHUNK,
    FIRST_LOOK,
    NORMALS_PER_CHUNK,
    chunk_size,
    draw_until,
    mean_over_chunks,
)
from sim.streams import stream
from theory.problems import ArraySpectrum, PowerLawSpectrum, TopKTask
from theory.results import DomainError, Status

pytestmark = pytest.mark.long

_SPEC = importlib.util.spec_from_file_location("naive", Path(__file__).parents[1] / "naive.py")
naive = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(naive)

# Isotropic floor, T and E t.q for dim 16, context 64, top 2: one-dimensional integrals over the order statistics of
# cosines, agreed by two codes (shared/reference/oracles.json).
ISOTROPIC = {"floor": 6.0646194438, "power": 10.102262402, "cross": 8.0375548104}


def orthonormal_basis(spectrum, degrees):
    """psi_j = lambda phi_j with phi orthonormal for the weights omega lambda^3: Lanczos, reorthogonalised twice."""
    eigenvalues, teacher = spectrum.input_variances(), spectrum.teacher_variances()
    weights = np.sqrt(teacher * eigenvalues**3)
    rows = []
    vector = weights
    for _ in range(degrees):
        for _ in range(2):
            for row in rows:
                vector = vector - row * (row @ vector)
        rows.append(vector / np.linalg.norm(vector))
        vector = eigenvalues * rows[-1]
    return eigenvalues * np.array(rows) / weights


def isotropic_basis(dim):
    return np.full((1, dim), dim**-0.5)


def isotropic_task(dim, context, top_k, scale=1.0):
    return TopKTask(PowerLawSpectrum(0, 0, dim, scale, scale), context, top_k)


def exact_in_three_dimensions(context, top_k):
    """Floor, T and E t.q of the isotropic task in three dimensions, in closed form.

    Cosines are uniform on [-1, 1] (Archimedes), so 1 - 2V_i with V_i the order statistics of uniform numbers:
    E V_i = i/(P+1), E V_i V_j = i(j+1)/((P+1)(P+2)) for i < j. Lengths are independent of directions with mean
    square 3 and squared mean 8/pi, and components orthogonal to the query have mean zero.
    """
    P, k = context, top_k
    mean_cosine = 1 - (k + 1) / (P + 1)
    pairs = sum(
        2 * (1 - 2 * (i + j) / (P + 1) + 4 * i * (j + 1) / ((P + 1) * (P + 2)))
        for i in range(1, k + 1)
        for j in range(i + 1, k + 1)
    )
    power = 3 / k + 8 / math.pi * pairs / k**2
    cross = 8 / math.pi * mean_cosine
    return power - cross**2 / 3, power, cross


def pilot_and_main(task, basis, chunks, seed=1):
    zeros = np.zeros((len(basis), len(basis)))
    pilot = floor_moments(task, basis, zeros, seed=seed, chunks=chunks, name="test pilot")
    coefficients = np.tril(np.tile(pilot.cross_moments.mean(axis=0), (len(basis), 1)))
    return pilot, floor_moments(task, basis, coefficients, seed=seed, chunks=chunks, name="test main")


class TestKernel:
    @pytest.mark.parametrize(
        ("dim", "context", "top_k", "degrees"), [(6, 12, 3, 3), (5, 4, 4, 2), (2, 1, 1, 1), (1, 9, 3, 1)]
    )
    def test_twin_draws_the_same_bits_and_finds_the_same_means(self, dim, context, top_k, degrees):
        spectrum = PowerLawSpectrum(1, 0.5, dim)
        basis = orthonormal_basis(spectrum, degrees)
        coefficients = np.tril(np.linspace(0.5, -0.3, degrees**2).reshape(degrees, degrees))
        arguments = (30, np.sqrt(spectrum.input_variances()), spectrum.teacher_variances(), context, top_k)
        rng, twin_rng = stream(3, "kernel"), stream(3, "kernel")
        means = floor_chunk(rng, *arguments, basis, coefficients)
        twin = naive.floor_chunk(twin_rng, *arguments, basis, coefficients)
        for mean, expected in zip(means, twin, strict=True):
            np.testing.assert_allclose(mean, expected, rtol=1e-12, atol=1e-14)
        # Equal states: the kernel drew exactly contexts * dim * (context + 1) normals, and the same ones.
        assert rng.bit_generator.state == twin_rng.bit_generator.state

    def test_the_rotation_of_each_context_drops_out(self):
        # The task as the paper states it, in the original space with the matrices Sigma and Omega of depth (3).
        spectrum = PowerLawSpectrum(1, 0.5, 4)
        sqrt_input, teacher = np.sqrt(spectrum.input_variances()), spectrum.teacher_variances()
        basis, coefficients = orthonormal_basis(spectrum, 1), np.array([[0.7]])
        power, cross, residual, gradient = floor_chunk(
            stream(5, "turned"), 1, sqrt_input, teacher, 6, 2, basis, coefficients
        )
        rng = stream(5, "turned")
        draws = sqrt_input * rng.standard_normal((7, 4))
        rotation = np.linalg.qr(rng.standard_normal((4, 4)))[0]
        query, *tokens = draws @ rotation.T
        tokens = np.array(tokens)
        omega = rotation @ np.diag(teacher) @ rotation.T
        predicted = rotation @ np.diag(basis[0]) @ rotation.T @ query
        cosines = tokens @ query / (np.linalg.norm(tokens, axis=1) * np.linalg.norm(query))
        target = tokens[np.argsort(-cosines)[:2]].mean(axis=0)
        error = target - 0.7 * predicted
        assert power == pytest.approx(target @ omega @ target, rel=1e-12)
        assert cross[0] == pytest.approx(predicted @ omega @ target, rel=1e-12)
        assert residual[0] == pytest.approx(error @ omega @ error, rel=1e-12)
        assert gradient[0, 0] == pytest.approx(predicted @ omega @ error, rel=1e-11)

    def test_the_list_of_the_best_is_a_stable_sort(self):
        rng = stream(6, "ties")
        for _ in range(200):
            context = int(rng.integers(1, 20))
            top_k = int(rng.integers(1, context + 1))
            given = rng.integers(0, 4, context).astype(float)  # many exact ties
            scores, slots, selected = np.empty(top_k), np.arange(top_k), np.empty((top_k, 1))
            filled = 0
            for index, score in enumerate(given):
                filled = insert_token(np.array([float(index)]), score, filled, scores, slots, selected)
            best = np.argsort(-given, kind="stable")[:top_k]
            assert filled == top_k
            np.testing.assert_array_equal(selected[slots, 0], best)
            np.testing.assert_array_equal(scores, given[best])

    def test_lowest_index_wins_the_exact_ties_of_one_dimension(self):
        rng, again = stream(7, "line"), stream(7, "line")
        one = np.ones(1)
        for _ in range(50):
            power, *_ = floor_chunk(rng, 1, one, one, 8, 2, one[None], np.zeros((1, 1)))
            query, tokens = again.standard_normal(), again.standard_normal(8)
            same_side = np.flatnonzero(tokens * query > 0)
            other_side = np.flatnonzero(tokens * query <= 0)
            chosen = np.concatenate([same_side, other_side])[:2]
            assert power == pytest.approx(tokens[chosen].mean() ** 2, rel=1e-13)


class TestExactValues:
    """Each |z| < 4 fails by chance for one seed in 1,000 or fewer (Student, 15 degrees or more); seeds are fixed."""

    def test_isotropic_paper_size_of_softmax(self):
        estimate = residual_floor(isotropic_task(16, 64, 2), isotropic_basis(16), relative_error=0.002, seed=11)
        assert estimate.status is Status.DONE
        assert abs(estimate.floor.z_score(ISOTROPIC["floor"])) < 4
        assert abs(estimate.target_power.z_score(ISOTROPIC["power"])) < 4
        assert abs(estimate.cross_moments[0].z_score(ISOTROPIC["cross"] / 4)) < 4
        assert estimate.floor.stderr <= 0.002 * estimate.floor.value

    @pytest.mark.parametrize(("context", "top_k"), [(5, 1), (9, 3), (6, 6)])
    @pytest.mark.parametrize("scale", [1.0, 1e100, 1e-80])
    def test_isotropic_in_three_dimensions_at_any_scale(self, context, top_k, scale):
        floor, power, cross = exact_in_three_dimensions(context, top_k)
        task = isotropic_task(3, context, top_k, scale)
        estimate = residual_floor(task, isotropic_basis(3) / scale, relative_error=0.02, seed=12)
        assert abs(estimate.floor.z_score(floor * scale**2)) < 4
        assert abs(estimate.target_power.z_score(power * scale**2)) < 4
        # psi = 1/(scale sqrt 3), so the cross moment has the unit of the scale.
        assert abs(estimate.cross_moments[0].z_score(cross / math.sqrt(3) * scale)) < 4
        assert 0 < estimate.floor.stderr <= 0.02 * estimate.floor.value

    def test_anisotropic_floor_does_not_depend_on_the_coefficients_it_is_measured_at(self):
        task = TopKTask(PowerLawSpectrum(1, 1, 6), 12, 2)
        basis = orthonormal_basis(task.spectrum, 2)
        pilot, main = pilot_and_main(task, basis, chunks=64)
        (values, errors), (others, other_errors) = (minimal_risks(m.residuals, m.gradients) for m in (pilot, main))
        assert (np.abs(values - others) < 4 * np.hypot(errors, other_errors)).all()


class TestStatistics:
    def test_minimal_risk_is_the_pair_formula(self):
        rng = stream(8, "pairs")
        residuals, gradients = rng.standard_normal((7, 2)), np.tril(rng.standard_normal((7, 2, 2)))
        values, errors = minimal_risks(residuals, gradients)

        def by_pairs(kept):
            products = [(gradients[i] * gradients[j]).sum(axis=1) for i in kept for j in kept if i != j]
            return residuals[kept].mean(axis=0) - np.mean(products, axis=0)

        everyone = list(range(7))
        without_one = np.array([by_pairs([i for i in everyone if i != out]) for out in everyone])
        jackknife = np.sqrt(6 / 7 * ((without_one - without_one.mean(axis=0)) ** 2).sum(axis=0))
        np.testing.assert_allclose(values, by_pairs(everyone), rtol=1e-12)
        np.testing.assert_allclose(errors, jackknife, rtol=1e-12)

    def test_mean_over_chunks_is_the_textbook_error_at_any_scale(self):
        means = stream(9, "means").standard_normal(10)
        value, stderr = mean_over_chunks(means)
        assert value == pytest.approx(means.mean())
        assert stderr == pytest.approx(means.std(ddof=1) / math.sqrt(10))
        assert mean_over_chunks(means * 1e200)[1] == pytest.approx(stderr * 1e200)

    def test_subtracting_before_averaging_beats_the_plug_in(self):
        # The pilot's own floor, at zero coefficients, is T - |h|^2: the plug-in without its bias.
        task = TopKTask(PowerLawSpectrum(2, 1, 16), 128, 8)
        pilot, main = pilot_and_main(task, orthonormal_basis(task.spectrum, 3), chunks=32)
        plug_in, residual = (minimal_risks(m.residuals, m.gradients)[1] for m in (pilot, main))
        assert (plug_in**2 > 8 * residual**2).all()

    def test_intervals_cover(self):
        # 200 runs with the stopping rule. A right interval covers too rarely for the bounds below once in 1e4.
        task, basis = isotropic_task(3, 8, 2), isotropic_basis(3)
        floor, *_ = exact_in_three_dimensions(8, 2)
        runs = [residual_floor(task, basis, relative_error=0.014, seed=seed, workers=1) for seed in range(200)]
        assert len({run.floor.chunks for run in runs}) > 1  # stopping is at work
        for level in (0.5, 0.95):
            covered = sum(floor in run.floor.interval(level) for run in runs)
            low, high = binom.ppf([1e-4, 1 - 1e-4], 200, level)
            assert low <= covered <= high
        assert abs(np.mean([run.floor.z_score(floor) for run in runs])) < 4 / math.sqrt(200)


class TestChunksAndStopping:
    def test_same_bits_for_any_number_of_workers(self):
        task = TopKTask(PowerLawSpectrum(1, 1, 4), 8, 2)
        basis = orthonormal_basis(task.spectrum, 2)
        one, two, eight = (
            residual_floor(task, basis, relative_error=0.012, seed=13, workers=workers) for workers in (1, 2, 8)
        )
        assert one == two == eight
        assert one.floor.chunks > FIRST_LOOK

    def test_each_chunk_is_its_own_stream_and_all_are_equally_large(self):
        task = isotropic_task(3, 5, 1)
        moments = floor_moments(task, isotropic_basis(3), np.zeros((1, 1)), seed=14, chunks=5, name="here")
        assert moments.contexts_per_chunk == chunk_size(3 * 5) == CONTEXTS_PER_CHUNK[1]
        assert moments.target_power.shape == (5,)
        assert moments.cross_moments.shape == moments.residuals.shape == (5, 1)
        assert moments.gradients.shape == (5, 1, 1)
        for index in range(5):
            rng = stream(14, f"here {task.canonical()}", index)
            twin = naive.floor_chunk(rng, 256, np.ones(3), np.ones(3), 5, 1, isotropic_basis(3), np.zeros((1, 1)))
            assert moments.target_power[index] == pytest.approx(twin[0], rel=1e-12)

    def test_chunk_size_follows_the_problem_within_bounds(self):
        assert chunk_size(128 * 1024) == 256
        assert chunk_size(2**20) == NORMALS_PER_CHUNK // 2**20 == 32
        assert chunk_size(10**7) == 16

    def test_samples_count_the_contexts_of_the_main_run(self):
        task, limit = isotropic_task(3, 5, 1), 30 * 256 + 100
        seen = []
        estimate = residual_floor(
            task, isotropic_basis(3), relative_error=1e-6, seed=15, max_contexts=limit, progress=seen.append
        )
        assert estimate.status is estimate.floor.status is Status.SAMPLE_LIMIT
        assert estimate.pilot_contexts == PILOT_CHUNKS * 256
        assert estimate.floor.samples == estimate.floor.chunks * 256 == (30 - PILOT_CHUNKS) * 256
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
        assert 0 < seen[0] < 1

    def test_looks_only_where_the_rule_says(self):
        looks = []

        def error_ratio(results):
            looks.append(len(results))
            return 3.0 if len(results) < 50 else 0.9

        seen = []
        results = draw_until(
            lambda rng: rng.random(),
            error_ratio,
            seed=1,
            name="looks",
            max_chunks=1000,
            workers=2,
            progress=seen.append,
        )
        assert looks == [16, 24, 36, 54]
        assert results == [stream(1, "looks", index).random() for index in range(54)]
        assert seen == sorted(seen)
        assert seen[-1] == 1.0

    def test_other_tasks_and_seeds_get_other_bits(self):
        # The same spectrum written in two ways would give the same means from the same stream.
        spectra = PowerLawSpectrum(0, 0, 3), ArraySpectrum((1, 1, 1), (1, 1, 1))
        powers = {
            floor_moments(
                TopKTask(spectrum, 4, 1), isotropic_basis(3), np.zeros((1, 1)), seed=seed, chunks=2
            ).target_power[0]
            for spectrum in spectra
            for seed in (1, 2)
        }
        assert len(powers) == 4

    def test_integer_arguments_are_normalised(self):
        task, basis = isotropic_task(3, 4, 1), isotropic_basis(3)
        plain = residual_floor(task, basis, relative_error=0.5, seed=1, max_contexts=10_000, workers=1)
        same = residual_floor(
            task, basis.tolist(), relative_error=0.5, seed=np.int8(1), max_contexts=1e4, workers=1.0
        )
        assert plain == same
        assert type(same.floor.seed) is int

    def test_estimates_are_frozen(self):
        estimate = residual_floor(isotropic_task(3, 4, 1), isotropic_basis(3), relative_error=0.5, seed=1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            estimate.pilot_contexts = 0


GOOD = {"relative_error": 0.1, "seed": 1}
SMALL, SMALL_BASIS = isotropic_task(3, 4, 1), isotropic_basis(3)


class TestDomain:
    @pytest.mark.parametrize(
        ("name", "task", "basis", "changes"),
        [
            ("task", PowerLawSpectrum(0, 0, 3), SMALL_BASIS, {}),
            ("task", isotropic_task(3, MAX_CONTEXT_WORK, 1), SMALL_BASIS, {}),
            ("task", isotropic_task(10**18, 4, 1), SMALL_BASIS, {}),
            ("task", isotropic_task(3, 10**4, 10**4), SMALL_BASIS, {}),
            ("task.spectrum", TopKTask(PowerLawSpectrum(60, 0, 3), 4, 1), SMALL_BASIS, {}),
            ("basis", SMALL, SMALL_BASIS * 1.001, {}),
            ("basis", SMALL, SMALL_BASIS * 1e200, {}),
            ("basis", SMALL, SMALL_BASIS * np.nan, {}),
            ("basis", SMALL, np.vstack([SMALL_BASIS, SMALL_BASIS]), {}),
            ("basis", SMALL, SMALL_BASIS[0], {}),
            ("basis", SMALL, isotropic_basis(4), {}),
            ("basis", SMALL, np.empty((0, 3)), {}),
            ("basis", SMALL, "psi", {}),
            ("relative_error", SMALL, SMALL_BASIS, {"relative_error": 0}),
            ("relative_error", SMALL, SMALL_BASIS, {"relative_error": 1.5}),
            ("relative_error", SMALL, SMALL_BASIS, {"relative_error": math.nan}),
            ("seed", SMALL, SMALL_BASIS, {"seed": -1}),
            ("seed", SMALL, SMALL_BASIS, {"seed": 1.5}),
            ("max_contexts", SMALL, SMALL_BASIS, {"max_contexts": 24 * 256 - 1}),
            ("workers", SMALL, SMALL_BASIS, {"workers": 0}),
        ],
    )
    def test_residual_floor_refuses(self, name, task, basis, changes):
        with pytest.raises(DomainError, match=f"^{re.escape(name)} "):
            residual_floor(task, basis, **(GOOD | changes))

    @pytest.mark.parametrize(
        ("name", "coefficients", "chunks"),
        [
            ("coefficients", np.zeros((2, 2)), 2),
            ("coefficients", np.full((1, 1), np.inf), 2),
            ("coefficients", None, 2),
            ("chunks", np.zeros((1, 1)), 1),
            ("chunks", np.zeros((1, 1)), 2.5),
        ],
    )
    def test_floor_moments_refuses(self, name, coefficients, chunks):
        with pytest.raises(DomainError, match=f"^{re.escape(name)} "):
            floor_moments(SMALL, SMALL_BASIS, coefficients, seed=1, chunks=chunks)

    def test_coefficients_above_the_diagonal_are_refused(self):
        task = TopKTask(PowerLawSpectrum(1, 1, 4), 8, 2)
        with pytest.raises(DomainError, match=r"^coefficients "):
            floor_moments(task, orthonormal_basis(task.spectrum, 2), np.ones((2, 2)), seed=1, chunks=2)
