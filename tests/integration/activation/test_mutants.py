"""Each wait, event, hold and check of the engine is needed: without it, a scenario fails.

Every probe passes on the engine as it is; every mutant makes its probe fail by a race, a wrong gradient, a missing raise
or bytes that stay. A mutant that survives means a scenario is missing, or a blind spot of the simulated accelerator.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _pytest.outcomes import Failed

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.errors import ActivationError
from hyper_parallel.simulation.backend import SimulatedBackend
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.simulation.streams import SimulatedEvent, SimulatedStream
from hyper_parallel.testing import SimulationError, simulated_accelerator

from . import (
    test_failures_cost,
    test_failures_schedule,
    test_kept_bytes_as_gradients,
    test_promises,
    test_replayed_graph,
    test_scenarios,
    test_schedule,
    test_version_counters,
)
from .kinds import KINDS, Kind
from .mutation import Edit, Mutant

RECORD = "core.activation_checkpoint.record:Record"
ENGINE = "core.activation_checkpoint.engine:Engine"
HOST = "core.activation_checkpoint.far.host:HostTier"
PACKED = "core.activation_checkpoint.packed"
ADAPTER = "core.activation_checkpoint.adapter:TensorAdapter"
REGION = "core.activation_checkpoint.region"
TORCH = "backends.torch"


def kind(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def scenario(name: str, kind_name: str, **settings: int) -> Callable[[], None]:
    return lambda: test_scenarios.check(
        name, kind(kind_name), timing="lazy", **{**test_scenarios.SMALL_WINDOW, **settings}
    )


def without_native(probe: Callable[[], None]) -> Callable[[], None]:
    """The questions about a saved tensor are answered by Python. The faults of the native answers are ``HP_FAULT`` in C++."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYPER_PARALLEL_NATIVE", "0")
            probe()

    return run


def sines(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return test_schedule.Sines(count)


def a_graph_that_dies_while_its_copies_are_queued() -> None:
    with simulated_accelerator(window_bytes=10**6):
        hp.swap_wrapper(sines(4))(test_schedule.unit())
        torch.rand(4)


def room_under_a_load_is_written_again() -> None:
    """A backward raised, so its loads are queued and nobody waits for them; their room is lent to bytes saved before."""
    size = 256  # floats: four of these fill the one page that far memory may take

    def stop(gradient: torch.Tensor) -> None:
        raise ArithmeticError("told to")

    # The loads run ahead by more than there is, and no two of them are one batch.
    settings = {"window_bytes": 0, "prefetch_bytes": 8 * 4 * size, "tail_bytes": 4 * 4 * size, "host_limit": 4096}
    with simulated_accelerator(**settings) as sim, pytest.MonkeyPatch.context() as patch:
        # A host that looks too early every time: only what it ordered by events is ordered.
        patch.setattr(SimulatedBackend, "event_is_done", lambda backend, event: False)
        x = torch.linspace(0, 1, size).requires_grad_()
        middle = hp.swap_wrapper(sines(3))(x)
        middle.register_hook(stop)
        out = hp.swap_wrapper(sines(5))(middle)
        assert sum(what == "offload" for what, _ in sim.events) == 4
        with pytest.raises(ArithmeticError, match="told to"):
            out.sum().backward()
        assert sum(what == "load" for what, _ in sim.events) == 4
        # Another stream, which is not ordered after the loads by what the first one lets go.
        main, side = sim.timeline.compute, other_stream(sim)
        sim.timeline.compute = side
        y = torch.linspace(0, 1, size).requires_grad_()
        half = hp.swap_wrapper(sines(4))(y)  # waits in the tail
        sim.timeline.compute = main
        del out, middle
        sim.timeline.compute = side
        hp.swap_wrapper(sines(4))(half).sum().backward()
        sim.timeline.compute = main
        sim.timeline.wait(main, SimulatedEvent(side))
    z = torch.linspace(0, 1, size).requires_grad_()
    sines(8)(z).sum().backward()
    assert torch.equal(y.grad, z.grad)


def addresses_come_again() -> None:
    """Storages that die give their address to others while the record of the first still lives."""
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0):
        x = torch.linspace(0, 1, 64).requires_grad_()
        hp.swap_wrapper(sines(12))(x).sum().backward()
        y = torch.linspace(0, 1, 64).requires_grad_()
        test_schedule.Sines(12)(y).sum().backward()
        assert torch.equal(x.grad, y.grad)


