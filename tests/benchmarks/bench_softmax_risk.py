"""The exact softmax risk against sampling: agreement at a relative error of 1e-4, and the speed of both.

Run: make bench.
"""

import time

import numpy as np

from sim.montecarlo.kernels.softmax_risk import softmax_risk_chunk
from sim.montecarlo.regression import AttentionHeads, regression_risks
from sim.montecarlo.softmax_risk import MAX_LANES, softmax_risk_comparison, softmax_risk_estimate
from sim.streams import stream
from tests import naive
from tests.sim.test_softmax_risk import PAPER, POINTS
from theory.multihead.softmax_risk import softmax_risk, softmax_risks
from theory.problems import RegressionTask


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
    """Best of several, in milliseconds of one core, and as ratios to sampling and to two heads at the trained scale."""
    heads = (([0.1267, -0.1267], [3.5, -3.5]), ([0.5, -0.5], [2.0, -2.0]), ([1.0, -1.0], [2.0, -2.0]))
    heads += (([2.0, -2.0], [2.0, -2.0]), ([0.5, -0.4, 0.3, 0.1], [1, -1, 1, -1]))
    first = None
    for omega, mu in heads:
        plain = best_seconds(lambda w=omega, m=mu: softmax_risks(PAPER, w, m))
        stated = best_seconds(lambda w=omega, m=mu: softmax_risk(PAPER, w, m))
        first = first or plain
        started = time.perf_counter()
        softmax_risk_estimate(PAPER, omega, mu, relative_error=1e-3, seed=1, workers=1)
        ratio = (time.perf_counter() - started) / plain
        print(
            f"\nexact risk at omega {omega}: {plain * 1e3:.1f} ms, {stated * 1e3:.1f} ms with its tolerance, "
            f"{plain / first:.1f} times the first, {ratio:.0f} times faster than sampling to 0.1 %"
        )
        assert stated < 4 * plain
        assert ratio > 1


def test_steep_slopes_cost_no_more_than_gentle_ones():
    task = RegressionTask(1000, 40, 0.1)
    gentle, steep = (best_seconds(lambda w=w: softmax_risks(task, [w, 0.9 * w], [1.0, 1.0])) for w in (0.1, 3.0))
    print(f"\ntwo heads of one sign at dim 1000: {gentle * 1e3:.0f} ms at omega 0.1, {steep * 1e3:.0f} ms at 3")
    assert steep < 5 * gentle


def best_seconds(function, repeats=5):
    """Least time of several runs: others on the machine only add to it."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def test_speed_of_the_reduced_kernel():
    # Two opposite heads at the paper's size, one core; the control variate is part of the time.
    omega, mu = np.array([0.1267, -0.1267]), np.array([[3.5006, -3.5006]])
    contexts = 2**17
    arguments = (contexts, MAX_LANES, PAPER.dim, PAPER.context, PAPER.noise, omega, mu)
    softmax_risk_chunk(stream(1, "bench"), *arguments)
    normals = stream(1, "bench")
    seconds = best_seconds(lambda: softmax_risk_chunk(stream(1, "bench"), *arguments))
    drawing = best_seconds(lambda: normals.standard_normal(contexts * PAPER.context))
    speed = contexts / seconds
    print(
        f"\nreduced kernel: {speed:.2e} contexts/s on one core, {1e9 / speed:.0f} ns per context; "
        f"NumPy alone needs {1e9 * drawing / contexts:.0f} ns to draw its {PAPER.context} normals"
    )
    # Neighbours on the machine slow both alike: undisturbed, NumPy's draw takes 460 ns or 2.2e6 contexts/s.
    assert speed > 2e6 or seconds < 1.05 * drawing


def test_reduced_kernel_against_whole_contexts():
    omega, mu = np.array([0.1267, -0.1267]), np.array([3.5006, -3.5006])

    def reduced():
        return softmax_risk_estimate(PAPER, omega, mu, relative_error=3e-5, seed=1, workers=1)

    estimate = reduced()
    reduced_seconds = best_seconds(reduced, 3)
    losses = naive.softmax_regression_losses(stream(1, "bench"), 50_000, 5, 40, 0.1, omega, mu)
    whole_seconds = best_seconds(
        lambda: naive.softmax_regression_losses(stream(1, "bench"), 50_000, 5, 40, 0.1, omega, mu), 3
    )
    whole = losses.var(ddof=1) / losses.size * whole_seconds
    ratio = whole / (estimate.stderr**2 * reduced_seconds)
    variance = estimate.stderr**2 * estimate.samples
    print(
        f"\nreduced and controlled: {estimate.samples / reduced_seconds:.2e} contexts/s on one core in all, "
        f"variance per context {variance:.2e} (whole contexts with sampled labels {losses.var(ddof=1):.2e}), "
        f"{ratio:.0f} times less variance x time than whole contexts in NumPy"
    )
    assert ratio > 50


def test_differences_on_common_contexts():
    settings = {
        "trained": ([0.1267, -0.1267], [3.5006, -3.5006]),
        "best": ([0.0712457, -0.0712457], [6.17547, -6.17547]),
    }
    sample = softmax_risk_comparison(PAPER, settings, relative_error=1e-4, seed=2, workers=1)
    difference = sample.difference("trained", "best")
    exact = softmax_risk(PAPER, *settings["trained"]).value - softmax_risk(PAPER, *settings["best"]).value
    apart = np.hypot(sample.estimate("trained").stderr, sample.estimate("best").stderr)
    predictors = {name: AttentionHeads(*heads) for name, heads in settings.items()}
    whole = regression_risks(PAPER, predictors, relative_error=2e-3, seed=2, workers=1)
    common = whole.difference("trained", "best")
    separate = np.hypot(whole.estimate("trained").stderr, whole.estimate("best").stderr)
    print(
        f"\ndifference of two settings: exact {exact:.3e}, sampled {difference.value:.3e} +- {difference.stderr:.1e} "
        f"(from separate errors +- {apart:.1e}); on whole contexts {common.value:.2e} +- {common.stderr:.1e}, "
        f"{(separate / common.stderr) ** 2:.0f} times less variance than from separate contexts"
    )
    assert abs(difference.z_score(exact)) < 4.5
    assert common.stderr < separate / 5
