"""Settings that were mistyped are refused when a wrapper is made, not ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import PolicyError


class _TakesAnything(nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x.exp()


class _TakesScale(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0, policy: str = "") -> torch.Tensor:
        return x.exp() * scale


@pytest.mark.parametrize("layer", [_TakesAnything(), _TakesScale()], ids=["any keyword", "its own keywords"])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("swap_input", "swap_inputs"),
        ("policyfn", "policy_fn"),
        ("earlystop", "early_stop"),
        ("swap_confg", "swap_config"),
        ("preserve_rng", "preserve_rng_state"),
    ],
)
def test_a_near_miss_of_a_setting_is_refused_when_the_wrapper_is_made(layer: nn.Module, given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{given!r} is not a setting; did you mean {meant!r}"):
        hp.checkpoint_wrapper(layer, **{given: True})


def test_a_keyword_that_the_layer_does_not_take_is_refused_when_the_wrapper_is_made() -> None:
    with pytest.raises(TypeError, match="'colour' is neither a setting nor an argument of the wrapped module"):
        hp.checkpoint_wrapper(_TakesScale(), colour="red")


def test_the_layers_own_keywords_are_still_taken() -> None:
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(hp.checkpoint_wrapper(_TakesScale(), scale=2.0, policy="x")(x), x.exp() * 2.0)
    assert torch.equal(hp.checkpoint_wrapper(_TakesAnything(), colour="red")(x), x.exp())
    assert torch.equal(hp.checkpoint_wrapper(hp.checkpoint_wrapper(_TakesScale()), scale=2.0)(x), x.exp() * 2.0)
    assert torch.equal(hp.checkpoint_wrapper(lambda x, scale: x.exp() * scale, scale=2.0)(x), x.exp() * 2.0)


def test_a_near_miss_of_a_setting_is_refused_at_a_call() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="'swap_input' is not a setting; did you mean 'swap_inputs'"):
        hp.checkpoint(_TakesAnything(), x, swap_input=True)
    with pytest.raises(TypeError, match="'swap_confg' is not a setting; did you mean 'swap_config'"):
        hp.swap(_TakesAnything(), x, swap_confg=None)
    assert torch.equal(hp.checkpoint(_TakesAnything(), x, policy="the layer's own"), x.exp())


@pytest.mark.parametrize("make", [hp.checkpoint_wrapper, hp.swap_wrapper])
def test_a_dict_of_settings_is_refused_when_the_wrapper_is_made(make: Any) -> None:
    with pytest.raises(TypeError, match=r"got a dict; write hp\.SwapConfig\(min_bytes=1\)"):
        make(_TakesAnything(), swap_config={"min_bytes": 1})
    with pytest.raises(TypeError, match="swap_config must be a SwapConfig"):
        make(_TakesAnything(), swap_config="4MiB")


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"swap_inputs": "yes"}, TypeError, "swap_inputs must be True or False, got 'yes'"),
        ({"context_fn": 3}, TypeError, "context_fn must be a function that returns two contexts, got 3"),
        ({"policy_fn": "mm"}, PolicyError, "a policy is a function .* got 'mm'"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_when_the_wrapper_is_made(
    keywords: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        hp.checkpoint_wrapper(_TakesAnything(), **keywords)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nosuchop", "there is no op of that name"),
        ("aten.addmmm", "no op of that name. Did you mean .*addmm"),
        ("linear", "torch runs as other ops"),
        ("scaled_dot_product_attention", "Did you mean .*_scaled_dot_product_flash_attention"),
    ],
)
def test_an_op_name_that_matches_nothing_is_refused(name: str, why: str) -> None:
    with pytest.raises(PolicyError, match=f"names {name!r}.*{why}"):
        hp.checkpoint_wrapper(_TakesAnything(), policy_fn=["mm", name])
    with pytest.raises(PolicyError, match=f"names {name!r}.*{why}"):
        hp.checkpoint(_TakesAnything(), torch.ones(3, requires_grad=True), policy_fn=[name])


@pytest.mark.parametrize("name", ["mm", "aten.mm", "aten.mm.default", "_softmax", "flex_attention", "aten.add.Tensor"])
def test_an_op_name_that_comes_up_is_accepted(name: str) -> None:
    hp.checkpoint_wrapper(_TakesAnything(), policy_fn=[name])


def test_a_list_of_ops_that_can_be_read_once_serves_every_call() -> None:
    layer = hp.checkpoint_wrapper(_TakesAnything(), policy_fn=iter(["exp"]))
    for _ in range(2):
        before = hp.stats().saved_bytes
        layer(torch.ones(1024, requires_grad=True)).sum().backward()
        assert hp.stats().saved_bytes - before == 4096


def test_an_op_that_is_registered_later_is_known_then() -> None:
    name = "hyper_parallel_late::doubled"
    with pytest.raises(PolicyError, match="no op of that name"):
        hp.checkpoint_wrapper(_TakesAnything(), policy_fn=["hyper_parallel_late.doubled"])

    @torch.library.custom_op(name, mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    hp.checkpoint_wrapper(_TakesAnything(), policy_fn=["hyper_parallel_late.doubled"])


@pytest.mark.parametrize("wrap", [hp.checkpoint_wrapper, hp.swap_wrapper])
def test_a_class_or_a_list_of_modules_is_refused_with_what_to_wrap(wrap: Any) -> None:
    with pytest.raises(TypeError, match=r"_TakesAnything is a class of modules; wrap one that was made, such as"):
        wrap(_TakesAnything)
    with pytest.raises(TypeError, match=r"expected a module or a callable, got a list; wrap each module in it"):
        wrap([_TakesAnything()])
    with pytest.raises(TypeError, match=r"expected a module or a callable, got 3"):
        wrap(3)
