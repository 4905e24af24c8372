"""Patterns of trained heads on constructed weights, where each number is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.head_patterns import (
    Circuits,
    circuit_patterns,
    circuits_of,
    dynamics,
    head_patterns,
    over_seeds,
    scalars_of,
    vectors_of,
)
from sim.streams import stream
from theory.results import DomainError

DIM = 4
OMEGA, MU = np.array([0.13, -0.13, 0.0]), np.array([3.5, -3.5, 0.0])


def pattern_circuits(omega=OMEGA, mu=MU) -> Circuits:
    """Circuits of the form (3.1)."""
    key_query, output_value = np.zeros((2, len(omega), DIM + 1, DIM + 1))
    key_query[:, :DIM, :DIM] = omega[:, None, None] * np.eye(DIM)
    output_value[:, DIM, DIM] = mu
    return Circuits(key_query, output_value, DIM)


def test_the_pattern_itself_has_no_violations():
    circuits = pattern_circuits()
    omega, mu = scalars_of(circuits)
    assert omega == pytest.approx(OMEGA, rel=1e-15)
    assert mu.tolist() == MU.tolist()
    parts = circuit_patterns(circuits)
    assert max(parts.spread.max(), parts.label_reads.max(), parts.input_writes.max()) < 1e-15
    found = head_patterns(omega, mu)
    assert found.groups.tolist() == [1, -1, 0]
    assert found.both_signs
    assert (found.sign_mismatch, found.zero_sum) == (0, 0)
    assert found.homogeneity < 1e-15
    assert found.gamma == pytest.approx(0.13, rel=1e-14)
    assert found.step == pytest.approx(2 * 0.13 * 3.5, rel=1e-14)
    assert (found.positive, found.negative) == (3.5, -3.5)


def test_entries_outside_the_pattern_are_read_where_they_are():
    circuits = pattern_circuits()
    circuits.key_query[1, 0, 2] = 0.26  # KQ_11 off the diagonal: one row of four
    circuits.key_query[0, DIM, :DIM] = 0.013  # KQ_21
    circuits.output_value[2, DIM, :DIM] = 0.35  # OV_21
    circuits.key_query[:, :, DIM] = 7.0  # no effect on the prediction
    circuits.output_value[:, :DIM] = 7.0
    parts = circuit_patterns(circuits)
    assert parts.spread == pytest.approx([0, 1, 0], abs=1e-14)
    assert parts.label_reads == pytest.approx([0.1, 0, 0], rel=1e-14)
    assert parts.input_writes == pytest.approx([0, 0, 0.1], rel=1e-14)


def test_circuits_are_composed_from_the_four_maps():
    output, value, key, query = stream(1, "maps").standard_normal((4, 2, 3, DIM + 1, DIM + 1))
    parameters = {"output_maps": output, "value_maps": value, "key_maps": key, "query_maps": query}
    circuits = circuits_of(parameters, DIM, logit_scale=0.5)
    assert circuits.key_query[1, 2] == pytest.approx(0.5 * key[1, 2].T @ query[1, 2])
    assert circuits.output_value[0, 1] == pytest.approx(output[0, 1] @ value[0, 1])
    with pytest.raises(DomainError, match="query_maps"):
        circuits_of({"output_maps": output, "value_maps": value, "key_maps": key}, DIM)


def test_several_outputs_have_vectors():
    key_query, output_value = np.zeros((2, 1, 5, 5))
    key_query[0, :3, :3], output_value[0, 3:, 3:] = np.diag([1, 2, 3]), [[4, 9], [9, 5]]
    circuits = Circuits(key_query, output_value, 3)
    omega, mu = vectors_of(circuits)
    assert omega.tolist() == [[1, 2, 3]]
    assert mu.tolist() == [[4, 5]]
    with pytest.raises(DomainError, match="one output"):
        scalars_of(circuits)


def test_violations_by_hand():
    found = head_patterns(np.array([[0.1, -0.3], [0.2, 0.2]]), np.array([[1.0, 2.0], [1.0, 0.01]]), slope=2.0)
    assert found.sign_mismatch.tolist() == pytest.approx([0.6 / 0.7, 0])
    assert found.zero_sum.tolist() == pytest.approx([1, 1])
    assert found.gamma.tolist() == pytest.approx([0.7 / 3, 0.2])
    # Weights 1/3 and 2/3 on 0.1 and 0.3: standard deviation 0.2 sqrt(2)/3.
    assert found.homogeneity.tolist() == pytest.approx([0.2 * np.sqrt(2) / 3 / (0.7 / 3), 0], abs=1e-12)
    assert found.step.tolist() == pytest.approx([2 * (0.1 - 0.6), 2 * 0.202])
    assert found.groups.tolist() == [[1, -1], [1, 0]]
    assert found.both_signs.tolist() == [True, False]


def test_heads_that_are_zero_are_all_dummies():
    found = head_patterns(np.zeros(2), np.zeros(2))
    assert found.groups.tolist() == [0, 0]
    assert not found.both_signs
    assert [found.zero_sum, found.homogeneity, found.sign_mismatch, found.gamma] == [0, 0, 0, 0]


WEIGHTS = st.lists(st.floats(-10, 10).filter(lambda x: abs(x) > 1e-3), min_size=4, max_size=4)


@given(WEIGHTS, WEIGHTS, st.permutations(range(4)), st.floats(0.1, 10))
def test_patterns_know_neither_order_nor_sign_nor_scale_of_heads(omega, mu, order, scale):
    w, m = np.array(omega), np.array(mu)
    one, other = head_patterns(w, m), head_patterns(-scale * w[list(order)], -m[list(order)] / scale)
    for name in ("sign_mismatch", "zero_sum", "homogeneity", "step"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-9)
    assert one.gamma * scale == pytest.approx(other.gamma)
    assert one.positive * -1 == pytest.approx(scale * other.negative)
    assert 0 <= one.sign_mismatch <= 1
    assert 0 <= one.zero_sum <= 1 + 1e-12


def test_dynamics_of_a_rise_and_fall():
    omega = np.array([[[0.1, -0.1]], [[0.4, -0.4]], [[0.2, -0.2]]])
    mu = np.array([[[1.0, -1.0]], [[0.9, -0.9]], [[2.0, -2.0]]])
    found = dynamics(head_patterns(omega, mu))
    assert found.peak.tolist() == [1]
    assert found.peak_ratio.tolist() == pytest.approx([2.0])
    assert found.largest_drop.tolist() == pytest.approx([0.05])
    with pytest.raises(DomainError, match="snapshots"):
        dynamics(head_patterns(omega[0], mu[0]))


def test_means_over_seeds_carry_their_error():
    estimate = over_seeds(np.array([1.0, 2.0, 3.0, 6.0]), (4, 5, 6, 7))
    assert estimate.value == 3.0
    assert estimate.stderr == pytest.approx(np.sqrt(14 / 3) / 2)
    assert (estimate.chunks, estimate.seed) == (4, 4)
    with pytest.raises(DomainError, match="seeds"):
        over_seeds(np.array([1.0]), (0,))


def test_shapes_are_checked():
    with pytest.raises(DomainError, match="per head"):
        head_patterns(np.zeros(2), np.zeros(3))
