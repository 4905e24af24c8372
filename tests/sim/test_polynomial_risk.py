import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest

from sim.montecarlo import polynomial_risk as module
from sim.montecarlo.kernels.polynomial_risk import context_risk_chunk, population_risk_chunk
from sim.montecarlo.polynomial_risk import polynomial_risk
from sim.streams import stream
from theory.problems import CopyTask, PowerLawSpectrum, TopKTask
from theory.results import DomainError, Status

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
        assert context_risk_chunk(rng, *arguments) == pytest.approx(
            naive.context_risk_chunk(twin_rng, *arguments), rel=1e-12
        )
        assert rng.bit_generator.state == twin_rng.bit_generator.state

    def test_population_twin(self):
        rng, twin_rng = stream(4, "kernel"), stream(4, "kernel")
        arguments = (50, np.sqrt(STEEP.input_variances()), STEEP.teacher_variances(), STEPS)
        assert population_risk_chunk(rng, *arguments) == pytest.approx(
            naive.population_risk_chunk(twin_rng, *arguments), rel=1e-12
        )
        assert rng.bit_generator.state == twin_rng.bit_generator.state

    @pytest.mark.parametrize("form_covariance", [False, True])
    def test_it_is_the_label_recursion_of_the_paper_averaged_over_teachers(self, form_covariance):
        # For independent beta_k = +-sqrt(omega_k) the mean over all signs is the exact average over the teacher.
        omega = np.array([1.0, 0.5, 0.1])
        risk = context_risk_chunk(stream(5, "labels"), 1, np.ones(3), omega, STEPS, 6, False, form_covariance)
        *tokens, query = stream(5, "labels").standard_normal((7, 3))
        signs = np.array([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)])
        losses = [
            naive.label_propagation_loss(np.sqrt(omega) * sign, np.array(tokens), query, STEPS) for sign in signs
        ]
        assert risk == pytest.approx(np.mean(losses), rel=1e-12)


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
            CopyTask(STEEP, 4), STEPS, relative_error=1e-6, seed=7, max_contexts=20 * 256 + 9, progress=seen.append
        )
        assert (estimate.samples, estimate.chunks, estimate.status) == (20 * 256, 20, Status.SAMPLE_LIMIT)
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
            ("max_contexts", CopyTask(STEEP), STEPS, {"max_contexts": 16 * 256 - 1}),
            ("seed", CopyTask(STEEP), STEPS, {"seed": -1}),
            ("workers", CopyTask(STEEP), STEPS, {"workers": 0}),
        ],
    )
    def test_refuses(self, name, task, steps, changes):
        with pytest.raises(DomainError, match=f"^{re.escape(name)} "):
            polynomial_risk(task, steps, **(GOOD | changes))
