"""Every block of the documents is held against the program: Python runs, settings are good, commands exist."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from oncehook.cli import cli
from oncehook.settings import load
from tests import certificates
from tests.docs.blocks import PAGES, ROOT, Block, all_blocks, anchors, blocks, commands, links, simple_commands

MOST_FRAGMENTS = 8
SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEY = bytes(range(32)).hex()
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def place(block: Block) -> str:
    return block.place


# -- Python ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=name)
def test_programs_run(page: Path, tmp_path: Path) -> None:
    secrets = set(re.findall(r'environ\["(\w+)"\]|_env="(\w+)"', page.read_text()))
    env = {variable: SECRET for pair in secrets for variable in pair if variable}
    env |= dict.fromkeys((f"ONCEHOOK_S3_{word}" for word in ("BUCKET", "REGION", "ACCESS_KEY", "SECRET_KEY")), "files")
    if "export ONCEHOOK_SECRET_KEY=" in page.read_text():
        env["ONCEHOOK_SECRET_KEY"] = base64.b64encode(bytes(range(32))).decode()
    (tmp_path / "oncehook.toml").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.programs", str(page)],
        cwd=tmp_path,
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_fragments_are_few_and_say_why() -> None:
    """What does not run by itself names the test that runs it in its place."""
    fragments = [block for block in all_blocks("python", "toml", "console") if block.fragment is not None]
    assert len(fragments) <= MOST_FRAGMENTS, [block.place for block in fragments]
    for block in fragments:
        tests = re.findall(r"tests/[\w/]+\.py", block.fragment or "")
        assert tests, f"{block.place}: the reason names no test"
        assert all((ROOT / test).is_file() for test in tests), block.place


def test_programs_are_called_python() -> None:
    """Other names for it would be a way round these tests."""
    assert not [block.place for block in all_blocks("py", "py3", "python3", "pycon", "shell", "bash", "sh")]


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", all_blocks("toml"), ids=place)
def test_settings_are_good(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tomllib.loads(block.text)
    if block.fragment is not None or block.text.startswith("# pyproject.toml"):
        return
    said = KEY if "encrypt" in tomllib.loads(block.text) else SECRET
    env = dict.fromkeys(re.findall(r'env = "(\w+)"', block.text), said)
    env |= dict.fromkeys(re.findall(r'^url = \{ env = "(\w+)"', block.text, re.MULTILINE), "https://there.example/")
    monkeypatch.chdir(tmp_path)
    for secret in re.findall(r'file = "([^"/]+)"', block.text):
        (tmp_path / secret).write_text(said)
    if 'ca = "ca.pem"' in block.text:
        certificates.make("there.example", tmp_path)[0].rename(tmp_path / "ca.pem")
    (tmp_path / "oncehook.toml").write_text(block.text + "".join(stand_ins(tomllib.loads(block.text))))
    load(tmp_path / "oncehook.toml", env)


def stand_ins(settings: dict[str, Any]) -> Iterator[str]:
    """What a block names and another one on the page defines."""
    routes = settings.get("route", [])
    sources = {route["from"] for route in routes} | set(settings.get("watermark", {}).get("daily_volume", {}))
    for one in sources - set(settings.get("source", {})):
        yield f'\n[source.{one}]\nverify = "none"\n'
    for one in {route["to"] for route in routes} - set(settings.get("destination", {})):
        yield f'\n[destination.{one}]\nurl = "https://there.example/"\n'


# -- commands ----------------------------------------------------------------------------------


def check(words: list[str]) -> None:
    """Raises click's own error for a command or option that is not there."""
    command: click.Command = cli
    context = click.Context(cli, info_name="oncehook")
    rest = words
    while isinstance(command, click.Group):
        rest = [word for word in rest if word not in ("-h", "--help", "--version")]
        if not rest:
            return
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"No such command: {rest[0]}")
        context = click.Context(found, info_name=rest[0], parent=context)
        command, rest = found, rest[1:]
    _, left, _ = command.make_parser(context).parse_args(list(rest))
    if left:
        raise click.UsageError(f"More than it takes: {left}")


def oncehook_words(words: list[str]) -> list[str] | None:
    """What follows `oncehook` in a command line; None: it is something else."""
    for at, word in enumerate(words[:3]):
        if word.rpartition("/")[2] == "oncehook":
            return words[at + 1 :]
    return None


@pytest.mark.parametrize("block", all_blocks("console"), ids=place)
def test_commands_and_their_options_exist(block: Block) -> None:
    assert block.fragment is None, "a command is short enough to be right"
    for words in commands(block):
        ours = oncehook_words(words)
        if ours is not None and words[0] != "pip":
            check(ours)
        elif words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file(), words[0]
        elif "pip" in words[:3] or "uv" in words[:1]:
            for extras in re.findall(r"oncehook\[([\w,]+)\]", " ".join(words)):
                assert set(extras.split(",")) <= EXTRAS, words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_the_text_exist(page: Path) -> None:
    """Inline code that begins with `oncehook ` and a command."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for said in re.findall(r"`(oncehook [a-z][^`\n]*)`", text):
        for words in simple_commands(said.replace("…", "X")):
            if words[0] == "oncehook":
                check(words[1:])


def test_the_checks_can_fail() -> None:
    with pytest.raises(click.UsageError):
        check(["relpay"])
    with pytest.raises(click.NoSuchOption):
        check(["serve", "--prot", "1"])
    with pytest.raises(click.UsageError):
        check(["version", "twice"])
    check(["db", "migrate"])


# -- links -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_their_place(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), f"{name(page)} links to {path}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)} links to {path}#{anchor}"


def test_the_list_for_machines_leads_to_pages() -> None:
    text = (ROOT / "docs/llms.txt").read_text()
    targets = set(re.findall(r"\]\(([^)]+)\)", text))
    assert all((ROOT / "docs" / target).is_file() for target in targets)
    written = {
        str(p.relative_to(ROOT / "docs"))
        for part in ("explanation", "reference")
        for p in (ROOT / "docs" / part).glob("*.md")
    }
    assert written <= targets, "a page is missing from docs/llms.txt"
