"""One program for the first start of a Trainer and for all others: its last complete checkpoint, if there is one.

transformers is imported in the tests: it takes 4 s, not in every process that collects them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import midepoch
from midepoch._internal.hints import forget_warnings


def test_an_interrupted_save_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    from midepoch.integrations.transformers import last_checkpoint

    assert last_checkpoint(tmp_path / "nothing") is None
    for step in (3, 9, 12, 15):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-15" / "midepoch.json").write_text("{}")
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"global_st')
    with caplog.at_level(logging.WARNING, "midepoch"):
        assert last_checkpoint(tmp_path) is None
        for step in (3, 9):
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        caplog.clear()
        assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    assert [record.args for record in caplog.records] == [(tmp_path / f"checkpoint-{step}",) for step in (15, 12)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, id: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += id.tolist() if self.training else []
        return {"loss": self.layer(id[:, None].float()).mean(), "logits": id}


@pytest.fixture
def make(small_files: list[str], tmp_path: Path) -> Any:
    pytest.importorskip("transformers")
    from transformers import TrainingArguments

    from midepoch.integrations.transformers import ResumableTrainer

    def made(kind: Any = ResumableTrainer, **options: Any) -> Any:
        args = TrainingArguments(
            str(tmp_path / "output"),
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_steps=2,
            **options,
        )
        ds = midepoch.from_files(small_files).select_columns("id")
        return kind(Model(), args, train_dataset=ds.shuffle(seed=1), eval_dataset=ds.take(8))

    return made


def test_one_program_begins_and_resumes(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from midepoch.integrations.transformers import last_checkpoint

    expected = [int(row["id"]) for row in make(max_steps=1).train_dataset][:24]
    with caplog.at_level(logging.WARNING, "midepoch"):
        first = make(max_steps=3)
        first.train(resume_from_checkpoint=True)
        assert f"no checkpoint in {tmp_path / 'output'} yet: the run begins at step 0." in caplog.messages
        caplog.clear()
        second = make(max_steps=6)
        second.train(resume_from_checkpoint=True)
    assert not caplog.messages and last_checkpoint(tmp_path / "output") == str(tmp_path / "output" / "checkpoint-6")
    assert first.model.seen == expected[:12] and second.model.seen == expected[12:]  # a last step is always saved


def test_a_first_save_that_was_killed_is_no_checkpoint(make: Any, tmp_path: Path) -> None:
    (tmp_path / "output" / "checkpoint-2").mkdir(parents=True)
    trainer = make(max_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_trainer_is_told_of_the_resumable_one(
    workers: int, make: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import Trainer

    class Mine(Trainer):  # type: ignore[misc]
        pass

    handler = logging.StreamHandler()  # workers write to the terminal
    logging.getLogger("midepoch").addHandler(handler)
    forget_warnings()
    try:
        make(max_steps=1).train()
        make(Mine, max_steps=1).evaluate()
        assert "ResumableTrainer" not in capfd.readouterr().err
        make(Mine, max_steps=2, dataloader_num_workers=workers).train()
        text = capfd.readouterr().err
        assert text.count("Use midepoch.integrations.transformers.ResumableTrainer, or class MyTrainer") == 1
        assert "class MyTrainer(ResumableTraining, Mine)" in text
    finally:
        logging.getLogger("midepoch").removeHandler(handler)
