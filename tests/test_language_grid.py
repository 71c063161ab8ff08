import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from longhorn_kit.lab import language, language_grid
from longhorn_kit.lab.language import LMPreset
from longhorn_kit.lab.language_grid import (
    MAIN, OTHERS, SECOND, SETTINGS, LanguageGrid, efficiency, figures, grid_from, in_order, kind_of, next_job, open_texts, paired,
    preset_of, run, settings_of, tables, throughput, throughput_table, timing_jobs)
from longhorn_kit.lab.language_grid import Results, Turns, key_of
from longhorn_kit.records import read_json, read_jsonl, to_plain
from longhorn_kit.lab.training import TrainConfig, TrainingDiverged
from longhorn_kit.models import MIXERS, SequenceLM

RECIPE = TrainConfig(batch_size=4, context=16, steps=2, lr=1e-2, warmup=1, log_every=1, cpu=True, loss_chunk=32)
TOY = LanguageGrid(
    LMPreset("a rehearsal", d_model=16, n_layer=2, train=RECIPE), tokens=1024, evaluations=4,
    jobs=(("longhorn", 0), ("mamba", 0), ("longhorn", 1)))
END = "\n<|endoftext|>\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    "A folder with two domains."
    folder = tmp_path_factory.mktemp("texts")
    for name, word in (("prose", "and then"), ("docs", "returns")):
        for part, lines in (("train", 400), ("val", 8)):
            documents = (f"{word} {i * i % 89} {word}\n" for i in range(lines))
            (folder / f"{name}.{part}.txt").write_text(END.join(documents))
    return str(folder)


@pytest.fixture(scope="module")
def rehearsal(texts, tmp_path_factory):
    "A whole grid, on two worker processes."
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("grid")
    return folder, run("gpu", folder, TOY, texts)


def in_process(folder, texts, grid=TOY, **how):
    "The same work without processes."
    opened = open_texts(texts, "bytes", folder / "tokens")
    corpus = opened.corpus.index["source_sha256"]
    do = lambda job: language_grid.one_run(grid, job, opened, folder, how) | language_grid.made_on("cpu")
    language_grid.take_turns(grid.jobs, lambda job: settings_of(grid, job, corpus), folder, do, time.time() + 999)
    return language_grid.record_of("gpu", grid, folder, opened)


def comparable(record):
    drop = ("seconds", "tokens_per_second", "wall_seconds", "engine", "device")
    return [{name: value for name, value in row.items() if name not in drop} for row in record["results"]["runs"]]


# ---- the grid


def test_the_first_runs_of_a_grid_are_a_comparison():
    jobs = in_order()
    assert jobs[:4] == tuple((mixer, 0) for mixer in MAIN) and {mixer for mixer, _ in jobs} == set(MIXERS)
    seeds = lambda mixer: sorted(seed for name, seed in jobs if name == mixer)
    assert all(seeds(mixer) == [0, 1, 2] for mixer in MAIN) and all(seeds(mixer) == [0, 1] for mixer in SECOND)
    assert all(seeds(mixer) == [0] for mixer in OTHERS) and len(jobs) == 26


