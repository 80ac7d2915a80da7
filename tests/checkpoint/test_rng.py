"""Random generators: their states come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from midepoch.checkpoint import PipelineCheckpoint


def test_any_bit_generator_of_numpy_comes_back(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        checkpoint = PipelineCheckpoint(tmp_path)
        checkpoint.save(step=1)
        expected = np.random.rand()
        np.random.set_bit_generator(before)
        assert checkpoint.restore_latest() == 1
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(before)
