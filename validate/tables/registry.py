"""Which tables can be reproduced, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from theory.results import DomainError
from validate.tables import depth_table_1, depth_table_2, depth_table_3, depth_table_4
from validate.tables.comparison import Progress, Table

Builder = Callable[[str, int, Progress], Table]

TABLES: dict[str, Builder] = {
    "depth:table-1": depth_table_1.build,
    "depth:table-2": depth_table_2.build,
    "depth:table-3": depth_table_3.build,
    "depth:table-4": depth_table_4.build,
}


def select_tables(names: Sequence[str]) -> dict[str, Builder]:
    """The builders of the named tables in the order given, all where none is named.

    Raises DomainError for unknown names.
    """
    for name in names:
        if name not in TABLES:
            raise DomainError(f"name must be one of {', '.join(TABLES)}, got {name!r}")
    return {name: TABLES[name] for name in names} if names else dict(TABLES)
