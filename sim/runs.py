"""A training run on disk: one folder, named by the hash of its configuration, that survives kill -9 at any moment.

A folder holds ``config.json``, ``metrics.parquet`` (the history so far), ``checkpoint.pt`` with its predecessor
``checkpoint.previous.pt``, ``result.json`` once the run is measured, and ``snapshots`` where they are kept. Every file
is written whole under another name, flushed to disk and renamed into place. A checkpoint begins with a line that holds
the SHA-256 of the rest, and is read without executing anything in it. ``lock`` is held by the process that trains the
folder; the operating system frees it when that process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sim.files import replace_file
from theory.results import AttnlawsError, DomainError

State = dict[str, Any]

CONFIG = "config.json"
METRICS = "metrics.parquet"
RESULT = "result.json"
CHECKPOINT = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
LOCK = "lock"
SNAPSHOTS = "snapshots"
REFUSED = ".refused"
MAGIC = b"attnlaws checkpoint 1 "
HASH_DIGITS = 16
POLL_SECONDS = 0.2


class CheckpointError(AttnlawsError):
    """A checkpoint is damaged or belongs to another run."""


class RunLockedError(AttnlawsError):
    """Another process trains the same folder."""


class CheckpointWarning(UserWarning):
    """A file of a run was refused; the text says which, why, and what is used instead."""


def canonical_json(content: Any) -> str:
    """The one text of ``content``: sorted keys, no spaces, shortest exact floats, and 1 for 1.0.

    Equal numbers have one text and different numbers have two. Raises DomainError for NaN and infinities.
    Source: no equation.
    """
    try:
        return json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, OverflowError) as failure:
        raise DomainError(f"a configuration must hold finite numbers and plain values: {failure}") from None


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def content_hash(content: Any) -> str:
    """SHA-256 of `canonical_json` in hexadecimal. Source: no equation."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """`replace_file` in a run folder, with one sentence for every failure.

    Source: no equation. Raises DomainError where the folder or the file cannot be written.
    """
    try:
        replace_file(path, content, "run folder")
    except OSError as failure:
        raise DomainError(f"{path} could not be written: {failure.strerror}") from None


@contextmanager
def opened_run(root: Path, config: Mapping[str, Any], identity: str, wait: float = 0.0) -> Iterator[RunFolder]:
    """The locked folder of a run below ``root``, made where it is not there.

    config: what config.json holds; identity: hash of what determines the run, whose first digits name the folder;
    wait: seconds to wait for another process to let go. Raises RunLockedError where it does not, DomainError where
    the folder holds another run. Source: no equation.
    """
    path = root / identity[:HASH_DIGITS]
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as failure:
        raise DomainError(f"the run folder must be writable, got {path}: {failure.strerror}") from None
    try:
        _lock(lock, path, wait)
        run = RunFolder(path, identity)
        run.remove_leftovers()
        run.write_config(config)
        yield run
    finally:
        os.close(lock)


def _lock(descriptor: int, path: Path, wait: float) -> None:
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise RunLockedError(f"another process trains the run in {path}: wait until it ends") from None
            time.sleep(POLL_SECONDS)
        else:
            return


class RunFolder:
    """The files of one run. path: the folder; identity: hash of what determines the run. Source: no equation."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.identity = identity

    def remove_leftovers(self) -> None:
        """Remove half-written files of a process that was killed; call with the lock held."""
        for name in (CONFIG, METRICS, RESULT, CHECKPOINT):
            for path in self.path.glob(f".{name}.*"):
                path.unlink(missing_ok=True)
        for path in (self.path / SNAPSHOTS).glob(".*"):
            path.unlink(missing_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json where it is not there. Raises DomainError where it is that of another run."""
        path = self.path / CONFIG
        if path.exists():
            try:
                found = json.loads(path.read_bytes())["identity"]
            except (ValueError, KeyError, TypeError):
                _warn(f"{path} is damaged and is written anew")
            else:
                if found != self.identity:
                    raise DomainError(f"the run folder must hold the run it is named by, got another one in {path}")
                return
        content = {"identity": self.identity, "config": config}
        write_durably(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())

    def write_checkpoint(self, state: State) -> None:
        """Write ``state`` (tensors and plain values) as the latest checkpoint and keep the one before."""
        latest = self.path / CHECKPOINT
        content = checkpoint_bytes({**state, "identity": self.identity})
        if latest.exists():
            os.replace(latest, self.path / PREVIOUS)
        write_durably(latest, content)

    def write_snapshot(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Write the parameters after ``step`` steps, for `sim.snapshots`."""
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_durably(self.path / SNAPSHOTS / f"{step}.npz", buffer.getvalue())

    def read_checkpoint(self) -> State | None:
        """The latest good state, or ``None``. Bad files are renamed, with a `CheckpointWarning` that names them."""
        for name, instead in ((CHECKPOINT, "the one before is used"), (PREVIOUS, "the run starts anew")):
            path = self.path / name
            if not path.exists():
                continue
            try:
                return checkpoint_state(path, self.identity)
            except CheckpointError as failure:
                # Out of the way, so that it never takes the place of a good one.
                os.replace(path, path.with_name(path.name + REFUSED))
                lost = name == CHECKPOINT and not (self.path / PREVIOUS).exists()
                _warn(f"{failure}; {'the run starts anew' if lost else instead}")
        return None

    def write_metrics(self, columns: Mapping[str, Sequence[Any]], steps: int, *, complete: bool) -> None:
        """Write the history so far; its metadata say up to which step, and whether that is all of it."""
        write_durably(self.path / METRICS, metrics_bytes(columns, self.identity, steps, complete=complete))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write what was measured, with a checksum."""
        content = {"identity": self.identity, "sha256": content_hash(result), "result": result}
        write_durably(self.path / RESULT, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())

    def read_result(self) -> dict[str, Any] | None:
        """What `write_result` wrote, or ``None`` where it is not there; a damaged file is named and not used."""
        path = self.path / RESULT
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            result: dict[str, Any] = content["result"]
            good = content["identity"] == self.identity and content["sha256"] == content_hash(result)
        except (ValueError, KeyError, TypeError):
            good = False
        if good:
            return result
        _warn(f"{path} is damaged; the run is measured again")
        return None


def checkpoint_bytes(state: State) -> bytes:
    """A line with magic word and SHA-256, then ``state`` as torch saves it. Source: no equation."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    return MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def checkpoint_state(path: Path, identity: str) -> State:
    """The state in a checkpoint file.

    Raises CheckpointError where the file is not a checkpoint, its checksum differs, or it is that of another run.
    Source: no equation.
    """
    import torch

    try:
        content = path.read_bytes()
    except OSError as failure:
        raise CheckpointError(f"checkpoint {path} cannot be read: {failure.strerror}") from None
    if not content.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of attnlaws or its first bytes are damaged")
    head, _, payload = content.partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != head[len(MAGIC) :]:
        raise CheckpointError(f"checkpoint {path} is damaged: its checksum does not match its {len(payload)} bytes")
    state: State = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    if state["identity"] != identity:
        raise CheckpointError(f"checkpoint {path} belongs to another run, {state['identity'][:HASH_DIGITS]}")
    return state


def metrics_bytes(columns: Mapping[str, Sequence[Any]], identity: str, steps: int, *, complete: bool) -> bytes:
    """A Parquet file of ``columns`` whose metadata hold run, steps and completeness. Source: no equation."""
    import pyarrow
    import pyarrow.parquet

    about = {"run": identity, "steps": steps, "complete": complete}
    table = pyarrow.table(dict(columns)).replace_schema_metadata({"attnlaws": json.dumps(about)})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def read_metrics(path: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Columns of a metrics file, and what it says of itself: ``run``, ``steps`` done and ``complete``.

    May be called while the run goes on. Source: no equation.
    """
    import pyarrow.parquet

    # Read in one go: Arrow opens a path twice, and the file may be replaced in between.
    table = pyarrow.parquet.read_table(io.BytesIO(path.read_bytes()))
    return table.to_pydict(), json.loads(table.schema.metadata[b"attnlaws"])


def _warn(sentence: str) -> None:
    warnings.warn(sentence, CheckpointWarning, stacklevel=3)
