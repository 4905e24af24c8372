"""Fits of a power law with a floor: exact recovery, independence of any start, invariances, verdicts, comparisons."""

import json

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from sim.streams import stream
from theory.depth.population_training import fitted_exponent
from theory.results import DomainError, Interval
from validate.fits import solver
from validate.fits.comparison import compare_laws, corrected_information, depth_scan, repeated_runs
from validate.fits.identifiability import within_factor
from validate.power_law_fit import LossLaw, MeasuredLosses, fit_losses, fit_power_law

pytestmark = pytest.mark.long

DEPTHS = 2.0 ** np.arange(9)
DESIGNS = (DEPTHS, np.array([1.0, 4, 16, 64, 256]), np.array([3.0, 5, 9, 20, 50, 100]), np.array([2.0, 8, 32, 128]))
# Exact data: what is asked of the fit, and the rounding of the losses amplified by the design.
RECOVERED = 1e-6
# Two fits of the same noisy problem stop within this share of a parameter of each other.
SAME = 1e-6


def fit(depths, losses, **options):
    return fit_power_law(depths, losses, **({"draws": 0, "profiles": ()} | options))


def values(found):
    return np.array([found.floor.value, found.coefficient.value, found.exponent.value])


def minimum(depths, losses, stderrs=None):
    """Floor, coefficient and exponent of the least squares alone."""
    return solver.fit_floor(MeasuredLosses(depths, losses, stderrs).batch()).values[0]


def noisy(name, depths=DEPTHS, floor=0.5, coefficient=0.5, exponent=1.0, noise=0.01):
    clean = floor + coefficient * depths**-exponent
    return clean * np.exp(noise * stream(5, name).standard_normal(depths.size))


def naive_minimum(depths, losses, generator, starts=12):
    """Lowest squares that a library's bounded search reaches from random starts."""
    best = np.inf
    for _ in range(starts):
        start = [
            generator.uniform(0, 1) * losses.min(),
            np.log(losses.max()) + generator.normal(),
            generator.uniform(0.1, 4),
        ]
        search = least_squares(
            lambda p: np.log(losses) - np.log(p[0] + np.exp(p[1]) * depths ** -p[2]), start,
            bounds=([0, -50, 1e-9], [np.inf, 50, 40]),
        )  # fmt: skip
        best = min(best, 2 * search.cost)
    return best


# --- the traps ---


def test_trap_1_a_search_that_stops_early_is_not_the_fit():
    # L-BFGS-B on the mean of squares stops here at an exponent of 0.496 and reports success.
    found = fit_power_law(DEPTHS, 0.5 + 0.02 / DEPTHS)
    assert values(found) == pytest.approx([0.5, 0.02, 1], rel=RECOVERED)
    assert found.verdict.identifiable
    assert found.exponent.profile.low < 1 < found.exponent.profile.high


def test_trap_3_five_close_depths_do_not_identify_an_exponent():
    depths = np.array([8.0, 10, 12, 14, 16])
    found = fit_power_law(depths, 0.3 + depths**-0.5)
    assert values(found) == pytest.approx([0.3, 1, 0.5], rel=RECOVERED)
    assert not found.verdict.identifiable
    assert "do not tell exponents" in found.verdict.reason
    # Exponents from a quarter to one fit within 0.43 %.
    assert found.exponent.profile.low < 0.25
    assert found.exponent.profile.high > 1
    assert found.compatible.deviation == pytest.approx(0.0043, abs=1e-4)
    for alpha in (0.25, 1.0):
        held = fit(depths, 0.3 + depths**-0.5, fixed_exponent=alpha)
        assert np.abs(np.log(held.predict(depths) / (0.3 + depths**-0.5))).max() < 0.0043


def test_trap_3_with_noise():
    depths = np.array([8.0, 10, 12, 14, 16])
    for noise in (1e-6, 1e-4, 0.003):
        found = fit_power_law(depths, noisy("close", depths, 0.3, 1.0, 0.5, noise), draws=0)
        assert not found.verdict.identifiable


def test_trap_4_as_many_parameters_as_rows_leaves_no_errors():
    found = fit_power_law([1, 4, 16], [1.0, 0.6, 0.52])
    assert found.degrees == 0
    assert found.residual_stderr is None
    assert found.exponent.stderr is found.exponent.profile is found.exponent.student is None
    assert "errors are unknown" in found.exponent.reason
    assert not found.verdict.identifiable
    assert "degree of freedom" in found.verdict.reason


