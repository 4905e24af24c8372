"""The engine of the ledger: claims, evidence, and verdicts that are computed, never typed in.

A `Claim` states one thing as its source prints it and carries a check of exactly that. Where the print fails, a
`Correction` states what holds instead and carries its own check. `evaluate` runs both and derives the verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from theory.results import DomainError


class Method(Enum):
    """How evidence was obtained."""

    SYMBOLIC = "symbolic"
    EXACT = "exact arithmetic"
    HIGH_PRECISION = "high precision"
    NUMERIC = "floating point"
    SWEEP = "sweep, worst case kept"
    STATISTICAL = "statistical"


class Relation(Enum):
    """How a correction relates to the printed statement; it decides the verdict once the correction holds."""

    CONDITIONS = "the same statement on a smaller domain"
    MISPRINT = "the statement with a symbol, sign or constant mended"
    OVERCLAIM = "a weaker or different statement"


class Verdict(Enum):
    """What the evidence says about the printed statement."""

    HOLDS = "holds"
    CONDITIONAL = "holds under conditions"
    MISPRINT = "misprint"
    OVERCLAIM = "overclaim"
    NOT_REPRODUCIBLE = "not reproducible"
    CHECK_FAILED = "check failed to run"

    @property
    def settled(self) -> bool:
        """Whether a statement is known to hold: the printed one or its correction."""
        return self not in (Verdict.NOT_REPRODUCIBLE, Verdict.CHECK_FAILED)


_VERDICT_OF_RELATION = {
    Relation.CONDITIONS: Verdict.CONDITIONAL,
    Relation.MISPRINT: Verdict.MISPRINT,
    Relation.OVERCLAIM: Verdict.OVERCLAIM,
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measured figure against its threshold.

    method; figure: what was measured (an error, a z-score), never NaN; threshold: the largest absolute figure that
    supports the statement; what: what the figure is; domain: over which arguments it is the worst case;
    false_alarm: for statistical evidence, the chance that a true statement fails.
    """

    method: Method
    figure: float
    threshold: float
    what: str
    domain: str
    false_alarm: float | None = None

    def __post_init__(self) -> None:
        # NumPy scalars are not JSON.
        object.__setattr__(self, "figure", float(self.figure))

    @property
    def supports(self) -> bool:
        """Whether the figure supports the statement; NaN never does."""
        return abs(self.figure) <= self.threshold

    def sentence(self) -> str:
        """The evidence as one line of text."""
        relation = "<=" if self.supports else "NOT <="
        chance = "" if self.false_alarm is None else f", false-alarm rate {self.false_alarm:.1e}"
        return (
            f"{self.what}: {abs(self.figure):.3g} {relation} {self.threshold:.3g} ({self.method.value}{chance}; "
            f"{self.domain})"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON; a figure that is not finite is null with a reason."""
        finite = math.isfinite(self.figure)
        content: dict[str, Any] = {
            "method": self.method.value,
            "figure": self.figure if finite else None,
            "threshold": self.threshold,
            "supports": self.supports,
            "what": self.what,
            "domain": self.domain,
            "false_alarm": self.false_alarm,
        }
        if not finite:
            content["reason"] = f"the figure is {self.figure!r}"
        return content


def statistical(z: float, false_alarm: float, what: str, domain: str) -> Evidence:
    """Evidence from a z-score: it fails a true statement with probability ``false_alarm`` (two-sided, normal)."""
    from scipy.special import ndtri

    return Evidence(Method.STATISTICAL, z, -float(ndtri(false_alarm / 2)), f"z-score of {what}", domain, false_alarm)


Check = Callable[[], Iterable[Evidence]]


@dataclass(frozen=True, slots=True)
class Correction:
    """What holds where the printed statement does not. note: why, for readers."""

    relation: Relation
    statement: str
    check: Check
    note: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement with its check.

    id: ``depth:39``, ``multihead:4.6``, ``beyond:...``; an unnumbered display takes the number that follows it with
    a letter. title: in words; statement: LaTeX as printed; check: yields evidence about exactly that statement;
    correction: where the print fails; measurement: whether the statement is a measured number of the source, which
    we may fail to reproduce without being wrong; reading: how an ambiguous print was read.
    """

    id: str
    title: str
    statement: str
    check: Check
    correction: Correction | None = None
    measurement: bool = False
    reading: str = ""

    @property
    def paper(self) -> str:
        """The part of the id before the colon."""
        return self.id.split(":", 1)[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A claim after its checks ran. printed, corrected: evidence; error: the failure of a check that raised."""

    claim: Claim
    verdict: Verdict
    printed: tuple[Evidence, ...]
    corrected: tuple[Evidence, ...]
    seconds: float
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether something that was expected to hold did not."""
        if self.verdict is Verdict.NOT_REPRODUCIBLE:
            return not self.claim.measurement
        return self.verdict is Verdict.CHECK_FAILED

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        correction = self.claim.correction
        used = correction is not None and self.verdict is not Verdict.HOLDS
        return {
            "id": self.claim.id,
            "title": self.claim.title,
            "statement": self.claim.statement,
            "reading": self.claim.reading,
            "verdict": self.verdict.value,
            "evidence": [item.to_json() for item in self.printed],
            "corrected": None
            if correction is None or not used
            else {
                "relation": correction.relation.value,
                "statement": correction.statement,
                "note": correction.note,
                "evidence": [item.to_json() for item in self.corrected],
            },
            "error": self.error or None,
            "seconds": self.seconds,
        }


def evaluate(claim: Claim) -> Outcome:
    """Run the checks of a claim and compute its verdict. A check that raises is reported, never counted as holding."""
    started = time.perf_counter()
    printed, error = _collect(claim.check)
    corrected: tuple[Evidence, ...] = ()
    if not error and claim.correction is not None and not _supported(printed):
        corrected, error = _collect(claim.correction.check)
    verdict = Verdict.CHECK_FAILED if error else _verdict(claim, printed, corrected)
    return Outcome(claim, verdict, printed, corrected, time.perf_counter() - started, error)


def _collect(check: Check) -> tuple[tuple[Evidence, ...], str]:
    try:
        evidence = tuple(check())
    except Exception as failure:
        return (), f"{type(failure).__name__}: {failure}"
    return evidence, "" if evidence else "the check produced no evidence"


def _supported(evidence: Sequence[Evidence]) -> bool:
    return bool(evidence) and all(item.supports for item in evidence)


def _verdict(claim: Claim, printed: Sequence[Evidence], corrected: Sequence[Evidence]) -> Verdict:
    if _supported(printed):
        return Verdict.HOLDS
    if claim.correction is not None and _supported(corrected):
        return _VERDICT_OF_RELATION[claim.correction.relation]
    return Verdict.NOT_REPRODUCIBLE


@dataclass(slots=True)
class Ledger:
    """Claims by id, in the order of the papers."""

    claims: dict[str, Claim] = field(default_factory=dict)

    def claim(
        self, identifier: str, title: str, statement: str, *, measurement: bool = False, reading: str = ""
    ) -> Callable[[Check], Check]:
        """Decorator that enters a check as the claim ``identifier``."""

        def enter(check: Check) -> Check:
            if identifier in self.claims:
                raise DomainError(f"claim id must be unique, got {identifier!r} twice")
            self.claims[identifier] = Claim(
                identifier, title, statement, check, measurement=measurement, reading=reading
            )
            return check

        return enter

    def correction(
        self, identifier: str, relation: Relation, statement: str, note: str = ""
    ) -> Callable[[Check], Check]:
        """Decorator that enters a check as the correction of the claim ``identifier``, entered before."""

        def enter(check: Check) -> Check:
            claim = self.claims[identifier]
            self.claims[identifier] = Claim(
                claim.id,
                claim.title,
                claim.statement,
                claim.check,
                Correction(relation, statement, check, note),
                claim.measurement,
                claim.reading,
            )
            return check

        return enter

    def merge(self, other: Ledger) -> None:
        """Enter all claims of another ledger. Raises DomainError where an id is taken."""
        for identifier, claim in other.claims.items():
            if identifier in self.claims:
                raise DomainError(f"claim id must be unique, got {identifier!r} twice")
            self.claims[identifier] = claim

    def select(self, identifiers: Sequence[str] = (), paper: str | None = None) -> list[Claim]:
        """Claims with these ids (all, where none are given) of this paper. Raises DomainError for unknown ids."""
        unknown = [name for name in identifiers if name not in self.claims]
        if unknown:
            raise DomainError(f"claim id must be one that `attnlaws verify --list` prints, got {unknown[0]!r}")
        chosen = [self.claims[name] for name in identifiers] if identifiers else list(self.claims.values())
        return [claim for claim in chosen if paper is None or claim.paper == paper]


def evaluate_all(claims: Iterable[Claim]) -> Iterator[Outcome]:
    """Outcomes one by one, in order."""
    for claim in claims:
        yield evaluate(claim)


def load_ledger() -> Ledger:
    """The ledger with every claim entered, in the order of the papers."""
    from validate.claims.depth import (
        architecture,
        beyond,
        context_update,
        covariance_polynomial,
        fits,
        layer_ensemble,
        loss_floor,
        mean_field,
        mode_superposition,
        references,
        setup,
        tables,
        trained,
    )
    from validate.claims.multihead import approximate_loss, extensions, gradient_descent, gradient_dynamics
    from validate.claims.multihead import bayes_risk as multihead_bayes_risk
    from validate.claims.multihead import beyond as multihead_beyond
    from validate.claims.multihead import setup as multihead_setup
    from validate.claims.multihead import solution_manifold as multihead_solution_manifold
    from validate.claims.multihead import trained as multihead_trained
    from validate.claims.multihead import trained_extensions as multihead_trained_extensions

    merged = Ledger()
    for module in (
        setup,
        covariance_polynomial,
        references,
        loss_floor,
        mode_superposition,
        layer_ensemble,
        context_update,
        fits,
        tables,
        beyond,
        architecture,
        mean_field,
        trained,
        multihead_setup,
        approximate_loss,
        gradient_dynamics,
        multihead_solution_manifold,
        gradient_descent,
        multihead_bayes_risk,
        extensions,
        multihead_beyond,
        multihead_trained,
        multihead_trained_extensions,
    ):
        merged.merge(module.LEDGER)
    return merged


__all__ = [
    "Claim",
    "Correction",
    "Evidence",
    "Ledger",
    "Method",
    "Outcome",
    "Relation",
    "Verdict",
    "evaluate",
    "evaluate_all",
    "load_ledger",
    "statistical",
]
