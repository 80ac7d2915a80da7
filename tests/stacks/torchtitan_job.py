"""examples/torchtitan_llama.py in torchtitan's own trainer on the CPU, with a tiny model. Ranks note their sequences.

python torchtitan_job.py FOLDER STEPS DIE_AT [PATTERN OF A CONFIG=VALUE …]: SIGKILL after step DIE_AT, before its save.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

import stacks.torchtitan_cpu  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"


def name_of(sequence: Any) -> int:
    """A number for a sequence of tokens."""
    return zlib.crc32(sequence.numpy().tobytes())


def main(folder: str, steps: str, die_at: str, *arguments: str) -> None:
    os.environ["RUN_FOLDER"] = folder
    sys.path.insert(0, str(EXAMPLES))
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    class Noted(Trainer):
        seen: list[int]

        def batch_generator(self, data_iterable: Any) -> Any:
            self.seen = []
            for inputs, labels in super().batch_generator(data_iterable):
                assert inputs["input"].shape == labels.shape == inputs["positions"].shape
                assert (inputs["input"][:, 1:] == labels[:, :-1]).all()
                self.seen += map(name_of, inputs["input"])
                yield inputs, labels

        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            with open(f"{folder}/seen-{os.environ['RANK']}.jsonl", "a") as log:
                log.write(json.dumps([self.step, self.seen]) + "\n")
            self.seen.clear()
            if self.step == int(die_at):
                dist.barrier()  # the others have noted this step: they are killed with the first
                signal.raise_signal(signal.SIGKILL)

    wanted = ["--module", "torchtitan_llama", "--config", "llama3_midepoch", "--training.steps", steps, *arguments]
    config = ConfigManager().parse_args(wanted)
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch than 2.13
    config.training.mixed_precision_param = "float32"
    config.hf_assets_path = folder
    trainer = Noted(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
