import math

import pytest

from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError
from validate.predictions import SHORT_CONTEXT, sampled_floors


def floors(context, method="auto", **spectrum):
    task = TopKTask(
        PowerLawSpectrum(**({"input_exponent": 1, "teacher_exponent": 1, "dim": 3} | spectrum)), context, 2
    )
    return sampled_floors(
        task, degree=2, relative_error=0.02, seed=3, max_contexts=10**6, progress=lambda _: None, method=method
    )


def test_long_contexts_are_integrated_and_short_ones_drawn():
    assert floors(SHORT_CONTEXT) == floors(SHORT_CONTEXT, "queries")
    assert floors(SHORT_CONTEXT - 1) == floors(SHORT_CONTEXT - 1, "contexts")
    # One mode: every cosine is +1 or -1.
    assert floors(SHORT_CONTEXT, dim=1) == floors(SHORT_CONTEXT, "contexts", dim=1)


def test_both_methods_agree():
    # One seed; |z| < 4 in both degrees fails by chance for fewer than one seed in 1,000.
    for ours, reference in zip(floors(32, "queries"), floors(32, "contexts"), strict=True):
        assert abs(ours.value - reference.value) < 4 * math.hypot(ours.stderr, reference.stderr)


def test_unknown_method():
    with pytest.raises(DomainError, match=r"^method must be .* got 'tokens'$"):
        floors(32, "tokens")
