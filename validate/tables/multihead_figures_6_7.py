"""Multi-head Figures 6 and 7: the approximate loss beside the exact risk, and the step along descent. No training."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from theory.multihead.approximate_loss import approximate_loss
from theory.multihead.gradient_descent import debiased_step
from theory.multihead.gradient_flow import Trajectory
from theory.multihead.softmax_risk import risk_coefficients
from theory.results import FloatArray
from validate.figures.comparison import PAPER, THEORY
from validate.multihead_training import descend
from validate.tables.comparison import Agreement, Progress, Row, Table
from validate.trained.multihead import TASK, best_heads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_6, FIGURE_7 = "multihead:figure-6", "multihead:figure-7"
# "Good approximation when omega and mu are not too large", read as at most this part of the risk, in this corner.
GOOD = 0.1
SMALL_OMEGA, SMALL_MU = 0.2, 2.0
GRID = {"quick": 25, "paper": 61}
OMEGA_RANGE, MU_RANGE = (0.02, 0.8), (0.0, 7.0)
# Figure 7: rate as printed; the start is not printed.
RATE, STEPS, RECORD = 0.01, 5000, 25
START = ((0.1, -0.1), (0.1, -0.1))
# "Rapidly": within a fifth of the run; "approximately stable": within this of one from then on.
STABLE, RAPID = 0.05, 0.2


def landscapes(count: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """ω and μ, shape (n,), and exact and approximate risk of heads (ω, -ω), (μ, -μ), shape (n, n), μ on columns."""
    omega, mu = np.linspace(*OMEGA_RANGE, count), np.linspace(*MU_RANGE, count)
    exact = np.empty((count, count))
    signs = np.array([1.0, -1.0])
    for row, w in zip(exact, omega, strict=True):
        found = risk_coefficients(TASK, w * signs)
        row[:] = 1 + TASK.noise - 2 * mu * (found.linear @ signs) + mu**2 * (signs @ found.quadratic @ signs)
    W, M = np.meshgrid(omega, mu, indexing="ij")
    approximate = approximate_loss(TASK, W[..., None] * signs, M[..., None] * signs)
    return omega, mu, exact, approximate


def build_figure_6(profile: str, seed: int, progress: Progress) -> Table:
    """Reproduce Figure 6. profile: "quick" or "paper"; seed: not used, nothing is random. Source: multihead (4.1)."""
    started = time.perf_counter()
    omega, mu, exact, approximate = landscapes(GRID[profile])
    progress(1.0)
    best = best_heads(2)
    w, m = float(np.abs(best.omega).max()), float(np.abs(best.mu).max())
    rows = []
    # Single points at which the two can be read off, from small to beyond the valley.
    for at_omega, at_mu in ((0.05, 1.0), (0.1267, 3.5006), (w, m), (0.3, 1.5), (0.5, 2.0), (0.7, 4.0)):
        pair, weights = np.array([at_omega, -at_omega]), np.array([at_mu, -at_mu])
        found = risk_coefficients(TASK, pair)
        risk = float(1 + TASK.noise - 2 * found.linear @ weights + weights @ found.quadratic @ weights)
        value = float(approximate_loss(TASK, pair, weights))
        rows.append(
            Row({"omega": at_omega, "mu": at_mu}, "approximate loss over exact risk, minus 1", None,
                theory=value / risk - 1, theory_text=f"exact {risk:.5g}, approximate {value:.5g}")
        )  # fmt: skip
    corner = np.ix_(omega <= SMALL_OMEGA, mu <= SMALL_MU)
    worst = float(np.abs(approximate[corner] / exact[corner] - 1).max())
    rows.append(
        Row({"omega": SMALL_OMEGA, "mu": SMALL_MU}, "largest relative error up to there", None, theory=worst,
            theory_text=f"<= {GOOD:g}", agreement=Agreement.AGREES if worst <= GOOD else Agreement.DIFFERS,
            remark="the approximation is good where omega and mu are small, as the paper says")
    )  # fmt: skip
    valleys = exact.argmin(axis=1), approximate.argmin(axis=1)
    shift = float(np.abs(mu[valleys[0]] - mu[valleys[1]])[omega > SMALL_OMEGA].max())
    rows.append(
        Row({}, "largest distance of the valleys in mu, omega above 0.2", None, theory=shift,
            theory_text="grid step " + format(mu[1] - mu[0], ".2g"),
            remark="both landscapes have the valley 2 omega mu = const; only the exact one has a lowest point")
    )  # fmt: skip
    notes = (
        f"Exact risk and (4.1) for heads (omega, -omega), (mu, -mu). Lowest point of the exact risk: omega = {w:.4g}, "
        f"mu = {m:.4g}; (4.1) falls towards omega -> 0 for ever.",
        "(4.1) misses a part of the risk that does not vanish at small omega: along the valley it is 9 % too low.",
    )
    figure = partial(landscape_figure, omega, mu, exact, approximate, (w, m))
    return Table(FIGURE_6, "approximate loss and exact risk", tuple(rows), notes, figure,
                 time.perf_counter() - started, {"grid": GRID[profile]})  # fmt: skip


def landscape_figure(
    omega: FloatArray, mu: FloatArray, exact: FloatArray, approximate: FloatArray, lowest: tuple[float, float]
) -> Figure:
    """Difference, exact risk and approximate loss as maps over (ω, μ), with the exact optimum."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attnlaws", "font.size": 9})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
    levels = np.geomspace(min(exact.min(), approximate.min()), 10, 18)
    difference = np.clip(exact - approximate, -2, 2)
    _map(axes[0], omega, mu, difference, np.linspace(-2, 2, 21), "RdBu_r", "(a) exact minus approximate, cut at 2")
    for axis, values, title in ((axes[1], exact, "(b) exact risk"), (axes[2], approximate, "(c) approximate loss")):
        _map(axis, omega, mu, np.clip(values, None, 10), levels, "viridis", title)
        axis.plot(*lowest, "*", color=PAPER, ms=9)
        axis.plot(omega, np.clip(debiased_step(TASK) / (2 * omega), None, MU_RANGE[1]), ":", color="white", lw=1)
    return figure


