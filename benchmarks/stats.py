"""What measuring itself costs a loader: `python -m benchmarks.stats`.

The cheapest batches there are (64 rows of 1,024 tokens, copied from mapped files, no workers), so that it shows most:
the time of one batch, and in turn with it the time that the meter takes for one, each the median of many slices.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import midepoch
from benchmarks import data
from midepoch.loader.meter import Meter

BAR = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tokens = data.load(args.data_dir).tokens
    loader = midepoch.from_files(tokens.arrow).shuffle(seed=1).with_format("numpy").loader(64, last_batch="drop")
    meter, batches, costs = Meter(0), [], []
    for _ in range(args.repeats):
        passing = iter(loader)
        for _ in range(tokens.rows // 64 // 50):
            start = time.perf_counter()
            for _ in range(50):
                batch = next(passing)
            between = time.perf_counter()
            for _ in range(50):
                meter.handed(time.perf_counter(), 64, batch)
            batches.append(between - start)
            costs.append(time.perf_counter() - between)
    batch_us, cost_us = 1e6 * float(np.median(batches)) / 50, 1e6 * float(np.median(costs)) / 50
    verdict = "passed" if cost_us <= BAR * batch_us else "LOST  "
    share = 100 * cost_us / batch_us
    print(f"{verdict}  measuring a batch takes {cost_us:.2f} µs of {batch_us:.1f} µs: {share:.2f} % (at most 1 %)")


if __name__ == "__main__":
    main()
