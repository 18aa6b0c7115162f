"""Plumbing that every script shares: flags, ranks, sharding, gradients across ranks, and the log.

One script serves 1 or N processes. Under torchrun each rank holds 1/N of the prompts of a step;
what makes N processes one run is a forward pass that all ranks take equally often and one average
of the gradients before the optimizer steps. `--fsdp off` keeps whole copies of the model and
averages with one all-reduce a step: DDP without its hooks, so that micro-batches accumulate first
and a rank without a row adds zeros. `--fsdp on` shards weights, gradients and optimizer: FSDP2.
"""
import argparse
import contextlib
import datetime
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from tqdm import tqdm

from data.watch import watch

ROOT = Path(__file__).parent
TINY = dict(model="tiny", data="tiny", prompts=16, group=8, max_prompt=160, max_new=64, steps=60,
            warmup=5, max_teacher_prompt=320, eval_every=20, save_every=20,
            rollout="hf")  # what --tiny sets
ON_OFF = argparse.BooleanOptionalAction  # a flag that is on, and --no-flag
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# what may change when a run is resumed: how far and how fast it goes, never what it computes
FREE = {"resume", "out", "steps", "eval_every", "save_every", "keep", "tokens_per_micro", "quiet",
        "vllm_memory", "tp", "plan", "gpu_gb", "wandb", "skip_bad"}
# the means that every log line holds; null where nothing was counted
MEANS = ("reward", "loss", "jsd", "entropy", "teacher_entropy", "kl_ref", "length", "artifact",
         "boxed", "frac_truncated", "frac_distilled", "frac_cut", "frac_think", "frac_zero_adv",
         "clip_frac", "is_weight", "mismatch_kl")


# ---- flags ---------------------------------------------------------------------------------------

class Help(argparse.RawDescriptionHelpFormatter):
    """One line for each flag, with its default."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=48, width=160)

    def _get_default_metavar_for_optional(self, action):
        return (action.type or str).__name__.upper()

    def _get_help_string(self, action):
        shown = type(action.default) in (int, float, str) and action.dest != "help"
        return action.help + (" [%(default)s]" if shown else "")


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line, once, and exits with 2."""

    def __init__(self, prog=None, description=None):
        super().__init__(prog, "%(prog)s [flags]", description, formatter_class=Help,
                         allow_abbrev=False)  # a flag has one name

    def error(self, message):
        if rank() == 0:
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def fail(message):
    """Bad input, found after the flags were parsed: the same one line and exit code."""
    Parser(prog=Path(sys.argv[0]).name).error(message)


