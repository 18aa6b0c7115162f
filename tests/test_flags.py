"""Flags: each is read, and what is wrong is refused in one line before anything loads. And the two
train files are twins."""
import argparse
import difflib
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import worker
from safetensors.torch import load_file

import common
import data
import loading
import packing
import rollout

ROOT = Path(__file__).parents[1]
TRAINERS = ["train_grpo", "train_sdpo"]
SCRIPTS = [*TRAINERS, "eval", "tools.sft"]
MACHINE = {"sample_seconds", "train_seconds", "sample_tokens_per_s", "train_tokens_per_s",
           "peak_memory_gb"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return worker.make_folders(tmp_path_factory.mktemp("models"))


# ---- each flag has an effect ---------------------------------------------------------------------

BASE = {"train_grpo": "--updates 2 --lr 0.02 --warmup 0",
        "train_sdpo": "--lr 0.02 --warmup 0 --max_prompt 60"}
EVERY = ("--data x --prompts 4 --group 4 --max_new 12 --steps 2 --eval_every 1 --eval_data y "
         "--eval_prompts 3 --eval_n 2 --ref_every 1 --save_every 1 --seed 1")
# flag: (what is changed to, what of a run differs then, what both runs have besides)
COMMON = {
    "model": ("--model {other}", "entropy reward samples"),
    "task": ("--task science", "stage"),
    "data": ("--data z", "samples reward"),
    "eval_data": ("--eval_data w", "eval"),
    "think": ("--think", "samples entropy"),
    "max_prompt": ("--max_prompt 32", "samples reward stderr"),
    "max_new": ("--max_new 5", "length frac_truncated"),
    "steps": ("--steps 1", "lines files"),
    "prompts": ("--prompts 2", "reward length", "--updates 1"),
    "group": ("--group 3", "reward"),
    "updates": ("--updates 4", "weights"),
    "lr": ("--lr 0.01", "lr weights"),
    "warmup": ("--warmup 4", "lr weights"),
    "weight_decay": ("--weight_decay 2", "weights"),
    "grad_clip": ("--grad_clip 1e-9", "weights"),
    "dtype": ("--dtype bfloat16", "entropy"),
    "param_dtype": ("--param_dtype bfloat16", "weights dtype"),
    "tokens_per_micro": ("--tokens_per_micro 1", "passes"),
    "no_pack": ("--no_pack", "masks"),
    "checkpoint_activations": ("--checkpoint_activations", "layers"),
    "seed": ("--seed 2", "samples reward"),
    "eval_every": ("--eval_every 2", "eval"),
    "eval_prompts": ("--eval_prompts 5", "eval"),
    "eval_n": ("--eval_n 5", "eval"),
    "ref_every": ("--ref_every 2", "kl_ref"),
    "save_every": ("--save_every 0", "files", "--eval_every 0"),
    "keep": ("--keep 1", "files", "--save_every 1 --eval_every 2"),
    "quiet": ("--quiet", "stderr"),
}
OWN = {
    "train_grpo": {
        "no_std": ("--no_std", "grad_norm weights"),
        "eps_low": ("--eps_low 1e-7", "clip_frac", "--lr 0.3"),
        "eps_high": ("--eps_high 1e-7", "clip_frac", "--lr 0.3"),
        "kl_coef": ("--kl_coef 1", "loss weights"),
        "agg": ("--agg seq", "loss weights"),
    },
    "train_sdpo": {
        "beta": ("--beta 1", "jsd weights"),
        "topk": ("--topk 3", "jsd weights"),
        "tail": ("--no-tail", "jsd weights", "--topk 3"),
        "is_clip": ("--is_clip 0.5", "is_weight loss"),
        "agg": ("--agg seq", "loss weights"),
        "success": ("--success 0", "frac_distilled"),
        "feedback": ("--feedback always", "frac_distilled samples"),
        "cot": ("--cot", "jsd samples"),
        "demo_cot": ("--demo_cot", "jsd", "--success 0"),
        "loss_cot": ("--loss_cot", "jsd"),
        "mask_ratio": ("--mask_ratio 0.5", "loss weights"),
        "max_teacher_prompt": ("--max_teacher_prompt 124", "frac_cut", "--feedback always"),
        "ema": ("--ema 0.5", "teacher_age jsd"),
        "restart_every": ("--restart_every 1", "teacher_age jsd"),
        "restart_mix": ("--restart_mix 0.5", "jsd", "--restart_every 1"),
        "teacher_init": ("--teacher_init {other}", "jsd"),
        "teacher_init_mix": ("--teacher_init_mix 0.5", "jsd", "--teacher_init {other}"),
    },
}
# why a flag is not in the tables, and where it is tested
ELSEWHERE = {
    "help": "test_help", "tiny": "test_tiny_sets_defaults",
    "out": "test_out; every run here has one",
    "resume": "test_train.py: test_resume; test_changed_flag_at_resume",
    "fsdp": "test_train.py: test_split, test_one_rank_under_fsdp",
    "optimizer_init": "test_continual.py: test_carry",
    "rollout": "tests/engine/test_vllm.py; test_refused: vllm where it is not installed",
    "vllm_memory": "is for CUDA; out of range, vLLM itself refuses it",
    "tp": "tests/engine/test_vllm.py; test_refused",
    "tis": "test_tis",
    "skip_bad": "test_torture_inputs.py: test_skip_bad",
    "plan": "test_plan.py", "gpu_gb": "test_plan.py: test_show; test_refused",
    "wandb": "test_wandb.py; test_refused: where it is not installed",
}


def parser_of(script):
    """The script's parser, caught as it parses."""
    caught = []
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, *a, **k):
        caught.append(self)
        raise InterruptedError
    argparse.ArgumentParser.parse_args = parse_args
    try:
        importlib.import_module(script).get_args([])
    except InterruptedError:
        return caught[0]
    finally:
        argparse.ArgumentParser.parse_args = original


