"""Reading measured losses from CSV, Parquet or a DataFrame, with every refused row named by its line."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theory.results import DomainError
from validate.fits.measured import MeasuredLosses, listed

if TYPE_CHECKING:
    from pandas import DataFrame

# Names that mean depth or loss, in lower case and without anything but letters.
DEPTH_NAMES = frozenset({"depth", "depths", "layer", "layers", "nlayer", "nlayers", "numlayers", "l", "x"})
LOSS_NAMES = frozenset(
    {"loss", "losses", "evalloss", "evaluationloss", "testloss", "valloss", "validationloss", "risk", "testrisk", "y"}
)
ERROR_NAMES = frozenset({"stderr", "standarderror", "lossstderr", "se", "sem", "error", "yerr"})
PARQUET_MAGIC = b"PAR1"
# Cells that hold no value, in lower case.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
DELIMITERS = ",;\t| "


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
    table, rows = (source, None) if not isinstance(source, Path | str) else _read(Path(source))
    names = [str(name) for name in table.columns]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DomainError(f"column names must differ, got {repeated[0]!r} more than once")
    rows = [f"row {i}" for i in range(1, len(table) + 1)] if rows is None else rows
    depth, loss = choose_columns(names, x, y)
    if stderr is not None:
        _present(names, stderr, "stderr")
    table = table.set_axis(names, axis=1)
    kept, notes = _without_repetition(table, rows)
    chosen = {"depth": depth, "loss": loss} | ({} if stderr is None else {"stderr": stderr})
    numbers, problems = {}, []
    for role, name in chosen.items():
        cells = [_number(value) for value in table[name]]
        problems += [f"{rows[i]}: {role} {cells[i]}" for i in kept if isinstance(cells[i], str)]
        numbers[role] = np.array([cells[i] if not isinstance(cells[i], str) else 1.0 for i in kept], dtype=np.float64)
    if problems:
        problems.sort(key=lambda text: int(text.split(":")[0].split()[1]))
        raise DomainError(f"every row needs a number > 0 in each column used: {listed(problems)}")
    if not kept:
        raise DomainError("the table has a header but no rows")
    unused = [name for name in names if _letters(name) in ERROR_NAMES and name != stderr]
    if stderr is None and unused:
        notes.append(f"the column {unused[0]!r} is not used; --stderr {unused[0]} takes weights from it")
    return MeasuredLosses(
        numbers["depth"], numbers["loss"], numbers.get("stderr"), tuple(rows[i] for i in kept), tuple(notes)
    )


def choose_columns(names: list[str], x: str | None, y: str | None) -> tuple[str, str]:
    """The columns of depth and loss, as named or as guessed."""
    for name, option in ((x, "x"), (y, "y")):
        if name is not None:
            _present(names, name, option)
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


def _present(names: list[str], name: str, option: str) -> None:
    if name not in names:
        raise DomainError(f"--{option} must name a column of the table ({', '.join(names)}), got {name!r}")


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalpha())


def _number(value: Any) -> float | str:
    """The positive number in a cell, or what is wrong with it."""
    # Missing values of pandas are neither strings nor numbers.
    if value is None or type(value).__name__ in {"NAType", "NaTType"}:
        return "is missing"
    if isinstance(value, str) and value.strip().lower() in MISSING:
        return "is missing"
    try:
        # Underscores are Python's, not a table's; truth values are no measurements.
        number = None if isinstance(value, bool | np.bool_) or "_" in str(value) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        return f"{value!r} is not a number"
    if math.isnan(number):
        return "is missing"
    if not math.isfinite(number):
        return f"{number!r} is not finite"
    return number if number > 0 else f"{number:.6g} is not positive"


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


def _read(path: Path) -> tuple[DataFrame, list[str] | None]:
    """The table of a file, and for text the line of each row."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise DomainError(f"the file must be readable, got {str(path)!r}: {failure.strerror}") from None
    if not content.strip():
        raise DomainError(f"the file {str(path)!r} is empty")
    if content.startswith(PARQUET_MAGIC) or path.suffix.lower() in {".parquet", ".pq"}:
        return _read_parquet(path), None
    return _read_text(path, content)


def _read_parquet(path: Path) -> DataFrame:
    import pandas as pd
    from pyarrow import ArrowException

    try:
        return pd.read_parquet(path, engine="pyarrow")
    except (ArrowException, OSError, ValueError):
        raise DomainError(f"{str(path)!r} is no complete Parquet file") from None


def _read_text(path: Path, content: bytes) -> tuple[DataFrame, list[str]]:
    """Cells as text, so that no digit is lost and every refused one can be shown."""
    import io

    import pandas as pd

    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DomainError(f"{str(path)!r} is neither a Parquet file nor text in UTF-8") from None
    if "\0" in text:
        raise DomainError(f"{str(path)!r} is neither a Parquet file nor text in UTF-8")
    lines = text.splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.strip())
    header = lines[number - 1]
    if header.count('"') % 2:
        raise DomainError(f"the header of {str(path)!r} has an open quotation mark")
    delimiter = _delimiter(lines[number - 1 : number + 20])
    try:
        names = next(csv.reader([header.strip()], delimiter=delimiter, skipinitialspace=True))
    except csv.Error as failure:  # a cell beyond the limit of the reader
        raise DomainError(f"the header of {str(path)!r} is no line of column names: {failure}") from None
    if any(isinstance(_number(name), float) for name in names):
        raise DomainError(f"the first line of {str(path)!r} must name the columns, got {header.strip()!r}")
    try:
        table = pd.read_csv(
            io.StringIO("\n".join(lines[number:])), sep=delimiter, header=None, names=range(len(names)), dtype=str,
            keep_default_na=False, na_filter=False, skip_blank_lines=False, skipinitialspace=True, engine="python",
            index_col=False, on_bad_lines="error",
        )  # fmt: skip
    except pd.errors.EmptyDataError:
        table = pd.DataFrame(columns=range(len(names)))
    except (pd.errors.ParserError, csv.Error, ValueError) as failure:
        raise DomainError(
            f"{str(path)!r} cannot be read as a table of {len(names)} columns: {_shifted(str(failure), number)}"
        ) from None
    labels = [f"line {number + 1 + i}" for i in range(len(table))]
    filled = [i for i in range(len(table)) if lines[number + i].strip()] if len(table) else []
    table = table.iloc[filled].set_axis([name.strip() for name in names], axis=1)
    return table, [labels[i] for i in filled]


def _delimiter(lines: list[str]) -> str:
    """The delimiter that the lines use."""
    try:
        return csv.Sniffer().sniff("\n".join(lines), delimiters=DELIMITERS).delimiter
    except csv.Error:
        found = [mark for mark in DELIMITERS if mark in lines[0].strip()]
        return found[0] if found else ","


def _shifted(message: str, lines: int) -> str:
    """A parser's message with its line numbers counted in the file."""
    import re

    return re.sub(r"line (\d+)", lambda match: f"line {int(match.group(1)) + lines}", message).rstrip(".")
