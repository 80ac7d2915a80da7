"""Kill -9 before, and an error of, every single call on the folder of a ledger, an index, a cache or shards: what is
delivered is right or an error says why not, and the next start has all rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tracer

from forks import Forks

unavailable = tracer.available()
pytestmark = pytest.mark.skipif(unavailable is not None, reason=str(unavailable))
SUBJECTS = {"index": 6, "block_cache": 100, "cache": 20, "written_shards": 18, "ledger": 8}
"""The calls that each makes at least."""


def run(subject: str, every: int, forks: Forks) -> None:
    [done] = forks.run([str(Path(__file__).with_name("points.py")), subject, str(every)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] >= SUBJECTS[subject], "it made fewer calls than it can do without: the tracer missed some"
    stopped = -(-found["calls"] // every)
    assert found["points"]["kill"] == stopped and found["points"]["EIO"] == stopped * (2 if every == 1 else 1)
    assert subject not in ("cache", "written_shards") or found["refused"]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_some_calls(subject: str, plain_forks: Forks) -> None:
    run(subject, max(5, SUBJECTS[subject] // 2), plain_forks)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_call(subject: str, plain_forks: Forks) -> None:
    run(subject, 1, plain_forks)
