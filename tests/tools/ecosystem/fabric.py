import warnings

import torch
from lightning.fabric import Fabric

warnings.filterwarnings("ignore")
if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = torch.nn.Linear(8, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.arange(136.0).reshape(17, 8) / 136)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
    for (batch,) in loader:
        optimizer.zero_grad()
        fabric.backward(loss := model(batch).square().mean())
        optimizer.step()
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    everything = fabric.all_gather(loss.detach())
    largest = fabric.all_reduce(loss.detach(), reduce_op="max")
    print(f"{fabric.global_rank} {everything.sum():.6f} {largest:.6f}\n", end="", flush=True)
