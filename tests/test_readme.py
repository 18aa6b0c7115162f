"""What the README tells people to do is done here, on a copy of the repository."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import data

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def copy(tmp_path):
    """The repository's files, without what was built or run."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True,
                           check=True).stdout.split()
    for name in names:
        if name.startswith(("data/", "tools/")) or ("/" not in name and name.endswith(".py")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ""}, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def one_step(folder, script, *flags):
    run(folder, script, "--tiny", "--steps", "1", "--prompts", "4", "--eval_every", "0", "--quiet",
        "--out", "run", *flags)
    return json.loads((folder / "run" / "log.jsonl").read_text())


def block(kind, holds):
    """The README's one code block of a kind that holds some text."""
    (found,) = [b for b in re.findall(rf"```{kind}\n(.*?)```", README, re.S) if holds in b]
    return found


def test_add_a_task(copy):
    (copy / "data" / "reverse.py").write_text(block("python", "# data/reverse.py"))
    (line,) = block("python", "one more line in TASKS").splitlines()[1:]
    init = copy / "data" / "__init__.py"
    text, count = re.subn(r"(?m)^TASKS = \{.*\n", rf"\g<0>{line}\n", init.read_text())
    assert count == 1
    init.write_text(text)
    log = one_step(copy, "train_grpo.py", "--task", "reverse")
    assert log["stage"] == "reverse" and log["length"] > 0


def test_change_a_loss(copy):
    text = (copy / "train_grpo.py").read_text()
    patch = block("diff", "return loss * weight").splitlines()
    old = "\n".join(line[1:] for line in patch if line[0] != "+")
    new = "\n".join(line[1:] for line in patch if line[0] != "-")
    assert text.count(old) == 1 and len(patch) < 20
    (copy / "train_bonus.py").write_text(text.replace(old, new))
    plain = one_step(copy, "train_grpo.py", "--updates", "1")
    shutil.rmtree(copy / "run")
    bonus = one_step(copy, "train_bonus.py", "--updates", "1")
    assert bonus["reward"] == plain["reward"]  # the same samples
    assert 0 < plain["loss"] - bonus["loss"] < 0.05  # a hundredth of an entropy below ln V


def test_every_log_key_is_in_the_glossary(copy):
    log = one_step(copy, "train_sdpo.py")
    glossary = README.split("\n## What is logged\n")[1].split("\n## ")[0]
    assert log.keys() <= set(re.findall(r"`([a-z_]+)`", glossary))


@pytest.mark.parametrize("k, task", enumerate(
    ("math", "science", "tooluse", "coding", "logic", "knowledge")))
def test_own_rows(k, task, tmp_path):
    """Each example is a row of its task, whose own answer is right."""
    path = tmp_path / "rows.jsonl"
    path.write_text(block("jsonl", "problem").splitlines()[k] + "\n")
    (row,) = data.TASKS[task].load(str(path))
    answer = data.TASKS[task].render(row["answer"])
    assert data.TASKS[task].score(answer, row["answer"])[0] == 1.0
