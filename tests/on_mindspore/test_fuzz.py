"""The program fuzzer's slice of every check on MindSpore, and every bug that it found, by name."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from fuzz.program import Action, Op, Program, Settings, Span, Tensor, from_json, to_json
from mindspore import mint, nn, ops

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .fuzzing import lowering
from .fuzzing.generate import program_number
from .fuzzing.judge import judge
from .scenario import batch

_CHUNKS = 4
_PROGRAMS_PER_CHUNK = 8


@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_programs_with_and_without_us_give_the_same_bytes(chunk: int) -> None:
    for number in range(chunk * _PROGRAMS_PER_CHUNK, (chunk + 1) * _PROGRAMS_PER_CHUNK):
        program = program_number(2026, number)
        verdict = judge(program)
        assert verdict.is_good, f"program {number} of seed 2026: {verdict.detail}\n{to_json(program)}"


def test_a_program_is_the_same_after_writing_and_reading_it() -> None:
    program = program_number(1, 4)
    assert from_json(to_json(program)) == program


def _checkpointed(*body: Op) -> Program:
    return Program(
        weights=(Tensor(shape=(4, 4)),),
        inputs=(Tensor(shape=(3, 4)),),
        constants=(Tensor(shape=(3, 4), requires_grad=False),),
        body=(Span(kind="checkpoint", body=body),),
        threads=((Action(kind="train"),),),
        settings=Settings(),
    )


def test_the_judge_sees_a_gradient_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _checkpointed(Op(name="tanh", ins=(0,)), Op(name="linear", ins=(0,), weights=(0,)))
    assert judge(program).kind == "equal"
    plain = lowering.Doors.call

    def wrong(self: Any, span: Span, function: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, span, function, *args, **kwargs)
        return (out[0] * 1.0000001,) if self.are_ours else out

    monkeypatch.setattr(lowering.Doors, "call", wrong)
    assert judge(program).kind == "mismatch"


# ---------------------------------------------------------------------- what it found


def test_bytes_that_a_checked_load_has_read_may_be_let_go() -> None:
    # The simulator blamed the copy that a checksum reads, although the host had waited for it: after the load no op runs that a
    # mode sees, because the backward of a LayerNorm is an older primitive.
    norm = nn.LayerNorm((8,))
    with simulated_accelerator("lazy", min_bytes=0, tail_bytes=0, verify=True):
        mindspore.value_and_grad(lambda x: mint.sum(hp.swap(norm, x)), 0, norm.trainable_params())(batch())
        assert hp.stats().swapped_in_bytes > 0


def test_what_a_factory_made_in_a_replay_is_not_held_to_its_end() -> None:
    rows, width, count = 256, 32, 6

    def scattered(x: Any) -> Any:
        index = mindspore.Tensor(np.arange(rows, dtype=np.int32).reshape(-1, 1))
        total = x
        for _ in range(count):
            blank = mint.zeros((rows, width), dtype=x.dtype)
            total = total + ops.tensor_scatter_add(blank, index, mint.tanh(total))
        return total

    with simulated_accelerator() as simulation:
        mindspore.grad(lambda x: hp.checkpoint(scattered, x).sum())(batch(rows, width))
    # One value is kept for each round, and a round works on a few.
    assert simulation.peak_bytes < (count + 6) * rows * width * 4
