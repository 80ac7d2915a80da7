"""The data of verl's own trainer, by ``RayPPOTrainer`` without the workers that generate and train, which need a GPU."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: it needs transformers < 5.11")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl and Ray
    from omegaconf import OmegaConf
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.dataset.rl_dataset import RLHFDataset, get_dataset_class

    from midepoch.integrations.verl import PromptDataset, ResumablePrompts

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, BATCH = 26, 4


class Trainer(ResumablePrompts, RayPPOTrainer):
    """RayPPOTrainer with its dataloaders and checkpoints of the data, and nothing else."""

    def __init__(self, config: Any) -> None:
        self.config, self.tokenizer, self.processor, self.use_critic = config, tokenizer(), None, False
        self.actor_rollout_wg: Any = Nothing()
        self.global_steps = 0
        self._create_dataloader(None, None, None, None)
        self._load_checkpoint()

    def steps(self, count: int) -> list[list[int]]:
        """Steps over epochs, as ``fit`` makes them; each is saved."""
        seen: list[list[int]] = []
        while True:
            for batch in self.train_dataloader:
                if len(seen) == count:
                    return seen  # a batch was taken, and the process dies before it is trained on
                self.global_steps += 1
                seen.append([extra["index"] for extra in batch["extra_info"]])
                self._save_checkpoint()


class Nothing:
    def save_checkpoint(self, folder: str, *_: Any, **__: Any) -> None:
        os.makedirs(folder, exist_ok=True)

    def load_checkpoint(self, *_: Any, **__: Any) -> None:
        pass


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"?": 0, "is": 1, "</s>": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


@pytest.fixture
def config(tmp_path: Path) -> Any:
    prompts = [[{"role": "user", "content": "is " * (1 + number)}] for number in range(ROWS)]
    rows = {"prompt": prompts, "data_source": ["made"] * ROWS, "extra_info": [{"index": i} for i in range(ROWS)]}
    pq.write_table(pa.table(rows), tmp_path / "data.parquet", row_group_size=5)
    files = {"train_files": str(tmp_path / "data.parquet"), "val_files": str(tmp_path / "data.parquet")}
    data = {"train_batch_size": BATCH, "val_batch_size": None, "shuffle": True, "seed": 7, "dataloader_num_workers": 0}
    data |= {"filter_overlong_prompts": False, "cache_dir": str(tmp_path / "cache"), "max_prompt_length": 20}
    trainer = {"resume_mode": "auto", "default_hdfs_dir": None, "default_local_dir": str(tmp_path / "checkpoints")}
    trainer |= {"total_epochs": 3, "total_training_steps": None, "del_local_ckpt_after_load": False}
    actor = {"actor": {"checkpoint": {"async_save": False}}}
    return OmegaConf.create({"data": data | files, "trainer": trainer, "actor_rollout_ref": actor})


def test_steps_of_a_run_that_stops_anywhere(config: Any, tmp_path: Path) -> None:
    """Also at the end of an epoch, where verl itself begins with its first order again."""
    whole = Trainer(OmegaConf.merge(config, {"trainer": {"default_local_dir": str(tmp_path / "whole")}})).steps(15)
    assert len({index for step in whole[:6] for index in step}) == 24
    assert sorted(whole[:6]) != sorted(whole[6:12])
    found: list[list[int]] = []
    for count, workers in ((2, 0), (4, 2), (5, 0), (4, 0)):  # 6 steps in an epoch
        config.data.dataloader_num_workers = workers
        found += Trainer(config).steps(count)
    assert found == whole


def test_items_of_verl(config: Any) -> None:
    config.data.custom_cls = {"path": "pkg://midepoch.integrations.verl", "name": "PromptDataset"}
    kind = get_dataset_class(config.data)
    assert kind.__name__ == PromptDataset.__name__
    for changes in ({}, {"filter_overlong_prompts": True, "filter_overlong_prompts_workers": 1}):
        data = OmegaConf.merge(config.data, changes)
        theirs, ours = (each(data.train_files, tokenizer(), data) for each in (RLHFDataset, PromptDataset))
        assert len(ours) == len(theirs) == (20 if changes else ROWS)
        for number in (0, 7, len(ours) - 1):
            for name, value in theirs[number].items():
                found = ours[number][name]
                assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
            assert ours.item(ours.rows[number]).keys() == theirs[number].keys()
    assert np.array_equal(ours[0]["dummy_tensor"], [0])


def test_refused(config: Any) -> None:
    trainer = Trainer(config)
    with pytest.raises(TypeError, match="must be a PromptDataset, got RLHFDataset"):
        trainer._create_dataloader(RLHFDataset(config.data.train_files, tokenizer(), config.data), None, None, None)
    with pytest.raises(ValueError, match="sampler would be ignored"):
        trainer._create_dataloader(None, None, None, [1])
