"""The command ``attnlaws``, run in this process."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from validate import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    old, sys.argv = sys.argv, ["attnlaws", *map(str, arguments)]
    try:
        cli.main()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        sys.argv = old
    captured = capsys.readouterr()
    return status, captured.out, captured.err
