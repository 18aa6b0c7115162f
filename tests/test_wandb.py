"""--wandb sends the lines of log.jsonl, and --resume goes on with the same run there. Here the
package is a stand-in that records its calls; where the real one is installed, it runs offline."""
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

import train_grpo

FLAGS = ("--tiny --quiet --wandb project --steps 1 --prompts 4 --group 2 --updates 1 --max_new 4 "
         "--eval_every 0 --ref_every 0")


@pytest.fixture
def calls(monkeypatch):
    seen = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.util.spec_from_loader("wandb", None)
    fake.init = lambda **given: seen.append(given) or types.SimpleNamespace(
        log=lambda line, step: seen.append((step, dict(line))), finish=lambda: seen.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return seen


def run_twice(out):
    train_grpo.main(train_grpo.get_args([*FLAGS.split(), "--out", str(out)]))
    train_grpo.main(train_grpo.get_args(["--resume", str(out), "--steps", "2"]))
    return [json.loads(line) for line in (out / "log.jsonl").open()]


def test_wandb(calls, tmp_path):
    lines = run_twice(tmp_path / "run")
    first, one, end, second, two, _ = calls
    assert [one, two] == [(1, lines[0]), (2, lines[1])] and end == "end"
    assert first["id"] == second["id"]
    assert first["resume"] is None and second["resume"] == "allow"
    assert first["project"] == "project" and first["config"]["prompts"] == 4
    train_grpo.main(train_grpo.get_args([*FLAGS.split(), "--out", str(tmp_path / "other")]))
    assert calls[6]["id"] != first["id"]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_twice(tmp_path / "run")
    found = list(Path(tmp_path, "run", "wandb").glob("offline-run-*/*.wandb"))
    assert len(found) == 2 and len({path.name for path in found}) == 1  # run-ID.wandb
