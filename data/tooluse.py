"""Tool use: ToolAlpaca (the paper's training and test set) and BFCL v4 `multiple`.

One turn: the prompt documents the tools, the response names the calls in ReAct form, nothing is
executed. Calls are read with a real JSON decoder and compared with the gold; reward 1.0 or 0.0.
The authors' scorer reads `{.*?}` and `\\w+`, which lose nested JSON and names such as
"[Optional]updateUserProfile", and merges repeated calls; a perfect answer can score 0 there.
"""
import json
import re
from collections import Counter
from pathlib import Path

from data import bfcl, hub, thinking, tiny_rows
from data.bfcl import canonical

TRAIN = "toolalpaca"
THINK_TAGS = ("<think>", "</think>")

# No hub data set holds these: SDPO's processed ToolAlpaca (4,046 + 68 rows), BFCL's own files.
RAW = "https://raw.githubusercontent.com/"
SDPO = RAW + "lasgroup/SDPO/4f51688f49bfc707e6345d90390a29235a6bfeb9/datasets/tooluse/"
BFCL = (RAW + "ShishirPatil/gorilla/a6da28eeae63c47551517f6c4cd6381292adf6ee/"
        "berkeley-function-call-leaderboard/bfcl_eval/data/BFCL_v4_multiple.json")
PROCESSED_COLUMNS = {"prompt": str, "answer": str, "idx?": (int, str)}
TOOLALPACA_COLUMNS = {"Name": str, "Description": str, "NLDocumentation": str,  # an API a line
                      "Instructions?": [str], "Golden_Answers?": [[dict]], "Instances?": [dict]}
BFCL_COLUMNS = {"id": str, "question": [[{"content": str}]], "function": [dict]}

PROMPT = """Your task is to answer the user's question using available tools.{space}
You have access to the following tools:
Name: {name}
Description: {description}
Documentation:
{documentation}
Use the following format:
Thought: you should always think about what to do
Action: the action to take, should be one of the tool names.
Action Input: the input to the action, must be in JSON format. \
All of the action input must be realistic and from the user.

Begin!
Question: {question}"""


def load(source: str, split: str = "train", limit: int | None = None, seed: int = 0) -> list[dict]:
    """Rows of "tiny", "toolalpaca", "bfcl", or a .jsonl with processed rows, raw ToolAlpaca records
    or BFCL questions (answers beside it: X_possible_answer.jsonl or possible_answer/X)."""
    if source == "tiny":
        return tiny(split, limit, seed)
    path = {"toolalpaca": f"{SDPO}{split}.json", "bfcl": BFCL}.get(source, source)
    gold, rows = None, []
    for place, row in hub.read_rows(path, [PROCESSED_COLUMNS, TOOLALPACA_COLUMNS, BFCL_COLUMNS]):
        with hub.at(place, "a prompt and gold calls"):
            if "function" in row:
                gold = _possible_answers(path) if gold is None else gold
                rows.append(_bfcl_row(row, gold))
            elif "NLDocumentation" in row:
                rows += _toolalpaca_rows(row)
            else:
                if not _calls(row["answer"]):
                    raise ValueError("no gold call")
                rows.append(_row(row["prompt"], row["answer"], row.get("idx", len(rows))))
    return rows[:limit]


def _row(prompt: str, answer, name) -> dict:
    return {"messages": [{"role": "user", "content": prompt}], "answer": answer, "id": str(name)}


def _toolalpaca_rows(api: dict) -> list[dict]:
    """SDPO's rows of an API: byte for byte on the evaluation set, 68 of its 100 instructions.

    SDPO drops an instruction whose gold holds a "$" (a placeholder for an earlier call's result)
    or is no JSON. (I) The gold of a training record is its chain of intermediate steps.
    """
    if "Golden_Answers" in api:
        pairs = zip(api["Instructions"], api["Golden_Answers"], strict=True)
    else:
        pairs = ((item["input"], [{"Action": step[0][0], "Action_Input": step[0][1]}
                                  for step in item["intermediate_steps"]])
                 for item in api["Instances"])
    rows = []
    for n, (question, calls) in enumerate(pairs):
        try:
            usable = "$" not in json.dumps(calls) and _calls(calls)
        except ValueError:
            usable = False
        if usable:
            prompt = PROMPT.format(space=" ", name=api["Name"], description=api["Description"],
                                   documentation=api["NLDocumentation"], question=question)
            rows.append(_row(prompt, json.dumps(calls), f"{api['Name']}/{n}"))
    return rows


