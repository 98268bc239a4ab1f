"""The protocol between the owner of a SQLite file and its clients: a Unix socket, frames, and the verbs of the store.

A frame is four bytes of length and a msgpack value. A client sends calls, each a number, a verb and its arguments; the
owner answers with the number and a result or a failure, and sends wake-ups under the number 0, changed definitions
under -1. Types of arguments and
results are those of the verb's own annotations, so that there is no second list of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import socket
import struct
import typing
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, Protocol, TypeVar

import msgspec

from oncehook.errors import ConfigError, OncehookError, StoreError, StoreUnavailable
from oncehook.model import DefinitionChanges, EventId, Id, Intake, Verdict
from oncehook.store.cipher import Cipher

PROTOCOL: Final = 1
"""To be raised with every change of a verb or of a type that travels."""
MOST_BYTES: Final = 256 << 20
"""A longer frame is taken for nonsense."""
GREETING_BYTES: Final = 1 << 20
_LENGTH: Final = 4
_LONGEST_ADDRESS: Final = 100
"""Bytes that a socket's address may have: 107 on Linux, 103 on macOS."""

P = ParamSpec("P")
T = TypeVar("T")


# -- frames ------------------------------------------------------------------------------------


class Greeting(msgspec.Struct, array_like=True):
    """The first frame of a connection."""

    protocol: int
    schema: int
    version: str
    """Of oncehook, for people."""
    key: str
    """The id of the key that encrypts; empty: payloads are kept as they came."""
    pid: int
    role: Literal["client", "command", "heartbeat"]
    works: bool = False
    """True where it has a worker, to be woken."""
    worker: str | None = None
    held: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Fences that its worker holds, and for how many seconds yet."""


class Welcome(msgspec.Struct, array_like=True):
    pid: int
    started_at: int
    started_steady: float
    """The store's time, in microseconds, and the machine's steady clock, at one moment."""


class CallFailure(msgspec.Struct):
    """An error, on its way to whoever called."""

    kind: str
    message: str
    hint: str = ""
    retry_after: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> CallFailure:
        if not isinstance(error, OncehookError):
            return cls(StoreError.__name__, f"{type(error).__name__}: {error}")
        return cls(type(error).__name__, str(error), error.hint, getattr(error, "retry_after", None))

    def build(self) -> OncehookError:
        kind = _kinds(OncehookError).get(self.kind, StoreError)
        error = kind.__new__(kind)  # some are built of other things than a message
        OncehookError.__init__(error, self.message, hint=self.hint)
        if self.retry_after is not None:
            error.retry_after = self.retry_after  # type: ignore[attr-defined]
        return error


def _kinds(kind: type[OncehookError]) -> dict[str, type[OncehookError]]:
    found = {kind.__name__: kind}
    for one in kind.__subclasses__():
        found |= _kinds(one)
    return found


class CallFrame(msgspec.Struct, array_like=True):
    number: int
    verb: str
    arguments: msgspec.Raw


class AnswerFrame(msgspec.Struct, array_like=True):
    number: int
    result: msgspec.Raw
    failure: CallFailure | None = None


Decided = list[Verdict] | CallFailure
"""Outcome of one intake."""

GREETINGS: Final = msgspec.msgpack.Decoder(Greeting)
CALLS: Final = msgspec.msgpack.Decoder(CallFrame)
ANSWERS: Final = msgspec.msgpack.Decoder(AnswerFrame)


def _encode_other(value: Any) -> Any:
    if isinstance(value, bytes):
        return bytes(value)  # an id
    if callable(value):
        return None  # it is for the process that made it
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_other(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Id):
        if not isinstance(value, bytes) or len(value) != 16:
            raise ValueError("not an id")
        return kind(value)
    if kind is object:
        return value
    if value is None:
        return _ignore
    raise ValueError(f"{kind} does not travel")


def _ignore(*_: object) -> None:
    """Stand for a function that stayed where it was made."""


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_other)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other)


RECORDS: Final = decoder(tuple[bool, list[Intake]])
"""The arguments of `record`: whether they were sent before, without an answer, and the intakes."""
DECIDED: Final = decoder(tuple[list[Decided], list[tuple[int, int, EventId]]])
"""The answer: what became of each intake, and which items (of which intake) came before under another key."""
WOKEN: Final = decoder(list[int] | None)
CHANGED: Final = decoder(DefinitionChanges)
DEFINITIONS: Final = -1
"""Number of a frame that tells of changed definitions; 0 is that of a wake-up."""


def encode(value: object) -> bytearray:
    """Encode a frame, its length included. Raises UnicodeEncodeError for text that is none."""
    buffer = bytearray(_LENGTH)
    _ENCODER.encode_into(value, buffer, _LENGTH)
    buffer[:_LENGTH] = (len(buffer) - _LENGTH).to_bytes(_LENGTH)
    return buffer


def encode_cleaned(value: object) -> bytearray:
    """Encode a frame whose text may hold half a surrogate, which the store would not keep as it is either."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_clean(msgspec.to_builtins(value, enc_hook=_encode_other, builtin_types=(bytes, datetime))))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(one) for name, one in value.items()}
    return value


class FrameReader:
    """Frames out of the bytes of a stream."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete now. Raises ValueError for one that is too long."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH:
            length = int.from_bytes(buffer[start : start + _LENGTH])
            if length > self._most:
                raise ValueError(f"a frame of {length} bytes")
            end = start + _LENGTH + length
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + _LENGTH : end]))
            start = end
        if start:
            del buffer[:start]
        return frames


# -- verbs -------------------------------------------------------------------------------------


class Moved(Exception):
    """The owner has gone, and nothing of this call is written, or it may be repeated: ask whoever owns the file now."""


class Asking(Protocol):
    """A client's connection, as verbs use it."""

    async def request(self, verb: Verb[Any], arguments: Sequence[Any]) -> Any:
        """Have the owner run a verb. Raises Moved, or what the verb raises there."""


