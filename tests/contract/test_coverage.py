"""The contract's own inventory: the 95 members with their parameters, and that each has a test which names it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from hyper_parallel.platform.platform import Platform

# Written by hand from the contract; "property" where the member is one.
MEMBERS = {
    # ranks and groups
    "get_rank": "()",
    "get_world_size": "()",
    "get_global_rank": "(group, group_rank)",
    "get_group_local_rank": "(group=None)",
    "init_process_group": (
        "(backend=None, *, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, pg_options=None, "
        "device_id=None)"
    ),
    "destroy_process_group": "(group=None)",
    "get_process_group_ranks": "(group=None)",
    "get_backend": "(group=None)",
    "create_group": "(rank_list)",
    "_create_group": "(rank_list)",
    "get_created_group": "(rank_list)",
    "mark_created_groups": "(process_group)",
    "split_group": "(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None)",
    "barrier": "(group=None, async_op=False, device_ids=None)",
    "all_gather_object": "(object_list, obj, group=None)",
    "send_object_list": "(obj_list, dst=None, group=None)",
    "recv_object_list": "(obj_list, src=None, group=None)",
    # collectives
    "all_gather_into_tensor": "(data, group_info, async_op=False)",
    "reduce_scatter_tensor": "(data, group_info, async_op=False)",
    "all_reduce": "(data, group_info, async_op=False)",
    "all_to_all_single": "(input_tensor, output_shape, group, async_op=False)",
    "broadcast": "(data, src, group, async_op=False)",
    "isend": "(tensor, dst=None, group=None, tag=0)",
    "irecv": "(tensor, src=None, group=None, tag=0)",
    # differentiable collectives
    "differentiable_all_gather_concat": "(data, group, concat_size, concat_dim)",
    "differentiable_all_to_all": "(input_data, output_shape, group)",
    "differentiable_all_reduce": "(data, op, group)",
    "differentiable_reduce_scatter": "(data, dev_num, axis, op, group)",
    "differentiable_all_to_all_single": "(input_tensor, input_splits, output_splits, group)",
    "differentiable_all_to_all_single_async": "(input_tensor, input_splits, output_splits, group)",
    "differentiable_async_a2a_wait": ("(x, work, out_perm, group, world_size, concat_dim, split_dim, handle_box=None)"),
    "differentiable_sync_hook": "(x, hook_name, coordinator)",
    "p2p_exchange": "(tensor, peer_rank, group=None)",
    # tensors and dtypes
    "is_tensor": "(obj)",
    "get_element_size": "(tensor)",
    "get_tensor_storage_size": "(tensor)",
    "tensor_type_cast": "(input_data, cast_type)",
    "chunk": "(data, split_dim, split_size, index)",
    "cat": "(tensors, dim=0)",
    "arange": "(start, end=None, step=1, dtype=None, device=None)",
    "zeros": "(size, dtype=None, device=None)",
    "new_tensor": "(tensor_shape, tensor_type, device)",
    "full_like": "(tensor, fill_value, dtype=None)",
    "empty_like": "(tensor, *, dtype=None, device=None, pin_memory=False)",
    "construct_strided_slice": "(x, begin, end, stride)",
    "get_tensor_transform": "()",
    "set_tensor_requires_grad": "(input_tensor)",
    "cast_fp_tensor": "(dtype, x)",
    "apply_to_tensors": "(fn, container)",
    "tree_map": "(fn, tree)",
    "tensor_to_numpy": "(tensor)",
    "str_to_dtype": "(dtype_str)",
    "list_to_size": "(size_list)",
    # modules and parameters
    "get_op_name": "(func)",
    "get_cell_construct": "(cell)",
    "get_cells_and_names": "(cell)",
    "parameters_dict": "(cell)",
    "search_parameter_by_name": "(cell, param_name)",
    "update_parameter_by_name": "(cell, result, new_param)",
    "set_layout_into_parameter": "(param, layout)",
    "get_param_local_shape": "(param)",
    "get_param_local_data": "(param)",
    "update_param_data": "(param, data)",
    "load_into_param": "(param, data)",
    "get_param_type_size": "(param)",
    "new_zero_parameter": "(param_shape, param_type, requires_grad, device)",
    "init_parameters": "(module, stage_index)",
    "is_linear_module": "(module)",
    "is_embedding_module": "(module)",
    "register_forward_pre_hook": "(module, hook, prepend=False, with_kwargs=False)",
    "register_full_backward_hook": "(module, hook, prepend=False)",
    "register_full_backward_pre_hook": "(module, hook, prepend=False)",
    "get_model_state_dict": "(model, *, options=None)",
    "save_checkpoint": "(cell, file_path, ckpt_format='safetensors')",
    "load_checkpoint": "(file_path, ckpt_format='safetensors')",
    "clip_grad_norm_": "(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None)",
    "micro_batch": "(micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None)",
    "meta_device": "property",
    "init_on_device": "(device, include_buffers=False)",
    # streams, autograd, activation memory
    "new_stream": "()",
    "get_current_stream": "()",
    "new_event": "()",
    "get_stream_context": "()",
    "set_grad_reduce_handle": "(handle, post_process=None)",
    "wait_grad_handle": "()",
    "_process_current_handle": "()",
    "no_grad": "()",
    "profiler_record": "(name)",
    "checkpoint": "property",
    "noop_context_fn": "property",
    "ckpt_wrapper": "(module, checkpoint_fn=None, **checkpoint_fn_kwargs)",
    "swap_wrapper": "(module, policy_fn=None)",
    "create_selective_checkpoint_contexts": "(policy_fn_or_list, allow_cache_entry_mutation=False)",
    "async_save_on_cpu": "(policy_fn=None)",
    "get_symmetric_memory_handler": "()",
}


def declared_as(owner: type, member: str) -> str:
    """How a class declares a member: "property", or its parameters without their types."""
    declared = inspect.getattr_static(owner, member)
    if isinstance(declared, property):
        return "property"
    signature = inspect.signature(getattr(owner, member))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def test_the_contract_has_95_members():
    assert len(MEMBERS) == 95


@pytest.mark.parametrize("member", MEMBERS)
def test_the_base_declares_the_member(member):
    assert declared_as(Platform, member) == MEMBERS[member]
    declared = inspect.getattr_static(Platform, member)
    assert isinstance(declared, property | staticmethod | classmethod), f"{member} cannot be called on the class"


def test_the_base_has_no_other_members():
    ours = {name for owner in Platform.__mro__[:-1] for name in vars(owner) if callable_or_property(owner, name)}
    helpers = {name for name in ours if name.startswith("_")} - set(MEMBERS)
    assert ours - helpers == set(MEMBERS)
    # Two seams between the cache and its platform; everything else with an underscore is nobody's business here.
    assert {"_is_live_group", "_forget_groups"} <= helpers


def callable_or_property(owner: type, name: str) -> bool:
    return isinstance(vars(owner)[name], property | staticmethod | classmethod) and not name.startswith("__")


def test_every_platform_keeps_the_signatures(platform):
    def parameters(owner: type, member: str) -> str:
        return declared_as(owner, member)

    different = {
        member: parameters(type(platform), member)
        for member, expected in MEMBERS.items()
        if parameters(type(platform), member) != expected
    }
    assert different == {}


def contract_tests():
    """Every test of this suite, as (module source, test)."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if file.stem == Path(__file__).stem:
            continue
        module = importlib.import_module(f"{__package__}.{file.stem}")
        source = file.read_text()
        for name, test in vars(module).items():
            if name.startswith("test_") and getattr(test, "__module__", None) == module.__name__:
                yield source, test


def test_every_member_has_a_test_that_names_it():
    covered = set()
    for source, test in contract_tests():
        for member in getattr(test, "covered_members", ()):
            assert member in MEMBERS, f"{test.__name__} covers {member!r}, which is no member"
            # A claim alone is not enough: the module must use the member somewhere outside the decorator.
            assert re.search(rf"\.{member}\b|getattr\(.*['\"]{member}['\"]", source), (
                f"{test.__name__}: {member} unused"
            )
            covered.add(member)
    assert sorted(set(MEMBERS) - covered) == []
