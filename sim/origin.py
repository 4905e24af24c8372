"""Which code made a run: versions of what was installed, and a digest of the source files that decide its numbers."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import theory.problems

DISTRIBUTION = "attnlaws"
DIGEST_DIGITS = 16
UNKNOWN = "not recorded"


class OtherCodeWarning(UserWarning):
    """A run on disk was made by other code than that which goes on with it or reads it; the text says what differs."""


@lru_cache(maxsize=1)
def distribution_version() -> str:
    """Version of the installed distribution, or that there is none. Source: no equation."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"


@lru_cache(maxsize=64)
def source_digest(experiment: type) -> str:
    """First digits of the SHA-256 of the source of ``sim``, `theory.problems` and, where it lies elsewhere, the class.

    experiment: class of what is trained. Names and contents of the files count, not where they are; a class that was
    typed into an interpreter has no file and does not count. Source: no equation.
    """
    digest = hashlib.sha256()
    for name, path in _source_files(experiment):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:DIGEST_DIGITS]


def _source_files(experiment: type) -> Iterator[tuple[str, Path]]:
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package.parent).as_posix(), path
    yield "theory/problems.py", Path(theory.problems.__file__)
    if not experiment.__module__.startswith(f"{package.name}."):
        try:
            found = inspect.getsourcefile(experiment)
        except (OSError, TypeError):
            found = None
        if found is not None and Path(found).is_file():
            yield experiment.__module__, Path(found)
