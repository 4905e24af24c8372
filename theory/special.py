"""Scalar helpers of general use: ratios of Gamma functions, sums of powers, integrals over order statistics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import betainc, betaln, log_ndtr, ndtri_exp, zeta, zetac

from theory.problems import as_integer, as_real
from theory.results import Certified, DomainError, FloatArray, PrecisionError

# Bernoulli numbers B_{2j}/(2j(2j-1)) of Stirling's series; eight terms leave 1e-18 at z = 12.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
_STIRLING_FROM = 12.0
# Bernoulli numbers B_{2j}/(2j)! of the Euler-Maclaurin formula; enough for 16 digits from k = 64.
_EULER_MACLAURIN = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160)
_DIRECT_TERMS = 64
# Trapezoid rule over order statistics: first step and largest number of halvings.
_FIRST_STEP = 0.5
_MAX_HALVINGS = 7
# Two successive trapezoid sums that agree to this relative error have converged: the error of the finer one is
# about the square of their difference, and rounding adds less than 1e-13.
_TRAPEZOID_AGREEMENT = 1e-11
_ROUNDING = 1e-13


def gamma_ratio(argument: npt.ArrayLike, shift: npt.ArrayLike) -> FloatArray:
    r"""Ratio :math:`\Gamma(z + s)/\Gamma(z)`, the rising factorial, to 15 digits for 0 <= s <= 40.

    argument: z > 0, shape (...); shift: s >= 0, broadcast. Small z is shifted up by the recurrence of Gamma; then
    Stirling's series of both factors is subtracted before exponentiating, with :math:`(z+s)^s` taken as one power, so
    nothing cancels however large z is (differences of ``gammaln`` lose all digits, ``scipy.special.poch`` four).
    Source: used by depth (38), (39); reference Abramowitz and Stegun 6.1.41. Raises DomainError outside the domain.
    """
    z, s = np.broadcast_arrays(np.asarray(argument, dtype=np.float64), np.asarray(shift, dtype=np.float64))
    if not ((z > 0) & np.isfinite(z)).all() or not ((s >= 0) & np.isfinite(s)).all():
        raise DomainError("gamma_ratio needs finite argument > 0 and shift >= 0")
    ratio = np.ones(z.shape)
    z = z.copy()
    for _ in range(int(_STIRLING_FROM)):
        small = z < _STIRLING_FROM
        ratio = np.where(small, ratio * (z / (z + s)), ratio)
        z = np.where(small, z + 1, z)
    total = z + s
    lost = (z - total) + s  # what rounding of z + s dropped, to first order
    power = total**s * (1 + s * lost / total)
    correction = _log1p_minus_x(s / z) * (z - 0.5) - s / (2 * z) + _stirling_tail(total) - _stirling_tail(z)
    return np.asarray(ratio * power * np.exp(correction))


def _log1p_minus_x(x: FloatArray) -> FloatArray:
    """log(1+x) - x without cancellation at small x, by the series of atanh(x/(2+x))."""
    y = x / (2 + x)
    square = y * y
    series = np.zeros_like(y)
    for power in range(23, 1, -2):
        series = (series + 1 / power) * square
    return np.asarray(np.where(x > 0.5, np.log1p(x) - x, y * (2 * series - x)))


def _stirling_tail(z: FloatArray) -> FloatArray:
    """Stirling's series of log Gamma beyond (z - 1/2) log z - z + log(2 pi)/2, for z >= 12."""
    inverse = 1 / z
    tail = np.zeros_like(z)
    for coefficient in reversed(_STIRLING):
        tail = tail * inverse * inverse + coefficient
    return tail * inverse


def power_sum(exponent: float, terms: int | None) -> float:
    r"""Sum :math:`\sum_{k=1}^{n} k^{-s}` to 14 digits for any s >= 0 and n up to 10^18, or n infinite.

    exponent: s >= 0; terms: n, or ``None`` for infinity, which needs s > 1. Direct up to 64 terms, then
    Euler-Maclaurin; s = 1 needs no special case. Source: traces tr Omega, tr Sigma^m of depth (45), (50) for the
    power laws (2). Raises DomainError where the sum diverges.
    """
    s = as_real("exponent", exponent, 0, 1e4)
    if terms is None:
        if s <= 1:
            raise DomainError(f"exponent must be > 1 for an infinite sum of powers, got {s:g}")
        return float(zeta(s)) if s < 50 else 1.0 + float(zetac(s))
    n = as_integer("terms", terms, 1)
    direct = min(n, _DIRECT_TERMS)
    head = float(np.sum(np.arange(direct, 0, -1, dtype=np.float64) ** -s))
    if n == direct:
        return head
    low, high = float(direct), float(n)
    middle = low ** (1 - s) * _power_integral(1 - s, np.log(high / low))
    return float(head + middle + (_end_correction(s, high) - _end_correction(s, low)))


def _power_integral(exponent: float, log_ratio: float) -> float:
    """Integral of x^(exponent - 1) from 1 to exp(log_ratio), also at exponent 0."""
    product = exponent * log_ratio
    return float(np.expm1(product) / exponent) if abs(product) > 1e-290 else log_ratio


