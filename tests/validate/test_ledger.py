import math

import numpy as np
import pytest

from theory.results import DomainError
from validate.claims.ledger import (
    Claim,
    Correction,
    Evidence,
    Ledger,
    Method,
    Relation,
    Verdict,
    evaluate,
    evaluate_all,
    load_ledger,
    statistical,
)
from validate.ledger_view import ledger_text

NUMBERED = {f"depth:{number}" for number in range(1, 94)}


def figure(value, threshold=1e-12):
    return lambda: [Evidence(Method.NUMERIC, value, threshold, "error", "one point")]


def claim(check, correction=None, **options):
    return Claim("beyond:test", "a test", "x = y", check, correction, **options)


def test_a_true_claim_holds_and_a_false_one_does_not():
    assert evaluate(claim(figure(1e-15))).verdict is Verdict.HOLDS
    outcome = evaluate(claim(figure(0.1)))
    assert outcome.verdict is Verdict.NOT_REPRODUCIBLE
    assert outcome.failed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_figures_that_are_not_small_never_support(bad):
    assert not evaluate(claim(figure(bad))).verdict.settled


@pytest.mark.parametrize(
    ("relation", "verdict"),
    [
        (Relation.CONDITIONS, Verdict.CONDITIONAL),
        (Relation.MISPRINT, Verdict.MISPRINT),
        (Relation.OVERCLAIM, Verdict.OVERCLAIM),
    ],
)
def test_a_correction_decides_the_verdict_only_where_it_holds(relation, verdict):
    holds, fails = Correction(relation, "x = z", figure(0.0)), Correction(relation, "x = z", figure(1.0))
    assert evaluate(claim(figure(1.0), holds)).verdict is verdict
    assert evaluate(claim(figure(1.0), fails)).verdict is Verdict.NOT_REPRODUCIBLE
    assert evaluate(claim(figure(0.0), holds)).verdict is Verdict.HOLDS


def test_a_check_that_raises_is_reported():
    def broken():
        yield Evidence(Method.NUMERIC, 0.0, 1.0, "error", "one point")
        raise ZeroDivisionError("division by zero")

    outcome = evaluate(claim(broken))
    assert outcome.verdict is Verdict.CHECK_FAILED
    assert outcome.failed
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert evaluate(claim(figure(1.0), Correction(Relation.MISPRINT, "", broken))).verdict is Verdict.CHECK_FAILED


def test_a_check_without_evidence_never_holds():
    assert evaluate(claim(list)).verdict is Verdict.CHECK_FAILED


def test_one_failing_figure_spoils_a_claim():
    assert not evaluate(claim(lambda: [*figure(0.0)(), *figure(1.0)()])).verdict.settled


def test_a_measurement_may_fail_without_failing_the_run():
    outcome = evaluate(claim(figure(1.0), measurement=True))
    assert outcome.verdict is Verdict.NOT_REPRODUCIBLE
    assert not outcome.failed


def test_statistical_evidence_has_the_false_alarm_rate_it_declares():
    rng, rate, repeats = np.random.default_rng(1), 0.05, 4000
    alarms = 0
    for _ in range(repeats):
        sample = rng.standard_normal(400)
        z = sample.mean() * math.sqrt(sample.size)
        outcome = evaluate(claim(lambda z=z: [statistical(z, rate, "a mean of zero", "400 normals")]))
        alarms += outcome.verdict is not Verdict.HOLDS
    # Four binomial standard errors.
    assert abs(alarms - rate * repeats) < 4 * math.sqrt(repeats * rate * (1 - rate))


def test_statistical_evidence_finds_a_false_mean():
    assert not statistical(8.0, 1e-6, "a mean", "a shifted sample").supports
    assert statistical(-4.0, 1e-6, "a mean", "a sample").supports


def test_ledger_refuses_duplicates_and_unknown_ids():
    ledger = Ledger()
    ledger.claim("beyond:x", "x", "x")(figure(0.0))
    with pytest.raises(DomainError, match="unique"):
        ledger.claim("beyond:x", "x", "x")(figure(0.0))
    with pytest.raises(DomainError, match="nonsense"):
        ledger.select(["nonsense"])
    assert [c.id for c in ledger.select(paper="beyond")] == ["beyond:x"]
    assert ledger.select(paper="depth") == []


def test_every_numbered_equation_and_table_of_the_depth_paper_has_a_claim():
    claims = load_ledger().claims
    assert set(claims) >= NUMBERED
    assert set(claims) >= {f"depth:table-{number}" for number in range(1, 6)}


def test_ids_name_their_paper_and_statements_are_not_empty():
    for identifier, entry in load_ledger().claims.items():
        assert identifier == entry.id
        assert entry.paper in ("depth", "multihead", "beyond")
        assert entry.statement
        assert entry.title


def test_merging_refuses_an_id_that_is_taken():
    one, two = Ledger(), Ledger()
    for ledger in (one, two):
        ledger.claim("beyond:x", "x", "x")(figure(0.0))
    with pytest.raises(DomainError, match="unique"):
        one.merge(two)


def test_views():
    ledger = load_ledger()
    outcomes = list(evaluate_all([ledger.claims["depth:39"], claim(figure(math.nan))]))
    text = "\n".join(ledger_text(outcomes))
    assert "MISPRINT" in text
    assert "corrected" in text
    assert "NOT <=" in text
    content = outcomes[1].to_json()
    assert content["evidence"][0]["figure"] is None
    assert "nan" in content["evidence"][0]["reason"]
