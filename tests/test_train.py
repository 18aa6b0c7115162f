"""Whole runs of both trainers: the gradient belongs to the batch and not to how it is split, a run
that was killed goes on as if it had not been, and no rank is ever left waiting.

tests/worker.py runs them all, some on two ranks, before the first test; the tests read what they
left. Arithmetic in float64 has Hugging Face's Llama norm patched to stay there: as shipped it
computes in float32, which alone would limit agreement to 1e-8. GPT-2 needs no patch.
"""
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import worker
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import checkpoint
import loading
import rollout
from teacher import Teacher

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "rows" / "cases.jsonl"
CASES = {case["id"]: case for case in map(json.loads, ROWS.open())}
MACHINE = {"sample_seconds", "train_seconds", "sample_tokens_per_s", "train_tokens_per_s",
           "peak_memory_gb"}  # fields of a log line that no two runs share

# ---- what is run ---------------------------------------------------------------------------------

# the configurations: every pair of trainer, --agg and --updates, other flags spread over them
CONFIGS = {}
for n, (script, agg, updates, flags) in enumerate([
        ("train_grpo", "token", 1, "--kl_coef 0.1 --no_std"),
        ("train_grpo", "token", 2, ""),
        ("train_grpo", "seq", 1, ""),
        ("train_grpo", "seq", 2, "--kl_coef 0.1"),
        ("train_sdpo", "token", 1, "--ema 0.3 --save_every 1 --keep 9"),
        ("train_sdpo", "token", 2, "--restart_every 2 --restart_mix 0.5 --topk 5"),
        ("train_sdpo", "seq", 1, "--mask_ratio 0.3 --feedback fallback --data twins"),
        ("train_sdpo", "seq", 2, "--restart_every 2 --ema 0.3 --restart_mix matched --beta 0.9")]):
    CONFIGS[f"{script[6:]}-{agg}-{updates}"] = (
        script, ["llama", "gpt2"][n % 2], f"--agg {agg} --updates {updates} {flags}")
SOME = "--tokens_per_micro 90"  # a few rows in a micro-batch (SDPO: see below)
VARIANTS = {"row": (1, "--tokens_per_micro 1"), "some": (1, SOME), "plain": (1, "--no_pack"),
            "ddp": (2, ""), "ddp-row-plain": (2, "--tokens_per_micro 1 --no_pack"),
            "fsdp": (2, "--fsdp on"), "fsdp-some-plain": (2, f"--fsdp on --no_pack {SOME}")}
