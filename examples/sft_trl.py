"""Supervised fine-tuning with TRL: texts in place, and an exact resume on any number of ranks.

torchrun --nproc-per-node 4 examples/sft_trl.py run --die-at 3
torchrun --nproc-per-node 2 examples/sft_trl.py run      # resumes, with the same rows in every step
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

import midepoch
from midepoch.integrations.transformers import last_checkpoint
from midepoch.integrations.trl import ResumableSFTTrainer

ROWS, GLOBAL_BATCH, EPOCHS, EVERY = 48, 8, 2, 2
WORDS = ["<pad>", "</s>", "is", "even", "odd", *(str(number) for number in range(ROWS))]


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = {"prompt": [f"{number} is" for number in range(ROWS)], "completion": [" even", " odd"] * (ROWS // 2)}
        pq.write_table(pa.table(texts), path)


def make_tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


class Trainer(ResumableSFTTrainer):
    """Trainer that writes down the rows of each step, and is killed on request."""

    folder: Path
    die_at: int | None

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        if self.state.global_step == self.die_at:
            signal.raise_signal(signal.SIGKILL)
        numbers = [int(WORDS[word]) for word in inputs["input_ids"][:, 0].tolist()]
        with open(self.folder / f"rows-{self.args.process_index}.txt", "a") as seen:
            print(self.state.global_step + 1, *numbers, file=seen)
        return super().training_step(model, inputs, *rest)


def train(folder: Path, die_at: int | None) -> None:
    batch = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    options = {"per_device_train_batch_size": batch, "num_train_epochs": EPOCHS, "save_steps": EVERY}
    always = {"dataloader_drop_last": True, "use_cpu": True, "bf16": False, "report_to": []}
    args = SFTConfig(output_dir=str(folder / "checkpoints"), max_length=16, **options, **always)
    with args.main_process_first():
        make_data(folder / "data.parquet")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    trainer = Trainer(model, args=args, train_dataset=ds, processing_class=make_tokenizer())
    trainer.folder, trainer.die_at = folder, die_at
    Path(args.output_dir).mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    options = parser.parse_args()
    train(options.folder, options.die_at)
