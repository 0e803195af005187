"""Which modules of a model are its repeated blocks, where they sit in the tree, and how to tell one model from another."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence

from hyper_parallel.backends.planning.block_search import BlockSearch
from hyper_parallel.backends.planning.module_paths import path_in_block
from hyper_parallel.backends.planning.module_tree import BlockRef, Module, ModuleLocation, ModuleTree
from hyper_parallel.errors import PlanError

__all__ = ["find_blocks", "fingerprint_of", "locations_of", "module_paths", "refuse_wrapped"]


def locations_of(tree: ModuleTree, root: Module, module: Module) -> list[ModuleLocation]:
    """Every location in the tree that holds this very module."""
    found = []
    for _, parent in tree.named(root):
        children = tree.children(parent).items()
        found += [ModuleLocation(tree, parent, key) for key, child in children if child is module]
    return found


def find_blocks(
    tree: ModuleTree,
    model: Module,
    patterns: str | Sequence[str] | None,
    *,
    who: str,
    calls: Callable[[], Mapping[str, int]] | None = None,
) -> list[BlockRef]:
    """The repeated blocks: those that patterns name, or those that are found (see ``block_search``).

    ``calls``: runs a step and says how often it calls each module, for models whose blocks are only repeated in time.
    """
    search = BlockSearch(tree)
    blocks = search.search(model, calls) if patterns is None else _named(tree, model, patterns, who)
    refuse_wrapped(tree, model, blocks, who)
    if blocks:
        return blocks
    raise PlanError(
        f"{who}: {type(model).__name__} has no repeated blocks: no container holds callable modules with parts and parameters "
        f"of their own{search.near_misses(model, has_step=calls is not None)}"
    )


def _named(tree: ModuleTree, model: Module, patterns: str | Sequence[str], who: str) -> list[BlockRef]:
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not wanted or not all(isinstance(pattern, str) and pattern for pattern in wanted):
        raise TypeError(f"{who}: blocks are one or more patterns such as 'model.layers.*', got {patterns!r}")
    named = [(path, module) for path, module in tree.named(model) if path]
    blocks: list[BlockRef] = []
    inside: set[int] = set()
    for pattern in wanted:
        hits = [(path, module) for path, module in named if _is_named(pattern, path)]
        if not hits:
            near = difflib.get_close_matches(pattern, [path for path, _ in named], n=4, cutoff=0.4)
            raise PlanError(
                f"{who}: no module is called {pattern!r}{'; near misses: ' + ', '.join(near) if near else ''}. A pattern is a "
                "path from the model's root in which * stands for one name."
            )
        for path, module in hits:
            if not tree.has_forward(module):
                raise PlanError(
                    f"{who}: {path} (named by {pattern!r}) cannot be a block, because a {type(module).__name__} is never called; "
                    f"its modules are. Name those, for example {f'{pattern}.*'!r}."
                )
            if id(module) not in inside:
                blocks.append(BlockRef(path, module))
                inside.update(id(inner) for _, inner in tree.named(module))
    return blocks


def _is_named(pattern: str, path: str) -> bool:
    names, parts = path.split("."), pattern.split(".")
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


def refuse_wrapped(tree: ModuleTree, model: Module, blocks: Sequence[BlockRef], who: str) -> None:
    """Refuse a model whose blocks are regions already."""
    for block in blocks:
        # ``type``: a wrapper's ``__class__`` is that of the wrapped module
        if any(issubclass(type(inner), tree.wrapper_class) for _, inner in tree.named(block.module)):
            raise PlanError(
                f"{who}: {block.name} is wrapped already, or something in it is, and both would decide about the same values. "
                "Remove what was applied before (handle.remove()), or unwrap it."
            )
    tree.refuse_own_checkpointing(model, who)


def fingerprint_of(tree: ModuleTree, model: Module) -> str:
    """Names one model structure: paths, classes, parameters with shapes and dtypes. Wrappers of ours do not show."""
    digest = hashlib.sha256()
    for path, module in tree.named(model):
        digest.update(f"{path}:{module.__class__.__name__}\n".encode())
    for path, parameter in tree.named_parameters(model):
        digest.update(f"{path}={tuple(parameter.shape)}:{parameter.dtype}\n".encode())
    return digest.hexdigest()[:16]


def module_paths(tree: ModuleTree, blocks: Sequence[BlockRef]) -> list[str]:
    """The paths of these blocks and of everything inside them."""
    return [path_in_block(block.name, inner) for block in blocks for inner, _ in tree.named(block.module)]
