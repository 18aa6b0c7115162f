"""Multiple choice and grids: science, knowledge (MMLU-Redux, GPQA), logic; cases and all rows."""
import json
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import choice, hub, knowledge, logic, math, science

HERE = Path(__file__).parent
ROWS = HERE / "rows"
SHARED = HERE.parents[1] / "shared" / "data"
CASES = {case["id"]: case for case in map(json.loads, (ROWS / "cases.jsonl").open())}
DOMAINS = ["biology", "chemistry", "material", "physics"]
full_sets = pytest.mark.skipif(not SHARED.exists(), reason="the full sets lie in ../shared")


def local(folder: str, name: str) -> str:
    return str(SHARED / folder / name if SHARED.exists() else ROWS / name)


# ---- the shared cases ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case["area"] == "mcq"])
def test_case(name):
    case = CASES[name]
    response, gold = case["input"]["response"], case["input"]["gold"]
    reward, feedback = science.score(response, gold)
    assert reward == float(case["expected"]) and bool(feedback) == (reward == 0.0)
    # the same content in a box, for the domains that ask for a box
    if response.startswith("<answer>"):
        boxed = response.replace("<answer>", "\\boxed{").replace("</answer>", "}")
        assert knowledge.score(boxed, gold)[0] == logic.score(boxed, gold)[0] == reward


@pytest.mark.parametrize("name, other", [("Q10", "A"), ("Q12", "S"), ("Q14", "A"), ("Q11", "E")])
def test_case_other_gold(name, other):
    assert science.score(CASES[name]["input"]["response"], other)[0] == 0.0


def test_case_M80():
    response = CASES["M80"]["input"]["response"]
    for score in (knowledge.score, logic.score, math.score):
        assert score(response, "A")[0] == 0.0
    assert knowledge.score(response, "D") == (1.0, "")


LETTERS = {"A": "A", "j": "J", "(c)": "C", "**B**": "B", "$D$": "D", "B.": "B", "[E]": "E",
           "I": "I", "\\textbf{(B)}": "B", "\\text{A}": "A", "\n D \n": "D", "B) text": "B",
           "b: text": "B", "C - text": "C", "A: B is wrong": "A", "B, since A fails": "B",
           "J because": "J"}
NO_LETTERS = ["", "A car", "I think", "a car", "Apple", "A or B", "(A) and (B)", "A) or B)", "B, C",
              "B and C", "B or C", "not B", "AB", "K", "1", "The answer", "e.g. this", "Both",
              "\\text{none}", "b because", "A because it is B", "\u0410"]  # a Cyrillic A


def test_letter_of():
    assert {text: choice.letter_of(text) for text in LETTERS} == LETTERS
    assert [text for text in NO_LETTERS if choice.letter_of(text)] == []


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_gets_a_reward(text):
    assert choice.letter_of(text) in {None, *"ABCDEFGHIJ"}
    for module, answer in (science, "A"), (knowledge, "B"), (logic, "C"), (logic, {"House 1": {}}):
        for response in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}",
                         f"{{\"House 1\": {text}}}"):
            reward, feedback = module.score(response, answer)
            assert reward in (0.0, 1.0) and bool(feedback) == (reward == 0.0)


def test_science_answers_are_in_the_last_closed_tag_after_the_reasoning():
    assert science.score("<answer>A</answer> no: <answer>B</answer>", "B") == (1.0, "")
    assert science.score("<reasoning>x</reasoning>\n<answer>\nB\n</answer>", "B") == (1.0, "")
    for response in ("B", "\\boxed{B}", "<answer>B", "<answer>B.", "B</answer>",
                     "<answer>A</answer><answer>B",
                     "<reasoning> <answer>B</answer>", "<answer>B</answer><think>so</think>", "",
                     "</answer>B<answer>", "<answer></answer>"):
        assert science.score(response, "B")[0] == 0.0
    feedback = {science.score(r, "B")[1] for r in ("<reasoning> x", "B", "<answer>AC</answer>",
                                                   "<answer>A</answer>")}
    assert len(feedback) == 4  # each says what kind of mistake it was


# ---- rows ------------------------------------------------------------------------------------


def check(module, rows: list[dict]) -> None:
    """Golds score 1.0 as rendered; those of the next row only where they are the same letter."""
    assert rows and len({row["id"] for row in rows}) == len(rows)
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        assert module.score(module.render(row["answer"]), row["answer"]) == (1.0, "")
        reward, feedback = module.score(module.render(other["answer"]), row["answer"])
        assert reward == float(row["answer"] == other["answer"])
        assert "\n" not in feedback and not any(w in "ABCDEFGHIJ" for w in feedback.split())


