#!/usr/bin/env python
"""What a machine does to a training step, measured: products at the shapes of models, pointwise operations, the host's
time for one operation, and collectives between GPUs. The planner (longhorn_kit.lab.planner) reads the record.

    python kernels/machine_rates.py                      # all GPUs there are: 1, 2, 4, ... of them; about a minute
    python kernels/machine_rates.py --gpus 1             # no collectives
    python kernels/machine_rates.py --device cpu         # rehearsal with gloo at toy sizes; its times mean nothing

Writes kernels/results/machine_<gpu>.json, whole or not at all. Products are checked against float32 before they are
timed, collectives against the sum they should give. A number of GPUs that was measured before and is not measured now
stays in the record when the GPU, torch and CUDA are the same.
"""
import argparse
import json
import os
import pathlib
import platform
import socket
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]   # the checkout, not another installed version

RESULTS = ROOT / "kernels" / "results"
WIDTHS = (512, 768, 1024, 2048)      # d_model of the presets small, owt-120m, owt-350m, slimpajama-1.3b
TOKENS = (8192, 24576, 65536, 131072) # in one part of a step
ODD = 776                            # d_model of longhorn_scalar as large as owt-120m: its products have odd sides
VOCABULARY, SLICE = 50304, 8192      # of GPT-2, padded; tokens whose logits exist at a time
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = tuple(1 << n for n in range(16, 31, 2)) + (1 << 29,)   # bytes of the whole tensor


