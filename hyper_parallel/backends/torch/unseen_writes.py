"""Writes that the dispatcher does not see, into outputs that a policy keeps.

A kernel that Python launches itself (Triton, CuPy, numpy) may change a tensor in place, and neither an op nor a version counter
shows it: fused rotary embeddings do so with the output of a matmul. Where a policy keeps that output, its replay would hand out
the changed bytes, and the kernel, which runs again, would change them a second time.

Theory
------
Such a kernel belongs to a place in the sequence of a region's ops, and runs whenever forward comes by. So a region is watched
where its sequence of ops is not known yet: sums over the bytes of each kept output are made when the op has run, and again when
forward ends or an op is about to change it. An op whose output came out different is run again by the replay, from this call
on. What was seen unchanged once is not looked at again: a known sequence costs one look into a set for each op. ``verify``
watches every call.

While a region is watched, its swapped outputs stay on the device until its forward ends. The output of an asynchronous
collective is summed up when its wait has returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final

import torch

from hyper_parallel.backends.torch.region_identity import RegionTable
from hyper_parallel.backends.torch.storages import NO_STORAGE_ERRORS, flat_bytes, is_copied_by_bytes, tensors_in, unseen
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, packed_in
from hyper_parallel.core.activation_checkpoint.region import Filed

__all__ = ["NOTHING_TO_LEARN", "KnownWrites", "OutputWatch", "known_writes_of"]

_WORD_BYTES: Final = 8
_ROW_WORDS: Final = 2048
_MOST_KNOWN: Final = 2**16  # a region whose sequences never repeat is not remembered for ever


_Instance = tuple[Hashable, int]
"""An op, and how many of it ran before."""


class KnownWrites:
    """What is known of one region over all its calls."""

    def __init__(self) -> None:
        self._sequences: set[int] = set()
        self._changed: set[_Instance] = set()

    def is_known(self, sequence: int) -> bool:
        """Whether a sequence of ops was watched to its end."""
        return sequence in self._sequences

    def is_changed(self, op: Hashable, number: int) -> bool:
        """Whether the output of this instance of an op is changed by a write that is not seen."""
        return bool(self._changed) and (op, number) in self._changed

    def add(self, sequences: Iterable[int], changed: Iterable[_Instance]) -> None:
        """A watched forward has ended."""
        self._changed.update(changed)
        if len(self._sequences) < _MOST_KNOWN:
            self._sequences.update(sequences)


class _NothingToLearn(KnownWrites):
    """Of a region that uses changed values as they are."""

    def is_known(self, sequence: int) -> bool:
        """See the base class."""
        return True


NOTHING_TO_LEARN: Final = _NothingToLearn()

_REGIONS: RegionTable[KnownWrites] = RegionTable()


def known_writes_of(function: Callable[..., Any], objects: Iterable[Any]) -> KnownWrites:
    """Of the region that a call of this function runs. ``objects``: what it is called with, beside tensors."""
    try:
        return _REGIONS.find(function, tuple(objects), {}, KnownWrites)
    except TypeError:  # it cannot be referred to weakly: every call is watched
        return KnownWrites()


class _Seen:
    """The bytes of a kept output as its op left them."""

    __slots__ = ("flat", "sums", "token", "version")

    def __init__(self, flat: torch.Tensor, token: Any, version: int) -> None:
        self.flat = flat
        self.token = token  # a VersionToken
        self.version = version
        self.sums = _sums(flat)

    def is_changed(self) -> torch.Tensor | None:
        """A flag on the tensor's device; None after a change that its version shows."""
        if self.token._version != self.version:
            return None
        with unseen():
            return (_sums(self.flat) != self.sums).any()


class _Watched:
    """A filed output, and what is asked of it when forward ends."""

    __slots__ = ("filed", "flags", "instance", "is_finished", "seen")

    def __init__(self, instance: _Instance, filed: Filed, *, is_finished: bool) -> None:
        self.instance = instance
        self.filed = filed
        self.is_finished = is_finished
        self.seen: list[_Seen] = []  # of its tensors; empty while nothing is watched
        self.flags: list[torch.Tensor] = []

    def look_again(self) -> None:
        """Ask whether the bytes are still those that the op left. Later changes do not count."""
        seen, self.seen = self.seen, []
        self.flags += [flag for flag in (tensor.is_changed() for tensor in seen) if flag is not None]


