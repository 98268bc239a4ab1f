"""GitLab: a fixed token in a header, or since 19.0 a signing token (Standard Webhooks); both may be set at once.

Nothing is retried by itself, and four failures in a row switch the webhook off, for a minute first, then longer.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Either, StandardWebhooks, Token

KIND: Final = "$.object_kind"
OBJECT: Final = "$.object_attributes"
PROJECT: Final = "$.project.id"

_HEADERS: Final = {
    "Idempotency-Key": "{id}-97f3-4f6d-95ca-10d4e1a5b0d3",
    "webhook-id": "{id}-97f3-4f6d-95ca-10d4e1a5b0d3",
    "X-Gitlab-Event-UUID": "{id}-b7f1-4c5c-8f5a-5d1d0a6f6f21",
    "X-Gitlab-Instance": "https://gitlab.example.com",
}
_PROJECT: Final = (
    '"user":{"id":7,"username":"ana"},"project":{"id":1545,"name":"hooks","path_with_namespace":"example/hooks",'
    '"default_branch":"main"}'
)


def _event(header: str, about: str) -> Sample:
    return Sample("{" + about + "," + _PROJECT + "}", {"X-Gitlab-Event": header, **_HEADERS})


PRESET = Preset(
    name="gitlab",
    title="GitLab",
    # A signing token begins with whsec_; anything else is the fixed token. Where there is a signature, it alone
    # decides.
    scheme=Either(StandardWebhooks(bare=False), Token(place="header:X-Gitlab-Token")),
    # Neither is signed when the fixed token is used.
    body_authenticated=False,
    key_authenticated=False,
    # Both have the same value; a signature covers webhook-id only.
    key=["header:webhook-id", "header:Idempotency-Key"],
    type=[[KIND, f"?{OBJECT}.action"], "$.event_name", "header:X-Gitlab-Event"],
    subject=[
        [PROJECT, KIND, f"{OBJECT}.iid"],
        # A comment belongs to what it is written on.
        [PROJECT, "literal:merge_request", "$.merge_request.iid"],
        [PROJECT, "literal:issue", "$.issue.iid"],
        [PROJECT, KIND, f"{OBJECT}.id"],
        ["$.project_id", KIND, "$.build_id"],
        [PROJECT, KIND, "$.deployment_id"],
        [PROJECT, "$.ref"],
        PROJECT,
        "$.project_id",
        "$.group_id",
    ],
    event_time=[f"{OBJECT}.updated_at", f"{OBJECT}.created_at"],
    horizon="2d",
    max_body="26MiB",
    # GitLab does not retry, so it is worth waiting for the store.
    budget="8s",
    facts={
        "scheme": "docs.gitlab.com/user/project/integrations/webhooks; signing token: gitlab.com/gitlab-org/gitlab "
        "merge requests 230944, 231325",
        "key": "docs.gitlab.com/user/project/integrations/webhooks (Idempotency-Key, 17.4 and later)",
        "type": "docs.gitlab.com/user/project/integrations/webhook_events",
        "subject": "docs.gitlab.com/user/project/integrations/webhook_events",
        "horizon": "unverified (resent by hand from a log that is kept about two days)",
        "budget": "docs.gitlab.com/user/gitlab_com (10 s)",
        "max_body": "github.com/gitlabhq/gitlabhq app/services/web_hook_service.rb (25 MB)",
    },
    samples={
        "push": Sample(
            '{"object_kind":"push","event_name":"push","before":"95790bf891e76fee5e1747ab589903a6a1f80f22",'
            '"after":"{id}{id}00000000","ref":"refs/heads/main","checkout_sha":"{id}{id}00000000","user_id":7,'
            '"project_id":1545,"commits":[{"id":"{id}{id}00000000","message":"Café: open at 8",'
            '"timestamp":"{now_iso}"}],"total_commits_count":1,' + _PROJECT + "}",
            {"X-Gitlab-Event": "Push Hook", **_HEADERS},
        ),
        "merge_request.open": Sample(
            '{"object_kind":"merge_request","event_type":"merge_request",' + _PROJECT + ',"object_attributes":'
            '{"id":{number},"iid":42,"title":"Take each hook once","state":"opened","action":"open",'
            '"source_branch":"once","target_branch":"main","created_at":"{now_iso}","updated_at":"{now_iso}"}}',
            {"X-Gitlab-Event": "Merge Request Hook", **_HEADERS},
        ),
        "note.create": Sample(
            '{"object_kind":"note","event_type":"note","project_id":1545,' + _PROJECT + ',"object_attributes":'
            '{"id":{number},"note":"Obrigada!","noteable_type":"MergeRequest","action":"create",'
            '"created_at":"{now_iso}","updated_at":"{now_iso}"},"merge_request":{"id":{number},"iid":42}}',
            {"X-Gitlab-Event": "Note Hook", **_HEADERS},
        ),
        "merge_request.merge": _event(
            "Merge Request Hook",
            '"object_kind":"merge_request","object_attributes":{"id":{number},"iid":42,"title":"Take each hook once",'
            '"state":"merged","action":"merge","source_branch":"once","target_branch":"main",'
            '"updated_at":"{now_iso}"}',
        ),
        "issue.open": _event(
            "Issue Hook",
            '"object_kind":"issue","object_attributes":{"id":{number},"iid":43,"title":"It came twice",'
            '"state":"opened","action":"open","created_at":"{now_iso}","updated_at":"{now_iso}"}',
        ),
        "issue.close": _event(
            "Issue Hook",
            '"object_kind":"issue","object_attributes":{"id":{number},"iid":43,"title":"It came twice",'
            '"state":"closed","action":"close","updated_at":"{now_iso}"}',
        ),
        "tag_push": _event(
            "Tag Push Hook",
            '"object_kind":"tag_push","event_name":"tag_push","ref":"refs/tags/v1.2.0","project_id":1545,'
            '"after":"{id}{id}00000000","checkout_sha":"{id}{id}00000000"',
        ),
        "pipeline": _event(
            "Pipeline Hook",
            '"object_kind":"pipeline","object_attributes":{"id":{number},"iid":3,"ref":"main","status":"success",'
            '"created_at":"{now_iso}","duration":63}',
        ),
        "build": _event(
            "Job Hook",
            '"object_kind":"build","build_id":{number},"build_name":"test","build_stage":"test",'
            '"build_status":"failed","ref":"main","project_id":1545',
        ),
        "deployment": _event(
            "Deployment Hook",
            '"object_kind":"deployment","status":"success","deployment_id":{number},"environment":"production",'
            '"ref":"main"',
        ),
        "release": _event(
            "Release Hook",
            '"object_kind":"release","id":{number},"tag":"v1.2.0","name":"v1.2.0","action":"create",'
            '"created_at":"{now_iso}"',
        ),
    },
)
