"""Splitting the inputs of a call into micro-batches. Knows a platform, no framework."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["MicroBatch"]

WHOLE: Final = -1
"""The batch dim of an argument that every micro-batch gets whole."""


class MicroBatch:
    """A decorator whose function runs once per micro-batch and returns the list of its outputs.

    Called with ``(args, kwargs)`` instead of a function it returns ``(list of args, list of kwargs)``. Each argument is
    split along its own dim: ``args_batch_dim[i]`` for a positional one, ``kwargs_batch_dim[name]`` for a keyword; −1
    passes it whole, absent or ``None`` means 0. The tensors inside a container are split along that dim; what is not a
    tensor goes to every micro-batch as it is. Micro-batch ``i`` holds rows ``i * n`` to ``(i + 1) * n`` of the batch.
    """

    def __init__(
        self,
        *,
        platform: Any,
        micro_batch_num: int,
        args_batch_dim: Sequence[int | None] | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
    ) -> None:
        if isinstance(micro_batch_num, bool) or not isinstance(micro_batch_num, int) or micro_batch_num < 1:
            raise ValueError(
                f"micro_batch: micro_batch_num must be a number of pieces, 1 or more; got {micro_batch_num!r}"
            )
        self._platform = platform
        self.micro_batch_num = micro_batch_num
        self.args_batch_dim = tuple(
            _checked_dim(dim, f"args_batch_dim[{index}]") for index, dim in enumerate(args_batch_dim or ())
        )
        self.kwargs_batch_dim = {
            name: _checked_dim(dim, f"kwargs_batch_dim[{name!r}]") for name, dim in (kwargs_batch_dim or {}).items()
        }

    def __call__(self, target: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Decorate a function, or split ``(args, kwargs)``."""
        if kwargs is None and callable(target):
            return self._decorate(target)
        if not isinstance(target, tuple | list):
            raise TypeError(
                f"micro_batch: give it a function to decorate, or args (a tuple) and kwargs (a dict); "
                f"got {type(target).__name__}"
            )
        return self.split(tuple(target), kwargs or {})

    def split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The positional and the keyword arguments of every micro-batch."""
        args_dims = self.args_batch_dim + (0,) * (len(args) - len(self.args_batch_dim))
        columns = [self._pieces(arg, dim, f"argument {i}") for i, (arg, dim) in enumerate(zip(args, args_dims))]
        named = {
            name: self._pieces(value, self.kwargs_batch_dim.get(name, 0), f"argument {name!r}")
            for name, value in kwargs.items()
        }
        count = range(self.micro_batch_num)
        return (
            [tuple(column[index] for column in columns) for index in count],
            [{name: pieces[index] for name, pieces in named.items()} for index in count],
        )

    def _decorate(self, function: Callable[..., Any]) -> Callable[..., list[Any]]:
        self._check_names(function)

        @functools.wraps(function)
        def run_in_pieces(*args: Any, **kwargs: Any) -> list[Any]:
            args_list, kwargs_list = self.split(args, kwargs)
            return [function(*piece, **named) for piece, named in zip(args_list, kwargs_list)]

        return run_in_pieces

    def _check_names(self, function: Callable[..., Any]) -> None:
        """Refuse a keyword dim for a parameter the function does not have: it would be ignored at every call."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            return
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        unknown = sorted(set(self.kwargs_batch_dim) - set(parameters))
        if unknown:
            raise ValueError(
                f"micro_batch: kwargs_batch_dim names {unknown}, which {getattr(function, '__name__', function)!s} "
                f"does not take; its parameters are {list(parameters)}"
            )

    def _pieces(self, value: Any, dim: int, where: str) -> list[Any]:
        if dim == WHOLE:
            return [value] * self.micro_batch_num

        def piece(tensor: Any, index: int) -> Any:
            return self._platform._micro_batch_piece(tensor, dim, self._piece_size(tensor, dim, where), index)

        return [
            self._platform.apply_to_tensors(lambda tensor, index=index: piece(tensor, index), value)
            for index in range(self.micro_batch_num)
        ]

    def _piece_size(self, tensor: Any, dim: int, where: str) -> int:
        shape = tuple(tensor.shape)
        if dim >= len(shape):
            raise ValueError(
                f"micro_batch: {where} has shape {shape} and no dim {dim} to split; "
                f"give its batch dim, or {WHOLE} to pass it whole"
            )
        if shape[dim] % self.micro_batch_num:
            raise ValueError(
                f"micro_batch: {where} has {shape[dim]} rows on dim {dim}, which do not divide into "
                f"{self.micro_batch_num} micro-batches; pad the batch, choose a divisor, or give {WHOLE} for whole"
            )
        return int(shape[dim]) // self.micro_batch_num


def _checked_dim(dim: int | None, where: str) -> int:
    if dim is None:
        return 0
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < WHOLE:
        raise ValueError(f"micro_batch: {where} must be a dim, 0 or greater, or {WHOLE} for whole; got {dim!r}")
    return dim
