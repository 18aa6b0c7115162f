"""Evaluation: scores against brute force, on one rank or four, and what a report has to say."""
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import worker

import data
import eval
import loading
import logbook
import rollout
from data.scores import majority, pass_at_k

ROWS = Path(__file__).parent / "rows" / "cases.jsonl"
CASES = {case["id"]: case for case in map(json.loads, ROWS.open())}
TWO = "aime24,math500"  # two benchmarks of one patched task
TEN = f"--tasks {TWO} --n 4 --max_new 10 --max_prompt 100 --limit 10"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return worker.make_folders(tmp_path_factory.mktemp("models"))


def record(rewards, answers=None, lengths=None, finished=None):
    n = len(rewards)
    return {"id": 0, "rewards": rewards, "answers": answers or [None] * n,
            "gold": 1.0, "lengths": lengths or [3] * n, "finished": finished or [True] * n,
            "responses": [""] * n}


def evaluate(models, out, flags, monkeypatch):
    worker.install_task(monkeypatch.setattr)
    argv = (f"--tasks {TWO} --n 4 --max_new 10 --max_prompt 100 --limit 9 {flags} "
            f"--out {out}").format(**models).split()
    return eval.main(eval.get_args(argv))


# ---- the numbers ---------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k(n):
    """Over all sets of k of n samples; and the naive 1 - (1 - c/n)^k is something else."""
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        sets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, sets)) / len(sets))
    assert pass_at_k(4, 2, 2) != pytest.approx(1 - 0.5**2)
    assert pass_at_k(10**4, 1, 5000) == pytest.approx(0.5)  # no overflow


@pytest.mark.parametrize("answers, rewards, wanted", [
    ("aab", [1, 1, 0], 1), ("abb", [1, 0, 0], 0), ("ab", [1, 0], 0.5), ("aabb", [0, 0, 1, 1], 0.5),
    ("abc", [1, 0, 0], 1 / 3), ("--a", [0, 0, 1], 1), ("---", [0, 0, 0], 0),
    ("aab", [1, 0, 0], 0.5)])  # one text, two rewards: its mean
def test_majority(answers, rewards, wanted):
    """By hand, - for no answer. The order of samples does not matter."""
    answers = [None if a == "-" else a for a in answers]
    for order in itertools.permutations(range(len(rewards))):
        assert majority([answers[i] for i in order],
                             [rewards[i] for i in order]) == pytest.approx(wanted)


def test_summary():
    """Against the statistics module: the error is over prompts, not over samples."""
    records = [record([1, 0, 1, 1], ["a", "b", "a", "a"], [5, 6, 7, 8], [True, False, True, True]),
               record([0, 0, 0, 0], ["c", "d", None, "d"]), record([1, 0, 0, 0], ["e", *"fgh"])]
    got = eval.summary(records)
    means = [0.75, 0.0, 0.25]
    assert got["mean"] == pytest.approx(statistics.mean(means))
    assert got["se"] == pytest.approx(statistics.stdev(means) / math.sqrt(3))
    assert got["se"] > 1.2 * math.sqrt(1 / 3 * 2 / 3 / 12)  # what 12 independent samples would have
    assert (got["prompts"], got["n"]) == (3, 4)
    assert got["pass"] == {"1": pytest.approx(1 / 3), "4": pytest.approx(2 / 3),
                           "2": pytest.approx((1 + 0 + 1 / 2) / 3)}
    assert got["pass"]["1"] == pytest.approx(got["mean"])
    assert got["maj"] == pytest.approx((1 + 0 + 1 / 4) / 3)
    assert got["length"] == pytest.approx((26 + 24) / 12)
    assert got["frac_truncated"] == pytest.approx(1 / 12)
    assert got["frac_answered"] == pytest.approx(11 / 12)
    assert eval.summary([record([1, 0])])["se"] is None  # one prompt has no spread: not 0


@pytest.mark.parametrize("score, base, relative, gain, forgetting", [
    (0.6, 0.5, 0.2, 0.2, 0.0), (0.4, 0.5, -0.2, 0.0, 0.2), (0.5, 0.5, 0.0, 0.0, 0.0),
    (0.3, 0.0, None, None, None), (0.0, 0.0, None, None, None)])
