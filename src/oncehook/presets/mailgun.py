"""Mailgun: proves itself by a random token inside the body, and signs nothing of the event beside it.

So whoever sees one genuine request can forge others with its token within the tolerance: treat the event as a hint.
Mail forwarded by a route comes as a form with the same three fields.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Mailgun

DATA: Final = "$['event-data']"

_EVENT: Final = (
    '{"signature":{},"event-data":{"event":"%s","id":"%s{id}","timestamp":{now}.25,"log-level":"%s",'
    '"recipient":"ana@example.com","recipient-domain":"example.com",'
    '"message":{"headers":{"message-id":"20270111.{id}@mg.example.com","from":"Loja <loja@mg.example.com>",'
    '"to":"ana@example.com","subject":"Seu recibo \\u2013 obrigado"}}%s}}'
)

PRESET = Preset(
    name="mailgun",
    title="Mailgun",
    # Every retry carries the first one's timestamp: the tolerance of 12 hours outlasts them.
    scheme=Mailgun(),
    body_authenticated=False,
    key_authenticated=False,
    # A token is used once, and again by retries: with another event's id, it was captured.
    watch_proof=True,
    # Forwarded mail comes in one copy per recipient.
    key=[f"{DATA}.id", ["form:Message-Id", "form:recipient"]],
    type=[f"{DATA}.event", "form:event"],
    subject=[
        [f"{DATA}.message.headers['message-id']", f"{DATA}.recipient"],
        f"{DATA}.recipient",
        ["form:Message-Id", "form:recipient"],
    ],
    event_time=[f"{DATA}.timestamp", "form:timestamp"],
    # A retry with a new signature would be the same event.
    volatile=("$.signature",),
    # 10, 10, 15, 30 minutes, 1, 2, 4 hours. Every status but 200 is retried, except 406, which we never send.
    horizon="9h",
    max_body="4MiB",
    facts={
        "scheme": "documentation.mailgun.com/docs/mailgun/user-manual/webhooks/securing-webhooks",
        "key": "documentation.mailgun.com/docs/mailgun/user-manual/events/events (id; form fields unverified)",
        "horizon": "help.mailgun.com/hc/en-us/articles/202236504",
        "volatile": "unverified (the three fields are said to stay the same)",
        "max_body": "unverified",
    },
    samples={
        "delivered": Sample(_EVENT % ("delivered", "D", "info", ',"delivery-status":{"code":250,"message":"OK"}')),
        "opened": Sample(_EVENT % ("opened", "O", "info", ',"ip":"203.0.113.7"')),
        "failed": Sample(
            _EVENT
            % ("failed", "F", "error", ',"severity":"permanent","reason":"bounce","delivery-status":{"code":550}')
        ),
    },
)
