"""The verdicts that `attnlaws verify --json` last wrote to docs/verdicts.json, to be found again by the tests."""

import json
from pathlib import Path

from validate.claims.ledger import evaluate, load_ledger

RECORD = Path(__file__).parents[2] / "docs" / "verdicts.json"


def recorded_verdicts(paper):
    """Verdict by claim id, for one paper."""
    claims = json.loads(RECORD.read_text(encoding="utf-8"))["claims"]
    return {claim["id"]: claim["verdict"] for claim in claims if claim["id"].startswith(f"{paper}:")}


def check_verdict(identifier, expected):
    """Evaluate a claim again: it runs, settles, has the recorded verdict, and is strict JSON."""
    outcome = evaluate(load_ledger().claims[identifier])
    assert outcome.error == ""
    assert not outcome.failed
    assert outcome.verdict.value == expected, [item.sentence() for item in (*outcome.printed, *outcome.corrected)]
    json.dumps(outcome.to_json(), allow_nan=False)
