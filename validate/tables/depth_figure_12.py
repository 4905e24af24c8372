"""Depth Figure 12 and (84): the context attention of the first of two layers, as identity plus uniform mixing."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.contexts import sample_contexts
from sim.streams import stream
from sim.training import TrainingConfig, TrainingResult
from theory.depth.context_update import identity_uniform_fit
from theory.results import Estimate, FloatArray
from validate.tables.comparison import Agreement, Progress, Row, Table, paper_tables
from validate.trained.generalised import (
    UPDATES,
    Model,
    ModelPlan,
    learned_update,
    model_configs,
    seeds_remark,
    updating,
    updating_alike,
)
from validate.trained.rows import setting_of
from validate.trained.runs import TrainedRuns
from validate.trained.softmax import over_seeds, softmax_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "depth:figure-12"
LAYERS = 2
CONTEXTS = 256
# The printed weights are said to show "nearly the identity" and "dominated by uniform mixing": above and below these.
NEAR_IDENTITY, MOSTLY_UNIFORM = 0.9, 0.5
# A printed weight agrees with ours within this; the paper gives no error and no number of contexts.
WEIGHT_TOLERANCE = 0.05


# What is trained: target and start, with the letter of its panel.
MODELS: tuple[tuple[str, int, Model], ...] = (
    ("top 2, layers started alike", 2, updating_alike),
    ("top 2, layers of several sharpnesses", 2, updating),
    ("top 16", 16, updating),
)


def configs(profile: str, seed: int) -> list[TrainingConfig]:
    """The two-layer models of Figure 11, and one of top 2 whose layers start alike."""
    plan = UPDATES[profile]
    two = ModelPlan((LAYERS,), plan.steps, plan.evaluation, plan.members)
    return [model_configs(model, two, top_k, seed)[0] for _, top_k, model in MODELS]


def context_attention(result: TrainingResult, seed: int) -> FloatArray:
    """The first layer's attention between context tokens, of many contexts, (n, P, P). Source: depth (9), (77)."""
    contexts = sample_contexts(result.config.experiment.problem, CONTEXTS, stream(seed, "context attention"))  # type: ignore[attr-defined]
    tokens = contexts.rotated(contexts.directions)
    logits = tokens @ result.parameters["key_query"][0, 0].T @ np.swapaxes(tokens, 1, 2)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    return np.asarray(weights / weights.sum(axis=2, keepdims=True))


def build(profile: str, seed: int, progress: Progress, runs: TrainedRuns) -> Table:
    """Reproduce the figure. profile: "quick" or "paper"; seed: of the training. Source: depth Figure 12, (83), (84)."""
    started = time.perf_counter()
    printed = paper_tables()["depth:84"]
    rows: list[Row] = []
    matrices = {}
    results = [result.without_diverged() for result in runs.results(configs(profile, seed))]
    for i, ((title, top_k, _), result) in enumerate(zip(MODELS, results, strict=True)):
        matrices[title] = context_attention(result, seed).mean(axis=0)
        mean = identity_uniform_fit(matrices[title])
        rows += _rows(title, top_k, printed[f"rho_top{top_k}"], result, float(mean.r_squared))
        progress((i + 1) / len(MODELS))
    alike, several = (over_seeds(result, "loss").value for result in results[:2])
    notes = (
        "The weight of the identity is a mean over contexts. The mean matrix over random tokens has R squared near one "
        "for any attention that treats tokens alike, so that a printed R squared near one says little about single "
        "contexts, for which it is given here as well.",
        f"Two layers, {UPDATES[profile].steps} steps, {UPDATES[profile].members} seeds; the matrices "
        "are of the first. On top 2 the weight depends on the start: layers started alike end "
        f"at R = {alike:.4g}, layers of several sharpnesses at {several:.4g} with a broader first layer.",
    )
    settings = {"profile": profile, "seed": seed, "steps": UPDATES[profile].steps, "contexts": CONTEXTS}
    return Table(NAME, "context attention of the first of two layers", tuple(rows), notes,
                 partial(_figure, matrices), time.perf_counter() - started, settings)  # fmt: skip


def _rows(title: str, top_k: int, paper: float, result: TrainingResult, r_squared: float) -> list[Row]:
    setting = setting_of(softmax_task(0.0, 0.0, top_k), LAYERS)
    weight = over_seeds(result, "identity_weight")
    like = weight.value > NEAR_IDENTITY if top_k == 2 else weight.value < MOSTLY_UNIFORM
    near = abs(weight.value - paper) <= WEIGHT_TOLERANCE
    kind = f"> {NEAR_IDENTITY:g}: nearly the identity" if top_k == 2 else f"< {MOSTLY_UNIFORM:g}: mostly uniform"
    update = learned_update(result)
    seen = f"m = {update.value:.2f}, {seeds_remark(result)}"
    other = "" if like else "a broader first layer has the lower loss"
    return [
        Row(setting, f"{title}: weight of the identity", paper, trained=weight,
            agreement=Agreement.AGREES if near else Agreement.DIFFERS,
            remark=("" if near else "the weight depends on the start of training, ") + seen),
        Row(setting, f"{title}: kind of the context attention", None, theory_text=kind, trained=weight,
            agreement=Agreement.AGREES if like else Agreement.DIFFERS, remark=other),
        Row(setting, f"{title}: R squared, single contexts", None, trained=over_seeds(result, "identity_r_squared")),
        Row(setting, f"{title}: R squared, mean over contexts", None,
            trained=Estimate(r_squared, 0.0, CONTEXTS, CONTEXTS, weight.seed)),
    ]  # fmt: skip


def _figure(matrices: dict[str, FloatArray]) -> Figure:
    """Mean context attention of both targets on one logarithmic scale of colours."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "attnlaws", "font.size": 9})
    figure, grid = plt.subplots(1, len(matrices), figsize=(3.4 * len(matrices), 3.2), layout="constrained")
    norm = LogNorm(1e-4, 1)
    shown: Any = None
    for axes, (title, matrix) in zip(np.atleast_1d(grid), matrices.items(), strict=True):
        shown = axes.imshow(np.maximum(matrix, 1e-4), norm=norm, cmap="viridis", interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("read token")
        axes.set_ylabel("reading token")
    figure.colorbar(shown, ax=np.atleast_1d(grid).tolist(), label="mean attention (1e-4 and below in one colour)")
    return figure
