"""Figures: what they draw is what the logs say, and what is missing is named. The runs here are
made up from a seed, so that every number in a figure is known."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import continual
from tools import keep, plot, plot_paper, plot_runs

ROOT = Path(__file__).parents[1]
TASKS = ["math", "science", "tooluse", "coding"]
NAMES = [f"tiny_{task}" for task in [*TASKS, "logic", "knowledge"]]
KINDS = ["q", "k", "v", "o", "gate", "up", "down"]
STEPS, PROMPTS, SAMPLES = 20, 4, 5


def spread(rng, centre, width):
    mean = centre + rng.gauss(0, width)
    return {"mean": mean, "p10": 0.8 * mean, "p90": 1.2 * mean}


def write_run(folder, method, base, seed, tasks, skill):
    """A run whose scores rise by `skill` in the stage of their own domain and fall a little after,
    and whose drift is in proportion to the stage."""
    rng = random.Random(f"{method} {base} {seed} {tasks}")
    name = f"{method}-b{base}-s{seed}" + (f"-{tasks[0]}" if len(tasks) == 1 else "")
    (folder / name).mkdir(parents=True)
    rows = {b: [0.3 + 0.05 * base + rng.uniform(0, 0.02)] for b in NAMES}
    for task in tasks:
        for b, row in rows.items():
            change = skill if b == f"tiny_{task}" else -0.06 * skill * rng.uniform(0.5, 4)
            row.append(min(max(row[-1] + change, 0), 1))
    result = {
        "args": {"algorithm": method[:4]}, "command": ["continual.py"], "commit": "abc",
        "stages": [{"task": t, "steps": STEPS, "folder": "gone", "checkpoint": f"ckpt-{k}"}
                   for k, t in enumerate(tasks)],
        "R": {b: [{"mean": x, "se": 0.02, "n": 8, "prompts": 64} for x in row]
              for b, row in rows.items()}}
    (folder / name / "continual.json").write_text(json.dumps(result))
    for k, task in enumerate(tasks, 1):
        lines = [{"step": i, "stage": task, "reward": 0.3 + skill * i / STEPS + rng.gauss(0, 0.03),
                  "jsd": 0.05 * skill * (1 + (i % 10) / 10) + rng.uniform(0, 0.003),
                  "entropy": 0.6 - 0.2 * i / STEPS + rng.gauss(0, 0.02), "artifact": 0.02 * k,
                  "teacher_entropy": 0.5 + rng.gauss(0, 0.02), "length": 20 + i + rng.gauss(0, 1),
                  "boxed": 1 + (k if method == "sdpo-ema5" else 0) * i / STEPS}
                 for i in range(1, STEPS + 1)]
        if method.startswith("grpo"):
            lines = [{k: v for k, v in x.items() if k not in ("jsd", "teacher_entropy")}
                     for x in lines]
        text = "".join(json.dumps(x) + "\n" for x in lines)
        (folder / name / f"{k}-{task}.jsonl").write_text(text)
    drift, records, size = {"weights": {}, "responses": {}}, [], skill * (0.2 + 0.1 * len(method))
    for k in range(len(tasks)):
        drift["weights"][f"ckpt-{k}"] = {kind: {
            "nss": spread(rng, 1e-4 * size * (k + 1), 1e-6),
            "rotation": spread(rng, 3 * size * (k + 1), 0.1),
            "pm_overlap": spread(rng, 99.9 - size * (k + 1), 0.02),
            "pm_update": spread(rng, 6 * size, 0.1),
            "pm_update_chance": spread(rng, 3, 0.05)} for kind in ["all", *KINDS]}
        drift["responses"][f"ckpt-{k}"] = {b: {
            "success": {"mean": rows[b][k + 1], "se": 0.02},
            "success_base": {"mean": rows[b][0], "se": 0.02},
            "sequence_kl": {"mean": size * (k + 1), "se": 0.02},
            "excess_jackknife": {"mean": size * (k + 0.5) + rng.gauss(0, 0.1), "se": 0.05}}
            for b in NAMES}
        records += [{"model": f"ckpt-{k}", "prompts": b, "id": i, "similarity": [
            1 - min(abs(rng.gauss(0, 0.05 * size)), 1) for _ in range(SAMPLES)]}
            for b in NAMES for i in range(PROMPTS)]
        records += [{"model": f"ckpt-{k}", "matrix": "layers.0.q_proj", "type": "q", "nss": 1.0}]
    drift["mmd"] = {"n": 32, "unbiased": False, "mmd2": {
        a: {b: 0.1 * abs(i - j) for j, b in enumerate(NAMES)} for i, a in enumerate(NAMES)}}
    (folder / name / "drift.json").write_text(json.dumps(drift))
    (folder / name / "drift.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """What runs/laptop.sh leaves: sequences, and single stages of tasks that begin none."""
    folder = tmp_path_factory.mktemp("study")
    skills = {m: 0.15 + 0.02 * i for i, m in enumerate(plot_runs.STYLE)}
    sequences = {*plot_paper.CONTINUAL, *plot_paper.COLLAPSE}
    teachers = {*plot_paper.EMA, *plot_paper.RESTART}
    for base, seed in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for method in sequences:
            order = ["tooluse", "math", "science", "coding"] if "reorder" in method else TASKS
            write_run(folder, method, base, seed, order, skills[method])
        for method, task in [*((m, "tooluse") for m in teachers), *((m, "math") for m in teachers
                             - sequences), *((m, t) for m in ("grpo", "sdpo", "sdpo-cot")
                             for t in ("science", "tooluse", "coding"))]:
            if not (folder / f"{method}-b{base}-s{seed}-{task}").exists():
                write_run(folder, method, base, seed, [task], skills[method])
    return folder


@pytest.fixture(scope="module")
def runs(study):
    return plot_runs.read_runs(study)


def of(runs, method, task):
    return [run for run in runs if (run["method"], run["tasks"][0]) == (method, task)]


def line(axis, method, thin=False):
    """The line of a method in a panel, the first of its bases' where thin."""
    lines = [x for x in axis.lines if x.get_color() == plot_runs.STYLE[method][1]
             and (x.get_linewidth() < 0.5) == thin]
    return lines[0].get_ydata()


