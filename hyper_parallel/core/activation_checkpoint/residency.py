"""Where the bytes of a saved storage are, and which moves are legal.

::

                 START_OFFLOAD            FINISH_OFFLOAD
        DEVICE ───────────────► D2H ───────────────────► HOST
          ▲ ▲      CANCEL        │                         │
          │ └────────────────────┘                         │ START_LOAD
          │            FINISH_LOAD                         ▼
          └────────────────────────────────────────────── H2D

The table is the whole machine: a move that is not in it raises and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from hyper_parallel.errors import SwapStateError

__all__ = ["MOVES", "Move", "Residency", "illegal", "next_residency", "row_of"]


class Residency(str, enum.Enum):
    """Which bytes exist, and who may read them."""

    DEVICE = "device"  # device bytes are valid; a far copy may exist too
    D2H = "d2h"  # device bytes are valid and held; a copy out of them may still be in flight
    HOST = "host"  # only the far copy exists
    H2D = "h2d"  # device bytes exist, and are valid only after the load's completion

    def __str__(self) -> str:
        return self.value


class Move(str, enum.Enum):
    """What can be asked of a record."""

    START_OFFLOAD = "start_offload"
    FINISH_OFFLOAD = "finish_offload"
    CANCEL_OFFLOAD = "cancel_offload"  # wanted again before it left
    START_LOAD = "start_load"
    FINISH_LOAD = "finish_load"


MOVES: Final[Mapping[tuple[Residency, Move], Residency]] = MappingProxyType(
    {
        (Residency.DEVICE, Move.START_OFFLOAD): Residency.D2H,
        (Residency.D2H, Move.FINISH_OFFLOAD): Residency.HOST,
        (Residency.D2H, Move.CANCEL_OFFLOAD): Residency.DEVICE,
        (Residency.HOST, Move.START_LOAD): Residency.H2D,
        (Residency.H2D, Move.FINISH_LOAD): Residency.DEVICE,
    }
)

# The table by move, for a look-up without hashing a state: every move has one row.
_ROWS: Final = {move.value: (source, target) for (source, move), target in MOVES.items()}
assert len(_ROWS) == len(MOVES) == len(Move), "a move with two rows needs another look-up"


def next_residency(residency: Residency, move: Move) -> Residency:
    """Look the move up; an illegal one raises."""
    source, target = row_of(move)
    if residency is not source:
        raise illegal(residency, move)
    return target


def row_of(move: Move) -> tuple[Residency, Residency]:
    """The residency before a move and the one after it. Who looks a move up often keeps its row."""
    return _ROWS[move._value_]  # ``value`` is a property, at five times the cost


def illegal(residency: Residency, move: Move) -> SwapStateError:
    """The error of a move that is not in the table."""
    legal = ", ".join(sorted(known.value for state, known in MOVES if state is residency))
    return SwapStateError(f"record: cannot {move.value} while {residency.value}; legal now: {legal}")
