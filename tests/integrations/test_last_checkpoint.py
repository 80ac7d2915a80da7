"""The last complete checkpoint of a Trainer, after a save that was killed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from midepoch.integrations.transformers import last_checkpoint


def test_an_interrupted_save_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
