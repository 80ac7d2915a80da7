"""Saves one step into an object store, in a process that can be killed: run by test_remote.py.

python store_job.py ADDRESS ENDPOINT STEP BACKEND
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow.fs  # noqa: F401
from counting import Numbers

from midepoch.checkpoint import PipelineCheckpoint
from s3 import storage_options


def model_at(value: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(5000.0) * value}


def open_at(address: str, endpoint: str, **options: object) -> PipelineCheckpoint:
    return PipelineCheckpoint(address, storage_options=storage_options(endpoint), **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    address, endpoint, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    checkpoint = open_at(address, endpoint, keep=1)
    print("ready", flush=True)
    sys.stdin.readline()
    checkpoint.save(Numbers(step), model_at(step), step=step)