class VerbHost(Protocol):
    """A store of which this process may or may not be the owner."""

    @property
    def owns(self) -> bool: ...

    @property
    def client(self) -> Asking: ...


S = TypeVar("S", bound=VerbHost)


class Verb(Generic[T]):
    """A method that writes, and so is run by the owner of the file, wherever it is called."""

    def __init__(self, method: Callable[..., Awaitable[T]], *, repeats: bool) -> None:
        self.name = method.__name__
        self.run = method
        self.repeats = repeats
        """Running it twice does no harm: it is sent again when the owner dies before its answer."""
        self.signature = inspect.signature(method)
        self.tells_again = "again" in self.signature.parameters
        """True where its last parameter `again` says that it may have been run before."""

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        return typing.get_type_hints(self.run)

    @functools.cached_property
    def arguments(self) -> msgspec.msgpack.Decoder[Any]:
        kinds = [kind for name, kind in self._hints.items() if name != "return"]
        return decoder(tuple[tuple(kinds)] if kinds else tuple[()])  # type: ignore[misc]

    @functools.cached_property
    def result(self) -> msgspec.msgpack.Decoder[Any]:
        return decoder(self._hints["return"])

    def bind(self, store: object, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return all arguments in their order, defaults included."""
        bound = self.signature.bind(store, *arguments, **named)
        bound.apply_defaults()
        return list(bound.args[1:])


VERBS: Final[dict[str, Verb[Any]]] = {}
"""Everything that a client may ask for, by name."""


def verb(
    *, repeats: bool = False
) -> Callable[[Callable[Concatenate[S, P], Awaitable[T]]], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]:
    """Have a method run in the process that owns the file."""

    def register(
        method: Callable[Concatenate[S, P], Awaitable[T]],
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
        made: Verb[T] = Verb(method, repeats=repeats)
        VERBS[made.name] = made

        @functools.wraps(method)
        async def call(store: S, /, *arguments: P.args, **named: P.kwargs) -> T:
            values: list[Any] | None = None
            while not store.owns:
                values = values or made.bind(store, arguments, named)
                try:
                    result: T = await store.client.request(made, values)
                except Moved:
                    if made.tells_again:
                        values[-1] = True
                else:
                    return result
            return await (method(store, *arguments, **named) if values is None else made.run(store, *values))

        return call

    return register


# -- the socket --------------------------------------------------------------------------------


def socket_path(database: Path) -> Path:
    return database.with_name(database.name + ".sock")


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield an address for a socket at this path, however long that is. Raises ConfigError where there is none."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        address = f"/proc/self/fd/{folder}/{path.name}"
        if not Path(f"/proc/self/fd/{folder}").exists() or len(os.fsencode(address)) > _LONGEST_ADDRESS:
            raise ConfigError(
                f"{path} is too long for the address of a socket.", hint="Give the store a shorter path, or name."
            )
        yield address
    finally:
        os.close(folder)


def listen(database: Path) -> socket.socket:
    """Listen for clients; only for who holds the file, because it removes the socket of a holder that died."""
    path = socket_path(database)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        with _address(path) as address:
            made.bind(address)
        path.chmod(0o600)  # nobody can connect before `listen`
        made.listen(128)
    except BaseException:
        made.close()
        raise
    made.setblocking(False)
    return made


def connect(database: Path, timeout: float) -> socket.socket:
    """Connect to the owner. Raises OSError where there is none, or where it is somebody else's process."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout)
        with _address(socket_path(database)) as address:
            made.connect(address)
        check_peer(made)
    except BaseException:
        made.close()
        raise
    return made


def check_peer(connected: socket.socket) -> None:
    """Raise PermissionError unless the other end is a process of the same user, or of root."""
    uid = _peer_user(connected)
    if uid is not None and uid not in (os.geteuid(), 0):
        raise PermissionError(f"the process at the other end belongs to user {uid}")


def _peer_user(connected: socket.socket) -> int | None:
    """Return the user at the other end; None where the system does not tell, and the socket's mode must do."""
    option = vars(socket).get("SO_PEERCRED")
    if option is None:
        return None
    return int(struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))[1])


def greet(connected: socket.socket, greeting: Greeting) -> Welcome:
    """Send the first frame and wait for its answer. Raises OSError, or what the owner has against this client."""
    connected.sendall(encode(greeting))
    answer = ANSWERS.decode(read_frame(connected))
    if answer.failure is not None:
        raise answer.failure.build()
    return msgspec.msgpack.decode(answer.result, type=Welcome)


def read_frame(connected: socket.socket, most: int = MOST_BYTES) -> bytes:
    """Read one frame from a blocking socket. Raises OSError when it ends before that."""
    length = int.from_bytes(_read(connected, _LENGTH))
    if length > most:
        raise OSError(f"a frame of {length} bytes")
    return _read(connected, length)


def _read(connected: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connected.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return bytes(data)


def key_of(cipher: Cipher) -> str:
    """Return the id of the key that encrypts what is kept; empty where nothing is encrypted."""
    return cipher.key_ids[0] if cipher.encrypts else ""


def outcome_unknown() -> StoreUnavailable:
    return StoreUnavailable("The process that owns the file ended before it answered; this may have been done or not.")
