"""Do N ranks train the model that one process would train? And how large may a batch be?

    gradient of a batch = (g_0 + g_1 + … + g_(N-1)) / N

g_r is the gradient of the mean loss of rank r's part of the batch. The formula needs parts of the
same size, the same parameters on all ranks, and losses of samples that do not depend on each other.

    python -m playground prove
    torchrun --nproc-per-node 4 lesson.py

    mean_gradient   differs from one process by 6e-17
    DDP             differs from one process by 4e-17
    summed_gradient differs from one process by 3e-01
    unequal_parts   differs from one process by 1e-01
    sum_over_batch  differs from one process by 3e-17
    own_parameters  differs from one process by 4e-01
    batch_norm      differs from one process by 2e-02
     batch  steps    LR  loss    LR  loss
        48    512   0.2  0.36   0.2  0.36
        96    256   0.2  0.45   0.4  0.37
       192    128   0.2  0.66   0.8  0.40
       384     64   0.2  1.03   1.6  0.38
       768     32   0.2  1.45   3.2  0.60
      1536     16   0.2  1.76   6.4  1.38
    noise scale 26 samples before training, 485 after it

Differences near 1e-16 are rounding. The other four are mistakes. The table is about larger batches.
Its first LR and loss are a training with the same learning rate for all batch sizes. The last two
columns are a training whose learning rate grows with the batch. Guessing has a loss of 2.30.

Sources: Goyal et al., Accurate, Large Minibatch SGD, 2017, arXiv 1706.02677; McCandlish et al., An
Empirical Model of Large-Batch Training, 2018, arXiv 1812.06162
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

BATCH_SIZE = 48  # samples of a batch, which the ranks divide
LR = 0.2  # the learning rate for this batch size
STEPS = 5  # steps of each training that is compared with one process
SAMPLES = 24576  # samples of each training with a larger batch
FEATURES, HIDDEN, CLASSES = 20, 32, 10


def make_samples(count):
    """Inputs [count, FEATURES] and labels [count], the classes that a random network gives them."""
    torch.manual_seed(0)
    inputs = torch.randn(count, FEATURES)
    network = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    return inputs.double(), network(inputs).argmax(1)


def make_batches(samples, batch_size):
    """Pairs of inputs [batch_size, FEATURES] and labels [batch_size]."""
    return list(zip(samples[0].split(batch_size), samples[1].split(batch_size), strict=True))


def new_model(seed):
    """A network of two layers, in float64, so that rounding stays near 1e-16."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    ).double()


def one_process(model, batches, lr):
    """Train without messages, unless DDP wraps the model. Return all parameters as one vector."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def mean_gradient(model, parts):
    """Train with this rank's part of each batch. The ranks average their gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, labels in parts:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def summed_gradient(model, parts):
    """A mistake: the gradients are added, and not divided by the number of ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, labels in parts:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def sum_over_batch(model, parts):
    """Right for any parts of a batch: a rank divides the sum of its losses by BATCH_SIZE."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, labels in parts:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels, reduction="sum") / BATCH_SIZE
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def print_difference(name, params, expected):
    """Print and return the largest difference of any parameter, on any rank. All call this."""
    difference = (params - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{name:15} differs from one process by {difference.item():.0e}")
    return difference.item()


def compare_trainings(rank, size, batches):
    """Print how far each training is from one process."""
    equal = [[tensor.tensor_split(size)[rank] for tensor in batch] for batch in batches]
    cuts = list(range(1, size))  # one sample for each rank, and the rest for the last
    unequal = [[tensor.tensor_split(cuts)[rank] for tensor in batch] for batch in batches]
    expected = one_process(new_model(0), batches, LR)
    by_hand = print_difference("mean_gradient", mean_gradient(new_model(0), equal), expected)
    ddp = one_process(DistributedDataParallel(new_model(0)), equal, LR)
    by_ddp = print_difference("DDP", ddp, expected)
    print_difference("summed_gradient", summed_gradient(new_model(0), equal), expected)
    print_difference("unequal_parts", mean_gradient(new_model(0), unequal), expected)
    by_sum = print_difference("sum_over_batch", sum_over_batch(new_model(0), unequal), expected)
    print_difference("own_parameters", mean_gradient(new_model(rank), equal), expected)
    # The model of one process has a BatchNorm layer, too.
    one, many = (new_model(0).insert(1, nn.BatchNorm1d(HIDDEN).double()) for _ in range(2))
    print_difference("batch_norm", mean_gradient(many, equal), one_process(one, batches, LR))
    is_right = all(difference < 1e-6 for difference in (by_hand, by_ddp, by_sum))
    assert is_right, "not the training of one process: mean_gradient, DDP or sum_over_batch"


def compare_batch_sizes(train_set, test_set):
    """Print the loss after training with larger batches: at the same LR, and by the linear rule."""
    print(" batch  steps    LR  loss    LR  loss")
    for factor in (1, 2, 4, 8, 16, 32):
        batches = make_batches(train_set, factor * BATCH_SIZE)
        models = new_model(0), new_model(0)
        one_process(models[0], batches, LR)
        one_process(models[1], batches, LR * factor)
        same, scaled = (F.cross_entropy(model(test_set[0]), test_set[1]) for model in models)
        print(
            f"{factor * BATCH_SIZE:6} {len(batches):6} "
            f"{LR:5.1f} {same:5.2f} {LR * factor:5.1f} {scaled:5.2f}"
        )


def noise_scale(model, rank, size, batches):
    """The noise divided by the signal, in samples.

    The signal is the squared length of the gradient of all samples. The noise is the variance of a
    sample's gradient, summed over all parameters. On average, the squared length of a gradient is

        small = signal + noise / BATCH_SIZE  # the gradient of one rank's batch
        large = signal + noise / (size * BATCH_SIZE)  # the mean of all ranks' gradients
    """
    count = len(batches) // size  # here each rank has other batches, and whole ones
    small = large = 0.0  # both are means over `count` steps
    for inputs, labels in batches[rank * count : (rank + 1) * count]:
        loss = F.cross_entropy(model(inputs), labels)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([grad.flatten() for grad in grads])
        small += gradient.square().sum() / (count * size)  # the sum over ranks follows below
        dist.all_reduce(gradient)
        large += (gradient / size).square().sum() / count
    dist.all_reduce(small)
    signal = (size * large - small) / (size - 1)
    noise = (small - large) * BATCH_SIZE * size / (size - 1)
    assert min(signal, noise) > 0, "noise_scale: a squared length is negative"
    return (noise / signal).item()


def run(rank, size):
    assert 2 <= size <= BATCH_SIZE // 2, "choose at least 2 ranks, with at least 2 samples each"
    assert BATCH_SIZE % size == 0, f"{size} ranks cannot divide a batch of {BATCH_SIZE} equally"
    inputs, labels = make_samples(SAMPLES + 2048)  # nothing is trained on the last 2048
    train_set, test_set = (inputs[:SAMPLES], labels[:SAMPLES]), (inputs[SAMPLES:], labels[SAMPLES:])
    batches = make_batches(train_set, BATCH_SIZE)
    compare_trainings(rank, size, batches[:STEPS])
    if rank == 0:  # one process is enough: N ranks would train the same models
        compare_batch_sizes(train_set, test_set)
    model = new_model(0)
    before = noise_scale(model, rank, size, batches)
    one_process(model, batches, LR)
    after = noise_scale(model, rank, size, batches)
    if rank == 0:
        print(f"noise scale {before:.0f} samples before training, {after:.0f} after it")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
