"""Arrays that are read later: into memory of their own, into an array, or through a small buffer onto a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from midepoch.checkpoint import arrays
from midepoch.checkpoint.arrays import StoredArray, spec_of
from midepoch.checkpoint.files import BytesSource


@pytest.mark.parametrize("length", [0, 1, 250, 1000, 1001])
@pytest.mark.parametrize("threads", [1, 4])
def test_all_chunks_arrive(length: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK", 1000)
    monkeypatch.setattr(arrays, "_READERS", threads)
    values = torch.arange(length, dtype=torch.float32)
    data = np.concatenate([np.zeros(24, np.uint8), values.numpy().view(np.uint8)])
    array = StoredArray("w", spec_of(values), BytesSource(data), 24)
    assert torch.equal(array.read(), values)
    target = torch.zeros(length)
    assert array.read_into(target) is target and torch.equal(target, values)
    onto_device: Any = torch.zeros(length)
    if length:
        array._fill_device(onto_device.view(torch.uint8))  # the way of all devices but the CPU
    assert torch.equal(onto_device, values)
    strided = torch.zeros(length, 2)[:, 0]
    assert torch.equal(array.read_into(strided), values)
