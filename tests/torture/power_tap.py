"""A tap on SQLite's own file layer: everything it asks of the disk is written down, in order, and then done.

`Tap()` bends the file layer (the VFS) of the SQLite that this process has loaded, from Python alone: no compiler, no
tracer, no other SQLite than the one people run, and not a line of the product changed. It is for a process of its own,
and stays for that process's life. `power_load` runs the store on it; `power_disk` reads the tape.
"""

from __future__ import annotations

import ctypes
import sqlite3
import threading
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p, cast
from pathlib import Path
from typing import Any, Final

from tests.torture.power_disk import Ack, Delete, Op, Sync, Truncate, Write

# Names are passed on as the pointers they are: SQLite keeps them.
_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
_Delete = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_Close = CFUNCTYPE(c_int, c_void_p)
_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)


class _Vfs(Structure):
    """`sqlite3_vfs`, as far as it is needed."""

    _fields_ = (
        ("version", c_int), ("file_size", c_int), ("longest_path", c_int), ("next", c_void_p), ("name", c_char_p),
        ("data", c_void_p), ("open", _Open), ("delete", _Delete),
    )  # fmt: skip


class _Methods(Structure):
    """`sqlite3_io_methods`: what can be done with an open file. Version 3 has these and no more."""

    _fields_ = (
        ("version", c_int), ("close", _Close), ("read", c_void_p), ("write", _Write), ("truncate", _Truncate),
        ("sync", _Sync), *((f"other{n}", c_void_p) for n in range(13)),
    )  # fmt: skip


_OK: Final = 0
_CREATE: Final = 0x4
_DATABASE: Final = 0x100
_JOURNALS: Final = 0x800 | 0x80000
"""The rollback journal and the log. Beside them and the database there is only what does not outlive a power cut."""


class Tap:
    """What this process's SQLite did to its files since the tap was made, and what was promised meanwhile."""

    def __init__(self) -> None:
        self.tape: list[Op] = []
        self._lock = threading.Lock()
        self._files: dict[int, tuple[str, _Methods]] = {}
        self._young: set[int] = set()
        """Logs and journals that were opened to be made: with their first sync SQLite syncs their folder too."""
        self._tables: dict[int, tuple[_Methods, _Methods]] = {}
        """Tables of methods by their address: as they were, and with ours in the place of those that write."""
        self._vfs = _found()
        # Kept as they were: the fields of the structure are about to be ours.
        self._true_open, self._true_delete = _copy(self._vfs.open, _Open), _copy(self._vfs.delete, _Delete)
        self._callbacks: list[Any] = [
            _Open(self._open), _Delete(self._delete), _Close(self._close), _Write(self._write),
            _Truncate(self._truncate), _Sync(self._sync),
        ]  # fmt: skip
        self._vfs.open, self._vfs.delete = self._callbacks[:2]

    def ack(self, events: list[bytes], done: list[bytes]) -> None:
        """Somebody was told that these events are kept, and that these deliveries are done."""
        self._note(Ack(events, done))

    def _note(self, op: Op) -> None:
        with self._lock:
            self.tape.append(op)

    # -- what SQLite calls ---------------------------------------------------------------------

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: Any) -> int:
        code: int = self._true_open(vfs, name, file, flags, out)
        if code == _OK and name is not None and flags & (_DATABASE | _JOURNALS):
            methods = cast(file, POINTER(c_void_p))
            straight, bent = self._table(methods[0])
            self._files[file] = _name(name), straight
            methods[0] = ctypes.addressof(bent)
            if flags & _CREATE and flags & _JOURNALS:
                self._young.add(file)
        return code

    def _table(self, address: int) -> tuple[_Methods, _Methods]:
        if address not in self._tables:
            straight, bent = _Methods(), _Methods()
            for copy in (straight, bent):
                ctypes.memmove(ctypes.addressof(copy), address, ctypes.sizeof(_Methods))
            bent.close, bent.write, bent.truncate, bent.sync = self._callbacks[2:]
            self._tables[address] = straight, bent
        return self._tables[address]

    def _close(self, file: int) -> int:
        _, straight = self._files.pop(file)
        self._young.discard(file)
        return int(straight.close(file))

    def _write(self, file: int, data: int, size: int, offset: int) -> int:
        name, straight = self._files[file]
        code = int(straight.write(file, data, size, offset))
        self._note(Write(name, offset, ctypes.string_at(data, size)))
        return code

    def _truncate(self, file: int, size: int) -> int:
        name, straight = self._files[file]
        code = int(straight.truncate(file, size))
        self._note(Truncate(name, size))
        return code

    def _sync(self, file: int, flags: int) -> int:
        name, straight = self._files[file]
        code = int(straight.sync(file, flags))
        if code == _OK:
            self._note(Sync(name, file in self._young))
            self._young.discard(file)
        return code

    def _delete(self, vfs: int, name: int, with_folder: int) -> int:
        code: int = self._true_delete(vfs, name, with_folder)
        if code == _OK:
            self._note(Delete(_name(name), bool(with_folder)))
        return code


def _name(pointer: int) -> str:
    return Path(ctypes.string_at(pointer).decode()).name


def _copy(pointer: Any, kind: Any) -> Any:
    """The same function, in a place of its own."""
    return kind(cast(pointer, c_void_p).value)


def _found() -> _Vfs:
    """The file layer of the SQLite that `sqlite3` uses, wherever that is linked in.

    A connection object begins with its `sqlite3 *`, and a `sqlite3` with its `sqlite3_vfs *`: so it has been in every
    CPython 3 and every SQLite since 3.5. That what is found there is named "unix" shows that it still is.
    """
    connection = sqlite3.connect(":memory:")
    handle = c_void_p.from_address(id(connection) + object.__basicsize__).value
    assert handle is not None
    address = c_void_p.from_address(handle).value
    assert address is not None
    vfs = _Vfs.from_address(address)
    assert (vfs.version, vfs.name) in ((2, b"unix"), (3, b"unix")), "this Python's sqlite3 is laid out otherwise"
    connection.close()
    return vfs
