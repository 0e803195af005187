"""The schedule as event lists, and the peak as a sum of named terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .helpers import count_of, engines
from .kinds import swap_everything
from .models import Chain

UNIT = 32 * 4
"""The bytes of every activation below."""


class Sines(nn.Module):
    """Saves exactly ``count`` storages of one unit each: the input of every sine."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x.sin()
        return x


def unit() -> torch.Tensor:
    return torch.linspace(0, 1, UNIT // 4).requires_grad_()


def names(events: list[tuple[str, int]]) -> list[str]:
    return [what for what, _ in events]


# ---------------------------------------------------------------------- without a chain


def test_a_copy_starts_when_the_value_is_produced_not_when_the_layer_ends() -> None:
    with simulated_accelerator(window_bytes=0) as sim:
        seen: list[int] = []

        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x.sin()
                seen.append(count_of(sim.events, "offload"))
            return x

        out = hp.swap(function, unit())
        assert seen == [1, 2, 3]
        out.sum().backward()


def test_event_list_of_one_step_without_look_ahead() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0) as sim:
        out = hp.swap_wrapper(Sines(3))(unit())
        assert names(sim.events) == ["offload", "drop"] * 3
        del sim.events[:]
        out.sum().backward()
        assert names(sim.events) == ["miss", "load", "use"] * 3


def test_event_list_of_one_step_with_look_ahead_of_two() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=2 * UNIT) as sim:
        out = hp.swap_wrapper(Sines(5))(unit())
        del sim.events[:]
        out.sum().backward()
        # The first is a miss; behind it two are ahead at all times, until none is left.
        assert names(sim.events) == [
            "miss", "load", "use", "load", "load",
            "use", "load",
            "use", "load",
            "use",
            "use",
        ]  # fmt: skip
        assert hp.stats().misses == 1
        assert hp.stats().prefetch_hits == 4


