"""What the training loop asks of an experiment, and the table of kinds that reads experiments back from files.

An experiment is a frozen, validated, hashable dataclass: problem, architecture and starting point, that is all that
determines what is trained apart from how it is optimised. Modules of this package import torch inside functions only.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from theory.problems import problem_from_json
from theory.results import DomainError, FloatArray

if TYPE_CHECKING:
    from torch import Tensor, nn

Loss = Literal["teacher_averaged", "sampled"]
# What a batch consists of: the first axis counts members of the ensemble, the second contexts.
Arrays = tuple[FloatArray, ...]
# Whether runs of a kind can be trained in one pass, and whether that was measured to be faster.
Together = Literal["no", "possible", "faster"]
# Rough microseconds on one core that a context takes in one step, and each further layer of it.
CONTEXT_WORK, LAYER_WORK = 4.0, 1.0


class Experiment(ABC):
    """Base of all experiments: frozen dataclasses, decorated with `register`, whose fields are what JSON holds.

    kind: the name in files and on the command line. losses: the losses that it can be trained with; the first one is
    that of the evaluation. dimensionless: names of measured quantities that are pure numbers and not squared labels.
    together: whether `sim.together` can train several settings in one pass, see `losses_together`.
    Source: no equation.
    """

    __slots__ = ()
    kind: ClassVar[str]
    losses: ClassVar[tuple[Loss, ...]] = ("teacher_averaged", "sampled")
    dimensionless: ClassVar[frozenset[str]] = frozenset()
    together: ClassVar[Together] = "no"

    @abstractmethod
    def initial(self, generators: Sequence[np.random.Generator]) -> nn.Module:
        """A float64 model on the CPU, one generator per member; every parameter has a leading axis of members."""

    @abstractmethod
    def sample(self, generators: Sequence[np.random.Generator], count: int, loss: Loss) -> Arrays:
        """``count`` contexts from each generator, arrays of shape (generators, count, ...)."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
        """Mean training loss of each member, shape (members,), in units of `unit`; members do not interact.

        batch: what `sample` returned, as tensors of shape (members, contexts, ...).
        """

    @abstractmethod
    def measure(self, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Quantities of each context, shape (members, contexts) each and ``loss`` among them, in units of `unit`.

        batch: a sample for the first of `losses`; all members see the same contexts. Called in float64, without
        gradients.
        """

    def unit(self) -> float:
        """The squared label that is 1 in training, so that float32 fits every scale; results are multiplied by it."""
        return 1.0

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups ``{"params": [...], "factor": f}``: each learns at f times the learning rate."""
        return [{"params": list(model.parameters()), "factor": 1.0}]

    def zero_loss(self, batch: tuple[Tensor, ...], loss: Loss) -> Tensor | None:
        """Loss of predicting zero on a batch, shape (members,), or ``None`` where it is not known.

        Models that start small rest at this loss before they learn; the convergence rule must not stop there.
        """
        return None

    def shape(self) -> Hashable:
        """Sizes of model and batch: runs of a kind that agree in it can be trained in one pass."""
        return self

    def drawn_from(self) -> Hashable:
        """What `sample` depends on besides its arguments: where it is equal, equal streams give equal batches."""
        return self

    @classmethod
    def losses_together(cls, model: Any, parts: Sequence[tuple[Any, int, tuple[Tensor, ...]]], loss: Loss) -> Tensor:
        """Losses of several settings of one `shape`, all members in their order.

        model: the parameters of all, one after the other along the axis of members; parts: experiment, number of
        members and batch of each. Kinds whose ``together`` is not ``no`` define it.
        """
        raise NotImplementedError(f"{cls.__name__} trains every setting in a pass of its own")

    def work(self) -> float:
        """Rough microseconds on one core that a context takes in one step: weighs runs, and changes no result."""
        return CONTEXT_WORK + LAYER_WORK * float(getattr(self, "depth", 1))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with the kind under ``kind``; `experiment_from_json` reads it back."""
        content: dict[str, Any] = {"kind": self.kind}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            content[field.name] = plain(getattr(self, field.name))
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Experiment:
        """The experiment that `to_json` wrote. Raises DomainError where fields or values are not those of the kind."""
        values = checked_fields(cls, cls.kind, {key: value for key, value in content.items() if key != "kind"})
        return cls(**{name: _from_plain(value) for name, value in values.items()})


_Kind = TypeVar("_Kind", bound=type[Experiment])
_KINDS: dict[str, type[Experiment]] = {}


def register(cls: _Kind) -> _Kind:
    """Class decorator, outermost: experiments of this class are found by their kind. Source: no equation.

    A class of one's own is found too, once its module has been imported.
    """
    known = _KINDS.get(cls.kind)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise DomainError(f"kind must name one experiment, got {cls.kind!r} for {known.__qualname__} as well")
    _KINDS[cls.kind] = cls
    return cls


def experiment_kinds() -> dict[str, type[Experiment]]:
    """Classes by kind: those of this package and those registered elsewhere, sorted. Source: no equation."""
    for module in pkgutil.iter_modules(importlib.import_module("sim.experiments").__path__):
        importlib.import_module(f"sim.experiments.{module.name}")
    return dict(sorted(_KINDS.items()))


def experiment_from_json(content: object) -> Experiment:
    """The experiment that ``to_json`` wrote.

    Raises DomainError where kind, fields or values are not those of an experiment. Source: no equation.
    """
    if not isinstance(content, Mapping):
        raise DomainError(f"experiment must be a table of fields, got {content!r}")
    kinds = experiment_kinds()
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise DomainError(f"kind must be one of {', '.join(kinds)}, got {kind!r}")
    return kinds[kind].from_json(content)


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: problems and other types by their own ``to_json``, tuples as lists."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def checked_fields(cls: Any, name: str, content: object) -> dict[str, Any]:
    """``content`` if it names fields of the dataclass ``cls`` only and all that have no default.

    name: what to call the table in the error. Raises DomainError otherwise. Source: no equation.
    """
    if not isinstance(content, Mapping):
        raise DomainError(f"{name} must be a table of fields, got {content!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(content) - set(fields), key=str)
    if unknown:
        raise DomainError(f"{name} has the fields {', '.join(fields)}, got the unknown field {unknown[0]!r}")
    missing = [
        key
        for key, field in fields.items()
        if key not in content
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise DomainError(f"{name} needs the field {missing[0]!r}, got {sorted(content)}")
    return dict(content)


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping) and "type" in value:
        return problem_from_json(value)
    return tuple(_from_plain(item) for item in value) if isinstance(value, list | tuple) else value
