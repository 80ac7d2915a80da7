"""One attempt of a GRPO run with TRL, which resumes from its last checkpoint, if any, and may be killed.

python trl_job.py FOLDER OPTIONS: what each micro-batch trained on in FOLDER/prompts-RANK.txt, after a line with the step
from which the attempt resumed. OPTIONS are JSON: those of GRPOConfig, ``prompts``, ``die_at``, ``kept`` for a filter;
or ``example``, the arguments of examples/grpo_trl.py, which is run instead, and ``die_at``.
"""

from __future__ import annotations

import json
import runpy
import signal
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
from midepoch.integrations import trl as integration

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from grpo_trl import WORDS, make_tokenizer, reward

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_trl.py"
QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "log_level": "error"}


class Trainer(integration.ResumableGRPOTrainer):
    """One that notes the prompts it trains on, and is killed if asked for."""

    folder: Path
    die_at: int | None

    def train(self, resume_from_checkpoint: str | None = None) -> Any:
        self.note("from", 0 if resume_from_checkpoint is None else resume_from_checkpoint.rpartition("-")[2])
        return super().train(resume_from_checkpoint=resume_from_checkpoint)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.state.global_step == self.die_at:
            signal.raise_signal(signal.SIGKILL)
        trained = inputs["prompt_ids"][inputs["completion_mask"].any(dim=1)]  # the others fill the last batch
        texts = [self.processing_class.decode(tokens, skip_special_tokens=True) for tokens in trained]
        self.note(self.state.global_step + 1, *(text.split()[0] for text in texts))
        return super()._compute_loss(model, inputs)

    def note(self, *words: object) -> None:
        with open(self.folder / f"prompts-{self.args.process_index}.txt", "a") as seen:
            print(*words, file=seen)


def data(folder: Path, prompts: int, kept: int | None) -> Any:
    path = folder / "prompts.parquet"
    if not path.exists():
        numbers = [str(number) for number in range(prompts)]
        pq.write_table(pa.table({"prompt": [f"{number} plus" for number in numbers], "answer": numbers}), path)
    ds = midepoch.from_files(path).shuffle(seed=7)
    return ds if kept is None else ds.filter(lambda row: int(row["answer"]) < kept)


def run(folder: Path, options: dict[str, Any]) -> None:
    prompts, kept = options.pop("prompts"), options.pop("kept", None)
    args = GRPOConfig(str(folder / "out"), max_completion_length=3, logging_strategy="no", **{**QUIET, **options})
    with args.main_process_first():
        ds = data(folder, prompts, kept)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))
    ledger = {"audit": str(folder / "ledger")}
    trainer = Trainer(model, reward, args, train_dataset=ds, processing_class=make_tokenizer(), loader_options=ledger)
    found = get_last_checkpoint(args.output_dir) if Path(args.output_dir).exists() else None
    trainer.train(resume_from_checkpoint=found)


def run_example(arguments: list[str]) -> None:
    """Run the example as it is, with the trainer that notes prompts in place of its own."""
    integration.ResumableGRPOTrainer = Trainer
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    Trainer.folder, Trainer.die_at = Path(sys.argv[1]), options.pop("die_at", None)
    run_example(options["example"]) if "example" in options else run(Trainer.folder, options)
    if torch.distributed.is_initialized():  # or a rank that ends first may take the other with it
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
