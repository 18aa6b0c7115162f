"""Figures from the logs alone: nothing is measured here, so that any figure can be drawn again.

    python tools/plot.py demo FOLDER           # what make demo ran
    python tools/plot.py learning FOLDER       # what runs/learning.sh ran
    python tools/plot.py continual FOLDER      # one run of continual.py
    python tools/plot.py findings FOLDER       # a verdict on every finding: results/PLAN.md
    python tools/plot.py paper FOLDER          # every figure, into FOLDER/figures

`paper` reads FOLDER/METHOD-bBASE-sSEED[-TASK]/ as runs/laptop.sh leaves them: continual.json, the
log of stage k as k-TASK.jsonl, drift.json, drift.jsonl. What concerns one task is drawn from every
run that begins with it, up to the end of that stage. A figure whose runs are missing is left out,
with a line that names them. Dash, mark and hatch say what colour says: all can be read in grey.
"""
import errno
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import findings
from tools import plot_runs as draw
from tools.plot_paper import FIGURES


def demo(folder):
    """The two runs of `make demo`: reward while training, held-out accuracy on the six domains."""
    result, (figure, ((left, right),)) = json.loads((folder / "eval.json").read_text()), draw.grid(
        1, 2, 11, 3.8, "error bars: standard error over prompts")
    models = {result["args"]["baseline"]: "base"}
    models |= {model: Path(model).name for model in result["args"]["model"]}
    for name in ("grpo", "sdpo"):
        log = {line["step"]: line for line in draw.read_lines(folder / name / "log.jsonl")}
        draw.history([left], {name: [{"base": "0", "log": log, "ends": [0, len(log)]}]}, ["reward"])
    draw.bars(right, list(result["scores"]), {name: (*(
        [100 * scores[model][key] for scores in result["scores"].values()]
        for key in ("mean", "se")), []) for model, name in models.items()})
    warm = result["args"]["temperature"]
    left.set(ylim=(0, 1), title=f"training: {log[1]['stage']}, T = 1")
    right.set(ylabel=f"mean@{result['args']['n']}, %", ylim=(0, 100),
              title=f"held-out prompts, T = {warm}")
    draw.save(figure, folder / "demo.png")


def learning(folder):
    """The runs of runs/learning.sh: held-out accuracy after training less that of a run's base."""
    groups, cells = {}, {}  # (task, algorithm) -> its runs, each with two scores
    for path in sorted(folder.glob("*-base*.json")):
        result, (task, base) = json.loads(path.read_text()), path.stem.split("-")
        (scores,) = result["scores"].values()
        for model in result["args"]["model"]:
            groups.setdefault((task, Path(model).name.split("-")[2]), []).append(
                {"base": base, "scores": (scores[result["args"]["baseline"]], scores[model])})
    print("| task | algorithm | base mean@1 (pass@8) | after | gain in points [95%] | by base |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (task, algorithm), runs in sorted(groups.items()):
        mean = [draw.over(runs, lambda run: 100 * run["scores"][i]["mean"])[0] for i in (0, 1)]
        most = [draw.over(runs, lambda run: 100 * run["scores"][i]["pass"]["8"])[0] for i in (0, 1)]
        gain, half, bases = draw.over(
            runs, lambda run: 100 * (run["scores"][1]["mean"] - run["scores"][0]["mean"]))
        cells.setdefault(algorithm, []).append((gain, half, bases))
        signs = ", ".join(f"{base} {own:+.1f}" for base, own in zip(
            sorted({run["base"] for run in runs}), bases, strict=True))
        print(f"| {task} | {draw.STYLE[algorithm][0]} | {mean[0]:.1f} ({most[0]:.1f}) | "
              f"{mean[1]:.1f} ({most[1]:.1f}) | {gain:+.1f} [{gain - half:+.1f}, "
              f"{gain + half:+.1f}] | {signs} |")
    figure, ((axis,),) = draw.grid(1, 1, 6, 3.6)
    draw.bars(axis, sorted({task for task, _ in groups}), {
        m: (*list(zip(*own, strict=True))[:2], list(zip(*(x[2] for x in own), strict=True)))
        for m, own in cells.items()})
    axis.set(ylabel="gain over the base, points", title="held-out accuracy")
    draw.save(figure, folder / "learning.png")


def continual(folder):
    """One run of continual.py: every benchmark over the stages, and the training reward."""
    run = draw.read_run(folder)
    figure, ((left, right),) = draw.grid(1, 2, 11, 4, "error bars: standard error over prompts")
    for i, ((name, row), mark) in enumerate(zip(run["R"].items(), "osD^vPXp<>hd*", strict=False)):
        left.errorbar([k + 0.03 * (i - len(run["R"]) / 2) for k in range(len(row))],
                      draw.scores(run, slice(None), [name])[0],
                      [100 * (x["se"] or 0) for x in row], label=draw.title(name), marker=mark,
                      linestyle="-" if draw.inside([name], run["tasks"]) else ":", capsize=2)
    draw.stage_ticks(left, run["tasks"])
    left.set(ylabel="score, %", title="solid: trained in a stage; dotted: out of distribution")
    right.plot(list(run["log"]), [line["reward"] for line in run["log"].values()], color="0.2")
    draw.borders(right, run["ends"])
    right.set(xlabel="step", ylabel="reward of the batch", title="training")
    draw.save(figure, folder / "continual.png")


def paper(folder):
    """Every figure that the runs in the folder suffice for."""
    runs = draw.read_runs(folder)
    if not runs:
        raise FileNotFoundError(errno.ENOENT, "no run",
                                f"{folder}/METHOD-bBASE-sSEED/continual.json")
    for name, figure in FIGURES.items():
        try:
            draw.save(figure(runs), folder / "figures" / f"{name}.png")
        except draw.Missing as missing:
            print(f"{name}.png is left out: {missing}")


COMMANDS = {"demo": demo, "learning": learning, "continual": continual, "paper": paper,
            "findings": lambda folder: print(findings.table(folder))}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in COMMANDS:
        print(f"usage: plot.py {'|'.join(COMMANDS)} FOLDER", file=sys.stderr)
        raise SystemExit(2)
    try:
        COMMANDS[sys.argv[1]](Path(sys.argv[2]))
    except FileNotFoundError as error:
        print(f"plot.py: {error.filename}: no such file; run what writes it first", file=sys.stderr)
        raise SystemExit(2) from None
