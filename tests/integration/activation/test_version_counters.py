"""Several version counters over one storage: the same number on another counter says nothing about the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

from .scenario import batch


def _everything(answer: CheckpointPolicy) -> Any:
    return lambda ctx, op, *args, **kwargs: answer


WAYS = {
    "swap": lambda module, x: hp.swap(module, x),
    "inputs": lambda module, x: hp.checkpoint(module, x, swap_inputs=True),
    "must_swap": lambda module, x: hp.checkpoint(module, x, policy_fn=_everything(CheckpointPolicy.MUST_SWAP)),
    "must_save": lambda module, x: hp.checkpoint(module, x, policy_fn=_everything(CheckpointPolicy.MUST_SAVE)),
}


@pytest.mark.parametrize("timing", ["lazy", "random", "eager"])
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("way", WAYS)
def test_recurrent_layers_whose_gates_are_pieces_of_one_storage(way: str, cell: Any, timing: str) -> None:
    torch.manual_seed(1)
    module, x = cell(16, 16, num_layers=2, batch_first=True), torch.randn(4, 8, 16, requires_grad=True)
    leaves = [x, *module.parameters()]
    wanted = torch.autograd.grad(module(x)[0].sin().sum(), leaves)
    with simulated_accelerator(timing, window_bytes=0):
        got = torch.autograd.grad(WAYS[way](module, x)[0].sin().sum(), leaves)
    for left, right in zip(got, wanted):
        assert torch.equal(left, right)


@pytest.mark.parametrize("far", ["pinned", "disk"])
def test_a_recurrent_layer_with_checksums(far: str, tmp_path: Path) -> None:
    # A copy of all pieces, taken for one of them, would see its neighbours while they change.
    torch.manual_seed(1)
    module, x = nn.GRU(16, 16, num_layers=2, bidirectional=True), torch.randn(8, 4, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(module(x)[0].sin().sum(), x)
    for seed in range(4):
        with (
            simulated_accelerator("random", seed=seed) as sim,
            hp.configure(tiers=far, disk_path=str(tmp_path), verify=True),
        ):
            (got,) = torch.autograd.grad(hp.swap(module, x)[0].sin().sum(), x)
        assert torch.equal(got, wanted)
        assert sim.swapped_bytes > 0


@pytest.mark.parametrize("way", ["swap", "must_swap"])
def test_a_packed_sequence(way: str) -> None:
    torch.manual_seed(1)
    module, x = nn.LSTM(16, 16, batch_first=True), torch.randn(3, 8, 16, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [8, 5, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)[0]

    (wanted,) = torch.autograd.grad(run(x).sin().sum(), x)
    with simulated_accelerator(window_bytes=0):
        (got,) = torch.autograd.grad(WAYS[way](run, x).sin().sum(), x)
    assert torch.equal(got, wanted)


def test_pieces_that_change_one_after_the_other() -> None:
    x = batch()

    def gates(x: torch.Tensor) -> torch.Tensor:
        left, right = (x * 2).unsafe_chunk(2)
        return left.sigmoid_().sum() + right.exp_().sum()  # each saves itself, at version 1 of its own counter

    (wanted,) = torch.autograd.grad(gates(x), x)
    with simulated_accelerator(window_bytes=0):
        (got,) = torch.autograd.grad(hp.swap(gates, x), x)
    assert torch.equal(got, wanted)


def test_an_output_that_its_own_op_and_the_next_one_save_is_copied_once() -> None:
    x = batch()
    with simulated_accelerator() as sim:
        y = hp.swap(lambda x: x.exp().sin().sum(), x)
        y.backward()
    assert sim.swapped_bytes == x.nbytes  # exp's output, saved by exp and by sin


def test_a_piece_and_its_views_are_copied_once() -> None:
    x = batch()

    def pieces(x: torch.Tensor) -> torch.Tensor:
        piece, _ = (x * 2).unsafe_chunk(2)
        return piece.exp().sum() + piece.t().sin().sum()  # saves exp's own output, and a view of the piece

    (wanted,) = torch.autograd.grad(pieces(x), x)
    with simulated_accelerator() as sim:
        (got,) = torch.autograd.grad(hp.swap(pieces, x), x)
    assert torch.equal(got, wanted)
    assert sim.swapped_bytes == x.nbytes + x.nbytes // 2


def test_a_source_that_changes_after_a_gradient_of_the_gradient_saved_it_again_raises() -> None:
    """Inside forward, the sine's backward reads the swapped input and saves it once more, for the second derivative."""

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return slope

    x = batch()
    with simulated_accelerator():
        loss = hp.swap(penalty, x).sum()
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(InPlaceChangeError, match="changed in place after it was saved"):
            loss.backward()


def test_an_argument_that_is_changed_under_hooks_that_hand_out_the_tensor_itself_is_named() -> None:
    """Hooks switch torch's own check off. ``save_on_cpu`` copies what is on a device, and nothing that is on the CPU."""
    x = torch.randn(4, 4, requires_grad=True)
    given = x * 2
    with torch.autograd.graph.save_on_cpu():
        output = hp.checkpoint(lambda given: given.exp().tanh(), given)
    given.detach().add_(1)
    with pytest.raises(InPlaceChangeError, match="cannot recompute, because a tensor"):
        output.sum().backward()
