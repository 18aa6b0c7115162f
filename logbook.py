"""The run folder: config.json, a line of log.jsonl for each step, samples, and the collapse watch.

Each number of a log line is a mean over all ranks, of values that `tally` adds up during the step.
The collapse watch reads the lines as they come, and warns; it never stops or alters a run.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import ROOT, fail, read_json
from ranks import all_sum, learning_rate, rank, world

# the means that every log line holds; null where nothing was counted
MEANS = ("reward", "loss", "jsd", "entropy", "teacher_entropy", "kl_ref", "length", "artifact",
         "boxed", "frac_truncated", "frac_distilled", "frac_cut", "frac_think", "frac_zero_adv",
         "clip_frac", "is_weight", "mismatch_kl")


# ---- the numbers of a step -----------------------------------------------------------------------

def tally(sums, **values):
    """Add values, a tensor or a list for each name, to running sums {name: [total, count]}."""
    for name, value in values.items():
        value = torch.as_tensor(value).detach().double()
        sums[name][0] += value.sum().item()
        sums[name][1] += value.numel()


def log_line(args, step, sums, norms, clock, sampled, teacher):
    """The numbers of a step, over all ranks; seconds and memory are this rank's. norms: of its
    optimizer steps; clock: its start, end of sampling, end of training; sampled: response tokens
    of this rank."""
    made = [n for n in norms if n is not None]
    sums["loss"][1] = len(made) / world()  # each rank's share of as many means
    values = all_sum([x for name in MEANS for x in sums[name]] + [sampled])
    line = {name: values[2 * i] / values[2 * i + 1] if values[2 * i + 1] else None
            for i, name in enumerate(MEANS)}
    sample_seconds, train_seconds = clock[1] - clock[0], clock[2] - clock[1]
    return {"step": step, "stage": args.task, **line,
            "grad_norm": sum(made) / len(made) if made else None, "lr": learning_rate(args, step),
            "teacher_age": None if teacher is None else step - teacher.last_changed,
            "skipped": not made, "eval": None, "sample_seconds": sample_seconds,
            "train_seconds": train_seconds, "sample_tokens_per_s": values[-1] / sample_seconds,
            "train_tokens_per_s": values[-1] / train_seconds, "peak_memory_gb": peak_memory_gb()}


def peak_memory_gb():
    """Most memory held: of the GPU since the last call, or by this process ever."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    status = Path("/proc/self/status").read_text()  # a child's ru_maxrss starts at its parent's
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def measure(rollouts, rewards, task):
    """What a log line says of the responses, as values whose mean it takes."""
    texts = [r.text for r in rollouts]
    return dict(reward=rewards, entropy=torch.cat([r.entropy for r in rollouts]),
                length=[float(len(r.ids)) for r in rollouts],
                artifact=[artifact(r.ids) for r in rollouts],
                boxed=[float(text.count("\\boxed")) for text in texts],
                frac_truncated=[float(not r.finished) for r in rollouts],
                frac_think=[float(any(tag in text for tag in task.THINK_TAGS)) for text in texts])


