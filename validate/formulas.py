"""Statements in LaTeX as HTML that browsers draw by themselves: text, and formulas in MathML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from markupsafe import Markup, escape
from math_core import LatexError, LatexToMathML

# A plain \text{...} that is no base of a script, a command, a brace, or anything else.
TOKEN = re.compile(r"\\text\{([^{}\\$]*)\}(?!\s*[_^'])|\\[A-Za-z]+|\\.|[{}]|[^\\{}]+", re.DOTALL)
# Commands between which a statement must stay in one piece.
OPENING, CLOSING = {"{", r"\left", r"\begin"}, {"}", r"\right", r"\end"}
SPACES = {r"\ ": " ", r"\quad": "\u2003", r"\qquad": "\u2003\u2003"}


def statement_html(latex: str) -> Markup:
    """A statement of the ledger as HTML: formulas in MathML, text and wide spaces between them where lines may break.

    What cannot be read as LaTeX is shown as it is written, in ``<code>``.
    """
    try:
        return Markup("").join(_formula(text) if is_formula else escape(text) for text, is_formula in _pieces(latex))
    except LatexError:
        pass
    try:
        # A break may have parted what belongs together.
        return _formula(latex)
    except LatexError:
        return Markup("<code>{}</code>").format(latex)


def _formula(latex: str) -> Markup:
    # The converter escapes the text in it, and knows no command that makes links, scripts or images.
    return Markup(_converter().convert_with_local_state(rf"\displaystyle {latex}", displaystyle=False))


@lru_cache(maxsize=1)
def _converter() -> LatexToMathML:
    return LatexToMathML(fancy_error=False)


def _pieces(latex: str) -> Iterator[tuple[str, bool]]:
    """Text and formulas in turn, each with whether it is a formula."""
    formula, depth, parentheses = "", 0, 0
    for token in TOKEN.finditer(latex):
        command, text = token[0], token[1]
        depth += (command in OPENING) - (command in CLOSING)
        between = text if text is not None else SPACES.get(command)
        if between is None:
            parentheses = max(0, parentheses + command.count("(") - command.count(")"))
        if depth or parentheses or between is None:
            formula += command
            continue
        if formula.strip():
            yield formula, True
        formula = ""
        yield between, False
    if formula.strip():
        yield formula, True
