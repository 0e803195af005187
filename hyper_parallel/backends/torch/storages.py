"""Facts about torch tensors that the engine relies on: identity, version, aliases, and how to make a view again.

Note: versions without bytes
    Autograd's own in-place check is off wherever hooks pack a value, so we check ourselves. A ``detach()`` shares its
    tensor's version counter; giving that alias other ``data`` keeps the counter and lets go of the bytes. What remains
    is a token that sees every later in-place change and holds no memory.

Note: counters of their own
    A view counts its changes with its base. ``unsafe_split``, which torch's recurrent cells are made of, gives each piece of a
    storage a counter of its own, and changes the pieces in place one after the other: two pieces at version 1 were not
    copied at the same moment. What is no view and less than its storage is therefore known by its place in it.

Note: below the counter
    A dispatch mode runs below the kernels that share and bump version counters, so an alias made there has a counter of
    its own. ``_ADINPLACE`` is let in again for the moment in which a mode makes an alias. A pack hook may be called from there
    too: from 2.15 on, torch's selective mode hands it the values that it saves.

Note: bytes without data
    A storage may report bytes and have no memory behind them: a ``ZeroTensor`` (what forward-mode differentiation uses for a
    tangent that is zero everywhere) and a functionalized tensor. Reading such a storage ends the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch.autograd.function import FunctionMeta
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes, instances_in
from hyper_parallel.core.activation_checkpoint.source import Source

__all__ = [
    "LONGEST_CHAIN",
    "NO_STORAGE_ERRORS",
    "PASS_THROUGH",
    "TorchSource",
    "ViewSpec",
    "alias",
    "bytes_of",
    "flat_bytes",
    "is_below_counter",
    "is_changed_piece",
    "is_copied_by_bytes",
    "is_parameter_derived",
    "shapes_of",
    "share_key",
    "storage_key_if_any",
    "storage_watch",
    "tensors_in",
    "unseen",
    "version_token",
    "with_counter_of",
]

_is_cow_tensor: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cow_tensor")  # noqa: B009 (not in torch's stubs)
_has_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ADINPLACE = torch._C.DispatchKey.ADInplaceOrView
NO_STORAGE_ERRORS: Final = (NotImplementedError, RuntimeError)
"""What torch raises where a tensor has no storage of its own: subclasses, sparse and functional tensors."""
PASS_THROUGH = frozenset(
    {"TBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
     "ReshapeAliasBackward0", "AliasBackward0", "SelectBackward0", "SliceBackward0", "UnsqueezeBackward0", "ExpandBackward0"}
)  # fmt: skip
LONGEST_CHAIN = 6
_NOT_A_CAST: set[type] = set()
"""Classes of torch's own nodes that neither hold a variable nor pass one through. A node of a custom Function may do so."""


class unseen:
    """A context for our own tensor ops: no dispatch mode sees them, no graph records them.

    A class, and the bare switch instead of ``torch.no_grad()``: it is entered ten times for every swapped tensor, and a
    generator around two contexts costs four times as much.
    """

    __slots__ = ("_guard", "_was_recording")

    def __enter__(self) -> None:
        self._guard = torch._C._DisableTorchDispatch()
        self._guard.__enter__()
        self._was_recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exc: object) -> None:
        torch._C._set_grad_enabled(self._was_recording)
        self._guard.__exit__(*exc)


def is_below_counter() -> bool:
    """Whether an alias made here, by a plain ``detach``, would have a version counter of its own."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_ADINPLACE)


def alias(tensor: torch.Tensor, *, is_below_autograd: bool = False) -> torch.Tensor:
    """A second tensor over the same bytes and the same version counter; never the tensor itself.

    Handing autograd its own saved output back would be a reference cycle that no collector can break.
    """
    if type(tensor) not in _PLAIN:
        return tensor.detach()  # a subclass answers for itself; regions do not count a detach
    if not is_below_autograd and not is_below_counter():
        if not _has_modes():
            return tensor.detach()
        with torch._C._DisableTorchDispatch():
            return tensor.detach()
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(_ADINPLACE)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch._C._DisableTorchDispatch():
        return tensor.detach()


def version_token(tensor: torch.Tensor, *, is_below_autograd: bool = False) -> torch.Tensor:
    """A tensor without bytes that shares the version counter (see "versions without bytes")."""
    token = alias(tensor, is_below_autograd=is_below_autograd)
    empty = _empty(tensor.dtype, tensor.device)
    if not _has_modes():
        token.data = empty
        return token
    with torch._C._DisableTorchDispatch():
        token.data = empty
    return token


def with_counter_of(token: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as ``tensor``, with the version counter of ``token`` (see "versions without bytes")."""
    shared = alias(token)
    with torch._C._DisableTorchDispatch():
        shared.data = tensor
    return shared


