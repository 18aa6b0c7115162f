"""Checkpoints: ordinary Hugging Face folders, plus what a run needs to go on as if never stopped.

  ckpt-000050/                config, safetensors, tokenizer: transformers and vLLM load it as it is
  ckpt-000050/trainer/        optimizer.safetensors, teacher.safetensors, state.json
  ckpt-000050/manifest.json   size and SHA-256 of every file

All that is random in a run is keyed on (seed, step, row), so the step is the whole state of its
samples, data order, demonstrations and masks. A checkpoint is written aside, flushed to disk and
renamed: a folder that bears the final name is whole, and a kill leaves the older ones as they were.
Nothing is pickled.
"""
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from common import fail
from loading import fault, sha256
from ranks import barrier, gather, rank

# ---- write ---------------------------------------------------------------------------------------

def save(args, step, model, tokenizer, optimizer, teacher, state):
    """Write args.out/ckpt-{step}; every rank calls it. `state`: JSON values that resume returns.
    The newest args.keep of the trainer/ folders stay, and that of state["best_step"]."""
    out = Path(args.out)
    folder, aside = out / f"ckpt-{step:06d}", out / f".ckpt-{step:06d}.part"
    weights = _wholes(_kept(model))
    moments = _wholes(_moments(model, optimizer))
    moved = teacher is not None and teacher.last_changed > 0  # else it is still that of the start
    average = _wholes(_kept(teacher.model)) if moved else {}
    if rank() == 0:
        try:
            _write(args, folder, aside, model, tokenizer, weights, moments, average, {
                **state, "step": step, "teacher_changed": teacher.last_changed if moved else 0})
        except (OSError, SafetensorError) as error:  # disk full, read-only
            shutil.rmtree(aside, ignore_errors=True)
            fail(f"{folder}: cannot be written ({error}); the older checkpoints are whole")
    barrier()


def _write(args, folder, aside, model, tokenizer, weights, moments, average, state):
    shutil.rmtree(aside, ignore_errors=True)
    (aside / "trainer").mkdir(parents=True)
    model.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    save_file(moments, aside / "trainer" / "optimizer.safetensors")
    save_file(average, aside / "trainer" / "teacher.safetensors")
    (aside / "trainer" / "state.json").write_text(json.dumps(state))
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    manifest = {str(p.relative_to(aside)): [p.stat().st_size, sha256(p)] for p in files}
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in (*files, aside / "manifest.json", aside / "trainer", aside):
        _flush(path)
    if folder.exists():  # broken, or of a run that was resumed from an older one
        shutil.rmtree(folder)
    os.rename(aside, folder)
    _flush(folder.parent)
    states = [path for path in sorted(folder.parent.glob("ckpt-*/trainer"))
              if path.parent.name <= folder.name]  # a later one is broken, else this run had it
    for old in states[:-args.keep]:
        if old.parent.name != f"ckpt-{state.get('best_step', -1):06d}":
            shutil.rmtree(old)


def whole(tensor):
    """A tensor, or all of an FSDP shard's (every rank asks at once), on the CPU."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().contiguous()


def _wholes(tensors):
    """Whole tensors by name on rank 0, which writes; nothing on the others, to spare memory."""
    wholes = ((name, whole(tensor)) for name, tensor in tensors.items())
    return {name: tensor for name, tensor in wholes if rank() == 0}


def _kept(model):
    """Parameters and saved buffers by name, a tied weight once."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def _moments(model, optimizer):
    return {f"{name}/{key}": tensor for name, p in model.named_parameters()
            for key, tensor in optimizer.state.get(p, {}).items()}


def _flush(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- read ----------------------------------------------------------------------------------------

def newest(out):
    """(The newest whole checkpoint with a trainer state, or None; what is wrong with it or those
    after it, each named on stderr, or "")."""
    wrong, folders = "", sorted(Path(out).glob("ckpt-*"), reverse=True)
    for folder in folders:
        if folder == folders[0] or (folder / "trainer").is_dir():  # older states are deleted
            found = fault(folder)
            if not found:
                return folder, wrong
            wrong = f"{folder}: {found}"
            print(f"{wrong}; looking for an older one", file=sys.stderr)
    return None, wrong


@torch.no_grad()
def resume(args, model, optimizer, teacher):
    """Put the newest checkpoint of the run folder args.resume into model, optimizer and teacher,
    and return its state: {"step": 0} where there is none, or no folder to resume; the optimizer
    then starts with the moments of args.optimizer_init."""
    out, folder = args.resume, None
    if out:  # one rank reads it all through, for its checksums
        ((folder, wrong),) = gather([newest(out)] if rank() == 0 else [])
        if wrong and not folder:  # to start again would cost the log
            fail(f"--resume {out}: no checkpoint with a trainer state is whole; delete the folder "
                 "to start again")
    if folder is None:
        if args.optimizer_init:
            _load_moments(Path(args.optimizer_init), model, optimizer)
        return {"step": 0}
    state = json.loads((folder / "trainer" / "state.json").read_text())
    if state["step"] > args.steps:
        fail(f"--steps {args.steps}: the run in {out} has made {state['step']} already")
    saved = _open(*folder.glob("*.safetensors"))
    for name, target in _kept(model).items():
        if name not in saved:
            fail(f"--resume {out}: {folder.name} has no weight {name}: it is of another model")
        _assign(target, saved[name]())
    _load_moments(folder, model, optimizer)
    if state["teacher_changed"]:
        average = _open(folder / "trainer" / "teacher.safetensors")
        for name, target in _kept(teacher.model).items():
            _assign(target, average[name]())
        teacher.last_changed = state["teacher_changed"]
    return state


def _load_moments(folder, model, optimizer):
    path = folder / "trainer" / "optimizer.safetensors"
    if not path.is_file():
        fail(f"--optimizer_init {folder}: holds no trainer/{path.name}; name a ckpt- folder")
    moments = _open(path)
    names = {f"{name}/{key}": (p, key) for name, p in model.named_parameters()
             for key in ("step", "exp_avg", "exp_avg_sq")}
    for name in moments:  # as the optimizer's first step would have made them
        (p, key), value = names.get(name, (None, None)), moments[name]()
        if p is None or (key != "step" and value.shape != p.shape):
            fail(f"--optimizer_init {folder}: {name} is of another model")
        optimizer.state[p][key] = value.to(p.device) if key == "step" else torch.zeros_like(p)
        _assign(optimizer.state[p][key], value)


def _open(*paths):
    """{name: function that reads the tensor} over safetensors files."""
    try:
        files = [safe_open(path, "pt") for path in paths]
    except (OSError, SafetensorError) as error:  # a pickle, say
        fail(f"{', '.join(map(str, paths))}: {error}")
    return {name: lambda f=file, n=name: f.get_tensor(n)
            for file in files for name in file.keys()}  # noqa: SIM118


def _assign(target, value):
    value = value.to(target.dtype)
    if isinstance(target, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements,
                                  src_data_rank=None)  # each rank cuts its shard out of the whole
    target.copy_(value)
