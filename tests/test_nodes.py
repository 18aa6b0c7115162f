"""Two nodes: two launchers of torchrun on this machine, a rank each. The gradient is that of one
process (test_train.py compares ranks, FSDP and micro-batches on one node)."""
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import worker
from test_train import CONFIGS, Jobs, distance

import train_sdpo  # noqa: F401  # the whole batch runs in a fork of this process


def test_two_nodes(tmp_path):
    jobs = Jobs(tmp_path)
    (tmp_path / "models").mkdir()
    jobs.models = worker.make_folders(tmp_path / "models")
    script, model, flags = CONFIGS["sdpo-seq-2"]
    flags += " --steps 1 --lr 1 --grad_clip 0 --eval_every 0 --ref_every 0 --param_dtype float64"
    jobs.add("whole", script, model, flags, sgd=True, f64=True)
    jobs.add("nodes", script, model, f"{flags} --fsdp on", 2, sgd=True, f64=True)
    whole, nodes = jobs
    pid = worker.start(whole, 0)
    with socket.create_server(("localhost", 0)) as one:
        port = str(one.getsockname()[1])
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps([nodes]))
    launchers = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node),
         "--nproc_per_node", "1", "--master_addr", "localhost", "--master_port", port,
         worker.__file__, path], stderr=subprocess.PIPE, text=True) for node in range(2)]
    for launcher in launchers:
        assert launcher.wait(timeout=300) == 0, launcher.stderr.read()[-3000:]
    assert os.waitpid(pid, 0)[1] == 0, jobs.told("whole")
    whole, nodes = jobs.seen("whole"), jobs.seen("nodes")
    ranks = [torch.load(tmp_path / f"nodes.rank{k}.pt", weights_only=True)["rows"] for k in (0, 1)]
    assert nodes["rows"] == whole["rows"] and nodes["sharded"] and not whole["sharded"]
    assert not ranks[0][0].keys() & ranks[1][0].keys()  # each sampled its own half
    assert len(nodes["grads"]) == len(whole["grads"]) == 2
    for ours, theirs in zip(nodes["grads"], whole["grads"]):
        assert distance(ours, theirs) <= 1e-9
    assert nodes["result"]["reward"] == pytest.approx(whole["result"]["reward"])