def test_loads_come_in_the_order_backward_wants_them() -> None:
    sizes = [4, 8, 12, 20]
    with simulated_accelerator(window_bytes=0, prefetch_bytes=10**6) as sim:

        def function(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for size in sizes:
                total = total + x[:size].exp().sum()
            return total

        hp.swap(function, unit()).backward()
        assert [size for what, size in sim.events if what == "load"] == [4 * size for size in reversed(sizes)]


def test_records_of_a_replayed_region_are_wanted_in_forward_order() -> None:
    """A selective region is replayed from its first op, so its first value is wanted first; regions go backwards."""

    def region(start: int) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            for size in (start, start + 8):
                x = x.repeat(8)[:size].sin()
            return x

        return function

    def swap_sines(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        swaps = "sin" in str(op)
        return hp.CheckpointPolicy.MUST_SWAP if swaps else hp.CheckpointPolicy.MUST_RECOMPUTE

    with simulated_accelerator(window_bytes=0, prefetch_bytes=10**6) as sim:
        x = unit()
        out = hp.checkpoint(region(48), hp.checkpoint(region(8), x, policy_fn=swap_sines), policy_fn=swap_sines)
        assert [size for what, size in sim.events if what == "offload"] == [32, 64, 192, 224]
        out.sum().backward()
        assert [size for what, size in sim.events if what == "load"] == [192, 224, 32, 64]


@pytest.mark.parametrize("num_in_window", [0, 1, 2])
def test_past_the_window_compute_waits_for_the_oldest_copy(num_in_window: int) -> None:
    with simulated_accelerator(window_bytes=num_in_window * UNIT) as sim:
        out = hp.swap_wrapper(Sines(4))(unit())
        assert names(sim.events) == ["offload"] * num_in_window + ["offload", "drop"] * (4 - num_in_window)
        (engine,) = engines()
        assert engine.in_flight_bytes == num_in_window * UNIT
        out.sum().backward()


def test_what_is_done_is_dropped_before_the_window_is_full() -> None:
    with simulated_accelerator(timing="eager", window_bytes=9 * UNIT) as sim:
        out = hp.swap_wrapper(Sines(4))(unit())
        assert names(sim.events) == ["offload", "drop"] * 4
        out.sum().backward()


@pytest.mark.parametrize("num_in_tail", [0, 1, 3, 4, 9])
def test_the_tail_is_never_copied(num_in_tail: int) -> None:
    with simulated_accelerator(window_bytes=0, tail_bytes=num_in_tail * UNIT) as sim:
        out = hp.swap_wrapper(Sines(4))(unit())
        left = max(0, 4 - num_in_tail)
        assert names(sim.events) == ["offload", "drop"] * left
        del sim.events[:]
        out.sum().backward()
        assert count_of(sim.events, "offload") == 0
        assert count_of(sim.events, "load") == left
        assert hp.stats().kept_count.get("needed_first", 0) == 4 - left
        assert hp.stats().kept_bytes.get("needed_first", 0) == (4 - left) * UNIT


def test_a_copy_in_flight_that_is_wanted_again_is_not_brought_back() -> None:
    with simulated_accelerator(window_bytes=10**6, prefetch_bytes=10**6) as sim:
        hp.swap_wrapper(Sines(3))(unit()).sum().backward()
        assert names(sim.events) == ["offload"] * 3 + ["use"] * 3
        assert hp.stats().swapped_in_bytes == 0


@pytest.mark.parametrize("policy_fn", [None, swap_everything])
def test_nothing_leaves_during_a_replay(policy_fn: Any) -> None:
    """The first and last sines belong to the checkpoint, so it replays, and with it the swapped ones in between."""
    layer = hp.checkpoint_wrapper(Chain([Sines(1), hp.swap_wrapper(Sines(3)), Sines(2)]), policy_fn=policy_fn)
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0) as sim:
        x, y = unit(), unit()
        out = layer(x)
        before = len(sim.events)
        assert count_of(sim.events, "offload") > 0
        out.sum().backward()
        assert count_of(sim.events[before:], "offload") == 0
        assert hp.stats().live_records == 0
        Sines(6)(y).sum().backward()
        assert torch.equal(x.grad, y.grad)


def test_a_retained_graph_lets_its_bytes_go_again_without_a_second_copy() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0) as sim:
        x = unit()
        loss = hp.swap_wrapper(Sines(4))(x).sum()
        after_forward, copied = sim.live_bytes, sim.swapped_bytes
        for _ in range(3):
            loss.backward(retain_graph=True)
            x.grad = None
            assert sim.live_bytes == after_forward
        assert sim.swapped_bytes == copied == 4 * UNIT
        assert count_of(sim.events, "load") == 3 * 4


def test_a_dead_branch_and_another_micro_batch_are_not_brought_back() -> None:
    layer = hp.swap_wrapper(Sines(3))
    with simulated_accelerator(window_bytes=0, prefetch_bytes=10**6) as sim:
        trunk, other = layer(unit()), layer(unit())
        dead = layer(trunk)
        del sim.events[:]
        layer(trunk).sum().backward(retain_graph=True)
        assert count_of(sim.events, "load") == 6
        del sim.events[:]
        other.sum().backward()
        assert count_of(sim.events, "load") == 3
        del dead


# ---------------------------------------------------------------------- a declared chain


def chained(depth: int, saves: int = 2) -> Chain:
    model = Chain([hp.swap_wrapper(Sines(saves)) for _ in range(depth)])
    for first, second in zip(model.layers[:-1], model.layers[1:]):
        hp.SwapManager().set_forward_prefetch_layer(first, second)
    return model


