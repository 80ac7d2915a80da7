"""NeMo Automodel on the CPU: it builds models on CUDA devices only. Imported before its recipes are used."""

from __future__ import annotations

import logging
from typing import Any

import torch

torch.cuda.reset_peak_memory_stats = lambda *_: None
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao registers enums in a way of older torch

from nemo_automodel.recipes.llm import train_ft  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402


def build_model(cfg_model: Any, *_: Any, **__: Any) -> LlamaForCausalLM:
    """The model of a recipe, on each rank by itself."""
    return LlamaForCausalLM(cfg_model.config.instantiate())


train_ft.build_model = build_model
