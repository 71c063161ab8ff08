"""A Python that imports PyTorch and Triton once and forks a child per command.

So commands need no import. As a program, it reads lines of JSON, [command, file for output, file
for errors], and writes exit codes."""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path


class WarmPython:
    """Runner of commands like `python -c CODE` or `python FILE ARGUMENTS`.

    environment: environment of all commands."""

    def __init__(self, environment, cwd):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment, cwd=cwd, **pipes
        )

    def run(self, *command):
        "Return (exit code, output, errors)."
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder, name)) for name in ("output", "errors")]
            self.process.stdin.write(json.dumps([list(map(str, command)), *paths]) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            output, errors = (Path(path).read_text() for path in paths)
        return code, output, errors

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def run_command(command):
    "Run a command in this process and return its exit code."
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(compile(command[1], "<command>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def in_child(command, output, errors):
    "Run a command in a fork of this process and return its exit code."
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = run_command(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import triton  # noqa: F401

    sys.path[0] = ""  # as for `python -c`
    for line in sys.stdin:
        print(in_child(*json.loads(line)), flush=True)
