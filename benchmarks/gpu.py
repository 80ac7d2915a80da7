"""Three training loops on a GPU, fed by midepoch and by torch's DataLoader: `python -m benchmarks.gpu`.

Needs a GPU, torch, torchvision and pyarrow; makes its own data (about 3 GB in a temporary folder).

- tokens: shuffled rows of 2,048 tokens → a small GPT in bf16
- text: filter → tokenize → mix of two sources → pack to 2,048 → the same GPT
- images: JPEGs of 38 KB → random crop of 224 → batches of 256 → ResNet-50 in bf16

Each loop runs on one synthetic batch that is on the GPU (the limit), with midepoch and with DataLoader, in turn, some
rounds; then both loaders run alone, into pinned memory. Medians are reported, and every bar as ok or LOST. Every figure
is printed (and written to ``--json``) as soon as it is measured.

`--smoke` runs everything on a CPU with tiny models; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.feeding import files as data
from benchmarks.feeding import measure, routes
from benchmarks.feeding.codec import codec
from benchmarks.feeding.measure import Figures
from benchmarks.feeding.models import Training
from benchmarks.feeding.work import Scale, crop
from benchmarks.ranks import Measured

OURS, TORCH, LIMIT = "midepoch", "DataLoader", "synthetic"
MAKERS: dict[str, Callable[..., Any]] = {OURS: routes.ours, TORCH: routes.torchs}
FEW_WORKERS = 8


@dataclass
class Report:
    """All figures by loop, kind and contender. Written after every one, so that a run cut short is not lost."""

    path: Path | None
    about: dict[str, Any]
    figures: dict[str, dict[str, dict[str, list[Any]]]] = field(default_factory=dict)
    bars: list[Measured] = field(default_factory=list)

    def add(self, loop: str, kind: str, contender: str, found: Figures | float) -> None:
        value = asdict(found) if isinstance(found, Figures) else found
        self.figures.setdefault(loop, {}).setdefault(kind, {}).setdefault(contender, []).append(value)
        print(f"  {loop:7} {kind:22} {contender:22} {_line(found)}", flush=True)
        self.write()

    def median(self, loop: str, kind: str, contender: str, name: str | None = None) -> float | None:
        values = self.figures.get(loop, {}).get(kind, {}).get(contender, [])
        values = values if name is None else [value[name] for value in values]
        return statistics.median(values) if values else None

    def write(self) -> None:
        if self.path is not None:
            bars = [{**bar._asdict(), "passed": bar.passed} for bar in self.bars]
            self.path.write_text(json.dumps({**self.about, "figures": self.figures, "bars": bars}, indent=1))


def _line(found: Figures | float) -> str:
    if not isinstance(found, Figures):
        return f"{found:10.3f}"
    first = "" if found.first_batch is None else f"  first batch {found.first_batch:6.2f} s"
    return (
        f"{found.rows_per_second:12,.0f} rows/s  next() {100 * found.next_share:5.1f} %"
        f"  main process {found.cpu_ms:7.2f} ms CPU/batch{first}"
    )


@dataclass(frozen=True)
class Bench:
    """The settings of a run."""

    scale: Scale
    files: data.Files
    device: str
    workers: int
    seconds: float
    warm_up: float
    rounds: int
    options: dict[str, Any]
    to_device: bool
    pin: bool

    def make(self, contender: str, loop: str, workers: int, *, on_device: bool = False) -> Callable[[], Any]:
        """Return a function that makes a loader."""
        options: dict[str, Any] = {"pin_memory": self.pin}
        if contender == OURS:
            options |= self.options
            if on_device and self.to_device:
                options = {**self.options, "device": self.device}
        return lambda: MAKERS[contender](loop, self.files, self.scale, workers, **options)

    def run(self, loop: str, report: Report) -> None:
        """Measure everything of a loop, all contenders in turn."""
        routes.dataset(loop, self.files, self.scale)  # the first open indexes the files
        training = Training(loop, self.scale, self.device)
        times = {"seconds": self.seconds, "warm_up": self.warm_up}
        measure.synthetic(training, seconds=self.warm_up, warm_up=self.warm_up)  # cuDNN and cuBLAS choose kernels
        for _ in range(self.rounds):
            report.add(loop, "training", LIMIT, measure.synthetic(training, **times))
            for contender in MAKERS:
                make = self.make(contender, loop, self.workers, on_device=True)
                report.add(loop, "training", contender, measure.trained(training, make, **times))
            for contender in MAKERS:
                make = self.make(contender, loop, self.workers)
                report.add(loop, "loader alone", contender, measure.alone(make, **times))
            for contender in MAKERS:
                seconds = measure.first_batch(self.make(contender, loop, 0))
                report.add(loop, "first batch, 0 workers", contender, seconds)
            if loop == "images":
                few = min(FEW_WORKERS, self.workers)
                report.add(loop, f"loader, {few} workers", OURS, measure.alone(self.make(OURS, loop, few), **times))
                report.add(loop, "one thread, rows/s", "crop alone", self._one_thread())

    def _one_thread(self) -> float:
        """Rows per second of the crop in a plain loop with one thread."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        jpegs = routes.column(self.files.images[:1], "jpeg").slice(0, 256).to_pylist()
        generator, count, start = np.random.default_rng(0), 0, time.perf_counter()
        while time.perf_counter() < start + self.warm_up:
            crop(jpegs[count % len(jpegs)], generator, self.scale.crop)
            count += 1
        torch.set_num_threads(threads)
        return count / (time.perf_counter() - start)


