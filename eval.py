"""Evaluation: n samples for every prompt of every benchmark, scored, with an honest error.

    python eval.py --tiny --baseline tiny --model runs/x/ckpt-000060
    python eval.py --model DIR --tasks aime24,math500 --n 16 --out eval.json
    torchrun --nproc_per_node 8 eval.py --baseline Qwen/Qwen3-4B --model DIR OTHER --tasks paper

Samples are drawn at T 0.6, top-p 0.95, as in the paper; the output says so. --baseline scores one
more model on the same prompts under the same settings, and adds relative gain and forgetting. What
a benchmark gave is written when it is done; the same command goes on with those that are missing.
"""
import itertools
import json
import time
from pathlib import Path

from tqdm import tqdm

import common
import data
import loading
import logbook
import ranks
import rollout
from data import batches
from data.scores import compare, summary

TINY = dict(model=["tiny"], tasks="tiny", n=8, max_new=64, max_prompt=160, limit=128,
            rollout="hf")
FREE = {"out", "overwrite", "quiet", "vllm_memory", "tp", "skip_bad"}  # flags that change no score


def evaluate(sampler, task, rows, n, max_new, key, temperature, top_p, title=None):
    """Sample and score n responses to each row. The ranks share the work and all get every record,
    one a prompt in order: {"id", "rewards", "answers", "lengths", "finished", "responses", "gold"},
    gold is what the verifier gives the gold answer itself. title: of a progress bar."""
    mine = list(enumerate(rows))[ranks.rank()::ranks.world()]
    bar = title and tqdm(desc=title, total=len(mine) * n, unit="response", leave=False)
    rollouts = sampler([row["ids"] for _, row in mine], [i for i, _ in mine], n, max_new, key,
                       temperature, top_p, bar=bar)
    if bar:
        bar.close()
    rewards, _ = batches.score(task, rollouts, mine, n)
    golds, records = batches.gold_scores(task, [row for _, row in mine]), []
    for k, (i, row) in enumerate(mine):
        own = rollouts[k * n:(k + 1) * n]
        texts = [row["opened"] + r.text for r in own]
        records.append((i, {"id": row["id"], "gold": golds[k][0],
                            "rewards": rewards[k * n:(k + 1) * n].tolist(),
                            "answers": [task.answer_of(text) for text in texts],
                            "lengths": [len(r.ids) for r in own],
                            "finished": [r.finished for r in own], "responses": texts}))
    return [record for _, record in sorted(ranks.gather(records), key=lambda pair: pair[0])]


# ---- within a run --------------------------------------------------------------------------------

def held_out(args, tokenizer):
    """For the train files: a function (sampler, step) -> mean reward at T = 1 on held-out prompts
    of the task that is trained, or None where --eval_every is 0."""
    if not args.eval_every:
        return None
    task, sources = data.TASKS[args.task], [(args.eval_data, "test")] if args.eval_data else [
        (source, split) for _, source, split, _, domain in data.BENCHMARKS.values()
        if domain == args.task and (source == "tiny") == (args.tiny or args.data == "tiny")]
    rows = [row for source, split in sources
            for row in read(task, source, split, tokenizer, args, args.eval_prompts,
                            hint="; choose the held-out rows with --eval_data, or --eval_every 0")]
    if not rows:
        common.fail(f"--task {args.task}: no benchmark of its own; give --eval_data or "
                    "--eval_every 0")

    def run(sampler, step):
        records = evaluate(sampler, task, rows, args.eval_n, args.max_new,
                           ("eval", args.seed, step), 1.0, 1.0)
        return summary(records)["mean"]
    return run


def best(state, line):
    """A run's state, with the step that scored best so far; its checkpoint is always kept."""
    if line["eval"] > state.get("best_eval", -1.0):
        state = {**state, "best_eval": line["eval"], "best_step": line["step"]}
    return state


def read(task, source, split, tokenizer, args, limit, hint=""):
    """Rows of a benchmark whose prompt fits; exits with 2 and the reason where there are none."""
    rows = batches.read(task, source, split, args, source, limit or None, hint)
    kept = batches.fitting(rows, task, tokenizer, args)
    if not kept:
        common.fail(f"{source}: none of {len(rows)} prompts has --max_prompt {args.max_prompt} "
                    "tokens or fewer")
    return kept


