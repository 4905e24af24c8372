"""Which tables and figures can be reproduced, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sim.training import TrainingConfig
from theory.results import DomainError
from validate.tables import (
    depth_figure_3,
    depth_figure_4,
    depth_figure_5,
    depth_figure_6,
    depth_figure_7,
    depth_figure_11,
    depth_figure_12,
    depth_figure_13,
    depth_figure_14,
    depth_figures_9_10,
    depth_table_1,
    depth_table_2,
    depth_table_3,
    depth_table_4,
    depth_table_5,
    multihead_activations,
    multihead_figure_12,
    multihead_figures_6_7,
    multihead_lengths,
    multihead_multitask,
    multihead_observations,
    multihead_table_1,
    multihead_valley,
)
from validate.tables.comparison import Progress, Table
from validate.trained.runs import TrainedRuns, TrainedTable

Builder = Callable[[str, int, Progress], Table]
Entry = Builder | TrainedTable

TABLES: dict[str, Entry] = {
    "depth:table-1": TrainedTable(depth_table_1.configs, depth_table_1.build),
    "depth:table-2": TrainedTable(depth_table_2.configs, depth_table_2.build),
    "depth:table-3": depth_table_3.build,
    "depth:table-4": TrainedTable(depth_table_4.configs, depth_table_4.build),
    "depth:table-5": TrainedTable(depth_table_5.configs, depth_table_5.build),
    "depth:figure-3": TrainedTable(depth_figure_3.configs, depth_figure_3.build),
    "depth:figure-4": TrainedTable(depth_figure_4.configs, depth_figure_4.build),
    "depth:figure-5": TrainedTable(depth_figure_5.configs, depth_figure_5.build),
    "depth:figure-6": TrainedTable(depth_figure_6.configs, depth_figure_6.build),
    "depth:figure-7": TrainedTable(depth_figure_7.configs, depth_figure_7.build),
    "depth:figure-9": depth_figures_9_10.FIGURE_9,
    "depth:figure-10": depth_figures_9_10.FIGURE_10,
    "depth:figure-11": TrainedTable(depth_figure_11.configs, depth_figure_11.build),
    "depth:figure-12": TrainedTable(depth_figure_12.configs, depth_figure_12.build),
    "depth:figure-13": TrainedTable(depth_figure_13.configs, depth_figure_13.build),
    "depth:figure-14": TrainedTable(depth_figure_14.configs, depth_figure_14.build),
    "multihead:table-1": TrainedTable(multihead_table_1.configs, multihead_table_1.build),
    "multihead:observations": multihead_observations.OBSERVATIONS_ENTRY,
    "multihead:figure-1": multihead_observations.FIGURE_1_ENTRY,
    "multihead:figure-3": multihead_observations.FIGURE_3_ENTRY,
    "multihead:figure-4": multihead_lengths.FIGURE_4_ENTRY,
    "multihead:figure-5": multihead_observations.FIGURE_5_ENTRY,
    "multihead:figure-6": multihead_figures_6_7.build_figure_6,
    "multihead:figure-7": multihead_figures_6_7.build_figure_7,
    "multihead:figure-8": multihead_lengths.FIGURE_8_ENTRY,
    "multihead:figure-9": multihead_activations.FIGURE_9_ENTRY,
    "multihead:figure-10": multihead_activations.FIGURE_10_ENTRY,
    "multihead:figure-11": multihead_activations.FIGURE_11_ENTRY,
    "multihead:figure-12": TrainedTable(multihead_figure_12.configs, multihead_figure_12.build),
    "multihead:multitask": TrainedTable(multihead_multitask.configs, multihead_multitask.build),
    "multihead:valley": multihead_valley.VALLEY_ENTRY,
}


def select_tables(names: Sequence[str]) -> dict[str, Entry]:
    """The named tables and figures in the order given, all where none is named.

    Raises DomainError for unknown names.
    """
    for name in names:
        if name not in TABLES:
            raise DomainError(f"name must be one of {', '.join(TABLES)}, got {name!r}")
    return {name: TABLES[name] for name in names} if names else dict(TABLES)


def needed_runs(entries: Mapping[str, Entry], profile: str, seed: int) -> list[TrainingConfig]:
    """The models that the entries need, each once."""
    needed = [
        one for entry in entries.values() if isinstance(entry, TrainedTable) for one in entry.configs(profile, seed)
    ]
    return list({one.identity(): one for one in needed}.values())


def build_table(entry: Entry, profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Build one table; models that are not in ``runs`` yet are trained."""
    if isinstance(entry, TrainedTable):
        return entry.build(profile, seed, progress, runs)
    return entry(profile, seed, progress)
