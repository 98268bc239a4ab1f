"""`@once`: run a function once for each key; later calls return the first call's result.

The result is stored as JSON, and every call, the first included, returns what is stored: so a type that JSON cannot
hold shows at the first call, not at the first duplicate. Exported as `oncehook.once`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, cast, get_type_hints
from uuid import UUID

import msgspec

from oncehook import clock
from oncehook.claims.client import KEEP, MAX_RESULT, NAMESPACE, TTL, Claim, Held, get_shared, get_shared_async, span
from oncehook.errors import ConfigError, InProgress, KeyMissing, ResultInvalid

P = ParamSpec("P")
R = TypeVar("R")

Rule: TypeAlias = str | Callable[..., Any]
"""A parameter's name, a dotted path that begins with one, or a function of the call's arguments."""

_encode: Final = msgspec.json.Encoder(order="deterministic").encode
_UNKEPT: Final = "This call was done before, but its result was not kept."


def once(
    *,
    key: Rule,
    store: str | None = None,
    keep: str | float = KEEP,
    ttl: str | float = TTL,
    payload: Rule | None = None,
    fail_open: bool = False,
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function once for each key, `def` or `async def`, in any number of threads, processes and machines.

    A second call returns the first one's result for `keep`; while the first still runs, InProgress is raised. When the
    function raises, the claim is given back and the next call runs it again; when its process dies, after `ttl` at
    most. `key` names a parameter ("order_id", "order.id") or is a function of the arguments; None or nothing there is
    KeyMissing. With `payload`, another payload under the same key is PayloadMismatch. Without `store`, it is what
    ONCEHOOK_CLAIMS names, or else where the settings keep the inbox: the same PostgreSQL database, or a SQLite file
    beside its own (`./oncehook-claims.db`). Keys belong to the function, by `name` (by default its module and name).

    >>> @once(key="order.id", store="redis://localhost/0")
    ... def charge(order): ...
    """
    settings = {"keep": keep, "ttl": ttl, "fail_open": fail_open}
    span(ttl, "ttl"), span(keep, "keep")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plan = _Plan(function, key, payload, name)
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, R]", _wrap_async(plan, function, store, settings))
        return _wrap(plan, function, store, settings)

    return decorate


def _wrap(plan: _Plan, function: Callable[P, R], store: str | None, settings: dict[str, Any]) -> Callable[P, R]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        key, payload = plan.read(args, kwargs)
        claims = get_shared(store, namespace=NAMESPACE, **settings)
        asked_at = clock.steady()
        claim = claims.claim(key, payload=payload)
        if claim.status != "new":
            return cast("R", plan.replay(claim))
        held = Held(key, claim, span(settings["ttl"], "ttl"), asked_at)
        with claims.work(held):
            outcome = plan.keep(held, _refuse_coroutine(function(*args, **kwargs)))
        return cast("R", outcome())

    return run


def _wrap_async(
    plan: _Plan, function: Callable[P, Awaitable[R]], store: str | None, settings: dict[str, Any]
) -> Callable[P, Awaitable[R]]:
    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        key, payload = plan.read(args, kwargs)
        claims = get_shared_async(store, namespace=NAMESPACE, **settings)
        asked_at = clock.steady()
        claim = await claims.claim(key, payload=payload)
        if claim.status != "new":
            return cast("R", plan.replay(claim))
        held = Held(key, claim, span(settings["ttl"], "ttl"), asked_at)
        async with claims.work(held):
            outcome = plan.keep(held, await function(*args, **kwargs))
        return cast("R", outcome())

    return run


def _refuse_coroutine(value: R) -> R:
    if inspect.iscoroutine(value):
        value.close()
        raise ConfigError("This function returned a coroutine that nobody has run.", hint="Declare it `async def`.")
    return value


