"""Decoders of images side by side, and `Dataset.decode` beside a bare loop. `python -m benchmarks.media`.

All are measured in turn, in one process: JPEGs of about 40 KB (500 × 400) in batches of 64, with one thread and with
several, as arrays of the full size and as 224 × 224 (scaled and cropped). One thread is measured in CPU time of the
process, which other programs on the machine change less; several threads in wall time. The bar: `Dataset.decode` ≥ 0.95
of the loop, the median of both. Decoders that are not installed are left out.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

import midepoch

BAR = 0.95
SIZE = 224
BATCH = 64  # the arrays of a batch are kept until it is complete: in new memory they cost 20 % more than in the same
Decoder = Callable[[bytes], Any]


def picture(number: int, width: int = 500, height: int = 400) -> Image.Image:
    """Waves and noise, which compress like a photograph."""
    generator = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / (30 + number % 7) + band) + 60 * np.cos(y / (25 - 3 * band)) for band in range(3)]
    noisy = np.stack(waves, -1) + generator.normal(0, 9, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def files(count: int, kind: str, **options: Any) -> list[bytes]:
    streams = [io.BytesIO() for _ in range(count)]
    for number, stream in enumerate(streams):
        picture(number).save(stream, kind, **options)
    return [stream.getvalue() for stream in streams]


def decoders() -> Iterator[tuple[str, Decoder]]:
    """The decoders of the full size, with the settings that yield the same pixels."""
    yield "Pillow", lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    try:
        import simplejpeg
    except ImportError:
        pass
    else:
        yield "simplejpeg", lambda data: simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False)
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_image, decode_jpeg
    except (ImportError, RuntimeError):
        pass
    else:
        yield (
            "torchvision decode_jpeg",
            lambda d: decode_jpeg(torch.frombuffer(d, dtype=torch.uint8), ImageReadMode.RGB),
        )
        yield "torchvision decode_image", lambda d: decode_image(torch.frombuffer(d, dtype=torch.uint8), "RGB")
    try:
        from turbojpeg import TJPF_RGB, TurboJPEG

        turbo = TurboJPEG(os.environ.get("TURBOJPEG"))
    except (ImportError, RuntimeError, OSError):
        pass
    else:
        yield "PyTurboJPEG", lambda data: turbo.decode(data, TJPF_RGB)


def shrinking() -> Iterator[tuple[str, Decoder]]:
    """The loops that make 224 × 224 of a JPEG: scaled, cropped at the center, (channels, height, width)."""

    def center(image: Image.Image) -> Any:
        width, height = image.size
        side = min(width, height)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        small = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
        return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))

    def pillow(data: bytes) -> Any:
        image = Image.open(io.BytesIO(data))
        image.draft("RGB", (SIZE, SIZE))
        return center(image)

    yield "Pillow, draft", pillow
    try:
        import simplejpeg
    except ImportError:
        return

    def quick(data: bytes) -> Any:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        scale = next((s for s in (8, 4, 2) if min(height, width) // s >= SIZE), 1)
        least = {"min_height": -(-height // scale), "min_width": -(-width // scale)} if scale > 1 else {}
        return center(Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, **least)))

    yield "simplejpeg, Pillow's resize", quick


def rate(decode: Decoder, data: list[bytes], threads: int) -> float:
    """Images per second."""

    def loop(part: list[bytes]) -> None:
        for at in range(0, len(part), BATCH):
            _ = [decode(each) for each in part[at : at + BATCH]]

    if threads == 1:
        start = time.process_time()
        loop(data)
        return len(data) / (time.process_time() - start)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(len, [b""] * threads))  # the threads are started
        start = time.perf_counter()
        list(pool.map(loop, [data[number::threads] for number in range(threads)]))
        return len(data) / (time.perf_counter() - start)


def side_by_side(title: str, found: list[tuple[str, Decoder]], data: list[bytes], threads: int, repeats: int) -> None:
    usable = [(name, decode) for name, decode in found if _decodes(decode, data[0])]
    rates = {(name, n): [] for name, _ in usable for n in (1, threads)}  # type: dict[tuple[str, int], list[float]]
    for _ in range(repeats):
        for n in (1, threads):
            for name, decode in usable:
                rates[name, n].append(rate(decode, data, n))
    print(f"\n{title}, {np.mean([len(each) for each in data]) / 1000:.0f} KB: images/s, median of {repeats} (best)")
    for name, _ in usable:
        numbers = [f"{np.median(rates[name, n]):7,.0f} ({max(rates[name, n]):6,.0f})" for n in (1, threads)]
        print(f"  {name:28} 1 thread {numbers[0]}   {threads} threads {numbers[1]}")


def _decodes(decode: Decoder, data: bytes) -> bool:
    try:
        decode(data)
    except Exception:
        return False
    return True


def beside_the_loop(data: list[bytes], repeats: int) -> bool:
    """Measure `Dataset.decode` beside the loop over the same decoder, and print the bars."""
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.arrow"
        table = pa.table({"image": data})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
        ds = midepoch.from_files(str(path)).shuffle(seed=1)
        full, small = dict(decoders()), dict(shrinking())
        fastest = "simplejpeg" if "simplejpeg" in full else "Pillow"
        cases = [
            ("rows of the full size", ds.decode("image"), full[fastest]),
            (f"batches, size={SIZE}", ds.decode("image", size=SIZE).loader(BATCH), list(small.values())[-1]),
        ]
        print(f"\nDataset.decode beside a loop over {fastest}, images/s of CPU time")
        for name, source, decode in cases:
            ours: list[float] = []
            loops: list[float] = []
            for _ in range(repeats):
                loops.append(rate(decode, data, 1))
                start = time.process_time()
                count = sum(len(item["image"]) if isinstance(source, midepoch.Loader) else 1 for item in source)
                ours.append(count / (time.process_time() - start))
            ratio = float(np.median(ours) / np.median(loops))
            passed &= ratio >= BAR
            verdict = "passed" if ratio >= BAR else "LOST  "
            print(f"  {verdict} {name:28} {np.median(ours):7,.0f} of {np.median(loops):7,.0f}: {ratio:.2f} (≥ {BAR})")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(8, len(os.sched_getaffinity(0))))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    jpegs = files(args.images, "JPEG", quality=82)
    side_by_side("JPEG", list(decoders()), jpegs, args.threads, args.repeats)
    side_by_side(f"JPEG to {SIZE} × {SIZE}", list(shrinking()), jpegs, args.threads, args.repeats)
    for kind in ("PNG", "WebP"):
        few = files(max(8, args.images // 8), kind)
        side_by_side(
            kind, [each for each in decoders() if "jpeg" not in each[0].lower()], few, args.threads, args.repeats
        )
    sys.exit(0 if beside_the_loop(jpegs, args.repeats) else 1)


if __name__ == "__main__":
    main()
