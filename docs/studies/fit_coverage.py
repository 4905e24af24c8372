"""Coverage of the power-law fit's intervals, counted over repeats with known answers.

Run from the root of the repository, some minutes on one core; writes ``fit_coverage.csv`` and ``fit_coverage.md``
beside this file. Settings that the table already has are not counted again: to count all anew, remove it.

    python docs/studies/fit_coverage.py [MINUTES]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import ndtri

from sim.streams import stream
from theory.results import FloatArray
from validate.files import write_atomically
from validate.fits import intervals, solver

FOLDER = Path(__file__).parent
SEED, LEVEL, REPEATS = 2026, 0.95, 2000
BOOTSTRAP_REPEATS, DRAWS = 300, 199
NOISES = (0.005, 0.01, 0.02, 0.05)
TARGET = (0.935, 0.965)
DESIGNS = {
    "1, 4, ..., 256": 4.0 ** np.arange(5),
    "1, 2, ..., 32": 2.0 ** np.arange(6),
    "1, 2, ..., 64": 2.0 ** np.arange(7),
    "1, 2, ..., 256": 2.0 ** np.arange(9),
    "1, 2, ..., 16": 2.0 ** np.arange(5),
    "4, 8, ..., 64": 2.0 ** np.arange(2, 7),
    "8, 10, ..., 16": np.arange(8.0, 17, 2),
}
NAMES = ("floor", "coefficient", "exponent")
KINDS = {kind: [f"{kind}_{name}" for name in NAMES] for kind in ("student", "profile", "bootstrap", "percentile")}


@dataclass(frozen=True)
class Setting:
    """One law, design and noise; ``group`` says what it stands for."""

    group: str
    design: str
    floor: float
    coefficient: float
    exponent: float
    noise: float

    @property
    def truth(self) -> FloatArray:
        """Floor, coefficient, exponent."""
        return np.array([self.floor, self.coefficient, self.exponent])

    def batch(self, count: int, name: str) -> solver.Batch:
        """``count`` noisy copies of the exact losses."""
        depths = DESIGNS[self.design]
        clean = np.log(self.floor + self.coefficient * depths**-self.exponent)
        noise = stream(SEED, f"{name} {self}").standard_normal((count, depths.size))
        return solver.Batch(np.log(depths), clean + self.noise * noise, np.ones(depths.size))


def settings() -> Iterator[Setting]:
    """Designs that users have, laws where the floor is weak or absent, and designs that identify nothing."""
    for design in ("1, 4, ..., 256", "1, 2, ..., 32", "1, 2, ..., 64", "1, 2, ..., 256"):
        for noise in NOISES:
            yield Setting("floor and decay alike", design, 0.5, 0.5, 1.0, noise)
    for noise in NOISES:
        yield Setting("small decay", "1, 2, ..., 256", 2.0, 0.5, 1.0, noise)
        yield Setting("slow decay", "1, 2, ..., 256", 0.2, 1.0, 0.5, noise)
    for floor in (0.0, 0.002):
        for design in ("1, 4, ..., 256", "1, 2, ..., 256"):
            yield Setting("no floor, or one in the noise", design, floor, 1.0, 1.0, 0.02)
    for design in ("1, 2, ..., 16", "4, 8, ..., 64"):
        for noise in (0.005, 0.05):
            yield Setting("short or late designs", design, 0.5, 0.5, 1.0, noise)
    for noise in (0.005, 0.02):
        yield Setting("hopeless design", "8, 10, ..., 16", 0.3, 1.0, 0.5, noise)


def bootstrap_settings() -> Iterator[Setting]:
    """The designs whose bootstrap is counted."""
    for design in ("1, 4, ..., 256", "1, 2, ..., 64", "1, 2, ..., 256"):
        yield Setting("bootstrap", design, 0.5, 0.5, 1.0, 0.02)


def coverage(setting: Setting) -> dict[str, float]:
    """Shares of repeats whose intervals hold the true value, by kind and parameter."""
    batch, truth = setting.batch(REPEATS, "coverage"), setting.truth
    found = solver.fit_floor(batch)
    on_bound = ~np.isfinite(found.parameters[:, 0])
    spare = batch.t.size - 3.0
    degrees = spare + on_bound
    errors = intervals.standard_errors(batch, found, degrees)
    # A floor on its bound has no Student interval; the command shows none.
    shown = np.stack([~on_bound, on_bound >= 0, on_bound >= 0], axis=1)
    limits = intervals.student_limits(found, errors, degrees, LEVEL)
    student = (limits[:, :, 0] <= truth) & (truth <= limits[:, :, 1])
    centre = np.stack([found.values[:, 0], found.parameters[:, 1], found.values[:, 2]], axis=1)
    target = np.array([truth[0], np.log(truth[1]), truth[2]])
    normal = np.abs(centre - target) <= ndtri((1 + LEVEL) / 2) * errors
    allowed = intervals.quantile(int(spare), LEVEL) ** 2 * found.squares / spare
    near = np.stack([found.parameters, np.tile(np.log(np.maximum(truth, 1e-300)), (REPEATS, 1))])
    row: dict[str, float] = {"on_bound": float(on_bound.mean())}
    for i, name in enumerate(NAMES):
        held = np.full(REPEATS, truth[i])
        squares = intervals.profile_squares(batch, i, held, floor=True, exponent=None, near=near)
        row[f"student_{name}"] = float(student[shown[:, i], i].mean())
        row[f"profile_{name}"] = float((squares - found.squares <= allowed).mean())
    row["normal_exponent"] = float(normal[:, 2].mean())
    low, high = limits[:, 2, 0], limits[:, 2, 1]
    row["exponent_within_factor_2"] = float(((low > 0) & (high <= 2 * low)).mean())
    return row


def bootstrap_coverage(setting: Setting) -> dict[str, float]:
    """The same for the bootstrap, as the command has it and by plain percentiles."""
    batch, truth = setting.batch(BOOTSTRAP_REPEATS, "bootstrap"), setting.truth
    found = solver.fit_floor(batch)
    inside = np.zeros((2, 3))
    for i in range(BOOTSTRAP_REPEATS):
        one = solver.Batch(batch.t, batch.logs[i : i + 1], batch.roots)
        best = solver.Solution(found.parameters[i : i + 1], found.squares[i : i + 1])
        limits = intervals.bootstrap_limits(one, best, solver.fit_floor, batch.t.size - 3, DRAWS, i, LEVEL)
        inside[0] += (limits[:, 0] <= truth) & (truth <= limits[:, 1])
        inside[1] += percentile_holds(one, best, truth, i)
    row = {f"bootstrap_{name}": inside[0, i] / BOOTSTRAP_REPEATS for i, name in enumerate(NAMES)}
    return row | {f"percentile_{name}": inside[1, i] / BOOTSTRAP_REPEATS for i, name in enumerate(NAMES)}


def percentile_holds(batch: solver.Batch, best: solver.Solution, truth: FloatArray, seed: int) -> FloatArray:
    """Whether plain percentiles of resampled estimates hold the truth: the way not taken."""
    fitted = solver.model_logs(best.parameters, batch.t)[0]
    residuals = (batch.logs[0] - fitted) / np.sqrt(np.maximum(1 - intervals.leverages(batch, best)[0], 1e-3))
    drawn = stream(seed, "percentiles").choice(residuals - residuals.mean(), size=(DRAWS, residuals.size))
    values = solver.fit_floor(solver.Batch(batch.t, fitted + drawn, batch.roots)).values
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return (low <= truth) & (truth <= high)


def percent(values: pd.Series) -> str:
    """Three coverages in per cent; those outside the target in bold."""
    cells = [f"{100 * v:.1f}" if TARGET[0] <= v <= TARGET[1] else f"**{100 * v:.1f}**" for v in values]
    return " / ".join(cells)


def page(both: pd.DataFrame) -> str:
    """The study as a page: what was counted, the table, and what follows from it."""
    table, resampled = both[both["group"] != "bootstrap"], both[both["group"] == "bootstrap"]
    spread, wide = (100 * np.sqrt(LEVEL * (1 - LEVEL) / count) for count in (REPEATS, BOOTSTRAP_REPEATS))
    lines = [
        "# Coverage of the fit's intervals",
        "",
        f"How often do {100 * LEVEL:g} % intervals hold the true value? For each setting, {REPEATS} data sets",
        r"$R_L = (L_0 + cL^{-\alpha})e^{\sigma z_L}$ with normal $z_L$ were fitted with a floor. Shares in per cent",
        f"are for floor / coefficient / exponent; the standard deviation of a share is {spread:.1f} %. Outside",
        f"{100 * TARGET[0]:g}-{100 * TARGET[1]:g} % they are bold. *On bound*: share of fits with a floor of 0,",
        "which have no Student interval of the floor. *Narrow*: share of Student intervals of the exponent within a",
        "factor 2.",
        "",
        f"Written by `docs/studies/fit_coverage.py`, seed {SEED}; all digits are in `fit_coverage.csv`.",
        "",
        "| setting | depths | $L_0$, $c$, $\\alpha$ | noise, % | Student | profile | on bound, % | narrow, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for _, row in table.iterrows():
        cells = [
            row["group"],
            row["design"],
            f"{row['floor']:g}, {row['coefficient']:g}, {row['exponent']:g}",
            f"{100 * row['noise']:g}",
            *(percent(row[KINDS[kind]]) for kind in ("student", "profile")),
            f"{100 * row['on_bound']:.1f}",
            f"{100 * row['exponent_within_factor_2']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What follows", "", *conclusions(table), "", "## Bootstrap", ""]
    lines += [
        f"{BOOTSTRAP_REPEATS} data sets with {DRAWS} draws each (standard deviation of a share {wide:.1f} %), law 0.5,",
        "0.5, 1. *Percentile* is the plain bootstrap, which the command does not use.",
        "",
        "| depths | noise, % | bootstrap | percentile |",
        "|---|---|---|---|",
    ]
    for _, row in resampled.iterrows():
        cells = [percent(row[KINDS[kind]]) for kind in ("bootstrap", "percentile")]
        lines.append(f"| {row['design']} | {100 * row['noise']:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def conclusions(table: pd.DataFrame) -> list[str]:
    """What the table says, in numbers taken from it."""
    regular = table[table["on_bound"] == 0]
    span, low, high, below = {}, {}, {}, {}
    for kind in ("student", "profile"):
        shares = 100 * regular[KINDS[kind]]
        span[kind] = f"{shares.min().min():.1f}-{shares.max().max():.1f} %"
        shares = 100 * table[KINDS[kind]]
        low[kind], high[kind] = f"{shares.min().min():.1f} %", f"{shares.max().max():.1f} %"
        below[kind] = int((shares < 100 * TARGET[0]).any(axis=1).sum())
    five = 100 * table[(table["design"] == "1, 4, ..., 256") & (table["floor"] == 0.5)]["normal_exponent"]
    return [
        f"- Where no repeat puts the floor on its bound ({len(regular)} of {len(table)} settings), Student intervals",
        f"  cover {span['student']} and profile intervals {span['profile']}.",
        f"- Student intervals fall below {100 * TARGET[0]:g} % in {below['student']} of the {len(table)} settings,",
        f"  down to {low['student']}, profile intervals in {below['profile']}: their lowest share is {low['profile']},",
        f"  and they reach {high['profile']} where the bound at 0 cuts one side off. The profile is the one to quote,",
        "  above all where few intervals are narrow.",
        f"- 1.96 standard errors with five depths cover {five.min():.0f}-{five.max():.0f} %: with two degrees of",
        "  freedom Student's factor is 4.3.",
    ]


def main() -> None:
    """Count what the table does not have yet, until the minutes given as argument are over, and write both files."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else np.inf
    end = time.monotonic() + 60 * minutes
    path = FOLDER / "fit_coverage.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    known = {Setting(**{field.name: row[field.name] for field in fields(Setting)}) for row in rows}
    for setting in (*settings(), *bootstrap_settings()):
        if setting in known or time.monotonic() > end:
            continue
        count = bootstrap_coverage if setting.group == "bootstrap" else coverage
        rows.append(asdict(setting) | count(setting))
        write_atomically(path, pd.DataFrame(rows).to_csv(index=False, float_format="%.17g").encode())
    write_atomically(FOLDER / "fit_coverage.md", page(pd.read_csv(path)).encode())


if __name__ == "__main__":
    main()
