"""Pretrained BERTs and MultiNLI as the tutorials have them: through `transformers` and `datasets`,
the extra `bert`. Source: Williams et al., MultiNLI, 2018, arXiv 1704.05426;
https://huggingface.co/datasets/nyu-mll/multi_nli
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from playground.lessons.bert.sizes import BertSizes
from playground.runtime.errors import UsageError

SCRATCH = "scratch"
"""In the place of a model's name: no pretrained weights."""
BASE = "bert-base-cased"
MULTINLI = "nyu-mll/multi_nli"
SPLITS = {"train": "train", "test": "validation_matched"}
"""Labels of MultiNLI's test set were never published: the matched development set is the test
set."""


class Tokenizer(NamedTuple):
    """`encode(premises, hypotheses, max_length)` gives the ids of each pair, with special tokens;
    `pad` and `sep` are the ids of those, and `vocabulary` is the number of all. Tokenizers that
    share a `fingerprint` give every pair the same ids."""

    encode: Callable[[list[str], list[str], int], list[list[int]]]
    vocabulary: int
    pad: int
    sep: int
    fingerprint: str


@contextlib.contextmanager
def use_library(name: str, asked: str) -> Iterator[Any]:
    """A library of the hub. What it raises in the block becomes a `UsageError` of one line."""
    try:
        library = importlib.import_module(name)
        logging = importlib.import_module(f"{name}.utils.logging")
    except ImportError as error:
        raise UsageError(
            f"{asked} needs the package {name} ({error}): pip install 'playground[bert]'"
        ) from None
    logging.set_verbosity_error()
    # of each retry it writes two lines
    importlib.import_module("huggingface_hub.utils.logging").set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield library
    except Exception as error:
        # which ones it raises depends on its version, and on that of its HTTP library
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        todo = (
            "check the name and the network; a folder, or what is in the hub's cache, needs no "
            "network"
        )
        raise UsageError(f"{asked} could not be loaded by {name} ({why}): {todo}") from None


def load_encoder(weights: str) -> Any:
    """The `transformers.BertModel` of that name on the hub, or in that folder. Raises
    `UsageError`."""
    asked = f"--weights {weights}"
    with use_library("transformers", asked) as transformers:
        encoder, loaded = transformers.BertModel.from_pretrained(weights, output_loading_info=True)
    if missing := sorted(loaded["missing_keys"]):
        raise UsageError(
            f"{asked}: of a BERT {missing[0]} is missing there; choose weights of a whole encoder"
        )
    return encoder


def load_pretrained(weights: str) -> tuple[BertSizes, Tokenizer]:
    """The sizes and the tokenizer of a pretrained BERT. Its weights are then on this host. Raises
    `UsageError`."""
    config = load_encoder(weights).config
    sizes = BertSizes(
        vocabulary=config.vocab_size, width=config.hidden_size, layers=config.num_hidden_layers,
        heads=config.num_attention_heads, intermediate=config.intermediate_size,
        segments=config.type_vocab_size,
        max_length=config.max_position_embeddings, dropout=config.hidden_dropout_prob,
        layer_norm_eps=config.layer_norm_eps,
    )  # fmt: skip
    with use_library("transformers", f"--weights {weights}") as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        fingerprint = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    check_fit(weights, config, tokenizer)

    def encode(premises: list[str], hypotheses: list[str], max_length: int) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(
            premises, hypotheses, truncation=True, max_length=max_length
        )["input_ids"]
        return ids

    return sizes, Tokenizer(
        encode, len(tokenizer), tokenizer.pad_token_id, tokenizer.sep_token_id, fingerprint
    )


def check_fit(weights: str, config: Any, tokenizer: Any) -> None:
    """Raise `UsageError` for a BERT that is not computed as ours is, or whose tokenizer has other
    tokens."""
    known = {"hidden_act": "gelu", "is_decoder": False, "type_vocab_size": 2}
    for name, value in known.items():
        if (theirs := getattr(config, name, value)) != value:
            raise UsageError(
                f"--weights {weights}: its {name} is {theirs}, where our encoder has {value}"
            )
    if len(tokenizer) > config.vocab_size or None in (
        tokenizer.pad_token_id,
        tokenizer.sep_token_id,
    ):
        has = f"{len(tokenizer)} tokens for {config.vocab_size} word embeddings"
        raise UsageError(
            f"--weights {weights}: its tokenizer has {has}, or none for the end of a sentence or "
            "padding"
        )


def read_pairs(split: str) -> Iterator[tuple[str, str, int]]:
    """The labelled pairs of MultiNLI: (premise, hypothesis, label), for "train" or "test". Raises
    `UsageError`."""
    with use_library("datasets", f"{MULTINLI} (--dataset multinli)") as datasets:
        rows = datasets.load_dataset(MULTINLI, split=SPLITS[split])
    yield from (
        (row["premise"], row["hypothesis"], row["label"]) for row in rows if row["label"] >= 0
    )