def _possible_answers(path: str) -> dict:
    folder, _, name = path.rpartition("/")
    beside = Path(path).with_name(f"{Path(path).stem}_possible_answer{Path(path).suffix}")
    answers = str(beside) if beside.exists() else f"{folder or '.'}/possible_answer/{name}"
    columns = {"id": str, "ground_truth": [dict]}
    return {row["id"]: row["ground_truth"] for _, row in hub.read_rows(answers, columns)}


def _bfcl_row(row: dict, gold: dict) -> dict:
    """The answer keeps the functions: the official rule needs types and required parameters."""
    about = "A set of functions/tools that you can use to answer the user's question."
    prompt = PROMPT.format(space="", name="Tools", description=about,
                           documentation=bfcl.documentation(row["function"]),
                           question=row["question"][0][-1]["content"])
    answer = {"functions": row["function"], "ground_truth": gold[row["id"]]}
    return _row(prompt, answer, row["id"])


# ---- the verifier ------------------------------------------------------------------------------

LABEL = re.compile(r"^[ \t>]*[*_`#]*Action[*_`]*[ \t]*:[ \t]*(.*)$", re.M)
INPUT = re.compile(r"\s*[*_`#]*Action Input[*_`]*[ \t]*:[*_`]*\s*(?:```(?:json)?\s*)?")


def parse(text: str) -> list[tuple[str, object, str]]:
    """The calls in order: (name, arguments, what is wrong with the format or "").

    CONVENTIONS. A call is a line `Action: name` and, blank lines aside (T05), a line
    `Action Input: {..}`; "Action:" within a line is prose. The name is the rest of its line, dots
    and brackets too. Bold and code marks round labels and name and a fence round the JSON are
    decoration (T06, T17). The first complete JSON value counts (T03) and labels inside it are data
    (T07); what follows, up to the next Action line, is ignored: prose, an invented Observation
    (T04), a stray brace. It must be an object; of a key given twice the last counts.
    """
    calls, position = [], 0
    while label := LABEL.search(text, position):
        name, arguments, position = label[1].strip(" \t\r*`\"'"), None, label.end()
        if begin := INPUT.match(text, position):
            try:
                arguments, position = json.JSONDecoder().raw_decode(text, begin.end())
                wrong = "" if isinstance(arguments, dict) else "its Action Input is no object"
            except (ValueError, RecursionError):  # decides the reward; and so time is linear
                return [*calls, (name, None, "its Action Input is not valid JSON")]
        else:
            wrong = "no line 'Action Input: {..}' follows it"
        calls.append((name, arguments, wrong))
    return calls


def _calls(answer) -> list[tuple[str, dict]]:
    """[{"Action", "Action_Input"}, ..], inputs dicts or JSON strings -> [(name, arguments), ..]."""
    return [(call["Action"], json.loads(call["Action_Input"])
             if isinstance(call["Action_Input"], str) else call["Action_Input"])
            for call in (json.loads(answer) if isinstance(answer, str) else answer)]


def score(response: str, answer) -> tuple[float, str]:
    """1.0 if the response, after its reasoning, makes exactly the gold calls: answer is
    [{"Action", "Action_Input"}, ..] or its JSON string, or BFCL's {"functions", "ground_truth"}.

    CONVENTIONS. The calls are a multiset (T11), in any order (T12), as in the authors' scorer: the
    rows do not say which call depends on which. Broken JSON in ANY call is 0 (T16).
    """
    try:
        calls = parse(thinking.after_thinking(response) or "")
        if not calls:
            return 0.0, ("There is no call after the reasoning; a call is a line 'Action: <tool>' "
                         "and a line 'Action Input: <JSON object>'.")
        answer = json.loads(answer) if isinstance(answer, str) else answer
        gold = _calls(answer) if isinstance(answer, list) else []
        wanted = Counter((name, canonical(arguments)) for name, arguments in gold)
        for n, (name, arguments, wrong) in enumerate(calls, 1):
            if not wrong and isinstance(answer, dict):
                wrong = bfcl.fault(answer, name, arguments) if n == 1 else "one call is enough here"
            elif not wrong:
                key = name, canonical(arguments)
                if wanted[key] == 0:
                    wrong = ("wrong arguments, or a call too many" if name in dict(gold)
                             else "this tool is not the right one here")
                wanted[key] -= 1
            if wrong:
                return 0.0, f"Call {n} ({name[:80]}): {wrong}."
        return (0.0, "A needed call is missing.") if wanted.total() else (1.0, "")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        return 0.0, f"The calls could not be compared ({type(error).__name__})."


