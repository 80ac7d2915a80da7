"""A run with leases that gets killed: ``python lease_job.py FOLDER DATA ATTEMPT IN_FLIGHT``.

Threads and processes acknowledge in a random order, and every one of them appends to one log what it does, in the order
in which it happens. The log is written with O_APPEND, so its lines are in one order, whoever writes them:

- ``R a k``: attempt a has restored checkpoint k (-1: none)
- ``D a row``: a row was delivered. ``W a row``: its acknowledgement begins. ``A a row``: it has returned
- ``B a k``, ``E a k``: checkpoint k is about to be saved, and is saved
- ``X a``: the epoch is over
"""

from __future__ import annotations

import os
import pickle
import queue
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

THREADS = PROCESSES = 2


class Log:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, *numbers: int) -> None:
        os.write(self._file, f"{kind} {' '.join(map(str, numbers))}\n".encode())


class Worker:
    """Holds some leases, and acknowledges them in a random order."""

    def __init__(self, log: Log, attempt: int, seed: int, most: int) -> None:
        self._log, self._attempt, self._draw, self._most = log, attempt, random.Random(seed), most
        self._held: list[tuple[Any, int]] = []

    def take(self, lease: Any, row: int) -> None:
        self._held.append((lease, row))
        if len(self._held) > self._most:
            self._acknowledge()

    def finish(self) -> None:
        while self._held:
            self._acknowledge()

    def _acknowledge(self) -> None:
        lease, row = self._held.pop(self._draw.randrange(len(self._held)))
        self._log.write("W", self._attempt, row)
        if not (lease.reject() if row % 7 == 0 else lease.ack()):
            raise AssertionError(f"row {row} was acknowledged before")
        self._log.write("A", self._attempt, row)


def work(log: Log, attempt: int, seed: int, most: int) -> None:
    """A worker process: leases come on stdin. It ends with the process of the loader."""
    worker, source = Worker(log, attempt, seed, most), sys.stdin.buffer
    while size := source.read(4):
        lease, row = pickle.loads(source.read(struct.unpack("<I", size)[0]))
        if lease is None:
            worker.finish()
            return
        worker.take(lease, row)


def send(pipe: IO[bytes], lease: Any, row: int) -> None:
    data = pickle.dumps((lease, row))
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def run(folder: Path, data: str, attempt: int, in_flight: int) -> None:
    import midepoch
    from midepoch.audit import Ledger
    from midepoch.checkpoint import PipelineCheckpoint

    log = Log(folder / "log")
    ledger = Ledger(folder / "ledger", attempt=f"attempt {attempt}")
    loader = midepoch.from_files(data).shuffle(seed=1).with_format("numpy").loader(1, audit=ledger)
    checkpoints = PipelineCheckpoint(folder / "checkpoints", keep=2)
    step = checkpoints.restore_latest(loader)
    last = -1 if step is None else step
    log.write("R", attempt, last)

    most = in_flight // (THREADS + PROCESSES) * 4 // 5
    todo: queue.Queue[Any] = queue.Queue()

    def in_thread(seed: int) -> None:
        worker = Worker(log, attempt, seed, most)
        for lease, row in iter(todo.get, None):
            worker.take(lease, row)
        worker.finish()

    threads = [threading.Thread(target=in_thread, args=(seed,), daemon=True) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    command = [sys.executable, __file__, str(folder), "", str(attempt), str(most)]
    workers = [subprocess.Popen([*command, str(seed)], stdin=subprocess.PIPE) for seed in range(PROCESSES)]
    pipes = [worker.stdin for worker in workers if worker.stdin is not None]
    draw = random.Random(attempt)
    with loader.lease(max_out=in_flight) as items:
        for number, lease in enumerate(items, 1):
            row = int(lease.batch["id"][0])
            log.write("D", attempt, row)
            where = draw.randrange(THREADS + PROCESSES)
            if where < THREADS:
                todo.put((lease, row))
            else:
                send(pipes[where - THREADS], lease, row)
            if number % 150 == 0:
                last += 1
                log.write("B", attempt, last)
                checkpoints.save(loader, step=last)
                log.write("E", attempt, last)
        for _ in threads:
            todo.put(None)
        for pipe in pipes:
            send(pipe, None, 0)
        items.join()
    if loader.epoch != 1:
        raise AssertionError("the epoch is not over")
    log.write("X", attempt)
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    where, source, of_attempt, number, *seed = sys.argv[1:]
    if seed:
        work(Log(Path(where) / "log"), int(of_attempt), int(seed[0]), int(number))
    else:
        run(Path(where), source, int(of_attempt), int(number))
