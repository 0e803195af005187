"""Makes a failing program small: tries simpler neighbours, keeps the first that still fails, until none does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.program import Op, Policy, Program, Settings, Span, Tensor

__all__ = ["shrink"]

Body = tuple[Op | Span, ...]


def shrink(program: Program, still_fails: Callable[[Program], bool], *, most_tries: int = 2000) -> Program:
    """The smallest program found for which ``still_fails``."""
    tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _neighbours(program):
            tries += 1
            if tries > most_tries:
                return program
            if candidate != program and still_fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def _neighbours(program: Program) -> Iterator[Program]:
    """Simpler programs, the biggest steps first."""

    def with_(**changes: Any) -> Program:
        return dataclasses.replace(program, **changes)

    for thread in program.threads:
        if len(program.threads) > 1:
            yield with_(threads=(thread,))
    for me, thread in enumerate(program.threads):
        for shorter in _without_one(thread):
            yield with_(threads=(*program.threads[:me], shorter, *program.threads[me + 1 :]))
    for body in _bodies(program.body):
        yield with_(body=body)
    for outs in _refs(program.outs):
        if outs:
            yield with_(outs=outs)
    for weights in _tensor_lists(program.weights):
        yield with_(weights=weights)
    for inputs in _tensor_lists(program.inputs):
        yield with_(inputs=inputs)
    for constants in _tensor_lists(program.constants):
        yield with_(constants=constants)
    yield with_(is_wild=False)
    yield with_(seed=0)
    for settings in _towards(program.settings, Settings()):
        yield with_(settings=settings)
    for me, thread in enumerate(program.threads):
        for number, action in enumerate(thread):
            for at in {0, action.at // 2, max(0, action.at - 1)} - {action.at}:
                changed = (*thread[:number], dataclasses.replace(action, at=at), *thread[number + 1 :])
                yield with_(threads=(*program.threads[:me], changed, *program.threads[me + 1 :]))


def _without_one(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for number in reversed(range(len(items))):
        yield (*items[:number], *items[number + 1 :])


def _towards(value: Any, simplest: Any) -> Iterator[Any]:
    for field in dataclasses.fields(value):
        if getattr(value, field.name) != getattr(simplest, field.name):
            yield dataclasses.replace(value, **{field.name: getattr(simplest, field.name)})


def _refs(refs: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield from _without_one(refs)
    for number, ref in enumerate(refs):
        for smaller in range(ref):
            yield (*refs[:number], smaller, *refs[number + 1 :])


def _tensor_lists(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    for shorter in _without_one(tensors):
        if shorter:
            yield shorter
    for number, tensor in enumerate(tensors):
        simpler = list(_towards(tensor, Tensor(shape=tensor.shape)))
        simpler += [
            dataclasses.replace(tensor, shape=tuple(min(size, most) for size in tensor.shape)) for most in (1, 2, 4)
        ]
        for one in simpler:
            yield (*tensors[:number], one, *tensors[number + 1 :])


def _bodies(body: Body) -> Iterator[Body]:
    """Bodies with less in them."""
    yield from _without_one(body)
    for number, node in enumerate(body):
        before, after = body[:number], body[number + 1 :]
        if isinstance(node, Span):
            yield (*before, *node.body, *after)
        for simpler in _nodes(node):
            yield (*before, simpler, *after)


def _nodes(node: Op | Span) -> Iterator[Op | Span]:
    if isinstance(node, Op):
        yield dataclasses.replace(node, number=0)
        for ins in _refs(node.ins):
            if len(ins) == len(node.ins):
                yield dataclasses.replace(node, ins=ins)
        yield dataclasses.replace(node, weights=tuple(0 for _ in node.weights))
        return
    for inner in _bodies(node.body):
        yield dataclasses.replace(node, body=inner)
    for outs in _refs(node.outs):
        if outs:
            yield dataclasses.replace(node, outs=outs)
    simplest = Span(kind=node.kind.removesuffix("_wrapper"), body=node.body, outs=node.outs)
    yield from _towards(node, simplest)
    if node.policy is not None:
        for table in _without_one(node.policy.table):
            yield dataclasses.replace(node, policy=dataclasses.replace(node.policy, table=table))
        for policy in _towards(node.policy, Policy(table=node.policy.table)):
            yield dataclasses.replace(node, policy=policy)