SINGLE = ["grpo-token-2", "sdpo-seq-2"]  # these also in float32
# a start of FSDP costs seconds: packed or plain, both trainers and both models see each
SPLITS = {f"{config}-f64": [v for v in VARIANTS if v != ["fsdp", "fsdp-some-plain"][n // 2 % 2]]
          for n, config in enumerate(CONFIGS)} | {
          f"{config}-f32": ["row", "ddp", "fsdp"] for config in SINGLE}
FAULTS = [("grpo-token-1", fault) for fault in ("denominator", "row", "index")] + [
          ("sdpo-seq-1", fault) for fault in ("denominator", "row", "mask")]
COMMON = ("--data x --prompts 4 --group 4 --max_new 12 --max_prompt 100 --warmup 0 --quiet "
          "--eval_data y --eval_prompts 3 --eval_n 2")


class Jobs(list):
    """The list of jobs, and the folder where they leave things."""

    def __init__(self, root):
        self.root, self.models = root, {}

    def add(self, name, script, model, flags, ranks=1, out=None, before=(), **more):
        out = self.root / (out or name)
        argv = ["--resume", str(out)] if "--resume" in flags.split() else [
            "--model", self.models[model], *COMMON.split(), *flags.split(), "--out", str(out)]
        self.append(dict(name=name, script=script, ranks=ranks, argv=argv, out=str(out),
                         files=str(self.root / name), before=list(before), **more))

    def codes(self, name):
        return json.loads((self.root / f"{name}.json").read_text())["codes"]

    def told(self, name, rank=0):
        return (self.root / f"{name}.rank{rank}.txt").read_text()

    def seen(self, name):
        """What the ranks of a run saw, joined: samples of both, gradients of the first."""
        ranks = [torch.load(path, weights_only=True)
                 for path in sorted(self.root.glob(f"{name}.rank?.pt"))]
        assert ranks, f"{name} failed: {self.codes(name)}\n{self.told(name)[-3000:]}"
        for other in ranks[1:]:
            for mine, theirs in zip(ranks[0]["rows"], other["rows"], strict=True):
                mine |= theirs
            ranks[0]["micro"] += other["micro"]
        return ranks[0]

    def log(self, name):
        lines = [json.loads(line) for line in (self.root / name / "log.jsonl").open()]
        return [{k: v for k, v in line.items() if k not in MACHINE} for line in lines]


def add_splits(jobs):
    """For each configuration the whole batch on one rank, and all ways to split it."""
    sgd = "--steps 3 --lr 1 --grad_clip 0 --eval_every 0 --ref_every 2"
    for config, (script, model, flags) in CONFIGS.items():
        for kind in ("f64", "f32") if config in SINGLE else ("f64",):
            dtype = f"{sgd} --param_dtype float{kind[1:]}"
            for variant in ("whole", *SPLITS[f"{config}-{kind}"]):
                ranks, split = VARIANTS.get(variant, (1, ""))
                split = split.replace(SOME, "--tokens_per_micro 150") if "sdpo" in script else split
                jobs.add(f"{config}-{kind}-{variant}", script, model, f"{flags} {dtype} {split}",
                         ranks, sgd=True, f64=kind == "f64")
    jobs.add("alone", "train_sdpo", "llama", CONFIGS["sdpo-token-1"][2] + f" {sgd} --fsdp on "
             "--param_dtype float64", sgd=True, f64=True)
    for config, fault in FAULTS:
        script, model, flags = CONFIGS[config]
        jobs.add(f"{config}-{fault}", script, model, f"{flags} {sgd} --param_dtype float64",
                 sgd=True, f64=True, fault=fault)
    jobs.add("up-and-down", "train_grpo", "gpt2", "--steps 1 --updates 1 --lr 0.1 --grad_clip 0 "
             "--eval_every 0 --ref_every 0 --no_std", sgd=True)
    jobs.add("no-context", "train_sdpo", "llama", f"--steps 1 {sgd[10:]}", fault="no context")
    for script, teacher in (("train_grpo", ""), ("train_sdpo", "--ema 0.3")):
        for ranks, shard in ((1, ""), (2, ""), (2, "--fsdp on")):
            for zero in ("odd", "all"):
                jobs.add(f"{script}-{zero}-{ranks}{shard[-2:]}", script, "gpt2",
                         f"{sgd} --updates 1 --param_dtype float64 {teacher} {shard}", ranks,
                         sgd=True, zero=zero)


MOVED = "--steps 5 --updates 2 --eval_every 2 --ref_every 2 --lr 0.01"
RUN = {"sdpo": f"{MOVED} --ema 0.1",
       "stable": f"{MOVED} --restart_every 2 --restart_mix 0.5 --feedback fallback",
       "grpo": "--steps 4 --kl_coef 0.1 --updates 2 --eval_every 2 --ref_every 3 --lr 0.01"}
AFTER_SAVE = dict(point="save", nth=1, after=True)
# for each run that is killed: script, ranks, flags, then the kills, each followed by a --resume
KILLED = {
    "sdpo": ("sdpo", 1, "--save_every 1", [AFTER_SAVE] * 4),  # after every step
    "sdpo-2": ("sdpo", 1, "--save_every 2", [
        dict(point="save_file", nth=2),  # the first checkpoint, half written: from the start
        dict(point="log_line", nth=4),   # step 4: trained, not logged
        dict(point="write", nth=1, after=True),  # step 3: logged, not saved
        dict(point="save_file", nth=1),  # R04: in the middle of a checkpoint
        dict(point="rename", nth=1)]),   # complete, but not yet in its place
    "grpo": ("grpo", 1, "--save_every 1", [AFTER_SAVE, dict(point="write", nth=2)]),
    "sdpo-ddp": ("sdpo", 2, "--save_every 1", [
        AFTER_SAVE, dict(point="log_line", nth=1, ranks=[1]), dict(point="save_file", nth=2)]),
    "grpo-ddp": ("grpo", 2, "--save_every 1", [dict(point="log_line", nth=3, ranks=[0])]),
    "stable-fsdp": ("stable", 2, "--save_every 1 --fsdp on", [
        AFTER_SAVE, dict(point="log_line", nth=3, ranks=[1])]),
    "torn": ("stable", 1, "--save_every 2", [dict(AFTER_SAVE, nth=2)]),
}


def add_kills(jobs):
    for name, (method, ranks, flags, kills) in KILLED.items():
        script = "train_grpo" if method == "grpo" else "train_sdpo"
        flags = f"{RUN[method]} {flags}"
        jobs.add(f"{name}-whole", script, "llama", flags, ranks)
        for k, kill in enumerate(kills):
            jobs.add(f"{name}-{k}", script, "llama", flags if k == 0 else "--resume", ranks,
                     out=f"{name}-killed", kill=kill)
        jobs.add(f"{name}-last", script, "llama", "--resume", ranks, out=f"{name}-killed",
                 before=["truncate", "tear"] if name == "torn" else [])
    jobs.add("bf16", "train_sdpo", "llama", "--steps 4 --param_dtype bfloat16 --ema 0.05 --lr 0.01 "
             "--save_every 1 --keep 9 --eval_every 0")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    jobs = Jobs(root)
    (root / "models").mkdir()
    jobs.models = worker.make_folders(root / "models")
    add_splits(jobs)
    add_kills(jobs)
    sockets = [socket.create_server(("localhost", 0)) for _ in jobs]
    for job, one in zip(jobs, sockets, strict=True):
        job["port"] = one.getsockname()[1]
        one.close()
    path = root / "jobs.json"
    path.write_text(json.dumps(jobs))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, worker.__file__, path], env=environment, timeout=1500,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return jobs


# ---- e. the gradient is that of the batch --------------------------------------------------------

def distance(ours, theirs):
    """Relative L2 distance of two lists of tensors."""
    difference = sum((a.double() - b.double()).square().sum() for a, b in
                     zip(ours, theirs, strict=True))
    return (difference / sum(b.double().square().sum() for b in theirs)).sqrt().item()


def weights(jobs, name, step=3, file="model.safetensors"):
    found = load_file(jobs.root / name / f"ckpt-{step:06d}" / file)
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("config, variant", [(c, v) for c in SPLITS for v in SPLITS[c]])
def test_split(jobs, config, variant):
    whole, split = jobs.seen(f"{config}-whole"), jobs.seen(f"{config}-{variant}")
    assert split["rows"] == whole["rows"]  # the same samples, token by token, and rewards
    bound = 1e-9 if config.endswith("f64") else 1e-5
    assert len(whole["grads"]) == len(split["grads"]) >= 3
    for ours, theirs in zip(split["grads"], whole["grads"], strict=True):
        assert distance(ours, theirs) <= bound
    assert whole["grads"][0][0].abs().max() > 0
    name = f"{config}-{variant}"
    assert distance(weights(jobs, name), weights(jobs, f"{config}-whole")) <= bound
    kind = {"f64": torch.float64, "f32": torch.float32}[config[-3:]]
    assert all(w.dtype == kind for w in weights(jobs, name))
    if "sdpo" in config and "seq-1" not in config:  # a teacher that moves
        file = "trainer/teacher.safetensors"
        teachers = [weights(jobs, run, file=file) for run in (name, f"{config}-whole")]
        assert distance(*teachers) <= bound
        assert distance(teachers[0], weights(jobs, name)) > 1e-4
    assert split["sharded"] == ("fsdp" in variant)
    for ours, theirs in zip(jobs.log(name), jobs.log(f"{config}-whole"), strict=True):
        assert ours == {k: pytest.approx(v, rel=max(bound, 1e-8), abs=max(bound, 1e-8))
                        if isinstance(v, float) else v for k, v in theirs.items()}


def test_the_splits_are_what_they_say(jobs):
    for config in CONFIGS:
        runs = {variant: jobs.seen(f"{config}-f64-{variant}")
                for variant in ("whole", "row", "some", "ddp-row-plain")}
        sizes = {variant: sum(run["micro"], []) for variant, run in runs.items()}
        assert max(sizes["row"]) == max(sizes["ddp-row-plain"]) == 1
        assert 1 < max(sizes["some"]) < max(sizes["whole"]), (config, sizes)
        assert len(sizes["some"]) > len(sizes["whole"])
        steps = runs["whole"]["rows"]
        rewards = [[reward for _, (_, reward) in sorted(step.items())] for step in steps]
        groups = [tuple(step[i:i + 4]) for step in rewards for i in range(0, 16, 4)]
        assert any(0 < sum(group) < 4 for group in groups) and (0.0,) * 4 in groups  # no signal
        assert len({len(ids) for step in steps for ids, _ in step.values()}) > 4  # padding
        if config.endswith("2"):  # off policy: the second half has seen the first half's update
            log = jobs.log(f"{config}-f64-whole")
            assert any(0 < (line["clip_frac"] or 0) < 1 for line in log) or "sdpo" in config
            assert any(abs((line["is_weight"] or 1) - 1) > 1e-3 for line in log) or "grpo" in config


def test_up_and_down(jobs):
    """L21, L22: at ratio 1 the loss is about 0 while the weights move: what won its group becomes
    more likely, what lost less."""
    (line,) = jobs.log("up-and-down")
    assert abs(line["loss"]) < 0.1 and line["grad_norm"] > 0.01 and line["clip_frac"] == 0
    (rows,), (prompts,) = (jobs.seen("up-and-down")[k] for k in ("rows", "prompts"))
    change = {"up": 0.0, "down": 0.0}
    models = [loading.load_model(path) for path in (
        jobs.models["gpt2"], jobs.root / "up-and-down" / "ckpt-000001")]
    asked = {n: rollout.encode(models[0][1], worker.load("x")[i]["messages"]) for n, i in prompts}
    made = [rollout.Rollout(n, asked[n // 4], ids, None, None, True, "") for n, (ids, _) in
            rows.items()]
    before, after = (rollout.logprobs(model, made, 999)[0] for model, _ in models)
    rewards = torch.tensor([rows[r.row][1] for r in made]).view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1)
    for a, old, new in zip(advantages.tolist(), before, after, strict=True):
        change["up" if a > 0 else "down"] += (a != 0) * (new - old).sum().item()
    assert change["up"] > 0.01 and change["down"] < -0.01


def test_one_rank_under_fsdp(jobs):
    whole, alone = jobs.seen("sdpo-token-1-f64-whole"), jobs.seen("alone")
    assert alone["rows"] == whole["rows"] and alone["sharded"]
    assert distance(weights(jobs, "alone"), weights(jobs, "sdpo-token-1-f64-whole")) <= 1e-9


@pytest.mark.parametrize("config, fault", FAULTS)
def test_a_fault_is_found(jobs, config, fault):
    """The comparison above fails where it should."""
    whole, broken = jobs.seen(f"{config}-f64-whole"), jobs.seen(f"{config}-{fault}")
    assert broken["rows"][0] == whole["rows"][0]
    assert distance(broken["grads"][0], whole["grads"][0]) > 1e-3
    assert distance(weights(jobs, f"{config}-{fault}"), weights(jobs, f"{config}-f64-whole")) > 1e-6


@pytest.mark.parametrize("run", ["2", "2on"])
@pytest.mark.parametrize("script", ["train_grpo", "train_sdpo"])
def test_a_rank_without_rows(jobs, script, run):
    """S15, R01, L05: rank 1 has no row to learn from, or nobody has; all go on together."""
    for zero in ("odd", "all"):
        assert jobs.codes(f"{script}-{zero}-{run}") == [0, 0]
    whole, split = (jobs.seen(f"{script}-odd-{r}") for r in ("1", run))
    assert split["rows"] == whole["rows"]
    assert len(split["grads"]) == len(whole["grads"]) > 0
    for ours, theirs in zip(split["grads"], whole["grads"], strict=True):
        assert distance(ours, theirs) <= 1e-9
    start = load_file(Path(jobs.models["gpt2"]) / "model.safetensors")
    skipped = load_file(jobs.root / f"{script}-all-{run}" / "ckpt-000003" / "model.safetensors")
    for name, tensor in skipped.items():
        assert torch.equal(tensor.float(), start[name])
    assert jobs.seen(f"{script}-all-{run}")["grads"] == []
    for line in jobs.log(f"{script}-all-{run}"):
        assert line["skipped"] and line["grad_norm"] is None and line["loss"] is None
        assert line["teacher_age"] == (0 if script == "train_sdpo" else None)


# ---- g. the teacher ------------------------------------------------------------------------------

def test_no_context_no_gradient(jobs):
    """S12: with equal weights and nothing to read, the teacher says what the student says."""
    (line,) = jobs.log("no-context")
    assert line["frac_distilled"] > 0 and not line["skipped"]
    assert 0 <= line["loss"] <= 1e-6 and line["jsd"] <= 1e-6 and line["grad_norm"] <= 1e-6
    first = jobs.log("sdpo-token-1-f64-whole")[0]
    assert first["jsd"] > 1e-3 and first["grad_norm"] > 1e-3  # with a demonstration it differs


@pytest.mark.parametrize("run, rate, steps", [("sdpo-token-1-f64-whole", 0.3, 3),
                                              ("bf16", 0.05, 4)])
def test_ema_follows_the_student(jobs, run, rate, steps):
    """From the checkpoints of every step. S03: in a bf16 run the average is float32 and moves."""
    model = load_file(Path(jobs.models["llama"]) / "model.safetensors")
    average = {name: tensor.to(torch.bfloat16 if run == "bf16" else torch.float64).double()
               for name, tensor in model.items()}
    bound = 1e-6 if run == "bf16" else 1e-12
    for step in range(1, steps + 1):
        folder = jobs.root / run / f"ckpt-{step:06d}"
        student = load_file(folder / "model.safetensors")
        teacher = load_file(folder / "trainer" / "teacher.safetensors")
        for name, tensor in student.items():
            average[name] = (1 - rate) * average[name] + rate * tensor.double()
            assert tensor.dtype == (torch.bfloat16 if run == "bf16" else torch.float64)
            assert teacher[name].dtype == (torch.float32 if run == "bf16" else torch.float64)
            torch.testing.assert_close(teacher[name].double(), average[name],
                                       atol=bound, rtol=bound)
    moved = [t for t in teacher.values() if not torch.equal(t, t.bfloat16().to(t.dtype))]
    assert len(moved) > 10  # no value of bf16: the average has digits that bf16 would have lost


# ---- h. killed and resumed -----------------------------------------------------------------------

def assert_same_run(jobs, killed, whole):
    last = sorted((jobs.root / whole).glob("ckpt-*"))[-1].name
    for name in ("model.safetensors", "trainer/optimizer.safetensors",
                 "trainer/teacher.safetensors", "config.json", "tokenizer.json"):
        ours, theirs = (jobs.root / run / last / name for run in (killed, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name
    ours, theirs = (jobs.root / run / last / "trainer" / "state.json" for run in (killed, whole))
    assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
    assert jobs.log(killed) == jobs.log(whole)
    ours, theirs = (jobs.root / run / "samples.jsonl" for run in (killed, whole))
    assert ours.read_text() == theirs.read_text()
    assert not list((jobs.root / killed).glob(".ckpt*"))  # nothing half written is left


@pytest.mark.parametrize("name", KILLED)
def test_resume(jobs, name):
    """R04, R07, R08: bit by bit the run that was never killed."""
    method, ranks, _, kills = KILLED[name]
    assert jobs.codes(f"{name}-whole") == [0] * ranks, jobs.told(f"{name}-whole")
    for k, kill in enumerate(kills):
        codes = jobs.codes(f"{name}-{k}")
        for rank in kill.get("ranks", [0] if kill["point"] == "save_file" else range(ranks)):
            assert codes[rank] == -9, (k, codes, jobs.told(f"{name}-{k}"))  # it was killed there
        assert "timeout" not in codes and 0 not in codes
    assert jobs.codes(f"{name}-last") == [0] * ranks, jobs.told(f"{name}-last")
    assert_same_run(jobs, f"{name}-killed", f"{name}-whole")
    log = jobs.log(f"{name}-whole")
    assert sum(not line["skipped"] for line in log) > 2 and log[1]["eval"] is not None
    ages = {"grpo": [None] * 4, "sdpo": [0] * 5, "stable": [1, 0, 1, 0, 1]}
    assert log[-1]["grad_norm"] > 0 and [line["teacher_age"] for line in log] == ages[method]


def test_a_truncated_checkpoint_is_passed_over(jobs):
    told = jobs.told("torn-last")
    assert "ckpt-000004: model.safetensors has" in told and "looking for an older one" in told
    assert [n for n, _ in itertools.groupby(line["step"] for line in jobs.log("torn-killed"))] == [
        1, 2, 3, 4, 5]
    assert len(jobs.seen("torn-last")["prompts"]) == 5 - 2  # it went on from step 2


def test_each_row_once_an_epoch(jobs):
    """R06, R07: the resumed part trains on the prompts that the whole run had then, and 20 rows
    fill 5 steps of 4 prompts."""
    whole = jobs.seen("sdpo-whole")["prompts"]
    assert sorted(row for step in whole for _, row in step) == list(range(20))
    assert jobs.seen("sdpo-last")["prompts"] == whole[4:]


def test_adam_counts_on(jobs):
    """R09: with --updates 2 a step makes two optimizer steps, unless half of it has no target."""
    last = jobs.root / "sdpo-killed" / "ckpt-000005" / "trainer"
    moments = load_file(last / "optimizer.safetensors")
    made = {int(value) for name, value in moments.items() if name.endswith("/step")}
    (made,) = made
    assert made == len(jobs.seen("sdpo-whole")["grads"]) > 5


def test_what_is_kept(jobs):
    """All model folders; the trainer states of the last --keep 2 and of the best evaluated step. A
    folder is transformers' own, also when the run was sharded, with a tied weight in it once."""
    for run in ("sdpo-whole", "stable-fsdp-whole"):
        out = jobs.root / run
        assert sorted(int(path.name[5:]) for path in out.glob("ckpt-*")) == [1, 2, 3, 4, 5]
        best = max((line["eval"] or -1, -line["step"]) for line in jobs.log(run))
        assert {int(p.parent.name[5:]) for p in out.glob("*/trainer")} == {-best[1], 4, 5}
        model, told = AutoModelForCausalLM.from_pretrained(out / "ckpt-000005",
                                                           output_loading_info=True)
        saved = load_file(out / "ckpt-000005" / "model.safetensors")
        assert not any(told.values()) and "lm_head.weight" not in saved
        assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
        config = json.loads((out / "config.json").read_text())
        assert config["args"]["updates"] == 2 and config["machine"]["ranks"] == 1 + (
            "fsdp" in run)
        assert config["versions"]["torch"] == torch.__version__


def test_full_disk(jobs, tmp_path, monkeypatch):
    """R10: an error in the middle of a save leaves student, teacher and the older checkpoint alone,
    and the next save succeeds."""
    model, tokenizer = loading.load_model(jobs.models["llama"])
    teacher, args = Teacher(model, 0.1), SimpleNamespace(out=tmp_path, keep=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    teacher.update(model, 1)
    checkpoint.save(args, 1, model, tokenizer, optimizer, teacher, {})
    before = [p.clone() for m in (model, teacher.model) for p in m.parameters()]
    with monkeypatch.context() as patch:
        def full(*a, **k):
            raise OSError(28, "No space left on device")
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(SystemExit):
            checkpoint.save(args, 2, model, tokenizer, optimizer, teacher, {})
    now = [p for m in (model, teacher.model) for p in m.parameters()]
    assert all(map(torch.equal, before, now))
    assert checkpoint.newest(tmp_path)[0].name == "ckpt-000001"
    checkpoint.save(args, 2, model, tokenizer, optimizer, teacher, {})
    assert checkpoint.newest(tmp_path)[0].name == "ckpt-000002"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt-000001", "ckpt-000002"]


# ---- the shared cases ----------------------------------------------------------------------------

AREAS = {"grpo-loop", "sdpo-teacher", "distributed-resume", "tokenizer-prompt", "eval-report"}
# cases that no function of their own name tests: where they are, or why they do not apply
ELSEWHERE = {
    "S15": "test_a_rank_without_rows", "R01": "test_a_rank_without_rows",
    "R04": "test_resume[sdpo-2]", "R07": "test_each_row_once_an_epoch", "R08": "test_resume",
    "R09": "test_adam_counts_on", "R10": "test_full_disk",
    "S23": "test_flags.py: test_readme_flags", "S24": "test_eval.py: test_watch",
    "E08": "test_eval.py: test_compare; test_continual.py: test_base_of_zero_in_words",
    "E04": "does not apply to a script that makes one run: runs/ repeats it over --seed, and the "
           "README states mean, spread and n of each result",
    "E10": "test_eval.py: e02 has the zero of accuracy; the drift of weights comes with drift.py",
    "R11": "each verifier has a wall limit of seconds and they run side by side; the ranks wait 30 "
           "minutes for each other (ranks.setup), which no setting of a run can fall below",
    "R12": "there is no vLLM engine yet: --rollout vllm is refused (test_flags.py: test_refused)",
}


def test_each_case_has_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = {name.upper() for name in re.findall(r"^def ([a-z]\d\d)\(", tests, re.M)} | {*ELSEWHERE}
    assert {case["id"] for case in CASES.values() if case["area"] in AREAS} - named == set()
    for function in re.findall(r"test_\w+", " ".join(ELSEWHERE.values())):
        assert f"def {function}(" in tests or (Path(__file__).parent / f"{function}.py").exists()


def test_torchrun(jobs):
    """What worker.py forks is what torchrun starts: the same run, bit by bit."""
    job = next(job for job in jobs if job["name"] == "stable-fsdp-whole")
    argv = [str(jobs.root / "torchrun") if x == job["out"] else x for x in job["argv"]]
    path = jobs.root / "torchrun.json"
    path.write_text(json.dumps([{**job, "argv": argv, "files": str(jobs.root / "torchrun")}]))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                           "--master_port", str(job["port"]), worker.__file__, path],
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(jobs, "torchrun", "stable-fsdp-whole")
