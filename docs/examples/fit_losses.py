"""Writes the example losses of the page on fits: three runs per depth of a known law with 1 % noise, nothing trained.

Run from the root of the repository: ``python docs/examples/fit_losses.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sim.streams import stream
from validate.files import write_atomically

FLOOR, COEFFICIENT, EXPONENT, NOISE, RUNS = 2.0, 3.0, 1.0, 0.01, 3
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
PATH = Path(__file__).with_suffix(".csv")


def text() -> str:
    """The table as CSV, losses with all their digits."""
    lines = ["depth,run,loss"]
    for depth in DEPTHS:
        noise = stream(0, "example losses", depth).standard_normal(RUNS)
        losses = (FLOOR + COEFFICIENT * depth**-EXPONENT) * np.exp(NOISE * noise)
        lines += [f"{depth},{run},{float(loss)!r}" for run, loss in enumerate(losses)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_atomically(PATH, text().encode())
