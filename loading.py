"""A model by its name: a hub id, a folder (Hugging Face's or a run's), a .gguf file, or "tiny"."""
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import packing
from common import ROOT, fail
from ranks import rank


def folder(name):
    """The folder of a model; a run's stands for its last checkpoint."""
    path = ROOT / "data" / "tiny_model" if name == "tiny" else Path(name)
    if (path / "log.jsonl").exists():
        path = max(filter(Path.is_dir, path.glob("ckpt-*")), default=path)
    return path


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder, model_only=False):
    """What is wrong with a checkpoint, or with its model, by its manifest; "" where nothing is."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, (size, digest) in manifest.items():
            path = folder / name
            if model_only and name.startswith("trainer"):  # older trainer states are deleted
                continue
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or sha256(path) != digest:
                return f"{name} has {path.stat().st_size} bytes, another checksum than was written"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"manifest.json: {error}"
    return "" if manifest else "manifest.json is empty"


def refuse_damage(name):
    """Exit with 2 where a model is a checkpoint that is not as it was written. One rank looks."""
    path = folder(name)
    if rank() == 0 and (path / "manifest.json").exists() and (wrong := fault(path, True)):
        fail(f"--model {name}: {path}: {wrong}")


def fingerprint(name):
    """What tells a folder's weights from others in its place: a digest of its manifest or, where it
    has none, of the size and the last megabyte of each file. None for a hub id."""
    digest, path = hashlib.sha256(), folder(name)
    files = sorted(path.glob("model*.safetensors"))
    if (path / "manifest.json").exists():
        return sha256(path / "manifest.json")[:16]
    for path in files:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2**20))
            digest.update(f"{path.name} {size} ".encode() + file.read())
    return digest.hexdigest()[:16] if files else None


def load_model(name, dtype=torch.float32):
    """(model, tokenizer) of a hub id, a folder (Hugging Face's or a run's), a .gguf file or "tiny".

    Dropout is set to 0: with it, sampler and trainer would be two policies. Exits with 2 where
    there is no such model. Code that comes with a model is never run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    logging.disable_progress_bar()
    refuse_damage(name)
    path, gguf = str(folder(name)), {}
    safe = {"trust_remote_code": False}  # not even after a question at the terminal
    if path.endswith(".gguf"):
        path, gguf = str(Path(path).parent), {"gguf_file": Path(path).name}
    try:
        config = AutoConfig.from_pretrained(path, **gguf, **safe)
        for key, value in config.to_dict().items():
            if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        tokenizer = AutoTokenizer.from_pretrained(path, **gguf, **safe)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, **gguf, **safe)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        fail(f"no model {name}: {str(error).strip().splitlines()[0]}")
    if gguf:  # de-quantised, but it refuses to be saved: move the weights into one that does not
        weights, generation, config = model.state_dict(), model.generation_config, model.config
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.config.architectures = [type(model).__name__]  # which vLLM asks for
        model.load_state_dict(weights)
        model.generation_config = generation
    note = packing.probe(model.eval())
    if note and rank() == 0:
        print(note, file=sys.stderr)
    return model, tokenizer


def load_weights(name, model):
    """{name: tensor} of another model, or of a .safetensors file such as a checkpoint's teacher,
    for each parameter of `model`. Exits with 2 where a name or a shape does not match."""
    if not name.endswith(".safetensors"):
        weights = load_model(name)[0].state_dict()
    else:
        try:
            weights = load_file(name)
        except (OSError, SafetensorError) as error:
            fail(f"--teacher_init {name}: {error}")
    for key, p in model.named_parameters():  # a tied weight once, under its first name
        if key not in weights or weights[key].shape != p.shape:
            have = tuple(weights[key].shape) if key in weights else "missing"
            fail(f"--teacher_init {name}: {key} is {have}, where the model has {tuple(p.shape)}")
    return weights
