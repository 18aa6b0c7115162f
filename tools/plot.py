"""Figures from the logs alone: nothing is measured here, so that any figure can be drawn again.

    python tools/plot.py demo runs/demo             # what make demo ran: demo.png
    python tools/plot.py learning runs/learning     # what runs/learning.sh ran: learning.png

Lines differ in dash and shade, bars in hatch: every figure can be read in grey.
"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# one look for one method, in every figure
STYLE = {"base": dict(color="0.75"), "grpo": dict(color="#1b6ca8", linestyle="--"),
         "sdpo": dict(color="#c1440e", linestyle="-")}
HATCH = {"base": "", "grpo": "//", "sdpo": ".."}
LABEL = {"base": "base", "grpo": "GRPO", "sdpo": "SDPO$_0$"}


def read_log(folder):
    """log.jsonl of a run folder as a list of dicts."""
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def demo(folder):
    """The two runs of `make demo`: reward while training, held-out accuracy on the six domains."""
    folder = Path(folder)
    result = json.loads((folder / "eval.json").read_text())
    names = {result["args"]["baseline"]: "base"}
    names |= {model: Path(model).name for model in result["args"]["model"]}
    task = read_log(folder / "sdpo")[0]["stage"]
    print(f"\nmean@{result['args']['n']} ± standard error, %, after training on {task}")
    print("{:16}".format("") + "".join(f"{name:>16}" for name in names.values()))
    for benchmark, scores in result["scores"].items():
        cells = (f"{100 * scores[m]['mean']:.1f} ± {100 * scores[m]['se']:.1f}" for m in names)
        print(f"{benchmark:16}" + "".join(f"{cell:>16}" for cell in cells))

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=(2, 3))
    for name in ("grpo", "sdpo"):
        log = read_log(folder / name)
        left.plot([x["step"] for x in log], [x["reward"] for x in log], label=LABEL[name],
                  **STYLE[name])
    left.set(xlabel="step", ylabel="reward of the batch", ylim=(0, 1), title=f"training: {task}")
    left.legend(frameon=False)
    for k, (model, name) in enumerate(names.items()):
        places = [i + 0.27 * (k - 1) for i in range(len(result["scores"]))]
        scores = [s[model] for s in result["scores"].values()]
        right.bar(places, [100 * s["mean"] for s in scores], 0.25, label=LABEL[name],
                  yerr=[100 * s["se"] for s in scores], color=STYLE[name]["color"],
                  hatch=HATCH[name], edgecolor="0.2")
    right.set_xticks(range(len(result["scores"])),
                     [name.removeprefix("tiny_") for name in result["scores"]])
    right.set(ylabel=f"mean@{result['args']['n']}, %", ylim=(0, 100), title="held-out prompts")
    right.legend(frameon=False, ncols=3)
    save(figure, folder / "demo.png")


def learning(folder):
    """The runs of runs/learning.sh: held-out accuracy after training less that of the run's base;
    the interval is Student's t over runs (both bases' seeds together)."""
    groups = {}  # (task, algorithm) -> the runs' scores beside their base's
    for path in sorted(Path(folder).glob("*-base*.json")):
        result = json.loads(path.read_text())
        task, base = path.stem.split("-")
        (scores,) = result["scores"].values()
        for model in result["args"]["model"]:
            algorithm = Path(model).name.split("-")[2]
            groups.setdefault((task, algorithm), []).append(
                (base, scores[result["args"]["baseline"]], scores[model]))
    print("| task | algorithm | base mean@1 (pass@8) | after | gain in points [95%] | by base |")
    print("| --- | --- | --- | --- | --- | --- |")
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for k, ((task, algorithm), runs) in enumerate(sorted(groups.items())):
        gains = [100 * (after["mean"] - before["mean"]) for _, before, after in runs]
        mean, half = interval(gains)
        own = {base: [g for g, run in zip(gains, runs, strict=True) if run[0] == base]
               for base, _, _ in runs}
        cells = [f"{100 * sum(run[i]['mean'] for run in runs) / len(runs):.1f} "
                 f"({100 * sum(run[i]['pass']['8'] for run in runs) / len(runs):.1f})"
                 for i in (1, 2)]  # before, after
        signs = ", ".join(f"{base} {sum(g) / len(g):+.1f}" for base, g in own.items())
        print(f"| {task} | {LABEL[algorithm]} | {cells[0]} | {cells[1]} | "
              f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}] | {signs} |")
        axis.bar(k, mean, 0.6, yerr=half, color=STYLE[algorithm]["color"], hatch=HATCH[algorithm],
                 edgecolor="0.2")
        axis.plot([k + 0.1 * (base == "base1") - 0.05 for base, _, _ in runs], gains, "k.")
    axis.set_xticks(range(len(groups)), [f"{task}\n{LABEL[a]}" for task, a in sorted(groups)])
    axis.axhline(0, color="0.2", linewidth=0.8)
    axis.set(ylabel="gain over the base, points", title="held-out accuracy, 95% over runs")
    save(figure, Path(folder) / "learning.png")


def interval(values):
    """(mean, half width of the 95% Student t interval) of up to 11 values."""
    mean, n = sum(values) / len(values), len(values)
    t = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)[n - 2]
    return mean, t * (sum((v - mean) ** 2 for v in values) / (n - 1) / n) ** 0.5


def save(figure, path):
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


FIGURES = {"demo": demo, "learning": learning}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FIGURES:
        print(f"usage: plot.py {'|'.join(FIGURES)} FOLDER", file=sys.stderr)
        raise SystemExit(2)
    try:
        FIGURES[sys.argv[1]](sys.argv[2])
    except FileNotFoundError as error:
        print(f"plot.py: {error.filename}: no such file; run what writes it first", file=sys.stderr)
        raise SystemExit(2) from None
