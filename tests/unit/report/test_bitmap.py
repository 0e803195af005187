"""The figure as a PNG: twice the SVG's size, with its colours and words on it."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.errors import MissingPackageError
from hyper_parallel.report import bitmap
from hyper_parallel.report.figure import render_figure
from tests.unit.report.runs import hostile_run, small_run

pytest.importorskip("resvg_py", reason="the extra 'png' is not installed")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    bitmap._drawing.cache_clear()
    yield
    bitmap._drawing.cache_clear()


def pixels(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and the pixels of the first 60 rows, which hold the legend, of an RGBA PNG of 8 bits."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) == (8, 6)
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    raw, before, found = zlib.decompress(packed), bytes(4 * width), []
    for row in range(60):
        start = row * (4 * width + 1)
        before = unfiltered(raw[start], raw[start + 1 : start + 1 + 4 * width], before)
        found += [before[at : at + 4] for at in range(0, 4 * width, 4)]
    return width, height, found


def unfiltered(kind: int, row: bytes, above: bytes) -> bytes:
    done = bytearray(4)  # the pixel left of the first
    corner = bytes(4) + above
    for at, value in enumerate(row):
        left, up, upper_left = done[at], above[at], corner[at]
        guess = left + up - upper_left
        nearest = min((left, up, upper_left), key=lambda near: abs(guess - near))
        done.append((value + (0, left, up, (left + up) // 2, nearest)[kind]) % 256)
    return bytes(done[4:])


@pytest.fixture
def fonts() -> None:
    try:
        bitmap._drawing()
    except MissingPackageError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("fonts")
@pytest.mark.parametrize("run", [small_run(), hostile_run()], ids=["plain", "hostile"])
def test_it_has_twice_the_size_of_the_svg_and_is_not_blank(run, tmp_path: Path) -> None:
    bitmap.write_bitmap(tmp_path / "figure.png", run)
    width, height, found = pixels(tmp_path / "figure.png")
    assert f'width="{width // 2}" height="{height // 2}"' in render_figure(run)
    colours = set(found)
    assert found[0] == b"\xff\xff\xff\xff"  # on white, not see-through
    assert bytes.fromhex("777777ff") in colours  # the first way
    assert bytes.fromhex("333333ff") in colours  # words


@pytest.mark.usefixtures("fonts")
def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_run().save("run.json")
    assert main(["report", "run.json", "--png", "figure.png", "--timeline-of", "none"]) == 0
    bitmap.write_bitmap("same.png", small_run(), timeline_of="none")
    assert Path("figure.png").read_bytes() == Path("same.png").read_bytes()


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(MissingPackageError, match="pip install resvg_py; or take the SVG"):
        bitmap.write_bitmap(tmp_path / "figure.png", small_run())
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_fonts_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import resvg_py

    with_fonts = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda **options: with_fonts(**options, skip_system_fonts=True))
    with pytest.raises(
        MissingPackageError, match=r"none of the fonts Helvetica, .* is installed here and its words would be missing"
    ):
        bitmap.write_bitmap(tmp_path / "figure.png", small_run())
    assert list(tmp_path.iterdir()) == []
