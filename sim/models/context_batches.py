"""Contexts in float32, drawn by torch several times faster than `sim.contexts` draws them: what training consumes.

The law is that of `sim.contexts.sample_contexts`; the bits are others, and numbers are rounded to float32, which moves
a loss by a relative 1e-6 at most. One NumPy generator seeds each batch, so that named streams reach here too.
Tokens are in units where the largest λ is 1. Source: depth (3)-(6), (57)-(58).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sim.contexts import MAX_BATCH, visible_teacher_variances
from theory.problems import CopyTask, TopKTask, as_integer
from theory.results import DomainError, MissingDependencyError

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingDependencyError("sim.models needs torch: pip install 'attnlaws[train]'") from error

# Vectors of at least this length have squares well inside the range of float32.
SMALLEST_LENGTH = 1e-15


@dataclass(frozen=True, eq=False, slots=True)
class ContextBatch:
    """A batch of n contexts; fields as in `sim.contexts.Contexts`, as float32 tensors, and the generator in use.

    tokens, query: in units of sqrt(λ_1). Source: depth (3)-(6), (57)-(58).
    """

    task: TopKTask | CopyTask
    tokens: Tensor
    query: Tensor
    directions: Tensor
    query_direction: Tensor
    target: Tensor
    rotation: Tensor | None
    generator: torch.Generator

    def rotated(self, vectors: Tensor) -> Tensor:
        """Vectors of the eigenbasis as a network sees them, O v, shape (n, ..., d). Source: depth (3)."""
        if self.rotation is None:
            return vectors
        turned = self.rotation.transpose(-1, -2)
        return vectors @ turned if vectors.ndim == 3 else (vectors[:, None] @ turned)[:, 0]

    def label_factors(self) -> Tensor:
        """Factors F with E[y y^T] = F F^T over the teacher, for labels of unit variance, shape (n, P, d).

        Source: depth (1), (3).
        """
        return self.tokens * _teacher_deviations(self.task, visible_teacher_variances(self.task))

    def labels(self) -> Tensor:
        """Labels of unit variance with one teacher per context, shape (n, P).

        Drawn as `sim.contexts.sample_labels` draws them. Source: depth (1), (3), (4).
        """
        deviations = _teacher_deviations(self.task, self.task.spectrum.teacher_variances())
        teachers = _normals(self.query.shape, self.generator) * deviations
        if self.task.spectrum.isotropic_input:
            lengths = torch.linalg.vector_norm(teachers, dim=-1, keepdim=True)
            teachers = lengths * _unit(_normals(self.query.shape, self.generator))
        return (teachers[:, None] @ self.tokens.transpose(-1, -2))[:, 0]


def draw_contexts(task: TopKTask | CopyTask, count: int, generator: np.random.Generator) -> ContextBatch:
    """``count`` independent contexts. Raises DomainError for infinitely many tokens. Source: depth (3)-(6)."""
    count = as_integer("count", count, 1, MAX_BATCH)
    if task.context is None:
        raise DomainError("context must be finite for contexts to be drawn, got None")
    source = torch.Generator().manual_seed(int(generator.integers(2**63)))
    variances = task.spectrum.input_variances()
    deviations = torch.tensor(np.sqrt(variances / variances.max()), dtype=torch.float32)
    dim = len(deviations)
    tokens = _normals((count, task.context, dim), source) * deviations
    if isinstance(task, CopyTask):
        match = torch.randint(task.context, (count, 1), generator=source)
        query = torch.take_along_dim(tokens, match[..., None], dim=1)[:, 0]
    else:
        query = _normals((count, dim), source) * deviations
    directions, query_direction = _unit(tokens), _unit(query)
    if isinstance(task, TopKTask):
        match = top_indices((query_direction[:, None] @ directions.transpose(-1, -2))[:, 0], task.top_k)
    target = torch.zeros(count, task.context).scatter_(1, match, 1 / match.shape[1])
    rotation = None if task.spectrum.isotropic_input else _rotations(count, dim, source)
    return ContextBatch(task, tokens, query, directions, query_direction, target, rotation, source)


def top_indices(scores: Tensor, top_k: int) -> Tensor:
    """Indices of the ``top_k`` largest scores of each row, of lowest index on ties, in any order, shape (n, top_k).

    torch.topk leaves ties to the backend; where the cut falls into one, rows are sorted stably. Source: depth (6).
    """
    if top_k < scores.shape[-1]:
        values, indices = torch.topk(scores, top_k + 1, dim=-1)
        if bool((values[:, -1] < values[:, -2]).all()):
            return indices[:, :-1]
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]


def _rotations(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Haar rotations, as `sim.contexts.haar_rotations` draws them."""
    orthogonal, triangular = torch.linalg.qr(_normals((count, dim, dim), generator))
    signs = 1 - 2 * (triangular.diagonal(dim1=-2, dim2=-1) < 0).to(torch.float32)
    rotations: Tensor = orthogonal * signs[:, None]
    return rotations


def _normals(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _unit(vectors: Tensor) -> Tensor:
    """Directions of vectors; where squares could underflow they are scaled first, never clamped."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    if not bool((lengths > SMALLEST_LENGTH).all()):
        vectors = vectors / vectors.abs().amax(dim=-1, keepdim=True)
        lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    directions: Tensor = vectors / lengths
    return directions


def _teacher_deviations(task: TopKTask | CopyTask, teacher: np.ndarray) -> Tensor:
    """Deviations of the teacher that go with tokens in units of sqrt(λ_1) and labels of unit variance, shape (d,)."""
    largest = float(task.spectrum.input_variances().max())
    label = math.sqrt(float(task.spectrum.label_variances().sum()))
    return torch.tensor(np.sqrt(teacher * largest) / label, dtype=torch.float32)
