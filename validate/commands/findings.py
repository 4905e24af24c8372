"""What training finds on disk, told in sentences instead of Python's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def named_findings() -> Iterator[None]:
    """Say which damaged files were found, and at the end how many runs of other code, with the first of them."""
    from sim.origin import OtherCodeWarning
    from sim.sweep import PASSED_ON

    of_other_code: list[str] = []
    with warnings.catch_warnings():
        for category in PASSED_ON:
            warnings.simplefilter("always", category)
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, OtherCodeWarning):
                of_other_code.append(str(message))
            elif issubclass(category, PASSED_ON):
                click.echo(f"attnlaws: {message}", err=True)
            else:
                usual(message, category, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        try:
            yield
        finally:
            if len(of_other_code) > 1:
                click.echo(f"attnlaws: {len(of_other_code)} runs were made by other code; the first:", err=True)
            for message in of_other_code[:1]:
                click.echo(f"attnlaws: {message}", err=True)
