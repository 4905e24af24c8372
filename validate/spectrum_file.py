"""Reading a spectrum of one's own, mode by mode, from a CSV or Parquet file."""

from __future__ import annotations

from pathlib import Path

from theory.problems import ArraySpectrum
from validate.table_file import column_names, number_columns, read_table, require_column

EIGENVALUE_COLUMN = "eigenvalue"
TEACHER_COLUMN = "teacher"


def read_spectrum(path: Path, eigenvalue: str = EIGENVALUE_COLUMN, teacher: str = TEACHER_COLUMN) -> ArraySpectrum:
    """The spectrum in a table with a row per mode, in any order: eigenvalues λ_k > 0 and teacher variances ω_k >= 0.

    eigenvalue, teacher: names of the columns. Equal rows are modes of their own. Source: depth (3). Raises
    DomainError, naming lines, where a value is missing or out of range, and where the file cannot be read.
    """
    table, rows = read_table(path)
    names = column_names(table)
    require_column(names, eigenvalue, "eigenvalue-column")
    require_column(names, teacher, "teacher-column")
    columns = {"eigenvalue": eigenvalue, "teacher": teacher}
    numbers = number_columns(table.set_axis(names, axis=1), rows, columns, zero=frozenset({"teacher"}))
    return ArraySpectrum(tuple(numbers["eigenvalue"].tolist()), tuple(numbers["teacher"].tolist()))
