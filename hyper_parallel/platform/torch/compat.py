"""What moved, or may move, between the torch releases we support (``TESTED_TORCH``). Tiny functions, no policy.

What a release of torch changes is adapted here. Private names of torch that all tested releases have are also used elsewhere in
``platform/torch`` and ``backends/torch``; ``make test-versions`` finds those that a new release drops.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "all_gather_single",
    "reduce_scatter_single",
    "DTensor",
    "RESPECT_HOOKS",
    "TAKES_RESPECT_HOOKS",
    "OBJECT_OUTLIVES_STORAGE",
    "bare_op",
    "around_compiled_call",
    "become",
    "call_with_hooks",
    "checkpoint",
    "compiler_name",
    "compiler_of",
    "constant_in_graph",
    "default_store",
    "end_watch_of_partition",
    "foreach_norm",
    "has_own_hooks",
    "hooks_around_checkpoint",
    "is_compiled_in_place",
    "is_freed",
    "is_making_graph",
    "is_tracing_autograd",
    "mark_outputs",
    "module_in_graph",
    "new_named_group",
    "own_code",
    "run_eagerly",
    "runs_cuda_graphs",
    "selective_mode",
    "set_local_tensor",
    "skip_in_compiler",
    "share_composable_state",
    "symmetric_memory",
    "symmetric_memory_backend",
    "uncompiled",
    "watch_partition",
    "wrapper_attribute",
]

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor
else:  # pragma: no cover - a build without distributed has no sharded tensor to meet

    class DTensor(torch.Tensor):  # type: ignore[no-redef]
        """Stands in for the sharded tensor; nothing is an instance of it."""


def set_local_tensor(sharded: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor use ``local`` as this rank's part; assigning to ``.data`` silently keeps the old part."""
    sharded._local_tensor = local


def symmetric_memory() -> Any:
    """torch's symmetric-memory module, or None where the build has none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


def symmetric_memory_backend(device_type: str) -> str | None:
    """The name of the symmetric-memory backend of a device; torch 2.8 cannot be asked, and has CUDA's alone."""
    memory = symmetric_memory()
    if memory is None:
        return None
    if not hasattr(memory, "get_backend"):
        return "CUDA" if device_type == "cuda" else None
    backend: str | None = memory.get_backend(device_type)
    return backend


def wrapper_attribute(module: torch.nn.Module) -> str | None:
    """The attribute under which a wrapper of torch's keeps the module it wraps, or None for any other module."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    for attribute in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        if attribute in module._modules:
            return attribute
    return None


def foreach_norm(tensors: list[torch.Tensor], power: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The norm of each tensor, in few kernels where the device has them; in ``dtype`` where one is given."""
    return list(torch._foreach_norm(tensors, power, dtype=dtype))


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give the object ``tensor`` the bytes and attributes of ``other``, of the same class; identity is kept."""
    swap: Any = torch.utils.swap_tensors  # carries no types
    swap(tensor, other)


def is_freed(storage: torch.UntypedStorage) -> bool:
    """Whether the bytes are returned although the storage's Python object still lives (see ``OBJECT_OUTLIVES_STORAGE``)."""
    return bool(torch._C._storage_Use_Count(storage._cdata) == 0)


def _object_outlives_storage() -> bool:
    tensor = torch.empty(1)
    storage_object, name = weakref.ref(tensor.untyped_storage()), StorageWeakRef(tensor.untyped_storage())
    del tensor
    return storage_object() is not None and name.expired()


OBJECT_OUTLIVES_STORAGE = _object_outlives_storage()
"""Whether a storage's Python object lives on, without bytes, while a ``StorageWeakRef`` names it. So in 2.8, not in 2.13."""


Fn = TypeVar("Fn", bound=Callable[..., Any])