def at_least(low, kind=int):
    """An argparse type: a finite number from `low` on."""
    def read(text):
        if not low <= kind(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be at least {low}")
        return kind(text)
    read.__name__ = kind.__name__  # which argparse shows
    return read


def sampling_engine(text):
    """The argparse type of --rollout: auto is vllm on CUDA, where it is installed."""
    installed = importlib.util.find_spec("vllm") is not None
    if text == "auto":
        return "vllm" if installed and torch.cuda.is_available() else "hf"
    if text == "vllm" and not installed:
        raise argparse.ArgumentTypeError("vllm is not installed: pip install vllm")
    return text


def ranks_that_share(text):
    """The argparse type of --tp: a divisor of the number of ranks."""
    if int(text) < 1 or world() % int(text):
        raise argparse.ArgumentTypeError(f"{text}: must divide the {world()} ranks")
    return int(text)


def require_files(parser, args, *names):
    """Refuse a file that is not there; a hub id or a folder shows when it loads."""
    for name in names:
        value = getattr(args, name, None) or []
        for path in value if isinstance(value, list) else [value]:
            if path.endswith((".jsonl", ".gguf")) and not Path(path).is_file():
                parser.error(f"--{name} {path}: there is no such file")


def add_run_args(parser, lr, updates):
    """The flags that change no science; the others are declared in the train files."""
    count, whole, real = at_least(1), at_least(0), at_least(0, float)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", default="Qwen/Qwen3-4B", help="hub id, Hugging Face folder, .gguf file, or tiny")
    add("--task", default="math", help="math, science, tooluse, coding, logic, knowledge")
    add("--data", help="short name, hub id, .jsonl file, tiny (default: the paper's training set)")
    add("--eval_data", help="the same, to evaluate on (default: the task's own benchmarks)")
    add("--skip_bad", action="store_true", help="leave rows that cannot be read out; count them")
    add("--tiny", action="store_true", help="laptop scale: model, data, lengths, batch, steps, lr")
    add("--think", action="store_true", help="the chat template's thinking switch, everywhere")
    add("--max_prompt", type=count, default=2048, help="longer prompts are dropped and counted")
    add("--max_new", type=count, default=8192, help="longest response, in tokens")
    add = parser.add_argument_group("batch and optimizer").add_argument
    add("--steps", type=count, default=50, help="batches of rollouts")
    add("--prompts", type=count, default=32, help="prompts a step, over all ranks")
    add("--group", type=count, default=8, help="responses to a prompt, G")
    add("--updates", type=count, default=updates, help="optimizer steps that a batch is split over")
    add("--lr", type=real, default=lr, help="learning rate, constant after the warm-up")
    add("--warmup", type=whole, default=10, help="steps of linear warm-up")
    add("--weight_decay", type=real, default=0.01, help="of AdamW")
    add("--grad_clip", type=real, default=1.0, help="largest gradient norm (0: any)")
    add("--optimizer_init", metavar="CKPT", help="start with the moments of this checkpoint")
    add = parser.add_argument_group("machine").add_argument
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="compute (auto: bf16 on CUDA)")
    add("--param_dtype", default="float32", choices=DTYPES, help="weights as kept and updated")
    add("--fsdp", default="auto", choices=["auto", "on", "off"], help="shard over the ranks")
    add_rollout_args(add)
    add("--tokens_per_micro", type=count, default=16384, help="tokens in one forward pass")
    add("--no_pack", action="store_true", help="the plain path: siblings share no prompt")
    add("--checkpoint_activations", action="store_true", help="recompute them (CUDA FSDP: always)")
    add("--plan", action="store_true", help="print what the run takes, and whether it fits")
    add("--gpu_gb", type=real, default=0.0, help="with --plan: a GPU's memory (0: this machine's)")
    add = parser.add_argument_group("run folder").add_argument
    add("--out", help="log, samples, checkpoints (default: runs/SCRIPT-TASK-DATE)")
    add("--resume", metavar="DIR", help="go on with the run in DIR, from its newest checkpoint")
    add("--seed", type=int, default=0, help="of samples, data order, demonstrations and masks")
    add("--eval_every", type=whole, default=10, help="steps between evaluations (0: none)")
    add("--eval_prompts", type=whole, default=64, help="held-out prompts of one (0: all)")
    add("--eval_n", type=count, default=4, help="samples for each of them")
    add("--ref_every", type=whole, default=10, help="steps between values of kl_ref (0: none)")
    add("--save_every", type=whole, default=10, help="steps between checkpoints (0: only the last)")
    add("--keep", type=count, default=2, help="trainer states to keep; model folders all stay")
    add("--quiet", action="store_true", help="no progress bar")
    add("--wandb", metavar="PROJECT", help="send the lines of log.jsonl to Weights & Biases too")


def add_rollout_args(add):
    add("--rollout", type=sampling_engine, default="auto", choices=["auto", "hf", "vllm"],
        help="sampling engine (auto: vllm on CUDA, where it is installed)")
    add("--vllm_memory", type=at_least(0.01, float), default=0.4,
        help="share of a GPU's memory that vLLM takes while it samples")
    add("--tp", type=ranks_that_share, default=1, help="ranks that share one vLLM engine")


