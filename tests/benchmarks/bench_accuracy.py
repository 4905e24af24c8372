"""Accuracy over the whole range that the documentation promises; the test suite holds a part of it. Run: make bench."""

import itertools

import mpmath
import numpy as np

from tests.theory.reference import free_risks, power_law
from theory.depth import free_polynomial, repeated_update
from theory.problems import ArraySpectrum, PowerLawSpectrum

VISIBLE = 1e-25


def test_finite_free_risk_over_the_whole_range():
    worst, worst_hidden = 0.0, 0.0
    for a, b, dim in itertools.product((0.5, 1, 1.5, 2), (0.5, 1, 2), (16, 64, 128, 512)):
        depth = min(64, dim - 1)
        exact = np.array(free_risks(power_law(a, dim), power_law(b, dim), depth))
        ours = free_polynomial.finite_risk(PowerLawSpectrum(a, b, dim), np.arange(depth + 1))
        errors = np.abs(ours / exact - 1)
        worst = max(worst, errors[exact > VISIBLE].max())
        worst_hidden = max(worst_hidden, errors.max())
    print(
        f"\nfree risk, dim 16-512, depth to 64: worst relative error {worst:.1e} above 1e-25, {worst_hidden:.1e} at all"
    )
    assert worst < 1e-12


def test_compressed_free_risk_against_refinement():
    worst, depths = 0.0, np.arange(1, 129)
    for a, b in itertools.product((0.2, 0.5, 1, 2, 4), (0.5, 1, 2)):
        spectrum = PowerLawSpectrum(a, b, 10**12)
        coarse, fine = (free_polynomial.finite_risk(spectrum, depths, leading_modes=m) for m in (1024, 4000))
        worst = max(worst, np.abs(coarse / fine - 1)[fine > VISIBLE].max())
    print(f"\nfree risk at dim 10^12, depth 1-128: worst relative change under refinement {worst:.1e}")
    assert worst < 1e-10


def test_compressed_free_risk_against_direct_sums():
    k, depths, worst = np.arange(1, 10**6 + 1.0), [1, 2, 8, 16], 0.0
    for a, b in ((2, 1), (0.5, 2)):
        direct = ArraySpectrum(tuple(k**-a), tuple(k**-b))
        compressed = free_polynomial.finite_risk(PowerLawSpectrum(a, b, 10**6), depths)
        worst = max(worst, np.abs(compressed / free_polynomial.finite_risk(direct, depths) - 1).max())
    print(f"\nfree risk at dim 10^6 against all modes, depth 1-16: worst relative difference {worst:.1e}")
    assert worst < 1e-10


def test_continuum_risks_over_the_whole_range():
    worst = {"free": 0.0, "repeated": 0.0}
    zetas = np.concatenate([np.linspace(0.051, 1, 7), np.linspace(1.3, 19.99, 9)])
    for zeta, depth in itertools.product(zetas, (1, 2, 3, 7, 31, 100, 1001, 10**5, 10**7, 10**9)):
        spectrum = PowerLawSpectrum(1, zeta)
        with mpmath.workdps(60):
            z = mpmath.mpf(spectrum.zeta)
            exact = {
                "free": z * (mpmath.gamma(z) / mpmath.rf(mpmath.mpf(depth + 1), z)) ** 2,
                "repeated": mpmath.beta(z, 2 * depth + 1),
            }
            ours = {
                "free": float(free_polynomial.continuum_risk(spectrum, depth)),
                "repeated": float(repeated_update.continuum_risk(spectrum, depth)),
            }
            for family, value in exact.items():
                if value > 1e-290:
                    worst[family] = max(worst[family], float(abs(ours[family] / value - 1)))
    print("\ncontinuum risks, zeta 0.05-20, depth 1-10^9: worst relative error", worst)
    assert max(worst.values()) < 1e-14
