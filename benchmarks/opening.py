"""Opening many shards again, and resuming far into them: `python -m benchmarks.opening`.

For each kind of source: the second opening of 10,000 shards, in a fresh process in which everything is imported, beside
the time that listing the folder and calling stat for each file takes without any library. The bar: 50 ms. Then 200
larger shards: the time from opening to the first batch, at 90 % of an epoch and from the beginning, in turn, medians.
The bar: 1.2 ×.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

OPEN_BAR, RESUME_BAR = 50.0, 1.2

_OPEN = """
import json, os, sys, time
import midepoch
call, warm = sys.argv[1], sys.argv[2]
eval(warm)  # everything is imported
def listed(folder):
    for root, _, _ in os.walk(folder):
        for entry in os.scandir(root):
            entry.stat()
times = {}
for what, action in (("listing", lambda: listed(sys.argv[3])), ("opening", lambda: eval(call))):
    began = time.perf_counter()
    action()
    times[what] = 1e3 * (time.perf_counter() - began)
print(json.dumps(times))
"""

_FIRST = """
import json, sys, time
import midepoch
call, warm, position = sys.argv[1], sys.argv[2], float(sys.argv[3])
next(iter(eval(warm).shuffle(seed=1).loader(8)))
began = time.perf_counter()
loader = eval(call).shuffle(seed=1).loader(8)
state = loader.state_dict()
state["position"] = int(position * len(loader)) * 8
state["cursor"] = [[0, state["position"]]]
loader.load_state_dict(state)
next(iter(loader))
print(1e3 * (time.perf_counter() - began))
"""


def write_megatron(prefix: Path, lengths: np.ndarray) -> None:
    """Write documents of these lengths, of random tokens."""
    np.random.default_rng(0).integers(0, 50_000, int(lengths.sum()), dtype=np.uint16).tofile(f"{prefix}.bin")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def parquet(folder: Path, shards: int, rows: int) -> str:
    table = pa.table({"id": range(rows), "text": ["x" * 200] * rows})
    for number in range(shards):
        pq.write_table(table, folder / f"{number:05d}.parquet", row_group_size=500)
    return f"midepoch.from_files({str(folder)!r})"


def tokens(folder: Path, shards: int, rows: int) -> str:
    for number in range(shards):
        np.save(folder / f"{number:05d}.npy", np.arange(rows * 16, dtype=np.uint16))
    return f"midepoch.from_tokens({str(folder)!r}, 16)"


def megatron(folder: Path, shards: int, rows: int) -> str:
    for number in range(shards // 2):  # two files each
        write_megatron(folder / f"{number:05d}", np.full(2 * rows, 16))
    return f"midepoch.from_megatron({str(folder)!r})"


def tar(folder: Path, shards: int, rows: int) -> str:
    import io

    for number in range(shards):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as shard:
            for row in range(rows):
                member = tarfile.TarInfo(f"{number:05d}{row:05d}.txt")
                member.size = 16
                shard.addfile(member, io.BytesIO(b"x" * 16))
    return f"midepoch.from_files({str(folder)!r})"


def images(folder: Path, shards: int, rows: int) -> str:
    """One file is one row here. Large shards are 25 files of 4 KB."""
    for number in range(shards if rows < 10 else 25 * shards):
        (folder / f"{number % 100:02d}").mkdir(exist_ok=True)
        (folder / f"{number % 100:02d}" / f"{number:06d}.jpg").write_bytes(number.to_bytes(8, "little") * 512)
    return f"midepoch.from_files({str(folder)!r}).with_format('arrow')"


def text(folder: Path, shards: int, rows: int) -> str:
    for number in range(shards):
        (folder / f"{number:05d}.txt").write_text("".join(f"{'word ' * 40}{row}\n" for row in range(rows)))
    return f"midepoch.from_files({str(folder)!r})"


def array(folder: Path, shards: int, rows: int) -> str:
    for number in range(shards):
        (folder / f"{number:05d}.json").write_text(json.dumps([{"id": row, "text": "x" * 200} for row in range(rows)]))
    return f"midepoch.from_files({str(folder)!r})"


KINDS: dict[str, Callable[[Path, int, int], str]] = {
    "parquet": parquet,
    "tokens": tokens,
    "megatron": megatron,
    "tar": tar,
    "images": images,
    "text": text,
    "array": array,
}


def run(code: str, cache: Path, *words: str) -> str:
    environment = {**os.environ, "MIDEPOCH_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    print(f"{'':10} {'listing':>9} {'opening':>9} {'beginning':>10} {'at 90 %':>9} {'ratio':>6}")
    for kind, write in KINDS.items():
        if args.only not in kind:
            continue
        with tempfile.TemporaryDirectory() as name:
            many, small, large, cache = (Path(name) / each for each in ("many", "small", "large", "cache"))
            for folder in (many, small, large):
                folder.mkdir()
            call, warm, other = write(many, args.shards, 2), write(small, 2, 2), write(large, 200, 1000)
            run(_OPEN, cache, call, warm, str(many))
            times = [json.loads(run(_OPEN, cache, call, warm, str(many))) for _ in range(args.rounds)]
            listing, opening = (min(each[what] for each in times) for what in ("listing", "opening"))
            run(_FIRST, cache, other, warm, "0")
            firsts = [[float(run(_FIRST, cache, other, warm, at)) for at in ("0", "0.9")] for _ in range(args.rounds)]
            begin, late = (median(column) for column in zip(*firsts, strict=True))
        lost = [what for what, bad in (("opening", opening > OPEN_BAR), ("resume", late > RESUME_BAR * begin)) if bad]
        verdict = f"LOST: {', '.join(lost)}" if lost else "passed"
        print(
            f"{kind:10} {listing:6.1f} ms {opening:6.1f} ms {begin:7.1f} ms {late:6.1f} ms {late / begin:6.2f}  "
            f"{verdict}"
        )


if __name__ == "__main__":
    main()