@full_sets
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_science_split_and_prompts_are_the_authors_own(domain, split):
    """From the hub's columns: the rows of SDPO's file, in its order, byte for byte."""
    official = science.load(local("science", f"sdpo_sciknoweval_{domain}_{split}.jsonl"))
    pool = list(hub.read_rows(local("science", "sciknoweval_test.jsonl"), science.HUB))
    pool = [item for item in pool if science.is_used(item[1])]
    assert Counter(row["domain"] for _, row in pool) == science.COUNTS
    ours = science._split(pool, domain.capitalize(), split, "local")
    assert [(r["messages"], r["answer"]) for r in ours] == [(r["messages"], r["answer"])
                                                            for r in official]
    check(science, official)
    check(science, ours)


def test_science_rows():
    path = str(ROWS / "sciknoweval.jsonl")  # 10 rows: other levels, types and domains among them
    chemistry = [science.load(path, split) for split in ("train", "test")]
    assert [len(part) for part in chemistry] == [3, 1]
    ours = {row["messages"][1]["content"]: row for row in chemistry[0] + chemistry[1]}
    sdpo = science.load(str(ROWS / "sdpo_sciknoweval_chemistry.jsonl"))
    assert len(sdpo) == 4 and {row["messages"][1]["content"] for row in sdpo} == set(ours)
    for row in sdpo:
        mine = ours[row["messages"][1]["content"]]
        assert (row["messages"], row["answer"]) == (mine["messages"], mine["answer"])
    assert science.load(path, "train", limit=2) == chemistry[0][:2]
    check(science, sdpo)


def test_knowledge_rows():
    folder = SHARED / "knowledge" / "mmlu_redux_2"
    if folder.exists():
        rows = knowledge.load(str(folder))
        assert len(rows) == knowledge.OK_ROWS
        check(knowledge, rows)
    rows = knowledge.load(str(ROWS / "mmlu_redux_anatomy.jsonl"))
    raw = [json.loads(line) for line in (ROWS / "mmlu_redux_anatomy.jsonl").open()]
    raw = [row for row in raw if row["error_type"] == "ok"]
    assert len(rows) == len(raw) == 6
    for row, source in zip(rows, raw, strict=True):
        lines = row["messages"][0]["content"].split("\n")
        assert lines[-1] == hub.BOXED.strip() and lines[0] == source["question"]
        right = source["choices"][source["answer"]]
        assert f"{row['answer']}. {right}" in lines
    check(knowledge, rows)


def test_gpqa_options_are_shuffled_by_row():
    path = ROWS / "gpqa_diamond.shape.jsonl"
    rows, raw = knowledge.load(str(path)), list(map(json.loads, path.read_text().splitlines()))
    assert rows == knowledge.load(str(path)) and len(rows) == 3
    for row, source in zip(rows, raw, strict=True):
        lines = row["messages"][0]["content"].split("\n")
        assert f"{row['answer']}. {source['Correct Answer']}" in lines
        for i in (1, 2, 3):
            assert any(line[1:] == f". {source[f'Incorrect Answer {i}']}" for line in lines)
    assert len({row["answer"] for row in rows}) > 1
    check(knowledge, rows)


def test_logic_choice_rows():
    rows = logic.load(str(ROWS / "zebra_private_mc.shape.jsonl"))
    assert rows[0]["answer"] == "A" and "A. cocoa\nB. lemonade" in rows[0]["messages"][0]["content"]
    check(logic, rows)


def test_logic_grid_rows():
    rows = logic.load(str(ROWS / "zebra_private_grid.shape.jsonl"))
    grid = rows[0]["answer"]
    assert grid == {"House 1": {"Name": "Mira", "Drink": "lemonade"},
                    "House 2": {"Name": "Otto", "Drink": "cocoa"}}
    assert '"Name": "___"' in rows[0]["messages"][0]["content"]
    for row in rows:
        assert logic.score(logic.render(row["answer"]), row["answer"]) == (1.0, "")
        for house, line in row["answer"].items():
            for name in line:
                wrong = json.loads(json.dumps(row["answer"]))
                wrong[house][name] = "nobody"
                reward, feedback = logic.score(logic.render(wrong), row["answer"])
                assert reward == 0.0 and feedback.startswith("1 cell")
                del wrong[house][name]
                assert logic.score(json.dumps(wrong), row["answer"])[0] == 0.0
            del wrong[house]
            assert logic.score(json.dumps(wrong), row["answer"])[0] == 0.0
    good, bad = json.dumps({"solution": grid}).upper(), json.dumps({"House 1": {}})
    good = good.replace("SOLUTION", "solution").replace("HOUSE", "House")
    good = good.replace("NAME", "Name").replace("DRINK", "Drink")
    assert logic.score(f"{bad} then ```json\n{good}\n```", grid)[0] == 1.0  # last one, any case
    assert logic.score(f"{good} then {bad}", grid)[0] == 0.0
    assert logic.score(f"<think>{good}</think> {bad}", grid)[0] == 0.0
    assert logic.score(f"<think>{good}", grid)[0] == 0.0
    assert logic.score(f"{good} then {{\"House 1\": ", grid)[0] == 1.0  # the last complete one
    start = time.monotonic()
    assert logic.score('{"House 1":' * 20_000, grid)[0] == 0.0
    assert time.monotonic() - start < 1
