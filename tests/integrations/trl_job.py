"""One attempt of a GRPO run with TRL, which resumes from its last checkpoint, if any, and may be killed.

python trl_job.py FOLDER OPTIONS: what each micro-batch trained on in FOLDER/prompts-RANK.txt, after a line with the step
from which the attempt resumed. OPTIONS are JSON: those of GRPOConfig, ``prompts``, ``die_at``, ``kept`` for a filter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

import midepoch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from grpo_trl import WORDS, Trainer, make_tokenizer, reward

QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "log_level": "error"}


def data(folder: Path, prompts: int, kept: int | None) -> Any:
    path = folder / "prompts.parquet"
    if not path.exists():
        numbers = [str(number) for number in range(prompts)]
        pq.write_table(pa.table({"prompt": [f"{number} plus" for number in numbers], "answer": numbers}), path)
    ds = midepoch.from_files(path).shuffle(seed=7)
    return ds if kept is None else ds.filter(lambda row: int(row["answer"]) < kept)


def run(folder: Path, options: dict[str, Any]) -> None:
    prompts, die_at, kept = options.pop("prompts"), options.pop("die_at", None), options.pop("kept", None)
    args = GRPOConfig(str(folder / "out"), max_completion_length=3, logging_strategy="no", **{**QUIET, **options})
    with args.main_process_first():
        ds = data(folder, prompts, kept)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))
    ledger = {"audit": str(folder / "ledger")}
    trainer = Trainer(model, reward, args, train_dataset=ds, processing_class=make_tokenizer(), loader_options=ledger)
    trainer.folder, trainer.die_at = folder, die_at
    found = get_last_checkpoint(args.output_dir) if Path(args.output_dir).exists() else None
    trainer.note("from", 0 if found is None else found.rpartition("-")[2])
    trainer.train(resume_from_checkpoint=found)


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
    if torch.distributed.is_initialized():  # or a rank that ends first may take the other with it
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
