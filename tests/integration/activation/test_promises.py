"""The promises of the engine that are no single failure: in-place guards, leaks, policies, wrappers that leave no trace."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import ActivationPolicy, AsyncSaveOnCpu
from hyper_parallel.errors import InPlaceChangeError, PolicyError
from hyper_parallel.testing import simulated_accelerator

from .helpers import collector_off, live_records, same_gradients, step_gradients, storage_ref
from .kinds import KINDS, Kind, mixed_policy, swap_everything
from .models import WIDTH, Block, Chain
from .scenario import batch

TIGHT: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 0}


class _SavesThenChanges(nn.Module):
    """Saves ``middle`` (exp saves its result), then changes it in place: plain torch raises in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = x.exp()
        out = middle.sin()
        middle.add_(1)
        return out


@pytest.mark.parametrize(
    "settings", [TIGHT, {"tail_bytes": 10**6}, {"min_bytes": 10**6}], ids=["swapped", "tail", "kept"]
)
def test_a_change_where_plain_raises_raises_naming_op_and_module(settings: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _SavesThenChanges()(batch()).sum().backward()
    with simulated_accelerator(**settings):
        out = hp.swap_wrapper(_SavesThenChanges())(batch())
        with pytest.raises(
            InPlaceChangeError,
            match=r"swap of _SavesThenChanges: a saved tensor \(4, 8\) torch\.float32, wanted by \w+Backward0, was changed",
        ):
            out.sum().backward()
        got = step_gradients(hp.swap_wrapper(nn.Linear(WIDTH, WIDTH)), batch())
    assert got[-1].isfinite().all()


@pytest.mark.parametrize(
    "settings", [TIGHT, {"tail_bytes": 10**6}, {"min_bytes": 10**6}], ids=["swapped", "tail", "kept"]
)
@pytest.mark.parametrize("changed", ["input", "output", "view", "data"])
def test_a_change_from_outside_is_never_silent(settings: dict[str, Any], changed: str) -> None:
    """The caller changes a saved input or output after forward: raise as plain does; ``.data`` hides it from both."""
    with simulated_accelerator(**settings):
        x = batch()
        value = x * 1
        out = hp.swap_wrapper(lambda v: v.sin().exp())(value)
        target = {"input": value, "output": out, "view": out[:, 1:], "data": value}[changed]
        with torch.no_grad():
            if changed == "data":
                target.data = target.data + 1
            else:
                target.mul_(2)
        if changed == "data":
            out.sum().backward()
            expected = batch()
            expected.sin().exp().sum().backward()
            assert torch.equal(x.grad, expected.grad)
        else:
            with pytest.raises(InPlaceChangeError, match="was changed in place after it was saved"):
                out.sum().backward()


@pytest.mark.parametrize("tail_bytes", [0, 10**6])
def test_a_change_before_the_save_is_fine(tail_bytes: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        z = y.sin()
        z.mul_(3)
        return z.exp_()

    one, two = batch(), batch()
    function(one).sum().backward()
    with simulated_accelerator(tail_bytes=tail_bytes, window_bytes=0):
        hp.swap_wrapper(function)(two).sum().backward()
    assert torch.equal(one.grad, two.grad)


def test_two_versions_of_one_storage_are_two_records() -> None:
    """Saved, changed, saved again: the first save is guarded, the second one is the new value."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        old = y.sin()
        y.add_(1)
        return old, y.sin()

    one, two = batch(), batch()
    function(one)[1].sum().backward()
    with simulated_accelerator(**TIGHT):
        old, new = hp.swap_wrapper(function)(two)
        new.sum().backward(retain_graph=True)
        assert torch.equal(one.grad, two.grad)
        with pytest.raises(InPlaceChangeError, match="was changed in place"):
            old.sum().backward()


def test_a_kept_output_makes_no_cycle() -> None:
    """What exp saves is its own output: a graph that holds it would never die."""
    with simulated_accelerator(min_bytes=10**6), collector_off():
        out = hp.swap_wrapper(torch.exp)(batch())
        storage = storage_ref(out)
        del out
        assert storage.expired()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("end", ["dropped", "backward", "retained", "raised"])
def test_nothing_is_left_without_the_collector(kind: Kind, end: str) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("told to")

    with simulated_accelerator(**TIGHT) as sim, collector_off():
        model = Chain([kind.layer(Block()) for _ in range(2)])
        x = batch()
        kind.forward(model, x).sum().backward()
        x.grad = None
        baseline = sim.live_bytes
        middle = model.layers[0](x)
        loss = kind.forward(model, Raises.apply(middle) if end == "raised" else middle).sum()
        records, storage = live_records(), storage_ref(middle)
        assert records or kind.name == "checkpoint"
        if end == "backward":
            loss.backward()
        elif end == "retained":
            loss.backward(retain_graph=True)
        elif end == "raised":
            with pytest.raises(ArithmeticError, match="told to"):
                loss.backward()
        x.grad = None
        del loss, middle
        assert storage.expired()
        assert [record() for record in records if record() is not None] == []
        assert sim.live_bytes == baseline
        assert hp.stats().live_records == 0


@pytest.mark.parametrize("answer", ["nonsense", 4, 1, None, TorchPolicy.MUST_SAVE])
def test_an_unknown_answer_of_an_op_policy_names_the_op_and_the_next_step_works(answer: Any) -> None:
    answers = [answer]
    module = nn.Linear(WIDTH, WIDTH)
    layer = hp.checkpoint_wrapper(
        module, policy_fn=lambda ctx, op, *args, **kwargs: answers[0] if "mm" in str(op) else CheckpointPolicy.MUST_SWAP
    )
    with simulated_accelerator(**TIGHT), collector_off():
        with pytest.raises(
            PolicyError,
            match=r"checkpoint of Linear: the policy answered .* for op aten\.addmm\.default; known answers are",
        ):
            layer(batch())
        assert hp.stats().live_records == 0
        answers[0] = CheckpointPolicy.MUST_SWAP
        got = step_gradients(layer, batch())
    same_gradients(got, step_gradients(module, batch()))


@pytest.mark.parametrize(
    "answer", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE, True, 1, "swap"]
)
def test_an_unknown_answer_of_a_tensor_policy_names_the_module_and_the_next_step_works(answer: Any) -> None:
    answers = [answer]
    module = nn.Linear(WIDTH, WIDTH)
    layer = hp.swap_wrapper(module, lambda tensor: answers[0])
    with simulated_accelerator(**TIGHT):
        with pytest.raises(PolicyError, match=r"swap of Linear: the tensor policy answered .* for a tensor \(4, 8\)"):
            layer(batch())
        answers[0] = None
        got = step_gradients(layer, batch())
    same_gradients(got, step_gradients(module, batch()))


@pytest.mark.parametrize("given", ["mm", 3, {"mm": True}, [3], [None], b"mm"])
def test_what_is_no_policy_is_refused(given: Any) -> None:
    with pytest.raises(PolicyError, match=r"checkpoint of Linear: .*(a policy is a function|list of ops to save)"):
        hp.checkpoint_wrapper(nn.Linear(WIDTH, WIDTH), policy_fn=given)(batch())


def test_what_is_no_tensor_policy_is_refused() -> None:
    with pytest.raises(PolicyError, match="swap of Linear: the tensor policy must be a function of one tensor"):
        hp.swap_wrapper(nn.Linear(WIDTH, WIDTH), ["mm"])(batch())


@pytest.mark.parametrize("call", [hp.checkpoint, hp.checkpoint_wrapper])
def test_reentrant_checkpoints_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        call(nn.Linear(WIDTH, WIDTH), batch(), use_reentrant=True) if call is hp.checkpoint else call(
            nn.Linear(WIDTH, WIDTH), use_reentrant=True
        )
    layer = hp.checkpoint_wrapper(nn.Linear(WIDTH, WIDTH), use_reentrant=False)
    layer(batch()).sum().backward()


def test_a_policy_is_asked_once_per_op_instance_and_in_forward_only() -> None:
    asked: list[tuple[str, bool]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append((op.overloadpacket.__name__, ctx.is_recompute))
        return CheckpointPolicy.MUST_RECOMPUTE

    with simulated_accelerator(**TIGHT):
        loss = hp.checkpoint(lambda x: x.exp().sin().exp(), batch(), policy_fn=policy).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert asked == [("exp", False), ("sin", False), ("exp", False)]


def test_context_fn_is_composed_around_the_policy() -> None:
    entered: list[str] = []

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *exc: object) -> None:
            entered.append(f"end of {self.name}")

    for policy in (None, swap_everything):
        del entered[:]
        with simulated_accelerator(**TIGHT):
            out = hp.checkpoint(
                torch.sin, batch(), policy_fn=policy, context_fn=lambda: (Context("forward"), Context("replay"))
            )
            assert entered == ["forward", "end of forward"]
            out.sum().backward()
        assert entered == ["forward", "end of forward", "replay", "end of replay"]


@pytest.mark.parametrize("policy", [*ActivationPolicy, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
def test_old_style_code_runs_unchanged(policy: Any) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.attn(x))

    plain = Chain([Layer() for _ in range(3)])
    ours = copy.deepcopy(plain)
    for index, layer in enumerate(ours.layers):
        layer.attn = hp.swap_wrapper(layer.attn, lambda tensor: policy)
        ours.layers[index] = hp.checkpoint_wrapper(layer, policy_fn=mixed_policy, swap_inputs=True)
    for a, b in zip(ours.layers[:-1], ours.layers[1:]):
        hp.SwapManager().set_forward_prefetch_layer(a, b)
    with simulated_accelerator(window_bytes=300, prefetch_bytes=300):
        for _ in range(2):
            got = step_gradients(ours, batch())
    same_gradients(got, step_gradients(plain, batch()))


# ---------------------------------------------------------------------- wrappers leave no trace


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(self.first(x)) * self.scale


def _wrapped(model: _Model) -> Any:
    ours = copy.deepcopy(model)
    ours.first.up = hp.swap_wrapper(ours.first.up)
    ours.first = hp.checkpoint_wrapper(hp.swap_wrapper(ours.first), policy_fn=mixed_policy)
    ours.parts = hp.swap_wrapper(ours.parts)
    return hp.checkpoint_wrapper(ours, swap_inputs=True)


def test_names_of_the_whole_model_are_those_without_wrappers() -> None:
    plain = _Model()
    ours = _wrapped(plain)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in ours.named_children()] == [name for name, _ in plain.named_children()]
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert ours.state_dict()._metadata == plain.state_dict()._metadata


def test_state_dicts_go_both_ways() -> None:
    plain, other = _Model(), _Model()
    ours = _wrapped(other)
    assert ours.load_state_dict(plain.state_dict()).missing_keys == []
    for key, value in ours.state_dict().items():
        assert torch.equal(value, plain.state_dict()[key])
    fresh = _Model()
    fresh.load_state_dict(ours.state_dict())
    assert torch.equal(fresh.first.up.weight, plain.first.up.weight)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        ours.load_state_dict({})
    ours.load_state_dict(plain.state_dict(), assign=True)
    with simulated_accelerator(**TIGHT):
        got = step_gradients(ours, batch())
    assert all(tensor is not None for tensor in got)


def test_attributes_indexing_and_iteration_are_the_modules_own() -> None:
    sequence = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    ours = hp.checkpoint_wrapper(hp.swap_wrapper(sequence))
    assert ours[0] is sequence[0]
    assert len(ours) == 2
    assert list(ours) == list(sequence)
    ours.answer = 42
    assert sequence.answer == 42
    del ours.answer
    assert not hasattr(sequence, "answer")
    assert not hasattr(ours, "answer")
    with pytest.raises(AttributeError, match="answer"):
        _ = ours.answer
    ours[1] = nn.Tanh()
    assert isinstance(sequence[1], nn.Tanh)
    ours.extra = nn.Linear(2, 2)
    assert "extra.weight" in dict(sequence.named_parameters())
    assert "extra.weight" in dict(ours.named_parameters())
    linear = hp.swap_wrapper(nn.Linear(3, 5))
    assert (linear.in_features, linear.out_features) == (3, 5)
    linear.weight = nn.Parameter(torch.zeros(5, 3))
    assert not linear(torch.rand(2, 3)).sub(linear.bias).any()
    assert linear.wrapped_module.weight is linear.weight


def test_a_layer_of_a_wrapped_list_is_deleted() -> None:
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.ReLU()])
    ours = hp.checkpoint_wrapper(hp.swap_wrapper(layers))
    del ours[0]
    assert [type(layer) for layer in layers] == [type(layer) for layer in ours] == [nn.ReLU]


def test_moving_casting_and_modes_reach_the_module() -> None:
    ours = _wrapped(_Model())
    assert ours.to(torch.float64) is ours
    assert {value.dtype for value in ours.parameters()} == {torch.float64}
    assert ours.eval() is ours
    assert not any(module.training for module in ours.modules())
    assert not ours.first.wrapped_module.training
    ours.train()
    assert all(module.training for module in ours.modules())
    ours.requires_grad_(False)
    assert not any(value.requires_grad for value in ours.parameters())
    ours.float().requires_grad_(True).zero_grad()
    seen = []
    ours.apply(lambda module: seen.append(type(module)))
    plain_seen = []
    _Model().apply(lambda module: plain_seen.append(type(module)))
    assert len(seen) == len(plain_seen)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_deepcopy_pickle_and_torch_save(kind: Kind) -> None:
    model = Chain([kind.layer(Block()), kind.layer(Block())])
    expected = step_gradients(model, batch())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for twin in twins:
        with simulated_accelerator(**TIGHT):
            same_gradients(step_gradients(twin, batch()), expected)
        with torch.no_grad():
            next(iter(twin.parameters())).add_(1)
    same_gradients(step_gradients(model, batch()), expected)


def test_hooks_on_a_wrapper_fire_once_and_see_the_call() -> None:
    layer = hp.swap_wrapper(nn.Linear(WIDTH, WIDTH))
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
    layer.register_forward_hook(lambda module, args, out: calls.append("after"))
    layer.register_full_backward_hook(lambda module, gin, gout: calls.append("backward"))
    with simulated_accelerator(**TIGHT):
        layer(batch()).sum().backward()
    assert calls == ["before", "after", "backward"]


def test_async_save_on_cpu_takes_a_policy() -> None:
    with simulated_accelerator(**TIGHT) as sim:
        with AsyncSaveOnCpu(lambda tensor: ActivationPolicy.SAVE):
            kept = batch().exp()
        assert sim.events == []
        kept.sum().backward()
        with AsyncSaveOnCpu():
            swapped = batch().exp()
        assert [what for what, _ in sim.events] == ["offload", "drop"]
        swapped.sum().backward()


def test_swap_tensor_wrapper_marks_what_leaves_and_names_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        middle = x.sin()
        same = hp.swap_tensor_wrapper({"a": [middle], "b": 3}, tag="middle")
        assert same["a"][0] is middle
        return (middle.exp() * middle).cos()

    one, two = batch(), batch()
    function(one).sum().backward()
    with simulated_accelerator(**TIGHT) as sim:
        function(two).sum().backward()
        assert count(sim.events) == 1, "only the marked value leaves where nothing else swaps"
        assert hp.stats().bytes_by_tag == {"middle": one.nbytes}
        with torch.no_grad():
            function(batch())
        hp.swap_wrapper(function, lambda tensor: ActivationPolicy.SAVE)(batch()).sum().backward()
        assert hp.stats().bytes_by_tag == {"middle": 2 * one.nbytes}, "a mark overrules the policy around it"
        assert count(sim.events) == 2
    assert torch.equal(one.grad, two.grad)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_reset_takes_off_the_hooks_of_a_mark_whose_tensor_is_gone() -> None:
    hp.swap_tensor_wrapper(torch.ones(3, requires_grad=True) * 2)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    hp.SwapManager().reset()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def count(events: list[tuple[str, int]]) -> int:
    return sum(what == "offload" for what, _ in events)
