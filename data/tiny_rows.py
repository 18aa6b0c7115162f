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
    "noble": ("helium neon argon krypton xenon", .4),
    "halogen": ("fluorine chlorine bromine iodine", .65),
    "alkali": ("lithium sodium potassium rubidium", .5),
    "divalent": ("magnesium calcium barium strontium", .6),
    "coinage": ("copper silver gold", .4),
    "magnetic": ("iron cobalt nickel", .55),
    "radioactive": ("radium thorium uranium", .45)}


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


def choice(rng: random.Random, facts: dict, ask: str, answer: str) -> tuple[str, Callable]:
    """A question with four options, one of which has the property; for collect().

    facts: {property: ("the options that have it", hard)}; ask holds {}, the property, and answer
    holds LETTER, as in the format of the task. The working recalls a fact for each option, up to
    the right one or for all of them; a wrong one misremembers, and so takes another option.
    """
    wanted = rng.choice(list(facts))
    known = {name: fact for fact, (names, _) in facts.items() for name in names.split()}
    right = rng.choice(facts[wanted][0].split())
    rest = rng.sample([name for name, fact in known.items() if fact != wanted], 3)
    options = dict(zip(rng.sample([right, *rest], 4), "ABCD", strict=True))
    question = ask.format(wanted) + "".join(f"\n{c}: {name}" for name, c in options.items())

    def work(said):
        lines = [f"{c} {said[name]}" for name, c in options.items()]
        at = [said[name] for name in options].index(wanted)
        tail = "\n" + answer.replace("LETTER", "ABCD"[at])
        return (f"{', '.join(lines)}, so {'ABCD'[at]}{tail}",
                f"{', '.join(lines[:at + 1])} yes{tail}")

    def finish():
        taken = rng.choice(rest)
        slip = {**known, taken: wanted, right: known[rng.choice(rest)]}
        return options[right], *work(known), rng.choice(work(slip)), facts[wanted][1]

    return question, finish
