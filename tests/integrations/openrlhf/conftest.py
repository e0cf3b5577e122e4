from __future__ import annotations

import sys
from pathlib import Path

import stand_ins

sys.path.insert(0, str(Path(__file__).parents[1]))  # paper.py
stand_ins.install()
