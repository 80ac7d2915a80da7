"""Saves steps with ``keep=1`` until its time is over, beside other processes that do the same: run by test_keep.py.

python writer_job.py FOLDER FIRST COUNT
"""

from __future__ import annotations

import sys

from midepoch.checkpoint import PipelineCheckpoint

if __name__ == "__main__":
    folder, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    checkpoint = PipelineCheckpoint(folder, keep=1)
    checkpoint.restore_latest(rng=False)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(count):
        checkpoint.save(step=first + number % 3, metadata={"by": first}, rng=False)