def product_shapes(small=False):
    "(M, K, N) of the products in a step: forward, gradient of the input, gradient of the weight."
    if small:
        return [(64, 32, 48), (48, 64, 32)]
    shapes = set()
    for d in WIDTHS:
        D, rank = 2 * d, -(-d // 16)
        layers = [(d, 2 * D), (D, rank + 32), (rank, D), (D, d),                       # Longhorn, Mamba
                  (d, 3 * d), (d, d), (d, 2 * (8 * d // 3 // 16 * 16)), (8 * d // 3 // 16 * 16, d)]   # attention, MLP
        for M in TOKENS:
            for K, N in layers:
                shapes |= {(M, K, N), (M, N, K), (N, M, K)}
        shapes |= {(SLICE, d, VOCABULARY), (SLICE, VOCABULARY, d), (VOCABULARY, SLICE, d)}
    rank = -(-ODD // 16)
    for M in TOKENS:
        for K, N in [(2 * ODD, rank + 32), (rank, 1)]:
            shapes |= {(M, K, N), (M, N, K), (N, M, K)}
    return sorted(shapes)


def milliseconds(run, device, seconds=0.02):
    "Median time of a call, of three or more, on a warm device."
    run()
    if device.type == "cpu":
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    import torch
    flush = torch.empty(1 << 26, dtype=torch.int32, device=device)   # twice the cache of the GPU
    times, spent = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - spent < seconds:
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def products(device, small, budget):
    "Times of products in bfloat16 with operands as autograd has them, the checked ones only."
    import torch
    rows, begin = [], time.monotonic()
    for M, K, N in product_shapes(small):
        if time.monotonic() - begin > budget:
            print(f"products: out of time before {M} x {K} x {N}", file=sys.stderr)
            break
        a, b = torch.randn(M, K, device=device).bfloat16(), torch.randn(N, K, device=device).bfloat16()
        wrong = ((a[:64] @ b.T).float() - a[:64].float() @ b.float().T).norm() / (64 * N * K) ** 0.5
        if not wrong < 0.01:
            raise SystemExit(f"machine_rates: the product {M} x {K} x {N} is wrong by {wrong:.2g}")
        rows.append(dict(M=M, K=K, N=N, dtype="bfloat16", ms=float(f"{milliseconds(lambda: a @ b.T, device):.5g}")))
    return rows


def pointwise(device, small):
    "Times of the pointwise operations of a block, with the bytes that each reads and writes."
    import torch
    import torch.nn.functional as F
    M, d, V, S = (64, 32, 100, 64) if small else (24576, 768, VOCABULARY, SLICE)
    h, y = torch.randn(M, d, device=device), torch.randn(M, d, device=device).bfloat16()
    wide, weight = torch.randn(M, 2 * d, device=device).bfloat16(), torch.ones(d, device=device)
    other, second, half = wide.clone(), h.clone(), wide[:, :d]
    logits = torch.randn(S, V, device=device)
    work = {
        "cast to bf16": (6 * M * d, lambda: h.bfloat16()),
        "cast to fp32": (6 * M * d, lambda: y.float()),
        "residual": (10 * M * d, lambda: h + y),
        "add fp32": (12 * M * d, lambda: h + second),
        "add bf16": (12 * M * d, lambda: wide + other),
        "join": (16 * M * d, lambda: torch.cat([wide, other], -1)),
        "silu of half a row": (4 * M * d, lambda: F.silu(half)),   # these two go one by one
        "times half a row": (6 * M * d, lambda: half * y),
        "rms_norm": (8 * M * d, lambda: F.rms_norm(h, (d,), weight)),
        "silu times": (20 * M * d, lambda: F.silu(wide) * wide),   # two operations: 8 and 12
        "log_softmax": (8 * S * V, lambda: torch.log_softmax(logits, -1)),
        "exp": (8 * S * V, lambda: logits.exp()),
    }
    grown = [t.requires_grad_() for t in (h.clone(), weight.clone(), logits.clone())]
    normed, logs = F.rms_norm(grown[0], (d,), grown[1]), torch.log_softmax(grown[2], -1)
    work["rms_norm backward"] = (12 * M * d, lambda: torch.autograd.grad(normed, grown[:2], h, retain_graph=True))
    work["log_softmax backward"] = (12 * S * V, lambda: torch.autograd.grad(logs, grown[2], logits, retain_graph=True))
    return [dict(name=name, bytes=size, ms=float(f"{milliseconds(run, device):.5g}")) for name, (size, run) in work.items()]


def launch_us(device, count=2000):
    "Microseconds that the host needs for one small operation."
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
    "The call of a collective, and the bytes of its whole tensor."
    import torch.distributed as dist
    if op == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(gathered, tensor[: gathered.numel() // world])
    return lambda: dist.reduce_scatter_tensor(tensor[: gathered.numel() // world], gathered)


def checked(op, rank, world, device):
    "One small collective with a known result; SystemExit when it is wrong."
    import torch
    tensor, gathered = torch.full((world * 4,), rank + 1.0, device=device), torch.empty(world * 4, device=device)
    if op == "reduce_scatter":
        gathered.fill_(rank + 1.0)
    collective(op, tensor, gathered, world)()
    total = world * (world + 1) / 2
    right = {"all_reduce": tensor.eq(total).all(), "reduce_scatter": tensor[:4].eq(total).all(),
             "all_gather": gathered.view(world, 4)[:, 0].eq(torch.arange(1.0, world + 1, device=device)).all()}[op]
    if not bool(right):
        raise SystemExit(f"machine_rates: {op} on {world} gives the wrong result")


def worker(rank, world, port, kind, sizes, out):
    "One process of the collectives; rank 0 writes the rows."
    import torch
    import torch.distributed as dist
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")   # no multicast over NVLink: not every machine lets it be used
    device = torch.device("cpu" if kind == "cpu" else f"cuda:{rank}")
    options = {} if kind == "cpu" else {"device_id": device}
    if kind != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", rank=rank, world_size=world, **options)
    rows = []
    for op in COLLECTIVES:
        if kind == "cpu" and op != "all_reduce":
            continue   # gloo has no reduce_scatter into one tensor
        checked(op, rank, world, device)
        for size in sizes:
            count = size // 4 // world * world
            tensor, gathered = torch.ones(count, device=device), torch.ones(count, device=device)
            run = collective(op, tensor, gathered, world)
            times, repeats = [], 3 if kind == "cpu" else 20
            for turn in range(repeats + 3):
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
            dist.all_reduce(slowest, dist.ReduceOp.MAX)   # a collective is over when the last one is
            rows.append(dict(op=op, gpus=world, bytes=size, ms=float(f"{slowest.median().item():.5g}")))
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def collectives(worlds, kind, sizes, folder):
    "Rows for each number of GPUs."
    import torch.multiprocessing as mp
    rows = []
    for world in worlds:
        out = pathlib.Path(folder) / f"{world}.json"
        mp.spawn(worker, (world, free_port(), kind, sizes, str(out)), nprocs=world)
        rows += json.loads(out.read_text())
        best = {op: max((r["bytes"] / r["ms"] / 1e6 for r in rows if r["op"] == op and r["gpus"] == world), default=0)
                for op in COLLECTIVES}
        print(f"{world} processes, GB/s of the whole tensor at best:", {op: round(v, 1) for op, v in best.items()}, flush=True)
    return rows


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs to connect (default 2, 4, 8 as far as there are)")
    parser.add_argument("--budget", type=float, default=180, help="seconds for the products (default 180)")
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument("--out", type=pathlib.Path, help="file to write (default kernels/results/machine_<gpu>.json)")
    return parser.parse_args(argv)


def merged(record, path):
    "The record, with what an older one has beside it: collectives of other numbers of GPUs, values from elsewhere."
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
    args, begin = parse(argv), time.monotonic()
    small, there = args.device == "cpu", torch.cuda.device_count()
    if not small and not there:
        raise SystemExit("machine_rates.py: no GPU here; --device cpu rehearses at toy sizes")
    device = torch.device("cpu" if small else "cuda:0")
    worlds = args.gpus or [n for n in (2, 4, 8) if small and n == 2 or n <= there]
    worlds = [n for n in worlds if n > 1]
    if not small and worlds and max(worlds) > there:
        raise SystemExit(f"machine_rates.py: there are {there} GPUs, not {max(worlds)}")
    gpu = "cpu rehearsal" if small else torch.cuda.get_device_name(0)
    sizes = (1 << 12, 1 << 16) if small else SIZES
    record = dict(gpu=gpu, python=platform.python_version(), torch=torch.__version__,
                  cuda=None if small else torch.version.cuda, commit=args.commit or commit_of_kit(),
                  command="python kernels/machine_rates.py" + (" --device cpu" if small else ""),
                  measure="median; products and pointwise by CUDA events with a cold cache; collectives on the host's clock, "
                          "the slowest process counts; bytes of a collective are those of the whole tensor",
                  memory_bytes=None if small else torch.cuda.get_device_properties(0).total_memory)
    torch.manual_seed(0)
    record["launch_us"] = launch_us(device)
    record["pointwise"] = pointwise(device, small)
    record["products"] = products(device, small, args.budget)
    print(f"{len(record['products'])} products, {len(record['pointwise'])} pointwise operations, "
          f"{record['launch_us']} us to launch one", flush=True)
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
