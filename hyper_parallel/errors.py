"""Every error and warning of ours, in one tree.

::

    RuntimeError
      HyperParallelError
        UnsupportedMemberError (also NotImplementedError)   a Platform member this framework or device cannot serve
        GroupError                                          a rank, group or rendezvous that does not fit the call
          RendezvousTimeoutError (also TimeoutError)        the other side of a rendezvous did not come in time
          LostRankError                                     another rank ended, or did not come in time; names it
        CheckpointFileError                                 a weight file that is missing, foreign, truncated or unsafe
        ActivationError                                     anything about a saved value
          PolicyError (also TypeError)                      a policy answered, or was given, something unknown
          InPlaceChangeError                                a saved value was changed before backward wanted it
          ReplayMismatchError                               a replayed region ran other ops than its forward
          SwapImpossibleError                               MUST_SWAP where the promise cannot be kept
          SwapStateError                                    an explicit swap call out of order, or an unknown group
          CaptureError                                      a graph capture of an active region
        FarMemoryError                                      far memory could not keep or return bytes
          DiskTierError (also OSError)                      the disk tier; names the path
          CorruptDataError                                  bytes came back different from what was written
        MissingPackageError (also ImportError)              an adapter to a package that is not installed
        PlanError                                           a plan that cannot be made or applied
          BudgetTooSmallError                               no plan fits; names the smallest peak found
    UserWarning
      CompileWarning                                        compiled code saves what it was to swap
      PlanWarning                                           a batch longer than a plan knows; a stored plan that cannot be used
      SwapStateWarning                                      an explicit swap call in the wrong state; nothing was changed

Bad settings are plain ``ValueError`` or ``TypeError``, raised where the setting is made.
"""

import copy
from typing import TypeVar

__all__ = [
    "ActivationError",
    "BudgetTooSmallError",
    "CaptureError",
    "CheckpointFileError",
    "CompileWarning",
    "CorruptDataError",
    "DiskTierError",
    "FarMemoryError",
    "GroupError",
    "HyperParallelError",
    "InPlaceChangeError",
    "LostRankError",
    "MissingPackageError",
    "PlanError",
    "PlanWarning",
    "PolicyError",
    "RendezvousTimeoutError",
    "ReplayMismatchError",
    "SwapImpossibleError",
    "SwapStateError",
    "SwapStateWarning",
    "UnsupportedMemberError",
]

E = TypeVar("E", bound=BaseException)


class HyperParallelError(RuntimeError):
    """The root of every error that this library raises about its own work."""


class UnsupportedMemberError(HyperParallelError, NotImplementedError):
    """A Platform member that this framework or device really cannot serve."""

    def __init__(self, *, member: str, platform: str, reason: str, instead: str) -> None:
        self.member = member
        self.platform = platform
        self.reason = reason
        self.instead = instead
        super().__init__(f"{platform}.{member}: not available; because {reason}. Instead: {instead}.")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_unsupported_member, (self.member, self.platform, self.reason, self.instead)


def _rebuild_unsupported_member(member: str, platform: str, reason: str, instead: str) -> UnsupportedMemberError:
    return UnsupportedMemberError(member=member, platform=platform, reason=reason, instead=instead)


class GroupError(HyperParallelError):
    """A rank, group or rendezvous that does not fit the call."""


class RendezvousTimeoutError(GroupError, TimeoutError):
    """The other side of a rendezvous did not come in time."""


class LostRankError(GroupError):
    """Another rank ended, or did not come in time."""

    ranks: tuple[int, ...] = ()  # those that were lost, in the default group


class CheckpointFileError(HyperParallelError):
    """A weight file that is missing, foreign, truncated or unsafe to load."""


class ActivationError(HyperParallelError):
    """Anything that went wrong with a saved value."""


class PolicyError(ActivationError, TypeError):
    """A policy answered, or was given, something that is not a policy."""


class InPlaceChangeError(ActivationError):
    """A saved value was changed in place before backward wanted it."""


class ReplayMismatchError(ActivationError):
    """A replayed region ran other ops, or made other shapes, than its forward."""


class SwapImpossibleError(ActivationError):
    """MUST_SWAP was asked where keeping that promise is impossible."""


class SwapStateError(ActivationError):
    """An explicit swap call out of order, or on an unknown group."""


class CaptureError(ActivationError):
    """A device graph was captured while a region of ours was active."""


class FarMemoryError(HyperParallelError):
    """Far memory could not keep, or could not give back, the bytes it was lent for."""


class DiskTierError(FarMemoryError, OSError):
    """The disk tier failed; the message names the path."""


class CorruptDataError(FarMemoryError):
    """Bytes came back from far memory different from what was written."""


class MissingPackageError(HyperParallelError, ImportError):
    """An adapter to a package that is not installed."""


class PlanError(HyperParallelError):
    """A plan that cannot be made, loaded or applied."""


class BudgetTooSmallError(PlanError):
    """No plan fits the budget."""

    smallest_peak_bytes: int | None = None  # the smallest peak that was found, where one was


def again(error: E) -> E:
    """A new error with the words of an old one, for errors that are kept: each raise adds the frames it passes to the very
    object, and with them everything that the frames of a step hold."""
    fresh = copy.copy(error)
    fresh.__traceback__ = None
    if isinstance(error, OSError) and isinstance(fresh, OSError):
        fresh.errno = error.errno  # set on the object, so a copy does not carry it
    cause = error.__cause__
    if cause is not None:
        fresh.__cause__ = copy.copy(cause)
        fresh.__cause__.__traceback__ = None
    return fresh


class PlanWarning(UserWarning):
    """A batch that is longer than the one a plan was fitted on, or a stored plan that cannot be used."""


class CompileWarning(UserWarning):
    """Compiled code does less than was asked for: what it should swap stays on the device."""


class SwapStateWarning(UserWarning):
    """An explicit swap call arrived in the wrong state; it changed nothing."""
