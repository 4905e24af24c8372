import pytest

from tests.validate.recorded import DEEP, check_verdict, recorded_verdicts, with_marks
from validate.claims.ledger import load_ledger

pytestmark = pytest.mark.tree
VERDICTS = recorded_verdicts("beyond")


def test_the_record_is_complete():
    assert set(VERDICTS) == {claim.id for claim in load_ledger().select(paper="beyond")}


def test_deep_claims_are_claims():
    assert set(load_ledger().claims) >= DEEP


@pytest.mark.parametrize("identifier", with_marks(VERDICTS))
def test_verdict(identifier):
    check_verdict(identifier, VERDICTS[identifier])
