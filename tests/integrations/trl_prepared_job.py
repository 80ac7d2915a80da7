"""Rows that trainers of TRL train on, prepared from a dataset of Hugging Face and from one of midepoch.

python trl_prepared_job.py FOLDER: {case: [rows of TRL, rows of midepoch]} as JSON in FOLDER/rows.json, and refusals in
FOLDER/refusals.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import midepoch
from midepoch.integrations.trl import ResumableDPOTrainer, ResumablePreparation, ResumableSFTTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from sft_trl import WORDS, make_tokenizer

transformers.logging.set_verbosity_error()
TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
TRAINED = {"input_ids", "labels", "seq_lengths", "prompt_ids", "chosen_ids", "rejected_ids"}


def said(role: str, *texts: str) -> list[Any]:
    return [[{"role": role, "content": text}] for text in texts]


LONG = "2 is " * 9  # fills max_length
TEXT = {"text": ["1 is odd", LONG, "3 is odd"]}
COMPLETED = {"prompt": ["1 is", LONG, "3 is"], "completion": [" odd", " even", " odd"]}
TALK = {
    "messages": [a + b for a, b in zip(said("user", "1 is", "2 is"), said("assistant", "odd", "even"), strict=True)]
}
OLD = {"conversations": [[{"from": "user", "value": "1 is"}, {"from": "assistant", "value": "odd"}]] * 2}
ANSWERED = {"prompt": said("user", "1 is"), "completion": said("assistant", "odd")}
PAIRS = {"prompt": ["1 is", LONG, "3 is"], "chosen": [" odd", " even", " odd"], "rejected": [" even", " odd", " even"]}
JUDGED = {"prompt": said("user", "1 is"), "chosen": said("assistant", "odd"), "rejected": said("assistant", "even")}
IMPLICIT = {"chosen": ["1 is odd", "2 is even"], "rejected": ["1 is even", "2 is odd"]}


class ResumableRewardTrainer(ResumablePreparation, RewardTrainer):
    pass


SFT = (SFTTrainer, ResumableSFTTrainer, SFTConfig)
DPO = (DPOTrainer, ResumableDPOTrainer, DPOConfig)
REWARD = (RewardTrainer, ResumableRewardTrainer, RewardConfig)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "text": (SFT, TEXT, {}),
    "the end of a text": (SFT, TEXT, {"truncation_mode": "keep_end"}),
    "completions": (SFT, COMPLETED, {}),
    "talk": (SFT, TALK, {}),
    "talk of another kind": (SFT, OLD, {}),
    "answers": (SFT, ANSWERED, {}),
    "tokens": (SFT, {"input_ids": [[1, 2, 3], [4] * 20, [5]]}, {}),
    "packed bfd": (SFT, COMPLETED, {"packing": True}),
    "packed bfd_split": (SFT, TEXT, {"packing": True, "packing_strategy": "bfd_split"}),
    "packed wrapped": (SFT, TEXT, {"packing": True, "packing_strategy": "wrapped"}),
    "pairs": (DPO, PAIRS, {}),
    "implicit pairs": (DPO, IMPLICIT, {}),
    "judged talk": (DPO, JUDGED, {}),
    "rewards": (REWARD, IMPLICIT, {}),
}


def made(trainer: Any, config: Any, data: Any, folder: Path, **options: Any) -> Any:
    """A trainer with a tiny model."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, num_labels=1, **sizes)
    kind = LlamaForSequenceClassification if config is RewardConfig else LlamaForCausalLM
    reference = {"ref_model": kind(model)} if config is DPOConfig else {}
    always = {"max_steps": 1, "max_length": 8, "per_device_train_batch_size": 1, "use_cpu": True, "bf16": False}
    quiet = {"report_to": [], "disable_tqdm": True, "train_sampling_strategy": "sequential", "save_strategy": "no"}
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    args = config(str(folder / "out"), **{**always, **quiet, **options})
    return trainer(kind(model), **reference, args=args, train_dataset=data, processing_class=tokenizer)


def prepared(folder: Path, case: str) -> list[Any]:
    """The rows that TRL trains on, and ours, after a step of each."""
    (theirs, ours, config), columns, options = CASES[case]
    pq.write_table(pa.table(columns), folder / f"{case}.parquet")
    found = []
    for trainer, data in (
        (theirs, datasets.Dataset.from_dict(columns)),
        (ours, midepoch.from_files(folder / f"{case}.parquet")),
    ):
        training = made(trainer, config, data, folder, **options)
        training.train()
        found.append([{name: row[name] for name in TRAINED & row.keys()} for row in training.train_dataset])
    return found


def refusals(folder: Path) -> dict[str, str]:
    """What is said where rows would be read in advance, or a loader is given."""
    ds, found = midepoch.from_files(folder / "pairs.parquet"), {}
    for case, data, options in (("loader", ds.loader(1), {}), ("precomputed", ds, {"precompute_ref_log_probs": True})):
        try:
            made(ResumableDPOTrainer, DPOConfig, data, folder, **options)
        except (TypeError, ValueError) as problem:
            found[case] = str(problem)
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "rows.json").write_text(json.dumps({case: prepared(place, case) for case in CASES}))
    (place / "refusals.json").write_text(json.dumps(refusals(place)))
