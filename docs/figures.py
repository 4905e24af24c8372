"""Figures of the documentation: one short function per page, drawn at build time from theory and small samples."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from theory.depth import (
    context_update,
    covariance_polynomial,
    free_polynomial,
    layer_ensemble,
    loss_floor,
    mean_field,
    mode_superposition,
    population_training,
    repeated_update,
)
from theory.multihead import (
    activations,
    approximate_loss,
    bayes_risk,
    gradient_descent,
    gradient_flow,
    multitask,
    softmax_risk,
    solution_manifold,
)
from theory.problems import MultiTaskRegression, PowerLawSpectrum, RegressionTask, TopKTask
from validate import power_law_fit
from validate.figures.comparison import PAPER, SAMPLED, THEORY, TRAINED, new_figure
from validate.figures.power_law_fit import fit_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
# What a figure may depend on beside its own function.
SOURCES = (
    "theory/**/*.py", "sim/montecarlo/**/*.py", "sim/contexts.py", "validate/figures/comparison.py",
    "validate/power_law_fit.py", "validate/fits/*.py", "validate/figures/power_law_fit.py", "docs/studies/valley.csv",
)  # fmt: skip
SIZE = (6.4, 3.8)
SPECTRUM = PowerLawSpectrum(input_exponent=2, teacher_exponent=1, dim=128)
REGRESSION = RegressionTask(dim=5, context=40, noise=0.1)
SHADES = (0.35, 0.6, 1.0)


def canvas(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty figure in the project's style with labelled axes."""
    figure, axes = new_figure(*SIZE)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def integer_ticks(axes: Axes, values: list[int]) -> None:
    """Ticks at these values of a logarithmic x axis, written as plain integers."""
    axes.set_xscale("log")
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


def covariance_polynomial_figure() -> Figure:
    """Predictors over the spectrum: zero at zero, and as near to one at the eigenvalues as the depth allows."""
    figure, axes = canvas(r"eigenvalue $\lambda/\lambda_1$", r"predictor $p_L(\lambda) = 1 - r_L(\lambda)$")
    x = np.geomspace(5e-4, 1, 400)
    for depth, alpha in zip((1, 4, 16), SHADES, strict=True):
        coefficients = repeated_update.predictor_coefficients(depth, depth)
        residual = covariance_polynomial.polynomial_residual(coefficients, x)
        axes.semilogx(x, 1 - residual, color=SAMPLED, alpha=alpha, label=f"repeated update, L = {depth}")
    best = 1 - free_polynomial.mode_residuals(SPECTRUM, 4)
    shown = SPECTRUM.input_variances() >= x[0]
    axes.plot(SPECTRUM.input_variances()[shown], best[shown], "o", ms=4, color=TRAINED,
              label="best polynomial, L = 4, at the eigenvalues")  # fmt: skip
    axes.axhline(1, color=THEORY, lw=0.8, ls=":")
    axes.legend(frameon=False, loc="upper left")
    axes.set_ylim(0, 2)
    return figure


def repeated_update_figure() -> Figure:
    """Risk of the repeated update at the paper's step and at the best one."""
    figure, axes = canvas("depth L", "risk")
    depths = 2 ** np.arange(0, 10)
    infinite = PowerLawSpectrum(2, 1)
    steps = repeated_update.continuum_best_step(infinite, depths)
    axes.loglog(depths, repeated_update.continuum_asymptote(infinite, depths), ":", color=PAPER,
                label=r"depth (34), leading order")  # fmt: skip
    axes.loglog(depths, repeated_update.continuum_risk(infinite, depths), color=THEORY, label=r"exact, $\eta = 1$")
    axes.loglog(depths, repeated_update.continuum_risk(infinite, depths, steps), color=TRAINED,
                label=r"exact, best $\eta$")  # fmt: skip
    axes.loglog(depths, repeated_update.finite_risk(SPECTRUM, depths), "o", color=SAMPLED, ms=4,
                label=r"128 modes, $\eta = 1$")  # fmt: skip
    integer_ticks(axes, [1, 4, 16, 64, 256])
    axes.legend(frameon=False)
    return figure


