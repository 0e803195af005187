"""Failures B31 to B48: what moving costs, and selective checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import create_selective_checkpoint_contexts
from hyper_parallel.backends.torch.ops import facts_of
from hyper_parallel.errors import InPlaceChangeError, ReplayMismatchError
from hyper_parallel.testing import simulated_accelerator

from .helpers import collector_off, count_of, engines, same_gradients, step_gradients
from .kinds import mixed_policy, swap_everything
from .models import WIDTH, Block, Chain, DropoutBlock
from .scenario import batch

TIGHT: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 0}


class CountOps(TorchDispatchMode):
    """How often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return op(*args, **(kwargs or {}))


def always(policy: Any) -> Any:
    return lambda ctx, op, *args, **kwargs: policy


def test_b31_far_memory_is_exact_and_reused() -> None:
    layer = hp.swap_wrapper(lambda x: x.sin().exp().cos().sin())
    sizes = [100_000, 70_000, 30_000]
    with simulated_accelerator(window_bytes=0):
        for step in range(6):
            for size in sizes:
                x = torch.rand(size // 4, requires_grad=True)
                layer(x).sum().backward()
            (tier,) = hp.stats().tiers
            if step == 1:
                allocations = tier.allocations
        assert tier.allocations == allocations, "no host allocation after the second identical step"
        assert tier.peak_held_bytes <= 1.05 * tier.peak_live_bytes + 4096 * tier.allocations
        assert tier.live_bytes == 0


def test_b31_kept_values_take_no_far_memory() -> None:
    with simulated_accelerator(window_bytes=0, min_bytes=10**6):
        hp.swap_wrapper(Block())(batch()).sum().backward()
        assert all(tier.allocations == 0 for tier in hp.stats().tiers)


def test_b32_small_values_stay_by_default() -> None:
    assert hp.SwapConfig().min_bytes == 2**20
    with simulated_accelerator(window_bytes=0, min_bytes=2**20) as sim:
        hp.swap_wrapper(Block())(batch()).sum().backward()
        stats = hp.stats()
        assert sim.events == []
        assert stats.kept_count["below_min_bytes"] > 0
        assert stats.kept_bytes["below_min_bytes"] > 0
        assert stats.swapped_out_bytes == 0


def test_b33_a_value_saved_by_three_matmuls_is_copied_once() -> None:
    weights = [nn.Parameter(torch.rand(WIDTH, WIDTH)) for _ in range(3)]

    def qkv(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        return sum((y @ weight).sum() for weight in weights)

    with simulated_accelerator(**TIGHT) as sim:
        x = batch(7)
        hp.swap_wrapper(qkv)(x).backward()
        assert count_of(sim.events, "offload", x.nbytes) == 1
        assert hp.stats().shared_copies == 2
        assert hp.stats().shared_bytes == 2 * x.nbytes


def test_b33_two_views_of_one_storage_are_two_values() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y[:2].sin() + y[2:].cos()).sum() + y.view(torch.int32).float().sum() * 0

    one, two = batch(), batch()
    function(one).backward()
    with simulated_accelerator(**TIGHT) as sim:
        hp.swap_wrapper(function)(two).backward()
        assert count_of(sim.events, "offload", one.nbytes) == 1
    assert torch.equal(one.grad, two.grad)


def test_b34_steps_with_duplicates_and_a_chain_warn_about_nothing(recwarn: pytest.WarningsRecorder) -> None:
    model = Chain([hp.swap_wrapper(Block()) for _ in range(3)])
    for first, second in zip(model.layers[:-1], model.layers[1:]):
        hp.SwapManager().set_forward_prefetch_layer(first, second)
    with simulated_accelerator(**TIGHT):
        for _ in range(3):
            model(batch()).sum().backward()
    assert len(recwarn) == 0


def test_b35_statistics_tell_what_happened() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().sin()

    with simulated_accelerator(window_bytes=0, prefetch_bytes=10**6) as sim:
        x = batch()
        hp.swap_wrapper(chain)(x).sum().backward()
        stats = hp.stats()
        assert stats == hp.SwapManager().stats()
        assert stats.swapped_out_bytes == 3 * x.nbytes == sim.swapped_bytes
        assert stats.swapped_in_bytes == 3 * x.nbytes
        assert (stats.misses, stats.prefetch_hits) == (1, 2)
        assert stats.live_records == 0
        assert stats.pinned_bytes >= 3 * x.nbytes
        assert stats.peak_resident_bytes > 0
        hp.SwapManager().reset()
        assert hp.stats().swapped_out_bytes == 0


def test_b37_copies_out_and_back_have_a_stream_each() -> None:
    with simulated_accelerator(**TIGHT) as sim:
        hp.swap_wrapper(Block())(batch()).sum().backward()
        (engine,) = engines()
        assert engine.lanes.out is not engine.lanes.back
        assert {lane.name for lane in sim.timeline.lanes} == {engine.lanes.out.name, engine.lanes.back.name}
        assert all(lane.queued > 0 for lane in sim.timeline.lanes)


@pytest.mark.parametrize("host_limit", [0, 4096])
def test_b38_over_the_host_limit_values_stay_and_are_counted(host_limit: int) -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
        return x

    one, two = (torch.linspace(0, 1, 500).requires_grad_() for _ in range(2))
    chain(one).sum().backward()
    with simulated_accelerator(**TIGHT, host_limit=host_limit) as sim:
        hp.swap_wrapper(chain)(two).sum().backward()
        stats = hp.stats()
        assert stats.kept_count["over_limit"] == (4 if host_limit == 0 else 2)
        assert count_of(sim.events, "offload") == (0 if host_limit == 0 else 2)
        assert all(tier.peak_held_bytes <= host_limit for tier in stats.tiers)
    assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize(
    ("policy_fn", "num_matmuls"),
    [
        (None, 3),
        (["mm"], 3),
        (["addmm"], 2),
        (["aten.addmm"], 2),
        ([torch.ops.aten.addmm.default], 2),
        ([torch.ops.aten.addmm], 2),
        (always(False), 3),
        (always(True), 2),
    ],
    ids=["none", "other", "name", "qualified", "overload", "packet", "false", "true"],
)
def test_b39_lists_bools_and_no_policy(policy_fn: Any, num_matmuls: int) -> None:
    """Matmuls in all: two in forward; the replay stops before the second, whose output backward does not need."""
    plain = Block()
    ours = hp.checkpoint_wrapper(copy.deepcopy(plain), policy_fn=policy_fn)
    with simulated_accelerator(**TIGHT), CountOps() as ops:
        got = step_gradients(ours, batch())
    same_gradients(got, step_gradients(plain, batch()))
    assert ops.counts["addmm"] == num_matmuls


@pytest.mark.parametrize(
    ("policy", "num_matmuls"),
    [
        (CheckpointPolicy.MUST_SAVE, 2),
        (CheckpointPolicy.PREFER_SAVE, 2),
        (CheckpointPolicy.MUST_SWAP, 2),
        (CheckpointPolicy.MUST_RECOMPUTE, 3),
        (CheckpointPolicy.PREFER_RECOMPUTE, 3),
    ],
)
def test_b40_each_answer_means_what_it_says(policy: CheckpointPolicy, num_matmuls: int) -> None:
    """Matmuls in all: two in forward, and of those two the first again where it is recomputed."""
    plain = Block()
    ours = hp.checkpoint_wrapper(copy.deepcopy(plain), policy_fn=always(policy))
    with simulated_accelerator(**TIGHT) as sim:
        with CountOps() as ops:
            got = step_gradients(ours, batch())
        assert ops.counts["addmm"] == num_matmuls
        assert (sim.swapped_bytes > 0) == (policy is CheckpointPolicy.MUST_SWAP)
        assert (hp.stats().saved_bytes > 0) == (policy.name.endswith("SAVE"))
        assert (hp.stats().recomputed_bytes > 0) == (policy.name.endswith("RECOMPUTE"))
    same_gradients(got, step_gradients(plain, batch()))


def test_b42_must_swap_needs_no_group() -> None:
    layer = hp.checkpoint_wrapper(Block(), policy_fn=swap_everything)
    with simulated_accelerator(**TIGHT) as sim, collector_off():
        layer(batch()).sum().backward()
        assert count_of(sim.events, "drop") > 0
        assert count_of(sim.events, "load") > 0
        assert hp.stats().live_records == 0


_CALLS: list[int] = []
"""Global, so that a region cannot put it back before a replay, as it does with a module's own attributes."""


class _Counts(nn.Module):
    """Runs another number of ops, or other shapes, when it is replayed."""

    def __init__(self, what: str) -> None:
        super().__init__()
        _CALLS.clear()
        self.what = what
        self.rows = 4
        self.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _CALLS.append(1)
        if len(_CALLS) > 1 and self.what == "more":
            x = x.exp().log()
        if len(_CALLS) > 1 and self.what == "shape":
            self.rows = 3
        if len(_CALLS) > 1 and self.what == "dtype":
            self.dtype = torch.float64
        if len(_CALLS) > 1 and self.what == "profiled":
            with torch.profiler.record_function("only in the replay"):
                pass
        x = x[: self.rows].to(self.dtype)
        if self.what == "list":
            x = torch.cat([x, x[: len(_CALLS)]])
        return x.exp().sin().exp().to(torch.float32)[:2]


def test_b43_a_replay_with_more_ops_names_the_op_and_its_count() -> None:
    with simulated_accelerator(**TIGHT):
        out = hp.checkpoint_wrapper(_Counts("more"), policy_fn=swap_everything)(batch())
        with pytest.raises(
            ReplayMismatchError,
            match=r"checkpoint of _Counts: the replay ran aten\.\w+\.default number \d+ .*forward ran",
        ):
            out.sum().backward()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"aten\.exp\.default number 1 .*3, 8.*4, 8"),
        ("dtype", r"aten\.exp\.default number 1 .*float64.*float32"),
        ("list", r"aten\.cat\.default number 1 .*2, 8.*1, 8"),
    ],
)
def test_b43_a_replay_with_other_inputs_names_both(what: str, message: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if "_to_copy" in str(op) else CheckpointPolicy.MUST_SWAP

    with simulated_accelerator(**TIGHT):
        out = hp.checkpoint_wrapper(_Counts(what), policy_fn=policy)(batch().to(torch.float16))
        with pytest.raises(ReplayMismatchError, match=f"(?s)checkpoint of _Counts: the replay ran {message}"):
            out.sum().backward()


def test_b43_profiler_ranges_in_a_replay_are_no_mismatch() -> None:
    one, two = batch(), batch()
    _Counts("")(one).sum().backward()
    with simulated_accelerator(**TIGHT):
        hp.checkpoint_wrapper(_Counts("profiled"), policy_fn=swap_everything)(two).sum().backward()
    assert torch.equal(one.grad, two.grad)


def test_b44_swapping_every_op_registers_each_storage_once() -> None:
    """Linear on three dimensions: view, t, addmm, view; only the matmul has bytes of its own."""
    linear = nn.Linear(WIDTH, WIDTH)
    with simulated_accelerator(**TIGHT) as sim:
        x = torch.rand(2, 3, WIDTH, requires_grad=True)
        out = hp.checkpoint(lambda x: linear(x).view(6, WIDTH).view(2, 3, WIDTH), x, policy_fn=swap_everything)
        assert [event for event in sim.events if event[0] == "offload"] == [("offload", out.nbytes)]
        out.sum().backward()


def test_b45_ops_that_only_ask_are_run_without_keywords() -> None:
    forward, replay = create_selective_checkpoint_contexts(swap_everything)
    x = torch.rand(3)
    for mode in (forward, replay):
        assert torch.equal(mode.__torch_dispatch__(torch.ops.aten.detach.default, (), (x,)), x)
        assert mode.__torch_dispatch__(torch.ops.prim.device.default, (), (x,)) == x.device


class _Residual(nn.Module):
    """The pattern of failure B46, with everything that may follow it."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.o = nn.Linear(WIDTH, WIDTH)
        self.variant = variant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.o(x)
        if self.variant == "add":
            h += x
        elif self.variant == "twice":
            h += x
            h *= 2
        elif self.variant == "view":
            h[:, 1:3] += x[:, 1:3]
        elif self.variant == "copy":
            h.copy_(x.sin())
        elif self.variant == "out":
            torch.add(h.detach(), x.detach(), out=h.detach())
            h = h * 1
        elif self.variant == "activation":
            F.relu_(h)
        elif self.variant == "read_then_add":
            g = h.sin().detach()
            h += g
        return h.exp() * x


@pytest.mark.parametrize("variant", ["add", "twice", "view", "copy", "out", "activation", "read_then_add"])
@pytest.mark.parametrize(
    "policy",
    [*map(always, CheckpointPolicy), mixed_policy],
    ids=[*(policy.name for policy in CheckpointPolicy), "mixed"],
)
@pytest.mark.parametrize("tail_bytes", [0, 10**6])
@pytest.mark.parametrize("is_whole", [True, False], ids=["every op", "matmuls only"])
def test_b46_a_change_of_a_filed_output_is_exact(variant: str, policy: Any, tail_bytes: int, is_whole: bool) -> None:
    module = _Residual(variant)

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """With matmuls only, what follows is recomputed from the filed value."""
        if is_whole or "mm" in str(op):
            return policy(ctx, op, *args, **kwargs)
        return CheckpointPolicy.MUST_RECOMPUTE

    oracle = copy.deepcopy(module)

    def step(call: Any, parameters: Any) -> list[Any]:
        x = batch()
        loss = call(x).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *(p.grad for p in parameters)]

    with simulated_accelerator(tail_bytes=tail_bytes, window_bytes=0):
        got = step(hp.checkpoint_wrapper(module, policy_fn=policy_fn), module.parameters())
    expected = step(lambda x: torch_checkpoint(oracle, x, use_reentrant=False), oracle.parameters())
    same_gradients(got, expected)


@pytest.mark.parametrize("policy", [*map(always, CheckpointPolicy), mixed_policy])
def test_b46_a_value_that_the_region_saves_and_then_changes_raises_as_in_the_plain_step(policy: Any) -> None:
    """Torch's own checkpoint gives a gradient of the changed bytes, without a word."""

    def function(x: torch.Tensor) -> torch.Tensor:
        b = x * 1
        a = b.square()  # saves b
        b.copy_(x * 0.5)
        return a * b

    x = batch()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x).sum().backward()
    with pytest.raises(InPlaceChangeError, match=r"a saved tensor \(4, 8\) .* was changed in place"):
        hp.checkpoint(function, x, policy_fn=policy).sum().backward()
    wanted = torch.autograd.grad(torch.square(x).sum(), x)
    found = torch.autograd.grad(hp.checkpoint(torch.square, x, policy_fn=policy).sum(), x)
    assert torch.equal(wanted[0], found[0]), "the next region is right"


