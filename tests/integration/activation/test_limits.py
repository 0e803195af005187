"""Far memory of every kind, limits of every kind, and what is counted when a value stays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, SwapConfig
from hyper_parallel.backends.torch import ActivationPolicy, create_selective_checkpoint_contexts
from hyper_parallel.simulation.backend import SimulatedBackend
from hyper_parallel.testing import simulated_accelerator

from .helpers import count_of, same_gradients, step_gradients
from .kinds import KINDS, Kind, mixed_policy, swap_everything
from .models import WIDTH, Block, Chain
from .scenario import assert_same, batch, run
from .scenarios import SCENARIOS
from .test_schedule import UNIT, Sines, unit

TIGHT: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 0}
SWAPPING = tuple(kind for kind in KINDS if kind.name in ("swap", "mixed", "swap_inputs", "all_swapped"))
CASES = ("one_step", "backward_twice_with_retain_graph", "double_backward", "five_forwards_backwards_in_any_order")
assert set(CASES) <= set(SCENARIOS)


@pytest.mark.parametrize("kind", SWAPPING, ids=repr)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "settings",
    [
        {"tiers": ("pageable",)},
        {"tiers": ("pinned", "pageable"), "host_limit": 8192},
        {"verify": True},
        {"host_limit": 4096},
        {"host_limit": 0},
        {"tiers": ("disk",)},
        {"tiers": ("pinned", "disk"), "host_limit": 4096 * 16, "verify": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_tier_gives_the_same_gradients(kind: Kind, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    if "disk" in settings.get("tiers", ()):
        settings = {**settings, "disk_path": str(tmp_path)}
    with simulated_accelerator(window_bytes=300, prefetch_bytes=600, **settings):
        results = run(name, kind)
    assert_same(name, kind, results)


@pytest.mark.parametrize("kind", SWAPPING, ids=repr)
def test_host_tensors_go_to_disk_where_a_disk_is_named(kind: Kind, tmp_path: Path) -> None:
    """No simulation: a machine without a device, whose own memory is what is short."""
    config = SwapConfig(min_bytes=0, window_bytes=0, tail_bytes=0, tiers=("disk",), disk_path=str(tmp_path))
    with hp.configure(config):
        results = run("one_step", kind)
        assert hp.stats().swapped_out_bytes > 0
        assert hp.stats().live_records == 0
    assert_same("one_step", kind, results)


def test_host_tensors_stay_where_no_disk_is_named() -> None:
    with hp.configure(min_bytes=0):
        hp.swap_wrapper(Block())(batch()).sum().backward()
        hp.checkpoint_wrapper(Block(), policy_fn=swap_everything)(batch()).sum().backward()
    stats = hp.stats()
    assert stats.swapped_out_bytes == 0
    assert stats.kept_count["already_on_host"] > 0


def test_the_disk_is_used_by_settings_that_name_it_only(tmp_path: Path) -> None:
    with hp.configure(SwapConfig(min_bytes=0, window_bytes=0, tail_bytes=0, tiers=("disk",), disk_path=str(tmp_path))):
        hp.swap_wrapper(Block())(batch()).sum().backward()
        swapped = hp.stats().swapped_out_bytes
        assert swapped > 0
    with hp.configure(min_bytes=0, tail_bytes=0, window_bytes=0):
        hp.swap_wrapper(Block())(batch()).sum().backward()
    assert hp.stats().swapped_out_bytes == swapped


def test_a_full_device_gives_back_what_was_brought_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that finds no room lets go of what was prefetched, and is tried again; a prefetch just stops."""
    one, two = unit(), unit()
    Sines(8)(one).sum().backward()
    allocate = SimulatedBackend.allocate
    calls = [0]

    def sometimes_full(backend: SimulatedBackend, nbytes: int) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise MemoryError("the device is full")
        return allocate(backend, nbytes)

    with simulated_accelerator(window_bytes=0, prefetch_bytes=3 * UNIT) as sim:
        out = hp.swap_wrapper(Sines(8))(two)
        monkeypatch.setattr(SimulatedBackend, "allocate", sometimes_full)
        out.sum().backward()
        assert calls[0] > 8
        assert count_of(sim.events, "use") == 8
    assert torch.equal(one.grad, two.grad)


