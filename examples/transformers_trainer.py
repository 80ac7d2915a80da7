"""Hugging Face Trainer: resumes in mid-epoch at the next row, without reading what it has seen.

python examples/transformers_trainer.py run --die-at 47      # or under torchrun
python examples/transformers_trainer.py run
"""

import argparse
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import midepoch
from midepoch.integrations.transformers import ResumableTrainer

ROWS, BATCH, EPOCHS, EVERY = 500, 16, 2, 10


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = np.random.default_rng(0).integers(ROWS, size=(ROWS, 8))
        tokens[:, 0] = np.arange(ROWS)  # every text begins with its number
        pq.write_table(
            pa.table({"input_ids": list(tokens), "labels": list(tokens), "source": ["made up"] * ROWS}), path
        )


class Trainer(ResumableTrainer):
    """One that notes what it sees, and is killed if asked for."""

    folder: Path
    die_at: int | None

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        if self.state.global_step == self.die_at:
            signal.raise_signal(signal.SIGKILL)
        with open(self.folder / f"rows-{self.args.process_index}.txt", "a") as seen:
            print(self.state.global_step + 1, *inputs["input_ids"][:, 0].tolist(), file=seen)
        return super().training_step(model, inputs, *rest)


def train(folder: Path, die_at: int | None) -> None:
    args = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        save_steps=EVERY,
        save_total_limit=3,
        dataloader_num_workers=1,
        use_cpu=True,
        report_to=[],
    )
    with args.main_process_first():
        make_data(folder / "data.parquet")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, **sizes))
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    trainer = Trainer(model, args, train_dataset=ds)
    trainer.folder, trainer.die_at = folder, die_at
    trainer.train(resume_from_checkpoint=True)  # the last complete checkpoint. At the first start there is none


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    options = parser.parse_args()
    train(options.folder, options.die_at)
