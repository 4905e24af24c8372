import math
import threading
import time
from concurrent.futures import Future
from itertools import chain, islice

import numpy as np
import pytest
from numba import njit

import sim.streams
from sim.streams import CHUNKS_AHEAD, MAX_SEED, default_workers, map_chunks, seed_sequence, stream, torch_stream
from theory.results import DomainError


@njit(nogil=True)
def draw_many(generator, count):
    out = np.empty((3, count))
    for i in range(count):
        out[0, i] = generator.random()
        out[1, i] = generator.standard_normal()
        out[2, i] = generator.standard_exponential()
    return out


def first_bits(*address) -> int:
    return int(stream(*address).bit_generator.random_raw())


class TestStream:
    def test_bits_are_settled(self):
        # Computed once with NumPy 2.4.6. Other bits would make every recorded seed worthless.
        assert stream(7, "floor", 3).bit_generator.random_raw(3).tolist() == [
            8235156797186546111,
            3769253138684795905,
            13948890311072587732,
        ]

    def test_same_address_same_bits(self):
        assert np.array_equal(stream(7, "floor", 3).standard_normal(100), stream(7, "floor", 3).standard_normal(100))
        assert first_bits(7, "floor") == first_bits(7, "floor", 0)

    @pytest.mark.parametrize("seed", [8.0, np.int64(8), np.uint8(8), np.float32(8)])
    def test_forms_of_one_seed_are_one_seed(self, seed):
        assert first_bits(seed, "x", 1) == first_bits(8, "x", 1)
        assert first_bits(8, "x", type(seed)(1)) == first_bits(8, "x", 1)

    def test_no_two_addresses_share_a_stream(self):
        # 51 seeds, 10 names and 12 indices: a chance collision of 64-bit words has probability 1e-12.
        seeds = [
            *range(40),
            2**31,
            2**32 - 1,
            2**32,
            2**32 + 8,
            2**63,
            2**64 - 1,
            2**64,
            2**64 + 8,
            2**96,
            2**127,
            MAX_SEED,
        ]
        names = ["", "a", "b", "aa", "ab", "ba", "a0", "0", "floor", "λ"]
        indices = [*range(10), 2**31, 2**32 - 1]
        addresses = [(s, n, i) for s in seeds for n in names for i in indices]
        assert len({first_bits(*address) for address in addresses}) == len(addresses)

    def test_neighbouring_seeds_do_not_share_items(self):
        assert first_bits(5, "x", 1) != first_bits(6, "x", 0)

    def test_streams_are_not_those_of_bare_seeds(self):
        bare = [np.random.default_rng(seed).bit_generator.random_raw() for seed in (8, [8], [8, 0])]
        plain = np.random.PCG64DXSM(8).random_raw()
        assert len(set(bare)) == 1  # the collision that NumPy leaves to its callers
        assert first_bits(8, "", 0) not in {*bare, plain}

    @pytest.mark.parametrize("other", [(5, "x", 1), (6, "x", 0), (5, "y", 0)])
    def test_neighbouring_streams_are_uncorrelated(self, other):
        count = 100_000
        correlation = np.corrcoef(stream(5, "x", 0).standard_normal(count), stream(*other).standard_normal(count))[
            0, 1
        ]
        assert abs(correlation) < 4 / math.sqrt(count)

    @pytest.mark.parametrize(
        "seed", [-1, MAX_SEED + 1, 10**400, 1.5, math.nan, math.inf, True, "8", None, [8], (8, 0)]
    )
    def test_bad_seeds_are_refused(self, seed):
        with pytest.raises(DomainError) as caught:
            stream(seed, "x")
        assert "seed must be an integer" in str(caught.value)
        assert repr(seed) in str(caught.value)

    @pytest.mark.parametrize("index", [-1, 2**32, 0.5, math.nan, False, "0", None])
    def test_bad_indices_are_refused(self, index):
        with pytest.raises(DomainError) as caught:
            seed_sequence(1, "x", index)
        assert "index must be an integer" in str(caught.value)
        assert repr(index) in str(caught.value)


class TestNumba:
    def test_kernels_draw_the_bits_that_numpy_draws(self):
        generator = stream(7, "kernel")
        expected = [
            (generator.random(), generator.standard_normal(), generator.standard_exponential()) for _ in range(2000)
        ]
        np.testing.assert_array_equal(draw_many(stream(7, "kernel"), 2000), np.array(expected).T)

    def test_kernels_leave_the_generator_where_numpy_would(self):
        ours, theirs = stream(7, "kernel"), stream(7, "kernel")
        draw_many(ours, 10)
        for _ in range(10):
            theirs.random(), theirs.standard_normal(), theirs.standard_exponential()
        assert ours.bit_generator.random_raw() == theirs.bit_generator.random_raw()

    def test_threads_do_not_change_what_kernels_draw(self):
        runs = [
            np.stack(list(map_chunks(lambda g: draw_many(g, 500), 3, "kernel", range(24), workers)))
            for workers in (1, 2, 8)
        ]
        np.testing.assert_array_equal(runs[0], runs[1])
        np.testing.assert_array_equal(runs[0], runs[2])


