"""Which rank is on which GPU: see gpus.md."""

import os

import torch
import torch.distributed as dist


def main():
    local_rank = int(os.environ["LOCAL_RANK"])  # among the ranks of this host
    torch.cuda.set_device(local_rank)  # "cuda" is this GPU from now on
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    rank = dist.get_rank()
    tensor = torch.ones(1, device="cuda")
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, (os.uname().nodename, str(tensor.device)))
    assert len(set(places)) == len(places), f"two ranks share a GPU: {places}"
    print(f"Rank {rank} is on {tensor.device}, of {torch.cuda.device_count()} that it sees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
