"""Say what this machine has, how fast it is, and what will and will not work here and why.

Measures the link to every accelerator in both directions, what pinning costs, and the speed of a disk. Builds torch's native
recorder where there is none yet (once, about a minute; not with HYPER_PARALLEL_NATIVE=0). Started on several ranks of a host
(torchrun --nproc-per-node 8 -m hyper_parallel.cli doctor), it also says what each gets of the link while all of them copy.

Example::

  hyper-parallel doctor --disk-path /fast/disk
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel._version import TESTED_TORCH, __version__
from hyper_parallel.backends.machine import Accelerator, DiskSpeed, disk_speed, memory_copy_bytes_per_second
from hyper_parallel.cli.console import Console
from hyper_parallel.cli.framework import FRAMEWORKS, add_platform_argument, asked_framework
from hyper_parallel.config import SwapConfig, show_bytes
from hyper_parallel.core.activation_checkpoint.far.process_memory import (
    available_memory_bytes,
    default_host_limit_bytes,
)
from hyper_parallel.core.processes import launched_local_processes
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.platform import (
    HYPER_PARALLEL_PLATFORM,
    HYPER_PARALLEL_PLATFORM_MINDSPORE,
    HYPER_PARALLEL_PLATFORM_TORCH,
)

if TYPE_CHECKING:
    from hyper_parallel.planner.shared_link import Rates

__all__ = ["Finding", "Machine", "add_arguments", "examined", "findings", "run"]

_PACKAGES = ("torch", "mindspore", "numpy", "transformers", "trl", "peft", "lightning", "accelerate", "rich")
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SLOW_DISK_BYTES_PER_SECOND = 500 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found."""

    python: str
    packages: dict[str, str]  # only those that are installed
    torch_problem: str = ""  # why torch cannot be used; empty: it can
    mindspore_problem: str = ""  # why MindSpore cannot be used; empty: it can, or is not installed
    accelerators: tuple[Accelerator, ...] = ()
    memory_bytes: int
    available_bytes: int
    host_limit_bytes: int
    local_ranks: int = 1  # of this host, as the launcher says
    shared_link: Rates | None = None  # with all ranks of this host copying; None: this is one process
    cores: int
    copy_bytes_per_second: float = 0.0
    disk_path: str
    disk: DiskSpeed | None = None
    disk_problem: str = ""
    recorder: str = ""  # torch's: "there", "switched off" or "missing"; empty: the framework in use has none
    recorder_problem: str = ""  # why it is not there
    settings_problem: str = ""
    allocator_settings: str = ""  # of torch, from the environment
    chosen_platform: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that works here, or does not."""

    what: str
    works: str  # "yes", "no", "slowly", "untested"
    because: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "--disk-path",
        metavar="DIR",
        default=tempfile.gettempdir(),
        help="the disk to measure; the temporary one by default",
    )
    add_platform_argument(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """The command. Of several ranks the first one answers; the others only copy when it does."""
    shared_link, is_first = _shared_link()
    if not is_first:
        return 0
    with console.progress("doctor", 2) as advance:
        machine = dataclasses.replace(examined(args.disk_path, advance), shared_link=shared_link)
    found = findings(machine)
    console.data({"machine": dataclasses.asdict(machine), "findings": [dataclasses.asdict(one) for one in found]})
    console.table("This machine", ("what", "value"), _machine_rows(machine), words=(0, 1))
    rows = [[one.what, one.works, one.because] for one in found]
    console.table("What works here", ("what", "works", "because"), rows, words=(0, 1, 2))
    return 0 if _has_framework(machine) else 1


def _shared_link() -> tuple[Rates | None, bool]:
    """What a rank gets of the link while all copy, and whether this is the first rank; one process is."""
    try:
        from hyper_parallel.backends.torch import machine_ranks
    except (ImportError, OSError):  # the table says so
        return None, True
    rank = machine_ranks.launched_rank()
    return (None, True) if rank is None else (machine_ranks.rates_of_launched_ranks(), rank == 0)


def _has_framework(machine: Machine) -> bool:
    """Whether the framework that is chosen can be used; where none is, whether any can."""
    usable = _usable(machine)
    return machine.chosen_platform in usable if machine.chosen_platform else bool(usable)


def _usable(machine: Machine) -> list[str]:
    problems = {
        HYPER_PARALLEL_PLATFORM_TORCH: machine.torch_problem,
        HYPER_PARALLEL_PLATFORM_MINDSPORE: machine.mindspore_problem,
    }
    return [name for name in FRAMEWORKS if name in machine.packages and not problems[name]]


def examined(disk_path: str, advance: Callable[[str], None] = lambda text: None) -> Machine:
    """Look at everything, and measure it. ``advance`` is told what begins."""
    chosen_platform = asked_framework()
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {}
    if chosen_platform != HYPER_PARALLEL_PLATFORM_MINDSPORE:
        facts |= _torch_facts(advance)
    if HYPER_PARALLEL_PLATFORM_MINDSPORE in packages and chosen_platform != HYPER_PARALLEL_PLATFORM_TORCH:
        found = _mindspore_facts()
        facts |= found | {"accelerators": (*facts.get("accelerators", ()), *found.get("accelerators", ()))}
    facts["copy_bytes_per_second"] = memory_copy_bytes_per_second()
    try:
        facts["disk"] = disk_speed(disk_path)
    except (HyperParallelError, OSError) as error:
        facts["disk_problem"] = str(error)
    try:
        SwapConfig.from_environment()
    except ValueError as error:
        facts["settings_problem"] = str(error)
    return Machine(
        python=platform.python_version(),
        packages=packages,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=available_memory_bytes(),
        host_limit_bytes=default_host_limit_bytes(launched_local_processes() or 1),
        local_ranks=launched_local_processes() or 1,
        cores=os.cpu_count() or 1,
        disk_path=disk_path,
        allocator_settings=",".join(os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS),
        chosen_platform=chosen_platform,
        **facts,
    )


def _torch_facts(advance: Callable[[str], None]) -> dict[str, Any]:
    try:
        from hyper_parallel.backends.torch import machine
    except (ImportError, OSError) as error:  # OSError: a library of the wheel is missing or of another machine
        return {"torch_problem": f"{type(error).__name__}: {error}"}
    advance("loading the native recorder (where there is none it is built: about a minute)")
    facts: dict[str, Any] = {**_recorder()}
    advance("looking at packages and devices")
    try:
        facts["accelerators"] = machine.accelerators()
    except (RuntimeError, MemoryError) as error:
        facts["torch_problem"] = f"a device is there and cannot be used: {error}"
    return facts


def _mindspore_facts() -> dict[str, Any]:
    try:
        from hyper_parallel.backends.mindspore import machine

        return {"accelerators": machine.accelerators()}
    except (ImportError, OSError, RuntimeError) as error:
        return {"mindspore_problem": f"{type(error).__name__}: {error}"}


def _recorder() -> dict[str, str]:
    """Whether torch's native recorder is there. It is built where it is wanted and there is none yet."""
    from hyper_parallel.backends.torch import native

    problem = native.why_not()
    if problem is None:
        return {"recorder": "there"}
    return {"recorder": "missing" if native.is_wanted() else "switched off", "recorder_problem": problem}


