"""What autograd saves on MindSpore, as a table: bytes as arithmetic."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn

import hyper_parallel as hp
from hyper_parallel.backends.mindspore.planner import list_saved
from hyper_parallel.errors import PlanError

ROWS, WIDTH, HIDDEN = 8, 16, 64


class Small(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = mint.nn.Linear(WIDTH, HIDDEN, bias=False), mint.nn.Linear(HIDDEN, WIDTH, bias=False)

    def construct(self, x: Any) -> Any:
        return self.down(mint.nn.functional.silu(self.up(x)))


def numbers(rows: int = ROWS) -> Any:
    return mindspore.Tensor(np.random.RandomState(0).standard_normal((rows, WIDTH)).astype(np.float32))


def step_of(model: Any, loss: Any, times: int = 1) -> Any:
    x = numbers()
    function = mindspore.value_and_grad(lambda x: loss(model(x)), None, model.trainable_params())
    return lambda: [function(x) for _ in range(times)]


def test_rows_are_by_cell_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = Small()
    table = hp.print_saved(model, step_of(model, lambda y: y.sum()))
    line = Small.construct.__code__.co_firstlineno + 1
    found = {row.module: (row.count, row.nbytes, row.source.endswith(f"test_saved.py:{line}")) for row in table}
    wide, narrow = 4 * ROWS * HIDDEN, 4 * ROWS * WIDTH
    assert found["up"] == (1, narrow, True)
    assert found["down"] == (1, wide, True)
    assert found[""][1:] == (wide, True)  # the input of silu
    assert table.total_bytes == 2 * wide + narrow
    assert table.weight_bytes <= 2 * 4 * WIDTH * HIDDEN
    assert table.weight_count > 0
    assert table[0].largest == f"[{ROWS}, {HIDDEN}] float32"
    assert capsys.readouterr().out == str(table) + "\n"


def test_views_of_one_storage_are_counted_once() -> None:
    model = mint.nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def loss(y: Any) -> Any:
        left, right = mint.chunk(y, 2, dim=1)
        return (left * right).sum()

    table = list_saved(model, step_of(model, loss))
    assert table.total_bytes == 4 * ROWS * (WIDTH + 2 * WIDTH)  # x, and the storage that both halves are views of
    assert table.total_count == 3


def test_bytes_that_are_used_again_are_another_storage() -> None:
    """Addresses name storages here: the second step's values may lie where those of the first one lay."""
    model = Small()
    once = list_saved(model, step_of(model, lambda y: mint.square(y).sum()))
    twice = list_saved(model, step_of(model, lambda y: mint.square(y).sum(), times=2))
    x_bytes = 4 * ROWS * WIDTH
    assert twice.total_count == 2 * once.total_count
    assert twice.total_bytes in (2 * once.total_bytes, 2 * once.total_bytes - x_bytes)  # both steps save one batch


def test_the_step_leaves_no_trace_and_its_gradients_are_right() -> None:
    model = Small()
    step = step_of(model, lambda y: mint.square(y).sum())
    before = [gradient.asnumpy().tobytes() for gradient in step()[0][1]]
    seen: list[bytes] = []
    list_saved(model, lambda: seen.extend(gradient.asnumpy().tobytes() for gradient in step()[0][1]))
    assert seen == before
    assert not any(cell._forward_pre_hook or cell._forward_hook for cell in model.cells())


def test_of_a_recomputed_layer_only_its_input_is_saved() -> None:
    model = nn.SequentialCell([hp.checkpoint_wrapper(Small()) for _ in range(3)])
    plain = nn.SequentialCell([Small() for _ in range(3)])
    least = list_saved(model, step_of(model, lambda y: y.sum())).total_bytes
    assert least < list_saved(plain, step_of(plain, lambda y: y.sum())).total_bytes


def test_a_step_that_saves_nothing_is_an_error() -> None:
    model = Small()
    with pytest.raises(PlanError, match=r"print_saved: autograd saved nothing.*inside mindspore.value_and_grad"):
        list_saved(model, lambda: model(numbers()))


def test_another_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"print_saved: expected a mindspore.nn.Cell, got int"):
        hp.print_saved(3, lambda: None)
