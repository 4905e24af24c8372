"""What training finds on disk is told in sentences."""

from __future__ import annotations

import warnings

import pytest

from sim.origin import OtherCodeWarning
from sim.runs import CheckpointWarning
from validate.commands.findings import named_findings


def test_many_runs_of_other_code_are_one_finding(capsys: pytest.CaptureFixture[str]) -> None:
    with named_findings():
        for number in range(3):
            warnings.warn(f"run {number} is of other code", OtherCodeWarning, stacklevel=1)
        warnings.warn("a checkpoint is damaged", CheckpointWarning, stacklevel=1)
    assert capsys.readouterr().err.splitlines() == [
        "attnlaws: a checkpoint is damaged",
        "attnlaws: 3 runs were made by other code; the first:",
        "attnlaws: run 0 is of other code",
    ]


def test_a_finding_is_told_though_training_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        with named_findings():
            warnings.warn("one run is of other code", OtherCodeWarning, stacklevel=1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert capsys.readouterr().err == "attnlaws: one run is of other code\n"


def test_other_warnings_are_left_alone() -> None:
    with pytest.warns(UserWarning, match="something else"), named_findings():
        warnings.warn("something else", UserWarning, stacklevel=1)
