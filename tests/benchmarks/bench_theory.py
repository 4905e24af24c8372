"""Speed of the theory as ratios against a baseline timed in the same run. Run: make bench."""

import subprocess
import sys
import time

import numpy as np

from theory.depth import free_polynomial
from theory.problems import ArraySpectrum, PowerLawSpectrum


def seconds(call, repeats=3):
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def report(name, ours, baseline, what):
    print(f"\n{name}: {ours:.3g} s, {baseline / ours:.3g} times faster than {what} ({baseline:.3g} s)")


def fresh(dim):
    """A spectrum that no earlier call has cached."""
    fresh.calls += 1
    return PowerLawSpectrum(2, 1, dim, 1 + fresh.calls * 1e-9)


fresh.calls = 0


def test_compressed_spectrum_against_all_modes():
    k = np.arange(1, 10**6 + 1.0)
    every_mode = ArraySpectrum(tuple(k**-2.0), tuple(k**-1.0))
    baseline = seconds(lambda: free_polynomial.finite_risk(every_mode, 8), repeats=1)
    ours = seconds(lambda: free_polynomial.finite_risk(fresh(10**6), 8))
    report("free risk at dim 10^6, depth 8", ours, baseline, "the sum over all modes")
    assert baseline > 20 * ours


def test_cost_does_not_grow_with_dim():
    depths = np.arange(1, 129)
    small = seconds(lambda: free_polynomial.finite_risk(fresh(5000), depths))
    large = seconds(lambda: free_polynomial.finite_risk(fresh(10**12), depths))
    report("free risk at dim 10^12, depths 1-128", large, small, "the same at dim 5,000")
    assert large < 10 * small


def test_command_start():
    def run(*arguments):
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    command = "import sys; sys.argv = ['attnlaws', *sys.argv[1:]]; from validate.cli import main; main()"
    python = seconds(lambda: run("-c", "import numpy"))
    for arguments in (["--help"], ["exponent", "-a", "2", "-b", "1", "--dim", "128"]):
        ours = seconds(lambda a=arguments: run("-c", command, *a))
        report(f"attnlaws {arguments[0]}", ours, python, "starting Python and NumPy")
        assert ours < 12 * python
