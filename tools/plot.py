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
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import BENCHMARKS

plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                     "legend.frameon": False, "hatch.linewidth": 0.6, "axes.titlesize": 9})
DOTS, DOT_DASH, LONG = (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))
STYLE = {  # one look for one method, in every figure: label, colour, dash, mark, hatch
    "base": ("base", "0.85", ":", "_", ""),
    "grpo": ("GRPO", "#1b6ca8", "--", "o", "//"),
    "grpo-equal": ("GRPO at SDPO's lr", "#7fb2d9", DOTS, "v", "\\\\"),
    "sdpo": ("SDPO$_0$", "#c1440e", "-", "s", ".."),
    "sdpo-ema0.5": (r"SDPO$_{0.5\%}$", "#f2c14e", LONG, "<", "--"),
    "sdpo-ema1": (r"SDPO$_{1\%}$", "#d98e04", DOT_DASH, ">", "||"),
    "sdpo-ema2": (r"SDPO$_{2\%}$", "#a678b8", "--", "p", "++"),
    "sdpo-ema5": (r"SDPO$_{5\%}$", "#4a235a", DOTS, "X", "xx"),
    "sdpo-matched": ("StableSDPO(0.40)", "#5fa777", "--", "D", "oo"),
    "sdpo-hard": ("StableSDPO(1)", "#14532d", DOT_DASH, "^", "OO"),
    "sdpo-cot": (r"SDPO$_0^{\mathrm{CoT}}$", "#111111", LONG, "P", "**"),
    "sdpo-ema5-mask": (r"SDPO$_{5\%}$, tokens masked", "#a678b8", "-", "d", "x"),
    "sdpo-ema5-reorder": (r"SDPO$_{5\%}$, re-ordered", "#4a235a", DOT_DASH, "h", "\\"),
}
EMA = ["sdpo", "sdpo-ema0.5", "sdpo-ema1", "sdpo-ema2", "sdpo-ema5"]
RESTART = ["sdpo", "sdpo-ema5", "sdpo-matched", "sdpo-hard"]
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # then 1.96 + 2.6/df
RUNS = "band, bar: 95% t interval over runs; thin line, small mark: mean of one base"


class Missing(Exception):
    """What a figure needs and the folder does not hold."""


# ---- reading -------------------------------------------------------------------------------------

def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_run(folder):
    """A run: what continual.json and drift.json hold, and its log by step over all stages."""
    run = json.loads((folder / "continual.json").read_text())
    run |= {"folder": folder, "tasks": [s["task"] for s in run["stages"]], "ends": [0], "log": {}}
    for k, stage in enumerate(run["stages"], 1):
        own = folder / f"{k}-{stage['task']}.jsonl"
        for line in read_lines(own if own.exists() else Path(stage["folder"], "log.jsonl")):
            run["log"][run["ends"][-1] + line["step"]] = line
        run["ends"].append(run["ends"][-1] + stage["steps"])
    drift = folder / "drift.json"
    return run | {"drift": json.loads(drift.read_text()) if drift.exists() else {}}


def read_runs(folder):
    """Every run in a folder, with the method and base that its name tells."""
    runs = []
    for path in sorted(Path(folder).glob("*/continual.json")):
        run, m = read_run(path.parent), re.fullmatch(r"(.+)-b(\d+)-s\d+-?(.*)", path.parent.name)
        if m and m[1] in STYLE and m[3] in ("", run["tasks"][0]):
            runs.append(run | {"method": m[1], "base": m[2]})
        else:
            print(f"{path.parent}: left out, its name is no METHOD-bBASE-sSEED[-TASK]")
    return runs


def choose(what, runs, methods, need=()):
    """{method: its runs}, for those that have any. Raises Missing where one of `need` has none."""
    found = {m: [run for run in runs if run["method"] == m] for m in methods}
    lacks = [m for m in methods if not found[m]]
    if set(lacks) & set(need) or len(lacks) == len(found):
        raise Missing(f"{what} needs runs of {', '.join(lacks)}")
    if lacks:
        print(f"{what}: drawn without runs of {', '.join(lacks)}")
    return {m: own for m, own in found.items() if own}


def title(name):
    """A task or a benchmark as figures call it."""
    name = name.removeprefix("tiny_")
    return "ToolUse" if name == "tooluse" else name.capitalize() if name.isalpha() else name


def own(task, run):
    """The run's benchmarks that are in distribution of a task; None: out of all."""
    return [b for b in run["R"] if BENCHMARKS[b][4] == task]


def scores(run, k, benchmarks=None):
    """Percent after stage k."""
    return np.array([100 * run["R"][b][k]["mean"] for b in benchmarks or run["R"]])


# ---- drawing -------------------------------------------------------------------------------------

def interval(values):
    """(mean, half width of the 95% t interval) over the first axis; None and NaN are left out."""
    x = np.ma.masked_invalid(np.array(values, float))
    n = np.maximum(x.count(0), 1)
    t = np.where(n > 11, 1.96 + 2.6 / n, np.take(T95, np.clip(n - 2, 0, 9)))
    squares = ((x - x.mean(0)) ** 2).sum(0)
    return x.mean(0).filled(np.nan), t * np.ma.filled(squares / np.maximum(n - 1, 1) / n, 0) ** 0.5


