"""What autograd saves inside a replay, with the version that it had: backward raises where the plain step does.

MindSpore's recompute hands such a value to backward without a look at its version: a region that changes the value in place after
the save would silently get a gradient of the changed bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel.backends.mindspore.storages import VersionToken
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.packed import Scope, raise_changed
from hyper_parallel.platform.mindspore import compat

__all__ = ["CheckedReplays"]


class CheckedReplays:
    """The function of a region. Where MindSpore runs it again, each value that autograd saves is checked at its use."""

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self._function = function
        self._scope = Scope(TENSORS, where)
        self._handles: list[Any] | None = None
        self._handle: Callable[[], Any] | None = None  # a weak reference: the handle holds this function

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of the region."""
        with compat.recompute_handles() as self._handles:
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function: the first call is forward, every other a replay."""
        if self._handles is not None:
            self._begin(self._handles)
            return self._function(*args, **kwargs)
        handle = None if self._handle is None else self._handle()
        if handle is None:
            return self._function(*args, **kwargs)
        key = compat.recompute_key(handle)
        values, pack, unpack = handle.recomputed_data[key], *compat.recompute_hooks(handle, key)
        compat.push_saved_tensors_hooks(lambda tensor: values.save(tensor, pack), unpack)
        try:
            return self._function(*args, **kwargs)
        finally:
            compat.pop_saved_tensors_hooks()

    def _begin(self, handles: list[Any]) -> None:
        """Nothing has run yet, so the only handle is that of this region; none where nothing is recorded."""
        self._handles = None
        if handles:
            scope = self._scope
            handles[0].recomputed_data = defaultdict(lambda: _Values(scope))
            self._handle = weakref.ref(handles[0])


class _Values(weakref.WeakKeyDictionary[Any, Any]):
    """What one replay saved, by placeholder: in place of MindSpore's own dictionary, which looks at no version."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope
        self._versions: weakref.WeakKeyDictionary[Any, tuple[VersionToken, int]] = weakref.WeakKeyDictionary()
        self._saved: tuple[VersionToken, int] | None = None

    def save(self, tensor: Any, pack: Callable[[Any], Any]) -> Any:
        """Let MindSpore pack a tensor, and remember its version. What MindSpore keeps does not share the counter."""
        token = VersionToken(tensor)
        self._saved = token, token._version
        try:
            return pack(tensor)
        finally:
            self._saved = None

    def __setitem__(self, holder: Any, value: Any) -> None:
        super().__setitem__(holder, value)
        if self._saved is not None:
            self._versions[holder] = self._saved

    def get(self, holder: Any, default: Any = None) -> Any:
        """The value that backward asks for. Raises if it was changed since it was saved."""
        value = super().get(holder, default)
        token, version = self._versions.get(holder, (None, 0))
        if token is not None and (now := token._version) != version:
            raise_changed(self._scope, shape=value.shape, dtype=value.dtype, version=version, now=now)
        return value
