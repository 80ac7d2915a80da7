"""Megatron-Core: its schedule, batch sizes and distributed checkpoints, on midepoch data.

torchrun --nproc-per-node=4 examples/megatron_core_loop.py run 7      # is killed after step 7
torchrun --nproc-per-node=2 examples/megatron_core_loop.py run        # or on 8 ranks: global batches stay the same
"""

import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, enums, parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig

import midepoch
from midepoch.integrations.megatron import iterator

ROWS, LENGTH, GLOBAL_BATCH, MICRO_BATCH, STEPS, EVERY = 101, 16, 16, 2, 20, 5
try:
    DEVICE = torch.cuda.current_device()  # as Megatron-Core itself does
except (AssertionError, RuntimeError):
    sys.exit("Megatron-Core needs CUDA, and torch finds no GPU here. Run this example on a machine with a GPU.")


class Model(MegatronModule):  # type: ignore[misc]  # or GPTModel
    def __init__(self) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1))
        self.model_type, self.set_input_tensor = enums.ModelType.encoder_or_decoder, lambda _: None
        self.layers = torch.nn.Sequential(torch.nn.Embedding(ROWS, 16), torch.nn.Linear(16, ROWS))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(tokens).transpose(1, 2), labels)


def forward_step(data: Any, model: Model) -> tuple[torch.Tensor, Any]:
    batch = {name: column.to(DEVICE) for name, column in next(data).items()}
    return model(batch["tokens"], batch["labels"]), lambda loss: (loss, batch["tokens"][:, 0].tolist())


def train(folder: Path, die_at: int) -> None:
    if dist.get_rank() == 0 and not (folder / "data.parquet").exists():
        folder.mkdir(exist_ok=True)
        sequences = [[(row + i) % ROWS for i in range(LENGTH + 1)] for row in range(ROWS)]  # begin with their number
        pq.write_table(pa.table({"tokens": sequences}), folder / "data.parquet", row_group_size=10)
    dist.barrier()
    ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(dist.get_rank(), None, GLOBAL_BATCH, MICRO_BATCH, ranks)
    data = iterator(midepoch.from_files(folder / "data.parquet").shuffle(seed=42).with_lanes(8))
    model, forward_backward = Model().to(DEVICE), get_forward_backward_func()
    done = max((int(path.parent.name) for path in folder.glob("*/metadata.json")), default=0)
    if done:
        saved = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{folder}/{done}")
        model.load_state_dict(saved["model"])
        data.load_state_dict(saved["data"])
    for step in range(done + 1, STEPS + 1):
        sizes = {"num_microbatches": get_num_microbatches(), "seq_length": LENGTH, "micro_batch_size": MICRO_BATCH}
        seen = forward_backward(forward_step_func=forward_step, data_iterator=data, model=model, **sizes)
        model.zero_grad()  # all-reduce the gradients, and step an optimizer
        with open(folder / f"rows-{dist.get_rank()}.txt", "a") as log:
            print(step, *(row for rows in seen for row in rows), file=log)
        if step % EVERY == 0:
            (folder / str(step)).mkdir(exist_ok=True)
            state = {"model": model.sharded_state_dict(), "data": data.state_dict()}
            dist_checkpointing.save(state, f"{folder}/{step}")
        if step == die_at:
            dist.barrier()  # all ranks have written down this step
            signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