def test_compare(score, base, relative, gain, forgetting):
    """E08: from a base of 0 a relative change is unknown, which is not 0 and not inf."""
    got = eval.compare(score, base)
    assert got["difference"] == pytest.approx(score - base)
    assert [got[k] for k in ("relative", "gain", "forgetting")] == [
        value if value is None else pytest.approx(value) for value in (relative, gain, forgetting)]
    assert "NaN" not in json.dumps(got) and "Infinity" not in json.dumps(got)


# ---- whole evaluations ---------------------------------------------------------------------------

def test_evaluation(models, tmp_path, monkeypatch, capsys):
    """The scores are those of the samples that lie beside them, which task.score gives again."""
    out = tmp_path / "deep" / "eval.json"
    result = evaluate(models, out, "--model {llama}", monkeypatch)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").open()]
    assert Counter(line["benchmark"] for line in lines) == {"aime24": 9, "math500": 9}
    for benchmark in TWO.split(","):
        own = [line for line in lines if line["benchmark"] == benchmark]
        assert [line["id"] for line in own] == list(range(9))
        for line in own:
            assert len(line["responses"]) == len(line["answers"]) == 4
            assert line["rewards"] == [worker.score(text, str(line["id"]))[0]
                                       for text in line["responses"]]
        score = result["scores"][benchmark][models["llama"]]
        assert score["mean"] == pytest.approx(
            statistics.mean(r for line in own for r in line["rewards"]))
        assert 0 < score["mean"] < 1 and score["frac_truncated"] == pytest.approx(
            statistics.mean(not f for line in own for f in line["finished"]))
        assert "relative" not in score
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and table[1].startswith("aime24") and "± se" in table[0]
    assert f"{100 * score['mean']:.1f}" in table[2] and table[2].endswith(models["llama"])
    again = evaluate(models, tmp_path / "again.json", "--model {llama}", monkeypatch)
    assert (tmp_path / "again.jsonl").read_text() == out.with_suffix(".jsonl").read_text()
    other = evaluate(models, tmp_path / "other.json", "--model {llama} --seed 1", monkeypatch)
    assert other["scores"]["aime24"] != again["scores"]["aime24"]


def e02(models, tmp_path, monkeypatch, given, expected):
    """A base row from the same script, prompts, decoding and length; all of it in the output."""
    flags = "--model {other} {gpt2} --baseline {llama}"
    result = evaluate(models, tmp_path / "eval.json", flags, monkeypatch)
    for scores in result["scores"].values():
        assert list(scores) == [models["llama"], models["other"], models["gpt2"]]
        base = scores[models["llama"]]["mean"]
        assert "relative" not in scores[models["llama"]]
        for name in ("other", "gpt2"):
            assert scores[models[name]]["difference"] == pytest.approx(
                scores[models[name]]["mean"] - base)
            assert scores[models[name]]["relative"] == pytest.approx(
                (scores[models[name]]["mean"] - base) / base)
    lines = [json.loads(line) for line in (tmp_path / "eval.jsonl").open()]
    prompts = {name: [(x["benchmark"], x["id"]) for x in lines if x["model"] == models[name]]
               for name in ("llama", "other", "gpt2")}
    assert prompts["llama"] == prompts["other"] == prompts["gpt2"]
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert saved["args"].items() >= {"temperature": 0.6, "top_p": 0.95, "n": 4, "max_new": 10,
                                     "seed": 0, "baseline": models["llama"]}.items()
    assert {"commit", "versions", "command", "machine", "date"} <= saved.keys()
    same = evaluate(models, tmp_path / "same.json", "--model {llama} --baseline {llama}",
                    monkeypatch)
    for scores in same["scores"].values():  # E10: no model differs from itself
        assert scores[models["llama"]]["difference"] == 0 == scores[models["llama"]]["relative"]


def e03(models, tmp_path, monkeypatch, given, expected):
    got = eval.summary([record(given["correct"])])
    assert got["mean"] == expected["avg@4"] and got["pass"]["4"] == expected["pass@4"]


def e06(models, tmp_path, monkeypatch, given, expected):
    """Rows whose own gold answer is not accepted are counted beside the score, and all wrong is 0.
    (A gold that cannot be read at all is refused by the loader: tests/test_loaders.py.)"""
    records = [record([0] * 4, list("abcd")) | {"gold": float(i >= given["unreadable_gold"])}
               for i in range(given["rows"])]
    got = eval.summary(records)
    assert got["mean"] == expected["accuracy"] and got["maj"] == 0
    assert got["unreadable"] == expected["unreadable"]


