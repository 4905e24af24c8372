"""The memory of the training process: what a step frees is kept for the next step."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

# Parameters of mallopt in the headers of the GNU C library, and the largest value it takes.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
LARGEST = 2**31 - 1


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Keep freed blocks in this process, however large; whether its C library could be told to.

    The GNU C library gives blocks of megabytes back to the system as soon as they are freed. The activations of deep
    models are such blocks, and every step faults them in again page by page, which costs as much time as half of the
    arithmetic. Only for processes that train and then end, as their memory stays at its peak. Other C libraries and
    systems are left as they are. Source: no equation.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, LARGEST)))
