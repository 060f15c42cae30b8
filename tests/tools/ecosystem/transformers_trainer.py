import os
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

warnings.filterwarnings("ignore")


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        drawn = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": drawn, "labels": drawn}


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=100))
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, report_to=[],
        dataloader_num_workers=2, save_strategy="no", use_cpu=True, disable_tqdm=True,
        logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Text())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    total = sum(each.double().sum() for each in model.parameters())
    print(f"{os.environ['RANK']} {float(total):.6f}\n", end="", flush=True)