def run(script, flags, models, out, capfd, monkeypatch):
    """{what: its value} of one run. The tags around reasoning are letters, so that a random model
    opens and closes blocks."""
    worker.install_task(monkeypatch.setattr)
    counts = dict(passes=0, masks=0, layers=0)
    response_hidden, layout, load = packing.response_hidden, packing.layout, loading.load_model

    def counted(*a, **k):
        counts["passes"] += 1
        return response_hidden(*a, **k)

    def laid(*a, **k):
        made = layout(*a, **k)
        counts["masks"] += made[2] is not None
        return made

    def loaded(*a, **k):
        model, tokenizer = load(*a, **k)
        model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_: counts.update(layers=counts["layers"] + 1))
        return model, tokenizer

    with monkeypatch.context() as patch:
        for task in ("math", "science"):
            patch.setattr(data.TASKS[task], "THINK_TAGS", ("a", "n"))
        patch.setattr(packing, "response_hidden", counted)
        patch.setattr(packing, "layout", laid)
        patch.setattr(loading, "load_model", loaded)
        module = importlib.import_module(script)
        argv = f"--model {{llama}} {EVERY} {BASE[script]} {flags}".format(**models).split()
        capfd.readouterr()
        module.main(module.get_args([*argv, "--out", str(out)]))
    err = capfd.readouterr().err
    lines = [json.loads(line) for line in (out / "log.jsonl").open()]
    weights = load_file(sorted(out.glob("ckpt-*"))[-1] / "model.safetensors")
    return {**{name: [line[name] for line in lines] for name in lines[0].keys() - MACHINE},
            **counts, "lines": len(lines), "samples": (out / "samples.jsonl").read_text(),
            "stderr": ("step/s" in err or "s/step" in err, "dropped" in err),
            "files": sorted(str(path.relative_to(out)) for path in out.rglob("*")),
            "weights": [t.float().sum().item() for t in weights.values()],
            "dtype": [t.dtype for t in weights.values()]}


@pytest.fixture(scope="module")
def bases():
    return {}


