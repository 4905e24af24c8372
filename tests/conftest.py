import importlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Every run draws the same examples, and a slow machine fails no test.
# To look longer: pytest --hypothesis-profile=thorough
_SAME_EVERYWHERE = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("attnlaws", max_examples=100, **_SAME_EVERYWHERE)
settings.register_profile("thorough", max_examples=2000, **_SAME_EVERYWHERE)
settings.load_profile("attnlaws")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run on another copy of the packages than the one under ATTNLAWS_EXPECT_PREFIX, where it is set."""
    prefix = os.environ.get("ATTNLAWS_EXPECT_PREFIX")
    if not prefix:
        return
    for name in ("theory", "sim", "validate"):
        source = importlib.import_module(name).__file__
        if source is None or not Path(source).resolve().is_relative_to(Path(prefix).resolve()):
            raise pytest.UsageError(f"{name} must be imported from {prefix}, but comes from {source}")
