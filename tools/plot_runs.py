"""What plot.py draws with: run folders as plain dicts, one look for each method, and the few marks
that every figure is made of. Over runs, a band or an error bar is a 95% t interval, the seeds of
all bases together; a thin line or a small mark is the mean of one base."""
import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.legend_handler import HandlerTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import BENCHMARKS

plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                     "legend.frameon": False, "hatch.linewidth": 0.6, "axes.titlesize": 9})
DOTS, DOT_DASH, LONG = (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))
STYLE = {  # one look for one method, in every figure: label, colour, dash, mark, hatch
    "base": ("base", "0.85", ":", "_", ""),
    "grpo": ("GRPO", "#14507f", "--", "o", "//"),
    "grpo-equal": ("GRPO, equal steps", "#7fb2d9", DOTS, "v", "\\\\"),
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
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # df 1 .. 10
RUNS = "bands, bars: 95% t interval over runs; thin lines, small marks: mean of one base"


class Missing(Exception):
    """What a figure needs and the folder does not hold."""


# ---- reading -------------------------------------------------------------------------------------

def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_run(folder):
    """A run: what continual.json holds; its log by step over all stages, and the steps at which
    stages end; drift.json, or None, and of it the part of each checkpoint in order."""
    run = json.loads((folder / "continual.json").read_text())
    run |= {"folder": folder, "tasks": [s["task"] for s in run["stages"]], "ends": [0], "log": {}}
    for k, stage in enumerate(run["stages"], 1):
        log = folder / f"{k}-{stage['task']}.jsonl"  # or, in a folder of continual.py's own
        for line in read_lines(log if log.exists() else log.with_suffix("") / "log.jsonl"):
            run["log"][run["ends"][-1] + line["step"]] = line
        run["ends"].append(run["ends"][-1] + stage["steps"])
    drift = folder / "drift.json"
    drift = json.loads(drift.read_text()) if drift.exists() else {"weights": {}, "responses": {}}
    return run | {"drift": drift if drift["weights"] else None, "models": list(drift["weights"]),
                  **{key: list(drift[key].values()) for key in ("weights", "responses")}}


def read_runs(folder):
    """Every run in a folder, with the method, base and seed that its name tells."""
    runs = []
    for path in sorted(Path(folder).glob("*/continual.json")):
        run, m = read_run(path.parent), re.fullmatch(r"(.+)-b(\d+)-s(\d+)-?(.*)", path.parent.name)
        if m and m[1] in STYLE and m[4] in ("", run["tasks"][0]):
            runs.append(run | {"method": m[1], "base": m[2], "seed": m[3]})
        else:
            print(f"{path.parent}: left out, its name is no METHOD-bBASE-sSEED[-TASK]")
    return runs


def choose(what, runs, methods, need, where=lambda run: True):
    """{method: its runs}, for those that have any. Raises Missing where one of `need` has none."""
    found = {m: [run for run in runs if run["method"] == m and where(run)] for m in methods}
    lacks = [m for m in methods if not found[m]]
    if set(lacks) & set(need):
        raise Missing(f"{what}: no run of {', '.join(m for m in lacks if m in need)}")
    if lacks:
        print(f"{what}: drawn without {', '.join(lacks)}")
    return {m: own for m, own in found.items() if own}


def choose_by_task(what, runs, tasks, methods, need):
    """{task: {method: its runs that begin with it}}, without tasks that lack what they need."""
    found = {}
    for task in tasks:
        try:
            found[task] = choose(f"{what}, {task}", runs, methods, need,
                                 lambda run: run["tasks"][0] == task)
        except Missing as missing:
            print(missing)
    if not found:
        raise Missing(f"{what}: no task is left")
    return found


def several(run):
    return len(run["tasks"]) > 1


def drifted(run):
    return several(run) and len(run["responses"]) == len(run["tasks"])


def inside(names, tasks):
    """Those of the names, benchmarks or training sets, that are in distribution of these tasks."""
    return [x for x in names if x in tasks or (x in BENCHMARKS and BENCHMARKS[x].domain in tasks)]


def scores(run, k, names=None):
    """Percent after stage k, or a slice of them; 0 is the base."""
    return np.array([[100 * x["mean"] for x in run["R"][b]] for b in names or run["R"]])[:, k]


def change(run, k, names):
    """Relative change from the base to stage k, percent; NaN, undefined, where the base has 0."""
    base = scores(run, 0, names)
    return 100 * (scores(run, k, names) - base) / np.where(base == 0, np.nan, base)


def title(name):
    """A task or a benchmark as figures call it."""
    name = name.removeprefix("tiny_")
    return "ToolUse" if name == "tooluse" else name.capitalize() if name.isalpha() else name


# ---- drawing -------------------------------------------------------------------------------------

def interval(values):
    """(mean, half width of the 95% t interval) over the first axis; None and NaN are left out, and
    one value has no width."""
    x = np.ma.masked_invalid(np.array(values, float))
    n = x.count(0)
    t = np.where(n > 11, 1.96 + 2.6 / np.maximum(n - 1, 1), np.take(T95, np.clip(n - 2, 0, 9)))
    variance = np.ma.filled(((x - x.mean(0)) ** 2).sum(0), 0) / np.maximum(n - 1, 1)
    return np.ma.filled(x.mean(0), np.nan), t * np.sqrt(variance / np.maximum(n, 1))


def over(runs, value):
    """interval of value(run) over runs, and the mean of each base where there are several. Of two
    runs the half width is NaN: 12.7 standard errors would be wider than any axis."""
    bases = [[value(run) for run in runs if run["base"] == b]
             for b in sorted({run["base"] for run in runs})]
    mean, half = interval(sum(bases, []))
    return mean, np.where(len(runs) == 2, np.nan, half), [
        interval(b)[0] for b in bases if len(bases) > 1]


def curve(axis, x, runs, value, method, band=None):
    """value(run), an array over x, of a method's runs. band: what stands for its two ends, where
    that is not the interval."""
    label, colour, dash, mark, _ = STYLE[method]
    mean, half, bases = over(runs, value)
    low, high = [over(runs, end)[0] for end in band] if band else (mean - half, mean + half)
    axis.plot(x, mean, color=colour, linestyle=dash, label=label, marker=mark, markersize=4,
              markevery=1 + len(x) // 12)
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
        borders(axis, ends)
        axis.set(xlabel="step", ylabel=key.replace("_", " "))


def borders(axis, ends):
    for end in ends[1:-1]:
        axis.axvline(end + 0.5, color="0.6", linewidth=0.6)


def bars(axis, names, cells):
    """cells: {method: (means, half widths, means of each base)}, each over the names."""
    for i, (method, (mean, half, bases)) in enumerate(cells.items()):
        label, colour, _, _, hatch = STYLE[method]
        x = np.arange(len(names)) + (i - (len(cells) - 1) / 2) * 0.84 / len(cells)
        axis.bar(x, mean, 0.76 / len(cells), yerr=half, label=label, color=colour, hatch=hatch,
                 edgecolor="w", linewidth=0, error_kw=dict(linewidth=0.8, ecolor="0.3", capsize=2))
        for mark, base in zip("oD^sv", bases, strict=False):
            axis.plot(x, base, mark, color="k", markersize=2.5, markerfacecolor="w",
                      markeredgewidth=0.5)
        for place in x[np.isnan(mean)]:
            axis.text(place, 0, " base has 0", rotation=90, ha="center", va="bottom", fontsize=7)
    axis.axhline(0, color="0.2", linewidth=0.6)
    axis.set_xticks(range(len(names)), [title(name) for name in names])


def symlog(axis, linear):
    axis.set_yscale("symlog", linthresh=linear)
    axis.yaxis.set_major_formatter("{x:g}")


def stage_ticks(axis, tasks, base=True):
    axis.set_xticks(range(1 - base, len(tasks) + 1), ["base"] * base + [*map(title, tasks)])
    axis.set_xlabel("after stage")


def trained(axis, groups, task):
    """Bars of the scores after the first stage and of their mean, beside the base's."""
    def value(k):
        return lambda run: [*scores(run, k), scores(run, k).mean()]
    bars(axis, [*next(iter(groups.values()))[0]["R"], "average"], {
        "base": over(sum(groups.values(), []), value(0)),
        **{method: over(runs, value(1)) for method, runs in groups.items()}})
    axis.set(ylabel="score, %", title=f"after {title(task)} training")


def violin(axis, x, values, side, colour, hatch, label):
    """Half a violin, with its median and its 5th percentile."""
    parts = axis.violinplot(values, [x], widths=0.9, side=side, showextrema=False,
                            quantiles=[0.05, 0.5])
    parts["bodies"][0].set(facecolor=colour, edgecolor="0.2", hatch=hatch, alpha=0.75,
                           linewidth=0.5, label=label)
    parts["cquantiles"].set(color="0.1", linewidth=0.9)


def grid(rows, columns, width, height, note=RUNS, **more):
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False,
                                layout="constrained", **more)
    figure.supxlabel(note, fontsize=7.5, color="0.3")
    return figure, axes


def save(figure, path):
    """One legend for all panels, over them; a method's bar and its line share an entry."""
    found = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, {})[type(handle)] = handle
    figure.legend([tuple(kinds.values()) for kinds in found.values()], found, handlelength=3.5,
                  handler_map={tuple: HandlerTuple(ndivide=None)}, loc="outside upper center",
                  ncols=int(figure.get_figwidth() / 1.5))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"figure: {path}")
