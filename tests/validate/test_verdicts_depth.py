import pytest

from tests.validate.recorded import check_verdict, recorded_verdicts, with_marks
from validate.claims.ledger import load_ledger

pytestmark = pytest.mark.tree
VERDICTS = recorded_verdicts("depth")


def test_the_record_is_complete():
    assert set(VERDICTS) == {claim.id for claim in load_ledger().select(paper="depth")}


@pytest.mark.parametrize("identifier", with_marks(VERDICTS))
def test_verdict(identifier):
    check_verdict(identifier, VERDICTS[identifier])