def e09(models, tmp_path, monkeypatch, given, expected):
    records = [record([0], ["a"], [n], [n < 900]) for n in given["lengths"]]
    got = eval.summary(records)
    assert got["length"] == pytest.approx(1600 / 3) and got["frac_answered"] == 1
    assert got["frac_truncated"] == pytest.approx(1 / 3)


def s26(models, tmp_path, monkeypatch, given, expected):
    """The log has both on one line, so the gap is seen (reward at T = 1, eval at T = 1). Nothing
    flags it automatically: held-out accuracy is what runs are compared by."""
    state = {}
    for step, (reward, score) in enumerate(zip(given["train"], given["val"], strict=True), 1):
        state = eval.best(state, {"reward": reward, "eval": score, "step": step})
    assert state == {"best_eval": 0.5, "best_step": 1}  # chosen by eval, whatever the reward does


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    """An evaluation on 1 rank, on 4, and on 3 with FSDP; and one on 2 that is killed when its
    second benchmark is sampled, but its scores are not written."""
    root, jobs = tmp_path_factory.mktemp("ranks"), []
    for name, n, shard, kill in (("one", 1, "", None), ("four", 4, "", None),
                                 ("shards", 3, "--fsdp on", None),
                                 ("killed", 2, "", dict(point="write_json", nth=2))):
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        jobs.append(dict(name=name, script="eval", ranks=n, before=[], port=port, kill=kill,
                         out=str(root / name), files=str(root / name),
                         argv=[*f"--model {models['gpt2']} {TEN} {shard}".split(),
                               "--out", str(root / f"{name}-scores.json")]))
    (root / "jobs").write_text(json.dumps(jobs))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, worker.__file__, root / "jobs"], env=environment,
                          timeout=900, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def r03(models, tmp_path, monkeypatch, given, expected, ranks):
    """10 rows on 4 ranks: each is scored once, and all as on one rank, which also says that no rank
    waits for another. FSDP too, where ranks have different numbers of forward passes."""
    assert (given["rows"], given["world"]) == (10, 4)
    one = (ranks / "one-scores.jsonl").read_text()
    for name, n in (("four", 4), ("shards", 3)):
        told = (ranks / f"{name}.rank0.txt").read_text()
        assert json.loads((ranks / f"{name}.json").read_text())["codes"] == [0] * n, told
        assert (ranks / f"{name}-scores.jsonl").read_text() == one
        scores = json.loads((ranks / f"{name}-scores.json").read_text())["scores"]
        for score in scores.values():
            assert score[models["gpt2"]]["prompts"] == expected["eval_rows_scored"]
        assert told.count("benchmark  ") == 1  # the table, by rank 0
        assert "benchmark  " not in (ranks / f"{name}.rank1.txt").read_text()


CHECKS = {name.upper(): check for name, check in list(globals().items())
          if name.upper() in CASES and callable(check)}


@pytest.mark.parametrize("case", CHECKS)
def test_case(case, models, tmp_path, monkeypatch, request):
    CHECKS[case](models, tmp_path, monkeypatch, CASES[case]["input"], CASES[case]["expected"],
                 *([request.getfixturevalue("ranks")] if case == "R03" else []))


# ---- a run that was stopped ----------------------------------------------------------------------

def contents(path):
    """What an evaluation wrote, without its times."""
    found = json.loads(path.read_text())
    for score in (score for models in found["scores"].values() for score in models.values()):
        assert score.pop("seconds") > 0
    return {key: found[key] for key in ("scores", "missing", "weights")}, [
        json.loads(line) for line in path.with_suffix(".jsonl").open()]


@pytest.fixture
def sampled(monkeypatch):
    """The models and prompts that are sampled from here on."""
    worker.install_task(monkeypatch.setattr)
    calls, original = [], rollout.sample

    def spy(model, tokenizer, prompts, *a, **k):
        calls.append((model.config.model_type, len(prompts)))
        return original(model, tokenizer, prompts, *a, **k)
    monkeypatch.setattr(rollout, "sample", spy)
    return calls


def again(out, *argv):
    return eval.main(eval.get_args([*argv, "--out", str(out)]))


