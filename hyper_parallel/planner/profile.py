"""What was measured of one training step: the record that measuring writes and planning reads.

A step is a prologue, blocks in the order they ran, an epilogue (head and loss), and the same backward. Identical blocks
share a :class:`BlockKind`. Inside a kind every op instance is named as a policy will meet it: base name, overload, module,
and how many of the same overload came before it in the block.

Values
------
A *value* is a storage that one op made. Ops that only make another view of it name that op in ``alias``, so every
count of bytes belongs to exactly one op. ``BLOCK_INPUT`` (-1) stands for what the block was given.

Bytes
-----
``output_bytes``  what the op newly allocates for its outputs; 0 for a view.
``kept_bytes``    how much of that autograd holds until backward when the block is left alone. ``kept_by`` says for which
                  ops' backward; the earliest of them lets go last.
``backward_bytes``, ``backward_transient_bytes``  above the kept values; the gradient of the output counts among them, and so
                  does everything else that its backward makes, except ``gradient_bytes``.
``base``          what is there anyway, in every moment: weights, gradients that already exist, optimizer states.

Compiled blocks
---------------
Their ops are those of the block run uncompiled, as the compiler meets them. ``BlockKind.graph`` says what the block's own graph
makes of them: it keeps fewer values than autograd would, and fused ops take less time.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Final

from hyper_parallel.planner.budget import DeviceMemory
from hyper_parallel.planner.step_inputs import StepInputs
from hyper_parallel.records.moments import MomentBytes
from hyper_parallel.records.record_files import load_record, require, save_record
from hyper_parallel.records.versions import Versions

__all__ = [
    "BLOCK_INPUT",
    "BaseBytes",
    "Block",
    "BlockKind",
    "Cut",
    "CompiledGraph",
    "EngineSettings",
    "FarCaps",
    "HostCost",
    "Link",
    "Measured",
    "OpProfile",
    "Profile",
    "CutRegion",
    "Segment",
]

SCHEMA: Final = "hyper_parallel.profile/3"
BLOCK_INPUT: Final = -1
MOST_BLOCKS: Final = 10_000
MOST_OPS: Final = 20_000


def _not_negative(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        require(value >= 0, f"{type(record).__name__}.{name}: {value!r} is negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseBytes:
    """Device bytes that are there at every moment of the step, whatever is planned."""

    weights: int = 0
    gradients: int = 0  # those that exist before the step; those the step makes are counted per block
    optimizer: int = 0
    other: int = 0  # the batch, buffers, workspaces, what else the process holds

    def __post_init__(self) -> None:
        _not_negative(self, "weights", "gradients", "optimizer", "other")

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.other


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpProfile:
    """One op instance of a block."""

    name: str  # exact base name: "mm"
    overload: str = "default"
    module: str = ""  # path inside the block: "attention.qkv"
    occurrence: int = 0  # how many of this name and overload came before it in the block
    seconds: float  # forward, at the kernel's real speed
    output_bytes: int = 0
    kept_bytes: int = 0
    inputs: tuple[int, ...] = ()  # ops whose outputs it reads (views are followed by the reader), or BLOCK_INPUT
    alias: int | None = None  # its output shares this op's storage (or BLOCK_INPUT's); None: its own
    kept_by: tuple[int, ...] = ()  # ops whose backward holds this value; empty with kept_bytes: its first reader
    is_random: bool = False
    is_keepable: bool = True  # False: replayed whatever a policy says
    reason: str = ""  # why it is not keepable: "view", "in_place", "factory", "collective"
    workspace_bytes: int = 0  # extra bytes while it runs forward
    backward_seconds: float = 0.0  # 0 for all ops of a block: shared out by forward time
    backward_bytes: int = 0  # device bytes above the kept values while its backward runs: gradients, workspace
    replay_seconds: float | None = None  # of a compiled block: when it is recomputed in the graph; None: as in forward
    runs_once: bool = False  # a collective: a region keeps or swaps its output, also where the plan says recompute

    def __post_init__(self) -> None:
        require(bool(self.name), "OpProfile.name: is empty")
        _not_negative(
            self,
            "occurrence",
            "seconds",
            "output_bytes",
            "kept_bytes",
            "workspace_bytes",
            "backward_seconds",
            "backward_bytes",
        )
        if self.kept_bytes > self.output_bytes:
            raise ValueError(
                f"OpProfile {self.label}: keeps {self.kept_bytes} bytes of an output of {self.output_bytes}; "
                "bytes that backward keeps belong to the op that made them"
            )
        if self.alias is not None and self.output_bytes:
            raise ValueError(f"OpProfile {self.label}: shares the storage of op {self.alias} and cannot own bytes too")

    @property
    def label(self) -> str:
        """The op as a person names it: ``attention.qkv::mm#0``."""
        return f"{self.module}::{self.name}#{self.occurrence}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutRegion:
    """A stretch of a block that can be wrapped as one replayed region: ``ops[first_op:stop_op]``."""

    module: str  # path inside the block; "": the block itself
    first_op: int
    stop_op: int
    inputs: tuple[int, ...] = (BLOCK_INPUT,)  # the values its replay starts from
    replay_stop: int | None = (
        None  # the replay ends before this op; None: after the last op whose backward keeps a value
    )

    def __post_init__(self) -> None:
        require(
            0 <= self.first_op < self.stop_op, f"CutRegion {self.module!r}: {self.first_op}..{self.stop_op} is empty"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """One way to cut a block into regions. Ops outside every region stay as they are."""

    regions: tuple[CutRegion, ...]

    def __post_init__(self) -> None:
        require(bool(self.regions), "Cut.regions: is empty")
        for before, after in zip(self.regions, self.regions[1:]):
            require(
                before.stop_op <= after.first_op,
                f"Cut.regions: {before.module!r} ends after {after.module!r} begins; regions must follow one another",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """The graph that a compiled block has when it is left alone, and what was measured of one that recomputes everything."""

    saves: tuple[int, ...]  # the ops whose outputs it keeps for backward
    other_bytes: int = 0  # what it keeps beside: casts of weights, side outputs
    forward_share: float = 1.0  # of the bytes that uncompiled ops would make in forward, how much is there at once
    replay_share: float = 1.0  # the same of what is recomputed
    compile_seconds: float = 0.0  # of one more graph of this kind

    def __post_init__(self) -> None:
        _not_negative(self, "other_bytes", "forward_share", "replay_share", "compile_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKind:
    """What identical blocks have in common."""

    name: str  # "DecoderLayer"
    ops: tuple[OpProfile, ...]
    cuts: tuple[Cut, ...] = ()  # empty: the whole block as one region
    backward_seconds: float = 0.0  # of the block left alone; 0: the sum over its ops
    backward_transient_bytes: int = 0  # peak of its backward, less what was there when it began
    gradient_bytes: int = 0  # weight gradients that its backward makes and leaves behind
    input_kept_by: tuple[int, ...] = ()  # ops whose backward holds the block's input; empty: none does
    runs_from_tape: bool = False  # whether its regions replay recorded ops; False: they run Python again
    host_forward_seconds: float = 0.0  # what the host takes to issue the block left alone; 0: less than the device
    host_backward_seconds: float = 0.0
    weight_bytes: int = 0  # of one block's parameters; 0 in profiles of earlier versions
    graph: CompiledGraph | None = None  # None: the block is not compiled

    def __post_init__(self) -> None:
        require(
            0 < len(self.ops) <= MOST_OPS, f"BlockKind {self.name}: has {len(self.ops)} ops; 1 to {MOST_OPS} are read"
        )
        _not_negative(
            self,
            "backward_seconds",
            "backward_transient_bytes",
            "gradient_bytes",
            "host_forward_seconds",
            "host_backward_seconds",
            "weight_bytes",
        )
        if not self.cuts:
            whole = CutRegion(module="", first_op=0, stop_op=len(self.ops))
            object.__setattr__(self, "cuts", (Cut(regions=(whole,)),))
        for at, op in enumerate(self.ops):
            self._check_op(at, op)
        for cut in self.cuts:
            for region in cut.regions:
                self._check_region(region)
        self._check_indices("input_kept_by", self.input_kept_by, 0, len(self.ops))
        if self.graph is not None:
            self._check_indices("graph.saves", self.graph.saves, 0, len(self.ops))

    def _check_op(self, at: int, op: OpProfile) -> None:
        where = f"op {at} ({op.label})"
        self._check_indices(f"{where}.inputs", op.inputs, BLOCK_INPUT, at)
        self._check_indices(f"{where}.kept_by", op.kept_by, at, len(self.ops))
        if op.alias is not None:
            self._check_indices(f"{where}.alias", (op.alias,), BLOCK_INPUT, at)

    def _check_region(self, region: CutRegion) -> None:
        where = f"region {region.module!r}"
        require(
            region.stop_op <= len(self.ops),
            f"BlockKind {self.name}: {where} ends at {region.stop_op} of {len(self.ops)}",
        )
        self._check_indices(f"{where}.inputs", region.inputs, BLOCK_INPUT, region.first_op)
        if region.replay_stop is not None:
            self._check_indices(f"{where}.replay_stop", (region.replay_stop,), region.first_op, region.stop_op + 1)

    def _check_indices(self, what: str, indices: tuple[int, ...], least: int, limit: int) -> None:
        for index in indices:
            require(
                least <= index < limit,
                f"BlockKind {self.name}: {what} names op {index}; known are {least}..{limit - 1}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One block of the step, in execution order."""

    name: str  # "model.layers.3"
    kind: int  # index into Profile.kinds
    input_bytes: (
        int  # device bytes of the tensors it is given, less those held elsewhere anyway (the batch, rope tables)
    )

    def __post_init__(self) -> None:
        _not_negative(self, "kind", "input_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """What runs before or after the blocks: embedding, or head and loss.

    The epilogue's numbers include the last block's output: bytes count above what is there without it. The prologue's do
    not include the first block's input, which that block counts.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    kept_bytes: int = 0  # held from the end of its forward to its backward
    forward_transient_bytes: int = 0  # peak of its forward, less what was there when it began
    backward_transient_bytes: int = 0  # peak of its backward, less what was there when it began
    gradient_bytes: int = 0  # weight gradients that its backward makes and leaves behind

    def __post_init__(self) -> None:
        _not_negative(
            self,
            "forward_seconds",
            "backward_seconds",
            "kept_bytes",
            "forward_transient_bytes",
            "backward_transient_bytes",
            "gradient_bytes",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The way to far memory, measured inside the step, and with all ranks of this host copying at once."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    copy_seconds: float = 0.0  # fixed cost of one copy on the link
    pin_seconds_per_byte: float = 0.0  # paid once, when the pinned memory is made
    lone_out_bytes_per_second: float = 0.0  # while no other rank of this host copies; 0: not measured apart
    lone_in_bytes_per_second: float = 0.0
    copying_ranks: int = 1  # of this host, while the first two were measured
    compute_seconds_per_byte: float = 0.0  # that compute stands still for a copy: where its own processor makes it

    def __post_init__(self) -> None:
        _not_negative(
            self,
            "copy_seconds",
            "pin_seconds_per_byte",
            "lone_out_bytes_per_second",
            "lone_in_bytes_per_second",
            "compute_seconds_per_byte",
        )
        require(self.copying_ranks >= 1, f"Link.copying_ranks: {self.copying_ranks} is less than 1")
        require(
            self.out_bytes_per_second > 0 and self.in_bytes_per_second > 0,
            f"Link: {self.out_bytes_per_second} and {self.in_bytes_per_second} bytes per second must be above 0",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarCaps:
    """How much far memory there is, in spill order: host, then disk. Without a disk link there is no disk."""

    host_bytes: int
    disk_bytes: int = 0
    disk_link: Link | None = None

    def __post_init__(self) -> None:
        _not_negative(self, "host_bytes", "disk_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine's window, tail and prefetch, as they will hold when the plan is applied."""

    window_bytes: int = 512 * 2**20
    tail_bytes: int = 256 * 2**20
    prefetch_bytes: int = 512 * 2**20
    min_bytes: int = 2**20
    is_tunable: bool = True  # whether a plan may choose window, tail and prefetch

    def __post_init__(self) -> None:
        _not_negative(self, "window_bytes", "tail_bytes", "prefetch_bytes", "min_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCost:
    """What the host spends on regions and swaps, beside ``BlockKind.host_forward_seconds`` and ``host_backward_seconds``.

    Where that is more than the device takes, the device waits. Zero: the host is never the slower one.
    """

    region_seconds: float = 0.0  # to begin and end one region's forward
    region_backward_seconds: float = 0.0  # the same in backward
    region_op_seconds: float = 0.0  # extra per op of a region's forward
    replayed_op_seconds: float = 0.0  # per op of a replay, the op's own launch included
    swap_out_seconds: float = 0.0  # per value that leaves
    swap_in_seconds: float = 0.0  # per value that comes back

    def __post_init__(self) -> None:
        _not_negative(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The step as it was measured, left alone or, where that does not fit, under ``under``."""

    step_seconds: float
    peak_bytes: int
    peak_where: str = ""
    reserved_bytes: int = 0  # what the allocator holds beyond the active bytes is the margin a budget needs
    under: str = "none"
    moments: MomentBytes | None = None  # the peak of each moment; None: a profile of an earlier version

    def __post_init__(self) -> None:
        _not_negative(self, "step_seconds", "peak_bytes", "reserved_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """One training step, measured."""

    versions: Versions
    model_fingerprint: str  # of the module tree; a plan made from this profile refuses another model
    base: BaseBytes
    kinds: tuple[BlockKind, ...]
    blocks: tuple[Block, ...]
    prologue: Segment = Segment()
    epilogue: Segment = Segment()
    measured: Measured
    link: Link
    far: FarCaps
    engine: EngineSettings = EngineSettings()
    host: HostCost = HostCost()
    inputs: StepInputs | None = None  # the shapes of the step; None: a profile of an earlier version
    device_memory: DeviceMemory | None = None  # what the device could give; None: a profile of an earlier version

    def __post_init__(self) -> None:
        require(
            0 < len(self.blocks) <= MOST_BLOCKS,
            f"Profile.blocks: {len(self.blocks)} blocks; 1 to {MOST_BLOCKS} are read",
        )
        for block in self.blocks:
            require(
                block.kind < len(self.kinds),
                f"Profile.blocks: {block.name} is of kind {block.kind}; there are {len(self.kinds)} kinds",
            )
        names = [block.name for block in self.blocks]
        require(all(names), "Profile.blocks: a block has no name")

    def kind_of(self, block: int) -> BlockKind:
        """The kind of block number ``block``."""
        return self.kinds[self.blocks[block].kind]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        save_record(self, path, schema=SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` wrote."""
        return load_record(cls, path, schema=SCHEMA, older={"hyper_parallel.profile/2": dict})
