"""Depth Table 4: fitted floors and exponents of softmax attention on broader targets and spectra."""

from __future__ import annotations

import time
from functools import partial

from theory.problems import PowerLawSpectrum, TopKTask
from validate.figures.comparison import mean_field_figure
from validate.mean_field import mean_field_floors
from validate.tables.comparison import Progress, Row, Table, paper_rows
from validate.tables.depth_table_1 import SOFTMAX_CONTEXT, SOFTMAX_DIM, mean_field_row


def build(profile: str, seed: int, progress: Progress) -> Table:
    """Reproduce the floors. profile: "quick" or "paper"; seed: of the sampling. Source: depth Table 4."""
    started = time.perf_counter()
    printed = paper_rows("depth:table-4")
    tasks = [
        TopKTask(PowerLawSpectrum(row["a"], row["b"], SOFTMAX_DIM), SOFTMAX_CONTEXT, row["top_k"]) for row in printed
    ]
    floors = mean_field_floors(tasks, seed=seed, profile=profile, progress=progress)
    rows: list[Row] = []
    for row, found in zip(printed, floors, strict=True):
        rows.append(mean_field_row({"k": row["top_k"], "a": row["a"], "b": row["b"]}, row["L0"], found))
    gaps = [found.disagreement.value / found.floor.value for found in floors]
    notes = (
        f"Sizes dim {SOFTMAX_DIM}, context {SOFTMAX_CONTEXT}, which the paper does not print. The mean-field floor is "
        "the lowest loss of infinitely many layers on fixed context states, found without training.",
        f"Layers drawn independently from the best law lose (A - C)/L more, {min(gaps):.2g} to {max(gaps):.2g} floors "
        "at one layer; trained layers are not independent and lose less. The fitted exponents need trained models of "
        "many depths and are not tested here.",
    )
    settings = {"dim": SOFTMAX_DIM, "context": SOFTMAX_CONTEXT, "profile": profile, "seed": seed}
    return Table(
        "depth:table-4",
        "floors of softmax attention, broader targets and spectra",
        tuple(rows),
        notes,
        partial(mean_field_figure, rows),
        time.perf_counter() - started,
        settings,
    )
