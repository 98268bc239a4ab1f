"""The API keeps to its own description: schemathesis makes requests out of /openapi.json and judges the answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from oncehook.web.api.endpoints import ENDPOINTS
from tests.acceptance.processes import Receiver
from tests.acceptance.test_api_served import TOKEN, arrived
from tests.acceptance.test_api_served import receiver as receiver

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "unsupported_method",
)  # fmt: skip


async def test_the_api_is_as_it_is_described(receiver: Receiver, tmp_path: Path) -> None:
    for n in range(3):
        await arrived(receiver, f"order-{n}", customer="c")
    command = [
        str(Path(sys.executable).with_name("st")), "run", f"http://127.0.0.1:{receiver.port}/openapi.json",
        "--header", f"Authorization: Bearer {TOKEN}", "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing",
        "--max-examples", "6", "--generation-deterministic", "--exclude-path-regex", "/stream$", "--no-color",
        "--request-timeout", "60", "--suppress-health-check", "too_slow",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "401/403" not in done.stdout, "it asked as nobody"
    operations = len(ENDPOINTS) - 1
    assert f"Tested: {operations}" in done.stdout, "every operation, but for the stream that never ends"
