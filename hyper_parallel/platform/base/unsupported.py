"""The error of a member that no framework serves; properties and methods that work on the class and on an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import UnsupportedMemberError

__all__ = ["class_or_instance_method", "class_property", "needs_framework"]


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


if TYPE_CHECKING:
    class_or_instance_method = classmethod
else:

    class class_or_instance_method(classmethod):
        """A class method that gets the instance in place of the class where it is called on an instance.

        The members of the base call other members. A subclass may override those as instance methods
        (``def new_stream(self)``), which can only be called on an instance.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Bind to the instance where there is one."""
            return self.__func__.__get__(owner if instance is None else instance)
