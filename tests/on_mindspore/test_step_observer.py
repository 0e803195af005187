"""A step recorded on MindSpore: bytes as arithmetic where the device counts them, order and names where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn

from hyper_parallel.backends.mindspore.observed_framework import FRAMEWORK
from hyper_parallel.backends.mindspore.wrappers import SwapWrapper
from hyper_parallel.backends.step_observation.gradients import FirstGradients
from hyper_parallel.backends.step_observation.step_observer import StepObserver, find_observed_blocks
from hyper_parallel.backends.step_observation.ways import WAYS, in_one_way
from hyper_parallel.fates import Fate
from hyper_parallel.records.run_record import StepRecord
from hyper_parallel.records.work_span import Track
from hyper_parallel.testing import simulated_accelerator

LAYERS, ROWS, WIDTH = 4, 256, 32
VALUE_BYTES = ROWS * WIDTH * 4  # what sigmoid keeps of each layer
FORWARDS = [f"layers.{at}" for at in range(LAYERS)]


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.linear = mint.nn.Linear(WIDTH, WIDTH)

    def construct(self, x: Any) -> Any:
        return mint.sigmoid(self.linear(x))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(LAYERS)])

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def numbers(seed: int = 0) -> Any:
    return mindspore.Tensor(np.random.RandomState(seed).standard_normal((ROWS, WIDTH)).astype(np.float32))


def made() -> tuple[Net, Callable[[], Any]]:
    model, batch = Net(), numbers()
    function = mindspore.value_and_grad(model, None, model.trainable_params())
    return model, lambda: function(batch)


def recorded(way: str) -> StepRecord:
    model, step = made()
    blocks = find_observed_blocks(FRAMEWORK, model)
    with simulated_accelerator(timing="eager") as simulation:
        with in_one_way(FRAMEWORK, model, blocks, way):
            record = StepObserver(FRAMEWORK, model, step, blocks).observe(way, what=WAYS[way].what, steps=1)
            simulation.reset_peak()
            step()
            assert record.peak_bytes == simulation.peak_bytes
    assert [type(layer) for layer in model.layers] == [Layer] * LAYERS, "the model is as it was"
    return record


def names(record: StepRecord, track: Track) -> list[str]:
    return [span.name for span in record.spans if span.track is track]


def test_the_step_left_alone() -> None:
    record = recorded("none")
    assert record.peak_parts == {"activations, gradients and workspace": record.peak_bytes}
    assert record.peak_bytes == max(record.memory.nbytes) >= LAYERS * VALUE_BYTES
    assert names(record, Track.FORWARD) == FORWARDS
    assert names(record, Track.BACKWARD) == FORWARDS[::-1]
    assert names(record, Track.REPLAY) == []
    assert record.out_bytes == 0


@pytest.mark.parametrize("way", ["recompute", "inputs", "boundary"])
def test_a_replay_lies_inside_the_backward_of_its_block(way: str) -> None:
    record = recorded(way)
    assert names(record, Track.FORWARD) == FORWARDS
    assert names(record, Track.BACKWARD) == FORWARDS[::-1]
    replays = [span for span in record.spans if span.track is Track.REPLAY]
    assert [span.name for span in replays] == FORWARDS[::-1]
    backwards = {span.name: span for span in record.spans if span.track is Track.BACKWARD}
    for replay in replays:
        around = backwards[replay.name]
        assert around.start_us <= replay.start_us <= replay.end_us <= around.end_us


def test_swapped_bytes_are_those_of_the_engine() -> None:
    record = recorded("swap")
    assert record.out_bytes == record.back_bytes > 0
    assert {total.fate: total.nbytes for total in record.fates}[Fate.SWAP] == record.out_bytes


def fingerprint(result: Any) -> str:
    seen = FirstGradients(FRAMEWORK, Net())
    seen(result)
    return seen.fingerprint


def test_gradients_are_what_a_step_returns() -> None:
    one = mindspore.Tensor(np.float32(1.0))
    assert fingerprint(one) == fingerprint(None) == ""
    assert fingerprint((one, (numbers(0),))) == fingerprint((one, (numbers(0),))) != ""
    assert fingerprint((one, (numbers(0),))) != fingerprint((one, (numbers(1),)))
    assert fingerprint(numbers(0)) != fingerprint(numbers(1))
    halves = [numbers(seed).astype(mindspore.bfloat16) for seed in (0, 0, 1)]
    assert fingerprint(halves[0]) == fingerprint(halves[1]) != fingerprint(halves[2])


def test_only_the_first_step_is_looked_at() -> None:
    seen = FirstGradients(FRAMEWORK, Net())
    seen(mindspore.Tensor(np.float32(1.0)))
    seen(numbers())
    assert seen.fingerprint == ""


def test_on_the_cpu_the_memory_of_the_process_is_read() -> None:
    model, step = made()
    observer = StepObserver(FRAMEWORK, model, step, find_observed_blocks(FRAMEWORK, model))
    assert observer.memory_kind == "resident memory of the process"
    record = observer.observe("none", warmup=0, steps=1)
    weights = sum(4 * parameter.size for parameter in model.get_parameters())
    assert record.peak_parts["weights"] == weights
    assert record.peak_bytes > weights


def test_another_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"record: expected a mindspore.nn.Cell, got int"):
        find_observed_blocks(FRAMEWORK, 3)


def test_wrappers_of_the_ways_are_ours() -> None:
    model, _ = made()
    with in_one_way(FRAMEWORK, model, find_observed_blocks(FRAMEWORK, model), "swap"):
        assert {type(layer) for layer in model.layers} == {SwapWrapper}
