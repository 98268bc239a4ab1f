"""Ready-made sources, one module per provider, found by name.

A preset of one's own is an entry point in the group `oncehook.presets` whose value is a `Preset`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from importlib.metadata import entry_points

from oncehook.errors import ConfigError
from oncehook.sources import Preset

GROUP = "oncehook.presets"


def names() -> list[str]:
    """Every preset there is, ours and those that other packages bring."""
    modules = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    ours = {name.removeprefix("p_").replace("_", "-") for name in modules}
    return sorted(ours | {point.name for point in entry_points(group=GROUP)})


def load(name: str) -> Preset:
    """The preset of this name; only its own module is imported."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        raise ConfigError(f'There is no preset "{name}".' + (f' Did you mean "{near[0]}"?' if near else ""))
    for point in entry_points(group=GROUP, name=name):
        theirs: Preset = point.load()
        return theirs
    plain = name.replace("-", "_")
    # A module's name cannot begin with a digit: 360dialog is p_360dialog.
    module = importlib.import_module(f"{__name__}.{'p_' if plain[0].isdigit() else ''}{plain}")
    preset: Preset = module.PRESET
    return preset