def over(runs, value):
    """interval of value(run) over runs, and the mean of each base where there are several."""
    bases = [[value(run) for run in runs if run["base"] == b]
             for b in sorted({run["base"] for run in runs})]
    return *interval(sum(bases, [])), [interval(b)[0] for b in bases if len(bases) > 1]


def curve(axis, x, runs, value, method, band=None):
    """value(run), an array over x, of a method's runs; band: functions for other ends of it."""
    label, colour, dash, mark, _ = STYLE[method]
    mean, half, bases = over(runs, value)
    low, high = [over(runs, end)[0] for end in band] if band else (mean - half, mean + half)
    axis.plot(x, mean, color=colour, linestyle=dash, label=label, marker=mark, markersize=4,
              markevery=1 if len(x) < 12 else (0.1, 0.2))
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    for base in bases:
        axis.plot(x, base, color=colour, linestyle=dash, linewidth=0.4)


def history(axes, groups, keys, stages=None):
    """A panel for each log key, over the steps of the first stages; a line where a stage ends."""
    for axis, key in zip(axes, keys, strict=True):
        for method, runs in groups.items():
            ends = runs[0]["ends"][:stages and stages + 1]
            steps = range(1, ends[-1] + 1)
            curve(axis, steps, runs, lambda run: [run["log"].get(s, {}).get(key) for s in steps],
                  method)
        for end in ends[1:-1]:
            axis.axvline(end + 0.5, color="0.6", linewidth=0.6)
        axis.set(xlabel="step", ylabel=key.replace("_", " "))


def bars(axis, names, cells):
    """cells: {method: (means, half widths, means of each base)}, each over the names."""
    for i, (method, (mean, half, bases)) in enumerate(cells.items()):
        label, colour, _, _, hatch = STYLE[method]
        x = np.arange(len(names)) + (i - (len(cells) - 1) / 2) * 0.84 / len(cells)
        axis.bar(x, mean, 0.76 / len(cells), yerr=half, label=label, color=colour, hatch=hatch,
                 edgecolor="w", linewidth=0, error_kw=dict(linewidth=0.8, ecolor="0.3"))
        for mark, base in zip("oD^sv", bases, strict=False):
            axis.plot(x, base, mark, color="k", markersize=2.5, markerfacecolor="w",
                      markeredgewidth=0.5)
    axis.axhline(0, color="0.2", linewidth=0.6)
    axis.set_xticks(range(len(names)), [title(name) for name in names])


def grid(rows, columns, width, height, note=RUNS):
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False,
                                layout="constrained")
    figure.supxlabel(note, fontsize=7.5, color="0.3")
    return figure, axes


def save(figure, path):
    """One legend for all panels, over them."""
    found = {label: handle for axis in figure.axes
             for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found, loc="outside upper center", ncols=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"figure: {path}")


# ---- the paper's figures -------------------------------------------------------------------------

def first(runs, task):
    return [run for run in runs if run["tasks"][0] == task]


def with_base(groups, k, benchmarks=None):
    """bars' cells: the scores after stage k of {method: runs}, and before them the base's."""
    everyone = {"base": sum(groups.values(), [])} | groups
    return {m: over(own, lambda run: scores(run, k if m != "base" else 0, benchmarks))
            for m, own in everyone.items()}


def teachers(runs):
    """Figure 2: scores after one stage, by teacher."""
    figure, axes = grid(2, 1, 12, 6)
    for axis, task in zip(axes[:, 0], ("math", "tooluse"), strict=True):
        groups = choose(f"figure 2, {task}", first(runs, task), EMA + RESTART[2:], ("sdpo",))
        bars(axis, list(runs[0]["R"]), with_base(groups, 1))
        axis.set(ylabel="score, %", title=f"{title(task)} training")
    return figure


def dynamics(runs):
    """Figures 2 and 3: the course of training by teacher, moving averages and restarts apart."""
    keys = ("reward", "jsd", "entropy", "teacher_entropy", "length")
    figure, axes = grid(4, 5, 14, 10)
    for i, row in enumerate(axes):
        task, methods = ("math", "tooluse")[i // 2], (EMA, RESTART)[i % 2]
        history(row, choose(f"figure 3, {task}", first(runs, task), methods, ("sdpo",)), keys, 1)
        row[0].set_title(f"{title(task)}: {('moving average', 'restart and freeze')[i % 2]}")
    return figure


def cot(runs):
    """Figure 4: distilling the reasoning too."""
    tasks, methods = ("math", "science", "tooluse"), ("sdpo", "sdpo-cot")
    figure, axes = grid(3, 4, 14, 8)
    for row, task in zip(axes, tasks, strict=True):
        groups = choose(f"figure 4, {task}", first(runs, task), methods, methods)
        bars(row[0], list(runs[0]["R"]), with_base(groups, 1))
        row[0].set(ylabel="score, %", title=f"{title(task)} training")
        history(row[1:], groups, ("length", "entropy", "jsd"), 1)
    return figure


def interference(runs):
    """Figure 5: gain and forgetting on a benchmark against its distance from the training set."""
    figure, axes = grid(1, 2, 11, 4, "")
    for axis, method in zip(axes[0], ("grpo", "sdpo"), strict=True):
        for task, mark in zip(("math", "science", "tooluse", "coding"), "osD^", strict=True):
            pass
    return figure
