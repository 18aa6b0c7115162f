"""Figures from the logs alone: nothing is measured here, so that any figure can be drawn again.

    python tools/plot.py demo FOLDER           # what make demo ran
    python tools/plot.py learning FOLDER       # what runs/learning.sh ran
    python tools/plot.py continual FOLDER      # one run of continual.py
    python tools/plot.py paper FOLDER          # every figure, into FOLDER/figures

`paper` reads FOLDER/METHOD-bBASE-sSEED[-TASK]/ as runs/laptop.sh leaves them: continual.json, the
log of stage k as k-TASK.jsonl, drift.json, drift.jsonl. What concerns one task is drawn from every
run that begins with it, up to the end of that stage. A figure whose runs are missing is left out,
with a line that names them. Dash, mark and hatch say what colour says: all can be read in grey.
"""
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import BENCHMARKS
from tools.plot_runs import (
    STYLE,
    Missing,
    bars,
    choose,
    curve,
    grid,
    history,
    interval,
    over,
    read_lines,
    read_run,
    read_runs,
    save,
    title,
)

EMA = ["sdpo", "sdpo-ema0.5", "sdpo-ema1", "sdpo-ema2", "sdpo-ema5"]
RESTART = ["sdpo", "sdpo-ema5", "sdpo-matched", "sdpo-hard"]
CONTINUAL = ["grpo", "grpo-equal", "sdpo", "sdpo-ema5", "sdpo-hard", "sdpo-cot"]


# ---- one run, a few runs -------------------------------------------------------------------------

def demo(folder):
    """The two runs of `make demo`: reward while training, held-out accuracy on the six domains."""
    result = json.loads((folder / "eval.json").read_text())
    names = {result["args"]["baseline"]: "base"}
    names |= {model: Path(model).name for model in result["args"]["model"]}
    logs = {name: read_lines(folder / name / "log.jsonl") for name in ("grpo", "sdpo")}
    task = logs["sdpo"][0]["stage"]
    print(f"\nmean@{result['args']['n']} ± standard error, %, after training on {task}")
    print("{:16}".format("") + "".join(f"{name:>16}" for name in names.values()))
    for benchmark, scores in result["scores"].items():
        cells = (f"{100 * scores[m]['mean']:.1f} ± {100 * scores[m]['se']:.1f}" for m in names)
        print(f"{benchmark:16}" + "".join(f"{cell:>16}" for cell in cells))
    figure, ((left, right),) = grid(1, 2, 11, 3.8, "error bars: standard error over prompts")
    for name, log in logs.items():
        run = {"base": "0", "log": {x["step"]: x for x in log}, "ends": [0, len(log)]}
        history([left], {name: [run]}, ["reward"])
    bars(right, list(result["scores"]), {name: (*(
        np.array([100 * s[model][key] for s in result["scores"].values()])
        for key in ("mean", "se")), []) for model, name in names.items()})
    left.set(ylim=(0, 1), title=f"training: {task}")
    right.set(ylabel=f"mean@{result['args']['n']}, %", ylim=(0, 100), title="held-out prompts")
    save(figure, folder / "demo.png")


def learning(folder):
    """The runs of runs/learning.sh: held-out accuracy after training less that of the run's base;
    the interval is Student's t over runs (both bases' seeds together)."""
    groups = {}  # (task, algorithm) -> the runs, with their scores and their base's
    for path in sorted(folder.glob("*-base*.json")):
        result = json.loads(path.read_text())
        task, base = path.stem.split("-")
        (scores,) = result["scores"].values()
        for model in result["args"]["model"]:
            groups.setdefault((task, Path(model).name.split("-")[2]), []).append(
                {"base": base, 0: scores[result["args"]["baseline"]], 1: scores[model]})
    print("| task | algorithm | base mean@1 (pass@8) | after | gain in points [95%] | by base |")
    print("| --- | --- | --- | --- | --- | --- |")
    cells = {}
    for (task, algorithm), runs in sorted(groups.items()):
        gain, half, bases = over(runs, lambda run: 100 * (run[1]["mean"] - run[0]["mean"]))
        cells.setdefault(algorithm, []).append((gain, half, bases))
        score = [f"{100 * interval([run[i]['mean'] for run in runs])[0]:.1f} "
                 f"({100 * interval([run[i]['pass']['8'] for run in runs])[0]:.1f})"
                 for i in (0, 1)]
        signs = ", ".join(f"{base} {mean:+.1f}" for base, mean in zip(
            sorted({run["base"] for run in runs}), bases, strict=True))
        print(f"| {task} | {STYLE[algorithm][0]} | {score[0]} | {score[1]} | "
              f"{gain:+.1f} [{gain - half:+.1f}, {gain + half:+.1f}] | {signs} |")
    figure, ((axis,),) = grid(1, 1, 6, 3.6)
    bars(axis, sorted({task for task, _ in groups}), {
        m: (*zip(*((gain, half) for gain, half, _ in own), strict=True),
            list(zip(*(bases for *_, bases in own), strict=True))) for m, own in cells.items()})
    axis.set(ylabel="gain over the base, points", title="held-out accuracy")
    save(figure, folder / "learning.png")


