"""Kills, faults and a soak: what a run survives, on the laptop tier, with real processes.

    python tools/torture.py                           # make torture: everything, under an hour
    python tools/torture.py --quick --parts kills     # a minute
    python tools/torture.py --parts kills --kills 9 --seed 1

A part yields rows {"fault", "tried", "survived", "seconds", "note"}; they become one table, and
results/torture.json. Survived means: a kill lost nothing (the end is bit-identical to that of a run
that was left alone), a fault ended the run in time, with a clear line, and no older checkpoint was
harmed. Exit 1 where one did not.

The scripts run unchanged, inside torture_child.py, which notes when each phase of a step begins
and commits one fault. More parts: torture_inputs.py (programs, verifiers, data), torture_peer.py.
"""
import argparse
import collections
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torture_child

ROOT, CHILD = Path(__file__).resolve().parents[1], torture_child.__file__
sys.path.insert(0, str(ROOT))
FLAGS = [f"--{flag}" for flag in (
    "tiny", "quiet", "prompts=4", "group=4", "max_new=32", "lr=1e-3", "eval_every=2",
    "eval_prompts=4", "eval_n=2", "save_every=2", "ref_every=3")]
RUNS = {  # script and its flags
    "grpo": ["train_grpo.py", *FLAGS, "--steps", "6", "--updates", "2", "--kl_coef", "0.1"],
    "sdpo": ["train_sdpo.py", *FLAGS, "--steps", "6", "--ema", "0.1"],
    "continual": ["continual.py", *FLAGS, "--algorithm", "sdpo", "--ema", "0.1", "--n", "2",
                  "--order", "math,tooluse", "--stage_steps", "3", "--limit", "8", "--tasks",
                  "tiny_math,tiny_science", "--carry_optimizer", "--carry_teacher"]}
RANKS = {"1 rank": (1, []), "2 ranks DDP": (2, ["--fsdp", "off"]),
         "2 ranks FSDP2": (2, ["--fsdp", "on"])}
MACHINE = {"sample_seconds", "train_seconds", "sample_tokens_per_s", "train_tokens_per_s",
           "peak_memory_gb", "seconds", "model"}  # what no two runs share: times, paths
LIMIT = 900  # seconds after which a job counts as hung; one takes 5 to 30 on idle cores


# ---- outside -------------------------------------------------------------------------------------

class Job:
    """A script on one rank or several, and the notes of its ranks.

    how: "fork", ranks forked from this process, which has imported what takes them seconds, with
    the environment that torchrun sets; "torchrun"; "python", one rank that starts from nothing."""

    def __init__(self, folder, run, ranks=1, fault="none", how="fork"):
        self.notes, self.began = tempfile.mktemp(prefix="notes", dir=folder), time.monotonic()
        self.told, self.ranks = Path(f"{self.notes}.told"), ranks
        words = [self.notes, fault, *map(str, run)]
        if how == "fork":
            with socket.create_server(("localhost", 0)) as one:
                port = one.getsockname()[1]
            more = [{"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(ranks),
                     "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)} for r in range(ranks)]
            self.members = [multiprocessing.get_context("fork").Process(
                target=forked, args=(self.told, one if ranks > 1 else {}, words)) for one in more]
            for member in self.members:
                member.start()
            return
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
                    "--"]  # or it takes continual.py's --n for its own
        with open(self.told, "w") as file:
            self.members = [subprocess.Popen(
                [sys.executable, *launcher * (how == "torchrun"), CHILD, *words],
                cwd=ROOT, stdout=file, stderr=file, start_new_session=True)]

    def codes(self):
        """Exit codes, None for what still runs: of the ranks, or of torchrun alone."""
        return [m.poll() if isinstance(m, subprocess.Popen) else m.exitcode for m in self.members]

    def running(self):
        return None in self.codes()

    def seen(self, rank=0):
        """[(seconds, phase)] of a rank so far, and its pid."""
        path = Path(f"{self.notes}.{rank}")
        text = path.read_text() if path.exists() else ""
        lines = [line.split(" ", 2) for line in text.splitlines()]
        return [(float(at), name) for _, at, name in lines], int(lines[0][0]) if lines else None

    def wait_for(self, phase, nth=1):
        """Until a phase begins for the n-th time; False where the run ends before."""
        while time.monotonic() - self.began < LIMIT:
            over = not self.running()
            if [name for _, name in self.seen()[0]].count(phase) >= nth:
                return not over
            if over:
                return False
            time.sleep(0.002)
        return False

    def alive(self):
        """Pids of ranks that have not ended."""
        stats = {pid: Path(f"/proc/{pid}/stat") for pid in
                 (self.seen(rank)[1] for rank in range(self.ranks)) if pid}
        return [pid for pid, stat in stats.items() if stat.exists() and
                stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"]

    def end(self, limit=LIMIT):
        """(exit code: 0, or one that is not, or None where it hung; what it said; ranks that were
        left)."""
        late = time.monotonic() + limit
        while self.running() and time.monotonic() < late:
            time.sleep(0.01)
        code = None if self.running() else next((c for c in self.codes() if c), 0)
        gone = time.monotonic() + (code is not None) * 10  # one that was killed takes time to die
        while self.alive() and time.monotonic() < gone:
            time.sleep(0.01)
        left = self.alive()
        for member in self.members:
            member.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for member in self.members:
            member.wait() if isinstance(member, subprocess.Popen) else member.join()
        return code, self.told.read_text(), left


def forked(told, environment, words):
    """What a forked rank does."""
    os.setsid()
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(file), "w", buffering=1) for _ in range(2))
    os.environ.update(environment)
    torture_child.child(*words)


