"""BFCL v4 `multiple`: the leaderboard's official rule for one call, and its questions.

The rule is that of ast_checker for Python (bfcl-eval 2026.3.23), on all 200 rows. The paper's
author keeps the 60 rows where every parameter has one allowed value, and compares text.
"""
import json
import re


def documentation(functions: list[dict]) -> str:
    """The functions in the words of the paper's author, in the manner of ToolAlpaca."""
    text = ""
    for function in functions:
        required = function["parameters"].get("required", [])
        parameters = {name: f"{schema['type']}{'' if name in required else ' (optional)'}. "
                            f"{schema.get('description', '')}"
                      for name, schema in function["parameters"]["properties"].items()}
        text += (f"{function['name']}: {function['description']}\n"
                 f"Parameters: {json.dumps(parameters)}\n"
                 "Output: Successful response.\n - Format: application/json\n")
    return text


def gold_call(answer: dict) -> dict:
    """A call that the rule accepts: the first allowed values; left out where that is ""."""
    (name, options), = answer["ground_truth"][0].items()
    return {"Action": name, "Action_Input": _first([options])}


def _first(options: list):
    """The first allowed value; inside dicts, whose values are lists of them, likewise."""
    value = options[0]
    if isinstance(value, list):
        return [_first([item]) for item in value]
    if isinstance(value, dict):
        return {key: _first(item) for key, item in value.items() if item[0] != ""}
    return value


def canonical(value):
    """Hashable, and equal for equal JSON values. CONVENTIONS: true is not 1 (T09); 1 and 1.0 are
    one JSON number; strings are compared exactly; lists have an order, objects none (T10)."""
    if isinstance(value, dict):
        return "object", frozenset((key, canonical(item)) for key, item in value.items())
    if isinstance(value, list):
        return "list", tuple(canonical(item) for item in value)
    return isinstance(value, bool), value


TYPES = {"string": str, "any": str, "integer": int, "float": float, "boolean": bool,
         "array": list, "tuple": list, "dict": dict}


def fault(answer: dict, name: str, arguments: dict) -> str:
    """What BFCL's AST rule (bfcl-eval 2026.3.23, Python) finds wrong with a call, "" if nothing:
    the right name, all required parameters, none unknown, each value of its exact type (an integer
    may stand for a float) and among the allowed ones; "" among them: it may be left out.
    CONVENTION: true is never 1, the one difference to the official code."""
    (wanted, allowed), = answer["ground_truth"][0].items()
    if name != wanted:
        return "this tool is not the right one here"
    parameters = {f["name"]: f["parameters"] for f in answer["functions"]}[wanted]
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
