"""Where and with what something was measured."""

from __future__ import annotations

import dataclasses

__all__ = ["Versions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versions:
    """The framework, the device and the library's version of one measurement."""

    framework: str  # "torch", "mindspore"
    framework_version: str
    device: str  # "NVIDIA H200", "simulated accelerator"
    library_version: str
    python_version: str = ""