def test_trap_4_fewer_depths_than_parameters_are_refused():
    with pytest.raises(DomainError, match="3 or more different depths, got 2"):
        fit_power_law([1, 1, 4, 4], [1.0, 1.1, 0.6, 0.7])


@pytest.mark.parametrize("bad", [0.0, -0.1, np.nan, np.inf])
def test_trap_4_losses_that_are_no_positive_numbers_are_named(bad):
    with pytest.raises(DomainError, match=r"each loss must be a finite number > 0, .*: row 3 has"):
        fit_power_law([1, 2, 4, 8, 16], [1, 0.7, bad, 0.6, 0.55])
    with pytest.raises(DomainError, match=r"each depth must be a finite number > 0, .*: row 1 has"):
        fit_power_law([bad, 2, 4, 8, 16], [1, 0.7, 0.65, 0.6, 0.55])


def test_trap_4_a_floor_on_its_bound_is_flagged_and_has_no_error():
    losses = DEPTHS**-0.8 * np.exp(-0.02 * np.log(DEPTHS) ** 2)
    found = fit_power_law(DEPTHS, losses)
    assert found.floor.value == 0
    assert found.floor.at_bound
    assert found.floor.stderr is found.floor.student is found.floor.bootstrap is None
    assert "bound 0" in found.floor.reason
    assert found.floor.profile.low == 0
    assert any("floor is on its bound" in note for note in found.notes)
    # The rest has the errors of the law without a floor, from its two free parameters.
    line = fit_power_law(DEPTHS, losses, with_floor=False)
    assert found.exponent.value == pytest.approx(line.exponent.value, rel=1e-12)
    assert found.exponent.stderr == pytest.approx(line.exponent.stderr, rel=1e-10)
    assert found.exponent.student.low == pytest.approx(line.exponent.student.low, rel=1e-10)


def test_trap_4_a_gap_that_is_not_positive_is_refused():
    shared = 2 - 0.5 / DEPTHS
    with pytest.raises(DomainError, match=r"gap to the floor 1.9 must be > 0 .*row 4 has"):
        fit_power_law(DEPTHS, shared, gap_floor=1.9)
    found = fit_power_law(DEPTHS, shared, gap_floor=2.0)
    assert found.exponent.value == pytest.approx(1, rel=1e-12)
    assert found.floor.value == 2
    assert found.floor.stderr is None


def test_trap_5_json_keeps_all_digits():
    found = fit_power_law(DEPTHS, noisy("digits"), draws=100)
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert content["exponent"]["value"] == found.exponent.value
    assert content["floor"]["interval"]["low"] == found.floor.profile.low
    assert content["identifiable"] is True
    # Rounded to one digit the exponent would be some per cent off where it is used to predict.
    exponent, coefficient = content["exponent"]["value"], content["coefficient"]["value"]
    predicted = content["floor"]["value"] + coefficient * 256.0**-exponent
    assert predicted == pytest.approx(float(found.predict(256.0)), rel=1e-14)


# --- the minimum ---


@given(
    floor=st.one_of(st.just(0.0), st.floats(0.01, 10)),
    coefficient=st.floats(0.01, 10),
    exponent=st.floats(0.2, 2.5),
    design=st.sampled_from(DESIGNS),
)
def test_exact_losses_give_back_their_parameters(floor, coefficient, exponent, design):
    found = solver.fit_floor(MeasuredLosses(design, floor + coefficient * design**-exponent).batch())
    # A floor far below the last loss is known relative to that loss only.
    scale = [max(floor, 1e-3 * (floor + coefficient * design[-1] ** -exponent)), coefficient, exponent]
    assert np.abs(found.values[0] - [floor, coefficient, exponent]) / scale == pytest.approx(0, abs=RECOVERED)


def test_the_minimum_is_that_of_many_searches():
    generator = stream(1, "searches")
    for trial in range(25):
        depths = np.sort(generator.choice(2.0 ** np.arange(10), generator.integers(4, 9), replace=False))
        floor, coefficient = generator.choice([0, 0.1, 1.0]), generator.choice([0.1, 1.0])
        clean = floor + coefficient * depths ** -generator.uniform(0.3, 2)
        losses = clean * np.exp(generator.choice([0.005, 0.02, 0.1]) * generator.standard_normal(depths.size))
        found = solver.fit_floor(MeasuredLosses(depths, losses).batch())
        assert found.squares[0] <= naive_minimum(depths, losses, generator) * (1 + 1e-6), trial


