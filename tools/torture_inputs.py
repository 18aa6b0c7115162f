"""Hostile programs, texts and rows, by the thousand: what is fed to a run that is left alone.

    python tools/torture_inputs.py [--quick] [--part programs] [--json rows.json]

Each part yields rows {"fault", "tried", "survived", "seconds", "note"}; `tools/torture.py` prints
them with its own. Exit code 1 where something did not survive; the note names the first of them.
"""
import argparse
import base64
import contextlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import TASKS, coding, coding_judge, hub, math_workers, sandbox  # noqa: E402

SYSTEM = "/usr/bin/python3"  # which all users can read, as the user of a program must
HOSTILE, ROWS = ROOT / "tests" / "hostile", ROOT / "tests" / "rows"


def row(fault, results, began, note=""):
    """One line of the table. results: (name, "" or what went wrong) of each that was tried."""
    wrong = [f"{name}: {told}" for name, told in results if told]
    print(*wrong[3:], sep="\n", end="\n" * (len(wrong) > 3), file=sys.stderr)  # the note has three
    return {"fault": fault, "tried": len(results), "survived": len(results) - len(wrong),
            "seconds": round(time.monotonic() - began, 1),
            "note": "; ".join([*([note] if note else []), *wrong[:3]])}


# ---- programs ------------------------------------------------------------------------------------

SUM = {"tests": [{"input": "3\n1 2 3\n", "output": "6"}, {"input": "2\n-5 4\n", "output": "-1"}]}
ADD = [{"fn_name": "add", "tests": [{"input": "1\n2", "output": "3"},
                                    {"input": "20\n-7", "output": "13"}]}] + [
    {"asserts": [form.format("add(1, 2)", 3), form.format("add(20, -7)", 13)]} for form in (
        "assert {} == {}", "assert abs({} - {}) < 1e-6", "assert {} == int('{}')",
        "assert isinstance({0}, int) and {0} in [{1}]", "assert round({}, 3) == {} and True")]
HELP = """def win():
    input(); print(sum(map(int, input().split())), flush=True)
"""


def programs(name, **words):
    """(name, program) of the sections of a file in tests/hostile; escape.txt tells the format."""
    for section in (HOSTILE / f"{name}.txt").read_text().split("\n## ")[1:]:
        head, _, program = section.partition("\n")
        title, _, variants = head.partition(" | ")
        word, _, values = variants.partition(": ")
        for value in values.split("; ") if values else [""]:
            text = re.sub(rf"\b{word}\b", lambda _, v=value: v, program) if word else program
            for key, meant in {**words, "NULL": "\0", "SURROGATE": "\udcff\ud800"}.items():
                text = text.replace(key, meant)
            yield f"{title} {value}".strip(), text


def cases():
    """Those of the shared cases that must score 0, with the programs."""
    for line in (ROWS / "cases.jsonl").open():
        case = json.loads(line)
        if case["area"] == "code-reward" and case["expected"].get("reward") == 0:
            task = SUM if case["input"]["task"].startswith("stdin") else ADD[1]
            yield case["id"], case["input"]["program"], task


def left_behind(folder, outside):
    """What programs left: processes (of a launcher's command line, or of a sandbox's users), files
    in the temporary folder and outside of it, System V memory."""
    found = [*map(str, folder.iterdir()), *map(str, outside.iterdir())]
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            mine = b"marshal.load(file)" in line and f"\0{os.getpid()}\0".encode() in line
            parent = Path(f"/proc/{name}/status").read_text().split("PPid:")[1].split()[0]
            if mine or parent == str(os.getpid()) and b"math_workers" not in line:
                found.append(f"process {name} {line[:80]}")
    return found + [line for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
                    if f"{0x746f7274}" in line]


