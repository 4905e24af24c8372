"""What importing costs: commands and theory work without torch, and theory also without Numba and Matplotlib."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tree

HEAVY = ("torch", "numba", "matplotlib")
IMPORT_AND_LIST_HEAVY = f"""
import importlib, json, pkgutil, sys
for name in sys.argv[1:]:
    if name.endswith(".*"):
        package = importlib.import_module(name[:-2])
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(info.name)
    else:
        importlib.import_module(name)
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""


def heavy_imports(*modules: str, cwd: Path) -> set[str]:
    command = [sys.executable, "-c", IMPORT_AND_LIST_HEAVY, *modules]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_probe_sees_heavy_imports(tmp_path: Path) -> None:
    assert heavy_imports("matplotlib", cwd=tmp_path) == {"matplotlib"}


@pytest.mark.parametrize("module", ["theory", "theory.problems", "theory.results", "sim", "sim.streams", "validate"])
def test_the_vocabulary_imports_nothing_heavy(module: str, tmp_path: Path) -> None:
    assert heavy_imports(module, cwd=tmp_path) == set()


def test_no_module_of_theory_imports_torch_numba_or_matplotlib(tmp_path: Path) -> None:
    assert heavy_imports("theory.*", cwd=tmp_path) == set()


@pytest.mark.skipif(importlib.util.find_spec("validate.cli") is None, reason="the command is not there yet")
def test_the_command_does_not_import_torch(tmp_path: Path) -> None:
    assert "torch" not in heavy_imports("validate.commands.group", cwd=tmp_path)