def difference(ours, theirs):
    """The first file in which two run folders differ; "" where they are the same, bit by bit."""
    def content(path):
        if path.name == "log.jsonl" or path.name.startswith("eval-"):
            text = path.read_text()
            lines = [json.loads(x) for x in text.splitlines()] if path.suffix == ".jsonl" else [
                x for models in json.loads(text)["scores"].values() for x in models.values()]
            return [{k: v for k, v in x.items() if k not in MACHINE} for x in lines]
        return path.read_bytes()
    last = {path.parent.parent: path.parent for path in sorted(theirs.rglob("ckpt-*/trainer"))}
    files = [path for pattern in ("ckpt-*/model.safetensors", "log.jsonl", "samples.jsonl",
                                  "eval-?.json*") for path in sorted(theirs.rglob(pattern))]
    files += [path for folder in last.values() for path in sorted((folder / "trainer").iterdir())]
    for path in files:
        name = path.relative_to(theirs)
        if not (ours / name).exists() or content(ours / name) != content(path):
            return str(name)
    return "" if files else "no file"


# ---- 1. kills ------------------------------------------------------------------------------------

def kills(folder, args):
    """SIGKILL at a random moment of a random phase, of one rank or of all with their launcher, up
    to 4 times a run; then the run goes on to its end."""
    draw = random.Random(args.seed)
    cases = list(itertools.product(RUNS, RANKS))
    if args.quick:
        cases = [("sdpo", "1 rank")]
    for number, (run, ranks) in enumerate(cases):
        todo = args.kills // len(cases) + (number < args.kills % len(cases))
        if todo:
            yield killed(Path(tempfile.mkdtemp(dir=folder)), run, ranks, todo, draw)


def killed(folder, run, ranks, todo, draw):
    began, hit, bad = time.monotonic(), collections.Counter(), []
    world, more = RANKS[ranks]
    script = [*RUNS[run], *more]
    whole = Job(folder, [*script, "--out", folder / "whole"], world)
    code, told, _ = whole.end()
    row = {"fault": f"SIGKILL and resume: {run}, {ranks}", "tried": todo, "survived": 0}
    if code != 0:
        return {**row, "seconds": 0, "note": f"the run itself failed: {told[-500:]}"}
    seen, lasts = whole.seen()[0], collections.defaultdict(list)
    for (at, name), (until, _) in itertools.pairwise(seen):
        lasts[name].append(until - at)  # seconds
    names, done, runs, ends = sorted(lasts.keys() - {"start", "between"}), 0, 0, []
    while done < todo:
        out, here, runs = folder / f"run{runs}", 0, runs + 1
        while True:
            command = [*script, "--out", out]  # with which continual.py goes on, too
            if run != "continual" and (out / "config.json").exists():
                command = [script[0], "--resume", out]
            how = ("torchrun" if world > 1 else "python") if runs % 3 == 0 else "fork"
            job, name = Job(folder, command, world, how=how), draw.choice(names)
            nth = draw.randint(1, min(len(lasts[name]), 2 if (out / "log.jsonl").exists() else 9))
            if here < 4 and done + here < todo and job.wait_for(name, nth):
                time.sleep(draw.uniform(0, max(lasts[name])))
                rank = draw.randrange(world)
                victims = [job.seen(rank)[1]]
                if world > 1 and draw.random() < 0.5:  # the machine, not one of its processes
                    victims = [m.pid for m in job.members] + job.alive()
                if job.running() and {*victims} <= {*job.alive(), *(m.pid for m in job.members)}:
                    struck = time.monotonic()
                    for pid in {*victims}:
                        os.kill(pid, signal.SIGKILL)
                    code, told, left = job.end()
                    if code != 0:  # else it had just ended by itself
                        here += 1
                        hit[job.seen(rank)[0][-1][1]] += 1  # in the moment of its death
                        ends.append(time.monotonic() - struck)
                        if code is None or left:
                            bad.append(f"killed, exit {code}, left {left}")
                        continue
            code, told, _ = job.end()
            wrong = told[-500:] if code != 0 else difference(out, folder / "whole")
            bad += [wrong] if wrong else []
            row["survived"] += here * (not wrong)
            done += here
            shutil.rmtree(out, ignore_errors=True)  # it never began, perhaps
            break
    phases = ", ".join(f"{name} {count}" for name, count in hit.most_common())
    return {**row, "survived": row["survived"] if not bad else min(row["survived"], todo - 1),
            "seconds": time.monotonic() - began, "phases": dict(hit), "note": "; ".join([
                f"{runs} runs, bit-identical ends; hit: {phases}; the job is gone after "
                f"{max(ends, default=0):.1f} s at most", *bad])}


