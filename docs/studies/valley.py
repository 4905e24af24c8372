"""Where two heads stop along the valley, as rate, batch and number of steps change.

Two opposite heads (gamma, -gamma), (mu, -mu) at the paper's size start in the valley at gamma = 0.3 and are trained by
Adam at a constant rate. Run from the root of the repository, ten minutes on one core; writes ``valley.csv``, one row
per setting and member, and ``valley.md`` beside this file. Settings that the table already has are not trained again:
to train all anew, remove it.

    python docs/studies/valley.py [MINUTES]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebval

from sim.contexts import SampleSize
from sim.experiments.base import Loss
from sim.experiments.multihead import ReducedHeads
from sim.snapshots import train_with_snapshots
from sim.training import TrainingConfig
from theory.multihead.softmax_risk import softmax_risks
from theory.results import FloatArray
from validate.files import write_atomically
from validate.trained.multihead import TASK, best_heads

FOLDER = Path(__file__).parent
START = (0.3, 1.35)
RATES, BATCHES, STEPS = (0.001, 0.003, 0.01), (64, 256, 1024), (1000, 4000, 16000)
# The law is fitted where noise does not hold heads up, after the start is forgotten.
CALM = RATES[:2]
MEMBERS = 6


@dataclass(frozen=True)
class Setting:
    """One way to train: rate of Adam, contexts per step, and whether the loss is sampled or averaged over teachers."""

    rate: float
    batch: int
    loss: Loss

    def config(self, members: int = MEMBERS, steps: int = STEPS[-1]) -> TrainingConfig:
        """Two opposite heads in the valley, constant rate."""
        gamma, mu = START
        return TrainingConfig(
            ReducedHeads(TASK, 2, initial_omega=(gamma, -gamma), initial_mu=(mu, -mu)),
            steps=steps,
            batch=self.batch,
            learning_rate=self.rate,
            schedule="constant",
            loss=self.loss,
            seeds=tuple(range(members)),
            evaluation=SampleSize(2, 1, 64),
            history_every=STEPS[0],
        )


def settings() -> Iterator[Setting]:
    """The grid with sampled loss, and the middle batch with the teacher's average, which has less noise."""
    for rate, batch in itertools.product(RATES, BATCHES):
        yield Setting(rate, batch, "sampled")
    for rate in RATES:
        yield Setting(rate, BATCHES[1], "teacher_averaged")


def trained(setting: Setting) -> pd.DataFrame:
    """Rows of one setting: where each member is after each number of steps, and the excess of its exact risk."""
    with tempfile.TemporaryDirectory(prefix="attnlaws-") as folder:
        result, snapshots = train_with_snapshots(setting.config(), Path(folder))
    rows = []
    for count in STEPS:
        at = int(np.flatnonzero(snapshots.steps == count)[0])
        omega, mu = snapshots.parameters["omega"][at], snapshots.parameters["mu"][at]
        excess = softmax_risks(TASK, omega, mu) - best_heads(2).risk.value
        for member, seed in enumerate(result.config.seeds):
            size = np.abs(omega[member]).mean()
            step = omega[member] @ mu[member]
            rows.append((setting.rate, setting.batch, setting.loss, count, seed, size, step, excess[member]))
    return pd.DataFrame(rows, columns=list(COLUMNS))


COLUMNS = ("rate", "batch", "loss", "steps", "seed", "gamma", "step", "excess")


@lru_cache(maxsize=1)
def valley_risk() -> tuple[Chebyshev, Chebyshev]:
    """A and B of the exact risk 1 + noise - A mu + B mu^2 of two opposite heads, interpolated over gamma."""

    def risks(gamma: FloatArray, mu: float) -> FloatArray:
        heads = np.stack([gamma, -gamma], axis=-1)
        return np.asarray(softmax_risks(TASK, heads, mu * np.sign(heads)))

    linear = Chebyshev.interpolate(lambda g: (risks(g, -1.0) - risks(g, 1.0)) / 2, DEGREE, RANGE)
    square = Chebyshev.interpolate(lambda g: (risks(g, -1.0) + risks(g, 1.0)) / 2 - 1 - TASK.noise, DEGREE, RANGE)
    return linear, square


# Interpolation to 1e-9 over all scales that runs pass.
DEGREE, RANGE = 24, (0.03, 0.4)


@lru_cache(maxsize=1)
def noiseless() -> dict[float, dict[int, float]]:
    """For each rate gamma of Adam with exact gradients of the exact risk after each number of steps."""
    linear, square = valley_risk()
    parts = (linear, square, linear.deriv(), square.deriv())
    coefficients = np.stack([np.pad(one.coef, (0, DEGREE + 1 - len(one.coef))) for one in parts], axis=-1)
    low, high = RANGE
    rates = np.array(RATES)
    place = np.tile(np.array(START)[:, None], len(RATES))
    mean, power = np.zeros_like(place), np.zeros_like(place)
    found: dict[float, dict[int, float]] = {rate: {} for rate in RATES}
    for step in range(1, STEPS[-1] + 1):
        gamma, mu = place
        a, b, a_slope, b_slope = chebval((2 * gamma - low - high) / (high - low), coefficients)
        # Of one head: the two have equal and opposite gradients.
        slope = np.stack([mu**2 * b_slope - mu * a_slope, 2 * mu * b - a]) / 2
        mean, power = 0.9 * mean + 0.1 * slope, 0.999 * power + 0.001 * slope**2
        place = place - rates * mean / (1 - 0.9**step) / (np.sqrt(power / (1 - 0.999**step)) + 1e-8)
        if step in STEPS:
            for rate, scale in zip(RATES, place[0], strict=True):
                found[rate][step] = float(scale)
    return found


