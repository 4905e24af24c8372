"""Pages that code writes: from equation to function, claim and verdict, and what the ledger found."""

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from validate.claims.ledger import Evidence, Method, Verdict, load_ledger

ROOT = Path(__file__).parent.parent
VERDICTS = Path(__file__).parent / "verdicts.json"
PAPERS = {"depth": "Depth paper", "multihead": "Multi-head paper", "beyond": "Beyond the papers"}
# "depth (36)-(39)", "depth (24), (26)", "multihead Theorem 4.2 (ii) and (4.1)", "display before depth (34)".
SENTENCE = re.compile(r"\b(depth|multihead)\b((?:[^.;]|\.(?=\d))*)")
NUMBER = re.compile(r"(\bbefore (?:depth |multihead )?)?\((\d+(?:\.\d+)?)\)(-(?=\())?")
NAMED = re.compile(r"\b(Theorem|Proposition|Table|Observation) (\d+(?:\.\d+)?)(?: \((i+)\))?")
SLUGS = {"Theorem": "thm", "Proposition": "prop", "Table": "table", "Observation": "obs"}
# Characters that Markdown would read as markup; code spans stay as they are.
MARKUP = re.compile(r"`[^`]*`|([\\*_<>$\[\]|#])")


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
    """Claim ids in the part of a docstring that follows "Source:"; "before (34)" stands for 34a, 34b and so on."""
    _, _, source = docstring.partition("Source:")
    text = " ".join(source.split()).replace("before depth (", "depth, before (")
    found: list[str] = []
    for paper, sentence in SENTENCE.findall(text):
        found += [
            f"{paper}:{SLUGS[kind]}-{number}" + (f"-{part}" if part else "")
            for kind, number, part in NAMED.findall(sentence)
        ]
        numbers = NUMBER.findall(sentence)
        for (before, number, dash), following in zip(numbers, [*numbers[1:], ("", "", "")], strict=False):
            found.append(f"{paper}:before-{number}" if before else f"{paper}:{number}")
            if dash:
                # Ranges run over the last part of the number: (36)-(39), (4.2)-(4.4).
                head, _, first = number.rpartition(".")
                last = following[1].rpartition(".")[2]
                found += [f"{paper}:{head + '.' if head else ''}{n}" for n in range(int(first) + 1, int(last))]
    return list(dict.fromkeys(found))


def functions_of(identifier: str, functions: dict[str, list[str]]) -> list[str]:
    """Functions of a claim; an unnumbered display, such as 34a, has those whose source is "before (34)"."""
    unnumbered = re.fullmatch(r"(\w+):(\d+(?:\.\d+)?)[a-z]", identifier)
    key = f"{unnumbered[1]}:before-{unnumbered[2]}" if unnumbered else identifier
    return functions.get(identifier, []) or functions.get(key, [])


def verdicts() -> dict[str, dict[str, Any]]:
    """Outcomes of the ledger by claim id, in the order of the file. Ends the build where there is no file."""
    if not VERDICTS.exists():
        raise SystemExit("docs/verdicts.json is missing: run attnlaws verify --json > docs/verdicts.json first")
    return {item["id"]: item for item in json.loads(VERDICTS.read_text(encoding="utf-8"))["claims"]}


def plain(text: str) -> str:
    """Text with the characters escaped that Markdown would read as markup, code spans excepted."""
    return MARKUP.sub(lambda match: f"\\{match[1]}" if match[1] else match[0], text)


def anchor(identifier: str) -> str:
    """Name of the target of a finding."""
    return "finding-" + re.sub(r"[^a-z0-9]+", "-", identifier.lower())


def display(statement: str) -> list[str]:
    """A displayed formula."""
    return [f"$$\n{statement.strip()}\n$$", ""]


def verdict_line(outcome: dict[str, Any] | None, identifier: str) -> str:
    """The verdict of a claim, with a link to the finding where there is one."""
    if outcome is None:
        return "Verdict: none in `docs/verdicts.json`."
    verdict = outcome["verdict"]
    return f"Verdict: {verdict if verdict == Verdict.HOLDS.value else f'[{verdict}](#{anchor(identifier)})'}."


