import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest

from sim.montecarlo import polynomial_risk as module
from sim.montecarlo.kernels.polynomial_risk import context_risk_chunk, population_risk_chunk
from sim.montecarlo.polynomial_risk import polynomial_mode_risks, polynomial_risk
from sim.streams import stream
from theory.problems import CopyTask, PowerLawSpectrum, TopKTask
from theory.results import DomainError, Status

pytestmark = pytest.mark.long

_SPEC = importlib.util.spec_from_file_location("naive", Path(__file__).parents[1] / "naive.py")
naive = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(naive)

STEEP = PowerLawSpectrum(1.5, 0.5, 8)
STEPS = np.array([1.3, 0.6, 0.9])


def infinite_context_risk(spectrum, steps):
    """sum_k lambda_k omega_k prod_l (1 - s_l lambda_k)^2, depth (29)."""
    response = np.prod(1 - np.outer(steps, spectrum.input_variances()), axis=0)
    return float(spectrum.label_variances() @ response**2)


def one_layer_risk(spectrum, step, context):
    """E (q - s S q).Omega (q - s S q) for q independent of S.

    E S = Sigma, and E S M S = (1 + 1/P) Sigma M Sigma + Sigma tr(Sigma M) / P for a Wishart S and a fixed M that
    commutes with Sigma; here M = Omega, and E q q' = Sigma.
    """
    lam, omega = spectrum.input_variances(), spectrum.teacher_variances()
    second = (1 + 1 / context) * lam**2 * omega + lam * (lam @ omega) / context
    return float(lam @ omega - 2 * step * (lam**2 @ omega) + step**2 * (lam @ second))


def one_layer_exact_match_risk(dim, step, context):
    """The same for isotropic unit spectra where q is the first token.

    S q = (|q|^2 q + W q) / P with W the sum of n = P - 1 independent x x': E W = n I, E W^2 = n (n + 1 + d) I.
    """
    second, fourth, sixth = dim, dim * (dim + 2), dim * (dim + 2) * (dim + 4)
    n = context - 1
    cross = (fourth + n * second) / context
    square = (sixth + 2 * n * fourth + n * (n + 1 + dim) * second) / context**2
    return second - 2 * step * cross + step**2 * square


class TestKernel:
    @pytest.mark.parametrize("exact_match", [False, True])
    @pytest.mark.parametrize("form_covariance", [False, True])
    @pytest.mark.parametrize("context", [1, 12])
    def test_context_twin(self, context, exact_match, form_covariance):
        spectrum = PowerLawSpectrum(1, 0.5, 5)
        rng, twin_rng = stream(3, "kernel"), stream(3, "kernel")
        arguments = (
            20, np.sqrt(spectrum.input_variances()), spectrum.teacher_variances(), STEPS, context, exact_match,
            form_covariance,
        )  # fmt: skip
        np.testing.assert_allclose(
            context_risk_chunk(rng, *arguments), naive.context_risk_chunk(twin_rng, *arguments), rtol=1e-12
        )
        assert rng.bit_generator.state == twin_rng.bit_generator.state

    def test_population_twin(self):
        rng, twin_rng = stream(4, "kernel"), stream(4, "kernel")
        arguments = (50, np.sqrt(STEEP.input_variances()), STEEP.teacher_variances(), STEPS)
        np.testing.assert_allclose(
            population_risk_chunk(rng, *arguments), naive.population_risk_chunk(twin_rng, *arguments), rtol=1e-12
        )
        assert rng.bit_generator.state == twin_rng.bit_generator.state

    @pytest.mark.parametrize("form_covariance", [False, True])
    def test_it_is_the_label_recursion_of_the_paper_averaged_over_teachers(self, form_covariance):
        # For independent beta_k = +-sqrt(omega_k) the mean over all signs is the exact average over the teacher.
        omega = np.array([1.0, 0.5, 0.1])
        modes = context_risk_chunk(stream(5, "labels"), 1, np.ones(3), omega, STEPS, 6, False, form_covariance)
        *tokens, query = stream(5, "labels").standard_normal((7, 3))
        signs = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)])
        losses = [
            naive.label_propagation_loss(np.sqrt(omega) * sign, np.array(tokens), query, STEPS) for sign in signs
        ]
        assert modes.sum() == pytest.approx(np.mean(losses), rel=1e-12)


