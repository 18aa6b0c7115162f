"""Continual post-training: a trainer on one task after another, and what became of each.

R[k][b] is the score on benchmark b after stage k; k = 0 is the base. For the task d of stage k

    learned    R[k][d] - R[0][d]: Current, right after d's own stage, less the base
    kept       R[K][d] - R[0][d]: Last, after all K stages, less the base
    forgotten  Current - Last; beside it best - Last, which noise in the best makes too large

and they stand side by side, since who learned little has little to forget. Errors are over prompts,
which are the same at every k, and say nothing of seeds. Backward transfer is the mean of
Last - Current over earlier stages; mean gain and forgetting are of the relative change against the
base over all benchmarks where it does not score 0.

A stage is a run of the trainer from the last one's checkpoint, with a new optimizer and teacher
unless carried. The same command goes on with a sequence that was stopped; delete the folder of a
stage and those of all later ones, and they are done again.

    python continual.py --tiny --out runs/sdpo                     # about 5 minutes of a CPU core
    python continual.py --tiny --algorithm grpo --base_eval runs/sdpo/eval-0.json --out runs/grpo
    torchrun --nproc_per_node 8 continual.py --ema 0.05 --out runs/sdpo5     # the paper's SDPO_5%
"""
import gc
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import common
import data
import eval
import loading
import logbook
import ranks
import train_grpo
import train_sdpo
from data.scores import sequence

TRAINERS = {"sdpo": train_sdpo, "grpo": train_grpo}
STAGE = {"task", "steps", "model", "data", "out", "resume", "teacher_init", "teacher_init_mix",
         "optimizer_init"}  # flags of the trainer that each stage sets itself


