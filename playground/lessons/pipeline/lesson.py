"""Pipeline parallelism: each of S ranks holds one stage, which is a part of the model's layers.

A batch is cut into M microbatches. Each microbatch goes forward from stage to stage as activations,
and its gradients come back. A schedule is the order in which a stage works. It decides how long the
stages are idle and how many microbatches they hold. The gradients are always the same.

    python -m playground pipeline
    torchrun --nproc-per-node 3 lesson.py

    gpipe: 25% of slots idle, largest difference 6e-17
      abcdef......AABBCCDDEEFF  holds 6
      .abcdef...AABBCCDDEEFF..  holds 6
      ..abcdefAABBCCDDEEFF....  holds 6

A row is a stage: a is the forward of the first microbatch, AA its backward, and a dot is idle time.
Sources: Huang et al., GPipe, NeurIPS 2019, arXiv 1811.06965, and Narayanan et al., Megatron-LM on
GPU clusters, SC 2021, arXiv 2104.04473.
"""

from string import ascii_lowercase, ascii_uppercase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, Block, C, T, make_batch

MICROBATCHES = 6
SEQUENCES = 4  # of each microbatch
BLOCKS = 12  # of the GPT: 2, 3 or 4 stages have equally many


class Embedding(nn.Module):
    """The beginning of the GPT. Maps tokens [B, T] to activations [B, T, C]."""

    def __init__(self, token, position):
        super().__init__()
        self.token = token
        self.position = position

    def forward(self, tokens):
        return self.token(tokens) + self.position(torch.arange(T))


def make_model():
    """A GPT in BLOCKS parts, of which a stage gets a few: blocks, with what comes at the ends."""
    torch.manual_seed(1234)  # the same parameters on every rank, and for every schedule
    gpt = GPT()  # we keep its embeddings and its head, and put BLOCKS blocks between them
    return nn.Sequential(
        nn.Sequential(Embedding(gpt.token_embedding, gpt.position_embedding), Block()),
        *(Block() for _ in range(BLOCKS - 2)),
        nn.Sequential(Block(), gpt.final_norm, gpt.lm_head),
    )


def token_loss(logits, targets):
    """The mean cross-entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stage:
    """This rank's layers at work on a batch of M microbatches [SEQUENCES, T + 1]."""

    def __init__(self, layers, batch, groups):
        self.layers = layers
        self.inputs = batch[:, :-1]  # for the first stage
        self.targets = batch[:, 1:]  # for the last stage
        self.rank = dist.get_rank()
        self.last = dist.get_world_size() - 1
        self.groups = groups
        self.held = {}  # by microbatch: its inputs and outputs, from forward until backward
        self.sending = []  # handles, which keep the memory of a message until it has left
        self.order = []  # of the layers' work: "forward" or "backward" for each microbatch
        # Hooks, because library calls the layers without our forward and backward.
        layers.register_forward_hook(lambda *_: self.order.append("forward"))
        layers.register_full_backward_pre_hook(lambda *_: self.order.append("backward"))

    def forward(self, m):
        """Receive microbatch m from the stage before, compute, and send to the stage after."""
        if self.rank == 0:
            inputs = self.inputs.chunk(MICROBATCHES)[m]
        else:
            inputs = torch.empty(SEQUENCES, T, C)
            dist.recv(inputs, src=self.rank - 1, group=self.groups["forward"])
            inputs.requires_grad_()  # so that backward leaves a gradient in inputs.grad
        outputs = self.layers(inputs)
        if self.rank < self.last:
            self.sending.append(
                dist.isend(outputs.detach(), dst=self.rank + 1, group=self.groups["forward"])
            )
        else:  # backward adds up over microbatches, and so gets the mean over the batch
            outputs = token_loss(outputs, self.targets.chunk(MICROBATCHES)[m]) / MICROBATCHES
        self.held[m] = inputs, outputs

    def backward(self, m):
        """Receive the gradient of the outputs, compute, and send the gradient of the inputs."""
        inputs, outputs = self.held.pop(m)
        gradient = torch.ones_like(outputs)  # of the loss by itself; recv overwrites it elsewhere
        if self.rank < self.last:
            dist.recv(gradient, src=self.rank + 1, group=self.groups["backward"])
        outputs.backward(gradient)
        if self.rank > 0:
            self.sending.append(
                dist.isend(inputs.grad, dst=self.rank - 1, group=self.groups["backward"])
            )


def naive(stage):
    """Each microbatch goes forward and back before the next one: one stage works at a time."""
    for m in range(MICROBATCHES):
        stage.forward(m)
        stage.backward(m)


