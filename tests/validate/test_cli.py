import json
import os
import subprocess
import sys

import pytest

from tests.validate.command import run

FLOOR = ["floor", "-b", "0", "--dim", "16", "--context", "64", "--top-k", "2"]


def test_exponent_json(capsys):
    status, out, _ = run(capsys, "exponent", "-a", "2", "-b", "1", "--dim", "128", "--depths", "1,2,4,8", "--json")
    content = json.loads(out)
    assert status == 0
    promised = {
        "zeta", "constrained", "free_continuum", "free_discrete", "depths", "risk_constrained", "risk_free",
        "local_exponent_constrained", "local_exponent_free",
    }  # fmt: skip
    assert promised <= set(content)
    assert (content["zeta"], content["constrained"], content["free_continuum"], content["free_discrete"]) == (
        1,
        1,
        2,
        4,
    )
    assert content["depths"] == [1, 2, 4, 8]
    assert content["risk_free"][3] == pytest.approx(0.000579252178602, rel=1e-12)
    assert len(content["local_exponent_free"]) == 3


def test_exponent_for_people(capsys):
    status, out, _ = run(capsys, "exponent", "-a", "2", "-b", "1")
    assert status == 0
    assert "infinitely many modes" in out
    assert "free polynomial" in out


def test_exponent_modes_and_plot(capsys, tmp_path):
    path = tmp_path / "exponent.svg"
    arguments = [
        "exponent",
        "-a",
        "2",
        "-b",
        "1",
        "--dim",
        "8",
        "--depths",
        "1,4,16",
        "--modes",
        "1,8",
        "--plot",
        str(path),
    ]
    status, out, _ = run(capsys, *arguments, "--json")
    modes = json.loads(out)["modes"]
    assert status == 0
    assert [mode["mode"] for mode in modes] == [1, 8]
    assert modes[0]["loss_repeated"] == [0, 0, 0]
    assert modes[1]["loss_free"][2] == 0
    assert sum(mode["label_share"] for mode in modes) < 1
    assert "not shown: 1 of zero risk" in path.read_text()
    assert "normalised loss" in run(capsys, *arguments)[1]


def test_softmax_floor(capsys, tmp_path, monkeypatch):
    from validate import mean_field

    monkeypatch.setitem(mean_field.PROFILES, "quick", mean_field.Effort(0.05, 3, 5, 2))
    path = tmp_path / "floor.svg"
    small = ["floor", "-a", "0", "-b", "0", "--dim", "3", "--context", "6", "--top-k", "2", "--attention", "softmax"]
    status, out, _ = run(capsys, *small, "--rel-error", "0.05", "--plot", str(path), "--json")
    content = json.loads(out)
    assert status == 0
    assert content["method"] == "mean field"
    assert 0 < content["value"] < content["single_layer"]["loss"]["value"]
    assert sum(kind["probability"] for kind in content["law"]) == pytest.approx(1)
    assert "mean-field floor" in path.read_text()
    assert "best one layer" in run(capsys, *small, "--rel-error", "0.05")[1]