class OutputWatch:
    """The kept outputs of one forward."""

    def __init__(self, known: KnownWrites, *, is_always_on: bool) -> None:
        self._known = known
        self._is_on = is_always_on
        self._sequence = 0
        self._new: list[int] = []
        self._watched: dict[int, _Watched] = {}  # by the id of what was filed
        self._unfinished: dict[int, _Watched] = {}  # by the storage that a collective still fills
        self.num_known = 0  # outputs that were not kept because it is known what happens to them

    def may_keep(self, op: Hashable, number: int, *, is_kept: bool) -> bool:
        """An op is about to run for the time ``number``. Whether its output is kept, if the policy wants that."""
        may_keep = is_kept and not self._known.is_changed(op, number)
        self.num_known += is_kept and not may_keep
        self._sequence = hash((self._sequence, op, may_keep))
        if not self._is_on and not self._known.is_known(self._sequence):
            self._is_on = True  # what was kept up to here is unchanged up to here
            for watched in self._watched.values():
                watched.seen = _still_there(watched.filed) if watched.is_finished else []
        if self._is_on:
            self._new.append(self._sequence)
        return may_keep

    def add(self, op: Hashable, number: int, filed: Filed, output: Any, *, is_finished: bool = True) -> None:
        """The output of the op that ran last was filed."""
        watched = self._watched[id(filed)] = _Watched((op, number), filed, is_finished=is_finished)
        if not is_finished:
            self._unfinished |= {tensor.untyped_storage()._cdata: watched for tensor in tensors_in((output,))}
        elif self._is_on:
            watched.seen = _seen(output)

    def add_finished(self, output: torch.Tensor) -> None:
        """A wait has returned the output of a collective."""
        watched = self._unfinished.pop(output.untyped_storage()._cdata, None)
        if watched is not None and self._is_on:
            watched.seen += _seen(output)

    def before_change(self, filed: Filed) -> None:
        """An op is about to change a filed output, which becomes a value of its own with the bytes of this moment."""
        watched = self._watched.get(id(filed))
        if watched is not None:
            watched.look_again()

    def end(self) -> list[_Instance]:
        """Forward is over: the instances whose output was changed by a write that is not seen."""
        watched, self._watched = list(self._watched.values()), {}
        if not self._is_on:
            return []
        for one in watched:
            one.look_again()
        with unseen():  # the device is waited for once, by the first flag
            changed = [one.instance for one in watched if any(bool(flag) for flag in one.flags)]
        self._known.add(self._new, changed)
        return changed


def _seen(output: Any) -> list[_Seen]:
    return [_Seen(flat, tensor, tensor._version) for tensor, flat in _plain(tensors_in((output,)))]


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors whose bytes can be summed up, and those bytes."""
    for tensor in tensors:
        if type(tensor) is torch.Tensor and not tensor.is_meta and not tensor.is_inference() and tensor.numel():
            with contextlib.suppress(*NO_STORAGE_ERRORS):
                if is_copied_by_bytes(tensor):
                    yield tensor, flat_bytes(tensor)


def _still_there(filed: Filed) -> list[_Seen]:
    """What was filed before the watch began. What is far already was copied as it was."""
    found = []
    for leaf in packed_in(filed.output):
        flat: torch.Tensor | None
        if isinstance(leaf, KeptValue):
            flat = next((flat for _, flat in _plain((leaf.tensor,))), None)
        else:
            flat = leaf.record.device_bytes
        if flat is not None and leaf.token._version == leaf.version:
            found.append(_Seen(flat, leaf.token, leaf.version))
    return found


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Sums over the rows and the columns of a table of words, without a large temporary. Values that change places show too."""
    with unseen():
        words = flat[: flat.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
        table = words[: words.numel() // _ROW_WORDS * _ROW_WORDS].view(-1, _ROW_WORDS)
        rest = flat[table.numel() * _WORD_BYTES :].to(torch.int64)
        places = torch.arange(1, rest.numel() + 1, device=flat.device)
        return torch.cat((table.sum(1), table.sum(0), (rest * places).sum().view(1)))
