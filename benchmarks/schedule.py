"""The cost of a schedule against a plain mix: `python -m benchmarks.schedule`.

Two loaders of the same sources, batch size and rows run in turn in slices of some batches: one with a plain mix, one
with a schedule. The schedules: constant weights; weights that change linearly; phases by tokens, with sequences of
one or two lengths. The overhead is that of the mean of all slices: the work for many batches at a time is in a few of
them. Beside it is that of the best slice. The bar: 2 %.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import midepoch
from benchmarks.provenance import arguments, documents, forever, in_turn, rows
from midepoch import Phase, Schedule

BAR = 0.02
NAMES = ("web", "code", "math")
WEIGHTS = dict(zip(NAMES, (0.6, 0.3, 0.1), strict=True))
FINAL = dict(zip(NAMES, (0.2, 0.3, 0.5), strict=True))
ROWS, TOKENS = 10_000_000, 10_000_000_000
"""The length of a schedule: far more than is measured."""
Loaders = Callable[[], tuple[midepoch.Loader, midepoch.Loader]]


def cases(folder: Path) -> dict[str, Loaders]:
    """Pairs of loaders, plain and by a schedule, by name."""
    of_rows = [midepoch.from_files(rows(folder / f"r{i}.arrow", 8_000, i)).shuffle(seed=i) for i in range(3)]
    of_docs = [midepoch.from_files(documents(folder / f"d{i}.arrow", 8_000, i)).shuffle(seed=i) for i in range(3)]

    def mixed(parts: list[midepoch.Dataset], weights: Any, **options: Any) -> midepoch.Dataset:
        return midepoch.mix(dict(zip(NAMES, parts, strict=True)), weights, seed=1, **options)

    def plain(parts: list[midepoch.Dataset]) -> midepoch.Dataset:
        return mixed(parts, WEIGHTS, stop="never")

    constant = Schedule([Phase("main", WEIGHTS, rows=ROWS)])
    linear = Schedule([Phase("main", WEIGHTS, rows=ROWS, final_weights=FINAL)])
    quick = Schedule([Phase("main", WEIGHTS, rows=40_000, final_weights=FINAL)])
    by_tokens = Schedule([Phase("main", WEIGHTS, tokens=TOKENS, sequence_length=2048)])
    growing = Schedule(
        [
            Phase("short", WEIGHTS, tokens=3 * 2**22, sequence_length=2048, global_batch_size=4),
            Phase("main", tokens=TOKENS, sequence_length=4096),
        ]
    )
    return {
        "rows, constant weights": lambda: (plain(of_rows).loader(64), mixed(of_rows, constant).loader(64)),
        "rows, linear over 10,000,000": lambda: (plain(of_rows).loader(64), mixed(of_rows, linear).loader(64)),
        "rows, linear over 40,000": lambda: (plain(of_rows).loader(64), mixed(of_rows, quick).loader(64)),
        "packed by tokens, one length": lambda: (
            plain(of_docs).pack(2048).loader(8),
            mixed(of_docs, by_tokens).pack().loader(8),
        ),
        "packed by tokens, two lengths": lambda: (
            plain(of_docs).pack(4096).loader(4),
            mixed(of_docs, growing).pack().loader(),
        ),
    }


def compared(loaders: tuple[midepoch.Loader, midepoch.Loader], slices: int) -> tuple[float, float, float]:
    """The seconds of a batch of the plain mix, and the share by which a schedule takes longer: mean and best."""
    before, after = in_turn(map(forever, loaders), slices, 80)
    return float(before.mean()), float(after.mean() / before.mean() - 1), float(after.min() / before.min() - 1)


def main() -> None:
    args = arguments(__doc__, 300)
    with tempfile.TemporaryDirectory() as name:
        print(f"{'':34} {'plain mix':>10} {'schedule':>10} {'best':>8}")
        for case, make in cases(Path(name)).items():
            if args.only not in case:
                continue
            seconds, share, best = compared(make(), args.slices)
            verdict = "passed" if share <= BAR else "LOST"
            print(f"{case:34} {1e6 * seconds:7.0f} µs {100 * share:+8.2f} % {100 * best:+6.2f} %  {verdict}")


if __name__ == "__main__":
    main()