def test_floor_plot(capsys, tmp_path):
    path = tmp_path / "floor.png"
    assert run(capsys, *FLOOR, "-a", "0", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_exponent_past_the_dimension_has_no_local_exponent(capsys):
    _, out, _ = run(capsys, "exponent", "-a", "1", "-b", "1", "--dim", "4", "--depths", "1,2,4,8", "--json")
    content = json.loads(out)
    assert content["risk_free"][2:] == [0, 0]
    assert content["local_exponent_free"][1:] == [None, None]
    assert "zero" in content["local_exponent_reason"]


def test_isotropic_floor_json(capsys):
    status, out, _ = run(
        capsys, "floor", "-a", "0", "-b", "0", "--dim", "128", "--context", "1024", "--top-k", "2", "--json"
    )
    content = json.loads(out)
    assert status == 0
    assert {"value", "stderr", "interval", "degree", "samples", "floors_by_degree"} <= set(content)
    assert content["value"] == pytest.approx(59.3802, abs=5e-5)
    assert content["floor_finite_context_degree_1"] < content["value"]
    assert content["interval"]["low"] <= content["value"] <= content["interval"]["high"]


def test_floor_of_whole_contexts_agrees_with_the_exact_one(capsys):
    arguments = [*FLOOR, "-a", "0", "--degree", "2", "--json"]
    exact = json.loads(run(capsys, *arguments)[1])
    drawn = json.loads(run(capsys, *arguments, "--method", "contexts", "--rel-error", "0.02", "--seed", "3")[1])
    assert (exact["method"], drawn["method"]) == ("exact", "Monte Carlo")
    # Fixed seed; five standard errors are exceeded by 1 seed in 10^6.
    assert abs(drawn["value"] - exact["value"]) < 5 * drawn["stderr"]


def test_risks_are_mean_squared_errors_and_the_label_variance_is_said(capsys):
    arguments = ["exponent", "-a", "1", "-b", "1", "--dim", "3", "--depths", "1,2"]
    content = json.loads(run(capsys, *arguments, "--json")[1])
    assert content["label_variance"] == pytest.approx(1 + 1 / 4 + 1 / 9, rel=1e-15)
    assert content["risk_constrained"][0] == pytest.approx(0 + 1 / 4 / 4 + 4 / 9 / 9, rel=1e-14)
    text = run(capsys, *arguments)[1]
    assert "risk of predicting zero   1.36111" in text
    assert "mean squared error" in text
    floor = json.loads(run(capsys, *FLOOR, "-a", "0", "--json")[1])
    assert floor["label_variance"] == pytest.approx(16, rel=1e-14)


def test_sampled_floor(capsys):
    arguments = [*FLOOR, "-a", "0.5", "--degree", "3", "--rel-error", "0.05", "--seed", "7"]
    status, out, _ = run(capsys, *arguments, "--json")
    content = json.loads(out)
    assert status == 0
    assert content["method"] == "Monte Carlo"
    assert [row["degree"] for row in content["floors_by_degree"]] == [1, 2, 3]
    assert content["stderr"] <= 0.05 * content["value"]
    assert run(capsys, *arguments, "--json")[1] == out
    status, text, _ = run(capsys, *arguments)
    assert status == 0
    assert "standard error" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exponent", "-a", "0", "-b", "1"], ["input_exponent", "0"]),
        (["exponent", "-a", "0.5", "-b", "0.5"], ["input_exponent + teacher_exponent", "> 1"]),
        (["exponent", "-a", "-1e-3", "-b", "1"], ["input_exponent", "-0.001"]),
        (["exponent", "-a", "nan", "-b", "1"], ["input_exponent", "nan"]),
        (["exponent", "-a", "inf", "-b", "1"], ["input_exponent", "inf"]),
        (["exponent", "-a", "two", "-b", "1"], ["--input-exponent", "'two'"]),
        (["exponent", "-a", "2", "-b", "1", "--dim", "1.5"], ["dim", "1.5"]),
        (["exponent", "-a", "2", "-b", "1", "--dim", "0"], ["dim", "0"]),
        (["exponent", "-a", "2", "-b", "1", "--dim", "-4"], ["dim", "-4"]),
        (["exponent", "-a", "2", "-b", "1", "--dim", "1e400"], ["dim", "inf"]),
        (["exponent", "-a", "2", "-b", "1", "--depths", "4,2"], ["depths", "[4, 2]"]),
        (["exponent", "-a", "2", "-b", "1", "--depths", "0,2"], ["depths", "from 1 to 4096"]),
        (["exponent", "-a", "2", "-b", "1", "--depths", "1.5"], ["depths", "from 1 to 4096", "[1.5]"]),
        (["exponent", "-a", "2", "-b", "1", "--depths", ""], ["--depths"]),
        (["exponent", "-a", "2", "-b", "1", "--depths", "1,100000"], ["depth", "4096"]),
        (["exponent", "-a", "2", "-b", "1", "--plot", "figure.bmp"], ["--plot", "figure.bmp", ".svg"]),
        (["exponent", "-a", "2", "-b", "1", "--modes", "1"], ["dim", "None"]),
        (["exponent", "-a", "2", "-b", "1", "--dim", "8", "--modes", "9"], ["modes", "9", "8"]),
        (["exponent", "-a", "2"], ["Missing option", "--teacher-exponent"]),
        ([*FLOOR, "-a", "0", "--degree", "0"], ["degree", "0"]),
        ([*FLOOR, "-a", "0.5", "--rel-error", "0"], ["relative_error", "0"]),
        ([*FLOOR, "-a", "0.5", "--seed", "-1"], ["seed", "-1"]),
        ([*FLOOR, "-a", "0.5", "--attention", "softmax", "--degree", "3"], ["--degree", "softmax"]),
        ([*FLOOR, "-a", "0.5", "--attention", "softmax", "--method", "contexts"], ["--method", "softmax"]),
        ([*FLOOR, "-a", "0.5", "--rel-error", "1e-9"], ["draw whole contexts", 'method "contexts"']),
        ([*FLOOR[:-1], "65", "-a", "0"], ["top_k", "65", "64"]),
        (["verify", "depth:999"], ["claim id", "depth:999"]),
        (["verify", "--paper", "other"], ["--paper", "other"]),
        (["reproduce", "depth:table-9"], ["depth:table-9", "depth:table-3"]),
        (["reproduce", "depth:table-2", "--seed", "x"], ["--seed", "'x'"]),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("attnlaws: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_unwritable_output_is_named_before_anything_is_computed(capsys, tmp_path, monkeypatch):
    from validate import predictions
    from validate.tables import registry

    def compute(*_args):
        raise AssertionError("computed although the output cannot be written")

    monkeypatch.setitem(registry.TABLES, "depth:table-2", compute)
    monkeypatch.setattr(predictions, "exponent_prediction", compute)
    monkeypatch.setattr(predictions, "floor_prediction", compute)
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    folder = tmp_path / "figure.png"
    folder.mkdir()
    spectrum = ["-a", "2", "-b", "1"]
    for arguments in (
        ["reproduce", "depth:table-2", "--out", str(blocker / "folder")],
        ["reproduce", "depth:table-2", "--out", str(blocker)],
        ["exponent", *spectrum, "--plot", str(blocker / "folder" / "figure.png")],
        [*FLOOR, "-a", "0.5", "--plot", str(blocker / "figure.svg")],
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "folder must be writable" in err
    status, _, err = run(capsys, "exponent", *spectrum, "--plot", str(folder))
    assert status == 2
    assert "must be a file" in err
    # A refusal for another reason leaves no folder behind.
    assert run(capsys, "exponent", "-a", "x", "-b", "1", "--plot", str(tmp_path / "new" / "figure.png"))[0] == 2
    assert not (tmp_path / "new").exists()


def test_verify(capsys):
    status, out, _ = run(capsys, "verify", "depth:33", "depth:39", "--json")
    claims = json.loads(out)["claims"]
    assert status == 0
    assert [(c["id"], c["verdict"]) for c in claims] == [("depth:33", "holds"), ("depth:39", "misprint")]
    assert claims[0]["corrected"] is None
    assert claims[1]["corrected"]["evidence"]
    status, out, _ = run(capsys, "verify", "depth:33")
    assert "HOLDS" in out
    assert "1 claims: 1 holds" in out


def test_verify_lists(capsys):
    _, out, _ = run(capsys, "verify", "--list", "--paper", "depth")
    assert "depth:19" in out
    _, out, _ = run(capsys, "verify", "--list", "--json")
    assert len(json.loads(out)["claims"]) >= 22


def test_verify_exits_1_where_a_claim_fails(capsys, monkeypatch):
    from validate.claims import ledger

    broken = ledger.Ledger()
    broken.claim("depth:0", "a false statement", "0 = 1")(
        lambda: [ledger.Evidence(ledger.Method.EXACT, 1.0, 0.0, "difference", "everywhere")]
    )
    monkeypatch.setattr(ledger, "load_ledger", lambda: broken)
    status, out, _ = run(capsys, "verify")
    assert status == 1
    assert "NOT REPRODUCIBLE" in out


@pytest.mark.parametrize(
    "command", ["exponent", "floor", "softmax-risk", "icl-risk", "optimum", "verify", "reproduce"]
)
def test_every_command_has_help_with_an_example(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"Example:  attnlaws {command}" in out


def test_output_survives_an_ascii_terminal():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    code = "import sys; sys.argv = ['attnlaws', 'exponent', '-a', '2', '-b', '1']; import validate.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "best polynomial" in done.stdout


def test_interrupt_exits_quietly(capsys, monkeypatch):
    from validate import predictions

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(predictions, "exponent_prediction", interrupt)
    status, _, err = run(capsys, "exponent", "-a", "2", "-b", "1")
    assert status == 130
    assert err.strip() == "interrupted"


REGRESSION = ["--dim", "5", "--context", "40", "--noise", "0.1"]


def test_softmax_risk(capsys, tmp_path):
    path = tmp_path / "risk.svg"
    arguments = ["softmax-risk", *REGRESSION, "--omega", "0.1267,-0.1267", "--mu", "3.5006,-3.5006"]
    status, out, _ = run(capsys, *arguments, "--plot", str(path), "--json")
    content = json.loads(out)
    assert status == 0
    assert {"exact", "approximate", "tolerance"} <= set(content)
    assert content["exact"] == pytest.approx(0.24299818, abs=1e-8)
    assert content["approximate"] == pytest.approx(0.2211, abs=5e-5)
    assert content["best_mu_risk"] < content["exact"]
    assert "approximate loss" in path.read_text()
    assert "effective step" in run(capsys, *arguments)[1]


def test_softmax_risk_of_equal_heads_has_no_unique_mu(capsys):
    arguments = ["softmax-risk", *REGRESSION, "--omega", "0.5,0.5", "--mu", "1,0.5"]
    content = json.loads(run(capsys, *arguments, "--json")[1])
    single = json.loads(run(capsys, "softmax-risk", *REGRESSION, "--omega", "0.5", "--mu", "1.5", "--json")[1])
    assert content["best_mu"] is None
    assert content["exact"] == pytest.approx(single["exact"], rel=1e-10)
    assert "share their mu" in run(capsys, *arguments)[1]


def test_icl_risk(capsys, tmp_path):
    path = tmp_path / "risk.png"
    status, out, _ = run(capsys, "icl-risk", *REGRESSION, "--plot", str(path), "--json")
    content = json.loads(out)
    assert status == 0
    promised = {
        "vanilla", "debiased", "bayes", "bayes_limit", "step_vanilla", "step_debiased", "ratio_debiased_bayes",
    }  # fmt: skip
    assert promised <= set(content)
    assert content["bayes"] == pytest.approx(0.11445493947, abs=1e-11)
    assert content["ratio_debiased_bayes"] <= content["ratio_bound"]
    assert path.stat().st_size > 5000
    assert "Bayes, proportional limit" in run(capsys, "icl-risk", *REGRESSION)[1]


def test_icl_risk_without_noise_gives_reasons(capsys):
    content = json.loads(run(capsys, "icl-risk", "--dim", "2", "--context", "9", "--noise", "0", "--json")[1])
    assert content["bayes"] == 0
    assert content["ratio_debiased_bayes"] is None
    assert content["ratio_reason"]
    assert content["bound_reason"]
    assert "the Bayes risk is zero" in run(capsys, "icl-risk", "--dim", "2", "--context", "9", "--noise", "0")[1]


def test_optimum(capsys):
    content = json.loads(run(capsys, "optimum", *REGRESSION, "--heads", "2", "--json")[1])
    assert content["omega"][0] == pytest.approx(0.0712457, abs=1e-6)
    assert content["risk"] == pytest.approx(0.2428240983, abs=1e-9)
    assert content["risk"] < content["debiased"]
    content = json.loads(run(capsys, "optimum", *REGRESSION, "--heads", "2", "--activation", "1+tanh", "--json")[1])
    assert content["risk"] == pytest.approx(0.239383, abs=1e-6)
    linear = json.loads(run(capsys, "optimum", *REGRESSION, "--heads", "2", "--activation", "1+Cx", "--json")[1])
    assert not linear["attained"]
    assert linear["limit"]
    assert "gradient" in run(capsys, "optimum", *REGRESSION, "--heads", "1")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["softmax-risk", *REGRESSION, "--omega", "1", "--mu", "1,2"], ["omega and mu", "(1,)"]),
        (["softmax-risk", *REGRESSION, "--omega", "nan", "--mu", "1"], ["omega", "nan"]),
        (["icl-risk", "--dim", "5", "--context", "0", "--noise", "0.1"], ["context", "0"]),
        (["icl-risk", "--dim", "5", "--context", "4", "--noise", "-1"], ["noise", "-1"]),
        (["optimum", *REGRESSION, "--heads", "5"], ["heads", "5"]),
        (["optimum", *REGRESSION, "--heads", "1", "--activation", "1+tanh"], ["heads", "1+tanh"]),
        (["optimum", *REGRESSION, "--heads", "2", "--activation", "relu"], ["--activation", "relu"]),
        (
            ["optimum", *REGRESSION, "--heads", "2", "--activation", "1+tanh", "--scale", "nan"],
            ["scale", "1+tanh", "nan"],
        ),
        (["optimum", *REGRESSION, "--heads", "2", "--scale", "7"], ["scale", "exp", "7"]),
        (["softmax-risk", *REGRESSION, "--omega", "0.1", "--mu", "1e200"], ["mu", "1e+100", "1e+200"]),
    ],
)
def test_bad_input_of_the_multihead_commands(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "missing", "text"),
    [
        (["--dim", "1000", "--context", "100000", "--noise", "0", "--omega", "1", "--mu", "1"], "approximate", "700"),
        (
            ["--dim", "999", "--context", "9", "--noise", "0", "--omega", "0.8", "--mu", "1e30"],
            "approximate",
            "1e308",
        ),
        ([*REGRESSION, "--omega", "0.1,0.1000000001", "--mu", "1,1"], "best_mu", "too close"),
    ],
)
def test_what_is_not_known_beside_the_exact_softmax_risk(capsys, arguments, missing, text, tmp_path):
    status, out, err = run(capsys, "softmax-risk", *arguments, "--json")
    content = json.loads(out)
    assert (status, err) == (0, "")
    assert content["exact"] > 0
    assert content[missing] is None
    assert text in content[f"{missing}_reason"]
    other = {"approximate": "best_mu", "best_mu": "approximate"}[missing]
    assert content[other] is not None
    assert content[f"{other}_reason"] is None
    path = tmp_path / "risk.svg"
    status, out, _ = run(capsys, "softmax-risk", *arguments, "--plot", str(path))
    assert status == 0
    assert f"undetermined: {content[f'{missing}_reason']}" in out
    assert "exact risk" in out
    assert ("not shown" in path.read_text()) == (missing == "approximate")


