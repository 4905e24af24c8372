"""Writing files so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from theory.results import DomainError


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to a temporary file beside ``path``, flush it to disk, and rename it into place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as failure:
        raise DomainError(f"the output folder must be writable, got {path.parent}: {failure.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; results are for reading.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def strict_json(content: Any, *, indent: int | None = None) -> str:
    """JSON text with full-precision floats and without NaN or infinities. Raises ValueError where one is left in."""
    return json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=True)
