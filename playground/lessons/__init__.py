"""The lessons: a folder for each, the path in reading order, then the parts beside it.

`lesson.py` of each is the blackboard; its steps are functions `step(rank, size)` that every rank
calls and that return plain data. This table is all the command line needs to know before torch is
imported. Every list of lessons follows it: the help, the site, the exercises, the README.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

from playground.console.lesson import Lesson

SEEDED = ("size", "backend", "timeout", "seed", "wide", "as_json", "see")
"""Options of lessons whose results depend on the seed."""
ORIGINS, SHAPES = "Where it came from", "Other shapes"
FURTHER = "Long runs, slow links"
"""Parts beside the path."""

lesson = partial(Lesson, package=__name__)

PATH = (
    lesson(
        name="hello",
        teaches="N processes become one world: who am I?",
        is_program=True,
        default_size=4,
    ),
    lesson(
        name="p2p",
        teaches="point to point: send, recv, isend, irecv",
        is_program=True,
        default_size=2,
    ),
    lesson(
        name="collectives",
        teaches="groups, and what each collective leaves on every rank",
        is_program=True,
        default_size=4,
    ),
    lesson(
        name="allreduce",
        folder="all_reduce",
        teaches="how a sum over ranks is made of messages: a root, all to all, rings",
        is_program=True,
        default_size=4,
    ),
    lesson(
        name="sgd",
        teaches="synchronous SGD by hand: partition the data, average the gradients",
        is_program=True,
        needs_mnist=True,
        default_size=2,
    ),
    lesson(
        name="ladder",
        teaches="from average_gradients to what DDP does: fewer messages, sent during backward",
        is_program=True,
        default_size=2,
    ),
    lesson(
        name="ddp",
        teaches="the script to copy: DistributedDataParallel, and what a training needs around it",
        is_program=True,
        needs_mnist=True,
        default_size=2,
    ),
    lesson(
        name="prove",
        teaches="is it the training of one process? A test, four mistakes, and larger batches",
        is_program=True,
        default_size=4,
    ),
    lesson(
        name="failures",
        teaches="five wrong programs, and five that stand still: from the symptom to the line",
        is_program=True,
        default_size=4,
    ),
    lesson(
        name="scaling",
        teaches="when does it pay? Speedup over links, two laws, and the share of the peak",
        is_program=True,
        default_size=2,
    ),
    lesson(
        name="memory",
        teaches="where the bytes are; mixed precision and activation checkpointing, by hand",
        shown="Adam takes {account[0][per_parameter]} bytes for each parameter; the loss is "
        "{mixed_precision[0][methods][bfloat16][loss]} in bfloat16 alone and "
        "{mixed_precision[0][methods][masters][loss]} with float32 masters; checkpointing keeps "
        "{checkpointing[0][ways][by_hand][kept]} of {checkpointing[0][ways][all][kept]} KiB, for "
        "{checkpointing[0][ways][by_hand][work]} times the work",
        default_size=2,
    ),
    lesson(
        name="zero",
        teaches="from DDP to FSDP: the optimizer's state, the gradients, the parameters in shards",
        is_program=True,
        default_size=4,
    ),
    lesson(
        name="pipeline",
        teaches="a model in stages over ranks: naive, GPipe and 1F1B, and what each costs",
        shown="{ranks} idle for {idle} of the time, and have the gradients of one process (largest "
        "difference {largest:.1e})",
        default_size=2,
    ),
    lesson(
        name="tensor",
        teaches="every matrix sharded over ranks: column- and row-parallel layers, heads, "
        "vocabulary, sequence",
        shown="on {ranks} each holds {share:.1%} of the parameters, sends {sent} bytes in a step, "
        "and trains to the numbers of one process (largest difference {largest:.1e})",
        default_size=2,
    ),
    lesson(
        name="context",
        teaches="attention over a sequence sharded over ranks: ring attention, the zigzag order, "
        "Ulysses",
        shown="{ranks} idle for {idle} of the time; for {length:,} tokens a rank of the ring keeps "
        "{kept:.2f} MB in place of the square's {square:.2f} MB, and trains to the numbers of one "
        "process (largest difference {largest:.1e})",
        default_size=2,
    ),
    lesson(
        name="experts",
        teaches="a mixture of experts over ranks: routing, uneven all-to-all, capacity and the "
        "balance loss",
        shown="the fullest expert gets {fullest} times the mean; tokens that go to experts on "
        "{ranks} and back train as in one process (largest difference {largest:.1e})",
        default_size=2,
        options=SEEDED,
    ),
    lesson(
        name="mesh",
        teaches="data, pipeline, context and tensor parallelism at once, in our words and the "
        "library's",
        shown="on each mesh {ranks} train to the numbers of one process (largest difference "
        "{largest:.1e})",
        default_size=8,
    ),
    lesson(
        name="elastic",
        teaches="ranks are killed, all restart from a snapshot, and finish bit-identical",
        shown="{ranks} redid {redone} of {steps} steps and finished with the same bits",
        default_size=4,
        options=SEEDED,
    ),
    lesson(
        name="data-parallel",
        part=ORIGINS,
        teaches="DataParallel by its parts: one process, many devices, and where that ends",
        shown="the fullest device holds {held}; {speed_up}",
        default_size=1,
        options=("timeout", "wide", "as_json", "see"),
    ),
    lesson(
        name="bert",
        part=ORIGINS,
        teaches="the workload of the tutorials: BERT with DataParallel, the loss in forward, and "
        "DDP",
        shown="{found}",
        default_size=2,
        options=SEEDED,
    ),
    lesson(
        name="rpc",
        part=SHAPES,
        teaches="remote calls, remote references, backward across ranks, by send and recv",
        shown="rank 0 has {remote_call[0][after]} from its neighbour, and its backward has left a "
        "gradient of {distributed_autograd[0][gradient_there]} there",
        default_size=3,
        min_size=2,
    ),
    lesson(
        name="parameter-server",
        part=SHAPES,
        teaches="one rank owns the parameters: what staleness costs, and when a server beats "
        "all-reduce",
        shown="the fastest server, {mode}, takes {ratio:.2f} times the samples per second of "
        "all-reduce, with gradients {staleness:.2f} steps old on average",
        default_size=5,
        min_size=2,
    ),
    lesson(
        name="checkpoint",
        part=FURTHER,
        teaches="shards that any number of ranks reads, random states, a sampler that resumes; and "
        "torch.distributed.checkpoint",
        shown="half as many as {ranks} resume with the same bits in {reshard[0][equal_bits]} of "
        "{reshard[0][pairs]} pairs of layouts; {samples[0][with_state][twice]} samples count twice "
        "with the sampler's state, and {samples[0][skipping][twice]} without it",
        default_size=4,
    ),
    lesson(
        name="bytes",
        part=FURTHER,
        teaches="training over a slow link: DiLoCo, compressed gradients, and what error feedback "
        "restores",
        shown="averaging after 32 steps sends {ladder[0][rungs][H = 32][kB]} kB in place of "
        "{ladder[0][rungs][DDP, AdamW][kB]}, for a loss of {ladder[0][rungs][H = 32][loss]} in "
        "place of {ladder[0][rungs][DDP, AdamW][loss]}; with feedback the largest 2 % of the "
        "gradient train to {ladder[0][rungs][top 2 %][fed_back]}, without to "
        "{ladder[0][rungs][top 2 %][loss]}",
        default_size=2,
        min_size=2,
    ),
)
"""All lessons: first those of the path, then those beside it, part by part."""
LESSONS = {each.name: each for each in PATH}
PARTS = {title: [*lessons] for title, lessons in groupby(PATH, lambda each: each.part)}
"""The lessons of the path, and of each part beside it, by title."""
