"""Coding: rows and prompts, safe decoding, what counts as a program, how tests are judged."""
import base64
import json
import pickle
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data import coding, coding_judge, hub, sandbox

HERE = Path(__file__).parent
ROWS = HERE / "rows"
SHARED = HERE.parents[1] / "shared" / "data" / "code"
SUM = {"tests": [{"input": "3\n1 2 3\n", "output": "6\n"}, {"input": "1\n4\n", "output": "4"}]}
SUM_CODE = "input(); print(sum(map(int, input().split())))"


def local(shared: str, name: str) -> str:
    return str(SHARED / shared if SHARED.exists() else ROWS / name)


def fence(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nDone."


@pytest.fixture
def runs(monkeypatch):
    """The programs that really ran."""
    programs = []

    def counted(program, *args, **limits):
        programs.append(program)
        return real(program, *args, **limits)

    real = sandbox.run
    monkeypatch.setattr(sandbox, "run", counted)
    coding_judge._verdicts.clear()
    return programs


# ---- rows ------------------------------------------------------------------------------------


def test_dolci_rows_and_its_held_out_split(monkeypatch):
    rows = coding.load(local("dolci_think_rl_7b.shape.jsonl", "dolci.jsonl"))
    assert [row["messages"][0]["content"][:14] for row in rows] == [
        "Write a Python", "sum the number", "Reverse the gi"]  # lstrip would eat "su"
    assert rows[0]["answer"]["asserts"][0] == "assert add_pair([1, 2]) == 3"
    assert rows[1]["answer"] == {"tests": [{"input": "3\n1 2 3\n", "output": "6"},
                                           {"input": "1\n-5\n", "output": "-5"}]}
    record = json.loads((ROWS / "dolci.jsonl").open().readline())
    many = [("hub", {**record, "prompt": f"user: {n}", "custom_id": str(n)}) for n in range(2000)]
    monkeypatch.setattr(hub, "read_rows", lambda *_: iter(many))
    train, test = ({row["id"] for row in coding.load("dolci", split)} for split in ("train",
                                                                                    "test"))
    assert not train & test and len(train | test) == 2000 and 20 <= len(test) <= 60
    assert len(coding.load("dolci", "train", limit=7)) == 7


def test_livecodebench_rows(monkeypatch):
    path = local("lcb_code_generation_lite.sample.jsonl", "lcb.jsonl")
    rows = coding.load(path, limit=4)
    texts = [row["messages"][0]["content"] for row in rows]
    statement = json.loads((ROWS / "lcb.jsonl").open().readline())["question_content"]
    assert texts[0] == (
        "You are a coding expert. You will be given a coding problem, and you need to write a "
        "correct Python program that matches the specification and passes all tests. The time "
        "limit is 1 second. You may start by outlining your thought process. In the end, please "
        f"provide the complete code in a code block enclosed with ``` ```.\n\n{statement}")
    assert texts[3].endswith(
        "return nums with every value multiplied by k.\n\nYour solution should have the following "
        "signature: ```python\ndef scale(nums: List[int], k: int) -> List[int]:\n```")
    assert [len(row["answer"]["tests"]) for row in rows] == [5, 3, 3, 2]  # public and private
    assert [row["answer"].get("fn_name") for row in rows] == [None, None, "secondLargest", "scale"]
    records = [("hub", json.loads(line)) for line in (ROWS / "lcb.jsonl").open()][:4]
    monkeypatch.setattr(hub, "read_rows", lambda *_: iter(records))
    assert [row["id"] for row in coding.load("lcb", "test")] == [rows[1]["id"], rows[2]["id"]]
    assert [row["id"] for row in coding.load("lcb", "train")] == [rows[0]["id"], rows[3]["id"]]


def test_a_pickle_that_names_anything_is_refused_and_not_run(tmp_path, monkeypatch):
    class Touch:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    def pack(value, protocol):
        return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()

    for protocol in range(6):
        assert coding.decode_tests(pack([{"input": "1"}], protocol)) == [{"input": "1"}]
        assert coding.decode_tests(pack('[{"input": "1"}]', protocol)) == [{"input": "1"}]
        for hostile in ([Touch()], [print], [{"input": Touch()}]):
            with pytest.raises(pickle.UnpicklingError):
                coding.decode_tests(pack(hostile, protocol))
    assert not (tmp_path / "touched").exists()
    monkeypatch.setattr(coding, "LARGEST", 1 << 20)
    bomb = zlib.compress(bytes(2 << 20))
    with pytest.raises(ValueError, match="too large"):
        coding.decode_tests(base64.b64encode(bomb).decode())
    with pytest.raises(hub.DataError, match=r"lcb.*jsonl:5: UnpicklingError.*names builtins.len"):
        coding.load(local("lcb_code_generation_lite.sample.jsonl", "lcb.jsonl"))


@pytest.mark.parametrize("change, part", [
    ({"private_test_cases": "eJx!"}, ":2: Error"), ({"private_test_cases": ""}, ":2: "),
    ({"private_test_cases": "[]"}, "no list of tests"),
    ({"public_test_cases": "[{}]"}, ":2: KeyError"),
    ({"question_content": 3}, '"question_content" is int'), ({"metadata": None}, '"metadata" is'),
    ({"public_test_cases": '[{"input": 1, "output": "", "testtype": "stdin"}]'}, ":2: TypeError")])
def test_broken_rows_are_named_by_file_and_line(tmp_path, change, part):
    good = (ROWS / "lcb.jsonl").read_text().splitlines()[0]
    broken = json.dumps(json.loads(good) | change)
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{broken}\n")
    with pytest.raises(hub.DataError, match="rows.jsonl:2: ") as error:
        coding.load(str(tmp_path / "rows.jsonl"))
    assert part in str(error.value) and "\n" not in str(error.value)


def test_mbpp_splits_and_prompt():
    rows = {split: coding.load(local("mbpp.jsonl", "mbpp.jsonl"), split)
            for split in (None, "train", "test", "validation", "prompt")}
    ids = {split: {int(row["id"]) for row in part} for split, part in rows.items()}
    assert all(601 <= n <= 974 for n in ids["train"]) and all(11 <= n <= 510 for n in ids["test"])
    assert ids[None] == ids["train"] | ids["test"] | ids["validation"] | ids["prompt"]
    if SHARED.exists():
        assert [len(part) for part in rows.values()] == [974, 374, 500, 90, 10]
    assert rows[None][0]["messages"][0]["content"].endswith(
        "\n\nWrite a function to find the minimum cost path to reach (m, n) from (0, 0) for the "
        "given cost matrix cost[][] and a position (m, n) in cost[][].\n\n"
        "Your code should pass this test:\n"
        "assert min_cost([[1, 2, 3], [4, 8, 2], [1, 5, 3]], 2, 2) == 8")


# All 974 + 164 golds were run once (see the report of issue A): exceptions by the clock only.
@pytest.mark.parametrize("name", ["mbpp.jsonl", "humaneval.jsonl", "lcb.jsonl", "dolci.jsonl"])
def test_golds_rendered_score_1_and_shuffled_0(name):
    rows = [row for row in coding.load(str(ROWS / name), limit=4 if name == "lcb.jsonl" else None)
            if "solution" in row["answer"] or "tests" in row["answer"]]
    assert len(rows) >= 2
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda row: coding.score(coding.render(row["answer"]),
                                                          row["answer"]), rows))
        assert [(row["id"], verdict) for row, verdict in zip(rows, verdicts, strict=True)
                if verdict != (1.0, "")] == []
        others = rows[1:9] + rows[:1]
        shuffled = list(pool.map(lambda row, other: coding.score(
            coding.render(other["answer"]), row["answer"])[0], rows[:9], others))
    assert shuffled == [0.0] * len(shuffled)


