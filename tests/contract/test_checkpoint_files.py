"""Weight files: whole or not at all, and never code."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import CheckpointFileError
from hyper_parallel.platform.base.weight_files import replacing

from .marks import covers
from .models import models_for

BATCH = np.linspace(-1.0, 1.0, 12).reshape(3, 4)
FORMATS = ("safetensors", "ckpt")


@pytest.fixture
def models(adapter):
    return models_for(adapter)


@covers("save_checkpoint", "load_checkpoint", "load_into_param")
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_a_model_comes_back(platform, adapter, models, tmp_path, ckpt_format):
    model = models.small()
    platform.load_into_param(model.first.bias, adapter.tensor(np.arange(4.0), "float32"))
    path = tmp_path / "weights.file"
    platform.save_checkpoint(model, path, ckpt_format)
    loaded = platform.load_checkpoint(path, ckpt_format)
    assert set(loaded) == {*models.names, *models.buffers}
    other = models.small()
    for name, parameter in platform.parameters_dict(other).items():
        platform.load_into_param(parameter, loaded[name])
    np.testing.assert_array_equal(models.run(other, BATCH), models.run(model, BATCH))
    assert os.listdir(tmp_path) == ["weights.file"]


@covers("save_checkpoint", "load_checkpoint")
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_tied_weights_keep_both_names(platform, adapter, models, tmp_path, ckpt_format):
    model = models.tied()
    path = tmp_path / "tied"
    platform.save_checkpoint(platform.get_model_state_dict(model), path, ckpt_format)
    loaded = platform.load_checkpoint(path, ckpt_format)
    weight = adapter.numpy(model.first.weight)
    for name in ("first.weight", "second.weight"):
        np.testing.assert_array_equal(adapter.numpy(loaded[name]), weight)


@covers("save_checkpoint", "load_checkpoint")
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_views_and_narrow_dtypes_come_back_exactly(platform, adapter, tmp_path, ckpt_format):
    base = adapter.tensor(np.arange(24.0).reshape(4, 6), "float32")
    state = {
        "piece": platform.chunk(base, 1, 2, 1),
        "overlapping": platform.chunk(base, 1, 3, 0),
        "bfloat16": adapter.tensor([1.5, -0.25], "bfloat16"),
        "scalar": adapter.tensor(np.float32(3.0)),
        "empty": platform.zeros((0, 3), dtype=base.dtype),
        "flags": adapter.tensor([True, False]),
    }
    path = tmp_path / "views"
    platform.save_checkpoint(state, path, ckpt_format)
    loaded = platform.load_checkpoint(path, ckpt_format)
    assert set(loaded) == set(state)
    for name, value in state.items():
        assert (tuple(loaded[name].shape), loaded[name].dtype) == (tuple(value.shape), value.dtype)
        np.testing.assert_array_equal(adapter.numpy(loaded[name]), adapter.numpy(value))


@covers("save_checkpoint")
def test_what_is_no_tensor_is_refused(platform, tmp_path):
    with pytest.raises(TypeError, match=r"save_checkpoint: expected a \w+ or a dict of tensors, got list"):
        platform.save_checkpoint([1], tmp_path / "w")
    with pytest.raises(TypeError, match=r"save_checkpoint: .*'step' is a int. Leave it out"):
        platform.save_checkpoint({"step": 3}, tmp_path / "w")
    with pytest.raises(CheckpointFileError, match=r"cannot write .*nowhere.*its folder does not exist; make it"):
        platform.save_checkpoint({}, tmp_path / "nowhere" / "w")
    with pytest.raises(CheckpointFileError, match=r"cannot write .*; because it is a folder; name a file in it"):
        platform.save_checkpoint({}, tmp_path)
    assert os.listdir(tmp_path) == []


@covers("save_checkpoint")
def test_a_link_stays_a_link_and_what_is_no_file_is_refused(platform, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "w")
    platform.save_checkpoint({}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert platform.load_checkpoint(tmp_path / "w") == {}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointFileError, match=r"cannot write .*pipe; because it is no regular file; name one"):
        platform.save_checkpoint({}, tmp_path / "pipe")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "w"]


@covers("save_checkpoint", "load_checkpoint")
def test_an_unknown_format_lists_the_known(platform, tmp_path):
    with pytest.raises(ValueError, match=r"save_checkpoint: unknown ckpt_format 'onnx'; known are safetensors, .*ckpt"):
        platform.save_checkpoint({}, tmp_path / "w", "onnx")
    with pytest.raises(ValueError, match=r"load_checkpoint: unknown ckpt_format 'onnx'; known are safetensors, .*ckpt"):
        platform.load_checkpoint(tmp_path / "w", "onnx")


@covers("load_checkpoint")
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_three_troubles_have_three_messages(platform, adapter, tmp_path, ckpt_format):
    path = tmp_path / "w"
    with pytest.raises(CheckpointFileError, match=r"load_checkpoint: cannot read .*; because there is no such file"):
        platform.load_checkpoint(path, ckpt_format)
    platform.save_checkpoint({"w": adapter.tensor(np.ones(1000), "float32")}, path, ckpt_format)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 20, 4, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointFileError, match=r"load_checkpoint: cannot read .*; because it is truncated: "):
            platform.load_checkpoint(path, ckpt_format)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointFileError, match=r"cannot read .*; because it is no"):
        platform.load_checkpoint(path, ckpt_format)
    assert not Bomb.has_gone_off


class Bomb:
    """A pickle that runs code when it is loaded."""

    has_gone_off = False

    def __reduce__(self):
        return _explode, ()


def _explode():
    Bomb.has_gone_off = True
    return {}


def test_the_bomb_is_live():
    try:
        pickle.loads(pickle.dumps(Bomb()))
        assert Bomb.has_gone_off
    finally:
        Bomb.has_gone_off = False


@covers("load_checkpoint")
@pytest.mark.parametrize("ckpt_format", FORMATS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(junk=st.binary(max_size=300), keep=st.integers(0, 400), flip=st.integers(0, 399))
def test_bytes_of_any_kind_load_or_are_refused(platform, adapter, tmp_path, ckpt_format, junk, keep, flip):
    path = tmp_path / "w"
    platform.save_checkpoint({"w": adapter.tensor(np.ones(8), "float32")}, path, ckpt_format)
    whole = path.read_bytes()
    broken = bytearray(whole[:keep] + junk)
    if flip < len(broken):
        broken[flip] ^= 0x41
    path.write_bytes(broken)
    try:
        loaded, refusal = platform.load_checkpoint(path, ckpt_format), str(path)
    except CheckpointFileError as error:
        loaded, refusal = {}, str(error)
    assert str(path) in refusal
    assert all(platform.is_tensor(value) for value in loaded.values())


SAVE = textwrap.dedent("""
    import sys
    sys.path[:0] = {path!r}
    from tests.contract.adapters import adapter_named
    adapter = adapter_named({name!r})
    adapter.platform.save_checkpoint({{"w": adapter.platform.zeros((1_000_000,))}}, {target!r}, {ckpt_format!r})
