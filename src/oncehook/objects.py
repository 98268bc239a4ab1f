"""Places for what is too large for the store: a folder, or a bucket (S3, Google Cloud Storage, Azure).

`bodies`, `media` and `archive` keep objects here. A folder needs nothing else; a bucket needs the extra
`oncehook[objects]`, whose library has connections of its own: it does not go through the guarded client (S21), so the
addresses of its endpoint are checked here, before it is opened.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar
from urllib.parse import urlsplit

from oncehook import clock
from oncehook.errors import ConfigError, ObjectsUnavailable
from oncehook.http_client.addresses import Guard, Network
from oncehook.secret import Secret

SCHEMES: Final = ("s3", "gs", "az", "file")
_AT_ONCE: Final = 8
_NAME: Final = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*")
_UNFINISHED: Final = ".part-"
"""What the name of a file that is being written begins with."""
_SECONDS: Final = 30
"""Seconds that one request to a bucket may take; the library repeats it within three times that."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ListedObject(NamedTuple):
    """An object in a list."""

    name: str
    size: int
    modified: datetime


class Objects(Protocol):
    """A place for objects: each is written whole, under a name of its own, and is never changed."""

    address: str
    """Where it is, without credentials."""

    async def open(self) -> None:
        """Prepare for use, which otherwise the first use does. Raises ConfigError or ObjectsUnavailable."""

    async def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Keep an object durably; with `new`, return False where one of this name exists, which stays.

        Raises ObjectsUnavailable.
        """

    async def get(self, name: str) -> bytes | None:
        """Return an object; None where there is none. Raises ObjectsUnavailable."""

    async def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already do not matter. Raises ObjectsUnavailable."""

    def list(self, prefix: str) -> AsyncIterator[Sequence[ListedObject]]:
        """Yield what is below a prefix that ends with a slash, page by page. Raises ObjectsUnavailable."""

    async def close(self) -> None: ...


def check_name(name: str) -> str:
    """Return the name of an object. Raises ValueError for one that could lead elsewhere."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} cannot name an object")
    return name


class FolderObjects:
    """Objects as files in a folder, which is made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.address = str(self._folder)
        self._threads: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """Do nothing: a folder is made when something is written."""

    async def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        return await self._run(self._put, check_name(name), data, new)

    def _put(self, name: str, data: bytes, new: bool) -> bool:
        path = self._folder / name
        self._make_folder(path.parent)
        part = path.with_name(f"{_UNFINISHED}{clock.random_bytes(8).hex()}")
        try:
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not new:
                part.replace(path)
            else:
                try:
                    path.hardlink_to(part)  # atomic, and refused where the name is taken
                except FileExistsError:
                    return False
        finally:
            part.unlink(missing_ok=True)
        _sync(path.parent)
        return True

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and those above it, each durably: a file is lost with the entry of its folder."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)

    async def get(self, name: str) -> bytes | None:
        return await self._run(self._get, check_name(name))

    def _get(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    async def delete(self, names: Iterable[str]) -> None:
        await self._run(self._delete, list(map(check_name, names)))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    async def list(self, prefix: str) -> AsyncIterator[Sequence[ListedObject]]:
        root = self._folder / prefix.rstrip("/")
        for folder in await self._run(lambda: [Path(found) for found, _, _ in os.walk(root)]):
            yield await self._run(self._list, folder)

    def _list(self, folder: Path) -> Sequence[ListedObject]:
        """List the files of one folder. A file that a process left unfinished an hour ago is removed."""
        found: list[ListedObject] = []
        if not folder.is_dir():
            return found
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                modified = datetime.fromtimestamp(about.st_mtime, UTC)
                if entry.name.startswith(_UNFINISHED):
                    if (clock.now_utc() - modified).total_seconds() > 3600:
                        Path(entry.path).unlink(missing_ok=True)
                elif entry.is_file(follow_symlinks=False):
                    name = Path(entry.path).relative_to(self._folder).as_posix()
                    found.append(ListedObject(name, about.st_size, modified))
        return found

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def _run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="oncehook-objects")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        except OSError as error:
            raise ObjectsUnavailable(f"The folder {self.address} cannot be used: {error.strerror or error}.") from error


