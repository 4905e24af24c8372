"""Members of an ensemble whose loss stopped being finite: what stands in place of their estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from theory.results import PrecisionError

# What an estimate offers, and a member that diverged does not.
OFFERED = frozenset({"value", "stderr", "samples", "chunks", "seed", "status", "interval", "z_score"})


class DivergedError(PrecisionError):
    """The loss of a member stopped being finite; the text says which, when, and what to do."""


@dataclass(frozen=True, slots=True)
class Diverged:
    """A member whose loss stopped being finite, in place of each of its estimates.

    member_seed: of the member; step: at which it happened; loss: as text, nan, inf or -inf; learning_rate: of the run.
    Reading any number of it raises DivergedError. Source: no equation.
    """

    member_seed: int
    step: int
    loss: str
    learning_rate: float

    def error(self) -> DivergedError:
        """The error that says so."""
        return DivergedError(
            f"the loss must stay finite, got {self.loss} at step {self.step} with seed {self.member_seed}: lower "
            f"learning_rate, {self.learning_rate:g}, or leave this seed out"
        )

    def __getattr__(self, name: str) -> Any:
        # Only what an estimate has: copying and pickling ask for names of their own.
        if name in OFFERED:
            raise self.error()
        raise AttributeError(f"a member that diverged has no {name!r}")

    def to_json(self) -> dict[str, Any]:
        """What happened, for JSON."""
        return {
            "value": None,
            "reason": f"diverged: the loss was {self.loss} at step {self.step}",
            "seed": self.member_seed,
        }
