"""The Platform contract on torch and MindSpore. The engine's adapters of both are in ``backends``.

Importing this package imports no framework; :func:`get_platform` does, at its first call.
"""

from hyper_parallel.platform.platform import (
    EXISTING_COMM_GROUPS,
    GroupInfo,
    ParameterLayout,
    Platform,
    PlatformType,
    get_mindspore_platform,
    get_platform,
    get_torch_platform,
)

__all__ = [
    "EXISTING_COMM_GROUPS",
    "GroupInfo",
    "ParameterLayout",
    "Platform",
    "PlatformType",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
]
