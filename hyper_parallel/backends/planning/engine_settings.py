"""The settings of the engine as a profile writes them down."""

from __future__ import annotations

import dataclasses
from typing import Final

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.far.process_memory import default_host_limit_bytes
from hyper_parallel.planner.profile import EngineSettings, FarCaps

__all__ = ["engine_settings", "far_caps", "settings_of_plans"]

_NOT_OF_PLANS: Final = ("rank_timeout_seconds",)


def far_caps(config: SwapConfig) -> FarCaps:
    """How much far memory the settings allow."""
    has_host = "pinned" in config.tiers or "pageable" in config.tiers
    limit = default_host_limit_bytes() if config.host_limit is None else config.host_limit
    return FarCaps(host_bytes=limit if has_host else 0)


def settings_of_plans(config: SwapConfig) -> str:
    """The settings that a fitted plan depends on, in words."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in _NOT_OF_PLANS]
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in names)


def engine_settings(config: SwapConfig) -> EngineSettings:
    """The settings as the engine reads them; a plan may choose what the user left open."""
    unset = EngineSettings()
    chosen = (config.window_bytes, config.tail_bytes, config.prefetch_bytes)
    window, tail, prefetch = chosen
    return EngineSettings(
        window_bytes=unset.window_bytes if window is None else window,
        tail_bytes=unset.tail_bytes if tail is None else tail,
        prefetch_bytes=unset.prefetch_bytes if prefetch is None else prefetch,
        min_bytes=config.min_bytes,
        is_tunable=all(value is None for value in chosen),
    )
