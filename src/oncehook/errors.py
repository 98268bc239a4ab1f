"""Every error oncehook raises, grouped by who can act on it.

    OncehookError
    ├── Rejected            the sender: its arrival is not taken; answered 4xx
    │   ├── SignatureInvalid        401, also: stale, missing, unknown source
    │   ├── TooLarge                413
    │   ├── Encoded                 415
    │   ├── KeyRequired             422
    │   ├── KeyConflict             422
    │   ├── Malformed               400
    │   └── TooManyHops             400, an event that goes round in a circle
    ├── Refused             a question or an act of people that cannot be answered now: 4xx
    │   ├── Unauthorized            401, no or a wrong credential
    │   │   └── TokenExpired        401, the token was right until some moment
    │   ├── Forbidden               403, the role does not suffice
    │   │   └── PayloadsHidden      403, bodies and header values are not for this viewer
    │   ├── BadRequest              400
    │   │   ├── QueryInvalid        a query that cannot be read
    │   │   └── QueryTooWide        it asks for what too many encrypted bodies say
    │   ├── NotFound                404
    │   ├── InvalidSettings         422, one error per setting
    │   ├── SecretKeyMissing        422, secrets are not kept in clear
    │   ├── DefinedElsewhere        409, a file or a program defines it
    │   ├── Exists                  409, the name or the address is taken
    │   ├── InUse                   409, deliveries wait for it
    │   ├── DefinitionChanged       409, somebody changed it at the same moment
    │   ├── NotReplayable           409, pending, leased, or done without `force`
    │   │   └── Erased              409, there is nothing left to deliver
    │   ├── NotWaiting              409, nothing to retry or discard
    │   ├── PlanChanged             409, the plan no longer says what would happen
    │   ├── Undecryptable           409, its key is not given, or it was changed
    │   ├── BodyMissing             409, a large body is not where it was kept
    │   ├── ReplayTooSoon           429, replayed a moment ago
    │   └── TestedTooSoon           429, tested a moment ago
    ├── Steering            a handler: how its attempt is to be taken
    │   ├── RetryLater              try again, after a while
    │   └── GiveUp                  a dead letter at once
    ├── LeaseLost           a worker: what it worked on is no longer its own
    ├── ClaimError          the caller of the small primitive: `claims`, `once`
    │   ├── InProgress              somebody else is at it; try again later
    │   ├── AlreadyDone             it was done before; carries the result
    │   ├── ClaimLost               the claim is no longer the caller's; nothing was changed
    │   ├── KeyMissing              there is nothing to tell two calls apart by
    │   ├── PayloadMismatch         the key was used before for something else
    │   └── ResultInvalid           a result that cannot be kept, or was not
    ├── ConfigError         the operator: a setting is wrong
    │   └── ExtraMissing            a package that an extra of oncehook installs
    ├── ArchiveInvalid      the operator: a file is no archive, or a day has none
    ├── FileUnsafe          the operator: a file is a link, or somebody else's
    └── StoreError          the operator: the store cannot do what was asked
        ├── StoreUnavailable        answered 503; the sender's retry repairs it
        │   ├── NotStarted          nobody has started the inbox
        │   ├── Overloaded          more waits than can be written in time
        │   └── ObjectsUnavailable  the place of large bodies, media or archives does not answer
        ├── StoreHeld               the owner of this SQLite file takes no such client
        ├── MigrationNeeded         the schema is older than this program
        └── SchemaTooNew            the schema is newer than this program

Each carries a stable `code` (a word for programs) and a `hint` (what to do next); API, command line and dashboard print
both. The hint is a note of the exception, too, so that tracebacks show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence


class OncehookError(Exception):
    """Something went wrong in oncehook."""

    code = "error"
    hint = ""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or "").split("\n")[0])
        if hint:
            self.hint = hint
        if self.hint:
            self.add_note(self.hint)


class Rejected(OncehookError):
    """This arrival is not taken."""

    code = "rejected"
    status = 400


class SignatureInvalid(Rejected):
    """Unknown source, or the signature does not match."""

    # One answer for an unknown source, a bad, a stale and a missing signature:
    # an outsider learns nothing. `reason` is for our own log, never for the answer.
    code = "signature_invalid"
    status = 401

    def __init__(self, reason: str = "signature") -> None:
        super().__init__()
        self.reason = reason


class TooLarge(Rejected):
    """The body is larger than this source allows."""

    code = "too_large"
    status = 413


class Encoded(Rejected):
    """Content-Encoding is not accepted here; send the body as it is."""

    code = "encoded"
    status = 415


class KeyRequired(Rejected):
    """No key was found in this arrival, and this source requires one."""

    code = "key_missing"
    status = 422


class KeyConflict(Rejected):
    """This key was used before with another body."""

    code = "key_conflict"
    status = 422


class Malformed(Rejected):
    """The request is not well formed."""

    code = "malformed"
    status = 400


class TooManyHops(Rejected):
    """This event has come through too many inboxes: a destination leads back to a source."""

    # Not a 5xx: the inbox that sent it would try again, and the circle would go on.
    code = "too_many_hops"
    status = 400
    hint = "Look for a destination whose url is an address of the inbox itself."


class Refused(OncehookError):
    """This cannot be done now."""

    code = "refused"
    status = 409
    retry_after: float | None = None


class Unauthorized(Refused):
    """A bearer token is needed here."""

    code = "unauthorized"
    status = 401
    hint = "Send `Authorization: Bearer …` with the admin token or one of the configured tokens."


class TokenExpired(Unauthorized):
    """This token has expired."""

    code = "token_expired"
    hint = "Make a new one with `oncehook token NAME --expires 90d`, and put it in the place of the old one."


class Forbidden(Refused):
    """This token's role does not allow that."""

    code = "forbidden"
    status = 403


