"""``print_saved`` on MindSpore: a hook on every value that autograd saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.planner.blocks import TREE, require_cell
from hyper_parallel.backends.mindspore.planner.framework import MINDSPORE
from hyper_parallel.backends.mindspore.planner.trial_guard import restored_after
from hyper_parallel.backends.mindspore.storages import storage_key
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.saved_values import SavedValues
from hyper_parallel.backends.planning.survey import require_step
from hyper_parallel.planner.saved import SavedTable

__all__ = ["list_saved"]


def list_saved(model: Any, step: Callable[[], Any]) -> SavedTable:
    """See ``hyper_parallel.print_saved``; nothing is printed."""
    who = "print_saved"
    require_cell(model, who)
    require_step(step, who)
    paths = ModulePaths()
    seen = SavedValues(paths, mindspore)
    with restored_after(model, who=who):
        paths.watch_module(TREE, "", model)
        try:
            with mindspore.saved_tensors_hooks(_Pack(model, seen), _unpack):
                step()
        finally:
            paths.remove()
    return seen.table(who, outside="mindspore._no_grad() and inside mindspore.value_and_grad")


class _Held:
    """What the graph holds. Its end is the end of the storage's name, which is an address."""

    def __init__(self, tensor: Any, key: int, pack: _Pack) -> None:
        self.tensor = tensor
        self._key = key
        self._pack = pack
        pack.holders[key] += 1

    def __del__(self) -> None:
        self._pack.release(self._key)


def _unpack(held: _Held) -> Any:
    return held.tensor


class _Pack:
    """The pack hook. Parameters and buffers are known by their address: they outlive the step."""

    def __init__(self, model: Any, seen: SavedValues) -> None:
        self._seen = seen
        self.holders: Counter[int] = Counter()
        buffers = (buffer for _, cell in TREE.named(model) for buffer in cell._buffers.values() if buffer is not None)
        self._weights = {storage_key(tensor) for tensor in (*TREE.parameters(model), *buffers) if tensor.size}

    def __call__(self, tensor: Any) -> _Held:
        """Count one value."""
        key, nbytes = storage_key(tensor), int(tensor.untyped_storage().nbytes())
        if key in self._weights or tensor.param_info is not None:
            self._seen.add_weight(key, nbytes)
        else:
            self._seen.add(key, nbytes, tensor.shape, MINDSPORE.dtype_name(tensor))
        return _Held(tensor, key, self)

    def release(self, key: int) -> None:
        """One value less is held."""
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self._seen.forget(key)
