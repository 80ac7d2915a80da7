"""torchtitan's trainer on midepoch data: a config function with another dataloader.

cd examples && torchrun --nproc-per-node=4 -m torchtitan.train --module torchtitan_llama --config llama3_midepoch
# Kill it, then resume on 2 GPUs: global batches stay the same.
cd examples && torchrun --nproc-per-node=2 -m torchtitan.train --module torchtitan_llama --config llama3_midepoch
"""

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import midepoch
from midepoch.integrations.torchtitan import MidepochDataLoader

FOLDER, GLOBAL_BATCH, SEQUENCE = os.environ.get("RUN_FOLDER", "run"), 16, 64


def make_data() -> None:
    """Write 1,000 sequences of tokens, by one process: replace them with yours."""
    if os.environ.get("RANK", "0") == "0" and not os.path.exists(f"{FOLDER}/data.parquet"):
        os.makedirs(FOLDER, exist_ok=True)
        rows = np.random.default_rng(0).integers(0, 2048, (1000, SEQUENCE + 1))
        pq.write_table(pa.table({"input_ids": list(rows)}), f"{FOLDER}/part.parquet", row_group_size=100)
        os.replace(f"{FOLDER}/part.parquet", f"{FOLDER}/data.parquet")


def sequences(tokenizer: Any, seq_len: int) -> midepoch.Dataset:
    """Return sequences of seq_len + 1 tokens. From text: shuffle, tokenize with ``tokenizer``, pack(seq_len + 1)."""
    del tokenizer, seq_len  # this data is tokenized and packed already
    return midepoch.from_files(f"{FOLDER}/data.parquet").shuffle(seed=42).with_lanes(8)


def llama3_midepoch() -> Trainer.Config:
    make_data()
    config = llama3_debugmodel()
    config.dump_folder = FOLDER
    config.training.seq_len, config.training.steps = SEQUENCE, 40
    config.training.local_batch_size, config.training.global_batch_size = 2, GLOBAL_BATCH
    config.checkpoint.enable, config.checkpoint.interval = True, 5
    config.validator.enable = False
    config.dataloader = MidepochDataLoader.Config(data=sequences, global_batch_size=GLOBAL_BATCH)
    return config
