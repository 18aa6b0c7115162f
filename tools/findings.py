"""A verdict on every finding, from the results folder alone, by the rules of results/PLAN.md.

    python tools/plot.py findings FOLDER       # a markdown table, on the screen

A row compares two methods, run by run: the same base, seed and first task. The interval is 95%,
Student's t over those pairs, so it speaks of these bases; each base's own mean stands beside it.

    reproduced    it excludes 0 on the paper's side, the mean reaches the smallest effect of
                  interest, and every base has the paper's sign
    opposite      the same on the other side
    not seen      it excludes the smallest effect on the paper's side
    underpowered  anything else
"""
import errno
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import plot_runs as draw

SMALLEST = {  # effect of interest of each measure, in its unit
    "gained": 5.0,      # points on the first stage's own benchmark
    "current": 5.0,     # points on the second stage's, right after it, over the base
    "average": 3.0,     # points, mean of all benchmarks after the first stage
    "final": 3.0,       # points, mean of all benchmarks after the last stage
    "untrained": 3.0,   # points over the base on what no stage trained, after the last
    "forgotten": 5.0,   # points, Current - Last, mean of all stages but the last
    "middle": 5.0,      # points over the base after the first stage, MMD^2 .05 to .45 less farther
    "nss": 0.5,         # log2: a factor of 1.4; of the weights after the last stage
    "nss_per_point": 0.5,  # log2, of the same over the points gained, each at its own stage
    "kl": 1.0,          # log2, nats of a response after the last stage, all prompt sets
    "excess": 0.5,      # nats of a response on a stage's own prompts right after it, mean of stages
    "artifact": 0.1,    # largest share of a response that repeats, last fifth of the last stage
}
ROWS = [  # finding, the paper's claim, measure, method, against (None: 0), first task, paper's sign
    ("F1", "SDPO specialises further", "gained", "sdpo", "grpo", "math", 1),
    ("F1", "", "gained", "sdpo", "grpo", "science", 1),
    ("F1", "", "gained", "sdpo", "grpo", "tooluse", 1),
    ("F1", "at equal steps", "gained", "sdpo", "grpo-equal", "math", 1),
    ("F2", "a frozen teacher beats a fast average", "average", "sdpo", "sdpo-ema5", "math", 1),
    ("F2", "", "average", "sdpo", "sdpo-ema5", "tooluse", 1),
    ("F2", "restarts repair it", "average", "sdpo-matched", "sdpo-ema5", "math", 1),
    ("F2", "a hard restart beats a frozen one", "average", "sdpo-hard", "sdpo", "math", 1),
    ("F2", "so does a slow average", "average", "sdpo-ema1", "sdpo", "math", 1),
    ("F3", "distilled reasoning hurts", "gained", "sdpo-cot", "sdpo", "math", -1),
    ("F3", "", "gained", "sdpo-cot", "sdpo", "science", -1),
    ("F3", "and helps", "gained", "sdpo-cot", "sdpo", "tooluse", 1),
    ("F4", "the middle distance loses", "middle", "sdpo", None, "math", -1),
    ("F4", "", "middle", "sdpo", None, "science", -1),
    ("F5", "SDPO is ahead when current", "current", "sdpo", "grpo", "math", 1),
    ("F5", "and forgets more", "forgotten", "sdpo", "grpo", "math", 1),
    ("F5", "at equal steps", "forgotten", "sdpo", "grpo-equal", "math", 1),
    ("F5", "and ends lower", "final", "sdpo", "grpo", "math", -1),
    ("F5", "SDPO ends below the base elsewhere", "untrained", "sdpo", None, "math", -1),
    ("F5", "GRPO above it", "untrained", "grpo", None, "math", 1),
    ("F5", "reasoning degrades it", "final", "sdpo-cot", "sdpo", "math", -1),
    *(("F6", f"{who} moves further{how}", measure, method, against, "math", 1)
      for measure in ("nss", "kl") for who, how, method, against in (
          ("SDPO", "", "sdpo", "grpo"), ("SDPO", ", equal steps", "sdpo", "grpo-equal"),
          ("a fast average", "", "sdpo-ema5", "sdpo"), ("reasoning", "", "sdpo-cot", "sdpo-ema5"))),
    *(("F6", "and per point gained", "nss_per_point", "sdpo", m, "math", 1)
      for m in ("grpo", "grpo-equal")),
    *(("F6", "and beyond what success needs", "excess", "sdpo", m, "math", 1)
      for m in ("grpo", "grpo-equal")),
    ("F7", "a fast average collapses", "final", "sdpo-ema5", "sdpo", "math", -1),
    ("F7", "into repetition", "artifact", "sdpo-ema5", "sdpo", "math", 1),
    ("F7", "masking helps", "final", "sdpo-ema5-mask", "sdpo-ema5", "math", 1),
    ("F7", "so does another order", "final", "sdpo-ema5-reorder", "sdpo-ema5", None, 1),
]


