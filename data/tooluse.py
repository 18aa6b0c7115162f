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

from data import hub

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
        try:
            if "function" in row:
                gold = _possible_answers(path) if gold is None else gold
                rows.append(_bfcl_row(row, gold))
            elif "NLDocumentation" in row:
                rows += _toolalpaca_rows(row)
            else:
                if not _calls(row["answer"]):
                    raise ValueError("no gold call")
                rows.append(_row(row["prompt"], row["answer"], row.get("idx", len(rows))))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise hub.DataError(f"{place}: {error!r}; expected a prompt and gold calls") from error
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
    """A BFCL question in the words of the paper's author; the answer keeps the functions, whose
    types and required parameters the official rule needs."""
    text = ""
    for function in row["function"]:
        required = function["parameters"].get("required", [])
        parameters = {name: f"{schema['type']}{'' if name in required else ' (optional)'}. "
                            f"{schema.get('description', '')}"
                      for name, schema in function["parameters"]["properties"].items()}
        text += (f"{function['name']}: {function['description']}\n"
                 f"Parameters: {json.dumps(parameters)}\n"
                 "Output: Successful response.\n - Format: application/json\n")
    about = "A set of functions/tools that you can use to answer the user's question."
    prompt = PROMPT.format(space="", name="Tools", description=about, documentation=text,
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
                wrong = "" if isinstance(arguments, dict) else "its Action Input is no JSON object"
            except (ValueError, RecursionError):  # the first one decides the reward: stop, so that
                return [*calls, (name, None, "its Action Input is not valid JSON")]  # time is linear
        else:
            wrong = "no line 'Action Input: {..}' follows it"
        calls.append((name, arguments, wrong))
    return calls


def canonical(value):
    """Hashable, and equal for equal JSON values. CONVENTIONS: true is not 1 (T09); 1 and 1.0 are
    one JSON number; strings are compared exactly; lists have an order, objects none (T10)."""
    if isinstance(value, dict):
        return "object", frozenset((key, canonical(item)) for key, item in value.items())
    if isinstance(value, list):
        return "list", tuple(canonical(item) for item in value)
    return isinstance(value, bool), value


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
        calls = parse(hub.after_thinking(response) or "")
        if not calls:
            return 0.0, ("There is no call after the reasoning; a call is a line 'Action: <tool>' "
                         "and a line 'Action Input: <JSON object>'.")
        answer = json.loads(answer) if isinstance(answer, str) else answer
        gold = _calls(answer) if isinstance(answer, list) else []
        wanted = Counter((name, canonical(arguments)) for name, arguments in gold)
        for n, (name, arguments, wrong) in enumerate(calls, 1):
            if not wrong and isinstance(answer, dict):
                wrong = bfcl_fault(answer, name, arguments) if n == 1 else "one call is enough here"
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


TYPES = {"string": str, "any": str, "integer": int, "float": float, "boolean": bool,
         "array": list, "tuple": list, "dict": dict}


def bfcl_fault(answer: dict, name: str, arguments: dict) -> str:
    """What BFCL's AST rule (bfcl-eval 2026.3.23, Python) finds wrong with a call, "" if nothing:
    the right name, all required parameters, none unknown, each value of its exact type (an integer
    may stand for a float) and among the allowed ones; "" among them: it may be left out.
    CONVENTION: true is never 1, the one difference to the official code."""
    (wanted, allowed), = answer["ground_truth"][0].items()
    if name != wanted:
        return "this tool is not the right one here"
    parameters = next(f["parameters"] for f in answer["functions"] if f["name"] == wanted)
    for key, value in arguments.items():
        if key not in parameters["properties"] or key not in allowed:
            return f"parameter {key[:80]!r} is not expected"
        if not _allowed(value, allowed[key], parameters["properties"][key]):
            return f"parameter {key[:80]!r} has a wrong type or value"
    needed = {key for key, options in allowed.items() if "" not in options}
    missing = needed.union(parameters.get("required", [])) - set(arguments)
    return "a parameter is missing" if missing else ""


def _allowed(value, options: list, schema: dict) -> bool:
    kind, inner = TYPES[schema["type"]], schema.get("items", {}).get("type")
    value = float(value) if schema["type"] == "float" and type(value) is int else value
    gold = next((type(option) for option in options if option != ""), kind)
    if type(value) is not kind or gold is not kind:  # the gold names a variable, not a value
        return type(value) in (kind, gold) and canonical(value) in map(canonical, options)
    if kind is dict:
        return any(_dict_allowed(value, option) for option in options)
    if kind is list:
        lists = [option or [] for option in options]  # the official code reads "" as [] here
        if inner == "dict":
            return any(len(value) == len(option) and all(map(_dict_allowed, value, option))
                       for option in lists)
        typed = [{*map(type, value)} <= {TYPES[inner], *map(type, option[:1])} for option in lists]
        return (any(typed) or "" in options) and _among(value, lists)
    return _among(value, options)


def _dict_allowed(value, option) -> bool:
    """A dict against one allowed dict, which holds lists of allowed values."""
    return (isinstance(value, dict) and isinstance(option, dict) and set(value) <= set(option)
            and all(_among(item, option[key]) for key, item in value.items())
            and all(key in value or "" in options for key, options in option.items()))


def _among(value, options: list) -> bool:
    return canonical(_loose(value)) in [canonical(_loose(option)) for option in options]


def _loose(value):
    """BFCL ignores case, spaces, ,./-_*^ and the kind of quotes in strings and lists of them."""
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
    if isinstance(value, list):
        return [_loose(item) if isinstance(item, str) else item for item in value]
    return value


def _first(options: list):
    """BFCL: the first allowed value; inside dicts, whose values are lists of them, likewise."""
    value = options[0]
    if isinstance(value, list):
        return [_first([item]) for item in value]
    if isinstance(value, dict):
        return {key: _first(item) for key, item in value.items() if item[0] != ""}
    return value


def render(answer) -> str:
    """The gold calls as a perfect response (BFCL: the first allowed values)."""
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if isinstance(answer, dict):
        (name, options), = answer["ground_truth"][0].items()
        answer = [{"Action": name, "Action_Input": _first([options])}]
    return "\n".join(
        f"Thought: I call {call['Action']}.\nAction: {call['Action']}\nAction Input: "
        + (text if isinstance(text := call["Action_Input"], str) else json.dumps(text))
        for call in answer)