def signals(folder, args):
    """SIGTERM and SIGINT: the step is finished and saved, and the printed command goes on."""
    for ranks in ["1 rank"] if args.quick else ["1 rank", "2 ranks DDP"]:
        world, more = RANKS[ranks]
        script, began = [*RUNS["grpo"], *more], time.monotonic()
        whole = folder / f"whole{world}"
        how = "torchrun" if world > 1 else "fork" if args.quick else "python"
        Job(folder, [*script, "--out", whole], world).end()
        for number in (signal.SIGTERM, signal.SIGINT):
            out = folder / f"{number.name}{world}"
            job = Job(folder, [*script, "--out", out], world, how=how)
            job.wait_for("reward", 2)
            os.kill(job.members[0].pid, number)
            code, told, left = job.end()
            saved = re.findall(r"stopped after step (\d+), .* go on with: (.*)", told)
            wrong = "" if saved and not left and (code == 0 or world > 1) else told[-500:]
            if not wrong:
                _, *command = shlex.split(saved[0][1])  # behind python, or torchrun and its flag
                command = command[2:] if world > 1 else command
                code_then, told, _ = Job(folder, command, world).end()
                wrong = told[-500:] if code_then != 0 else difference(out, whole)
            yield row(f"{number.name}, {ranks}", wrong, began, f"step finished, saved, exit {code}"
                      + " of torchrun" * (world > 1) + "; resumed to the same bits")
            began = time.monotonic()
    if not args.quick:
        long = [*RUNS["grpo"], "--prompts", "256", "--group", "32", "--out", folder / "long"]
        job = Job(folder, long)
        job.wait_for("reward")
        os.kill(job.members[0].pid, signal.SIGTERM)
        time.sleep(2.5)
        struck, running = time.monotonic(), job.running()
        os.kill(job.members[0].pid, signal.SIGTERM)
        code, told, _ = job.end()
        wrong = "" if running and code == -signal.SIGTERM else f"exit {code}: {told[-500:]}"
        yield row("a second SIGTERM, after 2.5 s", wrong, began,
                  f"ended in {time.monotonic() - struck:.1f} s")


def row(fault, wrong, began, note):
    """A fault that was tried once; wrong: "", or what went wrong."""
    return {"fault": fault, "tried": 1, "survived": int(not wrong),
            "seconds": time.monotonic() - began, "note": wrong or note}


# ---- 2. checkpoints ------------------------------------------------------------------------------

def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path, draw=random):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def refused(job, *words):
    """"" where a job ends with exit code 2 and one line that holds the words."""
    code, told, _ = job.end()
    lines = [line for line in told.splitlines() if "error: " in line]
    right = code == 2 and len(lines) == 1 and "Traceback" not in told and all(
        word in lines[0] for word in words)
    return "" if right else f"exit {code}: {told[-500:]}"


