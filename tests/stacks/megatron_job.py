"""Packed sequences in Megatron's iterators with tensor parallelism, and the files that Megatron saves of an iterator.

python megatron_job.py FOLDER TENSOR_PARALLEL FIRST LAST: steps FIRST to LAST, saved after LAST.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

import midepoch
from midepoch.integrations.megatron import iterators, reads_data


def main(folder: Path, tensor_parallel: int, first: int, last: int) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    calculator.init_num_microbatches_calculator(dist.get_rank(), None, 8, 2, ranks)
    assert reads_data() == (parallel_state.get_tensor_model_parallel_rank() == 0)
    if reads_data():
        packed = midepoch.from_files(folder / "data.parquet").shuffle(seed=42).with_lanes(4).pack(9, eos=0)
        chunks = iterators(
            packed.select_columns(["input_ids"]), 3
        )  # a virtual pipeline, whose second chunk reads nothing
        if first > 1:
            chunks[0].restore(folder, first - 1)
        data = RerunDataIterator(chunks[0])
        for step in range(first, last + 1):
            batches = [next(data) for _ in range(calculator.get_num_microbatches())]
            assert all(next(chunks[2]) is batch for batch in batches)
            names = [zlib.crc32(row.numpy().tobytes()) for batch in batches for row in batch["tokens"]]
            with open(folder / f"rows-{rank}.txt", "a") as log:
                print(step, *names, file=log)
            assert all(batch["tokens"].shape == batch["loss_mask"].shape == (2, 8) for batch in batches)
        state = {"dataloader_state_dict": data.iterable.save_state()}  # as Megatron's maybe_save_dataloader_state does
        assert state["dataloader_state_dict"] == chunks[1].state_dict()
        begun = next(chunks[0])  # of a step, which a load ends on all chunks
        chunks[0].load_state_dict(state["dataloader_state_dict"])
        assert all((next(chunks[index])["tokens"] == begun["tokens"]).all() for index in (2, 0))
        path = folder / f"iter_{last:07d}" / "mp_rank_00" / f"train_dataloader_dprank{rank:03d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        (folder / f"state-{rank}.json").write_text(json.dumps(state))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
