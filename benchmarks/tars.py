"""Tar shards beside `webdataset`: reading in order, opening, resuming, single rows. `python -m benchmarks.tars`.

Both read the same shards in one process, in turn, to dicts of bytes. Rows of midepoch are read without its cache of
blocks: every pass opens the dataset again.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import data
from benchmarks.latency import Measured

MANY = 10_000
SHARDS = 4
SIZES = {"2 KB": (2_000, 40_000), "20 KB": (20_000, 16_000), "100 KB": (100_000, 4_000), "1 MB": (1_000_000, 300)}
"""Average bytes of an image, and number of samples."""

_OPEN = """
import sys, time
import numpy, pyarrow, midepoch, midepoch.open, midepoch.loader, midepoch.sources.lake, pyarrow.fs
start = time.perf_counter()
ds = midepoch.from_files(sys.argv[1], index_dir=sys.argv[2], validate=sys.argv[3] == "1")
took = time.perf_counter() - start
assert len(ds) == int(sys.argv[4])
print(took)
"""


def write_shards(folder: Path, size: int, count: int) -> Path:
    """Write samples of an image of about ``size`` bytes and a class."""
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).bytes(3 * size)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as archive:
            for number in range(count // SHARDS):
                image = noise[number % size :][: size // 2 + number * 7919 % size]
                for extension, value in (("jpg", image), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{shard:04d}{number:06d}.{extension}")
                    info.size = len(value)
                    archive.addfile(info, io.BytesIO(value))
    (folder / "done").write_text("")
    return folder


def in_order(folder: Path) -> list[Measured]:
    """Time of a pass over all samples, relative to webdataset."""
    import webdataset as wds

    import midepoch

    measured = []
    for name, (size, count) in SIZES.items():
        shards = write_shards(folder / f"tars-{size}", size, count)
        contenders: dict[str, Callable[[], Iterator[Any]]] = {
            "webdataset": lambda shards=shards: iter(  # type: ignore[misc]
                wds.WebDataset(f"{shards}/{{0000..{SHARDS - 1:04d}}}.tar", shardshuffle=False)
            ),
            "midepoch": lambda shards=shards: iter(midepoch.from_files(shards)),  # type: ignore[misc]
        }
        start = time.perf_counter()
        midepoch.from_files(shards, force_reindex=True)
        print(f"{name}: first open {time.perf_counter() - start:.2f} s")
        times: dict[str, list[float]] = {each: [] for each in contenders}
        totals = set()
        for _ in range(7):
            for each, make in contenders.items():
                start = time.perf_counter()
                totals.add(sum(len(sample["jpg"]) + len(sample["cls"]) for sample in make()))
                times[each].append(time.perf_counter() - start)
        assert len(totals) == 1
        theirs, ours = (np.array(times[each]) for each in contenders)
        print(f"{name}: webdataset {theirs.min():.3f} s, midepoch {ours.min():.3f} s; medians {np.median(theirs):.3f} "
              f"and {np.median(ours):.3f} s; {totals.pop() / 1e6 / ours.min():,.0f} MB/s")  # fmt: skip
        measured.append(Measured(f"{name} samples in order, time × webdataset's", "×", 0.5, ours.min() / theirs.min()))
    return measured


def single_rows(folder: Path) -> None:
    """Print the time of a random row, which webdataset cannot read."""
    import midepoch

    for name, (size, count) in SIZES.items():
        ds = midepoch.from_files(write_shards(folder / f"tars-{size}", size, count), cache_bytes=1)
        rows = np.random.default_rng(1).integers(0, len(ds), 100).tolist()
        start = time.perf_counter()
        for row in rows:
            ds[row]
        print(f"{name}: a random row in {(time.perf_counter() - start) / len(rows) * 1e3:.2f} ms, nothing cached")


def resumed(folder: Path) -> list[Measured]:
    """Time to the first batch after a resume at 90 %, relative to a fresh start."""
    import midepoch

    size, count = SIZES["20 KB"]
    shards = write_shards(folder / f"tars-{size}", size, count)
    times: dict[float, list[float]] = {0.0: [], 0.9: []}
    for _ in range(9):
        for share, found in times.items():
            start = time.perf_counter()
            loader = midepoch.from_files(shards).shuffle(seed=1).loader(64)
            position = int(share * count) // 64 * 64
            loader.load_state_dict(
                {**loader.state_dict(), "position": position, "cursor": [[0, position]] if position else []}
            )
            next(iter(loader))
            found.append(time.perf_counter() - start)
    fresh, late = (float(np.median(found)) for found in times.values())
    print(f"first batch: fresh {fresh * 1e3:.1f} ms, resumed at 90 % {late * 1e3:.1f} ms (medians)")
    return [Measured("resume at 90 %, × a fresh start", "×", 1.2, late / fresh)]


def second_open(folder: Path) -> list[Measured]:
    """Time of the second open of many small shards, in fresh processes."""
    shards, index = folder / "many-tars", folder / "many-tars-index"
    if not (shards / "done").exists():
        shards.mkdir(parents=True, exist_ok=True)
        (shards / "first.tar").unlink(missing_ok=True)
        with tarfile.open(shards / "first.tar", "w") as archive:
            for number in range(10):
                info = tarfile.TarInfo(f"{number}.txt")
                info.size = 5
                archive.addfile(info, io.BytesIO(b"12345"))
        contents = (shards / "first.tar").read_bytes()
        (shards / "first.tar").unlink()
        for number in range(MANY):
            (shards / f"{number:06d}.tar").write_bytes(contents)
        (shards / "done").write_text("")
    measured = []
    for paths in (str(shards), f"{shards}/{{000000..{MANY - 1:06d}}}.tar"):
        for validate in (1, 0):
            runs = []
            for _ in range(8):
                command = [sys.executable, "-c", _OPEN, paths, str(index), str(validate), str(10 * MANY)]
                runs.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            what = (" by braces" if "{" in paths else "") + ("" if validate else ", validate=False")
            measured.append(Measured(f"second open of {MANY:,} shards{what}", "ms", 50, min(runs[1:]) * 1000))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR / "tars")
    folder = parser.parse_args().data_dir
    measured = second_open(folder) + resumed(folder)
    single_rows(folder)
    for each in measured + in_order(folder):
        verdict = "passed" if each.passed else "LOST  "
        print(f"{verdict}  {each.bar}: {each.measured:.2f} {each.unit} (at most {each.allowed:g})")


if __name__ == "__main__":
    main()