# ---- the script ----------------------------------------------------------------------------------

def add_sampling_args(add):
    """What is sampled, and how; continual.py takes these too."""
    add("--tasks", default="paper", help="paper, tiny, or benchmarks with commas between them; "
        "name=SOURCE takes its rows from a .jsonl file or hub id")
    add("--n", type=common.at_least(1), default=16, help="samples to a prompt")
    add("--temperature", type=common.at_least(0, float), default=0.6, help="0: the likeliest token")
    add("--top_p", type=float, default=0.95, help="1: nothing is cut off")
    add("--limit", type=common.at_least(0), default=0, help="prompts of each benchmark (0: all)")


def get_args(argv=None):
    parser = common.Parser(description=__doc__)
    add = parser.add_argument_group("what").add_argument
    add("--model", nargs="+", default=["Qwen/Qwen3-4B"], help="hub ids, folders, .gguf files, tiny")
    add("--baseline", help="the model to compare with, on the same prompts")
    add("--tiny", action="store_true", help="the six laptop-scale benchmarks")
    add = parser.add_argument_group("how").add_argument
    add_sampling_args(add)
    common.add_length_args(add)
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
        help="compute, over float32 weights (auto: bf16 on CUDA)")
    common.add_rank_args(add)
    common.add_engine_args(add)
    add("--seed", type=int, default=0, help="of the samples, and of what a benchmark draws")
    add("--out", default="eval.json", help="scores; the samples go to the .jsonl beside it")
    add("--overwrite", action="store_true", help="start anew where --out is there already")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(param_dtype="float32")
    args = parser.parse_args(argv)
    if args.tiny:
        parser.set_defaults(**TINY)
        args = parser.parse_args(argv)
    if args.tasks in ("paper", "tiny"):
        args.tasks = ",".join(name for name, (_, source, *_) in data.BENCHMARKS.items()
                              if (source == "tiny") == (args.tasks == "tiny"))
    entries = [entry.partition("=") for entry in args.tasks.split(",")]
    for name, _, source in entries:
        if name not in data.BENCHMARKS:
            parser.error(f"--tasks {name}: must be of {', '.join(data.BENCHMARKS)}")
        if [other for other, *_ in entries].count(name) > 1:
            parser.error(f"--tasks {args.tasks}: names {name} twice")
        if source.endswith(".jsonl") and not Path(source).is_file():
            parser.error(f"--tasks {name}={source}: there is no such file")
    if Path(args.out).is_dir() or Path(args.out).suffix != ".json":
        parser.error(f"--out {args.out}: must name a .json file; samples go to the .jsonl beside")
    common.check_ranks(parser, args)
    common.require_files(parser, args, "model", "baseline")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top_p {args.top_p}: must lie in (0, 1]")
    if Path(args.out).exists() and not args.overwrite:
        for name, old in same(parser, args.out, vars(args), FREE).get("weights", {}).items():
            if loading.fingerprint(name) != old:
                parser.error(f"--model {name}: {args.out} was made with other weights of that name")
    return args


def same(parser, path, new, free):
    """What a file holds; flags other than those in it are refused."""
    try:
        found = json.loads(Path(path).read_text())
        old = {**found["args"].get("trainer", {}), **found["args"]}
    except (ValueError, KeyError, TypeError) as error:
        parser.error(f"{path}: is not what a run writes ({error!r})")
    if told := [f"--{name} {new.get(name)}: {path} was made with {old.get(name)}"
                for name in sorted((old.keys() | new.keys()) - free)
                if old.get(name) != new.get(name)]:
        parser.error("; ".join(told))
    return found


