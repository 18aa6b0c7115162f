"""Steps of train_grpo.py and train_sdpo.py: seconds, memory, FLOPs; beside TRL and their own floor.

The train script itself runs, in a process of its own (tools/bench_workers.py), its phases timed
from outside; --peer trl runs TRL's trainer in another. They take turns, a step each, so that a
machine that slows down hits both. Model, prompts, group, lengths, sampling and optimizer are the
same; a step is one batch of responses and one update. Unless --free, EOS is a token that the model
cannot draw, in both, so that every response has --max_new tokens. --rewards mixed is 1, 0, 1, 0,
..: every row has a gradient, and a sibling that is a demonstration. CPU seconds stand beside wall
seconds: the load of others moves them less.

    python tools/bench.py grpo --peer trl --model DIR                   # 44-token sums, 48 new
    python tools/bench.py sdpo --peer trl --model DIR --case tools --max_new 64 --steps 3 \\
        --accumulate 16 --tokens_per_micro 2048
    python tools/bench.py sdpo --peer trl --case tiny --prompts 8 --max_new 64 --free
    python tools/bench.py growth                         # against G, prompt, response, vocabulary
    python tools/bench.py head                           # SDPO's loss at V = 151,936, 8,192 tokens
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
GROWTH = {"group": (2, 8, 32), "words": (64, 512, 2048), "max_new": (32, 256, 1024),
          "vocab": (512, 8192, 151936)}
START = {"vocab": 512, "prompts": 2, "group": 8, "words": 64, "max_new": 32}  # the others' values


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("algorithm", choices=["grpo", "sdpo", "growth", "head"], help="what to measure")
    add("--model", default="tiny", help="Hugging Face folder, .gguf file or tiny")
    add("--case", default="sums", choices=["sums", "tools", "tiny", "words"], help="prompts")
    add("--words", type=int, default=64, help="length of the prompts of --case words")
    add("--vocab", type=int, help="instead of --model: a random 0.8M Llama with so many tokens")
    add("--prompts", type=int, default=4, help="prompts a step")
    add("--group", type=int, default=8, help="responses to a prompt")
    add("--max_new", type=int, default=48, help="tokens of a response")
    add("--free", action="store_true", help="responses end where they end")
    add("--rewards", default="mixed", choices=["mixed", "real"], help="1, 0, 1, 0, .. or scored")
    add("--steps", type=int, default=5, help="steps measured of each")
    add("--warm", type=int, default=1, help="steps before them")
    add("--peer", choices=["trl"], help="whom to run beside")
    add("--accumulate", type=int, default=1, help="micro-batches of the peer")
    add("--threads", type=int, default=1, help="of torch, in each process")
    add("--out", help="add the numbers to this .json")
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # what to run, and its folder or K
    args, args.flags = parser.parse_known_args(argv)  # the rest: flags of the train script
    return args


# ---- what a step must do -------------------------------------------------------------------------

def flops(config, sampled, learned, taught=None):
    """Matmul FLOPs that a packed step of a Llama must do: {part: FLOPs}.

    sampled, learned, taught: what the sampler, the student and the teacher read, each a list of
    (length of a distinct prompt, how many of its first tokens another one has, [lengths of its
    responses]). A multiply-add is 2, a backward pass twice its forward pass. What a mask hides is
    not counted, nor anything twice.
    """
    d, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    size = getattr(config, "head_dim", None) or d // heads
    weights = layers * (2 * d * size * (heads + config.num_key_value_heads)
                        + 3 * d * config.intermediate_size)  # those that a token meets

    def forward(packed):  # the last token of a response is no input
        inputs = sum(p - shared + sum(t - 1 for t in row) for p, shared, row in packed)
        pairs = sum((p * (p + 1) - shared * (shared + 1)) // 2
                    + sum((t - 1) * p + t * (t - 1) // 2 for t in row) for p, shared, row in packed)
        head = d * config.vocab_size * sum(sum(row) for *_, row in packed)
        return 2 * weights * inputs + 4 * layers * heads * size * pairs + 2 * head
    return {"sampling": forward(sampled), "teacher": forward(taught or []),
            "student": 3 * forward(learned)}


def matmul_rate(n=1024, tries=20):
    """FLOPs a second of a float32 matmul: the best of some."""
    import torch
    a, b, best = torch.randn(n, n), torch.randn(n, n), math.inf
    for _ in range(tries):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def slope(xs, ys):
    """k of y = c x^k, by least squares of the logarithms."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


