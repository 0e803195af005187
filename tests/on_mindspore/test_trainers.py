"""One callback for ``mindspore.train.Model``, and the code blocks of the page about MindSpore."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import dataset, mint, nn, train

import hyper_parallel as hp
from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.mindspore import callback
from hyper_parallel.testing import simulated_accelerator

PAGE = Path(__file__).parents[2] / "docs" / "mindspore.md"


class Part(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = mint.nn.Linear(16, 64, bias=False), mint.nn.Linear(64, 16, bias=False)

    def construct(self, x: Any) -> Any:
        return x + self.down(mint.nn.functional.silu(self.up(x)))


class Stack(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Part() for _ in range(4)])
        for seed, parameter in enumerate(self.get_parameters()):
            numbers = np.random.RandomState(seed).standard_normal(parameter.shape).astype(np.float32)
            parameter.set_data(mindspore.Tensor(numbers * 0.2))

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(callbacks: list[Any]) -> list[bytes]:
    """The weights after three steps."""
    source = np.random.RandomState(0)
    rows = [tuple(source.standard_normal((256, 16)).astype(np.float32) for _ in range(2)) for _ in range(3)]
    network = Stack()
    model = train.Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1))
    data = dataset.GeneratorDataset(rows, ["x", "y"], shuffle=False)
    model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    assert [type(layer) for layer in network.layers] == [Part] * 4
    return [parameter.asnumpy().tobytes() for parameter in network.trainable_params()]


def test_a_callback_keeps_the_budget_and_the_weights_are_bitwise_the_same(tmp_path: Path) -> None:
    hp.configure(hp.SwapConfig(min_bytes=1))
    with simulated_accelerator() as simulation:
        plain = trained([])
        budget = int(0.7 * simulation.peak_bytes)
        keeper = callback(budget=budget, steps=1, report=tmp_path / "report.json")
        assert trained([keeper]) == plain
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["measured_peak_bytes"] <= budget
    assert report["regions"] > 0


def test_a_callback_that_sees_no_batch_says_what_to_do() -> None:
    class Context:
        def original_args(self) -> Any:
            return {}

    with pytest.raises(PlanError, match=r"BudgetCallback: cannot see the first batch;.*dataset_sink_mode=False"):
        callback(budget="1GiB").on_train_step_begin(Context())


def test_the_blocks_of_the_page_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the page is ours
    assert "budget 9.00 MiB" in capsys.readouterr().out


# ---------------------------------------------------------------------- micro-batches


def test_gradients_added_up_over_micro_batches_are_bitwise_the_same_and_within_the_budget() -> None:
    hp.configure(hp.SwapConfig(min_bytes=1))
    network = Stack()
    weights = network.trainable_params()
    function = mindspore.value_and_grad(lambda x: mint.mean(mint.square(network(x))), None, weights)
    source = np.random.RandomState(3)
    batches = [mindspore.Tensor(source.standard_normal((128, 16)).astype(np.float32)) for _ in range(3)]

    def step() -> list[Any]:
        total: list[Any] | None = None
        for batch in batches:
            _, gradients = function(batch)
            total = list(gradients) if total is None else [one + other for one, other in zip(total, gradients)]
        assert total is not None
        return total

    def found() -> list[bytes]:
        return [gradient.asnumpy().tobytes() for gradient in step()]

    with simulated_accelerator() as simulation:
        plain = found()
        budget = int(0.8 * simulation.peak_bytes)
        with hp.fit_memory(network, step, budget, steps=1):
            found()
            simulation.reset_peak()
            assert found() == plain
            assert simulation.peak_bytes <= budget