def checkpoints(folder, args):
    import loading
    whole, script = folder / "whole", [*RUNS["sdpo"], "--keep", "9"]
    assert Job(folder, [*script, "--out", whole]).end()[0] == 0
    last = sorted(whole.glob("ckpt-*"))[-1].name
    files = [path for path in sorted((whole / last).rglob("*")) if path.is_file()]
    began, draw, found, tried = time.monotonic(), random.Random(args.seed), 0, 200
    for _ in range(tried):  # a single bit, of any file, the manifest too
        copy = folder / "flipped"
        shutil.copytree(whole / last, copy)
        flip(copy / draw.choice(files).relative_to(whole / last), draw)
        found += loading.fault(copy) != ""
        shutil.rmtree(copy)
    yield {"fault": "one bit flipped, any file of a checkpoint", "tried": tried, "survived": found,
           "seconds": time.monotonic() - began, "note": "named"}
    for fault, name, damage in (
            ("weights cut to half", "model.safetensors", truncate),
            ("weights with a bit flipped", "model.safetensors", flip),
            ("weights missing", "model.safetensors", os.remove),
            ("moments cut to half", "trainer/optimizer.safetensors", truncate),
            ("teacher missing", "trainer/teacher.safetensors", os.remove),
            ("trainer/ deleted", "trainer", shutil.rmtree),
            ("manifest cut to half", "manifest.json", truncate))[:1 if args.quick else None]:
        began, out = time.monotonic(), folder / "damaged"
        shutil.copytree(whole, out)
        damage(out / last / name)
        code, told, _ = Job(folder, [script[0], "--resume", out]).end()
        right = code == 0 and f"{last}: {name}" in told
        wrong = difference(out, whole) if right else f"exit {code}: {told[-500:]}"
        yield row(f"newest checkpoint: {fault}", wrong, began, "named; the one before was used; "
                  "bit-identical end")
        shutil.rmtree(out)
    if args.quick:
        return
    began = time.monotonic()
    shutil.copytree(whole, folder / "all")
    for path in (folder / "all").glob("ckpt-*/model.safetensors"):
        truncate(path)
    yield row("every checkpoint damaged", refused(
        Job(folder, [script[0], "--resume", folder / "all"]),
        "no checkpoint with a trainer state is whole"),
        began, "exit 2, each is named")
    began = time.monotonic()
    yield row("a flag changed at resume", refused(
        Job(folder, [script[0], "--resume", str(whole), "--lr", "0.5"]), "--lr 0.5"),
        began, "exit 2, names the flag")
    began, out = time.monotonic(), folder / "taken"
    first = Job(folder, [*script, "--out", out, "--steps", "500"])
    first.wait_for("between")
    yield row("a folder in use", refused(
        Job(folder, [script[0], "--resume", out]), "in use"), began, "exit 2, in one line")
    first.members[0].kill()
    first.end()
    yield from disks(folder, script, whole)


def disks(folder, script, whole):
    """A small disk of its own, which takes root."""
    disk, size = folder / "disk", sum(
        path.stat().st_size for path in (whole / "ckpt-000002").rglob("*"))

    def mount(*options):
        disk.mkdir(exist_ok=True)
        return subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", disk],
                              capture_output=True, check=False).returncode == 0
    began = time.monotonic()
    if not mount(f"size={size * 3 // 2}"):
        print("no right to mount a tmpfs: the disk rows are left out", file=sys.stderr)
        return

    def went_on(out):
        """What is wrong with the first checkpoint, and with the end after a resume."""
        names = [path.name for path in out.glob("*ckpt*")]
        if names != ["ckpt-000002"]:
            return f"{names} are left"
        for name in ("model.safetensors", "trainer/optimizer.safetensors"):
            if (out / names[0] / name).read_bytes() != (whole / names[0] / name).read_bytes():
                return f"{name} has changed"
        subprocess.run(["mount", "-o", f"remount,size={9 * size}", disk], check=True)
        (disk / "filler").unlink(missing_ok=True)
        code, told, _ = Job(folder, [script[0], "--resume", out]).end()
        return told[-500:] if code != 0 else difference(out, whole)
    try:
        run = [*script, "--out", disk / "run"]
        wrong = refused(Job(folder, run), "No space left", "whole") or went_on(disk / "run")
        yield row("disk full while a checkpoint is written", wrong, began,
                  "exit 2, one line; older checkpoint whole; goes on to the same bits")
        began = time.monotonic()
        shutil.rmtree(disk / "run")
        wrong = refused(Job(folder, run, fault=f"disk={disk}"), "No space left", "whole")
        yield row("disk full as the log is written", wrong or went_on(disk / "run"), began,
                  "exit 2, one line; older checkpoint whole; goes on to the same bits")
        began, out = time.monotonic(), folder / "other"
        wrong = refused(Job(folder, [*script, "--out", out], fault="disk=other user"),
                        "Permission denied", "are whole")
        yield row("no right to write, from step 4 on", wrong or went_on(out), began,
                  "exit 2, one line; older checkpoint whole; goes on to the same bits")
        began = time.monotonic()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield row("a read-only disk", refused(Job(folder, [*script, "--out", disk / "new"]),
                                              "Read-only"), began, "exit 2, one line")
    finally:
        subprocess.run(["umount", disk], check=False)


