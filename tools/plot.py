"""Figures from the logs alone: nothing is measured here, so that any figure can be drawn again.

    python tools/plot.py demo runs/demo     # eval.json and */log.jsonl of one folder: demo.png

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
        right.bar(places, [100 * s["mean"] for s in scores], 0.25, label=LABEL[name], hatch=HATCH[name],
                  yerr=[100 * s["se"] for s in scores], color=STYLE[name]["color"], edgecolor="0.2")
    right.set_xticks(range(len(result["scores"])),
                     [name.removeprefix("tiny_") for name in result["scores"]])
    right.set(ylabel=f"mean@{result['args']['n']}, %", ylim=(0, 100), title="held-out prompts")
    right.legend(frameon=False, ncols=3)
    save(figure, folder / "demo.png")


def save(figure, path):
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


FIGURES = {"demo": demo}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FIGURES:
        print(f"usage: plot.py {'|'.join(FIGURES)} FOLDER", file=sys.stderr)
        raise SystemExit(2)
    try:
        FIGURES[sys.argv[1]](sys.argv[2])
    except FileNotFoundError as error:
        print(f"plot.py: {error.filename}: no such file; run what writes it first", file=sys.stderr)
        raise SystemExit(2) from None