def test_a_device_that_stays_full_says_so_and_a_later_backward_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(backend: SimulatedBackend, nbytes: int) -> Any:
        raise MemoryError("the device is full")

    one, two = unit(), unit()
    Sines(3)(one).sum().backward()
    with simulated_accelerator(**TIGHT):
        loss = hp.swap_wrapper(Sines(3))(two).sum()
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedBackend, "allocate", full)
            with pytest.raises(MemoryError, match="the device is full"):
                loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(one.grad, two.grad)


def test_every_reason_to_stay_is_counted() -> None:
    weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).sin()
        z = (y[:0] * x[:0]).sum() + (y.mean() * y.mean().exp())
        wave = torch.fft.fft(y)
        return (wave * wave.conj()).real.sum() + z

    def policy(tensor: torch.Tensor) -> Any:
        return ActivationPolicy.SAVE if tensor.dim() == 0 else None

    with simulated_accelerator(window_bytes=0, min_bytes=8):
        hp.swap_wrapper(function, policy)(batch()).backward()
        kept = hp.stats().kept_count
    assert kept["parameter"] >= 1
    assert kept["policy"] >= 1
    assert kept["no_plain_storage"] >= 1
    assert set(kept) <= {
        "parameter", "policy", "no_plain_storage", "empty", "below_min_bytes", "needed_first", "saved_during_backward",
    }  # fmt: skip


def test_must_swap_below_min_bytes_is_kept_and_never_recomputed() -> None:
    with simulated_accelerator(window_bytes=0, min_bytes=10**6) as sim:
        layer = hp.checkpoint_wrapper(Block(), policy_fn=swap_everything)
        layer(batch()).sum().backward()
        stats = hp.stats()
        assert sim.swapped_bytes == 0
        assert stats.recomputed_bytes == 0
        assert stats.kept_count["below_min_bytes"] > 0


def test_layers_with_settings_of_their_own_share_tensors_safely() -> None:
    plain = Chain([Block() for _ in range(3)])
    configs = [
        SwapConfig(min_bytes=0, window_bytes=size, tail_bytes=0, prefetch_bytes=size) for size in (0, 200, 10**6)
    ]
    twin = copy.deepcopy(plain)
    ours = Chain([hp.swap_wrapper(layer, swap_config=config) for layer, config in zip(twin.layers, configs)])
    with simulated_accelerator():
        got = step_gradients(ours, batch())
        assert hp.stats().live_records == 0
    same_gradients(got, step_gradients(plain, batch()))


@pytest.mark.parametrize("allows", [False, True])
def test_contexts_for_torchs_own_checkpoint(allows: bool) -> None:
    """The pair of contexts by itself. A filed value that was changed is made again; with the flag it is used as it is."""
    module = nn.Linear(WIDTH, WIDTH)

    def matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    middle: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        h = module(x)
        if not middle:
            middle.append(h)
        return h.exp() * x

    with simulated_accelerator(**TIGHT):
        x = batch()
        out = torch_checkpoint(
            function, x, use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(matmuls, allow_cache_entry_mutation=allows),
        )  # fmt: skip
        with torch.no_grad():
            middle[0].zero_()
        out.sum().backward()
    if not allows:
        expected = batch()
        middle.clear()
        function(expected).sum().backward()
        assert torch.equal(x.grad, expected.grad)
        return
    # The replay found zeros where the matmul's output was: exp(0) = 1, so d(exp(h)·x) = x·dh + dx.
    expected = batch()
    (module(expected) * expected.detach() + expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_a_mixed_policy_without_any_device_is_plain_selective_checkpointing() -> None:
    plain = Block()
    ours = hp.checkpoint_wrapper(copy.deepcopy(plain), policy_fn=mixed_policy, swap_inputs=True)
    same_gradients(step_gradients(ours, batch()), step_gradients(plain, batch()))
