"""Kernels that change a kept output in place, and that torch does not see: numpy stands for them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import unseen_writes
from hyper_parallel.backends.torch.ops import KNOWN, facts_of
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.platform.platform import get_platform
from hyper_parallel.testing import simulated_accelerator

WIDTH = 16


def halve(q: torch.Tensor) -> None:
    values = q.detach().numpy()
    values *= 0.5


class Rotate(torch.autograd.Function):
    """As fused rotary embeddings do: it changes the memory of its argument and returns a view of it."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        halve(q)
        return q.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 0.5 * gradient.transpose(0, 1)


class Block(nn.Module):
    """Two products, with the kernel in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(8, WIDTH, bias=False)
        self.rotates = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.first(x)
        rotated = Rotate.apply(q) if self.rotates else q.transpose(0, 1)
        y: torch.Tensor = self.last(rotated.sin()).tanh()
        return y


def keeps(fate: CheckpointPolicy) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return fate if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def gradients(run: Any, block: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()
    return list(torch.autograd.grad(run(x).square().sum(), [x, *block.parameters()]))


def changed_unseen() -> int:
    return hp.stats().replayed_ops.get("changed_unseen", 0)


@pytest.mark.parametrize(
    ("fate", "kind"),
    [
        (CheckpointPolicy.MUST_SAVE, "function"),
        (CheckpointPolicy.MUST_SWAP, "function"),
        (CheckpointPolicy.MUST_SAVE, "names"),
    ],
)
@pytest.mark.python_replay
def test_a_kept_output_that_a_hidden_kernel_changes_is_made_again(fate: CheckpointPolicy, kind: str) -> None:
    block = Block()
    wanted = gradients(block, block)
    policy = keeps(fate) if kind == "function" else ["aten.mm"]
    wrapped = hp.checkpoint_wrapper(block, policy_fn=policy, swap_config=hp.SwapConfig(min_bytes=1, tail_bytes=0))
    with simulated_accelerator() if fate is CheckpointPolicy.MUST_SWAP else contextlib.nullcontext():
        for _ in range(3):
            before = hp.stats()
            assert all(map(torch.equal, gradients(wrapped, block), wanted))
            found = hp.stats().since(before).replayed_ops.get("changed_unseen")
            assert found == 1, "the first product alone, in the first call and in later ones"


def test_a_sequence_of_ops_that_was_seen_is_not_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    original = unseen_writes._sums

    def count(flat: torch.Tensor) -> torch.Tensor:
        sums.append(flat.numel())
        return original(flat)

    monkeypatch.setattr(unseen_writes, "_sums", count)
    block = Block()
    block.rotates = False
    wrapped = hp.checkpoint_wrapper(block, policy_fn=keeps(CheckpointPolicy.MUST_SAVE))
    gradients(wrapped, block)
    assert sums == [512, 1024, 512, 1024], "two products, when they ran and at the end"
    gradients(wrapped, block)
    assert len(sums) == 4


def test_a_branch_that_is_taken_later_is_watched_from_where_it_begins() -> None:
    """The first product is kept before the branch begins, and changed behind it."""

    class ChangedLater(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.first(x)
            y = q.cos() if self.rotates else q.sin()
            if self.rotates:
                q = Rotate.apply(q).transpose(0, 1)
            z: torch.Tensor = (y.transpose(0, 1) * q.exp().transpose(0, 1)) @ self.last.weight.T
            return z

    block = ChangedLater()
    wrapped = hp.checkpoint_wrapper(block, policy_fn=keeps(CheckpointPolicy.MUST_SAVE))
    for rotates in (False, True, False, True):
        block.rotates = rotates
        assert all(map(torch.equal, gradients(wrapped, block), gradients(block, block)))


def test_a_change_that_torch_sees_is_none_of_these() -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.first(x)
            q += 1
            y: torch.Tensor = self.last(q.transpose(0, 1)).tanh()
            return y

    block = InPlace()
    wrapped = hp.checkpoint_wrapper(block, policy_fn=keeps(CheckpointPolicy.MUST_SAVE))
    before = changed_unseen()
    assert all(map(torch.equal, gradients(wrapped, block), gradients(block, block)))
    assert changed_unseen() == before


def test_a_change_that_torch_sees_does_not_hide_an_earlier_one_that_it_does_not() -> None:
    class Both(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.first(x)
            halve(q)
            q += 1
            y: torch.Tensor = self.last(q.transpose(0, 1).sin()).tanh()
            return y

    block = Both()
    wrapped = hp.checkpoint_wrapper(block, policy_fn=keeps(CheckpointPolicy.MUST_SAVE))
    for _ in range(2):
        before = changed_unseen()
        assert all(map(torch.equal, gradients(wrapped, block), gradients(block, block)))
        assert changed_unseen() == before + 1


def test_a_random_op_whose_output_is_changed_draws_the_same_again() -> None:
    class Drops(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            noise = torch.rand_like(x)
            dropped = Rotate.apply(torch.nn.functional.dropout(self.first(x), 0.5))
            y: torch.Tensor = self.last((dropped * torch.rand(8)).sin() * noise.T).tanh()
            return y

    block = Drops()
    names = ("mm", "native_dropout", "bernoulli", "mul", "rand")

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = any(name in str(op) for name in names)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    wrapped = hp.checkpoint_wrapper(block, policy_fn=policy)
    for _ in range(2):
        before = changed_unseen()
        assert all(map(torch.equal, gradients(wrapped, block), gradients(block, block)))
        assert changed_unseen() == before + 1


@pytest.mark.parametrize("kind", ["lambda", "partial", "number", "argument"])
@pytest.mark.parametrize(
    "policy", [None, ["aten.mm"], keeps(CheckpointPolicy.MUST_SAVE)], ids=["all", "names", "function"]
)
def test_what_is_known_of_one_block_is_not_believed_of_another(kind: str, policy: Any) -> None:
    """One function runs both blocks, which run the same ops. Only the second has a hidden kernel."""

    class MaybeScaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.first(x)
            if self.rotates:
                halve(q)
            y: torch.Tensor = self.last((q * q).transpose(0, 1)).tanh()
            return y

    blocks = nn.ModuleList([MaybeScaled(), MaybeScaled()])
    blocks[0].rotates = False

    def by_number(number: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = blocks[number](x)
        return y

    def run(number: int) -> Any:
        block = blocks[number]
        return {
            "lambda": lambda x: hp.checkpoint(lambda y: block(y), x, policy_fn=policy),
            "partial": lambda x: hp.checkpoint(functools.partial(by_number, number), x, policy_fn=policy),
            "number": lambda x: hp.checkpoint(lambda y: blocks[number](y), x, policy_fn=policy),
            "argument": lambda x: hp.checkpoint(by_number, number, x, policy_fn=policy),
        }[kind]

    for _ in range(2):
        for number, block in enumerate(blocks):
            assert all(map(torch.equal, gradients(run(number), block), gradients(block, block))), number


@pytest.mark.parametrize(
    "policy", [None, ["aten.mm"], keeps(CheckpointPolicy.MUST_SAVE)], ids=["all", "names", "function"]
)
def test_with_verify_nothing_is_believed_of_an_earlier_call(policy: Any) -> None:
    """The ops are the same in both calls; the second has a hidden kernel."""

    class Sometimes(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.first(x)
            if self.rotates:
                halve(q)
            y: torch.Tensor = self.last((q * q).transpose(0, 1)).tanh()
            return y

    block = Sometimes()
    wrapped = hp.checkpoint_wrapper(block, policy_fn=policy, swap_config=hp.SwapConfig(verify=True))
    for rotates in (False, True, False):
        block.rotates = rotates
        assert all(map(torch.equal, gradients(wrapped, block), gradients(block, block)))


def test_contexts_for_torchs_checkpoint_are_watched_in_every_call() -> None:
    """They do not say which region they are for."""
    quiet, changed = Block(), Block()
    quiet.rotates = False
    contexts = functools.partial(get_platform().create_selective_checkpoint_contexts, keeps(CheckpointPolicy.MUST_SAVE))
    for block in (quiet, changed, quiet, changed):

        def run(x: torch.Tensor, block: nn.Module = block) -> Any:
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)

        assert all(map(torch.equal, gradients(run, block), gradients(block, block)))


def test_where_changed_values_are_used_as_they_are_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen_writes, "_sums", None)  # a call would raise
    contexts = functools.partial(
        get_platform().create_selective_checkpoint_contexts,
        keeps(CheckpointPolicy.MUST_SAVE),
        allow_cache_entry_mutation=True,
    )
    block = Block()
    block.rotates = False
    with hp.configure(verify=True):
        run = functools.partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False, context_fn=contexts)
        assert all(map(torch.equal, gradients(run, block), gradients(block, block)))


@pytest.mark.parametrize("places", [(0, 2048), (0, 1), (3, 5 * 2048 + 7), (64 * 2048, 64 * 2048 + 1)])
def test_values_that_change_places_are_noticed(places: tuple[int, int]) -> None:
    words = torch.arange(64 * 2048 + 5, dtype=torch.int64)
    before = unseen_writes._sums(words.view(torch.uint8))
    first, second = places
    words[[first, second]] = words[[second, first]]
    assert not torch.equal(unseen_writes._sums(words.view(torch.uint8)), before)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 2048 * 8, 2048 * 8 + 3])
def test_every_byte_counts(nbytes: int) -> None:
    flat = torch.zeros(nbytes, dtype=torch.uint8)
    before = unseen_writes._sums(flat)
    for at in {0, nbytes // 2, nbytes - 1}:
        flat[at] = 1
        assert not torch.equal(unseen_writes._sums(flat), before)
        flat[at] = 0


def test_an_op_that_other_ranks_take_part_in_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    op = torch.ops.aten.mm.default
    facts = facts_of(op)
    monkeypatch.setitem(KNOWN, id(op), type(facts)(**{**vars(facts), "can_run_again": False}))
    wrapped = hp.checkpoint_wrapper(block, policy_fn=keeps(CheckpointPolicy.MUST_SAVE))
    with pytest.raises(
        InPlaceChangeError, match=r"cannot keep the output of aten.mm.default number 1.*Give that kernel a copy"
    ):
        gradients(wrapped, block)
