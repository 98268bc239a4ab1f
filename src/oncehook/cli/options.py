"""Options that commands share: -q and -v, a variable for every option, and the inbox that --config and --app name."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from oncehook.cli.help import add_help
from oncehook.errors import ConfigError

if TYPE_CHECKING:  # settings and inbox import nearly everything: a command's --help must not wait for that
    from oncehook.inbox import Inbox
    from oncehook.settings import Config, Loaded, ServerConfig

SHARED: Final = {"--app", "--config", "--server", "--token-env", "--json", "--wide", "--quiet", "--verbose"}
"""Options that mean the same everywhere: one variable sets them for every command."""
WITHOUT_VARIABLES: Final = {("token",)}
"""Commands whose own options have no variables: the token of `oncehook token accounts` is ONCEHOOK_TOKEN_ACCOUNTS."""

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings file, instead of ./oncehook.toml.",
)
app_option = click.option("--app", metavar="MODULE:INBOX", help="The inbox that a program makes, as in app:inbox.")
json_option = click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
json_lines_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")


class Voice:
    quiet = False
    verbose = False
    wide = False

    @property
    def log_level(self) -> str | None:
        """Return the log level of -q or -v; None for that of the settings."""
        return "debug" if self.verbose else "warning" if self.quiet else None


voice: Final = Voice()

wide_option = click.option(
    "--wide",
    is_flag=True,
    expose_value=False,
    callback=lambda context, option, value: setattr(voice, "wide", value),
    help="Every column in full: whole ids, exact times.",
)

T = TypeVar("T")


def takes_app(function: Callable[..., T]) -> Callable[..., T]:
    """Give a command its program as APP or as --app; the function gets it as `app`."""

    @click.argument("target", required=False, metavar="[APP]")
    @app_option
    @functools.wraps(function)
    def run(target: str | None, app: str | None, **rest: Any) -> T:
        said = click.get_current_context().get_parameter_source("app") is ParameterSource.COMMANDLINE
        if target and said and target != app:
            raise click.UsageError(f"APP is {target}, and --app is {app}: one of them is enough.")
        return function(app=target or app, **rest)

    return run


def add_shared_options(command: click.Command, *names: str) -> click.Command:
    """Add -q, -v and an environment variable for each option to a command and its subcommands."""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            add_shared_options(below, *names, name)
    if not isinstance(command, click.Group) or command.invoke_without_command:
        _add_voice(command)
    for option in command.params:
        if isinstance(option, click.Option):
            _name_variable(option, names)
    if not getattr(command, "has_help", False):  # the table of commands may be read more than once
        add_help(command, names)
        command.has_help = True  # type: ignore[attr-defined]
    return command


def _add_voice(command: click.Command) -> None:
    present = {name for option in command.params for name in option.opts}
    for short, name, about in (
        ("-q", "quiet", "Data and errors only."),
        ("-v", "verbose", "Say more; trace errors."),
    ):
        if f"--{name}" not in present:  # a command may have its own, or has them already
            flag = [short, f"--{name}"]
            command.params.append(
                click.Option(flag, is_flag=True, expose_value=False, callback=_set_voice(name), help=about)
            )


def _set_voice(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    return lambda context, option, value: setattr(voice, name, value)


def _name_variable(option: click.Option, names: tuple[str, ...]) -> None:
    if option.is_flag and not option.is_bool_flag:
        return  # --abort and the like are acts, not settings
    if option.envvar is None:
        longest = max(option.opts, key=len)
        if longest not in SHARED and names in WITHOUT_VARIABLES:
            return
        words = [] if longest in SHARED else list(names)
        option.envvar = "_".join(["ONCEHOOK", *words, longest.lstrip("-")]).upper().replace("-", "_")


# -- the inbox ---------------------------------------------------------------------------------


class Setup(NamedTuple):
    inbox: Inbox
    loaded: Loaded
    config: Config
    """The settings with the inbox's own store."""
    origin: str
    development: bool = False
    """True without any settings: every preset under its own name, for this machine only."""


