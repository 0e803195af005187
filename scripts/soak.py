"""Many steps of everything at once, as one command: nothing may grow.

    python scripts/soak.py --steps 10000 --output soak.json

Shapes change every step; experts get no tokens; every hundredth step raises, in forward, in backward or in a replay; every
two hundredth a model is dropped and another one built; far memory changes between pinned, pageable and disk. Some regions run
from a tape (alone, with swapped ops, with a gradient inside) and one runs its Python again. A sample of the steps is compared
with the same step without us, bitwise. Samples of device bytes, far memory, resident memory, descriptors, threads and Python
objects must be flat, and no tape may be left. Exit status: 0 flat, 1 not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")

import torch  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.backends.torch import native  # noqa: E402
from hyper_parallel.core.activation_checkpoint.policy import ByOpName  # noqa: E402
from hyper_parallel.testing import simulated_accelerator  # noqa: E402

WIDTH = 16
EXPERTS = 3
MOST_ROWS = 48
RAISES_EVERY = 100
REBUILDS_EVERY = 200
TIERS_CHANGE_EVERY = 500  # steps on one device under one kind of far memory
COMPARES_EVERY = 25
TIERS = (("pinned",), ("pageable",), ("pinned", "pageable"), ("disk",), ("pinned", "disk"))


class PlannedError(Exception):
    """What every hundredth step raises."""


class Experts(torch.nn.Module):
    """Each row goes to one expert; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum over what each expert makes of its rows."""
        rows = torch.arange(x.shape[0]) * 7 % (EXPERTS + 1)  # the last number is nobody's
        out = x.clone()
        for number, expert in enumerate(self.experts):
            mine = (rows == number).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(x[mine]).tanh())
        return out


class Layer(torch.nn.Module):
    """A residual block that can be told to raise."""

    def __init__(self, trouble: list[str]) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.trouble = trouble

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Also where the trouble comes from."""
        is_replay = torch._C._current_graph_task_id() != -1
        if self.trouble == ["forward"] or (self.trouble == ["replay"] and is_replay):
            raise PlannedError
        y = self.up(x).sin()
        if self.trouble == ["backward"] and y.requires_grad:
            y.register_hook(_raise)
        return x + self.down(y)


class Slope(torch.nn.Module):
    """Takes a gradient inside forward, through which the step differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two steps downhill."""
        for _ in range(2):
            (slope,) = torch.autograd.grad(self.up(x).sin().sum(), x, create_graph=True)
            x = x - 0.1 * slope
        return x


def _raise(grad: torch.Tensor) -> None:
    raise PlannedError


def swap_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> hp.CheckpointPolicy:
    """Matmuls leave, the rest is made again."""
    policies = hp.CheckpointPolicy
    return policies.MUST_SWAP if op.overloadpacket.__name__ in ("addmm", "mm") else policies.PREFER_RECOMPUTE


SWAPPED_MATMULS = ByOpName({"addmm": hp.CheckpointPolicy.MUST_SWAP}, otherwise=hp.CheckpointPolicy.PREFER_RECOMPUTE)
"""The same as a table, with which a region runs from a tape."""


def make_model(seed: int, trouble: list[str], *, wrapped: bool) -> torch.nn.Sequential:
    """Blocks, each wrapped in its own way."""
    torch.manual_seed(seed)
    blocks: list[Any] = [Layer(trouble), Experts(), Layer(trouble), Layer(trouble), Layer(trouble), Slope()]
    if wrapped:
        blocks[0] = hp.swap_wrapper(blocks[0])
        blocks[1] = hp.checkpoint_wrapper(hp.swap_wrapper(blocks[1]), swap_inputs=True)
        blocks[2] = hp.checkpoint_wrapper(blocks[2], policy_fn=swap_matmuls, swap_inputs=True)
        blocks[3] = hp.checkpoint_wrapper(hp.swap_wrapper(blocks[3]))
        blocks[4] = hp.checkpoint_wrapper(blocks[4], policy_fn=SWAPPED_MATMULS, swap_inputs=True)
        blocks[5] = hp.checkpoint_wrapper(blocks[5])
    return torch.nn.Sequential(*blocks)


def step(model: torch.nn.Module, rows: int, seed: int) -> list[bytes]:
    """One step's gradients, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, requires_grad=True)
    try:
        model(x).square().mean().backward()
        return [b"" if leaf.grad is None else leaf.grad.numpy().tobytes() for leaf in (x, *model.parameters())]
    finally:
        model.zero_grad(set_to_none=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What the process holds between two steps."""

    step: int
    device_bytes: int
    live_records: int
    lent_bytes: int
    far_bytes: int
    resident_bytes: int
    descriptors: int
    threads: int
    objects: int
    live_tapes: int


def look(number: int, live_bytes: int) -> Sample:
    """Take a sample; after a collection, because an error leaves cycles behind."""
    # torch's own queue holds the nodes of a backward that raised until the next one on this thread.
    torch.ones(1, requires_grad=True).mul(1.0).sum().backward()
    gc.collect()
    stats = hp.stats()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        step=number,
        device_bytes=live_bytes,
        live_records=stats.live_records,
        lent_bytes=sum(tier.live_bytes for tier in stats.tiers),
        far_bytes=sum(tier.held_bytes for tier in stats.tiers if tier.name != "disk"),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        objects=len(gc.get_objects()),
        live_tapes=live_tapes(),
    )


def live_tapes() -> int:
    """How many recordings this process holds."""
    recorder = native.load()
    return 0 if recorder is None else int(recorder.counters()["live_tapes"])