# ---- measure -------------------------------------------------------------------------------------

def take_turns(args, argv, workers, steps):
    """{name: [what each step took]} of processes that take a step in turn; workers: their names,
    each with what it gets."""
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    running = {who: subprocess.Popen(
        [sys.executable, __file__, *argv, "--worker", *worker], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE) for who, worker in workers.items()}
    took = {who: [] for who in running}
    try:
        for _ in range(steps):
            for who, process in running.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                took[who].append(json.loads(process.stdout.readline()))
                print(who, took[who][-1], file=sys.stderr, flush=True)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return took


def measure(args, argv):
    with tempfile.TemporaryDirectory() as folder:
        from tools.bench_workers import prepare
        prepare(args, folder)
        workers = {who: (who, folder) for who in ("ours", args.peer) if who}
        took = take_turns(args, argv, workers, args.warm + args.steps)
    return {who: steps[args.warm:] for who, steps in took.items()}


def summary(took, rate):
    """Medians of each contender, and ours as a share of the peer's and of the floor."""
    out = {}
    for who, steps in took.items():
        names = {name for step in steps for name in step["phases"]}
        out[who] = {key: statistics.median(step[key] for step in steps) for key in (
            "seconds", "cpu", "tokens")} | {"peak_gb": max(step["peak_gb"] for step in steps)}
        out[who]["tokens_per_s"] = out[who]["tokens"] / out[who]["seconds"]
        out[who]["phases"] = {name: statistics.median(
            step["phases"].get(name, 0.0) for step in steps) for name in sorted(names)}
    one = out["ours"]
    one["tflops"] = statistics.median(sum(step["flops"].values()) for step in took["ours"]) / 1e12
    one["floor_s"] = one["tflops"] * 1e12 / rate
    one["seconds_of_floor"], one["cpu_of_floor"] = (
        one[key] / one["floor_s"] for key in ("seconds", "cpu"))
    for who in out.keys() - {"ours"}:
        out["ratio"] = {key: one[key] / out[who][key] for key in ("seconds", "cpu", "peak_gb")}
    return out


def growth(args):
    """Seconds and memory of ours where one length grows and the others stay, with the slopes."""
    out = {}
    for name, values in GROWTH.items():
        for algorithm in ("grpo", "sdpo"):
            points = []
            for value in values:
                argv = [algorithm, "--case", "words", "--steps", str(args.steps)]
                for key, v in {**START, name: value}.items():
                    argv += [f"--{key}", str(v)]
                steps = measure(get_args(argv), argv)["ours"]
                points.append((value, statistics.median(step["cpu"] for step in steps),
                               max(step["peak_gb"] for step in steps)))
                print(algorithm, name, *points[-1], file=sys.stderr, flush=True)
            xs, seconds, peaks = zip(*points, strict=True)
            out[f"{algorithm} {name}"] = {
                "value, cpu_s, peak_gb": points, "slope_cpu": slope(xs, seconds),
                "slope_cpu_end": slope(xs[-2:], seconds[-2:]), "slope_gb": slope(xs, peaks)}
    return out


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = get_args(argv)
    if args.worker:
        from tools import bench_workers
        return bench_workers.main(args)
    import torch

    from logbook import describe
    torch.set_num_threads(args.threads)
    rate, out = matmul_rate(), {}
    if args.algorithm == "growth":
        out["summary"] = growth(args)
    elif args.algorithm == "head":
        argv = [*argv, "--vocab", str(args.vocab or 151936)]
        out["summary"] = {name: steps[0] for name, steps in take_turns(
            args, argv, {"full": ("head", "0"), "top-100": ("head", "100")}, 1).items()}
    else:
        out["steps"] = measure(args, argv)
        rate = max(rate, matmul_rate())
        out["summary"] = summary(out["steps"], rate)
    out = {**describe(args), "command": ["tools/bench.py", *argv], "gflops": rate / 1e9,
           "load": os.getloadavg(), **out}
    print(json.dumps(out["summary"], indent=1))
    if args.out:
        path = Path(args.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*found, out], indent=1))
    return out


if __name__ == "__main__":
    main()
