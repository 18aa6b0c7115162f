"""Judges programs by running them in sandbox.py: stdin programs, functions and assert statements.

A program cannot tell the judge that it passed. The child only returns data, the output of a stdin
program or the values of calls; expected values never leave this process and are compared here, with
plain data. So neither exit codes (K03), patched builtins, files (K23) nor objects that equal
everything count. Of `abs(f(2) - 0.5) < 1e-6` the child returns f(2) alone; the rest is worked out
in a sandbox of its own. WEAKER: an assert that needs more of the program than values of one
function (its classes, two functions, a loop over calls) runs whole in the child, which then reports
True: a program could forge that. And the value of a lone `f(2)` or `not f(2)` is easily guessed.
"""
import ast
import bisect
import builtins
import collections
import functools
import hashlib
import heapq
import itertools
import json
import math
import operator
import re
import threading
import time
import typing
from collections.abc import Callable
from concurrent.futures import Future
from decimal import Decimal
from pathlib import Path

from data import sandbox

SECONDS = 6.0  # for a stdin test, as in SDPO; for all calls of a function, with 0.5 more for each
TOTAL_SECONDS = 120.0  # for all stdin tests of a program
CACHED = 4096  # verdicts that are kept

_lock, _verdicts = threading.Lock(), collections.OrderedDict()  # key -> Future, oldest first


def judge(program: str, answer: dict) -> tuple[float, str]:
    """(1.0, "") if the program passes all tests, else (0.0, which it fails first and how).

    Siblings of a group are often one text, so a program that is being judged or has just been is
    not run again; a verdict that the clock gave is not kept. Raises ValueError and the like for
    tests that cannot be read.
    """
    if not answer.get("tests") and not answer.get("asserts"):
        raise ValueError("no tests")  # nothing to fail would be a reward for anything
    key = hashlib.sha256(json.dumps([program, answer]).encode()).digest()
    with _lock:
        future = _verdicts.pop(key, None)
        mine = future is None
        _verdicts[key] = future = Future() if mine else future
        if len(_verdicts) > CACHED:
            _verdicts.popitem(last=False)
    if mine:
        keep = False
        try:
            by = _judge_stdin if "tests" in answer and "fn_name" not in answer else _judge_calls
            verdict, keep = by(program, answer)
            future.set_result(verdict)
        except BaseException as error:
            future.set_exception(error)
        finally:
            if not keep:
                with _lock:
                    _verdicts.pop(key, None)
    return future.result()


def _judge_stdin(program: str, answer: dict) -> tuple[tuple[float, str], bool]:
    """(verdict, whether it would be the same again). One child a test, up to the first failure."""
    tests, started, imports = answer["tests"], time.monotonic(), needed_imports(program)
    code = (f"exec({imports!r})\nexec(compile({program!r}, 'program.py', 'exec'))" if imports
            else program)
    for n, test in enumerate(tests, 1):
        where, seconds = f"Test {n} of {len(tests)}", TOTAL_SECONDS - time.monotonic() + started
        result = sandbox.run(code, test["input"], max(0.1, min(SECONDS, seconds)),
                             size=(4 << 20) + 2 * len(test["output"]))
        if result.status != "ok":  # also after the right output: a crash is no answer
            return (0.0, f"{where}: {_why(result)}."), result.status == "error"
        if not same_output(result.stdout, test["output"]):
            return (0.0, f"{where}: wrong output."), True
    return (1.0, ""), True


def _judge_calls(program: str, answer: dict) -> tuple[tuple[float, str], bool]:
    """The same for functions and asserts: one child for all."""
    if "tests" in answer:
        calls = [{"function": answer["fn_name"], "arguments": arguments(test["input"])}
                 for test in answer["tests"]]
        accepts = [functools.partial(_same_value, json.loads(test["output"]))
                   for test in answer["tests"]]
    else:
        calls, accepts = zip(*map(split_assert, answer["asserts"]), strict=True)
    job = {"calls": calls, "parts": [needed_imports(program), answer.get("prelude", ""), program,
                                     answer.get("setup", "")]}
    child = Path(__file__).with_name("coding_child.py").read_text()
    result = sandbox.run(f"{child}\ndrive({json.dumps(job)!r})", seconds=SECONDS + len(calls) / 2)
    lines = result.stdout.splitlines()
    for n, accept in enumerate(accepts, 1):
        where = f"Test {n} of {len(accepts)}"
        if n > len(lines):
            why = "the program ended before this test" if result.status == "ok" else _why(result)
            return (0.0, f"{where}: {why}."), result.status not in ("timeout", "failed")
        value, error = _result(lines[n - 1])
        if error and any("run" in call for call in calls):  # its text could hold the whole assert
            error = name if hasattr(builtins, name := error.split(":")[0]) else "an error"
        if error or not accept(value):
            return (0.0, f"{where}: {error[:200] or 'wrong result'}."), True
    return (1.0, ""), True


def _why(result: sandbox.Result) -> str:
    if result.status == "timeout":
        return "time limit exceeded"
    lines = result.stderr.strip().splitlines()
    return lines[-1][:200] if lines else "it ended with an error code"


def arguments(text: str) -> list:
    """LiveCodeBench's input of a function: one JSON value a line."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def same_output(got: str, wanted: str) -> bool:
    """LiveCodeBench's rule: the same lines without outer blanks, or the same decimal numbers."""
    got, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (got, wanted))
    return len(got) == len(wanted) and all(map(_same_line, got, wanted))