@pytest.mark.parametrize("script, flag", [(script, flag) for script in TRAINERS
                                          for flag in {**COMMON, **OWN[script]}])
def test_flag_has_an_effect(script, flag, models, bases, tmp_path, capfd, monkeypatch):
    changed, differs, *base = {**COMMON, **OWN[script]}[flag]
    base = base[0] if base else ""
    if (script, base) not in bases:
        bases[script, base] = run(script, base, models, tmp_path / "base", capfd, monkeypatch)
    observed = run(script, f"{base} {changed}", models, tmp_path / "run", capfd, monkeypatch)
    for name in differs.split():
        assert observed[name] != bases[script, base][name], f"{changed}: {name} {observed[name]}"
    if flag in ("tokens_per_micro", "no_pack", "checkpoint_activations", "quiet", "save_every"):
        for name in ("loss", "grad_norm", "entropy"):  # these change no number
            assert observed[name] == pytest.approx(bases[script, base][name], rel=1e-4)


def test_tis(models, tmp_path, capfd, monkeypatch):
    """Tokens that another engine found less likely than the trainer by 1.5 weigh 1.5 times as much,
    up to the cap; 0 is no weight."""
    original, norms = rollout.sampler, {}

    def shifted(*given):
        def draw(*a, **k):
            rollouts = original(*given)(*a, **k)
            for r in rollouts:
                r.logprobs = r.logprobs - math.log(1.5)
            return rollouts
        return draw
    for cap in ("off", "0", "2", "1.2"):
        flags = "--updates 1" if cap == "off" else f"--updates 1 --tis {cap}"
        seen = run("train_grpo", flags, models, tmp_path / cap, capfd, monkeypatch)
        norms[cap] = seen["grad_norm"][0], seen["is_weight"][0]
        monkeypatch.setattr(rollout, "sampler", shifted)
    norm, _ = norms["off"]
    assert norm > 0 and norms == {
        "off": (norm, 1), "0": (pytest.approx(norm, rel=1e-5), 1),
        "2": (pytest.approx(1.5 * norm, rel=1e-5), pytest.approx(1.5)),
        "1.2": (pytest.approx(1.2 * norm, rel=1e-5), pytest.approx(1.2))}


@pytest.mark.parametrize("script", TRAINERS)
def test_the_tables_hold_every_flag(script):
    flags = {action.dest for action in parser_of(script)._actions}
    assert flags - {"tis"} == COMMON.keys() | OWN[script].keys() | ELSEWHERE.keys() - {"tis"}


@pytest.mark.parametrize("script", TRAINERS)
def test_tiny_sets_defaults(script):
    """--tiny, and each of its values gives way to its own flag."""
    module = importlib.import_module(script)
    wanted = {**common.TINY, **module.TINY}
    args = vars(module.get_args(["--tiny"]))
    own = {name: value for name, value in wanted.items() if name in args}
    assert {name: args[name] for name in own} == own and args["model"] == "tiny"
    args = vars(module.get_args(["--steps", "7", "--tiny", "--lr", "0.5", "--model", "m"]))
    assert (args["steps"], args["lr"], args["model"]) == (7, 0.5, "m")
    assert args["max_new"] == wanted["max_new"]


def test_out():
    module = importlib.import_module("train_grpo")
    args = module.get_args(["--tiny", "--task", "science"])
    assert re.fullmatch(r"runs/.*-science-\d{4}-\d{6}", args.out)
    assert module.get_args(["--tiny", "--out", "here"]).out == "here"


def test_matched():
    """0.4013 of the student every 10 steps: --ema only sets the mix."""
    args = importlib.import_module("train_sdpo").get_args(
        ["--tiny", "--ema", "0.05", "--restart_every", "10", "--restart_mix", "matched"])
    assert args.restart_mix == pytest.approx(0.4013, abs=5e-5) and args.ema == 0


# ---- what is wrong is refused --------------------------------------------------------------------