class PayloadsHidden(Forbidden):
    """You may see events, but not what is in them."""

    code = "payloads_hidden"
    hint = "Bodies, header values, previews and answers need a token or person without `payloads = false`."


class BadRequest(Refused):
    """This request cannot be understood."""

    code = "bad_request"
    status = 400


class QueryInvalid(BadRequest):
    """This query cannot be read."""

    code = "query_invalid"


class QueryTooWide(BadRequest):
    """Too many encrypted bodies would have to be read for this query."""

    code = "query_too_wide"
    hint = "Narrow it down, by status, subject or time: `status:dead since:2h body.amount:>1000`."


class NotFound(Refused):
    """There is no such thing here, or no longer."""

    code = "not_found"
    status = 404


class InvalidSettings(Refused):
    """A setting is wrong."""

    code = "invalid_settings"
    status = 422

    def __init__(self, errors: Sequence[Mapping[str, str]]) -> None:
        """`errors`: of each its `setting`, `error` and `hint`."""
        super().__init__("; ".join(one["error"] for one in errors), hint=errors[0]["hint"] if errors else "")
        self.errors = errors


class SecretKeyMissing(Refused):
    """There is no key to encrypt this secret with, and secrets are not kept in clear."""

    code = "secret_key_missing"
    status = 422
    hint = (
        "Make one, give it to every process of this inbox, and keep a copy:"
        " export ONCEHOOK_SECRET_KEY=$(openssl rand -base64 32)"
    )


class DefinedElsewhere(Refused):
    """A file or a program defines this; it is changed there."""

    code = "defined_elsewhere"


class Exists(Refused):
    """This name or address is taken."""

    code = "exists"


class InUse(Refused):
    """Deliveries still wait for this."""

    code = "in_use"
    hint = "Wait until they are done, or discard them with it: `discard=true`, `--discard`."


class DefinitionChanged(Refused):
    """Somebody else has changed this at the same moment; look at it again."""

    code = "definition_changed"


class NotReplayable(Refused):
    """This delivery cannot be replayed as it stands."""

    code = "not_replayable"


class Erased(NotReplayable):
    """What this delivery carried was erased; there is nothing left to deliver."""

    code = "erased"
    hint = "Ask the sender to send it again under another key: the old one still makes it a duplicate."


class NotWaiting(Refused):
    """This delivery does not stand where that could be done."""

    code = "not_waiting"


class PlanChanged(Refused):
    """What matches has changed since the plan was made; look at the new plan and confirm that."""

    code = "plan_changed"


