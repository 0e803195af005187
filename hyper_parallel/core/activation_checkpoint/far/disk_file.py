"""The private file behind the disk tier: nameless, readable by its owner only, read and written at full speed.

It knows offsets and bytes. It knows no lease, no thread and no device; any thread may call :meth:`SwapFile.write_at`
and :meth:`SwapFile.read_at` on ranges that do not overlap.

Nothing is left behind
----------------------
The file has no name from its first moment where the file system can do that (``O_TMPFILE``), else it is unlinked right
after it was opened: however the process ends, the kernel frees it. Where even that fails the file keeps a name that
says whose it is (process and its start time) under a lock that dies with the process, and the next start removes what
dead processes left.

Direct, and without a copy
--------------------------
Bytes that pass through the page cache are copied once more, pile up as dirty pages, and are written when the kernel
decides. Direct I/O avoids all that but wants memory, offset and length aligned, and tensors are aligned to 64 bytes only.
So a range is stored with its bytes rotated: first those from the first aligned *address* on, straight from where they
are; then the few before and after, which pass through a small aligned buffer in the same call. ``phase`` is the number
of bytes before. A reader whose memory has the same phase reads in place too; any other goes through a larger buffer.
The owner of the reader's memory can arrange that: ``residue_of`` the source says where it lay, and memory that begins
as far after a page has the same phase.
(A buffered write of those few bytes would be simpler, and takes the file's lock against all direct ones beside it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

from hyper_parallel.core.processes import start_ticks
from hyper_parallel.errors import DiskTierError

__all__ = ["BLOCK_BYTES", "SwapFile", "aligned_memory", "copy_bytes", "residue_of"]

BLOCK_BYTES: Final = 4096  # ranges of the file start at multiples of it; a multiple of every block size in use
BOUNCE_BYTES: Final = 4 * 2**20
_Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]  # os.pwritev, os.preadv
_NAME: Final = re.compile(r"hyper-parallel-(\d+)-(\d+)-[0-9a-f]{16}\.swap")
# Failures that mean "direct I/O is not possible here", and not "this disk is broken".
_NOT_DIRECTLY: Final = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


class SwapFile:
    """One private file in ``directory``; :class:`DiskTierError`, which names the path, when it cannot be made."""

    def __init__(self, directory: str | os.PathLike[str], *, direct: bool = True) -> None:
        self.directory = os.fspath(directory)
        self.nbytes = 0
        self._check_directory()
        remove_leftovers(self.directory)
        self._fd, self.path = self._open()
        fds = [self._fd]
        self._close = weakref.finalize(self, _close_all, os.getpid(), fds, self.path)
        self._of_thread = threading.local()
        self._alignment = BLOCK_BYTES
        self._direct_fd = self._open_direct() if direct else None
        if self._direct_fd is not None:
            fds.append(self._direct_fd)

    @property
    def is_direct(self) -> bool:
        """Whether bytes go around the page cache."""
        return self._direct_fd is not None

    def free_bytes(self) -> int:
        """What the file system still has for this user."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def total_bytes(self) -> int:
        """How large the file system is."""
        status = os.fstatvfs(self._fd)
        return status.f_blocks * status.f_frsize

    def grow(self, nbytes: int) -> None:
        """Make the file longer and take its blocks now, so that a later write finds them; OSError if it cannot."""
        try:
            _fallocate(self._fd, self.nbytes, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            os.ftruncate(self._fd, self.nbytes + nbytes)
        self.nbytes += nbytes

    def phase_of(self, view: memoryview) -> int:
        """How many bytes of ``view`` lie before its first aligned address."""
        return -_address(view) % self._alignment if self.is_direct else 0

    def write_at(self, offset: int, view: memoryview, phase: int) -> None:
        """Write all of ``view`` to the block range that starts at ``offset``."""
        bulk = _bulk_bytes(view, phase)
        head, tail = view[:phase], view[phase + bulk :]
        edge = self._edge_buffer(len(head) + len(tail))
        copy_bytes(edge[: len(head)], head)
        copy_bytes(edge[len(head) : len(head) + len(tail)], tail)
        try:
            self._transfer(os.pwritev, [view[phase : phase + bulk], edge], offset)
        except OSError as error:
            self._raise("write", len(view), offset, error)

    def read_at(self, offset: int, view: memoryview, phase: int) -> None:
        """Fill ``view`` from what ``write_at`` wrote with this offset, length and phase."""
        bulk = _bulk_bytes(view, phase)
        head, tail = view[:phase], view[phase + bulk :]
        edge = self._edge_buffer(len(head) + len(tail))
        try:
            if self._direct_fd is None or self.phase_of(view) == phase:
                self._transfer(os.preadv, [view[phase : phase + bulk], edge], offset)
            else:
                self._read_bounced(offset, view[phase : phase + bulk])
                self._transfer(os.preadv, [edge], offset + bulk)
        except OSError as error:
            self._raise("read", len(view), offset, error)
        copy_bytes(head, edge[: len(head)])
        copy_bytes(tail, edge[len(head) : len(head) + len(tail)])

    def close(self) -> None:
        """Give the file back to the kernel; the bytes are gone."""
        self._close()

    def _transfer(self, call: _Transfer, views: list[memoryview], offset: int) -> None:
        if self._direct_fd is not None:
            try:
                _complete(call, self._direct_fd, views, offset)
                return
            except OSError as error:
                # Some memory cannot be mapped for the disk (foreign driver pages); the page cache takes any.
                if error.errno not in _NOT_DIRECTLY:
                    raise
        _complete(call, self._fd, views, offset)

    def _edge_buffer(self, nbytes: int) -> memoryview:
        """Aligned memory of this thread for the bytes around the aligned ones, in whole blocks."""
        return self._buffer()[BOUNCE_BYTES : BOUNCE_BYTES - (-nbytes // BLOCK_BYTES * BLOCK_BYTES)]

    def _buffer(self) -> memoryview:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = aligned_memory(BOUNCE_BYTES + 2 * BLOCK_BYTES)
        buffer: memoryview = self._of_thread.buffer
        return buffer

    def _read_bounced(self, offset: int, view: memoryview) -> None:
        bounce = self._buffer()
        for at in range(0, len(view), BOUNCE_BYTES):
            part = view[at : at + BOUNCE_BYTES]
            self._transfer(os.preadv, [bounce[: len(part)]], offset + at)
            copy_bytes(part, bounce[: len(part)])

    def _check_directory(self) -> None:
        if not os.path.isdir(self.directory):
            what = "it is not a directory" if os.path.exists(self.directory) else "it does not exist"
            raise DiskTierError(
                f"disk tier: cannot use {self.directory}; because {what}; "
                "set SwapConfig.disk_path to an existing directory you can write to"
            )

    def _open(self) -> tuple[int, str]:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            fd = os.open(self.directory, flags | os.O_TMPFILE, 0o600)
            return fd, f"{self.directory}/(unnamed)"
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                self._raise_unusable(error)
        return self._open_named(flags)

    def _open_named(self, flags: int) -> tuple[int, str]:
        name = f"hyper-parallel-{os.getpid()}-{start_ticks(os.getpid())}-{secrets.token_hex(8)}.swap"
        path = os.path.join(self.directory, name)
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            self._raise_unusable(error)
        try:
            os.unlink(path)
        except OSError:
            _lock(fd)  # it keeps its name: the lock says that its owner lives
        return fd, path

    def _raise_unusable(self, error: OSError) -> NoReturn:
        raise DiskTierError(
            f"disk tier: cannot make a file in {self.directory}; because {error.strerror}; "
            "set SwapConfig.disk_path to an existing directory you can write to"
        ) from error

    def _raise(self, verb: str, nbytes: int, offset: int, error: OSError) -> NoReturn:
        wrapped = DiskTierError(
            f"disk tier: cannot {verb} {nbytes} bytes at offset {offset} of {self.path}; "
            f"because {error.strerror or error}; "
            "free or replace that disk, choose another SwapConfig.disk_path, or set SwapConfig.disk_limit"
        )
        wrapped.errno = error.errno
        raise wrapped from error

    def _open_direct(self) -> int | None:
        """Open the same file for direct I/O and find the smallest alignment that works here."""
        try:
            # The nameless file is reachable through its descriptor only; a second one keeps the flags apart.
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None
        buffer = aligned_memory(3 * BLOCK_BYTES)
        try:
            for alignment in (64, 512, BLOCK_BYTES):
                # This address is a multiple of the alignment and of nothing larger.
                part = buffer[alignment : alignment + BLOCK_BYTES]
                with contextlib.suppress(OSError):
                    if os.pwritev(fd, [part], 0) == os.preadv(fd, [part], 0) == BLOCK_BYTES:
                        self._alignment = alignment
                        return fd
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.ftruncate(self._fd, 0)
        os.close(fd)
        return None


def remove_leftovers(directory: str) -> list[str]:
    """Remove the files that dead processes left in ``directory``, where it does not allow nameless ones."""
    removed = []
    for entry in os.scandir(directory):
        match = _NAME.fullmatch(entry.name)
        if match is None or start_ticks(int(match.group(1))) == int(match.group(2)):
            continue
        try:
            fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or already gone
        try:
            # In a shared directory the process may live in another container or machine: then the lock is taken.
            if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd):
                os.unlink(entry.path)
                removed.append(entry.path)
        except OSError:
            pass
        finally:
            os.close(fd)
    return removed


def residue_of(view: memoryview) -> int:
    """How far after a block's first address ``view`` begins."""
    return _address(view) % BLOCK_BYTES


def aligned_memory(nbytes: int, *, residue_bytes: int = 0) -> memoryview:
    """Fresh host memory that begins ``residue_bytes`` after a block's first address; ``MemoryError`` when there is none.

    It is a mapping of its own: it leaves the process when the last view of it goes, whatever the C allocator would
    keep. It asks for huge pages, where the kernel gives them on request: direct reads into them were nearly twice as fast.
    """
    try:
        # Private, not the default: shared memory has a file of its own behind it, and seldom huge pages.
        block = mmap.mmap(-1, residue_bytes + nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host refused {nbytes} bytes ({error.strerror})") from error
    with contextlib.suppress(AttributeError, OSError):  # a kernel or system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)[residue_bytes:]


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """Copy without holding the interpreter's lock, which slice assignment would."""
    if len(destination) != len(source):
        raise ValueError(f"copy_bytes: {len(source)} bytes do not fill {len(destination)}")
    if len(source):
        ctypes.memmove(_address(destination), _address(source), len(source))


def _bulk_bytes(view: memoryview, phase: int) -> int:
    return max(0, len(view) - phase) // BLOCK_BYTES * BLOCK_BYTES


def _complete(call: _Transfer, fd: int, views: list[memoryview], offset: int) -> None:
    views = [view for view in views if len(view)]
    while views:
        moved = call(fd, views, offset)
        if moved <= 0:
            left = sum(len(view) for view in views)
            raise OSError(errno.EIO, f"the file ended {left} bytes early")
        offset += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _fallocate(fd: int, offset: int, nbytes: int) -> None:
    # Not os.posix_fallocate: where the file system cannot, the C library writes a byte into every block instead.
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, offset, nbytes) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _close_all(pid: int, fds: list[int], path: str) -> None:
    for fd in fds:
        os.close(fd)
    # A forked child closes its copies and leaves the parent's name alone.
    if os.getpid() == pid and not path.endswith("(unnamed)"):
        with contextlib.suppress(OSError):
            os.unlink(path)
