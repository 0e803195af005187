"""What only MindSpore has, or has differently; each test runs where the platform under test is MindSpore."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.errors import GroupError, HyperParallelError, UnsupportedMemberError

from .marks import covers, on_ranks
from .models import models_for
from .worker import World

BATCH = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def mindspore(adapter):
    if adapter.name != "mindspore":
        pytest.skip("MindSpore's own; run with --platform mindspore in its environment")
    import mindspore

    return mindspore


@covers("get_op_name")
def test_an_op_has_one_name_wherever_it_is_met(mindspore, platform, adapter):
    seen = []

    class Watch(mindspore.MsDispatchMode):
        def __ms_dispatch__(self, func, args, kwargs=None):
            seen.append(platform.get_op_name(func))
            return func(*args)

    with Watch():
        mindspore.ops.add(adapter.tensor(BATCH), adapter.tensor(BATCH))
    assert seen == ["Add"]
    assert platform.get_op_name(mindspore.ops.Add()) == platform.get_op_name("Add.Tensor") == "Add"
    assert platform.get_op_name(mindspore.mint.matmul) == "matmul"


@covers("no_grad")
def test_no_grad_records_nothing(mindspore, platform, adapter):
    def loss(x):
        with platform.no_grad():
            y = x * 3
        return (x * y).sum()

    (gradient,) = adapter.gradients(loss, BATCH)
    np.testing.assert_allclose(gradient, 3 * BATCH, rtol=1e-6)


@covers("profiler_record")
def test_a_range_lets_its_body_run_and_its_errors_out(mindspore, platform):
    def fail():
        with platform.profiler_record("hyper_parallel: a named range"):
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()


@covers("checkpoint")
@pytest.mark.parametrize("as_cell", [True, False])
def test_checkpoint_recomputes_and_gives_the_same_gradients(mindspore, platform, adapter, as_cell):
    model = models_for(adapter).small()
    calls = []
    model.first.register_forward_pre_hook(lambda *_: calls.append("forward"))
    plain = adapter.gradients(lambda x: model(x).square().sum(), BATCH)
    assert calls == ["forward"]
    region = model if as_cell else lambda x: model(x)
    again = adapter.gradients(lambda x: platform.checkpoint(region, x).square().sum(), BATCH)
    np.testing.assert_array_equal(plain, again)
    assert calls == ["forward"] * 3


@covers("checkpoint", "noop_context_fn")
def test_checkpoint_takes_contexts_and_refuses_foreign_options(mindspore, platform, adapter):
    model = models_for(adapter).small()
    plain = adapter.gradients(lambda x: model(x).sum(), BATCH)
    run = lambda x: platform.checkpoint(model, x, context_fn=platform.noop_context_fn).sum()  # noqa: E731
    np.testing.assert_array_equal(adapter.gradients(run, BATCH), plain)
    with pytest.raises(ValueError, match=r"checkpoint: use_reentrant=True is not .*leave it out"):
        platform.checkpoint(model, adapter.tensor(BATCH), use_reentrant=True)
    with pytest.raises(ValueError, match=r"checkpoint: \['debug'\] are not options .*preserve_rng_state"):
        platform.checkpoint(model, adapter.tensor(BATCH), debug=True)
    with pytest.raises(ValueError, match=r"contradict each other; they are two names of one option"):
        platform.checkpoint(model, adapter.tensor(BATCH), preserve_rng_state=True, save_rng_state=False)


@covers("checkpoint", "ckpt_wrapper")
@pytest.mark.parametrize("way", ["checkpoint", "ckpt_wrapper", "public", "policy", "swapped inputs"])
def test_preserve_rng_state_says_whether_a_replay_draws_the_same_numbers(mindspore, platform, adapter, way):
    values = np.linspace(-1.0, 1.0, 400, dtype=np.float32).reshape(20, 20)
    recompute_all = lambda ctx, op, *args: hp.CheckpointPolicy.PREFER_RECOMPUTE  # noqa: E731
    ways = {
        "checkpoint": lambda region, x, **option: platform.checkpoint(region, x, **option),
        "ckpt_wrapper": lambda region, x, **option: platform.ckpt_wrapper(region, **option)(x),
        "public": lambda region, x, **option: hp.checkpoint(region, x, **option),
        "policy": lambda region, x, **option: hp.checkpoint(region, x, policy_fn=recompute_all, **option),
        "swapped inputs": lambda region, x, **option: hp.checkpoint(region, x, swap_inputs=True, **option),
    }

    def gradient(run, **option):
        mindspore.set_seed(4)
        dropout = mindspore.nn.Dropout(p=0.5).set_train()
        drawn = queue.SimpleQueue()  # A region puts a list of its closure back; it leaves a queue alone.

        def region(x):
            drawn.put(np.random.rand())
            return dropout(x.exp()) * x

        found = adapter.gradients(lambda x: run(region, x, **option).sum(), values)
        return found, [drawn.get() for _ in range(drawn.qsize())]

    plain, _ = gradient(lambda region, x: region(x))
    np.testing.assert_array_equal(gradient(ways[way])[0], plain)
    found, (forward, replay) = gradient(ways[way], preserve_rng_state=True)
    np.testing.assert_array_equal(found, plain)
    assert forward == replay
    found, (forward, replay) = gradient(ways[way], preserve_rng_state=False)
    assert not np.array_equal(found, plain)
    assert forward != replay


@covers("checkpoint")
def test_a_normalisation_is_no_random_op(mindspore, platform, adapter):
    normal = mindspore.nn.LayerNorm((4,))
    found = adapter.gradients(lambda x: platform.checkpoint(normal, x).square().sum(), BATCH)
    np.testing.assert_array_equal(found, adapter.gradients(lambda x: normal(x).square().sum(), BATCH))


@covers("checkpoint")
def test_a_random_op_in_a_region_is_kept_and_gives_the_right_gradient(mindspore, platform, adapter):
    def gradient(checkpoint):
        mindspore.set_seed(4)
        dropout = mindspore.nn.Dropout(p=0.5).set_train()
        region = lambda x: dropout(x.exp()) * mindspore.ops.randn(3, 4) * x  # noqa: E731
        return adapter.gradients(lambda x: checkpoint(region, x).sum(), BATCH)

    plain = gradient(lambda region, x: region(x))
    np.testing.assert_array_equal(gradient(platform.checkpoint), plain)


@covers("checkpoint")
def test_an_error_in_a_region_is_raised_and_the_next_region_runs(mindspore, platform, adapter):
    model = models_for(adapter).small()

    def fail(x):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        adapter.gradients(lambda x: platform.checkpoint(fail, x).sum(), BATCH)
    for region in (mindspore.nn.LayerNorm((4,)), model):
        found = adapter.gradients(lambda x, region=region: platform.checkpoint(region, x).square().sum(), BATCH)
        plain = adapter.gradients(lambda x, region=region: region(x).square().sum(), BATCH)
        np.testing.assert_array_equal(found, plain)
    platform.load_into_param(model.first.weight, adapter.tensor(np.ones((4, 4)), "float32"))


def test_the_random_state_of_the_cpu_is_refused_and_seeds_repeat(mindspore, platform, adapter):
    with pytest.raises(UnsupportedMemberError, match=r"get_rng_state: .*no state .*Instead: call manual_seed"):
        platform.get_rng_state()
    with pytest.raises(UnsupportedMemberError, match=r"set_rng_state: .*Instead: call manual_seed"):
        platform.set_rng_state(None)
    draws = []
    for seed in (11, 12, 11):
        platform.manual_seed(seed)
        draws.append(adapter.numpy(mindspore.ops.randn(4)).tolist())
    assert draws[0] == draws[2] != draws[1]


@covers("clip_grad_norm_")
def test_clipping_says_where_gradients_belong(mindspore, platform, adapter):
    model = models_for(adapter).small()
    with pytest.raises(HyperParallelError, match=r"none of the 5 parameters has a gradient; .*parameter.grad = grad"):
        platform.clip_grad_norm_(model, 1.0)


@covers("set_layout_into_parameter", "get_param_local_shape", "get_param_local_data")
def test_a_layout_stays_on_the_parameter(mindspore, platform, adapter, monkeypatch):
    from hyper_parallel.platform.mindspore import modules

    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    layout = mindspore.parallel.Layout((2, 2, 2), ("a", "b", "c"))(("a", "c"), "b")
    for rank in range(8):
        monkeypatch.setattr(modules, "my_rank", lambda rank=rank: rank)
        parameter = mindspore.Parameter(mindspore.Tensor(values))
        assert platform.set_layout_into_parameter(parameter, layout) is parameter
        a, b, c = rank // 4, rank // 2 % 2, rank % 2
        row = 2 * (2 * a + c)
        assert platform.get_param_local_shape(parameter) == (2, 2)
        found = adapter.numpy(platform.get_param_local_data(parameter))
        np.testing.assert_array_equal(found, values[row : row + 2, 2 * b : 2 * b + 2])
    with pytest.raises(ValueError, match=r"already has .*device_matrix.*a second layout is refused"):
        platform.set_layout_into_parameter(parameter, layout)
    fresh = mindspore.Parameter(mindspore.Tensor(np.ones((3, 4), np.float32)))
    with pytest.raises(TypeError, match=r"a layout on MindSpore is a mindspore.parallel.Layout .* got 'dp'"):
        platform.set_layout_into_parameter(fresh, "dp")
    with pytest.raises(ValueError, match=r"dim 0 of shape \(3, 4\) does not divide into 4 pieces"):
        platform.set_layout_into_parameter(fresh, layout)


@covers("init_on_device")
def test_only_the_thread_inside_the_context_is_concerned(mindspore, platform, adapter):
    models, places = models_for(adapter), {}
    own = mindspore.nn.Cell.insert_param_to_cell

    def build(key):
        places[key] = {str(p.device) for p in platform.parameters_dict(models.small()).values()}

    with platform.init_on_device("meta"):
        thread = threading.Thread(target=build, args=("other thread",))
        thread.start()
        thread.join()
        with platform.init_on_device("cpu"):
            build("inner")
        build("inside")
    build("after")
    assert places == {"other thread": {"CPU"}, "inner": {"CPU"}, "inside": {"meta"}, "after": {"CPU"}}
    assert mindspore.nn.Cell.insert_param_to_cell is own
    assert mindspore.Parameter.init_param is True


@covers("init_on_device", "init_parameters")
def test_buffers_follow_when_asked_and_what_nobody_can_fill_is_named(mindspore, platform, adapter):
    with platform.init_on_device("meta", include_buffers=True):
        model = models_for(adapter).small()
    assert model.scale.device == "meta"
    with pytest.raises(HyperParallelError, match=r"init_parameters: cannot give values to \['scale'\]; because"):
        platform.init_parameters(model, 0)


@covers("save_checkpoint", "load_checkpoint")
def test_files_are_read_by_others_and_theirs_by_us(mindspore, platform, adapter, tmp_path):
    from safetensors.numpy import load_file

    state = {"w": adapter.tensor(BATCH), "n": adapter.tensor([1, 2], "int64"), "s": adapter.tensor(np.float32(3.0))}
    ours = tmp_path / "ours.safetensors"
    platform.save_checkpoint(state, ours)
    for name, array in load_file(ours).items():
        np.testing.assert_array_equal(array, adapter.numpy(state[name]))
    checkpoint = tmp_path / "ours.ckpt"
    platform.save_checkpoint({"w": state["w"]}, checkpoint, "ckpt")
    np.testing.assert_array_equal(adapter.numpy(mindspore.load_checkpoint(str(checkpoint))["w"]), BATCH)
    model = models_for(adapter).small()
    for form, path in (("ckpt", tmp_path / "theirs.ckpt"), ("safetensors", tmp_path / "theirs.safetensors")):
        mindspore.save_checkpoint(model, str(path), format=form)
        loaded = platform.load_checkpoint(path, form)
        for name, parameter in platform.parameters_dict(model).items():
            np.testing.assert_array_equal(adapter.numpy(loaded[name]), adapter.numpy(parameter))


def test_writing_into_views_reaches_the_storage_and_nothing_else(mindspore, platform, adapter):
    from hyper_parallel.platform.mindspore.tensors import write_into

    for dtype in ("float32", "bfloat16", "bool"):
        base = adapter.tensor(np.zeros((4, 6)), dtype)
        view = base[1:3].T
        write_into(view, adapter.tensor(np.ones(view.shape), dtype))
        expected = np.zeros((4, 6))
        expected[1:3] = 1
        np.testing.assert_array_equal(adapter.numpy(base).astype(float), expected)


@on_ranks(2)
@covers("all_reduce", "all_gather_into_tensor", "broadcast", "all_to_all_single", "isend", "irecv")
def test_every_dtype_travels(world: World):
    if world.adapter.name != "mindspore":
        return
    platform, adapter, other = world.platform, world.adapter, 1 - world.rank
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"):
        mine = adapter.tensor([world.rank, 1], dtype)
        gathered = platform.all_gather_into_tensor(mine, None)
        assert (adapter.numpy(gathered).astype(int).tolist(), gathered.dtype) == ([0, 1, 1, 1], mine.dtype)
        swapped, _ = platform.all_to_all_single(mine, (2,), None)
        assert adapter.numpy(swapped).astype(int).tolist() == ([0, 1] if world.rank == 0 else [1, 1])
        assert adapter.numpy(platform.broadcast(adapter.tensor([world.rank, 1], dtype), 1, None)).astype(int)[0] == 1
        target = adapter.tensor([0, 0], dtype)
        for work in (platform.isend(mine, other), platform.irecv(target, other)):
            work.wait()
        assert adapter.numpy(target).astype(int).tolist() == [other, 1]
        if dtype != "bool":
            assert adapter.numpy(platform.all_reduce(mine, None)).astype(int).tolist() == [1, 2]


@on_ranks(2)
@covers("irecv", "barrier")
def test_launched_operations_run_in_order_and_messages_must_fit(world: World):
    if world.adapter.name != "mindspore":
        return
    platform, adapter, other = world.platform, world.adapter, 1 - world.rank
    first, second = adapter.tensor([1.0 + world.rank]), adapter.tensor([10.0])
    _, one = platform.all_reduce(first, None, async_op=True)
    _, two = platform.all_reduce(second, None, async_op=True)
    assert (one.is_completed(), two.is_completed()) == (False, False)
    two.wait()
    assert one.is_completed()
    assert (adapter.numpy(first)[0], adapter.numpy(second)[0]) == (3.0, 20.0)
    platform.isend(adapter.tensor([1.0, 2.0]), other).wait()
    with pytest.raises(GroupError, match=r"irecv: the message of rank \d has 16 bytes and the tensor 8"):
        platform.irecv(adapter.tensor([0.0]), other).wait()
    platform.barrier()
