"""One rank of a run that torture.py watches and damages: a script as it is, its phases, one fault.

    python tools/torture_child.py NOTES FAULT train_grpo.py --tiny ..

Whenever a phase of a step begins, a line "pid seconds phase" is added to NOTES.rank: a kill can be
aimed at a phase, and the last line says what it hit. A fault is "name=value" of FAULTS; all replace
functions of the product from outside, and most act on the last rank, in step 2 or 3.
"""
import contextlib
import datetime
import os
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def around(owner, name, before=None, after=None):
    """Call before(*args) and after(result) with a function of the product."""
    inner = getattr(owner, name)

    def outer(*args, **kwargs):
        if before:
            before(*args)
        result = inner(*args, **kwargs)
        return after(result) if after else result
    setattr(owner, name, outer)


def child(notes, fault, script, *argv):
    """Run a script as its own main, noting its phases, with a fault."""
    import torch

    import checkpoint
    import eval
    import logbook
    import losses
    import ranks
    import teacher
    from data import batches
    file, now = os.open(f"{notes}.{ranks.rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), {}

    def phase(name):
        def note(*args):
            now.update(phase=name, step=now.get("step", 0) + (name == "sampling"))
            os.write(file, f"{os.getpid()} {time.time()} {name}\n".encode())
        return note
    for owner, name, begins in (
            (batches, "batch", "sampling"), (batches, "score", "reward"),
            (losses, "aggregate_weights", "update"), (torch.optim.AdamW, "step", "optimizer"),
            (teacher.Teacher, "update", "teacher update"), (logbook, "log_line", "log"),
            (eval, "evaluate", "evaluation"), (checkpoint, "save", "checkpoint")):
        around(owner, name, phase(begins))
    around(checkpoint, "save", after=phase("between"))
    phase("start")()
    name, _, value = fault.partition("=")
    FAULTS[name](now, value)
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def last_rank():
    return int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1


def poison(now, value):
    """A NaN or inf in one place of step 3, on the last rank: "logits nan"."""
    import torch

    import packing
    import ranks
    place, number = value.split()

    def bad(tensor):
        if now["step"] == 3 and now["phase"] == "update" and last_rank():
            tensor = tensor.clone()
            getattr(tensor, "_local_tensor", tensor).view(-1)[0] = float(number)
        return tensor

    def gradient(model, *_):
        p = next(p for p in model.parameters() if p.grad is not None)
        p.grad = bad(p.grad)
    if place == "loss":
        around(packing, "head_loss", after=lambda loss: loss + bad(torch.zeros_like(loss)))
    elif place == "gradient":
        around(ranks, "optimizer_step", gradient)
    elif place == "teacher":  # or reference: the head that is called for itself
        around(packing, "head", after=bad)
    else:
        inner = packing.head_loss
        packing.head_loss = lambda model, hidden, token_loss: inner(
            model, hidden, lambda logits, at: token_loss(logits + bad(0 * logits), at))


def rank_ends(now, value):
    """In the update of step 2 the last rank is killed, stops, or has no memory left."""
    import torch.distributed as dist

    import losses
    start = dist.init_process_group
    dist.init_process_group = lambda backend, timeout: start(
        backend, timeout=datetime.timedelta(seconds=10))  # ranks.setup: 4 hours

    def strike(*_):
        if now["step"] == 2 and last_rank():
            if value == "memory":
                held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (held, held))
                bytearray(2**28)  # what the next batch would ask for
            os.kill(os.getpid(), getattr(signal, f"SIG{value}"))
    around(losses, "aggregate_weights", strike)


def uneven(now, value):
    """The last rank has nothing: every reward there is 0, or every response ends at once."""
    import rollout
    from data import batches
    if value == "rewards" and last_rank():
        around(batches, "score", after=lambda scored: (0 * scored[0], scored[1]))
    elif last_rank():
        def cut(rollouts):
            for r in rollouts:
                r.ids, r.text, r.finished = r.ids[-1:], "", True
                r.logprobs, r.entropy, r.old = r.logprobs[-1:], r.entropy[-1:], r.old[-1:]
            return rollouts
        around(rollout, "sample", after=cut)


def disk(now, value):
    """Before the log line of step 3 the disk is filled, or the folder, from a save on, is another
    user's to write to."""
    import checkpoint
    import logbook

    def fill(*_):
        if now["step"] == 3:
            with open(Path(value, "filler"), "wb", buffering=0) as file, \
                    contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

    def leave(*_):
        if now["step"] == 4:
            os.seteuid(65534)
    if value == "other user":
        around(checkpoint, "save", leave)
    else:
        around(logbook, "log_line", fill)


FAULTS = {"none": lambda *_: None, "poison": poison, "rank": rank_ends, "uneven": uneven,
          "disk": disk}


if __name__ == "__main__":
    child(*sys.argv[1:])
