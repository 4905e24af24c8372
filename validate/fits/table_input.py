"""Reading measured losses from CSV, Parquet or a DataFrame, with every refused row named by its line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from theory.results import DomainError
from validate.fits.measured import MeasuredLosses
from validate.table_file import column_names, listed, number_columns, read_table, require_column, row_names

if TYPE_CHECKING:
    from pandas import DataFrame

# Names that mean depth or loss, in lower case and without anything but letters.
DEPTH_NAMES = frozenset({"depth", "depths", "layer", "layers", "nlayer", "nlayers", "numlayers", "l", "x"})
LOSS_NAMES = frozenset(
    {"loss", "losses", "evalloss", "evaluationloss", "testloss", "valloss", "validationloss", "risk", "testrisk", "y"}
)
ERROR_NAMES = frozenset({"stderr", "standarderror", "lossstderr", "se", "sem", "error", "yerr"})


def read_losses(
    source: Path | str | DataFrame, x: str | None = None, y: str | None = None, stderr: str | None = None
) -> MeasuredLosses:
    """Losses ``y`` at depths ``x`` from a CSV file (any usual delimiter), a Parquet file or a DataFrame.

    Columns that are not named are guessed where that is unambiguous: one column whose name means depth, one whose name
    means loss, or one of the two in a table of two columns. Values are read with all their digits. Lines of a CSV are
    counted from 1, its header; rows of other tables from 1. A row that repeats another one in every column is counted
    once, and noted. Raises DomainError, naming the rows, where a value is missing, no number or not positive, and where
    the file cannot be read.
    """
    table, rows = read_table(Path(source)) if isinstance(source, Path | str) else (source, row_names(source))
    names = column_names(table)
    depth, loss = choose_columns(names, x, y)
    if stderr is not None:
        require_column(names, stderr, "stderr")
    table = table.set_axis(names, axis=1)
    kept, notes = _without_repetition(table, rows)
    table, rows = table.iloc[kept], [rows[i] for i in kept]
    chosen = {"depth": depth, "loss": loss} | ({} if stderr is None else {"stderr": stderr})
    numbers = number_columns(table, rows, chosen)
    unused = [name for name in names if _letters(name) in ERROR_NAMES and name != stderr]
    if stderr is None and unused:
        notes.append(f"the column {unused[0]!r} is not used; --stderr {unused[0]} takes weights from it")
    return MeasuredLosses(numbers["depth"], numbers["loss"], numbers.get("stderr"), tuple(rows), tuple(notes))


def choose_columns(names: list[str], x: str | None, y: str | None) -> tuple[str, str]:
    """The columns of depth and loss, as named or as guessed."""
    for name, option in ((x, "x"), (y, "y")):
        if name is not None:
            require_column(names, name, option)
    depths = [x] if x is not None else [name for name in names if _letters(name) in DEPTH_NAMES and name != y]
    losses = [y] if y is not None else [name for name in names if _letters(name) in LOSS_NAMES and name != x]
    if len(names) == 2 and len(depths) + len(losses) == 1:
        (known,) = depths or losses
        other = names[1 - names.index(known)]
        depths, losses = depths or [other], losses or [other]
    if len(depths) != 1 or len(losses) != 1:
        what = "depth" if len(depths) != 1 else "loss"
        option = "--x" if len(depths) != 1 else "--y"
        raise DomainError(f"which column is the {what} is not clear from {', '.join(names)}: name it with {option}")
    if depths == losses:
        raise DomainError(f"depth and loss must be two columns, got {depths[0]!r} for both")
    return depths[0], losses[0]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalpha())


def _without_repetition(table: DataFrame, rows: list[str]) -> tuple[list[int], list[str]]:
    """Indices of the rows that are not exact repetitions of earlier ones, and a note on those that are."""
    first: dict[tuple[str, ...], int] = {}
    kept, repeated = [], []
    for index, cells in enumerate(table.itertuples(index=False, name=None)):
        key = tuple(str(cell).strip() for cell in cells)
        if key in first:
            repeated.append(f"{rows[index]} repeats {rows[first[key]]}")
        else:
            first[key] = index
            kept.append(index)
    return kept, [f"counted once: {listed(repeated)}"] if repeated else []