def _rate(bytes_per_second: float) -> str:
    return f"{show_bytes(int(bytes_per_second))}/s"


def _machine_rows(machine: Machine) -> list[list[str]]:
    rows = [
        ["hyper_parallel", __version__],
        ["python", machine.python],
        *([name, version] for name, version in machine.packages.items()),
        *([["native recorder of torch", machine.recorder]] if machine.recorder else []),
        ["cores", str(machine.cores)],
        ["RAM", show_bytes(machine.memory_bytes)],
        ["RAM this process may use", f"{show_bytes(machine.available_bytes)} (machine and control groups)"],
        ["ranks on this host", _ranks_in_words(machine)],
        ["far memory by default", f"{show_bytes(machine.host_limit_bytes)} of RAM for each rank"],
    ]
    for number, device in enumerate(machine.accelerators):
        rows += _device_rows(number, device, len(machine.accelerators))
    if not machine.accelerators:
        rows.append(["accelerators", "none"])
    if machine.shared_link is not None:
        rates = machine.shared_link
        what = "link" if machine.accelerators else "RAM to RAM"
        rows += [
            [f"{what} out / back, one rank", f"{_rate(rates.lone_out)} / {_rate(rates.lone_in)}"],
            [f"  with {rates.ranks} ranks copying", f"{_rate(rates.shared_out)} / {_rate(rates.shared_in)} for each"],
        ]
    elif machine.copy_bytes_per_second:
        rows.append(["RAM to RAM", _rate(machine.copy_bytes_per_second)])
    if machine.disk is not None:
        disk = machine.disk
        how = "past the page cache" if disk.is_direct else "through the page cache"
        speeds = f"write {_rate(disk.write_bytes_per_second)}, read {_rate(disk.read_bytes_per_second)} {how}"
        rows.append([f"disk {machine.disk_path}", f"{speeds}, {show_bytes(disk.free_bytes)} free"])
    return rows


