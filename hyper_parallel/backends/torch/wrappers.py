"""Wrappers of torch modules: what only ``nn.Module`` needs.

What a wrapper does on both frameworks is in ``core/activation_checkpoint/wrapper.py``. A torch wrapper *shares* the wrapped
module's own dictionaries of parameters, buffers, children and hooks of the state dict, so that every method of ``nn.Module``
that reads them finds the wrapped module's. The mode (``training``) is the wrapped module's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch.checkpointing import checkpoint, swap
from hyper_parallel.backends.torch.compiled_calls import NOT_COMPILED, call_compiled, refuse_cuda_graphs
from hyper_parallel.backends.torch.graph_regions import InGraph, region_in_graph, run_in_graph, warn_of_saved_swaps
from hyper_parallel.backends.torch.saved_tensors import TensorPolicy
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.backends.torch.tracing import is_exporting, node_of_trace, refuse_script
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint import wrapper
from hyper_parallel.core.activation_checkpoint.setting_checks import label_of
from hyper_parallel.platform.torch import compat

__all__ = ["ActivationWrapper", "CheckpointWrapper", "FuncModule", "SwapWrapper", "checkpoint_wrapper", "swap_wrapper"]


class FuncModule(wrapper.FunctionModule, nn.Module):
    """A plain callable as a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.fn(*args, **kwargs)


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_SET_ON_WRAPPER = frozenset({"_wrapped", "_compiled_call_impl", "forward"})


class ActivationWrapper(wrapper.ModuleWrapper, nn.Module, is_base=True):
    """The base of our wrappers: everything but ``forward``."""

    _wrapper_traits = wrapper.ModuleTraits(
        base=nn.Module,
        noun="module",
        from_function=FuncModule,
        registries=_REGISTRIES,
        shared=(
            *_REGISTRIES,
            "_non_persistent_buffers_set",
            "_state_dict_hooks",
            "_state_dict_pre_hooks",
            "_load_state_dict_pre_hooks",
            "_load_state_dict_post_hooks",
        ),
        looked_up=("training",),
        registered=(nn.Parameter, nn.Module, nn.Buffer),
        tensors=TENSORS,
    )

    def __init__(self, module: nn.Module | Callable[..., Any]) -> None:
        super().__init__(module)
        compat.share_composable_state(self._wrapped, self)

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module in the wrapper's own way."""

    @property
    def wrapped_module(self) -> nn.Module:
        """The module inside all wrappers of ours."""
        module: nn.Module = self._innermost()
        return module

    @property
    def training(self) -> bool:
        """The wrapped module's mode; there is no other."""
        module = self.__dict__.get("_wrapped")
        return True if module is None else module.training

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("_wrapped")
        if module is not None:  # else torch's own constructor runs
            module.training = mode

    def _is_set_on_wrapper(self, name: str) -> bool:
        return name in _SET_ON_WRAPPER or name.startswith("_fsdp") or super()._is_set_on_wrapper(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register it with the wrapper or the wrapped module, as the rule says."""
        self._register("register_parameter", name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register it with the wrapper or the wrapped module, as the rule says."""
        self._register("add_module", name, module)

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_script(self)
        return self

    # Methods that a module class may override: the wrapped module's own are called.

    def train(self, mode: bool = True) -> ActivationWrapper:
        """Set the mode of the wrapped module."""
        for module in self._modules_inside():
            module.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ActivationWrapper:
        for module in self._modules_inside():
            module._apply(fn, recurse)
        self._share()
        return self

    def extra_repr(self) -> str:
        """What the wrapped module shows of itself."""
        return str(self._wrapped.extra_repr())

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["_wrapped"] = self._wrapped._replicate_for_data_parallel()
        if self._own is not None:
            replica.__dict__["_own"] = self._own._replicate_for_data_parallel()
        replica._share()
        return replica


class CheckpointWrapper(wrapper.CheckpointCalls, ActivationWrapper, is_plain=True):
    """Every call goes through a checkpoint function, ours unless another is given."""

    _checkpoint_function = checkpoint
    _in_graph: InGraph | None = None

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        checkpoint_fn: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(module, checkpoint_fn, **keywords)
        function, keywords, _ = self._settings
        self._in_graph = region_in_graph(function, keywords, label_of(compat.uncompiled(module), TENSORS))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under the checkpoint function."""
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            return self._call_in_graph(args, kwargs)
        node = node_of_trace(self, args, kwargs)
        if node is not None:
            return node
        if is_exporting():
            return self._wrapped(*args, **kwargs)
        in_graph = self._in_graph
        if in_graph is not None and in_graph.region is not None and torch.is_grad_enabled():
            output = call_compiled(in_graph, self._wrapped, args, {**in_graph.bound, **kwargs})
            if output is not NOT_COMPILED:
                return output
        elif in_graph is not None and torch.is_grad_enabled():
            refuse_cuda_graphs(self._wrapped)
        return self._call_checkpointed(args, kwargs)

    def _call_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while dynamo traces it (``graph_regions.py``); a checkpoint function of others is traced as it is."""
        in_graph = self._in_graph
        if in_graph is None:
            return self._call_checkpointed(args, kwargs)
        if in_graph.region is None:
            return _saved_in_graph(self._wrapped, args, {**in_graph.bound, **kwargs})
        if in_graph.swaps_inputs or in_graph.swapped:
            warn_of_saved_swaps()
        return run_in_graph(in_graph.region, self._wrapped, args, {**in_graph.bound, **kwargs})

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module: what is swapped stays outside of the graph."""
        self._wrapped.compile(*args, **kwargs)


class SwapWrapper(wrapper.SwapCalls, ActivationWrapper, is_plain=True):
    """What the wrapped module saves for backward goes to far memory and comes back in time."""

    _swap_function = swap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module under the swap hooks."""
        if torch.compiler.is_dynamo_compiling() and not is_exporting():
            return _saved_in_graph(self._wrapped, args, kwargs)
        node = node_of_trace(self, args, kwargs)
        if node is not None:
            return node
        if is_exporting() or not torch.is_grad_enabled():
            return self._wrapped(*args, **kwargs)
        refuse_cuda_graphs(self._wrapped)
        return self._call_swapped(args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module: the hooks stay outside of the graph."""
        self._wrapped.compile(*args, **kwargs)


def _saved_in_graph(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the module in a traced graph, which cannot swap what it saves."""
    if torch.is_grad_enabled():
        warn_of_saved_swaps()
    return module(*args, **kwargs)


def checkpoint_wrapper(module: nn.Module | Callable[..., Any], **keywords: Any) -> CheckpointWrapper:
    """See ``hyper_parallel.checkpoint_wrapper``."""
    wrapper.refuse_reentrant(keywords)
    return CheckpointWrapper(module, **keywords)


def swap_wrapper(
    module: nn.Module | Callable[..., Any],
    policy_fn: TensorPolicy | None = None,
    *,
    swap_config: SwapConfig | None = None,
) -> SwapWrapper:
    """See ``hyper_parallel.swap_wrapper``."""
    return SwapWrapper(module, policy_fn, swap_config=swap_config)
