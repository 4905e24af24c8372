import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from theory.results import (
    AttnlawsError,
    Certified,
    DomainError,
    Estimate,
    Interval,
    MissingDependencyError,
    PrecisionError,
    Status,
)

EXAMPLE = Estimate(value=1.5, stderr=0.25, samples=4000, chunks=8, seed=2**128 - 1, status=Status.SAMPLE_LIMIT)
NOT_FINITE = [math.nan, math.inf, -math.inf]


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "builtin"),
        [(DomainError, ValueError), (PrecisionError, ArithmeticError), (MissingDependencyError, ImportError)],
    )
    def test_each_error_is_ours_and_the_builtin_that_a_caller_expects(self, error, builtin):
        assert issubclass(error, AttnlawsError)
        assert issubclass(error, builtin)
        copy = pickle.loads(pickle.dumps(error("dim must be positive, got 0")))
        assert type(copy) is error
        assert str(copy) == "dim must be positive, got 0"

    def test_status_members_are_sentences(self):
        assert [member.reached for member in Status] == [True, False]
        assert all(member.value[0].isupper() and member.value.endswith(".") for member in Status)


class TestInterval:
    def test_is_closed(self):
        interval = Interval(-1.0, 2.0, 0.95)
        assert all(x in interval for x in (-1.0, 0.0, 2.0, np.float64(2.0)))
        assert not any(x in interval for x in (math.nextafter(-1, -2), math.nextafter(2, 3), math.nan, math.inf))

    def test_a_single_point_holds_itself_only(self):
        assert 0.3 in Interval(0.3, 0.3, 1.0)
        assert 0.1 + 0.2 not in Interval(0.3, 0.3, 1.0)

    def test_json(self):
        assert Interval(-1.0, 2.0, 0.95).to_json() == {"low": -1.0, "high": 2.0, "level": 0.95}


