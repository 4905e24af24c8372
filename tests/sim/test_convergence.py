"""The convergence rule: neither noise nor the initial plateau triggers it, and what has settled does."""

from __future__ import annotations

import numpy as np
import pytest

from sim.convergence import Convergence, has_converged, window_mean
from sim.streams import stream
from theory.results import DomainError

RULE = Convergence(window=400, tolerance=0.02, fall=0.9)
REFERENCE = np.array([1.0])


def windows(level: float, change: float, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = stream(seed, "windows")
    drawn = level + noise * generator.standard_normal((2, RULE.window, 1))
    return drawn[0] + change, drawn[1]


def test_a_settled_loss_converges() -> None:
    assert has_converged(*windows(0.3, 0.0, 0.01), REFERENCE, RULE)


@pytest.mark.parametrize("level", [1.0, 0.99, 0.9])
def test_the_plateau_does_not(level: float) -> None:
    assert not has_converged(*windows(level, 0.0, 0.0), REFERENCE, RULE)
    assert not has_converged(*windows(level, 0.0, 0.01), REFERENCE, RULE)


def test_a_loss_that_still_falls_or_rises_does_not() -> None:
    for change in (0.02, -0.02):
        assert not has_converged(*windows(0.3, change, 0.001), REFERENCE, RULE)


def test_noise_never_hides_a_change() -> None:
    # The standard error of each window is 0.005, most of the allowed change of 0.006.
    for seed in range(20):
        assert not has_converged(*windows(0.3, 0.0, 0.1, seed), REFERENCE, RULE)


def test_every_member_must_have_settled() -> None:
    settled, plateau = windows(0.3, 0.0, 0.01), windows(1.0, 0.0, 0.01)
    both = tuple(np.concatenate(pair, axis=1) for pair in zip(settled, plateau, strict=True))
    assert has_converged(*settled, REFERENCE, RULE)
    assert not has_converged(*both, np.array([1.0, 1.0]), RULE)


def test_window_errors_are_those_of_a_mean() -> None:
    losses = stream(1, "errors").standard_normal((4000, 3))
    mean, error = window_mean(losses)
    assert mean == pytest.approx(losses.mean(axis=0), rel=1e-12)
    # 19 degrees of freedom: a standard error off by half has probability below 1e-3.
    assert error == pytest.approx(1 / np.sqrt(4000), rel=0.5)


@pytest.mark.parametrize(
    ("name", "value"), [("window", 19), ("window", 40.5), ("tolerance", 0), ("tolerance", 2), ("fall", 0)]
)
def test_rules_are_validated(name: str, value: float) -> None:
    with pytest.raises(DomainError, match=name):
        Convergence(**{name: value})
