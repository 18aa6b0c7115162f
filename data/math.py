r"""Mathematics: prompts as in the paper's data recipe, boxed answers compared by math-verify.

When two answers are equal is decided in math_equal.py, which math_workers.py runs in processes that
can be killed. What is text-equal or two integers (nearly all of DAPO and AIME) needs none.

CONVENTION (M61 to M73): the answer is the last complete \boxed{..} after the reasoning, in training
and in evaluation alike; several boxes are not joined into a list (M68: "\boxed{3}, \boxed{5},
\boxed{7}" answers 7, which is wrong for 3,5,7); a box never closed or empty is no answer.
The authors' scorer sees the last 100 characters only, so that a long boxed answer scores 0 there.
"""
import re

from data import hub, math_equal, math_workers, tiny_rows

TRAIN = "dapo"
THINK_TAGS = ("<think>", "</think>")
LONGEST = 500  # characters of an answer worth comparing; the longest gold of MATH-500 has 54

# ---- rows ------------------------------------------------------------------------------------

DAPO = {"prompt": [{"role": str, "content": str}], "reward_model": {"ground_truth": str},
        "extra_info": {"index": str}}
PROCESSED = {"prompt": str, "solution": str, "extra_info": {"index": str}}  # open-r1's version
ANSWERED = {"problem": str, "answer": (str, int),  # MATH-500, AIME25
            "unique_id?": str, "id?": (str, int)}
AIME24 = {"problem": str, "solution": str, "id?": (str, int)}  # solution is \boxed{204}
GSM8K = {"question": str, "answer": str}  # answer is worked text, then "#### 1,234"

HEAD = ("Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the "
        "problem.\n\n")
TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def load(source: str, split: str | None = None, limit: int | None = None,
         seed: int = 0) -> list[dict]:
    """Rows of "tiny", a short name or hub id of DAPO (both versions), AIME24, AIME25, MATH-500,
    GSM8K, or a .jsonl with the columns of one. split: the hub's own; a file has one already.

    DAPO is de-duplicated, the first copy kept (the hub's file holds each problem about 100 times).
    A copy is a row with the same problem text up to blanks, whatever its answer, or one with the
    same letters and digits AND the same answer: near-copies differ in typesetting, but problems
    that differ in a sign alone are two, and then their answers differ.
    """
    if source == "tiny":
        return tiny(split, limit, seed)
    math_workers.require_math_verify()
    rows, seen = [], set()
    for place, row in hub.read_rows(source, [DAPO, PROCESSED, ANSWERED, AIME24, GSM8K], split):
        with hub.at(place):
            keys = set()
            if "extra_info" in row:
                problem, answer = _dapo(row, place)
                keys = {" ".join(problem.split()), (re.sub(r"[\W_]+", "", problem).lower(), answer)}
                if keys & seen:
                    continue
                name = row["extra_info"]["index"]
            elif "question" in row:
                problem, name = row["question"], place
                _, mark, answer = row["answer"].rpartition("####")
                answer = math_equal.integer(answer) if mark else None
            else:
                problem, name = row["problem"], row.get("unique_id", row.get("id", place))
                answer = str(row["answer"]) if "answer" in row else hub.last_boxed(row["solution"])
            if not answer or not answer.strip():
                raise hub.DataError(f"{place}: no gold answer; expected a text or integer, a "
                                    "\\boxed{..} in a solution, or #### and an integer in GSM8K")
            seen |= keys  # now that it is kept: a copy without an answer hides no other
            rows.append({"messages": [{"role": "user", "content": problem + hub.BOXED}],
                         "answer": answer.strip(), "id": str(name)})
        if limit is not None and len(rows) == limit:
            break
    return rows


def _dapo(row: dict, place: str) -> tuple[str, str]:
    if isinstance(row["prompt"], str):
        return row["prompt"].strip(), row["solution"]
    problem = row["prompt"][-1]["content"]
    if not (problem.startswith(HEAD) and problem.endswith(TAIL)):
        # its "Answer:" contradicts the box that we ask for, so it must not stay by accident
        raise hub.DataError(f"{place}: the prompt is not in DAPO's wrapper, which starts "
                            f"{HEAD[:40]!r} and ends {TAIL[-30:]!r}")
    return problem[len(HEAD):-len(TAIL)].strip(), row["reward_model"]["ground_truth"]


# ---- score -----------------------------------------------------------------------------------


def score(response: str, answer: str) -> tuple[float, str]:
    """1.0 if the last box after the reasoning holds a value equal to the gold answer, else 0.0."""
    box, why = hub.boxed(response)
    if box is None:
        return 0.0, why
    box, gold = box.strip(), str(answer).strip()
    if not box:
        return 0.0, "The \\boxed{..} is empty."
    if box == gold:
        return 1.0, ""
    if len(box) > LONGEST:
        return 0.0, "The \\boxed{..} holds far more than an answer."
    integers = math_equal.integer(gold), math_equal.integer(box)
    verdict = integers[0] == integers[1] if all(integers) else math_workers.equal(gold, box)
    if verdict is None:
        return 0.0, "The answer in the box takes too long to evaluate; write it in a simpler form."
    return (1.0, "") if verdict else (0.0, "The answer in the box is wrong.")


def answer_of(response: str) -> str | None:
    """What the last box after the reasoning holds, for maj@n; None without one."""
    return (hub.boxed(response)[0] or "").strip() or None


def render(answer: str) -> str:
    """A perfect response."""
    return f"The answer is \\boxed{{{answer}}}."


# ---- the download-free version ---------------------------------------------------------------

THINGS = ["apples", "books", "coins", "cards", "pens", "eggs"]
VERBS = {"finds": (1, .3), "buys": (1, .5), "wins": (1, .2),  # verb: (sign, doubt)
         "loses": (-1, .3), "sells": (-1, .5), "eats": (-1, .2)}


def tiny(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """Two-step sums in words. A careless learner takes verbs the wrong way, or slips by ten."""

    def draw(rng):
        start, name, things = rng.randint(21, 39), rng.choice(tiny_rows.NAMES), rng.choice(THINGS)
        steps = [(verb, rng.randint(2, 5)) for verb in rng.sample(list(VERBS), 2)]
        (first, a), (second, b) = steps

        def work(slips):
            total, sums, words = start, [], []
            for (verb, k), slip in zip(steps, slips, strict=True):
                sign = VERBS[verb][0] * (-1 if slip == "sign" else 1)
                new = total + sign * k + (rng.choice((-10, 10)) if slip == "tens" else 0)
                sums.append(f"{total} {'+' if sign > 0 else '-'} {k} = {new}")
                words.append(f"{total} {'and' if sign > 0 else 'less'} {k} is {new}")
                total = new
            return total, *(f"so {', '.join(said)}\n\\boxed{{{total}}}" for said in (sums, words))

        def careless():
            slips = ["sign" if rng.random() < VERBS[verb][1] else
                     "tens" if rng.random() < .06 else "" for verb, _ in steps]
            total, *texts = work(slips)
            return rng.choice(texts), total == work(("", ""))[0]

        def finish():
            total, right, also = work(("", ""))
            return str(total), right, also, careless

        return (f"{name} has {start} {things}, {first} {a}, then {second} {b}."
                f" How many {things} does {name} have?", finish)

    return tiny_rows.collect("math", split, n, seed, draw)
