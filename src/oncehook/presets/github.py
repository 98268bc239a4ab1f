"""GitHub: waits ten seconds and never retries by itself; a person can press Redeliver, for three days.

A redelivery has the first one's id, so it is a duplicate if that was stored: to process it again, replay it here. The
name of an event's object depends on the event; all of them are listed.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

EVENT: Final = "header:X-GitHub-Event"

# The object of a repository's event: the first of these that exists. Issues, pull requests and discussions share one
# sequence of numbers, and a comment on a pull request names it as an issue, so the number keeps them together.
OBJECTS: Final = (
    "pull_request.number",
    "issue.number",
    "discussion.number",
    "workflow_job.id",
    "deployment.id",
    "workflow_run.id",
    "check_run.id",
    "check_suite.id",
    "release.id",
    "package.id",
    "comment.id",
    "label.id",
    "milestone.id",
    "project_card.id",
    "project_column.id",
    "project.id",
    "member.id",
    "rule.id",
    "key.id",
    "forkee.id",
    "merge_group.head_sha",
    "sha",
    "ref",
)

_REPOSITORY: Final = (
    '"repository":{"id":186853002,"name":"hooks","full_name":"example/hooks","private":false,'
    '"default_branch":"main"},"sender":{"login":"ana","id":21031067,"type":"User"}'
)
_HEADERS: Final = {
    "X-GitHub-Delivery": "{id}-72d3-11ee-8c99-0242ac120002",
    "X-GitHub-Hook-ID": "292430182",
    "User-Agent": "GitHub-Hookshot/044aadd",
}


def _event(name: str, about: str) -> Sample:
    return Sample("{" + about + "," + _REPOSITORY + "}", {"X-GitHub-Event": name, **_HEADERS})


PRESET = Preset(
    name="github",
    title="GitHub",
    scheme=Hmac(header="X-Hub-Signature-256", prefix="sha256="),
    key="header:X-GitHub-Delivery",
    key_authenticated=False,
    type=[[EVENT, "?$.action"]],
    subject=[
        ["$.organization.id", "$.team.id"],
        "$.hook_id",
        # Code scanning and Dependabot each count their alerts; older ones have an id.
        ["$.repository.id", "$.alert.id"],
        ["$.repository.id", EVENT, "$.alert.number"],
        *(["$.repository.id", f"$.{about}"] for about in OBJECTS),
        "$.repository.id",
        ["$.organization.id", "$.projects_v2_item.id"],
        ["$.organization.id", "$.blocked_user.id"],
        "$.organization.id",
        "$.installation.id",
        "$.marketplace_purchase.account.id",
        "$.sponsorship.node_id",
        "$.security_advisory.ghsa_id",
        "$.sender.id",
    ],
    horizon="3d",
    max_body="26MiB",
    # GitHub does not retry, so it is worth waiting for the store.
    budget="8s",
    facts={
        "scheme": "docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries",
        "key": "docs.github.com/en/webhooks/using-webhooks/best-practices-for-using-webhooks (X-GitHub-Delivery)",
        "subject": "npm @octokit/webhooks-examples api.github.com/index.json (all 329 payloads)",
        "horizon": "docs.github.com/en/webhooks/using-webhooks/handling-failed-webhook-deliveries (none automatic); "
        "3 days by hand: unverified",
        "budget": "docs.github.com/en/webhooks/using-webhooks/best-practices-for-using-webhooks (10 s)",
        "max_body": "docs.github.com/en/webhooks/webhook-events-and-payloads (25 MB)",
    },
    samples={
        "push": Sample(
            '{"ref":"refs/heads/main","before":"6113728f27ae82c7b1a177c8d03f9e96e0adf246",'
            '"after":"{id}{id}00000000","created":false,"deleted":false,"forced":false,'
            '"commits":[{"id":"{id}{id}00000000","message":"Café: open at 8 \\u2615","timestamp":"{now_iso}"}],'
            '"pusher":{"name":"ana"},' + _REPOSITORY + "}",
            {"X-GitHub-Event": "push", **_HEADERS},
        ),
        "pull_request.opened": Sample(
            '{"action":"opened","number":42,"pull_request":{"id":{number},"number":42,"state":"open",'
            '"title":"Take each hook once","head":{"ref":"once"},"base":{"ref":"main"}},' + _REPOSITORY + "}",
            {"X-GitHub-Event": "pull_request", **_HEADERS},
        ),
        "issue_comment.created": Sample(
            '{"action":"created","issue":{"id":{number},"number":42,"title":"Take each hook once"},'
            '"comment":{"id":{number},"body":"Obrigada!","created_at":"{now_iso}"},' + _REPOSITORY + "}",
            {"X-GitHub-Event": "issue_comment", **_HEADERS},
        ),
        "ping": Sample(
            '{"zen":"Keep it logically awesome.","hook_id":292430182,"hook":{"id":292430182,"type":"Repository",'
            '"events":["push"]},' + _REPOSITORY + "}",
            {"X-GitHub-Event": "ping", **_HEADERS},
        ),
        "pull_request.closed": _event(
            "pull_request",
            '"action":"closed","number":42,"pull_request":{"id":{number},"number":42,"state":"closed","merged":true,'
            '"title":"Take each hook once","head":{"ref":"once"},"base":{"ref":"main"}}',
        ),
        "pull_request_review.submitted": _event(
            "pull_request_review",
            '"action":"submitted","review":{"id":{number},"state":"approved","body":"Boa!",'
            '"submitted_at":"{now_iso}"},"pull_request":{"id":{number},"number":42,"state":"open"}',
        ),
        "issues.opened": _event(
            "issues",
            '"action":"opened","issue":{"id":{number},"number":43,"state":"open","title":"It came twice",'
            '"created_at":"{now_iso}"}',
        ),
        "release.published": _event(
            "release",
            '"action":"published","release":{"id":{number},"tag_name":"v1.2.0","draft":false,"prerelease":false,'
            '"published_at":"{now_iso}"}',
        ),
        "workflow_run.completed": _event(
            "workflow_run",
            '"action":"completed","workflow_run":{"id":{number},"name":"test","head_branch":"main","event":"push",'
            '"status":"completed","conclusion":"success"}',
        ),
        "check_run.completed": _event(
            "check_run",
            '"action":"completed","check_run":{"id":{number},"name":"lint","status":"completed",'
            '"conclusion":"failure","completed_at":"{now_iso}"}',
        ),
        "star.created": _event("star", '"action":"created","starred_at":"{now_iso}"'),
    },
)
