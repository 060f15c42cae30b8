"""Digits: images that stand in for MNIST where there is no network.

The ten glyphs of a font, in several stroke widths, under random affine maps and noise; written in
MNIST's own file format, so that one loader reads both. The same seed gives the same images (with
the same torch and Pillow). Format: https://yann.lecun.org/exdb/mnist/index.html
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

SIDE = 28
GLYPH = 56
"""Glyphs are drawn twice as large as they end up, so that shrinking them smooths their edges as
scanning does."""
STROKES = (0, 1, 2, 3)
SEED = 1234
"""Of the generator that draws them: all runs have the same images."""


def write_digits(folder: Path, train: int, test: int) -> None:
    """Draw `train` + `test` images and write the four files MNIST consists of, uncompressed, into
    `folder`."""
    generator = torch.Generator().manual_seed(SEED)
    for split, count in (("train", train), ("t10k", test)):
        images, labels = draw(count, generator)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))


def idx(tensor: torch.Tensor) -> bytes:
    """A uint8 tensor as an IDX file: magic number 0x0800 + dimensions, each dimension's size, then
    the bytes."""
    header = struct.pack(f">I{tensor.dim()}I", 0x0800 + tensor.dim(), *tensor.shape)
    return header + tensor.numpy().tobytes()


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` images [count, 28, 28] and their labels [count], both uint8."""
    glyphs = torch.stack([glyph(digit, stroke) for stroke in STROKES for digit in range(10)])
    labels = torch.randint(10, (count,), generator=generator)
    strokes = torch.randint(len(STROKES), (count,), generator=generator)
    images = torch.empty(count, SIDE, SIDE, dtype=torch.uint8)
    for some in torch.arange(count).split(5_000):
        grid = F.affine_grid(
            random_maps(len(some), generator), [len(some), 1, SIDE, SIDE], align_corners=False
        )
        moved = F.grid_sample(
            glyphs[strokes[some] * 10 + labels[some]], grid, align_corners=False
        ).squeeze(1)
        ink = 0.7 + 0.3 * torch.rand(len(some), 1, 1, generator=generator)
        noise = 0.08 * torch.randn(moved.shape, generator=generator)
        images[some] = ((moved * ink + noise * (noise > 0)) * 255).clamp(0, 255).to(torch.uint8)
    return images, labels.to(torch.uint8)


def random_maps(count: int, generator: torch.Generator) -> torch.Tensor:
    """Affine maps [count, 2, 3]: turned by up to 20°, sheared, stretched each way by up to a fifth,
    shifted."""

    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    angle, shear = between(-math.pi / 9, math.pi / 9), between(-0.25, 0.25)
    across, down = between(0.8, 1.2), between(0.8, 1.2)
    sine, cosine = angle.sin(), angle.cos()
    rows = [
        torch.stack([across * cosine, down * (shear * cosine - sine), between(-0.15, 0.15)], dim=1),
        torch.stack([across * sine, down * (shear * sine + cosine), between(-0.15, 0.15)], dim=1),
    ]
    return torch.stack(rows, dim=1)


def glyph(digit: int, stroke: int) -> torch.Tensor:
    """One digit, centred, [1, 56, 56] in 0 … 1, drawn with a pen `stroke` pixels wider than the
    font's own."""
    picture = Image.new("L", (GLYPH, GLYPH))
    centre = (GLYPH / 2, GLYPH / 2)
    font = ImageFont.load_default(size=44)
    ImageDraw.Draw(picture).text(
        centre, str(digit), fill=255, font=font, anchor="mm", stroke_width=stroke
    )
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(1, GLYPH, GLYPH) / 255
