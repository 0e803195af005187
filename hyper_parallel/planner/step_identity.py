"""What makes two fits the same: a plan made for one may serve the other only where all of it is equal."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from hyper_parallel.records.record_files import require
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["FittedStep", "StepIdentity"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepIdentity:
    """One model, step, device and question, in words; and what was on the device between two steps."""

    facts: tuple[str, ...]  # "device: NVIDIA H200", "torch: 2.13.0", ...
    base_bytes: int  # weights, gradients, optimizer states, whatever else this process holds there

    @classmethod
    def of_ranks(cls, ranks: Sequence[StepIdentity]) -> StepIdentity:
        """One identity for all ranks: the facts of each, and the fullest device."""
        if len(ranks) == 1:
            return ranks[0]
        facts = [f"rank {rank}: {fact}" for rank, one in enumerate(ranks) for fact in one.facts]
        shared = [f"every rank: {fact}" for fact in ranks[0].facts if all(fact in one.facts for one in ranks)]
        own = [fact for fact in facts if f"every rank: {fact.partition(': ')[2]}" not in shared]
        return cls(
            facts=(f"ranks: {len(ranks)}", *shared, *own),
            base_bytes=max(one.base_bytes for one in ranks),
        )

    def key(self) -> str:
        """A short name for all facts."""
        return hashlib.sha256("\n".join(self.facts).encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedStep:
    """What a plan was fitted to, and what was measured of it then."""

    facts: tuple[str, ...]
    base_bytes: int
    measured: StepMeasure

    def __post_init__(self) -> None:
        require(self.base_bytes >= 0, f"FittedStep.base_bytes: {self.base_bytes} is negative")
