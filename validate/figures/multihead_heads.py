"""Figures of trained heads: circuits as heat maps, and ω and μ along a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.head_patterns import Circuits
from theory.results import FloatArray
from validate.figures.panels import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MAP_WIDTH, MAP_HEIGHT = 2.1, 2.9
PATH_HEIGHT = 2.8
SMALLEST_SHOWN = 0.05


@dataclass(frozen=True, slots=True)
class CircuitMap:
    """One head: key_query, (D, dim), the columns that act; output_value, the last row of OV, (D,)."""

    title: str
    key_query: FloatArray
    output_value: FloatArray


@dataclass(frozen=True, slots=True)
class HeadPath:
    """ω and μ of one member along a run: steps (n,), omega and mu (n, heads); title: of the run."""

    title: str
    steps: npt.NDArray[np.int64]
    omega: FloatArray
    mu: FloatArray


def circuit_maps(circuits: Circuits, titles: Sequence[str]) -> list[CircuitMap]:
    """A map per head of one member with one output. Source: multihead (2.4)."""
    d = circuits.dim
    return [
        CircuitMap(title, key_query[:, :d], value[d])
        for title, key_query, value in zip(titles, circuits.key_query, circuits.output_value, strict=True)
    ]


def heads_figure(
    maps: Sequence[CircuitMap],
    paths: Sequence[HeadPath] = (),
    names: tuple[str, str] = ("KQ", "OV"),
    columns: int | None = None,
) -> Figure:
    """Heat maps side by side, KQ above OV, and below them ω and μ along runs.

    names: of what is above and below; columns: maps to a row, all of them where ``None``. Colours are common to a row.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attnlaws", "font.size": 9})
    across = len(maps) if columns is None else columns
    chunks = [maps[i : i + across] for i in range(0, len(maps), across)] if maps else []
    heights = [MAP_HEIGHT] * len(chunks) + [PATH_HEIGHT] * len(paths)
    width = max(MAP_WIDTH * across, 7.0 if paths else 0.0)
    figure = plt.figure(figsize=(width, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, chunk in zip(parts, chunks, strict=False):
        _draw_maps(part, chunk, names)
    for part, path in zip(parts[len(chunks) :], paths, strict=True):
        _draw_path(part, path)
    return figure


def _draw_maps(part: SubFigure, maps: Sequence[CircuitMap], names: tuple[str, str]) -> None:
    axes = part.subplots(2, len(maps), squeeze=False, height_ratios=[4, 1])
    for row, name in ((0, "key_query"), (1, "output_value")):
        limit = max(float(np.abs(getattr(one, name)).max()) for one in maps)
        for axis, one in zip(axes[row], maps, strict=True):
            values = np.atleast_2d(getattr(one, name))
            image = axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
            _write_values(axis, values, limit)
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(one.title, fontsize=8)
        axes[row, 0].set_ylabel(names[row], fontsize=8)
        part.colorbar(image, ax=list(axes[row]), shrink=0.9, pad=0.01)


def _write_values(axis: Axes, values: FloatArray, limit: float) -> None:
    """Entries as text where they are not small."""
    for (i, j), value in np.ndenumerate(values):
        if abs(value) > SMALLEST_SHOWN * limit:
            colour = "white" if abs(value) > limit / 2 else "black"
            axis.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=5.5, color=colour)


def _draw_path(part: SubFigure, path: HeadPath) -> None:
    axes = part.subplots(1, 2)
    for axis, values, name in ((axes[0], path.omega, "ω"), (axes[1], path.mu, "μ")):
        for head in range(values.shape[1]):
            axis.plot(path.steps, values[:, head], color=COLOURS[head], lw=1.2, label=f"head {head + 1}")
        axis.axhline(0, color="0.7", lw=0.6)
        axis.set_xlabel("step")
        axis.set_ylabel(name)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(path.title, fontsize=8)
    axes[0].legend(frameon=False, fontsize=7)


def scatter_figure(ensembles: Sequence[tuple[str, FloatArray, FloatArray]]) -> Figure:
    """Heads of all members in the plane of ω and μ, a panel per ensemble; omega, mu: shape (members, heads)."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attnlaws", "font.size": 9})
    figure, axes = plt.subplots(
        1, len(ensembles), figsize=(2.6 * len(ensembles), 2.6), squeeze=False, layout="constrained"
    )
    for axis, (title, omega, mu) in zip(axes[0], ensembles, strict=True):
        for member, (w, m) in enumerate(zip(omega, mu, strict=True)):
            axis.plot(w, m, "o", ms=4, color=COLOURS[member % len(COLOURS)])
        axis.axhline(0, color="0.7", lw=0.6)
        axis.axvline(0, color="0.7", lw=0.6)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel("ω")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("μ")
    return figure
