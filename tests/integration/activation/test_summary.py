"""One line at the end of the first step: once, true, and silent when asked to be."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import native
from hyper_parallel.core.activation_checkpoint.calls import noop_context_fn
from hyper_parallel.core.activation_checkpoint.summary import LOGGER, is_wanted
from hyper_parallel.testing import simulated_accelerator

VALUE_BYTES = 1024 * 256 * 4


@pytest.fixture(autouse=True)
def fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    hp.SwapManager().reset()
    yield
    hp.SwapManager().reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x))


def stack(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(wrap(Layer()) for _ in range(3)))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER.name]


def step(model: nn.Module) -> None:
    model(torch.randn(1024, 256)).sum().backward()


def test_it_is_said_once_with_what_was_swapped_and_why_the_rest_stayed(caplog: pytest.LogCaptureFixture) -> None:
    with simulated_accelerator(timing="eager", min_bytes=VALUE_BYTES):
        model = stack(hp.swap_wrapper)
        step(model)
        swapped = hp.stats().swapped_out_bytes
        step(model)
    assert swapped > 0
    (line,) = lines(caplog)
    assert line.startswith("hyper_parallel: first step: peak ")
    assert f"; swapped {swapped / 2**20:.2f} MiB" in line
    assert line.endswith("stayed where it was: below_min_bytes 512.00 KiB")


def test_nothing_swapped_is_said_plainly(caplog: pytest.LogCaptureFixture) -> None:
    step(stack(hp.swap_wrapper))  # host tensors, and no disk was named
    (line,) = lines(caplog)
    assert line.startswith("hyper_parallel: first step: nothing was swapped; stayed where it was: already_on_host")


WRAPS = pytest.mark.parametrize(
    "wrap",
    [hp.checkpoint_wrapper, lambda layer: lambda x: hp.checkpoint(layer, x)],
    ids=["wrapper", "function"],
)
Wrap = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]


def step_of_three(wrap: Wrap) -> None:
    x = torch.randn(8, 256)
    for layer in [wrap(Layer()) for _ in range(3)]:
        x = layer(x)
    x.sum().backward()


@WRAPS
def test_regions_made_again_are_counted(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    step_of_three(wrap)
    (line,) = lines(caplog)
    before = "hyper_parallel: first step: nothing was swapped, recomputed 3 regions"
    if native.load() is None:
        assert line == f"{before}; they run Python again: no native recorder: {native.why_not()}"
    else:
        assert line.startswith(f"{before} (")
        assert line.endswith(" from a tape")


@pytest.mark.python_replay
@WRAPS
def test_without_a_recorder_the_line_says_how_to_get_it(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    step_of_three(wrap)
    assert lines(caplog) == [
        "hyper_parallel: first step: nothing was swapped, recomputed 3 regions; they run Python again: "
        f"no native recorder: {native.why_not()}"
    ]
    assert "HYPER_PARALLEL_NATIVE" in lines(caplog)[0]


def recomputes(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def test_the_most_frequent_reason_why_python_runs_again_is_named(caplog: pytest.LogCaptureFixture) -> None:
    inner = Layer()

    def around(x: torch.Tensor) -> torch.Tensor:
        return sum(hp.checkpoint(inner, x) for _ in range(5)) * x

    x = torch.randn(8, 256, requires_grad=True)
    x = hp.checkpoint(around, hp.checkpoint(Layer(), x), policy_fn=recomputes)  # with five regions inside it
    hp.checkpoint(Layer(), hp.checkpoint(Layer(), x, policy_fn=recomputes), context_fn=noop_context_fn).sum().backward()
    (line,) = lines(caplog)
    counted = dict(hp.stats().regions_from_python)
    if native.load() is None:
        assert counted == {f"no native recorder: {native.why_not()}": 9}
        assert "recomputed 9 regions (" in line
        assert line.endswith(f"; they run Python again: no native recorder: {native.why_not()}")
    else:
        function = "a policy that is a function of an op's arguments"
        assert counted == {function: 2, "the option context_fn": 1, "inside a region whose Python runs again": 5}
        assert hp.stats().regions_from_tape == 1
        assert ", 1 from a tape; 8 regions run Python again: " in line
        assert line.endswith(f": {function} (2 more in stats().regions_from_python)")


def test_a_forward_without_a_backward_says_nothing_and_does_not_use_the_line_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = stack(hp.swap_wrapper)
    with torch.no_grad():
        model(torch.randn(8, 256))
    model(torch.randn(8, 256))
    assert lines(caplog) == []
    step(model)
    assert len(lines(caplog)) == 1


def test_an_output_that_is_pickled_before_the_backward_warns_of_nothing() -> None:
    output = stack(hp.swap_wrapper)(torch.randn(8, 256))
    assert torch.equal(pickle.loads(pickle.dumps(output)), output)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler's own
def test_under_compile_it_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    step(stack(lambda layer: hp.swap_wrapper(torch.compile(layer, backend="eager"))))
    assert len(lines(caplog)) == 1


def test_a_plan_brings_its_predicted_peak_and_trial_steps_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with simulated_accelerator(timing="eager", min_bytes=1024):
        model = nn.Sequential(*(Layer() for _ in range(12)))
        profile = hp.profile_memory(model, lambda: step(model), steps=1)
        assert lines(caplog) == []
        plan = hp.plan_memory(profile, profile.measured.peak_bytes - 2 * VALUE_BYTES, effort=0.2)
        before = hp.stats()
        with hp.apply_plan(model, plan):
            step(model)
        swapped = hp.stats().swapped_out_bytes - before.swapped_out_bytes
    (line,) = lines(caplog)
    assert before.swapped_out_bytes > 0, "trial steps must have counted something for this to mean anything"
    assert f"swapped {swapped / 2**20:.2f} MiB" in line
    assert line.count(f"predicted peak {plan.predicted_peak_bytes / 2**20:.2f} MiB") == 1


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


def simulated_peak(model: nn.Module) -> int:
    with simulated_accelerator(timing="eager", min_bytes=1) as device:
        model(torch.randn(8, 128, 64)).square().mean().backward()
    return int(device.peak_bytes)


@pytest.mark.parametrize(
    "wrap",
    [
        hp.checkpoint_wrapper,
        hp.swap_wrapper,
        lambda layer: hp.checkpoint_wrapper(layer, swap_inputs=True),
        lambda layer: hp.checkpoint_wrapper(layer, policy_fn=recomputes),
    ],
    ids=["recompute", "swap", "recompute, inputs swapped", "Python again"],
)
def test_the_line_says_by_how_much_the_peak_fell(wrap: Wrap, caplog: pytest.LogCaptureFixture) -> None:
    without = simulated_peak(encoder())
    assert lines(caplog) == []
    model = encoder()
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrap(layer)
    peak = simulated_peak(model)
    (line,) = lines(caplog)
    found = re.match(r"hyper_parallel: first step: peak (\S+) MiB instead of about (\S+) MiB \((-\d+)%\); ", line)
    assert found, line
    assert float(found[1]) == pytest.approx(peak / 2**20, abs=0.01)
    assert float(found[2]) == pytest.approx(without / 2**20, rel=0.15)
    assert int(found[3]) < -40


def test_what_was_applied_says_by_how_much_memory_fell_and_each_application_gets_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = encoder()
    with simulated_accelerator(timing="eager", min_bytes=1024):

        def one_step() -> None:
            model(torch.randn(8, 128, 64)).square().mean().backward()

        with hp.apply_rules(model, "boundary") as rules:
            assert "no step has run" in rules.summary()
            one_step()
            assert lines(caplog) == [rules.summary()]
        profile = hp.profile_memory(model, one_step, steps=1)
        plan = hp.plan_memory(profile, int(profile.measured.peak_bytes * 0.6), effort=0.2)
        with hp.apply_plan(model, plan) as applied:
            one_step()
    without = plan.untouched.peak_bytes / 2**20
    assert len(lines(caplog)) == 2
    assert f"instead of {without:.2f} MiB" in lines(caplog)[1]
    assert applied.summary().startswith(f"budget {plan.budget_bytes / 2**20:.2f} MiB: predicted peak ")
    assert f"instead of {without:.2f} MiB" in applied.summary()


def test_a_copied_or_pickled_wrapper_carries_nothing_of_it() -> None:
    model = stack(hp.checkpoint_wrapper)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step(twin)


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, True), ({"HYPER_PARALLEL_SUMMARY": "0"}, False), ({"RANK": "3"}, False)]
)
def test_when_it_is_wanted(environment: dict[str, str], expected: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert is_wanted(environment) is expected
    caplog.set_level(logging.ERROR, logger=LOGGER.name)
    assert is_wanted(environment) is False


BAR = """
import sys, torch, hyper_parallel as hp
from tqdm import tqdm
model = hp.checkpoint_wrapper(torch.nn.Linear(8, 8))
for _ in tqdm(range(3), mininterval=0, desc="steps", ncols=60):
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
"""


def test_beside_a_progress_bar_the_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    script = tmp_path / "train.py"
    script.write_text(BAR)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=True)
    shown = re.split(r"[\r\n]", done.stderr)
    assert [part for part in shown if "hyper_parallel: first step:" in part] == [
        part for part in shown if part.startswith("hyper_parallel: first step:") and "steps" not in part
    ]
    assert done.stderr.count("hyper_parallel: first step:") == 1


SCRIPT = """
import logging, sys, torch, hyper_parallel as hp
if "closed" in sys.argv: sys.stderr.close()
if "configured" in sys.argv: logging.basicConfig(level=logging.WARNING)
if "rank" in sys.argv:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
model = hp.checkpoint_wrapper(torch.nn.Linear(8, 8))
for _ in range(2): model(torch.randn(2, 8, requires_grad=True)).sum().backward()
"""


@pytest.mark.parametrize(("words", "said"), [([], 1), (["configured"], 0), (["rank"], 0), (["closed"], 0)])
def test_where_nobody_set_logging_up_it_goes_to_standard_error(words: list[str], said: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stderr.count("hyper_parallel: first step:") == said
    assert done.stdout == ""