def measure(run, name):
    """One number of a run (plot_runs.read_run), in the unit that SMALLEST names; NaN where the run
    does not have it."""
    tasks, names, end = run["tasks"], list(run["R"]), len(run["tasks"])

    def own(i):
        return draw.inside(names, [tasks[i]])

    def points(k, at):  # over the base, after stage k
        return (draw.scores(run, k, at) - draw.scores(run, 0, at)).mean() if at else np.nan

    if name == "average":
        return draw.scores(run, 1).mean()
    if name == "gained":
        return points(1, own(0))
    if name == "middle":
        distance = run["drift"] and run["drift"]["mmd"]["mmd2"][own(0)[0]]
        parts = [[b for b in names if low < distance[b] <= high]
                 for low, high in ((.05, .45), (.45, 2))] if distance else ([], [])
        return points(1, parts[0]) - points(1, parts[1])
    if end < 2:  # the rest is told of whole sequences alone
        return np.nan
    if name == "final":
        return draw.scores(run, end).mean()
    if name == "artifact":
        steps = list(run["log"])[run["ends"][-2]:]
        return np.mean([run["log"][step]["artifact"] for step in steps[-max(1, len(steps) // 5):]])
    if name == "current":
        return points(2, own(1))
    if name == "untrained":
        return points(end, [b for b in names if not draw.inside([b], tasks)])
    if name == "forgotten":
        return np.mean([points(k + 1, own(k)) - points(end, own(k)) for k in range(end - 1)])
    if not draw.drifted(run):
        return np.nan
    if name == "kl":
        return np.log2(np.mean([s["sequence_kl"]["mean"] for s in run["responses"][-1].values()]))
    if name == "excess":
        return np.mean([run["responses"][k][b]["excess_jackknife"]["mean"]
                        for k in range(end) for b in own(k)])
    nss = run["weights"][-1]["all"]["nss"]["mean"]
    gain = sum(points(k + 1, own(k)) for k in range(end)) if name == "nss_per_point" else 1.0
    return np.log2(nss / gain) if gain > 0 else np.nan


def verdict(mean, half, bases, sign, smallest):
    """mean +- half of the difference, the mean of each base, the paper's sign."""
    for side, word in ((sign, "reproduced"), (-sign, "opposite")):
        if side * mean >= smallest and side * mean > half and all(side * b > 0 for b in bases):
            return word
    return "not seen" if sign * mean + half < smallest else "underpowered"


def table(folder):
    """The table of all rows, in Markdown."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(errno.ENOENT, "no folder of runs", str(folder))
    found = {}  # {(method, first task): {(base, seed): run}}
    for run in draw.read_runs(folder):
        alone = len(run["tasks"]) == 1  # a whole sequence serves where no run of one stage does
        runs = found.setdefault((run["method"], run["tasks"][0]), {})
        if not alone or (run["base"], run["seed"]) not in runs:
            runs[run["base"], run["seed"]] = run
    lines = ["| | claim | measure | compared | first task | effect [95%] | pairs | by base | "
             "smallest | verdict |", "|" + " --- |" * 10]
    for finding, claim, name, method, against, task, sign in ROWS:
        a, b = ({k: run for (m, first), runs in found.items() for k, run in runs.items()
                 if m == who and (first == task or (task is None and draw.several(run)))}
                for who in (method, against))  # without a task: whole sequences in any order
        value = {k: measure(a[k], name) - (measure(b[k], name) if against else 0)
                 for k in sorted(a) if k in b or not against}
        value = {k: v for k, v in value.items() if np.isfinite(v)}
        cells = [finding, claim, name, f"{method} - {against or 0}", task or "any"]
        if len(value) < 2:
            word = "one pair" if value else "not run"
            lines.append(f"| {' | '.join(cells)} | | {len(value)} | | | {word} |")
            continue
        mean, half = map(float, draw.interval(list(value.values())))
        bases = {b: np.mean([v for k, v in value.items() if k[0] == b]) for b, _ in sorted(value)}
        cells += [f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]", str(len(value)),
                  ", ".join(f"{base}: {v:+.2f}" for base, v in bases.items()),
                  f"{sign * SMALLEST[name]:+g}",
                  verdict(mean, half, bases.values(), sign, SMALLEST[name])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
