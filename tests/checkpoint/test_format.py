"""Version 1 is read for ever: tests/fixtures/checkpoint-v1 is never changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from midepoch.checkpoint import PipelineCheckpoint

FIXTURE = Path(__file__).parents[1] / "fixtures" / "checkpoint-v1"


class Numbers:
    at = 0

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state == {"at": 41, "position": 256}
        self.at = state["at"]


def test_version_1_is_read(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(shutil.copytree(FIXTURE, tmp_path / "run"))
    model = {"w": np.zeros((3, 4), np.float32), "deep": {"b": np.zeros(1, complex), "t": None}}
    optimizer: dict[Any, Any] = {"lr": 0.0, 3: ""}
    note: dict[str, Any] = {}
    numbers = Numbers()
    assert checkpoint.restore_latest(numbers, model, optimizer, extra={"note": note}) == 7
    assert numbers.at == 41
    assert model["w"].tolist() == np.arange(12).reshape(3, 4).tolist()
    assert model["deep"]["b"][0] == 1 + 2j and model["deep"]["t"] == (1, None, float("inf"))  # type: ignore[call-overload]
    assert optimizer == {"lr": 0.1, 3: "three"}
    assert note == {"text": "π", "raw": b"\x00\xff", "set": {1, 2}}
    assert checkpoint.metadata(7) == {"loss": 0.25}
    checkpoint.verify(7)
