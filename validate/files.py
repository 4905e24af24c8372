"""Writing files so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.files import replace_file


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file beside ``path``, flush it to disk, and rename it into place."""
    replace_file(path, content, "output folder")


def strict_json(content: Any, *, indent: int | None = None) -> str:
    """JSON text with full-precision floats and without NaN or infinities. Raises ValueError where one is left in."""
    return json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=True)
