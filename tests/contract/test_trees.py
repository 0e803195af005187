"""Containers come back as what they were, with everything else they carry."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.trees import tree_map

from .marks import covers


class Point(NamedTuple):
    x: Any
    y: Any


class Special(Point):
    """A named tuple whose constructor is not its fields."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    derived: Any = dataclasses.field(init=False, default="derived")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = 2


@dataclasses.dataclass
class Counting:
    """Its constructor has effects; mapping must not run it again."""

    value: Any
    made: int = 0

    def __post_init__(self):
        self.made += 1


class TaggedList(list):
    pass


class TaggedDict(dict):
    pass


@covers("tree_map")
def test_every_leaf_is_mapped_and_every_type_kept(platform):
    tree = [1, (2, None), Point(3, "s"), {"k": 4, "n": [5]}, OrderedDict(b=6, a=7), {8}, frozenset({9})]
    mapped = platform.tree_map(lambda leaf: (type(leaf).__name__, leaf), tree)
    assert mapped == [
        ("int", 1),
        (("int", 2), ("NoneType", None)),
        Point(("int", 3), ("str", "s")),
        {"k": ("int", 4), "n": [("int", 5)]},
        OrderedDict(b=("int", 6), a=("int", 7)),
        {("int", 8)},
        frozenset({("int", 9)}),
    ]
    assert [type(item) for item in mapped[2:]] == [Point, dict, OrderedDict, set, frozenset]
    assert list(mapped[4]) == ["b", "a"]


@covers("tree_map")
def test_subclasses_keep_what_they_carry(platform):
    listed, table = TaggedList([1, 2]), TaggedDict(a=1)
    listed.tag = table.tag = "kept"
    mapped_list, mapped_table = platform.tree_map(lambda leaf: leaf + 1, (listed, table))
    assert (type(mapped_list), mapped_list, mapped_list.tag) == (TaggedList, [2, 3], "kept")
    assert (type(mapped_table), mapped_table, mapped_table.tag) == (TaggedDict, {"a": 2}, "kept")
    assert (listed, table) == ([1, 2], {"a": 1})
    defaults = platform.tree_map(lambda leaf: leaf + 1, defaultdict(list, a=1))
    assert (defaults["a"], defaults["new"]) == (2, [])
    assert platform.tree_map(lambda leaf: leaf * 2, Counter("aab")) == Counter(a=4, b=2)
    special = platform.tree_map(lambda leaf: leaf + 1, Special(1))
    assert (type(special), special) == (Special, (2, 2))


@covers("tree_map")
def test_dataclasses_are_rebuilt_without_their_constructor(platform):
    frozen = platform.tree_map(lambda leaf: [leaf], Frozen(1))
    assert (frozen.a, frozen.derived) == ([1], ["derived"])
    assert platform.tree_map(lambda leaf: leaf + 1, Slotted(1)) == Slotted(2, 3)
    original = Counting(Counting(5))
    mapped = platform.tree_map(lambda leaf: leaf * 10, original)
    assert (mapped.value.value, mapped.value.made, mapped.made) == (50, 10, 10)
    assert (original.value.value, original.made) == (5, 1)
    assert platform.tree_map(lambda leaf: leaf is Frozen, Frozen) is True


@covers("apply_to_tensors")
def test_only_tensors_are_touched(platform, adapter):
    tree = {
        "a": adapter.tensor([1.0]),
        "b": [adapter.tensor([2.0]), "text", None, 3],
        "c": Frozen(adapter.tensor([4.0])),
    }
    doubled = platform.apply_to_tensors(lambda tensor: tensor * 2, tree)
    assert adapter.numpy(doubled["a"]).tolist() == [2.0]
    assert adapter.numpy(doubled["b"][0]).tolist() == [4.0]
    assert doubled["b"][1:] == ["text", None, 3]
    assert adapter.numpy(doubled["c"].a).tolist() == [8.0]
    assert doubled["c"].derived == "derived"
    assert adapter.numpy(tree["a"]).tolist() == [1.0]
    assert {float(adapter.numpy(t)[0]) for t in platform.apply_to_tensors(lambda t: t + 1, {tree["a"]})} == {2.0}


@covers("apply_to_tensors", "tree_map")
@pytest.mark.parametrize("member", ["apply_to_tensors", "tree_map"])
def test_a_packed_sequence_keeps_its_bookkeeping(adapter, platform, member):
    if adapter.name != "torch":
        return
    import torch
    from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

    packed = pack_sequence([torch.ones(2, 3), torch.full((4, 3), 2.0), torch.zeros(1, 3)], enforce_sorted=False)
    doubled = getattr(platform, member)(lambda tensor: tensor * 2, packed)
    assert type(doubled) is PackedSequence
    before, lengths = pad_packed_sequence(packed)
    after, same_lengths = pad_packed_sequence(doubled)
    assert torch.equal(after, before * 2)
    assert torch.equal(lengths, same_lengths)
    moved = getattr(platform, member)(lambda tensor: tensor.to("meta"), packed)
    assert (moved.data.device.type, moved.unsorted_indices.device.type, moved.batch_sizes.device.type) == (
        "meta",
        "meta",
        "cpu",
    )


def test_results_of_torch_ops_keep_their_type(adapter, platform):
    if adapter.name != "torch":
        return
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    top = torch.max(torch.arange(6.0).view(2, 3), dim=1)
    halved = platform.apply_to_tensors(lambda tensor: tensor / 2, top)
    assert type(halved) is type(top)
    assert halved.values.tolist() == [1.0, 2.5]
    output = platform.apply_to_tensors(lambda t: t + 1, BaseModelOutput(last_hidden_state=torch.zeros(2)))
    assert isinstance(output, BaseModelOutput)
    assert output.last_hidden_state.tolist() == output["last_hidden_state"].tolist() == [1.0, 1.0]


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.booleans())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Frozen, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def flatten(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


@given(trees)
def test_the_identity_changes_nothing(tree):
    mapped = tree_map(lambda leaf: leaf, tree)
    assert mapped == tree
    assert repr(mapped) == repr(tree)


@given(trees)
def test_mapping_keeps_number_and_order_of_leaves(tree):
    numbered = iter(range(10_000))
    mapped = tree_map(lambda leaf: next(numbered), tree)
    assert flatten(mapped) == list(range(len(flatten(tree))))
