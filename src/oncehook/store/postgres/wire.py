"""How values travel between Python and PostgreSQL.

Ids and hashes are `bytes` here and `uuid` there, and whole columns travel as binary arrays that are packed in one
go, so that a group commit makes no object per value on its way. The engine's other modules use this one;
nobody else does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar, TypeAlias

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types.string import ByteaBinaryLoader

from oncehook.model import Id

Connection: TypeAlias = psycopg.AsyncConnection[tuple[object, ...]]
BlockingConnection: TypeAlias = psycopg.Connection[tuple[object, ...]]

_NULL = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("!i")
_SIXTEEN = _LENGTH.pack(16)
_ARRAY_HEAD = struct.Struct("!iiIii")
_SMALL = struct.Struct("!ih")
_INTEGER = struct.Struct("!ii")
_BIG = struct.Struct("!iq")
_FLOAT = struct.Struct("!id")
_TRUE, _FALSE = _LENGTH.pack(1) + b"\x01", _LENGTH.pack(1) + b"\x00"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Column:
    """An array, ready to be sent. One made of nothing but None is sent as NULL: `unnest` fills it up with NULLs."""

    __slots__ = ("packed",)
    oid: ClassVar[int]
    array_oid: ClassVar[int]

    def __init__(self, parts: Sequence[bytes] | None, count: int) -> None:
        self.packed = None if parts is None else b"".join((_ARRAY_HEAD.pack(1, 0, self.oid, count, 1), *parts))


class Ids(Column):
    """A column of ids or hashes."""

    __slots__ = ()
    oid, array_oid = 2950, 2951

    def __init__(self, values: Sequence[bytes | None]) -> None:
        if not any(values):
            super().__init__(None, 0)
            return
        # one of another length would shift the rest: the server then finds the array malformed
        super().__init__([_NULL if value is None else _SIXTEEN + value for value in values], len(values))


class Texts(Column):
    """A column of text."""

    __slots__ = ()
    oid, array_oid = 25, 1009

    def __init__(self, values: Sequence[str | None]) -> None:
        parts = [_NULL if value is None else _with_length(value.encode()) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Blobs(Column):
    """A column of bytes."""

    __slots__ = ()
    oid, array_oid = 17, 1001

    def __init__(self, values: Sequence[bytes | None]) -> None:
        parts: list[bytes] = []
        for value in values:
            if value is None:
                parts.append(_NULL)
            else:
                parts += (_LENGTH.pack(len(value)), value)
        super().__init__(parts, len(values))


class Smalls(Column):
    """A column of `smallint`."""

    __slots__ = ()
    oid, array_oid = 21, 1005

    def __init__(self, values: Sequence[int | None]) -> None:
        parts = [_NULL if value is None else _SMALL.pack(2, value) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Bools(Column):
    """A column of `boolean`."""

    __slots__ = ()
    oid, array_oid = 16, 1000

    def __init__(self, values: Sequence[bool]) -> None:
        super().__init__([_TRUE if value else _FALSE for value in values], len(values))


class Integers(Column):
    """A column of `integer`."""

    __slots__ = ()
    oid, array_oid = 23, 1007

    def __init__(self, values: Sequence[int | None]) -> None:
        parts = [_NULL if value is None else _INTEGER.pack(4, value) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Bigs(Column):
    """A column of `bigint`."""

    __slots__ = ()
    oid, array_oid = 20, 1016

    def __init__(self, values: Sequence[int]) -> None:
        super().__init__([_BIG.pack(8, value) for value in values], len(values))


class Floats(Column):
    """A column of `float8`."""

    __slots__ = ()
    oid, array_oid = 701, 1022

    def __init__(self, values: Sequence[float | None]) -> None:
        parts = [_NULL if value is None else _FLOAT.pack(8, value) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


class Times(Column):
    """A column of `timestamptz`."""

    __slots__ = ()
    oid, array_oid = 1184, 1185

    def __init__(self, values: Sequence[datetime | None]) -> None:
        parts = [_NULL if value is None else _BIG.pack(8, (value - _EPOCH) // _MICROSECOND) for value in values]
        super().__init__(None if all(value is None for value in values) else parts, len(values))


def _with_length(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


class _IdDumper(Dumper):
    format = Format.BINARY
    oid = Ids.oid

    def dump(self, obj: Id) -> bytes:
        return obj


class _ColumnDumper(Dumper):
    format = Format.BINARY

    def __init__(self, cls: type[Column], context: AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        # Always the same type, whatever is in it: else the driver would prepare one statement per mixture.
        self.oid = cls.array_oid

    def dump(self, obj: Column) -> bytes | None:
        return obj.packed


def adapt(context: AdaptContext) -> None:
    """Teach a connection, or one cursor of it, the types of this module."""
    adapters = context.adapters
    adapters.register_loader("uuid", ByteaBinaryLoader)
    adapters.register_dumper(Id, _IdDumper)
    for column in (Ids, Texts, Blobs, Smalls, Bools, Integers, Bigs, Floats, Times):
        adapters.register_dumper(column, _ColumnDumper)


def storable(text: str) -> str:
    """PostgreSQL takes neither NUL nor half a character, and one stranger's must not cost the others' rows."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
