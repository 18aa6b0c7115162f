"""The child's side of a function's tests; coding_judge.py sends this text and a job to the sandbox.

A result is a line [plain value, error] on the real stdout; what the program prints goes nowhere. It
ends at the first error: the reward is 0 then anyway. JSON has no tuples, sets, bytes, complex or
large numbers, nor dicts with any key: they are written {"tuple": [..]} and so on.
"""
import json
import os
import sys


def plain(value):
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 60 else {"int": hex(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    for kind in tuple, set, frozenset, bytes, bytearray:
        if isinstance(value, kind):
            return {kind.__name__: [plain(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    raise TypeError(f"a result of type {type(value).__name__} is no plain data")


def drive(job):
    """Runs the program in a module "program", so that no main guard fires, then the calls."""
    job, answers = json.loads(job), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.modules["program"] = program = type(sys)("program")
    space = program.__dict__
    for call in [None, *job["calls"]]:
        value = error = None
        try:
            if call is None:
                for part in job["parts"]:
                    exec(compile(part, "program.py", "exec"), space)
            elif "run" in call:
                exec(call["run"], space)
                value = True
            elif "value" in call:
                value = plain(eval(call["value"], space))
            else:
                owner = space["Solution"]() if "Solution" in space else program
                value = plain(getattr(owner, call["function"])(*call["arguments"]))
        except BaseException as problem:  # SystemExit and KeyboardInterrupt too
            error = f"{type(problem).__name__}: {problem}"
        if call is not None or error:
            print(json.dumps([value, error]), file=answers, flush=True)
        if error:
            break
    os._exit(0)  # not even threads of the program go on