class Undecryptable(Refused):
    """This cannot be decrypted."""

    code = "undecryptable"
    hint = "Nothing else is affected. A backup may hold it as it was."


class BodyMissing(Refused):
    """The body of this event is not where it was kept."""

    code = "body_missing"
    hint = "Nothing else is affected. Check `bodies` in the settings; a backup may hold it."


class ReplayTooSoon(Refused):
    """This delivery was replayed a moment ago."""

    code = "replay_too_soon"
    status = 429

    def __init__(self, retry_after: float) -> None:
        super().__init__(hint=f"Try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


class TestedTooSoon(Refused):
    """This destination was tested a moment ago."""

    __test__ = False
    code = "tested_too_soon"
    status = 429

    def __init__(self, retry_after: float) -> None:
        super().__init__(hint=f"Try again in {max(retry_after, 1):.0f} s.")
        self.retry_after = retry_after


class Steering(OncehookError):
    """How a handler wants its attempt to be taken."""

    code = "steering"


class RetryLater(Steering):
    """The handler asks to be called again later."""

    code = "retry_later"

    def __init__(self, message: str = "", *, after: float | str | None = None) -> None:
        super().__init__(message)
        self.after = after
        """Seconds, or text such as "5m", up to the policy's cap; None leaves it to the retry policy."""


class GiveUp(Steering):
    """The handler says that trying again is of no use."""

    code = "give_up"


class LeaseLost(OncehookError):
    """The lease ended before the attempt did; somebody else may work on it, and nothing was written."""

    code = "lease_lost"


class ClaimError(OncehookError):
    """This claim cannot be had, or not be kept."""

    code = "claim_error"


class InProgress(ClaimError):
    """Somebody else is working on this key."""

    code = "in_progress"

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message, hint="" if retry_after is None else f"Try again in {max(retry_after, 1):.0f} s.")
        self.retry_after = retry_after
        """Seconds until that claim lapses, unless it is renewed."""


class AlreadyDone(ClaimError):
    """This key was done before."""

    code = "already_done"

    def __init__(self, message: str = "", *, result: bytes | None = None) -> None:
        super().__init__(message)
        self.result = result


class ClaimLost(ClaimError):
    """This claim lapsed or belongs to somebody else by now; nothing was changed."""

    code = "claim_lost"


class KeyMissing(ClaimError):
    """There is no key to tell this call from another."""

    code = "key_missing"


class PayloadMismatch(ClaimError):
    """This key was used before with another payload."""

    code = "payload_mismatch"


class ResultInvalid(ClaimError):
    """This result cannot be kept."""

    code = "result_invalid"


class ConfigError(OncehookError):
    """A setting is wrong."""

    code = "config_invalid"


class ExtraMissing(ConfigError):
    """A package is not installed."""

    code = "extra_missing"

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the extra oncehook[{extra}], which is not installed.",
            hint=f"Run: pip install 'oncehook[{extra}]'",
        )


class ArchiveInvalid(OncehookError):
    """This is no archive of oncehook."""

    code = "archive_invalid"


class FileUnsafe(OncehookError):
    """This file is not one that only its owner, and that is us, can read."""

    code = "file_unsafe"


class StoreError(OncehookError):
    """The store cannot do what was asked."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """The store cannot write now; try again."""

    code = "store_unavailable"


class NotStarted(StoreUnavailable):
    """This inbox is not started."""

    code = "not_started"
    hint = "Give its lifespan to your application (`lifespan=inbox.lifespan`), or use `async with inbox.running():`."


class Overloaded(StoreUnavailable):
    """More arrivals wait than can be written in time; try again."""

    code = "overloaded"


class ObjectsUnavailable(StoreUnavailable):
    """The place of large bodies, media or archives cannot be used now; try again."""

    code = "objects_unavailable"


class StoreHeld(StoreError):
    """The process that owns this SQLite file cannot serve this one."""

    code = "store_held"


class MigrationNeeded(StoreError):
    """The store's schema is older than this program."""

    code = "migration_needed"
    hint = "Run: oncehook db migrate"


class SchemaTooNew(StoreError):
    """The store's schema is newer than this program."""

    code = "schema_too_new"
    hint = "Upgrade oncehook on this machine, or point it at another store."
