"""The torture driver: `scripts/torture --minutes 2 --engine both --seed 7 --only T4,T7 --report torture.json`.

Runs the chosen components on the chosen engines, each from an empty store, prints a line for every run and one for each
engine, and writes them as JSON. Ends with 0 when all promises held, 1 when one was broken, 2 when a run did not reach
the rare states without which it proves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.torture.claiming import torment_claims
from tests.torture.clocks import Clocks
from tests.torture.database import Database
from tests.torture.disk import Disk
from tests.torture.figures import Figures
from tests.torture.kills import Kills
from tests.torture.network import Network
from tests.torture.overload import Overload
from tests.torture.pooled import Pooler
from tests.torture.standby import Standby
from tests.torture.upgrade import Upgrade
from tests.torture.world import ENGINES, Component, Outcome, play

COMPONENTS: dict[str, type[Component]] = {
    kind.id: kind for kind in (Kills, Disk, Network, Database, Clocks, Upgrade, Overload, Pooler, Standby)
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def components_of(engine: str, chosen: Iterable[str] = COMPONENTS) -> list[str]:
    """Those that there are for an engine."""
    return [name for name in chosen if engine in COMPONENTS[name].engines]


def shares(chosen: Sequence[str], seconds: float) -> dict[str, float]:
    """How long each component runs, of so many seconds in all."""
    whole = sum(COMPONENTS[name].share for name in chosen)
    return {name: seconds * COMPONENTS[name].share / whole for name in chosen}


async def run(name: str, engine: str, folder: Path, seconds: float, seed: int) -> Outcome:
    """One component on one engine. What goes wrong with the run itself is a complaint, too."""
    try:
        return await play(COMPONENTS[name](), engine, folder, seconds, seed)
    except Exception as error:
        traceback.print_exc()
        return Outcome(name, engine, Figures(), [f"the run itself failed: {type(error).__name__}: {error}"], [])


def verdict(outcome: Outcome) -> str:
    if outcome.wrong:
        return "BROKEN"
    return "INVALID" if outcome.unreached else "ok"


def line(outcome: Outcome, seed: int) -> str:
    conserved = {True: "ok", False: "broken", None: "unknown"}[conserves([outcome])]
    return (
        f"torture {outcome.component} engine={outcome.engine} {outcome.figures.line()}"
        f" conservation={conserved} seed={seed} {verdict(outcome)}"
    )


def conserves(outcomes: Sequence[Outcome]) -> bool | None:
    """The store's own laws held (R68); None: a run did not come to its end, and nobody looked."""
    if any(text.startswith("does not hold") for outcome in outcomes for text in outcome.wrong):
        return False
    return True if all(outcome.figures.numbers for outcome in outcomes) else None


def command(outcome: Outcome, seed: int, seconds: float) -> str:
    """What repeats a run: its dice, not the way that processes happen to interleave."""
    minutes = f"{seconds / 60:.2f}"
    return f"scripts/torture --engine {outcome.engine} --only {outcome.component} --seed {seed} --minutes {minutes}"


def tell(outcome: Outcome, seed: int, seconds: float) -> None:
    say(line(outcome, seed))
    for text in outcome.wrong[:20]:
        say(f"  wrong: {text}")
    if outcome.unreached:
        say(f"  not reached: {', '.join(outcome.unreached)}")
    if outcome.wrong or outcome.unreached:
        say(f"  again: {command(outcome, seed, seconds)}")


def report(outcomes: Sequence[Outcome], claims: dict[str, Any], seed: int) -> dict[str, Any]:
    """Everything, for machines."""
    runs = [
        {
            "component": one.component, "what": COMPONENTS[one.component].what, "engine": one.engine,
            "verdict": verdict(one), **one.figures.as_json(), "complaints": list(one.wrong),
            "unreached": list(one.unreached),
        }
        for one in outcomes
    ]  # fmt: skip
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"seed": seed, "machine": machine, "totals": totals(outcomes), "runs": runs, "claims": claims}


def totals(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """All runs of an engine as one."""
    made = {}
    for engine in dict.fromkeys(outcome.engine for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.engine == engine]
        whole = sum((outcome.figures for outcome in own), Figures()).as_json()
        made[engine] = {**whole, "conservation_ok": conserves(own)}
    return made


def exit_code(outcomes: Sequence[Outcome], claims_wrong: Sequence[str]) -> int:
    if claims_wrong or any(outcome.wrong for outcome in outcomes):
        return 1
    return 2 if any(outcome.unreached for outcome in outcomes) else 0


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture", description="Break everything, and see what holds.")
    parser.add_argument("--minutes", type=float, default=2.0, help="for each engine (default: 2)")
    parser.add_argument("--engine", choices=[*ENGINES, "both"], default="both")
    parser.add_argument("--seed", type=int, default=None, help="repeats the dice of a run")
    parser.add_argument("--only", default=",".join(COMPONENTS), help=f"of {','.join(COMPONENTS)}")
    parser.add_argument("--report", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--folder", type=Path, default=None, help="where stores, logs and histories are kept")
    said = parser.parse_args(arguments)
    said.only = said.only.split(",")
    if unknown := [name for name in said.only if name not in COMPONENTS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(COMPONENTS)}")
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    said = read_arguments(arguments)
    seed = secrets.randbelow(10**9) if said.seed is None else said.seed
    folder = said.folder or Path(tempfile.mkdtemp(prefix="oncehook-torture-"))
    outcomes: list[Outcome] = []
    claims: dict[str, Any] = {}
    for engine in ENGINES if said.engine == "both" else [said.engine]:
        for name, seconds in shares(components_of(engine, said.only), said.minutes * 60).items():
            outcomes.append(asyncio.run(run(name, engine, folder / f"{engine}-{name}", seconds, seed)))
            tell(outcomes[-1], seed, seconds)
    wrong: list[str] = []
    if "T8" in said.only:
        told, faults, wrong = torment_claims(folder, min(said.minutes * 6, 60), seed)
        claims = {"told": dict(told), "faults": dict(faults), "complaints": wrong}
        say(f"torture T8 engine=valkey told={dict(told)} faults={dict(faults)} wrong={len(wrong)} seed={seed}")
    for engine, whole in totals(outcomes).items():
        shown = {k: v for k, v in whole.items() if not isinstance(v, dict)}
        say(f"torture ALL engine={engine} " + " ".join(f"{name}={value}" for name, value in shown.items()))
    if said.report is not None:
        said.report.write_text(json.dumps(report(outcomes, claims, seed), indent=2) + "\n")
    code = exit_code(outcomes, wrong)
    say(f"{['every promise held', 'A PROMISE WAS BROKEN', 'INVALID: not everything was reached'][code]}; {folder}")
    return code


if __name__ == "__main__":
    sys.exit(main())
