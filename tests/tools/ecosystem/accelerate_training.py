import torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(128.0).reshape(16, 8) / 128)
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward(loss := model(batch).square().mean())
    optimizer.step()
losses = accelerator.gather(loss.detach())
print(f"{accelerator.process_index} {losses.sum():.6f}\n", end="", flush=True)
accelerator.end_training()
