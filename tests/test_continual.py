"""A sequence of stages: its scores are those of its samples, a kill anywhere changes nothing, what
is carried arrives, and its report cannot take little learning for forgetting.

tests/worker.py runs the sequences that are killed or have two ranks; the others run in here.
"""
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import worker
from safetensors.torch import load_file

import checkpoint
import common
import continual
import data
import eval
from data.scores import estimate, sequence

MACHINE = {"sample_seconds", "train_seconds", "sample_tokens_per_s", "train_tokens_per_s",
           "peak_memory_gb"}
FLAGS = """--order math,science --stage_steps 2 --tasks aime24,math500,sciknoweval --limit 5 --n 2
    --data x --prompts 2 --group 4 --updates 1 --max_new 8 --max_prompt 100 --eval_every 0
    --ref_every 0 --save_every 1 --keep 9 --lr 0.01 --warmup 0""".split()  # noqa: SIM905
CARRY = ["--carry_teacher", "--carry_optimizer", "--fsdp", "on"]
KILLS = [dict(point="write_json", nth=2),          # the base's samples are there, not its scores
         dict(point="log_line", nth=2),            # inside stage 1
         dict(point="save", nth=1, after=True),    # between stage 1 and its evaluation
         dict(point="write_json", nth=2),          # inside that
         dict(point="save_file", nth=3),           # inside the last checkpoint of stage 2
         dict(point="write_json", nth=3)]          # all is there but the report


# ---- the report, by hand -------------------------------------------------------------------------

def prompts(*means, spread=0.0):
    """(K+1, 4): means over four prompts that lie apart, in each stage alike."""
    return torch.tensor([[m - spread, m + spread, m - spread, m + spread] for m in means],
                        dtype=torch.float64)


def test_matrix_by_hand():
    """K = 3; math has two benchmarks, coding none, and one of math's starts from 0."""
    scores = {"aime24": prompts(.0, .4, .2, .1), "aime25": prompts(.2, .4, .5, .3),
              "sciknoweval": prompts(.5, .6, .9, .8), "gpqa": prompts(.5, .4, .5, .3)}
    changes, got = sequence(scores, ["math", "science", "coding"])
    math, science, coding = got["domains"]
    for name, value in dict(base=.1, current=.4, last=.2, learned=.3, kept=.1, forgotten=.2,
                            below_best=.2, share_kept=1 / 3).items():
        assert math[name]["mean"] == pytest.approx(value), name
    for name, value in dict(base=.5, current=.9, last=.8, learned=.4, kept=.3, forgotten=.1,
                            below_best=.1, share_kept=.75).items():
        assert science[name]["mean"] == pytest.approx(value), name
    assert coding == {"task": "coding", "stage": 3} | dict.fromkeys(math.keys() - {"task", "stage"})
    assert got["backward_transfer"]["mean"] == pytest.approx(-.15)
    assert [c["relative"] for c in changes["aime24"]] == [None] * 4  # not 0, not inf
    assert [c["difference"] for c in changes["aime24"]] == pytest.approx([0, .4, .2, .1])
    assert [c["relative"] for c in changes["gpqa"]] == pytest.approx([0, -.2, 0, -.4])
    assert [c["forgetting"] for c in changes["gpqa"]] == pytest.approx([0, .2, 0, .4])
    assert [m["gain"]["mean"] for m in got["mean"]] == pytest.approx(
        [0, (1 + .2) / 3, (1.5 + .8) / 3, (.5 + .6) / 3])
    assert [m["forgetting"]["mean"] for m in got["mean"]] == pytest.approx([0, .2 / 3, 0, .4 / 3])
    assert "NaN" not in json.dumps([changes, got])


def test_best_may_lie_between():
    """Best-so-far is of any stage, the base among them; it is not Current."""
    for means, below in (([.2, .3, .7, .4], .3), ([.6, .3, .4, .5], .1), ([.1, .2, .3, .4], 0)):
        _, got = sequence({"aime24": prompts(*means)}, ["math", "science", "coding"])
        assert got["domains"][0]["below_best"]["mean"] == pytest.approx(below)


