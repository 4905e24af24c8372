"""The page of ``attnlaws report``: whole, closed to the outside, escaped, and the same for the same input."""

import json
import os
import subprocess
import sys
import webbrowser
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from urllib.parse import unquote

import pytest

from tests.validate.command import run
from theory.results import DomainError, Estimate
from validate.claims import ledger
from validate.claims.ledger import Evidence, Ledger, Method, Relation, Verdict, evaluate
from validate.claims.recorded import recorded_outcomes
from validate.commands import report as command
from validate.figures.comparison import new_figure
from validate.formulas import statement_html
from validate.report import TONES, Report, anchors, columns, render_report, source_text
from validate.tables import registry, view
from validate.tables.comparison import Agreement, Row, Table

# Elements that HTML closes by itself.
VOID = {"meta", "link", "br", "img"}
HOSTILE = """</style><script>alert("x")</script><img src=http://example.org/a.png onerror='x'> & {{ 7 * 7 }} &lt;"""


class Page(HTMLParser):
    """Ids, links, addresses, tags and text of a page; ``open_tags`` is empty where all tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.addresses, self.tags, self.open_tags, self.words = [], [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open_tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value)
            elif name == "href" and tag == "a":
                self.links.append(value)
            elif name in {"href", "src", "srcset", "action", "data", "poster", "xlink:href"}:
                self.addresses.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def checked_page(text):
    """The page, after what must hold of every one: balanced, unique ids, links that resolve, nothing from outside."""
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.open_tags == []
    assert len(set(page.ids)) == len(page.ids)
    assert not any(" " in name for name in page.ids)
    assert page.links
    assert {unquote(link) for link in page.links} <= {f"#{name}" for name in page.ids}
    assert all(address.startswith("data:") for address in page.addresses)
    assert {"script", "iframe", "object", "embed", "form"}.isdisjoint(page.tags)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    return page


def table_of(rows, name="depth:table-3", **fields):
    def figure():
        figure, axes = new_figure(1, 1)
        axes.plot([1, 2], [3, 4])
        return figure

    return Table(
        name, fields.pop("title", "a table"), tuple(rows), fields.pop("notes", ("a note",)), figure, **fields
    )


ROWS = (
    Row({"k": 2, "a": 0.5}, "agreeing", 1.0, 0.1, theory=1.05, agreement=Agreement.AGREES),
    Row(
        {"k": 16},
        "differing",
        2.0,
        trained=Estimate(3.0, 0.01, 100, 10, 0),
        agreement=Agreement.DIFFERS,
        remark="why",
    ),
    Row({"k": 16}, "untested", None, theory_text="<= 0.1"),
)


def claims_ledger(identifier="depth:39", statement=r"\frac{a}{b}\le1", text="evidence"):
    """A claim that fails as printed and holds as corrected, and one that holds."""
    found = Ledger()
    found.claim(identifier, "a claim", statement, reading=text)(
        lambda: [Evidence(Method.EXACT, 2.0, 1.0, text, text)]
    )
    found.correction(identifier, Relation.MISPRINT, r"a\le2b", text)(
        lambda: [Evidence(Method.EXACT, 2.0, 2.0, text, text)]
    )
    found.claim("beyond:ours", "another", r"x=y\quad\text{for all }x")(
        lambda: [Evidence(Method.SYMBOLIC, 0.0, 0.0, "difference", "everywhere")]
    )
    return found


def outcomes_of(found):
    return tuple(evaluate(claim) for claim in found.claims.values())


def report_of(tables=(), outcomes=(), **fields):
    return replace(
        Report("1.2.3", "2026-01-02 03:04 UTC", "attnlaws report", "quick", 7, tuple(tables), tuple(outcomes)),
        **fields,
    )


FULL = report_of([table_of(ROWS)], outcomes_of(claims_ledger("depth:table-3")))


def test_a_page_shows_all_that_it_was_given():
    text = render_report(FULL)
    page = checked_page(text)
    words = " ".join(" ".join(page.words).split())
    for expected in (
        "1.2.3", "2026-01-02 03:04 UTC", "quick", "7", "attnlaws report", "All that is expected to hold does.",
        "1 of 3 rows: differing (k 16)", "because why", "1 ± 0.1", "1.05", "3 ± 0.01", "<= 0.1", "a note",
        "depth:table-3", "beyond:ours", "misprint", "evidence: 2 NOT <= 1", "evidence: 2 <= 2",
        "the statement with a symbol, sign or constant mended", "Depth paper, Table 3", "for all",
    ):  # fmt: skip
        assert expected in words, expected
    # What does not agree stands before what does.
    assert text.index("Rows that differ") < text.index("Rows by verdict")
    assert {"math", "mfrac", "figure", "caption"} <= set(page.tags)
    assert page.addresses[-1].startswith("data:image/svg+xml;base64,")
    # Table and claim of one name point at each other.
    assert {"table-depth-table-3", "claim-depth-table-3"} <= set(page.ids)
    assert page.links.count("#claim-depth-table-3") >= 3


def test_the_same_report_gives_the_same_text():
    assert render_report(FULL) == render_report(FULL)
    later = render_report(replace(FULL, date="2027-01-01 00:00 UTC"))
    assert later.replace("2027-01-01 00:00 UTC", FULL.date) == render_report(FULL)


def test_empty_parts_are_left_out():
    only_tables = checked_page(render_report(report_of([table_of(ROWS[:1], notes=())])))
    assert not any("laims" in words for words in only_tables.words)
    assert "none" in only_tables.words
    only_claims = checked_page(render_report(report_of(outcomes=outcomes_of(claims_ledger()), record="v.json")))
    assert "figure" not in only_claims.tags
    assert "v.json" in only_claims.words


def test_hostile_text_is_shown_and_does_nothing():
    rows = [Row({HOSTILE: 1}, HOSTILE, 1.0, theory_text=HOSTILE, agreement=Agreement.DIFFERS, remark=HOSTILE)]
    table = table_of(rows, HOSTILE, title=HOSTILE, notes=(HOSTILE,), settings={HOSTILE: HOSTILE})
    broken = evaluate(replace(next(iter(claims_ledger().claims.values())), id="depth:broken", check=lambda: 1 / 0))
    outcomes = (*outcomes_of(claims_ledger(HOSTILE, HOSTILE, HOSTILE)), replace(broken, error=HOSTILE))
    report = report_of([table], outcomes, version=HOSTILE, date=HOSTILE, command=HOSTILE, record=HOSTILE)
    text = render_report(report)
    page = checked_page(text)
    assert "example.org" not in "".join(page.addresses)
    # Once in each place above, more often where a page repeats it.
    assert "".join(page.words).count(HOSTILE) >= 15


@pytest.mark.parametrize(
    ("latex", "part"),
    [
        (r"\text{<b>x</b>}+1", "&lt;b&gt;x&lt;/b&gt;"),
        (r"a<b", "&lt;"),
        (r"\unknown{<i>}", r"<code>\unknown{&lt;i&gt;}</code>"),
        (r"\href{javascript:x}{y}", "<code>"),
        (r"\frac{", r"<code>\frac{</code>"),
        (r"x\text{ for 10 % of }y", "</math> for 10 % of <math>"),
        (r"\left(x\quad y\right)", "<math>"),
        (r"f(\text{best})", "<mtext>best</mtext>"),
        (r"L_\text{best}=\text{low}^2", "<mtext>low</mtext>"),
        ("", ""),
    ],
)
def test_statements(latex, part):
    html = statement_html(latex)
    assert part in html
    assert "<b>" not in html
    assert "<i>" not in html
    Page(html)


def test_formulas_part_only_where_lines_may_break():
    assert statement_html(r"x=1,\quad y=2\text{ or }z=\{3,\ 4\}").count("<math>") == 4
    assert statement_html(r"\left(x,\ y\right)\begin{matrix}a\quad b\end{matrix}{c\ d}(e,\ f)").count("<math>") == 1


@pytest.mark.long
def test_statements_of_the_ledger_are_formulas_that_can_be_read():
    claims = list(ledger.load_ledger().claims.values())
    statements = [c.statement for c in claims] + [c.correction.statement for c in claims if c.correction]
    unread = [text for text in statements if "<code>" in statement_html(text)]
    assert unread == []


@pytest.mark.parametrize(
    ("identifier", "source"),
    [
        ("depth:39", "Depth paper, (39)"),
        ("depth:34a", "Depth paper, display before (34)"),
        ("multihead:4.6a", "Multi-head paper, display before (4.6)"),
        ("multihead:thm-4.2-iii", "Multi-head paper, Theorem 4.2 (iii)"),
        ("multihead:thm-4.2-ii-decreasing", "Multi-head paper, Theorem 4.2 (ii)"),
        ("depth:table-2a", "Depth paper, Table 2"),
        ("depth:fig-3c", "Depth paper, Figure 3c"),
        ("depth:sec-A.3-degree-one", "Depth paper, Section A.3"),
        ("multihead:obs-3-length", "Multi-head paper, Observation 3"),
        ("multihead:5.3-length", "Multi-head paper"),
        ("multihead:valley", "Multi-head paper"),
        ("beyond:table-2-placement", "Beyond the papers"),
        ("other", "other"),
    ],
)
def test_sources_say_no_more_than_the_id(identifier, source):
    assert source_text(identifier) == source


def test_anchors_are_unique():
    names = ["a:1", "a 1", "a-1", "ä", "ö"]
    found = anchors("x", names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert found["a:1"] == "x-a-1"


def test_columns_without_text_are_left_out():
    heads = [column.head for column in columns(table_of(ROWS))]
    assert heads == ["k", "a", "quantity", "paper", "theory", "trained", "verdict", "remark"]
    assert [column.head for column in columns(table_of(ROWS[2:]))] == ["k", "quantity", "theory", "verdict"]


def test_every_verdict_has_a_colour():
    assert set(TONES) == {*(one.value for one in Agreement), view.CONTRADICTION, *(one.value for one in Verdict)}


def test_failures_come_first():
    rows = [replace(ROWS[0], consistent=False)]
    bad = Ledger()
    bad.claim("depth:1", "false", "0=1")(lambda: [Evidence(Method.EXACT, 1.0, 0.0, "difference", "everywhere")])
    report = report_of([table_of(rows)], outcomes_of(bad))
    words = " ".join(" ".join(checked_page(render_report(report)).words).split())
    assert "Expected to hold, but does not: table depth:table-3 : our own numbers disagree claim depth:1" in words
    assert "All that is expected" not in words
    assert report.failed == ["table depth:table-3", "claim depth:1"]
    assert report.to_json()["rows"]["our numbers disagree"] == 1


def test_template_and_style_are_in_the_package():
    for name in ("report.html", "report.css"):
        assert files("validate").joinpath("templates", name).is_file()


# The command.


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two tables and two claims, in an empty folder; the list of what was built."""
    built = []

    def build(name):
        def table(profile, seed, progress):
            built.append((name, profile, seed))
            return table_of(ROWS, name)

        return table

    names = ("depth:table-3", "multihead:figure-6")
    monkeypatch.setattr(registry, "TABLES", {name: build(name) for name in names})
    monkeypatch.setattr(ledger, "load_ledger", claims_ledger)
    monkeypatch.chdir(tmp_path)
    return built


