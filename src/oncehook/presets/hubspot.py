"""HubSpot: up to a hundred events in one array; a retry sends them again with a higher `attemptNumber`.

Public apps sign method, URL, body and time (v3); older ones and private apps send a plain hash (v2, v1).
"""

from __future__ import annotations

from typing import Final

from oncehook.presets import _base
from oncehook.sources import Preset, Sample
from oncehook.verify import Either, Hash, Hmac

# HubSpot does not document which of the URL's escapes it resolves before signing, so both readings are tried.
V3: Final = Hmac(
    header="X-HubSpot-Signature-v3",
    encoding="base64",
    signed=("{method}{url}{body}{timestamp}", "{method}{url|decoded}{body}{timestamp}"),
    timestamp="header:X-HubSpot-Request-Timestamp",
    unit="milliseconds",
)
V2: Final = Hash(header="X-HubSpot-Signature", signed="{method}{url}{body}")
V1: Final = Hash(header="X-HubSpot-Signature", signed="{body}")


_EVENT: Final = (
    '{"eventId":{number}%s,"subscriptionId":23001,"portalId":62515,"appId":54321,"occurredAt":{now_ms},'
    '"attemptNumber":0,"changeSource":"CRM_UI",%s}'
)
_CREATION: Final = '"subscriptionType":"contact.creation","objectId":%s,"changeFlag":"CREATED"'
_CHANGE: Final = (
    '"subscriptionType":"contact.propertyChange","objectId":{number},"propertyName":"firstname",'
    '"propertyValue":"Zo\\u00eb"'
)

PRESET = Preset(
    name="hubspot",
    title="HubSpot",
    # A v3 signature alone decides. v2 and v1 share a header, and nothing tells them apart.
    scheme=Either(V3, Either(V2, V1, every=True)),
    needs=("secret", "public_url"),
    # A single event comes alone in an array, too; a workflow's webhook is no array and stays whole.
    split=_base.one_by_one,
    # eventId alone need not be unique. Associations have two ends instead of an object.
    key=[
        [
            "$[0].portalId",
            "?$[0].subscriptionId",
            "$[0].eventId",
            "?$[0].occurredAt",
            "?$[0].objectId",
            "?$[0].fromObjectId",
            "?$[0].toObjectId",
            "?$[0].propertyName",
        ]
    ],
    # A workflow's webhook has no event id, and two runs may look alike: they are all kept.
    on_missing_key="accept",
    type="$[0].subscriptionType",
    subject=[["$[0].portalId", "$[0].objectId"], ["$[0].portalId", "$[0].fromObjectId"], "$[0].portalId"],
    event_time="$[0].occurredAt",
    volatile=("$[*].attemptNumber",),
    horizon="1d",
    # HubSpot waits 5 s for the whole batch.
    budget="2.5s",
    facts={
        "scheme": "github.com/HubSpot/hubspot-api-python hubspot/utils/signature.py",
        "key": "developers.hubspot.com/docs/api/webhooks (fields; that eventId may repeat is unverified)",
        "split": "developers.hubspot.com/docs/api/webhooks (100 per request)",
        "volatile": "developers.hubspot.com/docs/api/webhooks (attemptNumber)",
        "horizon": "developers.hubspot.com/docs/api/webhooks (10 over 24 h)",
        "budget": "developers.hubspot.com/docs/api/webhooks (5 s)",
    },
    samples={
        "contact.creation": Sample("[" + _EVENT % ("", _CREATION % "{number}") + "]"),
        "contact.propertyChange": Sample("[" + _EVENT % ("", _CHANGE) + "]"),
        **{
            f"{noun}.{act}": Sample("[" + _EVENT % ("", f'"subscriptionType":"{noun}.{act}",{about}') + "]")
            for noun, act, about in (
                ("contact", "deletion", '"objectId":{number},"changeFlag":"DELETED"'),
                ("contact", "privacyDeletion", '"objectId":{number},"changeFlag":"DELETED"'),
                ("contact", "merge", '"objectId":{number},"primaryObjectId":42,"mergedObjectIds":[43]'),
                ("company", "creation", '"objectId":{number},"changeFlag":"CREATED"'),
                (
                    "company",
                    "propertyChange",
                    '"objectId":{number},"propertyName":"domain","propertyValue":"tea.example"',
                ),
                ("deal", "creation", '"objectId":{number},"changeFlag":"CREATED"'),
                (
                    "deal",
                    "propertyChange",
                    '"objectId":{number},"propertyName":"dealstage","propertyValue":"closedwon"',
                ),
                ("deal", "deletion", '"objectId":{number},"changeFlag":"DELETED"'),
                ("ticket", "creation", '"objectId":{number},"changeFlag":"CREATED"'),
            )
        },
        "batch": Sample(
            f"[{_EVENT % (1, _CREATION % '{number}')},{_EVENT % (2, _CHANGE)},{_EVENT % (3, _CREATION % '{number}7')}]"
        ),
    },
)