def artifact(ids):
    """The largest share of a response that one repeated n-gram fills: n * count / T over n = 1..8,
    count being its occurrences without overlap, two or more; 0 where nothing repeats."""
    best = 0.0
    for n in range(1, min(8, len(ids) // 2) + 1):
        count, end = {}, {}
        for i in range(len(ids) - n + 1):
            gram = tuple(ids[i:i + n])
            if i >= end.get(gram, 0):
                count[gram], end[gram] = count.get(gram, 0) + 1, i + n
        most = max(count.values())
        best = max(best, n * most / len(ids) if most > 1 else 0.0)
    return best


def samples(tokenizer, rollouts, rewards, passes, most=2):
    """A few rows as text, for samples.jsonl. passes: the student's prompts and any teacher's."""
    names = ("prompt", "teacher_prompt")
    return [{"row": rollouts[i].row, "reward": rewards[i].item(), "response": rollouts[i].text,
             **{name: column[i] and tokenizer.decode(column[i])
                for name, column in zip(names, passes, strict=False)}}
            for i in range(min(most, len(rollouts)))]


# ---- collapse watch ------------------------------------------------------------------------------

def watch(state, line):
    """Collapse watch: reads a log line, keeps what it needs in `state`, and returns new warnings,
    each kind once a run. It never stops or alters the run."""
    seen = state.setdefault("seen", dict(line, mean=line["reward"], best=0, jsd=0, idle=0, still=0))
    told, jsd, found = state.setdefault("told", set()), line["jsd"] or 0.0, {}
    seen["mean"] += 0.2 * (line["reward"] - seen["mean"])
    seen["best"], seen["jsd"] = max(seen["best"], seen["mean"]), max(seen["jsd"], jsd)
    seen["idle"] = line["skipped"] and seen["idle"] + 1
    seen["still"] = not line["skipped"] and line["grad_norm"] < 1e-4 and seen["still"] + 1
    if seen["mean"] < seen["best"] / 2 and seen["best"] > 0.05:
        found["reward"] = f"running reward {seen['mean']:.3f}, half its best {seen['best']:.3f}"
    if line["artifact"] > max(0.5, 2 * seen["artifact"]):
        found["artifact"] = f"one repeated n-gram fills {line['artifact']:.0%} of a response"
    if line["boxed"] > max(3, 3 * seen["boxed"]):
        found["boxed"] = f"{line['boxed']:.1f} \\boxed a response, {seen['boxed']:.1f} at the start"
    if line["jsd"] is not None and jsd < 0.01 * seen["jsd"]:
        found["jsd"] = f"jsd {jsd:.1e} has gone to 0 from {seen['jsd']:.1e}"
    if line["eval"] is not None:
        rise, seen["eval"] = line["reward"] - seen["reward"], seen["eval"] or line["eval"]
        if rise > 0.1 and line["eval"] < seen["eval"] - 0.05:
            found["gap"] = (f"reward has risen by {rise:.2f}, and fallen on held-out prompts, from "
                            f"{seen['eval']:.3f} to {line['eval']:.3f}")
    if seen["idle"] >= 50:
        found["idle"] = "nothing to learn from in 50 steps"
    if seen["still"] >= 10:
        found["still"] = f"grad_norm under 1e-4 for 10 steps, now {line['grad_norm']:.1e}"
    new = found.keys() - told
    told |= new
    return [f"step {line['step']}: {found[kind]}" for kind in sorted(new)]


# ---- the run folder ------------------------------------------------------------------------------

@contextlib.contextmanager
def writing(folder):
    """Within it a disk that is full, or read-only, ends the run with one line."""
    try:
        yield
    except OSError as error:
        fail(f"{folder}: cannot be written ({error}); what was saved before is whole")


def lock(folder):
    """A folder is one process's as long as this file is open; another exits with 2."""
    file = open(folder / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fail(f"--out {folder}: is in use by another process")
    return file


class Log:
    """The run folder, written by rank 0: config.json, log.jsonl with a line a step, samples.jsonl
    with a few responses a step; and the progress bar over it, or its part of a longer one."""

    def __init__(self, args, start, bar=None):
        self.out, self.state, self.last, self.own = Path(args.out), {}, None, bar is None
        self.asked, self.wandb = [], None  # asked: when this process was asked to stop
        self.bar = tqdm(total=args.steps, initial=start, unit="step",
                        disable=rank() > 0 or args.quiet) if self.own else bar
        if not self.own:
            bar.update(start)
        main = threading.current_thread() is threading.main_thread()
        self.before = {number: signal.signal(number, self.ask_to_stop)
                       for number in (signal.SIGTERM, signal.SIGINT) if main}
        if rank() == 0:
            with writing(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
                self.lock = lock(self.out)
                write_json(self.out / "config.json", describe(args))
                for name in ("log.jsonl", "samples.jsonl"):
                    self.forget(self.out / name, start)
            if args.wandb:
                import wandb  # a run folder is one run there, which --resume goes on with
                name = hashlib.sha256(str(self.out.resolve()).encode()).hexdigest()[:16]
                self.wandb = wandb.init(
                    project=args.wandb, name=self.out.name, id=name, config=vars(args),
                    resume="allow" if args.resume else None, dir=self.out)

    def forget(self, path, start):
        """What came after the checkpoint, and a last line that a kill cut off."""
        lines = read_json(path, lines=True) if start and path.exists() else []
        lines = [line for line in lines if line["step"] <= start]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
        if path.name == "log.jsonl":
            for line in lines:
                self.last = line
                watch(self.state, line)

    def write(self, line, samples):
        self.last = line
        if rank() == 0:
            samples = [{"step": line["step"], **sample} for sample in samples]
            for name, rows in (("log.jsonl", [line]), ("samples.jsonl", samples)):
                with writing(self.out), open(self.out / name, "a") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in rows))
            if self.wandb:
                self.wandb.log(line, step=line["step"])
            for warning in watch(self.state, line):
                self.warn(f"collapse watch: {warning}")
            names = ("reward", "jsd", "entropy", "length", "grad_norm", "eval")
            self.bar.set_postfix({name: f"{line[name]:.3g}" for name in names
                                  if line[name] is not None}, refresh=False)
            self.bar.update()

    def warn(self, text):
        if rank() == 0:
            self.bar.write(text, file=sys.stderr)

    def ask_to_stop(self, number, frame):
        """A second signal ends it at once; within two seconds it is the first, sent on by torchrun.
        """
        self.asked.append(time.monotonic())
        if self.asked[-1] - self.asked[0] > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def asked_to_stop(self):
        """Whether a rank has got SIGTERM, as before pre-emption, or SIGINT, from Ctrl-C."""
        return all_sum([len(self.asked)])[0] > 0

    def leave(self, step):
        """Exit with 0 after a step that was saved, and say how to go on."""
        launcher = ["python"] if world() == 1 else [
            "torchrun", "--nproc_per_node", os.environ.get("LOCAL_WORLD_SIZE", str(world()))]
        command = launcher + (sys.argv if "train" not in Path(sys.argv[0]).name else [
            sys.argv[0], "--resume", str(self.out)])
        if rank() == 0:
            print(f"stopped after step {step}, which is saved; go on with: {shlex.join(command)}",
                  file=sys.stderr)
        raise SystemExit(0)

    def close(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if rank() == 0:
            self.lock.close()
        if self.own:
            self.bar.close()
        if self.wandb:
            self.wandb.finish()
        return self.last


# ---- files ---------------------------------------------------------------------------------------

def write_whole(path, text):
    """A file that is whole, or as it was before."""
    aside = Path(f"{path}.part")
    aside.write_text(text)
    aside.replace(path)


def write_json(path, value):
    write_whole(path, json.dumps(value, indent=1) + "\n")


def describe(args):
    """What a number needs beside it: flags, command, versions of code and libraries, machine."""
    import transformers
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"],
                         capture_output=True, text=True, check=False).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    vllm = sys.modules.get("vllm")
    return {"args": vars(args), "command": sys.argv, "commit": git or None,
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "transformers": transformers.__version__,
                         "vllm": vllm and vllm.__version__},
            "machine": {"ranks": world(), "cpus": os.cpu_count(), "gpu": gpu},
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z")}
