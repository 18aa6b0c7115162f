"""math_equal.equal in a small pool of processes: from any thread, time and memory limited.

sympy can hang inside one big-integer operation, where no thread, timer or Python signal stops it:
a worker over its time is killed and another one started. Plain subprocesses, not multiprocessing:
nothing of the trainer is forked or imported again. No worker outlives its parent: they are killed
at exit; when the parent is killed, their input ends, and a comparison still running then is ended
by SIGALRM. (PR_SET_PDEATHSIG would fire when the THREAD that started them ends.)
"""
import atexit
import collections
import contextlib
import importlib.util
import json
import logging
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from data import math_equal

LIMIT = 5.0  # seconds that one comparison may take
START = 600  # seconds until a worker has imported sympy; 120 were too few at a load of 15
MEMORY = 2 << 30  # bytes of address space that a worker may take ..
RETIRE = MEMORY // 4  # .. and of memory taken once, after which it makes room for a fresh one
WORKERS = min(4, os.cpu_count() or 1)

_lock = threading.Lock()
# idle workers, None for one not started yet; and the turns of threads that wait for one
_pool: tuple[list, collections.deque] | None = None
_running: set[subprocess.Popen] = set()


def equal(gold: str, answer: str, limit: float | None = None) -> bool | None:
    """math_equal.equal in a worker; None if it took over limit seconds, or too much memory.

    Raises ImportError without math-verify and RuntimeError if no worker can be started: a broken
    installation must not look like wrong answers.
    """
    limit = LIMIT if limit is None else limit
    pool, worker = _take()  # waits while all are busy, each for at most its limit
    try:
        for _ in range(2):  # one found dead is replaced; if two die in a row, it is of this answer
            if worker is None:
                worker = _start()
            try:
                worker.stdin.write(json.dumps([gold, answer, limit]).encode() + b"\n")
                reply = _read_line(worker, limit)
            except BrokenPipeError:
                reply = b""
            if reply in (b"0", b"1"):
                return reply == b"1"
            if reply == b"memory":
                return None
            _kill(worker)
            worker = None
            if reply is None:
                return None
        return False
    finally:
        idle, waiting = pool
        with _lock:
            waiting.popleft().put(worker) if waiting else idle.append(worker)


def _take() -> tuple[tuple, subprocess.Popen | None]:
    """The pool and a worker of it. Threads are served in turn: from a queue, one that has just
    given its worker back could take it again, and again, before another that waits."""
    global _pool
    with _lock:
        if _pool is None:
            require_math_verify()
            _pool = [None] * WORKERS, collections.deque()
        idle, waiting = pool = _pool
        if idle:
            return pool, idle.pop()
        turn = queue.SimpleQueue()
        waiting.append(turn)
    return pool, turn.get()


def _start() -> subprocess.Popen:
    root = str(Path(__file__).resolve().parents[1])
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from data import math_workers; "
            "math_workers.serve()")
    worker = subprocess.Popen([sys.executable, "-c", code, root], bufsize=0,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
    with _lock:
        _running.add(worker)
    reply = _read_line(worker, START)
    if reply != b"ready":
        _kill(worker)
        raise RuntimeError("a worker that compares answers did not start; its error stands above"
                           if reply == b"" else f"a worker did not start within {START} s")
    return worker


def _read_line(worker: subprocess.Popen, seconds: float) -> bytes | None:
    """Its next line; b"" if it has died, None if the time is over."""
    end, line = time.monotonic() + seconds, b""
    poll = select.poll()  # select() refuses descriptors over 1023
    poll.register(worker.stdout, select.POLLIN | select.POLLHUP)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0, end - time.monotonic()) * 1000):
            return None
        part = os.read(worker.stdout.fileno(), 4096)
        if not part:
            return b""
        line += part
    return line.strip()


def _kill(worker: subprocess.Popen) -> None:
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()
    with _lock:
        _running.discard(worker)


@atexit.register
def close() -> None:
    """Ends all workers; the next comparison starts new ones."""
    global _pool
    with _lock:
        workers, _pool = list(_running), None
    for worker in workers:
        _kill(worker)


def _forget() -> None:
    """In a forked child: it must not talk to its parent's workers, end them or hold their pipes."""
    global _lock, _pool, _running
    _lock, _pool, _running = threading.Lock(), None, set()


os.register_at_fork(after_in_child=_forget)


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math-verify is missing, and without it right answers would score 0: "
                          "pip install 'math-verify[antlr4_13_2]'")


# ---- in the worker ---------------------------------------------------------------------------


def serve() -> None:
    """A worker's life: one JSON line [gold, answer, seconds] in, one line "0" or "1" out.

    It ends when its input does, as the parent closes it or is gone; and SIGALRM, whose default
    action needs no Python code to run, ends a comparison that the parent did not live to stop.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be read as a verdict
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.disable(logging.CRITICAL)  # math-verify warns in each worker that it has no timer
    math_equal.equal("\\frac{1}{2}", "0.5x")  # loads the parser before the clock runs
    with contextlib.suppress(OSError, ValueError):  # macOS: no such limit; that of time holds
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", file=out)
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        try:
            verdict = math_equal.equal(gold, answer)
            print(int(verdict), file=out)
        except MemoryError:
            print("memory", file=out)
            return
        except Exception:  # text that sympy cannot handle is not the gold answer
            print(0, file=out)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if _peak() > RETIRE:  # sympy swallows some MemoryErrors: short of memory, it would say no
            return            # to everything


def _peak() -> int:
    """The most memory that this process has held, in bytes. Not ru_maxrss where /proc tells: that
    survives exec, so in the child of a large trainer it is the trainer's, from the start."""
    try:
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: in bytes, of its own
