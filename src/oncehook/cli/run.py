"""`oncehook serve`: receive hooks until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from oncehook.cli.options import Setup, config_option, from_app, from_settings, settle_in, voice
from oncehook.cli.output import say
from oncehook.errors import ConfigError
from oncehook.logs import set_up_logging
from oncehook.notify import supervised

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

log = logging.getLogger("oncehook.settings")

_PROGRAM: Final = "import json, sys; from oncehook.cli.run import prove; prove(*json.loads(sys.argv[1]))"
_ONCE_ONLY: Final = "--open"


class Hangup:
    """What to do on SIGHUP, for one process that runs on these settings."""

    def __init__(self, app: str | None, config_file: Path | None, flags: Mapping[str, object]) -> None:
        self.is_again = False
        """Begin anew when everything has stopped."""
        self._is_ready = self._is_stopping = self._is_early = False
        self._question = json.dumps([app, config_file and str(config_file), dict(flags)])
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """While the block runs, the signal is heard."""
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
        """From now on everything stops in order at SIGTERM; a signal that came earlier counts now."""
        self._is_ready = True
        if self._is_early:
            self._on_signal()

    def stopping(self) -> None:
        """Everything is being stopped. Told a second time, somebody wants an end, whatever came before."""
        self.is_again = self.is_again and not self._is_stopping
        self._is_stopping = True

    def run(self, main: Coroutine[None, None, None], inbox: Inbox) -> None:
        """Run the process's whole life; then become the next one, if that was asked for."""
        import uvloop

        async def whole() -> None:
            await main
            if inbox.left_behind:  # a coroutine that does not let itself be cancelled would hold up the loop's end
                self._end(inbox)

        uvloop.run(whole())
        self._end(inbox)

    def _end(self, inbox: Inbox) -> None:
        from oncehook.cli.options import leave

        self._begin_anew()
        leave(inbox)

    def _begin_anew(self) -> None:
        if not self.is_again:
            return
        logging.shutdown()
        os.environ.pop("ONCEHOOK_SERVE_OPEN", None)
        said = [word for word in sys.orig_argv[1:] if word != _ONCE_ONLY]
        os.execv(sys.executable, [sys.executable, *said])  # noqa: S606 - ourselves

    def _on_signal(self) -> None:
        if not self._is_ready:
            self._is_early = True
        elif self._is_stopping or (self._asking is not None and not self._asking.done()):
            return
        elif sys.stderr.isatty():
            _stop()
        else:
            self._asking = asyncio.create_task(self._ask(), name="oncehook-hangup")

    async def _ask(self) -> None:
        program = [sys.executable, "-c", _PROGRAM, self._question]
        reader = await asyncio.create_subprocess_exec(*program, stdin=asyncio.subprocess.DEVNULL)
        if await reader.wait():
            log.error("settings.refused")
        elif not self._is_stopping:
            log.info("settings.taken")
            self.is_again = True
            _stop()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def prove(app: str | None, config_file: str | None, flags: Mapping[str, object]) -> NoReturn:
    """End with 0 if a process could begin with these settings, and say why not otherwise."""
    from oncehook.cli.options import from_app, from_settings
    from oncehook.errors import OncehookError

    file = Path(config_file) if config_file else None
    try:
        from_app(app, file, flags) if app else from_settings(file, flags)
    except OncehookError as error:
        sys.exit(f"oncehook: {error}")
    sys.exit(0)


LOOK_EVERY: Final = 0.3
PATIENCE: Final = 40.0
"""Seconds the old process has to end: more than it gives its attempts."""

_PASSED_OVER: Final = frozenset({"node_modules", "__pycache__", "site-packages"})

Stamps = Mapping[Path, int]


def serve_reloading(arguments: Sequence[str], settings: Sequence[Path], *, at_first: Sequence[str] = ()) -> int:
    """Serve with these arguments until a signal comes; returns how the last process ended."""
    stop = _Stop()
    seen = stamps(Path.cwd(), settings)
    process = _start_server([*arguments, *at_first])
    while not stop.asked:
        stop.wait(process, LOOK_EVERY)
        now = stamps(Path.cwd(), settings)
        if now == seen or stop.asked:
            continue
        changed = sorted({str(path) for path in {*now, *seen} if now.get(path) != seen.get(path)})
        click.echo(f"{os.path.relpath(changed[0])} changed; starting again", err=True)
        seen = now
        end(process)
        process = _start_server(arguments)
    return end(process)


def _start_server(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != "ONCEHOOK_SERVE_RELOAD"}
    return subprocess.Popen([sys.executable, "-m", "oncehook", "serve", *arguments], env=env)  # noqa: S603 - ourselves


