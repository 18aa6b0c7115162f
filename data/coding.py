"""Coding: Dolci (the paper's training set), LiveCodeBench, MBPP and HumanEval rows.

A response is a text with a program in a fenced block; coding_judge.py runs it in sandbox.py. Reward
1.0 only if every test passes. Programs have Python's standard library and nothing else.
Tests that the hub stores as a pickle are read without executing anything: a pickle that names
anything to call is refused.
"""
import ast
import base64
import datetime
import hashlib
import io
import json
import pickle
import re
import zlib
from pathlib import Path
from types import NoneType

from data import coding_judge, hub, thinking, tiny_rows

TRAIN = "dolci"
THINK_TAGS = ("<think>", "</think>")

LARGEST = 512 << 20  # bytes of the tests of a row, unpacked

PROMPT = ("You are a coding expert. You will be given a coding problem, and you need to write a "
          "correct Python program that matches the specification and passes all tests. The time "
          "limit is 1 second. You may start by outlining your thought process. In the end, please "
          "provide the complete code in a code block enclosed with ``` ```.\n\n")

DOLCI = {"prompt": str, "ground_truth": [str], "dataset": [str], "custom_id?": (str, NoneType)}
LCB = {"question_content": str, "starter_code": str, "public_test_cases": str,
       "private_test_cases": str, "metadata": str, "question_id": str,
       "contest_date": (str, datetime.datetime)}
MBPP = {"task_id": int, "text": str, "code": str, "test_list": [str], "test_setup_code?": str}
HUMANEVAL = {"task_id": str, "prompt": str, "canonical_solution": str, "test": str,
             "entry_point": str}
MBPP_IDS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}


# ---- rows ------------------------------------------------------------------------------------

def load(source: str, split: str | None = None, limit: int | None = None,
         seed: int = 0) -> list[dict]:
    """Rows of "tiny", "dolci", "lcb", "mbpp", "humaneval", or a .jsonl with the columns of one.

    split: of Dolci "train" or "test", 2% held out by a hash of the prompt; of LiveCodeBench "test",
    the contests of February to April 2025, or "train", those before; of MBPP by its ids (None:
    all). A file of Dolci or LiveCodeBench rows is one split already. Dolci's other domains are
    left out.
    """
    if source == "tiny":
        return tiny(split, limit, seed)
    from_hub, rows = not Path(source).exists(), []
    for place, record in hub.read_rows(source, [DOLCI, LCB, MBPP, HUMANEVAL],
                                       split if source == "mbpp" else None):
        if limit is not None and len(rows) >= limit:
            break
        row = None
        with hub.at(place, "tests as the hub's data set stores them"):
            if "ground_truth" in record:
                row = _dolci_row(record, split if from_hub else None)
            elif "private_test_cases" in record:
                row = _lcb_row(record, split if from_hub else None)
            else:
                row = _mbpp_row(record, split) if "test_list" in record else _humaneval_row(record)
        if row is not None:
            rows.append(row)
    return rows


def _row(prompt: str, answer: dict, name) -> dict:
    return {"messages": [{"role": "user", "content": prompt}], "answer": answer, "id": str(name)}


def _tests(tests: list[dict]) -> dict:
    return {"tests": [{"input": test["input"] + "", "output": test["output"] + ""}  # texts only
                      for test in tests]}


def _dolci_row(record: dict, split: str | None) -> dict | None:
    kind, prompt = record["dataset"][0], record["prompt"].removeprefix("user: ")
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    held_out = int(digest, 16) % 50 == 0  # equal prompts fall on the same side
    if kind not in ("code", "code_stdio") or split and (split == "test") != held_out:
        return None
    tests = decode_tests(record["ground_truth"][0])
    answer = {"asserts": [test + "" for test in tests]} if kind == "code" else _tests(tests)
    return _row(prompt, answer, record.get("custom_id") or digest[:16])


