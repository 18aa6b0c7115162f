"""The sandbox's own process: walls itself in, forks the program, waits, kills, reports.

sandbox.py compiles this file once and sends it, with the program behind it, to a fresh `python -S`;
it is never imported. argv: fd of this code and the program, mode, the trainer's pid, fd for the
report, working directory, Python's base prefix, seconds, megabytes, bytes of files and output.
"""
import _signal as signal  # the public module costs 7 ms
import builtins
import os
import resource
import sys

import __main__

program = __main__.file.read().decode("utf-8", "surrogatepass")
__main__.file.close()
mode, parent, status, box, prefix, seconds, memory, size = sys.argv[2:]
status, memory, size, child = int(status), int(memory) << 20, int(size), 0
linux, root = sys.platform == "linux", os.getuid() == 0
if linux:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    args = [os.fsencode(a) if isinstance(a, str) else a for a in args]
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), f"{name}{args}: {os.strerror(ctypes.get_errno())}")


def end(text):
    os.write(status, text.encode("utf-8", "replace")[:500])
    os._exit(0)


def below(pid):
    """All descendants of a process: its threads' children, and theirs."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # it has just ended
    return found + [other for child in found for other in below(child)]


def strike(pids, number):
    for pid in pids:
        try:  # noqa: SIM105 (contextlib costs 2 ms)
            (os.kill if linux else os.killpg)(pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # it has just ended


def kill_user():
    """SIGKILL to the program's own user, in one system call: a fork bomb outruns all others."""
    helper = os.fork()
    if helper:
        os.waitpid(helper, 0)
        return
    try:
        os.setgroups([])
        os.setresuid(*[2000000 + launcher] * 3)
        call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        if os.getresuid() == (2000000 + launcher,) * 3:  # never as root: that would be all
            os.kill(-1, 9)
    finally:
        os._exit(0)


def clean_up():
    """SIGKILL to the program and all its descendants, until none is left."""
    if mode == "subreaper" and linux and root:
        kill_user()
    while True:
        pids = {child}
        if mode == "subreaper" and linux:  # orphans become children of this process
            while more := set(below(os.getpid())) - pids:
                strike(more, signal.SIGSTOP)  # first, so that no death makes room for a new one
                pids |= more
        strike(pids, 9)
        try:
            while os.waitpid(-1, 0 if mode == "namespaces" else os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def stop(signum, frame):
    """Time is up (SIGALRM), or the trainer died (SIGTERM; once more for each of its threads)."""
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    if child:
        clean_up()
    if signum != signal.SIGALRM:  # nobody else is left to remove it
        import shutil
        shutil.rmtree(box, ignore_errors=True)
    end("timeout")


def unshare():
    uid, gid = os.getuid(), os.getgid()
    call("unshare", 0x68000000 | (0 if root else 0x10000000))  # PID, network, IPC; user
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"),
                           ("gid_map", f"65534 {gid} 1")):
            with open("/proc/self/" + name, "w") as file:
                file.write(text)


def wall_in():
    """A root of its own, in memory: the libraries, read only, /proc and an empty /tmp."""
    call("unshare", 0x20000)  # mounts
    call("mount", b"none", b"/", None, 0x44000, None)  # private, recursively
    call("mount", b"tmpfs", box, b"tmpfs", 0x6, b"size=%d,nr_inodes=4096,mode=755" % size)
    top = box + "/root"
    for path in dict.fromkeys((prefix + "/lib", "/lib", "/lib64", "/usr/lib", "/dev/null",
                               "/dev/urandom")):
        os.makedirs(top + os.path.dirname(path), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), top + path)
        elif os.path.exists(path):
            os.mkdir(top + path) if os.path.isdir(path) else open(top + path, "w").close()
            call("mount", path, top + path, None, 0x5000, None)  # bind, recursively
            kept = os.statvfs(path).f_flag  # a user namespace may not clear flags
            kept = kept & 0xc0e | (1 << 21 if kept & 4096 else 0)
            call("mount", None, top + path, None, 0x1021 | kept, None)  # read only
    os.mkdir(top + "/proc")
    try:  # noqa: SIM105
        call("mount", b"proc", top + "/proc", b"proc", 0xe, None)
    except OSError:
        pass  # some containers refuse it: no /proc at all, then
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{top}/dev/{name}")
    os.mkdir(top + "/tmp")
    os.chmod(top + "/tmp", 0o1777)
    os.chdir(box)
    call("pivot_root", b".", b".")
    call("umount2", b".", 2)
    os.chroot("/root")  # below the root mount: the kernel refuses user namespaces from here
    os.chdir("/tmp")