# ---- statistics ----------------------------------------------------------------------------------

def test_intervals_are_students():
    mean, half = plot_runs.interval([[1.0, 5.0, None], [2.0, None, None], [3.0, 7.0, 4.0]])
    assert mean == pytest.approx([2, 6, 4])
    assert half == pytest.approx([4.303 / 3**0.5, 12.706, 0])
    for n, t in ((11, 2.228), (12, 2.201), (16, 2.131), (31, 2.042), (121, 1.980)):
        x = [float(i % 2) for i in range(n)]
        assert plot_runs.interval(x)[1] == pytest.approx(t * np.std(x, ddof=1) / n**0.5, rel=3e-3)
    assert np.isnan(plot_runs.interval([[None], [np.nan]])[0])


def test_methods_are_told_apart_without_colour():
    looks = list(plot_runs.STYLE.values())
    assert len({(str(dash), mark) for _, _, dash, mark, _ in looks}) == len(looks)
    for column in (0, 3, 4):  # label, mark, hatch
        assert len({look[column] for look in looks}) == len(looks)


# ---- the figures ---------------------------------------------------------------------------------

def test_teachers_are_the_scores_after_the_first_stage(runs):
    figure = plot_paper.teachers(runs)
    assert [axis.get_title() for axis in figure.axes] == ["after Math training",
                                                          "after ToolUse training"]
    for axis, task in zip(figure.axes, ("math", "tooluse")):
        bars = {c.get_label(): c for c in axis.containers if hasattr(c, "patches")}
        assert len(bars) == 8
        for method in ("sdpo", "sdpo-ema2", "sdpo-hard"):
            own = of(runs, method, task)
            assert len(own) == 4
            values = np.array([[100 * run["R"][b][1]["mean"] for b in NAMES] for run in own])
            values = np.hstack([values, values.mean(1, keepdims=True)])  # the last is the average
            bar = bars[plot_runs.STYLE[method][0]]
            assert [p.get_height() for p in bar.patches] == pytest.approx(values.mean(0))
            error = [np.ptp(s[:, 1]) / 2 for s in bar.errorbar.lines[2][0].get_segments()]
            assert error == pytest.approx(3.182 * values.std(0, ddof=1) / 2)
        base = [100 * run["R"]["tiny_math"][0]["mean"] for run in runs if run["tasks"][0] == task
                and run["method"] in plot_paper.EMA + plot_paper.RESTART]
        assert bars["base"].patches[0].get_height() == pytest.approx(np.mean(base))


