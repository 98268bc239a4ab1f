"""Commands that run until a signal comes: serve, worker and demo.

SIGTERM and SIGINT stop them in order. SIGHUP makes serve and worker restart with changed settings, if those are good;
`serve --reload` restarts when a file of the program changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from oncehook.cli.complete import complete_destination
from oncehook.cli.options import Setup, build_setup, config_option, takes_app, voice
from oncehook.cli.output import can_browse, message, say
from oncehook.errors import ConfigError, OncehookError
from oncehook.logs import set_up_logging
from oncehook.notify import supervise

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

log = logging.getLogger("oncehook.settings")

log_level_option = click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log."
)

# -- serve -------------------------------------------------------------------------------------


@click.command("serve")
@takes_app
@config_option
@click.option("--host", help="Address to listen on (default: 127.0.0.1).")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on (default: 4020; 0: any).")
@click.option(
    "--receivers", type=click.IntRange(1, 64), help="Processes that take arrivals in (default: 1, the server itself)."
)
@click.option("--no-worker", is_flag=True, help="Receive only; a worker elsewhere does the work.")
@click.option("--no-ui", is_flag=True, help="No dashboard; the API stays.")
@click.option("--reload", is_flag=True, help="Start again when a Python file below this folder or the settings change.")
@click.option("--open", "open_", is_flag=True, help="Open the dashboard in your browser.")
@log_level_option
def serve(
    app: str | None,
    config_file: Path | None,
    host: str | None,
    port: int | None,
    receivers: int | None,
    no_worker: bool,
    no_ui: bool,
    reload: bool,
    open_: bool,
    log_level: str | None,
) -> int:
    """Receive hooks, keep them, and deliver them, as oncehook.toml and APP (module:inbox) define it."""
    level = log_level or voice.log_level
    if reload:
        values = {
            "--config": config_file, "--host": host, "--port": port, "--receivers": receivers, "--log-level": level,
        }  # fmt: skip
        flags = {"--no-worker": no_worker, "--no-ui": no_ui, "--quiet": voice.quiet}
        arguments = [*([app] if app else []), *(name for name, is_set in flags.items() if is_set)]
        arguments += [f"{name}={value}" for name, value in values.items() if value is not None]
        files = [config_file or Path("oncehook.toml"), Path("pyproject.toml")]
        return _serve_reloading(arguments, files, at_first=["--open"] if open_ else [])
    from oncehook.settings.stored import make_key_file
    from oncehook.settings.values import is_loopback

    # As flags of the settings, so that the checks see the address that is really listened on (S28).
    settings = {
        "server.host": host, "server.port": port, "server.receivers": receivers, "server.log_level": level,
    }  # fmt: skip
    setup = _build(app, config_file, settings)
    if setup.development and not is_loopback(setup.config.server.host):
        raise ConfigError("Without settings, serve listens on this machine only.", hint="Write an oncehook.toml first.")
    if setup.development:
        make_key_file(setup.config.store)
    restart = Restart(app, config_file, settings)
    restart.run(_serve(setup, restart, work=not no_worker, ui=not no_ui, browse=open_), setup.inbox)
    return 0


def _build(app: str | None, config_file: Path | None, settings: Mapping[str, object]) -> Setup:
    gc.disable()  # until `_freeze_objects`: hardly anything that a start makes is garbage

    from oncehook.traces import find_traces

    setup = build_setup(app, config_file, settings)
    setup.inbox.observer.verbose = set_up_logging(setup.config.server.log_level)
    setup.inbox.traces = setup.inbox.traces or find_traces()
    return setup


async def _serve(setup: Setup, restart: Restart, *, work: bool, ui: bool, browse: bool) -> None:
    from oncehook.web.server import serve_inbox

    with restart.on_hangup():
        async with supervise() as supervisor, setup.inbox.running(work=work):

            def stopping() -> None:
                restart.stopping()
                supervisor.reloading() if restart.is_wanted else supervisor.stopping()

            def ready(address: str, link: str | None) -> None:
                freeze_objects()
                _greet(setup, address, link)
                supervisor.ready(f"receiving on {address}")
                restart.ready()
                if browse and link:
                    import webbrowser

                    webbrowser.open(link)

            await setup.inbox.store.note_settings(setup.origin, setup.loaded.digests())
            await serve_inbox(
                setup.inbox,
                setup.config.server,
                ui=ui,
                on_ready=ready,
                on_stop=stopping,
                receiver_command=[sys.executable, "-m", "oncehook.cli.receiver", restart.arguments],
            )


def freeze_objects() -> None:
    """Exempt all loaded objects from garbage collection: its pauses caused half of the slowest answers under load."""
    gc.freeze()
    gc.enable()


def _greet(setup: Setup, address: str, link: str | None) -> None:
    if not sys.stderr.isatty():
        say([f"oncehook ready on {address}", *([f"dashboard  {link}"] if link else [])], err=True)
        return
    facts = {"store": setup.config.shown_store, "receive": f"{address}/in/{{source}}", "dashboard": link}
    if setup.development:
        facts["note"] = "no oncehook.toml here: every preset under its own name, from this machine only"
        facts["try"] = "oncehook send dev hello --repeat 2"
    else:
        facts["sources"] = ", ".join(setup.inbox.sources) or "none yet"
        facts["settings"] = setup.origin
    shown = ((f"  {name:<10} ", value) for name, value in facts.items() if value)
    say((line for name, value in shown for line in message(value, name)), err=True)


# -- worker ------------------------------------------------------------------------------------


@click.command("worker")
@takes_app
@config_option
@click.option("--concurrency", type=click.IntRange(1), default=1000, help="Attempts at once, over all destinations.")
@click.option(
    "--destination", "only", multiple=True, shell_complete=complete_destination,
    help="Work for this destination only; may be repeated.",
)  # fmt: skip
@click.option("--drain", is_flag=True, help="Stop when nothing is left to do, retries included.")
@click.option("--listen", metavar="HOST:PORT", help="Answer /livez, /readyz and /metrics here.")
@log_level_option
def worker(
    app: str | None, config_file: Path | None, only: Sequence[str], log_level: str | None, **options: Any
) -> None:
    """Deliver what waits, for the destinations of oncehook.toml and of APP (module:inbox)."""
    from oncehook.cli.api import check_known

    settings = {"server.log_level": log_level or voice.log_level}
    setup = _build(app, config_file, settings)
    known = setup.inbox.destinations
    if not known:
        raise ConfigError("There is nothing to work for.", hint="Add a [destination.NAME] and a [[route]] to it.")
    for name in only:
        check_known(name, known, "destination")
    restart = Restart(app, config_file, settings)
    restart.run(_work(setup, restart, only, **options), setup.inbox)


async def _work(
    setup: Setup, restart: Restart, only: Sequence[str], concurrency: int, drain: bool, listen: str | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        """Stop in order. A second signal meets Python's own handler and ends the process at once, which is safe,
        too."""
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    running = setup.inbox.running(work=True, only=only, concurrency=concurrency)
    with restart.on_hangup():
        async with supervise() as supervisor, running, _probes(setup, listen):
            freeze_objects()
            names = ", ".join(only or setup.inbox.destinations)
            say([f"oncehook worker ready for {names}"], err=True)
            supervisor.ready(f"working for {names}")
            restart.ready()
            await _first(stop.wait(), *([setup.inbox.drain()] if drain else []))
            restart.stopping()
            supervisor.reloading() if restart.is_wanted else supervisor.stopping()
            setup.inbox.wind_down()


def _probes(setup: Setup, listen: str | None) -> contextlib.AbstractAsyncContextManager[None]:
    if listen is None:
        return contextlib.nullcontext()
    from oncehook.web.server import serve_probes

    return serve_probes(setup.inbox, listen)


async def _first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these ends, and cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


# -- restart on SIGHUP -------------------------------------------------------------------------

_CHECK: Final = (
    "import json, sys; from oncehook.cli.run import check_settings; check_settings(*json.loads(sys.argv[1]))"
)


class Restart:
    """A restart on SIGHUP of a process that runs on these settings.

    A separate process reads the settings first, as the next start would. If they are wrong, it prints why and this
    process goes on; otherwise this process stops as for SIGTERM, and becomes the next one under the same id. On a
    terminal the signal means that the terminal is gone: then it only stops.
    """

    def __init__(self, app: str | None, config_file: Path | None, settings: Mapping[str, object]) -> None:
        self.is_wanted = False
        """Start again when everything has stopped."""
        self._is_ready = self._is_stopping = self._came_early = False
        self.arguments = json.dumps([app, config_file and str(config_file), dict(settings)])
        self._check: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def on_hangup(self) -> Iterator[None]:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_signal)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def ready(self) -> None:
        """Accept the signal from now on. An earlier one counts now."""
        self._is_ready = True
        if self._came_early:
            self._on_signal()

    def stopping(self) -> None:
        """Note that everything stops. A second call cancels the restart."""
        self.is_wanted = self.is_wanted and not self._is_stopping
        self._is_stopping = True

    def run(self, main: Coroutine[None, None, None], inbox: Inbox) -> None:
        """Run the process until it ends; then restart it, if that was requested."""
        import uvloop

        async def whole() -> None:
            await main
            if inbox.left_behind:  # a coroutine that cannot be cancelled would block the loop's end
                self._end(inbox)

        uvloop.run(whole())
        self._end(inbox)

    def _end(self, inbox: Inbox) -> None:
        if self.is_wanted:
            logging.shutdown()
            os.environ.pop("ONCEHOOK_SERVE_OPEN", None)
            arguments = [word for word in sys.orig_argv[1:] if word != "--open"]
            os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - ourselves
        if inbox.left_behind:
            # Python would wait for the handler's thread, while its lease lapses and another worker begins beside it.
            logging.shutdown()
            os._exit(0)

    def _on_signal(self) -> None:
        if not self._is_ready:
            self._came_early = True
        elif self._is_stopping or (self._check is not None and not self._check.done()):
            return
        elif sys.stderr.isatty():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._check = asyncio.create_task(self._check_and_stop(), name="oncehook-hangup")

    async def _check_and_stop(self) -> None:
        program = [sys.executable, "-c", _CHECK, self.arguments]
        check = await asyncio.create_subprocess_exec(*program, stdin=asyncio.subprocess.DEVNULL)
        if await check.wait():
            log.error("settings.refused")
        elif not self._is_stopping:
            log.info("settings.taken")
            self.is_wanted = True
            os.kill(os.getpid(), signal.SIGTERM)


def check_settings(app: str | None, config_file: str | None, settings: Mapping[str, object]) -> NoReturn:
    """Exit with 0 if a process could start with these settings; otherwise print why not."""
    try:
        build_setup(app, Path(config_file) if config_file else None, settings)
    except OncehookError as error:
        sys.exit(f"oncehook: {error}")
    sys.exit(0)


# -- restart on changed files ------------------------------------------------------------------

LOOK_EVERY: Final = 0.3
STOP_SECONDS: Final = 40.0
"""Seconds the old process has to end: more than it gives its attempts."""


def _serve_reloading(arguments: Sequence[str], settings: Sequence[Path], *, at_first: Sequence[str]) -> int:
    """Run `serve` in a process of its own, started anew when a watched file changes; return its last exit code.

    Watches the Python files below this folder and the settings. The old process ends before the next one starts, so
    that a SQLite store is free again. One that ends by itself starts again with the next change.
    """
    stop = _StopSignals()
    before = modification_times(Path.cwd(), settings)
    process = _start_server([*arguments, *at_first])
    while not stop.came:
        stop.wait(process, LOOK_EVERY)
        now = modification_times(Path.cwd(), settings)
        if now == before or stop.came:
            continue
        changed = min(str(path) for path in {*now, *before} if now.get(path) != before.get(path))
        click.echo(f"{os.path.relpath(changed)} changed; starting again", err=True)
        before = now
        _stop_server(process)
        process = _start_server(arguments)
    return _stop_server(process)


def _start_server(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != "ONCEHOOK_SERVE_RELOAD"}
    return subprocess.Popen([sys.executable, "-m", "oncehook", "serve", *arguments], env=env)  # noqa: S603 - ourselves


def _stop_server(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _StopSignals:
    """The stop signals: the first is remembered, a second goes straight to the server."""

    def __init__(self) -> None:
        self.came = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.came and self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self.came = True

    def wait(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait while this process runs."""
        self._process = process
        threading.Event().wait(seconds)


