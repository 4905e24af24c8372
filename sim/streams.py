"""One seed gives named, independent streams, the same bits whatever the number of threads or workers.

A stream is addressed by its seed, a name and an index: ``stream(7, "floor", 3)`` is the generator of chunk 3 of the
computation called "floor". Names enter as SHA-256 words of the spawn key, so neither neighbouring seeds nor
neighbouring names share bits, as ``seed + index`` would make them. Work is cut into chunks of fixed size, each with
its own stream, and results are merged in the order of the chunks: threads change the time, never the numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from theory.problems import as_integer
from theory.results import MissingDependencyError

if TYPE_CHECKING:
    import torch

MAX_SEED = 2**128 - 1
# Chunks in flight per worker: enough to keep workers busy while results are merged in order.
CHUNKS_AHEAD = 2

_Result = TypeVar("_Result")


def seed_sequence(seed: int, name: str, index: int = 0) -> np.random.SeedSequence:
    """The seed sequence of stream ``name``, chunk ``index``; seed in [0, 2^128), index in [0, 2^32)."""
    seed = as_integer("seed", seed, 0, MAX_SEED)
    index = as_integer("index", index, 0, 2**32 - 1)
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u4")
    return np.random.SeedSequence(seed, spawn_key=(*(int(word) for word in words), index))


def stream(seed: int, name: str, index: int = 0) -> np.random.Generator:
    """A NumPy generator (PCG64DXSM), which Numba kernels take as an argument and draw the same bits from."""
    return np.random.Generator(np.random.PCG64DXSM(seed_sequence(seed, name, index)))


def torch_stream(seed: int, name: str, index: int = 0, device: str = "cpu") -> torch.Generator:
    """A torch generator on ``device`` whose 64-bit seed is drawn from the named stream."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("training needs torch: pip install 'attnlaws[train]'") from None

    generator = torch.Generator(device=device)
    generator.manual_seed(int(seed_sequence(seed, name, index).generate_state(1, np.uint64)[0] >> 1))
    return generator


def default_workers() -> int:
    """Number of threads to use: the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_chunks(
    function: Callable[[np.random.Generator], _Result],
    seed: int,
    name: str,
    chunks: range,
    workers: int | None = None,
) -> Iterator[_Result]:
    """``function(stream(seed, name, i))`` for i in ``chunks``, yielded in order, computed by ``workers`` threads.

    ``function`` must release the GIL to gain from threads (Numba kernels with ``nogil``). Closing the iterator
    cancels what has not started, so a caller may stop as soon as its error is small enough.
    """
    workers = default_workers() if workers is None else as_integer("workers", workers, 1, 4096)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[_Result]] = deque()
        try:
            for index in chunks:
                waiting.append(pool.submit(lambda i=index: function(stream(seed, name, i))))  # type: ignore[misc]
                if len(waiting) >= CHUNKS_AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