def _ranks_in_words(machine: Machine) -> str:
    if machine.local_ranks > 1:
        return f"{machine.local_ranks}, as the launcher says"
    devices = max(2, len(machine.accelerators))
    return f"1 is assumed; torchrun --nproc-per-node {devices} -m hyper_parallel.cli doctor measures with {devices}"


def _shared_row(device: Accelerator, count: int) -> list[list[str]]:
    """Nothing where there is one device."""
    out, back = device.shared_out_bytes_per_second, device.shared_in_bytes_per_second
    return [[f"  with {count} devices copying", f"{_rate(out)} / {_rate(back)}"]] if out and back else []


def _device_rows(number: int, device: Accelerator, count: int) -> list[list[str]]:
    if not device.memory_bytes:
        return [[f"device {number}", f"{device.name}; its memory and its links are not measured"]]
    return [
        [
            f"device {number}",
            f"{device.name}, {show_bytes(device.memory_bytes)} ({show_bytes(device.free_bytes)} free)",
        ],
        ["  link out / back", f"{_rate(device.out_bytes_per_second)} / {_rate(device.in_bytes_per_second)}"],
        *_shared_row(device, count),
        ["  one copy costs", f"{device.copy_seconds * 1e6:.0f} µs beside its bytes"],
        ["  pinning 1 GiB takes", f"{device.pin_seconds_per_byte * 2**30:.2f} s, once"],
    ]


def findings(machine: Machine) -> list[Finding]:
    """What will and will not work, each with its reason."""
    usable = _usable(machine)
    is_mindspore = (
        machine.chosen_platform == HYPER_PARALLEL_PLATFORM_MINDSPORE or HYPER_PARALLEL_PLATFORM_TORCH not in usable
    )
    if HYPER_PARALLEL_PLATFORM_MINDSPORE in usable and is_mindspore:
        return [*_of_broken_torch(machine), *_of_mindspore(machine), *_of_settings(machine)]
    if machine.torch_problem:
        words = f"torch cannot be used here: {machine.torch_problem}. pip install torch"
        return [Finding(what="PyTorch", works="no", because=words), *_of_settings(machine)]
    has_device = bool(machine.accelerators)
    found = [
        Finding(what="recompute", works="yes", because="needs nothing but torch"),
        *_of_recorder(machine),
        Finding(
            what="swap to pinned memory",
            works="yes" if has_device else "no",
            because=f"up to {show_bytes(machine.host_limit_bytes)} for each rank by default; SwapConfig.host_limit changes it"
            if has_device
            else "there is no accelerator; values are in host memory already",
        ),
        _of_disk(machine, has_device=has_device),
        Finding(
            what="planning a budget",
            works="yes" if has_device else "no",
            because="profile, plan and fit_memory measure on the device"
            if has_device
            else "there is no device memory to plan; --simulate plans on the simulated accelerator",
        ),
    ]
    return [*_of_torch_release(machine), *found, *_of_allocator(machine), *_of_settings(machine)]


def _of_broken_torch(machine: Machine) -> list[Finding]:
    """Beside MindSpore torch need not be there; where it is and cannot be used, that is said."""
    if HYPER_PARALLEL_PLATFORM_TORCH not in machine.packages or not machine.torch_problem:
        return []
    return [Finding(what="PyTorch", works="no", because=f"torch cannot be used here: {machine.torch_problem}")]


def _of_mindspore(machine: Machine) -> list[Finding]:
    """What works where MindSpore is in use."""
    has_device = bool(machine.accelerators)
    untested = "written against MindSpore's documentation: no Ascend has run it yet"
    return [
        Finding(what="recompute", works="yes", because="in PyNative mode; a layer's Python runs again in backward"),
        Finding(
            what="swap to pinned memory",
            works="untested" if has_device else "no",
            because=untested if has_device else "there is no accelerator; values are in host memory already",
        ),
        _of_disk(machine, has_device=has_device),
        Finding(
            what="planning a budget",
            works="untested" if has_device else "no",
            because=untested
            if has_device
            else "there is no device memory to plan; --simulate plans on the simulated accelerator",
        ),
        Finding(
            what="graph mode and jit",
            works="no",
            because="a wrapped cell runs in PyNative mode only; a jitted cell inside a wrapper works",
        ),
    ]


