"""The mean-field floor of softmax attention: the programme of `theory` on the features of `sim`.

Types of layers are generated column by column on a pilot sample: solve on the types at hand, scan a grid of all types
for those that would lower the loss, add them, and stop when the dual bound over the scan has met the loss. A main
sample of fresh contexts then measures the minimum over the few types that are left. Teachers on the same inputs share
their contexts, and isotropic inputs need one run for all teachers: the loss is proportional to the trace of Ω.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.montecarlo.mean_field_features import (
    CONTEXTS_PER_CHUNK,
    MAX_SCALE,
    MeanFieldFeatures,
    TypeScan,
    losses_at,
    mean_field_features,
    mean_field_features_until,
    scan_types,
    visible_teachers,
)
from sim.streams import MAX_SEED
from theory.depth.mean_field import (
    SampledMinimum,
    best_single_type,
    best_weights,
    best_weights_at_depth,
    critical_types,
    dual_bound,
    excess_slope,
    finite_depth_loss,
    improving_types,
    product_types,
    sampled_minimum,
    scale_grid,
    separated_maxima,
)
from theory.problems import TopKTask, as_integer, as_real
from theory.results import DomainError, Estimate, FloatArray, Status

Progress = Callable[[float], None]
# Types at the start of column generation, and those without noise among which the best single layer is found.
FIRST_TYPES = product_types([0, 3, 8, 20, 50, 130], [0, 4, 10, 25, 60, 150])
SINGLE_TYPES = product_types([1, 1.4, 2, 2.8, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 18, 23, 32, 64], [0])
# Types of moderate noise, which few layers prefer to those of the limit.
SHALLOW_TYPES = product_types([3, 5, 8, 12, 18, 27, 50], [2.5, 5, 10, 17])
# Rounds of column generation, and the relative dual gap at which they stop.
COARSE_POINTS = 9
MAX_ROUNDS = 8
TARGET_GAP = 5e-4
# Cells of the scan with a relative slope above minus this are scanned again, on a finer grid.
CRITICAL_SLOPE = 3e-4
# Depths at which the best law of independent layers is found.
DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_MAX_CONTEXTS = 4 * 10**6


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a floor may cost.

    relative_error: of the floor; pilot_chunks: on which types are chosen; scan_points: scales of the scan; scan_parts:
    parts of each side of a critical cell.
    """

    relative_error: float
    pilot_chunks: int
    scan_points: int
    scan_parts: int


PROFILES = {
    "coarse": Effort(0.01, 4, 12, 2),
    "quick": Effort(0.01, 8, 14, 2),
    "paper": Effort(0.003, 24, 18, 3),
}


@dataclass(frozen=True, slots=True, eq=False)
class MeanFieldFloor:
    """Lowest loss of softmax attention with infinitely many layers on fixed context states, and what goes with it.

    floor: the estimate; in_sample, cross_fitted: too small and too large on average, see `SampledMinimum`; dual_gap:
    largest relative amount by which any law on the ``scanned`` types could lie lower, on the pilot's contexts;
    types (J, 2): rows (α, β) with weights (J,): the law times the gain; disagreement: A - C of that law; single_type,
    single_gain, single_layer: the best single layer and its loss; best_at_depth: loss of the best law at finite
    depth; defect: see `gram_defect`; pilot_contexts: drawn on top of the samples of the estimates.
    In units of the label variance.
    """

    task: TopKTask
    floor: Estimate
    in_sample: float
    cross_fitted: float
    dual_gap: float
    scanned: int
    types: FloatArray
    weights: FloatArray
    disagreement: Estimate
    single_type: tuple[float, float]
    single_gain: float
    single_layer: Estimate
    best_at_depth: dict[int, float]
    defect: float
    pilot_contexts: int

    @property
    def gain(self) -> float:
        """Readout gain of the best law."""
        return float(self.weights.sum())

    @property
    def law(self) -> FloatArray:
        """Probabilities of the types, (J,)."""
        return self.weights / self.gain

    @property
    def bracket(self) -> float:
        """Distance of cross-fitted and in-sample loss, relative to the floor."""
        return (self.cross_fitted - self.in_sample) / self.floor.value

    def risk(self, depth: npt.ArrayLike) -> FloatArray:
        """Loss R + (A - C)/L of layers drawn independently from the best law of infinite depth; depth: L >= 1."""
        layers = np.asarray(depth, dtype=np.float64)
        if not (layers >= 1).all():
            raise DomainError(f"depth must be at least 1, got {float(layers.min())!r}")
        return np.asarray(self.floor.value + self.disagreement.value / layers)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        law = [
            {"alpha": float(a), "beta": float(b), "probability": float(p)}
            for (a, b), p in zip(self.types, self.law, strict=True)
        ]
        return {
            "task": self.task.to_json(),
            "value": self.floor.value,
            "stderr": self.floor.stderr,
            "interval": self.floor.interval().to_json(),
            "samples": self.floor.samples,
            "seed": self.floor.seed,
            "status": self.floor.status.value,
            "in_sample": self.in_sample,
            "cross_fitted": self.cross_fitted,
            "dual_gap": self.dual_gap,
            "scanned_types": self.scanned,
            "gain": self.gain,
            "law": law,
            "disagreement": self.disagreement.to_json(),
            "single_layer": {
                "alpha": self.single_type[0],
                "beta": self.single_type[1],
                "gain": self.single_gain,
                "loss": self.single_layer.to_json(),
            },
            "best_at_depth": {str(depth): loss for depth, loss in self.best_at_depth.items()},
            "pilot_contexts": self.pilot_contexts,
        }


