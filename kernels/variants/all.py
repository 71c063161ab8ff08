"""Run every variant of this folder on a GPU, one script after the other.

python kernels/variants/all.py              # every script
python kernels/variants/all.py plans exact  # those whose name starts with a word
"""

import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent


def main():
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("all.py: no GPU here")
    wanted = tuple(sys.argv[1:]) or ("",)
    failed = []
    for script in sorted(FOLDER.glob("*.py")):
        if script.name in ("all.py", "shared.py") or not script.name.startswith(wanted):
            continue
        print(f"== {script.name}", flush=True)
        if subprocess.run([sys.executable, str(script)]).returncode:
            failed.append(script.name)
    if failed:
        print("failed: " + ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
