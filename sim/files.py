"""Writing files so that a crash or power cut leaves the old file or the new one, never part of either."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from theory.results import DomainError


def replace_file(path: Path, content: bytes, folder_name: str) -> None:
    """Write ``content`` to a temporary file beside ``path``, flush it to disk, and rename it into place.

    folder_name: what the folder is called in errors. Source: no equation. Raises DomainError where the folder cannot
    be written, OSError where the file cannot; the old file then stands.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as failure:
        raise DomainError(f"the {folder_name} must be writable, got {path.parent}: {failure.strerror}") from None
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # A rename is on disk only once the folder is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
