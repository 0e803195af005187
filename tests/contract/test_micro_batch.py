"""Splitting the inputs of a call."""

from __future__ import annotations

import numpy as np
import pytest

from .marks import covers

ROWS = np.arange(12.0, dtype=np.float32).reshape(4, 3)


@covers("micro_batch")
def test_a_decorated_function_returns_the_list_of_its_outputs(platform, adapter):
    @platform.micro_batch(2)
    def double(x, *, factor=1):
        """Doubles."""
        return x * 2 * factor

    outputs = double(adapter.tensor(ROWS), factor=3)
    assert [adapter.numpy(output).tolist() for output in outputs] == [(ROWS[:2] * 6).tolist(), (ROWS[2:] * 6).tolist()]
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")


@covers("micro_batch")
def test_called_with_arguments_it_splits_them(platform, adapter):
    whole, columns, text = adapter.tensor([7.0]), adapter.tensor(ROWS.T), "text"
    split = platform.micro_batch(4, [None, -1], {"columns": 1, "mask": -1})
    args, kwargs = split((adapter.tensor(ROWS), whole, text), {"columns": columns, "mask": whole, "flag": None})
    assert len(args) == len(kwargs) == 4
    for index in range(4):
        row, same, word = args[index]
        assert adapter.numpy(row).tolist() == ROWS[index : index + 1].tolist()
        assert same is whole
        assert word == "text"
        assert adapter.numpy(kwargs[index]["columns"]).tolist() == ROWS.T[:, index : index + 1].tolist()
        assert kwargs[index]["mask"] is whole
        assert kwargs[index]["flag"] is None


@covers("micro_batch")
def test_tensors_inside_containers_are_split(platform, adapter):
    (first, second), _ = platform.micro_batch(2)(({"x": adapter.tensor(ROWS), "n": [adapter.tensor(ROWS[:, 0])]},), {})
    assert adapter.numpy(first[0]["x"]).tolist() == ROWS[:2].tolist()
    assert adapter.numpy(second[0]["n"][0]).tolist() == ROWS[2:, 0].tolist()


@covers("micro_batch")
def test_gradients_pass_through_the_split(platform, adapter):
    split = platform.micro_batch(2)

    def loss(x):
        first, second = split(lambda piece: (piece**2).sum())(x)
        return first + 10 * second

    (gradient,) = adapter.gradients(loss, ROWS)
    np.testing.assert_allclose(gradient, np.concatenate([2 * ROWS[:2], 20 * ROWS[2:]]))


@covers("micro_batch")
def test_what_cannot_be_split_is_refused(platform, adapter):
    data = adapter.tensor(ROWS)
    with pytest.raises(ValueError, match=r"argument 0 has 4 rows on dim 0, which do not divide into 3 micro-batches"):
        platform.micro_batch(3)((data,), {})
    with pytest.raises(ValueError, match=r"argument 'x' has shape \(4, 3\) and no dim 2 to split; .* or -1"):
        platform.micro_batch(2, kwargs_batch_dim={"x": 2})((), {"x": data})
    with pytest.raises(ValueError, match=r"micro_batch_num must be a number of pieces, 1 or more; got 0"):
        platform.micro_batch(0)
    with pytest.raises(ValueError, match=r"args_batch_dim\[1\] must be a dim, 0 or greater, or -1 for whole; got -2"):
        platform.micro_batch(2, [0, -2])
    with pytest.raises(ValueError, match=r"kwargs_batch_dim names \['maks'\], which f does not take; .*\['mask'\]"):

        @platform.micro_batch(2, kwargs_batch_dim={"maks": 0})
        def f(mask):
            return mask

    with pytest.raises(TypeError, match=r"micro_batch: give it a function to decorate, or args .* got int"):
        platform.micro_batch(2)(3, {})
