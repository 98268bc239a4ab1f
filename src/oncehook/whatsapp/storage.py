"""S3-compatible storage (Cloudflare R2, MinIO, AWS) for files until WhatsApp fetches them.

`store` uploads a file and returns a `StoredFile`, whose key an outgoing message carries; each attempt to send asks
`link` for a fresh URL that expires. A file's key is the hash of its content, so the same file is uploaded once. Used by
the senders, through their protocol `Files`; needs the extra `oncehook[s3]`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, ParamSpec, Self, TypeVar
from urllib.parse import quote, urlsplit

from oncehook.categories import FailureRules
from oncehook.errors import ConfigError, ExtraMissing, OncehookError
from oncehook.human import seconds
from oncehook.model import Category
from oncehook.secret import Environment, Secret
from oncehook.whatsapp import files
from oncehook.whatsapp.files import StoredFile
from oncehook.whatsapp.messages import MediaKind

_LONGEST_LINK: Final = 7 * 86_400
"""Seconds that S3's signature allows."""
_AT_ONCE: Final = 8
_KEY: Final = re.compile(r"[0-9a-f]{64}(\.[a-z0-9]{1,5})?")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*")

_NOT_AGAIN: Final = {"NotImplemented", "ConditionalRequestConflict"}
"""Answers to a conditional upload after which it is tried without the condition."""
_WORDS: Final = {
    "NoSuchBucket": ("there is no such bucket", "Create the bucket, or correct its name."),
    "InvalidAccessKeyId": ("the access key is not known there", "Check the access key and the endpoint."),
    "SignatureDoesNotMatch": ("the secret key does not belong to the access key", "Check both keys."),
    "AccessDenied": ("these keys may not do that", "Allow them to read and write objects in this bucket."),
    "PermanentRedirect": ("the bucket is in another region", "Set the region that the bucket is in."),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "Set the region that the bucket is in."),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "Set the clock, best by NTP."),
}

