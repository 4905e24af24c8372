"""What every Numba kernel keeps to, read from its source: the ways in which kernels go wrong without a word."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import sim.montecarlo.kernels
from sim.montecarlo.kernels.exponential import exponentiate_columns
from sim.montecarlo.kernels.layer_ensemble import layer_ensemble_batch
from sim.montecarlo.kernels.polynomial_risk import population_risk_chunk
from sim.montecarlo.kernels.regression import averaged_loss
from sim.streams import stream

pytestmark = pytest.mark.long

FILES = sorted(Path(sim.montecarlo.kernels.__file__).parent.glob("*.py"))
# Rounding may be rearranged where a kernel says so; NaN, infinities and signed zeros keep their meaning everywhere.
ALLOWED_FASTMATH = {"reassoc", "contract"}
# Global generators: seeding them from Python does not reach compiled code, and threads share them.
GLOBAL_DRAWS = {"seed", "rand", "randn", "random", "normal", "uniform", "standard_normal", "randint", "choice"}


def jitted_functions():
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                yield pytest.param(node, id=f"{path.stem}.{node.name}")


def test_there_are_kernels_to_look_at():
    assert len(list(jitted_functions())) > 20


@pytest.mark.parametrize("function", list(jitted_functions()))
class TestSource:
    def test_options(self, function):
        (decorator,) = function.decorator_list
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
        assert options.pop("nogil") is True
        # No parallel loops, whose shared sums lose updates; no cache, which keeps stale callees across files. The
        # error model of NumPy divides by zero to infinity or NaN instead of raising.
        assert set(options) <= {"fastmath", "error_model"}
        assert set(options.get("fastmath", ())) <= ALLOWED_FASTMATH

    def test_randomness_comes_from_the_generator_passed_in(self, function):
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in GLOBAL_DRAWS:
                assert isinstance(node.value, ast.Name)
                assert node.value.id in {"rng", "generator"}
            if isinstance(node, ast.Name):
                assert node.id not in {"prange", "random"}

    def test_no_power_of_integers_can_overflow(self, function):
        # Integer products wrap around without a word (binomials from C(62, 31) on), so kernels form none.
        names = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        assert not names & {"comb", "factorial", "perm", "prod", "cumprod"}


class TestNaN:
    """A NaN that enters a kernel leaves it as NaN."""

    def test_in_polynomials(self):
        risks = population_risk_chunk(stream(1, "nan"), 3, np.array([1.0, np.nan]), np.ones(2), np.array([0.5]))
        assert np.isnan(risks).tolist() == [False, True]

    def test_in_softmax(self):
        scores, work = np.array([[0.0, np.nan], [1.0, 2.0]]), np.empty(2, np.int64)
        total = np.empty(2)
        exponentiate_columns(scores, total, np.empty(2), work.view(np.float64), work)
        assert np.isnan(total).tolist() == [False, True]

    def test_in_layers(self):
        rng = stream(2, "nan")
        reads = rng.standard_normal((1, 2, 3))
        reads[0, 1, 0] = np.nan
        terms = layer_ensemble_batch(rng.standard_normal((1, 4, 3)), reads, np.ones((1, 4, 3)), np.ones((1, 4)), 1.0)
        assert np.isnan(terms).all()

    def test_in_losses(self):
        weights = np.array([0.1, np.nan])
        assert np.isnan(averaged_loss(np.eye(2), 0.1, np.ones((2, 2)), np.ones(2), weights))