def test_asserts_without_a_reference_cannot_be_rendered():
    with pytest.raises(ValueError, match="no perfect response"):
        coding.render({"asserts": ["assert f(1) == 2"]})


# ---- the program in a response ---------------------------------------------------------------


@pytest.mark.parametrize("response, program", [
    (fence("a"), "a"), ("```\na\n```\ntext\n```py\nb\n```", "b"), ("```python\na\nb", "a\nb"),
    ("a = 1\n", "a = 1\n"), ("```python\n```", ""), ("```a\n1\n```\n```\n \n```", "1"),
    ("```python\ns = '```'\n```", "s = '```'"), ("  ```python\n  a\n  ```", "  a"),
    ("<think>```\na\n```</think>```\nb\n```", "b"), ("<think>```\na\n```", ""), ("", ""),
    ("```python\na\n```python\nb\n```", "b"), ("x\r\n```python\r\na\r\n```\r\n", "a\r")])
def test_extract(response, program):
    assert coding.extract(response) == program


# ---- judging ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code, reward", [
    (SUM_CODE, 1), ("print(6)", 0), ("input(); print(sum(map(int, input().split())), end='')", 1),
    ("input(); print(f'  {sum(map(int, input().split()))}.0 \\n\\n')", 1),  # the same number
    (SUM_CODE + "\nprint()\nprint()", 1), (SUM_CODE + "\nprint(1)", 0), (SUM_CODE + "\n1/0", 0),
    (SUM_CODE + "\nimport os; os._exit(1)", 0), ("", 0), ("import os; os._exit(0)", 0),
    ("from __future__ import annotations\ndef f(x: List[int]): pass\n" + SUM_CODE, 1),
    ("x = Counter(); d = deque(); y = sqrt(4)\n" + SUM_CODE, 1)])  # LiveCodeBench's imports
