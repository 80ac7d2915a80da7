"""A free port for a program that cannot be told 0, and binds it seconds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free() -> int:
    """Below those that the kernel hands out meanwhile to whoever asks for any."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text().split()[0]) if path.exists() else 32768
    for _ in range(1000):
        port = random.SystemRandom().randrange(10_000, max(10_001, first))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
