"""What is refused on MindSpore, by name."""

from __future__ import annotations

import pytest
from mindspore import nn, ops

import hyper_parallel as hp
from hyper_parallel.errors import PolicyError


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
