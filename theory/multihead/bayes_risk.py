r"""Bayes risk of in-context linear regression, exactly at finite size, in the proportional limit, and its bounds.

The posterior mean is a ridge predictor; with W the Wishart matrix of L tokens in d dimensions its risk, against the
noisy label, is

.. math:: \sigma^2\big(1 + E\operatorname{tr}(W + d\sigma^2 I)^{-1}\big).

The mean of the trace comes from de Bruijn's Pfaffian of the real Laguerre ensemble: with N = min(d, L) the
eigenvalues t² have the density :math:`\prod_{i<j}|t_i^2-t_j^2|\prod_i t_i^{|L-d|}e^{-t_i^2/2}`, and a linear statistic
is half the trace of an inverse skew matrix times a derivative, both made of one-dimensional integrals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from theory.multihead.gradient_descent import debiased_step
from theory.problems import RegressionTask
from theory.results import Certified, DomainError, FloatArray

# Beyond this many eigenvalues the first Laguerre function underflows where the last is still large.
MAX_EIGENVALUES = 300
# Beyond this size the exponents of Laguerre functions, of the order of it, are all rounding.
MAX_LARGER_SIZE = 10**17
# Gauss-Legendre nodes on each panel and panels per oscillation of the highest function.
_PANEL_NODES = 16
_PANELS_PER_WAVE = 0.6
# Functions are integrated until their logarithm has fallen by this much beyond the turning points.
_DECAY = 45.0
# Rounding of the linear algebra, relative, found by comparing panel counts and parities up to dimension 300.
_ROUNDING = 2e-14


def bayes_risk(task: RegressionTask) -> Certified:
    r"""Exact Bayes risk at finite dimension and context, to 12 digits.

    task: isotropic, with min(dim, context) <= 300 and max(dim, context) <= 1e17; noise >= 0 (at noise 0 the risk is
    (1 - L/d)_+). For L < d the W of the transpose is used, plus (d-L)/(dσ²) for its null space. The tolerance is the
    change on refining the panels, plus rounding. Source: beyond the paper; the risk that multihead Theorem 4.2 (iii)
    compares with.
    Raises DomainError where the covariance is not the identity or a size is out of range.
    """
    d, L, noise = _sizes(task)
    if noise == 0:
        return Certified(max(0.0, 1 - L / d), 0.0)
    coarse, fine = (_resolvent_mean(d, L, d * noise, panels) for panels in (1.0, 1.5))
    null = max(0, d - L) / d
    value = noise + null + noise * fine
    return Certified(value, noise * abs(fine - coarse) + _ROUNDING * value)


def _sizes(task: RegressionTask) -> tuple[int, int, float]:
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for the Bayes risk, got a matrix")
    if min(task.dim, task.context) > MAX_EIGENVALUES:
        raise DomainError(
            f"min(dim, context) must be at most {MAX_EIGENVALUES} for the exact Bayes risk, got "
            f"{min(task.dim, task.context)}; see bayes_risk_limit"
        )
    if max(task.dim, task.context) > MAX_LARGER_SIZE:
        raise DomainError(
            f"max(dim, context) must be at most {MAX_LARGER_SIZE:.0e} for the exact Bayes risk, got "
            f"{max(task.dim, task.context)}; see bayes_risk_limit"
        )
    return task.dim, task.context, task.noise


def _resolvent_mean(d: int, L: int, s: float, panels: float) -> float:
    r"""Mean of :math:`\sum 1/(t^2+s)` over the N = min(d, L) non-zero eigenvalues t² of the Wishart matrix.

    With :math:`\psi_j(t) = \int\mathrm{sgn}(t'-t)\varphi_j(t')dt'`: A_ij = ∫φ_iψ_j, B_ij = ∫gφ_iψ_j, tr A^-1 B;
    for odd N both get one more column of plain integrals (de Bruijn 1955).
    """
    N, alpha = min(d, L), abs(L - d)
    edges = _panel_edges(N, alpha, s, panels)
    t, weight, antiderivative = _panels(edges)
    phi = _laguerre_functions(N, alpha, t)
    total = phi @ weight
    psi = total[:, np.newaxis] - 2 * _integrate(phi, antiderivative, len(edges) - 1)
    A = (phi * weight) @ psi.T
    B = (phi * (weight / (t * t + s))) @ psi.T
    if N % 2:
        A = np.block([[A, total[:, np.newaxis]], [-total[np.newaxis], np.zeros((1, 1))]])
        column = phi @ (weight / (t * t + s))
        B = np.block([[B, column[:, np.newaxis]], [np.zeros((1, N + 1))]])
    A = (A - A.T) / 2
    return float(np.trace(np.linalg.solve(A, B)))


def _panel_edges(N: int, alpha: int, s: float, panels: float) -> FloatArray:
    """Panel edges over the range of the functions, graded towards 0 where 1/(t²+s) peaks within reach."""
    # x = t² lies between the turning points of the N-th Laguerre function, and a little beyond.
    centre, spread = 2 * N + alpha, 2 * np.sqrt(N * (N + alpha))
    low = max(0.0, np.sqrt(max(0.0, centre - spread)) - np.sqrt(2 * _DECAY))
    high = np.sqrt(centre + spread) + np.sqrt(2 * _DECAY)
    count = int(np.ceil(panels * (8 + _PANELS_PER_WAVE * N)))
    edges = np.linspace(low, high, count + 1)
    pole = np.sqrt(s)
    if low < 4 * pole and pole < edges[1]:
        graded = [edges[1]]
        while graded[-1] > max(pole / 2, 1e-160) and graded[-1] > low:
            graded.append(graded[-1] / 2)
        inner = [edge for edge in reversed(graded[1:]) if edge > low]
        edges = np.concatenate([[low], inner, edges[1:]])
    return edges


def _panels(edges: FloatArray) -> tuple[FloatArray, FloatArray, tuple[FloatArray, FloatArray]]:
    """Nodes and weights of all panels, and what is needed for integrals from the left end to each node."""
    x, w = np.polynomial.legendre.leggauss(_PANEL_NODES)
    half = np.diff(edges) / 2
    t = (edges[:-1] + half)[:, np.newaxis] + half[:, np.newaxis] * x
    weight = half[:, np.newaxis] * w
    # Integral of the interpolant from -1 to each node: Legendre coefficients, integrated term by term.
    n = np.arange(_PANEL_NODES)
    to_coefficients = (n[:, np.newaxis] + 0.5) * w * np.polynomial.legendre.legvander(x, _PANEL_NODES - 1).T
    integrals = np.polynomial.legendre.legint(np.eye(_PANEL_NODES), lbnd=-1)
    cumulative = np.polynomial.legendre.legvander(x, _PANEL_NODES) @ integrals @ to_coefficients
    return t.ravel(), weight.ravel(), (half, cumulative)


def _integrate(values: FloatArray, rule: tuple[FloatArray, FloatArray], panels: int) -> FloatArray:
    """Integrals from the left end to every node, along the last axis."""
    half, cumulative = rule
    blocks = values.reshape(len(values), panels, _PANEL_NODES)
    _, w = np.polynomial.legendre.leggauss(_PANEL_NODES)
    whole = (blocks @ w) * half
    before = np.cumsum(whole, axis=1) - whole
    return (before[:, :, np.newaxis] + (blocks @ cumulative.T) * half[:, np.newaxis]).reshape(values.shape)


def _laguerre_functions(N: int, alpha: int, t: FloatArray) -> FloatArray:
    r"""Orthonormal :math:`\varphi_n(t) \propto L_n^{(\alpha-1/2)}(t^2)\,t^\alpha e^{-t^2/2}`, shape (N, m)."""
    a, x = alpha - 0.5, t * t
    with np.errstate(divide="ignore"):
        first = np.exp(alpha * np.log(t) - x / 2 + (np.log(2) - gammaln(a + 1)) / 2)
    phi = np.empty((N, t.size))
    phi[0] = first
    previous = np.zeros_like(first)
    for n in range(N - 1):
        beta, following = np.sqrt(n * (n + a)) if n else 0.0, np.sqrt((n + 1) * (n + 1 + a))
        # x φ_n = -following φ_{n+1} + (2n+1+a) φ_n - beta φ_{n-1}; signs do not matter, so both are made positive.
        phi[n + 1] = ((x - (2 * n + 1 + a)) * phi[n] - beta * previous) / following
        previous = phi[n]
    return phi


def bayes_risk_limit(ratio: npt.ArrayLike, noise: npt.ArrayLike) -> FloatArray:
    r"""Bayes risk in the proportional limit d/L → ξ, shape of the broadcast arguments.

    .. math:: \sigma^2 + \frac{\sqrt{b^2+4\xi^2\sigma^2} - b}{2\xi}, \qquad b = 1-\xi+\xi\sigma^2

    ratio: ξ > 0, above 1 too; noise: σ² >= 0. Evaluated in the conjugate form
    :math:`2\xi\sigma^2/(b+\sqrt{b^2+4\xi^2\sigma^2})` where b > 0, so that no digit is lost down to σ² = 0.
    Source: limit in multihead Theorem 4.2 (iii). Raises DomainError where ξ <= 0 or σ² < 0.
    """
    xi, variance = _ratio_and_noise(ratio, noise)
    b = 1 - xi + xi * variance
    root = np.hypot(b, 2 * xi * np.sqrt(variance))
    positive = np.where(b > 0, b, 1.0)
    conjugate = 2 * xi * variance / (positive + np.hypot(positive, 2 * xi * np.sqrt(variance)))
    return np.asarray(variance + np.where(b > 0, conjugate, (root - b) / (2 * xi)))


def debiased_risk_limit(ratio: npt.ArrayLike, noise: npt.ArrayLike) -> FloatArray:
    r"""Limit of the risk of debiased descent at its best step, :math:`1+\sigma^2-(1+\xi(1+\sigma^2))^{-1}`.

    Source: numerator of multihead Theorem 4.2 (iii).
    """
    xi, variance = _ratio_and_noise(ratio, noise)
    return np.asarray(variance + xi * (1 + variance) / (1 + xi * (1 + variance)))


def paper_ratio_bound(ratio: npt.ArrayLike, noise: npt.ArrayLike) -> FloatArray:
    r"""Bound :math:`1 + \sigma^{-2}\{(1+\xi\sigma^2)(1+\sigma^2+\xi^{-1})\}^{-1}` on debiased over Bayes risk.

    ratio: ξ > 0; noise: σ² > 0, with σ² + 1/ξ > 1 in the paper; over wide ranges it holds without that, but in the
    proportional limit only: at finite size see `sharp_ratio_bound`. Source: multihead Theorem 4.2 (iii). Raises
    DomainError where noise is 0.
    """
    xi, variance = _ratio_and_noise(ratio, noise)
    _check_noisy(variance)
    return np.asarray(1 + 1 / (variance * (1 + xi * variance) * (1 + variance + 1 / xi)))


def sharp_ratio_bound(task: RegressionTask) -> float:
    r"""Bound on the ratio of debiased to Bayes risk at every d and L.

    .. math:: 1 + \frac{dL+L+d\sigma^2}{\sigma^2(L+d+d\sigma^2)^2}

    By Jensen, :math:`E\operatorname{tr}(W+sI)^{-1} \ge d/(L+s)`, and debiased descent at its best step is known
    exactly. In the limit it is :math:`1+\xi/(\sigma^2(1+\xi+\xi\sigma^2)^2)`, below the paper's bound.
    Source: beyond the paper. Raises DomainError where noise is 0.
    """
    d, L, noise = task.dim, task.context, task.noise
    if task.covariance is not None:
        raise DomainError("covariance must be None (isotropic tokens) for the ratio bound, got a matrix")
    _check_noisy(np.asarray(noise))
    return 1 + (d * L + L + d * noise) / (noise * (L + d + d * noise) ** 2)


def sharp_ratio_bound_limit(ratio: npt.ArrayLike, noise: npt.ArrayLike) -> FloatArray:
    r"""Proportional limit :math:`1+\xi/(\sigma^2(1+\xi+\xi\sigma^2)^2)` of `sharp_ratio_bound`.

    Source: beyond the paper. Raises DomainError where noise is 0.
    """
    xi, variance = _ratio_and_noise(ratio, noise)
    _check_noisy(variance)
    return np.asarray(1 + xi / (variance * (1 + xi + xi * variance) ** 2))


def debiased_bayes_ratio(task: RegressionTask) -> Certified:
    """Exact ratio of the risks of debiased descent at its best step and of Bayes, at finite size.

    Source: left-hand side of multihead Theorem 4.2 (iii) before the limit. Raises DomainError where the
    Bayes risk is zero.
    """
    bayes = bayes_risk(task)
    if bayes.value == 0:
        raise DomainError("noise must be > 0 where context >= dim, or the Bayes risk is zero, got 0.0")
    L = task.context
    risk = 1 + task.noise - (L - 1) / L * debiased_step(task)
    return Certified(risk / bayes.value, risk / bayes.value * (bayes.tolerance / bayes.value + 4e-16))


def _ratio_and_noise(ratio: npt.ArrayLike, noise: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    xi, variance = np.asarray(ratio, dtype=np.float64), np.asarray(noise, dtype=np.float64)
    if not (np.isfinite(xi) & (xi > 0)).all():
        raise DomainError(f"ratio must be finite and > 0, got {float(xi[~(np.isfinite(xi) & (xi > 0))][0])!r}")
    good = np.isfinite(variance) & (variance >= 0)
    if not good.all():
        raise DomainError(f"noise must be finite and >= 0, got {float(variance[~good][0])!r}")
    return xi, variance


def _check_noisy(variance: FloatArray) -> None:
    if not (variance > 0).all():
        raise DomainError("noise must be > 0 for a bound on the ratio to the Bayes risk, got 0.0")
