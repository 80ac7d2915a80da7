"""torchtitan on the CPU: it takes a machine without an accelerator for one with CUDA. Imported before its trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as tools


def _nothing(*_: Any, **__: Any) -> None:
    pass


_cpu = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})
_cpu.current_device = lambda: 0
_cpu.get_device_name = lambda *_: "cpu"
_cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
_cpu.memory_stats = lambda *_: {}
_cpu.reset_peak_memory_stats = _cpu.empty_cache = _nothing
tools.device_type, tools.device_module = "cpu", _cpu

import torchtitan.distributed.utils  # noqa: E402
import torchtitan.models.llama3.config_registry  # noqa: E402
import torchtitan.train  # noqa: E402

torchtitan.distributed.utils.set_pg_timeouts = _nothing  # it calls a function that torch 2.13 does not have
