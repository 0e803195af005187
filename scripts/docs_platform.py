"""The site's hook for the Platform contract: ``<!-- platform: members -->`` becomes a table of all members, by group.

What a member does is its docstring. A line of use of each is here; ``tests/contract/test_uses.py`` runs every line on two ranks
of each framework, with the names of ``NAMES``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hyper_parallel.platform.platform import Platform

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "rank, peer": "my rank and the other one's, of two",
        "x": "a tensor of float32, shape (2, 4)",
        "weight": "a `platform.Parameter` of shape (4, 4)",
        "model": "a module with the layers `first` and `second`",
        "fn": "a function of one tensor",
        "path": "a path that all ranks share",
    }
)


@dataclasses.dataclass(frozen=True)
class Use:
    """One line that uses a member."""

    line: str
    rank: int | None = None  # the rank that runs it; None: every rank
    refused_on: str = ""  # the platform that refuses it, with a reason and what to do instead


GROUPS: Mapping[str, Mapping[str, Use]] = MappingProxyType(
    {
        "Ranks and groups": {
            "init_process_group": Use("platform.init_process_group(timeout=300)"),
            "get_rank": Use("is_first = platform.get_rank() == 0"),
            "get_world_size": Use("share = 1 / platform.get_world_size()"),
            "create_group": Use("group = platform.create_group([0, 1])"),
            "_create_group": Use("apart = platform._create_group([0, 1])"),
            "get_created_group": Use("assert platform.get_created_group([1, 0]) is group"),
            "mark_created_groups": Use("platform.mark_created_groups([group])"),
            "get_process_group_ranks": Use("ranks = platform.get_process_group_ranks(group)"),
            "get_group_local_rank": Use("my_place = platform.get_group_local_rank(group)"),
            "get_global_rank": Use("first = platform.get_global_rank(group, 0)"),
            "get_backend": Use("print(platform.get_backend(group))"),
            "split_group": Use("mine = platform.split_group(split_ranks=[[0], [1]])"),
            "barrier": Use("platform.barrier(group)"),
            "all_gather_object": Use("platform.all_gather_object(names := [None, None], f'rank {rank}')"),
            "send_object_list": Use("platform.send_object_list(['step', 3], dst=1)", rank=0),
            "recv_object_list": Use("platform.recv_object_list(received := [None, None], src=0)", rank=1),
        },
        "Collectives without a gradient": {
            "all_reduce": Use("total = platform.all_reduce(x, group)"),
            "all_gather_into_tensor": Use(
                "gathered, handle = platform.all_gather_into_tensor(x, group, async_op=True)"
            ),
            "reduce_scatter_tensor": Use("my_rows = platform.reduce_scatter_tensor(x, group)"),
            "all_to_all_single": Use("exchanged, work = platform.all_to_all_single(x, (2, 4), group)"),
            "broadcast": Use("platform.broadcast(x, 0, group)"),
            "isend": Use("platform.isend(x, dst=1).wait()", rank=0),
            "irecv": Use("platform.irecv(platform.empty_like(x), src=0).wait()", rank=1),
        },
        "Collectives with a gradient": {
            "differentiable_all_reduce": Use("y = platform.differentiable_all_reduce(x, 'mean', group)"),
            "differentiable_all_gather_concat": Use("y = platform.differentiable_all_gather_concat(x, group, 2, 1)"),
            "differentiable_reduce_scatter": Use("y = platform.differentiable_reduce_scatter(x, 2, -1, 'sum', group)"),
            "differentiable_all_to_all": Use("y = platform.differentiable_all_to_all(x, (2, 4), group)"),
            "differentiable_all_to_all_single": Use(
                "y = platform.differentiable_all_to_all_single(x, [1, 1], [1, 1], group)"
            ),
            "differentiable_all_to_all_single_async": Use(
                "y = platform.differentiable_all_to_all_single_async(x, [1, 1], [1, 1], group)"
            ),
            "differentiable_async_a2a_wait": Use(
                "y = platform.differentiable_async_a2a_wait(x, work, exchanged.reshape(2, 1, 4), group, 2, 1, 0)"
            ),
            "differentiable_sync_hook": Use("y = platform.differentiable_sync_hook(x, 'A', HookCoordinator())"),
            "p2p_exchange": Use("theirs = platform.p2p_exchange(x, peer)"),
        },
        "Tensors and dtypes": {
            "is_tensor": Use("assert platform.is_tensor(x)"),
            "get_element_size": Use("assert platform.get_element_size(x) == 4"),
            "get_tensor_storage_size": Use("assert platform.get_tensor_storage_size(x) == 32"),
            "tensor_type_cast": Use("half = platform.tensor_type_cast(x, 'bfloat16')"),
            "chunk": Use("second_half = platform.chunk(x, 1, 2, 1)"),
            "cat": Use("longer = platform.cat([x, x], dim=1)"),
            "arange": Use("places = platform.arange(4)"),
            "zeros": Use("zeros = platform.zeros((2, 4), dtype=platform.str_to_dtype('float32'))"),
            "new_tensor": Use(
                "buffer = platform.new_tensor((2, 4), platform.str_to_dtype('float32'), platform.device())"
            ),
            "full_like": Use("ones = platform.full_like(x, 1.0)"),
            "empty_like": Use("host = platform.empty_like(x, device='cpu', pin_memory=True)"),
            "construct_strided_slice": Use("odd = platform.construct_strided_slice(x, [0, 1], [2, 4], [1, 2])"),
            "get_tensor_transform": Use("transform = platform.get_tensor_transform()", refused_on="torch"),
            "set_tensor_requires_grad": Use("leaf = platform.set_tensor_requires_grad(platform.full_like(x, 1.0))"),
            "cast_fp_tensor": Use("half = platform.cast_fp_tensor(platform.str_to_dtype('float16'), x)"),
            "apply_to_tensors": Use("doubled = platform.apply_to_tensors(lambda t: t * 2, {'x': x, 'n': 3})"),
            "tree_map": Use("types = platform.tree_map(type, {'x': x, 'n': 3})"),
            "tensor_to_numpy": Use("array = platform.tensor_to_numpy(x)"),
            "str_to_dtype": Use("dtype = platform.str_to_dtype('bfloat16')"),
            "list_to_size": Use("size = platform.list_to_size([2, 4])"),
        },
        "Modules and parameters": {
            "get_op_name": Use("name = platform.get_op_name(fn)"),
            "get_cell_construct": Use("forward = platform.get_cell_construct(model)"),
            "get_cells_and_names": Use("names = [name for name, _ in platform.get_cells_and_names(model)]"),
            "parameters_dict": Use("shapes = {name: p.shape for name, p in platform.parameters_dict(model).items()}"),
            "search_parameter_by_name": Use("found = platform.search_parameter_by_name(model, 'first.weight')"),
            "update_parameter_by_name": Use(
                "assert platform.update_parameter_by_name(model, ('first.weight', found), weight)"
            ),
            "set_layout_into_parameter": Use(
                "cut = platform.set_layout_into_parameter(weight, ParameterLayout(mesh={'tp': 2}, dims=('tp', None)))"
            ),
            "get_param_local_shape": Use("assert tuple(platform.get_param_local_shape(cut)) == (2, 4)"),
            "get_param_local_data": Use("my_rows = platform.get_param_local_data(cut)"),
            "update_param_data": Use("platform.update_param_data(cut, x)"),
            "load_into_param": Use("platform.load_into_param(cut, platform.cat([x, x], dim=0))"),
            "get_param_type_size": Use("assert platform.get_param_type_size(cut) == 4"),
            "new_zero_parameter": Use(
                "bias = platform.new_zero_parameter((4,), platform.str_to_dtype('float32'), True, platform.device())"
            ),
            "init_parameters": Use("platform.init_parameters(model, stage_index=0)"),
            "is_linear_module": Use("assert platform.is_linear_module(model.first)"),
            "is_embedding_module": Use("assert platform.is_embedding_module(model.embed)"),
            "register_forward_pre_hook": Use(
                "platform.register_forward_pre_hook(model, lambda module, args: print(args)).remove()"
            ),
            "register_full_backward_hook": Use(
                "platform.register_full_backward_hook(model, lambda module, grad_input, grad_output: None).remove()"
            ),
            "register_full_backward_pre_hook": Use(
                "platform.register_full_backward_pre_hook(model, lambda module, grad_output: None).remove()"
            ),
            "get_model_state_dict": Use(
                "state = platform.get_model_state_dict(model, options={'full_state_dict': True})"
            ),
            "save_checkpoint": Use("platform.save_checkpoint({'x': x}, f'{path}-{rank}.safetensors')"),
            "load_checkpoint": Use("x = platform.load_checkpoint(f'{path}-{rank}.safetensors')['x']"),
            "clip_grad_norm_": Use(
                "bias.grad = platform.full_like(bias, 2.0); assert float(platform.clip_grad_norm_([bias], 1.0)) == 4"
            ),
            "micro_batch": Use("outputs = platform.micro_batch(2)(fn)(x)"),
            "meta_device": Use("assert platform.meta_device is not None"),
            "init_on_device": Use("with platform.init_on_device(platform.meta_device): empty = type(model)()"),
        },
        "Streams, gradients, activation memory": {
            "new_stream": Use("stream = platform.new_stream()"),
            "get_current_stream": Use("current = platform.get_current_stream()"),
            "new_event": Use("event = platform.new_event(); event.record(current); stream.wait_event(event)"),
            "get_stream_context": Use("with platform.get_stream_context()(stream): y = x * 2"),
            "set_grad_reduce_handle": Use(
                "platform.set_grad_reduce_handle(handle, lambda: print('the reduction is over'))"
            ),
            "_process_current_handle": Use("platform._process_current_handle()"),
            "wait_grad_handle": Use("platform.wait_grad_handle()"),
            "no_grad": Use("with platform.no_grad(): y = fn(x)"),
            "profiler_record": Use("with platform.profiler_record('loss'): y = fn(x)"),
            "checkpoint": Use("y = platform.checkpoint(fn, x)"),
            "noop_context_fn": Use("forward_context, replay_context = platform.noop_context_fn()"),
            "ckpt_wrapper": Use("layer = platform.ckpt_wrapper(model.first)"),
            "swap_wrapper": Use("layer = platform.swap_wrapper(model.first)"),
            "create_selective_checkpoint_contexts": Use(
                "contexts = platform.create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: True)"
            ),
            "async_save_on_cpu": Use("with platform.async_save_on_cpu(): y = fn(x)"),
            "get_symmetric_memory_handler": Use("is_there = platform.get_symmetric_memory_handler().is_available()"),
        },
        "The end": {"destroy_process_group": Use("platform.destroy_process_group()")},
    }
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the place of a page."""
    return markdown.replace("<!-- platform: members -->", "\n".join([*_names(), *_groups()]))


def _names() -> list[str]:
    return ["| name | stands for |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in NAMES.items()), ""]


def _groups() -> list[str]:
    lines = []
    for title, members in GROUPS.items():
        lines += [f"### {title}", ""]
        for member, use in members.items():
            lines += [f"#### `{signature(member)}`", "", description(member), "", "```python", *_shown(use), "```", ""]
    return lines


def _shown(use: Use) -> list[str]:
    notes = [] if use.rank is None else [f"on rank {use.rank}"]
    notes += [f"refused by name on {use.refused_on}"] if use.refused_on else []
    return [use.line + (f"  # {', '.join(notes)}" if notes else "")]


def signature(member: str) -> str:
    """A member with its parameters and their defaults, without types."""
    if isinstance(inspect.getattr_static(Platform, member), property):
        return member
    parameters = inspect.signature(getattr(Platform, member)).parameters.values()
    return member + str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))


def description(member: str) -> str:
    """The docstring of the base."""
    text = inspect.getdoc(inspect.getattr_static(Platform, member))
    assert text, f"{member} has no docstring"
    return text.replace("``", "`")