def get_args(argv=None):
    parser = common.Parser(description=__doc__)
    add = parser.add_argument_group("sequence; and every flag of the trainer").add_argument
    add("--algorithm", default="sdpo", choices=TRAINERS, help="the trainer of all stages")
    add("--order", default="math,science,tooluse,coding", help="the task of each stage")
    add("--stage_steps", help="steps of each stage, or of all (default: 50, coding 20)")
    add("--model", default="Qwen/Qwen3-4B", help="the base: hub id, folder, .gguf file, or tiny")
    add("--data", help="source of each stage, or of all (default: the paper's training sets)")
    add("--tiny", action="store_true", help="laptop scale: model, data, lengths, batch, lr")
    add("--carry_teacher", action="store_true", help="a stage goes on with the last one's teacher")
    add("--carry_optimizer", action="store_true", help="and its AdamW moments; warm-ups remain")
    add("--out", required=True, help="folder of the sequence; one that is there goes on")
    add = parser.add_argument_group("evaluation of the base and after every stage").add_argument
    eval.add_sampling_args(add)
    add("--eval_seed", type=int, default=0, help="of the samples, and of what a benchmark draws")
    add("--base_eval", metavar="FILE", help="eval-0.json of another sequence from the same base")
    args, flags = parser.parse_known_args(argv)
    if args.tiny:
        own = {name: value for name, value in eval.TINY.items() if hasattr(args, name)}
        parser.set_defaults(**{**own, "model": "tiny"})
        args, flags = parser.parse_known_args(argv)
    for flag in flags:
        if flag.split("=")[0] in {f"--{name}" for name in STAGE}:
            parser.error(f"{flag}: is set for each stage; see --order, --stage_steps, --carry_*")
    if args.carry_teacher and args.algorithm == "grpo":
        parser.error("--carry_teacher: GRPO has no teacher")
    args.flags, args.order = flags + ["--tiny"] * args.tiny, args.order.split(",")
    for task in args.order:
        if task not in data.TASKS:
            parser.error(f"--order {task}: must be of {', '.join(data.TASKS)}")
    steps = ",".join("20" if task == "coding" else "50" for task in args.order)
    for name, default in (("stage_steps", steps), ("data", "")):
        values = (getattr(args, name) or default).split(",")
        if len(values) not in (1, len(args.order)):
            parser.error(f"--{name}: has {len(values)} values for {len(args.order)} stages")
        setattr(args, name, values * (len(args.order) // len(values)))
    stages, _ = plan(args)
    args.trainer = {name: value for name, value in vars(stages[0]).items() if name not in STAGE}
    config = Path(args.out, "config.json")
    if config.exists():
        eval.same(parser, config, {**args.trainer, **vars(args)},
                  common.FREE | {"base_eval", "flags", "trainer"})
    elif Path(args.out).is_file() or any(Path(stage.out).exists() for stage in stages):
        parser.error(f"--out {args.out}: is a file, or holds stages but no config.json")
    settings = vars(evaluation(args, 0, args.model))
    if args.base_eval:
        for path in (Path(args.base_eval), Path(args.base_eval).with_suffix(".jsonl")):
            if not path.is_file():
                parser.error(f"--base_eval {args.base_eval}: there is no file {path}")
        if eval.same(parser, args.base_eval, settings, eval.FREE).get("missing"):
            parser.error(f"--base_eval {args.base_eval}: some of its benchmarks are missing")
    return args


def plan(args):
    """The trainer's arguments of each stage, and the models that it starts from and ends with."""
    stages, models, teacher = [], [args.model], args.model
    for k, task in enumerate(args.order):
        flags = [*args.flags, "--task", task, "--steps", args.stage_steps[k], "--model", args.model]
        stage = TRAINERS[args.algorithm].get_args(
            [*flags, "--data", args.data[k]] if args.data[k] else flags)
        stage.model = models[k]  # the checkpoint of the stage before, which is not there yet
        if k and args.carry_teacher:
            stage.teacher_init = teacher
        if k and args.carry_optimizer:
            stage.optimizer_init = models[k]
        stage.out = stage.resume = str(Path(args.out, f"{k + 1}-{task}"))  # which may be half done
        stages.append(stage)
        models.append(str(Path(stage.out, f"ckpt-{stage.steps:06d}")))
        if args.carry_teacher and (  # one that never moved is not in the checkpoint
                stage.ema or (stage.restart_mix and 0 < stage.restart_every <= stage.steps)):
            teacher = str(Path(models[-1], "trainer", "teacher.safetensors"))
    return stages, models


def evaluation(args, k, model):
    """The arguments of eval.py for the model after stage k."""
    flags = {name: getattr(args, name) for name in ("tasks", "n", "temperature", "top_p", "limit")}
    flags |= {name: args.trainer[name] for name in (
        "max_prompt", "max_new", "dtype", "fsdp", "rollout", "vllm_memory", "tp")}
    if args.trainer["param_dtype"] == "bfloat16":  # which the trainer computes in: one vLLM engine
        flags["dtype"] = "bfloat16"
    flags |= {"model": model, "seed": args.eval_seed, "out": Path(args.out, f"eval-{k}.json")}
    flags = [f"--{name}={value}" for name, value in flags.items()]
    flags += [f"--{name}" for name in ("think", "tiny", "skip_bad") if args.trainer[name]]
    return eval.get_args([*flags, "--quiet"])  # one bar for the whole sequence


def main(args):
    """Do the stages and evaluations that are not there yet. Returns the report, on rank 0."""
    (stages, models), out = plan(args), Path(args.out)
    ranks.setup(stages[0])
    whole = [not loading.fault(Path(m)) for m in models[1:]] if ranks.rank() == 0 else []
    done = [*ranks.gather(whole), False].index(False)  # stages before the first that is not
    for stage in stages[done + 1:]:
        if Path(stage.out).exists():
            common.fail(f"{stage.out}: was made from {models[done + 1]}, which is not there or not "
                        "whole; delete it too, and both are made again")
    if ranks.rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        held = logbook.lock(out)  # noqa: F841, as long as this runs
        logbook.write_json(out / "config.json", logbook.describe(args))
        for k in range(done + 1, len(models)):  # evaluations of checkpoints that are no more
            (out / f"eval-{k}.json").unlink(missing_ok=True)
        if args.base_eval and not (out / "eval-0.json").exists():
            for suffix in (".jsonl", ".json"):
                shutil.copy(Path(args.base_eval).with_suffix(suffix), out / f"eval-0{suffix}")
    ranks.barrier()  # nobody looks before that is done
    bar = tqdm(total=sum(s.steps for s in stages), initial=sum(s.steps for s in stages[:done]),
               unit="step", disable=ranks.rank() > 0 or stages[0].quiet)
    gc.freeze()  # what was imported; models lie in cycles, and their memory is wanted back
    for k, model in enumerate(models):
        name, scores = f"{k} {args.order[k - 1]}" if k else "base", Path(out, f"eval-{k}.json")
        if k > done:
            gc.collect()
            bar.set_description(name)
            TRAINERS[args.algorithm].main(stages[k - 1], bar)
        if not scores.exists() or common.read_json(scores).get("missing"):
            gc.collect()
            bar.set_description(f"{name}, evaluation")
            eval.run(evaluation(args, k, model))
    bar.close()
    return report(args, stages, models) if ranks.rank() == 0 else None


def report(args, stages, models):
    """From the files alone: continual.json, the tables on the screen, the figure."""
    R, means, out = {}, {}, Path(args.out)
    for k in range(len(models)):
        for name, cells in common.read_json(out / f"eval-{k}.json")["scores"].items():
            R.setdefault(name, []).extend(cells.values())  # of one model
        for record in common.read_json(out / f"eval-{k}.jsonl", lines=True):
            own = means.setdefault(record["benchmark"], [{} for _ in models])[k]  # ids may repeat:
            own[len(own), record["id"]] = sum(record["rewards"]) / len(record["rewards"])
    scores = {name: torch.tensor([[row[prompt] for prompt in rows[0]] for row in rows],
                                 dtype=torch.float64) for name, rows in means.items()}  # (K+1, P)
    changes, summary = sequence(scores, args.order)
    R = {name: [c | d for c, d in zip(R[name], changes[name], strict=True)] for name in R}
    result = {**logbook.describe(args), "R": R, **summary, "stages": []}
    for stage, model in zip(stages, models[1:], strict=True):
        log = common.read_json(Path(stage.out, "log.jsonl"), lines=True)
        result["stages"].append({
            "task": stage.task, "steps": stage.steps, "folder": stage.out, "checkpoint": model,
            "seconds": sum(line["sample_seconds"] + line["train_seconds"] for line in log)})
    logbook.write_json(out / "continual.json", result)
    print(table(result))
    if importlib.util.find_spec("matplotlib"):
        subprocess.run([sys.executable, common.ROOT / "tools/plot.py", "continual", out],
                       check=False)
    return result


def table(result):
    """The report as text, in percent and points."""
    def points(x):
        error = "?" if x and x["se"] is None else x and f"{100 * x['se']:.1f}"
        return f"{100 * x['mean']:z.1f} ± {error}" if x else "n/a"

    args, end = result["args"], result["mean"][-1]
    names = [f"{d['stage']} {d['task']}" for d in result["domains"]]
    rows = [[f"mean@{args['n']}, %", "base", *names]]
    rows += [[name, *map(points, cells)] for name, cells in result["R"].items()]
    rows += [[""], ["stage", "learned", "kept", "share kept", "Current - Last", "best - Last"]]
    rows += [[name, *(points(d[key]) for key in (
        "learned", "kept", "share_kept", "forgotten", "below_best"))]
        for name, d in zip(names, result["domains"], strict=True)]
    return "\n".join([
        f"± standard error over prompts, T {args['temperature']}, top-p {args['top_p']}",
        *((row[0].ljust(16) + "".join(x.rjust(17) for x in row[1:])).rstrip() for row in rows),
        "share kept: n/a where what was learned is below two errors", "",
        f"backward transfer {points(result['backward_transfer'])}; over benchmarks, relative to the"
        f" base: mean change {points(end['relative'])}, mean gain {points(end['gain'])}, mean "
        f"forgetting {points(end['forgetting'])} (noise alone makes the last two positive)",
        *(f"{name}: no relative change, since the base scores 0; it changed by "
          f"{100 * cells[-1]['difference']:z.1f} points"
          for name, cells in result["R"].items() if cells[-1]["relative"] is None)])


if __name__ == "__main__":
    common.run(main, get_args)
