"""The Platform contract on torch: the sum of the files beside this one."""

from __future__ import annotations

from typing import ClassVar

from hyper_parallel.platform.platform import Platform, PlatformType
from hyper_parallel.platform.torch.collectives import TorchCollectiveMembers
from hyper_parallel.platform.torch.device import TorchDeviceMembers
from hyper_parallel.platform.torch.differentiable import TorchDifferentiableMembers
from hyper_parallel.platform.torch.groups import TorchGroupMembers
from hyper_parallel.platform.torch.modules import TorchModuleMembers
from hyper_parallel.platform.torch.streams import TorchStreamMembers
from hyper_parallel.platform.torch.tensors import TorchTensorMembers

__all__ = ["TorchPlatform"]


class TorchPlatform(
    TorchTensorMembers,
    TorchModuleMembers,
    TorchStreamMembers,
    TorchGroupMembers,
    TorchCollectiveMembers,
    TorchDifferentiableMembers,
    TorchDeviceMembers,
    Platform,
):
    """Every member of the contract, served by torch."""

    platform_type: ClassVar[PlatformType | None] = PlatformType.PYTORCH
