"""What ``get_model_state_dict`` may be asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["StateDictOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateDictOptions:
    """How a state dict is made. A framework's own options object, or a plain dict, is read into this.

    With ``full_state_dict`` and ``cpu_offload`` together only rank 0 gets the state, the others an empty dict: a whole
    model per rank would not fit the host.
    """

    full_state_dict: bool = False
    """Sharded tensors are gathered; every rank must call."""
    cpu_offload: bool = False
    """The tensors are on the host."""
    ignore_frozen_params: bool = False
    """Parameters that ask for no gradient are left out."""

    @classmethod
    def read(cls, options: Any) -> StateDictOptions:
        """From ``None``, a mapping of these names, or any object that has them as attributes."""
        if options is None:
            return cls()
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(options, Mapping):
            unknown = sorted(set(options) - set(names))
            if unknown:
                raise ValueError(f"get_model_state_dict: unknown options {unknown}; known are {names}")
            return cls(**options)
        if not any(hasattr(options, name) for name in names):
            raise TypeError(
                f"get_model_state_dict: options of type {type(options).__name__} have none of {names}; "
                f"give StateDictOptions, or a dict"
            )
        return cls(**{name: bool(getattr(options, name, False)) for name in names})
