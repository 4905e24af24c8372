"""Depth Figure 7: losses of single spectral modes under softmax attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from sim.contexts import SampleSize, estimate_from_chunks
from sim.training import TrainingConfig
from theory.problems import TopKTask
from theory.results import Estimate, FloatArray
from validate.figures.panels import Curve, Panel, panel_figure
from validate.tables.comparison import Progress, Row, Table
from validate.trained import softmax
from validate.trained.attention import mode_chunks
from validate.trained.rows import check_row
from validate.trained.runs import TrainedRuns

NAME = "depth:figure-7"
# The text does not print the figure's spectrum. Inputs show their modes at a > 0 alone, and of the spectra of Table 1
# with a > 0 this is the one where depth helps most.
SPECTRUM = (0.25, 0.0)
MODES = (1, 2, 4, 8, 16)
SIZES = {"quick": SampleSize(32, 2, 256), "paper": SampleSize(64, 4, 256)}
# Curves that start at 1 and end at 0 "nearly collapse" if modes differ by less than this in between. One by one, modes
# would differ by nearly 1: the linear model's do (Figure 3).
COLLAPSE = 0.2
# "At similar rates": the share of its reducible loss that the weakest mode has lost, over that of the strongest.
SIMILAR = 0.25


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The models of one spectrum."""
    return softmax.configs([_task()], profile, seed)


def _task() -> TopKTask:
    return softmax.softmax_task(*SPECTRUM, 2)


def normalised(chunks: FloatArray) -> FloatArray:
    """Reducible losses of modes over those at the first depth, with the deepest model as floor; (depths, modes).

    chunks: mode losses, shape (depths, chunks, modes). Source: depth section 4.2, Figure 7(b).
    """
    losses = chunks.mean(axis=1)
    return np.asarray((losses - losses[-1]) / (losses[0] - losses[-1]))


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of sampling and training. Source: depth Figure 7."""
    started = time.perf_counter()
    series, size = softmax.series(runs, _task(), profile, seed), SIZES[profile]
    chosen = np.array(MODES) - 1
    chunks = mode_chunks(series, seed, size)[:, :, chosen]
    progress(1.0)
    curves, depths = normalised(chunks), series.depths
    rows = _rows(chunks, curves, depths, size, seed)
    raw = chunks.mean(axis=1)
    panels = [
        Panel("(a) raw", "loss of the mode",
              [Curve(f"mode {m}", depths, raw[:, i], "o-", i) for i, m in enumerate(MODES)]),
        Panel(
            "(b) normalised",
            "share of the reducible loss",
            [Curve(f"mode {m}", depths, curves[:, i], "o-", i) for i, m in enumerate(MODES)],
            log_y=False,
        ),
    ]  # fmt: skip
    notes = (
        f"Spectrum a = {SPECTRUM[0]:g}, b = {SPECTRUM[1]:g}, top 2; the deepest model stands for the floor of each "
        "mode, which the paper may have fitted.",
    )
    settings = {"profile": profile, "seed": seed, "depths": depths, "modes": list(MODES)}
    return Table(NAME, "losses of spectral modes, softmax attention", tuple(rows), notes, partial(panel_figure, panels),
                 time.perf_counter() - started, settings)  # fmt: skip


def _rows(chunks: FloatArray, curves: FloatArray, depths: list[int], size: SampleSize, seed: int) -> list[Row]:
    a, b = SPECTRUM
    rows = [
        Row({"k": 2, "a": a, "b": b, "L": depth, "mode": mode}, "loss of the mode", None,
            trained=estimate_from_chunks(chunks[i, :, j], size.contexts, seed))
        for i, depth in enumerate(depths)
        for j, mode in enumerate(MODES)
    ]  # fmt: skip
    middle = range(1, len(depths) - 1)
    for i in middle:
        spread = float(np.ptp(curves[i]))
        rows.append(
            check_row(
                {"k": 2, "a": a, "b": b, "L": depths[i]},
                "largest less smallest normalised mode loss",
                f"< {COLLAPSE:g}: the curves collapse",
                _jackknife(chunks, partial(_spread, depth=i), size, seed),
                spread < COLLAPSE,
                "" if spread < COLLAPSE else "the normalised curves do not collapse at this depth",
            )
        )
    gained = _jackknife(chunks, _weak_over_strong, size, seed)
    holds = abs(gained.value - 1) <= SIMILAR
    rows.append(
        check_row(
            {"k": 2, "a": a, "b": b},
            "relative gain from depth, weakest over strongest mode",
            f"1 within {SIMILAR:g}: similar rates",
            gained,
            holds,
            "" if holds else "weak and strong modes gain unequally from depth",
        )
    )
    return rows


def _spread(chunks: FloatArray, depth: int) -> float:
    return float(np.ptp(normalised(chunks)[depth]))


def _weak_over_strong(chunks: FloatArray) -> float:
    losses = chunks.mean(axis=1)
    gains = 1 - losses[-1] / losses[0]
    return float(gains[-1] / gains[0])


def _jackknife(chunks: FloatArray, statistic: Callable[[FloatArray], float], size: SampleSize, seed: int) -> Estimate:
    """A statistic of chunk means with the jackknife's error over the chunks."""
    count = chunks.shape[1]
    whole = statistic(chunks)
    left_out = np.array([statistic(np.delete(chunks, i, axis=1)) for i in range(count)])
    stderr = float(np.sqrt((count - 1) / count * np.sum((left_out - left_out.mean()) ** 2)))
    return Estimate(whole, stderr, size.contexts, size.chunks, seed)