def continual(folder):
    """One run of continual.py: every benchmark over the stages, and the training reward."""
    run = read_run(folder) | {"base": "0"}
    figure, ((left, right),) = grid(1, 2, 11, 4, "error bars: standard error over prompts")
    for (name, row), mark in zip(run["R"].items(), "osD^vPXp<>hd*", strict=False):
        own = BENCHMARKS[name][4] in run["tasks"]
        left.errorbar(range(len(row)), 100 * np.array([s["mean"] for s in row]),
                      100 * np.array([s["se"] or 0 for s in row]), label=title(name), marker=mark,
                      linestyle="-" if own else ":", capsize=2, markersize=4)
    stage_ticks(left, run["tasks"])
    left.set(ylabel="score, %", title="solid: trained in some stage; dotted: out of distribution")
    history([right], {"sdpo" if "sdpo" in str(run["command"]) else "grpo": [run]}, ["reward"])
    save(figure, folder / "continual.png")


def stage_ticks(axis, tasks):
    axis.set_xticks(range(len(tasks) + 1), ["base", *map(title, tasks)])
    axis.set_xlabel("after stage")


# ---- the paper's figures -------------------------------------------------------------------------

def first(what, runs, task, methods, need):
    """{method: its runs that begin with a task}."""
    return choose(f"{what}, {task}", [r for r in runs if r["tasks"][0] == task], methods, need)


def sequences(what, runs, methods, need, drift=False):
    """{method: its runs of several stages}; drift: those whose drift was measured."""
    return choose(what + " (several stages, with drift)" * drift, [
        r for r in runs if len(r["tasks"]) > 1 and (r["drift"] or not drift)], methods, need)


def inside(names, tasks):
    """Those of the names that are in distribution of one of the tasks: benchmarks, training sets."""
    return [x for x in names if x in tasks or (x in BENCHMARKS and BENCHMARKS[x][4] in tasks)]


def scores(run, k, names=None):
    """Percent after stage k."""
    return np.array([100 * run["R"][b][k]["mean"] for b in names or run["R"]])


def change(run, k, names):
    """Relative change from the base to stage k, percent; NaN, undefined, where the base has 0."""
    base = scores(run, 0, names)
    return 100 * (scores(run, k, names) - base) / np.where(base == 0, np.nan, base)


def with_base(groups):
    """bars' cells: scores after the first stage, and the base's."""
    return {"base": over(sum(groups.values(), []), lambda run: scores(run, 0))} | {
        method: over(runs, lambda run: scores(run, 1)) for method, runs in groups.items()}


def teachers(runs):
    """Figure 2a: scores after one stage, by teacher."""
    figure, axes = grid(2, 1, 12, 6)
    for axis, task in zip(axes[:, 0], ("math", "tooluse"), strict=True):
        groups = first("figure 2", runs, task, EMA + RESTART[2:], ("sdpo", "sdpo-ema5"))
        bars(axis, list(groups["sdpo"][0]["R"]), with_base(groups))
        axis.set(ylabel="score, %", title=f"after {title(task)} training")
    return figure


