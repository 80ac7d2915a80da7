"""Kill -9, or a power loss, before every single call that changes the folder during a save: the old step or the new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tracer

from forks import Forks

unavailable = tracer.available()
pytestmark = pytest.mark.skipif(unavailable is not None, reason=str(unavailable))


def run(forks: Forks, *arguments: str, least: int) -> None:
    [done] = forks.run([str(Path(__file__).with_name("crash.py")), *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] >= least, "the save made fewer calls than it can do without: the tracer missed some"


@pytest.mark.parametrize("case", ["new", "replace"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_own_files(mode: str, case: str, plain_forks: Forks) -> None:
    run(plain_forks, "files", mode, case, least=25)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_torch_distributed_checkpoints(mode: str, torch_forks: Forks) -> None:
    run(torch_forks, "dcp", mode, "new", least=25)


@pytest.mark.parametrize(
    ("mode", "every"),
    [("sync", "4"), ("async", "8"), *(pytest.param(mode, "1", marks=pytest.mark.slow) for mode in ("sync", "async"))],
)
def test_orbax(mode: str, every: str, jax_forks: Forks) -> None:
    run(jax_forks, "orbax", mode, "new", every, least=80)