def test_the_gradient_vanishes_in_high_precision():
    losses = noisy("gradient")
    found = fit(DEPTHS, losses)

    def squares(floor, log_coefficient, alpha):
        model = [floor + mpmath.exp(log_coefficient) * mpmath.mpf(x) ** -alpha for x in DEPTHS]
        return mpmath.fsum(
            (mpmath.log(mpmath.mpf(y)) - mpmath.log(m)) ** 2 for y, m in zip(losses, model, strict=True)
        )

    with mpmath.workdps(40):
        at = [mpmath.mpf(found.floor.value), mpmath.log(found.coefficient.value), mpmath.mpf(found.exponent.value)]
        for i, error in enumerate(
            (found.floor.stderr, found.coefficient.stderr / found.coefficient.value, found.exponent.stderr)
        ):
            direction = tuple(int(i == j) for j in range(3))
            slope = mpmath.diff(squares, at, direction)
            curvature = mpmath.diff(squares, at, tuple(2 * d for d in direction))
            # Distance from the minimum along each parameter, in standard errors.
            assert abs(slope / curvature) < SAME * error


def test_a_straight_line_is_the_closed_form():
    losses = noisy("line", floor=0.0)
    found = fit(DEPTHS, losses, with_floor=False)
    slope, intercept = np.polyfit(np.log(DEPTHS), np.log(losses), 1)
    assert found.exponent.value == pytest.approx(-slope, rel=1e-12)
    assert found.exponent.value == pytest.approx(fitted_exponent(DEPTHS, losses), rel=1e-12)
    assert found.coefficient.value == pytest.approx(np.exp(intercept), rel=1e-12)
    # R^2 is the squared correlation of the logarithms.
    assert found.r2 == pytest.approx(np.corrcoef(np.log(DEPTHS), np.log(losses))[0, 1] ** 2, rel=1e-12)
    _, covariance = np.polyfit(np.log(DEPTHS), np.log(losses), 1, cov=True)
    assert found.exponent.stderr == pytest.approx(np.sqrt(covariance[0, 0]), rel=1e-10)


def test_standard_errors_are_those_of_the_library():
    losses = noisy("library")
    found = fit(DEPTHS, losses)
    start = values(found)
    search = least_squares(lambda p: np.log(losses) - np.log(p[0] + p[1] * DEPTHS ** -p[2]), start, jac="cs")
    covariance = np.linalg.inv(search.jac.T @ search.jac) * 2 * search.cost / (DEPTHS.size - 3)
    ours = [found.floor.stderr, found.coefficient.stderr, found.exponent.stderr]
    assert ours == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-5)


# --- invariances ---


@settings(max_examples=30)
@given(factor=st.floats(1e-6, 1e6), trial=st.integers(0, 20))
def test_units_of_loss_scale_floor_and_coefficient_only(factor, trial):
    losses = noisy(f"units {trial}")
    one, other = minimum(DEPTHS, losses), minimum(DEPTHS, factor * losses)
    assert other == pytest.approx(one * [factor, factor, 1], rel=SAME)


@settings(max_examples=30)
@given(factor=st.floats(1e-3, 1e3), trial=st.integers(0, 20))
def test_units_of_depth_scale_the_coefficient_only(factor, trial):
    losses = noisy(f"units {trial}")
    one, other = minimum(DEPTHS, losses), minimum(factor * DEPTHS, losses)
    assert other == pytest.approx([one[0], one[1] * factor ** one[2], one[2]], rel=10 * SAME)


@settings(max_examples=30)
@given(order=st.permutations(range(9)))
def test_the_order_of_rows_does_not_matter(order):
    losses, errors = noisy("order"), np.linspace(1, 3, 9)
    one = minimum(DEPTHS, losses, errors)
    assert minimum(DEPTHS[order], losses[order], errors[order]) == pytest.approx(one, rel=SAME)


def test_units_change_no_error_and_no_verdict():
    losses = noisy("units")
    one, other = fit_power_law(DEPTHS, losses, draws=99), fit_power_law(DEPTHS, 1000 * losses, draws=99)
    assert other.exponent.stderr == pytest.approx(one.exponent.stderr, rel=1e-5)
    assert other.r2 == pytest.approx(one.r2, rel=1e-9)
    for kind in ("student", "profile", "bootstrap"):
        ends = [[getattr(f.exponent, kind).low, getattr(f.exponent, kind).high] for f in (one, other)]
        assert ends[1] == pytest.approx(ends[0], rel=1e-4)
    assert other.verdict.identifiable is one.verdict.identifiable