def test_goes_on_after_a_kill(models, ranks, sampled, tmp_path, capsys):
    """SIGKILL in the second of two benchmarks, on two ranks: the file is whole and says what is
    missing, the first is not sampled again, and all is as in one go."""
    assert json.loads((ranks / "killed.json").read_text())["codes"][0] == -9
    for suffix in (".json", ".jsonl"):
        (tmp_path / f"killed{suffix}").write_bytes((ranks / f"killed-scores{suffix}").read_bytes())
    out, argv = tmp_path / "killed.json", ["--model", models["gpt2"], *TEN.split()]
    (scores, missing, _), lines = contents(out)[0].values(), contents(out)[1]
    assert list(scores["aime24"]) == [models["gpt2"]] and scores["math500"] == {}
    assert missing == [[models["gpt2"], "math500"]]
    assert len(lines) == 20  # samples without scores count for nothing
    result = again(out, *argv)
    assert sampled == [("gpt2", 10)]
    once = contents(ranks / "one-scores.json")
    assert contents(out) == once and once[0]["missing"] == []
    assert "math500, 2 of 2" in capsys.readouterr().err  # the progress bar
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert again(out, *argv, "--quiet") == result and len(sampled) == 1  # nothing is left to do
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "math500," not in capsys.readouterr().err
    again(out, *argv, "--overwrite")
    assert len(sampled) == 3 and contents(out) == once
    lines = out.with_suffix(".jsonl").read_text().splitlines(keepends=True)
    out.with_suffix(".jsonl").write_text("".join(lines[1:]))  # samples that are gone
    again(out, *argv)
    assert len(sampled) == 4 and contents(out) == once


def test_goes_on_with_the_second_model(models, sampled, tmp_path, monkeypatch):
    """Stopped in the second model: the baseline is neither loaded nor sampled, and compared."""
    argv = ["--baseline", models["gpt2"], "--model", models["llama"], *TEN.split(), "--quiet"]
    once = again(tmp_path / "once.json", *argv)
    original, loaded = loading.load_model, []
    with monkeypatch.context() as patch:
        def stop(name, *a):
            if name == models["llama"]:
                raise KeyboardInterrupt
            return original(name, *a)
        patch.setattr(loading, "load_model", stop)
        with pytest.raises(KeyboardInterrupt):
            again(tmp_path / "twice.json", *argv)
    monkeypatch.setattr(loading, "load_model", lambda name, *a: loaded.append(name) or original(
        name, *a))
    del sampled[:]
    twice = again(tmp_path / "twice.json", *argv)
    assert loaded == [models["llama"]] and sampled == [("llama", 10)] * 2
    assert contents(tmp_path / "twice.json") == contents(tmp_path / "once.json")
    assert list(twice["scores"]["math500"]) == list(once["scores"]["math500"])


def test_changed_flags_are_refused(models, ranks, tmp_path, monkeypatch, capsys):
    """One line that names them all; what changes no score may change; and other weights under the
    same name are another model."""
    out, argv = ranks / "one-scores.json", ["--model", models["gpt2"], *TEN.split()]
    for changed in (["--n", "3"], ["--seed", "1", "--temperature", "1"], ["--think"],
                    ["--tasks", "aime24"], ["--baseline", models["llama"]]):
        told = worker.refusal(lambda flags=changed: eval.get_args(
            [*argv, *flags, "--out", str(out)]), capsys, monkeypatch)
        assert all(f"{flag} " in told for flag in changed if flag.startswith("--")) and (
            f"{out} was made with" in told), told
        assert eval.get_args([*argv, *changed, "--overwrite", "--out", str(out)])
    assert eval.get_args([*argv, "--vllm_memory", "0.1", "--quiet", "--out", str(out)])
    found = json.loads(out.read_text())
    found["weights"][models["gpt2"]] = "0" * 16
    (tmp_path / "eval.json").write_text(json.dumps(found))
    told = worker.refusal(lambda: eval.get_args([*argv, "--out", str(tmp_path / "eval.json")]),
                          capsys, monkeypatch)
    assert f"--model {models['gpt2']}: " in told and "other weights" in told
    (tmp_path / "eval.json").write_text("[]")
    told = worker.refusal(lambda: eval.get_args([*argv, "--out", str(tmp_path / "eval.json")]),
                          capsys, monkeypatch)
    assert "is not what a run writes" in told


def test_fingerprint(models, tmp_path):
    """Of what the weights are, not of where or when; a run's folder stands for its last
    checkpoint."""
    run, hub = tmp_path / "run", loading.fingerprint("no/such-model")
    for step, kind in ((5, "llama"), (10, "other")):
        shutil.copytree(models[kind], run / f"ckpt-{step:06d}")
    (run / "log.jsonl").touch()
    prints = [loading.fingerprint(models[kind]) for kind in ("llama", "other", "gpt2")]
    assert len({*prints, hub}) == 4 and hub is None
    assert loading.fingerprint(run) == prints[1]
    assert loading.fingerprint("tiny") is not None