def parse(parser, argv, tiny, check):
    """Parse flags over the defaults of --tiny, or over those of the run to --resume, and refuse
    what is wrong before anything loads. tiny: the script's own laptop defaults; check(args, error):
    its own conditions."""
    args, old = parser.parse_args(argv), {}
    if args.resume:
        config = Path(args.resume, "config.json")
        if not config.is_file():
            parser.error(f"--resume {args.resume}: holds no config.json; name a run's --out folder")
        try:
            old = json.loads(config.read_text())["args"]
        except (ValueError, KeyError) as error:
            parser.error(f"--resume {args.resume}: config.json is not a run's ({error!r})")
        if old.keys() != vars(args).keys():
            other = sorted(old.keys() ^ vars(args).keys())[0]
            parser.error(f"--resume {args.resume}: is a run of another script (flag --{other})")
        parser.set_defaults(**old)
    elif args.tiny:
        own = {**TINY, **tiny}
        parser.set_defaults(**{name: own[name] for name in own if hasattr(args, name)})
    args = parser.parse_args(argv)
    if args.prompts % (args.updates * world()):
        parser.error(f"--prompts {args.prompts}: must be a multiple of --updates {args.updates} "
                     f"times {world()} ranks")
    if args.fsdp == "on" and "RANK" not in os.environ:
        parser.error("--fsdp on: needs ranks; start the script with torchrun")
    import data  # here, so that --help stays quick
    if args.task not in data.TASKS:
        parser.error(f"--task {args.task}: must be one of {', '.join(data.TASKS)}")
    args.data = args.data or data.TASKS[args.task].TRAIN
    if args.data is None:
        parser.error(f"--task {args.task}: has no training set of its own; name one with --data")
    require_files(parser, args, "model", "data", "eval_data", "teacher_init")
    if args.dtype not in ("auto", "bfloat16", args.param_dtype):
        parser.error(f"--dtype {args.dtype}: must be auto, bfloat16 or as --param_dtype")
    if world() % args.tp:
        parser.error(f"--tp {args.tp}: must divide the {world()} ranks")
    if args.gpu_gb and not args.plan:
        parser.error("--gpu_gb: changes nothing without --plan")
    if args.wandb and importlib.util.find_spec("wandb") is None:
        parser.error("--wandb: wandb is not installed: pip install wandb")
    check(args, parser.error)
    for name in sorted(old.keys() - FREE):
        if getattr(args, name) != old[name]:
            parser.error(f"--{name} {getattr(args, name)}: the run in {args.resume} was started "
                         f"with {old[name]}; start a new run, or leave the flag out")
    if args.out and (Path(args.out).is_file() or (Path(args.out, "log.jsonl").exists()
                                                  and not args.resume)):
        parser.error(f"--out {args.out}: holds a run already, or is a file; --resume it, or name "
                     "another folder")
    args.out = args.resume or args.out or (
        f"runs/{Path(parser.prog).stem}-{args.task}-{datetime.datetime.now():%m%d-%H%M%S}")
    if args.plan:
        from tools import plan  # a tool, but one to run before the script
        parser.exit(plan.show(args) if rank() == 0 else None)
    return args


# ---- ranks ---------------------------------------------------------------------------------------

def rank():
    return int(os.environ.get("RANK", 0))


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def setup(args):
    """Join the other ranks (nccl on CUDA, gloo on CPU). Returns this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=datetime.timedelta(hours=4))  # ranks sample apart
    torch.manual_seed(args.seed % 2**63)
    if args.tiny:
        torch.set_num_threads(1)  # so small a model only waits for a second thread
    return device


_asked = []  # when this process was asked to stop


def _ask_to_stop(number, frame):
    """A second signal ends it at once; within two seconds it is the first, sent on by torchrun."""
    _asked.append(time.monotonic())
    if _asked[-1] - _asked[0] > 2:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def asked_to_stop():
    """Whether a rank has got SIGTERM, as before pre-emption, or SIGINT, from Ctrl-C."""
    return all_sum([len(_asked)])[0] > 0


def leave(args, step):
    """Exit with 0 after a step that was saved, and say how to go on."""
    command = " ".join(sys.argv) if "train" not in Path(sys.argv[0]).name else (
        f"{sys.argv[0]} --resume {args.out}")
    if rank() == 0:
        print(f"stopped after step {step}, which is saved; go on with: {command}", file=sys.stderr)
    raise SystemExit(0)


def all_sum(values):
    """Sums of a list of numbers over the ranks, in float64."""
    device = "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def gather(items):
    """Every rank's list, joined in the order of the ranks, on every rank."""
    parts = [items]
    if dist.is_initialized():
        parts = [None] * world()
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def fills(model, room):
    """Whether --fsdp auto shards: weights, gradients, two moments, teacher and reference would take
    40% of a GPU of `room` bytes; activations and the key-value cache need the rest. In float32,
    which the teacher is in any case: student and teacher are sharded alike or not at all."""
    return 6 * sum(4 * p.numel() for p in model.parameters()) > 0.4 * room


