"""Mean-field floors of every softmax row of Tables 1 and 4: errors, gaps and time of both profiles. Run: make bench."""

import time

import pytest

from theory.problems import PowerLawSpectrum, TopKTask
from validate.mean_field import mean_field_floors
from validate.tables.comparison import paper_rows
from validate.tables.depth_table_1 import SOFTMAX_CONTEXT, SOFTMAX_DIM


def rows():
    first = [(2, row["a"], row["b"], row["softmax_L0"]) for row in paper_rows("depth:table-1")]
    return first + [(row["top_k"], row["a"], row["b"], row["L0"]) for row in paper_rows("depth:table-4")]


@pytest.mark.parametrize(("profile", "error", "limit"), [("quick", 0.01, 60), ("paper", 0.003, 600)])
def test_all_rows(profile, error, limit):
    printed = rows()
    tasks = [TopKTask(PowerLawSpectrum(a, b, SOFTMAX_DIM), SOFTMAX_CONTEXT, k) for k, a, b, _ in printed]
    started = time.perf_counter()
    floors = mean_field_floors(tasks, profile=profile, seed=2)
    seconds = time.perf_counter() - started
    print(f"\nprofile {profile}: {len(tasks)} rows in {seconds:.0f} s (target {limit} s on 2 cores)")
    for (k, a, b, paper), found in zip(printed, floors, strict=True):
        relative = found.floor.stderr / found.floor.value
        print(
            f"  top {k:2d} ({a:g}, {b:g}): {found.floor.value:.5g} +- {100 * relative:.2f} %, "
            f"paper {paper:g} ({100 * (found.floor.value / paper - 1):+.2f} %), dual gap {100 * found.dual_gap:.3f} %"
        )
        assert relative <= error * 1.001
        assert found.dual_gap <= 1e-3
        assert abs(found.floor.value / paper - 1) <= 0.02 + 2 * relative