_CHECKPOINT_OPTIONS = frozenset(inspect.signature(torch.utils.checkpoint.checkpoint).parameters)
_TAKES_EARLY_STOP = "early_stop" in _CHECKPOINT_OPTIONS
RESPECT_HOOKS = "respect_saved_tensors_hooks"
TAKES_RESPECT_HOOKS = RESPECT_HOOKS in _CHECKPOINT_OPTIONS
"""Whether torch's checkpoint can be told what hooks around it do with values that selective checkpointing saves (2.15)."""


def hooks_around_checkpoint() -> Any:  # (pack, unpack) | None
    """The hooks that torch's selective checkpointing would ask about a value it saves now; None where it asks none."""
    find: Any = getattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks", None)
    return None if find is None else find()


def selective_mode(context: Any) -> Any:
    """``context`` if it is torch's own selective mode and can be told about hooks, else None."""
    return context if hasattr(context, RESPECT_HOOKS) else None


def checkpoint(function: Callable[..., Any], *args: Any, early_stop: bool = True, **kwargs: Any) -> Any:
    """torch's non-reentrant checkpoint; an error inside it takes its hooks off at once, on the thread that raised."""
    try:
        return _checkpoint(function, *args, early_stop=early_stop, **kwargs)
    except BaseException as error:
        _close_open_checkpoint(error)
        raise


def _close_open_checkpoint(error: BaseException) -> None:
    """Before 2.13 the hooks stay until the error is forgotten, and come off on whichever thread that happens.

    A replay runs on the device's own thread: it would keep stale hooks for ever, and the caller's thread lose its own.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "checkpoint" and frame.f_globals is vars(torch.utils.checkpoint):
            generator = frame.f_locals.get("gen")
            if generator is not None:
                generator.close()
            return  # a checkpoint inside this one has closed its own
        trace = trace.tb_next


def _checkpoint(function: Callable[..., Any], *args: Any, early_stop: bool, **kwargs: Any) -> Any:
    """Releases before 2.10 take ``early_stop`` from a context only."""
    if _TAKES_EARLY_STOP:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, early_stop=early_stop, **kwargs)
    if early_stop:  # the default; the context is process-wide, so it is entered only where it is needed
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def run_eagerly(reason: str) -> Callable[[Fn], Fn]:
    """Keep torch.compile out of a function: it breaks the graph there and says why under ``fullgraph=True``."""

    def decorate(function: Fn) -> Fn:
        try:
            disabled: Fn = torch.compiler.disable(function, reason=reason)
        except TypeError:  # 2.8 takes no reason
            disabled = torch.compiler.disable(function)
        return disabled

    return decorate


def bare_op(op: Any) -> Any:  # torch._ops.OpOverload | torch._ops.HigherOrderOperator
    """What an op's Python call goes on to call: two microseconds less at every op of a region. Others answer as they are."""
    return op._op if type(op) is torch._ops.OpOverload else op


def skip_in_compiler(function: Callable[..., Any]) -> bool:
    """Let torch.compile pass over ``function`` and all it calls, at no cost per call; False where torch cannot.

    Torch wraps a mode's ``__torch_dispatch__`` in a guard that does the same, for a few microseconds at every op.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return False
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return True


def constant_in_graph(function: Fn) -> Fn:
    """Let dynamo call ``function`` while it traces, and put the result into the graph as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's function imports the compiler
    return function


def is_tracing_autograd() -> bool:
    """Whether AOTAutograd runs a graph now, to trace it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def is_making_graph() -> bool:
    """Whether the ops that run now become nodes of a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


_NOT_IN_PATHS = frozenset({"_wrapped", "_orig_mod", "__self__"})
"""Attributes through which a traced function reaches the module inside a wrapper, ``torch.compile(m)`` or ``m.compile()``."""


def module_in_graph() -> str:
    """The path of the module that the op traced now belongs to, below the traced function or the nearest wrapper of ours."""
    stack = torch.fx.traceback.get_current_meta().get("nn_module_stack") or {}
    path: str = next(reversed(stack.values()))[0] if stack else ""
    names = path.split(".")
    starts = [at for at, name in enumerate(names, start=1) if name in _NOT_IN_PATHS or name == "L['module']"]
    return ".".join(names[starts[-1] :]) if starts else ""