def finished(args):
    """What args.out and the samples beside it hold already of each model and benchmark, as
    {(model, benchmark): score} and {(model, benchmark): lines}."""
    lines, out = {}, Path(args.out)
    if args.overwrite or not out.exists() or not out.with_suffix(".jsonl").exists():
        return {}, {}
    for record in common.read_json(out.with_suffix(".jsonl"), lines=True):
        line = json.dumps(record) + "\n"
        lines.setdefault((record["model"], record["benchmark"]), []).append(line)
    scores = {(name, benchmark): score
              for benchmark, models in json.loads(out.read_text())["scores"].items()
              for name, score in models.items()
              if score["prompts"] == len(lines.get((name, benchmark), []))}
    return scores, {key: lines[key] for key in scores}


def run(args):
    """Evaluate, but what args.out holds already, and write it anew after each benchmark of each
    model. Returns what it holds, on rank 0."""
    device, out = ranks.setup(args), Path(args.out)
    sources = dict(entry.partition("=")[::2] for entry in args.tasks.split(","))
    names = dict.fromkeys([args.baseline or args.model[0], *args.model])
    keys = [(name, benchmark) for name in names for benchmark in sources]
    scores, lines = finished(args) if ranks.rank() == 0 else ({}, {})
    kept = ranks.gather(list(scores))  # what rank 0 has found
    missing = [key for key in keys if key not in kept]
    weights = {name: loading.fingerprint(name) for name in names}
    if ranks.rank() == 0:  # before anything is sampled: can it be written?
        with logbook.writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            Path(f"{out}.part").touch()
            Path(f"{out}.part").unlink()
    for name, own in itertools.groupby(missing, key=lambda key: key[0]):
        model, tokenizer = loading.load_model(name)
        model = ranks.distribute(model, args, device, train=False)
        sampler = rollout.sampler(args, model, tokenizer)
        for key in own:
            domain, source, split, _, _ = data.BENCHMARKS[key[1]]
            task, began = data.TASKS[domain], time.perf_counter()
            title = f"{key[1]}, {keys.index(key) + 1} of {len(keys)}"
            rows = read(task, sources[key[1]] or source, split, tokenizer, args, args.limit)
            records = evaluate(sampler, task, rows, args.n, args.max_new, ("eval", args.seed),
                               args.temperature, args.top_p,
                               None if ranks.rank() or args.quiet else title)
            if ranks.rank() == 0:
                score = {**summary(records), "seconds": time.perf_counter() - began}
                base = scores.get((args.baseline, key[1]), score)
                compared = args.baseline and name in args.model
                scores[key] = score | (compare(score["mean"], base["mean"]) if compared else {})
                lines[key] = [json.dumps({"model": name, "benchmark": key[1], **record}) + "\n"
                              for record in records]
                write(args, keys, weights, scores, lines)
    return json.loads(out.read_text()) if ranks.rank() == 0 else None


def write(args, keys, weights, scores, lines):
    """The samples, then the scores that vouch for them, each renamed when it is whole."""
    out, table = Path(args.out), {}
    for name, benchmark in keys:
        table.setdefault(benchmark, {}).update(
            {name: scores[name, benchmark]} if (name, benchmark) in scores else {})
    logbook.write_whole(out.with_suffix(".jsonl"),
                        "".join(line for key in keys for line in lines.get(key, [])))
    logbook.write_json(out, {
        **logbook.describe(args), "missing": [key for key in keys if key not in scores],
        "weights": weights, "scores": table})


def main(args):
    """Evaluate, and print a table of the scores."""
    result = run(args)
    if ranks.rank() == 0:
        print(table(result["scores"]))
    return result


def table(scores):
    """The scores as text, in percent."""
    head = ("benchmark", "mean", "± se", "pass@n", "maj@n", "answered", "cut off", "tokens")
    lines = ["{:16}{:>7}{:>7}{:>8}{:>8}{:>10}{:>9}{:>8}  model".format(*head)]
    for benchmark, models in scores.items():
        for name, s in models.items():
            values = (s["mean"], s["se"] or 0, s["pass"][str(s["n"])], s["maj"],
                      s["frac_answered"], s["frac_truncated"])
            lines.append("{:16}{:7.1f}{:7.1f}{:8.1f}{:8.1f}{:10.1f}{:9.1f}{:8.1f}  {}".format(
                benchmark, *(100 * v for v in values), s["length"], name))
    return "\n".join(lines)


if __name__ == "__main__":
    common.run(main, get_args)
