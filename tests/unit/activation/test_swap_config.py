"""Settings: where they come from, what they refuse."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel import SwapConfig
from hyper_parallel.config import current_config, parse_bytes


def test_the_defaults() -> None:
    config = SwapConfig()
    assert config.min_bytes == 2**20
    assert config.tiers == ("pinned",)
    assert config.verify is False
    assert all(
        getattr(config, name) is None
        for name in (
            "tail_bytes",
            "window_bytes",
            "prefetch_bytes",
            "device_bytes",
            "host_limit",
            "disk_path",
            "disk_limit",
        )
    )
    assert [field.name for field in dataclasses.fields(SwapConfig)] == [
        "min_bytes", "tail_bytes", "window_bytes", "prefetch_bytes", "device_bytes", "tiers", "host_limit", "disk_path",
        "disk_limit", "verify", "rank_timeout_seconds",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [0, -1, True, "10", None, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(seconds: Any) -> None:
    assert SwapConfig(rank_timeout_seconds=0.5).rank_timeout_seconds == 0.5
    assert SwapConfig.from_environment({"HYPER_PARALLEL_RANK_TIMEOUT_SECONDS": "20"}).rank_timeout_seconds == 20
    with pytest.raises(ValueError, match=r"SwapConfig\.rank_timeout_seconds: expected seconds, more than 0, got"):
        SwapConfig(rank_timeout_seconds=seconds)


def test_a_config_is_a_frozen_value() -> None:
    assert SwapConfig(min_bytes=3) == SwapConfig(min_bytes="3 B")
    assert hash(SwapConfig(min_bytes=3)) == hash(SwapConfig(min_bytes=3))
    with pytest.raises(dataclasses.FrozenInstanceError, match="min_bytes"):
        SwapConfig().min_bytes = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        SwapConfig(3)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "number"),
    [(5, 5), ("5", 5), ("5B", 5), ("2 KB", 2000), ("2KiB", 2048), ("1.5 MiB", 3 * 2**19), ("1gib", 2**30),
     ("3 GB", 3 * 10**9), ("1TiB", 2**40), ("1tb", 10**12), (" 7 ", 7), (0, 0)],
)  # fmt: skip
def test_bytes_are_read(text: Any, number: int) -> None:
    assert parse_bytes(text, name="x") == number
    assert SwapConfig(window_bytes=text).window_bytes == number


@pytest.mark.parametrize(
    "name", ["min_bytes", "tail_bytes", "window_bytes", "prefetch_bytes", "host_limit", "disk_limit"]
)
def test_bad_bytes_name_the_setting(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"SwapConfig.{name}: cannot read 'much' as bytes; write a number and one of B, KB"
    ):
        SwapConfig(**{name: "much"})
    with pytest.raises(ValueError, match=f"SwapConfig.{name}: -1 is negative"):
        SwapConfig(**{name: -1})
    for bad in (1.5, True, [1]):
        with pytest.raises(TypeError, match=f"SwapConfig.{name}: expected bytes as an int or a string"):
            SwapConfig(**{name: bad})


def test_min_bytes_cannot_be_left_to_the_library() -> None:
    with pytest.raises(TypeError, match=r"SwapConfig\.min_bytes: expected bytes"):
        SwapConfig(min_bytes=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", [("tape",), (), ("pinned", "pinned"), "tape", ["pinned", "tape"]])
def test_unknown_tiers_are_refused_with_the_known_ones(tiers: Any) -> None:
    with pytest.raises(ValueError, match=r"SwapConfig\.tiers: .* out of pinned, pageable, disk"):
        SwapConfig(tiers=tiers)


def test_one_tier_may_be_a_plain_name_and_a_list_is_as_good() -> None:
    assert SwapConfig(tiers="pageable").tiers == ("pageable",)  # type: ignore[arg-type]
    assert SwapConfig(tiers=["pinned", "pageable"]).tiers == ("pinned", "pageable")  # type: ignore[arg-type]


def test_the_disk_tier_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SwapConfig\.disk_path: the disk tier needs a directory; set disk_path"):
        SwapConfig(tiers=("pinned", "disk"))
    assert SwapConfig(tiers=("disk",), disk_path=tmp_path).disk_path == str(tmp_path)  # type: ignore[arg-type]


def test_verify_is_a_flag() -> None:
    with pytest.raises(TypeError, match=r"SwapConfig\.verify: expected True or False, got 'yes'"):
        SwapConfig(verify="yes")  # type: ignore[arg-type]


def test_configure_for_the_process() -> None:
    hp.configure(SwapConfig(min_bytes=5))
    assert current_config() == SwapConfig(min_bytes=5)
    hp.configure(window_bytes="1KiB")
    assert current_config() == SwapConfig(min_bytes=5, window_bytes=1024)
    hp.configure(SwapConfig(min_bytes=7), verify=True)
    assert current_config() == SwapConfig(min_bytes=7, verify=True)
    hp.configure(None)
    assert current_config() == SwapConfig()


def test_configure_for_a_block() -> None:
    hp.configure(min_bytes=5)
    with hp.configure(min_bytes=6) as inner:
        assert current_config() is inner
        assert inner.min_bytes == 6
        with hp.configure(SwapConfig(min_bytes=7)):
            assert current_config().min_bytes == 7
        assert current_config().min_bytes == 6
    assert current_config().min_bytes == 5


def test_a_block_ends_with_an_exception_too() -> None:
    with pytest.raises(KeyError, match="told to"), hp.configure(min_bytes=6):
        raise KeyError("told to")
    assert current_config() == SwapConfig()


def test_a_block_belongs_to_its_thread() -> None:
    with hp.configure(min_bytes=6):
        assert min_bytes_in_another_thread() == 2**20


def min_bytes_in_another_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(current_config().min_bytes))
    thread.start()
    thread.join()
    return seen[0]


def test_no_other_thread_sees_the_setting_of_a_block_before_it_begins() -> None:
    hp.configure(min_bytes=5)
    block = hp.configure(min_bytes=6)  # the moment between the call and the beginning of the block
    assert min_bytes_in_another_thread() == 5
    with block as inside:
        assert current_config() is inside
        assert min_bytes_in_another_thread() == 5
    assert current_config().min_bytes == 5
    del block
    assert current_config().min_bytes == 5


def test_a_result_that_is_kept_and_not_entered_sets_the_process() -> None:
    kept = hp.configure(min_bytes=6)
    assert current_config().min_bytes == 6, "this thread used the settings"
    assert min_bytes_in_another_thread() == 6
    hp.configure(window_bytes=7)
    assert current_config() == SwapConfig(min_bytes=6, window_bytes=7), "in the order of the calls"
    with kept:
        assert current_config() == SwapConfig(min_bytes=6)
    assert current_config() == SwapConfig(min_bytes=6, window_bytes=7), "a later setting of the process stays"


def test_a_block_of_settings_that_were_used_before_it_takes_them_off_the_process() -> None:
    hp.configure(min_bytes=5)
    kept = hp.configure(min_bytes=6)
    assert current_config().min_bytes == 6
    with kept:
        assert min_bytes_in_another_thread() == 5
    assert current_config().min_bytes == 5


def test_a_block_may_be_entered_twice() -> None:
    block = hp.configure(min_bytes=6)
    for _ in range(2):
        with block:
            assert current_config().min_bytes == 6
        assert current_config() == SwapConfig()


def test_the_process_setting_holds_in_every_thread() -> None:
    hp.configure(min_bytes=6)
    assert min_bytes_in_another_thread() == 6


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"configure: unknown setting window; did you mean window_bytes\? known"):
        hp.configure(window=3)
    with pytest.raises(TypeError, match=r"configure: expected a SwapConfig, got 3; write configure\(SwapConfig"):
        hp.configure(3)  # type: ignore[arg-type]
    assert current_config() == SwapConfig()


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {
        "MIN_BYTES": "4KiB", "TAIL_BYTES": "1", "WINDOW_BYTES": "2", "PREFETCH_BYTES": "3 MB", "TIERS": "pinned, disk",
        "HOST_LIMIT": "20GiB", "DISK_PATH": str(tmp_path), "DISK_LIMIT": "1TB", "VERIFY": "yes",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"HYPER_PARALLEL_{name}", value)
    expected = SwapConfig(
        min_bytes=4096, tail_bytes=1, window_bytes=2, prefetch_bytes=3_000_000, tiers=("pinned", "disk"),
        host_limit=20 * 2**30, disk_path=str(tmp_path), disk_limit=10**12, verify=True,
    )  # fmt: skip
    assert SwapConfig.from_environment() == expected
    assert current_config() == expected
    with hp.configure(SwapConfig()):
        assert current_config() == SwapConfig(), "what is said in code outweighs the environment"
    monkeypatch.setenv("HYPER_PARALLEL_MIN_BYTES", "9")
    assert current_config().min_bytes == 9, "the environment is read when it is needed"


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("true", True), ("No", False), ("0", False), ("FALSE", False)])
def test_flags_in_the_environment(text: str, flag: bool) -> None:
    assert SwapConfig.from_environment({"HYPER_PARALLEL_VERIFY": text}).verify is flag


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VERIFY", "perhaps", "HYPER_PARALLEL_VERIFY: cannot read 'perhaps' as yes or no"),
        ("MIN_BYTES", "much", "MIN_BYTES|min_bytes.*cannot read 'much'"),
        ("TIERS", "tape", "tiers"),
    ],
)
def test_bad_values_in_the_environment_name_the_setting(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwapConfig.from_environment({f"HYPER_PARALLEL_{name}": value})


def test_a_wrapper_may_have_settings_of_its_own() -> None:
    import torch

    from hyper_parallel.testing import simulated_accelerator

    small = SwapConfig(min_bytes=0, window_bytes=0, tail_bytes=0)
    large = SwapConfig(min_bytes=10**9)
    x = torch.rand(4, requires_grad=True)
    with simulated_accelerator(min_bytes=10**9) as sim:
        hp.swap_wrapper(torch.sin)(x).sum().backward()
        hp.swap(torch.sin, x).sum().backward()
        assert sim.swapped_bytes == 0
        hp.swap_wrapper(torch.sin, swap_config=small)(x).sum().backward()
        assert sim.swapped_bytes == x.nbytes
        hp.swap(torch.sin, x, swap_config=small).sum().backward()
        assert sim.swapped_bytes == 2 * x.nbytes
        hp.checkpoint(torch.sin, x, swap_inputs=True, swap_config=small).sum().backward()
        assert sim.swapped_bytes == 3 * x.nbytes
        hp.checkpoint_wrapper(torch.sin, swap_inputs=True, swap_config=large)(x).sum().backward()
        assert sim.swapped_bytes == 3 * x.nbytes
