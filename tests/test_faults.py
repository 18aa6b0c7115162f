"""What goes wrong around a run: it is told to stop, its folder is taken, the disk is full."""
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoint
import common
import drift
import eval
import loading
import logbook
import ranks
import train_grpo

ROOT = Path(__file__).parents[1]
FLAGS = ["--tiny", "--steps", "6", "--prompts", "4", "--group", "4", "--max_new", "24",
         "--eval_every", "0", "--save_every", "0"]


def start(*command):
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True,
                            stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def lines(out):
    log = out / "log.jsonl"
    return log.read_text().splitlines() if log.exists() else []


def weights(out):
    return (sorted(out.glob("ckpt-*"))[-1] / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    process = start("train_grpo.py", *FLAGS, "--out", str(out))
    assert process.wait(300) == 0, process.stderr.read()
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop(number, whole, tmp_path):
    """The step is finished and saved, exit 0, and the command that is printed goes on from there
    to the weights of a run that was never stopped."""
    out = tmp_path / "my run (1)"
    process = start("train_grpo.py", *FLAGS, "--out", str(out))
    while not lines(out) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    (step, command), = re.findall(r"stopped after step (\d), .* go on with: (.*)", told)
    assert sorted(x.name for x in out.glob("ckpt-*")) == [f"ckpt-00000{step}"] and int(step) < 6
    python, *command = shlex.split(command)
    again = start(*command)
    assert python == "python" and again.wait(300) == 0, again.stderr.read()
    assert weights(out) == weights(whole) and len(lines(out)) == 6


def test_a_second_signal_ends_it_at_once(tmp_path):
    process = start("train_grpo.py", *FLAGS, "--out", str(tmp_path / "run"), "--steps", "500",
                    "--prompts", "256", "--group", "32")  # steps of many seconds
    while not lines(tmp_path / "run") and process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    while process.poll() is None:  # torchrun may send one twice: that within 2 s is the first
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert time.monotonic() - began > 2
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_a_folder_in_use_is_refused(tmp_path):
    out = tmp_path / "run"
    first = start("train_grpo.py", *FLAGS, "--out", str(out), "--steps", "500", "--save_every", "1")
    try:
        while not list(out.glob("ckpt-*")) and first.poll() is None:
            time.sleep(0.02)
        second = start("train_grpo.py", "--resume", str(out))
        _, told = second.communicate(timeout=300)
        assert second.returncode == 2 and "is in use by another process" in told
        assert len(told.strip().splitlines()[-1]) < 200
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full(code, tmp_path, monkeypatch, capsys):
    """One line, exit 2; the checkpoint before is whole and nothing is left half written."""
    out, made = tmp_path / "run", []

    def save_file(tensors, path, inner=checkpoint.save_file):
        made.append(path)
        if len(made) > 2:  # of the second checkpoint
            Path(path).write_bytes(b"half")
            raise OSError(code, os.strerror(code))
        inner(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(SystemExit) as stop:
        train_grpo.main(train_grpo.get_args([*FLAGS, "--save_every", "2", "--quiet",
                                             "--out", str(out)]))
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and os.strerror(code) in told and "older checkpoints" in told
    assert [x.name for x in out.glob("*ckpt*")] == ["ckpt-000002"]
    assert loading.fault(out / "ckpt-000002") == ""
    assert json.loads((out / "ckpt-000002/trainer/state.json").read_text())["step"] == 2


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """One line, exit 2, and no line is lost: as it grows, and as a resume cuts it."""
    out, write_text = tmp_path / "run", Path.write_text
    train_grpo.main(train_grpo.get_args([*FLAGS, "--steps", "3", "--quiet", "--out", str(out)]))
    before = (out / "log.jsonl").read_text()

    def full(path):
        if Path(path).name.startswith("log.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for owner, name, broken in (
            (logbook, "open", lambda path, mode: full(path) or Path(path).open(mode)),  # noqa: SIM115
            (Path, "write_text", lambda path, text: full(path) or write_text(path, text))):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(logbook, "lock", lambda folder: open(os.devnull))  # noqa: SIM115
            patch.setattr(owner, name, broken, raising=False)
            train_grpo.main(train_grpo.get_args(["--resume", str(out), "--steps", "4"]))
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2 and "cannot be written" in told
        assert (out / "log.jsonl").read_text() == before and len(lines(out)) == 3


def test_a_kill_before_the_first_step(tmp_path, monkeypatch):
    """A folder is never one that can neither be resumed nor be started again."""
    out, flags = tmp_path / "run", [*FLAGS, "--steps", "1", "--quiet"]
    with monkeypatch.context() as patch:
        def killed(*_):
            raise KeyboardInterrupt
        patch.setattr(logbook, "lock", lambda folder: open(os.devnull))  # noqa: SIM115
        patch.setattr(logbook, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            train_grpo.main(train_grpo.get_args([*flags, "--out", str(out)]))
    train_grpo.main(train_grpo.get_args([*flags, "--out", str(out)]))
    assert len(lines(out)) == 1


def test_what_is_kept_beside_a_broken_checkpoint(tmp_path, capsys):
    """--keep counts no later, broken one: the state just saved stays. Where none is whole, nothing
    is started again over the log."""
    out = tmp_path / "run"
    train_grpo.main(train_grpo.get_args([*FLAGS, "--save_every", "2", "--quiet", "--keep", "2",
                                         "--steps", "4", "--out", str(out)]))
    weights = out / "ckpt-000004" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # it would load
    with pytest.raises(SystemExit) as stop:
        eval.main(eval.get_args(["--tiny", "--tasks", "tiny_math", "--limit", "2", "--model",
                                 str(out), "--out", str(tmp_path / "eval.json")]))
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "ckpt-000004: model.safetensors has" in told
    os.truncate(weights, 99)
    again = ["--resume", str(out), "--steps", "3", "--keep", "1"]
    train_grpo.main(train_grpo.get_args(again))
    assert "ckpt-000004: model.safetensors has 99 bytes" in capsys.readouterr().err
    assert checkpoint.newest(out)[0] == out / "ckpt-000003"
    shutil.rmtree(out / "ckpt-000004")
    shutil.rmtree(out / "ckpt-000003" / "trainer")
    with pytest.raises(SystemExit) as stop:
        train_grpo.main(train_grpo.get_args(again))
    told = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and "no checkpoint with a trainer state is whole" in told[-1]
    assert "ckpt-000003: trainer/" in told[-2] and len(lines(out)) == 3


@pytest.mark.parametrize("place, number", [("loss", "inf"), ("gradient", "nan")])
def test_a_number_that_is_not_finite(place, number, tmp_path, monkeypatch):
    """An infinite loss may have a finite gradient. No optimizer step; step, rank and rows named."""
    made, inner, bad = [], ranks.optimizer_step, float(number)

    def step(model, optimizer, args, number, gradient, loss, batch):
        if number == 2 and place == "gradient":
            next(model.parameters()).grad[:1] = bad
        made.append([row["id"] for _, row in batch])
        return inner(model, optimizer, args, number, gradient,
                     bad if number == 2 and place == "loss" else loss, batch)
    monkeypatch.setattr(ranks, "optimizer_step", step)
    out, flags = tmp_path / "run", [*FLAGS, "--updates", "1", "--save_every", "1", "--quiet"]
    with pytest.raises(FloatingPointError) as stop:
        train_grpo.main(train_grpo.get_args([*flags, "--out", str(out)]))
    assert str(stop.value).startswith("step 2, rank 0: the loss is ")
    assert str(stop.value).endswith(", ".join(map(str, made[1])))
    assert len(made) == 2 and checkpoint.newest(out)[0] == out / "ckpt-000001"


def test_torture():
    """Its quick kills and damage, by the tool itself."""
    done = subprocess.run([sys.executable, "tools/torture.py", "--quick", "--parts", "kills"],
                          cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def said(capsys, script, *flags):
    """The one line with which a script refuses."""
    with pytest.raises(SystemExit) as stop:
        script.main(script.get_args([str(flag) for flag in flags]))
    told = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2, told
    return told[-1]


def test_damaged_text_files(whole, tmp_path, capsys):
    """A file that is no longer what was written is one line, with its place."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for text in ("[]", "null", '{"args": 3}', "{"):
        (out / "config.json").write_text(text)
        assert "config.json is not a run's" in said(capsys, train_grpo, "--resume", out)
    shutil.copy(whole / "config.json", out)
    assert "--steps 5: the run" in said(capsys, train_grpo, "--resume", out, "--steps", "5")
    assert (out / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    log = (out / "log.jsonl").read_text().splitlines()
    (out / "log.jsonl").write_text("\n".join([*log[:2], log[2][:40], *log[3:], ""]))
    assert "log.jsonl, line 3: is damaged" in said(capsys, train_grpo, "--resume", out)
    last = sorted(out.glob("ckpt-*"))[-1]
    (out / "ckpt-999999").touch()  # no folder, so no checkpoint
    for text in ("[]", "{}", '{"model.safetensors": 3}'):
        (last / "manifest.json").write_text(text)
        assert loading.fault(last).startswith("manifest.json")
    assert "manifest.json" in said(capsys, eval, "--tiny", "--model", out, "--out",
                                   tmp_path / "eval.json")
    assert "manifest.json" in said(capsys, drift, "--tiny", "--model", out, "--out",
                                   tmp_path / "drift.json")


def test_damaged_scores(tmp_path, capsys):
    flags = ["--tiny", "--tasks", "tiny_math,tiny_logic", "--limit", "2", "--n", "2", "--quiet",
             "--out", tmp_path / "eval.json"]
    eval.main(eval.get_args([str(flag) for flag in flags]))
    scores, samples = ((tmp_path / f"eval{end}").read_text() for end in (".json", ".jsonl"))
    (tmp_path / "eval.jsonl").write_text("{bro\n" + samples)
    assert "eval.jsonl, line 1: is damaged" in said(capsys, eval, *flags)
    (tmp_path / "eval.jsonl").write_text(samples)
    (tmp_path / "eval.json").write_text(scores[:99])
    assert "is not what a run writes" in said(capsys, eval, *flags)
    assert "cannot be written" in said(capsys, eval, *flags[:-1], "/proc/none/eval.json")


def test_interrupted(monkeypatch, capsys):
    def main(args):
        raise KeyboardInterrupt
    with pytest.raises(SystemExit) as stop:
        common.run(main, lambda: None)
    assert stop.value.code == 130 and capsys.readouterr().err.count("\n") == 1