def test_everything_goes_to_the_default_place(small, capsys, monkeypatch, tmp_path):
    status, out, err = run(capsys, "report")
    assert (status, err) == (0, "")
    assert "6 rows: 2 agrees, 2 differs, 2 not tested" in out
    assert "2 claims: 1 holds, 1 misprint" in out
    assert out.endswith("written: results/report.html\n")
    page = checked_page((tmp_path / "results" / "report.html").read_text(encoding="utf-8"))
    assert {"table-depth-table-3", "table-multihead-figure-6", "claim-depth-39", "claim-beyond-ours"} <= set(page.ids)
    assert [one[0] for one in small] == ["depth:table-3", "multihead:figure-6"]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["report.html"]


def test_json_names_the_file_and_counts(small, capsys, monkeypatch):
    arguments = ("depth:table-3", "depth:39", "--seed", "5", "--profile", "paper", "--output", "a/b.html", "--json")
    status, out, _ = run(capsys, "report", *arguments)
    content = json.loads(out)
    assert status == 0
    assert content["path"] == "a/b.html"
    assert (content["profile"], content["seed"], content["tables"]) == ("paper", 5, ["depth:table-3"])
    assert (content["rows"]["agrees"], content["rows"]["differs"], content["failed"]) == (1, 1, [])
    assert sum(content["claims"].values()) == content["claims"]["misprint"] == 1
    assert small == [("depth:table-3", "paper", 5)]
    with open("a/b.html", encoding="utf-8") as file:
        assert f"attnlaws report {' '.join(arguments)}" in checked_page(file.read()).words


