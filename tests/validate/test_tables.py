import csv
import json

import numpy as np
import pytest

from theory.problems import PowerLawSpectrum, TopKTask
from theory.results import DomainError, Estimate
from validate.tables import comparison, depth_table_2, depth_table_3
from validate.tables.comparison import Agreement, Row, Table
from validate.tables.view import differences, show_table

pytestmark = pytest.mark.long


def estimate(value, stderr):
    return Estimate(value, stderr, 100, 10, 0)


def test_paper_tables_are_those_of_the_papers():
    assert len(comparison.paper_rows("depth:table-1")) == 7
    assert comparison.paper_rows("depth:table-3")[0]["predicted"] == 59.3714
    with pytest.raises(DomainError, match="table-77"):
        comparison.paper_rows("depth:table-77")


def test_agreement_uses_both_errors():
    assert comparison.compare(estimate(1.0, 0.01), 1.04, 0.01) is Agreement.AGREES
    assert comparison.compare(estimate(1.0, 0.01), 1.04, None) is Agreement.DIFFERS


def test_fitted_exponent_of_an_exact_power_law():
    risks = 3.0 * np.array(depth_table_2.DEPTHS, dtype=float) ** -1.7
    assert depth_table_2.fitted_exponent(risks) == pytest.approx(1.7, rel=1e-12)
    sampled = depth_table_2.sampled_exponent([estimate(risk, 0.01 * risk) for risk in risks])
    assert sampled.value == pytest.approx(1.7, rel=1e-12)
    x = np.log(depth_table_2.DEPTHS)
    assert sampled.stderr == pytest.approx(0.01 / np.sqrt(np.sum((x - x.mean()) ** 2)), rel=1e-12)


def test_rows_that_contradict_themselves_fail_the_table():
    rows = depth_table_2.asymptote_row({"a": 2, "b": 1}, "free", 2.0, 4.0, 3.97)
    assert rows.agreement is Agreement.DIFFERS
    assert rows.consistent
    wrong = depth_table_2.asymptote_row({"a": 2, "b": 1}, "free", 2.0, 4.0, 2.5)
    assert not wrong.consistent


def test_predicted_floor_of_the_isotropic_row():
    task = TopKTask(PowerLawSpectrum(0, 0, 128), 1024, 2)
    row = depth_table_3.predicted_row(task, 59.3714, 0.0213, estimate(59.38, 0.05))
    assert row.agreement is Agreement.AGREES
    assert row.consistent
    assert not depth_table_3.predicted_row(task, 59.3714, 0.0213, estimate(61.0, 0.05)).consistent
    assert depth_table_3.measured_row(task, 70.0, 59.38).agreement is Agreement.DIFFERS


def test_saved_tables_keep_all_digits(tmp_path):
    from validate.figures.comparison import floor_figure

    rows = (
        Row(
            {"k": 2, "a": 0, "b": 0}, "predicted floor", 59.3714, 0.02, theory=1 / 3, monte_carlo=estimate(0.1, 0.01)
        ),
        Row({"k": 2, "a": 0, "b": 0}, "trained loss", 60.0, agreement=Agreement.AGREES, trained=estimate(0.2, 0.01)),
    )
    table = Table(
        "depth:table-3", "test", rows, ("a note",), lambda: floor_figure(rows, "predicted floor", "trained loss")
    )
    paths = comparison.save(table, tmp_path)
    assert [path.name for path in paths] == [f"depth-table-3.{end}" for end in ("csv", "json", "png", "svg")]
    first = next(csv.DictReader(paths[0].read_text().splitlines()))
    assert float(first["theory"]) == 1 / 3
    assert float(first["monte_carlo"]) == 0.1
    assert json.loads(paths[1].read_text())["rows"][0]["theory"] == 1 / 3
    assert paths[2].stat().st_size > 5000
    before = paths[3].read_bytes()
    comparison.save(table, tmp_path)
    assert paths[3].read_bytes() == before
    assert show_table(table).row_count == 2
    assert list(differences([table])) == ["What differs:", "  nothing"]


def test_differences_name_rows_and_reasons():
    rows = [
        Row({"a": 2, "b": b}, "free", 2.0, agreement=Agreement.DIFFERS, remark="it is discrete") for b in range(5)
    ]
    rows.append(Row({"a": 2, "b": 0}, "sampled", None, consistent=False))
    table = Table("depth:table-2", "test", tuple(rows), (), lambda: None)
    text = "\n".join(differences([table]))
    assert "5 of 6 rows: free (a 2, b 0); free (a 2, b 1); free (a 2, b 2); ..." in text
    assert "because it is discrete" in text
    assert "our own numbers disagree" in text


def test_table_2_row_by_row():
    printed = {"a": 2.0, "b": 1.0, "constrained": 1.0, "measured": 1.485, "free": 2.0}
    seen = []
    rows = depth_table_2.spectrum_rows(printed, "quick", 0, seen.append)
    assert all(row.consistent for row in rows)
    assert [row.agreement for row in rows] == [
        Agreement.AGREES, Agreement.DIFFERS, Agreement.AGREES, Agreement.AGREES, Agreement.BRACKETED,
    ]  # fmt: skip
    assert seen[-1] == pytest.approx(1)
    assert seen == sorted(seen)