def free_polynomial_figure() -> Figure:
    """Local exponents of the best polynomial: continuum, infinitely many discrete modes, 128 modes."""
    figure, axes = canvas("depth L", r"local exponent $-d\log R/d\log L$")
    infinite = PowerLawSpectrum(2, 1)
    depths = np.unique(np.geomspace(1, 256, 33).round()).astype(int)
    middle = np.sqrt(depths[1:] * depths[:-1])
    discrete = free_polynomial.local_exponents(depths, free_polynomial.finite_risk(infinite, depths))
    axes.plot(middle, discrete, color=TRAINED, label="infinitely many modes")
    few = depths[depths <= 24]
    finite = free_polynomial.local_exponents(few, free_polynomial.finite_risk(SPECTRUM, few))
    axes.plot(middle[: len(finite)], finite, "o", ms=3.5, color=SAMPLED, label="128 modes")
    smooth = free_polynomial.continuum_local_exponent(infinite, depths)
    axes.plot(depths, smooth, color=THEORY, label="continuous spectrum")
    zeta = infinite.zeta
    for value, name in ((2 * zeta, r"$2\zeta$"), (free_polynomial.discrete_exponent(infinite), r"$(2+a)\zeta$")):
        axes.axhline(value, color=PAPER if value == 2 * zeta else THEORY, lw=0.8, ls=":")
        axes.annotate(name, (1.02, value), va="bottom")
    integer_ticks(axes, [1, 4, 16, 64, 256])
    axes.set_ylim(0.8, 6)
    axes.legend(frameon=False, loc="upper left")
    return figure


def loss_floor_figure() -> Figure:
    """How much of the floor each degree leaves above the limit, for tokens ranked by inner product."""
    figure, axes = canvas("degree of the polynomial", "excess over the limit, %")
    cases = ((0.25, 0.5, PAPER), (0.5, 0.5, SAMPLED), (1.0, 1.0, THEORY), (1.5, 0.0, TRAINED))
    for a, b, color in cases:
        task = TopKTask(PowerLawSpectrum(a, b, dim=128), context=1024, top_k=2)
        floors = loss_floor.inner_product_floor(task, 24).by_degree
        excess = 100 * (floors[:4] / floors[-1] - 1)
        axes.plot(np.arange(1, 5), excess, "o-", ms=4, color=color, label=f"a = {a:g}, b = {b:g}")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-5)
    axes.set_xticks(np.arange(1, 5))
    axes.legend(frameon=False)
    return figure


def mode_superposition_figure() -> Figure:
    """Exponential losses of single modes and the power law of their sum."""
    figure, axes = canvas("depth L", "loss")
    depths = np.geomspace(1, 512, 120).round()
    weights = SPECTRUM.label_variances()
    curves = mode_superposition.repeated_mode_losses(SPECTRUM, depths) * weights
    for mode in (2, 4, 8, 16, 32, 64):
        axes.loglog(
            depths, curves[:, mode - 1], color=SAMPLED, lw=1, label="modes 2, 4, ..., 64" if mode == 2 else ""
        )
    axes.loglog(depths, curves.sum(axis=1), color=THEORY, lw=2, label="sum of all 128 modes")
    density = mode_superposition.repeated_density(SPECTRUM)
    axes.loglog(depths, mode_superposition.power_law_loss(density, depths), "--", color=PAPER,
                label="power-law density, depth (55)")  # fmt: skip
    integer_ticks(axes, [1, 4, 16, 64, 256])
    axes.set_ylim(3e-8, 1)
    axes.legend(frameon=False, loc="lower left")
    return figure


