"""The sizes of a BERT, and those in the folder of a pretrained one. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from playground.runtime.errors import UsageError
from playground.runtime.untrusted import expect_int, show
from playground.training.sentence_pairs.wordpiece import WordPiece, read_json

CLASSES = 3
"""Entailment, neutral, contradiction."""


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Raises `UsageError` for sizes that no encoder can have. The defaults are those of the small one from scratch."""

    vocabulary: int
    """Rows of the word embeddings."""
    width: int = 128
    """Features of a token between two layers."""
    layers: int = 2
    heads: int = 4
    intermediate: int = 512
    """Features inside a layer's feed-forward part."""
    max_length: int = 64
    """Rows of the position embeddings: no sequence may be longer."""
    segments: int = 2
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "intermediate", "max_length", "segments"):
            if getattr(self, name) < 1:
                raise UsageError(f"a BERT with {name} {getattr(self, name)}: it must be at least 1")
        if self.width % self.heads:
            raise UsageError(f"a BERT of width {self.width} with {self.heads} heads: the heads must divide the width")

    def check_length(self, tokens: int) -> None:
        """Raise `UsageError` for sequences longer than there are positions."""
        if tokens > self.max_length:
            raise UsageError(f"--max-length {tokens}: the model has {self.max_length} positions, choose no more")

    @property
    def parameters(self) -> int:
        """How many there are in the encoder with its pooler and the head of `CLASSES` classes."""
        width, inside = self.width, self.intermediate
        embeddings = (self.vocabulary + self.max_length + self.segments + 2) * width
        layer = 4 * (width + 1) * width + (width + 1) * inside + (inside + 1) * width + 4 * width
        return embeddings + self.layers * layer + (width + 1) * width + (width + 1) * CLASSES


CONFIG, WEIGHTS, PICKLED_WEIGHTS = "config.json", "model.safetensors", "pytorch_model.bin"
SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_length": "max_position_embeddings",
    "segments": "type_vocab_size",
}
"""Names of the fields of `BertConfig` in config.json."""
RATES = {"dropout": "hidden_dropout_prob", "layer_norm_eps": "layer_norm_eps"}
OURS = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
"""Properties of our encoder; config.json may omit them."""
MAX_LAYERS, MAX_SIZE = 200, 2**24
"""The largest numbers in a config.json for which memory is asked."""


def read_config(folder: Path) -> BertConfig:
    """The sizes in config.json; its rate of dropout is used everywhere, in attention too. Raises `UsageError`."""
    file = folder / CONFIG
    content: Mapping[str, object] = read_json(file)
    if not content:
        raise UsageError(f"{folder} has no {CONFIG}: give the folder of a BERT, as save_pretrained() writes it")
    for name, ours in OURS.items():
        if content.get(name, ours) != ours:
            raise UsageError(f"{file}: {name} is {show(content[name])}; our encoder is a BERT, where it is {ours!r}")
    try:
        sizes = {field: read_size(content, name) for field, name in SIZES.items()}
        dropout, eps = (read_rate(content, name, getattr(BertConfig, field)) for field, name in RATES.items())
        return BertConfig(**sizes, dropout=dropout, layer_norm_eps=eps)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def read_size(content: Mapping[str, object], name: str) -> int:
    value = content.get(name)
    least, most = 2 if name == SIZES["segments"] else 1, MAX_LAYERS if name == SIZES["layers"] else MAX_SIZE
    try:
        return expect_int(value, least, most)
    except ValueError:
        rule = f"sentence pairs need a BERT where it is a number from {least} to {most:,}"
        raise UsageError(f"{name} is {show(value)}: {rule}") from None


def read_rate(content: Mapping[str, object], name: str, default: float) -> float:
    value = content.get(name, default)
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"{name} is {show(value)}: it must be a number from 0 to 1")
    return value


def check_vocabulary(folder: Path, config: BertConfig, tokenizer: WordPiece) -> None:
    """Raise `UsageError` where the tokenizer has ids that the embeddings have no row for."""
    tokens = len(tokenizer.vocabulary)
    if tokens > config.vocabulary:
        rule = "every token needs a row, so this tokenizer belongs to another model"
        raise UsageError(
            f"{folder}: {tokens:,} tokens in the vocabulary, {config.vocabulary:,} word embeddings: {rule}"
        )
