"""The simulator against the engine: fates at random, applied to a real model on the simulated accelerator.

Copies there run as late as they can, so nothing leaves before the window forces it: the simulator's own assumption. An op
with several outputs is one value to the planner and several records to the engine, so small side outputs (statistics of a
norm or of attention, hundreds of bytes) may push one value of 12 KiB over the border of a window; without a window there is
no border, and only those side outputs differ.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.fates import Fate  # noqa: E402
from hyper_parallel.planner.backend import planner_backend  # noqa: E402
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice  # noqa: E402
from hyper_parallel.planner.moves import Solution, Space, with_fate  # noqa: E402
from hyper_parallel.planner.planning import written_plan  # noqa: E402
from hyper_parallel.planner.profile import EngineSettings, Profile  # noqa: E402
from hyper_parallel.planner.solve import Solver  # noqa: E402
from hyper_parallel.planner.step_simulator import StepSimulator  # noqa: E402
from hyper_parallel.testing import simulated_accelerator  # noqa: E402

LAYERS, TOKENS, WIDTH, HIDDEN, HEADS = 5, 96, 32, 80, 4
SIDE_OUTPUTS, ONE_VALUE = 2048, 16 * 1024


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).view(1, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(1, TOKENS, WIDTH))


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model on the simulated accelerator, and its profile."""

    model: torch.nn.Module
    profile: Profile

    def step(self) -> None:
        # No name holds the batch: what the caller holds does not go when it is swapped.
        self.model(torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH)).square().sum().backward()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with simulated_accelerator(timing="lazy", min_bytes=0, tail_bytes=0, window_bytes=20_000):
        torch.manual_seed(0)
        model = Stack()
        bench = Bench(model, None)  # type: ignore[arg-type]  # the profile is made with the step
        bench.step()
        yield dataclasses.replace(bench, profile=hp.profile_memory(model, bench.step, steps=1))


def random_choice(dice: random.Random, space: Space) -> Choice:
    if dice.random() < 0.15:
        return LEFT_ALONE
    cut = dice.randrange(len(space.analyses[0].kind.cuts))
    choice = space.plain(0, cut, inputs=dice.choice((Fate.SAVE, Fate.SWAP)))
    recompute, save, swap = Fate.RECOMPUTE, Fate.SAVE, Fate.SWAP
    leaning = dice.choice(
        ((recompute,) * 3 + (save, swap), (recompute, save, swap), (recompute, swap, swap, swap), (save,) * 3)
    )
    for slot in space.slots[0, cut]:
        allowed = space.may_be(slot)
        choice = with_fate(choice, slot, dice.choice([fate for fate in leaning if fate in allowed] or list(allowed)))
    return choice


def check(bench: Bench, choices: tuple[Choice, ...], settings: EngineSettings, slack: int) -> None:
    solver = Solver(StepSimulator(bench.profile))
    plan = written_plan(solver, solver.simulate(Solution(choices, settings)), 10**9)
    with hp.apply_plan(bench.model, plan):
        bench.step()
        before = hp.stats()
        bench.step()
        after = hp.stats()
        measured = planner_backend().measure_step(bench.model, bench.step, steps=1)
    out_bytes = after.swapped_out_bytes - before.swapped_out_bytes
    in_bytes = after.swapped_in_bytes - before.swapped_in_bytes
    assert out_bytes == pytest.approx(plan.predicted.swapped_out_bytes, abs=slack)
    assert in_bytes == pytest.approx(plan.predicted.swapped_in_bytes, abs=slack)
    assert measured.peak_bytes == pytest.approx(plan.predicted_peak_bytes, abs=slack)


@pytest.mark.parametrize("seed", range(8))
def test_peak_and_bytes_moved_without_borders(bench: Bench, seed: int) -> None:
    dice = random.Random(seed)
    space = Solver(StepSimulator(bench.profile)).space
    choices = tuple(random_choice(dice, space) for _ in bench.profile.blocks)
    check(
        bench,
        choices,
        dataclasses.replace(bench.profile.engine, window_bytes=0, tail_bytes=0, prefetch_bytes=0),
        SIDE_OUTPUTS,
    )


@pytest.mark.parametrize("seed", range(12))
def test_peak_and_bytes_moved_with_window_tail_and_prefetch(bench: Bench, seed: int) -> None:
    dice = random.Random(seed)
    space = Solver(StepSimulator(bench.profile)).space
    choices = tuple(random_choice(dice, space) for _ in bench.profile.blocks)
    unit = TOKENS * WIDTH * 4
    settings = dataclasses.replace(
        bench.profile.engine,
        window_bytes=dice.choice((0, 1, 3, 8)) * unit,
        tail_bytes=dice.choice((0, 0, 2)) * unit,
        prefetch_bytes=dice.choice((1, 4, 12)) * unit,
    )
    check(bench, choices, settings, ONE_VALUE)
