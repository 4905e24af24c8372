"""What is in the source tree is also in the package that the tests run on, and can be imported."""

import importlib
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("theory", "sim", "validate")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_can_be_imported(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    for path in paths:
        parts = path.relative_to(ROOT).with_suffix("").parts
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_data_file_is_there(package):
    paths = [path for path in (ROOT / package).rglob("*") if path.suffix in {".json", ".toml", ".typed"}]
    assert paths
    for path in paths:
        inside = files(package).joinpath(*path.relative_to(ROOT / package).parts)
        assert inside.read_bytes() == path.read_bytes()
