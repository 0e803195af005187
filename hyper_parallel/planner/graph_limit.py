"""How many graphs a plan may need: every set of ops that compiled blocks keep is a graph of its own, and compiling takes time.

What of a graph's saved values leaves and what stays is decided outside of it, block by block. So two blocks that keep the same
ops share a graph, whatever each of them swaps. A block that is left alone has the graph that it was compiled with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice
from hyper_parallel.planner.profile import BlockKind, Profile

__all__ = ["MOST_GRAPHS", "Graph", "GraphLimit", "graph_of"]

MOST_GRAPHS: Final = 3  # of one kind of compiled block, its own included

Graph: TypeAlias = frozenset[int] | None
"""The ops that it keeps; None: the block's own graph."""


def graph_of(choice: Choice) -> Graph:
    """The graph that a compiled block needs for this choice."""
    if choice.cut < 0:
        return None
    return frozenset(at for at, fate in enumerate(choice.fates) if fate is not Fate.RECOMPUTE)


class GraphLimit:
    """The limit on one profile. Blocks that are not compiled are not concerned."""

    def __init__(self, profile: Profile) -> None:
        self._kinds: dict[int, BlockKind] = {
            number: kind for number, kind in enumerate(profile.kinds) if kind.graph is not None
        }
        self._rows = {
            number: [at for at, block in enumerate(profile.blocks) if block.kind == number] for number in self._kinds
        }
        self._graphs: dict[Choice, Graph] = {}

    def graphs(self, choices: Sequence[Choice]) -> dict[int, Counter[Graph]]:
        """How many blocks use each graph, by kind."""
        return {kind: Counter(self._graph_of(choices[at]) for at in row) for kind, row in self._rows.items()}

    def applied(self, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """The same choices; where they need too many graphs, the rarest ones become the most similar of the others."""
        found = choices
        for kind, counts in self.graphs(choices).items():
            if len(counts) > MOST_GRAPHS:
                kept = [graph for graph, _ in counts.most_common(MOST_GRAPHS)]
                found = self._within(found, kind, kept)
        return found

    def _graph_of(self, choice: Choice) -> Graph:
        if choice not in self._graphs:
            self._graphs[choice] = graph_of(choice)
        return self._graphs[choice]

    def _within(self, choices: tuple[Choice, ...], kind: int, kept: Sequence[Graph]) -> tuple[Choice, ...]:
        changed = list(choices)
        for at in self._rows[kind]:
            graph = self._graph_of(choices[at])
            if graph not in kept:
                nearest = min(kept, key=lambda other: self._bytes_between(self._kinds[kind], graph, other))
                changed[at] = _with_graph(choices[at], nearest, self._kinds[kind])
        return tuple(changed)

    def _bytes_between(self, kind: BlockKind, one: Graph, other: Graph) -> int:
        """Of the outputs that one of them keeps and the other does not."""
        return sum(kind.ops[at].output_bytes for at in _saves(kind, one) ^ _saves(kind, other))


def _saves(kind: BlockKind, graph: Graph) -> frozenset[int]:
    assert kind.graph is not None, "the kind is compiled"
    return frozenset(kind.graph.saves) if graph is None else graph


def _with_graph(choice: Choice, graph: Graph, kind: BlockKind) -> Choice:
    """The choice with another graph; what both keep stays or leaves as before."""
    if graph is None:
        return LEFT_ALONE
    before = choice.fates or (Fate.RECOMPUTE,) * len(kind.ops)
    fates = tuple(
        Fate.RECOMPUTE if at not in graph else Fate.SAVE if fate is Fate.RECOMPUTE else fate
        for at, fate in enumerate(before)
    )
    return Choice(max(choice.cut, 0), choice.inputs or (Fate.SAVE,) * len(kind.cuts[0].regions), fates)
