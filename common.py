"""What every script begins with: its flags, and one line, exit code 2, for bad input."""
import argparse
import datetime
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import torch

from ranks import DTYPES, rank, world

ROOT = Path(__file__).parent
TINY = dict(model="tiny", data="tiny", prompts=16, group=8, max_prompt=160, max_new=64, steps=60,
            warmup=5, max_teacher_prompt=320, eval_every=20, save_every=20,
            rollout="hf")  # what --tiny sets
ON_OFF = argparse.BooleanOptionalAction  # a flag that is on, and --no-flag
# what may change when a run is resumed: how far and how fast it goes, never what it computes
FREE = {"resume", "out", "steps", "eval_every", "save_every", "keep", "tokens_per_micro", "quiet",
        "vllm_memory", "tp", "plan", "gpu_gb", "wandb", "skip_bad"}


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

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        for name, value in vars(args).items():
            if value == "" != self.get_default(name):  # an unset variable of a shell, say
                self.error(f"--{name}: is empty")
        return args

    def error(self, message):
        if rank() == 0:
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def fail(message):
    """Bad input, found after the flags were parsed: the same one line and exit code."""
    Parser(prog=Path(sys.argv[0]).name).error(message)


def run(main, get_args):
    """A script's main(get_args()); Ctrl-C ends it with one line."""
    try:
        main(get_args())
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted; what it has saved is whole", file=sys.stderr)
        raise SystemExit(130) from None


def read_json(path, lines=False):
    """What a JSON file holds, or a list of what each of its lines does, without a last one that was
    cut off. Exits with 2 and the place where it is damaged."""
    text, rows = Path(path).read_text(errors="replace"), []
    try:
        if not lines:
            return json.loads(text)
        for line in text.split("\n")[:-1]:
            rows.append(json.loads(line))
        return rows
    except ValueError as error:
        where = f", line {len(rows) + 1}" if lines else ""
        fail(f"{path}{where}: is damaged ({error}); delete the file or put it right")


def at_least(low, kind=int, high=float("inf")):
    """An argparse type: a finite number from `low` on, up to `high`."""
    def read(text):
        if not low <= kind(text) <= high or kind(text) == float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be at least {low}" + (
                f" and at most {high}" if high < float("inf") else ""))
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


def require_files(parser, args, *names):
    """Refuse a file or folder that is not there; a hub id or a URL shows when it loads."""
    for name in names:
        value = getattr(args, name, None) or []
        for path in value if isinstance(value, list) else [value]:
            if "://" in path:
                continue
            if path.endswith((".jsonl", ".gguf", ".safetensors")):
                if not Path(path).is_file():
                    parser.error(f"--{name} {path}: there is no such file")
            elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not Path(path).is_dir():
                parser.error(f"--{name} {path}: there is no such folder, and it is no hub id")


def check_ranks(parser, args):
    """Refuse what the number of ranks does not allow."""
    if args.fsdp == "on" and "RANK" not in os.environ:
        parser.error("--fsdp on: needs ranks; start the script with torchrun")
    if world() % args.tp:
        parser.error(f"--tp {args.tp}: must divide the {world()} ranks")


def add_run_args(parser, lr, updates):
    """The flags that change no science; the others are declared in the train files."""
    count, whole, real = at_least(1), at_least(0), at_least(0, float)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", default="Qwen/Qwen3-4B", help="hub id, Hugging Face folder, .gguf file, or tiny")
    add("--task", default="math", help="math, science, tooluse, coding, logic, knowledge")
    add("--data", help="short name, hub id, .jsonl file, tiny (default: the paper's training set)")
    add("--eval_data", help="the same, to evaluate on (default: the task's own benchmarks)")
    add("--tiny", action="store_true", help="laptop scale: model, data, lengths, batch, steps, lr")
    add_length_args(add)
    add = parser.add_argument_group("batch and optimizer").add_argument
    add("--steps", type=count, default=50, help="batches of rollouts")
    add("--prompts", type=count, default=32, help="prompts a step, over all ranks")
    add("--group", type=count, default=8, help="responses to a prompt, G")
    add("--updates", type=count, default=updates, help="optimizer steps that a batch is split over")
    add("--lr", type=real, default=lr, help="learning rate, constant after the warm-up")
    add("--warmup", type=whole, default=10, help="steps of linear warm-up")
    add("--weight_decay", type=real, default=0.01, help="of AdamW")
    add("--grad_clip", type=real, default=1.0, help="largest gradient norm (0: no clipping)")
    add("--optimizer_init", metavar="CKPT", help="start with the moments of this checkpoint")
    add = parser.add_argument_group("machine").add_argument
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="compute (auto: bf16 on CUDA)")
    add("--param_dtype", default="float32", choices=DTYPES, help="weights as kept and updated")
    add_rank_args(add)
    add_engine_args(add)
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