def hostile_programs(quick):
    """Each scores 0 and the right ones 1, one at a time and 64 at once; then nothing is left."""
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    outside, boxes = folder / "outside", folder / "boxes"
    for part in outside, boxes:
        part.mkdir()
    folder.chmod(0o755)
    outside.chmod(0o777)
    old, tempfile.tempdir = tempfile.tempdir, str(boxes)
    seconds = coding_judge.SECONDS
    words = {"OUTSIDE": str(outside), "TRAINER": str(os.getpid()), "REPOSITORY": str(ROOT)}
    modes = [mode for mode in sandbox.MODES if sandbox.run("print(6)", mode=mode).stdout == "6\n"]
    run, descriptors = sandbox.run, len(os.listdir("/proc/self/fd"))
    try:
        for mode in modes[:1] if quick else modes:
            jobs = [(name, HELP * (kind == "escape") + text, SUM, 0)
                    for kind in ("escape", "exhaust", "forge_output")
                    for name, text in programs(kind, **words)
                    if mode == "namespaces" or not re.search(r" \*( |$)", name)]
            jobs += [(f"{name} (test {n})", text, answer, 0)
                     for name, text in programs("forge_value") for n, answer in enumerate(ADD)]
            jobs += [(name, text, task, 0) for name, text, task in cases()]
            right = [(name, text, SUM, 1) for name, text in programs("right")]

            def one(job, mode=mode):
                name, program, answer, wanted = job
                started = time.monotonic()
                reward, told = coding.score(f"```python\n{program}\n```", answer)
                late = time.monotonic() - started > 2 * coding_judge.SECONDS + 15
                wrong = f"reward {reward}, not {wanted}: {told}" if reward != wanted else ""
                return name, wrong or ("late" if late else "")

            sandbox.run = lambda *a, mode=mode, **k: run(*a, **{**k, "mode": mode})
            for threads, most, coding_judge.SECONDS in ((4, 400, 12.0), (64, 9999, 20.0)):
                most = (24 if threads == 4 else 8) if quick else most
                hostile = random.Random(threads).sample(jobs, min(most, len(jobs)))
                mixed = hostile + right[:most]  # the last come while the first still hang
                random.Random(0).shuffle(mixed)
                coding_judge._verdicts.clear()
                began, before = time.monotonic(), memory()
                with ThreadPoolExecutor(threads) as pool:
                    results = list(pool.map(one, mixed))
                left, grown = left_behind(boxes, outside), memory() - before
                results.append(("nothing left behind", ", ".join(left)))
                results.append(("the trainer's memory", f"{grown} MB" * (grown > 300)))
                more = len(os.listdir("/proc/self/fd")) - descriptors
                results.append(("the trainer's descriptors", f"{more} more" * (more > 2)))
                yield row(f"hostile programs, {threads} at once, {mode}", results, began,
                          f"{len(hostile)} hostile: reward 0; {len(mixed) - len(hostile)} right: "
                          "reward 1")
    finally:
        sandbox.run, tempfile.tempdir, coding_judge.SECONDS = run, old, seconds
        shutil.rmtree(folder)
    if not quick and modes == ["namespaces"] and os.path.exists(SYSTEM):
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run([SYSTEM, __file__, "--part", "programs", "--mode", "subreaper",
                            "--json", file.name], stdout=subprocess.DEVNULL, check=False)
            yield from json.loads(Path(file.name).read_text() or "[]")

# ---- verifiers -----------------------------------------------------------------------------------

FILES = {"math": ["dapo", "aime24", "aime25", "math500", "gsm8k"],
         "science": ["sdpo_sciknoweval_chemistry"],
         "tooluse": ["tooluse", "toolalpaca_raw", "bfcl"],
         "coding": ["dolci", "mbpp", "humaneval"],
         "logic": ["zebra_private_mc.shape", "zebra_private_grid.shape"],
         "knowledge": ["mmlu_redux_anatomy", "gpqa_diamond.shape"]}
PIECES = ["\\boxed{", "}", "{", "<think>", "</think>", "<reasoning>", "<answer>", "</answer>", "\n",
          "Action: ", "\nAction Input: ", "```", "```python\n", "\\frac{1}{", "^{", "\\text{", "$",
          "\\sqrt", "\\begin{pmatrix}", "\\infty", "\\cup", "\\pm", "!", "%", "=", ":", ",", "e999",
          "nan", "[", "]", "(", '"', "\\", "\\\\", "A", "b", "1/0", "\0", "\ud800", "\u202e",
          "\U0001f600", "\u0661", "\x1b[2K", "9" * 400, '{"House 1": ', "null", "import os\n",
          "def add(", " ", "\r"]
