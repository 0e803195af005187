"""A third framework subclasses the base: tensors are Python lists, modules have two methods, nothing else is needed.

What the base decides without a framework works at once: hooks, ``init_parameters``, groups and their cache, the gradient
handle, micro-batches and trees. The members of this framework are instance methods, as a user would write them.
"""

from __future__ import annotations

import contextlib

import pytest

import hyper_parallel.platform.platform as platform_module
from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS, Platform, get_platform

from .marks import covers


class Numbers(list):
    """The tensor of the third framework: rows of numbers."""

    @property
    def shape(self):
        return (len(self),)


class Lazy:
    """A parameter that gets its values when somebody asks for them."""

    def __init__(self, values):
        self.values, self.has_init, self._made = None, True, values

    def init_data(self):
        self.values, self.has_init = self._made, False


class Layer:
    """A module: parameters, and hooks before its forward, after its backward and before it."""

    def __init__(self, **parameters):
        self.parameters = parameters
        self.hooks = {"forward_pre": [], "full_backward": [], "full_backward_pre": []}

    def _register(self, kind, hook, prepend):
        self.hooks[kind].insert(0 if prepend else len(self.hooks[kind]), hook)
        return contextlib.closing(hook)

    def register_forward_pre_hook(self, hook, *, prepend, with_kwargs):
        return self._register("forward_pre", (hook, with_kwargs), prepend)

    def register_full_backward_hook(self, hook, *, prepend):
        return self._register("full_backward", hook, prepend)

    def register_full_backward_pre_hook(self, hook, *, prepend):
        return self._register("full_backward_pre", hook, prepend)


class ListPlatform(Platform):
    """The third framework; every member is an instance method."""

    def __init__(self):
        self.groups_made = []
        self.streams_made = 0
        self.log = []

    def is_tensor(self, obj):
        return isinstance(obj, Numbers)

    def chunk(self, data, split_dim, split_size, index):
        return Numbers(data[index * split_size : (index + 1) * split_size])

    def parameters_dict(self, cell):
        return dict(cell.parameters)

    def get_world_size(self):
        return 4

    def get_process_group_ranks(self, group=None):
        return list(group)

    def _create_group(self, rank_list):
        self.groups_made.append(tuple(rank_list))
        return self.groups_made[-1]

    def new_stream(self):
        self.streams_made += 1
        return self

    def get_current_stream(self):
        return self

    def get_stream_context(self):
        return lambda stream: contextlib.nullcontext()

    def wait_stream(self, stream):
        self.log.append("the current stream waits")


@pytest.fixture
def lists(monkeypatch):
    made = ListPlatform()
    monkeypatch.setattr(platform_module, "platform", made)
    monkeypatch.setattr(Platform, "grad_sync_stream", None)
    known = dict(EXISTING_COMM_GROUPS)
    EXISTING_COMM_GROUPS.clear()
    yield made
    EXISTING_COMM_GROUPS.clear()
    EXISTING_COMM_GROUPS.update(known)


@covers("register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook")
def test_the_modules_own_hooks_serve_the_members(lists):
    layer = Layer()
    for hook, prepend in (("second", False), ("first", True)):
        lists.register_forward_pre_hook(layer, hook, prepend, with_kwargs=prepend)
        lists.register_full_backward_hook(layer, hook, prepend)
        assert lists.register_full_backward_pre_hook(layer, hook, prepend=prepend) is not None
    assert layer.hooks == {
        "forward_pre": [("first", True), ("second", False)],
        "full_backward": ["first", "second"],
        "full_backward_pre": ["first", "second"],
    }
    with pytest.raises(UnsupportedMemberError, match=r"because Numbers has no method register_full_backward_hook\(\)"):
        lists.register_full_backward_hook(Numbers(), print)


@covers("init_parameters")
def test_lazy_parameters_get_their_values(lists):
    lazy, ready = Lazy([1.0, 2.0]), Numbers([3.0])
    lists.init_parameters(Layer(weight=lazy, bias=ready), 1)
    assert (lazy.values, lazy.has_init, ready) == ([1.0, 2.0], False, [3.0])
    with pytest.raises(ValueError, match="stage_index must be a pipeline stage"):
        lists.init_parameters(Layer(), -1)
    with pytest.raises(ValueError, match="module must be the module of a pipeline stage"):
        lists.init_parameters(None, 0)


@covers("create_group", "get_created_group", "mark_created_groups")
def test_groups_are_made_by_the_instance_and_cached(lists):
    assert get_platform() is lists
    assert lists.create_group([2, 0]) == lists.create_group([0, 2]) == (0, 2)
    assert lists.groups_made == [(0, 2)]
    assert lists.get_created_group([2, 0]) == (0, 2)
    lists.mark_created_groups([(1, 3)])
    assert lists.get_created_group([3, 1]) is not None
    with pytest.raises(ValueError, match="the world has 4 ranks"):
        lists.create_group([4])


@covers("set_grad_reduce_handle", "wait_grad_handle")
def test_gradients_are_finished_on_a_stream_of_the_instance(lists):
    class Reduction:
        def wait(self):
            lists.log.append("reduced")

    for _ in range(2):
        lists.set_grad_reduce_handle(Reduction(), lambda: lists.log.append("post"))
    lists.wait_grad_handle()
    assert lists.log == ["reduced", "post", "reduced", "post", "the current stream waits"]
    assert lists.streams_made == 1


@covers("micro_batch", "apply_to_tensors")
def test_a_batch_is_split_by_the_instance(lists):
    total = lists.micro_batch(2)(lambda rows, scale: scale * sum(rows))
    assert total(Numbers([1, 2, 3, 4]), 10) == [30, 70]
    assert lists.apply_to_tensors(lambda rows: len(rows), {"a": Numbers([1, 2]), "b": "text"})["b"] == "text"


def test_what_nobody_serves_says_so(lists):
    with pytest.raises(UnsupportedMemberError, match="all_reduce"):
        lists.all_reduce(Numbers([1]), None)