# ---- bad input -----------------------------------------------------------------------------------

def test_nothing_fits(models, tmp_path, monkeypatch, capsys):
    """Prompts that are all too long are no score of 0 and no traceback."""
    with pytest.raises(SystemExit) as stop:
        evaluate(models, tmp_path / "eval.json", "--model {llama} --max_prompt 5", monkeypatch)
    assert stop.value.code == 2 and "--max_prompt 5" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "eval.json").exists()


def test_unreadable_benchmark(models, tmp_path, monkeypatch, capsys):
    worker.install_task(monkeypatch.setattr)

    def broken(*a, **k):
        raise data.hub.DataError("rows.jsonl, line 3: no column 'answer'")
    monkeypatch.setattr(data.TASKS["math"], "load", broken)
    with pytest.raises(SystemExit) as stop:
        eval.main(eval.get_args(["--model", models["llama"], "--tasks", "aime24",
                                 "--out", str(tmp_path / "eval.json")]))
    assert stop.value.code == 2
    assert "rows.jsonl, line 3: no column 'answer'" in capsys.readouterr().err


# ---- within a run --------------------------------------------------------------------------------

def test_held_out(models, monkeypatch):
    """The same prompts at each evaluation, other samples at another step, T = 1; 0 prompts: all."""
    worker.install_task(monkeypatch.setattr)
    loaded = loading.load_model(models["llama"])
    import train_grpo
    args = train_grpo.get_args(["--model", "m", "--data", "x", "--eval_data", "y", "--max_new", "8",
                                "--eval_prompts", "6", "--eval_n", "3"])
    seen = []
    original = eval.evaluate

    def spy(*a):
        seen.append(([row["id"] for row in a[2]], a[5], a[6], a[7]))
        return original(*a)
    monkeypatch.setattr(eval, "evaluate", spy)
    run = eval.held_out(args, loaded[1])
    sampler = rollout.sampler(args, *loaded)
    first, again, later = run(sampler, 1), run(sampler, 1), run(sampler, 2)
    assert first == again and 0 <= later <= 1
    assert seen[0] == (list(range(6)), ("eval", 0, 1), 1.0, 1.0) and seen[2][1] == ("eval", 0, 2)
    args.eval_prompts = 0
    eval.held_out(args, loaded[1])(sampler, 1)
    assert len(seen[-1][0]) == 20
    args.eval_every = 0
    assert eval.held_out(args, loaded[1]) is None


def test_case_S26_the_gap_between_training_and_held_out_prompts_is_flagged():
    given, state = CASES["S26"]["input"], {}
    line = {"artifact": 0.0, "boxed": 1.0, "jsd": 0.1, "skipped": False, "grad_norm": 1.0}
    told = [logbook.watch(state, {**line, "step": i, "reward": train, "eval": held_out})
            for i, (train, held_out) in enumerate(zip(given["train"], given["val"], strict=True))]
    (warning,) = sum(told, [])
    assert "risen by 0.40, and fallen on held-out prompts, from 0.500 to 0.400" in warning
    state = {}  # both rise
    assert not any(logbook.watch(state, {**line, "step": i, "reward": r, "eval": r})
                   for i, r in enumerate(given["train"]))


def test_watch():
    """S24: an update too small to matter is said once; so is each other collapse."""
    line = dict(step=0, reward=0.5, artifact=0.1, boxed=1.0, jsd=0.1, grad_norm=1.0, loss=0.1,
                skipped=False, eval=None)
    state = {}
    for step in range(1, 13):
        told = logbook.watch(state, {**line, "step": step, "grad_norm": 1e-5})
        assert bool(told) == (step == 10)
    for change, kind, steps in (({"reward": 0.0}, "reward", 4), ({"artifact": 0.9}, "n-gram", 1),
                                ({"boxed": 9.0}, "boxed", 1), ({"jsd": 1e-4}, "jsd", 1),
                                ({"skipped": True, "grad_norm": None}, "nothing to learn", 50)):
        state = {}
        assert not any(logbook.watch(state, {**line, "step": step}) for step in range(20))
        told = [logbook.watch(state, {**line, **change, "step": 20 + i}) for i in range(60)]
        assert [i for i, warnings in enumerate(told) if warnings] == [steps - 1], kind
        assert len(told[steps - 1]) == 1 and kind in told[steps - 1][0]
