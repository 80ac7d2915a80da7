"""GRPO with TRL: every prompt is trained on exactly once, over kills and on other numbers of ranks.

A generation is used for two optimizer steps here. The checkpoint after the first of them holds the prompts of that step
as done: a resume generates completions for the others again, and then continues with new prompts.

python examples/grpo_trl.py run                 # kill it at any time (kill -9)
python examples/grpo_trl.py run                 # resumes
torchrun --nproc-per-node 2 examples/grpo_trl.py run --batch 4     # or on two ranks, with the same prompts per step
midepoch audit run/ledger                       # each prompt was acknowledged once
"""

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

import midepoch
from midepoch.integrations.transformers import last_checkpoint
from midepoch.integrations.trl import ResumableGRPOTrainer

PROMPTS, GENERATIONS = 40, 4
WORDS = ["<pad>", "</s>", "plus", "is", *(str(number) for number in range(100))]


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{number} plus {number % 10} is" for number in range(PROMPTS)]
        answers = [str(number + number % 10) for number in range(PROMPTS)]
        pq.write_table(pa.table({"prompt": texts, "answer": answers}), path)


def make_tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", padding_side="left")


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number, less the farther away the first number is."""
    guesses = [next((int(word) for word in text.split() if word.isdigit()), -100) for text in completions]
    return [1 / (1 + abs(guess - int(right))) for guess, right in zip(guesses, answer, strict=True)]


def train(folder: Path, batch: int) -> None:
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=batch,
        num_generations=GENERATIONS,
        steps_per_generation=2,
        max_completion_length=4,
        num_train_epochs=1,
        save_steps=3,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    with args.main_process_first():
        make_data(folder / "prompts.parquet")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))
    ds = midepoch.from_files(folder / "prompts.parquet").shuffle(seed=42)
    more = {"processing_class": make_tokenizer(), "loader_options": {"audit": str(folder / "ledger")}}
    trainer = ResumableGRPOTrainer(model, reward, args, train_dataset=ds, **more)
    Path(args.output_dir).mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=8, help="completions of a step on each rank")
    options = parser.parse_args()
    train(options.folder, options.batch)
