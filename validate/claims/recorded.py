"""Outcomes of the ledger from recorded evidence, so that they can be shown again without another check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from theory.results import DomainError
from validate.claims.ledger import Claim, Evidence, Method, Outcome, evaluate


def recorded_outcomes(path: Path, claims: Sequence[Claim]) -> list[Outcome]:
    """Outcomes of the claims, in their order, from a file that ``attnlaws verify --json`` wrote.

    The evidence is read; verdicts are computed from it as always.
    Raises DomainError where the file is not one, or where a claim is not in it as the ledger states it now.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = {record["id"]: record for record in content["claims"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise DomainError(f"verdicts must be a file that `attnlaws verify --json` wrote, got {path}") from None
    outcomes = []
    for claim in claims:
        record = records.get(claim.id)
        if record is None or not _states(record, claim):
            raise DomainError(
                f"verdicts must hold every claim as it is stated now, but {path} does not hold {claim.id}: run "
                "`attnlaws verify --json` again"
            )
        try:
            outcomes.append(_outcome(claim, record))
        except (ValueError, KeyError, TypeError):
            raise DomainError(
                f"verdicts must be complete, but the entry of {claim.id} in {path} is damaged"
            ) from None
    return outcomes


def _states(record: Mapping[str, Any], claim: Claim) -> bool:
    corrected, correction = record.get("corrected"), claim.correction
    if corrected is not None and (correction is None or corrected.get("statement") != correction.statement):
        return False
    return (record.get("title"), record.get("statement")) == (claim.title, claim.statement)


def _outcome(claim: Claim, record: Mapping[str, Any]) -> Outcome:
    printed = tuple(_evidence(item) for item in record["evidence"])
    corrected = tuple(_evidence(item) for item in (record["corrected"] or {"evidence": ()})["evidence"])
    correction = None if claim.correction is None else replace(claim.correction, check=lambda: corrected)
    # A check that failed left no evidence, and fails again.
    outcome = evaluate(replace(claim, check=lambda: printed, correction=correction))
    return replace(outcome, claim=claim, seconds=float(record["seconds"]), error=record["error"] or outcome.error)


def _evidence(item: Mapping[str, Any]) -> Evidence:
    # A figure that is not finite stands at the end of its reason.
    figure = item["reason"].rpartition(" ")[2] if item["figure"] is None else item["figure"]
    return Evidence(
        Method(item["method"]), float(figure), item["threshold"], item["what"], item["domain"], item["false_alarm"]
    )