def other_stream(sim: Simulation) -> SimulatedStream:
    """A second compute stream, which has seen everything that the first one has queued so far."""
    stream = SimulatedStream("side", runs_at_once=True)
    sim.timeline.wait(stream, SimulatedEvent(sim.timeline.compute))
    return stream


def a_load_on_a_stream_that_never_saw_the_copy_out() -> None:
    with simulated_accelerator(window_bytes=test_schedule.UNIT, prefetch_bytes=0) as sim:
        out = hp.swap_wrapper(sines(1))(test_schedule.unit())
        main, side = sim.timeline.compute, other_stream(sim)
        more = hp.swap_wrapper(sines(1))(test_schedule.unit())  # lets the first graph's bytes go, on the main stream
        assert [what for what, _ in sim.events] == ["offload", "offload", "drop"]
        sim.timeline.compute = side
        out.backward(torch.ones_like(out))
        sim.timeline.compute = main
        sim.timeline.wait(main, SimulatedEvent(side))
        del out, more


def a_reader_on_another_stream_than_the_buffers() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0) as sim:
        out = hp.swap_wrapper(sines(1))(test_schedule.unit())
        assert out.grad_fn._saved_self is not None  # brings the bytes back, into a buffer of the main stream
        main, side = sim.timeline.compute, other_stream(sim)
        sim.timeline.compute = side
        twice = out.grad_fn._saved_self * 2
        sim.timeline.compute = main
        del out
        sim.timeline.wait(main, SimulatedEvent(side))
        del twice


def in_place_twice(policy: CheckpointPolicy) -> Callable[[], None]:
    def probe() -> None:
        for tail_bytes in (0, 10**6):
            test_failures_cost.test_b46_a_change_of_a_filed_output_is_exact(
                "add", test_failures_cost.always(policy), tail_bytes, False
            )

    return probe