def _end_correction(s: float, k: float) -> float:
    """Euler-Maclaurin boundary terms of the sum of k^-s at the end point k (half of the end term included)."""
    total: float = 0.5 * k**-s
    term = -s * k ** (-s - 1)
    for order, bernoulli in enumerate(_EULER_MACLAURIN):
        total += bernoulli * term
        term *= (s + 2 * order + 1) * (s + 2 * order + 2) / k**2
    return total


def mean_over_order_statistic(function: Callable[[FloatArray], FloatArray], samples: int, rank: int) -> Certified:
    r"""Mean of ``function(log v)`` where v is the ``rank``-th smallest of ``samples`` uniform variables.

    .. math:: \int_0^1 f(v)\, \frac{v^{r-1} (1-v)^{n-r}}{B(r, n-r+1)}\, dv

    function: takes log v, shape (m,), and returns f, shape (m,), of at most polynomial growth in log v. The variable
    u = log(v/(1-v)) makes the integrand decay exponentially on both sides, where the trapezoid rule converges
    geometrically; the step is halved until two sums agree.
    Source: order statistics of depth (45) and of the isotropic floor (beyond the paper). Raises
    PrecisionError where the sums do not settle.
    """
    n = as_integer("samples", samples, 1)
    r = as_integer("rank", rank, 1, n)
    # Beyond these points the density has fallen below exp(-45) of its peak on either side.
    centre, spread = np.log(r / (n + 1 - r)), np.sqrt(1 / r + 1 / (n + 1 - r))
    low, high = centre - 12 * spread - 45 / r, centre + 12 * spread + 45 / (n + 1 - r)
    log_norm = betaln(r, n - r + 1)
    step = _FIRST_STEP * spread
    previous = np.inf
    for _ in range(_MAX_HALVINGS):
        u = np.arange(low, high + step, step)
        log_v, log_rest = -np.logaddexp(0, -u), -np.logaddexp(0, u)
        with np.errstate(over="ignore", invalid="ignore"):  # ends in a value that never settles
            weight = np.exp(r * log_v + (n - r + 1) * log_rest - log_norm)
            # Dividing by the sum of weights removes the rounding error of log_norm.
            value = float(np.sum(weight * function(log_v)) / np.sum(weight))
        if abs(value - previous) <= _TRAPEZOID_AGREEMENT * abs(value):
            return Certified(value, (_ROUNDING + _TRAPEZOID_AGREEMENT**1.5) * abs(value) + 1e-300)
        previous, step = value, step / 2
    raise PrecisionError(
        f"the mean over order statistic {r} of {n} did not settle to {_TRAPEZOID_AGREEMENT:g}, got {previous!r}"
    )


def normal_top_mean(samples: int, top: int) -> Certified:
    r"""Expected mean of the ``top`` largest of ``samples`` standard normals, :math:`\gamma_{P,k}`.

    Given the (k+1)-th largest value z, the k largest are independent draws from the tail beyond z, whose mean is
    :math:`\varphi(z)/(1 - \Phi(z))`; that is averaged over z. Zero where all are taken. Relative error 1e-12 up to
    n = 10^9. Source: depth (45). Raises DomainError where top > samples.
    """
    n = as_integer("samples", samples, 1)
    k = as_integer("top", top, 1, n)
    if k == n:
        return Certified(0.0, 0.0)

    def tail_mean(log_v: FloatArray) -> FloatArray:
        z = -np.asarray(ndtri_exp(log_v))
        return np.asarray(np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_ndtr(-z)))

    return mean_over_order_statistic(tail_mean, n, k + 1)


def chi_mean(dim: float) -> float:
    r"""Mean length of a standard normal vector, :math:`\sqrt2\, \Gamma((d+1)/2)/\Gamma(d/2)`.

    dim: d > 0. Source: lengths in the isotropic floor (beyond the paper).
    """
    return float(np.sqrt(2) * gamma_ratio(dim / 2, 0.5))


def cosine_upper_tail(cosine: npt.ArrayLike, dim: int) -> FloatArray:
    r"""Probability that a uniform direction in dim >= 2 has a cosine above ``cosine`` with a fixed one.

    .. math:: P(C > c) = \tfrac12 I_{1-c^2}\big(\tfrac{d-1}{2}, \tfrac12\big), \quad c \ge 0

    Source: isotropic floor (beyond the paper). Raises DomainError where dim < 2 or a cosine leaves
    [-1, 1].
    """
    d = as_integer("dim", dim, 2)
    c = np.asarray(cosine, dtype=np.float64)
    if not (np.abs(c) <= 1).all():
        raise DomainError("cosine must lie in [-1, 1]")
    half = 0.5 * betainc((d - 1) / 2, 0.5, (1 - c) * (1 + c))
    return np.asarray(np.where(c >= 0, half, 1 - half))


def log_cosine_constant(dim: int) -> float:
    r"""Logarithm of the constant of the cosine's density on a sphere in ``dim`` >= 2 dimensions.

    .. math:: p(c) = c_d\,(1-c^2)^{(d-3)/2}, \qquad c_d = \frac{\Gamma(d/2)}{\Gamma((d-1)/2)\,\sqrt\pi}

    Source: isotropic floor (beyond the paper). Raises DomainError where dim < 2.
    """
    d = as_integer("dim", dim, 2)
    # A difference of logarithms of Gamma functions would lose all digits by dim 1e16.
    return float(np.log(gamma_ratio((d - 1) / 2, 0.5)) - 0.5 * np.log(np.pi))
