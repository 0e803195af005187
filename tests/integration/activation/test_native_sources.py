"""What is asked of a saved tensor: the native answers and Python's are the same, and so are the views that are made again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.storages import TorchSource, flat_bytes
from hyper_parallel.backends.torch.tensor_adapter import TENSORS, TorchTensorAdapter, fastest_adapter
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason

Make = Callable[[], torch.Tensor]


def grid() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6)


def changed_piece() -> torch.Tensor:
    return grid().unsafe_chunk(2)[0].add_(1)


def changed_base() -> torch.Tensor:
    base = grid()
    view = base[1:, ::2]
    base.mul_(2)
    return view


def empty_storage() -> torch.Tensor:
    tensor = grid()
    tensor.untyped_storage().resize_(0)
    return tensor


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return grid()


def copied_on_write() -> torch.Tensor:
    return torch._lazy_clone(grid())


PARAMETER = torch.nn.Parameter(torch.ones(4, 6))
PLAIN: dict[str, Make] = {
    "whole": grid,
    "zero dimensions": lambda: torch.tensor(3.0),
    "transposed": lambda: grid().t(),
    "strided piece": lambda: grid()[1:, ::2],
    "expanded": lambda: torch.ones(1, 6).expand(4, 6),
    "other dtype over the bytes": lambda: grid().view(torch.int32),
    "bfloat16": lambda: grid().bfloat16(),
    "complex": lambda: torch.complex(grid(), grid()),
    "bool": lambda: grid() > 3,
    "leaf that needs a gradient": lambda: grid().requires_grad_(),
    "result": lambda: grid().requires_grad_().sin(),
    "cast of a parameter": lambda: PARAMETER.bfloat16(),
    "view of a parameter": lambda: PARAMETER.t(),
    "view of a cast of a parameter": lambda: PARAMETER.double().t()[1:],
    "result of a parameter": lambda: PARAMETER.sin(),
    "view of a result": lambda: grid().requires_grad_().sin()[1:],
    "piece": lambda: grid().unsafe_chunk(2)[1],
    "changed piece": changed_piece,
    "changed base": changed_base,
    "no elements": lambda: torch.empty(0, 3),
    "no elements of a storage": lambda: grid()[:0],
    "storage without bytes": empty_storage,
    "copied on write": copied_on_write,
    "meta": lambda: grid().to("meta"),
}
OTHERS: dict[str, Make] = {
    "parameter": lambda: PARAMETER,
    "conjugate": lambda: torch.complex(grid(), grid()).conj(),
    "negative": lambda: torch.complex(grid(), grid()).conj().imag,
    "zero tensor": lambda: torch._efficientzerotensor((4, 6)),
    "quantized": lambda: torch.quantize_per_tensor(grid(), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: grid().to_sparse(),
    "inference": inference,
}


@pytest.fixture
def extension() -> Any:
    loaded = native.load()
    if loaded is None:
        pytest.skip(f"no native extension: {native.why_not()}")
    return loaded


def answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """What it says, or the class of its error."""
    try:
        return question(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        return type(error)


def test_the_adapter_of_a_process_without_the_extension_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")
    assert fastest_adapter() is TENSORS
    assert isinstance(TENSORS.source_of(grid(), False), TorchSource)


def test_the_adapter_of_a_process_with_the_extension_is_native(extension: Any) -> None:
    tensors = fastest_adapter()
    assert tensors is not TENSORS
    assert isinstance(tensors, TorchTensorAdapter)
    assert isinstance(tensors.source_of(grid(), False), extension.Source)


@pytest.mark.filterwarnings("ignore:.*(prototype|quantiz)")  # what torch says of two kinds of tensors
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_every_answer_is_pythons(extension: Any, name: str) -> None:
    tensor, tensors = {**PLAIN, **OTHERS}[name](), fastest_adapter()
    nbytes = answer(TENSORS.storage_bytes, tensor)
    assert answer(tensors.storage_bytes, tensor) == nbytes
    for is_output in (False, True):
        wanted = answer(TENSORS.why_kept, tensor, nbytes if isinstance(nbytes, int) else 1, is_output)
        assert answer(tensors.why_kept, tensor, nbytes if isinstance(nbytes, int) else 1, is_output) == wanted
    assert tensors.sequence_of_save() == TENSORS.sequence_of_save()


def test_the_reasons_are_told_apart(extension: Any) -> None:
    reasons = {
        name: fastest_adapter().why_kept(make(), make().untyped_storage().nbytes(), False)
        for name, make in PLAIN.items()
        if name != "meta"
    }
    assert {name: reason for name, reason in reasons.items() if reason is not None} == {
        "cast of a parameter": KeepReason.PARAMETER,
        "view of a parameter": KeepReason.PARAMETER,
        "view of a cast of a parameter": KeepReason.PARAMETER,
        "changed piece": KeepReason.EXOTIC,
        "no elements": KeepReason.EMPTY,
        "no elements of a storage": KeepReason.EMPTY,
        "storage without bytes": KeepReason.EMPTY,
    }


def test_a_backward_is_seen(extension: Any) -> None:
    x, found = grid().requires_grad_(), []
    out = x.sin()
    out.register_hook(lambda gradient: found.append(fastest_adapter().why_kept(gradient, gradient.nbytes, False)))
    out.sum().backward()
    assert found == [KeepReason.IN_BACKWARD]


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ("meta", "storage without bytes")])
def test_a_source_is_pythons_and_makes_the_same_view(extension: Any, name: str) -> None:
    tensor, tensors = PLAIN[name](), fastest_adapter()
    ours, theirs = tensors.source_of(tensor, False), TENSORS.source_of(tensor, False)
    assert isinstance(ours, extension.Source)
    for fact in ("version", "_version", "storage_key", "share_key", "dtype"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    assert tuple(ours.size) == tuple(theirs.size)
    assert (ours.is_alive(), ours.is_unchanged()) == (True, True)
    flat = tensors.flat_bytes(tensor)
    assert torch.equal(flat, flat_bytes(tensor))
    assert [(ours.is_of(one), theirs.is_of(one)) for one in (flat, flat.clone())] == [(True, True), (False, False)]
    for bytes_of_view in (flat, flat.clone()):
        view, wanted = ours.over(bytes_of_view), theirs.over(bytes_of_view)
        assert view.untyped_storage()._cdata == bytes_of_view.untyped_storage()._cdata
        assert (view.stride(), view.storage_offset()) == (wanted.stride(), wanted.storage_offset())
        assert (view.dtype, view.requires_grad, view._version) == (wanted.dtype, False, 0)
        assert torch._C._dispatch_keys(view) == torch._C._dispatch_keys(wanted)
        assert torch.equal(view, tensor)


@pytest.mark.parametrize("way", ["native", "python"])
def test_a_source_counts_changes_and_holds_no_bytes(way: str, request: pytest.FixtureRequest) -> None:
    tensors = request.getfixturevalue("extension") and fastest_adapter() if way == "native" else TENSORS
    tensor = grid()
    source = tensors.source_of(tensor, False)
    view = source.share_counter(source.over(tensors.flat_bytes(tensor)))  # type: ignore[attr-defined]
    tensor.add_(1)
    assert (source.version, source._version, view._version, source.is_unchanged()) == (0, 1, 1, False)
    view.add_(1)
    assert tensor._version == 2
    del view
    assert source.is_alive()
    del tensor
    assert not source.is_alive()


@pytest.mark.parametrize("below", [False, True])
def test_an_output_below_autograd_counts_with_what_the_user_gets(extension: Any, below: bool) -> None:
    found = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = op(*args, **(kwargs or {}))
            found.append(fastest_adapter().source_of(output, below))
            return output

    with Watch():
        out = grid().requires_grad_().sin() if not below else torch.sin(grid())
    out.detach().add_(1)
    assert found[-1]._version == 1


def test_a_storage_that_became_too_small_is_refused(extension: Any) -> None:
    tensor = grid()
    source = fastest_adapter().source_of(tensor, False)
    with pytest.raises(RuntimeError, match="needs 96 bytes and the storage has 8"):
        source.over(torch.empty(8, dtype=torch.uint8))


def test_what_is_no_tensor_is_refused(extension: Any) -> None:
    source = fastest_adapter().source_of(grid(), False)
    for call in (source.over, source.is_of, source.share_counter):
        with pytest.raises(TypeError, match="expected a"):
            call(b"bytes")


def test_copies_and_buffers_of_a_batch_are_seen_by_no_mode(extension: Any) -> None:
    class Refuse(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{op} was seen")

    sources = [torch.arange(size, dtype=torch.uint8) for size in (3, 5)]
    with Refuse():
        made = extension.allocate_all([3, 5], torch.device("cpu"))
        extension.copy_all(list(zip(made, sources)))
    assert [one.tolist() for one in made] == [one.tolist() for one in sources]
    assert len({one.untyped_storage()._cdata for one in made}) == 2


def test_the_first_buffers_are_given_where_there_is_no_memory_for_all(extension: Any) -> None:
    cpu = torch.device("cpu")
    assert [len(one) for one in extension.allocate_all([8, 16, 2**60, 8], cpu)] == [8, 16]
    with pytest.raises(RuntimeError, match="memory"):
        extension.allocate_all([2**60, 8], cpu)


def test_the_numbers_that_a_backward_reaches_are_pythons(extension: Any) -> None:
    from hyper_parallel.backends.torch.graph import _reachable_numbers

    x, found = grid().requires_grad_(), []
    out = (x.sin() * x.cos() + x.exp()).sum()

    def look(gradients: Any) -> None:
        with contextlib.suppress(IndexError):
            node = torch._C._current_autograd_node()
            found.append((sorted(_reachable_numbers(node)), sorted(extension.reachable_numbers())))

    out.grad_fn.register_prehook(look)
    out.backward()
    ((python, cpp),) = found
    assert python == cpp
    assert len(python) > 4
    assert extension.reachable_numbers() == []
