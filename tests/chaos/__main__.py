"""Kill real runs at random moments until nobody can doubt that they come back: python -m chaos --kills 2000

Random pipelines, every third one a filter, packing or mix; each is run on 1 to 6 ranks with 0 to 4 workers, killed (a
rank, a worker, or all of them, by SIGKILL) at a random moment, and started again in another shape, until its epochs are
over. Then a log of all that was delivered, and the ledger, have to prove, each on its own, that nothing
was lost or repeated and that the order is that of an uninterrupted run. The seed is printed: with it, the same pipelines, shapes and victims are drawn again (moments are the machine's).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chaos.proof import prove
from chaos.streams import StreamPipeline
from chaos.trial import Pipeline, Start, be_rank

_PATIENCE = 120.0
PRELOADED = (
    "midepoch.audit.run",
    "midepoch.checkpoint.background",
    "midepoch.checkpoint.local",
    "midepoch.open",
    "midepoch.loader.make",
    "midepoch.order.turns",
    "midepoch._internal.progress",
    "midepoch.sources.formats.lines",
    "midepoch.sources.lake",
    "midepoch.transforms.formats",
    "torch.distributed",
)
"""What ranks would import one by one, 0.3 s each, and torch 2 s."""


def in_child(work: Callable[[], None]) -> int:
    """The pid of a fork that does some work and exits. This process itself never opens data, so it stays forkable."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        work()
        code = 0
    except BaseException as problem:
        if os.environ.get("CHAOS_VERBOSE"):
            traceback.print_exception(problem)
    finally:
        os._exit(code)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def children(pid: int) -> list[int]:
    """The worker processes of a rank."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        texts = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in tasks]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in texts for child in text.split()]


class Supervisor:
    """What an elastic agent does: starts ranks, ends all of them when one ends badly. And kills."""

    def __init__(self, pipeline: Pipeline | StreamPipeline, folder: Path, draw: random.Random, kills: int) -> None:
        self.pipeline, self.folder, self.draw, self.kills = pipeline, folder, draw, kills
        self.starts: list[Start] = []
        self.victims: Counter[str] = Counter()
        self.workers: set[int] = set()

    def run(self) -> None:
        while not self._start(Start.draw(len(self.starts), self.draw)):
            assert len(self.starts) < 200, "it does not come to an end"

    def _start(self, start: Start) -> bool:
        """Whether all ranks came to the end."""
        self.starts.append(start)
        victim = self.draw.choice(["worker", "worker", "rank", "all"] if start.workers else ["rank", "all"])
        # Now and then while it starts; else when so much has been logged, and a moment later.
        early = self.draw.random() * 0.3 if self.draw.random() < 0.15 else None
        logged, moment = self.draw.choice([50, 300, 1000, 2500]) * self.draw.random(), self.draw.random() * 0.01
        due: float | None = early
        pids = [
            in_child(lambda rank=rank: be_rank(self.pipeline, start, rank, self.folder)) for rank in range(start.world)
        ]
        began, codes = time.monotonic(), {}
        try:
            while len(codes) < len(pids):
                for pid in pids:
                    if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                        codes[pid] = os.waitstatus_to_exitcode(found[1])
                if any(codes.values()):
                    return False
                now = time.monotonic() - began
                if due is None and self._left and self._logged(start) > logged:
                    due = now + moment
                if due is not None and now > due and self._left and len(codes) < len(pids):
                    self._kill(victim, [pid for pid in pids if pid not in codes])
                    due = float("inf")
                    time.sleep(self.draw.random() * 0.05)  # the others may notice, or not
                assert now < _PATIENCE, f"{start} hangs"
                time.sleep(0.002)
            return True
        finally:
            for pid in pids:
                if pid not in codes:
                    self.workers.update(children(pid))
                    kill(pid)
                    os.waitpid(pid, 0)

    def _logged(self, start: Start) -> int:
        """Bytes that the first rank has logged: about 40 a step."""
        log = self.folder / f"log-{start.number:04}-0"
        return log.stat().st_size if log.exists() else 0

    @property
    def _left(self) -> int:
        return self.kills - self.victims.total()

    def _kill(self, victim: str, pids: list[int]) -> None:
        one = self.draw.choice(pids)
        workers = children(one)
        self.workers.update(workers)
        if victim == "worker" and not workers:
            victim = "rank"
        self.victims[victim] += 1
        for pid in {"rank": [one], "all": pids, "worker": workers[:1]}[victim]:
            kill(pid)


def trial(seed: int, number: int, kills: int) -> tuple[Counter[str], str]:
    """One pipeline, killed so many times (or fewer, if it is over before)."""
    draw = random.Random(f"{seed} {number}")
    folder = Path(tempfile.mkdtemp(prefix="midepoch-chaos-"))
    pipeline = StreamPipeline.draw(draw) if number % 3 == 2 else Pipeline.draw(draw)
    supervisor = Supervisor(pipeline, folder, draw, kills)
    try:
        wait_for(in_child(lambda: pipeline.write(folder / "data")), "writing the data")
        supervisor.run()
        told = folder / "verdict"
        wait_for(
            in_child(lambda: told.write_text(_told(prove(pipeline, supervisor.starts, folder, number)), "utf-8")),
            "the proof",
        )
        _nobody_left(supervisor.workers)
    except BaseException:
        sys.stderr.write(f"trial {number}: {pipeline}\n" + "".join(f"  {start}\n" for start in supervisor.starts))
        sys.stderr.write(f"what it left is in {folder}\n")
        raise
    verdict = told.read_text()
    shutil.rmtree(folder)
    return supervisor.victims, f"{pipeline.about}, {len(supervisor.starts)} starts, {verdict}"


def _told(verdict: tuple[int, int, int]) -> str:
    return "{} outputs once each, {} again after a crash".format(*verdict)


def wait_for(pid: int, what: str) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise AssertionError(f"{what} failed (CHAOS_VERBOSE=1 tells why)")


def _nobody_left(workers: set[int]) -> None:
    """Workers go when their rank has gone."""
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and "midepoch" not in _zombie(pid) for pid in workers):
        assert time.monotonic() < until, "worker processes outlive their ranks"
        time.sleep(0.05)


def _zombie(pid: int) -> str:
    """A text with "midepoch" in it if the process is only waiting to be reaped by someone else."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "midepoch"
    return "midepoch" if state == "Z" else ""


def main() -> None:
    options = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__.split("\n")[0])
    options.add_argument("--kills", type=int, default=200, help="how many times to kill (default: 200)")
    options.add_argument("--seed", type=int, help="to draw the same pipelines, shapes and victims again")
    options.add_argument("--trial", type=int, help="only this one of the seed's trials")
    chosen = options.parse_args()
    seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    os.environ.setdefault("CHAOS_VERBOSE", "")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or every fork would copy what its collector touches
    segments = set(os.listdir("/dev/shm"))
    victims: Counter[str] = Counter()
    number, began = chosen.trial or 0, time.monotonic()
    while victims.total() < chosen.kills:
        found, verdict = trial(seed, number, min(12, chosen.kills - victims.total()))
        victims += found
        print(f"trial {number}: {verdict}; killed so far: {dict(victims)}", flush=True)
        number += 1
        if chosen.trial is not None:
            break
    left = {name for name in set(os.listdir("/dev/shm")) - segments if "midepoch" in name}  # not of others
    assert not left, f"left in shared memory: {left}"
    print(f"{victims.total()} kills in {number} pipelines, {time.monotonic() - began:.0f} s: 0 lost, 0 repeated")


if __name__ == "__main__":
    main()
