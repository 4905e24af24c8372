"""Reading tables from CSV or Parquet files, with every refused cell named by its line."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theory.results import DomainError, FloatArray

if TYPE_CHECKING:
    from pandas import DataFrame

PARQUET_MAGIC = b"PAR1"
# Cells that hold no value, in lower case.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
DELIMITERS = ",;\t| "
# Rows named in one message; the rest are counted.
NAMED_ROWS = 6


def read_table(path: Path) -> tuple[DataFrame, list[str]]:
    """The table of a CSV file (any usual delimiter) or a Parquet file, and what messages call each row.

    Cells of text stay text. Raises DomainError where the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise DomainError(f"the file must be readable, got {str(path)!r}: {failure.strerror}") from None
    if not content.strip():
        raise DomainError(f"the file {str(path)!r} is empty")
    if content.startswith(PARQUET_MAGIC) or path.suffix.lower() in {".parquet", ".pq"}:
        table = _read_parquet(path)
        return table, row_names(table)
    return _read_text(path, content)


def column_names(table: DataFrame) -> list[str]:
    """The names of the columns. Raises DomainError where two are equal."""
    names = [str(name) for name in table.columns]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DomainError(f"column names must differ, got {repeated[0]!r} more than once")
    return names


def require_column(names: Sequence[str], name: str, option: str) -> None:
    """Refuse a name that no column has. Raises DomainError, naming the option that gave it."""
    if name not in names:
        raise DomainError(f"--{option} must name a column of the table ({', '.join(names)}), got {name!r}")


def number_columns(
    table: DataFrame, rows: Sequence[str], columns: Mapping[str, str], *, zero: frozenset[str] = frozenset()
) -> dict[str, FloatArray]:
    """The columns that play each role as arrays of numbers > 0, or >= 0 for the roles in ``zero``.

    rows: what messages call each row. Raises DomainError, naming the rows, where a cell holds something else.
    """
    problems: list[tuple[int, str]] = []
    numbers = {}
    for role, name in columns.items():
        cells = [_allowed(cell_number(value), role in zero) for value in table[name]]
        problems += [(i, f"{rows[i]}: {role} {cell}") for i, cell in enumerate(cells) if isinstance(cell, str)]
        numbers[role] = np.array([1.0 if isinstance(cell, str) else cell for cell in cells], dtype=np.float64)
    if problems:
        named = listed([text for _, text in sorted(problems, key=lambda problem: problem[0])])
        least = " (>= 0: " + ", ".join(sorted(zero)) + ")" if zero else ""
        raise DomainError(f"every row needs a number > 0 in each column used{least}: {named}")
    if not len(table):
        raise DomainError("the table has a header but no rows")
    return numbers


def listed(texts: Sequence[str]) -> str:
    """The first few of the texts, and how many more there are."""
    more = len(texts) - NAMED_ROWS
    return ", ".join(texts[:NAMED_ROWS]) + (f" and {more} more" if more > 0 else "")


def cell_number(value: Any) -> float | str:
    """The finite number in a cell, or what is wrong with it."""
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
    return number if math.isfinite(number) else f"{number!r} is not finite"


def _allowed(cell: float | str, zero: bool) -> float | str:
    if isinstance(cell, str) or cell > 0 or (zero and cell == 0):
        return cell
    return f"{cell:.6g} is negative" if zero else f"{cell:.6g} is not positive"


def row_names(table: DataFrame) -> list[str]:
    """Rows counted from 1, for tables that have no lines."""
    return [f"row {i}" for i in range(1, len(table) + 1)]


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
    if any(isinstance(cell_number(name), float) for name in names):
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
