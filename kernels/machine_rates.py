#!/usr/bin/env python
"""Measure the host's time to launch an operation, and collectives between GPUs.

Besides the kernels, these times determine a training step. The page nbs/machine/planner.ipynb reads
the record.

    python kernels/machine_rates.py  # 1, 2, 4, ... of all GPUs; about a minute
    python kernels/machine_rates.py --gpus 1             # no collectives
    python kernels/machine_rates.py --device cpu  # test with gloo; times are meaningless

Writes kernels/results/machine_<gpu>.json, completely or not at all. Collectives are checked against
the sum that they should give. Earlier measurements with another number of GPUs stay in the record
if the GPU, torch and CUDA are the same.
"""

import argparse
import json
import os
import pathlib
import platform
import socket
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # the checkout, not another installed version

RESULTS = ROOT / "kernels" / "results"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = tuple(1 << n for n in range(16, 31, 2)) + (1 << 29,)  # bytes of the full tensor


def launch_us(device, count=2000):
    "Return the microseconds that the host needs to launch a small operation."
    import torch

    a = torch.zeros(8, device=device, requires_grad=True)

    def run():
        b = a
        for _ in range(count):
            b = b + 1.0
        return b

    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    spent = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return float(f"{1e6 * spent / count:.4g}")


def collective(op, tensor, gathered, world):
    "Return the call of a collective, and the bytes of its full tensor."
    import torch.distributed as dist

    if op == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(gathered, tensor[: gathered.numel() // world])
    return lambda: dist.reduce_scatter_tensor(tensor[: gathered.numel() // world], gathered)


def checked(op, rank, world, device):
    "Check a small collective with a known result; raise SystemExit if it is wrong."
    import torch

    tensor = torch.full((world * 4,), rank + 1.0, device=device)
    gathered = torch.empty(world * 4, device=device)
    if op == "reduce_scatter":
        gathered.fill_(rank + 1.0)
    collective(op, tensor, gathered, world)()
    total = world * (world + 1) / 2
    right = {
        "all_reduce": tensor.eq(total).all(),
        "reduce_scatter": tensor[:4].eq(total).all(),
        "all_gather": gathered.view(world, 4)[:, 0]
        .eq(torch.arange(1.0, world + 1, device=device))
        .all(),
    }[op]
    if not bool(right):
        raise SystemExit(f"machine_rates: {op} on {world} gives the wrong result")


def worker(rank, world, port, kind, sizes, out):
    "Run one process of the collectives; rank 0 writes the rows."
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault(
        "NCCL_NVLS_ENABLE", "0"
    )  # no multicast over NVLink, which not every machine allows
    device = torch.device("cpu" if kind == "cpu" else f"cuda:{rank}")
    options = {} if kind == "cpu" else {"device_id": device}
    if kind != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", rank=rank, world_size=world, **options
    )
    rows = []
    for op in COLLECTIVES:
        if kind == "cpu" and op != "all_reduce":
            continue  # gloo has no reduce_scatter into one tensor
        checked(op, rank, world, device)
        for size in sizes:
            count = size // 4 // world * world
            tensor = torch.ones(count, device=device)
            gathered = torch.ones(count, device=device)
            run = collective(op, tensor, gathered, world)
            times = []
            repeats = 3 if kind == "cpu" else 20
            for _ in range(repeats + 3):
                dist.barrier()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                begin = time.perf_counter()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(1e3 * (time.perf_counter() - begin))
                tensor.fill_(1.0)
            slowest = torch.tensor(times[3:], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # the last process ends a collective
            rows.append(
                dict(op=op, gpus=world, bytes=size, ms=float(f"{slowest.median().item():.5g}"))
            )
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def collectives(worlds, kind, sizes, folder):
    "Return the rows for every number of GPUs."
    import torch.multiprocessing as mp

    rows = []
    for world in worlds:
        out = pathlib.Path(folder) / f"{world}.json"
        mp.spawn(worker, (world, free_port(), kind, sizes, str(out)), nprocs=world)
        rows += json.loads(out.read_text())
        best = {
            op: max(
                (r["bytes"] / r["ms"] / 1e6 for r in rows if r["op"] == op and r["gpus"] == world),
                default=0,
            )
            for op in COLLECTIVES
        }
        print(
            f"{world} processes, highest GB/s of the full tensor:",
            {op: round(v, 1) for op, v in best.items()},
            flush=True,
        )
    return rows


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        help="numbers of GPUs to connect (default 2, 4, 8, up to all GPUs)",
    )
    parser.add_argument("--commit", help="commit to record if git is missing")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="file to write (default kernels/results/machine_<gpu>.json)",
    )
    return parser.parse_args(argv)


def merged(record, path):
    """Return the record, with additional entries of an older record.

    These are collectives of other numbers of GPUs, and values that this program does not write."""
    if path.exists():
        old = json.loads(path.read_text())
        now = {row["gpus"] for row in record["collectives"]}
        if all(old.get(name) == record[name] for name in ("gpu", "torch", "cuda")):
            record["collectives"] += [row for row in old["collectives"] if row["gpus"] not in now]
            record = old | record
    return record


def main(argv=None):
    import tempfile

    import torch

    from longhorn_kit.records import commit_of_kit, write_json

    args = parse(argv)
    begin = time.monotonic()
    small = args.device == "cpu"
    there = torch.cuda.device_count()
    if not small and not there:
        raise SystemExit("machine_rates.py: no GPU here; --device cpu runs toy sizes")
    device = torch.device("cpu" if small else "cuda:0")
    worlds = args.gpus or [n for n in (2, 4, 8) if small and n == 2 or n <= there]
    worlds = [n for n in worlds if n > 1]
    if not small and worlds and max(worlds) > there:
        raise SystemExit(f"machine_rates.py: there are {there} GPUs, not {max(worlds)}")
    gpu = "cpu rehearsal" if small else torch.cuda.get_device_name(0)
    sizes = (1 << 12, 1 << 16) if small else SIZES
    record = dict(
        gpu=gpu,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=None if small else torch.version.cuda,
        commit=args.commit or commit_of_kit(),
        command="python kernels/machine_rates.py" + (" --device cpu" if small else ""),
        measure="median; collectives on the host's clock, the slowest process counts; "
        "bytes of a collective are those of the whole tensor",
        memory_bytes=None if small else torch.cuda.get_device_properties(0).total_memory,
    )
    record["launch_us"] = launch_us(device)
    print(f"{record['launch_us']} us to launch an operation", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        record["collectives"] = collectives(worlds, args.device, sizes, folder)
    record["seconds"] = round(time.monotonic() - begin)
    name = gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")
    path = args.out or RESULTS / f"machine_{name}.json"
    write_json(path, record if small else merged(record, path))
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
