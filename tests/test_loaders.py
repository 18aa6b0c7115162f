"""Reading rows: what is wrong is one line with its place; duplicates; hub and file load alike."""
import json
from pathlib import Path

import datasets
import pytest

from data import BENCHMARKS, TASKS, hub, knowledge, logic, math, science

ROWS = Path(__file__).parent / "rows"
SHARED = Path(__file__).parents[2] / "shared" / "data"
SETS = {"dapo": (math, math.DAPO), "dapo_processed": (math, math.PROCESSED),
        "aime24": (math, math.AIME24), "aime25": (math, math.ANSWERED),
        "math500": (math, math.ANSWERED), "gsm8k": (math, math.GSM8K),
        "sciknoweval": (science, science.HUB),
        "sdpo_sciknoweval_chemistry": (science, science.SDPO),
        "mmlu_redux_anatomy": (knowledge, knowledge.MMLU),
        "gpqa_diamond.shape": (knowledge, knowledge.GPQA),
        "zebra_private_mc.shape": (logic, logic.CHOICE),
        "zebra_private_grid.shape": (logic, logic.GRID)}


def raw(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").open()]


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


# ---- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_every_column_is_needed_and_typed(name, tmp_path):
    """Each column that the loader reads, missing or of another type in line 2, is named there."""
    (module, columns), rows = SETS[name], raw(name)[:2]
    for column in columns:
        if column.endswith("?"):
            continue
        broken = [rows[0], {k: v for k, v in rows[1].items() if k != column}]
        with pytest.raises(hub.DataError, match=rf'rows\.jsonl:2: no column "{column}"') as error:
            module.load(write(tmp_path / "rows.jsonl", broken))
        assert "the columns are: " in str(error.value) and "\n" not in str(error.value)
        broken[1] = {**rows[1], column: 1.5}
        with pytest.raises(hub.DataError, match=rf':2: column "{column}" is float 1\.5, expected '):
            module.load(write(tmp_path / "rows.jsonl", broken))


@pytest.mark.parametrize("module", [math, science, knowledge, logic])
@pytest.mark.parametrize("lines, message", [
    ([], "no rows; expected one JSON object a line"), (["", "  "], "no rows"),
    (["{\"question\": \"a\"", "{}"], r"rows\.jsonl:1: not JSON \(.*expected one object a line"),
    (["[1]"], r"rows\.jsonl:1: a list, expected an object"),
    (["", "null"], r"rows\.jsonl:2: a NoneType, expected an object"),
    (['{"colour": 1}'], r'rows\.jsonl:1: no column "[\w ]+" \(found: colour\); the columns are')])
def test_bad_files(module, lines, message, tmp_path):
    with pytest.raises(hub.DataError, match=message):
        module.load(write(tmp_path / "rows.jsonl", lines))


def test_bad_bytes_and_nested_columns(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"problem": "\xff"}\n')
    with pytest.raises(hub.DataError, match=r"rows\.jsonl:1: not JSON .*UTF-8"):
        math.load(str(tmp_path / "rows.jsonl"))
    row = raw("sciknoweval")[0]
    row["choices"] = {"text": ["a", 2], "label": ["A", "B"]}
    with pytest.raises(hub.DataError, match='column "choices" is dict .*expected {text: .str'):
        science.load(write(tmp_path / "rows.jsonl", [row]))


@pytest.mark.parametrize("module", [math, science, knowledge, logic])
@pytest.mark.parametrize("source, message", [
    ("nowhere/rows.jsonl", "nowhere/rows.jsonl: no such file"),
    ("dappo", "dappo: unknown source; give a .jsonl file, a hub id .* dapo, "),
    ("no-such-owner/no-such-set", "no-such-owner/no-such-set .*a local .jsonl file")])
def test_unknown_sources(module, source, message):
    with pytest.raises(hub.DataError, match=message):
        module.load(source)


@pytest.mark.parametrize("name, change, message", [
    ("aime24", {"solution": "204"}, "no gold answer"), ("aime25", {"answer": " "}, "no gold"),
    ("aime25", {"answer": True}, 'column "answer" is bool True'),
    ("gsm8k", {"answer": "no mark"}, "no gold"), ("gsm8k", {"answer": "#### four"}, "no gold"),
    ("dapo", {"prompt": [{"role": "user", "content": "bare"}]}, "not in DAPO's wrapper"),
    ("sdpo_sciknoweval_chemistry", {"answer": "none"}, "expected a letter A..J"),
    ("mmlu_redux_anatomy", {"answer": 4}, "4 options, number 4 right"),
    ("mmlu_redux_anatomy", {"choices": ["x"]}, "1 options"),
    ("zebra_private_mc.shape", {"answer": "tea"}, "none of the choices"),
    ("zebra_private_mc.shape", {"answer": None}, "the public set has no answers"),
    ("zebra_private_grid.shape", {"solution": {"header": ["House", "Name"], "rows": [["1"]]}},
     "2 cells")])
def test_rows_without_a_usable_gold(name, change, message, tmp_path):
    rows = raw(name)
    with pytest.raises(hub.DataError, match=rf"rows\.jsonl:2: .*{message}"):
        SETS[name][0].load(write(tmp_path / "rows.jsonl", [rows[0], {**rows[1], **change}]))


def test_masked_grid_is_refused():
    with pytest.raises(hub.DataError, match="zebra_grid_public.jsonl:1: the solution is masked"):
        logic.load(str(ROWS / "zebra_grid_public.jsonl"))


# ---- contents --------------------------------------------------------------------------------


def test_dapo_wrapper_and_duplicates(tmp_path):
    rows, processed = raw("dapo"), math.load(str(ROWS / "dapo_processed.jsonl"))
    found = math.load(str(ROWS / "dapo.jsonl"))
    # 8 rows: two problems three times each, and a pair that differs in blanks alone
    assert len(rows) == 8 and [row["answer"] for row in found] == ["34", "10", "1440"]
    assert found[:2] == processed[:2]  # both versions of the set give the same rows
    assert found[0]["id"] == rows[0]["extra_info"]["index"]
    assert "Answer:" not in "".join(row["messages"][0]["content"] for row in found)
    assert math.load(str(ROWS / "dapo.jsonl"), limit=2) == found[:2]

    def copy(text, answer):
        return {**raw("dapo_processed")[0], "prompt": text, "solution": answer}

    kept = math.load(write(tmp_path / "rows.jsonl", [
        copy("Solve $x^2-5=0$.", "1"), copy("Solve  $x^2-5=0$. ", "1"),
        copy("Solve $x^2-5=0$.", "2"), copy("solve $ x^{2} - 5 = 0 $", "1"),
        copy("Solve $x^2+5=0$.", "3"), copy("解 $x$", "1")]))
    assert [row["answer"] for row in kept] == ["1", "3", "1"]
    with hub.skipping() as bad:  # a copy that is left out takes no good one with it
        kept = math.load(write(tmp_path / "bad.jsonl", [copy("What?", text) for text in ("", "2")]))
    assert [row["answer"] for row in kept] == ["2"] and len(bad) == 1
    for name in ("dapo_math_17k", "dapo_math_17k_processed_en") if SHARED.exists() else ():
        assert len(math.load(str(SHARED / "math" / f"{name}.sample.jsonl"))) == 24


def test_other_mathematics():
    assert math.load(str(ROWS / "aime24.jsonl"))[0]["answer"] == "204"
    rows = math.load(str(ROWS / "aime25.jsonl"))
    assert rows[0]["answer"] == "70" and rows[0]["id"] == "0"  # an int in the file
    answers = [row["answer"] for row in math.load(str(ROWS / "gsm8k.jsonl"))]
    assert not any("," in answer for answer in answers)
    assert sum(int(answer) >= 1000 for answer in answers) >= 2
    assert sum(answer.startswith("-") for answer in answers) == 2
    raws = raw("math500")
    for row, source in zip(math.load(str(ROWS / "math500.jsonl")), raws, strict=True):
        assert row == {"messages": [{"role": "user", "content": source["problem"] + hub.BOXED}],
                       "answer": source["answer"], "id": source["unique_id"]}


def test_one_loader_takes_folders(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", raw("mmlu_redux_anatomy"))
    rows = knowledge.load(str(tmp_path))
    assert len(rows) == 12 and rows[0]["id"].endswith("a.jsonl:1")


# ---- the hub, played by a function -----------------------------------------------------------


@pytest.fixture
def fake_hub(monkeypatch):
    calls = []

    def give(rows_by_config: dict):
        def load_dataset(hub_id, config, split, revision):
            calls.append((hub_id, config, split, revision))
            return datasets.Dataset.from_list(rows_by_config[config])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(datasets, "get_dataset_config_names",
                            lambda *_, **__: list(rows_by_config))
        return calls
    return give


@pytest.mark.parametrize("source, name, config, split", [
    ("dapo", "dapo", None, "train"),
    ("open-r1/DAPO-Math-17k-Processed", "dapo_processed", "all", "train"),
    ("aime24", "aime24", None, "test"), ("math500", "math500", None, "test"),
    ("gsm8k", "gsm8k", "main", "train"), ("gpqa", "gpqa_diamond.shape", "gpqa_diamond", "train"),
    ("zebra", "zebra_private_mc.shape", "mc_mode", "test"),
    ("zebra_grid", "zebra_private_grid.shape", "grid_mode", "test")])
def test_hub_and_file_give_the_same_rows(source, name, config, split, fake_hub):
    calls = fake_hub({config: raw(name)})
    local, remote = (SETS[name][0].load(s) for s in (str(ROWS / f"{name}.jsonl"), source))
    assert [(row["messages"], row["answer"]) for row in remote] == [
        (row["messages"], row["answer"]) for row in local]
    known = hub.SOURCES.get(source) or next(s for s in hub.SOURCES.values() if s[0] == source)
    assert calls == [(known[0], config, split, known[3])]


def test_hub_split_can_be_named_and_other_columns_stay_there(fake_hub):
    calls = fake_hub({"main": raw("gsm8k")})
    math.load("gsm8k", "test")
    assert calls == [("openai/gsm8k", "main", "test", None)]
    (_, row), *_ = hub.read_rows("gsm8k", {"question": str}, revision="abc", config="main")
    assert list(row) == ["question"] and calls[-1] == ("openai/gsm8k", "main", "train", "abc")
    with pytest.raises(hub.DataError, match=r'gsm8k\[main/train\] row 0: no column "problem"'):
        list(hub.read_rows("gsm8k", {"problem": str}))
    fake_hub({"main": [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": None}]})
    with pytest.raises(hub.DataError, match=r'row 1: column "answer" is NoneType'):
        math.load("gsm8k")


def test_counts_of_the_full_sets_are_asserted(fake_hub):
    fake_hub({None: raw("sciknoweval")})
    with pytest.raises(hub.DataError, match="rows by domain are .*'Chemistry': 4.*expected .*2100"):
        science.load("sciknoweval", "train")
    calls = fake_hub({"anatomy": raw("mmlu_redux_anatomy"), "virology": raw("mmlu_redux_anatomy")})
    with pytest.raises(hub.DataError, match="12 rows with error_type ok, expected 5330"):
        knowledge.load("mmlu_redux")
    assert [call[1] for call in calls[-2:]] == ["anatomy", "virology"]  # all configs


@pytest.mark.skipif(not SHARED.exists(), reason="the full set lies in ../shared")
def test_full_sciknoweval_from_the_hub(fake_hub):
    path = SHARED / "science" / "sciknoweval_test.jsonl"
    fake_hub({None: [json.loads(line) for line in path.open()]})
    official = science.load(str(SHARED / "science" / "sdpo_sciknoweval_chemistry_train.jsonl"))
    rows = science.load("sciknoweval", "train")
    assert [row["messages"] for row in rows] == [row["messages"] for row in official]
    assert len(science.load("sciknoweval:physics", "test")) == 80
    assert len(science.load("sciknoweval:all", "test")) == 50 + 210 + 94 + 80
    with pytest.raises(hub.DataError, match="expected train or test"):
        science.load("sciknoweval:alchemy", "train")


def test_zebra_is_the_first_500_rows(fake_hub):
    rows = raw("zebra_private_mc.shape")
    fake_hub({"mc_mode": [{**rows[i % 3], "id": str(i)} for i in range(600)]})
    assert [row["id"] for row in logic.load("zebra")] == [str(i) for i in range(500)]
    assert len(logic.load("allenai/ZebraLogicBench-private")) == 600


# ---- the tables ------------------------------------------------------------------------------


def test_tables():
    for name, one in BENCHMARKS.items():
        assert one.task in TASKS and one.n > 0 and one.split in ("train", "test"), name
        assert one.domain is None or TASKS[one.domain].TRAIN, name
    trained = {one.domain for one in BENCHMARKS.values() if one.domain}
    assert trained == {"math", "science", "tooluse", "coding"}
    for module in TASKS.values():
        assert len(module.THINK_TAGS) == 2 and all(
            callable(getattr(module, name)) for name in ("load", "score", "render", "tiny"))
    for name, (hub_id, _, split, revision) in hub.SOURCES.items():
        assert "/" in hub_id and split and (revision is None or revision), name