class Stages:
    """Cuts the event list at the moments that the chain's promise speaks of."""

    def __init__(self, model: Chain, events: list[tuple[str, int]]) -> None:
        self.cuts: list[tuple[str, int]] = []
        self._events = events
        for index, layer in enumerate(model.layers):
            layer.register_forward_hook(self._after(index))

    def _after(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.cuts.append((f"forward {index}", len(self._events)))

        return hook

    def until(self, name: str) -> list[tuple[str, int]]:
        return self._events[: dict(self.cuts)[name]]


def test_a_declared_chain_gives_what_it_promises() -> None:
    """No window and no look-ahead of its own: whatever moves, moves because of the chain."""
    depth, saves = 4, 2
    with simulated_accelerator(window_bytes=10**9, tail_bytes=10**9, prefetch_bytes=0) as sim:
        model = chained(depth, saves)
        stages = Stages(model, sim.events)
        out = model(unit())
        for index in range(depth - 1):
            done = stages.until(f"forward {index}")
            # After layer i's forward its activations leave; its output is not among its saves.
            assert count_of(done, "offload") == (index + 1) * saves
            # Not later than after layer i+1's forward, layer i's device bytes are gone.
            assert count_of(done, "drop") == index * saves
        total = count_of(sim.events, "offload")
        assert total == (depth - 1) * saves, "the last layer is never swapped"
        assert count_of(sim.events, "drop") == total
        del sim.events[:]
        out.sum().backward()
        assert count_of(sim.events, "load") == total
        assert hp.stats().live_records == 0


def test_the_event_list_of_a_declared_chain_in_backward() -> None:
    """As a layer's backward begins, the whole layer before is sent for, and its own values are there."""
    depth, saves = 4, 3
    with simulated_accelerator(window_bytes=10**9, tail_bytes=10**9, prefetch_bytes=0) as sim:
        out = chained(depth, saves)(unit())
        del sim.events[:]
        out.sum().backward()
        begins = ["use", *["load"] * saves]
        goes_on = ["use"] * (saves - 1)
        first_layer = ["use"] * saves
        assert names(sim.events) == [*begins, *goes_on] * (depth - 1) + first_layer
        assert hp.stats().misses == 0


def test_outputs_of_a_declared_layer_are_protected_until_the_next_layer_has_them() -> None:
    """An output that the layer itself saves (exp) stays while it is an output; the next layer's save lets it leave."""

    class Exps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    with simulated_accelerator(window_bytes=10**9, tail_bytes=10**9, prefetch_bytes=0) as sim:
        model = Chain([hp.swap_wrapper(Exps()) for _ in range(3)])
        for first, second in zip(model.layers[:-1], model.layers[1:]):
            hp.SwapManager().set_forward_prefetch_layer(first, second)
        x = unit()
        middle = model.layers[0](x)
        assert count_of(sim.events, "offload") == 0, "its only save is its output"
        kept = middle.detach().clone()
        out = model.layers[2](model.layers[1](middle))
        assert torch.equal(middle, kept)
        out.sum().backward()
        expected = unit()
        expected.exp().exp().exp().sum().backward()
        assert torch.equal(x.grad, expected.grad)


def test_a_declared_chain_under_recompute_offloads_nothing_in_backward() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0) as sim:
        model = Chain([hp.checkpoint_wrapper(Sines(3), swap_inputs=True) for _ in range(4)])
        for first, second in zip(model.layers[:-1], model.layers[1:]):
            hp.SwapManager().set_forward_prefetch_layer(first, second)
        out = model(unit())
        before = len(sim.events)
        out.sum().backward()
        assert count_of(sim.events[before:], "offload") == 0
        assert hp.stats().misses <= 1


def test_declaring_again_changes_nothing_and_removing_takes_it_back() -> None:
    manager = hp.SwapManager()
    with simulated_accelerator(window_bytes=10**9, tail_bytes=10**9, prefetch_bytes=0) as sim:
        model = Chain([hp.swap_wrapper(Sines(2)) for _ in range(3)])
        pairs = list(zip(model.layers[:-1], model.layers[1:]))
        chains = [manager.set_forward_prefetch_layer(first, second) for first, second in pairs]
        assert [manager.set_forward_prefetch_layer(first, second) for first, second in pairs] == chains
        model(unit()).sum().backward()
        once = list(sim.events)
        assert count_of(once, "offload") == 4
        del sim.events[:]
        model(unit()).sum().backward()
        assert sim.events == once
        for chain in chains:
            chain.remove()
        del sim.events[:]
        model(unit()).sum().backward()
        assert sim.events == [("use", UNIT)] * 6, "nothing leaves: everything fits in the tail"


