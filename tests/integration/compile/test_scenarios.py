"""The engine's scenarios with every layer compiled: bitwise what the compiled layers give without the engine.

The compiled code runs under the simulated accelerator, with copies as late as can be. A scenario that torch cannot compile ends
in the same error with the engine and without it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch.compiled_calls import COMPILATIONS
from hyper_parallel.errors import CompileWarning, InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

sys.path.append(str(Path(__file__).parents[1]))
from activation import scenarios, scenarios_models, scenarios_values  # noqa: F401  # they fill the table
from activation.kinds import Kind, mixed_policy, swap_everything
from activation.scenario import MAY_REFUSE, SCENARIOS, _equal, run

SLICE = (
    "attention_with_shared_tables_and_mask",
    "backward_twice_with_retain_graph",
    "dropout",
    "five_forwards_backwards_in_any_order",
    "frozen_layers",
    "in_place_activation_on_an_output",
    "keywords_and_nested_values",
    "layer_called_several_times",
    "outputs_are_views_and_inputs",
    "shapes_change_every_step",
    "weights_tied",
)
"""What runs in every suite; the others take part in ``make test-long``."""

BUFFERS = {"batch_norm_buffers"}
"""Two forwards before a backward: the recomputation reads running statistics that the second forward changed. Torch's own
checkpoint in a graph refuses that too."""

SMALL_WINDOW: dict[str, Any] = {"window_bytes": 300, "tail_bytes": 0, "prefetch_bytes": 600}
Outcome = tuple[str, dict[str, torch.Tensor | None]]


def _compiled(layer: Any) -> Any:
    return torch.compile(layer, backend="aot_eager")


PLAIN = Kind("compiled", _compiled)
KINDS = (
    Kind("mixed", lambda m: hp.checkpoint_wrapper(_compiled(m), policy_fn=mixed_policy, swap_inputs=True)),
    Kind("all_swapped", lambda m: hp.checkpoint_wrapper(_compiled(m), policy_fn=swap_everything)),
    Kind("swap", lambda m: hp.swap_wrapper(_compiled(m))),
)


def outcome(name: str, kind: Kind) -> Outcome:
    """What ends the scenario, and every tensor worth comparing."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        if (
            name != "nested_wrappers"
        ):  # the inner one is inside a compiled function: what it swaps is saved, with a warning
            warnings.simplefilter("error", CompileWarning)
        try:
            return "", run(name, kind)
        except InPlaceChangeError:
            raise
        except Exception as error:
            return type(error).__name__, {}


@functools.cache
def without_engine(name: str) -> Outcome:
    return outcome(name, PLAIN)


def check(name: str, kind: Kind) -> None:
    wanted_end, wanted = without_engine(name)
    with simulated_accelerator(timing="lazy", **SMALL_WINDOW):
        try:
            end, results = outcome(name, kind)
        except InPlaceChangeError:
            assert name in MAY_REFUSE | BUFFERS
            return
    assert end == wanted_end
    assert results.keys() == wanted.keys()
    for key, tensor in results.items():
        other = wanted[key]
        assert _equal(tensor, other), key


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("name", SLICE)
def test_bitwise(name: str, kind: Kind) -> None:
    before = COMPILATIONS.count
    check(name, kind)
    assert (COMPILATIONS.count > before) == (kind.name != "swap")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - set(SLICE)))
def test_all_the_others(name: str, kind: Kind) -> None:
    check(name, kind)