def _lcb_row(record: dict, split: str | None) -> dict | None:
    date = str(record["contest_date"])[:10]
    first, end = ("2025-02", "2025-05") if split == "test" else ("", "2025-02")
    if split and not first <= date < end:
        return None
    tests = decode_tests(record["public_test_cases"]) + decode_tests(record["private_test_cases"])
    answer = _tests(tests)
    problem = record["question_content"]
    if record["starter_code"].strip():
        signature = "def " + record["starter_code"].split("def ")[1].strip()
        problem += ("\n\nYour solution should have the following signature: ```python\n"
                    + re.sub(r"\(self,?\s*", "(", signature) + "\n```")
    if tests[0]["testtype"] == "functional":
        answer["fn_name"] = json.loads(record["metadata"])["func_name"]
    return _row(PROMPT + problem, answer, record["question_id"])


def _mbpp_row(record: dict, split: str | None) -> dict | None:
    first, last = MBPP_IDS[split] if split else (1, 974)
    if not first <= record["task_id"] <= last:
        return None
    problem = f"{record['text']}\n\nYour code should pass this test:\n{record['test_list'][0]}"
    return _row(PROMPT + problem, {"asserts": record["test_list"], "solution": record["code"],
                                   "setup": record.get("test_setup_code", "")}, record["task_id"])


def _humaneval_row(record: dict) -> dict:
    """The asserts of `check` one by one, so that the judge can compare; whole if it holds more."""
    name = record["entry_point"]
    check = next(n for n in ast.parse(record["test"]).body if isinstance(n, ast.FunctionDef))
    asserts = [re.sub(r"\bcandidate\b", name, ast.unparse(node)) for node in check.body]
    if not all(isinstance(node, ast.Assert) for node in check.body):
        asserts = [f"{record['test']}\ncheck({name})"]
    problem = ("Your task is to complete the following function. You are not allowed to modify the "
               "given code and should do the completion only. Here is the given code to complete: "
               f"```python\n{record['prompt']}\n```")
    answer = {"asserts": asserts, "prelude": record["prompt"],  # its imports and helper functions
              "solution": record["prompt"] + record["canonical_solution"]}
    return _row(PROMPT + problem, answer, record["task_id"])


class _Data(pickle._Unpickler):
    """Reads lists, dicts, texts and numbers; a pickle that names anything to call is refused. In
    Python: the one in C makes room for 16 GB where a pickle of ten bytes numbers its memo so."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"the tests are a pickle that names {module}.{name}")


def decode_tests(text: str) -> list:
    """JSON, or base64(zlib(pickle(a list, or its JSON))), LARGEST at most; executes nothing."""
    if not text.lstrip().startswith(("[", "{")):
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(base64.b64decode(text, validate=True), LARGEST)
        if not unpacked.eof:
            raise ValueError("the tests are cut off or too large")
        text = _Data(io.BytesIO(data)).load()
    tests = json.loads(text) if isinstance(text, str) else text
    if not isinstance(tests, list) or not tests:
        raise ValueError("no list of tests")
    return tests


# ---- the verifier ----------------------------------------------------------------------------

def extract(response: str) -> str:
    """The program: the last fenced block after the reasoning that is not blank.

    CONVENTIONS. A fence opens and closes at the start of a line; one never closed counts to the end
    (K20: the tests decide). A response without any fence is a program as a whole, as in open-
    instruct's scorer for Dolci, whose prompts do not ask for a fence. LiveCodeBench, too, takes
    the last block (SDPO the longest).
    """
    text, blocks, block = thinking.after_thinking(response) or "", [], None
    for line in text.split("\n"):
        if not line.lstrip().startswith("```"):
            if block is not None:
                block.append(line)
        elif block is None or line.strip() != "```":  # "```python" in an open block begins anew
            block = []
            blocks.append(block)
        else:
            block = None
    programs = ["\n".join(block) for block in blocks if "".join(block).strip()]
    return programs[-1] if programs else "" if blocks else text


def score(response: str, answer: dict) -> tuple[float, str]:
    """1.0 if the program in the response passes all tests of answer.

    answer: {"tests": [{"input", "output"}, ..]} for stdin programs, with "fn_name" for functions
    (their input is one JSON argument a line), or {"asserts": [..]}, with code that runs before
    ("prelude") or after ("setup") the program.
    """
    program = extract(response)
    if not program.strip():
        return 0.0, "There is no program; give it in a block enclosed with ```."
    try:
        answer = json.loads(answer) if isinstance(answer, str) else answer
        return coding_judge.judge(program, answer)
    except Exception as error:  # never raises: a broken row must not stop a run
        return 0.0, f"The tests of this row cannot be run ({type(error).__name__}: {error})."


def answer_of(response: str) -> str | None:
    """The program in the response, or None."""
    return extract(response).strip() or None


def render(answer: dict) -> str:
    """A perfect response: the row's reference program, or else a table of its tests."""
    if "solution" in answer:
        program = answer["solution"]
    elif "asserts" in answer:
        raise ValueError("asserts without a reference program: no perfect response is known")
    elif "fn_name" in answer:
        table = {json.dumps(coding_judge.arguments(test["input"])): json.loads(test["output"])
                 for test in answer["tests"]}
        program = (f"import json\ndef {answer['fn_name']}(*arguments):\n"
                   f"    return {table!r}[json.dumps(arguments)]")
    else:
        table = {test["input"]: test["output"] for test in answer["tests"]}
        program = f"import sys\nprint({table!r}[sys.stdin.read()])"
    return f"```python\n{program.strip()}\n```"