""")


@covers("save_checkpoint")
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_a_disk_that_fills_up_in_mid_write_leaves_the_old_file(platform, adapter, tmp_path, ckpt_format):
    """The operating system really refuses the write: the process may write 100 kB to a file and needs 4 MB."""
    path = tmp_path / "w"
    platform.save_checkpoint({"w": adapter.tensor([1.0, 2.0])}, path, ckpt_format)
    before = path.read_bytes()
    root = str(Path(__file__).parents[2])
    script = SAVE.format(path=[root], name=adapter.name, target=str(path), ckpt_format=ckpt_format)

    def limit_file_size():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    run = subprocess.run(
        [sys.executable, "-c", script], preexec_fn=limit_file_size, capture_output=True, text=True, timeout=600
    )
    assert run.returncode != 0
    assert "CheckpointFileError: save_checkpoint: cannot write" in run.stderr
    assert "the old file, if there was one, is untouched" in run.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w"]


def test_a_failure_before_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(b"old")

    def fail_while_writing():
        with replacing(path) as temporary:
            temporary.write_bytes(b"half of the n")
            assert path.read_bytes() == b"old"
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        fail_while_writing()
    assert (os.listdir(tmp_path), path.read_bytes()) == (["w"], b"old")


def test_a_file_keeps_its_permissions_and_a_new_one_follows_the_mask(tmp_path):
    path = tmp_path / "w"
    mask = os.umask(0o027)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(b"first")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    with replacing(path) as temporary:
        temporary.write_bytes(b"second")
    assert (path.stat().st_mode & 0o777, path.read_bytes()) == (0o604, b"second")