def test_dynamics_are_the_logs_of_the_first_stage(runs):
    figure = plot_paper.dynamics(runs)
    axes = np.array(figure.axes).reshape(4, 5)
    assert [row[0].get_title(loc="left") for row in axes] == [
        f"{task}, {kind}" for task in ("Math", "ToolUse")
        for kind in ("moving average", "restart and freeze")]
    logs = [[run["log"][s]["jsd"] for s in range(1, STEPS + 1)] for run in of(runs, "sdpo", "math")]
    assert line(axes[0, 1], "sdpo") == pytest.approx(np.mean(logs, 0))
    assert line(axes[0, 1], "sdpo", thin=True) == pytest.approx(np.mean(logs[:2], 0))  # base 0
    assert {x.get_label() for x in axes[1, 0].lines if x.get_linewidth() > 1} == {
        plot_runs.STYLE[m][0] for m in plot_paper.RESTART}


def test_cot_compares_two_methods_on_three_tasks(runs):
    axes = np.array(plot_paper.cot(runs).axes).reshape(3, 4)
    for row, task in zip(axes, ("math", "science", "tooluse")):
        own = of(runs, "sdpo-cot", task)
        assert line(row[1], "sdpo-cot")[-1] == pytest.approx(np.mean(
            [run["log"][STEPS]["length"] for run in own]))
        assert row[0].containers[-1].patches[2].get_height() == pytest.approx(np.mean(
            [100 * run["R"]["tiny_tooluse"][1]["mean"] for run in own]))


def test_interference_is_gain_and_forgetting_at_a_distance(runs):
    left, right = plot_paper.interference(runs).axes
    points = [c.lines[0] for c in right.containers]  # per task: gains, then losses
    assert len(points) == 8 and right.get_yscale() == "symlog"
    own = of(runs, "sdpo", "math")
    changes = np.array([[100 * (run["R"][b][1]["mean"] / run["R"][b][0]["mean"] - 1) for b in NAMES]
                        for run in own])
    mean = np.nan_to_num(points[0].get_ydata()) + np.nan_to_num(points[1].get_ydata())
    assert mean == pytest.approx(changes.mean(0)) and mean[0] > 0 > mean[4]
    assert points[0].get_xdata() == pytest.approx([0, .1, .2, .3, .4, .5])
    assert points[1].get_markerfacecolor() == "w" != points[0].get_markerfacecolor()


