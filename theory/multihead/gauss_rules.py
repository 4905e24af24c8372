"""Gauss rules for densities without classical orthogonal polynomials, from a fine rule for the same density."""

from __future__ import annotations

import numpy as np
from scipy.linalg import eigh_tridiagonal

from theory.results import FloatArray

# Points of the fine rule with less than this of the largest weight are left out.
_NO_WEIGHT = 1e-24


def discretised_gauss_rule(points: FloatArray, weights: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights, shape (count,) each, read-only, of the Gauss rule of a fine rule; weights sum to one.

    Exact for polynomials up to degree 2 count - 1 under the fine rule. points, weights: the fine rule, weights >= 0
    of any scale, shape (m,), with m well above count. Source: Lanczos process with full reorthogonalisation, then
    Golub and Welsch 1969.
    """
    keep = weights > _NO_WEIGHT * weights.max()
    x, mass = points[keep], weights[keep] / weights[keep].sum()
    basis = np.empty((count + 1, x.size))
    basis[0] = np.sqrt(mass)
    diagonal, off = np.empty(count), np.empty(count)
    for k in range(count):
        vector = x * basis[k]
        diagonal[k] = basis[k] @ vector
        for _ in range(2):
            vector = vector - basis[: k + 1].T @ (basis[: k + 1] @ vector)
        off[k] = np.linalg.norm(vector)
        basis[k + 1] = vector / off[k]
    nodes, vectors = eigh_tridiagonal(diagonal, off[:-1], lapack_driver="stev")
    rule = np.asarray(nodes), np.asarray(vectors[0] ** 2)
    for array in rule:
        array.setflags(write=False)
    return rule
