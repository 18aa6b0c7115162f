"""What the domains share: reading rows, and finding the answer in a response.

Rows come from a Hugging Face data set (memory-mapped by `datasets`) or from a local .jsonl file, or
a folder of them, with the same columns. Whatever is wrong with them is one DataError line that
says where, what was found and what would be right.
"""
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType

from data import thinking

# The last sentence of every mathematics and boxed multiple-choice prompt of the paper's recipe.
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# short name -> (hub id, config, split, revision). A revision stands here only where it is known;
# None takes the hub's current one, and whoever needs the exact rows again pins it here.
SOURCES: dict[str, tuple[str, str | None, str, str | None]] = {
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", None),
    "dapo_processed": ("open-r1/DAPO-Math-17k-Processed", "all", "train", None),
    "aime24": ("math-ai/aime24", None, "test", None),
    "aime25": ("math-ai/aime25", None, "test", None),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", None),
    "gsm8k": ("openai/gsm8k", "main", "train", None),
    "sciknoweval": ("hicai-zju/SciKnowEval", None, "test", None),
    "gpqa": ("Idavidrein/gpqa", "gpqa_diamond", "train", None),
    "mmlu_redux": ("edinburgh-dawg/mmlu-redux-2.0", "*", "test", None),
    "zebra": ("allenai/ZebraLogicBench-private", "mc_mode", "test", None),
    "zebra_grid": ("allenai/ZebraLogicBench-private", "grid_mode", "test", None),
    "dolci": ("allenai/Dolci-Think-RL-7B", None, "train", None),
    # main has a loading script, which datasets >= 4 refuses; refs/pr/6 is the copy without
    "lcb": ("livecodebench/code_generation_lite", None, "test", "refs/pr/6"),
    "mbpp": ("google-research-datasets/mbpp", "full", "train", None),
    "humaneval": ("openai/openai_humaneval", None, "test", None),
}


class DataError(ValueError):
    """One line: the place (file:line or hub id, split and row), what is wrong, what is right."""


_left_out: list[str] | None = None  # within skipping(): what is wrong with each row left out


@contextlib.contextmanager
def skipping(on: bool = True):
    """--skip_bad: rows that cannot be read are left out, and what was wrong with each is listed."""
    global _left_out
    listed = []
    _left_out = listed if on else None
    try:
        yield listed
    finally:
        _left_out = None


@contextlib.contextmanager
def at(place: str, right: str = "a row as the data set has them"):
    """One row is read: whatever is raised, hostile rows raise anything, becomes one DataError line
    with its place, or, within skipping(), leaves the row out."""
    try:
        yield
    except Exception as error:
        told = str(error) if isinstance(error, DataError) else (
            f"{place}: {type(error).__name__}: {error}; expected {right}")
        told = " ".join(told.split())
        if _left_out is None:
            raise DataError(told[:1000]) from error
        _left_out.append(told[:1000])


def read_rows(source: str, columns: dict | list[dict], split: str | None = None,
              config: str | None = None, revision: str | None = None) -> Iterator[tuple[str, dict]]:
    """Yields (place, row) of a short name, a hub id, a .jsonl file or URL, or a folder of files.

    columns: {name: type}, with type a Python type, a tuple of types, [type] for a list of it or
      {key: type} for a dict; a name that ends in "?" may be absent. A list of such dicts offers
      alternatives; the first row decides which one holds. Hub rows carry no other columns.
    split, config, revision: of a hub data set, where they differ from SOURCES; config "*" is all of
      them. A file is one split already and ignores all three.
    Raises DataError for an unknown source, an empty one, bad JSON, a missing or mistyped column;
    the rows themselves may be left out instead, see skipping().
    """
    alternatives = columns if isinstance(columns, list) else [columns]
    if Path(source).exists() or source.endswith((".jsonl", ".json")):
        rows = _file_rows(source)
    else:
        rows = _hub_rows(source, alternatives, split, config, revision)
    chosen = None
    for place, row in rows:
        # until one is chosen: the alternative with the fewest faults explains itself best
        best = chosen or min(alternatives, key=lambda columns: len(_faults(row, columns)))
        faults = _faults(row, best)
        if not faults:
            chosen = best
            yield place, row
            continue
        with at(place):
            wanted = ", ".join(f"{name} {_name(kind)}" for name, kind in best.items())
            raise DataError(f"{place}: {faults[0]}; the columns are: {wanted}")
    if chosen is None:
        raise DataError(_left_out[0] if _left_out else
                        f"{source}: no rows; expected one JSON object a line")