def _of_allocator(machine: Machine) -> list[Finding]:
    """Near the card's limit torch's allocator retries; a setting of it helps. Nothing where it is set, or without a device."""
    if not machine.accelerators or "expandable_segments:true" in machine.allocator_settings.lower().replace(" ", ""):
        return []
    because = (
        "where the line of the first step says that the allocator was out of memory and asked again, set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which is not set here"
    )
    return [Finding(what="budgets near the card's limit", works="yes", because=because)]


def _of_recorder(machine: Machine) -> list[Finding]:
    """Whether recomputed regions run from a tape; nothing where the framework in use has no recorder."""
    if not machine.recorder:
        return []
    what = "recompute from a tape"
    if machine.recorder == "there":
        return [Finding(what=what, works="yes", because="regions run their Python once; see docs/tape.md")]
    because = f"regions run Python again, because the native recorder is {machine.recorder}: {machine.recorder_problem}"
    return [Finding(what=what, works="no", because=because)]


def _of_torch_release(machine: Machine) -> list[Finding]:
    """A sentence where the release is none of those we test on, else nothing."""
    version = machine.packages.get("torch", "")
    release = ".".join(version.split(".")[:2])
    if not version or release in TESTED_TORCH:
        return []
    is_older = _numbers(release) < _numbers(TESTED_TORCH[0])
    tested = ", ".join(TESTED_TORCH)
    because = f"torch {version} is none of the releases we test on ({tested}); " + (
        f"{TESTED_TORCH[0]} is the oldest whose interfaces we use: pip install 'torch>={TESTED_TORCH[0]}'"
        if is_older
        else "what is below may still hold: compare one step with and without us"
    )
    return [Finding(what="this torch release", works="no" if is_older else "untested", because=because)]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def _of_disk(machine: Machine, *, has_device: bool) -> Finding:
    what = "swap to disk"
    if machine.disk is None:
        return Finding(what=what, works="no", because=machine.disk_problem)
    slowest = min(machine.disk.write_bytes_per_second, machine.disk.read_bytes_per_second)
    tiers = ("pinned", "disk") if has_device else ("disk",)
    how = f"hp.configure(tiers={tiers}, disk_path={machine.disk_path!r})"
    if slowest < _SLOW_DISK_BYTES_PER_SECOND:
        return Finding(what=what, works="slowly", because=f"{_rate(slowest)} hides behind long steps only; {how}")
    return Finding(what=what, works="yes", because=how)


def _of_mindspore_package(machine: Machine) -> Finding:
    what, version = "MindSpore", machine.packages["mindspore"]
    if machine.mindspore_problem:
        because = f"mindspore {version} cannot be used here: {machine.mindspore_problem}"
        return Finding(what=what, works="no", because=because)
    if _numbers(machine.packages.get("numpy", "1").split(".")[0]) >= (2,):
        because = (
            f"its wheels are made for numpy 1 and break beside numpy {machine.packages['numpy']}: pip install 'numpy<2'"
        )
        return Finding(what=what, works="no", because=because)
    because = f"mindspore {version} is installed; see docs/mindspore.md for what differs"
    return Finding(what=what, works="yes", because=because)


def _of_settings(machine: Machine) -> list[Finding]:
    found = []
    has_mindspore = "mindspore" in machine.packages
    if has_mindspore:
        found.append(_of_mindspore_package(machine))
    if has_mindspore and "torch" in machine.packages and not machine.chosen_platform:
        words = (
            "both frameworks are installed; say which with --platform, or HYPER_PARALLEL_PLATFORM=torch or =mindspore"
        )
        found.append(Finding(what="choosing a framework", works="no", because=words))
    chosen = machine.chosen_platform
    if chosen and chosen not in FRAMEWORKS:
        known = " or ".join(FRAMEWORKS)
        words = f"{HYPER_PARALLEL_PLATFORM}={chosen} names no framework; set it to {known}, or unset it"
        found.append(Finding(what="choosing a framework", works="no", because=words))
    elif chosen and chosen not in machine.packages:
        words = f"{HYPER_PARALLEL_PLATFORM}={chosen}, and {chosen} is not installed: pip install {chosen}"
        found.append(Finding(what="choosing a framework", works="no", because=words))
    if machine.settings_problem:
        found.append(Finding(what="settings in the environment", works="no", because=machine.settings_problem))
    if machine.available_bytes < machine.memory_bytes // 2:
        words = f"{show_bytes(machine.available_bytes)} of {show_bytes(machine.memory_bytes)} are left to this process"
        found.append(Finding(what="large far memory in RAM", works="slowly", because=words))
    return found