def equations_page() -> str:
    """Every claim of the ledger with its statement, its verdict and the functions that implement it."""
    functions, outcomes = sourced_functions(), verdicts()
    lines: list[str] = []
    claims = load_ledger().claims
    for paper, title in PAPERS.items():
        chosen = [claim for claim in claims.values() if claim.paper == paper]
        if not chosen:
            continue
        lines += [f"## {title}", ""]
        for claim in chosen:
            lines += [f"### {claim.id}: {plain(claim.title)}", "", *display(claim.statement)]
            if claim.reading:
                lines += [f"Reading: {plain(claim.reading)}.", ""]
            lines += [verdict_line(outcomes.get(claim.id), claim.id), ""]
            names = functions_of(claim.id, functions)
            lines += ["Functions: " + ", ".join(names) if names else "Checked directly in the ledger.", ""]
    return "\n".join(lines)


def findings_page() -> str:
    """Counts of verdicts by paper, then every claim that does not simply hold, with what holds instead."""
    outcomes = verdicts()
    counts = Counter((identifier.split(":")[0], item["verdict"]) for identifier, item in outcomes.items())
    shown = [verdict.value for verdict in Verdict if any(verdict.value == found for _, found in counts)]
    lines = ["## Summary", "", "| | " + " | ".join(shown) + " | all |", "|---" * (len(shown) + 2) + "|"]
    for paper, title in PAPERS.items():
        row = [counts[paper, verdict] for verdict in shown]
        if sum(row):
            lines.append(f"| {title} | " + " | ".join(map(str, [*row, sum(row)])) + " |")
    for paper, title in PAPERS.items():
        found = [
            item
            for identifier, item in outcomes.items()
            if identifier.startswith(f"{paper}:") and item["verdict"] != Verdict.HOLDS.value
        ]
        if found:
            lines += ["", f"## {title}", ""]
        for item in found:
            lines += finding(item)
    return "\n".join([*lines, ""])


def finding(item: dict[str, Any]) -> list[str]:
    """One claim that does not simply hold: as printed, what holds instead, why, and the evidence that decides."""
    lines = [
        f"({anchor(item['id'])})=",
        f"### {item['id']}: {plain(item['title'])}",
        "",
        f"**{item['verdict']}**",
        "",
    ]
    lines += ["Stated:" if item["id"].startswith("beyond:") else "Printed:", "", *display(item["statement"])]
    if item["reading"]:
        lines += [f"Reading: {plain(item['reading'])}.", ""]
    lines += [f"- {line}" for line in evidence_lines(item["evidence"], supporting=False)]
    if item["error"]:
        lines += [f"- {plain(item['error'])}"]
    corrected = item["corrected"]
    if corrected is not None:
        supported = all(evidence["supports"] for evidence in corrected["evidence"])
        title = "Instead:" if supported else "Tried instead, but not supported either:"
        lines += ["", title, "", *display(corrected["statement"])]
        if corrected["note"]:
            lines += [f"{plain(corrected['note'][0].upper() + corrected['note'][1:])}.".replace("..", "."), ""]
        lines += [f"- {line}" for line in evidence_lines(corrected["evidence"], supporting=supported)]
    return [*lines, ""]


def evidence_lines(items: list[dict[str, Any]], *, supporting: bool) -> list[str]:
    """The evidence that decides, as sentences: against a printed statement, or for its correction."""
    return [
        plain(
            Evidence(
                Method(item["method"]),
                float("nan") if item["figure"] is None else item["figure"],
                item["threshold"],
                item["what"],
                item["domain"],
                item["false_alarm"],
            ).sentence()
        )
        for item in items
        if item["supports"] is supporting
    ]


def write_pages(folder: Path) -> None:
    """Write the generated pages where they have changed."""
    folder.mkdir(exist_ok=True)
    for name, text in {"equations.md": equations_page(), "findings.md": findings_page()}.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