_ALONE: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "ignore_configured_endpoint_urls": (None, None, True, None),
}
"""Ignore what this machine keeps for AWS's own tools (profiles, endpoints)."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StorageFailed(OncehookError):
    """The file storage did not do what was asked."""

    code = "storage_failed"

    def __init__(self, message: str, *, transient: bool, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.transient = transient
        """Whether a retry may succeed."""
        self.category = Category.transient if transient else Category.permanent


@dataclass(slots=True, frozen=True, repr=False)
class _Keys:
    """The credentials, without a repr."""

    access: str | Secret
    secret: str | Secret

    def reveal(self) -> dict[str, str]:
        names = {"aws_access_key_id": self.access, "aws_secret_access_key": self.secret}
        texts = {
            name: key if isinstance(key, str) else key.reveal().decode("ascii", "replace")
            for name, key in names.items()
        }
        return {name: text.strip() for name, text in texts.items()}


class S3Files:
    """A prefix in a bucket, for files to be sent."""

    def __init__(
        self,
        bucket: str,
        *,
        access_key: str | Secret,
        secret_key: str | Secret,
        endpoint: str | None = None,
        region: str = "auto",
        prefix: str = "oncehook/",
        expires: str | float = "24h",
        public_url: str | None = None,
        public_endpoint: str | None = None,
        limits: Mapping[files.SizeKind, int] | None = None,
    ) -> None:
        """Use `endpoint`, or AWS, which needs a `region`.

        `public_endpoint` is where WhatsApp reaches the storage, if that differs (MinIO in a compose file).
        `public_url` is the URL of a public bucket: links then begin with it, and never expire.
        """
        self._bucket = _matching(_BUCKET, bucket, "bucket")
        self._prefix = _matching(_PREFIX, prefix, 'prefix (it ends with "/")')
        self._endpoint = _address(endpoint, "endpoint")
        self._public_endpoint = _address(public_endpoint, "public_endpoint") or self._endpoint
        self._public_url = _address(public_url, "public_url")
        self._region = region
        self._expires = _expires(expires)
        self._limits = limits or {}
        self._keys = _Keys(access_key, secret_key)
        if not access_key or not secret_key:
            raise ConfigError("The file storage needs an access key and a secret key.")
        if self._endpoint is None and region == "auto":
            raise ConfigError('The file storage needs an endpoint, or a region of AWS such as "eu-west-1".')
        self._opening = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._client: Any = None
        self._signer: Any = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **options: Any) -> Self:
        """Read the settings above from variables: ONCEHOOK_S3_BUCKET and so on. Raises ConfigError.

        Missing ones are read from R2_* or AWS_* variables, whichever have the keys; BACKUP_S3_BUCKET comes last.
        """
        return cls(**{**_read_settings(Environment(environ)), **options})

    @staticmethod
    def named_in(environ: Mapping[str, str]) -> bool:
        """Return whether variables name a bucket for `from_env`."""
        return any(environ.get(name) for family in _FAMILIES for name in family["bucket"])

    def __repr__(self) -> str:
        return f"S3Files({self._bucket!r}, endpoint={self._endpoint!r}, prefix={self._prefix!r})"

    async def open(self) -> None:
        """Connect; the first use does so, too. Raises ConfigError."""
        if self._threads is None:
            await asyncio.to_thread(self._open)

    async def close(self) -> None:
        """Finish what is under way, and close all connections."""
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
            self._client.close()
            self._signer.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- storing -------------------------------------------------------------------------------

    async def prepare(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        *,
        filename: str | None = None,
        kind: MediaKind | None = None,
        types: files.FileTypes = files.META_TYPES,
    ) -> files.OutgoingFile:
        """Read a file and determine its type, among those an API takes (`types`). Raises FileRefused."""
        prepare = files.prepare
        return await self._run(prepare, path_or_bytes, filename=filename, kind=kind, types=types, limits=self._limits)

    async def store(
        self,
        content: str | os.PathLike[str] | bytes | files.OutgoingFile,
        *,
        filename: str | None = None,
        kind: MediaKind | None = None,
    ) -> StoredFile:
        """Upload a file, unless its content is there already. Raises FileRefused or StorageFailed.

        Anything but the result of `prepare` is prepared for Meta.
        """
        if not isinstance(content, files.OutgoingFile):
            content = await self.prepare(content, filename=filename, kind=kind)
        from oncehook.http_client import client  # loaded with the first upload only

        host = urlsplit(self._endpoint or "").hostname or "AWS"
        if client.gate is not None and (why := client.gate(host)) is not None:
            raise StorageFailed(f'bucket "{self._bucket}" at {host} is not called: {why}.', transient=False)
        return await self._run(self._store, content)

    def _store(self, file: files.OutgoingFile) -> StoredFile:
        key = f"{self._prefix}{hashlib.sha256(file.data).hexdigest()}{files.extension_of(file.mime)}"
        if not self._is_there(key, len(file.data)):
            self._upload(key, file)
        return StoredFile(key, file.kind, file.mime, file.filename, len(file.data))

    def _is_there(self, key: str, size: int) -> bool:
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=key)
        except _boto_errors() as error:
            # A HEAD answer has no body, and with keys that may not list, 403 also means a missing file: the upload will
            # fail with the real cause.
            failure = self._build_failure(error)
            if _status(error) and not failure.transient:
                return False
            raise failure from None
        return bool(found["ContentLength"] == size)

    def _upload(self, key: str, file: files.OutgoingFile) -> None:
        put = {
            "Bucket": self._bucket,
            "Key": key,
            "Body": file.data,
            "ContentType": file.mime,
            # the only checksum that all of these servers check
            "ContentMD5": base64.b64encode(hashlib.md5(file.data, usedforsecurity=False).digest()).decode(),
        }
        try:
            self._client.put_object(**put, IfNoneMatch="*")
        except _boto_errors() as error:
            exists = _code(error) == "PreconditionFailed" or _status(error) == 412
            if exists and self._is_there(key, len(file.data)):
                return  # another upload of the same content was faster
            if not (exists or _code(error) in _NOT_AGAIN or _status(error) in (409, 501)):
                raise self._build_failure(error) from None
            try:
                self._client.put_object(**put)
            except _boto_errors() as again:
                raise self._build_failure(again) from None

    # -- handing out ---------------------------------------------------------------------------

    async def link(self, key: str, *, filename: str | None = None) -> str:
        """Return a URL from which anybody can fetch a stored file for a while. Raises StorageFailed.

        Only keys made by `store` are accepted: an untrusted message must not open the rest of the bucket.
        """
        name = key.removeprefix(self._prefix)
        match = _KEY.fullmatch(name)
        if match is None or not key.startswith(self._prefix):
            raise StorageFailed("This key is not that of a file stored for sending.", transient=False)
        if self._public_url is not None:
            return f"{self._public_url}/{key}"
        return await self._run(self._sign, key, match[1], filename or name)

    def _sign(self, key: str, extension: str | None, filename: str) -> str:
        params = {"Bucket": self._bucket, "Key": key, "ResponseContentDisposition": _disposition(filename)}
        if extension:
            params["ResponseContentType"] = files.mime_of(extension)
        try:
            url = self._signer.generate_presigned_url("get_object", Params=params, ExpiresIn=self._expires)
        except _boto_errors() as error:
            raise self._build_failure(error) from None
        return str(url)

    # -- the client ----------------------------------------------------------------------------

    async def _run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        await self.open()
        assert self._threads is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def _open(self) -> None:
        with self._opening:
            if self._threads is None:
                self._client = self._connect(self._endpoint)
                same = self._public_endpoint == self._endpoint
                self._signer = self._client if same else self._connect(self._public_endpoint)
                self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="oncehook-s3")

    def _connect(self, endpoint: str | None) -> Any:
        try:
            library, config = import_module("botocore.session"), import_module("botocore.config")
        except ImportError:
            raise ExtraMissing("Storage for files", "s3") from None
        settings = config.Config(
            signature_version="s3v4",
            # explicit, because by default the library signs links for AWS's old address without region
            s3={"addressing_style": "path" if endpoint or "." in self._bucket else "virtual"},
            # R2, MinIO and others refuse or ignore the checksums that AWS's library adds by default
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=5,
            read_timeout=30,
            retries={"mode": "standard", "total_max_attempts": 3},
            max_pool_connections=_AT_ONCE,
        )
        wrong: tuple[type[Exception], ...] = (ValueError, *_boto_errors())
        try:
            return library.Session(_ALONE).create_client(
                "s3", endpoint_url=endpoint, region_name=self._region, config=settings, **self._keys.reveal()
            )
        except wrong as error:
            raise ConfigError(f"The file storage cannot be set up: {type(error).__name__}.") from None

    def _build_failure(self, error: Exception) -> StorageFailed:
        """Describe an error in our own words, because the library's may repeat what was sent."""
        place = f'bucket "{self._bucket}" at {urlsplit(self._endpoint or "").hostname or "AWS"}'
        code, status = _code(error), _status(error)
        transient = FailureRules().of_error(error).category is Category.transient
        if code is None:
            return StorageFailed(f"{place} cannot be reached: {type(error).__name__}.", transient=transient)
        reason, hint = _WORDS.get(code, (f"it answered {status} {code}", ""))
        return StorageFailed(f"{place}: {reason}.", transient=transient, hint=hint)


