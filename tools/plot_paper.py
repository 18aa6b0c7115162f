"""The paper's figures, and one of our own, from the runs of a study: run by `plot.py paper FOLDER`.

A figure is a function from all runs to a matplotlib figure. It raises Missing where there are no
runs of what it cannot do without, and prints what else it was drawn without. What concerns one task
is drawn from every run that begins with it, up to the end of that stage.
"""
import numpy as np

from tools import plot_runs as draw
from tools.plot_runs import STYLE, choose, choose_by_task, drifted, inside, over, several, title

EMA = ["sdpo", "sdpo-ema0.5", "sdpo-ema1", "sdpo-ema2", "sdpo-ema5"]
RESTART = ["sdpo", "sdpo-ema5", "sdpo-matched", "sdpo-hard"]
CONTINUAL = ["grpo", "grpo-equal", "sdpo", "sdpo-ema5", "sdpo-hard", "sdpo-cot"]
COLLAPSE = ["grpo", "sdpo", "sdpo-ema5", "sdpo-ema5-mask", "sdpo-ema5-reorder"]


def teachers(runs):
    """2a: scores after one stage, by teacher."""
    found = choose_by_task("figure 2", runs, ("math", "tooluse"), EMA + RESTART[2:],
                           ("sdpo", "sdpo-ema5"))
    figure, axes = draw.grid(len(found), 1, 12, 3 * len(found))
    for axis, (task, groups) in zip(axes[:, 0], found.items(), strict=True):
        draw.trained(axis, groups, task)
    return figure


def dynamics(runs):
    """2b, 3: the course of training by teacher; moving averages and restarts apart."""
    kinds = {"moving average": EMA, "restart and freeze": RESTART}
    found = {(task, kind): groups for kind, methods in kinds.items() for task, groups in
             choose_by_task("figure 3", runs, ("math", "tooluse"), methods,
                            ("sdpo", "sdpo-ema5")).items()}
    figure, axes = draw.grid(len(found), 5, 14, 2.5 * len(found))
    for row, ((task, kind), groups) in zip(axes, sorted(found.items()), strict=True):
        draw.history(row, groups, ("reward", "jsd", "entropy", "teacher_entropy", "length"), 1)
        row[0].set_title(f"{title(task)}, {kind}", loc="left")
    return figure


def cot(runs):
    """4: what distilling the reasoning too does to scores and to training."""
    found = choose_by_task("figure 4", runs, ("math", "science", "tooluse"),
                           *2 * [["sdpo", "sdpo-cot"]])
    figure, axes = draw.grid(len(found), 4, 14, 2.7 * len(found))
    for row, (task, groups) in zip(axes, found.items(), strict=True):
        draw.trained(row[0], groups, task)
        row[0].tick_params("x", rotation=40)
        draw.history(row[1:], groups, ("length", "entropy", "jsd"), 1)
    return figure


def interference(runs):
    """5: gain and forgetting on a benchmark against its distance from what was trained."""
    figure, axes = draw.grid(1, 2, 11, 4.5, "mark: what was trained; filled: gain; hollow: "
                             "forgetting; means over runs with 95% t intervals", sharey=True)
    groups = choose("figure 5 (with MMD)", runs, *2 * [["grpo", "sdpo"]],
                    lambda run: "mmd" in (run["drift"] or ()))
    for axis, (method, own) in zip(axes[0], groups.items(), strict=True):
        for task, mark in zip(dict.fromkeys(r["tasks"][0] for r in own), "osD^vP", strict=False):
            begun = [run for run in own if run["tasks"][0] == task]
            names, mmd = list(begun[0]["R"]), [run["drift"]["mmd"]["mmd2"] for run in begun]
            source = inside(mmd[0], [task])[-1]  # the training set itself, where it was embedded
            x = draw.interval([[table[source][b] for b in names] for table in mmd])[0]
            for part, face in ((np.fmax, None), (np.fmin, "w")):
                y, half, _ = over(begun, lambda run: part(draw.change(run, 1, names), 0))
                axis.errorbar(x, np.where(y == 0, np.nan, y), half,
                              fmt=mark, capsize=2, color=STYLE[method][1], linewidth=0.8,
                              markerfacecolor=face, label=None if face else title(task))
        draw.symlog(axis, 1)
        axis.axhline(0, color="0.2", linewidth=0.6)
        axis.set(xlabel="MMD$^2$ to the training prompts", title=STYLE[method][0])
    axes[0, 0].set_ylabel("change from the base, %")
    return figure


