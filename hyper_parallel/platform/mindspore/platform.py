"""The Platform contract on MindSpore: the sum of the files beside this one."""

from __future__ import annotations

from typing import ClassVar

from hyper_parallel.platform.mindspore.collectives import MindSporeCollectiveMembers
from hyper_parallel.platform.mindspore.device import MindSporeDeviceMembers
from hyper_parallel.platform.mindspore.differentiable import MindSporeDifferentiableMembers
from hyper_parallel.platform.mindspore.groups import MindSporeGroupMembers
from hyper_parallel.platform.mindspore.modules import MindSporeModuleMembers
from hyper_parallel.platform.mindspore.streams import MindSporeStreamMembers
from hyper_parallel.platform.mindspore.tensors import MindSporeTensorMembers
from hyper_parallel.platform.platform import Platform, PlatformType

__all__ = ["MindSporePlatform"]


class MindSporePlatform(
    MindSporeTensorMembers,
    MindSporeModuleMembers,
    MindSporeStreamMembers,
    MindSporeGroupMembers,
    MindSporeCollectiveMembers,
    MindSporeDifferentiableMembers,
    MindSporeDeviceMembers,
    Platform,
):
    """Every member of the contract, served by MindSpore or refused by name."""

    platform_type: ClassVar[PlatformType | None] = PlatformType.MINDSPORE
