"""Data is prepared once, whole, or refused with the way out."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import os
import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from playground.base.files import NoData, find_damaged, lock_directory, replace_files
from playground.training import prepare
from playground.training.data import MEAN, STD, Images
from playground.training.digits import write_digits


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for MNIST: a folder with four .gz files, and the checksums to go with
    them."""
    plain, packed = tmp_path / "plain", tmp_path / "mirror"
    plain.mkdir()
    packed.mkdir()
    write_digits(plain, 40, 20)
    sums = {}
    for name in prepare.MNIST:
        content = (plain / name).read_bytes()
        sums[name] = hashlib.sha256(content).hexdigest()
        (packed / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(prepare, "MNIST", sums)
    monkeypatch.setattr(prepare, "MIRRORS", ("http://127.0.0.1:9/",))  # nobody listens there
    return packed


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` fall back to few digits."""
    original = prepare.find_or_draw_digits
    monkeypatch.setattr(
        prepare,
        "find_or_draw_digits",
        lambda data_dir, why, say: original(data_dir, why, say, 30, 10),
    )


@pytest.mark.parametrize("form", ["{folder}", "file://{folder}/"])
def test_mnist_comes_from_a_mirror_once(mirror: Path, tmp_path: Path, form: str) -> None:
    where = tmp_path / "data"
    source = prepare.prepare("mnist", where, form.format(folder=mirror))
    assert (source.name, source.folder) == ("mnist", where / "MNIST" / "raw")
    assert not find_damaged(source.folder, prepare.MNIST)
    assert (source.train, source.test) == (40, 20)
    assert prepare.prepare("auto", where).why == f"found in {where}"
    assert not list(source.folder.glob(".unfinished-*"))


@pytest.mark.parametrize("hurt", ["changed", "missing"])
def test_a_damaged_file_is_replaced(mirror: Path, tmp_path: Path, hurt: str) -> None:
    source = prepare.prepare("mnist", tmp_path / "data", str(mirror))
    damage(source.folder / "train-images-idx3-ubyte", hurt)
    again = prepare.prepare("mnist", tmp_path / "data", str(mirror))
    assert not find_damaged(again.folder, prepare.MNIST)


def damage(file: Path, hurt: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    if hurt == "missing":
        file.unlink()


def test_a_damaged_file_that_cannot_be_replaced_is_named_and_kept(
    mirror: Path, tmp_path: Path, few: None
) -> None:
    source = prepare.prepare("mnist", tmp_path / "data", str(mirror))
    damage(source.folder / "t10k-labels-idx1-ubyte", "changed")
    with pytest.raises(NoData, match=r"t10k-labels-idx1-ubyte in .* is damaged"):
        prepare.prepare("mnist", tmp_path / "data")
    assert (source.folder / "t10k-labels-idx1-ubyte").exists()
    fallback = prepare.prepare("auto", tmp_path / "data")
    assert fallback.name == "digits"
    assert "t10k-labels-idx1-ubyte in" in fallback.why


def test_without_data_or_network_mnist_is_refused_with_the_way_out(
    mirror: Path, tmp_path: Path
) -> None:
    with pytest.raises(NoData) as caught:
        prepare.prepare("mnist", tmp_path / "data")
    message = str(caught.value)
    assert f"set {prepare.MIRROR} to a folder or address" in message
    assert all(f"{name}.gz" in message for name in prepare.MNIST)
    assert "\n" not in message


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1/", "http://", "https:mnist", "http://h:port/", "http://localhost:99999/",
        "gopher://h/", "file://",
        "/no/such/folder", f"http://{'a' * 100}/", "http://node 7/", "http://127.0.0.1:9/\n",
        "\udcff",
    ],
)  # fmt: skip
def test_a_mirror_that_cannot_be_asked_is_named_in_a_line(
    address: str, mirror: Path, tmp_path: Path
) -> None:
    with pytest.raises(NoData, match=r"MNIST is not in .* and could not be fetched") as caught:
        prepare.prepare("mnist", tmp_path / "data", address)
    assert address in str(caught.value)


def test_a_bad_mirror_is_named_and_auto_goes_on(mirror: Path, tmp_path: Path, few: None) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(mirror, bad)
    damage(bad / "train-labels-idx1-ubyte.gz", "changed")
    with pytest.raises(NoData, match="bad"):
        prepare.prepare("mnist", tmp_path / "data", str(bad))
    source = prepare.prepare("auto", tmp_path / "data", str(bad))
    assert source.name == "digits"
    assert str(bad) in source.why


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """`folder` as an http:// address on loopback."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Silent, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_mnist_comes_over_http(mirror: Path, tmp_path: Path) -> None:
    with served(mirror) as address:
        source = prepare.prepare("mnist", tmp_path / "data", address)
    assert source.why == f"from {address}"
    assert not find_damaged(source.folder, prepare.MNIST)


def test_a_server_that_never_answers_is_given_up(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "NETWORK_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(NoData, match="timed out"):
        prepare.prepare("mnist", tmp_path / "data", f"http://127.0.0.1:{deaf.getsockname()[1]}")


@contextlib.contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """No file that this process writes grows beyond `size` bytes: the system refuses, as it does on
    a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_there_is_no_room_the_folder_is_named_and_not_the_mirror(
    mirror: Path, tmp_path: Path
) -> None:
    with disk_full_after(5_000), pytest.raises(NoData) as caught:
        prepare.prepare("mnist", tmp_path / "data", str(mirror))
    assert str(caught.value) == (
        f"there is no room in {tmp_path}/data/MNIST/raw (File too large): "
        "make room, or choose another folder with PLAYGROUND_DATA_DIR"
    )
    assert not list((tmp_path / "data").rglob(".unfinished-*"))


def test_without_room_for_mnist_auto_says_so_of_digits(
    mirror: Path, tmp_path: Path, few: None
) -> None:
    with disk_full_after(5_000), pytest.raises(NoData, match=r"no room in .*digits"):
        prepare.prepare("auto", tmp_path / "data", str(mirror))
    with disk_full_after(28_000):  # MNIST's images take 31 kB here, those of digits 24 kB
        source = prepare.prepare("auto", tmp_path / "data", str(mirror))
    assert (source.name, source.why) == (
        "digits",
        f"there is no room in {tmp_path}/data/MNIST/raw (File too large)",
    )


def test_the_environment_names_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given, folder in ((str(tmp_path / "data"), "data"), ("", "playground")):
        monkeypatch.setenv(prepare.DATA_DIR, given)
        assert prepare.default_data_dir() == tmp_path / folder


def test_who_has_no_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(prepare.DATA_DIR, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(NoData, match=r"no home directory .* PLAYGROUND_DATA_DIR"):
        prepare.default_data_dir()


def test_a_fifo_is_no_data_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "labels")
    assert find_damaged(tmp_path, {"labels": "0"}) == ["labels"]


def test_an_interrupted_preparation_leaves_nothing_behind(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare("mnist", tmp_path / "data", str(mirror))
    assert list((tmp_path / "data" / "MNIST" / "raw").iterdir()) == []


def test_many_at_once_prepare_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = prepare.find_or_draw_digits
    few_digits = functools.partial(original, train=300, test=100)
    monkeypatch.setattr(prepare, "find_or_draw_digits", few_digits)
    said: list[str] = []
    threads = [
        threading.Thread(
            target=prepare.prepare, args=("digits", tmp_path / "data", None, said.append)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["drawing 400 digits, once"]


def test_drawn_digits_are_checked_and_drawn_again(tmp_path: Path) -> None:
    said: list[str] = []
    source = prepare.find_or_draw_digits(tmp_path, "for a test", said.append, 30, 10)
    prepare.find_or_draw_digits(tmp_path, "for a test", said.append, 30, 10)
    assert len(said) == 1
    whole = (source.folder / "train-images-idx3-ubyte").read_bytes()
    damage(source.folder / "train-images-idx3-ubyte", "changed")
    prepare.find_or_draw_digits(tmp_path, "for a test", said.append, 30, 10)
    assert len(said) == 2
    assert (source.folder / "train-images-idx3-ubyte").read_bytes() == whole, (
        "the same seed draws the same digits"
    )


def test_a_data_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no/such")):
        for dataset in prepare.DATASETS:
            with pytest.raises(NoData, match=prepare.DATA_DIR):
                prepare.prepare(dataset, bad)


def test_whole_data_needs_no_write_access(mirror: Path, tmp_path: Path) -> None:
    where = tmp_path / "data"
    prepare.prepare("mnist", where, str(mirror))
    (where / ".lock").unlink()
    (where / ".lock").mkdir()  # cannot be opened: whoever tries to lock fails
    assert prepare.prepare("mnist", where).name == "mnist"


def test_the_real_mnist(real_mnist: Path, tmp_path: Path) -> None:
    source = prepare.prepare("auto", tmp_path, real_mnist.as_uri())
    assert source.name == "mnist"
    images = Images(source.folder, "train")
    assert len(images) == 60_000
    pixels = images.images.float() / 255
    assert pixels.mean().item() == pytest.approx(MEAN, abs=1e-4)
    assert pixels.std().item() == pytest.approx(STD, abs=1e-4)
    assert images.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_no_link_is_locked_or_made_a_file_of(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(NoData, match=r"symbolic links; choose another with PLAYGROUND_DATA_DIR$"),
        lock_directory(tmp_path, "data directory", prepare.DATA_DIR),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_nothing_is_written_where_another_user_may_have_put_links(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "SHA256SUMS").write_text("ours")
    (tmp_path / "link").symlink_to(raw)
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    with (
        pytest.raises(
            NoData,
            match=r"belongs to another user.*choose a folder of your own with PLAYGROUND_DATA_DIR$",
        ),
        replace_files(tmp_path / "link", prepare.DATA_DIR) as folder,
    ):
        (folder / "SHA256SUMS").write_text("theirs")
    assert [(file.name, file.read_text()) for file in raw.iterdir()] == [("SHA256SUMS", "ours")]