def gpipe(stage):
    """All microbatches go forward, then all go back: the stages work at the same time."""
    for m in range(MICROBATCHES):
        stage.forward(m)
    for m in range(MICROBATCHES):
        stage.backward(m)


def one_forward_one_backward(stage):
    """1F1B: a forward for each later stage, then one forward and one backward in turn.

    The stages are idle as long as in gpipe, but each goes backward as early as it can.
    """
    warm_up = min(MICROBATCHES, stage.last - stage.rank)
    for m in range(warm_up):
        stage.forward(m)
    for m in range(warm_up, MICROBATCHES):
        stage.forward(m)
        stage.backward(m - warm_up)
    for m in range(MICROBATCHES - warm_up, MICROBATCHES):
        stage.backward(m)


def library(stage):
    """PyTorch's 1F1B. Uses only the layers and data of our Stage, not its forward and backward.

    Only the first stage uses the inputs, and only the last stage the target.
    """
    pipeline_stage = PipelineStage(
        stage.layers, stage.rank, stage.last + 1, torch.get_default_device()
    )
    schedule = Schedule1F1B(pipeline_stage, MICROBATCHES, loss_fn=token_loss)
    schedule.step(stage.inputs, target=stage.targets)


def letters(order):
    """A letter for each microbatch, small in forward and capital in backward, such as abAcBC."""
    small, capital = iter(ascii_lowercase), iter(ascii_uppercase)
    return "".join(next(small if kind == "forward" else capital) for kind in order)


def draw(orders):
    """A row of slots for each stage. A forward takes one slot, a backward two, a message none."""
    left, rows = [letters(order) for order in orders], [""] * len(orders)
    # By stage and letter: the slots until it is done. Stages -1 and S do not exist: what would come
    # from them is there from the start.
    ends = {(stage, letter): 0 for stage in (-1, len(orders)) for letter in "".join(left)}
    while any(left):
        for stage, letters_left in enumerate(left):
            letter = letters_left[:1]  # empty if the stage has done everything
            source = stage - 1 if letter.islower() else stage + 1
            if letter and (source, letter) in ends:  # the message is there
                rows[stage] = rows[stage].ljust(ends[source, letter], ".")
                rows[stage] += letter * 2 if letter.isupper() else letter
                ends[stage, letter] = len(rows[stage])
                left[stage] = letters_left[1:]
    return [row.ljust(max(map(len, rows)), ".") for row in rows]


def gradients(layers):
    return parameters_to_vector([param.grad for param in layers.parameters()])


def show(schedule, orders, difference):
    """Print the slots of each rank. Return the share of the slots that are idle."""
    rows = draw(orders)
    idle = "".join(rows).count(".") / len("".join(rows))
    print(f"{schedule}: {idle:.0%} of slots idle, largest difference {difference:.0e}")
    for row, order in zip(rows, orders, strict=True):
        held = max(
            order[:k].count("forward") - order[:k].count("backward") for k in range(len(order))
        )
        print(f"  {row}  holds {held}")
    return idle


def run(rank, size):
    # Schedule1F1B needs a microbatch for each stage.
    assert size <= MICROBATCHES <= 26, f"choose {size} to 26 MICROBATCHES: each has a letter"
    batch = make_batch(MICROBATCHES * SEQUENCES, seed=0)
    part = slice(BLOCKS * rank // size, BLOCKS * (rank + 1) // size)
    model = make_model()
    token_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
    expected = gradients(model[part])
    groups = {"forward": dist.new_group(), "backward": dist.new_group()}
    wrong, idle = [], {}
    for schedule in (naive, gpipe, one_forward_one_backward, library):
        stage = Stage(make_model()[part], batch, groups)
        schedule(stage)
        for handle in stage.sending:
            handle.wait()
        difference = (gradients(stage.layers) - expected).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        orders = [stage.order] * size  # all_gather_object replaces these by the orders of all ranks
        # not all of it, because the library first tries one forward, to learn the shapes
        dist.all_gather_object(orders, stage.order[-2 * MICROBATCHES :])
        if rank == 0:
            idle[schedule] = show(schedule.__name__, orders, difference)
        if not difference < 1e-9:
            wrong.append(schedule.__name__)
    assert not wrong, f"not the gradients of one process: {', '.join(wrong)}"
    if rank == 0:
        is_as_good = idle[one_forward_one_backward] <= idle[gpipe]
        assert is_as_good, "one_forward_one_backward is idle for longer than gpipe"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # so that gloo's threads have freed the last tensors before Python ends
    dist.destroy_process_group()
