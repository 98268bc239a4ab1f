"""Every command of the documents works as it is printed: typed in a shell, against real servers, its output compared.

One test for each page. A reader goes through it from top to bottom: files that it shows are written, commands are typed
in its order, servers run until another takes their place or the page ends. What differs from a reader's folder is in
the tables below, and nowhere else. A command that is neither typed nor in `NOT_RUN` cannot be: everything is typed.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, blocks
from tests.docs.reader import SECRET, Reader, clean_environment, steps
from tests.docs.scenes import SCENES, TROUBLED, scene_of
from tests.servers import free_port

NOT_RUN = {
    r"docker (build|run|compose) ": "needs Docker's engine; tests/deploy/test_files.py reads its files",
    r"kubectl ": "needs a cluster; tests/deploy/test_files.py reads the manifests",
    r"helm ": "needs a cluster; tests/deploy/test_files.py reads the chart",
    r"systemctl ": "needs systemd; the scene starts what the unit would",
    r"journalctl ": "needs systemd's journal",
    r"(python3 -m venv \S+ && \S+/)?pip install ": "needs an index; what pages use is installed here",
    r"(cloudflared|ngrok|tailscale) ": "needs an account and the network, of which we are no part",
    r"opentelemetry-instrument ": "needs a package with another SDK; tests/deploy/test_traces.py has its own",
    r"oncehook import archive ": "needs an archive of that day; tests/acceptance/test_archive.py brings one back",
    r"scripts/demo": "installs from an index; tests/acceptance/test_demo.py runs what it starts",
    r"(TORTURE_\w+=\w+ )*scripts/test": "is what runs these tests",
    r"scripts/torture ": "takes minutes; tests/torture/test_torture.py runs each of its parts",
    r"scripts/fuzz ": "takes as long as it is told to; tests/torture/test_review.py runs the same parts",
    r"\.venv/bin/python -m tests\.torture\.fuzz_targets ": "needs atheris; tests/torture/test_fuzz.py drives them",
    r"scripts/bench": "takes many minutes; tests/bench runs its parts",
    r"\.venv/bin/python -m tests\.torture\.seeded": "takes many minutes; tests/torture/test_seeded.py runs it",
    r'curl "https://api\.telegram\.org': "is Telegram's",
    r'eval "\$\(oncehook completion zsh\)"': "is for zsh; tests/cli/test_manners.py asks for the script",
}
"""Commands that cannot be typed here, by how they begin, and why."""

FOLLOWED_ELSEWHERE = {
    "docs/tutorial/first-five-minutes.md": "tests/acceptance/test_tutorial.py",
    # the same commands, which are compared with those
    "docs/tutorial/primeiros-cinco-minutos.md": "tests/unit/test_language.py",
    "docs/tutorial/primeros-cinco-minutos.md": "tests/unit/test_language.py",
}

MEANWHILE = {"oncehook forward stripe --to http://localhost:8000/hooks": "oncehook send stripe invoice.paid"}
"""What somebody else does while a command runs."""

NO_DUPLICATE = {
    "oncehook send acuity rescheduled --repeat 2": "it has no key, as the page says",
    "oncehook send twilio message.delivered --repeat 2": "the answer is TwiML, which says neither",
}
"""Repeated hooks whose second answer does not say `duplicate`, and why."""

REWRITES = {
    "/opt/oncehook/bin/": "",
    "/etc/oncehook": "{folder}/etc/oncehook",
    "/etc/systemd/system": "{folder}/etc/systemd/system",
    "/var/lib/oncehook": "{folder}",
    "/backups/": "{folder}/backups/",
    "/backup/": "{folder}/backup/",
    "whsec_…": SECRET,
}
"""What is printed, and what is typed. Ports (4020, 8000) and ids are added where they become known."""

ENVIRONMENT = {
    "ONCEHOOK_BENCH_SECONDS": "0.2",
}
"""What keeps commands short."""

STAND_INS = {
    "jq": "import json, sys\nfor line in sys.stdin: print(json.loads(line)[sys.argv[2][1:]])",
    "sqlite3": "import sqlite3, sys\nfor row in sqlite3.connect(sys.argv[1]).execute(sys.argv[2]): print(*row)",
    "psql": "import psycopg, sys\nfor row in psycopg.connect('').execute(sys.argv[2]): print(*row)",
    "openssl": "import secrets, sys\nprint(secrets.token_hex(int(sys.argv[3])))",
    "curl": (
        "import sys, urllib.request as web\n"
        "given = list(zip(sys.argv, sys.argv[1:]))\n"
        "headers = dict(one.split(': ') for word, one in given if word == '-H')\n"
        "data = next((one.encode() for word, one in given if word == '-d'), None)\n"
        "print(web.urlopen(web.Request(sys.argv[-1], data, headers)).read().decode())"
    ),
}
"""Other people's tools that pages use, for machines that have nothing but Python."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_commands(page: Path) -> bool:
    return any(block.language == "console" for block in blocks(page))


FOLLOWED = [page for page in PAGES if has_commands(page) and name(page) not in FOLLOWED_ELSEWHERE]


# -- following a page --------------------------------------------------------------------------