# ---- 3. ranks ------------------------------------------------------------------------------------

def ranks(folder, args):
    if args.quick:
        return
    for kind in ("2 ranks DDP", "2 ranks FSDP2"):
        for fault, value, limit in (("killed", "KILL", 120), ("hung", "STOP", 120),
                                    ("out of memory", "memory", 120)):
            began, out = time.monotonic(), tempfile.mkdtemp(dir=folder) + "/run"
            job = Job(folder, [*RUNS["sdpo"], *RANKS[kind][1], "--save_every", "1", "--out", out],
                      2, f"rank={value}", "torchrun")
            job.wait_for("update", 2)
            struck = time.monotonic()
            code, told, left = job.end(LIMIT)
            took = time.monotonic() - struck
            names = [path.name for path in Path(out).glob("*ckpt*")]
            wrong = "" if code and not left and took < limit and names == ["ckpt-000001"] else (
                f"exit {code} after {took:.0f} s, left {left}, {names}: {told[-300:]}")
            yield row(f"a rank {fault}, {kind}", wrong, began, f"all gone after {took:.0f} s, exit "
                      f"{code}" + "; ranks wait 10 s for one another here, 4 h as shipped"
                      * (value == "STOP"))
    began = time.monotonic()
    yield row("more ranks than prompts", refused(Job(folder, [
        *RUNS["sdpo"], "--prompts", "1", "--out", folder / "one"], 2), "--prompts 1"),
        began, "refused in one line")
    cases = [("a rank with no reward", "uneven=rewards", []),
             ("a rank whose responses are empty", "uneven=empty", []),
             ("an evaluation of one prompt", "none", ["--eval_prompts", "1"])]
    for (fault, name, flags), run, kind in itertools.product(
            cases, ("grpo", "sdpo"), ("2 ranks DDP", "2 ranks FSDP2")):
        began, out = time.monotonic(), tempfile.mkdtemp(dir=folder) + "/run"
        code, told, _ = Job(folder, [*RUNS[run], *RANKS[kind][1], *flags, "--out", out], 2,
                            name).end()
        yield row(f"{fault}, {run}, {kind}", "" if code == 0 else told[-500:], began,
                  "no hang: all 6 steps")


# ---- 4. numbers ----------------------------------------------------------------------------------

def numbers(folder, args):
    """The last checkpoint, of step 2, is that of a run that was left alone; no optimizer step came
    after the number."""
    cases = itertools.product(("grpo", "sdpo"), RANKS, ("logits", "loss", "gradient", "teacher"),
                              ("nan", "inf"))
    if args.quick:
        cases = [("grpo", "1 rank", "loss", "inf")]
    wholes = {}
    for run, kind, place, number in cases:
        if kind == "2 ranks DDP" and place in ("loss", "teacher"):
            continue  # the same code as on one rank; FSDP2 has them all
        world, more = RANKS[kind]
        if (run, kind) not in wholes:
            wholes[run, kind] = folder / f"{run}{kind}"
            Job(folder, [*RUNS[run], *more, "--steps", "2", "--out", wholes[run, kind]],
                world).end()
        began, out = time.monotonic(), Path(tempfile.mkdtemp(dir=folder), "run")
        job = Job(folder, [*RUNS[run], *more, "--out", out], world,
                  f"poison={place} {number}")
        code, told, left = job.end()
        names = [name for _, name in job.seen()[0]]
        third = [k for k, name in enumerate(names) if name == "sampling"][2:]
        said = re.search(rf"FloatingPointError: step 3, rank {world - 1}: .* rows of this rank: "
                         r".+", told)
        wrong = "" if code and not left and said and third and (
            "optimizer" not in names[third[0]:]) else f"exit {code}, {left}: {told[-700:]}"
        yield row(f"{number} in {place}, {run}, {kind}", wrong or difference(
            out, wholes[run, kind]), began, said and said[0][20:110])


# ---- 8. soak -------------------------------------------------------------------------------------