def test_sequence_shows_stages_and_what_was_never_trained(runs):
    *curves, others = plot_paper.sequence(runs).axes
    assert [axis.get_title() for axis in curves] == ["Math", "Science", "ToolUse", "Coding"]
    own = of(runs, "grpo", "math")
    science = [[100 * cell["mean"] for cell in run["R"]["tiny_science"]] for run in own]
    assert line(curves[1], "grpo") == pytest.approx(np.mean(science, 0))
    assert [t.get_text() for t in others.get_xticklabels()] == ["Logic", "Knowledge"]
    assert others.get_yscale() == "symlog" and len(others.containers) == 2 * 6
    logic = [100 * (run["R"]["tiny_logic"][4]["mean"] / run["R"]["tiny_logic"][0]["mean"] - 1)
             for run in own]
    bars = {c.get_label(): c for c in others.containers if hasattr(c, "patches")}
    assert bars["GRPO"].patches[0].get_height() == pytest.approx(np.mean(logic))


def test_a_change_from_zero_is_undefined_and_says_so(runs):
    nothing = json.loads(json.dumps([run["R"] for run in runs]))
    for row in nothing:
        row["tiny_logic"][0]["mean"] = 0.0
    runs = [{**run, "R": row} for run, row in zip(runs, nothing)]
    assert np.isnan(plot_runs.change(runs[0], 1, ["tiny_logic"])).all()
    axis = plot_paper.sequence(runs).axes[-1]
    bars = [c.patches for c in axis.containers if hasattr(c, "patches")]
    assert np.isnan([logic.get_height() for logic, _ in bars]).all()
    assert all(knowledge.get_height() < 0 for _, knowledge in bars)
    assert [text.get_text() for text in axis.texts] == [" base has 0"] * len(bars)


def test_weights_by_type_and_by_stage(runs):
    axes = np.array(plot_paper.weights(runs).axes).reshape(2, 4)
    assert [t.get_text() for t in axes[0, 0].get_xticklabels()] == KINDS
    assert [t.get_text() for t in axes[1, 0].get_xticklabels()] == [
        "Math", "Science", "ToolUse", "Coding"]
    drifts = [list(run["drift"]["weights"].values()) for run in of(runs, "sdpo-cot", "math")]

    def mean(key, stat, stage, kind):
        return np.mean([drift[stage][kind][key][stat] for drift in drifts])
    assert line(axes[0, 1], "sdpo-cot") == pytest.approx(
        [mean("rotation", "mean", 3, kind) for kind in KINDS])
    assert line(axes[1, 0], "sdpo-cot") == pytest.approx(
        [mean("nss", "mean", k, "all") for k in range(4)])
    band = axes[1, 0].collections[-1].get_paths()[0].vertices[:, 1]  # the last method drawn
    assert [band.min(), band.max()] == pytest.approx(
        [mean("nss", "p10", 0, "all"), mean("nss", "p90", 3, "all")])
    chance = [x.get_ydata() for x in axes[0, 3].lines if x.get_linestyle() == ":"
              and x.get_linewidth() == 1][-1]
    assert chance == pytest.approx([mean("pm_update_chance", "mean", 3, kind) for kind in KINDS])


def test_similarity_is_of_responses(runs):
    left, right = plot_paper.similarity(runs).axes
    cosines = {True: [], False: []}
    for run in of(runs, "grpo", "math"):
        for x in map(json.loads, (run["folder"] / "drift.jsonl").read_text().splitlines()):
            if x["model"] == "ckpt-3" and "similarity" in x:
                cosines[x["prompts"] in NAMES[:4]] += x["similarity"]
    assert len(cosines[True]) == 4 * 4 * PROMPTS * SAMPLES
    quantiles = [c for c in left.collections if hasattr(c, "get_segments")]
    for found, inner in zip(quantiles, (True, False)):  # GRPO's two halves come first
        heights = [segment[0, 1] for segment in found.get_segments()]
        assert heights == pytest.approx(np.quantile(cosines[inner], [.05, .5]), abs=1e-9)
    halves = [c.get_paths()[0].vertices[:, 0] for c in right.collections
              if not hasattr(c, "get_segments")]
    assert halves[0].max() == pytest.approx(1) == halves[1].min() and len(halves) == 8