_MARK = "hyper_parallel_kept_in_graph"  # in a node's meta: the number of the graph, and what its hooks are told of the value


def mark_outputs(ctx: Any, number: int, mark: Any) -> bool:
    """Mark the nodes that made the output of an op, from inside a selective policy; False where torch does not show them."""
    output = getattr(ctx, "op_output", None)  # 2.13
    tracer = getattr(torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY), "tracer", None)
    nodes = [_node_of(value, tracer) for value in torch.utils._pytree.tree_leaves(output)]
    for node in nodes:
        if node is not None:
            node.meta[_MARK] = number, mark
    return any(node is not None for node in nodes)


def _node_of(value: Any, tracer: Any) -> Any:  # torch.fx.Node | None
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if tracer is None or not isinstance(value, FunctionalTensor):
        return None
    inner = torch._from_functional_tensor(value.elem)
    slot = get_proxy_slot(inner, tracer, None)
    return None if slot is None else slot.proxy.node


_WATCHED: list[tuple[int, Any, Any]] = []
"""The thread that watches, the module of the partitioner and its function, while ours is in its place."""


def watch_partition(report: Callable[[tuple[Any, ...]], None], number: int) -> None:
    """Report, for each value that the graph partitioned next saves through hooks, its mark under ``number``, or None."""
    from torch._functorch import partitioners

    end_watch_of_partition()
    extract = getattr(partitioners, "_extract_fwd_bwd_modules", None)
    if extract is None or _WATCHED:  # another release of torch; another thread compiles
        return

    def extract_and_report(joint: Any, saved_values: list[Any], *args: Any, **kwargs: Any) -> Any:
        made = extract(joint, saved_values, *args, **kwargs)
        seen = [node for node in saved_values if not node.meta.get("saved_tensor_with_no_vc_check", False)]
        report(tuple(_mark_of(node, number) for node in seen))
        return made

    _WATCHED.append((threading.get_ident(), partitioners, extract))
    partitioners._extract_fwd_bwd_modules = extract_and_report  # type: ignore[assignment]


def end_watch_of_partition() -> None:
    """Put torch's own function back, if this thread watches."""
    if _WATCHED and _WATCHED[-1][0] == threading.get_ident():
        _, module, extract = _WATCHED.pop()
        module._extract_fwd_bwd_modules = extract


def _mark_of(node: Any, number: int) -> Any:
    """The mark of a node, or of what it is a view of; None for none."""
    while True:
        marked, mark = node.meta.get(_MARK, (None, None))
        if marked == number:
            return mark
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        is_view = any(result.alias_info is not None for result in returns)
        if not is_view or not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]


def compiler_of(module: torch.nn.Module) -> Any:  # torch._dynamo.eval_frame._TorchDynamoContext | None
    """What compiles the whole module: a function that compiles another function with the same settings; None if nothing does."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # imported by the first torch.compile; importing it takes a second
    if dynamo is None or not hasattr(dynamo, "OptimizedModule"):  # another thread imports it now
        return None
    if isinstance(module, dynamo.OptimizedModule):
        return module.dynamo_ctx
    compiled = module.__dict__.get("_compiled_call_impl") or module.__dict__.get("forward", type(module).forward)
    cells = dict(zip(getattr(getattr(compiled, "__code__", None), "co_freevars", ()), compiled.__closure__ or ()))
    held = cells["self"].cell_contents if "self" in cells else None
    return held if isinstance(held, dynamo.eval_frame.OptimizeContext) else None


def runs_cuda_graphs(module: torch.nn.Module) -> bool:
    """Whether the module is compiled into CUDA graphs; on other devices the modes that ask for them do not make any."""
    compiler = compiler_of(module)
    config = getattr(_backend_of(compiler), "config", None) if compiler is not None else None
    return bool(isinstance(config, dict) and config.get("triton.cudagraphs")) and _is_on_cuda(module)


def _is_on_cuda(module: torch.nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def _backend_of(compiler: Any) -> Any:
    callback = compiler.callback
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return getattr(callback, "compiler_fn", callback)


def compiler_name(module: torch.nn.Module) -> str | None:
    """The backend that compiles the whole module, with its options; None if nothing does."""
    compiler = compiler_of(module)
    if compiler is None:
        return None
    backend = _backend_of(compiler)
    return str(getattr(backend, "compiler_name", getattr(backend, "__name__", type(backend).__name__)))


def uncompiled(module: Any) -> Any:  # torch.nn.Module | Callable[..., Any]
    """The module inside ``torch.compile(module)``, or the module itself."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return module._orig_mod if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else module


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called: the module's hooks are a part of what is compiled."""
    return module.__dict__.get("_compiled_call_impl") is not None