def test_standard_errors_are_weights():
    losses = noisy("weights")
    relative = np.where(DEPTHS == 8, 0.5, 1.0)
    # Half the relative error weighs as much as four equal rows.
    weighted = fit(DEPTHS, losses, stderrs=0.01 * relative * losses)
    repeated = fit(np.append(DEPTHS, [8.0] * 3), np.append(losses, [losses[3]] * 3))
    assert values(weighted) == pytest.approx(values(repeated), rel=SAME)
    # Their common scale is estimated: errors ten times larger change nothing.
    larger = fit(DEPTHS, losses, stderrs=0.1 * relative * losses)
    assert larger.exponent.stderr == pytest.approx(weighted.exponent.stderr, rel=1e-9)


# --- verdicts ---


def test_a_wide_range_of_depths_identifies():
    found = fit_power_law(DEPTHS, noisy("wide"), draws=0)
    assert found.verdict.identifiable
    assert "within a factor 2" in found.verdict.reason


def test_too_much_scatter_does_not_identify():
    found = fit_power_law(DEPTHS, noisy("scatter", coefficient=0.1, noise=0.05), draws=0)
    assert not found.verdict.identifiable
    assert "scatter" in found.verdict.reason


def test_only_the_first_depth_above_the_floor_sets_no_upper_end():
    found = fit_power_law(DEPTHS, [9, 1.01, 1, 0.99, 1, 1, 1.01, 1, 1])
    assert not found.verdict.identifiable
    assert "every exponent above" in found.verdict.reason
    assert found.exponent.profile.high == np.inf
    assert found.to_json()["exponent"]["interval"]["high"] is None
    assert "no upper end" in found.to_json()["exponent"]["interval"]["reason"]


@pytest.mark.parametrize("losses", [[1, 1, 1, 1, 1], [1, 1.1, 1.2, 1.3, 1.5], [0.5, 0.7, 0.6, 0.8, 0.7]])
def test_losses_that_do_not_fall_are_refused(losses):
    with pytest.raises(DomainError, match="must fall with depth"):
        fit_power_law(DESIGNS[1], losses)


def test_a_fixed_exponent_needs_no_verdict_on_it():
    found = fit_power_law(DEPTHS, noisy("fixed"), fixed_exponent=1, draws=200)
    assert found.exponent.value == 1
    assert found.exponent.stderr is None
    assert found.verdict.identifiable
    assert found.floor.profile.low < found.floor.value < found.floor.profile.high


def test_within_factor():
    assert within_factor(Interval(0.6, 1.2, 0.95))
    for low, high in ((0.0, 1.0), (0.5, 1.01), (0.5, np.inf)):
        assert not within_factor(Interval(low, high, 0.95))


def test_the_gap_fit_says_what_an_error_of_the_floor_does():
    found = fit_power_law(DEPTHS, 2 - 3 / (DEPTHS + 2), gap_floor=2.0)
    (note,) = [note for note in found.notes if "0.1 %" in note]
    moved = fit_power_law(DEPTHS, 2 - 3 / (DEPTHS + 2), gap_floor=2.002)
    assert f"{moved.exponent.value - found.exponent.value:+.2g}" in note


def test_predictions_and_band():
    found = fit_power_law(DEPTHS, noisy("band"), draws=0)
    low, high = found.band(DEPTHS)
    assert (low < found.predict(DEPTHS)).all()
    assert (found.predict(DEPTHS) < high).all()
    assert found.predict([[1, 2]]).shape == (1, 2)
    assert fit_power_law([1, 4, 16], [1.0, 0.6, 0.52]).band(DEPTHS) is None
    with pytest.raises(DomainError, match="> 0"):
        found.predict([0, 1])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"level": 1}, "level"), ({"level": 0}, "level"), ({"draws": -1}, "draws"), ({"seed": -1}, "seed"),
     ({"fixed_exponent": 0}, "fixed_exponent"), ({"gap_floor": 0}, "gap"), ({"stderrs": [1.0, 2.0]}, "common length")],
)  # fmt: skip
def test_bad_options_are_named(options, words):
    with pytest.raises(DomainError, match=words):
        fit_power_law(DEPTHS, noisy("bad"), **options)


# --- comparisons ---


def test_laws_are_compared_by_the_corrected_criterion():
    data = MeasuredLosses(DEPTHS, noisy("compare"))
    scores = compare_laws(data, LossLaw())
    assert scores[0].law == LossLaw(fixed_exponent=1.0)
    assert scores[0].delta == 0
    assert [s.delta for s in scores] == sorted(s.delta for s in scores)
    pure = next(s for s in scores if s.law == LossLaw(with_floor=False))
    line = fit(DEPTHS, data.losses, with_floor=False)
    n, K = 9, 3
    expected = n * np.log(line.squares / n) + 2 * K * n / (n - K - 1)
    assert pure.aicc == pytest.approx(expected, rel=1e-12)


