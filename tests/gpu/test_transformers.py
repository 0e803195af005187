"""Models of ``transformers``, unchanged, on the device; the same families and treatments as on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import hyper_parallel as hp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compute_lags")]

FAMILIES = ("llama", "gpt2", "t5", "mixtral", "vit")
TREATMENTS = ("swap", "hooks_around_the_whole_forward", "checkpoint_swap_inputs", "swap_save_recompute_and_inputs")


def _moved(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to("cuda") if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize("treatment_name", TREATMENTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_step_is_bitwise_the_plain_one(name: str, treatment_name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.fail("needs the package transformers: pip install transformers", pytrace=False)
    # On the search path since conftest.py.
    from models.steps import assert_bitwise_equal, seeded_step
    from models.treatments import TREATMENTS as treatments
    from models.zoo import FAMILIES as families
    from models.zoo import build, wrap_layers

    treatment = treatments[treatment_name]
    batch = _moved(families[name].batch(0))
    wanted = seeded_step(build(name).to("cuda"), batch)
    model = build(name).to("cuda")
    wrap_layers(name, model, treatment.wrap)
    for _ in range(2):
        got = seeded_step(model, batch, around_forward=treatment.around_forward)
        torch.cuda.synchronize()
        assert_bitwise_equal(got, wanted)
    assert hp.stats().swapped_out_bytes > 0
