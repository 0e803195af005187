"""Budgets on models whose blocks are compiled one by one, against torch's checkpoint around and inside the compiled graph.

    python -m benchmarks.compile_h200 [--cases gqa8 llama3] [--rounds 5] [--steps 3] [--output FOLDER]
    python -m benchmarks.compile_h200 --simulated      # every code path at a tiny size, on a CPU

Each case is a process of its own, and every block of it is compiled by ``block.compile(fullgraph=True)``. The ways:

* ``none``: the compiled blocks left alone; all ratios are to it. ``eager``: the same blocks run uncompiled.
* ``torch around``: torch's checkpoint around each compiled block.
* ``torch inside``: torch's checkpoint inside each block's graph; ``attention``: attention is saved; ``matmuls``: matmuls too.
* ``fit ...``: one line from ``fit_memory`` at the memory of ``torch inside``, of ``torch inside, attention``, and at 6 and 9 GiB.

The ways take turns as in ``budgets_h200``: a ratio is the median over rounds of a way's time over that of ``none`` in the same
round, with the smallest and the largest. Activations are the peak of active bytes minus weights and gradients. The last lines
are the seconds of a first step without any compiler cache, for the model left alone and under each plan, and all graph breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hyper_parallel as hp
from benchmarks.budgets_h200 import Bench, wrapped
from benchmarks.recompute_h200 import CASES, Case, Stack, TorchCheckpoint
from hyper_parallel.backends.torch.compiled_calls import COMPILATIONS
from hyper_parallel.testing import simulated_accelerator

_ATTENTION: Final = ("scaled_dot_product", "flash_attn")
_MATMULS: Final = ("aten.mm.", "aten.addmm.", "aten.bmm.")
_INSIDE: Final[dict[str, tuple[str, ...] | None]] = {
    "torch inside": None,
    "torch inside, attention": _ATTENTION,
    "torch inside, matmuls": (*_ATTENTION, *_MATMULS),
}
_BUDGETS_GIB: Final = (6.0, 9.0)


def _gqa8() -> Case:
    with torch.device("cuda"):
        model = Stack(8, 4096, 32, 8, 14336, 8192).to(torch.bfloat16)
    x = torch.randn(2, 8192, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn_like(x) / x.numel() ** 0.5
    return model, lambda: (model(x) * weight).sum(), model.layers


def _tiny() -> Case:
    model = Stack(2, 64, 4, 2, 128, 64)
    x = torch.randn(2, 64, 64)
    return model, lambda: model(x).square().sum(), model.layers


_COMPILED_CASES: Final[dict[str, Callable[[], Case]]] = {"gqa8": _gqa8, "llama3": CASES["llama3"], "tiny": _tiny}


def _saves(names: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = any(name in str(op) for name in names)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class InsideGraph(TorchCheckpoint):
    """Torch's checkpoint of an uncompiled layer; it is compiled together with the layer."""

    def __init__(self, layer: nn.Module, names: tuple[str, ...] | None) -> None:
        super().__init__(layer)
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer; what its backward needs is recomputed, or saved by name."""
        if self.names is None:
            return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_saves, self.names))
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class CompiledBench(Bench):
    """One case, each block of it compiled."""

    def __init__(self, name: str, output: Path | None, backend: str) -> None:
        model, forward, layers = _COMPILED_CASES[name]()
        self._compile = {"backend": backend, "fullgraph": True}
        started = time.perf_counter()
        for layer in layers:
            layer.compile(**self._compile)
        self._inside: dict[str, list[nn.Module]] = {}
        super().__init__(name, output, (model, forward, layers))
        self.emit(mode="first step", seconds=round(time.perf_counter() - started, 1))

    def torch_ways(self) -> list[str]:
        """See the base class."""
        return ["none", "eager", "torch around", *_INSIDE]

    def fit_options(self, budget: int) -> dict[str, Any]:
        """See the base class. At the tiny size there is nothing to search for."""
        if self.name != "tiny":
            return {}
        return {"plan": hp.plan_memory(self.profile, budget, effort=0.02), "attempts": 1, "steps": 1}

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[None]:
        """See the base class."""
        if name == "eager":
            with torch.compiler.set_stance("force_eager"):
                yield
        elif name == "torch around":
            with wrapped(self.layers, TorchCheckpoint):
                yield
        elif name in _INSIDE:
            inside = iter(self._inside_graphs(name))
            with wrapped(self.layers, lambda _: next(inside)):
                yield
        else:
            with super().way(name):
                yield

    def _inside_graphs(self, name: str) -> list[nn.Module]:
        """Compiled once. The layer inside must not be compiled by itself, so it shares the parameters of the one that is."""
        if name not in self._inside:
            self._inside[name] = []
            for layer in self.layers:
                plain = object.__new__(type(layer))
                plain.__dict__.update(layer.__dict__, _compiled_call_impl=None)
                module = InsideGraph(plain, _INSIDE[name])
                module.compile(**self._compile)
                self._inside[name].append(module)
        return self._inside[name]

    def run(self, *, rounds: int, steps: int) -> None:
        """Everything, in the order that leaves most when time is up."""
        plain = self.timed("none", steps=steps, warmup=2)
        self.plain_ms = plain["ms"]
        self.emit(mode="none, once", **plain)
        memory = {}
        for name in ("torch inside", "torch inside, attention")[: 1 if self.name == "tiny" else 2]:
            memory[name] = self.timed(name, steps=steps, warmup=2)["act_gib"]
        self.take_profile()
        self.emit(mode="graphs", kinds=[{"name": kind.name, "graph": kind.graph} for kind in self.profile.kinds])
        for name, act_gib in memory.items():
            self.fit(f"fit {name}", act_gib)
        for act_gib in _BUDGETS_GIB if self.name != "tiny" else (1.5 * memory["torch inside"],):
            self.fit(f"fit {act_gib:.3g} GiB", act_gib)
        self.emit(mode="compilations", count=COMPILATIONS.count, seconds=round(COMPILATIONS.seconds, 1))
        self.rounds(rounds, steps)
        self.first_steps()
        self.emit(mode="graph breaks", breaks=dict(counters["graph_break"]))

    def first_steps(self) -> None:
        """Seconds of a first step, with nothing compiled and no cache."""
        import torch._inductor.config as inductor

        alone = None
        for name in ["none", *self.plans]:
            torch.compiler.reset()
            with warnings.catch_warnings(), inductor.patch(force_disable_caches=True), self.way(name):
                warnings.simplefilter("ignore")  # torch says what it switches off where there are no caches
                self.meter.wait()
                started = time.perf_counter()
                self.step()
                self.meter.wait()
                seconds = time.perf_counter() - started
            alone = seconds if alone is None else alone
            self.emit(mode=f"compile, {name}", seconds=round(seconds, 2), x=round(seconds / alone, 2))


def main(arguments: list[str] | None = None) -> None:
    """Measure the cases, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[name for name in _COMPILED_CASES if name != "tiny"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args(arguments)
    cases = options.cases or ["gqa8", "llama3"]
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    if options.simulated:
        with simulated_accelerator(), hp.configure(min_bytes=0):
            CompiledBench("tiny", options.output, "aot_eager").run(rounds=2, steps=1)
    elif len(cases) == 1:
        torch.manual_seed(0)
        CompiledBench(cases[0], options.output, "inductor").run(rounds=options.rounds, steps=options.steps)
    else:
        for case in cases:
            command = [sys.executable, "-m", "benchmarks.compile_h200", "--cases", case]
            command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
            command += [] if options.output is None else ["--output", str(options.output)]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
