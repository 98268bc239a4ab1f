"""n8n: what its log streaming posts by itself, and what its triggers hand to a flow that posts them on.

The first are the events of `log-streaming.event-relay.ts` in the envelope that its webhook destination writes
(n8n-io/n8n, 00c9ea3 and 0b570f3; people as `redactable.ts` writes them); the others are as docs.n8n.io and the
triggers' own sources have them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ID, AT = "3f0cd5d1-6c2f-4a0a-9d8e-0a9f3b2f6c11", "2026-11-17T09:30:00.000+00:00"
USER = {
    "userId": "8d1a2b3c-0000-4000-8000-000000000001",
    "_email": "ana@example.com",
    "_firstName": "Ana",
    "_lastName": "Souza",
    "globalRole": "global:owner",
}
FLOW = {"workflowId": "Zl1m8vYJ3oT2kq0B", "workflowName": "Orders"}
RUN = {"executionId": "231", **FLOW}
PROJECT = {"projectId": "q7w8e9", "projectName": "Shop"}
NODE = {**RUN, "nodeType": "n8n-nodes-base.httpRequest", "nodeName": "Tell the inbox", "nodeId": "b2c1"}


class Posted(NamedTuple):
    """A body, and the type and the key that its event has; None: no key, so it passes unkeyed."""

    body: dict[str, Any]
    type: str
    key: str | None


def streamed(name: str, payload: dict[str, Any] | None, id: str = ID) -> Posted:
    body = {"id": id, "ts": AT, "eventName": name, "message": name}
    return Posted(body if payload is None else {**body, "payload": payload}, name, f"{name}:{id}")


def posted(type: str = "event", key: str | None = None, **body: Any) -> Posted:
    return Posted(body, type, key)


PAYLOADS = {
    "a run begins": streamed(
        "n8n.workflow.started", {**RUN, "userId": USER["userId"], "isManual": False, "mode": "webhook", **PROJECT}
    ),
    "a run is over": streamed(
        "n8n.workflow.success", {**RUN, "success": True, "isManual": False, "mode": "webhook", **PROJECT}
    ),
    "a run has failed": streamed(
        "n8n.workflow.failed",
        {
            **RUN,
            "success": False,
            "isManual": False,
            "mode": "webhook",
            **PROJECT,
            "lastNodeExecuted": "Tell the inbox",
            "errorNodeType": "n8n-nodes-base.httpRequest",
            "errorMessage": "The service refused the connection - perhaps it is offline",
        },
    ),
    "a job is done": streamed(
        "n8n.queue.job.completed",
        {"executionId": "231", "workflowId": FLOW["workflowId"], "hostId": "main-4f1c", "jobId": "17"},
    ),
    "a job has failed": streamed(
        "n8n.queue.job.failed",
        {"executionId": "231", "workflowId": FLOW["workflowId"], "hostId": "main-4f1c", "jobId": "17"},
    ),
    "a node begins": streamed("n8n.node.started", NODE),
    "a node is over": streamed("n8n.node.finished", NODE),
    "a workflow is made": streamed("n8n.audit.workflow.created", {**USER, **FLOW}),
    "a workflow is changed": streamed("n8n.audit.workflow.updated", {**USER, **FLOW}),
    "a workflow is on": streamed("n8n.audit.workflow.activated", {**USER, **FLOW, "activeVersionId": "v2"}),
    "a workflow is off": streamed("n8n.audit.workflow.deactivated", {**USER, **FLOW, "deactivatedVersionId": "v2"}),
    "a workflow is put away": streamed("n8n.audit.workflow.archived", {**USER, "workflowId": FLOW["workflowId"]}),
    "a workflow is back": streamed("n8n.audit.workflow.unarchived", {**USER, "workflowId": FLOW["workflowId"]}),
    "a workflow is gone": streamed("n8n.audit.workflow.deleted", {**USER, "workflowId": FLOW["workflowId"]}),
    "a workflow is run": streamed("n8n.audit.workflow.executed", {**USER, **RUN, "source": "user-manual"}),
    "a person is invited": streamed("n8n.audit.user.invited", {**USER, "targetUserId": ["u2", "u3"]}),
    "a person is changed": streamed("n8n.audit.user.updated", {**USER, "fieldsChanged": ["firstName"]}),
    "a person is gone": streamed("n8n.audit.user.deleted", USER),
    "without its payload": streamed("n8n.audit.user.deleted", None, "9c7e7a52-0000-4000-8000-000000000002"),
    "error trigger": posted(
        execution={
            "id": "231",
            "url": "https://n8n.example.com/execution/231",
            "retryOf": "34",
            "error": {"message": "Example Error Message", "stack": "Stacktrace"},
            "lastNodeExecuted": "Node With Error",
            "mode": "manual",
        },
        workflow={"id": "1", "name": "Example Workflow"},
    ),
    "error trigger, of a trigger": posted(
        trigger={"error": {"message": "Example Error Message"}, "mode": "trigger"},
        workflow={"id": "1", "name": "Example Workflow"},
    ),
    "schedule trigger": posted(
        **{
            "timestamp": "2026-11-17T09:30:00.000-03:00",
            "Readable date": "November 17th 2026, 9:30:00 am",
            "Readable time": "9:30:00 am",
            "Day of week": "Tuesday",
            "Year": "2026",
            "Month": "November",
            "Day of month": "17",
            "Hour": "09",
            "Minute": "30",
            "Second": "00",
            "Timezone": "America/Sao_Paulo (UTC-03:00)",
        }
    ),
    "chat trigger": posted(sessionId="0b5e", action="sendMessage", chatInput="Where is my order?"),
    "form trigger": posted(Name="Ana", submittedAt="2026-11-17T09:30:00.000-03:00", formMode="production"),
    "webhook trigger, handed on whole": posted(
        headers={"host": "n8n.example.com", "user-agent": "curl/8.5.0", "content-type": "application/json"},
        params={},
        query={"from": "shop"},
        body={"order": 42},
        webhookUrl="https://n8n.example.com/webhook/orders",
        executionMode="production",
    ),
    "the second story's received": posted(
        "message", "M7:received", event="message", data={"messageId": "M7", "idempotency_key": "M7:received"}
    ),
    "the second story's read": posted(
        "message", "M7:read", event="message", data={"messageId": "M7", "idempotency_key": "M7:read"}
    ),
}
