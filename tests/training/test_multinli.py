"""MultiNLI's own files: read as they are, and refused by file and line where they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from playground.runtime.files import NoData
from playground.training.sentence_pairs import prepare
from playground.training.sentence_pairs.pairs import Pairs
from playground.training.sentence_pairs.prepare import FILES, find_multinli, prepare_pairs, read_pairs
from playground.training.sentence_pairs.wordpiece import SPECIAL, WordPiece

TRAIN, TEST = FILES.values()


def line(label: str, premise: str, hypothesis: str) -> str:
    """As in the archive, which has more fields."""
    fields = {"annotator_labels": [label], "genre": "travel", "gold_label": label, "pairID": "1e"}
    return json.dumps({**fields, "sentence1": premise, "sentence2": hypothesis, "sentence1_parse": "(ROOT)"})


LINES = [
    line("neutral", "Old \u2028 houses.", "New houses."),
    line("-", "Nobody agrees.", "Or so."),
    line("contradiction", "It rains.", "It is dry."),
    line("entailment", "It rains.", "n/a"),
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A data directory in which multinli_1.0.zip was unpacked."""
    (tmp_path / "multinli_1.0").mkdir()
    for name in FILES.values():
        (tmp_path / "multinli_1.0" / name).write_text("".join(f"{each}\n" for each in LINES))
    return tmp_path


def test_the_labelled_pairs_are_read(archive: Path) -> None:
    folder = find_multinli(archive)
    assert folder == find_multinli(archive / "multinli_1.0") == archive / "multinli_1.0"
    expected = [
        ("Old \u2028 houses.", "New houses.", 1),
        ("It rains.", "It is dry.", 2),
        ("It rains.", "n/a", 0),
    ]
    for split in ("train", "test"):
        assert [*read_pairs(folder, split)] == expected
    assert find_multinli(folder / "elsewhere") is None


@pytest.mark.parametrize("dataset", ["auto", "multinli"])
def test_a_file_that_is_missing_is_named(dataset: str, archive: Path) -> None:
    (archive / "multinli_1.0" / TEST).unlink()
    with pytest.raises(NoData, match=rf"multinli_1.0 lacks {TEST}: unpack"):
        prepare_pairs(dataset, archive)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
        ("\udcff", "it is not JSON"),
        ("[1]", 'it has no text "gold_label"'),
        ('{"gold_label": "neutral", "sentence1": "a"}', 'it has no text "sentence2"'),
        ('{"gold_label": "neutral", "sentence1": 7, "sentence2": "b"}', 'it has no text "sentence1"'),
        ('{"gold_label": "hidden", "sentence1": "a", "sentence2": "b"}', 'its gold_label is "hidden"'),
    ],
)
def test_a_bad_line_is_named(bad: str, message: str, archive: Path) -> None:
    file = archive / "multinli_1.0" / TRAIN
    file.write_bytes("\n".join([*LINES, bad, *LINES]).encode(errors="surrogateescape"))
    with pytest.raises(NoData) as caught:
        prepare_pairs("auto", archive)
    assert str(caught.value).startswith(f"{file}, line 5: {message}")
    assert "\n" not in str(caught.value)
    assert [left.name for left in archive.glob("pairs/*/*")] == [".lock"], "nothing half is left"


def test_no_labelled_pair_is_refused(archive: Path) -> None:
    (archive / "multinli_1.0" / TEST).write_text(LINES[1])
    with pytest.raises(NoData, match="has no pair with a label"):
        prepare_pairs("multinli", archive)


@pytest.mark.parametrize("given", ["data_dir", "folder"])
def test_multinli_is_tokenised_once(given: str, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = archive if given == "data_dir" else archive / "multinli_1.0"
    tokenizer = WordPiece((*SPECIAL, "it", "is", "rain", "##s", "dry", "."), lower_case=True)
    source = prepare_pairs("auto", where, tokenizer)
    assert (source.name, source.why, source.train, source.test) == (
        "multinli",
        f"found in {archive}/multinli_1.0",
        3,
        3,
    )
    monkeypatch.setattr(prepare, "parse_line", None)  # whoever reads once more fails
    assert prepare_pairs("multinli", where, tokenizer) == source
    batch = Pairs(source.folder, "test", max_length=32)[1]
    said = " ".join(tokenizer.vocabulary[i] for i in batch.input_ids)
    assert said == "[CLS] it rain ##s . [SEP] it is dry . [SEP]"


def test_without_a_tokenizer_the_words_of_the_training_split_are_taken(archive: Path) -> None:
    source = prepare_pairs("auto", archive)
    batch = Pairs(source.folder, "test", max_length=32).__getitems__(range(3))
    assert batch.input_ids.max() < source.vocabulary
    assert not (batch.input_ids == 1).any(), "no word is unknown"


def test_a_folder_that_cannot_be_written_leaves_the_pairs_elsewhere(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (archive / "pairs").write_text("a file where the folder would be")
    source = prepare_pairs("auto", archive)
    assert source.folder.is_relative_to(cache / "playground" / "pairs")
    assert source.train == 3


WITHOUT_LIBRARIES = """
import sys
sys.modules.update(dict.fromkeys(["datasets", "huggingface_hub", "safetensors", "transformers", "torch"]))
from pathlib import Path
from playground.runtime.errors import UsageError
from playground.training.bert_weights import find_weights
from playground.training.sentence_pairs.prepare import prepare_pairs
for ask in (lambda: prepare_pairs("multinli", Path(sys.argv[1])), lambda: find_weights("bert-base-cased")):
    try:
        ask()
    except UsageError as error:
        print(error)
"""


def test_the_hub_without_its_libraries_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(tmp_path)]
    data, weights = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert data.startswith(
        f"{tmp_path} has no {TRAIN} and no {TEST}, and the hub is asked through the package datasets"
    )
    assert weights.startswith("the hub is asked through huggingface_hub")
    assert data.endswith("pip install 'playground[hub]'")
    assert weights.endswith("pip install 'playground[hub]'")
