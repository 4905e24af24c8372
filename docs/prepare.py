"""Write the pages and figures that code makes, before the documentation is built: python docs/prepare.py."""

from pathlib import Path

import figures
import generate

FOLDER = Path(__file__).parent / "generated"


def write_all() -> None:
    """Write what is missing or has changed."""
    generate.write_pages(FOLDER)
    figures.write_figures(FOLDER / "figures")


if __name__ == "__main__":
    write_all()