def mean_field_floor(
    task: TopKTask,
    *,
    relative_error: float | None = None,
    seed: int = 0,
    profile: str = "quick",
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MeanFieldFloor:
    """The mean-field floor of one task; see `mean_field_floors`."""
    return mean_field_floors(
        [task],
        relative_error=relative_error,
        seed=seed,
        profile=profile,
        max_contexts=max_contexts,
        workers=workers,
        progress=progress,
    )[0]


def mean_field_floors(
    tasks: Sequence[TopKTask],
    *,
    relative_error: float | None = None,
    seed: int = 0,
    profile: str = "quick",
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[MeanFieldFloor]:
    """Mean-field floors of several tasks, in their order; those that differ in the teacher alone share contexts.

    relative_error in (0, 1]: requested standard error over floor, by default 0.3 % in the profile "paper" and 1 % in
    "quick" and "coarse", which choose and certify the law on fewer contexts. max_contexts: limit of the main sample of
    each input; where it stops the run, the status says so. Same seed, same bits, whatever the workers.
    Raises DomainError for arguments outside these ranges.
    """
    if profile not in PROFILES:
        raise DomainError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    effort = PROFILES[profile]
    if relative_error is not None:
        error = as_real("relative_error", relative_error, 0, 1, open_low=True)
        effort = replace(effort, relative_error=error)
    seed = as_integer("seed", seed, 0, MAX_SEED)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, task in enumerate(tasks):
        if task.top_k in (1, task.context):
            raise DomainError(
                f"top_k must lie strictly between 1 and context ({task.context}), got {task.top_k}: "
                "sharp or uniform attention alone has zero loss there"
            )
        inputs = tuple(task.spectrum.input_variances().tolist())
        groups.setdefault((inputs, task.context, task.top_k), []).append(index)
    floors: dict[int, MeanFieldFloor] = {}
    for done, members in enumerate(groups.values()):
        run = _Run([tasks[i] for i in members], effort, seed, workers)
        report = _share(progress, done, len(groups))
        floors.update(zip(members, run.floors(max_contexts, report), strict=True))
    return [floors[index] for index in range(len(tasks))]


def _share(progress: Progress | None, part: int, parts: int) -> Progress | None:
    return None if progress is None else lambda fraction: progress((part + fraction) / parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Pilot:
    """What the pilot found: types (J, 2), weights (B, J) and relative dual gaps (B,) over ``scanned`` types."""

    types: FloatArray
    weights: FloatArray
    gaps: FloatArray
    scanned: int


class _Run:
    """Tasks on the same inputs: teachers of unit trace, one row for each direction of the trace of Ω."""

    def __init__(self, tasks: list[TopKTask], effort: Effort, seed: int, workers: int | None) -> None:
        self.tasks, self.effort, self.seed, self.workers = tasks, effort, seed, workers
        rows = [visible_teachers(task)[0] for task in tasks]
        self.scales = [float(row.sum()) for row in rows]
        shapes: dict[tuple[float, ...], int] = {}
        self.row_of = [
            shapes.setdefault(tuple(np.round(r / s, 12)), len(shapes)) for r, s in zip(rows, self.scales, strict=True)
        ]
        first = [self.row_of.index(row) for row in range(len(shapes))]
        self.teachers = np.array([rows[i] / self.scales[i] for i in first])

    def floors(self, max_contexts: int, progress: Progress | None) -> list[MeanFieldFloor]:
        """Floors of the tasks, in their order."""
        pilot = self.pilot()
        if progress is not None:
            progress(0.5)
        wide = self.features(np.vstack([SINGLE_TYPES, SHALLOW_TYPES, pilot.types]))
        singles = [best_single_type(h, A) for h, A in zip(_mean(wide.cross), _mean(wide.single_power), strict=True)]
        single_types = wide.types[[int(w.argmax()) for w in singles]]
        types = np.vstack([pilot.types, single_types])
        main = mean_field_features_until(
            self.tasks[0],
            types,
            np.pad(pilot.weights, [(0, 0), (0, len(single_types))]),
            relative_error=self.effort.relative_error,
            seed=self.seed,
            max_contexts=max_contexts,
            teachers=self.teachers,
            name="mean field main",
            workers=self.workers,
            progress=None if progress is None else lambda fraction: progress((1 + fraction) / 2),
        )
        return [
            self.assembled(task, row, scale, pilot, wide, main)
            for task, row, scale in zip(self.tasks, self.row_of, self.scales, strict=True)
        ]

    def features(self, types: FloatArray) -> MeanFieldFeatures:
        """Features of ``types`` on the pilot's contexts."""
        return mean_field_features(
            self.tasks[0],
            types,
            seed=self.seed,
            chunks=self.effort.pilot_chunks,
            teachers=self.teachers,
            name="mean field pilot",
            workers=self.workers,
        )

    def pilot(self) -> _Pilot:
        """Column generation on the pilot's contexts: a coarse scan, then finer ones until the bound is met."""
        types = FIRST_TYPES
        for number in range(MAX_ROUNDS):
            features = self.features(types)
            weights = np.array(
                [best_weights(h, G) for h, G in zip(_mean(features.cross), _mean(features.gram), strict=True)]
            )
            points = self.effort.scan_points if number else COARSE_POINTS
            gaps, scanned, found = self.certificate(features, weights, scale_grid(points, MAX_SCALE))
            used = (weights > 0).any(axis=0)
            if number and (gaps.max() <= TARGET_GAP or number == MAX_ROUNDS - 1):
                break
            types = np.unique(np.vstack([types[used], found]), axis=0)
        return _Pilot(types[used], weights[:, used], gaps, scanned)

    def certificate(
        self, features: MeanFieldFeatures, weights: FloatArray, scales: FloatArray
    ) -> tuple[FloatArray, int, FloatArray]:
        """Relative dual gaps (B,) of the weights over all scanned types, their number, and the types that help.

        The grid of ``scales`` is scanned; where it meets the target, so is a finer one in its critical cells.
        """
        grid = product_types(scales, scales)
        scan = self.scan(features, weights, grid)
        gaps, excess = self.gaps(features, weights, scan), _relative_slope(scan)
        if gaps.max() > TARGET_GAP:
            # The most useful types, and those that hold the bound back.
            found = [improving_types(scales, scales, v) for v in (*scan.slope, *excess)]
            return gaps, len(grid), np.vstack(found)
        fine = critical_types(scales, scales, excess.max(axis=0), -CRITICAL_SLOPE, self.effort.scan_parts)
        fine_scan = self.scan(features, weights, fine)
        found = [separated_maxima(fine, v) for v in (*fine_scan.slope, *_relative_slope(fine_scan))]
        return np.maximum(gaps, self.gaps(features, weights, fine_scan)), len(grid) + len(fine), np.vstack(found)

    def scan(self, features: MeanFieldFeatures, weights: FloatArray, types: FloatArray) -> TypeScan:
        """Slopes towards ``types`` on the pilot's contexts."""
        return scan_types(
            self.tasks[0],
            features.types,
            weights,
            types,
            seed=self.seed,
            chunks=self.effort.pilot_chunks,
            teachers=self.teachers,
            name="mean field pilot",
            workers=self.workers,
        )

    def gaps(self, features: MeanFieldFeatures, weights: FloatArray, scan: TypeScan) -> FloatArray:
        """Relative dual gaps (B,) over the types of a scan."""
        power, gram = _mean(features.target_power), _mean(features.gram)
        losses = _mean(losses_at(features.target_power, features.cross, features.gram, weights))
        bounds = [
            dual_bound(float(power[b]), float(w @ gram[b] @ w), excess_slope(scan.cross[b], scan.slope[b]))
            for b, w in enumerate(weights)
        ]
        return np.maximum(0.0, 1 - np.array(bounds) / losses)

    def assembled(
        self,
        task: TopKTask,
        row: int,
        scale: float,
        pilot: _Pilot,
        wide: MeanFieldFeatures,
        main: MeanFieldFeatures,
    ) -> MeanFieldFloor:
        """The result for one task, in its units."""
        power, cross, gram = main.target_power[:, row], main.cross[:, row], main.gram[:, row]
        found = sampled_minimum(power, cross, gram, main.single_power[:, row], contexts=main.contexts, seed=self.seed)
        reached = found.floor.stderr <= self.effort.relative_error * found.floor.value
        status = Status.DONE if reached else Status.SAMPLE_LIMIT
        position = len(pilot.types) + row
        own, h = main.single_power[:, row, position], cross[:, position]
        gain = float(h.mean() / own.mean())
        single = power - 2 * gain * h + gain**2 * own
        return MeanFieldFloor(
            task=task,
            floor=_scaled(found.floor, scale, status),
            in_sample=scale * found.in_sample,
            cross_fitted=scale * found.cross_fitted,
            dual_gap=float(pilot.gaps[row]),
            scanned=pilot.scanned,
            types=main.types[found.weights > 0],
            weights=found.weights[found.weights > 0],
            disagreement=_scaled(found.disagreement, scale, status),
            single_type=(float(main.types[position, 0]), float(main.types[position, 1])),
            single_gain=gain,
            single_layer=_estimate(scale * single, main, self.seed, status),
            best_at_depth=_best_at_depth(wide, row, scale, found),
            defect=found.defect,
            pilot_contexts=self.effort.pilot_chunks * CONTEXTS_PER_CHUNK,
        )


def _best_at_depth(wide: MeanFieldFeatures, row: int, scale: float, found: SampledMinimum) -> dict[int, float]:
    """Floor plus what finite depth adds to the pilot's minimum, with the best law at each depth."""
    moments = (_mean(wide.cross)[row], _mean(wide.gram)[row], _mean(wide.single_power)[row])
    h, G, A = moments
    power = float(_mean(wide.target_power)[row])
    limit = best_weights(h, G)
    base = power - 2 * h @ limit + limit @ G @ limit
    losses = {}
    for depth in DEPTHS:
        weights = best_weights_at_depth(h, G, A, depth)
        excess = float(finite_depth_loss(power, h, G, A, weights, depth)) - base
        losses[depth] = float(scale * (found.floor.value + excess))
    return losses


def _relative_slope(scan: TypeScan) -> FloatArray:
    """Slope over what the predictor reads of each type, (B, K): `excess_slope` is its largest positive value."""
    return np.asarray(scan.slope / np.maximum(scan.cross - scan.slope, np.finfo(float).tiny))


def _mean(chunks: FloatArray) -> FloatArray:
    return np.asarray(chunks.mean(axis=0))


def _scaled(estimate: Estimate, scale: float, status: Status) -> Estimate:
    return replace(estimate, value=scale * estimate.value, stderr=scale * estimate.stderr, status=status)


def _estimate(values: FloatArray, main: MeanFieldFeatures, seed: int, status: Status) -> Estimate:
    stderr = float(values.std(ddof=1)) / np.sqrt(main.chunks)
    return Estimate(float(values.mean()), float(stderr), main.contexts, main.chunks, seed, status)
