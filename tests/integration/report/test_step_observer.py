"""A step recorded: bytes as arithmetic where the device counts them, order and names where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.step_observation.step_observer import StepObserver, find_observed_blocks
from hyper_parallel.backends.step_observation.ways import WAYS, in_one_way
from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.observed_framework import FRAMEWORK
from hyper_parallel.config import configure
from hyper_parallel.fates import Fate
from hyper_parallel.planner.fit import profile_memory
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.run_record import PROCESS_PART, RegionTotal, StepRecord
from hyper_parallel.records.work_span import Track
from hyper_parallel.testing import simulated_accelerator

LAYERS, ROWS, WIDTH = 4, 2048, 128
VALUE_BYTES = ROWS * WIDTH * 4  # 1 MiB: what sigmoid keeps of each layer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x))


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def recorded(way: str, **base: int) -> tuple[StepRecord, Model]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).sum().backward()

    blocks = find_observed_blocks(FRAMEWORK, model)
    with in_one_way(FRAMEWORK, model, blocks, way):
        record = StepObserver(FRAMEWORK, model, step, blocks, base=base).observe(
            way, what=WAYS[way].what, warmup=1, steps=2
        )
    return record, model


def names(record: StepRecord, track: Track) -> list[str]:
    return [span.name for span in record.spans if span.track is track]


FORWARDS = [f"layers.{at}" for at in range(LAYERS)]


def test_the_step_left_alone_on_the_simulated_device() -> None:
    with simulated_accelerator(timing="eager"):
        record, model = recorded("none")
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert record.peak_parts["weights"] == record.peak_parts["gradients"] == weights
    assert sum(record.peak_parts.values()) == record.peak_bytes == max(record.memory.nbytes)
    # Every layer's output is kept, the input is there, and the last layer's linear is alive beside its sigmoid.
    assert record.peak_parts["activations and workspace"] >= (LAYERS + 1) * VALUE_BYTES
    assert names(record, Track.FORWARD) == FORWARDS
    assert names(record, Track.BACKWARD) == FORWARDS[::-1]
    assert names(record, Track.REPLAY) == []
    assert record.out_bytes == 0
    assert record.fates == ()
    assert record.regions == ()


def test_a_replay_is_seen_as_one() -> None:
    with simulated_accelerator(timing="eager"):
        record, _ = recorded("recompute")
    assert names(record, Track.FORWARD) == FORWARDS
    assert names(record, Track.REPLAY) == FORWARDS[::-1]
    reason = "" if native.load() is not None else f"no native recorder: {native.why_not()}"
    assert record.regions == (RegionTotal(reason=reason, count=LAYERS, names=tuple(FORWARDS)),)


@pytest.mark.parametrize(
    "policy", [["addmm"], lambda ctx, op, *args: CheckpointPolicy.MUST_RECOMPUTE], ids=["list", "function"]
)
def test_a_replay_of_a_region_with_a_policy_is_seen_as_one(policy: Any) -> None:
    """A list of op names runs from a tape where there is a recorder. A function runs Python again."""
    model, x = Model(), torch.randn(ROWS, WIDTH)
    with simulated_accelerator(timing="eager"):
        blocks = find_observed_blocks(FRAMEWORK, model)
        for at in range(LAYERS):
            model.layers[at] = hp.checkpoint_wrapper(model.layers[at], policy_fn=policy)
        record = StepObserver(FRAMEWORK, model, lambda: model(x).sum().backward(), blocks).observe(
            "policy", warmup=0, steps=1
        )
    assert names(record, Track.FORWARD) == FORWARDS
    assert names(record, Track.REPLAY) == FORWARDS[::-1]
    is_recorded = native.load() is not None
    reason = "a policy that is a function of an op's arguments" if callable(policy) else ""
    reason = reason if is_recorded else f"no native recorder: {native.why_not()}"
    assert record.regions == (RegionTotal(reason=reason, count=LAYERS, names=tuple(FORWARDS)),)
    counters = hp.SwapManager().counters
    assert counters.on_replay is counters.on_region is None


def test_a_replay_lies_inside_the_backward_of_its_block() -> None:
    with simulated_accelerator(timing="eager"):
        record, _ = recorded("recompute")
    backwards = {span.name: span for span in record.spans if span.track is Track.BACKWARD}
    replays = [span for span in record.spans if span.track is Track.REPLAY]
    assert len(replays) == LAYERS
    for replay in replays:
        around = backwards[replay.name]
        assert around.start_us <= replay.start_us <= replay.end_us <= around.end_us


def test_the_replay_of_a_region_that_is_no_module_has_the_name_of_its_function() -> None:
    model, x = Model(), torch.randn(ROWS, WIDTH)

    def run_layers(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(model.layers[1](model.layers[0](x)))

    def step() -> None:
        hp.checkpoint(run_layers, x).sum().backward()

    with simulated_accelerator(timing="eager"):
        record = StepObserver(FRAMEWORK, model, step, find_observed_blocks(FRAMEWORK, model)).observe(
            "function", warmup=0, steps=1
        )
    of_python = ["layers.0", "layers.1"]  # the modules that run again
    of_tape = [run_layers.__qualname__]
    assert names(record, Track.REPLAY) == (of_python if native.load() is None else of_tape)


def test_swapped_bytes_are_counted_per_step() -> None:
    with simulated_accelerator(timing="eager", min_bytes=VALUE_BYTES, window_bytes=0):
        record, _ = recorded("swap")
    # The input of each linear is the output of the sigmoid before it: saved twice, copied once.
    assert record.out_bytes == (LAYERS + 1) * VALUE_BYTES
    assert record.back_bytes > 0
    swapped = [fate.nbytes for fate in record.fates if fate.fate is Fate.SWAP]
    assert swapped == [record.out_bytes]


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if not way.needs_plan])
def test_every_way_leaves_the_model_as_it_was(way: str) -> None:
    with simulated_accelerator(timing="eager"):
        _, model = recorded(way)
    assert [type(layer) for layer in model.layers] == [Layer] * LAYERS
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_host_is_read_as_its_process(tmp_path: Path) -> None:
    with configure(tiers="disk", disk_path=str(tmp_path), min_bytes=0, tail_bytes=0, window_bytes=0):
        record, _ = recorded("swap", **{PROCESS_PART: 2**20})
    assert record.peak_bytes >= 50 * 2**20, "a process with torch in it"
    assert record.process_bytes == 2**20
    assert record.model_peak_bytes == record.peak_bytes - 2**20
    copied = [span.nbytes for span in record.spans if span.track is Track.COPY_OUT]
    assert sum(copied) == record.out_bytes > LAYERS * VALUE_BYTES
    # One clock for all: a copy out begins after the forward that made its bytes, and before the end of the backward.
    begin_us = min(span.start_us for span in record.spans if span.track is Track.FORWARD)
    end_us = max(span.end_us for span in record.spans if span.track is Track.BACKWARD)
    assert all(begin_us < span.start_us < end_us for span in record.spans if span.track is Track.COPY_OUT)
    assert names(record, Track.FORWARD) == FORWARDS


def test_a_plan_is_counted_by_kind_of_op() -> None:
    torch.manual_seed(0)
    with simulated_accelerator(timing="eager", min_bytes=1024):
        model, x = Model(12), torch.randn(ROWS, WIDTH)
        profile = profile_memory(model, lambda: model(x).sum().backward(), steps=1)
        alone = plan_memory(profile, 2**40, effort=0.2)
        tight = plan_memory(profile, profile.measured.peak_bytes - 2 * VALUE_BYTES, effort=0.2)
    kept = {total.op: total.kept_bytes for total in op_totals(profile, alone)}
    assert kept["sigmoid"] == 12 * VALUE_BYTES, "left alone: what autograd holds"
    totals = op_totals(profile, tight)
    assert sum(total.recomputed_bytes + total.swapped_bytes for total in totals) > 0
    assert all(total.reason for total in totals)
