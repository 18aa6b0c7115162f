"""Runs an untrusted Python program: text in, text out, nothing left behind.

A small launcher (a fresh `python -S`) walls itself in, forks the program, waits with a timer, kills
what is left and reports. About 25 ms a program in all, of which a bare `python -S` takes 10. Any
thread may call run(), 64 at once; it never raises because of a program. Standard library only.

ALWAYS: limits on wall and CPU time, memory (address space, per process), processes, open files,
file and output size; SIGKILL at the end of the program or of the trainer, whichever is first; an
empty working directory, removed afterwards; an empty environment. stdin, stdout and stderr are
nameless files: no deadlock, and a flood ends at the size limit.
A system call filter (x86-64, arm64): no sockets, no signals to others, no tracing, nothing of
System V that would outlive it.
isolation() "namespaces" (Linux as root, or where users may make user namespaces): the program is
process 1 of its own PID namespace, so whatever it started dies with it. It is an unprivileged user
without capabilities, has no network and no IPC, cannot make user namespaces, and sees of the
machine the standard library, the system's shared libraries, its own /proc and a memory-backed
/tmp: not the trainer, the data, the repository.
isolation() "subreaper" (namespaces forbidden, as in a default Docker container): the launcher
adopts and kills orphans. The program can READ whatever files its user can, and fill the disk as
long as its time lasts. Under a root trainer it is a user of its own, under any other the trainer's.
With Landlock (Linux 5.13 and later) it writes in its directory alone, and other processes are
closed to it; without, it can leave files where it may write, and a program of the trainer's user
can read and change the trainer's environment, memory and open files. macOS: the process group is
killed, no filter.
NEVER protected from: bugs of the kernel; memory over all processes and programs together (put the
trainer in a cgroup); a program that knows its tests (coding.py keeps the expected values away).
"""
import contextlib
import functools
import marshal
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MODES = ("namespaces", "subreaper")


class Result(NamedTuple):
    status: str  # "ok" (exit code 0), "error" (another), "timeout", "failed" (the sandbox itself)
    stdout: str
    stderr: str  # the last 4,000 characters; the reason, if failed


START = "import marshal, sys; file = open(int(sys.argv[1]), 'rb'); exec(marshal.load(file))"


@functools.cache
def _launcher() -> bytes:
    text = Path(__file__).with_name("sandbox_launcher.py").read_text()
    return marshal.dumps(compile(text, "launcher", "exec"))  # once: it costs 4 ms


@functools.cache
def isolation() -> str:
    """The first of MODES that works here, tried once; "none", and one line on stderr, if none does:
    every run() then fails, since a program is never run unprotected."""
    reasons = []
    for mode in MODES:
        result = _run("import json; print(6)", "", 10.0, 1024, 1 << 20, mode)
        if result.stdout == "6\n":
            return mode
        reasons.append(f"{mode}: {result.stderr.strip()[-200:]}")
    print("No sandbox works here, so that all code scores 0:", *reasons, file=sys.stderr)
    return "none"


def run(program: str, stdin: str = "", seconds: float = 6.0, memory_mb: int = 1024,
        size: int = 16 << 20, mode: str | None = None) -> Result:
    """Runs a program as a script on stdin. seconds: wall time after the start, and CPU time of each
    process; size: bytes of a file, of stdout and of stderr each, and, with namespaces, of all files
    together."""
    mode = mode or isolation()
    if mode == "none":
        return Result("failed", "", "no sandbox works on this machine")
    for delay in (0.1, 0.5, 2.0, 0):  # "failed" is the machine's doing: too many at once, say
        result = _run(program, stdin, seconds, memory_mb, size, mode)
        if result.status != "failed":
            break
        time.sleep(delay)
    return result


def _run(program, stdin, seconds, memory_mb, size, mode) -> Result:
    box = tempfile.mkdtemp(prefix="sandbox-")
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as given, \
                tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            source.write(_launcher() + program.encode("utf-8", "surrogatepass"))
            given.write(stdin.encode("utf-8", "surrogatepass"))
            source.seek(0)
            given.seek(0)
            for file in given, out, err:  # so that another user can open /dev/stdin
                os.fchmod(file.fileno(), 0o666)
            # A fixed hash seed: a program that prints a set gets the same reward in a resumed run.
            launcher = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", "-X", "utf8", "-c", START, str(source.fileno()),
                 mode, str(os.getpid()), str(writer), box, sys.base_prefix, str(seconds),
                 str(memory_mb), str(size)], stdin=given, stdout=out, stderr=err, cwd=box,
                pass_fds=(source.fileno(), writer), env={"PYTHONHASHSEED": "0"},
                start_new_session=True)  # a signal to the trainer's group is not for it
            os.close(writer)
            writer, status = -1, b""
            ended = select.poll()
            ended.register(reader)  # it reports and exits, on a timer of its own: this one is for
            try:                    # a machine that starves it
                while ended.poll((seconds + 30) * 1000) and (more := os.read(reader, 1000)):
                    status += more
                if not status:
                    launcher.terminate()  # it is to clean up; killed, it would leave orphans
                    status = os.read(reader, 1000) if ended.poll(120_000) else b""
            finally:
                launcher.kill()
                launcher.wait()
            status = status.decode("utf-8", "replace") or "failed: launcher died"
            start = max(0, err.seek(0, os.SEEK_END) - 4000)
            out.seek(0)
            err.seek(start)
            texts = [file.read(size).decode("utf-8", "replace") for file in (out, err)]
            kind = status.split()[0].strip(":")
            return Result(kind, texts[0], status if kind == "failed" else texts[1])
    except OSError as error:  # no temporary files or processes to be had
        return Result("failed", "", repr(error))
    finally:
        for end in {reader, writer} - {-1}:
            os.close(end)
        with contextlib.suppress(RecursionError):
            shutil.rmtree(box, ignore_errors=True)
        if os.path.exists(box):  # folders that are closed, or thousands deep
            subprocess.run(["chmod", "-R", "u+rwx", box], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", box], check=False)
