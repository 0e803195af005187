"""Random numbers of the device: a replay draws the ones that forward drew, however its tensors came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy

pytestmark = pytest.mark.gpu


def _dropped(*, x: torch.Tensor, extra: dict[str, Any] | None = None) -> torch.Tensor:
    return F.dropout(x, 0.5).sin() * (1 if extra is None else extra["scale"])


def _recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [None, _recompute], ids=["whole", "selective"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["keyword", "nested keyword"])
def test_a_dropout_whose_input_comes_by_keyword(policy: Any, is_nested: bool) -> None:
    """Torch's own checkpoint asks the positional arguments which devices' states to keep; here there are none."""
    x = torch.ones(4096, device="cuda", requires_grad=True)
    keywords: dict[str, Any] = {"x": x}
    if is_nested:
        keywords["extra"] = {"scale": torch.ones(1, device="cuda")}
    torch.manual_seed(5)
    first = hp.checkpoint(_dropped, policy_fn=policy, **keywords)
    torch.rand(100, device="cuda")  # the stream goes on before backward
    first.sum().backward()
    got = x.grad.clone()
    x.grad = None
    torch.manual_seed(5)
    _dropped(**keywords).sum().backward()
    assert torch.equal(got, x.grad)


def _save_dropout(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "native_dropout" in str(op) else CheckpointPolicy.MUST_RECOMPUTE


def test_a_factory_that_draws_on_the_device_after_a_kept_dropout() -> None:
    """The replay skips the dropout's draw: what the factory draws next on the same device must be put in step."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        dropped = torch.native_dropout(x, 0.5, True)[0]
        return (dropped * torch.rand(dropped.shape, device=dropped.device)).sin()

    x = torch.ones(4096, device="cuda", requires_grad=True)
    torch.manual_seed(5)
    (wanted,) = torch.autograd.grad(noisy(x).sum(), x)
    torch.manual_seed(5)
    (got,) = torch.autograd.grad(hp.checkpoint(noisy, x, policy_fn=_save_dropout).sum(), x)
    assert torch.equal(got, wanted)
