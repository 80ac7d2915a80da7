"""The cost of a ledger: `python -m benchmarks.ledger`.

Two loaders of the same data, without and with ``audit=``, run in turn in slices of some batches, on the pipelines of
``benchmarks.provenance``. The figure is the speed with a ledger beside that without, by the mean of all slices (the
records of many steps are written at a time) and by the median of their ratios. The bar: 0.97.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.provenance import arguments, cases, forever, in_turn

BAR = 0.97


def main() -> None:
    args = arguments(__doc__, 200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{'':34} {'a batch':>10} {'by mean':>9} {'by median':>10}")
        for case, make in cases(folder).items():
            if args.only not in case:
                continue
            loaders = (forever(make(**options)) for options in ({}, {"audit": folder / case}))
            without, with_ledger = in_turn(loaders, args.slices, 20)
            mean = without.mean() / with_ledger.mean()
            median = np.median(without / with_ledger)
            verdict = "passed" if mean >= BAR else "LOST"
            print(f"{case:34} {1e6 * without.mean():7.0f} µs {mean:9.3f} {median:10.3f}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