def build_setup(app: str | None, config_file: Path | None, flags: Mapping[str, object] | None = None) -> Setup:
    """Build the inbox of --app or the settings; without either, the development inbox.

    `flags` take precedence over the settings.
    """
    return _from_app(app, config_file, flags) if app else _from_settings(config_file, flags)


def _from_settings(config_file: Path | None, flags: Mapping[str, object] | None) -> Setup:
    from oncehook.inbox import Inbox
    from oncehook.settings import load

    loaded = load(config_file, flags=flags)
    warn(loaded.warnings)
    inbox = Inbox.from_loaded(loaded)
    if loaded.origin is not None or inbox.sources:
        return Setup(inbox, loaded, loaded.config, str(loaded.origin or "environment"))
    from oncehook.settings import development

    for source in development.sources():
        inbox.add(source)
    return Setup(inbox, loaded, loaded.config, "development", development=True)


def _from_app(target: str, config_file: Path | None, flags: Mapping[str, object] | None) -> Setup:
    """Import the inbox of `module:attribute`, and add what the settings define unless it was made from them."""
    import msgspec

    from oncehook.settings import load

    inbox = _import_inbox(target)
    own = inbox.settings.origin if inbox.settings else None
    if own and config_file and config_file.resolve() != own.resolve():
        raise ConfigError(f"{target} was made from {own}, and --config names {config_file}.", hint="One file counts.")
    loaded = load(config_file or own, flags=flags, whole=False)
    warn([*loaded.warnings, *_unused_store(inbox, target, loaded)])
    if inbox.settings is None and inbox.takes_settings:
        inbox.add_settings(loaded, target)
    inbox.check_names()
    origin = f"{target} and {loaded.origin}" if loaded.origin and inbox.settings else target
    return Setup(inbox, loaded, msgspec.structs.replace(loaded.config, store=inbox.store_url), origin)


def _import_inbox(target: str) -> Inbox:
    from oncehook.inbox import Inbox

    module_name, _, attribute = target.partition(":")
    is_file = "/" in module_name or (module_name.endswith(".py") and Path(module_name).is_file())
    if is_file or not all(module_name.split(".")):
        raise ConfigError(f"{target} is no module.", hint=_TARGET_FORM)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), attribute or "inbox")
    except ImportError as error:
        raise _explain_import(target, module_name, error) from error
    except AttributeError as error:
        raise ConfigError(f"{target} cannot be loaded: {error}", hint=_TARGET_FORM) from error
    if not isinstance(found, Inbox):
        raise ConfigError(f"{target} is a {type(found).__name__}, not an Inbox.")
    return found


_TARGET_FORM: Final = "Write module:attribute, as in app:inbox."


def _explain_import(target: str, module_name: str, error: ImportError) -> ConfigError:
    """Tell a module that is not there from one whose own imports fail."""
    file = Path(*module_name.split(".")).with_suffix(".py")
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
        return ConfigError(
            f"There is no {file} in {Path.cwd()}.",
            hint=f"Run this in the folder of {file}, or write one that makes an inbox.",
        )
    return ConfigError(
        f"{target} cannot be loaded: {error}", hint=f"{file} imports it; is it installed in this environment?"
    )


def _unused_store(inbox: Inbox, target: str, loaded: Loaded) -> list[str]:
    from oncehook.settings.build import is_same_store
    from oncehook.settings.values import hide_password

    place = loaded.where("store")
    if not place.startswith("environment") or is_same_store(inbox.store_url, loaded.config.store):
        return []
    return [f"{place}: not used, since {target} keeps its events in {hide_password(inbox.store_url)}"]


def warn(warnings: list[str] | tuple[str, ...]) -> None:
    from oncehook.cli.output import message  # imports this module

    for warning in warnings:
        for line in message(warning, "warning: "):
            click.echo(line, err=True)


def address_of(server: ServerConfig) -> str:
    """Return the address at which commands on this machine find the server of these settings."""
    host = f"[{server.host}]" if ":" in server.host else server.host
    return loopback(f"http://{host}:{server.port}")


def loopback(address: str) -> str:
    """Replace an address that means every interface by the loopback one, from which the local token is accepted."""
    return address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