@pytest.mark.parametrize("scale", sorted(SETTINGS))
def test_a_grid_survives_json_and_its_tokens_are_a_parameter(scale):
    grid = SETTINGS[scale]
    assert grid_from(json.loads(json.dumps(to_plain(asdict(grid))))) == grid
    few = replace(grid, tokens=grid.tokens // 2)
    long, short = preset_of(grid, 0).train, preset_of(few, 0).train
    assert abs(short.steps - long.steps / 2) <= 1 and short.warmup == short.steps // 8
    assert settings_of(grid, ("mamba", 0), "x") != settings_of(few, ("mamba", 0), "x")
    assert preset_of(grid, 3, compile=True).train.seed == 3 and long.lr == short.lr
    assert language.settings_for(scale) == grid and scale in language.SCALES


def test_what_only_changes_the_speed_finds_the_same_results():
    faster = replace(TOY, preset=replace(TOY.preset, train=replace(RECIPE, accumulate=2, loss_chunk=8, log_every=2)))
    assert settings_of(TOY, ("mamba", 0), "x") == settings_of(faster, ("mamba", 0), "x")
    assert settings_of(TOY, ("mamba", 0), "x") != settings_of(TOY, ("mamba", 0), "another text")


def test_recorded_runs_are_still_found_and_switches_are_other_runs():
    from longhorn_kit.lab.language import override
    recorded = read_jsonl(Path(__file__).parent.parent / "nbs/lab/results/language/gpu/runs.jsonl")
    grid = replace(SETTINGS["gpu"], tokens=recorded[0]["tokens"])
    for then in (row["settings"] for row in recorded if row["tokens"] == grid.tokens):
        assert settings_of(grid, (then["mixer"], then["seed"]), then["corpus"]) == then
    for change in ({"sizes": "official"}, {"decay": "official"}):
        assert settings_of(replace(TOY, preset=override(TOY.preset, **change)), ("gla", 0), "x") != settings_of(TOY, ("gla", 0), "x")


# ---- the text


def test_domains_are_measured_apart_and_together(texts, tmp_path):
    opened = open_texts(texts, "bytes", tmp_path)
    tokens, size = opened.domains["docs"]
    written = (Path(texts) / "docs.val.txt").read_text()
    assert bytes(tokens.tolist()) == written.replace(END, "\0").rstrip("\n").encode() + b"\n\0" and size == len(tokens)
    assert sum(len(part) for part, _ in opened.domains.values()) == len(opened.corpus.val)
    weights = {name: len(part) - 1 for name, (part, _) in opened.domains.items()}
    model = language.new_model(language.model_config(TOY.preset, "longhorn", 256), 0)
    found = language_grid.held_out_losses(opened, RECIPE)(model)
    together = sum(found[f"held_out/{name}"] * count for name, count in weights.items()) / sum(weights.values())
    assert found["val_loss"] == pytest.approx(together) and set(opened.domains) == {"docs", "prose"}
    alone = open_texts(str(Path(texts) / "docs.train.txt"), "bytes", tmp_path)
    assert list(alone.domains) == ["held out"]


# ---- working it off


def test_two_processes_make_the_record_that_one_makes(rehearsal, texts, tmp_path):
    folder, record = rehearsal
    assert not record["results"]["not_run"] and not record["results"]["failed"]
    assert comparable(record) == comparable(in_process(tmp_path, texts))
    assert [(row["mixer"], row["seed"]) for row in record["results"]["runs"]] == [tuple(job) for job in TOY.jobs]
    assert {"claim", "scale", "settings", "results", "environment", "seconds", "command"} <= set(record)
    assert (folder / "record.json").exists() and (folder / "record.json").stat().st_size < 200_000
    for row in record["results"]["runs"]:
        assert row["held_out"]["tokens"][-1] == row["tokens"] == 1024 and len(row["held_out"]["all"]) == 4
        assert row["loss"]["all"] == row["held_out"]["all"][-1] and row["engine"]["processes"] == 1
        place = folder / f"{row['mixer']}-seed{row['seed']}"
        assert SequenceLM.from_pretrained(place / "model").num_parameters() == row["parameters"]
        assert not (place / "checkpoints").exists()
    assert str(folder) not in json.dumps(record) and texts not in json.dumps(record)


def test_a_finished_grid_is_not_run_again_and_a_larger_one_keeps_it(rehearsal, texts, monkeypatch):
    folder, record = rehearsal
    trained = []
    monkeypatch.setattr(language_grid, "one_run", lambda grid, job, *rest: trained.append(job) or {"diverged": "made up"})
    larger = replace(TOY, jobs=(*TOY.jobs, ("gla", 0)))
    again = in_process(folder, texts, larger)
    assert trained == [("gla", 0)] and comparable(again)[:3] == comparable(record)


def test_a_finished_grid_keeps_its_cost(rehearsal, texts):
    folder, record = rehearsal
    opened = open_texts(texts, "bytes", folder / "tokens")
    again = language_grid.finished_record("gpu", TOY, folder, opened, 0.5)
    assert again["seconds"] == pytest.approx(record["seconds"] + 0.5)


def test_a_seed_decides_weights_and_order_for_all_models_alike(rehearsal):
    _, record = rehearsal
    first, second = ([row["train"]["loss"] for row in record["results"]["runs"] if row["mixer"] == "longhorn"][i] for i in (0, 1))
    assert first != second


def test_an_interrupted_run_counts_its_time(texts, tmp_path, monkeypatch):
    def stopped(*_):
        time.sleep(0.3)
        raise KeyboardInterrupt
    monkeypatch.setattr(language_grid, "work_off", stopped)
    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run("gpu", tmp_path, TOY, texts)
        assert read_json(tmp_path / "partial.json")["seconds"] >= 0.3 * times


def test_stopped_in_the_middle_a_run_goes_on_to_the_same_numbers(rehearsal, texts, tmp_path):
    "A worker process is asked to stop while it trains; the next one resumes from its checkpoint."
    slow = (
        "import time, sys; from longhorn_kit.lab import training, language_grid; old = training.train_step;"
        "training.train_step = lambda *given: (time.sleep(0.2), old(*given))[1]; language_grid.worker(sys.argv[1])")
    options = {"what": "train", "folder": str(tmp_path), "grid": asdict(TOY), "data": texts, "tokenizer": "bytes",
               "how": {}, "deadline": time.time() + 999, "device": "cpu", "parent": os.getpid()}
    process = subprocess.Popen([sys.executable, "-c", slow, json.dumps(to_plain(options))], stderr=subprocess.PIPE, text=True)
    try:
        metrics, deadline = tmp_path / "longhorn-seed0" / "metrics.jsonl", time.monotonic() + 90
        while len(read_jsonl(metrics)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "stopped by SIGTERM after step" in told
    assert not read_jsonl(tmp_path / "runs.jsonl")
    begun = language_grid.last_step(tmp_path / "longhorn-seed0")
    record = in_process(tmp_path, texts, replace(TOY, jobs=TOY.jobs[:1]))
    attempts = read_json(tmp_path / "longhorn-seed0" / "config.json")["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, begun] and 3 <= begun < 16
    assert comparable(record) == comparable(rehearsal[1])[:1]


def test_when_the_time_is_over_the_record_says_what_was_not_run(texts, tmp_path, monkeypatch):
    idle = lambda *_: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(language_grid, "start_worker", idle)
    record = run("gpu", tmp_path, TOY, texts, minutes=0.05)
    assert record["seconds"] < 60 and not record["results"]["runs"] and len(record["results"]["not_run"]) == 3
    assert (tmp_path / "partial.json").exists() and not (tmp_path / "record.json").exists()
    assert figures(record) == [] and tables(record)[-1][2][0][:2] == ["diagonal", 0]


def test_a_job_that_fails_is_tried_twice_and_divergence_is_a_result(texts, tmp_path, monkeypatch):
    calls = []
    def sometimes(model, *rest, desc, **options):
        calls.append(desc)
        if desc.startswith("mamba"):
            raise RuntimeError("out of memory\nin many lines")
        raise TrainingDiverged("the loss is nan at step 3 (learning rate 1); last checkpoint: somewhere")
    monkeypatch.setattr(language_grid, "train", sometimes)
    record = in_process(tmp_path, texts, replace(TOY, jobs=TOY.jobs[:2]))
    results = record["results"]
    assert calls == ["longhorn, seed 0", "mamba, seed 0", "mamba, seed 0"]
    assert results["runs"][0]["diverged"] == "the loss is nan at step 3 (learning rate 1)"
    assert [row["error"] for row in results["failed"]] == ["RuntimeError: out of memory in many lines"] * 2
    assert results["not_run"] == [{"mixer": "mamba", "seed": 0, "step": 0}]


def test_a_lost_gpu_ends_the_process_so_that_it_is_started_again(tmp_path):
    def do(job):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(SystemExit) as left:
        language_grid.take_turns([1], lambda job: {"job": job}, tmp_path, do, time.time() + 9)
    assert left.value.code == language_grid.AGAIN and len(read_jsonl(tmp_path / "failed.jsonl")) == 1


def test_a_job_belongs_to_one_process_at_a_time(tmp_path):
    results, settings = Results(tmp_path), lambda job: {"job": job}
    turns = Turns(tmp_path)
    assert [next_job([1, 2], settings, results, turns) for _ in range(3)] == [1, 2, None]
    turns.give(key_of({"job": 1}))
    results.add({"settings": {"job": 1}})
    assert next_job([1, 2], settings, results, turns) is None


@pytest.mark.parametrize("call, match", [
    (lambda folder: run("moon", folder), "unknown scale 'moon' for language_grid; there are: gpu, paper"),
    (lambda folder: run("gpu", folder, replace(TOY, preset=replace(TOY.preset, tokenizer="gpt2"))), "this grid needs a text"),
    (lambda folder: run("gpu", folder, TOY, str(folder / "no" / "*.txt")), "matches no file"),
])
def test_bad_input_is_one_line(tmp_path, monkeypatch, call, match):
    monkeypatch.delenv("LONGHORN_TEXT", raising=False)
    with pytest.raises((ValueError, OSError), match=match) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_real_grid_says_so(tmp_path):
    with pytest.raises(ValueError, match="language at scale gpu needs a GPU, and there is none; scale laptop does not"):
        language.run("gpu", tmp_path)


# ---- reading a record


def made_up(losses):
    "A record with these held-out losses: mixer -> {seed: loss}."
    runs = [{"mixer": mixer, "seed": seed, "loss": {"prose": loss, "all": loss}, "tokens": 100, "parameters": 5,
             "tokens_per_second": 7, "engine": {"scan": "triton"}, "bits_per_byte": loss,
             "held_out": {"tokens": [25, 50, 100], "prose": [loss + 2, loss + 1, loss], "all": [loss + 2, loss + 1, loss]}}
            for mixer, row in losses.items() for seed, loss in row.items()]
    return {"scale": "gpu", "settings": {"tokens": 100, "preset": {"train": {"lr": 0.001}}},
            "results": {"runs": runs, "domains": {"prose": {}}, "not_run": [], "train_tokens": 100}}


def test_only_runs_with_the_same_seed_are_compared():
    record = made_up({"longhorn": {0: 3.0, 1: 3.5, 2: 3.2}, "mamba": {1: 3.6, 2: 3.4}, "gla": {0: 4.0}, "attention": {}})
    assert paired(record, "longhorn", "mamba") == pytest.approx([0.1, 0.2])
    assert len(paired(record, "longhorn", "gla")) == 1 and paired(record, "longhorn", "attention") == []
    row, verdict = (tables(record)[i][2][0] for i in (1, 2))
    assert row[2] == f"{mean([0.1, 0.2]):+.4f} ± {stdev([0.1, 0.2]):.4f}" and row[3:] == [2]
    assert verdict[2:] == [2, "cannot be judged: one learning rate was tried (0.001)", "+0.013"]


def test_efficiency_is_a_ratio_of_tokens_with_the_same_seed():
    record = made_up({"longhorn": {0: 3.0, 1: 3.6}, "mamba": {0: 3.5, 1: 3.5}})
    assert language_grid.tokens_at(record["results"]["runs"][0]["held_out"], 3.5) == 75
    assert efficiency(record, "longhorn") == [pytest.approx(100 / 75), None] and efficiency(record, "mamba") == [1.0, 1.0]
    assert [row for row in tables(record)[3][2] if row[0] == "diagonal"][0][1:] == ["1.33, never", "–", "1.8 at 1.3B"]


def test_the_record_of_a_rehearsal_can_be_drawn(rehearsal):
    import matplotlib.pyplot as plt
    _, record = rehearsal
    found = language.figures(record)
    assert len(found) == 2 and all(caption for _, caption in found)
    for title, header, rows in language.tables(record):
        assert all(len(row) == len(header) for row in rows), title
    assert language.samples(record) == []
    plt.close("all")


# ---- speed


def test_kernels_are_told_apart_by_their_names():
    ours = ("_diagonal_fwd_kernel", "_diagonal_adjoint_kernel", "_exact_bwd_kernel", "_scan_fwd_kernel", "_sum_kernel", "_rows_kernel",
            "chunk_gla_fwd_kernel_inter", "recompute_w_u_fwd_kernel", "chunk_fwd_kernel_o")
    assert all(kind_of(name) == "scan" for name in ours)
    names = {"_conv_fwd_kernel": "convolution", "triton_per_fused_mean_2": "compiled", "Memcpy HtoD": "pointwise and the rest",
             "sm90_xmma_gemm_bf16f32_tn_n_execute_segment_k_off_kernel__5x_cublas": "matrix products",
             "cudnn_generated_fort_native_sdpa_sm90_knob_7_kernel0_0": "attention",
             "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float>>": "optimiser",
             "void cublasLt::splitKreduce_kernel<32, 16>": "matrix products",
             "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>": "pointwise and the rest"}
    assert {name: kind_of(name) for name in names} == names


def test_throughput_is_rehearsed_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setitem(language.LM_PRESETS, "toy", TOY.preset)
    options = dict(mixers=("longhorn", "attention"), contexts=(16, 64), compiled=(False,), preset="toy", tokens=128, cpu=True)
    here = lambda options, devices, folder, *_: language_grid.time_jobs(options | {"device": "cpu"}, folder, options["deadline"])
    monkeypatch.setattr(language_grid, "work_off", here)
    record = throughput(tmp_path, **options)
    assert [(row["mixer"], row["context"]) for row in record["rows"]] == [
        ("longhorn", 16), ("attention", 16), ("longhorn", 64), ("attention", 64)]
    assert all(row["tokens_per_second"] > 0 and row["engine"]["scan"] for row in record["rows"])
    title, header, rows = throughput_table(record)
    assert all(len(row) == len(header) for row in rows) and header[1:3] == ["16", "64"]
    language_grid.draw_throughput(record)
    monkeypatch.setattr(language_grid, "time_step", lambda *_, **options: pytest.fail("timed again"))
    assert throughput(tmp_path, **options)["rows"] == record["rows"]
    assert timing_jobs(("a", "b"), (1, 2), (False, True))[:4] == [
        {"mixer": m, "context": c, "compile": False} for c in (1, 2) for m in ("a", "b")]


def test_curves_are_drawn_of_the_models_for_which_several_seeds_are_planned():
    run = lambda mixer, seed: {"mixer": mixer, "seed": seed, "loss": {"all": 3.0, "docs": 3.0},
                               "held_out": {"tokens": [1e6, 2e6], "docs": [4.0, 3.0], "all": [4.0, 3.0]}}
    drawn = lambda jobs: [line.get_label() for line in language_grid.draw_curves(
        {"settings": {"jobs": jobs}, "results": {"domains": {"docs": 1}, "runs": [run(*job) for job in jobs[:2]]}}).axes[0].get_lines()]
    assert len(drawn([("attention", 0), ("retnet", 0), ("attention", 1)])) == 1
    assert len(drawn([("attention", 0), ("retnet", 0)])) == 2
