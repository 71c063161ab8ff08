"""A pool of processes that start once and run functions together, as with `torchrun`.

`Pool(4).run(function, ...)` runs a function in each of them.
"""

import contextlib
import io
import multiprocessing
import os
import socket
from unittest.mock import patch


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(pipe, environment):
    "Run functions from the pipe until it is closed; this is the main loop of a process."
    os.environ |= environment
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        pipe.send(called(function, arguments, options))


def called(function, arguments, options):
    "Return a function's result, or its error as text, and its output to stderr."
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            result = function(*arguments, **options)
    except (Exception, KeyboardInterrupt) as error:
        result = f"{type(error).__name__}: {error}"
    return result, printed.getvalue()


class Alone:
    "A pool of one process, which is the current process."

    def run(self, function, *arguments, **options):
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
                result, printed = called(function, arguments, options)
        finally:
            torch.set_num_threads(threads)
        self.printed = [printed]
        return [result]

    def close(self):
        pass


class Pool:
    "A pool of several processes. They can start processes only without `daemon`."

    def __init__(self, count, daemon=True):
        spawn = multiprocessing.get_context("spawn")
        port = str(free_port())
        shared = dict(
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
        )
        self.pipes = []
        self.processes = []
        for rank in range(count):
            pipe, remote = spawn.Pipe()
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(spawn.Process(target=serve, args=(remote, own), daemon=daemon))
            self.processes[-1].start()
            self.pipes.append(pipe)
            remote.close()

    def run(self, function, *arguments, **options):
        "Return the result of each process, or its error as text; None if the process is gone."
        for pipe in self.pipes:
            pipe.send((function, arguments, options))
        result = []
        for pipe in self.pipes:
            try:
                assert pipe.poll(240), "a process of the pool hangs"
                result.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                result.append((None, ""))
        self.printed = [text for _, text in result]
        return [value for value, _ in result]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def one_process():
    "Context manager that gives this process a process group, for sharded models."
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