@functools.lru_cache(maxsize=256)
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with unseen():
        return torch.empty(0, dtype=dtype, device=device)


def flat_bytes(tensor: torch.Tensor) -> FlatBytes:
    """All bytes of a tensor's storage, as one flat tensor over it."""
    storage = tensor.untyped_storage()
    if not _has_modes():  # no graph records it either: the new tensor needs no gradient
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    with unseen():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_copied_by_bytes(tensor: torch.Tensor) -> bool:
    """Whether the storage's bytes, with a size, strides and an offset, are all there is to this tensor.

    False for tensors that carry more (a conjugate or negative bit, quantization, ragged sizes) and for storages without
    memory (see "bytes without data").
    """
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested:
        return False
    if _is_cow_tensor(tensor):
        return True  # it has memory; asking for the address would copy it
    try:
        storage = tensor.untyped_storage()
        return storage.nbytes() == 0 or storage.data_ptr() != 0
    except RuntimeError:
        return False


def is_changed_piece(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """Whether a part of a storage was changed in place on a counter of its own (see "counters of their own").

    Its neighbours are, or will be, changed as well, and unseen: a copy of the whole storage would be taken while they are, and
    there would be one such copy for every piece.
    """
    return tensor._version > 0 and tensor._base is None and tensor.nbytes != storage_bytes


def share_key(tensor: torch.Tensor) -> Hashable:
    """What a storage and a version counter over it are known by (see "counters of their own")."""
    base, storage = tensor._base, tensor.untyped_storage()
    root = tensor if base is None else base
    key: int = storage._cdata
    if root.nbytes == storage.nbytes():
        return key
    return key, root.storage_offset(), root.size(), root.stride()


def storage_watch(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """Whether the storage is still alive. While the watch exists its address names no other storage."""
    reference = StorageWeakRef(storage)
    return lambda: not reference.expired()


class ViewSpec:
    """How to make the exact view again: the same size, strides, offset and dtype over the same bytes."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def over(self, device_bytes: FlatBytes) -> torch.Tensor:
        """The view over these bytes."""
        if not _has_modes():
            return self._over(device_bytes)
        with unseen():
            return self._over(device_bytes)

    def _over(self, device_bytes: FlatBytes) -> torch.Tensor:
        view = torch.empty(0, dtype=self.dtype, device=device_bytes.device)
        return view.set_(device_bytes.untyped_storage(), self.offset, self.size, self.stride)


class TorchSource(Source):
    """A source whose view can count its changes with the saved tensor."""

    __slots__ = ()

    def is_of(self, device_bytes: FlatBytes) -> bool:
        """Whether these bytes are the storage that was saved."""
        return bool(device_bytes.untyped_storage()._cdata == self.storage_key)

    def share_counter(self, view: torch.Tensor) -> torch.Tensor:
        """The same bytes as ``view``, with the version counter of the saved tensor."""
        return with_counter_of(self.token, view)  # type: ignore[arg-type]  # a tensor here


def is_parameter_derived(tensor: torch.Tensor) -> bool:
    """A parameter, a view of one, or a cast of one (autocast's copy): it stays anyway, so swapping it frees nothing."""
    if tensor.__class__ is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return True
    base = tensor._base
    if base is not None and isinstance(base, torch.nn.Parameter):
        return True
    node: Any = tensor.grad_fn  # torch.autograd.graph.Node
    for _ in range(LONGEST_CHAIN):
        if node is None or node.__class__ in _NOT_A_CAST:
            return False
        variable = getattr(node, "variable", None)
        if variable is not None:
            return isinstance(variable, torch.nn.Parameter)
        # The type is asked: the context of a custom Function is its node, and may have a ``name`` of its own.
        if type(node).name(node) not in PASS_THROUGH:
            if not isinstance(type(node), FunctionMeta):
                _NOT_A_CAST.add(type(node))
            return False
        node = node.next_functions[0][0]
    return False


tensors_in = functools.partial(instances_in, torch.Tensor)


def shapes_of(args: Any) -> list[Any]:
    """The shape and dtype of each tensor among an op's arguments. A nested tensor's ragged size is new in every call."""
    return [(None if tensor.is_nested else tensor.shape, tensor.dtype) for tensor in tensors_in(args)]


def bytes_of(output: Any) -> int:
    """The bytes of the tensors in an op's output."""
    if isinstance(output, torch.Tensor):
        return output.nbytes if output.layout is torch.strided else 0
    if isinstance(output, tuple | list):
        return sum(bytes_of(item) for item in output)
    return 0


def storage_key_if_any(tensor: torch.Tensor) -> int | None:
    """Names the storage of a tensor; None without one. A subclass that leaves dispatch alone is a tensor like any other."""
    is_plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return tensor.untyped_storage()._cdata if is_plain and tensor.layout is torch.strided else None
