"""GitHub with all its published payloads, GitLab, Linear and Jira, end to end into a real store."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
from standardwebhooks import Webhook

from oncehook import clock, presets
from oncehook.errors import ConfigError
from oncehook.model import Mark
from oncehook.sources import build
from tests.npm import package
from tests.presets.trial import trial

# -- GitHub ------------------------------------------------------------------------------------

Payload = dict[str, Any]

# What each event is about, said once more and otherwise than in the preset: by the event's name.
ABOUT: dict[str, str] = {
    "branch_protection_rule": "rule.id",
    "check_run": "check_run.id",
    "check_suite": "check_suite.id",
    "commit_comment": "comment.id",
    "create": "ref",
    "delete": "ref",
    "deploy_key": "key.id",
    "deployment": "deployment.id",
    "deployment_review": "workflow_run.id",
    "deployment_status": "deployment.id",
    "discussion": "discussion.number",
    "discussion_comment": "discussion.number",
    "fork": "forkee.id",
    "issue_comment": "issue.number",
    "issues": "issue.number",
    "label": "label.id",
    "member": "member.id",
    "merge_group": "merge_group.head_sha",
    "milestone": "milestone.id",
    "package": "package.id",
    "project": "project.id",
    "project_card": "project_card.id",
    "project_column": "project_column.id",
    "pull_request": "number",
    "pull_request_review": "pull_request.number",
    "pull_request_review_comment": "pull_request.number",
    "pull_request_review_thread": "pull_request.number",
    "push": "ref",
    "release": "release.id",
    "repository_vulnerability_alert": "alert.id",
    "status": "sha",
    "workflow_dispatch": "ref",
    "workflow_job": "workflow_job.id",
    "workflow_run": "workflow_run.id",
}
WHOLE_REPOSITORY = frozenset(
    ["gollum", "page_build", "public", "repository", "repository_dispatch", "repository_import", "star", "watch"]
)
ELSEWHERE: dict[str, Callable[[Payload], tuple[Any, ...]]] = {
    "code_scanning_alert": lambda p: (p["repository"]["id"], "code_scanning_alert", p["alert"]["number"]),
    "dependabot_alert": lambda p: (p["repository"]["id"], "dependabot_alert", p["alert"]["number"]),
    "github_app_authorization": lambda p: (p["sender"]["id"],),
    "installation": lambda p: (p["installation"]["id"],),
    "installation_repositories": lambda p: (p["installation"]["id"],),
    "marketplace_purchase": lambda p: (p["marketplace_purchase"]["account"]["id"],),
    "membership": lambda p: (p["organization"]["id"], p["team"]["id"]),
    "meta": lambda p: (p["hook_id"],),
    "org_block": lambda p: (p["organization"]["id"], p["blocked_user"]["id"]),
    "organization": lambda p: (p["organization"]["id"],),
    "ping": lambda p: (p["hook_id"],),
    "projects_v2_item": lambda p: (p["organization"]["id"], p["projects_v2_item"]["id"]),
    "security_advisory": lambda p: (p["security_advisory"]["ghsa_id"],),
    "sponsorship": lambda p: (p["sponsorship"]["node_id"],),
    "team": lambda p: (p["organization"]["id"], p["team"]["id"]),
    "team_add": lambda p: (p["organization"]["id"], p["team"]["id"]),
}


def expected_subject(event: str, payload: Payload) -> str:
    if event in ELSEWHERE:
        parts = ELSEWHERE[event](payload)
    elif event in WHOLE_REPOSITORY:
        parts = (payload["repository"]["id"],)
    else:
        value: Any = payload
        for name in ABOUT[event].split("."):
            value = value[name]
        parts = (payload["repository"]["id"], value)
    return ":".join(str(part).replace(":", "\\:") for part in parts) if len(parts) > 1 else str(parts[0])


@pytest.fixture(scope="module")
def corpus() -> list[tuple[str, Payload]]:
    index = json.loads((package("@octokit/webhooks-examples") / "api.github.com" / "index.json").read_text())
    return [(event["name"], payload) for event in index for payload in event["examples"]]


def github_headers(event: str, delivery: str) -> dict[str, str]:
    return {"X-GitHub-Event": event, "X-GitHub-Delivery": delivery}


async def test_github_corpus(tmp_path: Path, corpus: list[tuple[str, Payload]]) -> None:
    assert len(corpus) == 329
    assert len({event for event, _ in corpus}) == 58
    bodies = set()
    async with trial(tmp_path, "github") as on:
        for number, (event, payload) in enumerate(corpus):
            arrival = on.sign(on.draft(payload, headers=github_headers(event, f"guid-{number}")))
            receipt = await on.take(arrival)
            assert receipt.outcome == "accepted", (event, receipt)
            [kept] = await on.kept(receipt)
            action = payload.get("action")
            assert kept.type == (f"{event}.{action}" if action else event)
            assert kept.key == f"guid-{number}"
            assert kept.subject == expected_subject(event, payload), event
            assert kept.body == arrival.body
            assert kept.marks == (Mark.same_body if kept.body in bodies else Mark.none)
            bodies.add(kept.body)
            assert (await on.take(arrival)).outcome == "duplicate"
            spoilt = replace(arrival, body=arrival.body[:-1] + b" ")
            assert (await on.take(spoilt)).reply.status == 401
        assert len(await on.events()) == 329


async def test_github_published_vector(tmp_path: Path) -> None:
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    async with trial(tmp_path, "github", secret=[b"It's a Secret to Everybody"]) as on:
        headers = {"X-Hub-Signature-256": signature, **github_headers("ping", "g1")}
        receipt = await on.take(on.draft("Hello, World!", headers=headers))
        [event] = await on.kept(receipt)
        assert (event.body, event.type, event.key) == (b"Hello, World!", "ping", "g1")
        assert event.marks == Mark.unparsed
        for body in ("Hello, World! ", "Hello, World", "hello, World!"):
            assert (await on.take(on.draft(body, headers=headers))).reply.status == 401


async def test_github_old_signature_is_not_enough(tmp_path: Path) -> None:
    async with trial(tmp_path, "github", secret=[b"s"]) as on:
        sha1 = "sha1=" + hmac.new(b"s", b"{}", hashlib.sha1).hexdigest()
        assert (await on.take(on.draft("{}", headers={"X-Hub-Signature": sha1}))).reply.status == 401
        assert (await on.take(on.draft("{}", headers={"X-Hub-Signature-256": sha1}))).reply.status == 401


async def test_github_comment_on_a_pull_request_keeps_its_order(tmp_path: Path) -> None:
    where = {"repository": {"id": 7}}
    async with trial(tmp_path, "github") as on:
        opened = await on.keep(
            {"action": "opened", "number": 42, "pull_request": {"id": 111, "number": 42}, **where},
            headers=github_headers("pull_request", "a"),
        )
        comment = await on.keep(
            {
                "action": "created",
                "issue": {"id": 222, "number": 42, "pull_request": {}},
                "comment": {"id": 3},
                **where,
            },
            headers=github_headers("issue_comment", "b"),
        )
        assert opened.subject == comment.subject == "7:42"


async def test_github_redelivery_is_a_duplicate(tmp_path: Path) -> None:
    async with trial(tmp_path, "github") as on:
        push = {"ref": "refs/heads/main", "repository": {"id": 7}}
        await on.keep(push, headers=github_headers("push", "same"))
        assert await on.outcome(push, headers=github_headers("push", "same")) == "duplicate"
        assert await on.outcome(push, headers=github_headers("push", "another")) == "accepted"
        unkeyed = await on.keep(push, headers={"X-GitHub-Event": "push"})
        assert (unkeyed.key, unkeyed.marks) == (None, Mark.unkeyed | Mark.same_body)


async def test_github_form_keeps_key_and_type(tmp_path: Path) -> None:
    async with trial(tmp_path, "github") as on:
        event = await on.keep(
            "payload=%7B%22action%22%3A%22opened%22%7D",
            headers=github_headers("issues", "g1"),
            content_type="application/x-www-form-urlencoded",
        )
        assert (event.key, event.type, event.subject) == ("g1", "issues", None)


@pytest.mark.parametrize("payload", [[], None, 5, {"repository": 5, "issue": []}, {"repository": {"id": None}}])
async def test_github_odd_payloads_are_kept(tmp_path: Path, payload: Any) -> None:
    async with trial(tmp_path, "github") as on:
        event = await on.keep(payload, headers=github_headers("issues", "g1"))
        assert (event.key, event.type, event.subject) == ("g1", "issues", None)


def test_github_waits_for_the_store_and_takes_what_github_sends() -> None:
    source = build("github", preset=presets.load("github"), secret=[b"s"])
    assert 5 < source.settings.budget < 10  # it gives us ten seconds and never comes again
    assert source.settings.max_body == 26 << 20


# -- GitLab ------------------------------------------------------------------------------------

WHSEC = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def merge_request(action: str = "open", iid: int = 42) -> Payload:
    return {
        "object_kind": "merge_request",
        "project": {"id": 1545},
        "object_attributes": {"id": 99, "iid": iid, "action": action, "updated_at": "2026-11-15T20:00:00Z"},
    }


async def test_gitlab_signing_token_with_the_reference_library(tmp_path: Path) -> None:
    body = json.dumps(merge_request())
    now = datetime.now(UTC)
    headers = {
        "Idempotency-Key": "id-1",
        "webhook-id": "id-1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(WHSEC).sign("id-1", now, body),
        "X-Gitlab-Event": "Merge Request Hook",
    }
    async with trial(tmp_path, "gitlab", secret=[WHSEC.encode()]) as on:
        [event] = await on.kept(await on.take(on.draft(body, headers=headers)))
        assert (event.key, event.type) == ("id-1", "merge_request.open")
        assert event.event_at == datetime(2026, 11, 15, 20, tzinfo=UTC)
        # the signature covers webhook-id, so that is the key: another Idempotency-Key makes no other event
        renamed = {**headers, "Idempotency-Key": "id-2"}
        assert (await on.take(on.draft(body, headers=renamed))).outcome == "duplicate"
        for name, value in (("webhook-id", "id-2"), ("webhook-timestamp", str(int(now.timestamp()) - 1))):
            assert (await on.take(on.draft(body, headers={**headers, name: value}))).reply.status == 401
        assert (await on.take(on.draft(body + " ", headers=headers))).reply.status == 401


async def test_gitlab_secret_token(tmp_path: Path) -> None:
    async with trial(tmp_path, "gitlab", secret=[b"long random text"]) as on:
        headers = {"X-Gitlab-Token": "long random text", "Idempotency-Key": "id-1"}
        assert (await on.take(on.draft(merge_request(), headers=headers))).outcome == "accepted"
        assert (await on.take(on.draft(merge_request(), headers=headers))).outcome == "duplicate"
        for wrong in ("long random texT", "long random", "", "long random text2"):
            refused = await on.take(on.draft(merge_request(), headers={**headers, "X-Gitlab-Token": wrong}))
            assert refused.reply.status == 401
        await on.inbox.store.ping()
        assert b"long random text" not in on.bytes_on_disk()


async def test_gitlab_wrong_signature_is_not_rescued_by_the_token(tmp_path: Path) -> None:
    async with trial(tmp_path, "gitlab", secret=[WHSEC.encode(), b"old token"]) as on:
        token = {"X-Gitlab-Token": "old token", "Idempotency-Key": "id-1"}
        signed = {
            "webhook-id": "id-1",
            "webhook-timestamp": str(int(clock.now())),
            "webhook-signature": "v1," + "A" * 44,
        }
        assert (await on.take(on.draft("{}", headers={**token, **signed}))).reply.status == 401
        assert (await on.take(on.draft("{}", headers=token))).outcome == "accepted"


PROJECT = {"project": {"id": 1545}, "project_id": 1545}


@pytest.mark.parametrize(
    ("payload", "kind", "subject"),
    [
        (merge_request("merge"), "merge_request.merge", "1545:merge_request:42"),
        ({**PROJECT, "object_kind": "push", "ref": "refs/heads/main"}, "push", "1545:refs/heads/main"),
        ({**PROJECT, "object_kind": "tag_push", "ref": "refs/tags/v1"}, "tag_push", "1545:refs/tags/v1"),
        (
            {**PROJECT, "object_kind": "issue", "object_attributes": {"id": 3, "iid": 8, "action": "close"}},
            "issue.close",
            "1545:issue:8",
        ),
        (
            {**PROJECT, "object_kind": "note", "object_attributes": {"id": 5}, "merge_request": {"id": 9, "iid": 42}},
            "note",
            "1545:merge_request:42",
        ),
        (
            {**PROJECT, "object_kind": "note", "object_attributes": {"id": 5}, "issue": {"id": 9, "iid": 8}},
            "note",
            "1545:issue:8",
        ),
        ({**PROJECT, "object_kind": "note", "object_attributes": {"id": 5}, "commit": {}}, "note", "1545:note:5"),
        (
            {
                **PROJECT,
                "object_kind": "pipeline",
                "object_attributes": {"id": 31, "iid": 3},
                "merge_request": {"iid": 1},
            },
            "pipeline",
            "1545:pipeline:3",
        ),
        ({"object_kind": "build", "project_id": 1545, "build_id": 77, "ref": "main"}, "build", "1545:build:77"),
        ({**PROJECT, "object_kind": "deployment", "deployment_id": 6}, "deployment", "1545:deployment:6"),
        ({**PROJECT, "object_kind": "release", "id": 4, "action": "create"}, "release", "1545"),
        ({"event_name": "user_add_to_group", "group_id": 78}, "user_add_to_group", "78"),
        ({"event_name": "project_create", "project_id": 74}, "project_create", "74"),
        ({"template": "of one's own"}, "Push Hook", None),
    ],
)
async def test_gitlab_shapes(tmp_path: Path, payload: Payload, kind: str, subject: str | None) -> None:
    async with trial(tmp_path, "gitlab") as on:
        event = await on.keep(payload, headers={"webhook-id": "id-1", "X-Gitlab-Event": "Push Hook"})
        assert (event.key, event.type, event.subject) == ("id-1", kind, subject)


async def test_gitlab_before_17_4_has_no_key(tmp_path: Path) -> None:
    async with trial(tmp_path, "gitlab", secret=[b"token"]) as on:
        event = await on.keep(merge_request(), headers={"X-Gitlab-Event-UUID": "shared by several"})
        assert (event.key, event.marks) == (None, Mark.unkeyed)


# -- Linear ------------------------------------------------------------------------------------


def issue(action: str = "update", **fields: Any) -> Payload:
    return {
        "action": action,
        "type": "Issue",
        "organizationId": "org",
        "webhookId": "hook",
        "createdAt": "2026-11-15T20:00:00.000Z",
        "data": {"id": "iss-1", "title": "Café", "updatedAt": "2026-11-15T20:00:00.000Z"},
        **fields,
    }


async def test_linear_reads_an_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "linear") as on:
        event = await on.keep(issue(), headers={"Linear-Delivery": "d1", "Linear-Event": "Issue"})
        assert (event.key, event.type, event.subject) == ("d1", "Issue.update", "org:iss-1")
        assert event.event_at == datetime(2026, 11, 15, 20, tzinfo=UTC)
        session = await on.keep(
            {"type": "AgentSessionEvent", "action": "created", "organizationId": "org", "agentSession": {"id": "s1"}},
            headers={"Linear-Delivery": "d2"},
        )
        assert (session.type, session.subject) == ("AgentSessionEvent.created", "org:s1")


async def test_linear_retry_is_stamped_anew_and_still_a_duplicate(tmp_path: Path) -> None:
    async with trial(tmp_path, "linear") as on:
        headers = {"Linear-Delivery": "d1"}
        first = on.sign(on.draft(issue(), headers=headers), at=clock.now() - 50)
        retry = on.sign(on.draft(issue(), headers=headers))
        assert first.body != retry.body
        assert (await on.take(first)).outcome == "accepted"
        assert (await on.take(retry)).outcome == "duplicate"
        changed = on.sign(on.draft(issue(data={"id": "iss-1", "title": "other"}), headers=headers))
        assert (await on.take(changed)).outcome == "conflict"


async def test_linear_without_a_delivery_id_takes_what_the_body_says(tmp_path: Path) -> None:
    async with trial(tmp_path, "linear") as on:
        event = await on.keep(issue())
        assert event.key == "hook:Issue:update:iss-1:2026-11-15T20\\:00\\:00.000Z"
        assert await on.outcome(issue()) == "duplicate"
        later = issue(data={"id": "iss-1", "title": "Café", "updatedAt": "2026-11-15T21:00:00.000Z"})
        assert await on.outcome(later) == "accepted"
        assert await on.outcome(issue("remove")) == "accepted"
        # without the moment of the change two changes would look alike: no key rather than a wrong one
        unkeyed = await on.keep(issue(data={"id": "iss-1"}))
        assert unkeyed.key is None


async def test_linear_believes_the_time_in_the_body_only(tmp_path: Path) -> None:
    async with trial(tmp_path, "linear") as on:
        for age in (61, -90, 3600):
            old = on.sign(on.draft(issue(), headers={"Linear-Delivery": "d1"}), at=clock.now() - age)
            old.headers = [*old.headers, (b"linear-timestamp", str(int(clock.now() * 1000)).encode())]
            assert (await on.take(old)).reply.status == 401
        for age in (55, -55):
            assert await on.outcome(issue(), at=clock.now() - age, headers={"Linear-Delivery": f"d{age}"}) == "accepted"


async def test_linear_without_a_time_is_refused(tmp_path: Path) -> None:
    async with trial(tmp_path, "linear", secret=[b"s"]) as on:
        for body in ('{"type":"Issue"}', '{"webhookTimestamp":"1"}', '{"webhookTimestamp":null}', "[]", "x"):
            headers = {"Linear-Signature": hmac.new(b"s", body.encode(), "sha256").hexdigest()}
            assert (await on.take(on.draft(body, headers=headers))).reply.status == 401


# -- Jira --------------------------------------------------------------------------------------

JIRA_ID = {"X-Atlassian-Webhook-Identifier": "w1"}


async def test_jira_admin_webhook(tmp_path: Path) -> None:
    body = json.dumps({"webhookEvent": "jira:issue_updated", "timestamp": 1795000000123, "issue": {"id": "10042"}})
    async with trial(tmp_path, "jira", secret=[b"secret"]) as on:
        signature = "sha256=" + hmac.new(b"secret", body.encode(), "sha256").hexdigest()
        genuine = on.draft(body, headers={"X-Hub-Signature": signature, **JIRA_ID})
        [event] = await on.kept(await on.take(genuine))
        assert (event.key, event.type, event.subject) == ("w1", "jira:issue_updated", "10042")
        assert event.event_at == datetime.fromtimestamp(1795000000.123, UTC)
        # a retry says so in a header, which decides nothing
        retry = on.draft(body, headers={"X-Hub-Signature": signature, "X-Atlassian-Webhook-Retry": "1", **JIRA_ID})
        assert (await on.take(retry)).outcome == "duplicate"
        assert (await on.take(replace(genuine, body=genuine.body + b" "))).reply.status == 401


async def test_jira_fixes_the_algorithm(tmp_path: Path) -> None:
    async with trial(tmp_path, "jira", secret=[b"secret"]) as on:
        for name in ("sha1", "sha512", "md5"):
            signature = f"{name}=" + hmac.new(b"secret", b"{}", name).hexdigest()
            assert (await on.take(on.draft("{}", headers={"X-Hub-Signature": signature}))).reply.status == 401


async def test_jira_oauth_app(tmp_path: Path) -> None:
    async with trial(tmp_path, "jira", secret=[b"the client secret of 32 bytes ...."]) as on:
        now = int(clock.now())

        def bearer(key: str = "the client secret of 32 bytes ....", **claims: Any) -> dict[str, str]:
            token = jwt.encode({"iss": "app", "iat": now, "exp": now + 180, **claims}, key, algorithm="HS256")
            return {"Authorization": f"Bearer {token}", **JIRA_ID}

        assert (await on.take(on.draft("{}", headers=bearer()))).outcome == "accepted"
        assert (await on.take(on.draft("{}", headers=bearer("another secret of 32 bytes ......")))).reply.status == 401
        assert (await on.take(on.draft("{}", headers=bearer(exp=now - 3600)))).reply.status == 401
        # a wrong signature beside a good token is refused all the same
        both = {**bearer(), "X-Hub-Signature": "sha256=" + "0" * 64}
        assert (await on.take(on.draft("{}", headers=both))).reply.status == 401
        token = bearer()["Authorization"].encode()
        await on.inbox.store.ping()
        assert token not in on.bytes_on_disk()


@pytest.mark.parametrize(
    ("payload", "subject"),
    [
        ({"webhookEvent": "comment_created", "comment": {"id": "1"}, "issue": {"id": "10042"}}, "10042"),
        ({"webhookEvent": "worklog_created", "worklog": {"id": "1", "issueId": "10042"}}, "10042"),
        ({"webhookEvent": "issuelink_created", "issueLink": {"id": 1, "sourceIssueId": 10042}}, "10042"),
        ({"webhookEvent": "project_created", "project": {"id": 10000}}, "project:10000"),
        ({"webhookEvent": "jira:version_released", "version": {"id": "5"}}, "version:5"),
        ({"webhookEvent": "sprint_started", "sprint": {"id": 5}}, "sprint:5"),
        ({"webhookEvent": "board_updated", "board": {"id": 5}}, "board:5"),
        ({"webhookEvent": "user_created", "user": {"accountId": "abc"}}, "user:abc"),
        ({"webhookEvent": "option_voting_changed"}, None),
    ],
)
async def test_jira_shapes(tmp_path: Path, payload: Payload, subject: str | None) -> None:
    async with trial(tmp_path, "jira") as on:
        event = await on.keep(payload, headers=JIRA_ID)
        assert (event.type, event.subject) == (payload["webhookEvent"], subject)


@pytest.mark.parametrize("preset", ["github", "gitlab", "linear", "jira"])
def test_no_secret_no_source(preset: str) -> None:
    for secrets in ([], [b""], [b" "]):
        with pytest.raises(ConfigError):
            build("x", preset=presets.load(preset), secret=secrets)
