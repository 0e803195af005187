"""Several threads at one tape: backwards of one retained graph at once, and handles that die while another thread replays."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from activation.helpers import run_in_threads

import hyper_parallel as hp

from .models import WIDTH, mlp


@pytest.fixture(autouse=True)
def threads_take_turns_at_once() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = x.sin().exp().cos()
    return x


def test_two_threads_go_through_one_recorded_graph() -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(chain(x).sum(), x)
    found: list[torch.Tensor] = []
    for _ in range(5):
        loss = hp.checkpoint(chain, x).sum()

        def work(loss: torch.Tensor = loss) -> None:
            for _ in range(20):
                found.extend(torch.autograd.grad(loss, x, retain_graph=True))

        run_in_threads(work, work)
    assert len(found) == 200
    assert all(torch.equal(one, wanted) for one in found)


def test_graphs_that_die_on_one_thread_do_not_disturb_replays_on_another() -> None:
    model, x = mlp(), torch.randn(8, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    outputs = [hp.checkpoint(model, x) for _ in range(20)]
    found: list[torch.Tensor] = []

    def drop() -> None:
        while len(outputs) > 10:
            outputs.pop()

    def run() -> None:
        for output in outputs[:10]:
            found.extend(torch.autograd.grad(output.sum(), x))

    run_in_threads(drop, run)
    assert len(found) == 10
    assert all(torch.equal(one, wanted) for one in found)


def test_the_parts_of_one_tape_are_dropped_and_read_by_two_threads() -> None:
    """Two outputs share a tape: one thread drops its half of the graph while the other reads its own."""
    x = torch.randn(8, WIDTH, requires_grad=True)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin().exp().cos(), x.cos().exp().sin()

    (wanted,) = torch.autograd.grad(region(x)[0].sum(), x)
    for _ in range(20):
        read_one, *dropped = hp.checkpoint(region, x)
        found: list[torch.Tensor] = []

        def read(output: torch.Tensor = read_one, found: list[torch.Tensor] = found) -> None:
            found.extend(torch.autograd.grad(output.sum(), x))

        run_in_threads(dropped.clear, read)
        assert torch.equal(found[0], wanted)
