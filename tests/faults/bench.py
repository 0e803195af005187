"""One small training step that uses every door, on a device of choice, and the books of what it leaves behind.

A trial runs the step with a fault in it, then once more without. Whatever the fault was: the first step is right or raises,
nothing is left behind, and the second one is right, bitwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import hyper_parallel as hp
from hyper_parallel.config import SwapConfig, configure
from hyper_parallel.testing import simulated_accelerator

WIDTH: Final = 48
ROWS: Final = 40
KIB: Final = 1024
ENDS_WITHIN_S: Final = 300.0


class Layer(torch.nn.Module):
    """A residual block: a matmul, an elementwise op, a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)
        self.down = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def swap_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> hp.CheckpointPolicy:
    """Matmuls leave, the rest is made again."""
    is_matmul = op.overloadpacket.__name__ in ("addmm", "mm", "linear")
    return hp.CheckpointPolicy.MUST_SWAP if is_matmul else hp.CheckpointPolicy.PREFER_RECOMPUTE


def make_model(*, wrapped: bool) -> torch.nn.Sequential:
    """Four blocks: swapped, selectively checkpointed with swapped inputs, recomputed, swapped inside a checkpoint."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [Layer() for _ in range(4)]
    if wrapped:
        layers[0] = hp.swap_wrapper(layers[0])
        layers[1] = hp.checkpoint_wrapper(layers[1], policy_fn=swap_matmuls, swap_inputs=True)
        layers[2] = hp.checkpoint_wrapper(layers[2])
        layers[3] = hp.checkpoint_wrapper(hp.swap_wrapper(layers[3]), swap_inputs=True)
    return torch.nn.Sequential(*layers)


def step(model: torch.nn.Module) -> list[bytes]:
    """All gradients of one step; as bytes, because the simulated device counts every tensor that it sees."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [leaf.grad.numpy().tobytes() for leaf in (x, *model.parameters())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A device, its far memory and its settings."""

    name: str
    is_simulated: bool = True
    tiers: tuple[str, ...] = ("pinned",)
    verify: bool = False
    prefetch_bytes: int = 16 * KIB
    timing: str = "lazy"

    @contextlib.contextmanager
    def device(self, folder: Path) -> Iterator[Callable[[], int]]:
        """Yields how many device bytes live now; always 0 where the device is the host's own memory."""
        fields: dict[str, Any] = {
            "min_bytes": 0,
            "tail_bytes": 0,
            "window_bytes": 4 * KIB,
            "prefetch_bytes": self.prefetch_bytes,
            "tiers": self.tiers,
            "verify": self.verify,
            "host_limit": 256 * 2**20,
            "disk_path": str(folder) if "disk" in self.tiers else None,
        }
        if not self.is_simulated:
            with configure(SwapConfig(**fields)):
                yield lambda: 0
            return
        with simulated_accelerator(timing=self.timing, seed=0, **fields) as simulation:
            yield lambda: simulation.live_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of the step with the fault in it. ``error``: None when it was right."""

    error: BaseException | None
    kept_count: dict[str, int]

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}"
        kept = [reason for reason in ("no_space", "over_limit") if self.kept_count.get(reason)]
        return "step right" + (", bytes stay on the device" if kept else "")


class Left:
    """What a process has open: compared before and after a trial."""

    def __init__(self) -> None:
        self.fds = sorted(filter(None, map(_target, os.listdir("/proc/self/fd"))))
        self.threads = sorted(thread.name for thread in threading.enumerate())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Left) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"fds {self.fds}, threads {self.threads}"


def _target(fd: str) -> str | None:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None  # the listing's own
    return None if target.startswith("/proc/") else target


def expected_gradients() -> list[bytes]:
    """Those of the same model without us."""
    return step(make_model(wrapped=False))


def trial(
    bench: Bench,
    folder: Path,
    fault: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    is_warm: bool = False,
    reference: list[bytes] | None = None,
    may_hold: Callable[[], bool] = lambda: False,
    holds_until_next: bool = False,
) -> Outcome:
    """Run the step with the fault in it, look for what it left, run it again, look again.

    ``may_hold``: asked after the fault, whether it took the rest of a destructor away; then some room returns with the
    manager only. ``holds_until_next``: what waits in a queue without workers goes when the next step starts new ones.
    """
    reference = expected_gradients() if reference is None else reference
    hp.SwapManager().reset()
    gc.freeze()  # what was there before is not looked through again and again
    gc.collect()
    before = Left()
    with bench.device(folder) as live_bytes:
        model = make_model(wrapped=True)
        with torch.no_grad():
            [parameter.sum() for parameter in model.parameters()]  # a weight is counted from its first use on
        if is_warm:
            same(step(model), reference, "the step before the fault")
        model.zero_grad(set_to_none=True)
        gc.collect()
        at_rest = live_bytes()
        error = _step_with(fault, model, reference)
        outcome = Outcome(error=error, kept_count=dict(hp.stats().kept_count))
        model.zero_grad(set_to_none=True)
        if not may_hold() and not holds_until_next:
            look_for_leaks(live_bytes, at_rest, f"the fault, which ended in {error!r}")
        same(step(model), reference, f"the step after the fault, which ended in {error!r},")
        model.zero_grad(set_to_none=True)
        if not may_hold():
            look_for_leaks(live_bytes, at_rest, "the step after the fault")
        del model
    hp.SwapManager().reset()
    gc.collect()
    gc.unfreeze()
    after = Left()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while after != before and time.monotonic() < deadline:  # threads are told to end, and then end
        time.sleep(0.005)
        after = Left()
    assert after == before, f"left open: {after}, before: {before}"
    assert not os.listdir(folder), f"left in the folder: {os.listdir(folder)}"
    return outcome


def _step_with(fault: Callable[[], Any], model: torch.nn.Module, reference: list[bytes]) -> BaseException | None:
    try:
        with fault():
            got = step(model)
    except BaseException as error:
        # Tracebacks hold frames, and frames hold tensors: keep the words alone.
        forget_frames(error)
        return error
    same(got, reference, "the step with the fault in it")
    return None


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of what it came from."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]


def look_for_leaks(live_bytes: Callable[[], int], at_rest: int, when: str) -> None:
    """Raise unless all of it was given back.

    Two things of torch's own come first, with us and without us: after an error inside backward its queue holds nodes that
    were ready to run, until the next backward of this thread, however small; and its checkpoint leaves cycles behind.
    """
    torch.ones(1, requires_grad=True).mul(1.0).sum().backward()
    gc.collect()
    stats = hp.stats()
    assert stats.live_records == 0, f"{stats.live_records} records live after {when}"
    for tier in stats.tiers:
        assert tier.live_bytes == 0, f"{tier.live_bytes} bytes of {tier.name} are lent after {when}"
    assert live_bytes() == at_rest, f"{live_bytes() - at_rest} device bytes are left after {when}"


def same(got: list[bytes], reference: list[bytes], what: str) -> None:
    """Bitwise."""
    assert got == reference, f"{what} is wrong"


class PinnedStep:
    """The same model on the simulated device with something between its blocks, for ranks that meet there."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._between = between
        self._stack = contextlib.ExitStack()
        fields: dict[str, Any] = {"min_bytes": 0, "tail_bytes": 0, "window_bytes": 4 * KIB, "prefetch_bytes": 16 * KIB}
        self._simulation = self._stack.enter_context(simulated_accelerator(timing="lazy", seed=0, **fields))
        blocks = list(make_model(wrapped=True))
        meeting = hp.checkpoint_wrapper(_Meeting(self))
        self._model = torch.nn.Sequential(*blocks[:2], meeting, *blocks[2:])
        with torch.no_grad():
            [parameter.sum() for parameter in self._model.parameters()]
        self._at_rest = self._simulation.live_bytes

    def meet(self, x: torch.Tensor) -> torch.Tensor:
        """What happens between the blocks."""
        return self._between(x.sin()).cos()

    def run(self) -> list[bytes]:
        """One step; its gradients are dropped."""
        try:
            return step(self._model)
        finally:
            self._model.zero_grad(set_to_none=True)

    def meets_nobody(self) -> None:
        """From now on."""
        self._between = lambda x: x

    def expected_alone(self) -> list[bytes]:
        """The gradients without us and without the others."""
        blocks = list(make_model(wrapped=False))
        plain = torch.nn.Sequential(*blocks[:2], _Meeting(self), *blocks[2:])
        with torch._C._DisableTorchDispatch():
            return step(plain)

    def look_for_leaks(self) -> None:
        """See :func:`look_for_leaks`."""
        look_for_leaks(lambda: self._simulation.live_bytes, self._at_rest, "the partner's end")


class _Meeting(torch.nn.Module):
    def __init__(self, owner: PinnedStep) -> None:
        super().__init__()
        self._owner = owner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._owner.meet(x)