def sequence(runs):
    """6: each trained domain over the stages; below, what became of all others."""
    groups = choose("figure 6", runs, CONTINUAL, ("grpo", "sdpo"), several)
    tasks, names = groups["sdpo"][0]["tasks"], list(groups["sdpo"][0]["R"])
    figure, axes = draw.grid(2, len(tasks), 3 * len(tasks), 6.5)
    for k, (axis, task) in enumerate(zip(axes[0], tasks, strict=True)):
        for method, own in groups.items():
            draw.curve(axis, range(len(tasks) + 1), own, lambda run: draw.scores(
                run, slice(None), inside(names, [task])).mean(0), method)
        axis.axvspan(k, k + 1, color="0.93", zorder=0)
        axis.set(ylabel="score, %", title=title(task), ylim=(0, 101))  # an interval may lie beyond
        draw.stage_ticks(axis, tasks)
        axes[1, k].remove()
    axis = figure.add_subplot(axes[1, 0].get_gridspec()[1, :])
    others = [b for b in names if not inside([b], tasks)]
    draw.bars(axis, others, {method: over(own, lambda run: draw.change(run, -1, others))
                             for method, own in groups.items()})
    draw.symlog(axis, 1)
    axis.set_ylim(bottom=max(-100, axis.get_ylim()[0]))  # no score falls by more
    axis.set(ylabel="change from the base, %", title="out of distribution, after the last stage")
    return figure


def weights(runs):
    """7a, b: drift of the weights by type of matrix after the last stage, and by stage."""
    groups = choose("figure 7a,b (with drift)", runs, CONTINUAL, ("grpo", "sdpo"), drifted)
    tasks = groups["sdpo"][0]["tasks"]
    known = ["q", "k", "v", "o", "gate", "up", "down"]
    kinds = sorted({*groups["sdpo"][0]["weights"][0]} - {"all"},
                   key=lambda kind: ([*known, kind].index(kind), kind))
    figure, axes = draw.grid(2, 4, 14, 6.5, "mean over matrices and runs; bands: 10th to 90th "
                             "percentile of the matrices; dotted: overlap by chance")
    for column, (key, label) in zip(axes.T, {
            "nss": "normalised spectral shift", "rotation": "rotation, degrees",
            "pm_overlap": "principal mask kept, IoU %",
            "pm_update": "principal mask updated, IoU %"}.items(), strict=True):
        def values(axis, key, stat):
            if axis is column[0]:
                return lambda run: [run["weights"][-1][kind][key][stat] for kind in kinds]
            return lambda run: [model["all"][key][stat] for model in run["weights"]]
        for axis, x in zip(column, (range(len(kinds)), range(1, len(tasks) + 1)), strict=True):
            for method, own in groups.items():
                mean, *band = (values(axis, key, stat) for stat in ("mean", "p10", "p90"))
                draw.curve(axis, x, own, mean, method, band)
                if key == "pm_update":
                    chance = over(own, values(axis, "pm_update_chance", "mean"))[0]
                    axis.plot(x, chance, ":", color=STYLE[method][1], linewidth=1)
            axis.set_yscale("log" if key == "nss" else "linear")
            axis.set_ylabel(label)
        column[0].set_xticks(range(len(kinds)), kinds)
        column[0].set_xlabel("type of matrix, last stage")
        draw.stage_ticks(column[1], tasks, base=False)
    return figure


