"""What is refused on MindSpore, by name."""

from __future__ import annotations

import pytest
from mindspore import nn, ops

import hyper_parallel as hp
from hyper_parallel.errors import PolicyError, UnsupportedMemberError


def test_print_saved_is_refused_by_its_name() -> None:
    with pytest.raises(
        UnsupportedMemberError, match=r"MindSporePlatform\.print_saved: not available; because MindSpore"
    ) as caught:
        hp.print_saved(nn.Dense(2, 2), lambda: None)
    assert caught.value.member == "print_saved"


def test_estimates_need_no_framework() -> None:
    found = hp.estimate(hp.ModelShape(width=64, layers=2, heads=4, hidden=128), tokens=64)
    assert found.way("recompute").activation_bytes < found.way("plain").activation_bytes


def test_a_list_that_names_no_op_is_refused_with_near_misses() -> None:
    with pytest.raises(
        PolicyError,
        match=r"checkpoint of Dense: the list of ops to save names 'MatMull', and there is no op.*Near misses:.*MatMul\b",
    ):
        hp.checkpoint(nn.Dense(2, 2), ops.ones((2, 2)), policy_fn=["MatMull"])


def test_names_of_both_generations_of_ops_are_known() -> None:
    names = [
        "MatMul",
        "MatMulExt",
        "BiasAdd",
        "LayerNorm",
        "StandardNormal",
        "Muls",
        "SplitTensorView",
        "DistCommAllReduce",
    ]
    hp.checkpoint(nn.Dense(2, 2), ops.ones((2, 2)), policy_fn=names)
