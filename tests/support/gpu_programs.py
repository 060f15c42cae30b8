"""Programs for GPUs, each on its own in a page of code. They run on the CPU with gloo, too, and
return what they have computed, to be compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import transformers
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

from playground.world import device

Values = list[torch.Tensor]
Program = Callable[[], Values]
WIDTH = 16


class Block(nn.Module):
    """Attention and a perceptron, with what transformers have: layer norms, GELU, dropout of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        made = nn.Sequential(nn.Embedding(11, WIDTH), Block(), Block(), nn.Linear(WIDTH, 11))
    return made.to(device(), dtype)


def tokens() -> torch.Tensor:
    torch.manual_seed(1 + dist.get_rank())
    return torch.randint(11, (4, 9), device="cpu").to(device())


def loss_of(net: nn.Module, seen: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(seen[:, :-1]).flatten(0, 1).float(), seen[:, 1:].flatten())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Values:
    """The losses of some steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, tokens())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def adamw(net: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **how)


def fsdp1() -> Values:
    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    net = FullyShardedDataParallel(
        model(), mixed_precision=policy, device_id=device(), use_orig_params=True
    )
    return train(net, adamw(net))


def one_mesh() -> DeviceMesh:
    """All ranks, on the device of their backend: by default it is the GPU wherever there is one."""
    return init_device_mesh(device().type, (dist.get_world_size(),))


def fsdp2() -> Values:
    net = model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*net, net):
        fully_shard(part, mesh=one_mesh(), mp_policy=policy)
    return train(net, adamw(net))


def fsdp2_all_bfloat16() -> Values:
    net = model(torch.bfloat16)
    for part in (*net, net):
        fully_shard(part, mesh=one_mesh())
    return train(net, adamw(net))


def tensor_parallel() -> Values:
    mesh, net = one_mesh(), model()
    for block in (net[1], net[2]):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    torch.manual_seed(1)
    x = torch.randint(11, (4, 9), device="cpu").to(device())
    loss = loss_of(net, x)
    loss.backward()
    grad = net[1].up.weight.grad
    assert isinstance(grad, DTensor)
    return [loss.detach(), grad.full_tensor()]


def dtensor_operations() -> Values:
    mesh = one_mesh()
    torch.manual_seed(0)
    a, b = (torch.randn(8, 6, device="cpu").to(device()) for _ in range(2))
    x, y = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)])
    return [(x @ y.T).full_tensor(), x.sum(0).full_tensor(), x.softmax(-1).full_tensor()]


def sync_batch_norm() -> Values:
    torch.manual_seed(0)
    with torch.device("cpu"):
        net: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    if device().type == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = DistributedDataParallel(net.to(device()))
    torch.manual_seed(2)
    whole = torch.randn(8, 3, 6, 6, device="cpu").to(device())
    rank, size = dist.get_rank(), dist.get_world_size()
    # On the CPU, where there is no SyncBatchNorm, each rank has the whole batch.
    mine = whole.chunk(size)[rank] if device().type == "cuda" else whole
    out = net(mine)
    out.square().mean().backward()
    return [
        *(each.grad for each in net.parameters() if each.grad is not None), *net.buffers(),
    ]  # fmt: skip


def autocast_and_scaler() -> Values:
    kind = device().type
    net = DistributedDataParallel(model())
    optimizer, scaler = adamw(net), torch.amp.GradScaler(kind, init_scale=1024.0)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            loss = loss_of(net, tokens())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [*losses, torch.tensor(scaler.get_scale())]


def attention() -> Values:
    """By each of the kernels, which compute the same."""
    torch.manual_seed(0)
    found: Values = []
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for kernel in kernels if device().type == "cuda" else kernels[:1] * 3:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, 7, 8, device="cpu").to(device()) for _ in range(3))
        dtype = torch.bfloat16 if kernel is SDPBackend.FLASH_ATTENTION else torch.float32
        q, k, v = (each.to(dtype).requires_grad_() for each in (q, k, v))
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.float().square().sum().backward()
        gradients = (each.grad for each in (q, k, v) if each.grad is not None)
        found += [each.float() for each in (out.detach(), *gradients)]
    return found


def optimizers() -> Values:
    found = []
    for kind, how in [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"foreach": True}),
        (torch.optim.RMSprop, {"foreach": True}),
        (torch.optim.NAdam, {"foreach": True}),
    ]:
        net = model()
        found += train(net, kind(net.parameters(), lr=1e-2, **how))  # type: ignore[arg-type]
    return found


def streams_and_events() -> Values:
    torch.manual_seed(0)
    x = torch.randn(50, 50, device="cpu").to(device())
    if device().type == "cpu":
        return [x @ x + 1]
    (x @ x + 1).sum().item()  # the first launch of a kernel waits for an idle GPU
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
        product = x @ x
        done.record()
    product.record_stream(torch.cuda.current_stream())
    assert not done.query()
    done.wait()
    result = product + 1
    host = torch.empty(50, 50, pin_memory=True).copy_(result, non_blocking=True)
    torch.cuda.synchronize()
    return [host]


def distributed_checkpoint() -> Values:
    net = model()
    for part in net:
        fully_shard(part, mesh=one_mesh())
    losses = train(net, adamw(net))
    state = net.state_dict()
    saved = [value.full_tensor().clone() for value in state.values()]
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place, device=device())
    checkpoint.save(state, checkpoint_id=place[0])
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    checkpoint.load(net.state_dict(), checkpoint_id=place[0])
    loaded = [value.full_tensor() for value in net.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    return losses


def recomputed() -> Values:
    net = model()
    hidden = net[0](tokens())
    for block in (net[1], net[2]):
        hidden = recompute(block, hidden, use_reentrant=False)
    hidden.square().mean().backward()
    return [value.grad for value in net.parameters() if value.grad is not None]


def pipeline() -> Values:
    rank, net = dist.get_rank(), model()
    part = nn.Sequential(*net[:2]) if rank == 0 else nn.Sequential(*net[2:])
    stage = PipelineStage(part, rank, dist.get_world_size(), device())
    torch.manual_seed(1)
    x = torch.randint(11, (4, 9), device="cpu").to(device())
    schedule = ScheduleGPipe(
        stage, 2, loss_fn=lambda out, wanted: F.cross_entropy(out.flatten(0, 1), wanted.flatten())
    )
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=losses)
    return [*losses, *(value.grad for value in part.parameters() if value.grad is not None)]


def compiled(backend: str) -> Values:
    net = model()
    run = torch.compile(net, backend=backend)
    seen = tokens()
    loss = F.cross_entropy(run(seen[:, :-1]).flatten(0, 1), seen[:, 1:].flatten())
    loss.backward()
    return [loss.detach(), *(value.grad for value in net.parameters() if value.grad is not None)]


def half_precision() -> Values:
    net = model(torch.float16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    return train(net, optimizer)


def recurrent_and_normalized() -> Values:
    """What CUDA has kernels of its own for, and the CPU has not."""
    found: Values = []
    torch.manual_seed(0)
    with torch.device("cpu"):
        nets = nn.LSTM(5, 7, 2), nn.GRU(5, 7), nn.RMSNorm(5), nn.GroupNorm(1, 4)
        inputs = torch.randn(3, 4, 5)
    for net in nets:
        out = net.to(device())(inputs.to(device()))
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        found += [out.detach(), *(each.grad for each in net.parameters() if each.grad is not None)]
    scores = inputs.to(device()).log_softmax(-1).requires_grad_()
    targets = torch.tensor([[1, 2]] * 4, device=device())
    lengths = [torch.tensor([length] * 4, device="cpu") for length in (3, 2)]
    loss = F.ctc_loss(scores, targets, *lengths)
    loss.backward()
    assert scores.grad is not None
    return [*found, loss.detach(), scores.grad]


def descend(net: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Values:
    """The losses of two steps of SGD under DistributedDataParallel."""
    wrapped = DistributedDataParallel(net.to(device()), find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(wrapped)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def vision_models() -> Values:
    found: Values = []
    models = torchvision.models
    torch.manual_seed(0)
    with torch.device("cpu"):
        nets = (
            models.resnet18(num_classes=5),
            models.mobilenet_v3_small(num_classes=5, dropout=0.0),
            models.squeezenet1_1(num_classes=5, dropout=0.0),
            models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=5),
        )
        torch.manual_seed(1 + dist.get_rank())
        images = torch.randn(4, 3, 64, 64)
    seen, labels = images.to(device()), torch.arange(4, device=device())
    for net in nets:
        found += descend(net, lambda run: F.cross_entropy(run(seen), labels))
    return found


def language_models() -> Values:
    found: Values = []
    small = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1}
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, **width, **small}
    kept = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, **small}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("GPT2", "LMHeadModel", gpt2 | none),
        ("Llama", "ForCausalLM", heads | {"num_key_value_heads": 2}),
        ("Bert", "ForMaskedLM", heads | kept),
        ("Mixtral", "ForCausalLM", heads | {"num_key_value_heads": 2, "num_local_experts": 4}),
    ]
    for name, kind, how in kinds:
        config = getattr(transformers, f"{name}Config")(**how)
        torch.manual_seed(0)
        with torch.device("cpu"):
            net = getattr(transformers, f"{name}{kind}")(config)
            torch.manual_seed(1 + dist.get_rank())
            words = torch.randint(90, (3, 12))
        seen = words.to(device())
        found += descend(net, lambda run, seen=seen: run(input_ids=seen, labels=seen).loss)  # type: ignore[misc]
    return found


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        fsdp1, fsdp2, fsdp2_all_bfloat16, tensor_parallel, dtensor_operations, sync_batch_norm,
        autocast_and_scaler, attention, optimizers, streams_and_events, distributed_checkpoint,
        recomputed, pipeline, half_precision, recurrent_and_normalized,
        vision_models, language_models,
    )
} | {
    f"compiled by {backend}": partial(compiled, backend) for backend in ("eager", "aot_eager")
}  # fmt: skip


def run_program(rank: int, size: int, name: str) -> Values:
    return [value.detach().cpu() for value in PROGRAMS[name]()]