class Soak:
    """The run."""

    def __init__(self, seed: int, folder: str) -> None:
        self._dice = random.Random(seed)
        self._folder = folder
        self._trouble: list[str] = []
        self.samples: list[Sample] = []
        self.errors = self.models = self.compared = self.from_tape = 0
        self.from_python: collections.Counter[str] = collections.Counter()

    def run(self, steps: int, sample_every: int) -> Iterator[int]:
        """Yields the number of steps done so far, after each."""
        number = 0
        while number < steps:
            with self._device(number // TIERS_CHANGE_EVERY) as simulation:
                self._build()
                last = min(steps, number - number % TIERS_CHANGE_EVERY + TIERS_CHANGE_EVERY)
                for number in range(number, last):  # noqa: B020
                    self._step(number)
                    if (number + 1) % sample_every == 0:
                        # Between two models nothing but what leaks is left.
                        self._model = self._plain = None
                        self.samples.append(look(number + 1, simulation.live_bytes))
                        self._build()
                    yield number + 1
                self._model = self._plain = None
            stats = hp.stats()
            self.from_tape += stats.regions_from_tape
            self.from_python.update(stats.regions_from_python)
            hp.SwapManager().reset()
            number += 1

    @contextlib.contextmanager
    def _device(self, turn: int) -> Iterator[Any]:
        tiers = TIERS[turn % len(TIERS)]
        fields: dict[str, Any] = {"min_bytes": 0, "tail_bytes": 512, "window_bytes": 4096, "prefetch_bytes": 8192}
        fields |= {"tiers": tiers, "host_limit": 128 * 2**20, "disk_path": self._folder if "disk" in tiers else None}
        timing = ("lazy", "random", "eager")[turn % 3]
        with simulated_accelerator(timing=timing, seed=turn, **fields) as simulation:
            yield simulation

    def _build(self) -> None:
        seed = self._dice.randrange(10**6)
        self._model: Any = make_model(seed, self._trouble, wrapped=True)
        self._plain: Any = make_model(seed, self._trouble, wrapped=False)
        self.models += 1

    def _step(self, number: int) -> None:
        rows, seed = self._dice.choice((0, 1, 2, 3, self._dice.randrange(1, MOST_ROWS))), self._dice.randrange(10**6)
        if number % REBUILDS_EVERY == REBUILDS_EVERY - 1:
            self._build()
        if number % RAISES_EVERY == RAISES_EVERY - 1:
            self._trouble[:] = [self._dice.choice(("forward", "backward", "replay"))]
            try:
                step(self._model, max(1, rows), seed)
            except PlannedError:
                self.errors += 1
            else:
                raise AssertionError(f"step {number} did not raise where it should")
            finally:
                self._trouble.clear()
        got = step(self._model, max(1, rows), seed)
        if number % COMPARES_EVERY == 0 or number % RAISES_EVERY == RAISES_EVERY - 1:
            self.compared += 1
            if got != step(self._plain, max(1, rows), seed):
                raise AssertionError(f"step {number} is wrong: gradients are not those of the plain step")


def growth(samples: list[Sample], tiers_change_every: int = TIERS_CHANGE_EVERY) -> list[str]:
    """What is not flat. The first two rounds through all kinds of far memory may warm caches up."""
    problems = []
    for sample in samples:
        if sample.live_records or sample.lent_bytes:
            problems.append(
                f"step {sample.step}: {sample.live_records} records, {sample.lent_bytes} lent bytes are left"
            )
        if sample.device_bytes:
            problems.append(f"step {sample.step}: {sample.device_bytes} device bytes are left")
        if sample.live_tapes:
            problems.append(f"step {sample.step}: {sample.live_tapes} tapes are left")
    settled = samples[len(samples) // 3 :]
    early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    # Different far memory holds different things: the worst of one half is compared with the worst of the other.
    for name, slack in (
        ("far_bytes", 2**20),
        ("descriptors", 0),
        ("threads", 0),
        ("objects", 2000),
        ("resident_bytes", 48 * 2**20),
    ):
        before, after = (max(getattr(sample, name) for sample in half) for half in (early, late))
        if after > before + slack:
            problems.append(f"{name}: at most {before} in the first half, {after} in the second")
    return problems


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-every", type=int, default=50)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("soak.json"), help="the record")
    options = parser.parse_args()
    if options.steps < 12 * options.sample_every or options.sample_every < 1:
        parser.error("--steps must be at least 12 times --sample-every: fewer samples say nothing")
    from rich.console import Console
    from rich.progress import track

    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(options.seed, folder)
        console = Console(stderr=True)
        for _ in track(soak.run(options.steps, options.sample_every), "steps", total=options.steps, console=console):
            pass
        left = os.listdir(folder)
    problems = growth(soak.samples) + [f"left in the folder: {name}" for name in left]
    if native.load() is not None and not soak.from_tape:
        problems.append("no region ran from a tape")
    record = {
        "schema": 1,
        "steps": options.steps,
        "seconds": round(time.monotonic() - started, 1),
        "errors_survived": soak.errors,
        "models_built": soak.models,
        "steps_compared_bitwise": soak.compared,
        "regions_from_tape": soak.from_tape,
        "regions_from_python": dict(soak.from_python),
        "problems": problems,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": f"python scripts/soak.py --steps {options.steps} --seed {options.seed} --sample-every {options.sample_every}",
        "samples": [dataclasses.asdict(sample) for sample in soak.samples],
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{options.steps} steps in {record['seconds']:.0f} s, {soak.errors} errors, {soak.models} models, "
        f"{soak.compared} compared, {len(soak.samples)} samples, {soak.from_tape} regions from a tape: "
        f"{'; '.join(problems) or 'flat'}; {options.output}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