def slope(points):
    """Least squares over 20 block means of (x, y): (slope, half of its 95% interval)."""
    blocks = [points[k * len(points) // 20:(k + 1) * len(points) // 20] for k in range(20)]
    x, y = ([sum(p[i] for p in b) / len(b) for b in blocks] for i in (0, 1))
    mx, my = sum(x) / 20, sum(y) / 20
    sxx = sum((a - mx) ** 2 for a in x)
    b = sum((a - mx) * (c - my) for a, c in zip(x, y, strict=True)) / sxx
    rest = sum((c - my - b * (a - mx)) ** 2 for a, c in zip(x, y, strict=True))
    return b, 2.101 * math.sqrt(rest / 18 / sxx)  # t of 18 degrees


def soak(folder, args):
    """One process, looked at from outside at every step; its first tenth is the warm-up."""
    steps = min(args.soak, 100) if args.quick else args.soak
    for run in ("grpo",) if args.quick else ("grpo", "sdpo"):
        began, out = time.monotonic(), folder / run
        job = Job(folder, [*RUNS[run], "--prompts", "2", "--group", "2", "--max_new", "8",
                           "--eval_every", "50", "--eval_prompts", "2", "--save_every", "100",
                           "--steps", str(steps), "--out", out], how="python")
        here, looks, cpu, at = Path(f"/proc/{job.members[0].pid}"), [], 0.0, 0
        while job.running():
            time.sleep(0.2)
            step = [name for _, name in job.seen()[0]].count("log")
            try:
                used = sum(map(int, (here / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
                memory = int((here / "statm").read_text().split()[1]) * resource.getpagesize()
                files = len(os.listdir(here / "fd"))
            except (OSError, IndexError):  # it has just ended
                break
            if step > at and step > steps // 10:
                looks.append((step, memory / 2**20, files, (used / 100 - cpu) / (step - at)))
            cpu, at = (used / 100, step) if step > at else (cpu, at)
        code, told, _ = job.end()
        if code or len(looks) < 21:
            yield row(f"soak, {run}", f"exit {code}, {len(looks)} looks: {told[-500:]}", began, "")
            continue
        for k, unit, most in ((1, "MB of resident memory", 0.05), (2, "open files", 0.0),
                              (3, "CPU seconds a step", 0.05)):
            points = [(look[0], look[k]) for look in looks[1:]]
            level = sum(y for _, y in points) / len(points)
            b, half = (1000 * x for x in slope(points))
            flat = b - half <= most * level * 1000 / steps  # within 5% over the run, or less
            yield row(f"soak of {steps} steps, {run}: {unit}", "" if flat else
                      f"{b:+.3g} ± {half:.2g} per 1,000 steps at {level:.4g}", began,
                      f"{b:+.3g} ± {half:.2g} per 1,000 steps [95%], at {level:.4g}")


# ---- all -----------------------------------------------------------------------------------------

PARTS = {"kills": kills, "signals": signals, "checkpoints": checkpoints, "ranks": ranks,
         "numbers": numbers, "soak": soak}  # and those of torture_inputs.py


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="", help="some of them, with commas")
    parser.add_argument("--quick", action="store_true", help="a few of each, for CI")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs in all [100, quick 3]")
    parser.add_argument("--soak", type=int, default=2000, help="steps of the soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a JSON file for the rows")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    import torch
    import torture_inputs
    import torture_peer

    import continual  # noqa: F401  # what a forked run need not import again
    torch.set_num_threads(1)
    for name, part in torture_inputs.PARTS.items():
        PARTS[name] = lambda folder, args, part=part: part(args.quick)
    PARTS["peer"] = torture_peer.peer
    args.kills = args.kills or (3 if args.quick else 100)
    rows, names = [], args.parts.split(",") if args.parts else [
        name for name in PARTS if not (args.quick and name == "peer")]
    with tempfile.TemporaryDirectory(prefix="torture") as folder:
        for name in names:
            for row in PARTS[name](Path(folder), args):
                rows.append({"part": name, **row})
                print(f"{row['fault']}: {row['survived']} of {row['tried']}, {row['seconds']:.0f} s"
                      f"; {row['note']}", file=sys.stderr, flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps(rows, indent=1) + "\n")
    print("| fault | tried | survived | seconds | |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['fault']} | {row['tried']} | {row['survived']} | {row['seconds']:.0f} | "
              f"{row['note']} |")
    return int(any(row["survived"] < row["tried"] and "peer" not in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
