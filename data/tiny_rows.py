"""What the six download-free domains share: drawing questions, and multiple choice over facts.

Each data/<task>.py has a tiny(split, n, seed): short questions with a worked answer, in the format
of the real task and judged by the same verifier. Beside messages, answer and id its rows carry what
tools/sft.py teaches the tiny base with: two right responses ("response", "also": the same working
said in two ways), a "wrong" one as a learner would write it, and how often the base is shown that
instead of a right one ("hard"). The first line of a response is its working, the rest its answer.
"""
import hashlib
import random
from collections.abc import Callable

from data.hub import DataError

COUNTS = {"train": 2000, "test": 600}  # rows where no number is asked for

CITIES = ["Oslo", "Rome", "Paris", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bern", "Seoul"]
NAMES = ["Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal"]
ELEMENTS = {  # science, and half of knowledge: fact -> (what it is true of, hard)
    "is a noble gas": ("helium neon argon krypton xenon", .35),
    "is a halogen": ("fluorine chlorine bromine iodine", .65),
    "is an alkali metal": ("lithium sodium potassium rubidium cesium", .5),
    "forms 2+ ions": ("magnesium calcium barium zinc strontium", .6),
    "is a coinage metal": ("copper silver gold", .45),
    "is a liquid metal": ("mercury", .3),
    "is in all organic matter": ("carbon", .4),
    "makes up most of the air": ("nitrogen", .7)}


def collect(task: str, split: str, n: int | None, seed: int, draw: Callable) -> list[dict]:
    """n distinct rows of draw(rng) -> (question, finish); finish() makes answer, right, also, wrong
    and hard.

    The hash of a question decides where it belongs: one in five is a test question, and each is in
    the share of one of four seeds (seed % 4). So train and test are disjoint, and neighbouring
    seeds too. Raises DataError for an unknown split, or where the domain has fewer questions.
    """
    if split not in COUNTS:
        raise DataError(f"tiny {task}: split {split!r}, expected train or test")
    n = COUNTS[split] if n is None else n
    rng, found, seen = random.Random(f"{task} {split} {seed}"), [], set()
    for _ in range(200 * n + 2000):
        if len(found) == n:
            return found
        question, finish = draw(rng)
        number = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big")
        mine = (number % 5 == 0) == (split == "test") and number // 5 % 4 == seed % 4
        if not mine or question in seen:
            continue
        seen.add(question)
        answer, right, also, wrong, hard = finish()
        if rng.random() < .5:
            right, also = also, right
        found.append({"messages": [{"role": "user", "content": question}], "answer": answer,
                      "id": f"tiny-{task}-{split}-{seed}-{len(found)}", "response": right,
                      "also": also, "wrong": wrong, "hard": hard})
    if len(found) == n:
        return found
    raise DataError(f"tiny {task}, {split}, seed {seed}: only {len(found)} questions, {n} wanted")


def choice(rng: random.Random, facts: dict, ask: str, say: str,
           answer: str) -> tuple[str, Callable]:
    """A question with four options, one of which the fact is true of; for collect().

    facts: {fact: ("options it is true of", hard)}; ask and say hold {fact}, say also {option}, and
    answer holds LETTER, as in the format of the task.
    """
    fact = rng.choice(list(facts))
    names, hard = facts[fact]
    others = [name for other, (true, _) in facts.items() if other != fact for name in true.split()]
    right, *rest = rng.choice(names.split()), *rng.sample(others, 3)
    options = dict(zip(rng.sample([right, *rest], 4), "ABCD", strict=True))
    question = ask.format(fact=fact) + "".join(f"\n{c}: {name}" for name, c in options.items())

    def work(name):
        tail = "\n" + answer.replace("LETTER", options[name])
        return (say.format(option=name, fact=fact) + tail,
                f"it is option {options[name]}, {name}{tail}")

    def finish():
        return options[right], *work(right), rng.choice(work(rng.choice(rest))), hard

    return question, finish
