"""The trained models of one command: every configuration is trained once and shared by all tables that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sim.streams import default_workers
from sim.sweep import train_many
from sim.training import TrainingConfig, TrainingResult
from validate.tables.comparison import Progress, Table


@dataclass(frozen=True, slots=True)
class TrainedTable:
    """A table that is read off trained models.

    configs: of the models it needs, from profile and seed; build: the table, from profile, seed, progress and the
    models, which are trained where they are not there yet.
    """

    configs: Callable[[str, int], list[TrainingConfig]]
    build: Callable[[str, int, Progress, TrainedRuns], Table]


@dataclass(slots=True)
class TrainedRuns:
    """Models trained so far.

    folder: where runs are kept, see `sim.training.train`; an interrupted command goes on from there. workers:
    processes, one per usable core where ``None``; scheduler: of a distributed engine, see `sim.sweep.train_many`.
    """

    folder: Path | None = None
    workers: int | None = None
    scheduler: str | None = None
    _known: dict[str, TrainingResult] = field(default_factory=dict, repr=False)

    @property
    def processes(self) -> int:
        """Number of processes to train in."""
        return default_workers() if self.workers is None else self.workers

    def results(self, configs: Sequence[TrainingConfig], progress: Progress = lambda _: None) -> list[TrainingResult]:
        """Results of ``configs`` in their order; those that are not there yet are trained."""
        missing = {one.identity(): one for one in configs if one.identity() not in self._known}
        if missing:
            found = train_many(list(missing.values()), self.processes, self.folder, progress, self.scheduler)
            self._known.update(zip(missing, found, strict=True))
        return [self._known[one.identity()] for one in configs]