class TestTorchStream:
    def test_same_address_same_bits_and_others_differ(self):
        torch = pytest.importorskip("torch")
        draws = {
            address: torch.randn(50, generator=torch_stream(*address)).numpy().tobytes()
            for address in [(7, "x", 0), (7, "x", 1), (8, "x", 0), (7, "y", 0), (MAX_SEED, "x", 0)]
        }
        assert len(set(draws.values())) == len(draws)
        for address, bits in draws.items():
            assert torch.randn(50, generator=torch_stream(*address)).numpy().tobytes() == bits

    def test_leaves_the_global_generator_alone(self):
        torch = pytest.importorskip("torch")
        before = torch.random.get_rng_state()
        generator = torch_stream(7, "x")
        torch.randn(10, generator=generator)
        assert torch.equal(before, torch.random.get_rng_state())
        assert generator.device.type == "cpu"


def work(generator):
    """Some NumPy work of uneven length, so that chunks end in another order than they started."""
    size = int(generator.integers(5, 120))
    rows = generator.standard_normal((size, 30))
    return np.sort(rows @ rows.T, axis=None)[:20].sum(), rows.mean(), generator.bit_generator.random_raw()


class TestMapChunks:
    def test_workers_do_not_change_a_bit(self):
        runs = [list(map_chunks(work, 11, "work", range(40), workers)) for workers in (1, 2, 8)]
        assert runs[0] == runs[1] == runs[2]
        assert runs[0] == [work(stream(11, "work", index)) for index in range(40)]
        assert list(map_chunks(work, 11, "work", range(40))) == runs[0]

    def test_chunks_may_be_taken_in_several_ranges(self):
        everything = list(map_chunks(work, 11, "work", range(20), 2))
        parts = [list(map_chunks(work, 11, "work", part, 2)) for part in (range(7), range(7, 8), range(8, 20))]
        assert list(chain.from_iterable(parts)) == everything
        assert list(map_chunks(work, 11, "work", range(0, 20, 5), 2)) == everything[::5]
        assert list(map_chunks(work, 11, "work", range(0), 2)) == []

    def test_slow_first_chunks_do_not_overtake(self):
        started = []

        def late_first(generator):
            started.append(generator)
            time.sleep(0.05 if len(started) == 1 else 0)
            return generator.bit_generator.random_raw()

        assert list(map_chunks(late_first, 1, "x", range(6), 3)) == [first_bits(1, "x", i) for i in range(6)]

    def test_work_happens_in_threads_and_no_further_ahead_than_promised(self):
        threads, calls = set(), []

        def count(generator):
            threads.add(threading.current_thread())
            calls.append(generator)

        results = map_chunks(count, 1, "x", range(10**9), 2)
        assert calls == []  # nothing runs before the first result is asked for
        for taken, _ in enumerate(islice(results, 50), 1):
            assert len(calls) <= taken - 1 + CHUNKS_AHEAD * 2
        results.close()
        assert len(calls) <= 50 + CHUNKS_AHEAD * 2
        assert threading.current_thread() not in threads
        assert not any(thread.is_alive() for thread in threads)

    def test_closing_early_cancels_what_has_not_started(self, monkeypatch):
        futures = []

        class OnlyTheFirstRuns:
            def __init__(self, workers):
                assert workers == 2

            def __enter__(self):
                return self

            def __exit__(self, *_):
                return None

            def submit(self, function):
                futures.append(Future())
                if len(futures) == 1:
                    futures[0].set_result(function())
                return futures[-1]

        monkeypatch.setattr(sim.streams, "ThreadPoolExecutor", OnlyTheFirstRuns)
        results = map_chunks(lambda _: "first", 1, "x", range(10**9), 2)
        assert next(results) == "first"
        assert not any(future.cancelled() for future in futures)
        results.close()
        assert len(futures) == CHUNKS_AHEAD * 2
        assert all(future.cancelled() for future in futures[1:])

    @pytest.mark.parametrize("workers", [1, 2, 8])
    def test_exceptions_reach_the_caller_in_order(self, workers):
        bad = first_bits(1, "x", 3)

        def fail_at_three(generator):
            bits = generator.bit_generator.random_raw()
            if bits == bad:
                raise ZeroDivisionError("chunk 3")
            return bits

        results = map_chunks(fail_at_three, 1, "x", range(10**9), workers)
        assert list(islice(results, 3)) == [first_bits(1, "x", i) for i in range(3)]
        with pytest.raises(ZeroDivisionError, match="chunk 3"):
            next(results)
        assert list(results) == []

    @pytest.mark.parametrize("workers", [0, -1, 4097, 1.5, math.nan, True, "2"])
    def test_bad_numbers_of_workers_are_refused(self, workers):
        with pytest.raises(DomainError) as caught:
            list(map_chunks(work, 1, "x", range(2), workers))
        assert "workers must be an integer from 1 to 4096" in str(caught.value)
        assert repr(workers) in str(caught.value)

    def test_bad_seeds_are_refused(self):
        with pytest.raises(DomainError, match="seed must be an integer"):
            list(map_chunks(work, -1, "x", range(2), 1))

    def test_default_workers_are_the_cores_of_this_process(self, monkeypatch):
        assert default_workers() >= 1
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
        assert default_workers() == 3
        monkeypatch.delattr("os.sched_getaffinity")
        monkeypatch.setattr("os.cpu_count", lambda: None)
        assert default_workers() == 1