# -- errors of the library ---------------------------------------------------------------------


def _boto_errors() -> tuple[type[Exception], ...]:
    errors = import_module("botocore.exceptions")
    return (errors.BotoCoreError, errors.ClientError)


def _code(error: Exception) -> str | None:
    """Return the server's error code; None when there was no answer."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else None


def _status(error: Exception) -> int:
    answer = getattr(error, "response", None)
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(answer, dict) else 0


# -- settings ----------------------------------------------------------------------------------


def _matching(pattern: re.Pattern[str], text: str, setting: str) -> str:
    if not pattern.fullmatch(text):
        raise ConfigError(f"{text!r} cannot be the file storage's {setting}.")
    return text


def _address(url: str | None, setting: str) -> str | None:
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        # not repeated, because it may contain a password
        raise ConfigError(f"The file storage's {setting} must be an address such as https://files.example.com.")
    return url.rstrip("/")


def _expires(text: str | float) -> int:
    value = int(seconds(text))
    if not 1 <= value <= _LONGEST_LINK:
        raise ConfigError("The file storage's links can expire after 1 second to 7 days.")
    return value


def _disposition(filename: str) -> str:
    """Build a header that makes it a download, so that a stored file is never shown as a page of the storage's
    origin."""
    plain = re.sub(r'[^ -~]|["\\%]', "_", filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


_FAMILIES: Final[tuple[Mapping[str, tuple[str, ...]], ...]] = (
    {
        "bucket": ("ONCEHOOK_S3_BUCKET",),
        "endpoint": ("ONCEHOOK_S3_ENDPOINT",),
        "region": ("ONCEHOOK_S3_REGION",),
        "access_key": ("ONCEHOOK_S3_ACCESS_KEY",),
        "secret_key": ("ONCEHOOK_S3_SECRET_KEY",),
        "prefix": ("ONCEHOOK_S3_PREFIX",),
        "public_url": ("ONCEHOOK_S3_PUBLIC_URL",),
        "public_endpoint": ("ONCEHOOK_S3_PUBLIC_ENDPOINT",),
    },
    {
        "bucket": ("R2_BUCKET", "R2_BUCKET_NAME"),
        "endpoint": ("R2_ENDPOINT", "R2_ENDPOINT_URL"),
        "account": ("R2_ACCOUNT_ID",),
        "access_key": ("R2_ACCESS_KEY_ID",),
        "secret_key": ("R2_SECRET_ACCESS_KEY",),
        "public_url": ("R2_PUBLIC_URL",),
    },
    {
        "bucket": ("AWS_S3_BUCKET", "AWS_BUCKET"),
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
        "access_key": ("AWS_ACCESS_KEY_ID",),
        "secret_key": ("AWS_SECRET_ACCESS_KEY",),
    },
    {"bucket": ("BACKUP_S3_BUCKET",)},
)
_BESIDE_KEYS: Final = ("access_key", "secret_key", "endpoint", "account", "region")


def _read_settings(env: Environment) -> dict[str, Any]:
    """Read the settings of `S3Files`: the bucket from one family of variables, the keys from one."""
    families = [_variables(env, family) for family in _FAMILIES]
    named = next((family for family in families if "bucket" in family), None)
    if named is None:
        raise ConfigError("No bucket is named for files.", hint="Set ONCEHOOK_S3_BUCKET.")
    # keys come in pairs for one endpoint, so a half pair is never completed from another family
    keyed = next((family for family in (named, *families) if "access_key" in family and "secret_key" in family), None)
    if keyed is None:
        hint = "Set ONCEHOOK_S3_ACCESS_KEY and ONCEHOOK_S3_SECRET_KEY."
        raise ConfigError("No keys are set for the file storage.", hint=hint)
    chosen = named | {setting: keyed[setting] for setting in _BESIDE_KEYS if setting in keyed}
    chosen |= {setting: named[setting] for setting in ("endpoint", "region") if setting in named}
    secret = {setting: Secret.from_env(chosen.pop(setting), env=env) for setting in ("access_key", "secret_key")}
    settings = {setting: env[variable] for setting, variable in chosen.items()}
    if account := settings.pop("account", None):
        settings.setdefault("endpoint", f"https://{account}.r2.cloudflarestorage.com")
    return settings | secret


def _variables(env: Environment, family: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {
        setting: next(name for name in names if env.get(name))
        for setting, names in family.items()
        if any(env.get(name) for name in names)
    }
