"""The exact softmax risk against sampling: agreement at a relative error of 1e-4, and speed. Run: make bench."""

import time

import numpy as np

from sim.montecarlo.softmax_risk import softmax_risk_estimate
from sim.streams import stream
from tests import naive
from tests.sim.test_softmax_risk import PAPER, POINTS
from theory.multihead.softmax_risk import softmax_risk, softmax_risks


def test_six_points_at_1e_4():
    for task, omega, mu in POINTS:
        exact = softmax_risk(task, omega, mu)
        estimate = softmax_risk_estimate(task, omega, mu, relative_error=1e-4, seed=9)
        z = estimate.z_score(exact.value)
        print(
            f"\ndim {task.dim}, context {task.context}, omega {omega}: exact {exact.value:.10f}, "
            f"sampled {estimate.value:.6f} +- {estimate.stderr:.1e}, z = {z:.2f}"
        )
        assert abs(z) < 4


def test_speed_of_the_exact_risk():
    heads = (([0.1267, -0.1267], [3.5, -3.5]), ([0.5, -0.5], [2.0, -2.0]), ([0.5, -0.4, 0.3, 0.1], [1, -1, 1, -1]))
    for omega, mu in heads:
        softmax_risks(PAPER, omega, mu)
        started = time.perf_counter()
        for _ in range(5):
            softmax_risks(PAPER, omega, mu)
        exact_seconds = (time.perf_counter() - started) / 5
        started = time.perf_counter()
        softmax_risk_estimate(PAPER, omega, mu, relative_error=1e-3, seed=1, workers=1)
        ratio = (time.perf_counter() - started) / exact_seconds
        print(
            f"\nexact risk at omega {omega}: {exact_seconds * 1e3:.1f} ms, "
            f"{ratio:.0f} times faster than sampling to 0.1 %"
        )
        assert ratio > 1


def test_reduced_kernel_against_whole_contexts():
    omega, mu = np.array([0.1267, -0.1267]), np.array([3.5006, -3.5006])
    softmax_risk_estimate(PAPER, omega, mu, relative_error=0.5, seed=1, workers=1)
    started = time.perf_counter()
    reduced = softmax_risk_estimate(PAPER, omega, mu, relative_error=1e-3, seed=1, workers=1)
    reduced_seconds = time.perf_counter() - started
    started = time.perf_counter()
    losses = naive.softmax_regression_losses(stream(1, "bench"), 50_000, 5, 40, 0.1, omega, mu)
    whole_seconds = time.perf_counter() - started
    whole = losses.var(ddof=1) / losses.size * whole_seconds
    ratio = whole / (reduced.stderr**2 * reduced_seconds)
    print(
        f"\nreduced kernel: {reduced.samples / reduced_seconds:.2e} contexts/s on one core, {ratio:.0f} times less ",
        end="",
    )
    print("variance x time than whole contexts in NumPy")
    assert ratio > 50
