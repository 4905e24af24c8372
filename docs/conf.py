"""Sphinx configuration: pages in Markdown, API from docstrings, examples executed by `make docs`."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import prepare

project = "attnlaws"
author = "The attnlaws developers"
copyright = "2026, The attnlaws developers"  # noqa: A001
version = release = installed_version("attnlaws")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"npt.ArrayLike": "ArrayLike", "FloatArray": "FloatArray"}
default_role = "literal"
html_theme = "furo"
html_title = f"attnlaws {version}"
exclude_patterns = ["_build", "generated/*.md", "results"]
nitpicky = False
doctest_global_setup = "import numpy as np"


def setup(_app: object) -> None:
    """Write the generated pages and figures before the sources are read."""
    prepare.write_all()
