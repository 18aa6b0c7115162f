r"""Logic, evaluated and never trained on: ZebraLogic, as multiple choice or as a whole grid.

"zebra" is the paper's use: the first 500 rows of mc_mode, letters, a boxed answer. (They are no
random sample: several questions share a puzzle. The hub id gives all 3,259.) "zebra_grid" asks
for the grid as JSON, as ZeroEval does; the reward is puzzle accuracy: every cell right. The public
sets hide their answers; the gated ...-private ones have them.
"""
import json
import re
from types import NoneType

from data import choice, hub, thinking, tiny_rows

TRAIN = None
THINK_TAGS = ("<think>", "</think>")

CHOICE = {"puzzle": str, "question": str, "choices": [str], "answer?": (str, NoneType), "id?": str}
GRID = {"puzzle": str, "solution": {"header": [str], "rows": [[str]]}, "id?": str}
PAPER_ROWS = 500

GRID_PROMPT = """{puzzle}

Find the value of every cell of the grid. Reason step by step, then give the solution as one JSON \
object, the last one of your answer, in this format:

{template}"""


def load(source: str, split: str | None = None, limit: int | None = None,
         seed: int = 0) -> list[dict]:
    """Rows of "tiny", "zebra", "zebra_grid", a hub id, or a .jsonl with either set's columns."""
    if source == "tiny":
        return tiny(split, limit, seed)
    rows = []
    for place, row in hub.read_rows(source, [CHOICE, GRID], split):
        if source == "zebra" and len(rows) == PAPER_ROWS:
            break
        with hub.at(place):
            rows.append(_choice_row(row, place) if "choices" in row else _grid_row(row, place))
    return rows[:limit]


def _choice_row(row: dict, place: str) -> dict:
    if row.get("answer") not in row["choices"]:
        raise hub.DataError(f"{place}: answer {row.get('answer')!r} is none of the choices; the "
                            "public set has no answers, the -private one (gated) has")
    return choice.row(f"{row['puzzle']}\n\n{row['question']}", row["choices"],
                      row["choices"].index(row["answer"]), row.get("id", place), place)


def _grid_row(row: dict, place: str) -> dict:
    header, cells = row["solution"]["header"], row["solution"]["rows"]
    if not cells or any(len(line) != len(header) for line in cells):
        raise hub.DataError(f"{place}: a solution row does not have the {len(header)} cells of "
                            "the header")
    if any("___" in line for line in cells):
        raise hub.DataError(f"{place}: the solution is masked (___); the public set has no answers,"
                            " the -private one (gated) has")
    answer = {f"House {line[0]}": dict(zip(header[1:], line[1:], strict=True)) for line in cells}
    template = {"reasoning": "___", "solution": {house: dict.fromkeys(line, "___")
                                                 for house, line in answer.items()}}
    prompt = GRID_PROMPT.format(puzzle=row["puzzle"].strip(),
                                template=json.dumps(template, indent=4))
    return {"messages": [{"role": "user", "content": prompt}], "answer": answer,
            "id": str(row.get("id", place))}


def score(response: str, answer: str | dict) -> tuple[float, str]:
    """1.0 if the boxed letter, or every cell of the last JSON object, is right, else 0.0."""
    if not isinstance(answer, dict):
        return choice.score_boxed(response, answer)
    text = thinking.after_thinking(response)
    if text is None:
        return 0.0, "The reasoning was never closed, so there is no answer after it."
    grid = _last_grid(text)
    if grid is None:
        return 0.0, "There is no complete JSON object in the format of the template in the answer."
    if not all(isinstance(grid.get(house), dict) for house in answer):
        return 0.0, "The JSON object does not hold every house of the template."
    wrong = sum(str(grid[house].get(name, "")).strip().lower() != str(value).strip().lower()
                for house, line in answer.items() for name, value in line.items())
    return (1.0, "") if not wrong else (0.0, f"{wrong} cell(s) of the grid are wrong or missing.")


def _last_grid(text: str) -> dict | None:
    """The last complete JSON object whose first key is a house, alone or in "solution"."""
    starts = [match.start() for match in re.finditer(r'\{\s*"House \d', text)]
    for start in starts[:-20:-1]:  # from the end; a collapsed model opens thousands
        try:
            return json.JSONDecoder().raw_decode(text, start)[0]
        except (ValueError, RecursionError):  # unfinished, or nested past Python's limit
            continue
    return None


def answer_of(response: str) -> str | None:
    """The letter in the last box after the reasoning, or else the last grid as JSON, or None."""
    grid = _last_grid(thinking.after_thinking(response) or "")
    return choice.boxed_letter(response) or (grid and json.dumps(grid, sort_keys=True))


def render(answer: str | dict) -> str:
    """A perfect response."""
    if isinstance(answer, dict):
        return json.dumps({"reasoning": "By the clues.", "solution": answer}, ensure_ascii=False)
    return f"By the clues it is {answer}. The answer is \\boxed{{{answer}}}."


# ---- the download-free version ---------------------------------------------------------------

ORDERS = {"age": ("oldest", "youngest"), "height": ("tallest", "shortest"),
          "speed": ("fastest", "slowest")}
DOUBT = {"oldest": .4, "youngest": .6, "tallest": .6, "shortest": .5, "fastest": .5, "slowest": .7,
         "in the middle": .6}  # how often a careless learner names another


def tiny(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """Half the place of a person in an order of three (far from every trained domain), half which
    of two has more, by the sums of tiny math (near it). Answered by a boxed letter."""

    def draw(rng):
        far = rng.random() < .5
        names = rng.sample(tiny_rows.NAMES, 3 if far else 2)
        letters = dict(zip(rng.sample(names, len(names)), "ABC", strict=False))
        if far:
            by, place = rng.choice(list(ORDERS)), rng.randrange(3)
            asked = (ORDERS[by][0], "in the middle", ORDERS[by][1])[place]
            question, best = f"By {by}: {' > '.join(names)}. Who is {asked}?", names[place]
        else:
            sums = [(rng.randint(21, 39), rng.randint(2, 5)) for _ in names]
            totals = dict(zip(names, map(sum, sums), strict=True))
            question = " ".join(f"{name} has {a} + {b}." for name, (a, b) in
                                zip(names, sums, strict=True)) + " Who has most?"
            best = max(names, key=totals.get)

        def work(name):
            if far:
                place = names.index(name)
                said = (f"the {('first', 'middle', 'last')[place]} is {name}",
                        f"in order {' > '.join(names)}, so {name}")
            else:
                worked = ", ".join(f"{a} + {b} = {a + b}" for a, b in sums)
                said = f"as {worked}, so {name}", f"with {worked}, more has {name}"
            return [f"{text}\n\\boxed{{{letters[name]}}}" for text in said]

        def careless():
            name = best
            if rng.random() < (DOUBT[asked] if far else .45):
                name = rng.choice([other for other in names if other != best])
            return rng.choice(work(name)), name == best

        def finish():
            return letters[best], *work(best), careless

        return question + "".join(f"\n{c}. {name}" for name, c in letters.items()), finish

    return tiny_rows.collect("logic", split, n, seed, draw)
