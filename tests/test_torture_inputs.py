"""The quick subset of tools/torture_inputs.py, and what its parts rely on."""
import json
import sys
from pathlib import Path

import pytest

from data import hub, math

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import torture_inputs  # noqa: E402

ROWS = ROOT / "tests" / "rows"


@pytest.mark.parametrize("part", torture_inputs.PARTS)
def test_part(part):
    """Everything that is tried survives; the note names what did not."""
    rows = list(torture_inputs.PARTS[part](quick=True))
    assert [row for row in rows if row["survived"] < row["tried"]] == []
    assert all(row["tried"] for row in rows)


def test_at_least_200_hostile_programs():
    """All different, each with a name of its own."""
    words = {"OUTSIDE": "/o", "TRAINER": "7", "REPOSITORY": "/r"}
    found = [item for file in ("escape", "exhaust", "forge_output", "forge_value")
             for item in torture_inputs.programs(file, **words)]
    assert len(found) >= 400 and len({name for name, _ in found}) == len(found)
    assert len({program for _, program in found}) == len(found)
    assert not any(word in program for word in words for _, program in found)


@pytest.mark.parametrize("break_it, part", [
    (lambda m: m.setattr("data.coding.score", lambda *a: (1.0, "")), "programs"),
    (lambda m: m.setattr("data.math.score", lambda *a: 1 / 0), "verifiers"),
    (lambda m: m.setattr("data.hub.DataError", KeyError), "loaders"),
    (lambda m: m.setattr("data.coding._Data.find_class", lambda self, module, name: open),
     "pickles")])
def test_what_does_not_survive_is_told(break_it, part, monkeypatch, capsys):
    break_it(monkeypatch)
    row = next(torture_inputs.PARTS[part](quick=True))
    assert row["survived"] < row["tried"] and row["note"]


def test_skip_bad(tmp_path, capsys):
    """One line counts the rows that were left out and shows the first; without the flag it ends
    the run. What was left out before does not count again."""
    import common
    import data
    from data import batches
    good = (ROWS / "math500.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([good[0], "{", good[1], "{}", '{"problem": 3}', good[2]]) + "\n")
    args = common.argparse.Namespace(skip_bad=True, seed=0)
    for _ in range(2):
        rows = batches.read(data.TASKS["math"], str(path), "train", args, "--data rows.jsonl")
        told = capsys.readouterr().err
        assert [row["id"] for row in rows] == [json.loads(line)["unique_id"] for line in good[:3]]
        assert told.startswith(f"--skip_bad: left 3 of 6 rows of {path} out; the first: {path}:2: ")
        assert told.count("\n") == 1
    args.skip_bad = False
    with pytest.raises(SystemExit) as stop:
        batches.read(data.TASKS["math"], str(path), "train", args, "--data rows.jsonl")
    assert stop.value.code == 2 and f"{path}:2: not JSON" in capsys.readouterr().err
    path.write_text("{\n{}\n")  # no row at all is refused even so
    with hub.skipping(), pytest.raises(hub.DataError, match=r"rows\.jsonl:1: not JSON"):
        math.load(str(path))


def test_what_no_tokenizer_takes_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    for line in (b'{"problem": "\\ud800", "answer": "1"}', b'{"problem": ' + b"[" * 10000,
                 b'{"problem": "\xed\xa0\x80", "answer": "1"}'):
        path.write_bytes(line + b"\n")
        with pytest.raises(hub.DataError, match=r"rows\.jsonl:1: not JSON"):
            math.load(str(path))
    path.write_bytes(b'{"problem": "\\ud83d\\ude00", "answer": "1"}\n')  # a whole character
    assert math.load(str(path))[0]["messages"][0]["content"].startswith("\U0001f600")
