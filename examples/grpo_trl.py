"""GRPO with TRL: every prompt is trained on exactly once, over kills and on other numbers of ranks.

A generation is used for two optimizer steps here. The checkpoint after the first of them holds the prompts of that step
as done: a resume generates completions for the others again, and then continues with new prompts.

python examples/grpo_trl.py run --die-at 7      # killed within the eighth step, after the checkpoint of step 6
python examples/grpo_trl.py run                 # resumes: 40 prompts, each trained on once
torchrun --nproc-per-node 2 examples/grpo_trl.py run --batch 4     # or on two ranks, with the same prompts per step
"""

import argparse
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

import midepoch
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
    words = [completion.split() for completion in completions]
    guesses = [next((int(word) for word in each if word.isdigit()), -100) for each in words]
    return [1 / (1 + abs(guess - int(right))) for guess, right in zip(guesses, answer, strict=True)]


class Trainer(ResumableGRPOTrainer):
    """One that notes the prompts it trains on, and is killed if asked for."""

    folder: Path
    die_at: int | None

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


def train(folder: Path, die_at: int | None, batch: int) -> None:
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
        disable_tqdm=True,
    )
    with args.main_process_first():
        make_data(folder / "prompts.parquet")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))
    ds = midepoch.from_files(folder / "prompts.parquet").shuffle(seed=42)
    trainer = Trainer(model, reward, args, train_dataset=ds, processing_class=make_tokenizer())
    trainer.folder, trainer.die_at = folder, die_at
    Path(args.output_dir).mkdir(exist_ok=True)
    last = get_last_checkpoint(args.output_dir)
    trainer.note("from", 0 if last is None else last.rpartition("-")[2])
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed in the step after this one")
    parser.add_argument("--batch", type=int, default=8, help="completions of a step on each rank")
    options = parser.parse_args()
    train(options.folder, options.die_at, options.batch)
