"""The Platform contract in one class, and the choice of the framework that serves it.

Nothing here imports a framework before :func:`get_platform` is called. The choice is made once: the instance is kept in
``platform`` until it is set to None again.
"""

from __future__ import annotations

import enum
import importlib
import os
from collections.abc import Callable
from typing import Any, ClassVar, Final

from hyper_parallel.platform.base.collectives import CollectiveMembers
from hyper_parallel.platform.base.differentiable import DifferentiableMembers
from hyper_parallel.platform.base.groups import EXISTING_COMM_GROUPS, GroupInfo, GroupMembers
from hyper_parallel.platform.base.layouts import ParameterLayout
from hyper_parallel.platform.base.modules import ModuleMembers
from hyper_parallel.platform.base.streams import StreamMembers
from hyper_parallel.platform.base.tensors import TensorMembers
from hyper_parallel.platform.base.unsupported import class_or_instance_method

__all__ = [
    "EXISTING_COMM_GROUPS",
    "GroupInfo",
    "HYPER_PARALLEL_PLATFORM",
    "HYPER_PARALLEL_PLATFORM_MINDSPORE",
    "HYPER_PARALLEL_PLATFORM_TORCH",
    "ParameterLayout",
    "Platform",
    "PlatformType",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
]

HYPER_PARALLEL_PLATFORM: Final = "HYPER_PARALLEL_PLATFORM"
"""The environment variable that names the platform."""
HYPER_PARALLEL_PLATFORM_MINDSPORE: Final = "mindspore"
HYPER_PARALLEL_PLATFORM_TORCH: Final = "torch"


class PlatformType(enum.Enum):
    """The frameworks that the contract is served on."""

    MINDSPORE = "mindspore"
    PYTORCH = "pytorch"


class Platform(TensorMembers, ModuleMembers, StreamMembers, GroupMembers, CollectiveMembers, DifferentiableMembers):
    """The contract: every member exists here; what needs a framework says so, naming the member.

    Note: the gradient handle
        A trainer launches an asynchronous reduction of gradients and gives its handle to ``set_grad_reduce_handle``. One
        handle is in flight. When the next arrives, the previous one is first finished on the gradient stream: waited for
        there, and its post-processing run there, so that the compute stream is not held up. ``wait_grad_handle``
        finishes the last one and orders the current stream after the gradient stream. The three attributes are those of
        this class, whichever subclass is called: a process has one handle in flight.
    """

    platform_type: ClassVar[PlatformType | None] = None
    current_grad_handle: ClassVar[Any] = None
    post_grad_handle_process: ClassVar[Callable[[], Any] | None] = None
    grad_sync_stream: ClassVar[Any] = None

    @class_or_instance_method
    def set_grad_reduce_handle(cls, handle: Any, post_process: Callable[[], Any] | None = None) -> None:
        """Put ``handle`` in flight, after finishing the previous one on the gradient stream."""
        cls._process_current_handle()
        Platform.current_grad_handle = handle
        # A bare function on a class would become a method; staticmethod keeps it the function it was given as.
        Platform.post_grad_handle_process = None if post_process is None else staticmethod(post_process)

    @class_or_instance_method
    def wait_grad_handle(cls) -> None:
        """Finish the handle in flight and order the current stream after the gradient stream."""
        cls._process_current_handle()
        if Platform.grad_sync_stream is not None:
            cls.get_current_stream().wait_stream(Platform.grad_sync_stream)

    @class_or_instance_method
    def _process_current_handle(cls) -> None:
        """Wait for the handle in flight and run its post-processing, both on the gradient stream."""
        handle, post_process = Platform.current_grad_handle, Platform.post_grad_handle_process
        if handle is None:
            return
        # Cleared first: after a failed reduction the next step must not wait for the same handle again.
        Platform.current_grad_handle = None
        Platform.post_grad_handle_process = None
        if Platform.grad_sync_stream is None:
            Platform.grad_sync_stream = cls.new_stream()
        with cls.get_stream_context()(Platform.grad_sync_stream):
            handle.wait()
            if post_process is not None:
                post_process()


platform: Platform | None = None
"""The cached instance; None means that nothing has been chosen yet."""


def get_platform() -> Platform:
    """The platform of this process.

    The cached one; else what ``HYPER_PARALLEL_PLATFORM`` names; else MindSpore if it is installed; else torch. An empty
    variable counts as unset.
    """
    if platform is not None:
        return platform
    name = os.environ.get(HYPER_PARALLEL_PLATFORM, "").strip()
    if name:
        return _platform_named(name)
    if _imports("mindspore"):
        return get_mindspore_platform()
    if _imports("torch"):
        return get_torch_platform()
    raise ImportError(
        "get_platform: cannot choose a platform; because neither mindspore nor torch can be imported; "
        "install one: pip install torch, or pip install mindspore"
    )


def get_torch_platform() -> Platform:
    """Make the torch platform the platform of this process."""
    return _create("hyper_parallel.platform.torch.platform", "TorchPlatform")


def get_mindspore_platform() -> Platform:
    """Make the MindSpore platform the platform of this process."""
    return _create("hyper_parallel.platform.mindspore.platform", "MindSporePlatform")


def _platform_named(name: str) -> Platform:
    creators = {
        HYPER_PARALLEL_PLATFORM_TORCH: get_torch_platform,
        HYPER_PARALLEL_PLATFORM_MINDSPORE: get_mindspore_platform,
    }
    create = creators.get(name.lower())
    if create is None:
        raise ValueError(
            f"get_platform: cannot choose {name!r}, which {HYPER_PARALLEL_PLATFORM} names; because it is no platform; "
            f"set it to one of {', '.join(creators)}, or unset it"
        )
    _require_importable(name.lower())
    return create()


def _require_importable(framework: str) -> None:
    """A framework that was asked for by name and is not installed is named, with the command that installs it."""
    try:
        importlib.import_module(framework)
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ImportError(
            f"get_platform: cannot choose {framework!r}, which {HYPER_PARALLEL_PLATFORM} names; because it is not installed "
            f"here; install it: pip install {framework}; or unset the variable"
        ) from None


def _create(module: str, class_name: str) -> Platform:
    global platform
    cls = getattr(importlib.import_module(module), class_name)
    if type(platform) is not cls:
        platform = cls()
    assert platform is not None
    return platform


def _imports(framework: str) -> bool:
    # Only the framework's own import is tried: an ImportError inside our backend must reach the user.
    try:
        importlib.import_module(framework)
    except ImportError:
        return False
    return True
