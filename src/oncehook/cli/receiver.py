"""The process of one receiver: `serve` starts it as `python -m oncehook.cli.receiver SETUP ASSIGNMENT`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import msgspec
import uvloop

from oncehook.cli.options import build_setup
from oncehook.cli.run import freeze_objects
from oncehook.errors import OncehookError
from oncehook.logs import set_up_logging
from oncehook.traces import find_traces
from oncehook.web.receivers import Assignment, receive


def main(setup: str, assignment: str) -> None:
    app, config_file, settings = json.loads(setup)
    # What a program prints while it is loaded, and warnings about the settings, the main process has printed already.
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        built = build_setup(app, Path(config_file) if config_file else None, settings)
    inbox, server = built.inbox, built.config.server
    inbox.observer.verbose = set_up_logging(server.log_level)
    inbox.traces = inbox.traces or find_traces()
    freeze_objects()
    uvloop.run(receive(inbox, msgspec.json.decode(assignment, type=Assignment), server.trusted_proxies))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OncehookError as error:
        sys.exit(f"oncehook: {error}")
