"""``print_saved``: bytes as arithmetic, the right lines, one storage counted once, and nothing left behind."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.planner.saved_values import list_saved
from hyper_parallel.cli.command_line import main
from hyper_parallel.config import show_bytes
from hyper_parallel.errors import PlanError

ROWS, WIDTH, HIDDEN = 4, 8, 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        squared = hidden * hidden
        return self.down(squared)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


def line_of(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(at for at, line in enumerate(lines) if text in line)


def test_bytes_and_lines_of_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Mlp(), torch.randn(ROWS, WIDTH)
    table = hp.print_saved(model, lambda: model(x).sum().backward())
    here = "tests/integration/planner/test_saved.py"
    found = {(row.module, row.source): (row.count, row.nbytes) for row in table}
    relu, product = line_of(Mlp.forward, "relu"), line_of(Mlp.forward, "hidden * hidden")
    down = line_of(Mlp.forward, "self.down(squared)")
    wide, narrow = 4 * ROWS * HIDDEN, 4 * ROWS * WIDTH
    assert found == {
        ("", f"{here}:{relu}"): (1, wide),  # relu's output
        ("down", f"{here}:{down}"): (1, wide),  # the product
        ("up", f"{here}:{relu}"): (1, narrow),  # x
        ("", f"{here}:{product}"): (2, 0),  # relu's output again, as both factors
    }
    assert [row.nbytes for row in table.rows] == [wide, wide, narrow, 0]
    assert table.total_bytes == 2 * wide + narrow
    assert (table.weight_count, table.weight_bytes) == (
        1,
        4 * WIDTH * HIDDEN,
    )  # down's: x needs no gradient, up's is not used
    assert table.rows[0].largest == f"[{ROWS}, {HIDDEN}] float32"
    printed = capsys.readouterr().out
    assert printed == str(table) + "\n"
    assert f"saved for backward: {2 * wide + narrow} B in 5 values; besides, weights: 512 B in 1 values" in printed


def test_views_of_one_storage_are_counted_once() -> None:
    model = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        left, right = model(x).chunk(2, dim=1)
        (left * right).sum().backward()

    table = list_saved(model, step)
    assert table.total_bytes == 4 * ROWS * (WIDTH + 2 * WIDTH)  # x, and the storage that both halves are views of
    assert table.total_count == 3


def test_bytes_that_are_used_again_are_another_storage() -> None:
    """Two steps in one: the allocator hands the first step's memory out again for the second."""
    model, x = nn.Linear(WIDTH, HIDDEN, bias=False), torch.randn(ROWS, WIDTH)

    def step() -> None:
        for _ in range(2):
            model(x).square().sum().backward()

    assert list_saved(model, step).total_bytes == 4 * ROWS * (WIDTH + 2 * HIDDEN)  # x once, the output twice


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    gradients = [
        (parameter.grad, parameter.grad.clone()) for parameter in model.parameters() if parameter.grad is not None
    ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    hp.print_saved(model, lambda: model(x).sum().backward())
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    now = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(now) == len(gradients)
    for (before, value), after in zip(gradients, now):
        assert after is before
        assert torch.equal(after, value)


def test_a_step_that_raises_leaves_nothing_behind_either() -> None:
    model, x = Model(), torch.randn(ROWS, WIDTH)
    state = torch.get_rng_state()

    def step() -> None:
        model(x).sum().backward()
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        hp.print_saved(model, step)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gradients_of_the_step_itself_are_right() -> None:
    model, x = Mlp(), torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    seen: list[torch.Tensor] = []

    def step() -> None:
        model(x).sum().backward()
        seen.extend(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)

    hp.print_saved(model, step)
    assert len(seen) == len(expected) == 4
    assert all(torch.equal(one, other) for one, other in zip(seen, expected))


def test_what_is_recomputed_is_not_saved() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, WIDTH, requires_grad=True)
    plain = list_saved(model, lambda: model(x).sum().backward())
    for number, layer in enumerate(model.layers):
        model.layers[number] = hp.checkpoint_wrapper(layer)
    recomputed = list_saved(model, lambda: model(x).sum().backward())
    inside = {row.module: row.nbytes for row in recomputed if row.module.startswith("layers") and row.nbytes}
    assert inside == {"layers.0": 4 * ROWS * WIDTH, "layers.1": 4 * ROWS * WIDTH}  # their inputs
    assert (
        recomputed.total_bytes == plain.total_bytes - 4 * 4 * ROWS * HIDDEN
    )  # relu's output and the product of both layers


def test_rows_that_are_not_printed_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Model(), torch.randn(ROWS, WIDTH)
    table = hp.print_saved(model, lambda: model(x).sum().backward(), most_rows=2)
    lines = capsys.readouterr().out.splitlines()
    rest = sum(row.nbytes for row in table.rows[2:])
    assert lines[3] == f"and {len(table) - 2} smaller rows with {show_bytes(rest)}"
    assert len(lines) == 5


def test_mistakes_are_answered() -> None:
    model, x = Mlp(), torch.randn(ROWS, WIDTH)
    with pytest.raises(TypeError, match=r"print_saved: expected a torch\.nn\.Module, got int"):
        hp.print_saved(3, print)
    with pytest.raises(TypeError, match=r"print_saved: step must be a callable"):
        hp.print_saved(model, model(x))
    with pytest.raises(ValueError, match=r"print_saved: most_rows must be a whole number of 1 or more, got 0"):
        hp.print_saved(model, print, most_rows=0)
    with pytest.raises(PlanError, match=r"print_saved: autograd saved nothing in this step"):
        hp.print_saved(model, lambda: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains() -> None:
        model(x).sum().backward()
        optimizer.step()

    before = model.up.weight.detach().clone()
    with pytest.raises(PlanError, match=r"print_saved: the step calls SGD\.step\(\)"):
        hp.print_saved(model, trains)
    assert torch.equal(model.up.weight, before)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "saved_train.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(8, 16)\n"
        "    x = torch.randn(4, 8)\n"
        "    return model, lambda: model(x).square().sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["saved", "saved_train:make", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_bytes"] == 4 * 4 * (8 + 16)
    assert {row["source"] for row in found["rows"]} == {"saved_train.py:5"}
    assert main(["saved", "saved_train:make"]) == 0
    assert "saved for backward: 384 B in 2 values" in capsys.readouterr().out
    sys.modules.pop("saved_train", None)
