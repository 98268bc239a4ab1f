"""Ready-made sources, one module per provider, found by name.

A preset of one's own is an entry point in the group `oncehook.presets` whose value is a `Preset`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from oncehook.errors import ConfigError
from oncehook.human import nearest
from oncehook.plugins import find_entry_points, load_entry_point
from oncehook.sources import Preset

GROUP = "oncehook.presets"


def names() -> list[str]:
    """List every preset, ours and those of other packages."""
    return sorted(_ours() | {point.name for point in find_entry_points(GROUP)})


def load(name: str | Preset) -> Preset:
    """Return the preset of this name, importing only its own module. Another package cannot replace one of ours."""
    if isinstance(name, Preset):
        return name
    if name in _ours():
        plain = name.replace("-", "_")
        # A module's name cannot begin with a digit: 360dialog is p_360dialog.
        module = importlib.import_module(f"{__name__}.{'p_' if plain[0].isdigit() else ''}{plain}")
        preset: Preset = module.PRESET
        return preset
    for point in find_entry_points(GROUP, name):
        return load_entry_point(point, Preset, "preset")
    near = nearest(name, names())
    raise ConfigError(f'There is no preset "{name}".' + (f' Did you mean "{near}"?' if near else ""))


@cache
def _ours() -> frozenset[str]:
    modules = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return frozenset(name.removeprefix("p_").replace("_", "-") for name in modules)