class _Plan:
    """The rules of a decorated function, read before it is called."""

    def __init__(self, function: Callable[..., Any], key: Rule, payload: Rule | None, name: str | None) -> None:
        _check_function(function)
        self._function = function
        self._name = name or _name_of(function)
        self._signature = inspect.signature(function)
        self._key = _reader(key, self._signature)
        self._payload = None if payload is None else _reader(payload, self._signature)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, bytes | None]:
        """Read key and payload of a call. Raises TypeError as the function would, and KeyMissing."""
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        try:
            found = self._key(call)
        except (LookupError, AttributeError) as error:
            raise KeyMissing(f"No key was found for {self._name}: {error!r}") from error
        key = f"{self._name}:{_key_text(found)}"
        return key, None if self._payload is None else _payload_bytes(self._payload(call))

    def replay(self, claim: Claim) -> Any:
        """Return the first call's result to a later one. Raises InProgress while there is none."""
        if claim.status == "in_progress":
            raise InProgress(f"{self._name} is running for this key.", retry_after=claim.retry_after)
        if claim.result is None:
            raise ResultInvalid(_UNKEPT)
        return self._decode(claim.result)

    def keep(self, held: Held, value: Any) -> Callable[[], Any]:
        """Set the result to be committed; return the function that then returns it, or raises.

        The function has had its effect, so the commit comes first, even if its result cannot be stored.
        """
        try:
            kept = _encode(value)
            if len(kept) > MAX_RESULT:
                raise ValueError(f"{len(kept):,} bytes; {MAX_RESULT:,} can be kept")
            result = self._decode(kept)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            return functools.partial(_fail, self._name, error)
        held.result = kept
        return lambda: result

    def _decode(self, kept: bytes) -> Any:
        if self._decoder is not None:
            try:
                return self._decoder.decode(kept)
            except (msgspec.ValidationError, TypeError, NotImplementedError):
                pass  # does not fit the annotation: decode without it; the same bytes take this path each time
        return msgspec.json.decode(kept)

    @functools.cached_property
    def _decoder(self) -> msgspec.json.Decoder[Any] | None:
        """Build a decoder for the annotated return type; None without one, or for a type that JSON has not."""
        try:
            hints = get_type_hints(self._function)
            return msgspec.json.Decoder(hints["return"]) if "return" in hints else None
        except (NameError, AttributeError, TypeError):
            return None


def _fail(name: str, error: Exception) -> Any:
    raise ResultInvalid(
        f"{name} was done, but its result cannot be kept as JSON: {error}",
        hint="Return what JSON holds, or nothing. The call counts as done and is not repeated.",
    ) from error


# -- functions ---------------------------------------------------------------------------------


def _check_function(function: Any) -> None:
    if isinstance(function, classmethod | staticmethod | type) or not callable(function):
        raise ConfigError("@once is for functions and methods.", hint="Put it below @classmethod or @staticmethod.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{function.__qualname__} is a generator: it has no one result that could be kept.")


def _name_of(function: Callable[..., Any]) -> str:
    qualname = getattr(function, "__qualname__", "<lambda>")
    if qualname.endswith("<lambda>"):
        raise ConfigError("A function without a name needs one for its keys.", hint="Give once(…, name=…).")
    return f"{_module_of(function)}.{qualname}"


def _module_of(function: Callable[..., Any]) -> str:
    """Return the defining module's name, the same whether its file was run or imported."""
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec else Path(file).stem if file else "__main__"


# -- keys and payloads -------------------------------------------------------------------------


def _reader(rule: Rule, signature: inspect.Signature) -> Callable[[inspect.BoundArguments], Any]:
    if not isinstance(rule, str):
        return lambda call: rule(*call.args, **call.kwargs)
    first, *path = rule.split(".")
    if first not in signature.parameters:
        raise ConfigError(f"There is no parameter {first!r} for {rule!r}: {', '.join(signature.parameters) or 'none'}.")
    return lambda call: functools.reduce(_step, path, call.arguments[first])


def _step(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value[name]
    if isinstance(value, Sequence) and name.isdecimal():
        return value[int(name)]
    return getattr(value, name)


def _key_text(found: object) -> str:
    if isinstance(found, tuple | list) and found:
        # As JSON, so that ("a", "bc") and ("ab", "c") differ.
        return _encode([_key_text(part) for part in found]).decode()
    if isinstance(found, bool) or not isinstance(found, str | int | UUID) or found == "":
        raise KeyMissing(f"A key is text, a whole number, a UUID or a tuple of such, not {found!r}.")
    return str(found)


def _payload_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _encode(value)
