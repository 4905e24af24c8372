"""The river valley of two heads: where training stops along γ, against the exact optimum."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sim.head_patterns import over_seeds
from sim.training import TrainingConfig
from theory.multihead.softmax_risk import softmax_risks
from theory.results import Estimate
from validate.figures.panels import Panel, estimate_curve, panel_figure
from validate.multihead_training import descend
from validate.tables.comparison import Progress, Row, Table
from validate.tables.multihead_observations import no_configs
from validate.trained.multihead import PLANS, TASK, Ensemble, best_heads, heads_config, layers
from validate.trained.rows import check_row
from validate.trained.runs import TrainedRuns, TrainedTable

NAME = "multihead:valley"
# All start in the valley, above the optimum as every trained model comes down from there, and one below it.
START = (0.3, 1.35)
BELOW = (0.04, 11.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train: rate of Adam, contexts per step, and start (γ, μ)."""

    learning_rate: float
    batch: int
    start: tuple[float, float] = START


SETTINGS = (
    Setting(1e-3, 256),
    Setting(3e-3, 256),
    Setting(1e-2, 256),
    Setting(3e-2, 256),
    Setting(1e-2, 64),
    Setting(1e-2, 1024),
    Setting(1e-2, 256, BELOW),
)
# Which of them each panel of the figure shows, and how many snapshots of a run.
RATES, BATCHES = (0, 1, 2, 3), (4, 2, 5, 6)
SHOWN = 24
# Parts of the run at which γ is read.
PARTS = (0.05, 0.2, 1.0)


def valley_config(setting: Setting, profile: str, seed: int) -> TrainingConfig:
    """Two opposite heads (ω, μ) in the valley, sampled loss, constant rate."""
    gamma, mu = setting.start
    config = heads_config(profile, seed, 2, initial_omega=(gamma, -gamma), initial_mu=(mu, -mu))
    return dataclasses.replace(
        config, learning_rate=setting.learning_rate, batch=setting.batch, schedule="constant", loss="sampled"
    )


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """The study. profile: "quick" or "paper"; seed: of the training. Source: multihead section 4.3, the valley."""
    started = time.perf_counter()
    best = best_heads(2)
    gamma = float(np.abs(best.omega).max())
    ensembles = layers(runs, [valley_config(one, profile, seed) for one in SETTINGS], progress)
    rows: list[Row] = []
    curves = []
    for number, (setting, ensemble) in enumerate(zip(SETTINGS, ensembles, strict=True)):
        steps, places, risks = _places(setting, ensemble)
        noiseless = _noiseless(setting, steps)
        for step, place, risk, quiet in zip(steps, places, risks, noiseless, strict=True):
            rows.append(
                Row(_setting(setting, step), "gamma", None, theory=gamma,
                    theory_text=f"optimum; without noise, on (4.1): {quiet:.4g}", trained=place,
                    remark=f"exact excess risk {risk.value - best.risk.value:.2g} ± {risk.stderr:.1g}")
            )  # fmt: skip
        label = f"rate {setting.learning_rate:g}, batch {setting.batch}" + (", from below" if number == 6 else "")
        curves.append(_curve(label, ensemble, number))
    rows += _checks(ensembles, gamma)
    panels = [
        Panel(title, "gamma", [curves[i] for i in shown], "step", lines=[(gamma, "optimum", 5)])
        for title, shown in (("(a) rates", RATES), ("(b) batches, and from below", BATCHES))
        if max(shown) < len(curves)
    ]
    plan = PLANS[profile]
    notes = (
        f"Heads (gamma, -gamma), (mu, -mu) from gamma = {START[0]:g}, and once from {BELOW[0]:g}; {plan.members} "
        f"members each, sampled loss, constant rate, {plan.head_steps} steps.",
        "The exact risk along the valley differs by 3e-5 between gamma = 0.07 and 0, and by 2e-4 at 0.127: where "
        "training stops is decided by time and rate long before it is by the optimum.",
        "Without noise: Adam with exact gradients of (4.1), whose valley has no lowest point.",
    )
    settings = {"profile": profile, "seed": seed, "members": plan.members, "steps": plan.head_steps}
    return Table(NAME, "where training stops along the valley", tuple(rows), notes, partial(panel_figure, panels),
                 time.perf_counter() - started, settings)  # fmt: skip


def _setting(setting: Setting, step: int) -> dict[str, float]:
    return {"rate": setting.learning_rate, "batch": setting.batch, "start": setting.start[0], "steps": float(step)}


def _places(setting: Setting, ensemble: Ensemble) -> tuple[list[int], list[Estimate], list[Estimate]]:
    """γ and exact risk, over members, at parts of the run."""
    steps, omega, mu = ensemble.path()
    seeds = ensemble.result.config.seeds
    at = [int(np.argmin(np.abs(steps - part * steps[-1]))) for part in PARTS]
    places = [over_seeds(np.abs(omega[i]).mean(axis=1), seeds) for i in at]
    risks = [over_seeds(softmax_risks(TASK, omega[i], mu[i]), seeds) for i in at]
    return [int(steps[i]) for i in at], places, risks


def _noiseless(setting: Setting, steps: Sequence[int]) -> list[float]:
    """γ of Adam with exact gradients of (4.1) after as many steps."""
    gamma, mu = setting.start
    path = descend(TASK, [gamma, -gamma], [mu, -mu], setting.learning_rate, steps[-1], objective="approximate",
                   rule="adam")  # fmt: skip
    return [float(np.abs(path.omega[step]).mean()) for step in steps]


def _curve(label: str, ensemble: Ensemble, number: int):  # type: ignore[no-untyped-def]
    steps, omega, _ = ensemble.path()
    seeds = ensemble.result.config.seeds
    at = np.unique(np.geomspace(1, len(steps) - 1, SHOWN).astype(int))
    places = [over_seeds(np.abs(omega[i]).mean(axis=1), seeds) for i in at]
    return estimate_curve(label, steps[at], places, number if number < 5 else number + 1, "-")


def _checks(ensembles: Sequence[Ensemble], gamma: float) -> list[Row]:
    """What is known beforehand: runs from above come down towards the optimum."""
    rows = []
    for setting, ensemble in zip(SETTINGS, ensembles, strict=True):
        steps, places, _ = _places(setting, ensemble)
        last = places[-1]
        inward = abs(last.value - gamma) < abs(setting.start[0] - gamma)
        rows.append(check_row(_setting(setting, steps[-1]), "gamma has moved towards the optimum",
                              f"from {setting.start[0]:g}", last, inward,
                              "" if inward else "noise moves it more than the slope of the valley"))  # fmt: skip
    return rows


VALLEY_ENTRY = TrainedTable(no_configs, build)
