"""Depth Figure 3: linear attention on the easy task, losses by depth and by spectral mode."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from sim.training import TrainingConfig, TrainingResult
from theory.depth import free_polynomial, mode_superposition, repeated_update
from theory.problems import PowerLawSpectrum
from validate.figures.panels import Curve, Panel, estimate_curve, panel_figure
from validate.tables.comparison import Agreement, Progress, Row, Table
from validate.trained import linear
from validate.trained.rows import check_row
from validate.trained.runs import TrainedRuns

NAME = "depth:figure-3"
# The text does not print the spectrum of panel (c); this one lies in the middle of panel (a).
MODES_OF = (2.0, 1.0)
MODES = (1, 2, 4, 8, 16, 32, 64, 128)
# The figure's own threshold, and "almost perfectly within a few layers".
LEARNED, FEW_LAYERS = 0.02, 4
# No trained loss may lie below the free risk by more than rounding, nor above the best single layer's.
ROUNDING = 1e-6


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of Table 2."""
    return linear.easy_configs(profile, seed)


def loss_rows(spectrum: PowerLawSpectrum, results: list[TrainingResult], depths: tuple[int, ...]) -> list[Row]:
    """Trained losses between the free risk, their minimum, and the best repeated update."""
    free, repeated = free_polynomial.finite_risk(spectrum, depths), repeated_update.best_risk(spectrum, depths)
    rows = []
    for depth, result, low, high in zip(depths, results, free, repeated, strict=True):
        loss = result.loss.value
        possible, better = loss >= low * (1 - ROUNDING), loss <= high * (1 + ROUNDING)
        rows.append(
            Row(
                {"a": spectrum.input_exponent, "b": spectrum.teacher_exponent, "L": depth},
                "loss R",
                None,
                theory=float(low),
                theory_text=f"bounds {low:.4g} .. {high:.4g}",
                trained=result.loss,
                agreement=Agreement.BRACKETED if possible and better else Agreement.OUTSIDE,
                consistent=bool(possible),
                remark="bounds: free polynomial, best repeated update"
                if better
                else "worse than the best repeated update: training has not come that far",
            )
        )
    return rows


def mode_rows(results: list[TrainingResult], depths: tuple[int, ...]) -> tuple[list[Row], list[Curve]]:
    """Normalised losses of single modes, how deep each must be learned, and their curves. Panel (c)."""
    spectrum = PowerLawSpectrum(*MODES_OF, linear.DIM)
    shares = spectrum.label_variances()
    normalised = np.array(
        [[result.estimate(f"mode_loss_{mode}").value / shares[mode - 1] for mode in MODES] for result in results]
    )
    learned = mode_superposition.depths_below(depths, normalised, LEARNED)
    free = mode_superposition.free_mode_losses(spectrum, depths)[:, np.array(MODES) - 1]
    curves = []
    for i, mode in enumerate(MODES):
        curves.append(Curve(f"mode {mode}", depths, np.maximum(normalised[:, i], LEARNED), "o-", i))
        curves.append(Curve("", depths, np.maximum(free[:, i], LEARNED), ":", i))
    setting = {"a": MODES_OF[0], "b": MODES_OF[1]}
    finite = np.where(np.isfinite(learned), learned, 2.0 * depths[-1])
    ordered = bool((np.diff(finite) >= 0).all())
    pairs = zip(MODES, learned, strict=True)
    listed = ", ".join(f"{m}: {d:g}" if np.isfinite(d) else f"{m}: > {depths[-1]}" for m, d in pairs)
    quick, slow = learned[0] <= FEW_LAYERS, not np.isfinite(learned[-1]) or learned[-1] > FEW_LAYERS
    rows = [
        check_row(setting, f"depth at which modes are below {100 * LEARNED:g} %", "increases with the mode", None,
                  ordered, f"mode: depth {listed}"),
        check_row(setting, "strongest mode", f"learned within {FEW_LAYERS} layers", None, bool(quick)),
        check_row(setting, "weakest mode", f"not learned within {FEW_LAYERS} layers", None, bool(slow)),
    ]  # fmt: skip
    return rows, curves


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of the training. Source: depth Figure 3."""
    started = time.perf_counter()
    plan = linear.EASY[profile]
    steps, depths = plan.budgets[-1], plan.depths
    spectra = sorted(linear.printed_spectra(), key=lambda one: (one.input_exponent, one.teacher_exponent))
    rows: list[Row] = []
    panels: dict[bool, list[Curve]] = {True: [], False: []}
    modes: list[TrainingResult] = []
    for i, spectrum in enumerate(spectra):
        results = linear.easy_results(runs, spectrum, steps, profile, seed)
        rows += loss_rows(spectrum, results, depths)
        a, b = spectrum.input_exponent, spectrum.teacher_exponent
        if (a, b) == MODES_OF:
            modes = results
        for fixed_a in [key for key, here in ((True, a == 2), (False, b == 2)) if here]:
            curves, colour = panels[fixed_a], len(panels[fixed_a]) // 3
            curves.append(
                estimate_curve(
                    f"{'b' if fixed_a else 'a'} = {b if fixed_a else a:g}", depths, [r.loss for r in results], colour
                )
            )
            curves.append(Curve("", depths, free_polynomial.finite_risk(spectrum, depths), ":", colour))
            curves.append(Curve("", depths, repeated_update.best_risk(spectrum, depths), "--", colour))
        progress((i + 1) / len(spectra))
    found, curves = mode_rows(modes, depths)
    rows += found
    drawn = [
        Panel("(a) a = 2, by b", "loss R", panels[True]),
        Panel("(b) b = 2, by a", "loss R", panels[False]),
        Panel(f"(c) modes, a = {MODES_OF[0]:g}, b = {MODES_OF[1]:g}", "normalised loss", curves,
              lines=[(LEARNED, "", 5)]),
    ]  # fmt: skip
    notes = (
        f"Layer scalars, dim {linear.DIM}, infinite context, {steps} steps of Adam on the exact population loss. "
        "Dotted: free polynomial, the exact optimum of the architecture; dashed: best repeated update.",
        "The fitted exponents, beside the paper's, are Table 2. A power law is a poor name for the curves at dim "
        f"{linear.DIM}: the free risk bends downwards and is zero at depth {linear.DIM}.",
        "Panel (c): the text does not print the spectrum. Learned in order of strength, unlike softmax attention "
        "(Figure 7).",
    )
    settings = {"dim": linear.DIM, "depths": list(depths), "steps": steps, "profile": profile, "seed": seed}
    return Table(NAME, "linear attention by depth, easy task", tuple(rows), notes, partial(panel_figure, drawn),
                 time.perf_counter() - started, settings)  # fmt: skip