def test_a_chain_may_be_declared_from_its_end() -> None:
    with simulated_accelerator(window_bytes=10**9, tail_bytes=10**9, prefetch_bytes=0) as sim:
        model = Chain([hp.swap_wrapper(Sines(2)) for _ in range(4)])
        for first, second in reversed(list(zip(model.layers[:-1], model.layers[1:]))):
            hp.SwapManager().set_forward_prefetch_layer(first, second)
        model(unit()).sum().backward()
        assert count_of(sim.events, "offload") == 3 * 2


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("num_in_window", [0, 2])
@pytest.mark.parametrize("num_in_tail", [0, 3])
def test_the_forward_peak_is_a_sum_of_named_terms(num_in_window: int, num_in_tail: int) -> None:
    with simulated_accelerator(window_bytes=num_in_window * UNIT, tail_bytes=num_in_tail * UNIT) as sim:
        x = unit()
        x = (x * 1).detach().requires_grad_()
        before = sim.live_bytes
        out = hp.swap_wrapper(Sines(20))(x)
        tail = num_in_tail * UNIT
        in_flight_out = num_in_window * UNIT
        working_set = 2 * UNIT  # what the op reads and what it writes
        entering = UNIT  # the record that pushes the oldest one out
        assert sim.peak_bytes - before <= tail + in_flight_out + working_set + entering
        output = UNIT
        assert sim.live_bytes - before <= tail + in_flight_out + output
        out.sum().backward()


@pytest.mark.parametrize("num_ahead", [0, 1, 4])
def test_the_backward_peak_is_a_sum_of_named_terms(num_ahead: int) -> None:
    with simulated_accelerator(window_bytes=0, tail_bytes=0, prefetch_bytes=num_ahead * UNIT) as sim:
        x = (unit() * 1).detach().requires_grad_()
        loss = hp.swap_wrapper(Sines(20))(x).sum()
        before = sim.live_bytes
        sim.reset_peak()
        loss.backward()
        prefetched = num_ahead * UNIT
        read_now = UNIT
        gradients = 2 * UNIT  # the one that comes in and the one that goes out
        working_set = UNIT  # cos(x), the middle of sine's backward
        seed_gradient = 4
        assert sim.peak_bytes - before <= prefetched + read_now + gradients + working_set + seed_gradient


def test_without_the_engine_the_peak_is_all_activations() -> None:
    """The other side of the sums above, measured by the same instrument."""
    with simulated_accelerator() as sim:
        x = (unit() * 1).detach().requires_grad_()
        before = sim.live_bytes
        out = Sines(20)(x)
        assert sim.live_bytes - before == 20 * UNIT
        del out


def test_device_bytes_held_by_records_are_known() -> None:
    with simulated_accelerator(window_bytes=0, tail_bytes=3 * UNIT):
        out = hp.swap_wrapper(Sines(10))(unit())
        assert hp.stats().peak_resident_bytes <= (3 + 1) * UNIT
        assert hp.stats().live_records == 10
        out.sum().backward()
        assert hp.stats().live_records == 0


def test_far_memory_lives_as_long_as_the_graph() -> None:
    with simulated_accelerator(window_bytes=0):
        out = hp.swap_wrapper(Sines(5))(unit())
        (tier,) = hp.stats().tiers
        assert tier.live_bytes == 5 * UNIT
        out.sum().backward()
        del out
        (tier,) = hp.stats().tiers
        assert tier.live_bytes == 0
        assert tier.read_bytes == tier.written_bytes == 5 * UNIT
