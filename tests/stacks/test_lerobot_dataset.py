"""Items of LeRobot datasets in place, against those of LeRobot's own class."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from midepoch.integrations.lerobot import from_lerobot

pytest.importorskip("lerobot", reason="lerobot is not installed: it needs torch < 2.11")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

pytestmark = pytest.mark.filterwarnings("ignore")
FIXTURE = Path(__file__).parents[1] / "fixtures" / "lerobot" / "v3.0"
TOP, WRIST = "observation.images.top", "observation.images.wrist"
DELTAS = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], TOP: [-0.1, 0.0, 0.3], WRIST: [0.0, 0.2]}


@pytest.mark.parametrize(
    "options", [{}, {"delta_timestamps": DELTAS}, {"episodes": [0, 2], "delta_timestamps": {TOP: [0.0]}}]
)
def test_items(options: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "robot")
    theirs = LeRobotDataset("me/robot", root=tmp_path / "robot", video_backend="pyav", **options)
    ours = from_lerobot(tmp_path / "robot", **options)
    assert len(ours) == len(theirs)
    for number in range(len(theirs)):
        expected, found = theirs[number], ours[number]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, str):
                assert found[name] == value
            else:
                assert found[name].dtype == value.dtype and torch.equal(found[name], value), (number, name)
