"""Helpers that are no tests stand beside them: `rig`, `fake_vllm`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