class _Stop:
    """Remembers that somebody wants to stop; a second signal goes straight through to the server."""

    def __init__(self) -> None:
        self.asked = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.asked and self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self.asked = True

    def wait(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Let some time pass."""
        self._process = process
        threading.Event().wait(seconds)


def end(process: subprocess.Popen[bytes]) -> int:
    """Ask it to stop, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def stamps(folder: Path, settings: Sequence[Path]) -> Stamps:
    """When each watched file was last written."""
    found = {}
    for path in [*_python_files(folder), *settings]:
        try:
            found[path] = path.stat().st_mtime_ns
        except OSError:
            continue  # gone again, or not there yet
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
        yield from (Path(here) / name for name in files if name.endswith(".py"))


@click.command("worker")
@click.argument("app", required=False)
@config_option
@click.option("--concurrency", type=click.IntRange(1), default=1000, help="Attempts at once, over all destinations.")
@click.option("--destination", "only", multiple=True, help="Work for this destination only; may be repeated.")
@click.option("--drain", is_flag=True, help="Stop when nothing is left to do, retries included.")
@click.option("--listen", metavar="HOST:PORT", help="Answer /livez, /readyz and /metrics here.", show_envvar=True)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.")
def worker(
    app: str | None,
    config_file: Path | None,
    concurrency: int,
    only: Sequence[str],
    drain: bool,
    listen: str | None,
    log_level: str | None,
) -> None:
    """Work off what waits, for the destinations of oncehook.toml and of APP (module:inbox)."""
    flags = {"server.log_level": log_level or voice.log_level}
    setup = from_app(app, config_file, flags) if app else from_settings(config_file, flags)
    _check_destinations(setup, only)
    setup.inbox.observer.verbose = set_up_logging(setup.config.server.log_level)
    from oncehook.traces import wanted

    setup.inbox.traces = setup.inbox.traces or wanted()
    hangup = Hangup(app, config_file, flags)
    hangup.run(_work(setup, hangup, concurrency, only, drain, listen), setup.inbox)


def _check_destinations(setup: Setup, only: Sequence[str]) -> None:
    known = setup.inbox.destinations
    if not known:
        raise ConfigError("There is nothing to work for.", hint="Add a [destination.NAME] and a [[route]] to it.")
    for name in only:
        if name not in known:
            raise ConfigError(f'There is no destination "{name}".', hint=f"There are: {', '.join(known)}.")


async def _work(
    setup: Setup, hangup: Hangup, concurrency: int, only: Sequence[str], drain: bool, listen: str | None
) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The second one finds the ordinary handler again and leaves at once: that is safe too, only less polite.
        loop.add_signal_handler(number, _on_signal, loop, told)
    running = setup.inbox.running(work=True, only=only, concurrency=concurrency)
    with hangup.heard():
        async with supervised() as supervisor, running, _probed(setup, listen):
            settle_in()
            whom = ", ".join(only or setup.inbox.destinations)
            say([f"oncehook worker ready for {whom}"], err=True)
            supervisor.ready(f"working for {whom}")
            hangup.ready()
            if drain:
                await _first(setup.inbox.drain(), told.wait())
            else:
                await told.wait()
            hangup.stopping()
            supervisor.reloading() if hangup.is_again else supervisor.stopping()
            setup.inbox.wind_down()


def _probed(setup: Setup, listen: str | None) -> contextlib.AbstractAsyncContextManager[None]:
    if listen is None:
        return contextlib.nullcontext()
    from oncehook.web.server import answering_probes

    return answering_probes(setup.inbox, listen)


def _on_signal(loop: asyncio.AbstractEventLoop, told: asyncio.Event) -> None:
    told.set()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


async def _first(*coroutines: object) -> None:
    """Until one of them is over; the others are not waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


@click.command("demo")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop by itself after this long.")
@click.option("--rate", type=click.FloatRange(0.1, 100), default=3.0, show_default=True, help="Hooks a second.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on (default: 4020, or any when that is taken)."
)
@click.option("--no-open", is_flag=True, help="Do not open the dashboard in your browser.")
def demo(seconds: float | None, rate: float, port: int | None, no_open: bool) -> None:
    """Run a living inbox until Ctrl-C. With -v, a line for every arrival and every attempt."""
    import uvloop

    from oncehook.demo.running import free_port, run

    free = free_port(port)
    folder = Path(tempfile.mkdtemp(prefix="oncehook-demo-"))
    try:
        uvloop.run(run(folder, seconds, rate, free, browse=not no_open and _has_browser(), verbose=voice.verbose))
    except (KeyboardInterrupt, asyncio.CancelledError):  # before there was anything to stop
        click.echo(err=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_browser() -> bool:
    """Whether a person sits here, with a screen: a browser in the terminal would take the terminal away."""
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return sys.stderr.isatty() and has_screen


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
def serve(
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
        return serve_reloading(arguments, files, at_first=["--open"] if open_ else [])
    from oncehook.settings.forms import is_loopback

    # As flags of the settings, so that the checks see the address that is really listened on (S28).
    flags = {"server.host": host, "server.port": port, "server.log_level": log_level or voice.log_level}
    setup = from_app(app, config_file, flags) if app else from_settings(config_file, flags)
    server = setup.config.server
    if setup.development and not is_loopback(server.host):
        raise ConfigError("Without settings, serve listens on this machine only.", hint="Write an oncehook.toml first.")
    setup.inbox.observer.verbose = set_up_logging(server.log_level)
    run_server(setup, Hangup(app, config_file, flags), work=not no_worker, ui=not no_ui, browse=open_)
    return 0


def run_server(setup: Setup, hangup: Hangup, *, work: bool = True, ui: bool = True, browse: bool = False) -> None:
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
