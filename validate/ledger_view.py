"""The ledger as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from validate.claims.ledger import Outcome, Verdict


def ledger_text(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Each claim with its verdict and evidence, then a count of verdicts."""
    for outcome in outcomes:
        claim = outcome.claim
        yield f"{claim.id}  {claim.title}: {outcome.verdict.value.upper()}"
        yield f"    printed    {claim.statement}"
        if claim.reading:
            yield f"    reading    {claim.reading}"
        yield from (f"    evidence   {item.sentence()}" for item in outcome.printed)
        if claim.correction is not None and outcome.verdict is not Verdict.HOLDS:
            yield f"    corrected  {claim.correction.statement}"
            if claim.correction.note:
                yield f"    note       {claim.correction.note}"
            yield from (f"    evidence   {item.sentence()}" for item in outcome.corrected)
        if outcome.error:
            yield f"    error      {outcome.error}"
    counts = Counter(outcome.verdict.value for outcome in outcomes)
    yield ""
    yield f"{len(outcomes)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
