import torch
from common import dist, new_ddp, rank, say, sgd, total

model = new_ddp()
optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
torch.manual_seed(rank)
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(6, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
say(loss.detach(), norm, total(model))
dist.destroy_process_group()