def test_stdin(code, reward):
    verdict, feedback = coding.score(fence(code), SUM)
    assert verdict == reward and bool(feedback) == (reward == 0)


@pytest.mark.parametrize("got, wanted, same", [
    ("1\n2", "1\n2\n", 1), ("1 2", "1  2", 1), ("a b", "a  b", 0), ("1\n\n2", "1\n2", 0),
    ("1.50", "1.5", 1),
    ("nan", "nan", 1), ("nan", "sNaN", 0), ("0.333", "0.3333", 0), ("1e999999999", "1", 0),
    ("YES", "yes", 0),
    ("", "", 1), ("x", "", 0), (" a \r\n", "a", 1), ("1", "1\n1", 0)])
def test_output_is_compared_by_lines(got, wanted, same):
    assert coding_judge.same_output(got, wanted) == bool(same)


def test_stdin_stops_at_the_first_failure(runs):
    feedback = coding.score(fence("print(6)"), {"tests": SUM["tests"][::-1] * 3})[1]
    assert feedback.startswith("Test 1 of 6")
    assert len(runs) == 1


FUNCTION = {"fn_name": "f", "tests": [{"input": "[1, 2]\n3", "output": "[3, 6]"},
                                      {"input": "[]\n9", "output": "[]"}]}


@pytest.mark.parametrize("code, reward", [
    ("def f(a, k): return [x * k for x in a]", 1),
    ("def f(a, k): return tuple(x * k for x in a)", 1),
    ("class Solution:\n    def f(self, a: List[int], k) -> List[int]: return [x * k for x in a]",
     1),
    ("def f(a, k): print('noise', flush=True); return [x * k for x in a]", 1),
    ("def f(a, k): return [3, 6]", 0),
    ("def f(a): return a", 0), ("def g(): pass", 0), ("def f(a, k): raise SystemExit", 0),
    ("def f(a, k): return {3: 6}", 0), ("if __name__ == '__main__': input()\ndef f(a, k): "
                                        "return [x * k for x in a]", 1)])
def test_functions_run_in_one_child(code, reward, runs):
    assert coding.score(fence(code), FUNCTION)[0] == reward and len(runs) == 1


EQUAL_TO_ALL = ("class E:\n    def __eq__(self, o): return True\n"
                "    __ne__ = __lt__ = __gt__ = __eq__\n"
                "    def __hash__(self): return 0\n")


@pytest.mark.parametrize("code, reward", [
    ("def f(x): return x + 1", 1), ("def f(x): return 2 if x == 1 else 0", 0),
    (EQUAL_TO_ALL + "def f(x): return E()", 0),
    (EQUAL_TO_ALL + "class I(int):\n    __eq__ = E.__eq__\n    __hash__ = int.__hash__\n"
     "def f(x): return I(0)", 0),
    (EQUAL_TO_ALL + "class L(list):\n    __eq__ = E.__eq__\ndef f(x): return L()", 0),
    ("def f(x): import os; os._exit(0)", 0), ("import sys; sys.exit(0)", 0),
    ("def f(x): raise SystemExit", 0),
    ("import json\njson.dumps = lambda *a: '[6, null]'\ndef f(x): return 0", 0),
    ("import os\nfor n in range(3, 9):\n    try: os.write(n, b'[2, null]\\n' * 9)\n"
     "    except OSError: pass\ndef f(x): return 0", 0),
    ("import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.isinstance = lambda *a: True\n"
     "def f(x): return 0", 0),
    ("import sys\nsys.settrace(None)\ndef f(x):\n    import inspect\n    return inspect.stack()",
     0),
    ("def f(x): return " + "[" * 50 + "]" * 50, 0),
    ("def f(x):\n    a = []\n    a.append(a)\n    return a", 0)])