def distribute(model, args, device, train=True):
    """Move a model to its device, say how it computes, and shard it where --fsdp asks for that.

    Sharded on CUDA, a model recomputes its activations.
    """
    compute = DTYPES.get(args.dtype)
    if args.dtype == "auto":
        compute = torch.bfloat16 if device.type == "cuda" else model.dtype
    model.compute_dtype = compute if compute != model.dtype else None  # read by packing.compute
    shard = args.fsdp == "on"
    if args.fsdp == "auto" and world() > 1 and device.type == "cuda":
        shard = fills(model, torch.cuda.get_device_properties(device).total_memory)
    if not shard and model.device.type != device.type:  # FSDP moves the layers, one at a time
        model.to(device)
    if train and (args.checkpoint_activations or (shard and device.type == "cuda")):
        # the older name, up to transformers 5.20, takes what is the newer one's default
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable() if enable else model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers recomputes in train mode alone; there is no dropout
    if shard:
        mesh = dist.device_mesh.init_device_mesh(device.type, (world(),))
        policy = MixedPrecisionPolicy(model.compute_dtype, torch.float32)
        policy = policy if model.compute_dtype else MixedPrecisionPolicy()
        model.compute_dtype = None  # FSDP casts the weights themselves
        lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        for module in (*max(lists, key=len), model):  # layer by layer, then what is left
            fully_shard(module, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "states")
    return model


@contextlib.contextmanager
def gathered(model):
    """Within it a model can sample: an FSDP model is whole on every rank, so that each may call it
    as often as it likes."""
    shards = [m for m in model.modules() if isinstance(m, FSDPModule)]
    training = model.training
    model.eval()  # in train mode, a model that recomputes activations keeps no key-value cache
    for m in shards:
        m.unshard()
        m.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        model.train(training)
        for m in shards:
            m.set_reshard_after_forward(m is not model, recurse=False)
            m.reshard()


def average_gradients(model):
    """The mean of the gradients over the ranks; FSDP has taken it in its backward pass."""
    if world() == 1 or isinstance(model, FSDPModule):
        return
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for pending in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
        pending.wait()
    for p in model.parameters():
        p.grad /= world()


def make_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.999), fused=True,
                             weight_decay=args.weight_decay)  # fused: one pass over the memory


def optimizer_step(model, optimizer, args, step, gradient, loss, batch):
    """Average, clip, step, clear. Returns the gradient's norm before clipping, or None for a batch
    that had no gradient: no step is made then, since momentum alone would move the weights. A norm
    or a loss (this rank's, of its part of `batch`) that is not finite stops all ranks before it
    reaches the weights."""
    norm = None
    if gradient:
        average_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or float("inf"))
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        if not norm + abs(all_sum([loss])[0]) < float("inf"):
            raise FloatingPointError(
                f"step {step}, rank {rank()}: the loss is {loss} here, the gradient's norm {norm}; "
                "the weights are untouched, so are the checkpoints. The rows of this rank: "
                f"{', '.join(str(row['id']) for _, row in batch)}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def learning_rate(args, step):
    return args.lr * min(1.0, step / args.warmup if args.warmup else 1.0)


# ---- the log -------------------------------------------------------------------------------------

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
            "grad_norm": sum(made) / len(made) if made else 0.0, "lr": learning_rate(args, step),
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


@contextlib.contextmanager
def writing(folder):
    """Within it a disk that is full, or read-only, ends the run with one line."""
    try:
        yield
    except OSError as error:
        fail(f"{folder}: cannot be written ({error}); its checkpoints are whole")


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
        self.wandb = None
        self.bar = tqdm(total=args.steps, initial=start, unit="step",
                        disable=rank() > 0 or args.quiet) if self.own else bar
        if not self.own:
            bar.update(start)
        main = threading.current_thread() is threading.main_thread()
        _asked.clear()
        self.before = {number: signal.signal(number, _ask_to_stop)
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
        lines = path.read_text().split("\n")[:-1] if start and path.exists() else []
        lines = [line for line in lines if json.loads(line)["step"] <= start]
        aside = Path(f"{path}.part")
        aside.write_text("".join(f"{line}\n" for line in lines))
        aside.replace(path)
        for self.last in map(json.loads, lines if path.name == "log.jsonl" else []):
            watch(self.state, self.last)

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


def write_json(path, value):
    """A JSON file that is whole or not there."""
    aside = Path(f"{path}.part")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.replace(path)


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