@contextlib.contextmanager
def around_compiled_call(module: torch.nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Let ``around(call, *args, **kwargs)`` stand for each call of a module that was compiled in place."""
    compiled = module.__dict__["_compiled_call_impl"]
    module.__dict__["_compiled_call_impl"] = functools.partial(around, compiled)
    try:
        yield
    finally:
        module.__dict__["_compiled_call_impl"] = compiled


_OWN_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_own_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks on this very module run around its forward."""
    return any(module.__dict__.get(name) for name in _OWN_HOOKS)


def call_with_hooks(module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a module with another function in the place of its forward: its hooks run around that."""
    before = module.__dict__["forward"]  # ``torch.compile(module)`` has a forward of its own
    module.__dict__["forward"] = forward
    try:
        return torch.nn.Module.__call__(module, *args, **kwargs)
    finally:
        module.__dict__["forward"] = before


def own_code(function: Any) -> Callable[..., Any]:  # types.FunctionType
    """The same function with a code object of its own: dynamo counts recompilations by code object."""
    code = function.__code__.replace(co_name=function.__code__.co_name)
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def default_store() -> Any:  # torch.distributed.Store
    """The store that the default group was made with."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._get_default_store()


def new_named_group(
    ranks: list[int], name: str, *, timeout: Any, backend: Any, pg_options: Any, group_desc: Any
) -> Any:
    """``new_group`` for members alone, under a name of ours.

    torch names a group by a counter, which ranks that skip a call get wrong, or (local synchronisation) by its ranks and
    the number of groups on *this* rank, which differs between members of overlapping groups: both then wait for ever.
    """
    c10d: Any = torch.distributed.distributed_c10d
    world = c10d._get_default_group()
    world_backend, store = c10d._world.pg_map[world]
    backend = c10d.Backend(backend or world_backend)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(world.rank()),
        ranks,
        backend,
        store,
        name,
        backend_options=pg_options,
        timeout=timeout if timeout is not None else c10d._get_default_timeout(backend),
        group_desc=group_desc,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def all_gather_single(output: torch.Tensor, data: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    """One tensor gathered from all ranks; torch 2.13 renamed it and warns about the older name."""
    distributed: Any = torch.distributed
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return gather(output, data, group=group, async_op=async_op)


def reduce_scatter_single(output: torch.Tensor, data: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
    """One tensor summed and scattered; torch 2.13 renamed it and warns about the older name."""
    distributed: Any = torch.distributed
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return scatter(output, data, group=group, async_op=async_op)


def share_composable_state(module: torch.nn.Module, stand_in: torch.nn.Module) -> None:
    """Let ``stand_in`` carry what ``fully_shard`` knows of ``module``, whose place in the tree it takes."""
    from torch.distributed import _composable_state

    state = _composable_state._get_module_state(module)
    if state is not None:
        _composable_state._insert_module_state(stand_in, state)
