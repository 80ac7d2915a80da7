"""Megatron-Core on the CPU: it names CUDA devices without asking whether there are any. Imported before it is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors that are created on ``"cuda"`` are created on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
OnCpu().__enter__()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine and Apex are not installed
    import megatron.core.dist_checkpointing
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer  # noqa: F401