def resting_excess(gamma: float) -> float:
    """Excess risk of heads at rest at this scale, with the best mu."""
    linear, square = valley_risk()
    return float(1 + TASK.noise - linear(gamma) ** 2 / (4 * square(gamma)) - best_heads(2).risk.value)


def effective_time(table: pd.DataFrame) -> pd.Series:
    """Rate * steps * sqrt(batch): what Adam in noise has for time."""
    return table["rate"] * table["steps"] * np.sqrt(table["batch"])


def exponents(table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Powers of rate, batch and steps in gamma, fitted to the later parts of calm runs: mean and error over members."""
    late = table[(table["loss"] == "sampled") & (table["steps"] > STEPS[0]) & table["rate"].isin(CALM)]
    names = ("rate", "batch", "steps")
    fits = []
    for _, own in late.groupby("seed"):
        design = np.column_stack([np.ones(len(own)), *(np.log(own[name]) for name in names)])
        fits.append(np.linalg.lstsq(design, np.log(own["gamma"]), rcond=None)[0][1:])
    return over_members(names, np.array(fits))


def over_members(names: tuple[str, ...], values: FloatArray) -> dict[str, tuple[float, float]]:
    """Mean and standard error of each column."""
    errors = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return {name: (float(m), float(e)) for name, m, e in zip(names, values.mean(axis=0), errors, strict=True)}


def last_power(own: pd.DataFrame) -> tuple[float, float]:
    """Power of steps in gamma over the last part of the runs of one setting: mean and error over members."""
    ends = own.pivot(index="seed", columns="steps", values="gamma")
    powers = np.log(ends[STEPS[2]] / ends[STEPS[1]]) / np.log(STEPS[2] / STEPS[1])
    return float(powers.mean()), float(powers.sem())


def collapse(table: pd.DataFrame) -> tuple[float, float]:
    """How far calm runs are from one curve in the effective time: root mean square and largest, of log gamma."""
    calm = table[(table["loss"] == "sampled") & table["rate"].isin(CALM)]
    means = calm.groupby(["rate", "batch", "steps"], as_index=False)["gamma"].mean()
    x, y = np.log(effective_time(means)), np.log(means["gamma"])
    rest = y - Polynomial.fit(x, y, 2)(x)
    return float(np.sqrt((rest**2).mean())), float(rest.abs().max())


def runs_of(table: pd.DataFrame, setting: Setting) -> pd.DataFrame:
    """Rows of one setting."""
    same = (table["rate"] == setting.rate) & (table["batch"] == setting.batch) & (table["loss"] == setting.loss)
    return table[same]


def page(table: pd.DataFrame) -> str:
    """The study as a page: what was trained, the table, and what follows from it."""
    best = np.abs(best_heads(2).omega).max()
    lines = [
        "# Where training stops along the valley",
        "",
        "Two opposite heads $(\\gamma,-\\gamma)$, $(\\mu,-\\mu)$ at the paper's size have their best risk at",
        f"$\\gamma^* = {best:.4f}$, in a long flat valley. From $\\gamma = {START[0]:g}$ in it, {MEMBERS} members of",
        "each setting are trained by Adam at a constant rate, on sampled loss and on that averaged over the teacher.",
        "Given are $\\gamma$, the power of steps that it follows over the last part, both with the standard error over",
        "members, and the mean excess of the exact risk over the best, at the end; in brackets that of heads at rest",
        "at the same $\\gamma$. *Without noise*: Adam with gradients of the exact risk.",
        "",
        "Written by `python docs/studies/valley.py`; all members are in `valley.csv`.",
        "",
        "| loss | rate | batch | " + " | ".join(f"{steps} steps" for steps in STEPS) + " | power | excess |",
        "|---" * (len(STEPS) + 5) + "|",
    ]
    for setting in settings():
        own = runs_of(table, setting)
        places = [f"{values.mean():.4f} ± {values.sem():.4f}" for _, values in own.groupby("steps")["gamma"]]
        end = own[own["steps"] == STEPS[-1]]
        power, error = last_power(own)
        cells = [setting.loss.replace("_", " "), f"{setting.rate:g}", f"{setting.batch}", *places]
        cells += [
            f"{power:.3f} ± {error:.3f}",
            f"{end['excess'].mean():.1e} ({resting_excess(end['gamma'].mean()):.1e})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for rate in RATES:
        # Adam bounces between the valley's sides, so that later digits depend on how sums are rounded.
        places = [f"{noiseless()[rate][steps]:.2g}" for steps in STEPS]
        power = np.log(noiseless()[rate][STEPS[2]] / noiseless()[rate][STEPS[1]]) / np.log(STEPS[2] / STEPS[1])
        end = resting_excess(noiseless()[rate][STEPS[-1]])
        lines.append(f"| without noise | {rate:g} | | {' | '.join(places)} | {power:.2f} | {end:.0e} |")
    return "\n".join([*lines, "", *figure(), "", "## What follows", "", *conclusions(table)]) + "\n"


def figure() -> list[str]:
    """The figure that the documentation draws from the table."""
    return [
        "```{figure} ../generated/figures/multihead-valley.svg",
        ":alt: Scale against rate times steps times the root of the batch: low rates on one curve, a high one above.",
        "",
        "All settings with sampled loss, against rate times steps times the root of the batch.",
        "```",
    ]


def conclusions(table: pd.DataFrame) -> list[str]:
    """What the numbers say."""
    root = "\\sqrt{\\mathrm{batch}}"
    powers = {name: f"${value:.3f}\\pm{error:.3f}$" for name, (value, error) in exponents(table).items()}
    typical, largest = collapse(table)
    least = table["gamma"].min() / np.abs(best_heads(2).omega).max()
    ends = table[table["steps"] == STEPS[-1]].groupby(["loss", "rate", "batch"])
    places, excess = ends["gamma"].mean(), ends["excess"].mean()
    high = [last_power(runs_of(table, Setting(RATES[-1], batch, "sampled")))[0] for batch in BATCHES]
    fast, slow = places["sampled", RATES[-1]], places["sampled", RATES[1]]
    share = [excess["sampled", RATES[-1], batch] / resting_excess(fast[batch]) for batch in BATCHES]
    averaged, sampled = (
        [places[loss, rate, BATCHES[1]] for rate in RATES] for loss in ("teacher_averaged", "sampled")
    )
    sentences = [
        f"At the rates {' and '.join(f'{rate:g}' for rate in CALM)}, from {STEPS[1]} steps on, $\\gamma$ goes like "
        f"rate, batch and steps to the powers {powers['rate']}, {powers['batch']} and {powers['steps']}. The batch "
        f"counts half as much as the others: places lie on one curve in $T$ = rate x steps x ${root}$, to "
        f"{100 * typical:.1f} % and at worst {100 * largest:.1f} %.",
        f"Noise sets this pace. Adam divides each gradient by its noise, which goes like $\\mu/{root}$ for $\\omega$ "
        f"and like $\\omega/{root}$ for $\\mu$. With an excess risk of about $\\gamma^4$ along the valley that gives "
        "$\\gamma\\sim T^{-1/5}$; the flow on (4.1) has $t^{-1/6}$. Without noise Adam comes near $\\gamma^*$ in "
        f"{STEPS[-1]} steps at every rate.",
        f"At the rate {RATES[-1]:g} noise also sets where heads nearly come to a halt: the last power is "
        f"{min(high):.2f} to {max(high):.2f}, and $\\gamma$ ends at {numbers(fast[batch] for batch in BATCHES)} "
        f"for the three batches, against {numbers(slow[batch] for batch in BATCHES)} "
        f"at the rate {RATES[1]:g}. Their risk is that of moving "
        f"heads: the excess is {', '.join(f'{one:.1f}' for one in share)} times that of heads at rest.",
        f"No member reaches the optimum: the least $\\gamma$ of all is {least:.2f} $\\gamma^*$. With the teacher "
        f"averaged, which leaves less noise, the batch of {BATCHES[1]} ends at {numbers(averaged)} at the three rates, "
        f"against {numbers(sampled)} on sampled loss.",
    ]
    return [textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                          break_on_hyphens=False) for text in sentences]  # fmt: skip


def numbers(values: Iterable[float]) -> str:
    """Three digits each."""
    return ", ".join(f"{value:.3f}" for value in values)


def write(table: pd.DataFrame) -> None:
    """The table and the page, each as a whole."""
    order = [(one.rate, one.batch, one.loss) for one in settings()]
    table = pd.concat(
        [own for key in order for found, own in table.groupby(["rate", "batch", "loss"]) if found == key]
    )
    write_atomically(FOLDER / "valley.csv", table.to_csv(index=False, lineterminator="\n").encode())
    if len(table.groupby(["rate", "batch", "loss"])) == len(order):
        write_atomically(FOLDER / "valley.md", page(table).encode())


def main(minutes: float) -> None:
    """Train what the table lacks, as far as the time allows."""
    started, path = time.monotonic(), FOLDER / "valley.csv"
    parts = [pd.read_csv(path)] if path.exists() else []
    known = {key for part in parts for key, _ in part.groupby(["rate", "batch", "loss"])}
    for setting in settings():
        if (setting.rate, setting.batch, setting.loss) not in known and time.monotonic() - started < 60 * minutes:
            parts.append(trained(setting))
            write(pd.concat(parts, ignore_index=True))
    write(pd.read_csv(path))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else np.inf)