def test_the_criterion_needs_rows_and_scatter():
    assert corrected_information(1.0, 5, 3) is None
    assert corrected_information(0.0, 9, 3) is None
    few = compare_laws(MeasuredLosses([1, 4, 16, 64, 256], noisy("few", DESIGNS[1])), LossLaw())
    assert any(score.aicc is None and "at least 6 rows" in score.reason for score in few)
    exact = compare_laws(MeasuredLosses(DEPTHS, 1 / DEPTHS), LossLaw())
    assert all(score.reason == "the law fits to rounding" for score in exact if score.floor == 0)


def test_the_scan_shows_an_exponent_that_settles():
    # Two powers: the local exponent falls from 1.7 towards one.
    losses = 0.5 + 0.5 / DEPTHS + 2.0 / DEPTHS**3
    steps = depth_scan(MeasuredLosses(DEPTHS, losses), LossLaw())
    exponents = [step.exponent.value for step in steps]
    assert [step.smallest for step in steps] == DEPTHS[:7].tolist()
    assert exponents[0] > 1.8
    assert exponents == sorted(exponents, reverse=True)
    assert exponents[5] == pytest.approx(1, abs=0.01)


def test_the_scan_stops_where_losses_no_longer_fall():
    losses = [1.0, 0.6, 0.5, 0.4, 0.45, 0.5, 0.55]
    steps = depth_scan(MeasuredLosses(DEPTHS[:7], losses), LossLaw())
    assert [step.smallest for step in steps] == [1, 2]


def test_repeated_runs_give_pure_error_and_a_test_of_the_law():
    depths = np.repeat(DEPTHS, 3)
    right = MeasuredLosses(depths, noisy("runs", depths))
    found = repeated_runs(right, LossLaw())
    assert found.degrees == 18
    assert found.stderr == pytest.approx(0.01, rel=0.5)
    assert found.p_value > 0.001
    wrong = MeasuredLosses(depths, noisy("runs", depths) * (1 + 0.2 * (depths == 8)))
    assert repeated_runs(wrong, LossLaw()).p_value < 1e-6
    assert repeated_runs(MeasuredLosses(DEPTHS, noisy("single")), LossLaw()) is None
    saturated = repeated_runs(right.select(np.isin(depths, [1, 16, 256])), LossLaw())
    assert saturated.p_value is None


def test_repeated_runs_at_three_depths_have_errors_but_no_test_of_the_law():
    depths = np.repeat([1.0, 16, 256], 4)
    found = fit_losses(MeasuredLosses(depths, noisy("three", depths)), draws=0)
    assert found.degrees == 9
    assert found.exponent.profile is not None
    assert any("form of the law" in note for note in found.notes)


# --- extremes ---


@pytest.mark.parametrize("factor", [1e-90, 1e90])
def test_losses_of_any_size(factor):
    found = fit(DEPTHS, factor * (0.5 + 0.5 / DEPTHS))
    assert values(found) == pytest.approx([0.5 * factor, 0.5 * factor, 1], rel=RECOVERED)


def test_a_coefficient_beyond_float64_has_a_reason_instead():
    depths = 1e6 * np.array([1, 1.1, 1.2, 1.3, 1.4])
    losses = [9.0, 1.01, 1.0, 0.99, 1.0]
    found, larger = fit_power_law(depths, losses, draws=100), fit_power_law(depths / 1e6, losses, draws=100)
    assert found.coefficient.value is None
    assert "larger units" in found.coefficient.reason
    assert found.exponent.value == pytest.approx(larger.exponent.value, rel=1e-3)
    assert larger.coefficient.value > 0
    assert json.dumps(found.to_json(), allow_nan=False)


def test_many_rows_and_depths_are_scanned_in_a_few_steps():
    depths = np.arange(1.0, 41)
    steps = depth_scan(MeasuredLosses(depths, noisy("many", depths, noise=0.001)), LossLaw())
    assert len(steps) == 12
    assert steps[0].smallest == 1
    with pytest.raises(DomainError, match="at most 10000 rows"):
        MeasuredLosses(np.ones(10001), np.ones(10001))


@pytest.mark.parametrize(("deepest", "identified"), [(8, True), (16, True), (2, False)])
def test_the_design_alone_decides_on_exact_losses(deepest, identified):
    depths = np.geomspace(1, deepest, 5)
    found = fit(depths, 0.5 + 0.5 / depths)
    assert found.verdict.identifiable is identified
    assert within_factor(found.compatible.exponent) is identified
