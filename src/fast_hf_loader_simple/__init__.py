"""Instant loading of Hugging Face datasets with exact mid-epoch resume. A thin layer on ``midepoch``.

from fast_hf_loader_simple import fast_load_iterable_dataset

ids = fast_load_iterable_dataset("HuggingFaceTB/smollm-corpus", "fineweb-edu-dedup", split="train")
ids = ids.shuffle(seed=42)
"""

from midepoch.compat.fast_hf import SimpleArrowIterableDataset, fast_load_iterable_dataset
from midepoch.errors import CheckpointMismatchError

__all__ = ["CheckpointMismatchError", "SimpleArrowIterableDataset", "fast_load_iterable_dataset"]