def modification_times(folder: Path, settings: Sequence[Path]) -> Mapping[Path, int]:
    found = {}
    for path in [*_python_files(folder), *settings]:
        with contextlib.suppress(OSError):  # removed again, or not created yet
            found[path] = path.stat().st_mtime_ns
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    ignored = {"node_modules", "__pycache__", "site-packages"}
    for here, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in ignored and not name.startswith(".")]
        yield from (Path(here) / name for name in files if name.endswith(".py"))


# -- demo --------------------------------------------------------------------------------------


@click.command("demo")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop by itself after this long.")
@click.option("--rate", type=click.FloatRange(0.1, 100), default=0.2, show_default=True, help="Hooks a second.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on (default: 4020, or any when that is taken)."
)
@click.option("--no-open", is_flag=True, help="Do not open the dashboard in your browser.")
def demo(seconds: float | None, rate: float, port: int | None, no_open: bool) -> None:
    """Run a living inbox until Ctrl-C, in a folder that is removed at the end. With -v, a line for every arrival and
    every attempt."""
    say(["  preparing  a day of history; about half a minute"], err=True)

    import shutil
    import tempfile

    import uvloop

    from oncehook.demo.running import free_port, run

    free = free_port(port)
    browse = not no_open and can_browse()
    folder = Path(tempfile.mkdtemp(prefix="oncehook-demo-"))
    try:
        uvloop.run(run(folder, seconds, rate, free, browse=browse, verbose=voice.verbose))
    except (KeyboardInterrupt, asyncio.CancelledError):  # nothing was running yet
        click.echo(err=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
