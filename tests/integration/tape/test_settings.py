"""An op runs again under the settings of the process that it ran under: precision, attention kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp

from .models import WIDTH

_HAS_PRECISION_BY_BACKEND = hasattr(torch.backends, "fp32_precision")  # torch 2.9 and later


class Setting(NamedTuple):
    """A setting of the process and a value that it does not have at first."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    other: Any


def attribute(owner: Any, name: str, other: Any) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), other)


def attention(name: str) -> Setting:
    cuda = torch.backends.cuda
    return Setting(getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"), other=False)


PRECISION = {
    "float32 matmuls": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "TF32 in matmuls": attribute(torch.backends.cuda.matmul, "allow_tf32", other=True),
    "TF32 in cuDNN": attribute(torch.backends.cudnn, "allow_tf32", other=False),
    "reductions of float16": attribute(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", other=False
    ),
    "reductions of bfloat16": attribute(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", other=False
    ),
    "accumulation in float16": attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", other=True),
}
if _HAS_PRECISION_BY_BACKEND:
    PRECISION |= {
        "float32 everywhere": attribute(torch.backends, "fp32_precision", other="tf32"),
        "float32 matmuls on CUDA": attribute(torch.backends.cuda.matmul, "fp32_precision", other="tf32"),
        "float32 convolutions": attribute(torch.backends.cudnn.conv, "fp32_precision", other="ieee"),
    }
ATTENTION = {
    "flash": attention("flash"),
    "memory-efficient": attention("mem_efficient"),
    "math": attention("math"),
    "cuDNN": attention("cudnn"),
    "order": Setting(torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, [0, 2, 1, 3, 4]),
}
SETTINGS = PRECISION | ATTENTION


class Watch(TorchDispatchMode):
    """Notes what is read at each op that runs while it is active."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self._read = read
        self.at: dict[str, Any] = {}  # when an op came first

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.at.setdefault(op.overloadpacket.__name__, self._read())
        return op(*args, **(kwargs or {}))


@contextlib.contextmanager
def set_to(setting: Setting, value: Any) -> Iterator[None]:
    before = setting.read()
    setting.write(value)
    try:
        yield
    finally:
        setting.write(before)


def each_op_runs_again_under(setting: Setting) -> None:
    before = setting.read()

    def region(x: torch.Tensor, value: Any) -> torch.Tensor:
        early = x.sin()
        with set_to(setting, value):
            late = early.cos()
        return (late * 2).exp()

    x = torch.randn(WIDTH, requires_grad=True)
    hp.checkpoint(region, x, before).sum().backward()
    loss = hp.checkpoint(region, x, setting.other).sum()
    with Watch(setting.read) as inside:
        loss.backward()
    assert (inside.at["sin"], inside.at["cos"], inside.at["exp"]) == (before, setting.other, before)
    with set_to(setting, setting.other):
        loss = hp.checkpoint(region, x, before).sum()
    with Watch(setting.read) as around:
        loss.backward()
    assert (around.at["sin"], around.at["cos"], around.at["exp"]) == (setting.other, before, setting.other)
    assert setting.read() == before, "the replay left its settings behind"
    assert hp.stats().regions_from_tape == 3


@pytest.mark.parametrize("name", SETTINGS)
def test_each_op_runs_again_under_the_precision_and_the_attention_kernels_of_its_forward(name: str) -> None:
    each_op_runs_again_under(SETTINGS[name])


@pytest.mark.skipif(not _HAS_PRECISION_BY_BACKEND, reason="this torch has one precision for everything")
def test_a_precision_that_is_inherited_is_inherited_after_a_replay() -> None:
    """A replay puts back what was set, not what it came to."""
    x = torch.randn(WIDTH, requires_grad=True)
    everywhere, matmuls = PRECISION["float32 everywhere"], PRECISION["float32 matmuls on CUDA"]
    with set_to(matmuls, "none"):
        with set_to(everywhere, "tf32"):
            loss = hp.checkpoint(lambda x: x.sin().exp(), x).sum()
        loss.backward()
        assert matmuls.read() == "none"
        with set_to(everywhere, "ieee"):
            assert matmuls.read() == "ieee"


def test_a_setting_that_a_region_leaves_changed_is_changed_once_and_its_ops_run_again_as_they_ran() -> None:
    dtype = Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)

    def region(x: torch.Tensor) -> torch.Tensor:
        early = x * torch.full((WIDTH,), 1 / 3)
        torch.set_default_dtype(torch.float64)
        return (early * torch.full((WIDTH,), 1 / 7)).exp()

    x = torch.randn(WIDTH, requires_grad=True)
    with set_to(dtype, torch.float32):
        (wanted,) = torch.autograd.grad(region(x).sum(), x)
    for _ in range(2):
        with set_to(dtype, torch.float32):
            loss = hp.checkpoint(region, x).sum()
            assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)
            assert torch.get_default_dtype() is torch.float64
    assert hp.stats().regions_from_tape == 2


def test_attention_is_made_again_by_the_kernel_that_its_context_chose() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            by_math = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.nn.functional.scaled_dot_product_attention(by_math, x, x).sin()

    x = torch.randn(1, 2, 8, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(region(x).sum(), x)
    for _ in range(2):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            loss = hp.checkpoint(region, x).sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], wanted)
    assert hp.stats().regions_from_tape == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ops_that_autocast_cast_run_again_as_they_were_cast(dtype: torch.dtype) -> None:
    """Also where backward runs under another autocast."""
    weight = torch.randn(WIDTH, WIDTH)

    def region(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin()

    x = torch.randn(4, WIDTH, requires_grad=True)

    def gradient(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            loss = run(region, x).float().sum()
        other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
        with torch.autocast("cpu", dtype=other):
            return torch.autograd.grad(loss, x)[0]

    wanted = gradient(lambda function, *args: function(*args))
    for _ in range(2):
        assert torch.equal(gradient(hp.checkpoint), wanted)
    assert hp.stats().regions_from_tape == 2
