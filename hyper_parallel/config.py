"""Settings: frozen, and checked when they are made. Sizes are in bytes.

A :class:`SwapConfig` is a value. Where a setting comes from is decided in one place, :func:`current_config`: the
innermost ``with configure(...)`` of this thread and context, else what ``configure(...)`` set for the process, else the
environment (``HYPER_PARALLEL_<FIELD>``), else the defaults below. This module imports no framework.
"""

from __future__ import annotations

import contextvars
import dataclasses
import difflib
import functools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

__all__ = ["SwapConfig", "configure", "current_config", "parse_bytes", "show_bytes"]

KNOWN_TIERS: Final = ("pinned", "pageable", "disk")

_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(value: int | str, *, name: str) -> int:
    """Turn ``"20GiB"``, ``"500 MB"`` or a plain number into bytes; ``name`` is the setting the error speaks of."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name}: expected bytes as an int or a string such as '20GiB', got {value!r}")
    if isinstance(value, int):
        number = value
    else:
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(
                f"{name}: cannot read {value!r} as bytes; write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
            )
        number = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if number < 0:
        raise ValueError(f"{name}: {value!r} is negative; bytes cannot be")
    return number


def show_bytes(nbytes: float) -> str:
    """Bytes as text: ``20.00 GiB``."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """How swapping behaves. ``None`` means: chosen by the library, from measurements where it has them."""

    min_bytes: int = 2**20
    """Storages smaller than this stay on the device: the copy would cost more than it frees."""
    tail_bytes: int | None = None
    """The most recent bytes of a forward that are not copied at all, because backward wants them first."""
    window_bytes: int | None = None
    """Bytes in flight out of the device; past it the compute stream waits for the oldest copy."""
    prefetch_bytes: int | None = None
    """Bytes brought back ahead of their use in backward."""
    device_bytes: int | None = None
    """While the device holds less than this in all, copies out past the window do not make compute wait, and loads run
    further ahead than ``prefetch_bytes``. Set it to the memory you may use less what one layer's backward needs."""
    tiers: tuple[str, ...] = ("pinned",)
    """Far memory in spill order: any of ``pinned``, ``pageable``, ``disk``."""
    host_limit: int | None = None
    """The most host memory that this process's pinned and pageable tiers may take together. None: the processes of one job
    on this host share half of what they may use; a value is for each process."""
    disk_path: str | None = None
    """A directory for the disk tier's files; naming one lets CPU tensors be swapped on machines without a device."""
    disk_limit: int | None = None
    """The most bytes this process's disk tier may hold. None: the processes of one job on this host share what is free on
    that file system, less a reserve; a value is for each process."""
    verify: bool = False
    """Checksum what is written to far memory and compare it when it is read back."""
    rank_timeout_seconds: float = 600.0
    """How long a rank waits for the others where ranks plan together. One that ended on this host is found at once."""

    if TYPE_CHECKING:  # what may be given is wider than what is kept

        def __init__(
            self,
            *,
            min_bytes: int | str = ...,
            tail_bytes: int | str | None = ...,
            window_bytes: int | str | None = ...,
            prefetch_bytes: int | str | None = ...,
            device_bytes: int | str | None = ...,
            tiers: str | Sequence[str] = ...,
            host_limit: int | str | None = ...,
            disk_path: str | os.PathLike[str] | None = ...,
            disk_limit: int | str | None = ...,
            verify: bool = ...,
            rank_timeout_seconds: float = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in (
            "min_bytes",
            "tail_bytes",
            "window_bytes",
            "prefetch_bytes",
            "device_bytes",
            "host_limit",
            "disk_limit",
        ):
            value = getattr(self, name)
            if value is None and name != "min_bytes":
                continue
            object.__setattr__(self, name, parse_bytes(value, name=f"SwapConfig.{name}"))
        given: Any = self.tiers  # a list or a single name is as good
        tiers: tuple[str, ...] = (given,) if isinstance(given, str) else tuple(given)
        unknown = [tier for tier in tiers if tier not in KNOWN_TIERS]
        if unknown or not tiers or len(set(tiers)) != len(tiers):
            raise ValueError(
                f"SwapConfig.tiers: {self.tiers!r} must name each tier at most once, in spill order, "
                f"out of {', '.join(KNOWN_TIERS)}"
            )
        object.__setattr__(self, "tiers", tiers)
        if self.disk_path is not None:
            object.__setattr__(self, "disk_path", os.fspath(self.disk_path))
        if "disk" in tiers and self.disk_path is None:
            raise ValueError(
                "SwapConfig.disk_path: the disk tier needs a directory; set disk_path=... or drop 'disk' from tiers"
            )
        if not isinstance(self.verify, bool):
            raise TypeError(f"SwapConfig.verify: expected True or False, got {self.verify!r}")
        seconds = self.rank_timeout_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ValueError(f"SwapConfig.rank_timeout_seconds: expected seconds, more than 0, got {seconds!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> SwapConfig:
        """Read ``HYPER_PARALLEL_<FIELD>``; unset fields keep their defaults."""
        environment = os.environ if environment is None else environment
        given: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = environment.get(f"HYPER_PARALLEL_{field.name.upper()}")
            if text is None:
                continue
            try:
                given[field.name] = _FROM_TEXT.get(field.name, str)(text)
            except ValueError as error:
                raise ValueError(f"HYPER_PARALLEL_{field.name.upper()}: {error}") from None
        return cls(**given)


def _tiers_from_text(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _flag_from_text(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.strip().lower() not in known:
        raise ValueError(f"cannot read {text!r} as yes or no; write one of {', '.join(known)}")
    return known[text.strip().lower()]


_FROM_TEXT: Final[Mapping[str, Callable[[str], Any]]] = {
    "tiers": _tiers_from_text,
    "verify": _flag_from_text,
    "rank_timeout_seconds": float,
}


_VARIABLES: Final = tuple(f"HYPER_PARALLEL_{field.name.upper()}" for field in dataclasses.fields(SwapConfig))

# This is asked for at every call of a wrapper, and os.environ raises and catches an error for each name that is not set. The
# table behind it, where there is one, answers for all names at once.
_ENCODED: Final = frozenset(map(getattr(os.environ, "encodekey", str), _VARIABLES))


class _Settings:
    """What ``configure`` set for the process, the override of this context, and calls of ``configure`` that are undecided."""

    process: SwapConfig | None = None
    override: contextvars.ContextVar[SwapConfig | None] = contextvars.ContextVar("hyper_parallel_config", default=None)
    undecided: list[_Call] = []  # noqa: RUF012  # changed by ``append`` and ``remove`` alone, which are atomic


@functools.lru_cache(maxsize=1)
def _from_environment_once(snapshot: tuple[tuple[str, str], ...]) -> SwapConfig:
    return SwapConfig.from_environment(dict(snapshot))


def current_config() -> SwapConfig:
    """The settings that hold here and now."""
    if _Settings.undecided:
        _decide_calls_of_this_thread()
    override = _Settings.override.get()
    if override is not None:
        return override
    process = _Settings.process  # read once: another thread may change it
    return _environment_config() if process is None else process


def _environment_config() -> SwapConfig:
    if _ENCODED.isdisjoint(getattr(os.environ, "_data", _ENCODED)):
        return _from_environment_once(())
    environ = os.environ
    return _from_environment_once(tuple((name, environ[name]) for name in _VARIABLES if name in environ))


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of :func:`configure`: for the process, unless a ``with`` block takes it first.

    Both cannot be told apart when ``configure`` is called. So a call is undecided until its result is entered (it is a
    block's), is dropped (it was a plain statement), or its thread uses settings again. Until then no thread sees it.
    """

    config: SwapConfig | None  # None: what the environment says
    thread: int
    previous: SwapConfig | None = None  # what it replaced as the default of the process

    def take(self) -> bool:
        """Decide it now; False where it was decided before."""
        try:
            _Settings.undecided.remove(self)
        except ValueError:
            return False
        return True

    def set_default(self) -> None:
        """Set the default of the process, if it is still undecided."""
        if self.take():
            self.previous, _Settings.process = _Settings.process, self.config

    def take_for_block(self) -> None:
        """It is the setting of a block: it never becomes the default of the process, or is no longer it."""
        if not self.take() and _Settings.process is self.config:
            _Settings.process = self.previous


def _decide_calls_of_this_thread() -> None:
    thread = threading.get_ident()
    for call in [call for call in _Settings.undecided if call.thread == thread]:
        call.set_default()


class Configured:
    """What :func:`configure` returns: drop it, or use it as a context manager that restores what was."""

    def __init__(self, call: _Call, config: SwapConfig) -> None:
        self._call = call
        self._config = config
        self._token: contextvars.Token[SwapConfig | None] | None = None

    def __enter__(self) -> SwapConfig:
        # Inside a with-block the setting belongs to this thread and context only.
        self._call.take_for_block()
        self._token = _Settings.override.set(self._config)
        return self._config

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _Settings.override.reset(self._token)
            self._token = None

    def __del__(self) -> None:
        self._call.set_default()


def configure(config: SwapConfig | None = None, **fields: Any) -> Configured:
    """Set the settings of the process, or of a ``with`` block; ``configure(None)`` goes back to the defaults.

    Fields given by name change those of ``config``, or of what holds now: ``configure(min_bytes="4MiB")``. A ``with`` block
    sets them for its own thread and context: no other thread sees them, not even for a moment. Without ``with``, call it as
    a statement: the settings hold for the process as soon as the result is dropped, or this thread uses them.
    """
    if config is not None and not isinstance(config, SwapConfig):
        raise TypeError(
            f"configure: expected a SwapConfig, got {config!r}; write configure(SwapConfig(...)) or configure(min_bytes=...)"
        )
    _decide_calls_of_this_thread()
    if fields:
        known = {field.name for field in dataclasses.fields(SwapConfig)}
        unknown = sorted(set(fields) - known)
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise TypeError(
                f"configure: unknown setting {', '.join(unknown)}{meant} known are {', '.join(sorted(known))}"
            )
        config = dataclasses.replace(config if config is not None else current_config(), **fields)
    call = _Call(config, threading.get_ident())
    _Settings.undecided.append(call)
    return Configured(call, config or _Settings.override.get() or _environment_config())