def _file_rows(source: str) -> Iterator[tuple[str, dict]]:
    path = Path(source)
    if source.startswith("https://"):
        import datasets
        try:
            path = Path(datasets.DownloadManager().download(source))  # kept in the data sets' cache
        except Exception as error:
            raise DataError(f"{source}: {type(error).__name__}: {error}; a local copy of the file "
                            "works too") from error
    elif not path.exists():
        raise DataError(f"{path}: no such file")
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = None
                with at(f"{file}:{number}"):
                    row = _object(line, f"{file}:{number}")
                if row is not None:
                    yield f"{file}:{number}", row


def _object(line: bytes, place: str) -> dict:
    try:
        row = json.loads(line)
        if b"\\ud" in line.lower() or b"\xed" in line:  # half a character: no tokenizer takes it
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 alike
        raise DataError(f"{place}: not JSON ({error}); expected one object a line, in "
                        "UTF-8") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: a {type(row).__name__}, expected an object")
    return row


def _hub_rows(source, alternatives, split, config, revision) -> Iterator[tuple[str, dict]]:
    known = SOURCES.get(source) or next((s for s in SOURCES.values() if s[0] == source), None)
    if known is None and not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise DataError(f"{source}: unknown source; give a .jsonl file, a hub id (owner/name) or "
                        f"one of {', '.join(SOURCES)}")
    hub, own_config, own_split, own_revision = known or (source, None, "train", None)
    split, config, revision = split or own_split, config or own_config, revision or own_revision
    import datasets  # here, because it takes a second
    try:
        configs = (sorted(datasets.get_dataset_config_names(hub, revision=revision))
                   if config == "*" else [config])
        parts = [datasets.load_dataset(hub, name, split=split, revision=revision)
                 for name in configs]
    except Exception as error:  # offline, gated, renamed: the hub raises many kinds
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{hub} (config {config}, split {split}): {type(error).__name__}: {reason}"
                        "; a local .jsonl file with the same columns works too") from error
    wanted = {column.rstrip("?") for columns in alternatives for column in columns}
    for name, part in zip(configs, parts, strict=True):
        kept = [column for column in part.column_names if column in wanted]
        part = part.select_columns(kept) if kept else part  # none: the check lists what there is
        done = 0
        for batch in part.iter(1000):  # whole batches: ten times faster than row by row
            for values in zip(*batch.values(), strict=True):
                row = dict(zip(batch, values, strict=True))
                yield f"{hub}[{name or 'default'}/{split}] row {done}", row
                done += 1


def _faults(row: dict, columns: dict) -> list[str]:
    """What is wrong with a row, a column at a time, e.g. 'no column "answer"'."""
    faults = []
    for name, kind in columns.items():
        if name.rstrip("?") not in row:
            if not name.endswith("?"):
                faults.append(f'no column "{name}" (found: {", ".join(map(str, row))[:200]})')
        elif not _fits(row[name.rstrip("?")], kind):
            value = row[name.rstrip("?")]
            faults.append(f'column "{name.rstrip("?")}" is {type(value).__name__} '
                          f"{repr(value)[:60]}, expected {_name(kind)}")
    return faults


def _fits(value, kind) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(k in value and _fits(value[k], v)
                                               for k, v in kind.items())
    return isinstance(value, kind) and not isinstance(value, bool)


def _name(kind) -> str:
    if isinstance(kind, list):
        return f"[{_name(kind[0])}, ..]"
    if isinstance(kind, dict):
        return "{" + ", ".join(f"{k}: {_name(v)}" for k, v in kind.items()) + "}"
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if k is NoneType else k.__name__ for k in kinds)


# ---- the answer in a response ----------------------------------------------------------------

def boxed(response: str) -> tuple[str | None, str]:
    r"""(what the last \boxed{..} after the reasoning holds, ""), or (None, why there is none)."""
    text = thinking.after_thinking(response)
    if text is None:
        return None, "The reasoning was never closed, so there is no answer after it."
    box = last_boxed(text)
    return box, "There is no complete \\boxed{..} in the answer." if box is None else ""


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{..}, braces balanced, escaped ones not counted; the
    outermost of nested boxes. None without one. One pass: a collapsed model writes thousands."""
    stack, found = [], None
    for brace in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if brace.group() == "}":
            start = stack.pop() if stack else None
            if start is not None:
                found = text[start:brace.start()]
        elif brace.group()[-1] == "{" and (brace.group() == "{" or "boxed" in brace.group()):
            stack.append(brace.end() if "boxed" in brace.group() else None)
    return found