def ensemble_sample(contexts: int, layers: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions (contexts, layers) and targets of softmax layers that read along noisy copies of the query."""
    dim, tokens, top_k = 16, 64, 2
    rng = np.random.default_rng(seed)
    x, q, teacher = (rng.standard_normal((contexts, *shape)) for shape in ((tokens, dim), (dim,), (dim,)))
    labels = np.einsum("npd,nd->np", x, teacher)
    relevance = layer_ensemble.cosine_similarities(x, q)
    targets = np.sum(layer_ensemble.target_rows(relevance, top_k) * labels, axis=-1)
    direction = x / np.linalg.norm(x, axis=-1, keepdims=True)
    noise = np.einsum("npd,nld->nlp", direction, rng.standard_normal((contexts, layers, dim)))
    attention = np.exp(18 * relevance[:, np.newaxis] + 3 * noise)
    attention /= attention.sum(axis=-1, keepdims=True)
    return layer_ensemble.layer_predictions(attention, labels), targets


def layer_ensemble_figure() -> Figure:
    """Measured losses of the first L layers on the line through shared error and disagreement."""
    figure, axes = canvas("1 / L", "loss")
    predictions, targets = ensemble_sample(4096, 16, seed=1)
    estimate = layer_ensemble.estimate_terms(predictions, targets, seed=1)
    inverse = np.linspace(0, 1, 50)
    shared, spread = estimate.shared.value, estimate.disagreement.value
    axes.plot(inverse, shared + spread * inverse, color=THEORY, label=r"$C + (A-C)/L$, from 16 layers")
    counts = np.array([1, 2, 3, 4, 6, 8, 16])
    losses = [np.mean((predictions[:, :n].mean(axis=1) - targets) ** 2) for n in counts]
    axes.plot(1 / counts, losses, "o", color=SAMPLED, label="loss of the first L layers")
    axes.axhline(shared, color=PAPER, lw=0.8, ls=":")
    axes.annotate("shared error C", (1, shared), ha="right", va="bottom")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="upper left")
    return figure


def mixing_sample(contexts: int, sharpness: float, seed: int) -> np.ndarray:
    """Softmax attention matrices among random tokens on the sphere, shape (contexts, 32, 32)."""
    x = np.random.default_rng(seed).standard_normal((contexts, 32, 8))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    weights = np.exp(sharpness * x @ np.swapaxes(x, -1, -2))
    return weights / weights.sum(axis=-1, keepdims=True)


def context_update_figure() -> Figure:
    """R² of the identity-plus-uniform fit as more contexts are averaged."""
    figure, axes = canvas("contexts averaged", r"$1 - R^2$ of the fit")
    counts = 4 ** np.arange(0, 6)
    for sharpness, color in ((2.0, SAMPLED), (5.0, THEORY), (12.0, TRAINED)):
        matrices = mixing_sample(counts[-1], sharpness, seed=1)
        fits = [context_update.identity_uniform_fit(matrices[:n].mean(axis=0)) for n in counts]
        label = rf"sharpness {sharpness:g}, $\rho$ = {float(fits[-1].rho):.2f}"
        axes.loglog(counts, [1 - float(fit.r_squared) for fit in fits], "o-", ms=4, color=color, label=label)
    integer_ticks(axes, counts.tolist())
    axes.legend(frameon=False)
    return figure


def mean_field_figure() -> Figure:
    """Loss of L layers drawn from a law: the law of infinite depth, the best law at each depth, one layer."""
    from sim.montecarlo.mean_field_features import mean_field_features

    figure, axes = canvas("depth L", "loss")
    task = TopKTask(PowerLawSpectrum(0, 0, dim=16), context=64, top_k=2)
    types = mean_field.product_types([5, 8, 12, 18, 27, 40], [0, 4, 8, 16, 32])
    sample = mean_field_features(task, types, seed=1, chunks=4)
    power, cross, gram, single = (
        values.mean(axis=0)[0] for values in (sample.target_power, sample.cross, sample.gram, sample.single_power)
    )
    limit = mean_field.best_weights(cross, gram)
    depths = 2 ** np.arange(0, 11)
    drawn = mean_field.finite_depth_loss(power, cross, gram, single, limit, depths)
    best = [
        float(mean_field.finite_depth_loss(power, cross, gram, single, law, depth))
        for depth in depths.tolist()
        for law in [mean_field.best_weights_at_depth(cross, gram, single, depth)]
    ]
    axes.plot(depths, drawn, "--", color=THEORY, label="layers from the law of infinite depth")
    axes.plot(depths, best, "o-", ms=4, color=TRAINED, label="layers from the best law of depth L")
    floor = mean_field.mean_field_loss(power, cross, gram, limit)
    axes.axhline(floor, color=PAPER, lw=0.8, ls=":")
    axes.annotate("mean-field floor", (1, floor), va="bottom")
    integer_ticks(axes, [1, 4, 16, 64, 256, 1024])
    axes.set_ylim(floor - 0.04, best[0] + 0.25)
    axes.legend(frameon=False, loc="upper right")
    return figure


def population_training_figure() -> Figure:
    """Losses over depth after growing training times, between the two references."""
    figure, axes = canvas("depth L", "population loss")
    depths = [1, 2, 3, 4, 6, 8]
    axes.loglog(depths, repeated_update.best_risk(SPECTRUM, depths), color=THEORY, label="repeated update, best step")
    times = np.array([1e2, 1e4, 1e6])
    paths = []
    for depth in depths:
        start = population_training.start_scalars(depth, 0.1, spread=0.5)
        paths.append(population_training.gradient_flow(SPECTRUM, start, times).losses)
    for losses, time, marker in zip(np.transpose(paths), times, "vso", strict=True):
        power = int(np.log10(time))
        axes.loglog(depths, losses, f"{marker}:", ms=4, lw=0.8, color=SAMPLED, label=rf"trained to $t = 10^{power}$")
    axes.loglog(depths, free_polynomial.finite_risk(SPECTRUM, depths), color=TRAINED, label="free polynomial")
    integer_ticks(axes, depths)
    axes.legend(frameon=False, loc="lower left")
    return figure


def softmax_risk_figure() -> Figure:
    """Exact risk of two opposite heads at their best weight, over the scale."""
    figure, axes = canvas(r"scale $\gamma$", "excess over debiased descent")
    scales = np.linspace(0.01, 0.2, 39)
    base = float(gradient_descent.debiased_step_risk(REGRESSION, gradient_descent.debiased_step(REGRESSION)))
    exact = [softmax_risk.optimal_mu(REGRESSION, (g, -g))[1].value - base for g in scales]
    axes.plot(scales, exact, color=THEORY, label="exact")
    series = softmax_risk.small_gamma_risk(REGRESSION, scales) - base
    axes.plot(scales[scales < 0.09], series[scales < 0.09], "--", color=SAMPLED, label=r"exact to order $\gamma^2$")
    limit = float(solution_manifold.manifold_loss(REGRESSION, 1e-3))
    approximate = solution_manifold.manifold_loss(REGRESSION, scales) - limit
    axes.plot(scales, approximate, ":", color=PAPER, label="approximate loss (4.1), over its own limit")
    best = softmax_risk.optimum(REGRESSION, 2)
    axes.plot(best.omega[0], best.risk.value - base, "o", color=TRAINED, label="optimum of two heads")
    axes.axhline(0, color=THEORY, lw=0.6)
    axes.set_xlim(left=0)
    axes.set_ylim(-1e-4, 4e-4)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.legend(frameon=False, loc="upper left")
    return figure


def approximate_loss_figure() -> Figure:
    """Errors of (4.1) and of the loss to first order in 1/L over the context length."""
    figure, axes = canvas("context L", "error of the loss")
    contexts = [10, 20, 40, 80, 160, 320, 640]
    omega, mu = (0.3, -0.3), (1.2, -1.2)
    errors = []
    for context in contexts:
        task = RegressionTask(dim=5, context=context, noise=0.1)
        exact = float(softmax_risk.softmax_risks(task, omega, mu))
        errors.append(
            [abs(loss(task, omega, mu) - exact) for loss in (approximate_loss.approximate_loss,
                                                             approximate_loss.first_order_loss)]
        )  # fmt: skip
    first, second = np.transpose(errors)
    axes.loglog(contexts, first, "o-", ms=4, color=PAPER, label="approximate loss (4.1)")
    axes.loglog(contexts, second, "o-", ms=4, color=TRAINED, label="first order in 1/L, exact")
    reference = np.array(contexts, dtype=float)
    axes.loglog(reference, first[-1] * reference[-1] / reference, ":", color=THEORY, label="slopes 1 and 2")
    axes.loglog(reference, second[-1] * (reference[-1] / reference) ** 2, ":", color=THEORY)
    integer_ticks(axes, contexts)
    axes.legend(frameon=False, loc="lower left")
    return figure


def solution_manifold_figure() -> Figure:
    """Contours of the approximate loss of two opposite heads, and the valley that is the manifold."""
    figure, axes = canvas(r"scale $\gamma$", r"weight $\mu$")
    gamma, mu = np.meshgrid(np.linspace(0.02, 0.7, 120), np.linspace(0.2, 6, 120))
    loss = approximate_loss.approximate_loss(REGRESSION, np.stack([gamma, -gamma], -1), np.stack([mu, -mu], -1))
    levels = [0.24, 0.3, 0.5, 1, 2, 5]
    lines = axes.contour(gamma, mu, loss, levels, colors=SAMPLED, linewidths=0.8)
    axes.clabel(lines, fmt="%g", fontsize=7)
    line = np.linspace(0.06, 0.7, 200)
    axes.plot(line, solution_manifold.effective_mu(REGRESSION, line), color=PAPER, lw=2, label=r"$\mu_\gamma$ (4.6)")
    small = line[line < 0.4]
    axes.plot(
        small, solution_manifold.small_gamma_mu(REGRESSION, small), "--", color=THEORY, label="small scale (4.8)"
    )
    axes.set_ylim(0.2, 6)
    axes.legend(frameon=False, loc="upper right")
    return figure


def gradient_flow_figure() -> Figure:
    """Two heads from small values, one with the wrong sign: scales and weights over time, with the late-time law."""
    figure, axes = canvas("time", "magnitude")
    times = np.geomspace(0.01, 1e5, 300)
    path = gradient_flow.gradient_flow(REGRESSION, (0.02, -0.01), (0.01, 0.005), times)
    axes.loglog(times, np.abs(path.mu), color=SAMPLED, lw=1.2, label=[r"$|\mu_h|$", ""])
    axes.loglog(times, np.abs(path.omega), color=TRAINED, lw=1.2, label=[r"$|\omega_h|$", ""])
    late = times[times > 30]
    axes.loglog(late, gradient_flow.late_scale(REGRESSION, late), "--", color=THEORY,
                label=r"late law $(8cd^3t)^{-1/6}$")  # fmt: skip
    stages = gradient_flow.detect_stages(REGRESSION, path, tolerance=0.005)
    marks = (("signs match", stages.sign_matching), ("turning", stages.turning), ("one scale", stages.homogeneity))
    for (name, time), height in zip(marks, (0.06, 0.003, 0.012), strict=True):
        if time is not None:
            axes.axvline(time, color=PAPER, lw=0.8, ls=":")
            axes.annotate(f" {name} ", (time, height), color=PAPER, ha="right" if name == "signs match" else "left")
    axes.set_ylim(5e-4, 60)
    axes.legend(frameon=False, loc="upper left")
    return figure


def gradient_descent_figure() -> Figure:
    """Risks at other context lengths than that of training."""
    figure, axes = canvas("test context", "risk against the noisy label")
    lengths = np.unique(np.geomspace(5, 400, 60).round()).astype(int)
    step = gradient_descent.debiased_step(REGRESSION)
    axes.plot(lengths, gradient_descent.softmax_length_risk(REGRESSION, step, lengths), color=TRAINED,
              label="two softmax heads, small scale")  # fmt: skip
    linear = gradient_descent.linear_length_risk(REGRESSION, gradient_descent.vanilla_step(REGRESSION), lengths)
    axes.plot(lengths, linear, color=SAMPLED, label="linear attention, fixed normaliser")
    floor = gradient_descent.infinite_length_risk(REGRESSION.noise, (0.5 * step,), (2.0,))
    axes.axhline(floor, color=PAPER, lw=0.8, ls=":")
    axes.annotate(r"floor $\sigma^2 + (1-\eta)^2$", (5, floor - 0.02), va="top")
    axes.axvline(REGRESSION.context, ymax=0.75, color=THEORY, lw=0.8, ls=":")
    axes.annotate("context of training", (REGRESSION.context * 1.03, 0.5), rotation=90)
    integer_ticks(axes, [5, 10, 20, 40, 100, 200, 400])
    axes.set_ylim(0, 1.4)
    axes.legend(frameon=False, loc="upper left")
    return figure


def bayes_risk_figure() -> Figure:
    """Ratio of debiased descent to Bayes: exact, limit and both bounds."""
    figure, axes = canvas(r"ratio $\xi = d/L$", "debiased risk over Bayes risk")
    noise, context = 0.1, 40
    ratios = np.linspace(0.02, 3, 150)
    limit = bayes_risk.debiased_risk_limit(ratios, noise) / bayes_risk.bayes_risk_limit(ratios, noise)
    axes.plot(ratios, bayes_risk.paper_ratio_bound(ratios, noise), color=PAPER, label="bound of Theorem 4.2 (iii)")
    axes.plot(ratios, limit, color=THEORY, label="proportional limit")
    tasks = [RegressionTask(dim, context, noise) for dim in range(1, 121)]
    bounds = [bayes_risk.sharp_ratio_bound(task) for task in tasks]
    axes.plot([task.dim / context for task in tasks], bounds, "--", color=TRAINED, label="bound at context 40")
    dims = [1, 2, 5, 10, 20, 40, 60, 80, 100]
    exact = [bayes_risk.debiased_bayes_ratio(tasks[dim - 1]).value for dim in dims]
    axes.plot(np.array(dims) / context, exact, "o", ms=4, color=SAMPLED, label="exact, context 40")
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False)
    return figure


def activations_figure() -> Figure:
    """Exact risk of two heads at their best weight over the scale, for three activations."""
    figure, axes = canvas(r"effective scale $C\gamma$", "excess over debiased descent")
    base = float(gradient_descent.debiased_step_risk(REGRESSION, gradient_descent.debiased_step(REGRESSION)))
    scales = np.linspace(0.02, 0.46, 23)
    square, tanh, exp = activations.square(0.5), activations.shifted_tanh(), activations.exponential()
    cases = ((square, TRAINED), (tanh, SAMPLED), (exp, PAPER))
    for act, color in cases:
        risks = []
        for gamma in scales / act.slope:
            mu = activations.best_mu(REGRESSION, act, gamma)
            risks.append(activations.activation_risk(REGRESSION, act, gamma, mu).value - base)
        axes.plot(scales, risks, color=color, label=f"f = {act.name}")
        best = activations.best_two_heads(REGRESSION, act)
        axes.plot(act.slope * best.gamma, best.risk.value - base, "o", color=color)
    axes.axhline(0, color=THEORY, lw=0.6)
    axes.set_xlim(left=0)
    axes.set_ylim(-0.006, 0.006)
    axes.legend(frameon=False, loc="upper left")
    return figure


def multitask_figure() -> Figure:
    """How far heads at finite scale are from the rule they implement in the limit."""
    figure, axes = canvas(r"scale $\gamma$", "distance from the rule")
    task = MultiTaskRegression(6, 40, 0.1, ((1, 2, 3, 4), (3, 4, 5, 6)))
    rule = multitask.descent_rule(task)
    rng = np.random.default_rng(1)
    x, q, y = (rng.standard_normal(shape) for shape in ((512, 40, 6), (512, 6), (512, 40, 2)))
    centred = x - x.mean(axis=1, keepdims=True)
    target = np.einsum("nlk,nld,nd,kd->nk", y, centred, q, rule) / task.context
    scales = np.geomspace(0.003, 0.3, 13)
    for heads, color, name in ((3, PAPER, "3 heads, superposed"), (4, TRAINED, "4 heads, a pair per task")):
        errors = []
        for gamma in scales:
            pattern = multitask.descent_pattern(rule, heads, gamma)
            predicted = multitask.multitask_prediction(x, y, q, pattern.omega, pattern.mu)
            errors.append(np.sqrt(np.mean((predicted - target) ** 2)))
        axes.loglog(scales, errors, "o-", ms=4, color=color, label=name)
    axes.loglog(scales, 0.3 * scales, ":", color=THEORY, label="slopes 1 and 2")
    axes.loglog(scales, 0.3 * scales**2, ":", color=THEORY)
    axes.legend(frameon=False)
    return figure


def valley_figure() -> Figure:
    """Scale of trained heads over rate x steps x root of the batch, from the table of the study."""
    figure, axes = canvas(r"rate $\times$ steps $\times\sqrt{\mathrm{batch}}$", r"scale $\gamma$")
    with (ROOT / "docs" / "studies" / "valley.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"] == "sampled"]
    for rate, color in zip(sorted({float(row["rate"]) for row in rows}), (SAMPLED, PAPER, TRAINED), strict=True):
        for batch, marker in zip(sorted({int(row["batch"]) for row in rows}), "osv", strict=True):
            own = [row for row in rows if (float(row["rate"]), int(row["batch"])) == (rate, batch)]
            steps = sorted({int(row["steps"]) for row in own})
            places = [np.mean([float(row["gamma"]) for row in own if int(row["steps"]) == step]) for step in steps]
            axes.loglog(rate * np.sqrt(batch) * np.array(steps), places, marker, ms=5, color=color,
                        label=f"rate {rate:g}, batch {batch}")  # fmt: skip
    time = np.geomspace(100, 6000, 2)
    axes.loglog(time, 0.155 * (time / 500) ** -0.2, ":", color=THEORY, label="slope -1/5")
    best = softmax_risk.optimum(REGRESSION, 2)
    axes.axhline(np.abs(best.omega).max(), color=THEORY, lw=0.8)
    axes.annotate(r"$\gamma^*$", (4000, 1.03 * np.abs(best.omega).max()))
    axes.set_yticks([0.1, 0.2, 0.3], ["0.1", "0.2", "0.3"])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 0.06))
    return figure


def fits_figure() -> Figure:
    """A power-law fit of the example losses."""
    data = power_law_fit.read_losses(ROOT / "docs" / "examples" / "fit_losses.csv")
    return fit_plot(power_law_fit.fit_losses(data, draws=0, profiles=("exponent",)))


FIGURES: dict[str, Callable[[], Figure]] = {
    "depth-covariance-polynomial": covariance_polynomial_figure,
    "depth-repeated-update": repeated_update_figure,
    "depth-free-polynomial": free_polynomial_figure,
    "depth-loss-floor": loss_floor_figure,
    "depth-mode-superposition": mode_superposition_figure,
    "depth-layer-ensemble": layer_ensemble_figure,
    "depth-context-update": context_update_figure,
    "depth-mean-field": mean_field_figure,
    "depth-population-training": population_training_figure,
    "multihead-softmax-risk": softmax_risk_figure,
    "multihead-approximate-loss": approximate_loss_figure,
    "multihead-solution-manifold": solution_manifold_figure,
    "multihead-gradient-flow": gradient_flow_figure,
    "multihead-gradient-descent": gradient_descent_figure,
    "multihead-bayes-risk": bayes_risk_figure,
    "multihead-activations": activations_figure,
    "multihead-multitask": multitask_figure,
    "multihead-valley": valley_figure,
    "fits": fits_figure,
}


def fingerprints() -> dict[str, str]:
    """A digest of the code behind each figure: its own function, the shared ones, and the packages it draws from."""
    paths = sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)})
    shared = hashlib.sha256(b"".join(path.read_bytes() for path in paths))
    for helper in (canvas, integer_ticks, ensemble_sample, mixing_sample, write_figures):
        shared.update(inspect.getsource(helper).encode())
    shared.update(repr((SIZE, SPECTRUM, REGRESSION, SHADES)).encode())
    return {
        name: hashlib.sha256(shared.digest() + inspect.getsource(draw).encode()).hexdigest()
        for name, draw in FIGURES.items()
    }


def write_figures(folder: Path) -> None:
    """Draw the figures that are missing or whose code has changed, as SVG."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "fingerprints.json"
    known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    current = fingerprints()
    for name, draw in FIGURES.items():
        path = folder / f"{name}.svg"
        if path.exists() and known.get(name) == current[name]:
            continue
        figure = draw()
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
        record.write_text(json.dumps({**known, name: current[name]}), encoding="utf-8")
        known[name] = current[name]