def test_a_program_cannot_tell_the_judge_that_it_passed(code, reward):
    answer = {"asserts": ["assert f(1) == 2", "assert f(2) == 3"]}
    verdict, feedback = coding.score(fence(code), answer)
    assert verdict == reward and bool(feedback) == (reward == 0)


@pytest.mark.parametrize("form", [
    "abs(f({0}) - {1}) < 1e-6", "f({0}) == int('{1}')", "round(f({0}), 3) == {1} and True",
    "isinstance(f({0}), int) and f({0}) in [{1}]", "(f({0}) == {1}) == True",
    "f({0}) - {1} == 0", "math.isclose(f({0}), {1})",
    "len([x for x in [f({0})] if x == {1}]) == 1"])
@pytest.mark.parametrize("code, reward", [
    ("def f(x): return x + 1", 1), ("def f(x): return 0", 0),
    ("class E(float):\n    def __eq__(self, o): return True\n    __lt__ = __eq__\n"
     "    def __sub__(self, o): return 0.0\n    __hash__ = float.__hash__\n"
     "def f(x): return E()", 0),
    ("def abs(x): return 0\ndef round(*a): return 3\nisinstance = isclose = abs\n"
     "def f(x): return 0", 0),
    ("import os\nfor n in range(3, 9):\n    try: os.write(n, b'[true, null]\\n' * 9)\n"
     "    except OSError: pass\ndef f(x): return 0", 0)])
def test_an_assert_of_another_form_is_worked_out_without_the_program(code, reward, form):
    answer = {"asserts": [f"assert {form.format(1, 2)}", f"assert {form.format(7, 8)}"]}
    assert coding.score(fence(code), answer)[0] == reward


def test_a_result_whose_keys_collide_is_not_built():
    code = "def f(x):\n    return {n * (2**61 - 1): 0 for n in range(3000)}"
    assert coding.score(fence(code), {"asserts": ["assert f(1) == {}"]})[0] == 0.0
    start = time.monotonic()
    line = json.dumps([{"set": [{"int": hex(n * (2**61 - 1))} for n in range(100_000)]}, None])
    assert coding_judge._result(line)[1] and time.monotonic() - start < 5


@pytest.mark.parametrize("text, result, right", [
    ("assert f() == (1, 2)", "(1, 2)", 1), ("assert f() == [1, 2]", "(1, 2)", 0),
    ("assert f() == {1, 2}", "{2, 1}", 1),
    ("assert f() == {'a': (1,)}", "__import__('collections').OrderedDict(a=(1,))", 1),
    ("assert f() == 2.5", "5 / 2", 1),
    ("assert f() == b'x'", "b'x'", 1), ("assert f() == 1j", "1j", 1),
    ("assert f() == 10**30", "10**30", 1),
    ("assert f() == 1000000000000000000000", "10**21", 1),
    ("assert f() == {1: {2: [3]}}", "{1: {2: [3]}}", 1),
    ("assert f() == frozenset({1})", "frozenset({1})", 1), ("assert f() == set()", "set()", 1),
    ("assert f() == 'é\\n'", "'é\\n'", 1),
    ("assert f() is None", "None", 1), ("assert f() is None", "0", 0),
    ("assert f() is True", "1", 0), ("assert f() == True", "1", 1),
    ("assert f() != 3", "4", 1), ("assert f() < 3", "4", 0), ("assert f() < 3", "'a'", 0),
    ("assert f() > 3", "4", 1),
    ("assert abs(f() - 2.5) < 1e-6", "2.5", 1), ("assert abs(f() - 2.5) < 1e-6", "2.6", 0),
    ("assert f()", "[1]", 1),
    ("assert f()", "[]", 0), ("assert not f()", "[]", 1), ("assert not f()", "[1]", 0),
    ("assert f() == 1, 'text'", "1", 1),
    ("assert f() == f()", "1", 1), ("assert f() in (1, 2)", "3", 0),
    ("assert f() in (1, 2)", "2", 1), ("assert 1 == f() == 1", "1", 1),
    ("x = f()\nassert x == 1", "1", 1), ("x = f()\nassert x == 1", "2", 0),
    ("assert f() == float('inf')", "1e999", 1)])
