# acme_oncehook/__init__.py
from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

PRESET = Preset(
    name="acme",
    title="Acme Orders",
    scheme=Hmac(header="X-Acme-Proof", algorithm="sha512", signed="acme:{body}"),
    key=[["$.order.number", "$.order.state"]],
    type="$.order.state",
    subject="$.order.number",
    preview="$.order.note",
    horizon="2d",
    facts={"scheme": "acme.example/docs/hooks", "horizon": "acme.example/docs/hooks#retries"},
    samples={"paid": Sample('{"order":{"number":{number},"state":"paid"}}')},
)