def test_b46_a_saved_value_that_is_changed_and_not_asked_for_is_no_error() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        b = x * 1
        square = b.square()
        del square  # nothing will ask for what it saved
        b.copy_(x * 0.5)
        return b.exp()

    x = batch()
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    policy = always(CheckpointPolicy.PREFER_RECOMPUTE)
    (found,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=policy).sum(), x)
    assert torch.equal(wanted, found)


class _EndsInLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(x.exp())


class _EndsInNorm(_EndsInLinear):
    """Backward needs two outputs of the last op, and not the third, which the caller changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(super().forward(x), (WIDTH,))


class _EndsInDropout(_EndsInLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(super().forward(x), 0.5, True)[0]


class _ReadsItsOutput(_EndsInLinear):
    """The replay computes from a value that the caller changes, and the plain step does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.stack([y, (y * 2).sin()])[0] + (y.double() * 3).exp().float()


class _ReturnsTwo(_EndsInLinear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, (y.double() * 3).exp().float()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
@pytest.mark.parametrize("last", [_EndsInLinear, _EndsInNorm, _EndsInDropout, _ReadsItsOutput, _ReturnsTwo])
@pytest.mark.parametrize("tail_bytes", [0, 10**6])
def test_b46_a_change_of_a_kept_output_after_the_region_is_exact(
    last: Any, policy: CheckpointPolicy, early_stop: bool, tail_bytes: int
) -> None:
    plain = last()

    def keeps_large_ops(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = any(name in str(op) for name in ("addmm", "layer_norm", "dropout"))
        return policy if is_kept else CheckpointPolicy.MUST_RECOMPUTE

    def step(module: Any) -> list[Any]:
        torch.manual_seed(2)
        module.zero_grad()
        x = batch()
        out, *more = module(x) if last is _ReturnsTwo else (module(x),)
        out *= 3
        loss = sum(more, out).sum() + torch.rand(())
        loss.backward(retain_graph=True)
        loss.backward()  # a second replay finds the same
        return [x.grad, *(p.grad.clone() for p in plain.parameters()), torch.rand(1)]

    with simulated_accelerator(**TIGHT, tail_bytes=tail_bytes):
        expected = step(plain)
        for policy_fn in (always(policy), keeps_large_ops):
            same_gradients(step(hp.checkpoint_wrapper(plain, policy_fn=policy_fn, early_stop=early_stop)), expected)


@pytest.mark.python_replay  # a tape notes the generator's state, and makes the value again
def test_b46_a_changed_value_that_cannot_be_made_again_raises_naming_the_module() -> None:
    generator = torch.Generator().manual_seed(1)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.bernoulli(x.detach().sigmoid(), generator=generator)
        return mask, x * (mask * 2)

    with simulated_accelerator(**TIGHT, tail_bytes=10**6):
        mask, out = hp.checkpoint(function, batch(), policy_fn=["bernoulli"])
        mask.zero_()
        with pytest.raises(
            InPlaceChangeError, match=r"checkpoint of .*function: a saved tensor .* was changed in place"
        ):
            out.sum().backward()


@pytest.mark.parametrize("op", [torch.ops._c10d_functional.all_reduce.default, torch.ops.c10d.allreduce_.default])
def test_b46_a_collective_is_not_run_again_for_one_rank(op: Any) -> None:
    assert not facts_of(op).can_run_again


@pytest.mark.parametrize("saved", ["bernoulli", "rand_like", "native_dropout", "bernoulli_"])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
def test_b47_a_kept_random_op_does_not_move_the_next_one(saved: str, policy: CheckpointPolicy) -> None:
    module = DropoutBlock()
    oracle = copy.deepcopy(module)

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if saved in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    torch.manual_seed(3)
    with simulated_accelerator(**TIGHT):
        got = step_gradients(hp.checkpoint_wrapper(module, policy_fn=policy_fn), batch())
    after = torch.rand(1)
    torch.manual_seed(3)
    expected = step_gradients(oracle, batch())
    assert torch.equal(after, torch.rand(1)), "the stream outside goes on as without the engine"
    same_gradients(got, expected)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
def test_b48_a_collective_that_writes_its_argument_is_replayed(policy: CheckpointPolicy, one_rank: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return _Exchange.apply(x.exp()).sin()

    one, two = batch(), batch()
    function(one).sum().backward()
    with simulated_accelerator(**TIGHT):
        hp.checkpoint(function, two, policy_fn=always(policy)).sum().backward()
        assert hp.stats().replayed_ops["collective"] == 1
    assert torch.equal(one.grad, two.grad)
