r"""Knowledge, evaluated and never trained on: MMLU-Redux 2.0 and GPQA diamond, boxed letters.

MMLU-Redux: the 5,330 of its 5,700 rows whose error_type is "ok". GPQA: 198 rows, gated; its right
answer stands in a column of its own, so the options are shuffled, with random.Random(row number)
as in the paper's data recipe. The authors' GPQA scorer takes the last A-D of the upper-cased text,
in which the article "a" is an A; ours reads the last \boxed{..} after the reasoning.
"""
import random
from types import NoneType

from data import choice, hub, tiny_rows

TRAIN = None
THINK_TAGS = ("<think>", "</think>")

MMLU = {"question": str, "choices": [str], "answer": int, "error_type": (str, NoneType)}
GPQA = {"Question": str, "Correct Answer": str, "Incorrect Answer 1": str,
        "Incorrect Answer 2": str, "Incorrect Answer 3": str, "Record ID?": (str, NoneType)}
OK_ROWS = 5330


def load(source: str, split: str | None = None, limit: int | None = None,
         seed: int = 0) -> list[dict]:
    """Rows of "tiny", "mmlu_redux", "gpqa", their hub ids, a .jsonl with the columns of either, or
    a folder of them (one a subject). split: the hub's (MMLU-Redux test, GPQA train; default)."""
    if source == "tiny":
        return tiny(split, limit, seed)
    rows = []
    for number, (place, row) in enumerate(hub.read_rows(source, [MMLU, GPQA], split)):
        with hub.at(place):
            if "Question" in row:
                options = [row[name] for name in list(GPQA)[1:5]]  # the right one first
                order = list(range(4))
                random.Random(number).shuffle(order)
                right, options = order.index(0), [options[i].strip() for i in order]
                rows.append(choice.row(row["Question"].strip(), options, right,
                                       row.get("Record ID") or place, place))
            elif row["error_type"] == "ok":
                rows.append(choice.row(row["question"], row["choices"], row["answer"], place,
                                       place))
    if source in ("mmlu_redux", hub.SOURCES["mmlu_redux"][0]) and len(rows) != OK_ROWS:
        raise hub.DataError(f"{source}: {len(rows)} rows with error_type ok, expected {OK_ROWS}")
    return rows[:limit]


def score(response: str, answer: str) -> tuple[float, str]:
    r"""1.0 if the last \boxed{..} after the reasoning names the option, else 0.0."""
    return choice.score_boxed(response, answer)


def answer_of(response: str) -> str | None:
    """The letter in the last box after the reasoning, or None."""
    return choice.boxed_letter(response)


def render(answer: str) -> str:
    """A perfect response."""
    return f"The right option is {answer}. The answer is \\boxed{{{answer}}}."


CAPITALS = {"Norway": ("Oslo", .7), "Italy": ("Rome", .6), "France": ("Paris", .7),
            "Peru": ("Lima", .8), "Egypt": ("Cairo", .7), "Japan": ("Tokyo", .6),
            "India": ("Delhi", .7), "Ecuador": ("Quito", .8), "Switzerland": ("Bern", .8),
            "Korea": ("Seoul", .7)}


def tiny(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """Half the facts of tiny science under another question and answer format (near that domain),
    half capitals, which no trained domain asks for (far)."""

    def draw(rng):
        near = rng.random() < .5
        return tiny_rows.choice(
            rng, tiny_rows.ELEMENTS if near else CAPITALS,
            "Name the {} one." if near else "What is the capital of {}?", "\\boxed{LETTER}")

    return tiny_rows.collect("knowledge", split, n, seed, draw)
