"""How fast the simulated device is, where its time shall have a length: a clock made of arithmetic, the same on every machine.

An op takes what its arithmetic takes or what moving its bytes takes, whichever is more; a copy takes the link. Streams run beside
one another and wait for one another as their events say. The host takes no time at all.
"""

from __future__ import annotations

import dataclasses

__all__ = ["DeviceSpeed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """The figures of a simulated device. All are above 0, the fixed costs 0 or more."""

    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float  # to host memory and back, each direction
    op_seconds: float = 0.0  # fixed cost of an op
    copy_seconds: float = 0.0  # fixed cost of a copy

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_fixed = field.name in ("op_seconds", "copy_seconds")
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < 0
                or (value == 0 and not is_fixed)
            ):
                raise ValueError(
                    f"DeviceSpeed.{field.name}: {value!r} must be {'0 or more' if is_fixed else 'above 0'}"
                )

    def of_op(self, flops: int, nbytes: int) -> float:
        """The seconds of one op."""
        return self.op_seconds + max(flops / self.flops_per_second, nbytes / self.memory_bytes_per_second)

    def of_copy(self, nbytes: int) -> float:
        """The seconds of one copy."""
        return self.copy_seconds + nbytes / self.link_bytes_per_second