def test_collapse_has_a_row_for_each_order(runs):
    axes = np.array(plot_paper.collapse(runs).axes).reshape(2, 4)
    rows = {row[0].get_title(loc="left"): row for row in axes}
    row, reordered = (rows[f"{a}, {b}, {c}, Coding"] for a, b, c in (
        ("Math", "Science", "ToolUse"), ("ToolUse", "Math", "Science")))
    assert line(row[3], "sdpo-ema5")[-1] == pytest.approx(5.0)
    assert len(line(row[3], "sdpo-ema5")) == 4 * STEPS
    borders = [x.get_xdata()[0] for x in row[0].lines if len(x.get_xdata()) == 2]
    assert borders == [STEPS + .5, 2 * STEPS + .5, 3 * STEPS + .5]
    assert {x.get_label() for x in reordered[0].lines if x.get_linewidth() > 1} == {
        plot_runs.STYLE["sdpo-ema5-reorder"][0]}


def test_excess_is_that_of_the_task_just_trained(runs):
    axes = plot_paper.excess(runs).axes
    own = of(runs, "sdpo", "math")
    for k, names in enumerate([*([f"tiny_{task}"] for task in TASKS), NAMES[4:]]):
        sets = [list(run["drift"]["responses"].values())[min(k, 3)] for run in own]
        x = np.mean([100 * (s[b]["success"]["mean"] - s[b]["success_base"]["mean"])
                     for s in sets for b in names])
        y = np.mean([s[b]["excess_jackknife"]["mean"] for s in sets for b in names])
        (point,) = [c.lines[0] for c in axes[k].containers
                    if c.get_label() == plot_runs.STYLE["sdpo"][0]]
        assert (*point.get_xdata(), *point.get_ydata()) == pytest.approx((x, y))


def test_what_is_missing_is_named(runs, capsys):
    def without(*methods):
        return [run for run in runs if run["method"] not in methods]
    with pytest.raises(plot_runs.Missing, match="figure 6: no run of grpo$"):
        plot_paper.sequence(without("grpo", "sdpo-cot"))
    capsys.readouterr()
    plot_paper.sequence(without("sdpo-hard"))
    assert capsys.readouterr().out == "figure 6: drawn without sdpo-hard\n"
    alone = [run for run in runs if run["tasks"] != ["tooluse"]]
    assert len(plot_paper.teachers(alone).axes) == 1
    assert "figure 2, tooluse: no run of sdpo, sdpo-ema5" in capsys.readouterr().out
    for figure in (plot_paper.weights, plot_paper.similarity, plot_paper.excess):
        with pytest.raises(plot_runs.Missing, match="no run of grpo, sdpo"):
            figure([{**run, "responses": []} for run in runs])


# ---- commands ------------------------------------------------------------------------------------

def command(*argv):
    return subprocess.run([sys.executable, ROOT / "tools" / "plot.py", *map(str, argv)],
                          capture_output=True, text=True, cwd=ROOT)


def test_bad_input_is_one_line(tmp_path):
    for argv in (["nothing", tmp_path], ["paper", tmp_path]):
        done = command(*argv)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{tmp_path}/METHOD-bBASE-sSEED/continual.json: no such file" in done.stderr


@pytest.fixture
def shown(monkeypatch):
    """Figures that a command would save."""
    figures = []
    monkeypatch.setattr(plot_runs, "save", lambda figure, path: figures.append((path, figure)))
    return figures


def test_learning_prints_the_table_in_the_readme(shown, capsys):
    plot.learning(ROOT / "results" / "learning")
    rows = [row for row in re.sub(r"base\d |\$", "", capsys.readouterr().out).splitlines()
            if row.startswith(("| math", "| tooluse"))]
    assert len(rows) == 4 and all(row in (ROOT / "README.md").read_text() for row in rows)
    bars = [c for c in shown[0][1].axes[0].containers if hasattr(c, "patches")]
    assert [f"{p.get_height():+.1f}" for c in bars for p in c.patches] == [
        re.search(r"\| ([+-][\d.]+) \[", rows[i])[1] for i in (0, 2, 1, 3)]