def shown(name, scores, order):
    """The cells of a stage's row in the printed table."""
    changes, summary = sequence(scores, order)
    text = continual.table({
        "args": dict(n=8, temperature=.6, top_p=.95), "R": {
            b: [estimate(x) | c for x, c in zip(s, changes[b])] for b, s in scores.items()},
        **summary})
    row = next(x for x in text.split("share kept")[1].splitlines() if x.startswith(name))
    return re.split(r"\s{2,}", row)[1:], text


def test_learning_less_is_not_forgetting():
    """Two methods end at the same 30%: one learned 60 points and lost 50 of them, one learned 10
    and lost none. And one learned nothing that can be told from noise: it has no share to keep."""
    torch.manual_seed(0)
    noise = 0.2 * torch.randn(3, 200, dtype=torch.float64)
    noise = noise - noise.mean(1, keepdim=True)
    rows = {name: shown("1 math", {"aime24": torch.tensor(means)[:, None] + noise},
                        ["math", "science"])[0]
            for name, means in dict(forgot=[.2, .8, .3], little=[.2, .3, .3],
                                    nothing=[.2, .21, .15]).items()}
    plain = {name: [cell.split(" ±")[0] for cell in row] for name, row in rows.items()}
    assert plain == {"forgot": ["60.0", "10.0", "16.7", "50.0", "50.0"],
                     "little": ["10.0", "10.0", "100.0", "0.0", "0.0"],
                     "nothing": ["1.0", "-5.0", "n/a", "6.0", "6.0"]}


def test_base_of_zero_in_words():
    scores = {"aime24": prompts(0, .5, .25), "gpqa": prompts(0, 0, 0), "zebra": prompts(.5, .5, .5)}
    cells, text = shown("2 science", scores, ["math", "science"])
    assert set(cells) == {"n/a"}  # no benchmark of its own: not 0
    told = text.splitlines()[-2:]
    assert told == [f"{name}: no relative change, since the base scores 0; it changed by {d} points"
                    for name, d in (("aime24", 25.0), ("gpqa", 0.0))]
    assert "inf" not in text and "nan" not in text
    _, got = sequence({"gpqa": scores["gpqa"]}, ["math", "science"])
    assert got["mean"][-1] == {"gain": None, "forgetting": None, "relative": None}
    assert got["backward_transfer"] is None


def test_errors():
    """Paired over prompts; a ratio's by the bootstrap; of one prompt unknown, which is not 0."""
    base = torch.tensor([.0, .2, .9, .5], dtype=torch.float64)
    after = torch.tensor([.1, .4, 1., .5], dtype=torch.float64)
    changes, got = sequence({"aime24": torch.stack([base, after])}, ["math"])
    apart = [a - b for a, b in zip(after.tolist(), base.tolist())]
    assert got["domains"][0]["learned"]["se"] == pytest.approx(statistics.stdev(apart) / 2)
    assert got["domains"][0]["learned"]["se"] == changes["aime24"][1]["difference_se"]
    torch.manual_seed(1)
    bottom = torch.rand(300, dtype=torch.float64)
    top = 0.5 * bottom + 0.2 * torch.rand(300, dtype=torch.float64)
    pick = torch.randint(300, (4000, 300))
    spread = (top[pick].mean(1) / bottom[pick].mean(1)).std().item()
    assert estimate(top, bottom)["se"] == pytest.approx(spread, rel=0.06)
    assert estimate(top, bottom)["mean"] == pytest.approx((top.sum() / bottom.sum()).item())
    alone = {name: prompts(.2, .6, .4)[:, :1] for name in ("aime24", "sciknoweval")}
    changes, got = sequence(alone, ["math", "science"])
    assert changes["aime24"][1]["relative_se"] is None is got["mean"][1]["gain"]["se"]
    assert got["backward_transfer"]["se"] is None is got["domains"][0]["share_kept"]
    assert shown("1 math", alone, ["math", "science"])[0][0] == "40.0 ± ?"


