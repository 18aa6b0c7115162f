"""Tool use: the shared cases, prompts byte for byte, golds of all real rows, BFCL's rule."""
import copy
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import bfcl, hub, tooluse

HERE = Path(__file__).parent
ROWS = HERE / "rows"
SHARED = HERE.parents[1] / "shared" / "data" / "tools"
CASES = [case for case in map(json.loads, (ROWS / "cases.jsonl").open())
         if case["area"] == "tool-call"]
SOURCES = [ROWS / "tooluse.jsonl", ROWS / "toolalpaca_raw.jsonl", ROWS / "bfcl.jsonl"]
SOURCES += [SHARED / name for name in ("tooluse_test.jsonl", "tooluse_train_standin.jsonl",
                                       "bfcl_v4_multiple.jsonl") if SHARED.exists()]
DECIDED = {"T12": 1.0,  # the order of calls does not count
           "T17": 1.0}  # bold labels are labels


def call(name, text):
    return f"Action: {name}\nAction Input: {text}"


def gold(*calls):
    return [{"Action": name, "Action_Input": arguments} for name, arguments in calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.parametrize("as_text", [False, True])
def test_case(case, as_text):
    wanted = gold(*((item["name"], item["args"]) for item in case["input"]["gold"]))
    if as_text:  # the answer as SDPO stores it: JSON in JSON
        wanted = json.dumps([{**item, "Action_Input": json.dumps(item["Action_Input"])}
                             for item in wanted])
    expected = DECIDED[case["id"]] if isinstance(case["expected"], dict) else case["expected"]
    reward, feedback = tooluse.score(case["input"]["response"], wanted)
    assert reward == float(expected) and bool(feedback) == (reward == 0.0)


GET = gold(("get", {"id": 3, "tags": ["a", "b"]}))
PERFECT = call("get", '{"id": 3, "tags": ["a", "b"]}')


@pytest.mark.parametrize("response, reward", [
    (PERFECT, 1), (call("get", '{"id": 3.0, "tags": ["a", "b"]}'), 1),  # one JSON number
    (call("get", '{"id": 3, "tags": ["b", "a"]}'), 0),
    (call("get", '{"id": "3", "tags": ["a", "b"]}'), 0),
    (call("get", '{"id": 3, "tags": ["a", "b"], "x": null}'), 0), (call("get", '{"id": 3}'), 0),
    (call("Get", '{"id": 3, "tags": ["a", "b"]}'), 0), (PERFECT + "\n" + PERFECT, 0),
    (PERFECT + "}", 1), (PERFECT + "\nObservation: {}\nThought: done", 1),
    (PERFECT + "\nAction: get\nAction Input: {broken", 0), (PERFECT + "\nAction: get", 0),
    (PERFECT.replace("\n", "\r\n"), 1), (call("`get`", PERFECT.split(": ", 2)[2]), 1),
    ("Thought: I could use Action: drop, but no.\n" + PERFECT, 1),
    ("<think>" + call("drop", "{}") + "</think>\n" + PERFECT, 1),
    ("<think>" + PERFECT + "</think>\nDone.", 0), (PERFECT + "\n<think>\n", 0),
    (call("get", '[{"id": 3}]'), 0), (call("get", "null"), 0), (call("get", ""), 0),
    ("Action: get\nAction: get\nAction Input: {}", 0), ("", 0), ("\0\ud800", 0),
    (call("get", "{'id': 3, 'tags': ['a', 'b']}"), 0),  # Python, not JSON
    (call("get", '{"id": NaN}'), 0), (call("get", "[" * 100000), 0), (call("get", "{" * 9), 0)])
def test_what_counts_as_a_call(response, reward):
    assert tooluse.score(response, GET)[0] == reward


def test_names_with_dots_dashes_and_brackets():
    for name in ("[Optional]updateUserProfile", "preferred-routes_search_get", "math.hypot", "a b"):
        assert tooluse.score(call(name, "{}"), gold((name, {}))) == (1.0, "")
        assert tooluse.score(call(name[1:], "{}"), gold((name, {})))[0] == 0.0


def test_feedback_says_which_call_and_never_the_gold():
    wanted = gold(("secret_tool", {"city": "Zanzibar"}), ("get", {"id": 1}))
    for response, part in [("hello", "no call"),
                           (call("get", "[1]"), "Call 1 (get): its Action Input is no object"),
                           (call("get", '{"id": 2}'), "Call 1 (get): wrong"),
                           (call("get", '{"id": 1}'), "missing"),
                           (call("other", "{}"), "Call 1 (other)"),
                           (call("get", '{"id": 1}') + "\n" + call("get", "{"), "Call 2 (get)")]:
        reward, feedback = tooluse.score(response, wanted)
        assert reward == 0.0 and part in feedback
        assert "secret_tool" not in feedback and "Zanzibar" not in feedback


@pytest.mark.parametrize("answer", [None, 3, "{", "[]x", [{"Action": "a"}], {"functions": []},
                                    {"functions": [], "ground_truth": [{"get": {}}]}])
def test_a_broken_gold_scores_0_without_an_exception(answer):
    assert tooluse.score(PERFECT, answer)[0] == 0.0


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
                           | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v),
                           max_leaves=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.from_regex(r"[\w.\[\]-]{1,12}", fullmatch=True),
                          st.dictionaries(st.text(), json_values, max_size=3)), min_size=1,
                          max_size=3))
