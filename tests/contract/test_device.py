"""The members beside the base: the device that is there, its random state, and the framework's classes."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.platform import PlatformType


def test_the_device_is_the_one_that_is_there(platform):
    kind, count = platform.device_type(), platform.device_count()
    assert kind.lower() in ("cpu", "cuda", "npu", "xpu", "ascend", "gpu")
    assert count >= 1
    assert platform.get_device_handle() is not None
    with pytest.raises(ValueError, match=r"device: cannot name \w+ device \d+"):
        platform.device(count)


def test_a_new_tensor_is_on_that_device(platform):
    made = platform.zeros((2,), device=platform.device())
    assert str(made.device).lower().startswith(platform.device_type().lower())
    assert str(platform.device(0)).lower().startswith(platform.device_type().lower())


def test_classes_and_type(platform, adapter):
    assert platform.platform_type in PlatformType
    assert isinstance(adapter.tensor([1.0]), platform.Tensor)
    for name in ("Tensor", "Parameter", "Module", "Function", "DTensorBase"):
        assert isinstance(getattr(platform, name), type), name
    for name in ("tensor", "dtype", "tensor_dtype"):
        assert getattr(platform, name) is not None, name


def test_every_member_answers_on_the_class_as_on_an_instance(platform):
    assert type(platform).get_rank() == platform.get_rank() == 0
    assert type(platform).device_type() == platform.device_type()


def test_the_random_state_goes_back_or_is_refused_by_name(platform, adapter):
    if adapter.name == "mindspore":
        with pytest.raises(UnsupportedMemberError, match=r"get_rng_state: .*Instead: call manual_seed"):
            platform.get_rng_state()
        return
    import torch

    platform.manual_seed(11)
    state = platform.get_rng_state()
    first = torch.randn(4, device=platform.device())
    platform.set_rng_state(state)
    again = torch.randn(4, device=platform.device())
    platform.manual_seed(11)
    seeded = torch.randn(4, device=platform.device())
    np.testing.assert_array_equal(adapter.numpy(first), adapter.numpy(again))
    np.testing.assert_array_equal(adapter.numpy(first), adapter.numpy(seeded))