# ---- the download-free version -------------------------------------------------------------------

OPERATIONS = {  # as asked: (expression, what it is taken for, how often)
    "add {k}": ("{x} + {k}", "subtract {k}", .3), "subtract {k}": ("{x} - {k}", "add {k}", .4),
    "multiply by {k}": ("{x} * {k}", "add {k}", .25), "square": ("{x} ** 2", "negate", .4),
    "negate": ("-{x}", "halve", .5), "halve": ("{x} // 2", "square", .3)}


def tiny(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """A function of two operations, in one expression or two lines. A careless learner takes some
    operations for others, or forgets the brackets."""

    def draw(rng):
        f = rng.choice(["f", "g", "h", "p", "solve", "run", "calc", "make"])
        x = rng.choice("xnatbk")
        asked = [(name, rng.randint(2, 9)) for name in rng.sample(list(OPERATIONS), 2)]
        inputs = rng.sample(range(-9, 10), 3)

        def work(steps, brackets=True):
            (first, k), (last, m) = steps
            inner = OPERATIONS[first][0].format(x=x, k=k)
            outer = OPERATIONS[last][0]
            whole = outer.format(x=f"({inner})" if brackets else inner, k=m)
            head = f"```python\ndef {f}({x}):\n"
            return whole, (f"{inner}, then the rest\n{head}    return {whole}\n```",
                           f"first {first.format(k=k)}\n{head}    {x} = {inner}\n"
                           f"    return {outer.format(x=x, k=m)}\n```")

        def results(whole):
            return [eval(whole, {x: value}) for value in inputs]

        def careless():
            steps = [(OPERATIONS[name][1] if rng.random() < OPERATIONS[name][2] else name, k)
                     for name, k in asked]
            brackets = rng.random() < .85
            whole, texts = work(steps, brackets)
            text = rng.choice(texts) if brackets else texts[0]  # two lines need none
            return text, results(whole) == results(work(asked)[0])

        def finish():
            whole, (right, also) = work(asked)
            asserts = [f"assert {f}({i}) == {o}"
                       for i, o in zip(inputs, results(whole), strict=True)]
            return {"asserts": asserts}, right, also, careless

        first, last = (name.format(k=k) for name, k in asked)
        return f"Write {f}({x}): {first}, then {last}.", finish

    return tiny_rows.collect("coding", split, n, seed, draw)
