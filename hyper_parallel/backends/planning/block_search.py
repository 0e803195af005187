"""Finding a model's repeated blocks, and saying what was looked at where there are none.

The ways, in this order; the first that finds something is the answer
--------------------------------------------------------------------
1. *Repeated in a container*: modules of one class, at least two, in one ``ModuleList``, ``ModuleDict`` or ``Sequential``.
   What only holds modules is never called, so what it holds counts as its container's. A module that is itself a stack of
   blocks (a stage of a vision model, one of two towers) gives its blocks instead of itself.
2. *Called many times*: a module that one step calls at least twice as often as what it is in. This needs a step.
3. *In a container at all*: one module, or modules of different classes.
4. *Side by side*: modules of one class, at least two, that are attributes of one module.

A block always has parts and parameters of its own: replaying a single op saves nothing that its own input does not cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from hyper_parallel.backends.planning.module_tree import BlockRef, Module, ModuleTree

__all__ = ["BlockSearch"]

_MOST_MISSES: Final = 8


class BlockSearch:
    """The search in one framework's modules."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree

    def search(self, model: Module, calls: Callable[[], Mapping[str, int]] | None = None) -> list[BlockRef]:
        """The blocks of a model; ``calls`` says how often one step calls each module, and is asked only where that matters."""
        blocks = self._repeated(model)
        if not blocks and calls is not None and self._candidates(model):
            blocks = self._called_many_times(model, calls())
        return blocks or self._in_containers(model) or self._side_by_side(model)

    def _can_be_block(self, module: Module) -> bool:
        return (
            bool(self._tree.children(module))
            and self._tree.has_forward(module)
            and next(iter(self._tree.parameters(module)), None) is not None
        )

    def _candidates(self, model: Module) -> list[BlockRef]:
        """Every module that could be a block; the model itself cannot be one."""
        return [
            BlockRef(path, module) for path, module in self._tree.named(model) if path and self._can_be_block(module)
        ]

    def _called_in(self, path: str, container: Module) -> list[BlockRef]:
        """The modules of a container that can be called; where a child cannot, what it holds counts as the container's."""
        found: list[BlockRef] = []
        for key, child in self._tree.children(container).items():
            if child is not None:
                name = f"{path}.{key}" if path else key
                found.extend([BlockRef(name, child)] if self._tree.has_forward(child) else self._called_in(name, child))
        return found

    def _outermost(self, groups: Iterable[list[BlockRef]]) -> list[BlockRef]:
        """All of them, in order, without those that are inside one before."""
        blocks: list[BlockRef] = []
        inside: set[int] = set()
        for group in groups:
            for block in group:
                if id(block.module) not in inside:
                    blocks.append(block)
                inside.update(id(inner) for _, inner in self._tree.named(block.module))
        return blocks

    def _of_repeated_classes(self, children: Iterable[BlockRef]) -> list[BlockRef]:
        candidates = [block for block in children if self._can_be_block(block.module)]
        counts = Counter(block.module.__class__ for block in candidates)
        return [block for block in candidates if counts[block.module.__class__] > 1]

    def _repeated(self, model: Module) -> list[BlockRef]:
        groups = (
            self._without_stacks(self._of_repeated_classes(self._called_in(path, container)))
            for path, container in self._tree.named(model)
            if isinstance(container, self._tree.containers)
        )
        return self._outermost(groups)

    def _without_stacks(self, group: list[BlockRef], *, is_in_stack: bool = False) -> list[BlockRef]:
        """The group, with the blocks of every member that is a stack in its place."""
        structures = {tuple(tuple(p.shape) for p in self._tree.parameters(block.module)) for block in group}
        # Stages of a vision model differ in width, and layers are alike. In a stage, the first layer often changes the width.
        are_stages = not is_in_stack and 2 * len(structures) > len(group)
        found: list[BlockRef] = []
        for block in group:
            inner = self._stacked_in(block, are_stages)
            found.extend(self._without_stacks(inner, is_in_stack=True) if inner else [block])
        return found

    def _stacked_in(self, block: BlockRef, are_stages: bool) -> list[BlockRef]:
        """The blocks that a module is a stack of; none where it is a block itself.

        The experts of a mixture and the heads of an attention are lists of modules too. They are no stack: they have no parts
        that have parts, and the layers that hold them are alike.
        """
        if isinstance(block.module, self._tree.containers):
            return self._of_repeated_classes(self._called_in(block.name, block.module))
        for key, child in self._tree.children(block.module).items():
            if isinstance(child, self._tree.containers):
                inner = self._of_repeated_classes(self._called_in(f"{block.name}.{key}", child))
                if inner and (are_stages or all(self._is_deep(one.module) for one in inner)):
                    return inner
        return []

    def _is_deep(self, module: Module) -> bool:
        return any(child is not None and self._tree.children(child) for child in self._tree.children(module).values())

    def _called_many_times(self, model: Module, calls: Mapping[str, int]) -> list[BlockRef]:
        def found() -> Iterator[list[BlockRef]]:
            for block in self._candidates(model):
                if calls.get(block.name, 0) >= 2 * max(1, _calls_around(block.name, calls)):
                    yield [block]

        return self._outermost(found())

    def _in_containers(self, model: Module) -> list[BlockRef]:
        return self._outermost(
            [block for block in self._called_in(path, container) if self._can_be_block(block.module)]
            for path, container in self._tree.named(model)
            if isinstance(container, self._tree.containers)
        )

    def _side_by_side(self, model: Module) -> list[BlockRef]:
        return self._outermost(
            self._of_repeated_classes(
                BlockRef(f"{path}.{key}" if path else key, child)
                for key, child in self._tree.children(parent).items()
                if child is not None
            )
            for path, parent in self._tree.named(model)
        )

    def near_misses(self, model: Module, *, has_step: bool) -> str:
        """What was looked at and why it was not taken, and how to name blocks by hand; several sentences."""
        containers = [
            f"{path or 'the model'} ({type(module).__name__} of {len(self._tree.children(module))}) {self._why_not(path, module)}"
            for path, module in self._tree.named(model)
            if isinstance(module, self._tree.containers)
        ]
        single = self._candidates(model)
        text = f"; its containers are {_some(containers)}" if containers else "; it has no container of modules"
        if single:
            reason = (
                "each is called once for every call of what it is in"
                if has_step
                else "whether one runs many times is known only with a step"
            )
            text += f". Modules with parts are {_some([f'{one.name} ({type(one.module).__name__})' for one in single])}; {reason}"
        example = single[0].name if single else "encoder.*"
        return f"{text}. Name the modules to treat as blocks, for example blocks={example!r}."

    def _why_not(self, path: str, container: Module) -> str:
        children = [block.module for block in self._called_in(path, container)]
        if not children:
            return "holds nothing that can be called"
        classes = ", ".join(sorted({type(child).__name__ for child in children}))
        with_parts = [child for child in children if self._tree.children(child)]
        if not with_parts:
            return f"holds modules without parts ({classes})"
        return f"holds modules without parameters ({classes})"


def _calls_around(path: str, calls: Mapping[str, int]) -> int:
    """How often the nearest module around this one, that is called at all, is called."""
    while path:
        path = path.rpartition(".")[0]
        if calls.get(path):
            return calls[path]
    return 0


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:_MOST_MISSES]) + (f" and {len(texts) - _MOST_MISSES} more" if texts[_MOST_MISSES:] else "")
