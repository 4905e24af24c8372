"""Writing files so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.files import replace_file
from theory.results import DomainError


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file beside ``path``, flush it to disk, and rename it into place.

    A link keeps pointing where it does. Raises DomainError where the folder cannot be written, or where ``path`` is
    something else than a file: a device would be replaced by the rename.
    """
    require_replaceable(path)
    replace_file(path.resolve(), content, "output folder")


def require_replaceable(path: Path) -> None:
    """Refuse a path at which a folder, a device or a pipe stands. Raises DomainError."""
    if path.exists() and not path.is_file():
        raise DomainError(f"the output must be a file, got {path}, which is a folder, a device or a pipe")


def strict_json(content: Any, *, indent: int | None = None) -> str:
    """JSON text with full-precision floats and without NaN or infinities. Raises ValueError where one is left in."""
    return json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=True)