@pytest.mark.parametrize(
    ("arguments", "tables", "claims"),
    [
        (["depth:table-3"], ["depth:table-3"], 0),
        (["depth:39"], [], 1),
        (["--paper", "multihead"], ["multihead:figure-6"], 0),
        (["--paper", "beyond"], [], 1),
        (["--no-claims"], ["depth:table-3", "multihead:figure-6"], 0),
        (["--no-tables"], [], 2),
    ],
)
def test_parts_can_be_chosen(small, capsys, monkeypatch, arguments, tables, claims):
    status, out, _ = run(capsys, "report", *arguments, "--json")
    content = json.loads(out)
    assert status == 0
    assert content["tables"] == tables
    assert sum(content["claims"].values()) == claims


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["depth:table-9"], ["depth:table-9", "reproduce --list", "verify --list"]),
        (["--paper", "other"], ["--paper", "other"]),
        (["depth:39", "--no-claims"], ["leave none"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--workers", "0"], ["workers", "0"]),
        (["--profile", "long"], ["--profile", "long"]),
        (["--output", "."], ["--output"]),
        (["--output", "file/folder/report.html"], ["output folder must be writable"]),
        (["--verdicts", "none.json"], ["--verdicts", "none.json"]),
        (["--verdicts", "file"], ["verdicts", "attnlaws verify --json", "file"]),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_computed(small, capsys, monkeypatch, arguments, words):
    with open("file", "w", encoding="utf-8") as file:
        file.write("in the way")
    status, out, err = run(capsys, "report", *arguments)
    assert (status, out, err.count("\n"), small) == (2, "", 1, [])
    for word in words:
        assert word in err


def test_failures_exit_1_after_the_page_is_written(small, capsys, monkeypatch, tmp_path):
    rows = [replace(ROWS[0], consistent=False)]
    monkeypatch.setitem(registry.TABLES, "depth:table-3", lambda profile, seed, progress: table_of(rows))
    status, out, _ = run(capsys, "report", "--no-claims")
    assert status == 1
    assert "expected to hold, but does not: table depth:table-3" in out
    checked_page((tmp_path / "results" / "report.html").read_text(encoding="utf-8"))


def test_a_failed_write_leaves_the_old_page(small, capsys, monkeypatch, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        run(capsys, "report", "--output", "report.html")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("found", [True, False, webbrowser.Error("none"), OSError("none")])
def test_opening_never_fails(small, capsys, monkeypatch, tmp_path, found):
    asked = []

    def open_address(address):
        asked.append(address)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(webbrowser, "open", open_address)
    status, _, err = run(capsys, "report", "depth:39", "--open")
    assert status == 0
    assert asked == [(tmp_path / "results" / "report.html").as_uri()]
    assert err == ("" if found is True else "attnlaws: no browser was found, open results/report.html in one\n")


def test_without_a_display_there_is_no_browser_and_no_failure(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name not in {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"}
    }
    code = "from pathlib import Path; from validate.commands.report import open_page; open_page(Path('page.html'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "page.html" in done.stderr


def test_help_has_an_example(capsys, monkeypatch):
    status, out, _ = run(capsys, "report", "--help")
    assert status == 0
    assert "Example:  attnlaws report" in out
    for option in (
        "--open",
        "--output",
        "--profile",
        "--seed",
        "--runs",
        "--workers",
        "--verdicts",
        "--no-claims",
        "--json",
    ):
        assert option in out


@pytest.mark.long
def test_a_real_table_and_a_real_claim(capsys, monkeypatch, tmp_path):
    path = tmp_path / "report.html"
    arguments = (
        "multihead:figure-6",
        "depth:33",
        "depth:39",
        "--runs",
        str(tmp_path / "runs"),
        "--output",
        str(path),
    )
    status, out, _ = run(capsys, "report", *arguments, "--json")
    content = json.loads(out)
    assert status == 0
    assert content["tables"] == ["multihead:figure-6"]
    assert (content["claims"]["holds"], content["claims"]["misprint"]) == (1, 1)
    page = checked_page(path.read_text(encoding="utf-8"))
    assert "img" in page.tags
    assert "munderover" in page.tags


# Recorded verdicts.


def recorded(tmp_path, outcomes):
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps({"claims": [outcome.to_json() for outcome in outcomes]}), encoding="utf-8")
    return path


def test_recorded_evidence_gives_the_same_outcomes(tmp_path):
    found = claims_ledger()
    for name, figure in (("nan", float("nan")), ("inf", float("inf"))):
        found.claim(f"depth:{name}", name, "x")(
            lambda figure=figure: [Evidence(Method.NUMERIC, figure, 1.0, "x", "y")]
        )
    found.claim("depth:raises", "raises", "x")(lambda: 1 / 0)
    outcomes = outcomes_of(found)
    read = recorded_outcomes(recorded(tmp_path, outcomes), list(found.claims.values()))
    assert [one.to_json() for one in read] == [one.to_json() for one in outcomes]
    assert read[-1].verdict is Verdict.CHECK_FAILED
    assert render_report(report_of(outcomes=read)) == render_report(report_of(outcomes=outcomes))


def test_verdicts_are_computed_from_the_evidence_and_not_believed(tmp_path):
    found = claims_ledger()
    outcome = outcomes_of(found)[0]
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps({"claims": [outcome.to_json() | {"verdict": "holds"}]}), encoding="utf-8")
    assert recorded_outcomes(path, [outcome.claim])[0].verdict is Verdict.MISPRINT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"statement": "another"}, "as it is stated now"),
        ({"id": "depth:other"}, "as it is stated now"),
        ({"corrected": {"statement": "another", "evidence": []}}, "as it is stated now"),
        ({"evidence": [{"method": "guess"}]}, "damaged"),
        ({"seconds": None}, "damaged"),
    ],
)
def test_records_of_something_else_are_refused(tmp_path, change, words):
    outcome = outcomes_of(claims_ledger())[0]
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps({"claims": [outcome.to_json() | change]}), encoding="utf-8")
    with pytest.raises(DomainError, match=words):
        recorded_outcomes(path, [outcome.claim])


def test_recorded_verdicts_spare_the_checks(small, capsys, monkeypatch, tmp_path):
    path = recorded(tmp_path, outcomes_of(claims_ledger()))

    def never(_claim):
        raise AssertionError

    monkeypatch.setattr(command, "check_claims", never)
    status, out, _ = run(capsys, "report", "--no-tables", "--verdicts", str(path), "--json")
    assert status == 0
    assert json.loads(out)["claims"]["misprint"] == 1
