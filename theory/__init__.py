"""Closed forms and deterministic numerics of both papers: no randomness, no torch.

Submodules are loaded when first named, so ``import theory`` costs next to nothing.
"""

import importlib
from types import ModuleType

_SUBMODULES = ("depth", "multihead", "problems", "results", "special")
__all__ = ["depth", "multihead", "problems", "results", "special"]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"theory.{name}")
    raise AttributeError(f"module 'theory' has no attribute {name!r}")