def test_icl_risk_beyond_the_exact_bayes_risk(capsys, tmp_path):
    arguments = ["icl-risk", "--dim", "500", "--context", "500", "--noise", "1e-3"]
    path = tmp_path / "risk.svg"
    status, out, err = run(capsys, *arguments, "--plot", str(path), "--json")
    content = json.loads(out)
    assert (status, err) == (0, "")
    assert content["bayes"] is content["bayes_tolerance"] is content["ratio_debiased_bayes"] is None
    assert "300" in content["bayes_reason"]
    assert "Bayes" in content["ratio_reason"]
    # At this size the limit is within a few 1/dim of the exact risk, and the bound must lie above the ratio to it.
    assert content["debiased"] / content["bayes_limit"] < content["ratio_bound"]
    assert "Bayes not shown:" in path.read_text()
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "Bayes                      undetermined: min(dim, context) must be at most 300" in out
    assert "bound at this size" in out


def test_icl_risk_with_noise_too_small_for_its_bounds(capsys):
    content = json.loads(run(capsys, "icl-risk", "--dim", "5", "--context", "40", "--noise", "1e-320", "--json")[1])
    assert content["bayes"] > 0
    for name, reason in (
        ("ratio_debiased_bayes", "ratio_reason"),
        ("ratio_bound", "bound_reason"),
        ("ratio_bound_paper", "bound_paper_reason"),
    ):
        assert content[name] is None
        assert "1e308" in content[reason]
    assert run(capsys, "icl-risk", "--dim", "5", "--context", "40", "--noise", "1e-320")[0] == 0
