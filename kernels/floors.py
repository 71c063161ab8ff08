"""Lower bounds of a scan's time, from the page nbs/scan/16_speed.ipynb.

The page is the only source: this module runs its cells with the tag `floors`, in order, and offers
the names that they define.

    from floors import row_floors, scan_bytes
"""

import json
import pathlib

PAGE = pathlib.Path(__file__).resolve().parent.parent / "nbs" / "scan" / "16_speed.ipynb"


def code_of_page() -> str:
    "Return the source of the cells with the tag `floors`."
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "floors" in cell["metadata"].get("tags", ())]
    return "\n\n".join("".join(cell["source"]) for cell in tagged)


exec(compile(code_of_page(), str(PAGE), "exec"))