def add_length_args(add):
    """What a prompt is, and how long it and a response may be: eval.py and drift.py take it too."""
    add("--think", action="store_true", help="the chat template's thinking switch, everywhere")
    add("--max_prompt", type=at_least(1), default=2048, help="longer prompts are dropped, counted")
    add("--max_new", type=at_least(1), default=8192, help="longest response, in tokens")
    add("--skip_bad", action="store_true", help="leave rows that cannot be read out; count them")


def add_engine_args(add):
    """How responses are sampled; eval.py and drift.py take it too."""
    add("--rollout", type=sampling_engine, default="auto", choices=["auto", "hf", "vllm"],
        help="sampling engine (auto: vllm on CUDA, where it is installed)")
    add("--vllm_memory", type=at_least(0.01, float, 1.0), default=0.4,
        help="share of a GPU's memory that vLLM takes while it samples")


def add_rank_args(add):
    """How ranks share a model; eval.py takes it too."""
    add("--fsdp", default="auto", choices=["auto", "on", "off"], help="shard over the ranks")
    add("--tp", type=at_least(1), default=1, help="ranks that share one vLLM engine")


def parse(parser, argv, tiny, check):
    """Parse flags over the defaults of --tiny, or over those of the run to --resume, and refuse
    what is wrong before anything loads. tiny: the script's own laptop defaults; check(args, error):
    its own conditions."""
    args, old = parser.parse_args(argv), {}  # once for --resume and --tiny, which set defaults
    if args.resume:
        if args.out not in (None, args.resume):
            parser.error(f"--out {args.out}: a run goes on in its own folder, {args.resume}")
        config = Path(args.resume, "config.json")
        if not config.is_file():
            parser.error(f"--resume {args.resume}: holds no config.json; name a run's --out folder")
        try:
            old = json.loads(config.read_text())["args"]
            old.keys()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            parser.error(f"--resume {args.resume}: config.json is not a run's ({error!r})")
        if old.keys() != vars(args).keys():
            other = sorted(old.keys() ^ vars(args).keys())[0]
            parser.error(f"--resume {args.resume}: is a run of another script or version "
                         f"(flag --{other})")
        parser.set_defaults(**old)
    elif args.tiny:
        own = {**TINY, **tiny}
        parser.set_defaults(**{name: own[name] for name in own if hasattr(args, name)})
    args = parser.parse_args(argv)
    if args.prompts % (args.updates * world()):
        parser.error(f"--prompts {args.prompts}: must be a multiple of --updates {args.updates} "
                     f"times {world()} ranks")
    check_ranks(parser, args)
    import data  # here, so that --help stays quick
    if args.task not in data.TASKS:
        parser.error(f"--task {args.task}: must be one of {', '.join(data.TASKS)}")
    args.data = args.data or data.TASKS[args.task].TRAIN
    if args.data is None:
        parser.error(f"--task {args.task}: has no training set of its own; name one with --data")
    require_files(parser, args, "model", "data", "eval_data", "teacher_init", "optimizer_init")
    if args.dtype not in ("auto", "bfloat16", args.param_dtype):
        parser.error(f"--dtype {args.dtype}: must be auto, bfloat16 or as --param_dtype")
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
        if rank() == 0:
            plan.show(args)
        sys.stdout.flush()
        os._exit(0)  # torch 2.13's fake tensors have crashed interpreters that were taken down
    return args