BOMBS = [
    "9^{9^{9^{9}}}", "(10^{10^{10}})!", "170!!!", "10^{10^8}", "\\frac{10^{9^9}}{10^{9^9}+1}",
    "\\sum_{n=1}^{10^{12}} \\frac{1}{n}", "\\prod_{n=1}^{10^9} n", "\\binom{10^9}{5\\cdot10^8}",
    "\\int_0^1 \\frac{\\sin^{99} x}{x^{33}+e^{x^2}} dx", "\\lim_{x\\to0} x^{x^{x^{x}}}",
    "(x+y+z+w)^{400}", "\\sqrt{" * 80 + "2" + "}" * 80, "\\frac{1}{1+" * 40 + "1" + "}" * 40,
    "(" * 240 + "1" + ")" * 240, "2" + "^{2" * 60 + "}" * 60, "1" + "+1" * 240, "9" * 499,
    "\\begin{pmatrix}" + "\\\\".join("&".join("x" * 9) for _ in range(9)) + "\\end{pmatrix}^{99}",
    "\\{" + ",".join(map(str, range(120))) + "\\}", "x" * 499, "-" * 499, "\\sin" * 120 + "x",
    "0." + "3" * 480, "1e999999999", "\\log_{10}(9^{9^{9}})", "2^{2^{40}} \\bmod 7", "F_{10^{18}}",
    "1" + "," * 490 + "1", "1:" * 240 + "1", "x=" * 240 + "1", "\\text{" * 80 + "a" + "}" * 80,
    "[1," * 160 + "]" * 160, "\\cup".join(f"({n},{n + 1})" for n in range(40)), "|" * 499,
    "\\cos(1)" + "\\cdot\\cos(1)" * 35, "x^{99999999}-x^{99999998}", "\\pm" * 160 + "1"]


def golds(name):
    """The rows of a domain in tests/rows."""
    return [row for file in FILES[name] for row in TASKS[name].load(str(ROWS / f"{file}.jsonl"))]


def mutated(text, rng):
    """The text after one to five accidents."""
    for _ in range(rng.randint(1, 5)):
        a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
        text = rng.choice((
            lambda: text[:a] + text[b:], lambda: text[:b] + text[a:], lambda: text[:a],
            lambda: text[b:] + text[:b], lambda: text[:a] + rng.choice(PIECES) + text[a:],
            lambda: text[:a] + rng.choice(PIECES) * rng.choice((2, 9, 500)) + text[b:],
            lambda: text[:a] + text[a:b].swapcase() + text[b:],
            lambda: text[:a] + chr(rng.randrange(0x110000)) + text[a + 1:]))()
    return text