# ---- real sequences ------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return worker.make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def root(models, tmp_path_factory):
    """whole: a sequence; killed: the same, killed six times; ranks: on two ranks, killed once."""
    root, jobs = tmp_path_factory.mktemp("sequences"), []
    for folder, n, kill in [("whole", 1, None), *(("killed", 1, kill) for kill in [*KILLS, None]),
                            ("ranks", 2, dict(KILLS[2], nth=3)), ("ranks", 2, None)]:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        jobs.append(dict(name=f"job-{len(jobs)}", script="continual", ranks=n, before=[], kill=kill,
                         out=str(root / folder), files=str(root / f"job-{len(jobs)}"), port=port,
                         argv=["--model", models["llama"], *FLAGS, "--ema", "0.3", "--out",
                               str(root / folder), *CARRY * (n > 1)]))
    (root / "jobs").write_text(json.dumps(jobs))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, worker.__file__, root / "jobs"], env=environment,
                          timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for job in jobs:
        codes = json.loads(Path(f"{job['files']}.json").read_text())["codes"]
        told = Path(f"{job['files']}.rank0.txt").read_text()
        assert codes == ([-9] if job["kill"] else [0]) * job["ranks"], told
    return root


def get_args(models, out, *flags):
    return continual.get_args(["--model", models["llama"], *FLAGS, *flags, "--out", str(out)])


