"""Memory that is freed stays with a process that trains."""

from __future__ import annotations

import multiprocessing
import platform
import resource
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from sim.allocator import keep_freed_memory

# The new process imports this module from the tree.
pytestmark = pytest.mark.tree
BLOCKS, BLOCK_BYTES = 20, 2**25


def faults_of_blocks(kept: bool) -> tuple[bool, int]:
    """Whether memory is kept, and the pages faulted in by blocks that are written and freed one after the other."""
    told = keep_freed_memory() if kept else False
    np.ones(BLOCK_BYTES, dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(BLOCKS):
        np.ones(BLOCK_BYTES, dtype=np.uint8)
    return told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def in_new_process(kept: bool) -> tuple[bool, int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(faults_of_blocks, kept).result()


def test_freed_blocks_are_not_faulted_in_again() -> None:
    told, faults = in_new_process(kept=True)
    assert told == (sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc")
    usual = in_new_process(kept=False)[1]
    # Where pages are huge, a block faults in few of them at any rate; one block's worth may be new.
    assert faults <= usual / 2 + 2 if told else faults > 0
