"""Pages that code writes: the table from equation to function and to claim."""

import ast
import re
from pathlib import Path

from validate.claims.ledger import load_ledger

ROOT = Path(__file__).parent.parent
PAPERS = {"depth": "Depth paper", "multihead": "Multi-head paper"}
# "depth (36)-(39)", "depth (24), (26)", "multihead (4.1)": numbers and ranges after the paper's name.
MENTION = re.compile(r"\b(depth|multihead)\b[^.;]*?((?:\((?:\d+(?:\.\d+)?)\)(?:-|, | and )?)+)")
NUMBER = re.compile(r"\((\d+(?:\.\d+)?)\)(-)?")


def sourced_functions() -> dict[str, list[str]]:
    """Names of public functions by the equation that their docstring gives as source."""
    functions: dict[str, list[str]] = {}
    for path in sorted((ROOT / "theory").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            for equation in cited_equations(ast.get_docstring(node) or ""):
                functions.setdefault(equation, []).append(f"`{module}.{node.name}`")
    return functions


def cited_equations(docstring: str) -> list[str]:
    """Equation ids in the part of a docstring that follows "Source:"."""
    _, _, source = docstring.partition("Source:")
    found: list[str] = []
    for paper, numbers in MENTION.findall(" ".join(source.split())):
        parts = NUMBER.findall(numbers)
        for (number, dash), following in zip(parts, [*parts[1:], ("", "")], strict=True):
            found.append(f"{paper}:{number}")
            if dash and "." not in number:
                found += [f"{paper}:{n}" for n in range(int(number) + 1, int(following[0]))]
    return list(dict.fromkeys(found))


def equations_page() -> str:
    """Every claim of the ledger with its statement and the functions that implement it."""
    functions = sourced_functions()
    lines = ["# Equations and functions", ""]
    lines += ["Every numbered equation that the ledger holds, as printed, with the functions that implement it.", ""]
    claims = load_ledger().claims
    for paper, title in PAPERS.items():
        chosen = [claim for claim in claims.values() if claim.paper == paper]
        if not chosen:
            continue
        lines += [f"## {title}", ""]
        for claim in chosen:
            number = claim.id.split(":", 1)[1]
            lines += [f"### {claim.id}: {claim.title}", "", f"$$\n{claim.statement}\n$$", ""]
            if claim.reading:
                lines += [f"Reading: {claim.reading}.", ""]
            names = functions.get(f"{paper}:{number}", [])
            lines += ["Functions: " + ", ".join(names) if names else "Checked directly in the ledger.", ""]
    return "\n".join(lines)


def write_pages(folder: Path) -> None:
    """Write the generated pages where they have changed."""
    folder.mkdir(exist_ok=True)
    for name, text in {"equations.md": equations_page()}.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