def answer_of(response: str) -> str | None:
    """The calls after the reasoning in one canonical text, whatever their order, or None."""
    calls = parse(thinking.after_thinking(response) or "")
    return "\n".join(sorted(f"{name} {json.dumps(arguments, sort_keys=True)}"
                            for name, arguments, _ in calls)) or None


def render(answer) -> str:
    """The gold calls as a perfect response (BFCL: the first allowed values)."""
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if isinstance(answer, dict):
        answer = [bfcl.gold_call(answer)]
    return "\n".join(
        f"Thought: I call {call['Action']}.\nAction: {call['Action']}\nAction Input: "
        + (text if isinstance(text := call["Action_Input"], str) else json.dumps(text))
        for call in answer)


# ---- the download-free version ---------------------------------------------------------------

TOOLS = {  # name: (kinds of its arguments, a request, the word that tells it from its twin,
    # how often it is taken for its twin)
    "trains": ("from to", "a seat by rail from {} to {}", "rail", .45),
    "flights": ("from to", "a seat by air from {} to {}", "air", .6),
    "weather": ("city day", "the sun and rain in {} on {}", "rain", .4),
    "events": ("city day", "a concert in {} on {}", "concert", .6),
    "rooms": ("city guests", "beds in {} for {}", "beds", .4),
    "tables": ("city guests", "dinner in {} for {}", "dinner", .7)}
ARGUMENTS = {"from": ("start", "origin"), "to": ("end", "target"), "city": ("city", "place"),
             "day": ("day", "date"), "guests": ("guests", "count")}
DAYS = ["Monday", "Tuesday", "Friday", "Sunday"]


def tiny(split: str, n: int | None = None, seed: int = 0) -> list[dict]:
    """One call to one of three listed tools: a pair with the same arguments, and another. Names of
    arguments change from row to row. A careless call takes the twin, or swaps the two values."""

    def draw(rng):
        name = rng.choice(list(TOOLS))
        kinds, request, _, doubt = TOOLS[name]
        twin, = (tool for tool in TOOLS if tool != name and TOOLS[tool][0] == kinds)
        third = rng.choice([tool for tool in TOOLS if TOOLS[tool][0] != kinds])
        listed = {tool: [rng.choice(ARGUMENTS[kind]) for kind in TOOLS[tool][0].split()]
                  for tool in rng.sample([name, twin, third], 3)}
        city, other = rng.sample(tiny_rows.CITIES, 2)
        second = {"to": other, "day": rng.choice(DAYS), "guests": rng.randint(2, 9)}
        values = [city, second[kinds.split()[1]]]

        def work(tool, values):
            call = json.dumps(dict(zip(listed[tool], values, strict=True)))
            tail = f"\nAction: {tool}\nAction Input: {call}"
            signature = f"{tool}({', '.join(listed[tool])})"
            return (f"for {TOOLS[tool][2]} use {signature}{tail}",
                    f"use {signature} with {', '.join(map(json.dumps, values))}{tail}"), call

        def careless():
            twice = rng.random() < doubt, rng.random() < .1
            texts, _ = work(twin if twice[0] else name, values[::-1] if twice[1] else values)
            return rng.choice(texts), not any(twice)

        def finish():
            (right, also), call = work(name, values)
            return [{"Action": name, "Action_Input": call}], right, also, careless

        tools = ", ".join(f"{tool}({', '.join(names)})" for tool, names in listed.items())
        wish = request.format(*map(json.dumps, values))
        return f"Tools: {tools}\nQuestion: I need {wish}", finish

    return tiny_rows.collect("tooluse", split, n, seed, draw)
