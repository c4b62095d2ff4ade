from __future__ import annotations

import sys
from pathlib import Path

# Behind everything else: the scripts' modules have short names.
sys.path.append(str(Path(__file__).parents[2] / "perf"))