class TestExactValues:
    """Each |z| < 4 fails by chance for one seed in 1,000 or fewer (Student, 15 degrees or more); seeds are fixed."""

    @pytest.mark.parametrize("steps", [[], [1.0], [1.3, 0.6, 0.9], np.full(40, 0.5)])
    def test_infinite_context(self, steps):
        estimate = polynomial_risk(CopyTask(STEEP), steps, relative_error=0.02, seed=1)
        assert estimate.status is Status.DONE
        assert abs(estimate.z_score(infinite_context_risk(STEEP, steps))) < 4
        assert estimate.stderr <= 0.02 * estimate.value

    @pytest.mark.parametrize(("context", "step"), [(1, 0.4), (4, 0.7), (50, 1.1)])
    def test_one_layer_at_finite_context(self, context, step):
        estimate = polynomial_risk(CopyTask(STEEP, context), [step], relative_error=0.02, seed=2)
        assert abs(estimate.z_score(one_layer_risk(STEEP, step, context))) < 4
        # The check has teeth: the value of infinite context is many errors away, except at the largest context.
        if context < 50:
            assert abs(estimate.z_score(infinite_context_risk(STEEP, [step]))) > 8

    @pytest.mark.parametrize(("dim", "context", "step"), [(1, 1, 0.2), (4, 6, 0.5)])
    def test_one_layer_with_the_query_among_the_tokens(self, dim, context, step):
        task = CopyTask(PowerLawSpectrum(0, 0, dim), context)
        estimate = polynomial_risk(task, [step], relative_error=0.02, seed=3, exact_match=True)
        assert abs(estimate.z_score(one_layer_exact_match_risk(dim, step, context))) < 4

    def test_forming_the_covariance_changes_rounding_only(self, monkeypatch):
        task = CopyTask(STEEP, 10)
        formed = polynomial_risk(task, np.full(6, 0.5), relative_error=0.05, seed=4)
        monkeypatch.setattr(module, "_forming_pays", lambda *_: False)
        monkeypatch.setattr(module, "chunk_size", lambda _: formed.samples // formed.chunks)
        by_tokens = polynomial_risk(task, np.full(6, 0.5), relative_error=0.05, seed=4)
        assert by_tokens.value == pytest.approx(formed.value, rel=1e-12)
        assert by_tokens.samples == formed.samples

    def test_a_risk_of_zero_is_exact(self):
        estimate = polynomial_risk(CopyTask(PowerLawSpectrum(0, 1, 4)), [1.0], relative_error=0.01, seed=5)
        assert (estimate.value, estimate.stderr, estimate.status) == (0.0, 0.0, Status.DONE)


class TestChunks:
    @pytest.mark.parametrize("context", [None, 6])
    def test_same_bits_for_any_number_of_workers(self, context):
        one, two, eight = (
            polynomial_risk(CopyTask(STEEP, context), STEPS, relative_error=0.02, seed=6, workers=workers)
            for workers in (1, 2, 8)
        )
        assert one == two == eight

    def test_samples_count_equal_chunks_up_to_the_limit(self):
        seen = []
        estimate = polynomial_risk(
            CopyTask(STEEP, 4), STEPS, relative_error=1e-6, seed=7, max_contexts=40 * 256 + 9, progress=seen.append
        )
        assert (estimate.samples, estimate.chunks, estimate.status) == (40 * 256, 40, Status.SAMPLE_LIMIT)
        assert seen == sorted(seen)
        assert seen[-1] == 1.0

    def test_depths_get_independent_bits(self):
        task = CopyTask(PowerLawSpectrum(0, 0, 3), 5)
        values = {polynomial_risk(task, steps, relative_error=0.5, seed=8).value for steps in ([], [0.0], [0.0, 0.0])}
        assert len(values) == 3  # steps of zero leave the query as it is: only the bits differ

    def test_exact_match_has_no_effect_at_infinite_context(self):
        either, other = (
            polynomial_risk(CopyTask(STEEP), STEPS, relative_error=0.1, seed=9, exact_match=exact)
            for exact in (False, True)
        )
        assert either == other


MATRICES = 0.6 * np.eye(8) + 0.2 * stream(10, "matrices").standard_normal((2, 8, 8))


def naive_matrix_risk(task, matrices, seed, contexts=4000):
    """Losses with D = (I - S B_1) ... (I - S B_L), depth (22), formed in the frame of the network."""
    lam, omega = np.sqrt(task.spectrum.input_variances()), task.spectrum.teacher_variances()
    rng, dim = stream(seed, "matrix twin"), len(lam)
    losses = []
    for _ in range(contexts):
        orthogonal, triangular = np.linalg.qr(rng.standard_normal((dim, dim)))
        rotation = orthogonal * np.sign(np.diagonal(triangular))
        query = rotation @ (lam * rng.standard_normal(dim))
        if task.context is None:
            S = rotation @ np.diag(lam**2) @ rotation.T
        else:
            tokens = (rng.standard_normal((task.context, dim)) * lam) @ rotation.T
            S = tokens.T @ tokens / task.context
        error = np.eye(dim)
        for B in matrices:
            error = error @ (np.eye(dim) - S @ B)
        losses.append(omega * (rotation.T @ error @ query) ** 2)
    return np.array(losses)


class TestModes:
    """|z| < 4.5 fails by chance for 4e-4 of seeds (Student, 15 degrees) or fewer; seeds are fixed."""

    @pytest.mark.parametrize("context", [None, 6])
    @pytest.mark.parametrize("exact_match", [False, True])
    def test_scalar_steps_add_up_to_the_risk(self, context, exact_match):
        task, options = CopyTask(STEEP, context), {"relative_error": 0.05, "seed": 11, "exact_match": exact_match}
        sample = polynomial_mode_risks(task, STEPS, **options)
        assert sample.estimate("risk") == polynomial_risk(task, STEPS, **options)
        np.testing.assert_allclose(sample.chunk_means[:, 0], sample.chunk_means[:, 1:].sum(axis=1), rtol=1e-13)
        assert sample.names == ("risk", *(f"mode {k}" for k in range(1, 9)))

    def test_modes_at_infinite_context_are_those_of_the_paper(self):
        sample = polynomial_mode_risks(CopyTask(STEEP), STEPS, relative_error=0.01, seed=12)
        response = np.prod(1 - np.outer(STEPS, STEEP.input_variances()), axis=0)
        for k, exact in enumerate(STEEP.label_variances() * response**2, 1):
            assert abs(sample.estimate(f"mode {k}").z_score(exact)) < 4.5

    def test_modes_of_one_layer_at_finite_context(self):
        # E S M S = (1 + 1/P) Sigma M Sigma + Sigma tr(Sigma M) / P with M = Omega e_k e_k', as in one_layer_risk.
        step, context = 0.7, 4
        lam, omega = STEEP.input_variances(), STEEP.teacher_variances()
        mixing = step**2 * lam * omega * (lam @ lam) / context
        exact = lam * omega * ((1 - step * lam) ** 2 + step**2 * lam**2 / context) + mixing
        assert exact.sum() == pytest.approx(one_layer_risk(STEEP, step, context), rel=1e-12)
        sample = polynomial_mode_risks(CopyTask(STEEP, context), [step], relative_error=0.01, seed=13)
        for k, value in enumerate(exact, 1):
            assert abs(sample.estimate(f"mode {k}").z_score(value)) < 4.5

    @pytest.mark.parametrize("context", [None, 6])
    def test_matrices_that_are_scalars(self, context):
        task = CopyTask(STEEP, context)
        matrices = STEPS[:, None, None] * np.eye(8)
        sample = polynomial_mode_risks(task, matrices, relative_error=0.01, seed=14)
        scalar = polynomial_mode_risks(task, STEPS, relative_error=0.01, seed=15)
        for name in sample.names:
            expected = scalar.estimate(name)
            assert abs(sample.estimate(name).z_score(expected.value, expected.stderr)) < 4.5

    @pytest.mark.parametrize("context", [None, 6])
    def test_matrices_against_a_naive_twin(self, context):
        task = CopyTask(STEEP, context)
        sample = polynomial_mode_risks(task, MATRICES, relative_error=0.01, seed=16)
        losses = naive_matrix_risk(task, MATRICES, 17)
        stderr = losses.std(axis=0, ddof=1) / np.sqrt(len(losses))
        for k in range(8):
            assert abs(sample.estimate(f"mode {k + 1}").z_score(losses[:, k].mean(), stderr[k])) < 4.5
        total = losses.sum(axis=1)
        error = total.std(ddof=1) / np.sqrt(len(total))
        assert abs(sample.estimate("risk").z_score(total.mean(), error)) < 4.5

    def test_matrices_see_the_query_among_the_tokens(self):
        dim, context, step = 4, 6, 0.5
        task = CopyTask(PowerLawSpectrum(0, 0, dim), context)
        sample = polynomial_mode_risks(task, step * np.eye(dim)[None], relative_error=0.01, seed=18, exact_match=True)
        assert abs(sample.estimate("risk").z_score(one_layer_exact_match_risk(dim, step, context))) < 4.5

    @pytest.mark.parametrize(
        ("task", "layers", "changes", "words"),
        [
            (TopKTask(STEEP, 4, 1), STEPS, {}, "task must be a CopyTask"),
            (CopyTask(STEEP), np.ones((2, 3, 3)), {}, "matrices of shape"),
            (CopyTask(STEEP), np.full((2, 8, 8), np.inf), {}, "must be finite"),
            (CopyTask(STEEP), [["a", "b"]], {}, "numbers or of matrices"),
            (CopyTask(PowerLawSpectrum(1, 1, 5000)), STEPS, {}, "at most 4096"),
            (CopyTask(PowerLawSpectrum(1, 1, 1000)), np.zeros((1, 1000, 1000)), {}, "layers with matrices"),
            (CopyTask(STEEP), STEPS, {"exact_match": 1}, "exact_match"),
            (CopyTask(STEEP), np.full((2, 8, 8), 1e200), {}, "layers must keep the risk finite"),
        ],
    )
    def test_refuses(self, task, layers, changes, words):
        with pytest.raises(DomainError, match=words):
            polynomial_mode_risks(task, layers, **({"relative_error": 0.1, "seed": 1} | changes))


GOOD = {"relative_error": 0.1, "seed": 1}


class TestDomain:
    @pytest.mark.parametrize(
        ("name", "task", "steps", "changes"),
        [
            ("task", TopKTask(STEEP, 4, 1), STEPS, {}),
            ("task.spectrum.dim", CopyTask(PowerLawSpectrum(1, 1)), STEPS, {}),
            ("task", CopyTask(PowerLawSpectrum(1, 1, 10**18)), STEPS, {}),
            ("task", CopyTask(STEEP, 10**18), STEPS, {}),
            ("task", CopyTask(PowerLawSpectrum(1, 1, 1000), 20_000), np.full(10**4, 0.5), {}),
            ("layer_steps", CopyTask(STEEP), 0.5, {}),
            ("layer_steps", CopyTask(STEEP), [[0.5]], {}),
            ("layer_steps", CopyTask(STEEP), [math.nan], {}),
            ("layer_steps", CopyTask(STEEP), "steps", {}),
            ("layer_steps", CopyTask(STEEP), ["a"], {}),
            ("layer_steps", CopyTask(STEEP), [1e200, 1e200], {}),
            ("layer_steps", CopyTask(STEEP, 4), [1e200, 1e200], {}),
            ("exact_match", CopyTask(STEEP, 4), STEPS, {"exact_match": 1}),
            ("relative_error", CopyTask(STEEP), STEPS, {"relative_error": 0}),
            ("relative_error", CopyTask(STEEP), STEPS, {"relative_error": "1%"}),
            ("max_contexts", CopyTask(STEEP), STEPS, {"max_contexts": 32 * 256 - 1}),
            ("seed", CopyTask(STEEP), STEPS, {"seed": -1}),
            ("workers", CopyTask(STEEP), STEPS, {"workers": 0}),
        ],
    )
    def test_refuses(self, name, task, steps, changes):
        with pytest.raises(DomainError, match=f"^{re.escape(name)} "):
            polynomial_risk(task, steps, **(GOOD | changes))
