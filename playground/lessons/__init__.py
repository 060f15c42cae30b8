"""The lessons: a folder for each, the path in reading order, then the parts beside it.

`lesson.py` of each is a program. This table is all the command line needs to know before torch is
imported. Every list of lessons follows it: the help, the site, the exercises, the README.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

from playground.lessons.lesson_row import Lesson

ORIGINS, SHAPES = "Where it came from", "Other shapes"
"""Parts beside the path."""

lesson = partial(Lesson, package=__name__)

ROWS = (
    lesson(
        name="hello",
        teaches="N processes become one world: who am I?",
        default_size=4,
    ),
    lesson(
        name="p2p",
        teaches="point to point: send, recv, isend, irecv",
        default_size=2,
    ),
    lesson(
        name="collectives",
        teaches="groups, and what each collective leaves on every rank",
        default_size=4,
    ),
    lesson(
        name="allreduce",
        folder="all_reduce",
        teaches="how a sum over ranks is made of messages: a root, all to all, rings",
        default_size=4,
    ),
    lesson(
        name="sgd",
        teaches="synchronous SGD by hand: partition the data, average the gradients",
        needs_mnist=True,
        default_size=2,
    ),
    lesson(
        name="ladder",
        teaches="from average_gradients to what DDP does: fewer messages, sent during backward",
        default_size=2,
    ),
    lesson(
        name="ddp",
        teaches="the script to copy: DistributedDataParallel, and what a training needs around it",
        needs_mnist=True,
        default_size=2,
    ),
    lesson(
        name="prove",
        teaches="is it the training of one process? A test, four mistakes, and larger batches",
        default_size=4,
    ),
    lesson(
        name="failures",
        teaches="five programs that train a wrong model, four in which ranks wait in vain, one "
        "that is slow: from the symptom to the line",
        default_size=4,
    ),
    lesson(
        name="scaling",
        teaches="when does it pay? Speedup over links, two laws, and the share of the peak",
        default_size=2,
    ),
    lesson(
        name="gpt",
        folder="inside_gpt",
        teaches="what is inside the model: shapes, parameters, activations, operations",
        default_size=2,
    ),
    lesson(
        name="memory",
        teaches="where the bytes of a step are; activations computed again, bfloat16 and float32",
        default_size=2,
    ),
    lesson(
        name="zero",
        teaches="from DDP to FSDP: the optimizer's state, the gradients, the parameters in shards",
        default_size=4,
    ),
    lesson(
        name="pipeline",
        teaches="a model in stages over ranks: naive, GPipe and 1F1B, and what each costs",
        default_size=3,
    ),
    lesson(
        name="tensor",
        teaches="every matrix sharded over ranks: column- and row-parallel layers, heads, "
        "vocabulary, sequence",
        default_size=4,
    ),
    lesson(
        name="context",
        teaches="attention over a sequence sharded over ranks: a ring, the zigzag order, Ulysses",
        default_size=3,
    ),
    lesson(
        name="experts",
        teaches="a mixture of experts over ranks: routing, uneven all-to-all, capacity and balance",
        default_size=2,
    ),
    lesson(
        name="mesh",
        teaches="data, pipeline, context and tensor parallelism at once, on a mesh of ranks",
        default_size=8,
    ),
    lesson(
        name="checkpoint",
        teaches="saved by N ranks and loaded by M: rows, then blocks of any kind; the library's "
        "dcp.save and dcp.load",
        default_size=4,
    ),
    lesson(
        name="elastic",
        teaches="ranks are killed, all restart from a snapshot, and finish bit-identical",
        needs_mnist=True,
        restarts=2,
        default_size=4,
    ),
    lesson(
        name="bytes",
        teaches="training over a slow link: local SGD, DiLoCo, top-k and PowerSGD with error "
        "feedback, by bytes and by time",
        default_size=2,
    ),
    lesson(
        name="data-parallel",
        part=ORIGINS,
        teaches="DataParallel by its parts: one process, many devices, and where that ends",
        default_size=1,
    ),
    lesson(
        name="bert",
        part=ORIGINS,
        teaches="the workload of the tutorials: an encoder with DataParallel, the loss in forward, "
        "and DDP",
        default_size=2,
    ),
    lesson(
        name="rpc",
        part=SHAPES,
        teaches="a function runs on another rank: call, reference and backward by send and recv, "
        "and by torch.distributed.rpc",
        default_size=3,
    ),
    lesson(
        name="parameter-server",
        part=SHAPES,
        teaches="one rank has the parameters: synchronous, asynchronous and bounded steps, by time "
        "and staleness",
        default_size=5,
    ),
)
"""All lessons: first those of the path, then those beside it, part by part."""
LESSONS = {each.name: each for each in ROWS}
PARTS = {title: [*lessons] for title, lessons in groupby(ROWS, lambda each: each.part)}
"""The lessons of the path, and of each part beside it, by title."""
