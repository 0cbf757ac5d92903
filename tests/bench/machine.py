"""The machine and the versions that a figure was measured with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers


def describe_machine() -> dict[str, str]:
    return {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def bytes_written() -> int:
    """Bytes passed to write calls by this process so far; Linux counts them."""
    counters: Any = psutil.Process().io_counters()
    return counters.write_chars


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
