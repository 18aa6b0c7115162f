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

TASKS = {
    "math": import_module("data.math"),
    "science": import_module("data.science"),
    "tooluse": import_module("data.tooluse"),
    "coding": import_module("data.coding"),
    "logic": import_module("data.logic"),
    "knowledge": import_module("data.knowledge"),
}

# name -> (task, source, split, samples per prompt, the training domain it is in distribution of).
# GPQA is asked and scored like MMLU-Redux (a boxed letter), so it lives with it in knowledge.py.
BENCHMARKS = {
    "aime24": ("math", "aime24", "test", 16, "math"),
    "aime25": ("math", "aime25", "test", 16, "math"),
    "sciknoweval": ("science", "sciknoweval", "test", 16, "science"),
    "toolalpaca": ("tooluse", "toolalpaca", "test", 16, "tooluse"),
    "dolci": ("coding", "dolci", "test", 16, "coding"),
    "math500": ("math", "math500", "test", 16, None),
    "gpqa": ("knowledge", "gpqa", "train", 16, None),
    "bfcl": ("tooluse", "bfcl", "test", 16, None),
    "lcb": ("coding", "lcb", "test", 16, None),
    "zebra": ("logic", "zebra", "test", 16, None),
    "mmlu_redux": ("knowledge", "mmlu_redux", "test", 16, None),
    "tiny_math": ("math", "tiny", "test", 8, "math"),
    "tiny_science": ("science", "tiny", "test", 8, "science"),
    "tiny_tooluse": ("tooluse", "tiny", "test", 8, "tooluse"),
    "tiny_coding": ("coding", "tiny", "test", 8, "coding"),
    "tiny_logic": ("logic", "tiny", "test", 8, None),
    "tiny_knowledge": ("knowledge", "tiny", "test", 8, None),
}
