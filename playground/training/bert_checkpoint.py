"""The weights in a pretrained BERT's folder, by name, in our model."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from playground.runtime.errors import UsageError
from playground.training.bert import Model
from playground.training.bert_config import PICKLED_WEIGHTS, WEIGHTS, BertConfig
from playground.training.hub import INSTALL

OLD_NAMES = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)
"""Names of a norm's parameters in converted files of 2018."""
ENCODER = ("embeddings.", "encoder.", "pooler.")
HEAD = "classifier."


def check_checkpoint(folder: Path, config: BertConfig) -> None:
    """Raise `UsageError` unless the weights in `folder` are there, whole, and those of a BERT of this config."""
    with torch.device("meta"):  # shapes, no memory
        model = Model(config)
    select_weights(model, read_checkpoint(folder), folder)


@torch.no_grad()
def load_weights(model: Model, folder: Path | None) -> list[str]:
    """Copy the weights in `folder` into `model`; returns the names of the parameters that keep their initial values:
    the head's, or all without a folder.

    Raises `UsageError` naming the first parameter of the model that is missing or has another shape.
    """
    weights = {} if folder is None else select_weights(model, read_checkpoint(folder), folder)
    params = dict(model.named_parameters())
    for name, tensor in weights.items():
        params[name].copy_(tensor)
    return [name for name in params if name not in weights]


def select_weights(model: Model, found: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The found tensors that the model has. A head counts only if it has as many classes as ours."""
    params = dict(model.named_parameters())
    head = {name: found.get(name) for name in params if name.startswith(HEAD)}
    fits = all(tensor is not None and tensor.shape == params[name].shape for name, tensor in head.items())
    selected = {}
    for name, param in params.items():
        if name in head and not fits:
            continue
        check_parameter(folder, name, param, found.get(name))
        selected[name] = found[name]
    return selected


def check_parameter(folder: Path, name: str, param: torch.Tensor, found: torch.Tensor | None) -> None:
    """Raise `UsageError` unless `found` can be the value of our parameter `name`."""
    shape = list(param.shape)
    if found is None:
        raise UsageError(f"weights in {folder}: {name} is missing; its config.json calls for one of shape {shape}")
    if found.shape != param.shape:
        has = f"has shape {list(found.shape)}"
        raise UsageError(f"weights in {folder}: {name} {has}; its config.json calls for {shape}")
    if not found.is_floating_point():
        raise UsageError(f"weights in {folder}: {name} is {found.dtype}; only floating-point weights can be loaded")


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, by the names that our model uses. Raises `UsageError`
    where there is neither, or a damaged one."""
    if (folder / WEIGHTS).is_file():
        tensors = read_safetensors(folder / WEIGHTS)
    elif (folder / PICKLED_WEIGHTS).is_file():
        tensors = read_pickled(folder / PICKLED_WEIGHTS)
    else:
        raise UsageError(f"{folder} has no weights: it needs {WEIGHTS} or {PICKLED_WEIGHTS}")
    found = {}
    for name, tensor in tensors.items():
        for old, new in OLD_NAMES:
            name = old.sub(new, name)
        found[f"bert.{name}" if name.startswith(ENCODER) else name] = tensor  # an encoder saved alone lacks "bert."
    return found


def read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise UsageError(f"{file} is read through the package safetensors, which is not installed: {INSTALL}") from None
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is damaged ({error}): fetch it again") from None


def read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """With `weights_only`: a file that holds anything but tensors is refused."""
    try:
        check_inflated_size(file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch tells that it checks what is sparse
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle is a program: what it raises is for whoever wrote it to choose
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"{file} is damaged, or holds more than tensors ({first_line}): fetch it again") from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UsageError(f"{file} holds no dictionary of tensors: save the model's state_dict there")
    return content


def check_inflated_size(file: Path) -> None:
    """Raise `ValueError` for an archive that holds more than its own bytes: `torch.save` packs nothing, and what is
    packed can become a thousand times as large."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > file.stat().st_size:
                raise ValueError("its members are larger than the file")
