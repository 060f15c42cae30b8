"""What returns before it is done, and why `barrier` does not: see gpus.md."""

import os

import torch
import torch.distributed as dist


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    rank = dist.get_rank()
    stream = torch.cuda.current_stream()
    on_cpus = dist.new_group(backend="gloo")  # for a message that does not wait for the GPU
    total, message = torch.ones(1, device="cuda"), torch.zeros(1)
    dist.all_reduce(total)
    torch.cuda.synchronize()  # the ranks are connected now

    if rank == 1:
        dist.recv(message, src=0, group=on_cpus)  # rank 1 comes late
    dist.all_reduce(total)
    if rank == 0:
        print(f"Rank 0: all_reduce has returned, the stream is done: {stream.query()}")
        dist.send(message, dst=1, group=on_cpus)
    dist.barrier()
    if rank == 0:
        print(f"Rank 0: barrier has returned, the stream is done: {stream.query()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
