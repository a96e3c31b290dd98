"""Where references end, under Triton's interpreter. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run with TRITON_INTERPRET=1", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from poisoning import device, poisoned, untuned  # noqa: F401
from reference_cases import *  # noqa: F403

pytestmark = [
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # of the interpreter
]