def test_demo_shows_rewards_and_scores(tmp_path, shown):
    scores = {f"tiny_{task}": {m: {"mean": 0.1 * i + 0.2 * k, "se": 0.02}
                               for k, m in enumerate(("tiny", "x/grpo", "x/sdpo"))}
              for i, task in enumerate(TASKS)}
    (tmp_path / "eval.json").write_text(json.dumps({
        "args": {"baseline": "tiny", "model": ["x/grpo", "x/sdpo"], "n": 8,
                 "temperature": 0.6}, "scores": scores}))
    for name in ("grpo", "sdpo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(
            {"step": i, "stage": "math", "reward": i / 10}) + "\n" for i in (1, 2, 3)))
    plot.demo(tmp_path)
    left, right = shown[0][1].axes
    assert line(left, "sdpo") == pytest.approx([.1, .2, .3])
    bars = [c for c in right.containers if hasattr(c, "patches")]
    assert [p.get_height() for p in bars[2].patches] == pytest.approx([40, 50, 60, 70])


def test_continual_shows_every_benchmark_with_its_error(study, shown):
    plot.continual(study / "sdpo-b0-s0")
    left, right = shown[0][1].axes
    result = json.loads((study / "sdpo-b0-s0" / "continual.json").read_text())
    assert [c.get_label() for c in left.containers] == [plot_runs.title(b) for b in NAMES]
    for found, row in zip(left.containers, result["R"].values()):
        assert found.lines[0].get_ydata() == pytest.approx([100 * x["mean"] for x in row])
        assert np.ptp(found.lines[2][0].get_segments()[0][:, 1]) == pytest.approx(4)
    assert len(right.lines[0].get_xdata()) == 4 * STEPS


