"""Ready-made sources, one module per provider, found by name.

A preset of one's own is an entry point in the group `oncehook.presets` whose value is a `Preset`.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points

from oncehook.errors import ConfigError
from oncehook.human import nearest
from oncehook.sources import Preset

GROUP = "oncehook.presets"


def names() -> list[str]:
    """List every preset, ours and those of other packages."""
    return sorted(_ours() | {point.name for point in entry_points(group=GROUP)})


def load(name: str | Preset) -> Preset:
    """Return the preset of this name. Only its own module is imported; no other package can take a name of ours."""
    if isinstance(name, Preset):
        return name
    if name in _ours():
        plain = name.replace("-", "_")
        # A module's name cannot begin with a digit: 360dialog is p_360dialog.
        module = importlib.import_module(f"{__name__}.{'p_' if plain[0].isdigit() else ''}{plain}")
        preset: Preset = module.PRESET
        return preset
    for point in entry_points(group=GROUP, name=name):
        return _theirs(point)
    near = nearest(name, names())
    raise ConfigError(f'There is no preset "{name}".' + (f' Did you mean "{near}"?' if near else ""))


def _ours() -> set[str]:
    modules = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return {name.removeprefix("p_").replace("_", "-") for name in modules}


def _theirs(point: EntryPoint) -> Preset:
    package = point.dist.name if point.dist else "another package"
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(f'The preset "{point.name}" of {package} cannot be loaded: {error}.') from error
    if not isinstance(found, Preset):
        raise ConfigError(
            f'The preset "{point.name}" of {package} is a {type(found).__name__}.',
            hint=f"The entry point {point.value!r} must name a Preset.",
        )
    return found
