"""Mathematics: every shared case by its id, every gold of every row, workers that always end."""
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import hub, math, math_equal, math_workers, thinking

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared" / "data" / "math"
CASES = [case for case in map(json.loads, (HERE / "rows" / "cases.jsonl").open())
         if case["area"] == "math-verifier"]
BY_ID = {case["id"]: case for case in CASES}
# M80 is a choice of letters and stands in test_data_choice.py; these have tests of their own below
SPECIAL = {"M68", "M71", "M74", "M75", "M76", "M78", "M79", "M80"}


def rows(name: str) -> list[dict]:
    """All rows of a set where ../shared stands beside the clone, else the few in tests/rows."""
    path = next((SHARED / file for file in (f"{name}.jsonl", f"{name}.sample.jsonl")
                 if (SHARED / file).exists()), HERE / "rows" / f"{name}.jsonl")
    return math.load(str(path))


def children() -> list[int]:
    """Process ids of the living children of this process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True, scope="module")
def end_workers():
    yield
    math_workers.close()
    assert children() == [], "workers are left"


# ---- the shared cases ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BY_ID if name not in SPECIAL])
def test_case(name):
    case = BY_ID[name]
    reward, feedback = math.score(case["input"]["response"], case["input"]["gold"])
    assert reward == float(case["expected"])
    assert bool(feedback) == (reward == 0.0)


def test_case_M18_does_not_depend_on_the_side():
    case = BY_ID["M18"]["input"]
    box = hub.last_boxed(case["response"])
    assert math.score(f"\\boxed{{{case['gold']}}}", box) == (1.0, "")


def test_case_M68_last_box_alone_is_the_answer():
    case = BY_ID["M68"]["input"]
    assert math.score(case["response"], case["gold"])[0] == 0.0
    assert math.score(case["response"], "7")[0] == 1.0
    assert math.score("\\boxed{3, 5, 7}", case["gold"])[0] == 1.0


def test_case_M71_completion_only():
    case = BY_ID["M71"]["input"]
    assert math.score(case["response"]["completion"], case["gold"])[0] == 0.0


@pytest.mark.parametrize("name", ["M74", "M75"])
def test_case_power_tower_is_bounded(name, monkeypatch):
    monkeypatch.setattr(math_workers, "LIMIT", 1.5)
    math_workers.equal("1/2", "0.5")  # a worker is up
    case, before, start = BY_ID[name], len(children()), time.monotonic()
    reward, feedback = math.score(case["input"]["response"], case["input"]["gold"])
    assert time.monotonic() - start < 1.5 + 10  # left alone it takes hours
    assert reward == 0.0 and "too long" in feedback
    assert len(children()) == before - 1  # it was killed
    math_workers.close()
    assert children() == []


def test_case_M76_one_score_per_completion():
    case = BY_ID["M76"]
    got = [math.score(*pair)[0] == 1.0
           for pair in zip(case["input"]["response"], case["input"]["gold"], strict=True)]
    assert got == case["expected"]


@pytest.mark.parametrize("name", ["dapo_math_17k", "dapo_math_17k_processed_en", "dapo",
                                  "dapo_processed", "aime24", "aime25", "math500", "gsm8k_test",
                                  "gsm8k"])
def test_case_M78_every_gold_rendered_scores_one(name):
    if not (SHARED.exists() or (HERE / "rows" / f"{name}.jsonl").exists()):
        pytest.skip("the full set lies in ../shared")
    found = rows(name)
    assert found and all(math.score(math.render(row["answer"]), row["answer"]) == (1.0, "")
                         for row in found)
    for row in found:
        assert row["messages"][0]["content"].endswith(hub.BOXED) and len(row["messages"]) == 1


def test_case_M79_missing_library_is_an_error_not_a_zero(monkeypatch):
    math_workers.close()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for call in (lambda: math.load(str(HERE / "rows" / "aime25.jsonl")),
                 lambda: math.score("\\boxed{0.5}", "\\frac{1}{2}")):
        with pytest.raises(ImportError, match="pip install"):
            call()


def test_every_case_has_a_test():
    source = Path(__file__).read_text() + (HERE / "test_data_choice.py").read_text()
    assert all(name in source for name in SPECIAL)
    assert len(CASES) == len(BY_ID) == 54


# ---- golds written otherwise, golds of other rows --------------------------------------------


def retypeset(gold: str) -> list[str]:
    """The same answer as other people type it."""
    forms = [f"${gold}$.", gold + "\\,", "\\displaystyle " + gold,
             gold.replace("\\frac", "\\dfrac")]
    if "\\left" in gold:
        forms.append(gold.replace("\\left", "").replace("\\right", ""))
    else:
        forms.append(re.sub(r"(?<!\\text\{)([(\[])(.*)([)\]])", r"\\left\1\2\\right\3", gold))
    if "text" not in gold and "mbox" not in gold:
        forms.append(re.sub(r"(?<![a-z\\]) | (?![a-z0-9])", "", gold))
    if re.fullmatch(r"\D*[0-9]{1,3}(,(\\! ?)?[0-9]{3})+", gold):
        forms.append(re.sub(r",(\\! ?)?", "", gold))
    return forms


def test_golds_retypeset_score_one():
    golds = sorted({row["answer"] for row in rows("math500")})
    golds = [gold for gold in golds if math_equal.integer(gold) is None] + golds[::40]
    pairs = [(form, gold) for gold in golds for form in retypeset(gold) if form != gold]
    wrong = [pair for pair in pairs if math.score(f"\\boxed{{{pair[0]}}}", pair[1])[0] != 1.0]
    assert len(pairs) > 3 * len(golds) and wrong == []


def test_golds_of_other_rows_score_zero():
    golds = sorted({row["answer"] for row in rows("math500")})
    # a point and the list of its coordinates, written without brackets, are not told apart
    equal = {frozenset(("(-2,1)", "-2,1")), frozenset(("1,-2", "-2,1"))}
    # two ways of typing one value
    equal |= {frozenset(("2 \\sqrt{5}", "2\\sqrt{5}")), frozenset(("x=5", "5")),
              frozenset(("\\frac14", "\\frac{1}{4}"))}
    golds = [gold for gold in golds if math_equal.integer(gold) is None] + golds[::20]
    others = golds.copy()
    random.Random(1).shuffle(others)
    right = [pair for pair in zip(others, golds, strict=True) if pair[0] != pair[1]
             and math.score(math.render(pair[0]), pair[1])[0] == 1.0]
    assert [pair for pair in right if frozenset(pair) not in equal] == []
    for name in ("aime24", "aime25", "gsm8k_test" if SHARED.exists() else "gsm8k"):
        golds = [row["answer"] for row in rows(name)][:300]
        for gold, other in pairwise(golds):
            assert math.score(math.render(other), gold)[0] == float(int(other) == int(gold))


TRUE, FALSE = [
    ("2.5", "2 1/2"), ("\\frac{2\\sqrt{3}}{3}", "2\\frac{\\sqrt{3}}{3}"), ("58,500", "58500"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}"), ("x \\in [-2,7]", "-2 \\le x \\le 7"),
    ("[-2,7]", "-2 \\leq x \\leq 7"), ("15\\mbox{ cm}^2", "15 \\text{ square centimeters}"),
    ("864 \\mbox{ inches}^2", "864 \\text{ in}^2"), ("\\$18.90", "18.9"), ("18", "\\$18"),
    ("18", "18 dollars"), ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}^\\circ"),
    ("5", "x = 5"), ("x=5", "5"), ("y = 2x + 3", "2x+3"), ("5x - 7y + 4 = 0", "5x-7y=-4"),
    ("(a+5)(b+2)", "ab+2a+5b+10"), ("\\text{Navin}", "navin"), ("\\text{(C)}", "\\textbf{(C)}"),
    ("C", "(C)"), ("\\frac{1}{3}", "0.333333"), (".0000672", "6.72 \\times 10^{-5}"),
    ("50\\%", "0.5"), ("0.5", "50\\%"), ("50", "50\\%"), ("2516_8", "2516_{8}"), ("2516_8", "2516"),
    ("42", "52_8"), ("6+9i", "9i+6"), ("\\cot x", "\\frac{\\cos x}{\\sin x}"), ("12", "12th"),
    ("2\\pi", "2\u03c0"), ("12\\pi", "12\\pi \\text{ cm}"), ("3,5,7", "3, 5 \\text{ and } 7"),
    ("-2", "\u22122"), ("\\infty", "infinity"), ("6", "{6}"), ("5", "5 \\text{ apples}"),
    ("3:4", "3 : 4"), ("3:4", "\\frac{3}{4}"), ("12:30 \\text{ p.m.}", "12:30 \\text{ pm}"),
    ("\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}", "\\begin{bmatrix}0.2\\\\-3.6\\end{bmatrix}"),
    ("5", "f(2) = 5"), ("5", "a_{10} = 5"), ("(1,2)", "(x, y) = (1, 2)"), ("1,2", "x = 1, 2"),
    ("5", "x = 2 + 3 = 5"), ("4", "\\sqrt{16} = 4"), ("x \\le 5", "x <= 5"), ("5", "5 apples"),
    ("1,2", "x = 1, x = 2"), ("1, 2, \\ldots, n", "1,2,\\dots,n"),
    ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{6}}"),
], [
    ("(2,4)", "(4,2)"), ("(2,4)", "4,2"), ("(3,4]", "(3,4)"), ("[-2,7]", "-2 < x \\leq 7"),
    ("15\\mbox{ cm}^2", "15\\text{ cm}"), ("2 \\text{ hours}", "2 \\text{ minutes}"),
    ("5", "5m"), ("5m", "5"), ("5", "5 xy"), ("5", "5 x y"), ("A", "A_1"), ("5", "2x+3y = 5"),
    ("1,2", "1,2,..."), ("12", "1 2"), ("x < 5", "x \\le 5"),
    ("5", "x \\ne 5"), ("5", "x <= 5"),
    ("n \\text{ even}", "n"), ("0", "x^2-5=0"), ("x^2+1", "x^2+1=0"),
    ("p - q", "q - p"), ("\\text{east}", "\\text{seat}"), ("\\text{even}", "\\text{odd}"),
    ("\\frac{1}{3}", "0.33"), ("1000000", "1000000.5"), ("0.0000001", "0.0000002"),
    ("x/3", "0.33x"), ("\\frac{x}{2^{99}}", "\\frac{x}{2^{98}}"), ("\\pi", "3.14"),
    ("3:4", "6:8"), ("12:00", "12:30"), ("12:30 \\text{ p.m.}", "12:30 \\text{ a.m.}"),
    ("2516_8", "2516_9"), ("52", "52_8"), ("52_8", "42"), ("0.05", "50\\%"), ("1,2", "1,2,3"),
    ("7", "3,5,7"), ("3", "3x"), ("1\\frac{4}{5}", "\\frac{4}{5}"),
    ("90^\\circ", "\\frac{\\pi}{2}"),
    ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}"), ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "1"),
    ("58,500", "58, 500"), ("1234", "1,23,4"), ("5", "five"), ("\\text{(C)}", "D"),
]


@pytest.mark.parametrize("verdict", [True, False])
def test_conventions(verdict):
    pairs = TRUE if verdict else FALSE
    assert [pair for pair in pairs if math_workers.equal(*pair) is not verdict] == []


# ---- what is in the box ----------------------------------------------------------------------


def test_boxes_and_thinking():
    assert hub.last_boxed("\\boxed{\\frac{1}{2}} or \\boxed{\\{1, 2\\}}; \\boxed{3") == "\\{1, 2\\}"
    assert hub.last_boxed("\\boxed{a\\boxed{b}c} }") == "a\\boxed{b}c"
    assert hub.last_boxed("\\boxed {5}\\\\{") == "5"
    assert hub.last_boxed("\\boxed{\\left\\{ 1 \\right.} or") == "\\left\\{ 1 \\right."
    assert hub.last_boxed("\\boxedx{5} \\boxed{") is None
    assert thinking.after_thinking("<think>a</think>b<think>c</think> d") == " d"
    assert thinking.after_thinking("a</think>b") == "b"
    assert thinking.after_thinking("a</think>b<reasoning>c") is None
    assert math.score("<think>\\boxed{5}</think> so \\boxed{6}", "6")[0] == 1.0
    assert math.score("<think>\\boxed{5}</think> so", "5")[0] == 0.0
    start = time.monotonic()
    assert math.score("\\boxed{" * 50_000, "1")[0] == 0.0  # a collapsed model
    assert math.score("\\boxed{" + "(" * 50_000 + "}", "1/2")[0] == 0.0
    assert time.monotonic() - start < 1


PIECES = [*"\\{}$^_()[]=,.:%+-*/ 019xaAei\u03c0\x00\ud800",
          "\\boxed{", "\\frac", "\\text{", "\\pm", "\\sqrt", "^{\\circ}", "\\cup", "\\infty"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_any_text_gets_a_reward(pieces):
    text = "".join(pieces)
    for gold in ("\\frac{1}{2}", "3,5,7"):
        reward, feedback = math.score(f"\\boxed{{{text}}}", gold)
        assert reward in (0.0, 1.0) and bool(feedback) == (reward == 0.0)


@pytest.mark.parametrize("response", ["", "no box", "<think> \\boxed{31415/27}", "\\boxed{}",
                                      "\\boxed{1}", "\\boxed{" + "1" * 600 + "}"])
def test_feedback_never_tells_the_gold(response):
    reward, feedback = math.score(response, "31415/27")
    assert reward == 0.0 and feedback and "31415" not in feedback and "27" not in feedback


# ---- workers ---------------------------------------------------------------------------------


def test_eight_threads_get_their_own_verdicts():
    def one(i):
        gold = i if i % 3 else i + 1
        return math.score(f"\\boxed{{{i}/7}}", f"\\frac{{{gold}}}{{7}}")

    with ThreadPoolExecutor(8) as pool:
        got = [reward for reward, _ in pool.map(one, range(1, 97))]
    assert got == [float(i % 3 > 0) for i in range(1, 97)]
    assert len(children()) <= math_workers.WORKERS


def test_workers_outlive_the_thread_that_started_them_and_are_replaced_when_killed():
    math_workers.close()
    thread = threading.Thread(target=math_workers.equal, args=("1/2", "0.5"))
    thread.start()
    thread.join()
    (pid,) = children()
    assert math_workers.equal("1/2", "0.5") is True
    assert children() == [pid]
    os.kill(pid, signal.SIGKILL)
    assert math_workers.equal("1/2", "0.5") is True
    assert children() != [pid] and len(children()) == 1


def test_a_large_trainer_keeps_its_workers():
    """A child inherits its parent's ru_maxrss: taken for its own, each comparison retires it."""
    ballast = bytearray(b"1") * (math_workers.RETIRE + 2**20)
    math_workers.close()
    assert math_workers.equal("1/2", "0.5") is True
    before = children()
    assert math_workers.equal("1/3", "0.5") is False
    assert children() == before and len(before) == 1 and ballast