def drop():
    """Limits, then privileges, in the program's own process."""
    uid = os.getuid()
    if root:  # a user for each program: the kernel counts processes by user
        os.setgroups([])
        for uid in (2000000 + launcher, 65534):
            try:
                os.setgid(uid)
                break
            except OSError:
                continue  # a container without such a user
    for name, limit in (("CPU", int(float(seconds)) + 1), ("AS", memory), ("FSIZE", size),
                        ("CORE", 0), ("NOFILE", 64), ("STACK", 64 << 20),
                        ("NPROC", 32 if root or mode == "namespaces" else 4096)):
        what = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(what)[1]
        limit = limit if hard < 0 else min(limit, hard)
        if linux or name not in ("AS", "STACK"):  # macOS refuses these two
            resource.setrlimit(what, (limit, limit))
    if root:
        os.setuid(uid)
        if not os.access(os.__file__, os.R_OK):
            raise OSError(f"only root can read {os.__file__}; install Python elsewhere")
    if linux:
        call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        call("prctl", 38, 1, 0, 0, 0)  # no new privileges
        call("prctl", 1, 9, 0, 0, 0)  # dies with the launcher
        if mode == "subreaper":
            landlock()
        refuse()


def landlock():
    """Where the kernel has Landlock (5.13): writes in the working directory alone; and memory,
    environment and open files of processes that are not below this one stay closed."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return  # README: then a program can do there whatever its user can
    rights = 0x1ff2 | (version > 1) << 13 | (version > 2) << 14  # all that write, make or remove
    ruleset = libc.syscall(444, (ctypes.c_uint64 * 1)(rights), 8, 0)
    for path, allowed in (".", rights), ("/dev/null", 2):
        beneath = os.open(path, os.O_PATH)
        rule = allowed.to_bytes(8, "little") + beneath.to_bytes(4, "little")
        if libc.syscall(445, ruleset, 1, rule, 0) < 0:
            raise OSError(ctypes.get_errno(), "landlock_add_rule")
        os.close(beneath)
    if libc.syscall(446, ruleset, 0) < 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def refuse():
    """A seccomp filter: no signals to others, no tracing, no sockets. Second wall with namespaces,
    the only one without. kill, tkill, tgkill, rt_(tg)sigqueueinfo, pidfd_send_signal, ptrace,
    process_vm_readv and writev, socket, io_uring_setup; pidfd_getfd, setpriority,
    sched_setaffinity; shmget, semget, msgget, mq_open, which outlive a program; prlimit of
    others."""
    x86 = 0xc000003e, 302, (62, 200, 234, 129, 297, 424, 101, 310, 311, 41, 425,
                            438, 141, 203, 29, 64, 68, 240)
    arm = 0xc00000b7, 261, (129, 130, 131, 138, 240, 424, 117, 270, 271, 198, 425,
                            438, 140, 122, 194, 190, 186, 180)
    arch, prlimit, numbers = {"x86_64": x86, "aarch64": arm}.get(os.uname().machine, (0, 0, ()))
    if not arch:
        if mode == "subreaper":
            raise OSError("no list of system calls for this processor")
        return
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (6, 0, 0, 0),  # load arch; another one: kill
            (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (6, 0, 0, 0)]  # load number; x32: kill
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        code.append((0x15, left + 3, 0, number))  # equal: jump to the refusal
    code += [(0x15, 0, 2, prlimit), (0x20, 0, 0, 16), (0x15, 0, 1, 0)]  # its pid must be 0: itself
    code += [(6, 0, 0, 0x7fff0000), (6, 0, 0, 0x50001)]  # allow; or EPERM
    text = b"".join(op.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
                    for op, yes, no, value in code)
    buffer = ctypes.create_string_buffer(text)  # struct sock_fprog: a length and a pointer
    call("prctl", 22, 2, (ctypes.c_size_t * 2)(len(code), ctypes.addressof(buffer)), 0, 0)


try:
    launcher = os.getpid()
    signals = signal.SIGTERM, signal.SIGALRM
    for number in signals:
        signal.signal(number, stop)
    if linux:
        call("prctl", 1, signal.SIGTERM, 0, 0, 0)  # when the trainer dies
        call("prctl", 36, 1, 0, 0, 0)  # subreaper
    if os.getppid() != int(parent):
        stop(0, None)
    if mode == "namespaces":
        unshare()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if linux:  # nobody opens its memory or its pipe by way of /proc
        call("prctl", 4, 0, 0, 0, 0)
    child = os.fork()
    if child:
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.setitimer(signal.ITIMER_REAL, 0)
        if mode == "subreaper":
            clean_up()
        end("ok" if code == 0 else f"error {code}")
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if linux:
        call("prctl", 4, 1, 0, 0, 0)
    if mode == "namespaces":
        wall_in()
    else:
        os.setsid()
        os.chmod(box, 0o777)
        os.chdir(box)
    drop()
    os.close(status)
except BaseException as error:
    end(f"failed {error!r}")
os.environ.clear()
sys.argv, sys.path[:] = ["program.py"], [path for path in sys.path if path]
sys.modules["__main__"] = main = type(sys)("__main__")
builtins.exit = builtins.quit = sys.exit  # as the module site would, which -S leaves out
exec(compile(program, "program.py", "exec"), main.__dict__)