def test_asserts(text, result, right):
    assert coding.score(fence(f"def f(): return {result}"), {"asserts": [text]})[0] == right


def test_expected_values_never_reach_the_child(runs):
    coding.score(fence(SUM_CODE), {"tests": [{"input": "1\n4\n", "output": "4"}]})
    coding.score(fence("def f(a, k): return a"), {"fn_name": "f", "tests": [
        {"input": "[1]\n2", "output": "[31337]"}]})
    coding.score(fence("def f(x): return x"), {"asserts": [
        "assert f(1) == 31337", "assert f(2) is not 31337", "assert abs(f(3)) < 31337"]})
    assert len(runs) == 3 and not any("31337" in program for program in runs)


def test_feedback_names_the_test_and_never_the_gold():
    for answer, code, part in [
            ({"asserts": ["assert f(1) == 1", "assert f(2) == 31337"]}, "def f(x): return x",
             "Test 2 of 2"),
            ({"asserts": ["assert f(1) == 31337 - 0, 'say 31337'"]}, "def f(x): return x",
             "wrong result"),
            ({"asserts": ["assert f(1) == 31337 + g(0)"]}, "def f(x): return x\ng = f",
             "AssertionError"),
            ({"asserts": ["assert f(1) == g(31337)"]}, "def f(x): raise ValueError(31337)",
             "ValueError"),
            ({"tests": [{"input": "1", "output": "31337"}]}, "print(1)", "wrong output"),
            ({"tests": [{"input": "1", "output": "31337"}]}, "def f(:", "SyntaxError"),
            ({"tests": [{"input": "1", "output": "31337"}]}, "{}['k']", "KeyError: 'k'"),
            ({"fn_name": "f", "tests": [{"input": "1", "output": "31337"}]}, "f = 1", "TypeError"),
            ({"asserts": ["assert f() == 31337"]}, "import os; os._exit(0)", "ended before")]:
        reward, feedback = coding.score(fence(code), answer)
        assert reward == 0.0 and part in feedback and "31337" not in feedback


def test_setup_runs_after_and_prelude_before_the_program():
    answer = {"asserts": ["assert f(root) == 3"], "setup": "root = Node(3)", "prelude": "K = 1"}
    code = "class Node:\n    def __init__(self, v): self.v = v * K\ndef f(n): return n.v"
    assert coding.score(fence(code), answer) == (1.0, "")


def test_equal_programs_run_once_but_not_after_a_timeout(runs, monkeypatch):
    monkeypatch.setattr(coding_judge, "SECONDS", 1.0)
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: coding.score(fence(SUM_CODE), SUM), range(16))) == {(1.0, "")}
    assert coding.score(fence(SUM_CODE), SUM) == (1.0, "") and len(runs) == 2  # two tests
    assert coding.score(fence(SUM_CODE), {"tests": SUM["tests"][:1]})[0] == 1.0 and len(runs) == 3
    for count in (4, 5):
        assert "time limit" in coding.score(fence("while True: pass"),
                                            SUM)[1] and len(runs) == count
    monkeypatch.setattr(coding_judge, "CACHED", 2)
    for n in range(5):
        coding.score(fence(f"print({n})"), SUM)
    assert len(coding_judge._verdicts) == 2


@pytest.mark.parametrize("answer", [None, 3, "{", [], {}, {"tests": [{}]}, {"tests": []},
                                    {"asserts": []}, {"asserts": ["("]},
                                    {"tests": [], "fn_name": 3}, {"fn_name": "f", "tests": [
                                        {"input": "{", "output": "1"}]}])
def test_a_broken_answer_scores_0_without_an_exception(answer):
    assert coding.score(fence("print(1)"), answer)[0] == 0.0


def test_all_tests_of_a_program_end_in_a_bounded_time(monkeypatch):
    monkeypatch.setattr(coding_judge, "TOTAL_SECONDS", 1.5)
    slow = {"tests": [{"input": "", "output": "1"}] * 50}
    start = time.monotonic()
    reward, feedback = coding.score(fence("import time; time.sleep(0.4); print(1)"), slow)
    assert reward == 0.0 and "time limit" in feedback and time.monotonic() - start < 6