def similarity(runs):
    """7c, d: cosine of a checkpoint's responses with the base's to the same prompts."""
    groups = choose("figure 7c,d (with drift)", runs, CONTINUAL, ("grpo", "sdpo"), drifted)
    tasks, found = groups["sdpo"][0]["tasks"], {}  # (method, stage, in distribution) -> cosines
    for run in sum(groups.values(), []):
        for line in draw.read_lines(run["folder"] / "drift.jsonl"):
            if "similarity" in line:
                k, inner = run["models"].index(line["model"]), inside([line["prompts"]], tasks)
                found.setdefault((run["method"], k, bool(inner)), []).extend(line["similarity"])
    figure, ((left, right),) = draw.grid(1, 2, 14, 4.2, "responses of all runs; lines: the median "
                                         "and the 5th percentile of a half", width_ratios=(3, 2))
    for x, method in enumerate(groups):
        draw.violin(left, x, found[method, len(tasks) - 1, True], "low", "0.8", "",
                    "in distribution")
        draw.violin(left, x, found[method, len(tasks) - 1, False], "high", "0.5", "//",
                    "out of distribution")
    for k in range(len(tasks)):
        for method, side in (("grpo", "low"), ("sdpo", "high")):
            label, colour, _, _, hatch = STYLE[method]
            draw.violin(right, k + 1, found[method, k, True] + found[method, k, False], side,
                        colour, hatch, label)
    left.set_xticks(range(len(groups)), [STYLE[method][0] for method in groups])
    left.set(ylabel="cosine with the base's response", title="after the last stage")
    draw.stage_ticks(right, tasks, base=False)
    return figure


def collapse(runs):
    """8: the signs of a collapse over all stages, a row for each order of them."""
    groups = choose("figure 8", runs, COLLAPSE, ("sdpo-ema5",), several)
    orders = list(dict.fromkeys(tuple(run["tasks"]) for run in sum(groups.values(), [])))
    figure, axes = draw.grid(len(orders), 4, 14, 1 + 2.6 * len(orders))
    for row, order in zip(axes, orders, strict=True):
        draw.history(row, {m: own for m, own in groups.items() if own[0]["tasks"] == list(order)},
                     ("reward", "jsd", "artifact", "boxed"))
        row[0].set_title(", ".join(map(title, order)), loc="left")
    return figure


def excess(runs):
    """Ours: how much further than its success needed a method moved: on a task after its stage, and
    out of distribution after the last."""
    groups = choose("excess drift", runs, CONTINUAL, ("grpo", "sdpo"), drifted)
    tasks = groups["sdpo"][0]["tasks"]
    figure, axes = draw.grid(1, len(tasks) + 1, 3.2 * (len(tasks) + 1), 3.8, "small: a run, hollow "
                             "on the first base; large: mean of all, 95% t intervals; 0: the least "
                             "drift that the success allows; an estimate may be negative")

    def value(run, k):
        sets = run["responses"][min(k, len(tasks) - 1)]
        own = inside(sets, tasks[k:k + 1]) or [x for x in sets if not inside([x], tasks)]
        after, before, y = (np.mean([sets[x][key]["mean"] for x in own])
                            for key in ("success", "success_base", "excess_jackknife"))
        return 100 * (after - before), y

    for k, axis in enumerate(axes[0]):
        for method, own in groups.items():
            label, colour, _, mark, _ = STYLE[method]
            for run in own:
                axis.plot(*value(run, k), mark, color=colour, markersize=3, alpha=0.7,
                          markerfacecolor="w" if run["base"] == own[0]["base"] else colour)
            (x, y), (dx, dy), _ = over(own, lambda run: value(run, k))
            axis.errorbar(x, y, dy, dx, fmt=mark, color=colour, markersize=7, capsize=2,
                          markeredgecolor="k", label=label)
        axis.axhline(0, color="0.2", linewidth=0.6)
        axis.set(xlabel="success gained, points", title=f"{title(tasks[k])}, after its stage"
                 if k < len(tasks) else "out of distribution, last stage")
    axes[0, 0].set_ylabel("excess drift, nats a response")
    return figure


FIGURES = {"fig2_teachers": teachers, "fig3_dynamics": dynamics, "fig4_cot": cot,
           "fig5_interference": interference, "fig6_continual": sequence, "fig7ab_weights": weights,
           "fig7cd_responses": similarity, "fig8_collapse": collapse, "excess_drift": excess}
