"""The requests of the benchmark are what they are said to be: genuine, of their size, and repeated as often as said."""

from __future__ import annotations

import hmac
import json
from pathlib import Path

import pytest

from bench import traffic

PATH = "/in/bench"


def prepared(folder: Path, **options: int) -> traffic.Traffic:
    return traffic.prepare(folder, tick=lambda share: None, **{"records": 50, "duplicates": 0, **options})


def requests(of: traffic.Traffic, repeated: float = 0.0) -> list[bytes]:
    tails = traffic.read_tails(of.folder)
    head = traffic.request_head(4020, PATH, tails)
    data = of.records_file(repeated).read_bytes()
    size = traffic.RECORD_SIZE
    return [traffic.compose(head, tails, data[at : at + size]) for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [traffic.BODY_SIZE, traffic.LARGE_SIZE])
def test_every_request_is_genuine_and_of_its_size(tmp_path: Path, size: int) -> None:
    made = prepared(tmp_path, body_size=size)
    keys = made.keys(0, 50)
    assert len(set(keys)) == 50
    for request, key in zip(requests(made), keys, strict=True):
        head, _, body = request.partition(b"\r\n\r\n")
        signature = hmac.digest(traffic.SECRET.encode(), body, "sha256").hex()
        assert f"X-Signature: sha256={signature}".encode() in head
        assert f"Content-Length: {size}".encode() in head
        assert len(body) == size
        assert json.loads(body)["id"] == key


def test_keys_can_be_had_from_the_middle(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    assert made.keys(10, 20) == made.keys(0, 50)[10:20]


@pytest.mark.parametrize("repeated", traffic.MIXES)
def test_a_mix_repeats_as_often_as_it_says(tmp_path: Path, repeated: float) -> None:
    made = prepared(tmp_path, records=1, duplicates=4000)
    sent = requests(made, repeated)
    distinct = len(set(sent))
    assert made.distinct(len(sent), repeated) == distinct
    assert abs(1 - distinct / len(sent) - repeated) < 0.05
