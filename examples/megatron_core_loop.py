"""Megatron-Core: its schedule, batch sizes and distributed checkpoints, on midepoch data.

torchrun --nproc-per-node=4 examples/megatron_core_loop.py run --die-at 7
torchrun --nproc-per-node=2 examples/megatron_core_loop.py run          # or on 8 ranks: global batches stay the same
"""

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig

import midepoch
from midepoch.integrations.megatron import iterator

ROWS, LENGTH, GLOBAL_BATCH, MICRO_BATCH, STEPS, EVERY = 101, 16, 16, 2, 20, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(MegatronModule):  # type: ignore[misc]  # or GPTModel
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.embedding, self.head = torch.nn.Embedding(ROWS, 16), torch.nn.Linear(16, ROWS)

    def set_input_tensor(self, tensor: Any) -> None:
        pass

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.embedding(tokens)).transpose(1, 2), labels)


def train(folder: Path, die_at: int | None) -> None:
    rank, seen = dist.get_rank(), []
    if rank == 0 and not (folder / "data.parquet").exists():
        rows = [np.arange(row, row + LENGTH + 1) % ROWS for row in range(ROWS)]
        pq.write_table(pa.table({"tokens": rows}), folder / "data.parquet", row_group_size=10)
    dist.barrier()
    parallel_state.initialize_model_parallel()
    ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(rank, None, GLOBAL_BATCH, MICRO_BATCH, ranks)
    data = iterator(midepoch.from_files(folder / "data.parquet").shuffle(seed=42).with_lanes(8))
    model = Model(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)).to(DEVICE)

    def forward_step(batches: Any, model: Model) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        batch = {name: column.to(DEVICE) for name, column in next(batches).items()}
        seen.extend(batch["tokens"][:, 0].tolist())
        return model(batch["tokens"], batch["labels"]), lambda loss: (loss, {"loss": loss.detach()})

    step = max((int(path.parent.name) for path in folder.glob("*/metadata.json")), default=0)
    if step:
        saved = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{folder}/{step}")
        model.load_state_dict(saved["model"])
        data.load_state_dict(saved["data"])
    for step in range(step + 1, STEPS + 1):  # noqa: B020
        arguments = {"num_microbatches": get_num_microbatches(), "seq_length": LENGTH, "micro_batch_size": MICRO_BATCH}
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model, forward_only=False, **arguments
        )
        model.zero_grad()  # all-reduce gradients and step an optimizer here
        with open(folder / f"rows-{rank}.txt", "a") as log:
            print(step, *seen, file=log)
        seen.clear()
        if step % EVERY == 0:
            (folder / str(step)).mkdir(exist_ok=True)
            dist_checkpointing.save({"model": model.sharded_state_dict(), "data": data.state_dict()}, f"{folder}/{step}")
        if step == die_at:
            signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="one that all ranks see")
    parser.add_argument("--die-at", type=int, help="be killed behind this step")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    train(args.folder, args.die_at)
    dist.destroy_process_group()