def copy_folder(folder: Path, target: Path) -> None:
    """Copy the objects that are missing in another folder, for a backup. Raises OSError."""
    for found, _, files in os.walk(folder):
        for name in files:
            path = Path(found) / name
            copied = target / path.relative_to(folder)
            if name.startswith(_UNFINISHED) or copied.exists():
                continue
            copied.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = copied.with_name(f"{_UNFINISHED}{name}")
            try:
                shutil.copyfile(path, part)
            except FileNotFoundError:  # its event was pruned meanwhile
                part.unlink(missing_ok=True)
                continue
            part.chmod(0o600)
            part.replace(copied)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class BucketObjects:
    """Objects in a bucket, below a prefix. The library's own threads do the work; the event loop only waits."""

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        access_key: Secret | None = None,
        secret_key: Secret | None = None,
        allow_private: bool | Sequence[Network] = False,
    ) -> None:
        """Without keys, those of the environment count, as for the provider's own tools (AWS_ACCESS_KEY_ID …)."""
        self.address = url.rstrip("/")
        self._options = {"endpoint": endpoint, "region": region}
        self._keys = (access_key, secret_key)
        self._guard = Guard(allow_private)
        self._opening = asyncio.Lock()
        self._library: Any = None
        self._store: Any = None

    async def open(self) -> None:
        await self._open()

    async def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        library, store = await self._open()
        mode = {"mode": "create"} if new else {}
        try:
            # In one request, which either is done or is not: several parts would leave some behind when one fails.
            await self._wait(library.put_async(store, check_name(name), data, use_multipart=False, **mode))
        except library.exceptions.AlreadyExistsError:
            return False
        except library.exceptions.BaseError as error:
            raise self._build_failure(error) from None
        return True

    async def get(self, name: str) -> bytes | None:
        library, store = await self._open()
        try:
            found = await self._wait(library.get_async(store, check_name(name)))
            return bytes(await self._wait(found.bytes_async()))
        except (FileNotFoundError, library.exceptions.NotFoundError):
            return None
        except library.exceptions.BaseError as error:
            raise self._build_failure(error) from None

    async def delete(self, names: Iterable[str]) -> None:
        library, store = await self._open()
        for name in map(check_name, names):
            try:
                await self._wait(library.delete_async(store, name))
            except (FileNotFoundError, library.exceptions.NotFoundError):
                continue
            except library.exceptions.BaseError as error:
                raise self._build_failure(error) from None

    async def list(self, prefix: str) -> AsyncIterator[Sequence[ListedObject]]:
        library, store = await self._open()
        try:
            async for page in library.list(store, prefix.rstrip("/"), chunk_size=1000):
                yield [ListedObject(one["path"], one["size"], one["last_modified"]) for one in page]
        except library.exceptions.BaseError as error:
            raise self._build_failure(error) from None

    async def close(self) -> None:
        self._store = None

    async def _wait(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(3 * _SECONDS):
                return await call
        except TimeoutError:
            raise ObjectsUnavailable(f"{self.address} did not answer in time.") from None

    async def _open(self) -> tuple[Any, Any]:
        if self._store is None:
            async with self._opening:
                if self._store is None:
                    self._library = _import_library()[0]
                    self._store = await asyncio.to_thread(self._build)
        return self._library, self._store

    def _build(self) -> Any:
        stores = _import_library()[1]
        config = {name: value for name, value in self._options.items() if value is not None}
        for name, key in zip(("access_key_id", "secret_access_key"), self._keys, strict=True):
            if key is not None:
                config[name] = key.reveal().decode("ascii", "replace").strip()
        client = {"timeout": f"{_SECONDS}s", "connect_timeout": "5s"}
        endpoint = self._endpoint()
        if endpoint is not None:
            self._check_endpoint(endpoint)
            if endpoint.startswith("http://"):
                client["allow_http"] = True  # type: ignore[assignment]
        try:
            return stores.from_url(self.address, config=config or None, client_options=client)
        except Exception as error:
            # Not repeated: the library's words may contain what it was given.
            raise ConfigError(f"{self.address} cannot be used: {type(error).__name__}.") from None

    def _endpoint(self, env: Mapping[str, str] = os.environ) -> str | None:
        """Return the endpoint that is not the provider's own, as set here or for its tools."""
        names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_ENDPOINT",)}
        named = names.get(self.address.partition(":")[0], ())
        return self._options["endpoint"] or next((env[name] for name in named if env.get(name)), None)

    def _check_endpoint(self, endpoint: str) -> None:
        """Refuse an endpoint at an address that is not public, unless it is allowed (S21)."""
        host = urlsplit(endpoint).hostname or ""
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            raise ObjectsUnavailable(f"The name {host} of the endpoint of {self.address} leads nowhere.") from None
        for address in {str(info[4][0]) for info in found}:
            if (what := self._guard.refuses(address)) is not None:
                raise ConfigError(
                    f"The endpoint of {self.address} is at {address}, which is not a public address ({what}).",
                    hint="Where that is meant, set allow_private beside its url.",
                )

    def _build_failure(self, error: Exception) -> ObjectsUnavailable:
        """Name an error of the library by its kind, because its text may contain what was sent."""
        return ObjectsUnavailable(f"{self.address} cannot be used now: {type(error).__name__}.")


def _import_library() -> tuple[Any, Any]:
    try:
        return importlib.import_module("obstore"), importlib.import_module("obstore.store")
    except ImportError:
        raise ConfigError(
            "Objects in a bucket need a library that is not installed.", hint="Run: pip install 'oncehook[objects]'"
        ) from None


def open_objects(url: str, **options: Any) -> Objects:
    """Build the place that a setting names: a bucket's address, or a folder. Nothing is opened yet."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "file":
        return BucketObjects(url, **options)
    return FolderObjects(Path(rest if separator else url))
