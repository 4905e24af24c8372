"""The verdicts that `attnlaws verify --json` last wrote to docs/verdicts.json, to be found again by the tests."""

import json
from pathlib import Path

import pytest

from validate.claims.ledger import evaluate, load_ledger

RECORD = Path(__file__).parents[2] / "docs" / "verdicts.json"
# Claims that train or search for tens of seconds.
DEEP = {
    "beyond:mean-field-top-2", "beyond:multi-task-trained", "beyond:trained-heads-together", "beyond:trained-step",
    "beyond:trained-top-16", "beyond:trained-top-2", "beyond:trained-trapped", "beyond:unequal-heads",
    "depth:sec-A.3-degree-one", "multihead:fig-12-trained", "multihead:fig-18-trained", "multihead:fig-19-trained",
    "multihead:obs-1", "multihead:obs-1-trained", "multihead:obs-2-trained", "multihead:obs-3-trained",
    "multihead:obs-4-trained",
}  # fmt: skip


def recorded_verdicts(paper):
    """Verdict by claim id, for one paper."""
    claims = json.loads(RECORD.read_text(encoding="utf-8"))["claims"]
    return {claim["id"]: claim["verdict"] for claim in claims if claim["id"].startswith(f"{paper}:")}


def with_marks(identifiers):
    """Parameters for ``pytest.mark.parametrize``, those of claims in `DEEP` marked so."""
    return [pytest.param(one, marks=pytest.mark.deep if one in DEEP else ()) for one in identifiers]


def check_verdict(identifier, expected):
    """Evaluate a claim again: it runs, settles, has the recorded verdict, and is strict JSON."""
    outcome = evaluate(load_ledger().claims[identifier])
    assert outcome.error == ""
    assert not outcome.failed
    assert outcome.verdict.value == expected, [item.sentence() for item in (*outcome.printed, *outcome.corrected)]
    json.dumps(outcome.to_json(), allow_nan=False)
