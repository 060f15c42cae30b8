import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = torch.utils.data.TensorDataset(torch.arange(19 * 8.0).reshape(19, 8) / 152)
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def train():
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


train()
accelerator.save_state("state")
train()
seen = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
total = sum(each.double().sum() for each in model.parameters())
accelerator.load_state("state")
before = sum(each.double().sum() for each in model.parameters())
with accelerator.main_process_first():
    torch.save(total, f"total{accelerator.process_index}.pt")
words = broadcast_object_list([accelerator.process_index])
counted = sum(map(len, seen))
print(
    f"{accelerator.process_index} {total:.6f} {before:.6f} {counted} {words}\n", end="", flush=True
)
accelerator.end_training()
