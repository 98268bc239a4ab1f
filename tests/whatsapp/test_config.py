"""`[destination.NAME.whatsapp]`: what may be written, what is refused and how, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.settings import Loaded, load
from oncehook.settings.describe import schema

CANARY = "EAAG-canary-7f3a"
ENV = {
    "TOKEN": CANARY,
    "KEY": CANARY,
    "PROXY": f"http://user:{CANARY}@proxy.example:8080",
    "S3": CANARY,
    "S3_SECRET": CANARY,
}
META = """
[destination.answers]
unsure = "dead"
retry = "quick"
[destination.answers.whatsapp]
api = "meta"
token = { env = "TOKEN" }
phone_number_id = "106540352242922"
country = 55
proxy = { env = "PROXY" }
[destination.answers.whatsapp.files]
bucket = "media"
endpoint = "https://r2.example"
access_key = { env = "S3" }
secret_key = { env = "S3_SECRET" }
expires = "1h"
"""
SMALL = 'api = "meta"\ntoken = { env = "TOKEN" }\n'
BOTH = 'url = "https://a.example"\nwhatsapp = { api = "meta", token = { env = "TOKEN" }, phone_number_id = "1" }'


def loaded(text: str, folder: Path, env: dict[str, str] | None = None) -> Loaded:
    (folder / "oncehook.toml").write_text(text)
    return load(folder / "oncehook.toml", {**ENV, **(env or {})})


def refused(text: str, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, folder)
    return str(caught.value).splitlines()


def whatsapp(text: str) -> str:
    return f"[destination.answers.whatsapp]\n{text}"


def test_a_sender_in_the_settings(tmp_path: Path) -> None:
    read = loaded(META, tmp_path)
    destination = read.config.destination["answers"]
    found = destination.whatsapp
    assert found is not None
    assert (destination.unsure, found.api, found.phone_number_id, found.country) == (
        "dead",
        "meta",
        "106540352242922",
        "55",
    )
    assert found.token is not None
    assert found.token.reveal() == CANARY.encode()
    assert found.files is not None
    assert (found.files.bucket, found.files.expires, found.files.region) == ("media", 3600.0, "auto")


async def test_links_lead_where_the_settings_say(tmp_path: Path) -> None:
    key = f"oncehook/{'0' * 64}.png"
    for said, begins in (
        ('public_endpoint = "https://files.example"', f"https://files.example/media/{key}?"),
        ('public_url = "https://pub.example"', f"https://pub.example/{key}"),
    ):
        found = loaded(META.replace('bucket = "media"', f'bucket = "media"\n{said}'), tmp_path).config
        sender = Inbox.from_config(found).destinations["answers"].sender  # type: ignore[attr-defined]
        assert (await sender.files.link(key)).startswith(begins)
        await sender.files.close()


def test_it_is_shown_with_its_origin_and_without_its_secrets(tmp_path: Path) -> None:
    read = loaded(META, tmp_path)
    shown = {setting.name: (setting.value, setting.origin) for setting in read.settings()}
    value, origin = shown["destination.answers.whatsapp.token"]
    assert (value, origin.rpartition("/")[2]) == ("env:TOKEN (set)", "oncehook.toml:7")
    assert shown["destination.answers.whatsapp.proxy"][0] == "env:PROXY (set)"
    assert shown["destination.answers.whatsapp.files.bucket"][0] == "media"
    assert CANARY not in repr(shown) + repr(read.config.destination)


def test_the_environment_lies_over_it(tmp_path: Path) -> None:
    over = {
        "ONCEHOOK_DESTINATION__ANSWERS__WHATSAPP__PHONE_NUMBER_ID": "9",
        "ONCEHOOK_WHATSAPP_API": "meta",
        "ONCEHOOK_S3_BUCKET": "b",
    }
    read = loaded(META, tmp_path, over)
    found = read.config.destination["answers"].whatsapp
    assert found is not None
    assert found.phone_number_id == "9"
    assert read.warnings == (), "variables of the command are no settings, and no mistake"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (whatsapp('api = "metta"'), 'api in [destination.answers.whatsapp]: must be "meta" or'),
        (whatsapp('token = { env = "TOKEN" }'), '[destination.answers.whatsapp] needs "api"'),
        (whatsapp('api = "meta"\nphone_number_id = "1"'), "needs token"),
        (whatsapp(SMALL), "needs phone_number_id"),
        (whatsapp('api = "evolution-api"\nbase_url = "https://e.example"\ninstance = "x"'), "needs api_key"),
        (whatsapp('api = "evolution-go"\ntoken = { env = "TOKEN" }'), "needs base_url"),
        (
            whatsapp(SMALL + 'phone_number_id = "1"\ninstance = "x"'),
            'instance in [destination.answers.whatsapp]: the API "meta" has no such thing',
        ),
        (
            whatsapp(SMALL + 'phone_number = "1"'),
            'unknown key "phone_number" in [destination.answers.whatsapp]; did you mean "phone_number_id"?',
        ),
        (
            whatsapp(f'api = "meta"\ntoken = "{CANARY}"\nphone_number_id = 1'),
            "must be a reference and never the secret",
        ),
        (whatsapp(SMALL + 'phone_number_id = "1"\ncountry = "Brazil"'), "must be a calling code"),
        (f"[destination.two]\n{BOTH}", "[destination.two] has both url and whatsapp"),
        (META.replace('"dead"', '"maybe"'), 'unsure in [destination.answers]: must be "retry" or "dead"'),
        (META.replace('unsure = "dead"', 'sign = { env = "KEY" }'), "sign in [destination.answers] is for a url"),
        (
            META.replace('bucket = "media"', 'bucked = "media"'),
            'unknown key "bucked" in [destination.answers.whatsapp.files]; did you mean "bucket"?',
        ),
        ("[destination.answers]", "or [destination.answers.whatsapp]"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (line,) = refused(text, tmp_path)
    assert sentence in line
    assert CANARY not in line


def test_editors_know_it() -> None:
    described = schema()
    assert described["$defs"]["DestinationSettings"]["properties"]["whatsapp"] == {"$ref": "#/$defs/WhatsAppConfig"}
    assert described["$defs"]["WhatsAppConfig"]["properties"]["files"] == {"$ref": "#/$defs/FilesConfig"}


# -- names that a program emits under ----------------------------------------------------------

ROUTED = """
[source.whatsapp]
verify = "none"
[destination.crm]
url = "https://crm.example"
[[route]]
from = "{name}"
to = "crm"
"""


@pytest.mark.parametrize("name", ["app", "answers", "orders"])
def test_a_route_may_begin_where_a_program_emits(name: str, tmp_path: Path) -> None:
    read = loaded(ROUTED.format(name=name) + f"[watermark]\ndaily_volume = {{ {name} = 1000 }}", tmp_path)
    assert read.config.route[0].from_ == name


@pytest.mark.parametrize("name", ["whatsap", "watsapp", "whats-app"])
def test_a_misspelt_source_is_told(name: str, tmp_path: Path) -> None:
    (line,) = refused(ROUTED.format(name=name), tmp_path)
    assert f'there is no source "{name}"; did you mean "whatsapp"?' in line


def test_what_is_no_name_is_told(tmp_path: Path) -> None:
    (line,) = refused(ROUTED.format(name="The App"), tmp_path)
    assert '"The App" is not a name for a source' in line


def test_a_volume_is_turned_off_by_nought_or_by_name(tmp_path: Path) -> None:
    read = loaded(ROUTED.format(name="app") + '[watermark]\ndaily_volume = { whatsapp = "off", app = 0 }', tmp_path)
    assert read.config.watermark.daily_volume == {"whatsapp": 0, "app": 0}