def test_any_gold_rendered_scores_1_and_without_a_call_0(calls):
    calls = [(name, arguments) for name, arguments in calls]
    text = tooluse.render(gold(*calls))
    if "think>" not in text and "reasoning>" not in text:  # tags of reasoning rule everything
        assert tooluse.score(text, gold(*calls)) == (1.0, "")
        assert tooluse.score(tooluse.render(gold(*calls[1:])), gold(*calls))[0] == 0.0


@settings(max_examples=200, deadline=None)
@given(st.text() | st.lists(st.sampled_from(["Action: ", "Action Input: ", "\n", "{", "}", '"',
                                             "get",
                                             '{"id": 3}', "```", "**", "</think>"])).map("".join))
def test_any_text_is_scored(text):
    reward, feedback = tooluse.score(text, GET)
    assert reward in (0.0, 1.0) and (feedback == "") == (reward == 1.0)


def test_time_is_linear_in_the_length():
    for piece in (PERFECT + "\n", "Action: get\n", "Action: get\nAction Input: ", "Action Input: {",
                  " " * 50, "Action: get\nAction Input: {\"a\": \"", "`*_" * 20, "\n> \t" * 20):
        start = time.monotonic()
        tooluse.score(piece * (1000000 // len(piece)), GET)
        assert time.monotonic() - start < 3, piece


# ---- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_golds_rendered_score_1_and_shuffled_0(source):
    """No exceptions in 68 + 110 + 200 rows; SDPO's own scorer rewards nobody on 4072 and 4079."""
    rows = tooluse.load(str(source))
    assert all(tooluse.score(tooluse.render(row["answer"]), row["answer"]) == (1.0,
                                                                               "") for row in rows)
    true_equals = {frozenset(("multiple_108", "multiple_195"))}  # one call serves both
    for n, row in enumerate(rows):
        for other in rows[n + 1:n + 40]:
            if tooluse.score(tooluse.render(other["answer"]), row["answer"])[0]:
                assert (tooluse.render(other["answer"]) == tooluse.render(row["answer"])
                        or {row["id"], other["id"]} in true_equals)


def test_raw_records_give_the_processed_rows_byte_for_byte():
    pairs = [(ROWS / "tooluse.jsonl", ROWS / "toolalpaca_raw.jsonl", 19)]
    if SHARED.exists():
        pairs += [(SHARED / "tooluse_test.jsonl", SHARED / "toolalpaca_eval_simulated.jsonl", 68),
                  (SHARED / "tooluse_train_standin.jsonl", SHARED / "toolalpaca_eval_real.jsonl",
                   110)]
    for processed, raw, count in pairs:
        given, made = tooluse.load(str(processed)), tooluse.load(str(raw))
        assert len(given) == len(made) == count
        assert [row["messages"] for row in given] == [row["messages"] for row in made]
        assert [row["answer"] for row in given] == [row["answer"] for row in made]
        records = [json.loads(line) for line in processed.open()]
        assert [[{"role": "user", "content": record["prompt"]}] for record in records] == [
            row["messages"] for row in given]
        assert [str(record["idx"]) for record in records] == [row["id"] for row in given]


def test_a_raw_training_record(tmp_path):
    record = json.loads((ROWS / "toolalpaca_raw.jsonl").open().readline())
    steps = [[["getRandomAxolotlImage", "{}", "text"], "observation"]]
    record = {key: record[key] for key in ("Name", "Description",
                                           "NLDocumentation")} | {"Instances": [
        {"input": "Show me one.", "output": "..", "intermediate_steps": steps},
        {"input": "No call needed.", "output": "..", "intermediate_steps": []}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    row, = tooluse.load(str(tmp_path / "train.jsonl"))
    assert row["messages"][0]["content"].endswith("\nBegin!\nQuestion: Show me one.")
    assert row["answer"] == '[{"Action": "getRandomAxolotlImage", "Action_Input": "{}"}]'


def test_bfcl_prompt():
    row = tooluse.load(str(ROWS / "bfcl.jsonl"))[0]
    text = row["messages"][0]["content"]
    assert text.startswith("Your task is to answer the user's question using available tools.\nYou")
    assert ('\ntriangle_properties.get: Retrieve the dimensions, such as area and perimeter, of a '
            'triangle if lengths of three sides are given.\nParameters: {"side1": "integer. The '
            'length of first side of the triangle.", ') in text
    assert '"get_area": "boolean (optional). A flag' in text
    assert " - Format: application/json\n\nUse the following format:\nThought: " in text


@pytest.mark.parametrize("lines, part", [
    ([""], "no rows"), (["{"], ":1: not JSON"), (["[1]"], ":1: a list"),
                        (['{"prompt": "p"}'], '"answer"'),
    (['{"prompt": "p", "answer": "[]"}'], ":1: "),
    (['{"prompt": 3, "answer": "[]"}'], '"prompt" is int'),
    (['{"prompt": "p", "answer": "[{\\"Action\\": \\"a\\", \\"Action_Input\\": \\"{}\\"}]"}',
      "{}"], ":2: "),
    (['{"prompt": "p", "answer": "[{\\"Action\\": \\"a\\"}]"}'], ":1: KeyError")])
def test_broken_rows_are_named_by_file_and_line(tmp_path, lines, part):
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(hub.DataError, match="rows.jsonl") as error:
        tooluse.load(str(tmp_path / "rows.jsonl"))
    assert part in str(error.value) and "\n" not in str(error.value)


def test_bfcl_without_its_answers_is_refused(tmp_path):
    (tmp_path / "q.jsonl").write_bytes((ROWS / "bfcl.jsonl").read_bytes())
    with pytest.raises(hub.DataError, match="possible_answer"):
        tooluse.load(str(tmp_path / "q.jsonl"))
    answers = (ROWS / "bfcl_possible_answer.jsonl").read_text().splitlines()
    (tmp_path / "q_possible_answer.jsonl").write_text("\n".join(answers[:-1]))  # one is missing
    with pytest.raises(hub.DataError, match="q.jsonl:10: KeyError.*multiple_195"):
        tooluse.load(str(tmp_path / "q.jsonl"))


# ---- BFCL's rule (no difference to bfcl-eval's own checker on 180,000 mutated calls) ----------

SCHEMA = [{"name": "f", "description": "", "parameters": {"required": ["n"], "properties": {
    "n": {"type": "integer"}, "x": {"type": "float"}, "s": {"type": "string"},
    "b": {"type": "boolean"},
    "l": {"type": "array", "items": {"type": "float"}}, "t": {"type": "array",
                                                              "items": {"type": "string"}},
    "d": {"type": "dict"}, "ds": {"type": "array", "items": {"type": "dict"}},
    "v": {"type": "integer"}}}}]
ALLOWED = {"n": [1, 2], "x": [2.0, 2.5, ""], "s": ["New York, NY", "NYC", ""], "b": [True, ""],
           "l": [[1.0, 2.0], ""], "t": [["a b", "C"], ""], "d": [{"k": [5, 6], "o": [7, ""]}, ""],
           "ds": [[{"k": ["v"]}, {"k": ["w"]}], ""], "v": ["variable", ""]}


@pytest.mark.parametrize("arguments, right", [
    ({"n": 1}, 1), ({"n": 2}, 1), ({"n": 3}, 0), ({"n": 1.0}, 0), ({"n": True}, 0),
    ({"n": "1"}, 0), ({}, 0),
    ({"n": 1, "x": 2}, 1), ({"n": 1, "x": 2.5}, 1), ({"n": 1, "x": 3.0}, 0),
    ({"n": 1, "x": "2.5"}, 0),
    ({"n": 1, "s": "new-york NY"}, 1), ({"n": 1, "s": "nyc."}, 1), ({"n": 1, "s": "York"}, 0),
    ({"n": 1, "b": True}, 1), ({"n": 1, "b": False}, 0), ({"n": 1, "b": 1}, 0),
    ({"n": 1, "b": "true"}, 0),
    ({"n": 1, "l": [1.0, 2.0]}, 1), ({"n": 1, "l": [2.0, 1.0]}, 0), ({"n": 1, "l": [1.0]}, 0),
    ({"n": 1, "t": ["A, B", "c"]}, 1), ({"n": 1, "t": ["c", "a b"]}, 0), ({"n": 1, "t": []}, 1),
    ({"n": 1, "d": {"k": 5}}, 1), ({"n": 1, "d": {"k": 6, "o": 7}}, 1),
    ({"n": 1, "d": {"o": 7}}, 0),
    ({"n": 1, "d": {"k": 5, "z": 1}}, 0), ({"n": 1, "d": {"k": True}}, 0), ({"n": 1, "d": 5}, 0),
    ({"n": 1, "ds": [{"k": "V"}, {"k": "w"}]}, 1), ({"n": 1, "ds": [{"k": "w"}, {"k": "v"}]}, 0),
    ({"n": 1, "ds": [{"k": "v"}]}, 0), ({"n": 1, "ds": [1, 2]}, 0), ({"n": 1, "v": "variable"}, 1),
    ({"n": 1, "v": 3}, 0), ({"n": 1, "z": 1}, 0)])
def test_bfcl_rule(arguments, right):
    answer = {"functions": SCHEMA, "ground_truth": [{"f": ALLOWED}]}
    reward, feedback = tooluse.score(call("f", json.dumps(arguments)), answer)
    assert reward == right and "could not" not in feedback
    assert bfcl.fault(answer, "g", arguments) != ""


def test_bfcl_wants_one_call_and_parameters_that_may_not_be_left_out():
    answer = {"functions": SCHEMA, "ground_truth": [{"f": ALLOWED}]}
    assert tooluse.score(call("f", '{"n": 1}') + "\n" + call("f", '{"n": 1}'), answer)[0] == 0.0
    strict = copy.deepcopy(answer)
    strict["ground_truth"][0]["f"]["b"] = [True]  # optional by the schema, needed by the question
    assert tooluse.score(call("f", '{"n": 1}'), strict)[0] == 0.0
    assert tooluse.score(call("f", '{"n": 1, "b": true}'), strict)[0] == 1.0
    strict["ground_truth"][0]["f"] = {"n": [1], "l": [[1.0, 2.0]]}  # floats, and not integers
    assert tooluse.score(call("f", '{"n": 1, "l": [1.0, 2.0]}'), strict)[0] == 1.0
    assert tooluse.score(call("f", '{"n": 1, "l": [1, 2]}'), strict)[0] == 0.0
    strict["ground_truth"][0]["f"] = {"n": [1, ""]}  # required by the schema
    assert tooluse.score(call("f", "{}"), strict)[0] == 0.0
