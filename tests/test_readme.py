"""The README's Python runs as printed."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.tree
README = Path(__file__).parents[1] / "README.md"


def test_python_examples_run_and_show_what_they_say():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        for line in block.splitlines():
            code, _, comment = line.partition("  # ")
            if not comment.startswith("Certified("):
                exec(line, names)
                continue
            # "Certified(value=59.3802270..., tolerance=6e-12)": the printed digits are those of the value.
            value, tolerance = re.match(r"Certified\(value=([\d.]+?)\.\.\., tolerance=([\de-]+)\)", comment).groups()
            result = eval(code, names)
            assert str(result.value).startswith(value)
            assert result.tolerance == pytest.approx(float(tolerance), rel=0.5)
