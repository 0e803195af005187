"""A random training program as plain data: what a model computes, which spans are wrapped, in which order steps run.

Programs are total: a reference counts back from the newest visible value and wraps around, and every operation adapts
its operands (see ``operations``). So any part can be deleted, and what remains is still a program; that is what makes
shrinking simple. This file knows neither torch nor the library under test.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

__all__ = [
    "BLOCKS",
    "OURS",
    "RECOMPUTED",
    "THEIRS",
    "Action",
    "Op",
    "Policy",
    "Program",
    "Settings",
    "Span",
    "Tensor",
    "from_json",
    "ops_of",
    "spans_of",
    "to_json",
]

BLOCKS = {
    "no_grad": "torch.no_grad()",
    "autocast": "torch.autocast(DEVICE, torch.bfloat16)",
    "enable_grad": "torch.enable_grad()",
    "autocast_off": "torch.autocast(DEVICE, enabled=False)",
    "autocast_uncached": "torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False)",
    "copying_hooks": "copying_hooks()",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu()",
    "passing_mode": "PassingMode()",
}
"""Spans that are a ``with`` block: what stands behind the ``with``."""

THEIRS = ("torch_checkpoint", "torch_reentrant", "torch_selective")  # regions of torch's own, with us and without us
OURS = ("checkpoint", "checkpoint_wrapper", "swap", "swap_wrapper")
RECOMPUTED = ("checkpoint", "checkpoint_wrapper", *THEIRS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: ``ins`` count back from the newest visible value, ``number`` is its only free setting."""

    name: str
    ins: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    number: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A selective policy. ``form`` says how it is written down."""

    form: str = "function"  # function | bools | list | cycle (by instance: entry i of the table for the i-th op asked)
    table: tuple[tuple[str, str], ...] = ()  # op name -> policy name
    otherwise: str = "PREFER_RECOMPUTE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A part of the model that runs through a door."""

    kind: str  # a door of ours, plain, or one of BLOCKS and THEIRS
    body: tuple[Op | Span, ...] = ()
    outs: tuple[int, ...] = (0,)
    form: str = "tuple"  # of several outputs: tuple | list | dict
    passing: str = "args"  # args | kwargs | nested
    calls: int = 1
    swap_inputs: bool = False
    policy: Policy | None = None
    tensor_policy: str = "none"  # of swaps: none | save_even | all_save
    early_stop: bool = True
    config: tuple[tuple[str, Any], ...] = ()  # settings of this span only
    module: str = "none"  # of wrappers: none | module | forward_hook | backward_hook | other_weights | weights_inside
    keyword: str = "none"  # of wrappers: a keyword of the module with its value, such as "debug=True"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A weight, an input or a constant."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True
    is_parameter: bool = True  # of weights: a Parameter, or a leaf that is none
    hook: str = "none"  # of weights: none | tensor | accumulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """One step of the schedule (see ``harness.Run`` for what each kind does)."""

    kind: str
    batch: int = 0
    at: int = 0
    retain: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the simulated accelerator and the swap engine."""

    timing: str = "lazy"
    seed: int = 0
    min_bytes: int = 0
    tail_bytes: int = 0
    window_bytes: int = 65536
    prefetch_bytes: int = 65536
    device_bytes: int | None = None
    host_limit: int | None = None
    tiers: tuple[str, ...] = ("pinned",)
    verify: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """All of it."""

    weights: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    body: tuple[Op | Span, ...]
    outs: tuple[int, ...] = (0,)
    threads: tuple[tuple[Action, ...], ...] = ()
    settings: Settings = Settings()
    seed: int = 0
    is_wild: bool = False  # in-place changes may cross the border of a checkpointed span


def spans_of(body: tuple[Op | Span, ...]) -> Iterator[Span]:
    """Every span, outer before inner."""
    for node in body:
        if isinstance(node, Span):
            yield node
            yield from spans_of(node.body)


def ops_of(body: tuple[Op | Span, ...]) -> Iterator[Op]:
    """Every operation, in order."""
    for node in body:
        if isinstance(node, Op):
            yield node
        else:
            yield from ops_of(node.body)


def to_json(program: Program) -> str:
    """The program as text."""
    return json.dumps(dataclasses.asdict(program), sort_keys=True)


def from_json(text: str) -> Program:
    """The program back from text."""
    data = json.loads(text)
    return Program(
        weights=tuple(_tensor(item) for item in data["weights"]),
        inputs=tuple(_tensor(item) for item in data["inputs"]),
        constants=tuple(_tensor(item) for item in data["constants"]),
        body=_body(data["body"]),
        outs=tuple(data["outs"]),
        threads=tuple(tuple(Action(**action) for action in actions) for actions in data["threads"]),
        settings=Settings(**{**data["settings"], "tiers": tuple(data["settings"]["tiers"])}),
        seed=data["seed"],
        is_wild=data["is_wild"],
    )


def _tensor(data: dict[str, Any]) -> Tensor:
    return Tensor(**{**data, "shape": tuple(data["shape"])})


def _body(data: list[dict[str, Any]]) -> tuple[Op | Span, ...]:
    return tuple(_span(item) if "body" in item else _op(item) for item in data)


def _op(data: dict[str, Any]) -> Op:
    return Op(**{**data, "ins": tuple(data["ins"]), "weights": tuple(data["weights"])})


def _span(data: dict[str, Any]) -> Span:
    policy = data["policy"]
    if policy is not None:
        policy = Policy(**{**policy, "table": tuple((name, answer) for name, answer in policy["table"])})
    return Span(
        **{
            **data,
            "body": _body(data["body"]),
            "outs": tuple(data["outs"]),
            "policy": policy,
            "config": tuple((name, value) for name, value in data["config"]),
        }
    )
