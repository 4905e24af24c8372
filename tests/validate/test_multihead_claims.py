"""The ledger of the multi-head paper: complete, settled, and wrong exactly where the paper is."""

import pytest

from tests.validate.recorded import check_verdict, recorded_verdicts, with_marks
from validate.claims.ledger import Verdict, load_ledger

pytestmark = pytest.mark.tree

# Numbered displays of the text that we hold, sections 2 to 5 (appendices B to E are not in it).
NUMBERED = (
    [f"2.{n}" for n in range(1, 6)]
    + [f"3.{n}" for n in range(1, 3)]
    + [f"4.{n}" for n in range(1, 14)]
    + [f"5.{n}" for n in range(1, 7)]
)
# Unnumbered displays that state a formula, by the number that follows.
UNNUMBERED = ("2.3a", "3.1a", "4.2a", "4.3a", "4.3b", "4.3c", "4.5a", "4.6a", "4.6b", "4.6c", "5.2a", "5.3b")
NAMED = (
    ["prop-4.1", "thm-4.2-i", "thm-4.2-ii", "thm-4.2-iii", "table-1", "def-5.1", "def-5.2"]
    + [f"obs-{n}" for n in range(1, 5)]
)  # fmt: skip
WRONG_AS_PRINTED = {
    "2.2": Verdict.MISPRINT,
    "2.3b": Verdict.MISPRINT,
    "2.3": Verdict.MISPRINT,
    "3.2a": Verdict.MISPRINT,
    "obs-2": Verdict.OVERCLAIM,
    "obs-3-vanilla": Verdict.CONDITIONAL,
    "obs-3-bayes": Verdict.CONDITIONAL,
    "4.1a": Verdict.OVERCLAIM,
    "prop-4.1": Verdict.CONDITIONAL,
    "4.1": Verdict.CONDITIONAL,
    "4.2": Verdict.CONDITIONAL,
    "4.3": Verdict.CONDITIONAL,
    "4.4": Verdict.OVERCLAIM,
    "4.5": Verdict.MISPRINT,
    "4.6a": Verdict.MISPRINT,
    "4.6b": Verdict.MISPRINT,
    "4.6c": Verdict.MISPRINT,
    "4.7": Verdict.MISPRINT,
    "4.13": Verdict.MISPRINT,
    "thm-4.2-ii": Verdict.OVERCLAIM,
    "thm-4.2-ii-decreasing": Verdict.MISPRINT,
    "5.2": Verdict.MISPRINT,
    "5.3-length": Verdict.CONDITIONAL,
    "contribution-e": Verdict.OVERCLAIM,
    "table-1-eta": Verdict.OVERCLAIM,
    "5.3c": Verdict.OVERCLAIM,
    "5.6a": Verdict.OVERCLAIM,
    "conj-5.3": Verdict.MISPRINT,
    "def-5.2": Verdict.MISPRINT,
    "contribution-f": Verdict.MISPRINT,
    "fig-18-trained": Verdict.OVERCLAIM,
}
CLAIMS = {claim.id.removeprefix("multihead:"): claim for claim in load_ledger().select(paper="multihead")}
BEYOND = {
    "softmax-risk",
    "first-order-loss",
    "descent-risks",
    "preconditioners",
    "bayes-risk",
    "sharper-bound",
    "finite-gamma",
    "unequal-heads",
    "activations",
    "two-head-flow",
    "flow-stages",
    "multi-task",
    "multi-task-ranks",
    "multi-task-trained",
    "trained-preconditioner",
    "length-floor",
    "same-sign-minimum",
}


@pytest.mark.parametrize("name", [*NUMBERED, *UNNUMBERED, *NAMED])
def test_every_statement_of_the_text_has_a_claim(name):
    assert name in CLAIMS


def test_every_finding_of_ours_has_a_claim():
    ours = {claim.id.removeprefix("beyond:") for claim in load_ledger().select(paper="beyond")}
    assert ours >= BEYOND


def test_expected_verdicts_name_claims_with_corrections():
    assert set(WRONG_AS_PRINTED) == {name for name, claim in CLAIMS.items() if claim.correction is not None}


@pytest.mark.parametrize("identifier", with_marks(f"multihead:{name}" for name in CLAIMS))
def test_verdict(identifier):
    name = identifier.removeprefix("multihead:")
    check_verdict(identifier, WRONG_AS_PRINTED.get(name, Verdict.HOLDS).value)


def test_the_record_is_complete_and_agrees():
    expected = {f"multihead:{name}": WRONG_AS_PRINTED.get(name, Verdict.HOLDS).value for name in CLAIMS}
    assert recorded_verdicts("multihead") == expected
