"""Jira Cloud: admin webhooks are signed with their secret, those of OAuth apps bring a JWT made with the app's.

Only 408, 409, 425, 429 and 5xx are retried: what we reject with 401 because of a wrong secret is lost.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Either, Hmac, Jwt

_ISSUE: Final = (
    '"issue":{"id":"10042","key":"EX-42","fields":{"summary":"Caf\\u00e9 opens at 8","status":{"name":"Done"},'
    '"project":{"id":"10000","key":"EX"}}}'
)
_USER: Final = '"user":{"accountId":"5b10a2844c20165700ede21g","displayName":"Ana"}'
_HEADERS: Final = {"X-Atlassian-Webhook-Identifier": "{id}-5c4d", "X-Atlassian-Webhook-Flow": "Primary"}


def _event(kind: str, about: str) -> Sample:
    return Sample(f'{{"timestamp":{{now_ms}},"webhookEvent":"{kind}",{about}}}', _HEADERS)


PRESET = Preset(
    name="jira",
    title="Jira Cloud",
    # The prefix names the algorithm, which we fix, so that the sender cannot choose a weak one.
    scheme=Either(Hmac(header="X-Hub-Signature", prefix="sha256="), Jwt()),
    # The JWT proves the sender, not the content.
    body_authenticated=False,
    key_authenticated=False,
    watch_proof=True,
    own="$.timestamp",
    key="header:X-Atlassian-Webhook-Identifier",
    type="$.webhookEvent",
    subject=[
        "$.issue.id",
        "$.worklog.issueId",
        "$.issueLink.sourceIssueId",
        ["literal:project", "$.project.id"],
        ["literal:version", "$.version.id"],
        ["literal:sprint", "$.sprint.id"],
        ["literal:board", "$.board.id"],
        ["literal:user", "$.user.accountId"],
    ],
    event_time="$.timestamp",
    # Up to five tries, 5 to 15 minutes apart.
    horizon="2h",
    max_body="26MiB",
    facts={
        "scheme": "confluence.atlassian.com/adminjiraserver/managing-webhooks-938846912.html (X-Hub-Signature); JWT: "
        "developer.atlassian.com/cloud/jira/platform/webhooks (its claims are unverified)",
        "key": "unverified (developer.atlassian.com/cloud/jira/platform/webhooks, as client libraries quote it)",
        "horizon": "community.developer.atlassian.com/t/new-jira-cloud-webhook-retry-policy/30554 (number and "
        "distance of the tries are unverified)",
        "max_body": "unverified",
    },
    samples={
        "jira:issue_created": Sample(
            '{"timestamp":{now_ms},"webhookEvent":"jira:issue_created","issue_event_type_name":"issue_created",'
            + f"{_USER},{_ISSUE}}}",
            _HEADERS,
        ),
        "jira:issue_updated": Sample(
            '{"timestamp":{now_ms},"webhookEvent":"jira:issue_updated","issue_event_type_name":"issue_generic",'
            + f"{_USER},{_ISSUE}"
            + ',"changelog":{"id":"{number}","items":[{"field":"status","fromString":"Todo","toString":"Done"}]}}',
            _HEADERS,
        ),
        "comment_created": Sample(
            '{"timestamp":{now_ms},"webhookEvent":"comment_created","comment":{"id":"{number}","body":"Obrigada!"},'
            + f"{_ISSUE}}}",
            _HEADERS,
        ),
        "jira:issue_deleted": _event("jira:issue_deleted", f"{_USER},{_ISSUE}"),
        "comment_updated": _event("comment_updated", '"comment":{"id":"{number}","body":"Obrigado!"},' + _ISSUE),
        "comment_deleted": _event("comment_deleted", '"comment":{"id":"{number}"},' + _ISSUE),
        "worklog_created": _event("worklog_created", '"worklog":{"id":"{number}","issueId":"10042","timeSpent":"2h"}'),
        "issuelink_created": _event(
            "issuelink_created", '"issueLink":{"id":{number},"sourceIssueId":10042,"destinationIssueId":10043}'
        ),
        "sprint_started": _event("sprint_started", '"sprint":{"id":42,"state":"active","name":"Sprint 42"}'),
        "sprint_closed": _event("sprint_closed", '"sprint":{"id":42,"state":"closed","name":"Sprint 42"}'),
        "project_created": _event("project_created", '"project":{"id":10001,"key":"TEA","name":"Tea"}'),
        "jira:version_released": _event(
            "jira:version_released", '"version":{"id":"10007","name":"1.2","released":true,"projectId":10000}'
        ),
    },
)