WORKER = """
import sys
sys.path.insert(0, {root!r})
from data import math_equal, math_workers
def equal(gold, answer, own=math_equal.equal):
    if answer == "big":
        raise MemoryError
    return own(gold, answer)
math_equal.equal, math_workers.RETIRE = equal, {retire}
math_workers.serve()
"""


@pytest.mark.parametrize("answers, retire, replies", [
    (["0.5", "x(", "2", "big", "0.5"], 1 << 40, "ready 1 0 0 memory"),
    (["0.5", "0.5"], 1, "ready 1")])
def test_a_worker_short_of_memory_makes_room(answers, retire, replies):
    code = WORKER.format(root=str(HERE.parent), retire=retire)
    lines = "".join(json.dumps(["1/2", answer, 5]) + "\n" for answer in answers)
    done = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout.split() == replies.split(), done.stderr


def test_memory_is_limited():
    math_workers.equal("1/2", "0.5")
    for pid in children():
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (math_workers.MEMORY,) * 2


PARENT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from data import math_workers
math_workers.equal("1/2", "0.5")
print(*[worker.pid for worker in math_workers._running], flush=True)
{end}
"""
ENDS = {"exit": "", "exception": "raise KeyError", "killed": "os.kill(os.getpid(), signal.SIGKILL)",
        # a forked child holds the workers' pipes open, has workers of its own, and ends those alone
        "fork": "pid = os.fork()\nassert pid or not math_workers._running\n"
                "assert math_workers.equal('1/2', '0.5')\nif pid == 0:\n    sys.exit(0)\n"
                "assert os.waitpid(pid, 0)[1] == 0\n"
                "assert [worker.poll() for worker in math_workers._running] == [None]",
        "exit while busy": "import threading\nthreading.Thread(target=math_workers.equal, args=("
                           "'1', '9^{9^{9^{9}}}', 60.0), daemon=True).start()\n"
                           "threading.Event().wait(0.5)",
        "killed, a fork left": "if os.fork() == 0:\n    os.close(1)\n    os.close(2)\n"
                               "    signal.alarm(9)\n    signal.pause()\n"
                               "os.kill(os.getpid(), signal.SIGKILL)",
        "killed while busy": "import threading\nthreading.Thread(target=math_workers.equal, args=("
                             "'1', '9^{9^{9^{9}}}', 1.0)).start()\nthreading.Event().wait(0.5)\n"
                             "os.kill(os.getpid(), signal.SIGKILL)"}


@pytest.mark.parametrize("end", ENDS)
def test_no_worker_outlives_its_parent(end):
    code = PARENT.format(root=str(HERE.parent), end=ENDS[end])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          check=False)
    wanted = -9 if end.startswith("killed") else 1 if end == "exception" else 0
    assert done.returncode == wanted, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    deadline = time.monotonic() + 6
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_import_is_cheap():
    code = ("import sys, time; start = time.process_time(); import data; "
            "print(time.process_time() - start, *[m for m in ('sympy', 'math_verify', 'datasets', "
            "'torch', 'numpy') if m in sys.modules])")
    best = min((subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, capture_output=True,
                               text=True, check=True).stdout.split() for _ in range(3)),
               key=lambda words: float(words[0]))
    assert len(best) == 1 and float(best[0]) < 0.3


def test_threads_are_served_in_turn(monkeypatch):
    """With one worker nobody is served twice while another waits."""
    math_workers.close()
    monkeypatch.setattr(math_workers, "WORKERS", 1)
    served = []

    def ask(name):
        for _ in range(4):
            assert math_workers.equal("1/2", "0.5")
            served.append(name)
    threads = [threading.Thread(target=ask, args=name) for name in "ab"]
    for thread in threads:  # the second comes while the first waits for the worker to start
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(served) in ("abababab", "babababa")
    math_workers.close()
