"""The six domains of the paper, one file each, and the benchmarks that they are measured on.

A domain is a module with the same names; a new one is a file and a line in TASKS:
  TRAIN       short name of the paper's training source (None: the domain is only evaluated)
  THINK_TAGS  the tags around reasoning in its answers
  load(source, split, limit=None, seed=0) -> [{"messages": [..], "answer": .., "id": ..}, ..]
  score(response, answer) -> (reward 0.0 | 1.0, feedback that never tells the answer)
  answer_of(response) -> the answer it gives, in one canonical text, or None
  render(answer) -> a perfect response;  tiny(split, n, seed) -> rows made from a seed, no download
Importing this costs milliseconds: datasets, math-verify and sympy are imported where first used.
"""
from importlib import import_module
from typing import NamedTuple

TASKS = {  # imported in place, so that a new domain is one line of this file and no second one
    "math": import_module("data.math"),
    "science": import_module("data.science"),
    "tooluse": import_module("data.tooluse"),
    "coding": import_module("data.coding"),
    "logic": import_module("data.logic"),
    "knowledge": import_module("data.knowledge"),
}


class Benchmark(NamedTuple):
    task: str           # who loads and scores it
    source: str
    split: str
    n: int              # samples per prompt
    domain: str | None  # the training domain that it is in distribution of


# GPQA is asked and scored like MMLU-Redux (a boxed letter), so it lives with it in knowledge.py.
BENCHMARKS = {
    "aime24": Benchmark("math", "aime24", "test", 16, "math"),
    "aime25": Benchmark("math", "aime25", "test", 16, "math"),
    "sciknoweval": Benchmark("science", "sciknoweval", "test", 16, "science"),
    "toolalpaca": Benchmark("tooluse", "toolalpaca", "test", 16, "tooluse"),
    "dolci": Benchmark("coding", "dolci", "test", 16, "coding"),
    "math500": Benchmark("math", "math500", "test", 16, None),
    "gpqa": Benchmark("knowledge", "gpqa", "train", 16, None),
    "bfcl": Benchmark("tooluse", "bfcl", "test", 16, None),
    "lcb": Benchmark("coding", "lcb", "test", 16, None),
    "zebra": Benchmark("logic", "zebra", "test", 16, None),
    "mmlu_redux": Benchmark("knowledge", "mmlu_redux", "test", 16, None),
    "tiny_math": Benchmark("math", "tiny", "test", 8, "math"),
    "tiny_science": Benchmark("science", "tiny", "test", 8, "science"),
    "tiny_tooluse": Benchmark("tooluse", "tiny", "test", 8, "tooluse"),
    "tiny_coding": Benchmark("coding", "tiny", "test", 8, "coding"),
    "tiny_logic": Benchmark("logic", "tiny", "test", 8, None),
    "tiny_knowledge": Benchmark("knowledge", "tiny", "test", 8, None),
}
