"""`oncehook serve`: receive hooks until told to stop."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

import click

from oncehook.cli import reload as reloading
from oncehook.cli.hangup import Hangup
from oncehook.cli.manners import voice
from oncehook.cli.setup import Setup, config_option, from_app, from_settings, settle_in
from oncehook.cli.showing import say
from oncehook.errors import ConfigError
from oncehook.logs import set_up_logging
from oncehook.notify import supervised


@click.command("serve")
@click.argument("app", required=False)
@config_option
@click.option("--host", help="Address to listen on (default: 127.0.0.1).", show_envvar=True)
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on (default: 4020; 0: any).", show_envvar=True
)
@click.option("--no-worker", is_flag=True, help="Receive only; a worker elsewhere does the work.")
@click.option("--no-ui", is_flag=True, help="No dashboard; the API stays.")
@click.option("--reload", is_flag=True, help="Start again when a Python file below this folder or the settings change.")
@click.option("--open", "open_", is_flag=True, help="Open the dashboard in your browser.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.")
def command(
    app: str | None,
    config_file: Path | None,
    host: str | None,
    port: int | None,
    no_worker: bool,
    no_ui: bool,
    reload: bool,
    open_: bool,
    log_level: str | None,
) -> int:
    """Receive hooks, keep them, and work them off: as oncehook.toml says, and APP (module:inbox) beside it."""
    if reload:
        said = {"--config": config_file, "--host": host, "--port": port, "--log-level": log_level or voice.log_level}
        given = {"--no-worker": no_worker, "--no-ui": no_ui, "--quiet": voice.quiet}
        arguments = [*([app] if app else []), *(name for name, is_given in given.items() if is_given)]
        arguments += [f"{name}={value}" for name, value in said.items() if value is not None]
        files = [config_file or Path("oncehook.toml"), Path("pyproject.toml")]
        return reloading.run(arguments, files, at_first=["--open"] if open_ else [])
    from oncehook.settings.values import is_loopback

    # As flags of the settings, so that the checks see the address that is really listened on (S28).
    flags = {"server.host": host, "server.port": port, "server.log_level": log_level or voice.log_level}
    setup = from_app(app, config_file, flags) if app else from_settings(config_file, flags)
    server = setup.config.server
    if setup.development and not is_loopback(server.host):
        raise ConfigError("Without settings, serve listens on this machine only.", hint="Write an oncehook.toml first.")
    setup.inbox.observer.verbose = set_up_logging(server.log_level)
    run(setup, Hangup(app, config_file, flags), work=not no_worker, ui=not no_ui, browse=open_)
    return 0


def run(setup: Setup, hangup: Hangup, *, work: bool = True, ui: bool = True, browse: bool = False) -> None:
    """Serve until a signal comes."""
    from oncehook.traces import wanted

    setup.inbox.traces = setup.inbox.traces or wanted()
    hangup.run(_serve(setup, hangup, work, ui, browse), setup.inbox)


async def _serve(setup: Setup, hangup: Hangup, work: bool, ui: bool, browse: bool) -> None:
    from oncehook.web.server import serve_inbox

    with hangup.heard():
        async with supervised() as supervisor, setup.inbox.running(work=work):

            def stopping() -> None:
                hangup.stopping()
                supervisor.reloading() if hangup.is_again else supervisor.stopping()

            def ready(address: str, link: str | None) -> None:
                settle_in()
                _greet(setup, address, link)
                supervisor.ready(f"receiving on {address}")
                hangup.ready()
                if browse and link:
                    webbrowser.open(link)

            await setup.inbox.store.note_settings(setup.origin, setup.loaded.digests())
            await serve_inbox(setup.inbox, setup.config.server, ui=ui, on_ready=ready, on_stop=stopping)


def _greet(setup: Setup, address: str, link: str | None) -> None:
    lines = [("store", setup.config.shown_store), ("receive", f"{address}/in/{{source}}")]
    if link:
        lines.append(("dashboard", link))
    if setup.development:
        lines.append(("note", "no oncehook.toml here: every preset under its own name, from this machine only"))
        lines.append(("try", "oncehook send dev hello --repeat 2"))
    else:
        lines.append(("sources", ", ".join(setup.inbox.sources) or "none yet"))
        lines.append(("settings", setup.origin))
    if sys.stderr.isatty():
        say((f"  {name:<10} {text}" for name, text in lines), err=True)
    else:
        say([f"oncehook ready on {address}", *([f"dashboard  {link}"] if link else [])], err=True)
