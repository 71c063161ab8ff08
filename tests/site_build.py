"""Import the scripts of docs/ as modules: `build`, `api`, `figures`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import api  # noqa: F401
import build  # noqa: F401
import figures  # noqa: F401