def arrive(folder: Path, page: Path) -> Reader:
    """A reader in a folder of their own, with what everybody has, and the secrets that settings ask for."""
    folder.mkdir()
    port, other = str(free_port()), str(free_port())
    env = clean_environment(folder) | ENVIRONMENT | {"ONCEHOOK_SERVER__PORT": port}
    env |= dict.fromkeys(re.findall(r'env = "(\w+)"', page.read_text() + TROUBLED), SECRET)
    rewrites = {printed: typed.format(folder=folder) for printed, typed in REWRITES.items()}
    (folder / "bin").mkdir()
    for tool, program in STAND_INS.items():
        if shutil.which(tool) is None:
            (folder / "bin" / tool).write_text(f"#!{sys.executable}\n{program}\n")
            (folder / "bin" / tool).chmod(0o755)
    return Reader(folder, env, rewrites | {"4020": port, "8000": other})


@dataclass(frozen=True)
class Part:
    """A block, where it stands, and the paragraph right before it."""

    block: Block
    section: str
    before: str


def parts(page: Path) -> Iterator[Part]:
    lines = page.read_text().splitlines()
    for block in blocks(page):
        above = "\n".join(lines[: block.line - 1])
        text = re.sub(r"^```.*?^```", "", above, flags=re.DOTALL | re.MULTILINE)
        yield Part(block, re.findall(r"^#+ (.+)$", text, re.MULTILINE)[-1], above.rstrip().rpartition("\n\n")[2])


def file_of(block: Block) -> str | None:
    """The file that a block is, if any: settings without a name are oncehook.toml."""
    if block.language == "python":
        return block.file
    if block.language == "toml" and block.fragment is None:
        return "oncehook.toml"
    return None


def is_run(command: str) -> bool:
    return not any(re.match(begin, command) for begin in NOT_RUN)


def follow(page: Path, called: str, folder: Path) -> None:
    """Go through a page. Raises AssertionError at the first command that does not do what is printed."""
    for number, (listed, together) in enumerate(groupby(parts(page), lambda part: scene_of(called, part.section))):
        with arrive(folder / str(number), page) as reader:
            if listed is not None:
                SCENES[listed](reader, page)
            for part in together:
                if part.block.language == "console":
                    if re.search("stop the server", part.before, re.IGNORECASE):
                        reader.stop()
                    type_all(reader, part.block)
                elif listed is None and (file := file_of(part.block)) is not None:
                    reader.write(file, part.block.text)


def type_all(reader: Reader, block: Block) -> None:
    for step in steps(block):
        if not is_run(step.command):
            continue
        shown = reader.type(step.command, step.printed, MEANWHILE.get(step.command))
        if " --repeat 2" in step.command and step.command not in NO_DUPLICATE:
            assert "duplicate" in shown, f"$ {step.command}\n{shown}\nThe second is no duplicate."


@pytest.mark.parametrize("page", FOLLOWED, ids=name)
def test_everything_works_as_it_is_printed(page: Path, tmp_path: Path) -> None:
    follow(page, name(page), tmp_path)


# -- the tables --------------------------------------------------------------------------------

COMMANDS = [
    step.command for page in PAGES for block in blocks(page) if block.language == "console" for step in steps(block)
]


@pytest.mark.parametrize("begin", NOT_RUN)
def test_what_is_not_run_is_still_printed(begin: str) -> None:
    assert any(re.match(begin, command) for command in COMMANDS), "no page has such a command any more"
    named = re.findall(r"tests/[\w/]+(?:\.py)?", NOT_RUN[begin])
    assert all((ROOT / test).exists() for test in named), named


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_stand_in_console_blocks(page: Path) -> None:
    """Elsewhere nobody would try them."""
    for block in blocks(page):
        if block.language != "console":
            assert not re.search(r"^(\$ |oncehook |scripts/|curl )", block.text, re.MULTILINE), block.place


def test_what_the_tables_speak_of_is_still_printed() -> None:
    typed = "\n".join(command for command in COMMANDS if is_run(command))
    assert not [printed for printed in REWRITES if printed not in typed]
    assert not [command for command in [*MEANWHILE, *NO_DUPLICATE] if command not in COMMANDS]
    assert not [tool for tool in STAND_INS if not re.search(rf"(^|[|] ?){tool} ", typed, re.MULTILINE)]
    played = {scene_of(name(page), part.section) for page in FOLLOWED for part in parts(page)}
    assert set(SCENES) == played - {None}


@pytest.mark.parametrize(("page", "test"), FOLLOWED_ELSEWHERE.items())
def test_what_is_followed_elsewhere_is(page: str, test: str) -> None:
    assert (ROOT / page).is_file()
    assert page in (ROOT / test).read_text()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("invoice.paid\n", "invoice.paid --twice\n"),
        ("oncehook send stripe invoice.paid --bad-signature", "flyctl deploy"),
        (
            "oncehook send stripe invoice.paid\n",
            "$ oncehook send stripe invoice.paid\n→ 200 in 4 ms   evt_…   duplicate\n$ ",
        ),
    ],
    ids=["an option that is not there", "a command that is not there", "another output"],
)
def test_a_page_that_is_wrong_is_found_out(right: str, wrong: str, tmp_path: Path) -> None:
    called = "docs/providers/stripe.md"
    text = (ROOT / called).read_text()
    assert right in text
    (tmp_path / "stripe.md").write_text(text.replace(right, wrong, 1))
    with pytest.raises(AssertionError, match=r"^\$ "):
        follow(tmp_path / "stripe.md", called, tmp_path)
