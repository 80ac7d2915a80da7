"""One rank of one leg: `python -m benchmarks.resuming.rank SPECIFICATION.json`. Started by `launch`.

The specification is that of `launch.Leg`. The result is a pickle beside it, one for each rank.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist  # every contender ends in torch: its import is nobody's first batch

from benchmarks import data, one, resuming


def measure(specification: dict[str, Any], rank: int) -> dict[str, Any]:
    """Deliver the batches of this rank, and save its state after them."""
    key, steps = specification["contender"], specification["steps"]
    topology = resuming.Topology(**specification["topology"])
    module = resuming.find(key)
    dataset = data.load(Path(specification["data_dir"]), specification["scale"])
    folder = one.folder_of(key, dataset)
    one.warm_page_cache(dataset, folder, "text")
    states = [pickle.loads(Path(path).read_bytes()) for path in specification["states"]]
    _join(topology)
    start = time.perf_counter()
    loader = module.open_loader(dataset, folder, topology, rank)
    if states:
        loader.load(states)
    iterator = loader.batches()
    batches = list(islice(iterator, 1))
    first = time.perf_counter() - start
    batches += islice(iterator, None if steps is None else steps - 1)
    state = pickle.dumps(loader.state()) if specification["save"] else b""
    following = next(iterator, []) if specification["following"] else []
    return {"first": first, "batches": batches, "state": state, "following": following}


def _join(topology: resuming.Topology) -> None:
    """Join the process group, as a training program does before it opens its data."""
    if topology.world_size > 1:
        dist.init_process_group("gloo")


def main() -> None:
    path = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    try:
        result = measure(json.loads(path.read_text()), rank)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    finished = path.with_suffix(f".{rank}.partial")
    finished.write_bytes(pickle.dumps(result))
    finished.rename(path.with_suffix(f".{rank}.pickle"))
    sys.stdin.read()  # until all ranks have finished: the first one holds the store that connects them
    os._exit(0)  # no orderly end: it is not measured, and some loaders hang in it


if __name__ == "__main__":
    main()
