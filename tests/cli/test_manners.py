"""What holds for every command: variables, -q and -v, help that imports little, pipes that are closed early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from oncehook import clock
from oncehook.cli import COMMANDS, cli
from oncehook.cli.help import HelpContext
from oncehook.cli.output import Progress
from tests.acceptance.test_admin_cli import EVERY, PAGE, Admin

HEAVY = (
    "aiohttp", "cryptography", "httptools", "jinja2", "jsonpath_rfc9535", "psycopg", "starlette",
    "uvicorn", "uvloop", "oncehook.inbox", "oncehook.presets",
)  # fmt: skip
OF_HELP = """
import sys
sys.argv = ["oncehook", {name!r}, "--help"]
from oncehook.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
print("loaded:", *[name for name in {heavy!r} if name in sys.modules])
"""
LOOK_AND_ACT = (
    "tail", "forward", "events", "show", "open", "replay", "dead", "dead discard", "pause", "resume", "sources",
    "destinations", "stats", "import keys", "export", "erase",
)  # fmt: skip


@pytest.mark.parametrize("name", [*LOOK_AND_ACT[:5], "stats", "import", "export", "db", "completion", "serve", "init"])
def test_help_imports_nothing_heavy(name: str) -> None:
    program = OF_HELP.format(name=name.split()[0], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


@pytest.mark.parametrize("name", LOOK_AND_ACT)
def test_every_command_that_looks_or_acts_can_be_used_from_afar(name: str) -> None:
    options = {option for one in EVERY[name].params for option in one.opts}
    assert {"--server", "--token-env", "--config", "--app"} <= options


@pytest.mark.parametrize("name", EVERY)
def test_every_option_is_a_variable_and_help_says_which_in_its_last_line(name: str) -> None:
    command = EVERY[name]
    context = HelpContext(command, terminal_width=4000, max_content_width=4000)
    *above, said = command.get_help(context).strip().splitlines()
    prefix = f"ONCEHOOK_{name.upper().replace(' ', '_').replace('-', '_')}_"
    for option in command.params:
        if isinstance(option, click.Option) and not (option.is_flag and not option.is_bool_flag):
            # Ours first; behind it may stand what people have from other programs.
            first, *others = [option.envvar] if isinstance(option.envvar, str) else option.envvar or [""]
            if name == "token" and not first:
                continue  # ONCEHOOK_TOKEN_… are tokens
            assert first.startswith("ONCEHOOK_")
            named = prefix + "…" if first.startswith(prefix) and first not in said else first
            assert all(word in said for word in (named, *others)), option.name
    assert "env var" not in "".join(above)


def test_no_variable_means_two_things() -> None:
    """One that is shared is shared on purpose; another belongs to one command, or to the WhatsApp and claims ones."""
    shared = {"APP", "WIDE", "CONFIG", "SERVER", "TOKEN_ENV", "JSON", "QUIET", "VERBOSE"}
    for name, command in EVERY.items():
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.envvar, str):
                rest = option.envvar.removeprefix("ONCEHOOK_")
                own = rest.startswith((f"{name.upper().replace(' ', '_').replace('-', '_')}_", "WHATSAPP_", "CLAIMS"))
                assert own or rest in shared, (name, option.envvar)


def test_a_variable_says_what_the_option_would(here: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    here.good("pause", "crm")
    here.send("a", "b", "c")
    monkeypatch.setenv("ONCEHOOK_EVENTS_LIMIT", "2")
    monkeypatch.setenv("ONCEHOOK_JSON", "1")
    done = here.good("events")
    assert len(done.out.splitlines()) == 2
    assert "not a setting" not in done.err
    assert len(here.good("events", "--limit", "3").out.splitlines()) == 3, "what is said counts more"


def test_quiet_and_verbose(here: Admin) -> None:
    here.die("o1")
    asked = ("replay", "--query", "status:dead", "--yes")
    assert here.good("events", "-v").err.startswith("asking http://127.0.0.1:")
    assert here.good(*asked, "-q").err == ""
    wrong = here.run("events", "nonsense:1", "-q")
    assert (wrong.code, wrong.out, bool(wrong.err)) == (2, "", True), "errors are told all the same"


def test_a_reader_that_has_enough_is_no_failure(here: Admin) -> None:
    here.good("pause", "crm")
    here.send(*(f"o{n}" for n in range(60)))
    command = f"{sys.executable} -m oncehook events --all --json | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=here.receiver.folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


# -- completion --------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Callable[..., Any], shell: str) -> None:
    done = run("completion", shell)
    assert done.code == 0
    assert "_ONCEHOOK_COMPLETE" in done.out


def test_what_is_completed() -> None:
    shell = ShellComplete(cli, {}, "oncehook", "_ONCEHOOK_COMPLETE")
    assert {one.value for one in shell.get_completions([], "s")} == {n for n in COMMANDS if n.startswith("s")}
    assert "restored" in {one.value for one in shell.get_completions(["db"], "")}
    assert "--server" in {one.value for one in shell.get_completions(["events"], "--s")}
    assert {one.value for one in shell.get_completions(["completion"], "")} == {"bash", "zsh", "fish"}


def test_bash_asks_and_is_answered(tmp_path: Path) -> None:
    """As bash would call it: the variable says that it wants words."""
    program = "import sys; sys.argv = ['oncehook']; from oncehook.cli import main; main()"
    env = {"_ONCEHOOK_COMPLETE": "bash_complete", "COMP_WORDS": "oncehook ta", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.split() == ["plain,tail"], done.stderr


# -- progress ----------------------------------------------------------------------------------


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("working", 10) as bar:
        bar.add(5)
        assert bar.line().startswith("working  [############............]  50%  5/10")
    assert capsys.readouterr() == ("", "")


def test_progress_without_an_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "perf", lambda: 7.0)
    bar = Progress("pruning", unit="events")
    bar.reach(1500)
    assert bar.line() == "pruning  1,500 events  0s"


def test_the_page_says_what_all_commands_have() -> None:
    for said in ("`-q`", "`-v`", "NO_COLOR", "ONCEHOOK_CONFIG", "ONCEHOOK_APP", "ONCEHOOK_JSON", "--wide"):
        assert said in PAGE