REFUSED = [(script, flags) for script in TRAINERS for flags in (
    "--lr nan", "--lr -1", "--lr inf", "--steps 0", "--group 0", "--prompts -4", "--max_new 0",
    "--task cooking", "--task logic", "--data no/such.jsonl", "--eval_data no/such.jsonl",
    "--model no/such.gguf", "--resume no/such", "--fsdp on", "--dtype int8", "--rollout vllm",
    "--tp 0", "--tp 2", "--gpu_gb 80", "--wandb project",
    "--model no/such/folder", "--optimizer_init no/such/folder", "--model no.safetensors",
    "--data=", "--out=", "--vllm_memory 7", "--prompts 7 --updates 2", "--warmup -1",
    "--weight_decay nan", "--grad_clip -1", "--steps many", "--colour red", "--keep 0",
    "--seed x")] + [
    ("train_grpo", flags) for flags in (
        "--group 1", "--eps_low 1.5", "--eps_low nan", "--eps_high 0", "--eps_high nan",
        "--kl_coef -1", "--kl_coef nan", "--agg mean", "--ema 0.1", "--tis 0.5", "--tis nan")] + [
    ("train_sdpo", flags) for flags in (
        "--ema 1.5", "--ema nan", "--ema -0.1", "--ema 0.1 --restart_every 5", "--beta 2",
        "--beta nan", "--group 1", "--restart_mix matched", "--restart_mix matched --ema 0.1",
        "--restart_mix 1.5", "--restart_mix often", "--restart_mix nan", "--topk -1",
        "--restart_every -1", "--is_clip 0", "--is_clip nan", "--mask_ratio 1.1", "--success nan",
        "--mask_ratio 1", "--success 2",
        "--max_teacher_prompt 9", "--teacher_init_mix 2", "--teacher_init no/such.gguf",
        "--feedback loud", "--kl_coef 1")] + [
    ("eval", flags) for flags in (
        "--n 0", "--tasks cooking", "--tasks aime24,", "--temperature -1", "--temperature nan",
        "--top_p 0", "--top_p 1.5", "--limit -1", "--temperature inf", "--out e.txt",
        "--model no/such/folder",
        "--max_new 0", "--fsdp on", "--model no/such.gguf", "--tasks aime24,math500=no/such.jsonl",
        "--baseline no/such.gguf")]


@pytest.mark.parametrize("script, flags", REFUSED)
def test_refused(script, flags, capsys, monkeypatch):
    """Exit code 2 and one line that names the flag, without a model, a row or a rank."""
    told = worker.refusal(lambda: importlib.import_module(script).get_args(flags.split()),
                          capsys, monkeypatch)
    assert flags.split()[0].strip("-=") in told


