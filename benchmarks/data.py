"""The two datasets every contender reads, made once and kept in a folder.

400,000 rows of about 1 KB text (`id`, `text`) and 200,000 rows of 1,024 int32 tokens (`id`, `tokens`), each as Parquet
and as the Arrow files that `datasets.load_dataset` leaves in its cache. `python -m benchmarks.data` makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TEXT_ROWS = 400_000
TOKEN_ROWS = 200_000
TOKENS_PER_ROW = 1_024
SHARDS = 8
FORMAT = 1  # raise it when the generated data changes, so that old folders are not reused
DEFAULT_DIR = Path(tempfile.gettempdir()) / "midepoch-bench"


@dataclass(frozen=True)
class Files:
    """One dataset: its Arrow cache files, the Parquet shards they came from, and how many rows."""

    rows: int
    arrow: tuple[str, ...]
    parquet: tuple[str, ...]

    def batches(self, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of the Arrow files in order, memory-mapped."""
        for path in self.arrow:
            with pa.memory_map(path) as source, pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    yield batch.select(columns) if columns else batch


@dataclass(frozen=True)
class Data:
    """Both datasets and the folder below which contenders put what they convert."""

    folder: Path
    text: Files
    tokens: Files


def data_folder(data_dir: Path, scale: float) -> Path:
    """Where the data of one scale lives."""
    return data_dir / f"v{FORMAT}-scale-{scale:g}"


def load(data_dir: Path = DEFAULT_DIR, scale: float = 1.0) -> Data:
    """The data of this scale, made first if it is not there."""
    folder = data_folder(data_dir, scale)
    manifest = folder / "manifest.json"
    if not manifest.exists():
        make(folder, scale)
    found: dict[str, Any] = json.loads(manifest.read_text())
    files = {
        name: Files(found[name]["rows"], tuple(found[name]["arrow"]), tuple(found[name]["parquet"]))
        for name in ("text", "tokens")
    }
    return Data(folder, files["text"], files["tokens"])


def make(folder: Path, scale: float) -> None:
    """Write Parquet shards, let `datasets` cache them as Arrow, record the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "text": _make_dataset(folder, "text", max(SHARDS, round(TEXT_ROWS * scale))),
        "tokens": _make_dataset(folder, "tokens", max(SHARDS, round(TOKEN_ROWS * scale))),
    }
    partial = folder / "manifest.json.partial"
    partial.write_text(json.dumps(manifest, indent=1))
    os.replace(partial, folder / "manifest.json")


def _make_dataset(folder: Path, name: str, rows: int) -> dict[str, Any]:
    import datasets

    rng = np.random.default_rng(7)
    shards = folder / f"{name}-parquet"
    shards.mkdir(exist_ok=True)
    bounds = np.linspace(0, rows, SHARDS + 1).astype(int)
    blob = _words(rng) if name == "text" else ""
    paths = []
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        ids = np.arange(start, stop)
        column = _text(rng, blob, len(ids)) if name == "text" else _tokens(rng, len(ids))
        path = shards / f"part-{shard:05d}.parquet"
        # Neither compression nor dictionary: a peer that reads Parquet pays for no decoding it could do without.
        pq.write_table(
            pa.table({"id": pa.array(ids, pa.int64()), name: column}),
            path,
            row_group_size=10_000,
            compression="none",
            use_dictionary=False,
        )
        paths.append(str(path))
    cached = datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=str(folder / f"{name}-cache"))
    if len(cached) != rows:
        raise RuntimeError(f"expected {rows} rows of {name} in the cache, found {len(cached)}")
    return {"rows": rows, "arrow": [f["filename"] for f in cached.cache_files], "parquet": paths}


def _words(rng: np.random.Generator) -> str:
    """About 8 MB of lower-case words with spaces between them."""
    letters = rng.integers(97, 123, size=8_000_000, dtype=np.uint8)
    letters[np.cumsum(rng.integers(3, 12, size=1_000_000)) % len(letters)] = 32
    return letters.tobytes().decode("ascii")


def _text(rng: np.random.Generator, blob: str, rows: int) -> pa.Array:
    lengths = np.clip(rng.normal(1_024, 200, rows), 200, 2_000).astype(int)
    starts = rng.integers(0, len(blob) - 2_000, rows)
    texts = [blob[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    for row in range(0, rows, 50):  # 2 % of rows are not ASCII, as in English web text with some punctuation
        texts[row] += " naïve café – 日本語"
    return pa.array(texts, pa.string())


def _tokens(rng: np.random.Generator, rows: int) -> pa.Array:
    values = rng.integers(0, 50_257, size=rows * TOKENS_PER_ROW, dtype=np.int32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values), TOKENS_PER_ROW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    data = load(arguments.data_dir, arguments.scale)
    for name, files in (("text", data.text), ("tokens", data.tokens)):
        size = sum(os.path.getsize(p) for p in files.arrow)
        print(f"{name}: {files.rows:,} rows, {len(files.arrow)} Arrow files, {size / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