def _same_line(got: str, wanted: str) -> bool:
    try:
        return got == wanted or [*map(Decimal, got.split())] == [*map(Decimal, wanted.split())]
    except ArithmeticError:  # not numbers
        return False


def _same_value(wanted, got) -> bool:
    """LiveCodeBench compares with ==, tuples as lists."""
    return _lists(got) == wanted


def _lists(value):
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return {k: _lists(v) for k, v in value.items()} if isinstance(value, dict) else value


OPERATORS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
             ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_,
             ast.IsNot: operator.is_not}


def split_assert(text: str) -> tuple[dict, Callable]:
    """An assert as (what the child runs, the function that accepts its value here)."""
    def is_true(value):
        return value is True

    body = ast.parse(text).body
    test = body[0].test if len(body) == 1 and isinstance(body[0], ast.Assert) else None
    job = {"run": text}, is_true
    if isinstance(test, (ast.Call, ast.Name, ast.UnaryOp)):
        job = {"value": f"not not ({ast.unparse(test)})"}, is_true
        if _is_own(test.operand if isinstance(test, ast.UnaryOp) else test):
            return job
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in OPERATORS:
        left, right, compare = test.left, test.comparators[0], OPERATORS[type(test.ops[0])]
        try:
            literal = ast.literal_eval(right)
        except (ValueError, TypeError):
            pass
        else:
            job = {"value": ast.unparse(left)}, functools.partial(_holds, compare, literal)
            if _is_own(left) or compare is operator.eq and literal not in (0, 1):
                return job  # else too easily guessed: abs(f(1) - 2) < 1e-6
    calls, rest = _Calls().take(ast.parse(text))
    if not calls:
        return job
    return {"value": f"[{', '.join(calls)}]"}, functools.partial(_holds_alone, rest)


def _is_own(node: ast.expr) -> bool:
    """f(..) of the program, or list(f(..)) and the like, which make its result plain data."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    name, inside = node.func.id, [arg for arg in node.args if isinstance(arg, ast.Call)]
    return name not in KNOWN or name in ("list", "tuple", "set", "dict", "sorted", "str") and (
        any(map(_is_own, inside)))


class _Calls(ast.NodeTransformer):
    """Puts the names _0, _1, .. in the place of the calls of the program's function."""

    def take(self, tree: ast.Module) -> tuple[dict[str, str], str]:
        """({call: its name}, the text of the rest); {} if the rest needs more of the program."""
        self.calls, self.functions = {}, set()
        rest = self.visit(tree)
        nodes = list(ast.walk(rest))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        bound = {node.id for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)
                 and isinstance(node, ast.Name)}
        words = {word for text in self.calls for word in re.findall(r"\w+", text)}
        objects = any(isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                      and node.value.id in self.calls.values() for node in nodes)
        alone = not objects and len(self.functions) == 1 and not bound & words and (
            names <= KNOWN | bound | set(self.calls.values()))
        return (self.calls if alone else {}), ast.unparse(rest)

    def visit_Call(self, node):
        if not _is_own(node):
            return self.generic_visit(node)
        inner = [call for call in ast.walk(node) if _is_own(call) and call.func.id not in KNOWN]
        self.functions.add(inner[0].func.id)
        return ast.Name(self.calls.setdefault(ast.unparse(node), f"_{len(self.calls)}"), ast.Load())


def _holds_alone(text: str, values: list) -> bool:
    """An assert on plain values, where the program is not."""
    names = "".join(f"_{n}, " for n in range(len(values)))
    program = f"from math import inf, nan\n{needed_imports(text)}\n{names}= {values!r}\n{text}"
    return sandbox.run(program).status == "ok"


def _holds(compare: Callable, literal, value) -> bool:
    try:
        return bool(compare(value, literal))
    except TypeError:  # "a" < 1
        return False


def _result(line: str) -> tuple[object, str]:
    """A line of the child: (value, error or ""). It may be anything: a program can write there."""
    try:
        value, error = json.loads(line)
        return _from_plain(value), str(error or "")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, "the result cannot be read"


def _from_plain(value):
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind in ("dict", "set", "frozenset"):  # made to collide, they would take hours to build
        keys = [_from_plain(item[0] if kind == "dict" else item) for item in content]
        if len(set(map(hash, keys))) < len(keys) / 2:
            raise ValueError("the keys of a result have one hash")
    if kind == "dict":
        return {_from_plain(key): _from_plain(item) for key, item in content}
    if kind in ("int", "complex"):
        return int(content, 16) if kind == "int" else complex(*content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes,
            "bytearray": bytearray}[kind](_from_plain(content))


PUBLIC = {module.__name__: set(getattr(module, "__all__", dir(module))) - set(dir(builtins))
          for module in (typing, collections, itertools, functools, heapq, bisect, math)}
MODULES = {*PUBLIC, "copy", "datetime", "json", "operator", "random", "re", "string", "sys"}
KNOWN = {*dir(builtins), *MODULES, *set().union(*PUBLIC.values())}  # all else is the program's


def needed_imports(program: str) -> str:
    """What LiveCodeBench puts before a program (`from typing import *`, `import math`, ..), as far
    as it uses the names, since each import costs milliseconds."""
    words = set(re.findall(r"\w+", program))
    lines = [f"from {name} import {', '.join(sorted(words & public))}"
             for name, public in PUBLIC.items() if words & public]
    return "\n".join(lines + [f"import {name}" for name in sorted(words & MODULES)])
