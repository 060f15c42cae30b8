"""The training images as PNG files: the same pixels, whole, only as many as are asked for, and mended if damaged."""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from playground.runtime.files import NoData
from playground.training import image_files
from playground.training.data import ImageFiles, Images
from playground.training.digits import write_digits
from playground.training.image_files import UnreadableImage, list_image_files, prepare_image_files

COUNT = 25


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of 25 images, ten to a folder."""
    monkeypatch.setattr(image_files, "PER_FOLDER", 10)
    folder = tmp_path / "digits" / "raw"
    folder.mkdir(parents=True)
    write_digits(folder, COUNT, 5)
    return folder


def files_in(raw: Path) -> dict[str, int]:
    """Every file among the PNGs, and when it was written."""
    found = (raw.parent / "png").rglob("*")
    return {str(file.relative_to(raw.parent / "png")): file.stat().st_mtime_ns for file in found if file.is_file()}


def test_each_file_holds_its_image_and_says_its_label(raw: Path) -> None:
    said: list[str] = []
    prepare_image_files(raw, say=said.append)
    assert said == ["writing 25 PNG files, once"]
    samples = list_image_files(raw)
    assert [label for _, label in samples] == Images(raw, "train").labels.tolist()
    for number, (path, label) in enumerate(samples):
        assert path == str(raw.parent / "png" / f"000{number // 10}0" / f"{number:05}-{label}.png")
    assert_same_pixels(raw)


def assert_same_pixels(raw: Path) -> None:
    """Every file, decoded, is the image of the dataset."""
    for (path, _), image in zip(list_image_files(raw), Images(raw, "train").images, strict=True):
        with Image.open(path) as picture:
            assert (picture.mode, picture.size) == ("L", (28, 28))
            assert picture.tobytes() == bytes(image.flatten().tolist())


@pytest.mark.parametrize(("limit", "written"), [(1, 10), (10, 10), (11, 20), (25, 25), (None, 25)])
def test_only_what_is_needed_is_written_and_once(limit: int | None, written: int, raw: Path) -> None:
    prepare_image_files(raw, limit)
    first = files_in(raw)
    assert sum(name.endswith(".png") for name in first) == written
    assert all(Path(path).is_file() for path, _ in list_image_files(raw, limit))
    prepare_image_files(raw, limit)
    assert files_in(raw) == first
    prepare_image_files(raw)
    assert files_in(raw).items() >= first.items()
    assert sum(name.endswith(".png") for name in files_in(raw)) == COUNT


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how == "changed":
        file.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    else:
        file.write_bytes(content[: {"empty": 0, "cut": 50}[how]])


Damages = st.dictionaries(
    st.integers(0, COUNT - 1), st.sampled_from(["gone", "changed", "empty", "cut"]), min_size=1, max_size=4
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=Damages)
def test_damaged_files_are_named_and_written_again(damages: dict[int, str], raw: Path) -> None:
    prepare_image_files(raw)
    whole = {path: Path(path).read_bytes() for path, _ in list_image_files(raw)}
    paths = [Path(path) for path in whole]
    for number, how in damages.items():
        damage(paths[number], how)
    said: list[str] = []
    prepare_image_files(raw, say=said.append)
    first_of_each = {number // 10: paths[number] for number in sorted(damages, reverse=True)}
    named = [f"{path} is damaged or missing: its folder is written again" for _, path in sorted(first_of_each.items())]
    assert said[:-1] == named
    assert {path: Path(path).read_bytes() for path in whole} == whole


def test_files_from_other_images_are_replaced(raw: Path) -> None:
    """The dataset was drawn anew, by another version or with another seed."""
    prepare_image_files(raw)
    write_digits(raw, COUNT, 5, seed=5)
    prepare_image_files(raw)
    assert_same_pixels(raw)


def put_file_in_the_way(raw: Path) -> Path:
    (raw.parent / "png").write_text("")
    return raw.parent / "png" / "00000"


def put_folder_in_the_way(raw: Path) -> Path:
    [(path, _)] = list_image_files(raw, 1)
    Path(path, "full").mkdir(parents=True)
    return Path(path).parent


@pytest.mark.parametrize("block", [put_file_in_the_way, put_folder_in_the_way])
def test_where_nothing_can_be_written_one_line_says_so(block: Callable[[Path], Path], raw: Path) -> None:
    place = block(raw)
    with pytest.raises(NoData, match=r"^[^\n]*--data-dir$") as caught:
        prepare_image_files(raw)
    assert str(place) in str(caught.value)


def test_the_error_is_one_line_in_a_loader_worker_too() -> None:
    error = UnreadableImage("/data/7.png: it is damaged")
    traceback = f"Traceback (most recent call last):\n  …\nplayground.training.UnreadableImage: {error}\n"
    wrapped = f"Caught UnreadableImage in DataLoader worker process 0.\nOriginal {traceback}"
    assert str(UnreadableImage(wrapped)) == str(error) == "/data/7.png: it is damaged"


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def break_chunks(content: bytes) -> bytes:
    """Half of the pixels, and a chunk that is none: the decoder tells of it by a SyntaxError."""
    half = b"IDAT" + content[41 : len(content) // 2]
    return content[:33] + struct.pack(">I", len(half) - 4) + half + struct.pack(">I", crc32(half)) + 12 * b"\0"


def draw_another(content: bytes) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (30, 30)).save(stream, "png")
    return stream.getvalue()


@pytest.mark.parametrize("damage", [cut, break_chunks, draw_another])
def test_a_picture_that_is_damaged_later_is_named(damage: Callable[[bytes], bytes], raw: Path) -> None:
    prepare_image_files(raw)
    samples = list_image_files(raw, 1)
    file = Path(samples[0][0])
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UnreadableImage, match=rf"{file.name}: it is damaged"):
        ImageFiles(samples)[0]


def test_files_can_be_moved_with_their_data(raw: Path, tmp_path: Path) -> None:
    prepare_image_files(raw)
    shutil.move(raw.parent, tmp_path / "elsewhere")
    said: list[str] = []
    prepare_image_files(tmp_path / "elsewhere" / "raw", say=said.append)
    assert said == []