def test_ranks_must_divide(capsys, monkeypatch):
    """Said once, by rank 0; a batch of 12 goes on 2 ranks with --updates 3, not on 8."""
    module = importlib.import_module("train_grpo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    batch = ["--tiny", "--prompts", "12", "--updates", "3"]
    assert module.get_args([*batch, "--fsdp", "on"]).prompts == 12
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank, lines in (("0", 1), ("7", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            module.get_args(batch)
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == lines
        assert lines == 0 or ("--prompts 12" in told and "8 ranks" in told)


def test_refused_from_the_shell():
    """The whole of it, in a process: import, one line, code 2."""
    done = subprocess.run([sys.executable, "train_sdpo.py", "--ema", "1.5"], cwd=ROOT, text=True,
                          capture_output=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""
    assert "--ema 1.5" in done.stderr


def test_changed_flag_at_resume(tmp_path, capsys):
    """What a run computes is fixed at its start: refused by name. How far it goes may change."""
    module = importlib.import_module("train_sdpo")
    first = ["--tiny", "--ema", "0.05", "--restart_every", "10", "--restart_mix", "matched",
             "--out"]
    args = module.get_args([*first, str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps({"args": vars(args)}))
    resumed = module.get_args(["--resume", str(tmp_path)])
    assert {**vars(resumed), "resume": None} == {**vars(args), "out": str(tmp_path)}
    assert module.get_args(["--resume", str(tmp_path), "--steps", "99"]).steps == 99
    assert module.get_args(["--resume", str(tmp_path), *first[:-1]]).restart_mix == args.restart_mix
    for flags in ("--lr 0.1", "--group 4", "--beta 0.4", "--task tooluse", "--seed 3", "--think",
                  "--model m", "--updates 2", "--no_pack"):
        with pytest.raises(SystemExit) as stop:
            module.get_args(["--resume", str(tmp_path), *flags.split()])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == 1
        assert flags.split()[0] in told and "was started with" in told
    with pytest.raises(SystemExit) as stop:
        module.get_args(["--resume", str(tmp_path), "--out", "elsewhere"])
    assert stop.value.code == 2 and "--out elsewhere: a run goes on" in capsys.readouterr().err


# ---- help and README -----------------------------------------------------------------------------

def shown(script, capsys):
    """{flag: its line} of --help."""
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(script).get_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    lines = {line.split()[0].rstrip(","): line for line in text.splitlines()
             if re.match(r"  -", line)}
    return text, lines


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys):
    """Sections; one line a flag, with its default; each flag says something."""
    text, lines = shown(script, capsys)
    actions = [a for a in parser_of(script)._actions if a.dest != "help"]
    assert len([line for line in text.splitlines() if line.endswith(":") and line[0] != " "]) >= 2
    assert lines.keys() == {a.option_strings[0] for a in actions} | {"-h"}
    for action in actions:
        line = lines[action.option_strings[0]]
        assert action.help and action.help.split("(default")[0].strip()[:40] in line, line
        if type(action.default) in (int, float, str):
            assert line.endswith(f"[{action.default}]")
    after = text.split("\n\n")[-1]  # the last section has a line a flag, and no others
    assert all(re.match(r"\S.*:$|  --", line) for line in after.splitlines() if line)


def test_readme_flags():
    """S23: README's table has each flag of both trainers, with its defaults, also under --tiny."""
    rows = re.findall(r"^\| `--(\w+)[^|]*\| ([^|]*)\| ([^|]*)\|", (ROOT / "README.md").read_text(),
                      re.M)
    wanted, tiny = {}, {}
    for script in TRAINERS:
        own = {**common.TINY, **importlib.import_module(script).TINY}
        for action in parser_of(script)._actions:
            if action.dest != "help":
                shown = type(action.default) in (int, float, str)
                wanted.setdefault(action.dest, set()).update([str(action.default)] * shown)
                tiny.setdefault(action.dest, set()).update(
                    [str(own[action.dest])] if action.dest in own else [])
    table = {name: [set(re.findall(r"`([^`]*)`", cell)) for cell in cells] for name, *cells in rows
             if name in wanted}
    assert table == {name: [wanted[name], tiny[name]] for name in wanted}


# ---- twins ---------------------------------------------------------------------------------------

def shared_text(script):
    """A train file without its docstring and the sections that are the algorithm's own."""
    text = (ROOT / f"{script}.py").read_text()
    text = text[text.index('"""', 3) + 3:]
    kept, own, count = [], False, 0
    for line in text.splitlines():
        if line.strip().startswith("# ==== the algorithm's own"):
            assert not own
            own, count = True, count + 1
            kept.append(line.split("own")[0])
        elif line.strip() == "# ==== end ====":
            assert own
            own = False
        elif not own:
            kept.append(line)
    assert not own
    return kept, count


def test_twins():
    (grpo, sections), (sdpo, also) = map(shared_text, TRAINERS)
    assert list(difflib.unified_diff(grpo, sdpo, lineterm="", n=0)) == []
    assert sections == also >= 4 and len(grpo) > 70
    done = subprocess.run(["diff", *(f"{script}.py" for script in TRAINERS)], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert 20 < len(re.findall("^[<>]", done.stdout, re.M)) <= 180  # it fits on a screen
