"""Makes each known mistake in turn and lets our own tests find it: `python -m tests.torture.seeded [NAME…]`.

For every bug of `seeded_bugs` the smallest selection of tests that ought to turn red is run with it, and each of them
must; without a bug all of them must be green. Prints a line per bug and the score. `test_seeded` is the same in a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.servers import LENT, shared_postgres

ROOT: Final = Path(__file__).parents[2]
AT_ONCE: Final = 2
REWRITE_WARNING: Final = "pytest.PytestAssertRewriteWarning"
TIMED_OUT: Final = "from pytest-timeout."
SETTINGS: Final = {"TORTURE_IMAGES": "240", "TORTURE_SEED": "20261116"}

BUGS: Final[dict[str, Sequence[str]]] = {
    "GET-then-SET": (
        "tests/store/test_intake.py::test_of_many_at_once_exactly_one_is_accepted[sqlite]",
        "tests/store/test_postgres_rivals.py::test_rivals_with_the_same_keys_have_one_winner_each",
    ),
    "claim held 24 h": (
        "tests/store/test_intake.py::test_killed_before_commit_the_next_arrival_is_new_at_once[sqlite]",
        "tests/claims/test_races.py::test_a_killed_owner_blocks_for_its_ttl_and_not_a_day[redis]",
        "tests/claims/test_races.py::test_a_killed_owner_blocks_for_its_ttl_and_not_a_day[sqlite]",
        "tests/claims/test_verbs.py::test_three_answers[redis]",
        "tests/claims/test_verbs.py::test_three_answers[sqlite]",
    ),
    "key cleared before commit": (
        "tests/torture/test_moments.py::test_during_the_commit_nobody_is_answered_and_a_copy_is_no_second_event",
    ),
    "ack before commit": (
        "tests/torture/test_moments.py::test_during_the_commit_nobody_is_answered_and_a_copy_is_no_second_event",
    ),
    "synchronous=NORMAL": ("tests/torture/test_power.py::test_what_was_acknowledged_outlives_a_power_cut",),
    "completion by id only": (
        "tests/store/test_lease.py::test_a_taken_over_lease_gives_no_rights[sqlite]",
        "tests/store/test_lease.py::test_a_taken_over_lease_gives_no_rights[postgres]",
    ),
    "reaper by id only": (
        "tests/store/test_lease.py::test_a_heartbeat_keeps_the_lease[sqlite]",
        "tests/store/test_lease.py::test_a_heartbeat_keeps_the_lease[postgres]",
    ),
    "attempt counted at completion": (
        "tests/store/test_crash.py::test_three_deaths_alone_are_the_end[sqlite]",
        "tests/store/test_crash.py::test_three_deaths_alone_are_the_end[postgres]",
        "tests/store/test_lease.py::test_attempts_count_when_leased_and_come_back_when_released[sqlite]",
    ),
    "zero-winner rival check": ("tests/store/test_lease.py::test_somebody_wins[sqlite]",),
    "replay by insert": (
        "tests/store/test_replays.py::test_a_replay_is_never_refused_by_its_key[sqlite]",
        "tests/store/test_replays.py::test_a_dead_letter_runs_again[sqlite]",
    ),
    "worker clock for expiry": (
        "tests/torture/test_moments.py::test_a_workers_clock_neither_ends_a_lease_nor_holds_work_back",
    ),
    "key concatenation": (
        "tests/store/test_intake.py::test_parts_of_a_key_do_not_run_together[sqlite]",
        "tests/unit/test_receive.py::test_composite_keys_are_not_concatenated",
    ),
    "missing key ignored": ("tests/acceptance/test_kept.py::test_a_missing_key_follows_the_policy[sqlite]",),
    "dedup forgotten at purge": (
        "tests/store/test_sweep.py::test_keys_stay_for_their_window[sqlite]",
        "tests/store/test_sweep.py::test_keys_stay_for_their_window[postgres]",
    ),
    "retry header means duplicate": ("tests/acceptance/test_kept.py::test_retry_headers_decide_nothing[sqlite]",),
    "4xx on storage error": (
        "tests/unit/test_receive.py::test_a_fault_of_ours_is_503_and_is_told",
        "tests/acceptance/test_storage_failures.py::test_full_disk",
    ),
    "redirect followed": ("tests/acceptance/test_http_destination.py::test_a_redirect_is_not_followed",),
    "is_global as filter": (
        "tests/unit/test_addresses.py::test_each_entry_is_refused_from_its_first_to_its_last_address",
    ),
}
"""What must turn red. A test of many cases counts when one of them does."""


@dataclass(slots=True, frozen=True)
class Run:
    """One run of some tests, with a bug or without."""

    bug: str
    code: int
    missed: Sequence[str]
    """Tests that ought to have failed, and did not."""
    said: str

    @property
    def caught(self) -> bool:
        return self.code == 1 and not self.missed


def run(bug: str, tests: Sequence[str]) -> Run:
    """Run these tests, with this bug in every process; with none when it is empty."""
    paths = [str(ROOT), str(Path(__file__).parent / "seeded_site"), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SEEDED_BUG": bug, "COLUMNS": "400", **SETTINGS}
    settings |= {LENT: shared_postgres().url}
    # The bug is there before pytest is, and so is our package: its own plugin cannot be rewritten any more.
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=120", "-W", f"ignore::{REWRITE_WARNING}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        env={**os.environ, **settings}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    # A test that hung has found nothing.
    lines = [line for line in done.stdout.splitlines() if not line.endswith(TIMED_OUT)]
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    missed = [test for test in tests if not any(line.startswith(test) for line in failed)]
    return Run(bug, done.returncode, missed, done.stdout)


def run_seeded(names: Sequence[str] = ()) -> list[Run]:
    """One run for each bug."""
    chosen = {name: BUGS[name] for name in names or BUGS}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, chosen, chosen.values()))


def run_clean(names: Sequence[str] = ()) -> Run:
    """The same tests without a bug."""
    return run("", list(dict.fromkeys(test for name in names or BUGS for test in BUGS[name])))


def report(seeded: Sequence[Run]) -> str:
    """A line per bug, and the score."""
    lines = [f"{'caught' if one.caught else 'ESCAPED':8}{one.bug}" for one in seeded]
    return "\n".join([*lines, f"{sum(one.caught for one in seeded)} of {len(seeded)} seeded bugs caught"])


def main(names: Sequence[str]) -> int:
    clean, seeded = run_clean(names), run_seeded(names)
    wrong = [one for one in seeded if not one.caught] + ([clean] if clean.code else [])
    for one in wrong:
        sys.stdout.write(f"--- {one.bug or 'without a bug'}: exit {one.code}, not red: {one.missed}\n{one.said}\n")
    sys.stdout.write(f"{report(seeded)}\nwithout a bug: {'RED' if clean.code else 'green'}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
