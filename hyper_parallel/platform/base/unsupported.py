"""How a member says that nobody serves it, and a property that also answers on the class."""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import UnsupportedMemberError

__all__ = ["class_property", "needs_framework"]


def needs_framework(member: str) -> UnsupportedMemberError:
    """The error of a member that only a framework's own platform can serve."""
    return UnsupportedMemberError(
        member=member,
        platform="Platform",
        reason="the base class knows no framework",
        instead="call it on get_platform(), which is TorchPlatform or MindSporePlatform",
    )


class class_property(property):
    """A read-only property that answers on the class as it does on an instance."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Compute the value from the class when there is no instance."""
        if self.fget is None:
            raise AttributeError("unreadable attribute")
        return self.fget(owner if instance is None else instance)
