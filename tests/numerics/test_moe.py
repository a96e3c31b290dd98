"""The mixture of experts' numbers under Triton's interpreter. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from cases_moe import *  # noqa: F403
from poisoning import device, poisoned  # noqa: F401
