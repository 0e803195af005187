"""``value_and_grad``, which both platforms have beside the base."""

from __future__ import annotations

import numpy as np
import pytest

X = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
W = np.array([[2.0, 1.0], [-1.0, 0.25]], np.float32)


@pytest.fixture
def weight(platform, adapter):
    return platform.Parameter(adapter.tensor(W))


def test_by_one_argument_by_several_and_by_weights(platform, adapter, weight):
    def loss(x, y, scale):
        return ((x @ weight) * y).sum() * scale

    x, y = adapter.tensor(X), adapter.tensor(X + 1)
    value, by_x = platform.value_and_grad(loss)(x, y, 2.0)
    assert float(value) == pytest.approx(2 * float(((X @ W) * (X + 1)).sum()), rel=1e-6)
    np.testing.assert_allclose(adapter.numpy(by_x), 2 * (X + 1) @ W.T, rtol=1e-6)
    _, both = platform.value_and_grad(loss, (1, 0))(x, y, 2.0)
    np.testing.assert_allclose(adapter.numpy(both[0]), 2 * X @ W, rtol=1e-6)
    np.testing.assert_allclose(adapter.numpy(both[1]), 2 * (X + 1) @ W.T, rtol=1e-6)
    _, (of_weight,) = platform.value_and_grad(loss, None, [weight])(x, y, 2.0)
    np.testing.assert_allclose(adapter.numpy(of_weight), 2 * X.T @ (X + 1), rtol=1e-6)
    _, (by_x, (of_weight,)) = platform.value_and_grad(loss, 0, [weight])(x, y, 2.0)
    np.testing.assert_allclose(adapter.numpy(by_x), 2 * (X + 1) @ W.T, rtol=1e-6)
    np.testing.assert_allclose(adapter.numpy(of_weight), 2 * X.T @ (X + 1), rtol=1e-6)


def test_what_the_value_does_not_depend_on_has_zeros(platform, adapter, weight):
    unused = platform.Parameter(adapter.tensor(W))
    _, (by_y, grads) = platform.value_and_grad(lambda x, y: (x @ weight).sum(), 1, [weight, unused])(
        adapter.tensor(X), adapter.tensor(X)
    )
    assert not np.any(adapter.numpy(by_y))
    assert np.any(adapter.numpy(grads[0]))
    assert not np.any(adapter.numpy(grads[1]))


def test_the_arguments_and_the_weights_are_left_as_they_were(platform, adapter, weight):
    x = adapter.tensor(X)
    platform.value_and_grad(lambda x: (x @ weight).sum(), 0, [weight])(x)
    assert getattr(weight, "grad", None) is None
    with platform.no_grad():
        again = x @ weight
    np.testing.assert_allclose(adapter.numpy(again), X @ W, rtol=1e-6)


def test_after_an_error_the_next_call_is_right(platform, adapter, weight):
    def broken(x):
        (x @ weight).sum()
        raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        platform.value_and_grad(broken)(adapter.tensor(X))
    _, by_x = platform.value_and_grad(lambda x: (x @ weight).sum())(adapter.tensor(X))
    np.testing.assert_allclose(adapter.numpy(by_x), np.ones_like(X) @ W.T, rtol=1e-6)


def test_nothing_to_differentiate_by_is_refused(platform):
    with pytest.raises(
        ValueError, match="value_and_grad: nothing to differentiate by; give grad_position, weights, or both"
    ):
        platform.value_and_grad(lambda x: x, None)
