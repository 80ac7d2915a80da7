"""The cost for a CPU of feeding a GPU: `python -m benchmarks.feed`.

- transport: batches of 38 MB through two workers whose map returns an image that exists: CPU of the main process for
  each batch, beside torch's DataLoader
- threads: the JPEG map with threads beside processes: images per second, and memory (PSS without
  the pages of mapped files) of all processes
- first: the first batch of text → filter → tokenize → mix → pack with many workers beside none, in fresh processes,
  and where its seconds were spent
- memory: PSS of 8 workers over an index of 10⁸ rows, beyond that of one process

All contenders of a part run in turn. Medians are judged, and every bar printed as ok or LOST.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

import midepoch
from benchmarks import huge, machine
from benchmarks.feeding import files as data
from benchmarks.feeding import fresh, measure, routes
from benchmarks.feeding.codec import codec
from benchmarks.feeding.work import Scale
from benchmarks.gpu import verdict
from benchmarks.ranks import Measured


@dataclass(frozen=True)
class Settings:
    """The sizes of a run."""

    folder: Path
    smoke: bool
    seconds: float
    rounds: int
    workers: int

    @property
    def scale(self) -> Scale:
        return Scale().smoke if self.smoke else Scale()

    @property
    def of_data(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "smoke": self.smoke}


@dataclass(frozen=True)
class Existing:
    """A map that does nothing: every row gets the same image."""

    size: int

    @property
    def __name__(self) -> str:
        return "existing"

    def __call__(self, number: int) -> dict[str, Any]:
        return {"image": image_of(self.size)}


@dataclass(eq=False)
class ExistingRows(Dataset[Any]):
    rows: int
    size: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "image": torch.from_numpy(image_of(self.size))}


_IMAGES: dict[int, Any] = {}


def image_of(size: int) -> Any:
    """The image of a process, made once."""
    if size not in _IMAGES:
        _IMAGES[size] = np.random.default_rng(0).integers(0, 256, (3, size, size), dtype=np.uint8)
    return _IMAGES[size]


def transport(settings: Settings) -> tuple[list[Measured], dict[str, Any]]:
    """Large batches through two workers."""
    scale, rows = settings.scale, 200 * settings.scale.image_batch
    table, path = pa.table({"id": np.arange(rows)}), settings.folder / "ids.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)

    def ours() -> Any:
        ds = midepoch.from_files(path, index_dir=settings.folder / "index").map(
            Existing(scale.crop), input_columns="id"
        )
        return ds.loader(scale.image_batch, num_workers=2, persistent_workers=True)

    def torchs() -> Any:
        rows_ = ExistingRows(rows, scale.crop)
        return DataLoader(rows_, scale.image_batch, num_workers=2, persistent_workers=True)

    contenders: dict[str, Callable[[], Any]] = {"midepoch": ours, "DataLoader": torchs}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(settings.rounds):
        for name, make in contenders.items():
            figures = measure.alone(make, seconds=settings.seconds, warm_up=settings.seconds / 4)
            found[name].append(asdict(figures))
            print(
                f"  {name:12} {figures.rows_per_second / scale.image_batch:7.1f} batches/s, main process "
                f"{figures.cpu_ms:6.2f} ms CPU/batch, the caller's thread {figures.thread_ms:6.2f}",
                flush=True,
            )
    cost = {name: median(runs, "cpu_ms") for name, runs in found.items()}
    rate = {name: median(runs, "rows_per_second") for name, runs in found.items()}
    megabytes = scale.image_batch * 3 * scale.crop**2 / 1e6
    return [
        Measured(f"batches of {megabytes:.1f} MB: CPU of the main process", cost["midepoch"], 0.3, "ms"),
        Measured("the same beside DataLoader", cost["midepoch"] / cost["DataLoader"], 1, "x"),
        Measured("batches/s beside DataLoader", rate["midepoch"] / rate["DataLoader"], 1, "x", least=True),
    ], found


def threads(settings: Settings) -> tuple[list[Measured], dict[str, Any]]:
    """The JPEG map with threads and with processes."""
    kinds: list[str | None] = ["process", "thread"]
    if not routes.accepts("worker_type"):
        print("  this midepoch has no loader(worker_type=…): threads are left out")
        kinds = [None]
    counts = (2,) if settings.smoke else (2, 4, 8)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(settings.rounds):
        for workers in counts:
            for kind in kinds:
                name = f"{workers} {kind or 'process'}"
                one = fresh.run("jpeg", **settings.of_data, workers=workers, worker_type=kind, seconds=settings.seconds)
                runs.setdefault(name, []).append(one)
                print(
                    f"  {name:10} {one['rate']:9,.0f} images/s, {own(one['megabytes']):7.0f} MB and "
                    f"{one['megabytes']['Pss_File']:.0f} MB of files (before: {own(one['before']):.0f} MB), "
                    f"main process {one['cpu_ms']:.1f} ms CPU/batch",
                    flush=True,
                )
    bars = []
    for workers in counts if len(kinds) > 1 else ():
        by_thread, by_process = runs[f"{workers} thread"], runs[f"{workers} process"]
        rate = median(by_thread, "rate") / median(by_process, "rate")
        used = [statistics.median(own(run["megabytes"]) for run in runs_) for runs_ in (by_thread, by_process)]
        bars.append(Measured(f"JPEG map, {workers} threads beside processes: rate", rate, 0.95, "x", least=True))
        bars.append(Measured(f"JPEG map, {workers} threads beside processes: memory", used[0] / used[1], 0.5, "x"))
    return bars, runs


def first(settings: Settings) -> tuple[list[Measured], dict[str, Any]]:
    """The first batch of a text pipeline."""
    counts = (0, settings.workers)
    seconds: dict[int, list[float]] = {workers: [] for workers in counts}
    for _ in range(settings.rounds):
        for workers in counts:
            one = fresh.run("first_batch", **settings.of_data, workers=workers)
            seconds[workers].append(one["seconds"])
            print(f"  {workers:3} workers: first batch after {one['seconds']:.3f} s", flush=True)
    watched: dict[str, Any] = {}
    for workers in counts[settings.smoke :]:
        for watch in ("workers", "main"):
            one = fresh.run("first_batch", **settings.of_data, workers=workers, watch=watch)
            watched[f"{workers} workers, {watch}"] = one
            print(f"  {workers} workers, watching the {watch}: {one['seconds']:.3f} s")
            lines = one["main"] if watch == "main" else [f"{name}: {value}" for name, value in one["workers"].items()]
            print("\n".join(f"    {line}" for line in lines), flush=True)
    none, many = (statistics.median(seconds[workers]) for workers in counts)
    return [
        Measured(f"first batch of text, {settings.workers} workers", many, 1.0, "s"),
        Measured("the same beside none", many / none, 2, "x"),
    ], {"seconds": seconds, "watched": watched}


def memory(settings: Settings) -> tuple[list[Measured], dict[str, Any]]:
    """Workers over an index of many rows."""
    blocks, workers = (1_000, 2) if settings.smoke else (100_000, 8)
    path, index_dir = huge.make(settings.folder, blocks), str(settings.folder / "index")
    midepoch.from_files(path, index_dir=index_dir)
    found: dict[str, Any] = {}
    bars = []
    for select in (False, True):
        arguments = {"path": str(path), "index_dir": index_dir, "select": select, "batches": 8 * workers}
        what = "selected rows" if select else "all rows"
        one = found[f"{what}, one process"] = fresh.run("index", **arguments, workers=0, method=None)
        print(f"  {one['rows']:,} rows, {what}, one process: {one['megabytes']}", flush=True)
        for method in (None, "spawn"):
            name = f"{what}, {workers} workers, {method or 'default start method'}"
            many = found[name] = fresh.run("index", **arguments, workers=workers, method=method)
            beyond = (many["megabytes"]["Pss"] - one["megabytes"]["Pss"]) / 1024
            print(f"  {name}: {many['megabytes']}", flush=True)
            bars.append(Measured(f"{name}: PSS beyond one process", beyond, 0.5, "GiB"))
    return bars, found


def median(runs: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def own(megabytes: dict[str, float]) -> float:
    """Memory without pages of files: those of the mapped data are as many for threads, and the kernel may drop them."""
    return megabytes["Pss"] - megabytes["Pss_File"]


PARTS: dict[str, Callable[[Settings], tuple[list[Measured], dict[str, Any]]]] = {
    "transport": transport,
    "threads": threads,
    "first": first,
    "memory": memory,
}
LOOPS = {"threads": "images", "first": "text"}
"""The data of a part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement of a rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=14, help="of the first batch")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown parts: {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    report: dict[str, Any] = {"machine": {**machine.describe(), "torch": torch.__version__, "codec": codec().name}}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    with tempfile.TemporaryDirectory(prefix="midepoch-feed-") as name:
        seconds, rounds = (0.2, 1) if options.smoke else (options.seconds, options.rounds)
        workers = min(2, options.workers) if options.smoke else options.workers
        settings = Settings(Path(name), options.smoke, seconds, rounds, workers)
        began = time.perf_counter()
        made = data.make(settings.folder, settings.scale, tuple(LOOPS[part] for part in parts if part in LOOPS))
        data.warm(made)
        (settings.folder / "files.json").write_text(json.dumps(asdict(made)))
        print(f"made the data in {time.perf_counter() - began:.0f} s", flush=True)
        for part in parts:
            print(part, flush=True)
            bars, figures = PARTS[part](settings)
            report[part] = {"figures": figures, "bars": [{**bar._asdict(), "passed": bar.passed} for bar in bars]}
            for bar in bars:
                print(verdict(bar), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
