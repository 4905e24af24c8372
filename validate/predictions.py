"""What the commands ``exponent`` and ``floor`` print: predictions as plain values."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from theory.problems import PowerLawSpectrum, Spectrum, TopKTask, as_integer
from theory.results import DomainError, Estimate, FloatArray, PrecisionError

if TYPE_CHECKING:
    from validate.tables.comparison import Progress

MAX_DEPTHS = 10_000
# Shorter contexts are cheaper to draw than to integrate.
SHORT_CONTEXT = 16
DEPTH_COLUMNS = (
    "risk_constrained",
    "risk_constrained_best_step",
    "best_step",
    "risk_free",
    "risk_free_continuum",
    "local_exponent_constrained",
    "local_exponent_free",
)


def exponent_prediction(spectrum: Spectrum, depths: list[int]) -> dict[str, Any]:
    """Asymptotic exponents, risks at the given depths and exponents between them.

    spectrum: a power law with a > 0, a + b > 1, or modes given one by one, for which there are no asymptotic
    exponents and no continuum: those are ``None``. depths: increasing, >= 1. Exponents between neighbouring depths
    have one entry fewer than depths; they are ``None`` where the risk has reached zero.
    """
    from theory.depth import free_polynomial, repeated_update

    layers = _checked_depths(depths)
    asymptotic = _asymptotic_exponents(spectrum)
    constrained = repeated_update.finite_risk(spectrum, layers)
    step = repeated_update.best_step(spectrum, layers)
    free = free_polynomial.finite_risk(spectrum, layers)
    slopes = {"constrained": _local_exponents(layers, constrained), "free": _local_exponents(layers, free)}
    missing = any(value is None for slope in slopes.values() for value in slope)
    law = spectrum if isinstance(spectrum, PowerLawSpectrum) else None
    return {
        "input_exponent": law.input_exponent if law else None,
        "teacher_exponent": law.teacher_exponent if law else None,
        "dim": spectrum.dim,
        "label_variance": label_variance(spectrum),
        **asymptotic,
        "depths": [int(layer) for layer in layers],
        "risk_constrained": constrained.tolist(),
        "risk_constrained_best_step": repeated_update.finite_risk(spectrum, layers, step).tolist(),
        "best_step": step.tolist(),
        "risk_free": free.tolist(),
        "risk_free_continuum": free_polynomial.continuum_risk(law, layers).tolist() if law else None,
        "local_exponent_constrained": slopes["constrained"],
        "local_exponent_free": slopes["free"],
        "local_exponent_reason": "no exponent where the risk has reached zero" if missing else None,
    }


def label_variance(spectrum: Spectrum) -> float:
    r"""Variance :math:`\sum_k\lambda_k\omega_k` of a label: the risk of predicting zero on the easy task.

    Source: depth (30) with r = 1. Raises DomainError where it diverges.
    """
    from theory.depth.free_polynomial import finite_risk

    return float(finite_risk(spectrum, 0))


def _checked_depths(depths: list[int]) -> FloatArray:
    from theory.depth.spectral_measure import MAX_DEGREE

    layers = np.asarray(depths, dtype=np.float64)
    allowed = (layers >= 1) & (layers <= MAX_DEGREE) & (layers == np.floor(layers))
    if not 1 <= layers.size <= MAX_DEPTHS or not allowed.all() or not (np.diff(layers) > 0).all():
        raise DomainError(
            f"depths must be at most {MAX_DEPTHS} increasing integers from 1 to {MAX_DEGREE}, got {depths!r}"
        )
    return layers


def _asymptotic_exponents(spectrum: Spectrum) -> dict[str, Any]:
    from theory.depth import free_polynomial

    names = ("zeta", "constrained", "free_continuum", "free_discrete")
    if not isinstance(spectrum, PowerLawSpectrum):
        return {**dict.fromkeys(names), "asymptotic_reason": "modes given one by one follow no stated power law"}
    zeta = spectrum.zeta
    values = (zeta, zeta, 2 * zeta, free_polynomial.discrete_exponent(spectrum))
    return {**dict(zip(names, values, strict=True)), "asymptotic_reason": None}


def mode_prediction(spectrum: Spectrum, depths: list[int], modes: list[int]) -> list[dict[str, Any]]:
    """How fast single modes are learned: normalised losses of both families, as in the depth paper's Figure 3(c).

    modes: numbers k from 1 to dim, in the order of the spectrum. Each entry holds the mode's share of the label
    variance, its characteristic depth under the repeated update, and its normalised losses at ``depths``. At most
    4096 modes.
    """
    from theory.depth import mode_superposition

    if spectrum.dim is None:
        raise DomainError("dim must be given for mode-wise losses, got None")
    chosen = [as_integer("modes", mode, 1, spectrum.dim) - 1 for mode in modes]
    free = mode_superposition.free_mode_losses(spectrum, depths)
    repeated = mode_superposition.repeated_mode_losses(spectrum, depths)
    characteristic = mode_superposition.repeated_characteristic_depths(spectrum)
    shares = spectrum.label_variances() / spectrum.label_variances().sum()
    return [
        {
            "mode": k + 1,
            "label_share": float(shares[k]),
            "characteristic_depth_repeated": float(characteristic[k]),
            "loss_repeated": repeated[:, k].tolist(),
            "loss_free": free[:, k].tolist(),
        }
        for k in chosen
    ]


def depth_table(prediction: dict[str, Any]) -> str:
    """The depth table of `exponent_prediction` as CSV with all digits, a row per depth.

    Exponents are those to the next depth; cells without a value are empty.
    """
    depths = prediction["depths"]
    columns: dict[str, list[float | None]] = {"depth": depths}
    for name in DEPTH_COLUMNS:
        values = prediction[name] or []
        columns[name] = [*values, *[None] * (len(depths) - len(values))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _local_exponents(depths: FloatArray, risks: FloatArray) -> list[float | None]:
    from theory.depth.free_polynomial import local_exponents

    pairs = zip(depths[:-1], depths[1:], risks[:-1], risks[1:], strict=True)
    return [
        float(local_exponents([left, right], [high, low])[0]) if high > 0 and low > 0 else None
        for left, right, high, low in pairs
    ]


def floor_prediction(
    task: TopKTask,
    *,
    degree: int,
    relative_error: float,
    seed: int,
    max_contexts: int,
    progress: Progress,
    method: str = "auto",
) -> dict[str, Any]:
    """Floor of the difficult task by degree: exact for isotropic inputs, else sampled to ``relative_error``.

    method: as in `sampled_floors`; other methods than "auto" sample isotropic inputs too.
    """
    from theory.depth.loss_floor import MAX_BASIS_DEGREE, isotropic_empirical_floor, isotropic_floor

    degree = as_integer("degree", degree, 1, MAX_BASIS_DEGREE)
    seed = as_integer("seed", seed, 0, 2**64 - 1)
    if task.spectrum.isotropic_input and method == "auto":
        exact = isotropic_floor(task).floor
        entry = {"value": exact.value, "stderr": 0.0, "interval": exact.interval().to_json()}
        floors = [{"degree": r, **entry} for r in range(1, degree + 1)]
        status = f"Exact within {exact.tolerance:.1e}; every degree has the same floor."
        # In one dimension no degree-one form in S is known.
        empirical = None if task.spectrum.dim == 1 else isotropic_empirical_floor(task).floor.value
        extra: dict[str, Any] = {
            "method": "exact",
            "samples": 0,
            "tolerance": exact.tolerance,
            "floor_finite_context_degree_1": empirical,
        }
    else:
        estimates = sampled_floors(
            task,
            degree=degree,
            relative_error=relative_error,
            seed=seed,
            max_contexts=max_contexts,
            progress=progress,
            method=method,
        )
        floors = [{"degree": r, **_estimate_entry(e)} for r, e in enumerate(estimates, 1)]
        status = estimates[-1].status.value
        extra = {"method": "Monte Carlo", "samples": estimates[-1].samples, "tolerance": None}
    top = floors[-1]
    return {
        "task": task.to_json(),
        "label_variance": label_variance(task.spectrum),
        "value": top["value"],
        "stderr": top["stderr"],
        "interval": top["interval"],
        "degree": top["degree"],
        **extra,
        "seed": seed,
        "floors_by_degree": floors,
        "status": status,
    }


def sampled_floors(
    task: TopKTask,
    *,
    degree: int,
    relative_error: float,
    seed: int,
    max_contexts: int,
    progress: Progress,
    method: str = "auto",
) -> tuple[Estimate, ...]:
    """Floors of degrees 1..degree (at most the number of distinct eigenvalues), sampled.

    method: "queries" draws queries and integrates their contexts, "contexts" draws whole contexts token by token (the
    reference), "auto" takes the first from `SHORT_CONTEXT` tokens and two modes on.
    """
    from sim.montecarlo.conditional_floor import conditional_floor
    from sim.montecarlo.floor_moments import residual_floor
    from theory.depth.loss_floor import predictor_basis

    if method not in ("auto", "queries", "contexts"):
        raise DomainError(f'method must be "auto", "queries" or "contexts", got {method!r}')
    if method == "auto":
        method = "contexts" if task.context < SHORT_CONTEXT or task.spectrum.dim == 1 else "queries"
    sample = conditional_floor if method == "queries" else residual_floor
    basis = predictor_basis(task.spectrum, degree)
    try:
        return sample(
            task, basis, relative_error=relative_error, seed=seed, max_contexts=max_contexts, progress=progress
        ).by_degree
    except PrecisionError as failure:
        if method == "contexts":
            raise
        raise PrecisionError(f'{failure}; whole contexts are the method "contexts"') from None


def _estimate_entry(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "stderr": estimate.stderr, "interval": estimate.interval().to_json()}
