"""Files that only their owner may read: the store with its log and lock, development keys, exports (S38).

A file that exists before us is checked: somebody else's file, or a link, is refused, because it would reveal what we
write; a file of ours that others can read is closed to them first.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from oncehook.errors import FileUnsafe

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: Path, flags: int, *, as_root: bool = False) -> int:
    """Open a file of ours and close it to others; with O_CREAT, create it if it is missing. Returns its descriptor.

    O_TRUNC is not among the flags: a refused file keeps its content. `as_root` lets root open anybody's file unchanged.
    Raises FileUnsafe, or OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        if path.is_symlink():
            raise _is_link(path) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not (as_root and os.geteuid() == 0):
            _check(path, status)
            if status.st_mode & _OTHERS:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_OTHERS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_private(path: Path, *, create: bool = False) -> None:
    """Close an existing file to others without opening it; on request, create an empty one where it is missing.

    For the files of a database: closing a descriptor would drop the locks of this process's connections. Raises
    FileUnsafe, or OSError.
    """
    if create:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    _check(path, status)
    if status.st_mode & _OTHERS:
        path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)


def _check(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _is_link(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileUnsafe(f"{path} is not a file.", hint="Name another path, or move away what is there.")
    if status.st_uid != os.geteuid():
        raise FileUnsafe(
            f"{path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}.",
            hint="Run as that user, give the file to this one (chown), or move it away.",
        )


def _is_link(path: Path) -> FileUnsafe:
    return FileUnsafe(f"{path} is a symbolic link.", hint="Name the file itself, or move the link away.")