def test_what_is_kept_draws_the_same(study, tmp_path):
    """As continual.py and drift.py leave it, and back."""
    run, name = tmp_path / "run", "sdpo-b0-s0"
    shutil.copytree(study / name, run)
    for k, task in enumerate(TASKS, 1):
        lines = [json.loads(x) | {"train_seconds": 1.5, "peak_memory_gb": 1.0, "kl_ref": None}
                 for x in (run / f"{k}-{task}.jsonl").read_text().splitlines()]
        (run / f"{k}-{task}").mkdir()
        (run / f"{k}-{task}.jsonl").unlink()
        (run / f"{k}-{task}" / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    keep.keep(run, tmp_path / name)
    before, after = (plot_runs.read_run(folder / name) for folder in (study, tmp_path))
    old, new = before["log"][50], after["log"][50]
    assert old.keys() == new.keys() and old.pop("stage") == new.pop("stage") == "tooluse"
    assert new == pytest.approx(old, rel=5e-5)
    assert plot_runs.scores(after, 2) == pytest.approx(plot_runs.scores(before, 2), rel=5e-5)
    assert after["weights"][3]["q"]["rotation"] == pytest.approx(
        before["weights"][3]["q"]["rotation"], rel=5e-5)
    assert after["responses"][0].keys() == before["responses"][0].keys() and after["drift"]["mmd"]
    lines = plot_runs.read_lines(tmp_path / name / "drift.jsonl")
    assert len(lines) == 4 * len(NAMES)
    assert all(len(x["similarity"]) == 4 * PROMPTS for x in lines)


# ---- runs/laptop.sh ------------------------------------------------------------------------------

def laptop(folder, *argv, script="laptop.sh", **env):
    env = {"RESULTS": str(folder / "results"), "WORK": str(folder / "work"),
           "PYTHON": sys.executable, **env}
    return subprocess.run([ROOT / "runs" / script, *argv], capture_output=True, text=True,
                          env={**os.environ, **env})


@pytest.mark.parametrize("script, bases", [("laptop.sh", "01"), ("paper.sh", "0")])
def test_the_commands_are_right_and_enough_for_every_figure(tmp_path, script, bases):
    """With echo in place of the launcher every run fails, but its command is in its file."""
    done = laptop(tmp_path, "3", script=script, LAUNCH="echo", PYTHON="true")
    assert done.returncode == 1 and "grpo-b0-s3.txt, failed:" in done.stderr
    (tmp_path / "work" / "base1").mkdir(exist_ok=True)  # where sft.py would have put it
    began, steps = set(), {}
    for file in (tmp_path / "work").glob("*.txt"):
        args = continual.get_args(file.read_text().splitlines()[0].split()[1:])
        method, base, seed, task = re.fullmatch(r"(.+)-b(\d)-s(\d)-?(.*)", file.stem).groups()
        flags, tasks = args.trainer, args.order
        assert args.algorithm == method[:4] and int(seed) == 3 == flags["seed"] and base in bases
        assert tasks == [task] if task else sorted(tasks) == sorted(TASKS)
        assert (tasks[0] == "tooluse") == ("reorder" in method) or task
        if "ema" in method:
            assert flags["ema"] == float(re.search(r"ema([\d.]+)", method)[1]) / 100
        if method.startswith("sdpo"):
            assert (flags["restart_every"] > 0) == (method in ("sdpo-matched", "sdpo-hard"))
            assert flags["cot"] == flags["think"] == (method == "sdpo-cot")
            assert (flags["mask_ratio"] > 0) == method.endswith("mask")
        began |= {(method, tasks[0]), (method, len(tasks))}
        for one, n in zip(tasks, args.stage_steps):
            assert int(n) == int(steps.setdefault(one, n)), "alone as in a sequence"
    assert began >= {
        *((m, t) for m in plot_paper.EMA + plot_paper.RESTART for t in ("math", "tooluse")),
        *((m, t) for m in ("sdpo", "sdpo-cot") for t in ("math", "science", "tooluse")),
        *((m, t) for m in ("sdpo", "grpo") for t in TASKS),
        *((m, 4) for m in plot_paper.CONTINUAL + plot_paper.COLLAPSE)}


def test_the_smallest_study_from_end_to_end(tmp_path):
    done = laptop(tmp_path, "--smoke")
    assert done.returncode == 0, done.stderr
    results = tmp_path / "results"
    figures = {path.stem for path in (results / "figures").glob("*.png")}
    assert figures == {"fig5_interference", "fig6_continual", "fig7ab_weights", "fig7cd_responses",
                       "excess_drift"}
    assert "fig8_collapse.png is left out: figure 8: no run of sdpo-ema5" in done.stdout
    for name in ("grpo-b0-s0", "sdpo-b0-s0"):
        assert f"{name}: " in done.stdout
        assert sorted(path.name for path in (results / name).iterdir()) == [
            "1-math.jsonl", "2-science.jsonl", "continual.json", "drift.json", "drift.jsonl"]
        assert sum(path.stat().st_size for path in (results / name).iterdir()) < 50_000
        assert not (tmp_path / "work" / name).exists(), "checkpoints are deleted"
    for method in ("sdpo-ema5", "sdpo-cot"):  # the other figures, from copies under other names
        shutil.copytree(results / "sdpo-b0-s0", results / f"{method}-b0-s0")
    shutil.copytree(results / "sdpo-b0-s0", results / "sdpo-b0-s1-other")
    runs = plot_runs.read_runs(results)
    assert len(runs) == 4
    for name in plot_paper.FIGURES.keys() - figures:
        plot_runs.save(plot_paper.FIGURES[name](runs), results / "figures" / f"{name}.png")
    again = laptop(tmp_path, "--smoke", PYTHON="true", LAUNCH="false")  # nothing is left to run
    assert again.returncode == 0 and "b0-s0" not in again.stdout, again.stderr
