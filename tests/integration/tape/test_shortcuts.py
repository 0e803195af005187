"""What is left out to save the host work changes nothing: ops that are not seen, tables and tensors that are used again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.region_identity import RegionTable

from .models import WIDTH, mlp


def recorder() -> Any:
    found = native.load()
    assert found is not None
    return found


def is_passed_over(op: str) -> bool:
    """Others have no kernel of their own for the recorder's key: the recorder is the fallback of all ops."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(op, "Fake")
    if has_kernel:
        assert torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(op, "Fake")
    return has_kernel


@pytest.mark.parametrize("op", ["aten::view", "aten::t", "aten::detach", "aten::transpose.int", "aten::split.Tensor"])
def test_views_do_not_come_to_the_recorder(op: str) -> None:
    assert is_passed_over(op)


@pytest.mark.parametrize(
    "op", ["aten::mm", "aten::add_.Tensor", "aten::topk", "aten::set_.source_Storage", "aten::empty_like"]
)
def test_what_makes_or_changes_a_storage_comes_to_the_recorder(op: str) -> None:
    assert not is_passed_over(op)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # torch discourages it
def test_an_op_that_gives_what_it_writes_another_size_leaves_other_views_alone() -> None:
    """In a replay the tensor that an op returned is given to the ops that read it: that one object may be resized."""

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = x.detach().sin()
            as_made = made.detach()
            torch.add(x.detach()[:2], 1, out=made)
        assert made.shape == (2,)
        return (x * as_made.exp()).sum()

    x = torch.randn(4, requires_grad=True)
    (wanted,) = torch.autograd.grad(region(x), x)
    for _ in range(3):
        (found,) = torch.autograd.grad(hp.checkpoint(region, x), x)
        assert torch.equal(found, wanted)
    assert hp.stats().regions_from_tape == 3


def test_tapes_that_use_the_tables_of_others_again_hold_nothing_of_them() -> None:
    """A step with other values, sizes and numbers of ops follows; several tapes of one region live at a time."""
    gc.collect()
    before = recorder().counters()["live_tapes"]
    model = mlp()

    def region(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = model(x)
        return x

    for times, rows in ((1, 4), (3, 2), (2, 8), (1, 1)):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        (wanted,) = torch.autograd.grad(region(region(x, times), times).sum(), x)
        for _ in range(2):
            output = hp.checkpoint(region, hp.checkpoint(region, x, times), times)
            (found,) = torch.autograd.grad(output.sum(), x)
            assert torch.equal(found, wanted)
    del output
    gc.collect()
    assert recorder().counters()["live_tapes"] <= before  # those of other tests may end meanwhile


def test_a_tape_unpacks_only_what_a_tape_has_packed() -> None:
    with pytest.raises(TypeError, match="what a tape has packed"):
        recorder().unpack(object())


class Equal(nn.Module):
    """Equal to every other one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_modules_that_are_equal_are_two_regions() -> None:
    table: RegionTable[object] = RegionTable()
    first, second = Equal(), Equal()
    known = table.find(first, (), {}, object)
    assert table.find(first, (), {}, object) is known
    assert table.of_module(first) is known
    assert table.of_module(second) is None
    assert table.find(second, (), {}, object) is not known


def test_a_module_that_is_gone_leaves_no_region() -> None:
    table: RegionTable[object] = RegionTable()
    module = Equal()
    table.find(module, (), {}, object)
    assert table.modules() == [module]
    del module
    gc.collect()
    assert table.modules() == []
    assert not table._root.branches._known, "its place in the table may become another object's"