class TestEstimate:
    @pytest.mark.parametrize("bad", NOT_FINITE)
    @pytest.mark.parametrize("field", ["value", "stderr"])
    def test_what_is_not_finite_is_a_precision_error(self, field, bad):
        with pytest.raises(PrecisionError, match=f"{field}.*{bad!r}"):
            dataclasses.replace(EXAMPLE, **{field: bad})

    def test_a_negative_stderr_is_a_precision_error(self):
        with pytest.raises(PrecisionError, match=r"stderr >= 0.*-1e-300"):
            dataclasses.replace(EXAMPLE, stderr=-1e-300)

    @pytest.mark.parametrize(("samples", "chunks"), [(10, 1), (10, 0), (10, -3), (7, 8), (0, 2)])
    def test_too_few_chunks_or_samples_are_a_domain_error(self, samples, chunks):
        with pytest.raises(DomainError, match=f"chunks.*samples.*{chunks} and {samples}"):
            dataclasses.replace(EXAMPLE, samples=samples, chunks=chunks)

    @pytest.mark.parametrize("bad", [7.5, *NOT_FINITE])
    @pytest.mark.parametrize("field", ["samples", "chunks", "seed"])
    def test_counts_and_seeds_that_are_not_integers_are_a_domain_error(self, field, bad):
        with pytest.raises(DomainError, match=f"{field} must be an integer, got {bad!r}"):
            dataclasses.replace(EXAMPLE, **{field: bad})

    @pytest.mark.parametrize("chunks", [2, 3, 5, 8, 30, 1000])
    @pytest.mark.parametrize("level", [0.05, 0.5, 0.6827, 0.9, 0.95, 0.99, 0.999])
    def test_interval_is_that_of_student(self, chunks, level):
        interval = dataclasses.replace(EXAMPLE, chunks=chunks).interval(level)
        low, high = scipy.stats.t.interval(level, chunks - 1, loc=EXAMPLE.value, scale=EXAMPLE.stderr)
        # The two evaluate the same quantile; the tails of 0.5 + level / 2 lose three digits at level 0.999.
        assert interval.low == pytest.approx(low, rel=1e-12)
        assert interval.high == pytest.approx(high, rel=1e-12)
        assert interval.level == level

    def test_interval_by_hand(self):
        # One degree of freedom is the Cauchy law, whose 95 % quantile is tan(0.475 pi) = 12.7062...
        interval = Estimate(0.0, 1.0, 2, 2, 0).interval()
        assert interval.high == pytest.approx(math.tan(0.475 * math.pi), rel=1e-13)
        assert interval.low == -interval.high

    def test_levels_next_to_one_keep_their_digits(self):
        # The Cauchy quantile is cot(pi (1 - level) / 2); as 0.5 + level / 2 the level would round to 1.
        level = 1 - 2.0**-53
        assert Estimate(0.0, 1.0, 2, 2, 0).interval(level).high == pytest.approx(2**54 / math.pi, rel=1e-12)
        assert Estimate(3.0, 0.0, 2, 2, 0).interval(level) == Interval(3.0, 3.0, level)

    @pytest.mark.parametrize("level", [0.0, 1.0, -0.1, 1.1, 95, *NOT_FINITE, 0, 1, True, False])
    def test_levels_outside_0_and_1_are_refused(self, level):
        with pytest.raises(DomainError, match=rf"level .* got {level!r}"):
            EXAMPLE.interval(level)

    @given(st.floats(0.001, 0.999), st.floats(0.001, 0.999), st.integers(2, 100))
    def test_intervals_are_nested_and_centred(self, one, other, chunks):
        estimate = dataclasses.replace(EXAMPLE, chunks=chunks)
        inner, outer = (estimate.interval(level) for level in sorted((one, other)))
        assert outer.low <= inner.low <= estimate.value <= inner.high <= outer.high
        assert estimate.value in inner

    def test_student_intervals_cover_as_often_as_they_say(self):
        # 2,000 repeats of 5 chunks: the standard deviation of the rate is 0.49 %, the band 3 of them. Plain 1.96
        # standard errors would cover 87.8 % (t with 4 degrees), far outside the band.
        repeats, chunks, truth = 2000, 5, -0.7
        draws = np.random.default_rng(20261129).normal(truth, 3.0, size=(repeats, chunks))
        stderr = draws.std(axis=1, ddof=1) / math.sqrt(chunks)
        rate = np.mean(
            [
                truth in Estimate(value, error, chunks, chunks, 0).interval(0.95)
                for value, error in zip(draws.mean(axis=1), stderr, strict=True)
            ]
        )
        naive = np.mean(np.abs(draws.mean(axis=1) - truth) <= 1.96 * stderr)
        assert 0.935 < rate < 0.965
        assert naive < 0.9

    def test_z_score(self):
        assert EXAMPLE.z_score(1.0) == 2.0
        assert EXAMPLE.z_score(2.0) == -2.0
        assert EXAMPLE.z_score(1.0, 0.25) == pytest.approx(math.sqrt(2), rel=1e-15)
        assert EXAMPLE.z_score(EXAMPLE.value) == 0.0

    def test_z_score_without_any_error(self):
        exact = dataclasses.replace(EXAMPLE, stderr=0.0)
        assert exact.z_score(1.5) == 0.0
        assert exact.z_score(1.0) == math.inf
        assert exact.z_score(2.0) == -math.inf
        assert exact.z_score(1.0, 0.25) == 2.0

    @pytest.mark.parametrize("bad", NOT_FINITE)
    def test_z_score_against_what_is_not_finite_is_refused(self, bad):
        with pytest.raises(DomainError, match=rf"reference.* got {bad!r} and 0\.0"):
            EXAMPLE.z_score(bad)
        with pytest.raises(DomainError, match=rf"reference_stderr.* got 1\.0 and {bad!r}"):
            EXAMPLE.z_score(1.0, bad)

    def test_z_score_against_a_negative_stderr_is_refused(self):
        with pytest.raises(DomainError, match=r"reference_stderr .* got 1\.0 and -0\.25"):
            EXAMPLE.z_score(1.0, -0.25)

    def test_json(self):
        content = json.loads(json.dumps(EXAMPLE.to_json(), allow_nan=False))
        interval = EXAMPLE.interval(0.95)
        assert content == {
            "value": 1.5,
            "stderr": 0.25,
            "interval": {"low": interval.low, "high": interval.high, "level": 0.95},
            "samples": 4000,
            "chunks": 8,
            "seed": 2**128 - 1,
            "status": Status.SAMPLE_LIMIT.value,
        }

    def test_numpy_scalars_become_plain_numbers(self):
        estimate = Estimate(np.float32(0.5), np.float64(0.25), np.float64(10), np.int32(5), np.uint64(3))
        assert estimate == Estimate(0.5, 0.25, 10, 5, 3)
        assert [type(x) for x in dataclasses.astuple(estimate)] == [float, float, int, int, int, Status]
        json.dumps(estimate.to_json())

    def test_is_a_frozen_value(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            EXAMPLE.value = 2.0
        assert pickle.loads(pickle.dumps(EXAMPLE)) == EXAMPLE
        assert hash(dataclasses.replace(EXAMPLE)) == hash(EXAMPLE)
        assert dataclasses.replace(EXAMPLE, seed=0) != EXAMPLE
        assert Estimate(0.0, 0.0, 2, 2, 0).status is Status.DONE


class TestCertified:
    @pytest.mark.parametrize("bad", NOT_FINITE)
    @pytest.mark.parametrize("field", ["value", "tolerance"])
    def test_what_is_not_finite_is_a_precision_error(self, field, bad):
        with pytest.raises(PrecisionError, match=f"{field}.*{bad!r}"):
            Certified(**({"value": 1.0, "tolerance": 0.5} | {field: bad}))

    def test_a_negative_tolerance_is_a_precision_error(self):
        with pytest.raises(PrecisionError, match=r"tolerance, got 1\.0 and -1e-300"):
            Certified(1.0, -1e-300)

    def test_interval_is_certain(self):
        assert Certified(1.0, 0.25).interval() == Interval(0.75, 1.25, 1.0)
        assert Certified(1.0, 0.0).interval() == Interval(1.0, 1.0, 1.0)

    def test_is_a_frozen_value_of_plain_numbers(self):
        certified = Certified(np.float32(1.5), np.int64(0))
        assert [type(x) for x in dataclasses.astuple(certified)] == [float, float]
        assert json.loads(json.dumps(certified.to_json())) == {"value": 1.5, "tolerance": 0.0}
        assert pickle.loads(pickle.dumps(certified)) == certified
        with pytest.raises(dataclasses.FrozenInstanceError):
            certified.value = 2.0