def _map(axis: Axes, omega: FloatArray, mu: FloatArray, values: FloatArray, levels: FloatArray, colours: str,
         title: str) -> None:  # fmt: skip
    image = axis.contourf(omega, mu, values.T, levels=levels, cmap=colours)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("ω")
    axis.set_ylabel("μ")
    axis.figure.colorbar(image, ax=axis, format="%.2g")


def build_figure_7(profile: str, seed: int, progress: Progress) -> Table:
    """Reproduce Figure 7. profile: "quick" or "paper"; seed: not used. Source: multihead Figure 7, section 4.2."""
    started = time.perf_counter()
    factor = 1 / debiased_step(TASK)
    paths = {"approximate loss (4.1)": descend(TASK, *START, RATE, STEPS, objective="approximate", record=RECORD)}
    progress(0.3)
    paths["exact risk"] = descend(TASK, *START, 4 * RATE, STEPS // 10, objective="exact", record=5)
    rows = []
    for name, path in paths.items():
        scaled = factor * (path.omega * path.mu).sum(axis=1)
        stable = np.abs(scaled - 1) <= STABLE
        broken = np.flatnonzero(~stable)
        since = 0 if broken.size == 0 else min(int(broken[-1]) + 1, len(scaled) - 1)
        share = float(path.times[since] / path.times[-1])
        holds = share <= RAPID and bool(stable[-1])
        kind = "as printed" if name.startswith("approximate") else "beyond the paper"
        rows += [
            Row({}, f"{name}: largest value", None, theory=float(scaled.max()), theory_text=kind,
                remark="overshoots before it settles" if scaled.max() > 1 else ""),
            Row({}, f"{name}: at the end", None, theory=float(scaled[-1]), theory_text=kind),
            Row({}, f"{name}: within {STABLE:g} of 1 after, of the run", None, theory=share,
                theory_text=f"<= {RAPID:g}", agreement=Agreement.AGREES if holds else Agreement.DIFFERS,
                remark="" if holds else "it settles, but later"),
        ]  # fmt: skip
    notes = (
        f"Descent from omega = {START[0]}, mu = {START[1]} at rate {RATE:g} for {STEPS} steps on (4.1); on the exact "
        f"risk at four times the rate for {STEPS // 10} steps. The start is not printed.",
        "Shown is (1 + (1 + noise) d/L) sum omega mu, which is 1 in the valley as omega -> 0.",
    )
    return Table(FIGURE_7, "effective step along descent", tuple(rows), notes, partial(step_figure, paths),
                 time.perf_counter() - started, {"rate": RATE, "steps": STEPS})  # fmt: skip


def step_figure(paths: dict[str, Trajectory]) -> Figure:
    """The scaled effective step along descent."""
    from validate.figures.comparison import new_figure

    figure, axes = new_figure(6.0, 3.8)
    for (name, path), colour in zip(paths.items(), (PAPER, THEORY), strict=True):
        scaled = (path.omega * path.mu).sum(axis=1) / debiased_step(TASK)
        axes.plot(path.times / path.times[-1], scaled, color=colour, label=name)
    axes.axhline(1, color="0.6", lw=0.8, ls="--")
    axes.set_xlabel("part of the run")
    axes.set_ylabel("(1 + (1 + σ²) d/L) Σ ωμ")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