def dynamics(runs):
    """Figures 2b and 3: the course of training by teacher, averages and restarts apart."""
    figure, axes = grid(4, 5, 14, 10)
    for i, row in enumerate(axes):
        task, methods = ("math", "tooluse")[i // 2], (EMA, RESTART)[i % 2]
        history(row, first("figure 3", runs, task, methods, ("sdpo", "sdpo-ema5")),
                ("reward", "jsd", "entropy", "teacher_entropy", "length"), 1)
        row[0].set_title(f"{title(task)}: {('moving average', 'restart and freeze')[i % 2]}")
    return figure


def cot(runs):
    """Figure 4: what distilling the reasoning too does to scores and to training."""
    figure, axes = grid(3, 4, 14, 8)
    for row, task in zip(axes, ("math", "science", "tooluse"), strict=True):
        groups = first("figure 4", runs, task, ["sdpo", "sdpo-cot"], ("sdpo", "sdpo-cot"))
        bars(row[0], list(groups["sdpo"][0]["R"]), with_base(groups))
        row[0].tick_params("x", rotation=40)
        row[0].set(ylabel="score, %", title=f"after {title(task)} training")
        history(row[1:], groups, ("length", "entropy", "jsd"), 1)
    return figure


def interference(runs):
    """Figure 5: gain and forgetting on a benchmark against its distance from what was trained."""
    figure, axes = grid(1, 2, 11, 4.5, "filled: gain; hollow: forgetting; each a mean over runs with "
                        "its 95% t interval; mark: what was trained")
    groups = choose("figure 5", [r for r in runs if r["drift"] and "mmd" in r["drift"]],
                    ["grpo", "sdpo"], ["sdpo"])
    for axis, (method, own) in zip(axes[0], groups.items(), strict=False):
        for task, mark in zip(dict.fromkeys(r["tasks"][0] for r in own), "osD^vP", strict=False):
            begun = [run for run in own if run["tasks"][0] == task]
            table = begun[0]["drift"]["mmd"]["mmd2"]
            distance = table[inside(table, [task])[-1]]
            names = [b for b in begun[0]["R"] if b in distance]
            for sign in (1, -1):
                y, half, _ = over(begun, lambda run: np.clip(
                    change(run, 1, names), *((0, None) if sign > 0 else (None, 0))))
                axis.errorbar([distance[b] for b in names], y, half, fmt=mark, capsize=2,
                              color=STYLE[method][1], markerfacecolor=None if sign > 0 else "w",
                              linewidth=0.8, label=f"trained on {title(task)}" if sign > 0 else None)
        axis.axhline(0, color="0.2", linewidth=0.6)
        axis.set(xlabel="MMD$^2$ to the training prompts", ylabel="gain, forgetting, %",
                 title=STYLE[method][0])
    return figure


def sequence(runs):
    """Figure 6: each trained domain over the stages; below, what became of all others."""
    groups = sequences("figure 6", runs, CONTINUAL, ("grpo", "sdpo"))
    tasks, names = groups["sdpo"][0]["tasks"], list(groups["sdpo"][0]["R"])
    figure, axes = grid(2, len(tasks), 3 * len(tasks), 6.5)
    for k, (axis, task) in enumerate(zip(axes[0], tasks, strict=True), 1):
        for method, own in groups.items():
            curve(axis, range(len(tasks) + 1), own, lambda run: np.mean(
                [scores(run, i, inside(names, [task])) for i in range(len(tasks) + 1)], 1), method)
        axis.axvspan(k - 1, k, color="0.93", zorder=0)
        axis.set(ylabel="score, %", title=title(task))
        stage_ticks(axis, tasks)
    for axis in axes[1]:
        axis.remove()
    axis, others = figure.add_subplot(2, 1, 2), [b for b in names if b not in inside(names, tasks)]
    bars(axis, others, {m: over(own, lambda run: change(run, -1, others))
                        for m, own in groups.items()})
    axis.set_yscale("symlog", linthresh=1)
    axis.set(ylabel="change from the base, %", title="out of distribution, after the last stage")
    return figure


def weights(runs):
    """Figure 7a,b: drift of the weights by type of matrix, and by checkpoint."""
    groups = sequences("figure 7a,b", runs, CONTINUAL, ("grpo", "sdpo"), drift=True)
    tasks = groups["sdpo"][0]["tasks"]
    figure, axes = grid(2, 4, 14, 6.5, "mean over matrices and runs; band: 10th to 90th percentile of "
                        "the matrices; thin dots: the update's overlap by chance")
    for column, (key, label) in zip(axes.T, (
            ("nss", "normalised spectral shift"), ("rotation", "rotation, degrees"),
            ("pm_overlap", "principal mask kept, IoU %"),
            ("pm_update", "principal mask updated, IoU %")), strict=True):
        for method, own in groups.items():
            kinds = [x for x in next(iter(own[0]["drift"]["weights"].values())) if x != "all"]

            def by_type(run, key=key, stat="mean"):
                last = list(run["drift"]["weights"].values())[-1]
                return [last[kind][key][stat] for kind in kinds]

            def by_stage(run, key=key, stat="mean"):
                return [x["all"][key][stat] for x in run["drift"]["weights"].values()]

            for axis, value, x in ((column[0], by_type, range(len(kinds))),
                                   (column[1], by_stage, range(1, len(tasks) + 1))):
                curve(axis, x, own, value, method, [
                    lambda run, end=end: value(run, stat=end) for end in ("p10", "p90")])
                if key == "pm_update":
                    axis.plot(x, over(own, lambda run: value(run, "pm_update_chance"))[0], ":",
                              color=STYLE[method][1], linewidth=0.9)
        column[0].set_xticks(range(len(kinds)), kinds)
        column[0].set(ylabel=label, xlabel="type of matrix, last checkpoint")
        column[1].set(ylabel=label)
        stage_ticks(column[1], tasks)
        for axis in column:
            axis.set_yscale("log" if key == "nss" else "linear")
    return figure


def similarity(runs):
    """Figure 7c,d: how like the base's responses a checkpoint's are, as split violins."""
    groups = sequences("figure 7c,d", runs, CONTINUAL, ("grpo", "sdpo"), drift=True)
    tasks = groups["sdpo"][0]["tasks"]
    values = {}  # (method, stage, in distribution) -> cosines
    for method, own in groups.items():
        for run in own:
            models = list(run["drift"]["weights"])
            for line in read_lines(run["folder"] / "drift.jsonl"):
                if "similarity" in line:
                    key = method, models.index(line["model"]), bool(inside([line["prompts"]], tasks))
                    values.setdefault(key, []).extend(line["similarity"])
    figure, ((left, right),) = grid(1, 2, 12, 4, "each half a distribution over responses of all "
                                    "runs; lines: median, 5th percentile")
    for x, method in enumerate(groups):
        for inner in (True, False):
            half(left, x, values[method, len(tasks) - 1, inner], "base" if not inner else method, inner)
    return figure