@pytest.fixture
def run(models, monkeypatch):
    """A sequence in this process, without its figure."""
    worker.install_task(monkeypatch.setattr)
    monkeypatch.setattr(continual, "subprocess", SimpleNamespace(run=lambda *a, **k: None))
    return lambda out, *flags: continual.main(get_args(models, out, "--quiet", *flags))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    """What a sequence computed, without times and its own path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = {key: t.numpy().tobytes() for key, t in load_file(path).items()}
        elif path.name in ("log.jsonl", "samples.jsonl") or re.fullmatch(r"eval-\d.jsonl", name):
            found[name] = [{k: v for k, v in line.items() if k not in MACHINE | {"model"}}
                           for line in read(path)]
    result = json.loads((folder / "continual.json").read_text())
    for cell in (cell for cells in result["R"].values() for cell in cells):
        del cell["seconds"]
    return found | {name: result[name] for name in ("R", "domains", "backward_transfer", "mean")}


def test_kills(root):
    """Killed between and inside stages and evaluations: the same bits as uninterrupted."""
    whole, killed = contents(root / "whole"), contents(root / "killed")
    assert whole.keys() == killed.keys() and len(whole) > 20
    for name in whole:
        assert whole[name] == killed[name], name
    told = [(root / f"job-{n}.rank0.txt").read_text() for n in range(1, 8)]
    assert "holds" not in "".join(told) and "Traceback" not in "".join(told)
    assert re.findall(r"\d+/4", told[6])[0] == "4/4"  # nothing was left to do but the report
    assert re.findall(r"\d+/4", told[5])[-1] == "4/4"  # a stage that goes on counts what was done


def test_matrix_is_that_of_the_samples(root):
    """R and its summary, recomputed from the samples by another way, and those scored again."""
    result = json.loads((root / "whole" / "continual.json").read_text())
    means = {}  # (benchmark, k) -> of each prompt
    for k in range(3):
        for line in read(root / "whole" / f"eval-{k}.jsonl"):
            assert line["rewards"] == [worker.score(text, str(line["id"]))[0]
                                       for text in line["responses"]]
            assert len(line["rewards"]) == 2
            means.setdefault((line["benchmark"], k), []).append(statistics.mean(line["rewards"]))
    assert {b: len(cells) for b, cells in result["R"].items()} == dict.fromkeys(
        ("aime24", "math500", "sciknoweval"), 3)
    assert len({statistics.mean(means["math500", k]) for k in range(3)}) > 1  # it did move
    for benchmark, cells in result["R"].items():
        first = statistics.mean(means[benchmark, 0])
        for k, cell in enumerate(cells):
            own = means[benchmark, k]
            assert (cell["prompts"], cell["n"], len(own)) == (5, 2, 5)
            assert cell["mean"] == pytest.approx(statistics.mean(own))
            assert cell["se"] == pytest.approx(statistics.stdev(own) / 5**.5)
            assert cell["difference"] == pytest.approx(cell["mean"] - first)
            assert cell["relative"] == pytest.approx((cell["mean"] - first) / first)
            assert {"pass", "maj", "frac_truncated", "length", "frac_answered"} <= cell.keys()
    for d, benchmark, k in zip(result["domains"], ("aime24", "sciknoweval"), (1, 2)):
        base, now, last = (means[benchmark, j] for j in (0, k, 2))
        assert (d["task"], d["stage"]) == (("math", "science")[k - 1], k)
        for name, x, y in (("learned", now, base), ("kept", last, base), ("forgotten", now, last)):
            apart = [a - b for a, b in zip(x, y)]
            assert d[name]["mean"] == pytest.approx(statistics.mean(apart))
            assert d[name]["se"] == pytest.approx(statistics.stdev(apart) / 5**.5)
    assert result["backward_transfer"]["mean"] == -result["domains"][0]["forgotten"]["mean"]


def test_record(root, models):
    """What was run and how: stages with their seconds, settings of the evaluation, one bar."""
    whole = root / "whole"
    result = json.loads((whole / "continual.json").read_text())
    assert result["args"].items() >= {"temperature": .6, "top_p": .95, "n": 2, "eval_seed": 0,
                                      "order": ["math", "science"], "algorithm": "sdpo"}.items()
    assert result["args"]["trainer"]["lr"] == .01 and result["args"]["trainer"]["ema"] == .3
    assert {"commit", "versions", "command", "machine", "date"} <= result.keys()
    start = models["llama"]
    for k, stage in enumerate(result["stages"], 1):
        folder = whole / f"{k}-{stage['task']}"
        assert stage["folder"] == str(folder) and stage["steps"] == 2
        assert stage["checkpoint"] == str(folder / "ckpt-000002")
        config, log = json.loads((folder / "config.json").read_text())["args"], read(
            folder / "log.jsonl")
        assert config["model"] == start and config["task"] == stage["task"]
        assert {line["stage"] for line in log} == {stage["task"]}
        assert stage["seconds"] == pytest.approx(sum(
            line["sample_seconds"] + line["train_seconds"] for line in log))
        start = stage["checkpoint"]
    for k, model in enumerate([models["llama"], *(s["checkpoint"] for s in result["stages"])]):
        args = json.loads((whole / f"eval-{k}.json").read_text())["args"]
        assert args["model"] == [model] and (args["seed"], args["max_new"]) == (0, 8)
    told = (root / "job-0.rank0.txt").read_text()
    assert {total for _, total in re.findall(r"(\d+)/(\d+) \[", told)} == {"4"}
    assert re.findall(r"(\d+)/4 \[", told)[-1] == "4"
    for name in ("base, evaluation", "1 math", "2 science", "2 science, evaluation", "mean@2"):
        assert name in told


def test_ranks(root):
    """Two ranks with FSDP, killed after the first step of stage 2: finished, the base as on one,
    and what is carried goes on with the numbers of stage 1."""
    whole, ranks = contents(root / "whole"), contents(root / "ranks")
    assert whole.keys() == ranks.keys()
    for name in ("eval-0.jsonl", "1-math/samples.jsonl"):
        same = [row for row in whole[name] if row.get("step", 1) == 1]
        assert same == [row for row in ranks[name] if row.get("step", 1) == 1]
    assert [len(ranks[f"{stage}/log.jsonl"]) for stage in ("1-math", "2-science")] == [2, 2]
    step, moved = (load_file(root / "ranks" / end / "trainer/optimizer.safetensors")
                   for end in ("1-math/ckpt-000002", "2-science/ckpt-000001"))
    assert all(moved[k] == step[k] + 1 for k in step if k.endswith("/step")) and step
    before, after = (load_file(root / "ranks" / end / "trainer/teacher.safetensors")
                     for end in ("1-math/ckpt-000002", "2-science/ckpt-000001"))
    student = load_file(root / "ranks/2-science/ckpt-000001/model.safetensors")
    assert all(torch.allclose(after[k], 0.7 * before[k] + 0.3 * student[k], atol=1e-6)
               for k in before) and before
    assert (root / "job-9.rank0.txt").read_text().count("mean@2") == 1
    assert "mean@2" not in (root / "job-9.rank1.txt").read_text()


def test_stage_done_again(root, run, tmp_path):
    """A deleted stage is done again, to the same bits, and its old evaluation is no part of it.
    A stage whose start is gone is refused."""
    whole = contents(root / "whole")
    shutil.copytree(root / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "2-science")
    (tmp_path / "again" / "eval-2.jsonl").write_text("stale")
    run(tmp_path / "again", "--ema", "0.3")
    again = contents(tmp_path / "again")
    for name in whole:
        assert whole[name] == again[name], name


def test_a_stage_without_its_start_is_refused(root, run, tmp_path, capsys):
    shutil.copytree(root / "whole", tmp_path / "gap")
    (tmp_path / "gap" / "1-math" / "ckpt-000002" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "gap", "--ema", "0.3")
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1
    assert "2-science: was made from" in told and "1-math/ckpt-000002" in told


# ---- what is carried -----------------------------------------------------------------------------

def starts(run, out, monkeypatch, *flags):
    """Runs a sequence; per stage the student, teacher and moments that it starts with."""
    seen, resume = [], checkpoint.resume

    def spied(args, model, optimizer, teacher):
        state = resume(args, model, optimizer, teacher)
        kept = [{k: v.clone() for k, v in checkpoint._kept(m).items()} if m else None
                for m in (model, teacher and teacher.model)]
        moments = {k: v.clone() for k, v in checkpoint._moments(model, optimizer).items()}
        seen.append((*kept, moments, teacher and teacher.last_changed))
        return state
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "resume", spied)
        run(out, *flags)
    return seen


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_fresh(models, run, tmp_path, monkeypatch):
    """Each stage starts with a new optimizer, and a teacher made of the student as it is then."""
    flags = ("--ema", "0.3", "--order", "science,math", "--tasks", "aime24")
    first, second = starts(run, tmp_path / "a", monkeypatch, *flags)
    assert equal(first[0], first[1]) and equal(second[0], second[1]) and not equal(
        first[0], second[0])
    assert first[2] == second[2] == {}
    assert equal(second[0], load_file(tmp_path / "a/1-science/ckpt-000002/model.safetensors"))
    assert sorted(p.name for p in (tmp_path / "a").glob("*-*/")) == ["1-science", "2-math"]


@pytest.mark.parametrize("flags, moves", [
    ("--ema 0.3", True), ("--restart_every 2 --restart_mix 0.5", True),
    ("--restart_every 3", False), ("", False)])
def test_carry(models, run, tmp_path, monkeypatch, flags, moves):
    """The second stage starts with the first one's last teacher, that of the base if it never
    moved, and with its moments, and ends elsewhere for it."""
    flags = [*flags.split(), "--carry_teacher", "--carry_optimizer", "--tasks", "aime24"]
    first, second = starts(run, tmp_path / "a", monkeypatch, *flags)
    last = tmp_path / "a/1-math/ckpt-000002"
    assert equal(first[0], first[1]) and first[2] == {}
    assert equal(second[0], load_file(last / "model.safetensors"))
    saved = load_file(last / "trainer/teacher.safetensors")
    assert bool(saved) == moves and equal(second[1], saved if moves else first[1])
    assert not equal(second[1], second[0]) and second[3] == 0
    assert moves == (not equal(second[1], first[1]))
    moments = load_file(last / "trainer/optimizer.safetensors")
    assert equal(second[2], moments) and any(k.endswith("exp_avg_sq") for k in moments)
    end = load_file(tmp_path / "a/2-science/ckpt-000002/trainer/optimizer.safetensors")
    assert {v.item() for k, v in end.items() if k.endswith("/step")} == {
        2 + v.item() for k, v in moments.items() if k.endswith("/step")}  # it counts on


def test_carry_of_another_model(root, models, tmp_path, monkeypatch, capsys):
    """--optimizer_init and --teacher_init: what cannot be read is said in one line."""
    worker.install_task(monkeypatch.setattr)
    trainer = continual.TRAINERS["sdpo"]
    last = root / "whole/1-math/ckpt-000002"
    for flags, wanted in (
            (["--optimizer_init", str(last / "trainer")], "holds no trainer/optimizer.safetensors"),
            (["--optimizer_init", str(last), "--model", models["gpt2"]], "is of another model"),
            (["--teacher_init", str(last / "none.safetensors")], "there is no such file")):
        with pytest.raises(SystemExit) as stop:
            trainer.main(trainer.get_args([
                "--model", models["llama"], "--data", "x", "--eval_every", "0", *flags, "--out",
                str(tmp_path / "run")]))
        told = capsys.readouterr().err
        assert stop.value.code == 2 and flags[0] in told.splitlines()[-1] and wanted in told


# ---- one base for many sequences -----------------------------------------------------------------

def test_base_eval(root, models, run, tmp_path, monkeypatch, capsys):
    """GRPO from the same base: not sampled again, copied; other settings or bases are refused."""
    file, evaluate, sampled = root / "whole" / "eval-0.json", eval.evaluate, []
    monkeypatch.setattr(eval, "evaluate", lambda *a: sampled.append(a[2]) or evaluate(*a))
    flags = ("--algorithm", "grpo", "--stage_steps", "1", "--base_eval", str(file))
    result = run(tmp_path / "grpo", *flags)
    assert len(sampled) == 6  # 3 benchmarks, after each stage
    for suffix in (".json", ".jsonl"):
        assert (tmp_path / f"grpo/eval-0{suffix}").read_bytes() == file.with_suffix(
            suffix).read_bytes()
    wanted = json.loads((root / "whole" / "continual.json").read_text())["R"]
    for benchmark, cells in result["R"].items():
        assert cells[0] == wanted[benchmark][0]
    for changed in ("--n 3", "--temperature 1", "--top_p 1", "--limit 4", "--eval_seed 1",
                    "--max_new 9", "--tasks aime24", "--think", f"--model {models['other']}"):
        with pytest.raises(SystemExit) as stop:
            get_args(models, tmp_path / "new", *flags, *changed.split())
        told = capsys.readouterr().err
        name = changed.split()[0].replace("--eval_seed", "--seed")
        assert stop.value.code == 2 and told.count("\n") == 1
        assert told.startswith(f"{Path(sys.argv[0]).name}: error: {name} ") and str(file) in told


# ---- what is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize("flags", [
    "--order cooking", "--order math,", "--order logic", "--order", "--stage_steps 1,2,3",
    "--stage_steps 0", "--stage_steps many,2", "--task math", "--steps=3", "--resume x",
    "--teacher_init x", "--teacher_init_mix 1", "--optimizer_init x", "--algorithm ppo",
    "--algorithm grpo --carry_teacher", "--algorithm grpo --ema 0.1", "--lr -1", "--colour red",
    "--tasks cooking", "--tasks aime24=no/such.jsonl", "--n 0", "--temperature -1", "--top_p 2",
    "--limit -1", "--base_eval no/such.json", "--data a,b,c,d,e", "--model no/such.gguf",
    "--data no/such.jsonl", "--stage 3", "--prompts 7 --updates 2", "stray"])
def test_refused(flags, capsys, monkeypatch, tmp_path):
    """Exit code 2 and one line, before anything is loaded or written."""
    told = worker.refusal(
        lambda: continual.get_args(["--out", str(tmp_path / "a"), *flags.split()]),
        capsys, monkeypatch)
    assert any(re.split("[ =]", flags)[i].strip("-") in told for i in (0, -1)), told
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("changed", [
    "--lr 0.5", "--n 3", "--order science,math", "--ema 0.1", "--eval_seed 1", "--carry_optimizer",
    "--stage_steps 3", "--seed 4", "--tasks aime24", "--algorithm grpo", "--max_new 9", "--data z"])
def test_changed_flag(root, models, capsys, changed):
    """A sequence that goes on computes what it was started for; how fast may change."""
    same = [] if changed == "--algorithm grpo" else ["--ema", "0.3"]
    assert get_args(models, root / "whole", "--ema", "0.3", "--tokens_per_micro", "99")
    with pytest.raises(SystemExit) as stop:
        get_args(models, root / "whole", *same, *changed.split())
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1
    assert f"error: {changed.split()[0]} " in told and "was made with" in told


def test_flag_left_out(root, models, capsys):
    """Also one that is not given again: the default is another value."""
    with pytest.raises(SystemExit):
        get_args(models, root / "whole")
    assert "--ema 0.0: " in capsys.readouterr().err


def test_folders_of_others(models, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "other" / "1-math").mkdir(parents=True)
    for name in ("file", "other"):
        with pytest.raises(SystemExit):
            get_args(models, tmp_path / name)
        assert "--out" in capsys.readouterr().err


def test_defaults():
    """The paper's sequence; --tiny; and the coding stage stays short wherever it stands."""
    args = continual.get_args(["--out", "x"])
    stages, models = continual.plan(args)
    assert [(s.task, s.steps, s.data, s.lr) for s in stages] == [
        (task, steps, data.TASKS[task].TRAIN, 1e-5) for task, steps in (
            ("math", 50), ("science", 50), ("tooluse", 50), ("coding", 20))]
    assert models[0] == "Qwen/Qwen3-4B" and models[2] == "x/2-science/ckpt-000050"
    assert [s.model for s in stages] == models[:4]
    settings = continual.evaluation(args, 0, models[0])
    assert (settings.n, settings.temperature, settings.top_p, settings.limit) == (16, .6, .95, 0)
    assert settings.max_new == 8192 and len(settings.tasks.split(",")) == 11
    args = continual.get_args(["--out", "x", "--tiny", "--order", "coding,logic",
                               "--max_new", "99"])
    stages, _ = continual.plan(args)
    assert [(s.steps, s.data, s.model[:4], s.max_new) for s in stages] == [
        (20, "tiny", "tiny", 99), (50, "tiny", "x/1-", 99)]
    settings = continual.evaluation(args, 1, "m")
    assert (settings.n, settings.limit, settings.max_new, settings.tiny) == (8, 128, 99, True)
    assert args.trainer["max_new"] == 99 and "max_new" not in vars(args)  # kept once: see same()
    assert settings.tasks == ",".join(name for name in data.BENCHMARKS if "tiny" in name)
    stages, _ = continual.plan(continual.get_args(
        ["--out", "x", "--order", "math,science", "--data", "a,b", "--stage_steps", "3,4"]))
    assert [(s.data, s.steps) for s in stages] == [("a", 3), ("b", 4)]


def test_help(capsys):
    """One line a flag; README's table says the same of each, with its defaults."""
    with pytest.raises(SystemExit):
        continual.get_args(["--help"])
    lines = dict(re.findall(r"^  --(\w+) (.*)$", capsys.readouterr().out, re.M))
    table = (Path(common.__file__).parent / "README.md").read_text().split("**continual.py**")[1]
    rows = re.findall(r"^\| `--(\w+)` \| `?([^|`]*)`? \| `?([^|`]*)`? \| (.*) \|$", table, re.M)
    assert lines.keys() - {name for name, *_ in rows} == {"model", "data", "tiny", "out"}
    full, tiny = (vars(continual.get_args(["--out", "x", *flags])) for flags in ([], ["--tiny"]))
    for name, default, small, told in rows:
        assert lines[name].split("  ")[-1].strip() == told + f" [{default}]" * bool(default)
        if default and name != "order":
            assert (str(full[name]), str(tiny[name])) == (default, small or default)
