"""What a profile says of a step: bytes as arithmetic, kinds, cuts, predictions that are the measurement; and no trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError, PlanError
from hyper_parallel.planner.block_trace import LEFT_ALONE
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.testing import simulated_accelerator

from .models import BATCH, FAMILIES, HEADS, LENGTH, VOCABULARY, WIDTH, Layer, transformer, tree_of

ACTIVATION = BATCH * LENGTH * WIDTH * 4


@pytest.fixture(scope="module")
def profile() -> Profile:
    model, step = transformer()
    model.eval()  # without dropout the arithmetic is short
    with simulated_accelerator():
        return hp.profile_memory(model, step, steps=1)


def test_bytes_are_those_of_the_model(profile: Profile) -> None:
    model, _ = transformer()
    weights = sum(p.nbytes for p in model.parameters())
    assert profile.base.weights == weights
    assert profile.base.gradients == weights
    assert profile.base.optimizer == 0
    assert profile.base.other == BATCH * LENGTH * 8 + 4  # the token ids, and the buffer
    assert [block.name for block in profile.blocks] == [f"layers.{number}" for number in range(4)]
    assert [block.input_bytes for block in profile.blocks] == [ACTIVATION] * 4
    assert profile.epilogue.kept_bytes >= BATCH * LENGTH * VOCABULARY * 4  # the logits, at least


def test_all_layers_are_one_kind_with_two_cuts(profile: Profile) -> None:
    (kind,) = profile.kinds
    assert kind.name == "Layer"
    assert [[region.module for region in cut.regions] for cut in kind.cuts] == [[""], ["attn", "mlp"]]
    whole, halves = kind.cuts
    assert whole.regions[0].stop_op == halves.regions[1].stop_op == len(kind.ops)
    assert halves.regions[0].stop_op == halves.regions[1].first_op
    (between,) = halves.regions[1].inputs
    assert kind.ops[between].name == "add"
    assert kind.ops[between].output_bytes == ACTIVATION


def test_what_backward_keeps_of_a_layer(profile: Profile) -> None:
    kept = {op.label: op.kept_bytes for op in profile.kinds[0].ops if op.kept_bytes}
    row = BATCH * LENGTH * 4  # one float per token: a mean or a reciprocal deviation of a norm
    assert kept == {
        "attn.norm::native_layer_norm#0": ACTIVATION + 2 * row,
        "attn.qkv::addmm#0": 3 * ACTIVATION,
        "attn::_scaled_dot_product_flash_attention_for_cpu#0": ACTIVATION + HEADS * row,
        "attn::add#0": ACTIVATION,
        "mlp.norm::native_layer_norm#1": ACTIVATION + 2 * row,
        "mlp.up::addmm#2": 4 * ACTIVATION,
        "mlp::gelu#0": 4 * ACTIVATION,
    }
    assert profile.kinds[0].input_kept_by


def test_ops_say_what_they_are(profile: Profile) -> None:
    ops = {op.label: op for op in profile.kinds[0].ops}
    qkv = ops["attn.qkv::addmm#0"]
    assert (qkv.overload, qkv.is_keepable, qkv.is_random, qkv.output_bytes) == ("default", True, False, 3 * ACTIVATION)
    assert profile.kinds[0].ops[qkv.inputs[0]].name == "native_layer_norm"  # through the view between them
    assert ops["attn::_scaled_dot_product_flash_attention_for_cpu#0"].is_random
    views = [op for op in ops.values() if op.reason == "view"]
    assert views
    assert all(not op.is_keepable and op.output_bytes == 0 for op in views)
    assert all(op.seconds > 0 for op in ops.values())
    assert sum(op.backward_seconds for op in ops.values()) > 0


@pytest.mark.parametrize("family", ["transformer", "llama", "gpt2"])
def test_the_step_left_alone_is_predicted_to_the_percent(family: str) -> None:
    model, step = FAMILIES[family]()
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
    alone = StepSimulator(profile).simulate([LEFT_ALONE] * len(profile.blocks), profile.engine)
    assert profile.measured.under == "none"
    assert alone.peak_bytes == pytest.approx(profile.measured.peak_bytes, rel=0.05)


def test_layers_that_differ_are_kinds_of_their_own() -> None:
    model, _ = transformer()
    model.layers[1].mlp.up = nn.Linear(WIDTH, 6 * WIDTH)
    model.layers[1].mlp.down = nn.Linear(6 * WIDTH, WIDTH)
    ids = torch.ones(BATCH, LENGTH, dtype=torch.long)
    with simulated_accelerator():
        profile = hp.profile_memory(model, lambda: model(ids).sum().backward(), steps=1)
    assert [block.kind for block in profile.blocks] == [0, 1, 0, 0]
    up = [next(op for op in kind.ops if op.module == "mlp.up" and op.output_bytes) for kind in profile.kinds]
    assert [op.output_bytes for op in up] == [4 * ACTIVATION, 6 * ACTIVATION]


def test_a_layer_that_is_called_twice_is_two_blocks() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in [*self.layers, self.layers[0]]:
                x = layer(x)
            return x

    model, x = Loop(), torch.randn(BATCH, LENGTH, WIDTH)
    with simulated_accelerator():
        profile = hp.profile_memory(model, lambda: model(x).sum().backward(), steps=1)
    assert [block.name for block in profile.blocks] == ["layers.0", "layers.1", "layers.0"]


def test_a_profile_is_saved_and_loaded(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_trial_steps_leave_no_trace() -> None:
    model, step = transformer()
    batch_norm = nn.BatchNorm1d(WIDTH)
    model.layers[1].mlp.register_module("extra", batch_norm)
    model.layers[1].mlp.register_forward_hook(lambda module, args, output: batch_norm(output.mT).mT)
    step()
    gradients = {name: (id(p.grad), p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: (id(b), b.clone()) for name, b in model.named_buffers()}
    tree, values = tree_of(model), {name: p.clone() for name, p in model.named_parameters()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    with simulated_accelerator():
        hp.profile_memory(model, step, steps=1)
    assert tree_of(model) == tree
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name])
        assert (id(p.grad), True) == (gradients[name][0], torch.equal(p.grad, gradients[name][1])), name
    for name, b in model.named_buffers():
        assert (id(b), True) == (buffers[name][0], torch.equal(b, buffers[name][1])), name


def test_gradients_that_did_not_exist_do_not_exist_after() -> None:
    model, step = transformer()
    with simulated_accelerator():
        hp.profile_memory(model, step, steps=1)
    assert all(p.grad is None for p in model.parameters())


def test_a_step_that_trains_is_refused_by_name() -> None:
    model, step = transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training_step() -> None:
        step()
        optimizer.step()

    tree = tree_of(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with simulated_accelerator():
        with pytest.raises(PlanError, match=r"profile_memory: the step calls SGD\.step\(\)"):
            hp.profile_memory(model, training_step, steps=1)
    assert tree_of(model) == tree
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_step_that_changes_weights_by_hand_is_refused_by_name() -> None:
    model, step = transformer()

    def training_step() -> None:
        step()
        with torch.no_grad():
            model.embed.weight.mul_(0.5)

    with simulated_accelerator():
        with pytest.raises(
            PlanError, match=r"left a trace that cannot be undone: parameters were changed \(embed\.weight\)"
        ):
            hp.profile_memory(model, training_step, steps=1)


def test_optimizer_states_are_named() -> None:
    model, step = transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    with simulated_accelerator():
        step()
        optimizer.step()
        optimizer.zero_grad()
        profile = hp.profile_memory(model, step, steps=1)
    assert profile.base.optimizer == 2 * profile.base.weights


def test_an_error_in_the_step_leaves_the_model_as_it_was() -> None:
    model, step = transformer()
    calls = []

    def failing() -> None:
        calls.append(1)
        step()
        if len(calls) == 3:
            raise KeyError("the third batch")

    tree = tree_of(model)
    with simulated_accelerator(), pytest.raises(KeyError, match="the third batch"):
        hp.profile_memory(model, failing, steps=1)
    assert tree_of(model) == tree
    assert all(p.grad is None for p in model.parameters())
    assert float(model.forwards) == 0


def test_what_cannot_be_profiled() -> None:
    model, step = transformer()
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(PlanError, match=r"the model is on cpu, .*simulated_accelerator\(\)"):
        hp.profile_memory(model, step)
    with simulated_accelerator():
        with pytest.raises(PlanError, match=r"never ran a backward through the blocks"):
            hp.profile_memory(model, lambda: model(ids).sum().item())
        with pytest.raises(PlanError, match=r"ran none of the model's blocks"):
            hp.profile_memory(model, lambda: None)
        with pytest.raises(PlanError, match=r"has no repeated blocks"):
            hp.profile_memory(nn.Linear(2, 2), step)
        with pytest.raises(TypeError, match=r"step must be a callable"):
            hp.profile_memory(model, None)
        with pytest.raises(ValueError, match=r"steps says how many steps are timed"):
            hp.profile_memory(model, step, steps=0)
    assert all(p.grad is None for p in model.parameters())


def test_a_step_that_does_not_fit_is_profiled_all_the_same() -> None:
    """A device that is full at 75 % of what the step left alone needs."""
    model, step = transformer()
    with simulated_accelerator():
        whole = hp.profile_memory(model, step, steps=1)
    limit = whole.base.total + int(0.75 * (whole.measured.peak_bytes - whole.base.total))
    with simulated_accelerator() as sim:

        def full(*_: object) -> None:
            if sim.live_bytes > limit:
                raise MemoryError(f"{sim.live_bytes} bytes of {limit}")

        step()
        hooks = [layer.register_forward_hook(full) for layer in model.layers]
        with pytest.raises(MemoryError, match=f"bytes of {limit}"):
            step()
        model.zero_grad()
        profile = hp.profile_memory(model, step, steps=1)
        for hook in hooks:
            hook.remove()
    assert profile.measured.under == "every block replayed"
    assert profile.measured.peak_bytes < limit
    kept = [[op.kept_bytes for op in one.kinds[0].ops] for one in (profile, whole)]
    assert kept[0] == kept[1]
    assert hp.plan_memory(profile, limit).predicted_peak_bytes <= limit


def test_a_step_that_fits_no_way_says_so() -> None:
    model, step = transformer()
    tree = tree_of(model)

    def full(*_: object) -> None:
        raise MemoryError("full")

    with simulated_accelerator():
        hook = model.layers[2].register_forward_hook(full)
        with pytest.raises(
            BudgetTooSmallError, match=r"does not fit on simulated accelerator even with every block replayed"
        ):
            hp.profile_memory(model, step, steps=1)
        hook.remove()
    assert tree_of(model) == tree
    assert all(p.grad is None for p in model.parameters())
