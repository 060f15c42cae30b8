"""The lessons: a folder for each, the path in reading order, then the parts beside it.

`lesson.py` of each is the blackboard; its steps are functions `step(rank, size)` that every rank
calls and that return plain data. This table is all the command line needs to know before torch is
imported. Every list of lessons follows it: the help, the site, the exercises, the README.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

from playground.console.lesson import Lesson

BARE = ("size", "backend", "timeout", "as_json", "see")
"""Options of steps that draw no random numbers and have few columns."""
HAS_DATA = "Rank {rank} has data {after}"
ORIGINS, SHAPES = "Where it came from", "Other shapes"
FURTHER = "Long runs, slow links"
"""Parts beside the path."""

lesson = partial(Lesson, package=__name__)

PATH = (
    lesson(
        name="hello",
        teaches="N processes become one world: who am I?",
        shown="{ranks} met, and each knows its place",
        default_size=4,
        options=BARE,
    ),
    lesson(
        name="p2p",
        teaches="point to point: send, recv, isend, irecv",
        shown="messages between ranks: blocking, immediate, from anyone, in a batch, round a ring",
        default_size=2,
        min_size=2,
        options=BARE,
        says={
            "blocking": (HAS_DATA,),
            "two_tensors": ("Rank {rank} has data {tensor}, {received}",),
            "immediate": ("Rank {rank} started {started}", HAS_DATA),
            "exchange": (HAS_DATA,),
            "ring": (HAS_DATA,),
        },
    ),
    lesson(
        name="collectives",
        teaches="groups, and what each collective leaves on every rank",
        shown="what each collective leaves on every rank",
        default_size=4,
        options=(*BARE, "wide"),
        says={"groups": (HAS_DATA,)},
    ),
    lesson(
        name="sgd",
        teaches="synchronous SGD by hand: partition the data, average the gradients",
        shown="{ranks} trained one model by averaging {averaged}",
        default_size=2,
    ),
    lesson(
        name="allreduce",
        folder="all_reduce",
        teaches="our own all-reduce algorithms, message by message",
        shown="the same sum on every rank, and what each algorithm costs",
        default_size=4,
        min_size=2,
    ),
    lesson(
        name="failures",
        teaches="five programs that stand still or are wrong: from the symptom to the line",
        shown="what torch, its flight recorder and ours say of each program",
        default_size=4,
        min_size=3,
        options=("size", "timeout", "as_json", "see"),
    ),
    lesson(
        name="ladder",
        teaches="from average_gradients to what DDP does, rung by rung, each measured",
        shown="what each rung gains",
        default_size=2,
    ),
    lesson(
        name="scaling",
        teaches="what more ranks gain: speedup, large batches and the learning rate, the share of "
        "the peak",
        shown="what {ranks} gain, and where that ends",
        default_size=2,
        min_size=2,
        options=BARE,
    ),
    lesson(
        name="ddp",
        teaches="the same training, with DistributedDataParallel doing the averaging",
        shown="{ranks} trained one model with DistributedDataParallel",
        default_size=2,
    ),
    lesson(
        name="prove",
        teaches="do N ranks equal one process with the whole batch? A proof, and four ways to "
        "break it",
        shown="{ranks} equal one process with the whole batch",
        default_size=4,
    ),
    lesson(
        name="memory",
        teaches="where the bytes are; mixed precision and activation checkpointing, by hand",
        shown="what a training step holds, and what it need not",
        default_size=2,
        options=BARE,
    ),
    lesson(
        name="zero",
        teaches="from DDP to FSDP: the optimizer's state, the gradients, the parameters in shards, "
        "and what it costs",
        shown="{ranks} with shards of the training's memory train as one process does",
        default_size=2,
    ),
    lesson(
        name="pipeline",
        teaches="a model in stages over ranks: naive, GPipe and 1F1B, and what each costs",
        shown="the gradients of a model in stages on {ranks} are those of one process",
        default_size=2,
    ),
    lesson(
        name="tensor",
        teaches="every matrix sharded over ranks: column- and row-parallel layers, heads, "
        "vocabulary, sequence",
        shown="a transformer whose matrices {ranks} share is that of one process",
        default_size=2,
    ),
    lesson(
        name="context",
        teaches="attention over a sequence sharded over ranks: ring attention, the zigzag order, "
        "Ulysses",
        shown="attention over a sequence that {ranks} share is that of one process",
        default_size=2,
    ),
    lesson(
        name="experts",
        teaches="a mixture of experts over ranks: routing, uneven all-to-all, capacity and the "
        "balance loss",
        shown="tokens that go to their experts on {ranks} and back train as in one process",
        default_size=2,
    ),
    lesson(
        name="mesh",
        teaches="data, pipeline, context and tensor parallelism at once, in our words and the "
        "library's",
        shown="on each mesh {ranks} train as one process does",
        default_size=8,
    ),
    lesson(
        name="elastic",
        teaches="ranks are killed, all restart from a snapshot, and finish bit-identical",
        shown="{ranks} trained on after failures, to the same bits",
        default_size=4,
    ),
    lesson(
        name="data-parallel",
        part=ORIGINS,
        teaches="DataParallel by its parts: one process, many devices, and where that ends",
        shown="the parts of DataParallel, what fills a device's memory, what helps, and why "
        "processes come next",
        default_size=1,
        options=("timeout", "seed", "wide", "as_json", "see"),
    ),
    lesson(
        name="bert",
        part=ORIGINS,
        teaches="the workload of the tutorials: BERT with DataParallel, the loss in forward, and "
        "DDP",
        shown="what training BERT costs by each way",
        default_size=2,
    ),
    lesson(
        name="rpc",
        part=SHAPES,
        teaches="remote calls, remote references, backward across ranks, by send and recv",
        shown="calls, objects and graphs that reach from rank to rank, over send and recv",
        default_size=3,
        min_size=2,
        options=BARE,
    ),
    lesson(
        name="parameter-server",
        part=SHAPES,
        teaches="one rank owns the parameters: what staleness costs, and when a server beats "
        "all-reduce",
        shown="a parameter server in every mode, beside all-reduce",
        default_size=5,
        min_size=2,
    ),
    lesson(
        name="checkpoint",
        part=FURTHER,
        teaches="shards that any number of ranks reads, random states, a sampler that resumes; and "
        "torch.distributed.checkpoint",
        shown="half as many as {ranks} resume with the same bits, and with each sample once",
        default_size=4,
        options=(*BARE, "wide"),
    ),
    lesson(
        name="bytes",
        part=FURTHER,
        teaches="training over a slow link: DiLoCo, compressed gradients, and what error feedback "
        "restores",
        shown="what fewer messages and fewer bytes cost, and what they do not",
        default_size=2,
        min_size=2,
        options=BARE,
    ),
)
"""All lessons: first those of the path, then those beside it, part by part."""
LESSONS = {each.name: each for each in PATH}
PARTS = {title: [*lessons] for title, lessons in groupby(PATH, lambda each: each.part)}
"""The lessons of the path, and of each part beside it, by title."""