PROBES: dict[str, Callable[[], None]] = {
    "bytes returned as a gradient": lambda: test_kept_bytes_as_gradients.test_swapped_and_zeroed_between_two_backwards(
        2**20, swap_inputs=False
    ),
    "a source that is saved again": lambda: (
        test_version_counters.test_a_source_that_changes_after_a_gradient_of_the_gradient_saved_it_again_raises()
    ),
    "pieces of one storage": without_native(test_version_counters.test_pieces_that_change_one_after_the_other),
    "gradient inside a region": lambda: test_replayed_graph.test_a_gradient_inside_a_region_within_another_checkpoint(
        CheckpointPolicy.MUST_SAVE
    ),
    "one step": scenario("one_step", "swap"),
    "one step, all swapped": scenario("one_step", "all_swapped"),
    "two backwards": scenario("backward_twice_with_retain_graph", "swap", prefetch_bytes=10**6),
    "partial grad": scenario("grad_of_a_part", "swap", prefetch_bytes=1024),
    "skip connections": scenario("skip_connections", "mixed"),
    "dropout": lambda: test_failures_cost.test_b47_a_kept_random_op_does_not_move_the_next_one(
        "bernoulli", CheckpointPolicy.MUST_SAVE
    ),
    "dead graph": a_graph_that_dies_while_its_copies_are_queued,
    "room under a load": room_under_a_load_is_written_again,
    "load on another stream": a_load_on_a_stream_that_never_saw_the_copy_out,
    "reader on another stream": a_reader_on_another_stream_than_the_buffers,
    "addresses again": without_native(addresses_come_again),
    "filed value changed, swapped": in_place_twice(CheckpointPolicy.MUST_SWAP),
    "filed value changed, saved": in_place_twice(CheckpointPolicy.MUST_SAVE),
    "swapped value changed": lambda: test_promises.test_a_change_where_plain_raises_raises_naming_op_and_module(
        test_promises.TIGHT
    ),
    "kept value changed": lambda: test_promises.test_a_change_where_plain_raises_raises_naming_op_and_module(
        {"min_bytes": 10**6}
    ),
    "two versions": test_promises.test_two_versions_of_one_storage_are_two_records,
    "cycle": test_promises.test_a_kept_output_makes_no_cycle,
    "replay offloads nothing": without_native(lambda: test_schedule.test_nothing_leaves_during_a_replay(None)),
    "retained graph": test_schedule.test_a_retained_graph_lets_its_bytes_go_again_without_a_second_copy,
    "micro-batches": lambda: test_failures_schedule.test_b17_a_micro_batch_brings_back_its_own_records_only(False),
    "one copy": test_failures_cost.test_b33_a_value_saved_by_three_matmuls_is_copied_once,
    "region changed after": scenario("in_place_inside_a_layer_used_twice", "all_swapped"),
}

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a copy out does not wait for the producer",
        (Edit(f"{HOST}.write_together", "backend.wait_event(stream, ready)", "pass"),),
        "one step",
        r"copy out .* reads bytes .* nothing orders",
    ),
    Mutant(
        "device bytes are dropped without waiting for the copy out",
        (Edit(f"{RECORD}.finish_offload", "self._order_owner(current)", "pass"),),
        "one step",
        r"let go while copy out",
    ),
    Mutant(
        "the owner is not ordered after the copy out",
        (Edit(f"{RECORD}._order_owner", "copy.order(self.stream)", "copy is self.out or copy.order(self.stream)"),),
        "one step",
        r"let go while copy out",
    ),
    Mutant(
        "the owner is not ordered after the load",
        (Edit(f"{RECORD}._order_owner", "copy.order(self.stream)", "copy is self.back or copy.order(self.stream)"),),
        "one step, all swapped",
        r"let go while copy back",
    ),
    Mutant(
        "a load does not wait for its buffer",
        (Edit(f"{HOST}.read_together", "backend.wait_event(stream, ready)", "pass"),),
        "one step",
        r"copy back .* writes bytes that allocation",
    ),
    Mutant(
        "the buffer's event is recorded before the buffer is taken",
        (
            Edit(
                f"{RECORD}.prepare_load",
                "buffer = self.engine.far.allocate(backend, self.lease)\n"
                "        self.prepared = buffer, backend.record_event(stream), stream",
                "early = backend.record_event(stream)\n"
                "        self.prepared = self.engine.far.allocate(backend, self.lease), early, stream",
            ),
        ),
        "one step",
        r"copy back .* writes bytes that allocation",
    ),
    Mutant(
        "a load does not wait for the copy out",
        (Edit(f"{HOST}.read_together", "ordered.order(stream)", "pass"),),
        "load on another stream",
        r"copy back .* reads bytes that copy out",
    ),
    Mutant(
        "a reader on another stream is forgotten",
        (Edit(f"{RECORD}.add_reader", "self._add_foreign(stream)", "pass"),),
        "reader on another stream",
        r"let go while .* on side",
    ),
    Mutant(
        "a consumer does not wait for the load",
        (Edit(f"{RECORD}.finish_load", "self.back.order(stream)", "pass"),),
        "one step",
        r"reads bytes that copy back",
    ),
    Mutant(
        "the destructor does not order",
        (Edit(f"{RECORD}.__del__", "self._order_owner()", "pass"),),
        "dead graph",
        r"let go while copy out",
    ),
    Mutant(
        "far memory is lent again under a load",
        (Edit(f"{HOST}.write_together", "completion.order(stream)", "pass"),),
        "room under a load",
        r"copy out .* writes bytes that copy back",
    ),
    Mutant(
        "far memory is returned without the load's completion",
        (Edit(f"{RECORD}.__del__", "self.back if self.back is not None else self.out", "self.out"),),
        "room under a load",
        r"copy out .* writes bytes that copy back",
    ),
    Mutant(
        "the source is not held while its copy is queued",
        (
            Edit(
                f"{RECORD}.start_offload",
                "self.residency = target",
                "self.residency = target; self.device_bytes = None",
            ),
        ),
        "one step",
        r"let go while copy out",
    ),
    Mutant(
        "a load in flight is let go without its completion",
        (
            Edit(
                f"{ENGINE}._drop_copied_bytes",
                "record.finish_load(reads=False)",
                "record.residency = Residency.DEVICE; record.back = None",
            ),
        ),
        "partial grad",
        r"let go while copy back",
    ),
    Mutant(
        "a filed value is not settled before it is changed",
        (
            Edit(
                f"{REGION}:RegionForward._protect_written",
                "filed.output = map_packed(filed.output, self._independent)",
                "pass",
            ),
        ),
        "filed value changed, swapped",
        r"differs by",
    ),
    Mutant(
        "a filed value that is saved is not copied before it is changed",
        (
            Edit(
                f"{REGION}:RegionForward._protect_written",
                "filed.output = map_packed(filed.output, self._independent)",
                "pass",
            ),
        ),
        "filed value changed, saved",
        r"differs by",
    ),
    Mutant(
        "the replay hands out the filed value itself",
        (
            Edit(
                f"{REGION}:RegionReplay._hand_out_copy",
                "return self._region.tensors.clone(value)",
                "return value",
            ),
        ),
        "filed value changed, saved",
        r"differs by",
    ),
    Mutant(
        "the version of a swapped value is not checked",
        (Edit(f"{PACKED}:SwappedValue.unpack", "if not source.is_unchanged():", "if False:"),),
        "swapped value changed",
        r"DID NOT RAISE",
    ),
    Mutant(
        "the version of a kept value is not checked",
        (Edit(f"{PACKED}:KeptValue.unpack", "if now != self.version:", "if False:"),),
        "kept value changed",
        r"DID NOT RAISE",
    ),
    Mutant(
        "a record is found again whatever the version",
        (Edit(f"{ENGINE}.find", "record.source.version == source.version and ", ""),),
        "two versions",
        r"equal",
    ),
    Mutant(
        "the address of a dead storage is not held back",
        (
            Edit(
                f"{TORCH}.storages:storage_watch",
                "reference = StorageWeakRef(storage)\n    return lambda: not reference.expired()",
                "return lambda: True",
            ),
        ),
        "addresses again",
        r"equal",
    ),
    Mutant(
        "a record is never found again",
        (Edit(f"{ENGINE}.find", "return record if", "return None if"),),
        "one copy",
        r"offload|==",
    ),
    Mutant(
        "the random state is not restored",
        (Edit(f"{TORCH}.selective:ReplayMode.__torch_dispatch__", "entry.draw_state.restore(run.displaced)", "pass"),),
        "dropout",
        r"differs by",
    ),
    Mutant(
        "autograd gets its own tensor back",
        (
            Edit(
                f"{TORCH}.saved_tensors:TorchPacker.pack",
                "detached = alias(tensor) if _has_modes() or is_below_counter() else tensor.detach()",
                "detached = tensor",
            ),
        ),
        "cycle",
        r"expired",
    ),
    Mutant(
        "values of a replay leave",
        (Edit(f"{ADAPTER}.why_kept", "self.is_in_backward()", "False"),),
        "replay offloads nothing",
        r"offload|==",
    ),
    Mutant(
        "a retained graph keeps what was brought back",
        (Edit(f"{ENGINE}.end_of_task", "self._drop_copied_bytes(record)", "pass"),),
        "retained graph",
        r"live_bytes",
    ),
    Mutant(
        "what is handed out is held by nobody",
        (
            Edit(
                f"{TORCH}.tensor_adapter:TorchTensorAdapter.view_for_backward",
                "views[source, counts_with_source] = made, made._version",
                "pass",
            ),
        ),
        "bytes returned as a gradient",
        r"changed in place after it was saved",
    ),
    Mutant(
        "what is handed out counts its own changes alone",
        (
            Edit(
                f"{TORCH}.tensor_adapter:TorchTensorAdapter.view_for_backward",
                "if counts_with_source:",
                "if False:",
            ),
        ),
        "a source that is saved again",
        r"DID NOT RAISE",
    ),
    Mutant(
        "the same number on another counter counts",
        (
            Edit(f"{TORCH}.storages:is_changed_piece", "tensor._version > 0", "False"),
            Edit(f"{TORCH}.storages:share_key", "root.nbytes == storage.nbytes()", "True"),
        ),
        "pieces of one storage",
        r"equal",
    ),
    Mutant(
        "a forward counts the ops of a replay inside it",
        (Edit(f"{TORCH}.selective:ForwardMode.__torch_dispatch__", "_current_task() != self._task", "False"),),
        "gradient inside a region",
        r"equal|with inputs",
    ),
    Mutant(
        "every record counts as reachable",
        (Edit(f"{TORCH}.graph:GraphTask.reach", "return reaches", "return lambda first, last: True"),),
        "micro-batches",
        r"brought back another's bytes",
    ),
)


@pytest.mark.parametrize("name", sorted(PROBES))
def test_the_engine_passes_every_probe(name: str) -> None:
    PROBES[name]()


NOTICED = (SimulationError, ActivationError, AssertionError, Failed)


@pytest.mark.python_replay  # tests/integration/tape has the faults of tapes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=repr)
def test_a_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(NOTICED, match=mutant.shows):
        PROBES[mutant.probe]()
