"""What the six download-free domains share: drawing questions, and multiple choice over facts.

Each data/<task>.py has a tiny(split, n, seed): short questions with a worked answer, in the format
of the real task and judged by the same verifier. The first line of a response is its working, the
rest its answer. Beside messages, answer and id a row carries what tools/sft.py teaches with:
  response, also  two right responses, the same working said in two ways, in random order
  noisy           one of a careless learner with fixed misconceptions, right or wrong by chance
  wrong           one of the same learner that is wrong
"""
import hashlib
import random
from collections.abc import Callable

from data.hub import DataError

COUNTS = {"train": 2000, "test": 600}  # rows where no number is asked for

CITIES = ["Oslo", "Rome", "Paris", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bern", "Seoul"]
NAMES = ["Ann", "Bob", "Cal", "Dan", "Eve", "Fay", "Gus", "Hal"]
ELEMENTS = {  # science, half of knowledge: property -> (who has it, how often that is mistaken)
    "noble": ("helium neon argon krypton xenon", .6),
    "halogen": ("fluorine chlorine bromine iodine", .8),
    "alkali": ("lithium sodium potassium rubidium", .7),
    "divalent": ("magnesium calcium barium strontium", .75),
    "coinage": ("copper silver gold", .6),
    "magnetic": ("iron cobalt nickel", .7),
    "radioactive": ("radium thorium uranium", .65)}


def collect(task: str, split: str, n: int | None, seed: int, draw: Callable) -> list[dict]:
    """n distinct rows. draw(rng) -> (question, finish), finish() -> (answer, right, also, careless)
    and careless() -> (a response, whether it is right), another at each call.

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
        answer, right, also, careless = finish()
        noisy, good = wrong, _ = careless()
        while good:
            wrong, good = careless()
        if rng.random() < .5:
            right, also = also, right
        found.append({"messages": [{"role": "user", "content": question}], "answer": answer,
                      "id": f"tiny-{task}-{split}-{seed}-{len(found)}", "response": right,
                      "also": also, "noisy": noisy, "wrong": wrong})
    if len(found) == n:
        return found
    raise DataError(f"tiny {task}, {split}, seed {seed}: only {len(found)} questions, {n} wanted")


def choice(rng: random.Random, facts: dict, ask: str, answer: str) -> tuple[str, Callable]:
    """A question with four options, one of which has the property; for collect().

    facts: {property: ("the options that have it", doubt)}; ask holds {}, the property, and answer
    holds LETTER, as in the format of the task. The working recalls a property for each option, all
    of them or up to the one wanted. Each option is mistaken for having one other property, always
    the same, with a probability of `doubt`; where none seems right a careless learner guesses.
    """
    wanted = rng.choice(list(facts))
    properties = list(facts)
    known, mistaken = {}, {}
    for at, (names, doubt) in enumerate(facts.values()):
        for shift, name in enumerate(names.split()):
            known[name] = properties[at]
            mistaken[name] = properties[(at + 1 + shift) % len(properties)], doubt
    right = rng.choice(facts[wanted][0].split())
    rest = rng.sample([name for name, fact in known.items() if fact != wanted], 3)
    options = dict(zip(rng.sample([right, *rest], 4), "ABCD", strict=True))
    question = ask.format(wanted) + "".join(f"\n{c}: {name}" for name, c in options.items())

    def work(said):
        lines = [f"{c} {said[name]}" for name, c in options.items()]
        fits = [c for name, c in options.items() if said[name] == wanted]
        letter = fits[0] if fits else rng.choice("ABCD")
        tail = "\n" + answer.replace("LETTER", letter)
        return (f"{', '.join(lines)}, so {letter}{tail}",
                f"{', '.join(lines[:'ABCD'.index(fits[0]) + 1])} yes{tail}" if fits else
                f"{', '.join(lines)}, guess {letter}{tail}"), letter

    def careless():
        said = {name: mistaken[name][0] if rng.random() < mistaken[name][1] else known[name]
                for name in options}
        texts, letter = work(said)
        return rng.choice(texts), letter == options[right]

    def finish():
        return options[right], *work(known)[0], careless

    return question, finish
