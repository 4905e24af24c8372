"""Many training runs: spawned processes of one thread each, or the workers of a dask scheduler.

Runs do not know of each other, so the number of workers and where they are change the time, never a bit. Runs of equal
shape go through one pass where that is faster, see `sim.together`, which changes no bit of them either. With a folder
every run is on disk: what was interrupted or killed goes on from its last checkpoint when asked for again.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sim.allocator import keep_freed_memory
from sim.experiments.base import checked_fields
from sim.origin import OtherCodeWarning
from sim.runs import CheckpointWarning
from sim.together import is_faster_together, shape_of, train_all_together
from sim.training import TrainingConfig, TrainingResult, TrainingStopped, config_from_json, train
from theory.problems import as_integer
from theory.results import AttnlawsError, DomainError, MissingDependencyError

Progress = Callable[[float], None]
# Results of some runs, or the errors in their places, with categories and texts of the warnings that came with them.
Outcome = tuple[list[TrainingResult | AttnlawsError], list[tuple[type[Warning], str]]]
# What a run tells of its way: its number and the fraction of it that is done.
Note = Callable[[int, float], None]

POLL_SECONDS = 0.2
# A process that was killed, or whose parent was, may take a moment to let go of its run.
LOCK_WAIT_SECONDS = 20.0
# Seconds between questions of a remote worker whether to stop, and that it has to do so.
REMOTE_POLL_SECONDS = 1.0
REMOTE_STOP_SECONDS = 60.0
CONNECT_SECONDS = 10
MAX_RUNS = 10**5
TABLES = ("experiment", "training", "sweep")
# Warnings that are passed on from where a run was trained.
PASSED_ON = (CheckpointWarning, OtherCodeWarning)


class WorkerLostError(AttnlawsError):
    """A worker process ended without a result."""


def train_many(
    configs: Sequence[TrainingConfig],
    workers: int = 2,
    folder: Path | None = None,
    progress: Progress | None = None,
    scheduler: str | None = None,
    *,
    snapshots: bool = False,
) -> list[TrainingResult]:
    """Results of ``configs`` in their order, with the bits of `sim.training.train`.

    workers: processes of one torch thread each; with one, or one config, everything runs in this process. Scripts must
    guard their entry (``if __name__ == "__main__"``), as processes are spawned. folder: where runs are kept, as in
    `sim.training.train`; progress: called with the fraction of the work done, in which runs count by their `cost`.
    scheduler: address of a running dask scheduler, whose workers must see ``folder``; then ``workers`` is not used, and
    runs whose worker dies are given to another one, which resumes them. snapshots: as in `sim.training.train`.

    With several workers the longest runs come first. Runs of equal shape are trained in one pass where that was
    measured to be faster, in at least as many groups as there are workers. The first interrupt (Ctrl-C) lets every run
    write a checkpoint and raises KeyboardInterrupt. A run that fails does not stop the others where there is a folder;
    its error is raised at the end. Raises WorkerLostError where a local process dies. Source: no equation.
    """
    workers = as_integer("workers", workers, 1, 4096)
    unique = list({config.identity(): config for config in configs}.values())
    with _stop_on_interrupt() as stop:
        sweep = _Sweep(unique, folder, progress or (lambda _: None), stop, snapshots)
        if scheduler is not None:
            sweep.run_on_scheduler(scheduler)
        elif min(workers, len(unique)) > 1:
            sweep.run_in_processes(min(workers, len(unique)))
        else:
            sweep.run_here()
        if stop.is_set():
            raise KeyboardInterrupt
    if sweep.errors:
        raise sweep.errors[min(sweep.errors)]
    results = {config.identity(): sweep.results[i] for i, config in enumerate(unique)}
    return [results[config.identity()] for config in configs]


def cost(config: TrainingConfig) -> float:
    """Rough seconds of a run on one core: contexts that it reads times what the experiment says of each.

    Source: no equation.
    """
    return 1e-6 * config.steps * config.members * config.batch * config.experiment.work()


def parted(configs: Sequence[TrainingConfig], workers: int) -> list[list[int]]:
    """Numbers of the configs that are trained in one pass; for several workers the longest first.

    Configs of one shape whose kind is faster so are dealt out to ``workers`` groups; all others stay alone.
    Source: no equation.
    """
    alike: dict[object, list[int]] = {}
    for index, config in enumerate(configs):
        alike.setdefault(shape_of(config) if is_faster_together(config) else index, []).append(index)
    parts = [part for indices in alike.values() for part in _dealt(indices, configs, workers)]
    if workers == 1:
        return parts
    # So that the workers end together.
    return sorted(parts, key=lambda part: -math.fsum(cost(configs[index]) for index in part))


def _dealt(indices: list[int], configs: Sequence[TrainingConfig], workers: int) -> list[list[int]]:
    """At most ``workers`` parts of about equal size; runs that draw the same batches stay side by side."""
    drawn = {index: (configs[index].experiment.drawn_from(), configs[index].seeds) for index in indices}
    first = {source: index for index, source in reversed(drawn.items())}
    ordered = sorted(indices, key=lambda index: first[drawn[index]])
    count = min(workers, len(ordered))
    bounds = [len(ordered) * part // count for part in range(count + 1)]
    return [sorted(ordered[low:high]) for low, high in itertools.pairwise(bounds)]


def sweep_configs(content: object) -> list[TrainingConfig]:
    """The runs that a table with ``experiment``, ``training`` and, for several runs, ``sweep`` describes.

    ``experiment`` and ``training`` hold the fields of the experiment and of `TrainingConfig`. ``sweep`` has the same
    shape; each list in it is an axis whose entries replace the field (tables: some of its fields), and all
    combinations are run, the last axis fastest. Raises DomainError where a field is unknown or a value is not allowed.
    Source: no equation.
    """
    if not isinstance(content, Mapping) or not set(content) <= set(TABLES) or "experiment" not in content:
        got = sorted(content) if isinstance(content, Mapping) else content
        raise DomainError(f"a training file must have the table experiment (training, sweep optional), got {got!r}")
    for name, part in content.items():
        if not isinstance(part, Mapping):
            raise DomainError(f"{name} must be a table of fields, got {part!r}")
    training = content.get("training", {})
    if "experiment" in training:
        raise DomainError("training must not have the field 'experiment', which is a table of its own")
    base = {"experiment": content["experiment"], "training": training}
    axes = list(_axes(content.get("sweep", {}), ()))
    runs = 1
    for _, values in axes:
        runs *= len(values)
    if not 1 <= runs <= MAX_RUNS:
        raise DomainError(f"sweep must describe 1 to {MAX_RUNS} runs, got {runs}")
    configs = []
    for chosen in itertools.product(*(values for _, values in axes)):
        table: Any = base
        for (path, _), value in zip(axes, chosen, strict=True):
            table = _replaced(table, path, value)
        fields = checked_fields(TrainingConfig, "training", {"experiment": table["experiment"], **table["training"]})
        configs.append(config_from_json(fields))
    return configs


def _axes(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            yield from _axes(value, here)
        elif isinstance(value, list) and len(here) > 1 and here[0] in TABLES[:2]:
            yield here, value
        else:
            raise DomainError(f"sweep must hold lists of values of experiment and training, got {'.'.join(here)}")


def _replaced(table: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise DomainError(f"sweep must name fields of tables, got {'.'.join(path)} of {table!r}")
    key, rest = path[0], path[1:]
    old = table.get(key, {})
    if rest:
        new = _replaced(old, rest, value)
    else:
        new = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return {**table, key: new}


class _Sweep:
    """Runs in progress: how far each is, results and errors by index."""

    def __init__(
        self,
        configs: list[TrainingConfig],
        folder: Path | None,
        progress: Progress,
        stop: threading.Event,
        snapshots: bool,
    ) -> None:
        self.configs = configs
        self.folder = None if folder is None else Path(folder).absolute()
        self.progress = progress
        self.stop = stop
        self.snapshots = snapshots
        costs = [cost(config) for config in configs]
        self.weights = [one / math.fsum(costs) for one in costs]
        self.fractions = [0.0] * len(configs)
        self.results: dict[int, TrainingResult] = {}
        self.errors: dict[int, BaseException] = {}

    def parts(self, workers: int) -> list[tuple[list[int], list[TrainingConfig]]]:
        """What is trained in one pass: numbers and configs."""
        return [(part, [self.configs[index] for index in part]) for part in parted(self.configs, workers)]

    def advance(self, index: int, fraction: float) -> None:
        """Note that a run has got so far."""
        if fraction > self.fractions[index]:
            self.fractions[index] = fraction
            if all(one == 1 for one in self.fractions):
                self.progress(1.0)
            else:
                self.progress(math.fsum(w * one for w, one in zip(self.weights, self.fractions, strict=True)))

    def take(self, indices: list[int], outcome: Callable[[], Outcome]) -> bool:
        """Keep the results of runs, or their errors; whether the others may go on."""
        try:
            found, told = outcome()
        except TrainingStopped:
            return False
        except (AttnlawsError, BrokenProcessPool) as failure:
            self.errors |= dict.fromkeys(indices, failure)
            return self.folder is not None and not isinstance(failure, BrokenProcessPool)
        for category, text in told:
            warnings.warn(text, category, stacklevel=4)
        failed = False
        for index, one in zip(indices, found, strict=True):
            if isinstance(one, AttnlawsError):
                self.errors[index] = one
                failed = True
            else:
                self.results[index] = one
                self.advance(index, 1.0)
        return self.folder is not None or not failed

    def run_here(self) -> None:
        """One pass after the other in this process."""
        for part, configs in self.parts(1):

            def outcome(part: list[int] = part, configs: list[TrainingConfig] = configs) -> Outcome:
                found = _train_part(part, configs, self.folder, self.snapshots, self.advance, self.stop.is_set, 0.0)
                return found, []

            if not self.take(part, outcome):
                return

    def run_in_processes(self, workers: int) -> None:
        """In spawned processes, which end when this one does."""
        context = multiprocessing.get_context("spawn")
        # A flag without a lock, which a worker that is killed could never give back.
        stop, steps = context.RawValue(ctypes.c_bool, False), context.SimpleQueue()
        with ProcessPoolExecutor(workers, context, _start_worker, (stop, steps)) as pool:
            waiting: dict[Future[Outcome], list[int]] = {
                pool.submit(_train_in_process, part, configs, self.folder, self.snapshots): part
                for part, configs in self.parts(workers)
            }
            # The pool starts to watch over its processes before it starts the last one, whose death would pass unseen
            # until another run ends; one more task makes it look at all of them.
            pool.submit(os.getpid)
            try:
                while waiting:
                    done, _ = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                    while not steps.empty():
                        self.advance(*steps.get())
                    taken = [self.take(waiting.pop(future), future.result) for future in done]
                    if self.stop.is_set() or not all(taken):
                        break
            finally:
                stop.value = True
                pool.shutdown(wait=True, cancel_futures=True)
        self._name_lost_workers()

    def _name_lost_workers(self) -> None:
        lost = [index for index, failure in self.errors.items() if isinstance(failure, BrokenProcessPool)]
        if lost and not self.stop.is_set():
            kept = "nothing was kept" if self.folder is None else "the same command goes on from the last checkpoints"
            raise WorkerLostError(f"a worker process was killed or ran out of memory: {kept}") from None

    def run_on_scheduler(self, address: str) -> None:
        """On the workers of a dask scheduler, which gives the runs of a dead worker to another one."""
        distributed = _require_distributed()
        if self.folder is None:
            raise DomainError("folder must be given with a scheduler: runs resume from it when a worker dies")
        try:
            client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as failure:
            raise DomainError(
                f"scheduler must be the address of a running dask scheduler, got {address!r}: {failure}"
            ) from None
        name = f"attnlaws-{uuid.uuid4()}"
        with client:
            stop = distributed.Event(name, client=client)
            client.subscribe_topic(name, lambda event: self.advance(*event[1]))
            parts = self.parts(max(1, sum(client.nthreads().values())))
            waiting = {
                number: client.submit(
                    _train_on_worker, part, configs, self.folder, self.snapshots, name, key=f"{name}-{number}"
                )
                for number, (part, configs) in enumerate(parts)
            }
            try:
                self._collect(waiting, [part for part, _ in parts])
            finally:
                if waiting:
                    stop.set()
                    _let_stop(list(waiting.values()))

    def _collect(self, waiting: dict[int, Any], parts: Sequence[list[int]]) -> None:
        while waiting and not self.stop.is_set():
            for number in [number for number, future in waiting.items() if future.done()]:
                self.take(parts[number], waiting.pop(number).result)
            time.sleep(POLL_SECONDS)


def _let_stop(futures: list[Any]) -> None:
    # Runs that have not started are taken back; the others write a checkpoint first.
    until = time.monotonic() + REMOTE_STOP_SECONDS
    while time.monotonic() < until and any(not future.done() for future in futures):
        time.sleep(POLL_SECONDS)
    for future in futures:
        future.cancel()


_stop_flag: Any = None
_steps: Any = None


def _start_worker(stop: Any, steps: Any) -> None:
    global _stop_flag, _steps
    _stop_flag, _steps = stop, steps
    keep_freed_memory()
    # Ctrl-C reaches all processes of a terminal; the parent passes it on as a request to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train_part(
    part: list[int],
    configs: list[TrainingConfig],
    folder: Path | None,
    snapshots: bool,
    note: Note,
    stop: Callable[[], bool],
    lock_wait: float,
) -> list[TrainingResult | AttnlawsError]:
    """Train one config, or several in one pass; errors of runs take the places of their results."""

    def progress(place: int, step: int, _loss: float) -> None:
        note(part[place], step / (configs[place].steps + 1))

    if len(configs) > 1:
        return train_all_together(configs, folder, progress, stop, lock_wait, snapshots=snapshots)
    try:
        return [train(configs[0], folder, partial(progress, 0), stop, lock_wait, snapshots=snapshots)]
    except TrainingStopped:
        raise
    except AttnlawsError as failure:
        return [failure]


def _train_in_process(
    part: list[int], configs: list[TrainingConfig], folder: Path | None, snapshots: bool
) -> Outcome:
    def note(index: int, fraction: float) -> None:
        _steps.put((index, fraction))

    def run() -> list[TrainingResult | AttnlawsError]:
        return _train_part(part, configs, folder, snapshots, note, lambda: _stop_flag.value, LOCK_WAIT_SECONDS)

    return _with_warnings(run)


def _train_on_worker(
    part: list[int], configs: list[TrainingConfig], folder: Path, snapshots: bool, name: str
) -> Outcome:
    distributed = _require_distributed()
    worker = distributed.get_worker()
    event = distributed.Event(name)
    asked = [time.monotonic()]

    def note(index: int, fraction: float) -> None:
        worker.log_event(name, (index, fraction))

    def stop() -> bool:
        if time.monotonic() - asked[0] < REMOTE_POLL_SECONDS:
            return False
        asked[0] = time.monotonic()
        return bool(event.is_set())

    def run() -> list[TrainingResult | AttnlawsError]:
        return _train_part(part, configs, folder, snapshots, note, stop, LOCK_WAIT_SECONDS)

    return _with_warnings(run)


def _with_warnings(run: Callable[[], list[TrainingResult | AttnlawsError]]) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        for category in PASSED_ON:
            warnings.simplefilter("always", category)
        found = run()
    return found, [(one.category, str(one.message)) for one in caught if issubclass(one.category, PASSED_ON)]


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first SIGINT sets; the second one interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.default_int_handler(number, frame)
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _require_distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise MissingDependencyError("a scheduler needs dask: pip install 'attnlaws[distributed]'") from error
    return distributed
