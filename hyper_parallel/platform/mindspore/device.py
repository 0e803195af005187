"""Which device this process computes on: the target MindSpore was given, the CPU otherwise."""

from __future__ import annotations

from typing import Any, Final

import mindspore

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.base.unsupported import class_or_instance_method

__all__ = ["CPU", "MindSporeDeviceMembers", "device_name", "on_cpu"]

CPU: Final = "CPU"
_NAMES: Final = {"cpu": CPU, "ascend": "Ascend", "npu": "Ascend", "gpu": "GPU", "cuda": "GPU", "meta": "meta"}
"""How people write a device, and how MindSpore does."""


def target() -> str:
    """``"CPU"``, ``"Ascend"`` or ``"GPU"``."""
    return str(mindspore.get_context("device_target"))


def on_cpu() -> bool:
    """Whether the CPU's kernels serve this process; every branch between CPU and Ascend asks here."""
    return target() == CPU


def device_name(device: Any, *, member: str) -> str:
    """A device as MindSpore spells it; None is this process's own."""
    if device is None:
        return target()
    kind = str(device).partition(":")[0].lower()
    if kind not in _NAMES:
        raise ValueError(f"{member}: unknown device {device!r}; known are {', '.join(_NAMES)}")
    return _NAMES[kind]


class MindSporeDeviceMembers:
    """The members beside the base that speak of the device."""

    @staticmethod
    def device_type() -> str:
        """``"cpu"``, ``"ascend"`` or ``"gpu"``."""
        return target().lower()

    @class_or_instance_method
    def device(cls, index: int | None = None) -> str:
        """A device of this process's type, as the name that MindSpore takes."""
        count = cls.device_count()
        if index is not None and not 0 <= index < count:
            raise ValueError(
                f"device: cannot name {target()} device {index}; because there are {count}; "
                f"give an index between 0 and {count - 1}"
            )
        return target()

    @class_or_instance_method
    def device_count(cls) -> int:
        """How many devices of this process's type there are; the CPU is one."""
        return 1 if on_cpu() else int(cls.get_device_handle().device_count())

    @staticmethod
    def get_device_handle() -> Any:
        """MindSpore's module for the device: ``mindspore.device_context.cpu``, ``.ascend`` ..."""
        return getattr(mindspore.device_context, target().lower())

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed every generator: on the CPU ``mindspore.manual_seed`` alone does not reach the random ops."""
        mindspore.set_seed(seed)
        mindspore.manual_seed(seed)

    @staticmethod
    def get_rng_state() -> Any:  # mindspore.Tensor
        """The state of the device's generator; the CPU's random ops have none that could be put back."""
        _refuse_on_cpu("get_rng_state")
        return mindspore.get_rng_state()

    @staticmethod
    def set_rng_state(state: Any) -> None:  # mindspore.Tensor
        """Put the state of the device's generator back."""
        _refuse_on_cpu("set_rng_state")
        mindspore.set_rng_state(state)


def _refuse_on_cpu(member: str) -> None:
    if on_cpu():
        raise UnsupportedMemberError(
            member=member,
            platform="MindSporePlatform",
            reason="MindSpore's random ops on the CPU follow no state that can be read or put back",
            instead="call manual_seed(seed) before the draw and again before its repetition",
        )
