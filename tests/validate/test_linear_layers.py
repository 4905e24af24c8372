"""Linear attention at infinite context against the finite-dimensional theory: what each parametrisation can reach."""

from __future__ import annotations

import numpy as np
import pytest

from sim.contexts import haar_rotations
from sim.streams import stream
from theory.depth import free_polynomial, repeated_update
from theory.problems import PowerLawSpectrum

torch = pytest.importorskip("torch")

from sim.models.linear_attention import (  # noqa: E402
    LinearAttention,
    population_errors,
    population_losses,
    scalar_population_errors,
)

pytestmark = pytest.mark.long

SPECTRUM = PowerLawSpectrum(2, 1, dim=128)
SMALL = PowerLawSpectrum(1, 0.5, dim=6)
# Departure of the optimiser from the minimum that its own stopping rule leaves.
OPTIMISED = 1e-9


def minimised(model: LinearAttention, spectrum: PowerLawSpectrum, iterations: int = 500) -> float:
    """The population loss of scalar layers after deterministic quasi-Newton minimisation."""
    variances, teacher = (torch.tensor(v) for v in (spectrum.input_variances(), spectrum.teacher_variances()))
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=iterations,
        history_size=30,
        tolerance_grad=1e-13,
        tolerance_change=1e-17,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (scalar_population_errors(model, variances).square() * teacher).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return float(closure().detach())


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_layer_scalars_are_minimised_at_the_free_polynomial(depth: int) -> None:
    start = depth * 2 ** ((np.arange(depth) + 0.5) / depth)
    found = minimised(LinearAttention(start[None], np.ones(1), depth), SPECTRUM)
    assert found == pytest.approx(free_polynomial.finite_risk(SPECTRUM, depth).item(), rel=OPTIMISED)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_shared_scalar_gains_from_a_trained_readout_at_even_depth(depth: int) -> None:
    # One scalar and the readout gain: at depth 2 any quadratic through r(0) = 1, at even depth well below gain 1.
    found = minimised(LinearAttention(np.full((1, 1), float(depth)), np.ones(1), depth), SPECTRUM)
    repeated = repeated_update.best_risk(SPECTRUM, depth).item()
    free = free_polynomial.finite_risk(SPECTRUM, depth).item()
    assert free * (1 - OPTIMISED) <= found <= repeated * (1 + OPTIMISED)
    if depth <= 2:
        assert found == pytest.approx(free, rel=OPTIMISED)
    elif depth % 2 == 0:
        assert found < 0.7 * repeated
    else:
        assert found > 0.99 * repeated


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("size", [0.05, 0.5])
def test_matrices_do_not_go_below_the_free_polynomial(depth: int, size: float) -> None:
    # Averaged over rotations the model is a polynomial in Sigma, and averaging only adds variance: no matrices can be
    # better than the best scalars. These perturbations are worse by many standard errors.
    variances, teacher = (torch.tensor(v) for v in (SMALL.input_variances(), SMALL.teacher_variances()))
    best = depth * free_polynomial.layer_steps(SMALL, depth) / SMALL.input_variances()[0]
    free = free_polynomial.finite_risk(SMALL, depth).item()
    rotation = torch.tensor(haar_rotations(2000, SMALL.dim or 0, stream(1, "rotations"))[None])
    for index in range(3):
        noise = stream(2, "matrices", index).standard_normal((1, depth, 6, 6))
        model = LinearAttention(best[:, None, None] * (np.eye(6) + size * noise), np.ones(1), depth)
        losses = population_losses(population_errors(model, variances, rotation), teacher)[0].detach().numpy()
        error = losses.std(ddof=1) / np.sqrt(len(losses))
        # |z| < 4.5 fails by chance with probability 3e-6, 18 times.
        assert losses.mean() - 4.5 * error > free