def summarize(loop: str, report: Report) -> None:
    """Print the medians of a loop, and judge its bars."""
    limit = report.median(loop, "training", LIMIT, "rows_per_second")
    print(f"{loop + ', medians':42} {OURS:>12} {TORCH:>12}")
    for name, kind, figure, form in (
        ("loader alone, rows/s", "loader alone", "rows_per_second", ",.0f"),
        ("loader alone, main process, ms CPU/batch", "loader alone", "cpu_ms", ".2f"),
        ("training, rows/s", "training", "rows_per_second", ",.0f"),
        ("training, share of the synthetic rate", "training", "rows_per_second", ".3f"),
        ("training, share of the time in next()", "training", "next_share", ".4f"),
        ("first batch, all workers, s", "loader alone", "first_batch", ".3f"),
        ("first batch, 0 workers, s", "first batch, 0 workers", None, ".3f"),
    ):
        values = [report.median(loop, kind, who, figure) for who in (OURS, TORCH)]
        if "synthetic" in name:
            values = [_ratio(value, limit) for value in values]
        print(f"  {name:40}" + "".join(f" {'-' if value is None else format(value, form):>12}" for value in values))
    new = bars(loop, report, limit)
    report.bars += new
    for bar in new:
        print(verdict(bar), flush=True)
    report.write()


def verdict(bar: Measured) -> str:
    sign = ">=" if bar.least else "<="
    return f"{'ok  ' if bar.passed else 'LOST'} {bar.name:60} {bar.measured:8.3f} {bar.unit} (bar {sign} {bar.bar:g})"


def bars(loop: str, report: Report, limit: float | None) -> list[Measured]:
    """The bars of a loop that could be measured."""

    def of(kind: str, who: str, name: str | None = None) -> float | None:
        return report.median(loop, kind, who, name)

    ours = of("training", OURS, "rows_per_second")
    alone = of("loader alone", OURS, "rows_per_second")
    found: list[tuple[str, float | None, float, str, bool]] = [
        (f"{loop}: share of the synthetic rate", _ratio(ours, limit), 0.99, "x", True),
        (f"{loop}: share of the time in next()", of("training", OURS, "next_share"), 0.01, "", False),
    ]
    if loop == "images":
        peer = of("loader alone", TORCH, "rows_per_second")
        few = next((name for name in report.figures[loop] if name.startswith("loader, ")), "")
        thread = of("one thread, rows/s", "crop alone")
        found.append(("images: loader alone beside DataLoader", _ratio(alone, peer), 1.3, "x", True))
        found.append(
            (f"images: {few} beside one thread", _ratio(of(few, OURS, "rows_per_second"), thread), 6, "x", True)
        )
    if loop == "text":
        first, inline = of("loader alone", OURS, "first_batch"), of("first batch, 0 workers", OURS)
        found.append(("text: first batch, all workers", first, 1.0, "s", False))
        found.append(("text: first batch, all workers beside none", _ratio(first, inline), 2, "x", False))
    return [Measured(name, value, bar, unit, least) for name, value, bar, unit, least in found if value is not None]


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", default=",".join(routes.LOOPS), help="loops, comma-separated")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, after a warm-up of 3.5 s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", action="store_true", help="midepoch puts batches on the GPU: loader(device=…)")
    parser.add_argument("--worker-type", help="midepoch's loader(worker_type=…): thread, process or auto")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    options.loops = tuple(options.loops.split(","))
    if unknown := sorted(set(options.loops) - set(routes.LOOPS)):
        parser.error(f"unknown loops: {', '.join(unknown)}; expected some of {', '.join(routes.LOOPS)}")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no GPU was found. Use --smoke to run everything on the CPU with tiny sizes.")
    return options


def bench_of(options: argparse.Namespace, files: data.Files, scale: Scale) -> Bench:
    """Return the settings; arguments that this midepoch lacks are reported and left out."""
    extra: dict[str, Any] = {}
    if options.worker_type is not None:
        if routes.accepts("worker_type"):
            extra["worker_type"] = options.worker_type
        else:
            print("this midepoch has no loader(worker_type=…): the default is measured")
    to_device = options.device and routes.accepts("device")
    if options.device and not to_device:
        print("this midepoch has no loader(device=…): pinned batches are copied with .to(non_blocking=True)")
    smoke, cuda = options.smoke, torch.cuda.is_available()
    return Bench(
        scale=scale,
        files=files,
        device="cpu" if smoke else "cuda",
        workers=min(2, options.workers) if smoke else options.workers,
        seconds=0.1 if smoke else options.seconds,
        warm_up=0.02 if smoke else 3.5,  # every slot of shared memory is page-locked once, in the first 50 batches
        rounds=1 if smoke else options.rounds,
        options=extra,
        to_device=to_device,
        pin=cuda and not smoke,
    )


def main(arguments: list[str] | None = None) -> Report:
    options = parse(arguments)
    began = time.perf_counter()
    scale = Scale().smoke if options.smoke else Scale()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not options.smoke else "CPU (smoke)"
    about = {**machine.describe(), "torch": torch.__version__, "device": device, "codec": codec().name}
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    report = Report(options.json, {"machine": about})
    with tempfile.TemporaryDirectory(prefix="midepoch-gpu-") as folder:
        files = data.make(Path(folder), scale, options.loops)
        size = data.warm(files)
        print(f"made {size / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s", flush=True)
        bench = bench_of(options, files, scale)
        for loop in options.loops:
            bench.run(loop, report)
            summarize(loop, report)
    print(f"{time.perf_counter() - began:.0f} s in all")
    lost = [bar for bar in report.bars if not bar.passed]
    print("nothing is lost" if not lost else "Where we lose:\n" + "\n".join(map(verdict, lost)), flush=True)
    return report


if __name__ == "__main__":
    main()