def generated(count, seed=0):
    """Texts by hypothesis: any Unicode, and what the verifiers look for in any order."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    found = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(st.text(st.characters(), max_size=300)
           | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
    def collect(text):
        found.append(text)

    collect()
    return found[:count]


def verdict(task, text, answer, limit):
    """What is wrong with how a verifier takes a text, and the reward."""
    began = time.monotonic()
    try:
        reward, told = task.score(text, answer)
        named = task.answer_of(text)
    except BaseException as error:
        return f"raised {error!r}"[:200], None
    late = time.monotonic() - began
    fine = reward in (0.0, 1.0) and isinstance(told, str) and bool(told) == (reward == 0) and (
        named is None or isinstance(named, str))
    told = "" if not told or "too long" not in told and "time limit" not in told else "clock"
    return "" if fine and late < limit else f"gave {reward!r} after {late:.1f} s", told or reward


def verifiers(quick):
    """10,000 texts a verifier, half of them gold answers after accidents: twice the same reward,
    first in this thread, then in eight; nothing is raised and no limit is passed."""
    limit, math_workers.LIMIT = math_workers.LIMIT, 2.0
    seconds, coding_judge.SECONDS = coding_judge.SECONDS, 2.0
    try:
        for name, task in TASKS.items():
            began, rng = time.monotonic(), random.Random(name)
            rows = golds(name)
            if name == "coding":  # those with a known solution
                rows = [row for row in rows if row["answer"].keys() & {"solution", "tests"}]
            count = (10 if name == "coding" else 100) if quick else 10000
            jobs = [(text, rng.choice(rows)["answer"]) for text in generated(count // 2)]
            for _ in range(count - len(jobs)):
                answer = rng.choice(rows)["answer"]
                jobs.append((mutated(task.render(answer), rng), answer))

            def one(job, task=task):
                return verdict(task, *job, limit=60)  # while others wait for the same two workers

            first = list(map(one, jobs)) if name != "coding" else None
            with ThreadPoolExecutor(8) as pool:
                first = first or list(pool.map(one, jobs))
                coding_judge._verdicts.clear()
                second = list(pool.map(one, jobs))
            results, late = [], 0
            for (text, _), (wrong, x), (also, y) in zip(jobs, first, second, strict=True):
                late += "clock" in (x, y)
                differs = x != y and "clock" not in (x, y)
                results.append((repr(text)[:80], wrong or also or f"{x}, then {y}" * differs))
            yield row(f"{name}: any text, twice", results, began,
                      f"{sum(x == 1 for _, x in first)} right, {late} stopped by the clock")
        yield from (adversarial(quick), huge(quick))
    finally:
        math_workers.LIMIT, coding_judge.SECONDS = limit, seconds


def adversarial(quick):
    """Expressions that take for ever: each ends within its limit and the start of a new worker, for
    as many as wait before it, in one thread and in eight; a worker has 2 GB of address space."""
    began, before, task, results = time.monotonic(), memory(), TASKS["math"], []
    math_workers.close()
    math_workers.equal("1", "2")
    start = time.monotonic() - began  # seconds that a worker takes to start on this machine now
    for threads in 1, 8:
        wait = (math_workers.LIMIT + 3 * start + 1) * (1 + threads / math_workers.WORKERS)
        jobs = [(f"\\boxed{{{bomb}}}", "\\frac{1}{3}" if threads == 1 else f"{bomb}+1")
                for bomb in (BOMBS[:1] if quick else BOMBS)]
        with ThreadPoolExecutor(threads) as pool:
            results += pool.map(lambda job, wait=wait: (job[0][:60], verdict(task, *job, wait)[0]),
                                jobs)
    results.append(("the trainer's memory", f"{memory() - before} MB" * (memory() - before > 200)))
    return row("mathematics that explodes, in 1 and 8 threads", results, began,
               f"a worker took {start:.1f} s to start, each text had {wait:.0f} s at most")


def huge(quick):
    """Texts of 1 MB, from one piece or from noise, at every verifier."""
    began, rng, results, size = time.monotonic(), random.Random(1), [], 1 << 20
    texts = [piece * (size // len(piece)) for piece in (PIECES[::24] if quick else PIECES)]
    texts += ["".join(rng.choices(PIECES, k=size // 8)) for _ in range(1 if quick else 20)]
    texts += [f"\\boxed{{{'1+' * (size // 2)}1}}", "<answer>" + "A" * size + "</answer>",
              'Action: a\nAction Input: {"a": "' + "x" * size + '"}',
              '{"House 1": ' + '{"a":' * (size // 5),
              "```python\n" + "x = 1\n" * (size // 6) + "```"]
    for name, task in TASKS.items():
        answer = golds(name)[0]["answer"]
        for text in texts:
            results.append((f"{name} {text[:20]!r}..", verdict(task, text, answer, 10)[0]))
    return row("answers of 1 MB, every verifier", results, began)


# ---- rows ----------------------------------------------------------------------------------------

LOADERS = [(task, name) for task, names in {
    **FILES, "science": ["sciknoweval", "sdpo_sciknoweval_chemistry"],
    "math": [*FILES["math"], "dapo_processed"], "coding": [*FILES["coding"], "lcb"]}.items()
    for name in names]
VALUES = [
    None, True, 0, -1, 1.5, 10**30, "", " ", "\0", "a\0b", "\ud800", "x" * 100_000, [], {},
    [[]], [None], {"a": None}, [1, "a"], "NaN", float("nan"), "[" * 5000, "{", "\\boxed{", "J",
    "9" * 5000]


def spoilt(record, rng):
    """A line of a file, as bytes: the record after an accident, and which."""
    record = json.loads(json.dumps(record))
    spot, keys = record, [rng.choice(list(record))]
    while isinstance(spot[keys[-1]], (dict, list)) and spot[keys[-1]] and rng.random() < .6:
        spot = spot[keys[-1]]
        keys.append(rng.choice(list(spot)) if isinstance(spot, dict) else rng.randrange(len(spot)))
    kind, value = rng.randrange(9), rng.choice(VALUES)
    if kind == 0:
        del spot[keys[-1]]
    elif kind < 5:
        spot[keys[-1]] = value
    elif kind == 5 and isinstance(spot[keys[-1]], str):
        spot[keys[-1]] = mutated(spot[keys[-1]], rng)
    line = json.dumps(record).encode()
    if kind == 6:
        cut = rng.randrange(len(line))
        bad = rng.choice([b"", b"\xff\xfe", b"\xed\xa0\x80", b"\0", b'"', b"}", b"\r"])
        line = line[:cut] + bad + (line[cut:] if rng.random() < .5 else b"")
    if kind == 7:
        line = rng.choice([b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b"null", b"[]",
                           b'"a"', line * 2, b"\xef\xbb\xbf" + line, line.decode().encode("utf-16"),
                           b"\x80\x04\x95", b'{"' + b"x" * (8 << 20) + b'": 1}'])
    if kind == 8:
        line = line + b"\n" + line  # the same id twice
    return line.replace(b"\r", b"") if line.strip() else b"{}"


def loaded(task, path, *skip):
    """What a loader makes of a file: (rows, its one line, what is wrong with either)."""
    try:
        rows = task.load(str(path))
    except hub.DataError as error:
        lines = str(error).splitlines()
        fine = len(lines) == 1 and re.match(rf"{re.escape(str(path))}(:\d+)?: ", lines[0])
        return [], lines[0], "" if fine else f"refused without a place: {error!r}"[:300]
    except BaseException as error:
        return [], "", f"raised {error!r}"[:300]
    for row in rows:
        texts = [message["content"] for message in row["messages"]]
        try:
            "".join([*texts, row["id"]]).encode()
            with contextlib.suppress(ValueError):  # as in batches.gold_scores
                perfect = task.render(row["answer"])
                "coding" in task.__name__ or task.score(perfect, row["answer"])
        except Exception as error:
            return rows, "", f"loaded a row that breaks the run: {error!r}"[:300]
    return rows, "", ""


def loaders(quick):
    """Each accident alone between two good rows, then all of them in one file under --skip_bad."""
    for name, file in LOADERS:
        began, rng, task = time.monotonic(), random.Random(file), TASKS[name]
        good = (ROWS / f"{file}.jsonl").read_bytes().splitlines()
        good = good[:4] if file == "lcb" else good  # its fifth is a hostile pickle
        folder = Path(tempfile.mkdtemp(prefix="torture-"))
        path, results, refused = folder / "rows.jsonl", [], 0
        if file == "bfcl":
            shutil.copy(ROWS / "bfcl_possible_answer.jsonl", folder / "rows_possible_answer.jsonl")
        lines = [spoilt(json.loads(rng.choice(good)), rng) for _ in range(10 if quick else 1000)]
        lines = [line for line in lines if line.count(b"\n") < 2]
        alone = lines[:100] if file == "sciknoweval" else lines  # datasets takes 0.3 s to split
        for line in alone:
            path.write_bytes(b"\n".join([good[0], line, *good[1:]]) + b"\n")
            _, told, wrong = loaded(task, path)
            results.append((repr(line[:60]), wrong))
            refused += (1 + line.count(b"\n")) * bool(told)
        path.write_bytes(b"\n".join([*good, *lines]) + b"\n")
        with hub.skipping() as skipped:
            rows, told, wrong = loaded(task, path)
        free = alone is not lines or "dapo" in file  # where a copy is dropped before it is read
        counted = (len(skipped) == refused or free) and rows and all(
            re.match(rf"{re.escape(str(path))}:\d+: .*", told, re.DOTALL) for told in skipped)
        results.append(("--skip_bad", wrong or told or "" if counted else
                        f"{len(skipped)} left out, {refused} refused; {told}"))
        shutil.rmtree(folder)
        yield row(f"{name} rows ({file})", results, began, f"{len(alone)} alone: {refused} lines "
                  f"refused; {len(lines)} at once: --skip_bad counts {len(skipped)}")


# ---- pickles and other people's code -------------------------------------------------------------

def hostile_pickles(canary):
    """(name, bytes): pickles that would write a file, or take all memory."""
    class Touch:
        def __init__(self, call, *args):
            self.call, self.args = call, args

        def __reduce__(self):
            return self.call, self.args

    path = str(canary)
    calls = {
        "open": Touch(open, path, "w"), "system": Touch(os.system, f"touch {path}"),
        "eval": Touch(eval, f"open({path!r}, 'w')"), "mkdir": Touch(os.mkdir, path),
        "in a list": [Touch(open, path, "w")], "a key": {Touch(open, path, "w"): 1},
        "in a test": [{"input": Touch(open, path, "w"), "output": "1"}], "a class": [Path],
        "import": Touch(__import__, "antigravity"), "suppress": Touch(contextlib.suppress)}
    for name, value in calls.items():
        yield from ((f"{name}, protocol {n}", pickle.dumps(value, n)) for n in range(6))
    text = path.encode()
    yield "inst", b"(S'" + text + b"'\nS'w'\nibuiltins\nopen\n."
    yield "global and reduce", b"cbuiltins\nopen\n(S'" + text + b"'\nS'w'\ntR."
    yield "obj", b"(cbuiltins\nopen\nS'" + text + b"'\nS'w'\no."
    yield "a name with lines in it", b"\x80\x04\x8c\x04os\n\n\x8c\x06sys\n\nx\x93."
    yield "persistent", b"Pos\n."
    yield "extension", b"\x80\x02\x82\x01."
    yield "a memo of 16 GB", b"\x80\x02]r\xff\xff\xff\x7f."
    yield "a text of 2^62 bytes", b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x."
    yield "an array of 2^40 bytes", b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x."
    nested = "x"
    for _ in range(40):
        nested = [nested, nested]
    yield "2^40 texts in 40 lists", pickle.dumps([nested])
    yield "deep", b"(" * 100000 + b"l" * 100000 + b"."
    yield "nothing", b""
    yield "cut off", pickle.dumps(["a" * 100])[:-20]


def pickles(quick):
    """Tests, checkpoints and models that are pickles or bring code: refused, nothing is run."""
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    canary, began, results = folder / "canary", time.monotonic(), []
    records = {"lcb": (json.loads((ROWS / "lcb.jsonl").read_text().splitlines()[0]),
                       lambda row, text: row.update(private_test_cases=text)),
               "dolci": (json.loads((ROWS / "dolci.jsonl").read_text().splitlines()[1]),
                         lambda row, text: row.update(ground_truth=[text]))}
    for name, data in hostile_pickles(canary):
        for file, (record, put) in records.items():
            forms = {"zlib": base64.b64encode(zlib.compress(data)).decode(),
                     "twice": base64.b64encode(zlib.compress(zlib.compress(data))).decode(),
                     "latin": data.decode("latin-1"), "base64": base64.b64encode(data).decode()}
            for form, text in forms.items():
                put(record, text)
                path = folder / "rows.jsonl"
                path.write_text(json.dumps(record) + "\n")
                rows, told, wrong = loaded(TASKS["coding"], path)
                wrong = wrong or "loaded" * bool(rows) or "was run" * canary.exists()
                results.append((f"{file}, {form}, {name}", wrong))
    yield row("pickles as tests, by load()", results, began)
    began, results = time.monotonic(), []
    for name, told in hostile_checkpoints(folder, canary, quick):
        results.append((name, told or ("was run" if canary.exists() else "")))
    yield row("pickles and code in checkpoints and models", results, began)
    shutil.rmtree(folder)


def hostile_checkpoints(folder, canary, quick):
    """(what, what is wrong): each is refused with one line and exit code 2."""
    import checkpoint
    import loading
    tiny, evil = ROOT / "data" / "tiny_model", next(hostile_pickles(canary))[1]
    zipped = folder / "torch.bin"
    import torch
    torch.save({"x": torch.zeros(2)}, zipped)
    code = f"open({str(canary)!r}, 'w')\nfrom transformers import LlamaForCausalLM as Evil\n"
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    changes = {  # file of a model's folder: its new content, None where it goes
        "weights that are a pickle": {"model.safetensors": evil},
        "weights in pytorch_model.bin": {"model.safetensors": None, "pytorch_model.bin": evil},
        "good weights in pytorch_model.bin": {"model.safetensors": None,
                                              "pytorch_model.bin": zipped.read_bytes()},
        "a config with code": {"config.json": {"auto_map": auto, "model_type": "evil"},
                               "evil.py": code.encode()},
        "a config with code beside a known type": {"config.json": {"auto_map": auto},
                                                   "evil.py": code.encode()},
        "a tokenizer with code": {"tokenizer_config.json": {
            "auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"},
            "evil.py": code.encode()},
        "a generate with code": {"custom_generate/generate.py": code.encode()},
        "a template with code": {"chat_template.jinja": (
            "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os'].system("
            f"'touch {canary}') }}}}").encode()}}
    for name, files in changes.items():
        model = folder / "model"
        shutil.copytree(tiny, model)
        for file, content in files.items():
            (model / file).parent.mkdir(exist_ok=True)
            if content is None:
                (model / file).unlink()
            elif isinstance(content, dict):
                old = json.loads((model / file).read_text())
                (model / file).write_text(json.dumps({**old, **content}))
            else:
                (model / file).write_bytes(content)
        harmless = "beside" in name or name.endswith(("generate with code", "tokenizer with code"))
        yield name, refusal(lambda model=model: loading.load_model(str(model)),
                            harmless or "template" in name)
        shutil.rmtree(model)
    path = folder / "ckpt" / "trainer" / "optimizer.safetensors"
    path.parent.mkdir(parents=True)
    for name, data in [("a pickle", evil), ("a torch file", zipped.read_bytes()), ("nothing", b""),
                       ("a header of 2^62 bytes", (1 << 62).to_bytes(8, "little") + b"{}")]:
        path.write_bytes(data)
        yield f"moments that are {name}", refusal(lambda: checkpoint._open(path))
        yield f"a teacher that is {name}", refusal(lambda: loading.load_weights(str(path), None))


def refusal(call, harmless=False):
    """"" if the call ends with exit code 2 and one line, or harmless and without any."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call()
    except SystemExit as stop:
        lines = said.getvalue().strip().splitlines()
        return "" if stop.code == 2 and "error: " in lines[-1] else f"exit {stop.code}: {lines}"
    except BaseException as error:
        return f"raised {error!r}"[:300]
    return "" if harmless else "was taken"


def memory():
    """Megabytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


PARTS = {"programs": hostile_programs, "verifiers": verifiers, "loaders": loaders,
         "pickles": pickles}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--mode", choices=sandbox.MODES, help="this isolation alone")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows, sandbox.MODES = [], (args.mode,) if args.mode else sandbox.MODES
    print("| fault | tried | survived | seconds | note |\n| --- | --- | --- | --- | --- |")
    for name in [args.part] if args.part else PARTS:
        for line in PARTS[name](args.quick):
            rows.append(line)
            print(f"| {' | '.join(str(value) for value in line.values())} |", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=1))
    sys.exit(any(line["survived"] < line["tried"] for line in rows))


if __name__ == "__main__":
    main()
