"""Stops a process, or makes one of its calls fail, at every single call on a folder. Run by test_points.py, as a process
of its own: everything is forked from here, before any library has threads.

    python points.py SUBJECT [EVERY]

With EVERY above 1, only some calls, and two of six failures.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tracer

ROWS = 400
FOREVER = 1 << 30
FEW = [(errno.ENOSPC, 1), (errno.EIO, FOREVER)]
FAILURES = [(error, count) for error in (errno.ENOSPC, errno.EIO, errno.ENOMEM) for count in (1, FOREVER)]
Rows = list[int]


def data(root: Path) -> str:
    """The Parquet files that subjects read."""
    return str(root / "data")


def write_data(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "data").mkdir()
    for part in range(2):
        ids = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        pq.write_table(pa.table({"id": ids}), f"{data(root)}/{part}.parquet", row_group_size=50)


def index(root: Path, folder: Path) -> Rows:
    """The index of files that are opened for the first time."""
    import midepoch

    return [row["id"] for row in midepoch.from_files(data(root), index_dir=folder / "index")]


def block_cache(root: Path, folder: Path) -> Rows:
    """Decoded blocks in files."""
    import midepoch

    ds = midepoch.from_files(data(root), index_dir=root / "index", cache_dir=folder / "blocks").shuffle(1, scope="rows")
    return [row["id"] for row in ds.select_columns("id")]


def cache(root: Path, folder: Path) -> Rows:
    """Results that are stored once."""
    import midepoch

    ds = midepoch.from_files(data(root), index_dir=root / "index").map(lambda row: {"id": row["id"]})
    return [row["id"] for row in ds.cache(folder / "cache")]


def written_shards(root: Path, folder: Path) -> Rows:
    """The files of rows that come from a generator."""
    import midepoch

    os.environ["MIDEPOCH_CACHE"] = str(folder / "shards")
    return [row["id"] for row in midepoch.from_generator(lambda: ({"id": i} for i in range(ROWS)), key="rows")]


def ledger(root: Path, folder: Path) -> Rows:
    """The ledger of a run that is resumed from its last state, if it has one. It writes what it delivers to a log."""
    import midepoch
    from midepoch.audit import Ledger

    ds = midepoch.from_files(data(root), index_dir=root / "index").shuffle(1).with_format("numpy")
    ds = ds.filter(lambda row: row["id"] != 3)
    saved, log = root / "state.json", root / "log.jsonl"
    start = len(log.read_text().splitlines()) if log.exists() else 0
    loader = ds.loader(50, audit=Ledger(folder / "run", attempt=f"start at {start}"))
    if saved.exists():
        state, lines = json.loads(saved.read_text())
        loader.load_state_dict(state)
        kept = log.read_text().splitlines(keepends=True)[:lines] if log.exists() else []
        log.write_text("".join(kept))
    elif log.exists():
        log.unlink()
    with log.open("a") as lines:
        for number, batch in enumerate(loader, 1):
            lines.write(json.dumps(batch["id"].tolist()) + "\n")
            lines.flush()
            if number == 3 and not saved.exists():
                saved.write_text(json.dumps([loader.state_dict(), number]))
    loader.close()
    return [*(number for line in log.read_text().splitlines() for number in json.loads(line)), 3]


SUBJECTS: dict[str, Callable[[Path, Path], Rows]] = {
    each.__name__: each for each in (index, block_cache, cache, written_shards, ledger)
}


def run(subject: str, root: Path, folder: Path, *, trace: bool) -> None:
    """Run a subject, and write what came of it. Only errors that say what they are may end it."""
    import logging

    from midepoch.errors import MidepochError

    logging.getLogger("midepoch").setLevel(logging.CRITICAL)
    if trace:
        tracer.begin()
    found: dict[str, Any] = {"rows": None}
    try:
        found["rows"] = sorted(SUBJECTS[subject](root, folder))
    except (MidepochError, OSError) as problem:
        found["problem"] = f"{type(problem).__name__}: {problem}"
    (root / "found.json").write_text(json.dumps(found))


def look(subject: str, root: Path, folder: Path) -> None:
    """A restart without a fault: all rows, and a ledger that accuses nobody."""
    run(subject, root, folder, trace=False)
    found = json.loads((root / "found.json").read_text())
    assert found["rows"] == list(range(ROWS)), f"after a restart: {found}"[:600]
    if subject == "ledger":
        from midepoch.audit import read_run

        audited = read_run(folder / "run")
        (epoch,) = audited.epochs
        assert not epoch.repeated and (not epoch.never or audited.problems), (epoch, audited.problems)
        assert epoch.never or (epoch.complete and epoch.once == ROWS), epoch


def forked(action: Callable[[], None]) -> None:
    status = os.waitpid(tracer.forked(action), 0)[1]
    if status:
        raise SystemExit(f"failed with {status}")


def main(subject: str, every: int) -> None:
    for name in ("numpy.random", "pyarrow.parquet", "pyarrow.compute", "midepoch.audit", "midepoch.loader"):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page
    root = Path(tempfile.mkdtemp(prefix="points-"))
    forked(partial(write_data, root))
    forked(lambda: index(root, root))
    shutil.move(root / "index", root / "index of the data")
    counts: dict[str, int] = {}
    refused: list[str] = []

    def attempt(what: str, stop_before: int | None, failure: tracer.Failure | None) -> tracer.Traced:
        folder = root / "attempt"
        for left in ("state.json", "log.jsonl", "found.json"):
            (root / left).unlink(missing_ok=True)
        shutil.rmtree(root / "index", ignore_errors=True)
        shutil.copytree(root / "index of the data", root / "index")
        folder.mkdir()
        found = tracer.traced(lambda: run(subject, root, folder, trace=True), folder, stop_before, failure)
        at = f"{subject}, {what}"
        if not found.killed:
            assert found.code == 0, f"{at}: the process ended with {found.code}"
            said = json.loads((root / "found.json").read_text())
            assert said["rows"] in (None, list(range(ROWS))), f"{at}: {said}"[:600]
            assert said["rows"] or failure is not None, f"{at}: {said}"
            refused.append(said.get("problem", ""))
        try:
            forked(lambda: look(subject, root, folder))
        except SystemExit as problem:
            raise SystemExit(f"{at}: {problem}") from None
        shutil.rmtree(folder)
        counts[what.split(" ")[0]] = counts.get(what.split(" ")[0], 0) + 1
        return found

    calls = attempt("clean", None, tracer.Failure(FOREVER, 1, 0)).calls
    for number in range(1, calls + 1, every):
        attempt(f"kill before call {number}", number, None)
        for error, count in FEW if every > 1 else FAILURES:
            name = f"{errno.errorcode[error]} from call {number} on, {'once' if count == 1 else 'for ever'}"
            failed = attempt(name, None, tracer.Failure(number, count, error))
            assert failed.refused or failed.calls < number, f"{subject}, {name}: no call was refused"
    print(json.dumps({"calls": calls, "points": counts, "refused": sorted({*filter(None, refused)})}))
    shutil.rmtree(root)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
