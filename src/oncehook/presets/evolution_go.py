"""Evolution Go: a WhatsApp bridge that signs nothing and puts the instance's API token into every body.

That token is the only proof there is, so it is compared and then taken out before anything is stored. One receipt
lists several message ids; each becomes an event of its own.
"""

from __future__ import annotations

from typing import Final

from oncehook.presets import _base
from oncehook.presets.evolution_api import TEXTS
from oncehook.sources import Preset, Sample, split_at
from oncehook.verify import Token

RECEIPT: Final = ("$.instanceId", "$.data.MessageIDs[0]")

_ENVELOPE: Final = (
    '{"event":"%s","data":%s,"instanceId":"0d9d2c1e-0000-4000-8000-000000000001","instanceName":"sales"%s}'
)
_RECEIPT: Final = (
    '{"Chat":"5511988880142@s.whatsapp.net","Sender":"5511988880142@s.whatsapp.net","IsFromMe":false,"IsGroup":false,'
    '"MessageIDs":[%s],"Timestamp":"{now_iso}","Type":"read"}'
)

PRESET = Preset(
    name="evolution-go",
    title="Evolution Go",
    scheme=Token(place="body:instanceToken"),
    body_authenticated=False,
    key_authenticated=False,
    split=split_at("$.data.MessageIDs"),
    key=[
        # An edit in a channel has the id of the message that it changes.
        ["$.instanceId", "$.event", "$.data.Info.ID", "$.data.NewsletterMeta.EditTS"],
        ["$.instanceId", "$.event", "$.data.Info.ID"],
        [*RECEIPT, "$.state", "$.data.Sender"],
        [*RECEIPT, "$.state"],
    ],
    # Connected, Presence and the like look the same every time. Because retries end after two minutes, the same body
    # within ten minutes is the same event, and later another one.
    on_missing_key="body_hash:10m",
    type="$.event",
    subject=[
        ["$.instanceId", "$.data.Info.Chat"],
        ["$.instanceId", "$.data.Chat"],
        ["$.instanceId", "$.data.From"],
        ["$.instanceId", "$.data.JID"],
        "$.instanceId",
    ],
    event_time=["$.data.Info.Timestamp", "$.data.Timestamp"],
    preview=[f"$.data.Message.{text}" for text in TEXTS],
    rank={"of": "$.state", "order": ["Delivered", "Read"]},
    rank_scope=[[*RECEIPT, "$.data.Sender"], [*RECEIPT]],
    redact=("$.instanceToken",),
    volatile=("$.instanceToken",),
    horizon="2m",
    keep_keys="30d",
    daily_volume=50,
    volume=("Message", "SendMessage"),
    # Media are included in base64 unless the bridge has a store for them.
    max_body="24MiB",
    # The bridge sets no time limit of its own.
    budget="5s",
    facts={
        "scheme": "github.com/EvolutionAPI/evolution-go pkg/events/webhook/webhook_producer.go (0.6.1)",
        "redact": "github.com/EvolutionAPI/evolution-go pkg/whatsmeow/service/whatsmeow.go",
        "key": "github.com/EvolutionAPI/evolution-go pkg/whatsmeow/service/whatsmeow.go · "
        "github.com/evolution-foundation/evolution-go docs/wiki/recursos-avancados/events-system.md (channel edits)",
        "split": "github.com/EvolutionAPI/evolution-go pkg/whatsmeow/service/whatsmeow.go · "
        "github.com/tulir/whatsmeow types/events/events.go",
        "event_time": "github.com/tulir/whatsmeow types/message.go",
        "preview": "github.com/tulir/whatsmeow proto/waE2E/WAWebProtobufsE2E.proto",
        "volume": "github.com/EvolutionAPI/evolution-go pkg/whatsmeow/service/whatsmeow.go",
        "horizon": "github.com/EvolutionAPI/evolution-go pkg/events/webhook/webhook_producer.go (5 × 30 s)",
        "max_body": "github.com/EvolutionAPI/evolution-go pkg/whatsmeow/service/whatsmeow.go (base64; size unverified)",
    },
    samples={
        "Message": _base.fill(
            _ENVELOPE,
            "Message",
            '{"Info":{"Chat":"5511988880142@s.whatsapp.net","Sender":"5511988880142@s.whatsapp.net",'
            '"IsFromMe":false,"IsGroup":false,"ID":"3EB0{id}","Type":"text","PushName":"Ana",'
            '"Timestamp":"{now_iso}"},"Message":{"conversation":"Olá, tudo bem?"},"IsEphemeral":false,'
            '"IsViewOnce":false}',
            "",
        ),
        "Receipt": Sample(_ENVELOPE % ("Receipt", _RECEIPT % '"3EB0{id}"', ',"state":"Read"')),
        "Presence": _base.fill(
            _ENVELOPE,
            "Presence",
            '{"From":"5511988880142@s.whatsapp.net","Unavailable":true,"LastSeen":"{now_iso}"}',
            ',"state":"offline"',
        ),
        "batch": Sample(_ENVELOPE % ("Receipt", _RECEIPT % '"3EB0{id}A","3EB0{id}B","3EB0{id}C"', ',"state":"Read"')),
    },
)
